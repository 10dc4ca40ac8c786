"""Means of the clients' rows: weighted, by distance, over groups."""
from __future__ import annotations

from collections.abc import Callable
import functools
import inspect
from typing import Any, cast

import jax
import jax.numpy as jnp

from fedjax_ssl import arguments
from fedjax_ssl.aggregation.algebra import (
  Array,
  Axis,
  column,
  combined,
  Function,
  jit,
  narrowed,
  over,
  row_lengths,
  row_norms,
  Scalar,
  shares_of,
  Tree,
  weights_of,
)
from fedjax_ssl.arguments import at_least_float32

DISTANCES = ('sum_of_norms', 'global_norm')


def _distance_shares(stacked: Any, num_examples: jax.Array, boost: jax.Array,
                     beta: Scalar, distance: str,
                     first: jax.Array | None = None, axis_name: Axis = None
                     ) -> jax.Array:
  """float[K], the shares of `distance_reweighted_mean`.

  `first` is the multiplier in f_k where that is not `boost`.
  """
  active = num_examples * boost > 0
  count = jnp.where(active, num_examples, 1)
  first = jnp.where(active, boost if first is None else first, 1)
  boost = jnp.where(active, boost, 1)
  rows = jax.tree.map(
      lambda x: jnp.where(column(active, x), at_least_float32(x), 0), stacked)
  mean_shares = shares_of(
      jnp.where(active, count * first, 0), axis_name=axis_name)
  gaps = jax.tree.map(
      lambda x: x - over(jax.lax.psum, jnp.sum(
          column(mean_shares, x) * x, axis=0), axis_name), rows)
  largest = jnp.finfo(jnp.float32).max
  # Distance per example. A norm that overflows counts as far, not as NaN.
  gap = jnp.minimum(row_norms(gaps, count.shape[0], distance) / count, largest)
  nearest_only = jnp.isinf(beta)
  gap = jnp.where(nearest_only, jax.lax.stop_gradient(gap), gap)
  closest = jax.lax.stop_gradient(jnp.min(gap, where=active, initial=largest))
  closest = over(jax.lax.pmin, closest, axis_name)
  excess = jnp.where(active, gap - closest, 0)
  logits = (jnp.log(count) + (jnp.log(first) + jnp.log(boost))
            - jnp.where(nearest_only, largest, beta) * excess)
  top = jax.lax.stop_gradient(jnp.max(logits, where=active, initial=-jnp.inf))
  top = over(jax.lax.pmax, top, axis_name)
  scaled = jnp.exp(jnp.where(active, logits - top, 0))
  return shares_of(jnp.where(active, scaled, 0), axis_name=axis_name)


def _checked(stacked: Any, num_examples: Array, labeled: Array | None,
             labeled_multiplier: Scalar, distance: str
             ) -> tuple[jax.Array, jax.Array]:
  """Examples and multiplier of each client, float32[K] both."""
  arguments.check_choice('distance', distance, DISTANCES)
  count = weights_of(stacked, num_examples, 'num_examples')
  if labeled is None:
    labeled = jnp.zeros(count.shape, bool)
  labeled = jnp.asarray(labeled)
  if jnp.issubdtype(labeled.dtype, jnp.inexact):
    raise ValueError(f'labeled has type {labeled.dtype}; allowed is bool.')
  if labeled.shape != count.shape:
    raise ValueError(f'labeled has shape {labeled.shape}; '
                     f'allowed is {count.shape}, as num_examples.')
  return count, jnp.where(labeled, labeled_multiplier, 1.0).astype(jnp.float32)


@jit('axis_name', weights=arguments.FINITE)
def weighted_mean(stacked: Tree, weights: Array, *, axis_name: Axis = None
                  ) -> Tree:
  r"""Computes the mean of the rows: :math:`\sum_k w_k x_k / \sum_k w_k`.

  Args:
    stacked: pytree of [K, ...], one row per client.
    weights: float32[K], for FedAvg the number of examples; 0 leaves a row out.
    axis_name: mesh axis over which the clients are spread, with K of them on
      this device; None if all are here.

  Returns:
    The same pytree without the client axis, dtypes kept: of integers the mean
    is rounded.

  Raises:
    ValueError: for other shapes, or negative weights of the host.

  References:
    McMahan et al., FedAvg, AISTATS 2017, https://arxiv.org/abs/1602.05629.
  """
  weights = weights_of(stacked, weights, 'weights')
  return combined(
      stacked, shares_of(weights, axis_name=axis_name), axis_name=axis_name)


@jit('axis_name', scores=arguments.FINITE)
def reliability_weighted_mean(stacked: Tree, scores: Array, *,
                              axis_name: Axis = None) -> Tree:
  r"""Weighs clients by how good their models are: :math:`w_k = s_k/\sum_j s_j`.

  The paper prints the ratio outside the sum over its own index; this is the
  reading under which the weights sum to one.

  Args:
    stacked: pytree of [K, ...], one row per client.
    scores: float32[K], accuracies on examples that the server holds; equal
      scores are the plain mean, 0 leaves a row out.
    axis_name: as for `weighted_mean`.

  Returns:
    The same pytree without the client axis, dtypes kept.

  References:
    Jeong et al., FedMatch, https://arxiv.org/abs/2006.12097v1, eq. 4.
  """
  return weighted_mean(stacked, scores, axis_name=axis_name)


