"""Optimizers of a client, with a learning rate that follows the rounds."""
from __future__ import annotations

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_ssl.core import blame, checks, knobs, registry

Schedule = Callable[[jax.Array], jax.Array]


def _constant(horizon: int | None) -> Schedule:
  """Keeps the rate."""
  del horizon
  return lambda round_: jnp.float32(1)


def _needed(horizon: int | None) -> int:
  if horizon is None:
    raise checks.LengthError('the learning rate')
  return horizon


def _share(round_: jax.Array, horizon: int) -> jax.Array:
  """Computes the share of the horizon that is over, float32[] in [0, 1]."""
  return jnp.clip(round_ / max(horizon, 1), 0, 1)


@knobs.checked()
def _cosine(horizon: int | None, *, final: float = 0.0) -> Schedule:
  """Falls like half a cosine to a share of the rate after the last round.

  Args:
    horizon: rounds that it spans.
    final: the share; 0 learns nothing in rounds beyond the horizon.
  """
  span = _needed(horizon)
  def factor(round_: jax.Array) -> jax.Array:
    wave = 0.5 * (1 + jnp.cos(jnp.pi * _share(round_, span)))
    return final + (1 - final) * wave
  return factor


def _fixmatch_cosine(horizon: int | None) -> Schedule:
  """Falls as cos(7 pi t / 16), t from 0 to 1, to 0.195 of the rate.

  Sohn et al., FixMatch, https://arxiv.org/abs/2001.07685, section 2.4.

  Args:
    horizon: rounds that it spans.
  """
  span = _needed(horizon)
  return lambda round_: jnp.cos(7 / 16 * jnp.pi * _share(round_, span))


@knobs.checked()
def _linear(horizon: int | None, *, final: float = 0.0) -> Schedule:
  """Falls linearly to a share of the rate after the last round.

  Args:
    horizon: rounds that it spans.
    final: the share; 0 learns nothing in rounds beyond the horizon.
  """
  span = _needed(horizon)
  return lambda round_: 1 - (1 - final) * _share(round_, span)


@knobs.checked(decay=knobs.Bound(0, 1, above=True))
def _exponential(horizon: int | None, *, decay: float = 0.99) -> Schedule:
  """Multiplies the rate by a factor after every round.

  Args:
    horizon: is not read.
    decay: the factor; 1 keeps the rate.
  """
  del horizon
  return lambda round_: jnp.float32(decay) ** round_


@knobs.checked(rounds=knobs.whole(1, 2**31 - 1))
def _warmup_cosine(horizon: int | None, *, rounds: int = 5) -> Schedule:
  """Rises linearly to the rate, then falls to 0 like half a cosine.

  Args:
    horizon: rounds that both span.
    rounds: of the rise.
  """
  span = _needed(horizon)
  def factor(round_: jax.Array) -> jax.Array:
    rising = (round_ + 1) / rounds
    rest = _cosine(max(span - rounds, 1))(jnp.maximum(round_ - rounds, 0))
    return jnp.where(round_ < rounds, rising, rest)
  return factor


SCHEDULES: registry.Registry[Callable[..., Schedule]] = (
    registry.Registry('lr_schedule', {
        'constant': _constant,
        'cosine': _cosine,
        'fixmatch_cosine': _fixmatch_cosine,
        'linear': _linear,
        'exponential': _exponential,
        'warmup_cosine': _warmup_cosine,
    }))


def make_schedule(text: str, horizon: int | None) -> Schedule:
  """Makes the factor of the rate over the rounds that a text names.

  Args:
    text: one of `SCHEDULES`, with knobs if any, or a user's.
    horizon: rounds that it spans; None is unknown.

  Returns:
    (round int32[]) -> float[], the factor.

  Raises:
    FieldError: if it spans the run and the horizon is unknown, or if it is
      a user's and fails, as may the factor itself.
  """
  made: Schedule = registry.build('lr_schedule', text, SCHEDULES, horizon)
  blame.check('lr_schedule', text, made, callable(made),
              'function (round) -> factor')
  if not registry.is_own(text, SCHEDULES):
    return made

  def checked(round_: jax.Array) -> jax.Array:
    factor = jnp.asarray(made(round_))
    if factor.shape or not (jnp.issubdtype(factor.dtype, jnp.floating) or
                            jnp.issubdtype(factor.dtype, jnp.integer)):
      raise ValueError('a schedule gives one number for a round, not '
                       f'{factor.dtype}{list(factor.shape)}.')
    # Rounding may take a factor of 0 below it.
    return jnp.where((factor < 0) & (factor > -1e-6), 0, factor)
  return blame.named('lr_schedule', text, checked, own=True)


