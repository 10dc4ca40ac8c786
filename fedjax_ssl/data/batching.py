"""From index tables to batches: true epochs over a client's own rows."""
from __future__ import annotations

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from fedjax_ssl.core.local import Batches
from fedjax_ssl.core.types import Array, Batch, Examples, Number, Shard, Task

STREAMS = ('both', 'labeled', 'unlabeled')


class Pair(NamedTuple):
  """What a semi-supervised step sees; None is a stream that is not used."""

  labeled: Batch | None
  unlabeled: Batch | None


def gather(examples: Examples, rows: Array, mask: Array, *,
           hidden: bool = False) -> Batch:
  """The examples at `rows` int32[B]; hidden labels become -1, unread."""
  inputs = jnp.take(examples.inputs, rows, axis=0)
  labels = (jnp.full(rows.shape, -1, jnp.int32) if hidden
            else jnp.take(examples.labels, rows, axis=0))
  return Batch(inputs, labels, jnp.asarray(mask))


def _ceil_div(n: Number, d: Number) -> jax.Array:
  return jnp.asarray((n + d - 1) // d)


def _labeled_steps(task: Task, shard: Shard) -> jax.Array:
  """round(n_labeled / B) for whom it is positive, as in FedMatch, FedDure."""
  steps = jnp.round(shard.num_labeled / task.labeled_batch).astype(jnp.int32)
  return jnp.where(shard.num_labeled > 0, jnp.maximum(steps, 1), 0)


def num_steps(task: Task, shard: Shard, streams: str = 'both') -> jax.Array:
  """Local steps of one client in a round.

  Args:
    task: batch sizes, epochs or steps. `local_steps` rules if positive. With
      `unlabeled_batch` 0 an epoch has round(n_labeled / B) steps, and a client
      without labels ceil(n_unlabeled / capacity). Else it has as many as the
      longer stream needs.
    shard: the client's rows.
    streams: 'both', 'labeled' or 'unlabeled': what the loss uses.

  Returns:
    int32[]; 0 for a client that has no rows in the streams used.
  """
  n_s = jnp.where(streams == 'unlabeled', 0, shard.num_labeled)
  n_u = jnp.where(streams == 'labeled', 0, shard.num_unlabeled)
  if task.local_steps:
    return jnp.where(n_s + n_u > 0, task.local_steps, 0).astype(jnp.int32)
  if task.unlabeled_batch:
    epoch = jnp.maximum(_ceil_div(n_s, task.labeled_batch),
                        _ceil_div(n_u, task.unlabeled_batch))
  else:
    alone = _ceil_div(n_u, max(task.unlabeled_capacity, 1))
    labeled = _labeled_steps(task, shard)
    epoch = jnp.where(n_s + n_u > 0, jnp.where(labeled > 0, labeled, alone), 0)
  return (task.local_epochs * epoch).astype(jnp.int32)


def unlabeled_capacity(labeled: npt.ArrayLike, unlabeled: npt.ArrayLike, *,
                       labeled_batch: int, local_steps: int = 0) -> int:
  """Widest unlabeled batch of any client when rows are split over the steps.

  Args:
    labeled: int[N] rows with labels.
    unlabeled: int[N] rows without.
    labeled_batch: B.
    local_steps: if positive, the steps of every client.

  Returns:
    max over clients with labels of ceil(n_unlabeled / round(n_labeled / B)),
    at least 1; if no client has labels, the labeled batch.
  """
  labeled, unlabeled = np.asarray(labeled), np.asarray(unlabeled)
  if local_steps:
    return max(-(-int(unlabeled.max(initial=0)) // local_steps), 1)
  steps = np.maximum(np.round(labeled / labeled_batch), 1)
  widths = np.ceil(unlabeled / steps)[labeled > 0]
  return int(max(widths.max(), 1)) if widths.size else labeled_batch


class _Stream(NamedTuple):
  """One of a client's two lists of rows, dealt batch by batch."""

  rows: jax.Array  # int32[W], the first n count.
  n: jax.Array  # int32[]
  batch: jax.Array  # int32[], rows of a full batch.
  capacity: int  # Its static bound.
  key: jax.Array

  def shuffled(self, epoch: Array) -> jax.Array:
    """int32[W]: a permutation of the first n rows, then padding."""
    draw = jax.random.uniform(
        jax.random.fold_in(self.key, epoch), self.rows.shape)
    real = jnp.arange(self.rows.shape[0]) < self.n
    return self.rows[jnp.argsort(jnp.where(real, draw, 2.0))]

  def next(self, order: jax.Array, step: Array
           ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(order, rows int32[capacity], mask): the stream's own epochs, endless.

    The last batch of an epoch may be short; a stream that is exhausted before
    the other one starts over in a new order.
    """
    per_epoch = jnp.maximum(_ceil_div(self.n, self.batch), 1)
    position = step % per_epoch
    order = lax.cond(
        position == 0, lambda: self.shuffled(step // per_epoch), lambda: order)
    slot = jnp.arange(self.capacity)
    index = position * self.batch + slot
    mask = (slot < self.batch) & (index < self.n)
    rows = jnp.take(order, jnp.where(mask, index, 0))
    return order, rows, mask.astype(jnp.float32)


def _streams(task: Task, shard: Shard, steps: jax.Array, key: jax.Array,
             streams: str) -> dict[str, _Stream]:
  keys = jax.random.split(key)
  out = {}
  if streams != 'unlabeled':
    size = task.labeled_batch
    out['labeled'] = _Stream(jnp.asarray(shard.labeled),
                             jnp.asarray(shard.num_labeled),
                             jnp.int32(size), size, keys[0])
  if streams != 'labeled':
    size = task.unlabeled_batch or max(task.unlabeled_capacity, 1)
    per_epoch = jnp.maximum(steps // max(task.local_epochs, 1), 1)
    batch = (jnp.int32(size) if task.unlabeled_batch else
             jnp.clip(_ceil_div(shard.num_unlabeled, per_epoch), 1, size))
    out['unlabeled'] = _Stream(jnp.asarray(shard.unlabeled),
                               jnp.asarray(shard.num_unlabeled), batch, size,
                               keys[1])
  return out


def batches(task: Task, examples: Examples, shard: Shard, key: jax.Array,
            streams: str = 'both') -> Batches:
  """A client's batches of one round, as `Pair`s.

  Args:
    task: batch sizes, epochs or steps; see `num_steps`.
    examples: the data that the shard indexes.
    shard: the client's rows. Labels of unlabeled rows are never read.
    key: draws the orders.
    streams: 'both', 'labeled' or 'unlabeled'.

  Returns:
    Batches for `core.local.train`.
  """
  steps = num_steps(task, shard, streams)
  parts = _streams(task, shard, steps, key, streams)

  def first():
    return {name: jnp.zeros_like(s.rows) for name, s in parts.items()}

  def following(orders, step):
    made: dict[str, Batch | None] = {'labeled': None, 'unlabeled': None}
    used = jnp.float32(0)
    orders = dict(orders)
    for name, stream in parts.items():
      orders[name], rows, mask = stream.next(orders[name], step)
      made[name] = gather(examples, rows, mask, hidden=name == 'unlabeled')
      used += mask.sum()
    return orders, Pair(**made), used

  width = sum(s.capacity for s in parts.values())
  return Batches(steps, width, first, following)
