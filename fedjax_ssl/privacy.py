r"""Differential privacy of training: clipping, noise, and the epsilon spent.

A private step draws each row with probability q (`poisson_rows`), clips every
row's own gradient to norm C (`clipped_sum`), adds noise of standard deviation
:math:`\sigma C` to the sum (`gaussian`) and divides by the *expected* number of
rows. One row more or less then changes the sum by at most C, which is what
`epsilon` accounts for: neighbours differ by one row added or removed. The
accountants are those of the package dp-accounting, the extra `[privacy]`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import arguments
from fedjax_ssl.aggregation import algebra

PyTree = Any
Array = jax.Array | np.ndarray
Scalar = Array | float

ACCOUNTANTS = ('rdp', 'pld')
# Integer orders: their moments have closed forms without numerical integrals.
_ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512, 1024)
# Steps of the privacy loss; a coarser grid overestimates epsilon a little.
_GRID = 1e-3
_LEAST_NOISE, _LARGEST_NOISE = 1e-100, 1e6
# To leave a row out of a full batch is a change that epsilon does not count, so
# that it must stay rarer than any delta, over all steps.
_OVERFLOW = 1e-15


def poisson_capacity(expected: float) -> int:
  """Computes for how many rows a Poisson-sampled batch needs room.

  It is the least c with P(X > c) < 1e-15 for X of the Poisson law, whose upper
  tail is heavier than that of any binomial law of the same mean.

  Args:
    expected: mean number of rows, above 0.

  Returns:
    int, c.

  Raises:
    ValueError: for a mean that is not positive.
  """
  if not 0 < expected < math.inf:
    raise ValueError(f'expected is {expected}; it must be positive.')
  # Sum the tail from far out, where adding loses no digits.
  end = int(expected + 12 * math.sqrt(expected) + 40)
  tail = 0.0
  for k in range(end, 0, -1):
    tail += math.exp(k * math.log(expected) - expected - math.lgamma(k + 1))
    if tail >= _OVERFLOW:
      return k
  return 1


def poisson_rows(key: Array, num_rows: Array, rate: Scalar, *, width: int,
                 capacity: int) -> tuple[jax.Array, jax.Array]:
  """Draws each of the first `num_rows` places of a table independently.

  Args:
    key: PRNG key.
    num_rows: int32[], at most `width`.
    rate: q in [0, 1], float32[]; 1 takes every row. A row is drawn with
      floor(2^23 q) / 2^23, as draws are multiples of 2^-23: never more often
      than q, which privacy is accounted for.
    width: columns of the table.
    capacity: places returned; if more rows are drawn, a random choice of them
      is kept, so that rows are only ever left out.

  Returns:
    int32[capacity] places and float32[capacity], 1 for a drawn one.
  """
  draw = jax.random.uniform(key, (width,))
  steps = 2.0 ** 23
  drawn = (draw < jnp.floor(rate * steps) / steps) & (
      jnp.arange(width) < num_rows)
  order = jnp.argsort(jnp.where(drawn, draw, 2.0))[:capacity]
  mask = drawn[order].astype(jnp.float32)
  short = capacity - order.shape[0]
  return (jnp.pad(order, (0, max(short, 0))).astype(jnp.int32),
          jnp.pad(mask, (0, max(short, 0))))


def clip(tree: PyTree, max_norm: Scalar) -> PyTree:
  r"""Scales a pytree to a Euclidean norm of at most C over all its leaves.

  :math:`g \min(1, C / \|g\|)`; one that is not finite becomes zero, as its
  influence could not be bounded otherwise.

  Args:
    tree: pytree of float arrays, of any finite size: squares and norms that
      float32 cannot hold do no harm.
    max_norm: C, float32[], 0 or more; infinity changes nothing finite.

  Returns:
    The pytree, dtypes kept.

  Raises:
    ValueError: if C is negative or NaN.
  """
  arguments.check_number('max_norm', max_norm, arguments.NOT_NEGATIVE)
  tree = jax.tree.map(jnp.asarray, tree)
  leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(tree)]
  if not leaves:
    return tree
  # A power of two, so that no digit changes where the plain formula holds.
  unit = algebra.power_of_two(jnp.max(jnp.stack(
      [jnp.max(jnp.abs(x), initial=0) for x in leaves])))
  squares = [jnp.sum(jnp.square(x / unit)) for x in leaves]
  length = jnp.sqrt(jnp.sum(jnp.stack(squares)))  # In units.
  factor = max_norm / length
  short, good = unit * length <= max_norm, jnp.isfinite(length)
  def one(x: jax.Array) -> jax.Array:
    wide = arguments.at_least_float32(x)
    scaled = (wide / unit * factor).astype(x.dtype)
    return jnp.where(good, jnp.where(short, x, scaled), 0)
  return jax.tree.map(one, tree)


def clipped_sum(gradient: Callable[[PyTree], Mapping[str, PyTree]],
                rows: PyTree, mask: Array, *, clip_norm: Mapping[str, float],
                microbatch: int = 0) -> dict[str, PyTree]:
  r"""Sums the gradients of rows, each exact and clipped by itself.

  :math:`\sum_i m_i\, g_i^p \min(1, C_p / \|g_i^p\|)` for every part p. One row
  more or less changes the whole by at most :math:`\sqrt{\sum_p C_p^2}`.

  Args:
    gradient: one row of `rows`, without its leading axis -> a pytree for each
      named part, such as each network.
    rows: pytree of [B, ...].
    mask: float32[B], 1 for a row that counts.
    clip_norm: C_p for each part; infinity leaves it unclipped.
    microbatch: rows whose gradients are held at a time; 0 is all. The result
      is the same up to rounding.

  Returns:
    The parts, of the shapes that `gradient` returns.

  Raises:
    ValueError: if `microbatch` is negative, or parts and norms differ.
  """
  size = mask.shape[0]
  if microbatch < 0:
    raise ValueError(f'microbatch is {microbatch}; it must be at least 0.')
  chunk = min(microbatch or size, size)

  def of_chunk(rows: PyTree, mask: Array) -> dict[str, PyTree]:
    parts = jax.vmap(gradient)(rows)
    if set(parts) != set(clip_norm):
      raise ValueError(f'clip_norm has {sorted(clip_norm)}; the parts are '
                       f'{sorted(parts)}.')
    out = {}
    for name, part in parts.items():
      kept = jax.vmap(functools.partial(clip, max_norm=clip_norm[name]))(part)
      out[name] = jax.tree.map(
          lambda x: jnp.tensordot(
              mask.astype(x.dtype), x, 1, precision=jax.lax.Precision.HIGHEST),
          kept)
    return out

  if chunk == size:
    return of_chunk(rows, mask)
  pieces = -(-size // chunk)
  # The last row again, masked: a row may be a key, which cannot be padded.
  index = jnp.minimum(jnp.arange(pieces * chunk), size - 1)
  cut_rows = jax.tree.map(
      lambda x: x[index].reshape(pieces, chunk, *x.shape[1:]), rows)
  cut_mask = jnp.pad(jnp.asarray(mask), (0, pieces * chunk - size)).reshape(
      pieces, chunk)
  zero = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype),
      jax.eval_shape(of_chunk, *jax.tree.map(
          lambda x: x[0], (cut_rows, cut_mask))))
  def add(total: PyTree, piece: PyTree) -> tuple[PyTree, None]:
    return jax.tree.map(jnp.add, total, of_chunk(*piece)), None
  sums: dict[str, PyTree] = jax.lax.scan(add, zero, (cut_rows, cut_mask))[0]
  return sums


def gaussian(key: Array, tree: PyTree, stddev: Scalar) -> PyTree:
  """Adds independent Gaussian noise to every number of a pytree.

  Args:
    key: PRNG key.
    tree: pytree of float arrays.
    stddev: float32[]; 0 adds nothing.

  Returns:
    The pytree, dtypes kept.
  """
  leaves, form = jax.tree.flatten(tree)
  keys = jax.random.split(key, max(len(leaves), 1))
  noisy = [x + (stddev * jax.random.normal(k, x.shape)).astype(x.dtype)
           for k, x in zip(keys, leaves, strict=False)]
  return jax.tree.unflatten(form, noisy)


def epsilon(noise_multiplier: float, rate: float, steps: int, *, delta: float,
            accountant: str = 'rdp') -> float:
  """Computes the privacy spent by Poisson-sampled Gaussian steps.

  Args:
    noise_multiplier: sigma, noise over clipping norm; 0 is no privacy. Above
      1e6 it counts as 1e6.
    rate: q in [0, 1], the chance of a row to enter a step.
    steps: how many, a whole number.
    delta: of (epsilon, delta), in (0, 1).
    accountant: 'rdp' of integer orders, or 'pld', tighter and slower.

  Returns:
    float; 0 without steps, infinity without noise.

  Raises:
    ValueError: for a number out of range, another accountant, or if
      dp-accounting is not installed.
  """
  noise, rate, number, delta = map(
      float, (noise_multiplier, rate, steps, delta))
  _check(rate, delta, accountant)
  if not 0 <= number < math.inf or number % 1 or not noise >= 0:
    raise ValueError(f'steps is {number:g} and noise_multiplier {noise}; both '
                     'must be at least 0, steps a whole number.')
  if number == 0 or rate == 0:
    return 0.0
  if noise < _LEAST_NOISE:
    return math.inf
  return _spent(min(noise, _LARGEST_NOISE), rate, int(number), delta,
                accountant)


@functools.cache  # All rounds of a run, however many, are kept.
def _spent(noise_multiplier: float, rate: float, steps: int, delta: float,
           accountant: str) -> float:
  return float(_composed(noise_multiplier, rate, accountant)(steps, delta))


@functools.lru_cache(maxsize=8)
def _composed(noise_multiplier: float, rate: float, accountant: str
              ) -> Callable[[int, float], float]:
  """Makes (steps, delta) -> epsilon, for at least one step.

  A single step is solved here, once: that takes longer than to compose it, and
  a run asks for epsilon after each of its rounds.
  """
  accounting = _accounting()
  if accountant == 'rdp':
    account = accounting.rdp.RdpAccountant(list(_ORDERS))
    account.compose(accounting.PoissonSampledDpEvent(
        rate, accounting.GaussianDpEvent(noise_multiplier)))
    orders, moments = account.orders, account.rdp
    # Moments of independent steps add up.
    return lambda steps, delta: accounting.rdp.compute_epsilon(
        orders, steps * moments, delta)[0]
  losses = functools.partial(
      accounting.pld.privacy_loss_distribution.from_gaussian_mechanism,
      value_discretization_interval=_GRID)
  if rate == 1:  # Gaussians compose to one Gaussian exactly.
    return lambda steps, delta: losses(
        noise_multiplier / math.sqrt(steps)).get_epsilon_for_delta(delta)
  one = losses(noise_multiplier, sampling_prob=rate)
  return lambda steps, delta: one.self_compose(steps).get_epsilon_for_delta(
      delta)


def spending(noise_multiplier: float, rate: float, steps_per_round: int,
             num_rounds: int, *, delta: float, accountant: str = 'rdp'
             ) -> np.ndarray:
  """Computes epsilon after each round, for the device to look up.

  A process keeps what it has computed: the same run again costs nothing, and
  a longer one only its further rounds.

  Args:
    noise_multiplier: sigma.
    rate: q.
    steps_per_round: private steps of a round.
    num_rounds: how many rounds.
    delta: see `epsilon`.
    accountant: see `epsilon`.

  Returns:
    float32[num_rounds + 1], never falling, from 0; infinity without noise.

  Raises:
    ValueError: see `epsilon`.
  """
  if num_rounds < 0:
    raise ValueError(f'num_rounds is {num_rounds}; allowed is 0 or more.')
  values = [epsilon(noise_multiplier, rate, i * steps_per_round, delta=delta,
                    accountant=accountant) for i in range(num_rounds + 1)]
  return np.maximum.accumulate(np.asarray(values, np.float32))


@functools.lru_cache
def noise_multiplier(target: float, rate: float, steps: int, *, delta: float,
                     accountant: str = 'rdp') -> float:
  """Finds the least noise under which planned steps stay within a budget.

  Args:
    target: epsilon of the budget, above 0; infinity needs no noise.
    rate: q.
    steps: planned steps.
    delta: see `epsilon`.
    accountant: see `epsilon`.

  Returns:
    sigma, at most 1e-4 of it above the least for which
    `epsilon(sigma, rate, steps)` is at most `target`.

  Raises:
    ValueError: for a budget that is not positive, or that no noise meets.
  """
  _check(rate, delta, accountant)
  if not target > 0:
    raise ValueError(f'target is {target}; it must be above 0.')
  if steps == 0 or rate == 0 or target == math.inf:
    return 0.0
  def spent(sigma: float) -> float:
    return epsilon(sigma, rate, steps, delta=delta, accountant=accountant)
  low, high = 0.0, 1.0
  while spent(high) > target:
    low, high = high, 2 * high
    if high > _LARGEST_NOISE:
      raise ValueError(f'No noise keeps {steps} steps at rate {rate} within '
                       f'an epsilon of {target}.')
  while high - low > 1e-4 * high:
    middle = (low + high) / 2
    low, high = (low, middle) if spent(middle) <= target else (middle, high)
  return high


def _check(rate: float, delta: float, accountant: str) -> None:
  arguments.check_choice('accountant', accountant, ACCOUNTANTS)
  if not 0 <= rate <= 1 or not 0 < delta < 1:
    raise ValueError(f'rate is {rate} and delta {delta}; they must be in '
                     '[0, 1] and (0, 1).')


def _accounting() -> Any:
  try:
    import dp_accounting
    from dp_accounting import pld, rdp
  except ImportError:
    raise ValueError('Accounting for privacy needs the package '
                     "dp-accounting: pip install -e '.[privacy]' in this "
                     "repository's folder.") from None
  del pld, rdp
  return dp_accounting
