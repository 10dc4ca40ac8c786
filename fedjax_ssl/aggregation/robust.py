"""Rules that bound what a minority of broken or hostile clients can do.

A weight is a number of votes: a row of weight 2 acts as two equal rows of
weight 1, and a row of weight 0 is absent. Only Krum's scores are the same
whatever the positive weights. Clients report their own weights: where they may
lie about their numbers of examples, give all the same weight. The length of a
row is its norm over all leaves. A row with a number that is not finite is
broken, and no such number enters a result that other rows can give. For Krum
it is as far from the others as can be; for all other rules it is absent, and
what is said of shares of the weight holds for the rest.
"""
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl import arguments
from fedjax_ssl.aggregation.algebra import (
  Array,
  column,
  combined,
  jit,
  narrowed,
  row_lengths,
  row_norms,
  Scalar,
  shares_of,
  shrinking,
  Tree,
  weights_of,
)
from fedjax_ssl.arguments import at_least_float32

_LARGEST = float(jnp.finfo(jnp.float32).max)
# Share of the total weight below which a difference is one of rounding.
_ROUNDING = 1e-6


def _checked_rows(stacked: Tree, weights: Array) -> tuple[Tree, jax.Array]:
  """Rows in float32, zeros where they are absent, and the weights.

  Weights whose sum float32 might not hold are all made smaller.
  """
  weights = weights_of(stacked, weights, 'weights')
  if not weights.shape[0]:
    raise ValueError('weights has shape (0,); allowed is 1 client or more.')
  weights *= shrinking(jnp.max(weights))
  wide: Tree = jax.tree.map(
      lambda x: jnp.where(column(weights > 0, x), at_least_float32(x), 0),
      stacked)
  return wide, weights


def _whole(rows: Any, weights: jax.Array) -> jax.Array:
  """Returns bool[K], rows whose numbers are all finite; all, if none is."""
  whole = weights > 0
  for x in jax.tree.leaves(rows):
    whole &= jnp.isfinite(x).all(axis=tuple(range(1, x.ndim)))
  return whole | ~whole.any()


def _sound_rows(stacked: Tree, weights: Array) -> tuple[Tree, jax.Array]:
  """As `_checked_rows`, with broken rows absent, unless all are broken."""
  wide, weights = _checked_rows(stacked, weights)
  whole = _whole(wide, weights)
  # Zeros, as a number that is not finite would break the derivatives of all.
  kept: Tree = jax.tree.map(
      lambda x: jnp.where(column(whole, x), x, 0), wide)
  return kept, jnp.where(whole, weights, 0)


def _in_dtypes_of(result: Any, stacked: Tree) -> Tree:
  """Returns the result in the dtypes of the leaves."""
  narrow: Tree = jax.tree.map(
      lambda y, x: narrowed(y, x.dtype), result, stacked)
  return narrow


def _sorted(x: jax.Array, weights: jax.Array
            ) -> tuple[jax.Array, jax.Array, jax.Array]:
  """A leaf's numbers by size, their weights, and the weight up to each."""
  order = jnp.argsort(x, axis=0)
  weight = jnp.take(weights, order)
  return (jnp.take_along_axis(x, order, axis=0), weight,
          jnp.cumsum(weight, axis=0))


