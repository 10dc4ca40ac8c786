"""Optimizers of a client, with a learning rate that follows the rounds."""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.core import names

Schedule = Callable[[jax.Array], jax.Array]


def _constant(horizon: int) -> Schedule:
  del horizon
  return lambda round_: jnp.float32(1)


def _share(round_: jax.Array, horizon: int) -> jax.Array:
  return jnp.clip(round_ / max(horizon, 1), 0, 1)


def _cosine(horizon: int, *, final: float = 0.0) -> Schedule:
  if not 0 <= final <= 1:
    raise ValueError(f'final must be in [0, 1], not {final}.')
  def factor(round_):
    wave = 0.5 * (1 + jnp.cos(jnp.pi * _share(round_, horizon)))
    return final + (1 - final) * wave
  return factor


def _fixmatch_cosine(horizon: int) -> Schedule:
  """cos(7 pi t / 16), which ends at 0.195 (arXiv 2001.07685, section 2.3)."""
  return lambda round_: jnp.cos(7 / 16 * jnp.pi * _share(round_, horizon))


def _linear(horizon: int, *, final: float = 0.0) -> Schedule:
  return lambda round_: 1 - (1 - final) * _share(round_, horizon)


def _exponential(horizon: int, *, decay: float = 0.99) -> Schedule:
  del horizon
  return lambda round_: jnp.float32(decay) ** round_


def _warmup_cosine(horizon: int, *, rounds: int = 5) -> Schedule:
  def factor(round_):
    rising = (round_ + 1) / rounds
    rest = _cosine(max(horizon - rounds, 1))(jnp.maximum(round_ - rounds, 0))
    return jnp.where(round_ < rounds, rising, rest)
  return factor


SCHEDULES = {
    'constant': _constant,
    'cosine': _cosine,
    'fixmatch_cosine': _fixmatch_cosine,
    'linear': _linear,
    'exponential': _exponential,
    'warmup_cosine': _warmup_cosine,
}

OPTIMIZERS = ('sgd', 'nesterov', 'adam', 'adamw', 'rmsprop')


def make(name: str, *, learning_rate: float, momentum: float = 0.0,
         weight_decay: float = 0.0, schedule: str = 'constant',
         horizon: int = 1) -> Callable[[jax.Array],
                                       optax.GradientTransformation]:
  """A client's optimizer as a function of the round.

  Args:
    name: one of `OPTIMIZERS`.
    learning_rate: the rate at factor 1; positive.
    momentum: of sgd, nesterov and rmsprop in [0, 1); must be 0 for adam and
      adamw, whose first moment keeps its usual 0.9.
    weight_decay: L2 term added to the gradient, as PyTorch's optimizers do;
      decoupled for adamw; 0 is off.
    schedule: one of `SCHEDULES`, with knobs if any, as 'cosine(final=0.1)'.
    horizon: rounds that the schedule spans.

  Returns:
    (round int32[]) -> GradientTransformation.

  Raises:
    ValueError: for an unknown name or a number out of range.
  """
  names.check('optimizer', name, OPTIMIZERS)
  if not 0 < learning_rate < float('inf'):
    raise ValueError(f'learning_rate must be positive, not {learning_rate}.')
  if not 0 <= momentum < 1:
    raise ValueError(f'momentum must be in [0, 1), not {momentum}.')
  if not 0 <= weight_decay < float('inf'):
    raise ValueError(f'weight_decay must be at least 0, not {weight_decay}.')
  if momentum and name in ('adam', 'adamw'):
    raise ValueError(f'momentum is {momentum}, but {name} has its own; give '
                     'momentum=0, or one of sgd, nesterov, rmsprop.')
  factor = names.build('lr_schedule', schedule, SCHEDULES, horizon)

  def at(round_):
    rate = learning_rate * factor(round_)
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

  return at
