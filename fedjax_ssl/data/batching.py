"""From index tables to batches: true epochs over a client's own rows."""
from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from fedjax_ssl.core import checks
from fedjax_ssl.core.local_training import Batches
from fedjax_ssl.core.types import (
  Array,
  Batch,
  Examples,
  Metrics,
  Number,
  Shard,
  STREAMS,
  Task,
)


class Pair(NamedTuple):
  """What a semi-supervised step sees; None is a stream that is not used."""

  labeled: Batch | None
  unlabeled: Batch | None
  # float32[] in (0, 1], how far the run is after this step; None where the task
  # has no `schedule_rounds`.
  progress: jax.Array | None


def passes(batch: Pair, labelings: Number, views: int = 1,
           labeled_views: int = 1) -> Metrics:
  """Counts a step's passes through the network, in examples.

  Args:
    batch: its rows.
    labelings: forward passes of an unlabeled row that only label it.
    views: passes forward and backward of an unlabeled row that train.
    labeled_views: passes forward and backward of a labeled row.

  Returns:
    The metrics 'forward_passes' and 'backward_passes', float32[].
  """
  known, unknown = (jnp.float32(0) if rows is None else rows.mask.sum()
                    for rows in (batch.labeled, batch.unlabeled))
  known *= labeled_views
  return {'forward_passes': known + (labelings + views) * unknown,
          'backward_passes': known + views * unknown}


def gather(examples: Examples, rows: Array, mask: Array, *,
           hidden: bool = False) -> Batch:
  """Takes the examples at `rows` int32[B]; hidden labels are -1, not read."""
  inputs = jnp.take(examples.inputs, rows, axis=0)
  labels = (jnp.full(rows.shape, -1, jnp.int32) if hidden
            else jnp.take(examples.labels, rows, axis=0))
  return Batch(inputs, labels, jnp.asarray(mask))