@dataclasses.dataclass(frozen=True)
class Scheduled:
  """A client's optimizer as a function of the round; see `make`.

  Attributes:
    of_rate: (rate) -> GradientTransformation.
    rate: at factor 1.
    schedule: the factor over the rounds, by name.
    horizon: rounds that it spans; None is unknown.
  """

  of_rate: Callable[[jax.Array], optax.GradientTransformation]
  rate: float
  schedule: str
  horizon: int | None

  def __call__(self, round_: jax.Array) -> optax.GradientTransformation:
    """Returns the optimizer of a round."""
    return self.of_rate(self.rate * self.factor(round_))

  @property
  def factor(self) -> Schedule:
    """Returns the factor over the rounds, see `make_schedule`."""
    return make_schedule(self.schedule, self.horizon)

  def spanning(self, num_rounds: int) -> Scheduled:
    """Returns the same optimizer whose schedule spans so many rounds."""
    return dataclasses.replace(self, horizon=num_rounds)


@knobs.checked(learning_rate=knobs.RATE, momentum=knobs.MOMENTUM,
               weight_decay=knobs.WEIGHT_DECAY)
def make(name: str, *, learning_rate: float, momentum: float = 0.0,
         weight_decay: float = 0.0, schedule: str = 'constant',
         horizon: int | None = None) -> Scheduled:
  """Makes a client's optimizer as a function of the round.

  Args:
    name: one of `knobs.OPTIMIZERS`.
    learning_rate: the rate at factor 1; positive.
    momentum: of sgd, nesterov and rmsprop in [0, 1); must be 0 for adam and
      adamw, whose first moment keeps its usual 0.9.
    weight_decay: L2 term added to the gradient, as PyTorch's optimizers do;
      decoupled for adamw; 0 is off.
    schedule: one of `SCHEDULES`, with knobs if any, as 'cosine(final=0.1)', or
      a user's, see `check_factors`.
    horizon: rounds that the schedule spans; None if unknown, and then of ours
      only 'constant' and 'exponential' give a rate.

  Returns:
    (round int32[]) -> GradientTransformation.

  Raises:
    ValueError: for an unknown name or a number out of range.
  """
  checks.check('optimizer', name, knobs.OPTIMIZERS)
  if momentum and name in knobs.OWN_MOMENTUM:
    raise checks.FieldError(
        'momentum', momentum, 'it has its own; give 0, or one of sgd, '
        'nesterov, rmsprop.', optimizer=name)

  def of_rate(rate: jax.Array) -> optax.GradientTransformation:
    if name == 'adamw':
      return optax.adamw(rate, weight_decay=weight_decay)
    if name == 'adam':
      core = optax.adam(rate)
    elif name == 'rmsprop':
      core = optax.rmsprop(rate, decay=0.99, momentum=momentum or None)
    else:
      core = optax.sgd(rate, momentum=momentum or None,
                       nesterov=name == 'nesterov')
    if not weight_decay:
      return core
    return optax.chain(optax.add_decayed_weights(weight_decay), core)

  made = Scheduled(of_rate, learning_rate, schedule, horizon)
  if not registry.is_own(schedule, SCHEDULES):
    make_schedule(schedule, horizon or 1)  # An unknown one is refused.
  elif horizon is None:
    with blame.naming('lr_schedule', schedule, own=True):
      registry.chosen('lr_schedule', schedule, SCHEDULES)
  check_factors(made)
  return made


def check_factors(optimizer: object) -> None:
  """Refuses a user's schedule that gives no rate in one of its rounds.

  Args:
    optimizer: a client's. Only a `Scheduled` one with a user's schedule and a
      horizon is looked at, of a long one 10,000 rounds.

  Raises:
    FieldError: for a factor that is not finite, or negative.
  """
  if not (isinstance(optimizer, Scheduled) and optimizer.horizon is not None
          and registry.is_own(optimizer.schedule, SCHEDULES)):
    return
  last, text = max(optimizer.horizon - 1, 0), optimizer.schedule.strip()
  rounds = np.unique(np.linspace(0, last, 10_000).astype(int))
  with jax.ensure_compile_time_eval():
    found = np.asarray(jax.lax.map(  # One by one, as in a run.
        optimizer.factor, jnp.asarray(rounds, jnp.int32)))
  fits = np.isfinite(found) & (found >= 0)
  if not fits.all():
    first = int(fits.argmin())
    raise checks.FieldError(
        'lr_schedule', text, f'gives {found[first]} in round '
        f'{rounds[first] + 1}; a factor is finite and 0 or more.')
