"""Labels of received models for a client's rows, and the rows it keeps."""
from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.core import local_training
from fedjax_ssl.core.types import (
  Array,
  Client,
  Metrics,
  Ratio,
  Shard,
  Task,
  Variables,
  WORK,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import network

_BATCH = 100  # Rows that are labeled together.


def probabilities(task: Task, model: Variables, client: Client,
                  key: jax.Array, *, view: Callable[..., Any] | None = None
                  ) -> tuple[jax.Array, Metrics]:
  """Predicts one weak view of each unlabeled row, with running statistics.

  Args:
    task: the static choices.
    model: as received, which is the same for all clients.
    client: the one that holds the rows.
    key: draws the views.
    view: (rows, key) -> rows as the model sees them; None is `network.weakly`.

  Returns:
    float32[U, C] in the order of the client's table, zeros for padding; and
    the metrics `core.types.WORK` of the passes.
  """
  size = client.shard.unlabeled.shape[-1]
  once = dataclasses.replace(task.one_pass(),
                             unlabeled_batch=max(min(_BATCH, size), 1))
  view = view or functools.partial(network.weakly, task)

  def step(table, batch, key):
    rows = view(batch.unlabeled, key)
    assert rows.slots is not None
    found = jax.nn.softmax(task.apply(model, rows.inputs))
    # Padding goes to a place beyond the table, where it is dropped.
    place = jnp.where(rows.mask > 0, rows.slots, size)
    return table.at[place].set(found, mode='drop'), {
        'forward_passes': rows.mask.sum(), 'backward_passes': jnp.float32(0)}

  order_key, view_key = jax.random.split(key)
  table, found = local_training.train(
      step, jnp.zeros((size, task.num_classes)),
      batching.batches(once, client.train, client.shard, order_key,
                       'unlabeled'), view_key)
  return table, {name: found[name] for name in WORK}


def confidence_sum(
    task: Task, predict: Callable[..., jax.Array], client: Client,
    key: jax.Array, *, kind: str, wanted: jax.Array) -> jax.Array:
  """Sums the largest probabilities of a client's rows, without any view.

  Args:
    task: the static choices.
    predict: (inputs, key) -> logits.
    client: the one that holds the rows.
    key: of the order, and of `predict`.
    kind: 'labeled' or 'unlabeled' rows.
    wanted: bool[], without which no row is predicted.

  Returns:
    float32[2], the sum and the number of rows.
  """
  def step(sums, batch, key):
    rows = getattr(batch, kind)
    top = jax.nn.softmax(predict(rows.inputs, key)).max(-1)
    return sums + jnp.stack([(rows.mask * top).sum(), rows.mask.sum()]
                            ).astype(jnp.float32), {}

  order_key, step_key = jax.random.split(key)
  # Not split over the labels, which would change how often labels come.
  once = dataclasses.replace(task.one_pass(),
                             unlabeled_batch=task.unlabeled_width)
  made = batching.batches(once, client.train, client.shard, order_key, kind)
  made = made._replace(num_steps=jnp.where(wanted, made.num_steps, 0))
  return local_training.train(
      step, jnp.zeros(2, jnp.float32), made, step_key)[0]


def metrics(client: Client, count: Array, training: Metrics, passes: Metrics
            ) -> Metrics:
  """Returns the metrics of a client that labels once, then trains.

  Args:
    client: as it was before training.
    count: int32[], unlabeled rows that it has trained on.
    training: metrics of the training.
    passes: those of `probabilities`.

  Returns:
    The training's with the work of both, and the share of rows that it has
    trained on as `mask_rate`.
  """
  sums = {name: training[name] + passes[name] for name in WORK}
  rate = Ratio(*(jnp.asarray(x, jnp.float32) for x in (
      count, client.shard.num_unlabeled)))
  return {**training, **sums, 'mask_rate': rate}


class Kept(NamedTuple):
  """The rows that a client learns from in a round.

  Attributes:
    batches: of these rows, and of the client's labeled rows if it has some.
    shard: the client's, with these rows first; its `num_unlabeled` counts only
      them.
    order: int32[U], where each row stood in the client's table before.
  """

  batches: local_training.Batches
  shard: Shard
  order: jax.Array


def kept(task: Task, client: Client, labels: jax.Array, mask: jax.Array,
         key: jax.Array) -> Kept:
  """Selects the unlabeled rows that a client trains on in the round.

  Args:
    task: says how large batches are, and where labels.
    client: the one that holds the rows.
    labels: int32[U], the pseudo-label of each row.
    mask: bool[U], true for the rows to train on.
    key: draws the order.
  """
  shard, order = batching.select_unlabeled(client.shard, mask)
  made = batching.batches(
      task, client.train, shard, key, task.client_streams, client.round,
      pseudo_labels=labels[order])
  return Kept(made, shard, order)