@jit('distance', 'axis_name', num_examples=arguments.FINITE,
     beta=arguments.NOT_NEGATIVE, labeled_multiplier=arguments.FINITE)
def distance_reweighted_mean(
    stacked: Tree, num_examples: Array, *, beta: Scalar,
    labeled: Array | None = None, labeled_multiplier: Scalar = 1.0,
    distance: str = 'sum_of_norms', axis_name: Axis = None) -> Tree:
  r"""Averages clients, trusting them less the further they are from the mean.

  With multiplier :math:`m_k` (1 for a client without labels), shares
  :math:`f_k \propto m_k n_k` and :math:`\bar x = \sum_k f_k x_k`,

    :math:`w_k \propto m_k f_k \exp(-\beta \|x_k - \bar x\| / n_k)`,

  computed in logs: at the paper's scale of 1e4 the exponential underflows for
  every client, and the mean of nothing would freeze the model.

  Args:
    stacked: pytree of [K, ...], one row per client.
    num_examples: float32[K], examples n_k behind each row; 0 leaves it out,
      also for derivatives.
    beta: float32[], examples per unit of distance; 0 is the mean by f_k (and
      FedAvg if the multiplier is 1), infinity the row with the smallest
      distance per example, whose weight is then a constant for derivatives.
    labeled: bool[K], clients whose share is multiplied, or None.
    labeled_multiplier: float32[], enters f_k and once more the weight, but not
      the n_k of the exponent; 1 is off, 0 leaves labeled clients out.
    distance: 'sum_of_norms' over leaves (authors' code) or 'global_norm', the
      norm of all leaves together. Integer leaves count too.
    axis_name: as for `weighted_mean`.

  Returns:
    The same pytree without the client axis, dtypes kept.

  Raises:
    ValueError: for leaves or `labeled` without K rows, another distance, or a
      negative number.

  References:
    Liang et al., RSCFed, CVPR 2022, https://arxiv.org/abs/2203.13993.
  """
  count, boost = _checked(
      stacked, num_examples, labeled, labeled_multiplier, distance)
  shares = _distance_shares(stacked, count, boost, beta, distance,
                            axis_name=axis_name)
  return combined(stacked, shares, axis_name=axis_name)


@jit('num_clients', 'groups', 'size')
def sample_sub_consensus(key: Array, num_clients: int, *, groups: int,
                         size: int) -> jax.Array:
  """Draws RSCFed's groups, each on its own; the paper's: 3 of 5 clients.

  Args:
    key: PRNG key.
    num_clients: K, clients to draw from.
    groups: M, groups drawn; a client may be in several.
    size: clients of a group; K puts everybody in every group.

  Returns:
    int32[groups, size], clients in [0, K), each at most once per group.

  Raises:
    ValueError: if `groups` is below 1 or `size` outside [1, K].
  """
  if groups < 1:
    raise ValueError(f'groups is {groups}; allowed is 1 or more.')
  if not 1 <= size <= num_clients:
    raise ValueError(f'size is {size}; allowed is 1 to {num_clients} clients.')
  order = jax.vmap(jax.random.permutation, (0, None))(
      jax.random.split(key, groups), num_clients)
  return order[:, :size].astype(jnp.int32)


@jit('distance', num_examples=arguments.FINITE,
     beta=arguments.NOT_NEGATIVE, labeled_multiplier=arguments.FINITE,
     first_multiplier=arguments.FINITE)