def _weighted_median(x: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns the weighted median of a leaf."""
  value, _, upto = _sorted(x, weights)
  total = weights.sum()
  margin = _ROUNDING * total
  def first(reached: jax.Array) -> jax.Array:
    place = jnp.argmax(reached, axis=0)[None]
    return jnp.take_along_axis(value, place, axis=0)[0]
  lower, upper = (first(upto >= total / 2 - margin),
                  first(upto > total / 2 + margin))
  return jnp.where(total > 0, lower / 2 + upper / 2, 0)


@jit(weights=arguments.FINITE)
def median(stacked: Tree, weights: Array) -> Tree:
  """Takes the weighted median, number by number.

  As long as hostile rows hold less than half of the weight, each number stays
  within those of the honest rows.

  Args:
    stacked: pytree of [K, ...], one row per client.
    weights: float32[K]; if two numbers halve them, the median is their mean.

  Returns:
    The same pytree without the client axis, dtypes kept.

  References:
    Yin et al., Byzantine-Robust Distributed Learning, ICML 2018,
    https://arxiv.org/abs/1803.01498.
  """
  wide, weights = _sound_rows(stacked, weights)
  return _in_dtypes_of(
      jax.tree.map(lambda x: _weighted_median(x, weights), wide), stacked)


@jit('trim', weights=arguments.FINITE)
def trimmed_mean(stacked: Tree, weights: Array, *, trim: float = 0.2) -> Tree:
  """Averages each number without its largest and its smallest values.

  A row at the border counts with the part of its weight that is left. As long
  as hostile rows hold at most `trim` of the weight, each number stays within
  those of the honest rows.

  Args:
    stacked: pytree of [K, ...], one row per client.
    weights: float32[K].
    trim: share of the weight left out at either end, below 0.5; 0 is the mean.

  Returns:
    The same pytree without the client axis, dtypes kept.

  Raises:
    ValueError: if `trim` is out of [0, 0.5).

  References:
    Yin et al., Byzantine-Robust Distributed Learning, ICML 2018,
    https://arxiv.org/abs/1803.01498.
  """
  if not 0 <= trim < 0.5:
    raise ValueError(f'trim must be in [0, 0.5), not {trim}.')
  wide, weights = _sound_rows(stacked, weights)
  total = weights.sum()

  def one(x: jax.Array) -> jax.Array:
    value, weight, upto = _sorted(x, weights)
    left = jnp.minimum(upto, (1 - trim) * total) - jnp.maximum(
        upto - weight, trim * total)
    # A tiny weight that only rounding has left could multiply a huge number.
    # Of a million rows and more each has such a weight.
    large = jnp.where(left > _ROUNDING * total, left, 0)
    left = jnp.where(large.any(0), large, jnp.maximum(left, 0))
    kept = left.sum(0)
    # What is left out may be infinite, where all rows are broken.
    value = jnp.where(left > 0, value, 0)
    return jnp.sum(left / jnp.where(kept > 0, kept, 1) * value, axis=0)

  return _in_dtypes_of(jax.tree.map(one, wide), stacked)


def _scores(rows: Any, present: jax.Array, hostile: jax.Array) -> jax.Array:
  """Krum's score of each row, infinite for absent ones."""
  size = present.shape[0]
  def squares(i: jax.Array) -> jax.Array:
    gaps = jax.tree.map(lambda x: x - x[i], rows)
    square = sum((jnp.sum(jnp.square(x), axis=tuple(range(1, x.ndim)))
                  for x in jax.tree.leaves(gaps)), jnp.zeros(size))
    square = jnp.minimum(square, _LARGEST / (2 * size))
    return jnp.where(present & (jnp.arange(size) != i), square, jnp.inf)
  nearest = jnp.sort(jax.lax.map(squares, jnp.arange(size)), axis=1)
  count = jnp.maximum(present.sum() - hostile - 2, 1)
  counts = (jnp.arange(size) < count) & jnp.isfinite(nearest)
  return jnp.where(present, jnp.where(counts, nearest, 0).sum(1), jnp.inf)


def num_hostile(share: float, number: Array) -> jax.Array:
  """Computes how many clients `krum` and `multi_krum` take for hostile.

  Args:
    share: of the clients, 0 to below 0.5.
    number: int32[] of clients with positive weight.

  Returns:
    int32[], their product rounded up, but for less than a thousandth.

  Raises:
    ValueError: for a share out of range.
  """
  if not 0 <= share < 0.5:
    raise ValueError(f'share must be in [0, 0.5), not {share}.')
  return jnp.ceil(share * number - 1e-3).astype(jnp.int32)


def _of_best(stacked: Tree, weights: Array, share: float, several: bool
             ) -> Tree:
  """Mean of the rows with the best scores, one or all that may be honest."""
  wide, weights = _checked_rows(stacked, weights)
  present = weights > 0
  number = present.sum()
  hostile = num_hostile(share, number)
  whole = _whole(wide, weights)
  scores = jnp.where(whole, jax.lax.stop_gradient(
      _scores(wide, present, hostile)), jnp.inf)
  last = jnp.maximum(number - hostile, 1) - 1 if several else 0
  # Equal scores are taken together: the order of the rows decides nothing.
  chosen = present & (scores <= jnp.sort(scores)[last]) & whole
  return _in_dtypes_of(combined(wide, shares_of(jnp.where(chosen, weights, 0))),
                stacked)


@jit('share', weights=arguments.FINITE)
def krum(stacked: Tree, weights: Array, *, share: float = 0.2) -> Tree:
  r"""Takes the row nearest to its neighbours; of several, their mean.

  Of the n rows with a weight, f = ceil(share n) are taken for hostile. A row's
  score is the sum of its squared distances to the n - f - 2 nearest others. If
  :math:`n \ge 2f + 3`, at most f are hostile and the others are no further
  than D from each other, the result is no further than
  :math:`D \sqrt{(n-f-2)/(n-2f-1)}` from an honest row, unless several rows have
  the best score.

  Args:
    stacked: pytree of [K, ...], one row per client.
    weights: float32[K]; 0 leaves a row out. Others choose alike, and weigh the
      mean of rows that are best alike.
    share: of the rows that may be hostile, below 0.5.

  Returns:
    The same pytree without the client axis, dtypes kept; the weighted mean
    of the rows with the best score, if several have it, as two do that are each
    other's only neighbour.

  Raises:
    ValueError: if `share` is out of [0, 0.5).

  References:
    Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant
    Gradient Descent, NeurIPS 2017, https://arxiv.org/abs/1703.02757.
  """
  return _of_best(stacked, weights, share, several=False)


@jit('share', weights=arguments.FINITE)
def multi_krum(stacked: Tree, weights: Array, *, share: float = 0.2) -> Tree:
  """Averages the n - f rows with the best scores of `krum`, by weight.

  Each of them is as near to an honest row as the result of `krum`, where n is
  at least 2 f + 3. Rows of equal scores are taken together, which may be more
  than n - f; among four rows, pairs always tie.

  Args:
    stacked: pytree of [K, ...], one row per client.
    weights: float32[K], of the mean; 0 leaves a row out.
    share: of the rows that may be hostile, below 0.5; 0 is the mean.

  Returns:
    The same pytree without the client axis, dtypes kept.

  Raises:
    ValueError: if `share` is out of [0, 0.5).

  References:
    Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant
    Gradient Descent, NeurIPS 2017, https://arxiv.org/abs/1703.02757.
  """
  return _of_best(stacked, weights, share, several=True)


@jit('steps', weights=arguments.FINITE,
     smoothing=arguments.POSITIVE)
def geometric_median(stacked: Tree, weights: Array, *,
                     smoothing: Scalar = 1e-6, steps: int = 8) -> Tree:
  r"""Finds the point with the least weighted sum of distances to the rows.

  It runs the smoothed Weiszfeld algorithm from the coordinates' medians. If
  hostile rows hold a share a < 1/2 of the weight, and the honest ones are no
  further than r from some point, the exact geometric median is no further than
  :math:`2 r (1-a)/(1-2a)` from that point.

  Args:
    stacked: pytree of [K, ...], one row per client.
    weights: float32[K].
    smoothing: distances below it count as it, above 0.
    steps: of the algorithm, at least 1.

  Returns:
    The same pytree without the client axis, dtypes kept.

  Raises:
    ValueError: if `steps` is below 1, or `smoothing` not above 0.

  References:
    Pillutla et al., Robust Aggregation for Federated Learning,
    https://arxiv.org/abs/1912.13445.
  """
  if steps < 1 or steps != int(steps):
    raise ValueError(f'steps is {steps}; allowed is 1 or more, whole.')
  wide, counted = _sound_rows(stacked, weights)
  start = jax.tree.map(lambda x: _weighted_median(x, counted), wide)

  def nearer(_: Any, point: Any) -> Any:
    gaps = jax.tree.map(lambda x, y: x - y, wide, point)
    away = row_norms(gaps, counted.shape[0], 'global_norm')
    away = jnp.where(
        counted > 0, jnp.clip(away, smoothing, _LARGEST), _LARGEST)
    nearest = jnp.min(away, initial=_LARGEST)
    return combined(wide, shares_of(counted * (nearest / away)))

  return _in_dtypes_of(jax.lax.fori_loop(0, int(steps), nearer, start), stacked)


@jit(weights=arguments.FINITE, max_norm=arguments.POSITIVE)
def norm_clipped(stacked: Tree, weights: Array, *, max_norm: Scalar = 1.0
                 ) -> Tree:
  """Averages the rows, those longer than `max_norm` scaled down to it.

  Hostile rows that hold a share a of the weight move the mean by at most
  2 a max_norm.

  Args:
    stacked: pytree of [K, ...], one row per client.
    weights: float32[K].
    max_norm: float32[], above 0; infinity is the mean.

  Returns:
    The same pytree without the client axis, dtypes kept.

  Raises:
    ValueError: if `max_norm` is not above 0.

  References:
    Sun et al., Can You Really Backdoor Federated Learning?,
    https://arxiv.org/abs/1911.07963.
  """
  wide, weights = _sound_rows(stacked, weights)
  length = row_lengths(wide, weights.shape[0])
  far = length > max_norm
  less = jnp.where(far, shrinking(length), 1)
  factor = jnp.where(
      far, max_norm / jnp.where(length > 0, length * less, 1), 1)
  shorter = jax.tree.map(
      lambda x: x * column(less, x) * column(factor, x), wide)
  return _in_dtypes_of(combined(shorter, shares_of(weights)), stacked)