def _ceil_div(n: Number, d: Number) -> jax.Array:
  return jnp.asarray((n + d - 1) // d)


def _split_steps(labeled: Any, labeled_batch: int) -> Any:
  """Steps of an epoch over which the unlabeled rows are split.

  round(n_labeled / B) as in FedMatch and FedDure; but 4 where that is 2 or
  less, as in FedDure's code. Otherwise a client with few labels would have all
  its unlabeled rows in one batch, and every client's batches would be as wide.
  """
  steps = (labeled / labeled_batch).round().astype(int)
  return steps + (4 - steps) * (steps <= 2)


def num_steps(task: Task, shard: Shard, streams: str = 'both') -> jax.Array:
  """Computes the local steps of one client in a round.

  Args:
    task: batch sizes, epochs or steps. A positive `local_steps` is the number
      itself. Otherwise an epoch has as many steps as the longer stream needs.
      If `unlabeled_batch` is 0, it has round(n_labeled / B) steps, or 4 if that
      is 2 or less. This holds also where unlabeled rows are not used, so that
      methods and their supervised bounds take as many steps. Only a client
      whose unlabeled batches would be wider than `unlabeled_capacity` takes
      more, and only where it uses these rows.
    shard: the client's rows.
    streams: 'both', 'labeled' or 'unlabeled': what the loss uses.

  Returns:
    int32[]; 0 for a client that has no rows in the streams used.

  Raises:
    ValueError: for another word than those of `STREAMS`.
  """
  checks.check('streams', streams, STREAMS)
  n_s = jnp.where(streams == 'unlabeled', 0, shard.num_labeled)
  n_u = jnp.where(streams == 'labeled', 0, shard.num_unlabeled)
  if task.local_steps:
    return jnp.where(n_s + n_u > 0, task.local_steps, 0).astype(jnp.int32)
  if task.unlabeled_batch:
    epoch = jnp.maximum(_ceil_div(n_s, task.labeled_batch),
                        _ceil_div(n_u, task.unlabeled_batch))
  else:
    steps = _split_steps(jnp.asarray(shard.num_labeled), task.labeled_batch)
    steps = jnp.maximum(steps, _ceil_div(n_u, task.unlabeled_width))
    epoch = jnp.where(n_s + n_u > 0, steps, 0)
  return (task.local_epochs * epoch).astype(jnp.int32)


def unlabeled_capacity(labeled: npt.ArrayLike, unlabeled: npt.ArrayLike, *,
                       labeled_batch: int, local_steps: int = 0) -> int:
  """Computes the width of unlabeled batches that are split over labeled steps.

  All clients share one width, and shorter batches are padded to it. It is 1.5
  times the width that a client with mean numbers of rows needs, or the largest
  that any client needs, if that is less. A client that needs more takes more
  steps or, where the number of steps is fixed, leaves rows for another round.
  The mean numbers are the same for all seeds of a setting, so a seed gets the
  same width whether it runs alone or with others, unless the largest decides.

  Args:
    labeled: int[...], rows with labels of each client, of all seeds and tasks.
    unlabeled: the same for rows without.
    labeled_batch: B.
    local_steps: if positive, the steps of every client.

  Returns:
    int, at least 1.
  """
  labeled, unlabeled = np.asarray(labeled), np.asarray(unlabeled)
  def width(n_s: Any, n_u: Any) -> Any:
    return n_u / (local_steps or _split_steps(n_s, labeled_batch))
  mean = width(labeled.mean(), unlabeled.mean())
  widest = np.max(width(labeled, unlabeled), initial=1)
  return int(np.ceil(min(max(1.5 * mean, 1), widest)))


class _Stream(NamedTuple):
  """A client's labeled or unlabeled rows, taken batch by batch."""

  rows: jax.Array  # int32[W], the first n count.
  n: jax.Array  # int32[]
  capacity: int  # Rows of a full batch.
  pieces: jax.Array  # int32[], batches of an epoch of this list.
  even: bool  # Whether batches are about equal; else all but the last are full.
  key: jax.Array

  def shuffled(self, epoch: Array) -> jax.Array:
    """Shuffles the first n places: int32[W], padding last."""
    draw = jax.random.uniform(
        jax.random.fold_in(self.key, epoch), self.rows.shape)
    real = jnp.arange(self.rows.shape[0]) < self.n
    return jnp.argsort(jnp.where(real, draw, 2.0)).astype(jnp.int32)

  def next(self, order: jax.Array, step: Array
           ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Takes the next batch: (order, places int32[capacity], mask).

    The last batch of an epoch may be short. After it the list starts again in a
    new order, whether or not the other list has come to its end.
    """
    position = step % self.pieces
    order = lax.cond(
        position == 0, lambda: self.shuffled(step // self.pieces),
        lambda: order)
    if self.even:
      begin, end = (_share(self.n, position + i, self.pieces) for i in (0, 1))
    else:
      begin = position * self.capacity
      end = jnp.minimum(begin + self.capacity, self.n)
    index = begin + jnp.arange(self.capacity)
    mask = index < end
    places = jnp.take(order, jnp.where(mask, index, 0))
    return order, places, jnp.asarray(mask, jnp.float32)


def _share(n: Array, position: Array, pieces: Array) -> Array:
  """Computes n * position // pieces, although int32 cannot hold the product.

  Args:
    n: int32[].
    position: int32[], at most `pieces`.
    pieces: int32[], at most 2^20.
  """
  size, rest = n // pieces, n % pieces
  # rest * position in base 1024, each digit divided by itself.
  high = rest // 1024 * position
  low = high % pieces * 1024 + rest % 1024 * position
  return size * position + high // pieces * 1024 + low // pieces


def _streams(task: Task, shard: Shard, steps: jax.Array, key: jax.Array,
             streams: str) -> dict[str, _Stream]:
  keys = jax.random.split(key)
  out = {}
  def stream(rows: Array, n: Array, size: int, key: jax.Array) -> _Stream:
    rows = jnp.asarray(rows)
    if not rows.shape[-1]:  # A table without columns: a place to read from.
      rows = jnp.zeros(1, rows.dtype)
    return _Stream(rows, jnp.asarray(n), size,
                   jnp.maximum(_ceil_div(n, size), 1), False, key)
  if streams != 'unlabeled':
    out['labeled'] = stream(shard.labeled, shard.num_labeled,
                            task.labeled_batch, keys[0])
  if streams != 'labeled':
    size = task.unlabeled_width
    made = stream(shard.unlabeled, shard.num_unlabeled, size, keys[1])
    if not task.unlabeled_batch:
      pieces = jnp.maximum(steps // task.epochs_a_round, 1)
      made = made._replace(pieces=pieces, even=True)
    out['unlabeled'] = made
  return out


def select_unlabeled(shard: Shard, chosen: Array) -> tuple[Shard, jax.Array]:
  """Keeps only some of the unlabeled rows of a client's shard.

  Args:
    shard: one client's rows.
    chosen: bool[U], which places of `shard.unlabeled` to keep; padding is
      never kept.

  Returns:
    The shard, and int32[U]: for each place of the new table, its place in the
    old one.
  """
  real = jnp.arange(chosen.shape[0]) < shard.num_unlabeled
  kept = jnp.asarray(chosen) & real
  order = jnp.argsort(~kept, stable=True).astype(jnp.int32)
  return shard._replace(
      unlabeled=jnp.asarray(shard.unlabeled)[order],
      num_unlabeled=kept.sum().astype(jnp.int32)), order


def batches(task: Task, examples: Examples, shard: Shard, key: jax.Array,
            streams: str = 'both', round_: Number = 0, *,
            pseudo_labels: Array | None = None) -> Batches:
  """Makes a client's batches of one round, as `Pair`s.

  Args:
    task: batch sizes, epochs or steps; see `num_steps`.
    examples: the data that the shard indexes.
    shard: the client's rows. Labels of unlabeled rows are never read.
    key: draws the orders.
    streams: 'both', 'labeled' or 'unlabeled'.
    round_: int32[], for the progress over `task.schedule_rounds`; if that is
      None there is no progress.
    pseudo_labels: int32[U], labels that the client gave its unlabeled rows, in
      the order of its table; they become the batches' labels. None is -1.

  Returns:
    Batches for `core.local_training.train`.
  """
  steps = num_steps(task, shard, streams)
  parts = _streams(task, shard, steps, key, streams)

  def first() -> dict[str, jax.Array]:
    return {name: jnp.zeros(s.rows.shape, jnp.int32)
            for name, s in parts.items()}

  if pseudo_labels is not None:  # And one for the place of an empty table.
    given = jnp.append(jnp.asarray(pseudo_labels), -1)

  def following(orders: dict[str, jax.Array], step: jax.Array) -> Any:
    made: dict[str, Batch | None] = {'labeled': None, 'unlabeled': None}
    used = jnp.float32(0)
    orders = dict(orders)
    for name, stream in parts.items():
      orders[name], places, mask = stream.next(orders[name], step)
      made[name] = gather(
          examples, stream.rows[places], mask,
          hidden=name == 'unlabeled')._replace(slots=places)
      used += mask.sum()
    if pseudo_labels is not None and made['unlabeled'] is not None:
      made['unlabeled'] = made['unlabeled']._replace(
          labels=given[made['unlabeled'].slots])
    share = (step + 1) / jnp.maximum(steps, 1)
    progress = None if task.schedule_rounds is None else jnp.minimum(
        (round_ + share) / task.schedule_rounds, 1)
    return orders, Pair(**made, progress=progress), used

  width = sum(s.capacity for s in parts.values())
  return Batches(steps, width, first, following)


def together(first: Batches, second: Batches) -> Batches:
  """Joins the batches of two clients: each batch is a pair of theirs.

  There are as many steps as the first has. If the second has fewer, it goes on
  with new orders.
  """
  def following(cursors: Any, step: jax.Array) -> Any:
    a, batch, rows = first.next(cursors[0], step)
    b, other, more = second.next(cursors[1], step)
    return (a, b), (batch, other), rows + more

  return Batches(first.num_steps, first.width + second.width,
                 lambda: (first.start(), second.start()), following)