def sub_consensus_mean(
    stacked: Tree, num_examples: Array, members: Array, *,
    beta: Scalar, labeled: Array | None = None,
    labeled_multiplier: Scalar = 1.0, distance: str = 'sum_of_norms',
    first_multiplier: Array | None = None) -> Tree:
  """Averages the groups' distance-reweighted means, as in RSCFed.

  Args:
    stacked: pytree of [K, ...], one row per client.
    num_examples: float32[K], as for `distance_reweighted_mean`.
    members: int32[groups, size], rows of each group; an entry outside [0, K)
      is an empty place. One group of all rows is one distance-reweighted mean.
    beta: float32[] or float32[groups]; the authors use one value for groups
      with a labeled client and another for groups without.
    labeled: bool[K] or None, as for `distance_reweighted_mean`.
    labeled_multiplier: float32[], as there.
    distance: 'sum_of_norms' or 'global_norm', as there.
    first_multiplier: float32[groups], what multiplies labeled clients in f_k;
      None is labeled_multiplier, as in `distance_reweighted_mean`.

  Returns:
    The same pytree without the client axis, dtypes kept; a group without
    examples counts as zeros.

  Raises:
    ValueError: for another shape or distance, or a negative number.
  """
  count, boost = _checked(
      stacked, num_examples, labeled, labeled_multiplier, distance)
  labeled = jnp.zeros(count.shape, bool) if labeled is None else (
      jnp.asarray(labeled))
  members = jnp.asarray(members)
  if not jnp.issubdtype(members.dtype, jnp.integer):
    raise ValueError(f'members holds {members.dtype}; allowed are integers, '
                     'the places of rows.')
  if jnp.ndim(members) != 2:
    raise ValueError(f'members has {jnp.ndim(members)} axes; allowed is 2.')
  groups = members.shape[0]
  if not groups:
    raise ValueError('members has no group; allowed is 1 or more.')
  if jnp.shape(beta) not in ((), (groups,)):
    raise ValueError(f'beta has shape {jnp.shape(beta)}; allowed is one number '
                     f'or one for each of the {groups} groups.')

  if first_multiplier is not None and (
      jnp.shape(first_multiplier) != (groups,)):
    raise ValueError('first_multiplier has shape '
                     f'{jnp.shape(first_multiplier)}; allowed is ({groups},).')

  def group_shares(group: Any) -> jax.Array:
    rows, scale, first = group
    filled = (rows >= 0) & (rows < count.shape[0])
    rows = jnp.where(filled, rows, 0)
    taken = jax.tree.map(lambda x: x[rows], stacked)
    if first is not None:
      first = jnp.where(labeled[rows], first, 1.0)
    shares = _distance_shares(taken, jnp.where(filled, count[rows], 0),
                              boost[rows], scale, distance, first)
    return jnp.zeros_like(count).at[rows].add(shares.astype(count.dtype))

  # The groups' shares are averaged, not their means, so that nothing is rounded
  # to a leaf's dtype before the end.
  shares = jax.lax.map(
      group_shares, (members, jnp.broadcast_to(beta, (groups,)),
                     first_multiplier))
  return combined(stacked, jnp.mean(shares, axis=0))


@jit(decay=arguments.SHARE)
def ema(old: Tree, new: Tree, decay: Scalar) -> Tree:
  """Moves an exponential average: decay * old + (1 - decay) * new.

  Args:
    old: pytree of arrays.
    new: pytree of the same structure and shapes.
    decay: float32[]; 0 is `new`, 1 is `old`.

  Returns:
    A pytree with the dtypes of `old`; integer leaves are rounded.

  Raises:
    ValueError: if structures or shapes differ, or for another decay.
  """
  arguments.check_alike(old=old, new=new)
  def move(x: jax.Array, y: jax.Array) -> jax.Array:
    first, second = (
        jnp.where((share == 0) & ~jnp.isfinite(value), 0, value)
        for share, value in ((decay, at_least_float32(x)),
                             (1 - decay, at_least_float32(y))))
    return narrowed(decay * first + (1 - decay) * second, x.dtype)

  moved: Tree = jax.tree.map(move, old, new)
  return moved


@jit(weights=arguments.ANY, max_norm=arguments.NOT_NEGATIVE)
def finite_or_zero(stacked: Tree, weights: Array, *,
                   max_norm: Scalar = jnp.inf
                   ) -> tuple[Tree, jax.Array, jax.Array]:
  """Leaves out rows that are not finite, too long, or of a broken weight.

  Args:
    stacked: pytree of [K, ...], one row per client.
    weights: float32[K]; broken is negative or not finite.
    max_norm: float32[], largest norm of a row over all leaves; infinity allows
      every finite row, 0 only rows of zeros.

  Returns:
    The pytree and float32[K] weights with zeros for the rows left out, and
    int32[], how many of these had a nonzero weight.
  """
  weights = weights_of(stacked, weights, 'weights')
  good = jnp.isfinite(weights) & (weights >= 0)
  for leaf in jax.tree.leaves(stacked):
    good &= jnp.isfinite(leaf).all(axis=tuple(range(1, leaf.ndim)))
  good &= row_lengths(stacked, weights.shape[0]) <= max_norm
  # With 0 in place of False a bool leaf would become one of integers.
  kept = jax.tree.map(
      lambda x: jnp.where(column(good, x), x, False if x.dtype == bool else 0),
      stacked)
  rejected = jnp.sum(~good & (weights != 0), dtype=jnp.int32)
  return kept, jnp.where(good, weights, 0), rejected


def linear(finish: Function, *, each: Callable[[Any], Any] | None = None,
           replaceable: bool = True) -> Function:
  """Marks a rule for which the weighted mean of the messages is enough.

  "Linear" is what it reads of the messages; what it does with their mean may be
  anything. The mark is set on `finish` itself. A client pass then adds up the
  messages as they come, and need not hold all of them at once.

  Args:
    finish: (server, mean_message, cohort, context, key) -> (server, metrics).
    each: message -> a small part of it that the rule needs of every client as
      well; it then gets `core.rounds.Detailed` in place of the mean.
    replaceable: whether another rule, such as a median, may take the place of
      the mean; False where `finish` needs the mean itself, as one that divides
      it by a mean of counts does.

  Returns:
    `finish` itself, marked; of a bound method a function that calls it.
  """
  if inspect.ismethod(finish):  # It takes no marks.
    finish = cast('Function', functools.partial(finish))
  finish.is_linear = True  # type: ignore[attr-defined]
  finish.of_each = each  # type: ignore[attr-defined]
  finish.is_replaceable = replaceable  # type: ignore[attr-defined]
  return finish
