"""The network in training: views of a batch, and passes through it."""
from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.core import tree
from fedjax_ssl.core.local_training import Step
from fedjax_ssl.core.types import (
  Batch,
  PyTree,
  Ratio,
  Task,
  Variables,
)
from fedjax_ssl.data.batching import Pair

# Norms whose statistics depend on all rows of a batch: all views go through the
# network together, as in the authors' code of most methods.
_COUPLED = ('batch', 'static')
_Rows = TypeVar('_Rows', Batch, Batch | None)


def is_coupled(task: Task) -> bool:
  """Returns whether a row's logits depend on the other rows of its batch."""
  return task.model.norm in _COUPLED


def next_stats(task: Task, old: PyTree, new: PyTree) -> PyTree:
  """Returns the statistics after a step.

  Those of norm='static' stay: a pass of their own recomputes them, see
  `assemble.statistics`.
  """
  return old if task.model.norm == 'static' else new


def over_rows(mean: jax.Array, batch: Batch) -> Ratio:
  """Makes a Ratio of a batch's mean, so that all real rows count the same."""
  rows = batch.mask.sum()
  return Ratio(mean * rows, rows)


def dropout_key(key: jax.Array | None) -> jax.Array | None:
  """Derives a key for dropout, independent of the step's other draws."""
  return None if key is None else jax.random.fold_in(key, 0xd0)


def forward(task: Task, model: Variables, *views: Batch | None,
            key: jax.Array | None = None) -> tuple[list[Any], PyTree]:
  """Runs one training pass of the network over several views together.

  Args:
    task: has the network.
    model: its variables.
    *views: raw inputs with masks; None is skipped.
    key: of the step, for networks with dropout; None drops nothing.

  Returns:
    Logits float32[B, C] per view (None for None) and the new statistics.
  """
  real = [view for view in views if view is not None]
  inputs = jnp.concatenate([view.inputs for view in real])
  mask = jnp.concatenate([view.mask for view in real])
  logits, stats = task.apply_train(model, inputs, mask, dropout_key(key))
  parts = iter(parted(logits, real))
  return [None if view is None else next(parts) for view in views], stats


def forward_apart(task: Task, model: Variables, *views: Batch,
                  key: jax.Array | None = None
                  ) -> tuple[list[jax.Array], PyTree]:
  """Runs `forward` with each view as a batch of its own, in order.

  With batch statistics each view has its own, and the running ones move once
  for each. Without them this is one pass.
  """
  if not is_coupled(task):
    return forward(task, model, *views, key=key)
  found = []
  for view in views:
    (logits,), stats = forward(task, model, view, key=key)
    model = model._replace(stats=stats)
    found.append(logits)
  return found, model.stats


def parted(rows: jax.Array, views: Sequence[Batch]) -> list[jax.Array]:
  """Splits what the rows of joined views have, as logits, into each view's."""
  ends = [sum(v.mask.shape[0] for v in views[:i + 1])
          for i in range(len(views) - 1)]
  return jnp.split(rows, ends)


def forward_with_features(task: Task, model: Variables, view: Batch, *,
                          key: jax.Array | None = None
                          ) -> tuple[jax.Array, jax.Array, PyTree]:
  """Runs `forward` on one view: features float32[B, F], logits, statistics.

  Raises:
    ValueError: if the network gives none.
  """
  read = task.model.features_train
  if read is None:
    raise ValueError('the model has no features; a Model needs features and '
                     'features_train.')
  return read(model, task.preprocess(view.inputs), view.mask,
              dropout_key(key))


def features(task: Task, model: Variables, view: Batch) -> jax.Array:
  """Computes features float32[B, F] in prediction mode, without gradient."""
  assert task.model.features is not None
  return jax.lax.stop_gradient(
      task.model.features(model, task.preprocess(view.inputs)))


def forward_with_targets(task: Task, model: Variables, targets: Batch,
                         *views: Batch | None, key: jax.Array | None = None
                         ) -> tuple[jax.Array, list[Any], PyTree]:
  """Runs `forward` with one more view, whose logits are only a target.

  With batch statistics the target view is a part of the batch. Without them it
  has a pass of its own, which needs no gradient.

  Returns:
    The target's logits with gradients stopped, the views' logits, statistics.
  """
  if is_coupled(task):
    (target, *rest), stats = forward(task, model, targets, *views, key=key)
    return jax.lax.stop_gradient(target), rest, stats
  fixed = jax.lax.stop_gradient(model)
  (target,), _ = forward(task, fixed, targets)
  rest, stats = forward(task, model, *views, key=key)
  return jax.lax.stop_gradient(target), rest, stats


def joined(batches: Sequence[Batch]) -> Batch:
  """Concatenates batches; their rows' places in tables are dropped."""
  return Batch(jnp.concatenate([b.inputs for b in batches]),
               jnp.concatenate([b.labels for b in batches]),
               jnp.concatenate([b.mask for b in batches]))


class Views(NamedTuple):
  """The views of a step's batch."""

  weak: Batch
  labeled: Batch | None  # None where the step sees no labeled rows.
  strong: Batch


def weakly(task: Task, batch: _Rows, key: jax.Array) -> _Rows:
  """Returns the batch's weak view; None for None."""
  if batch is None:
    return batch
  return batch._replace(inputs=task.weak(key, batch.inputs))


def labeled_view(task: Task, batch: _Rows, key: jax.Array) -> _Rows:
  """Returns the labeled rows as the loss sees them; None for None."""
  if batch is None or task.labeled_view is None:
    return weakly(task, batch, key)
  return batch._replace(inputs=task.labeled_view(key, batch.inputs))


def on_labels(task: Task, model: Variables, batch: Batch, key: jax.Array
              ) -> tuple[jax.Array, PyTree]:
  """Computes the cross entropy of labeled rows, as the loss sees them.

  Args:
    task: has the network and the labeled view.
    model: its variables.
    batch: labeled rows.
    key: draws the view and dropout.

  Returns:
    float32[], and the statistics after the batch.
  """
  (logits,), stats = forward(task, model, labeled_view(task, batch, key),
                             key=key)
  return losses.cross_entropy(logits, batch.labels, batch.mask)[0], stats


def views(task: Task, batch: Pair, key: jax.Array) -> Views:
  """Returns the weak, the labeled and the strong view of a batch."""
  keys = jax.random.split(key, 3)
  assert batch.unlabeled is not None
  return Views(weakly(task, batch.unlabeled, keys[0]),
               labeled_view(task, batch.labeled, keys[1]),
               strongly(task, batch.unlabeled, keys[2]))


def forward_views(task: Task, model: Variables, batch: Pair, key: jax.Array
                  ) -> tuple[jax.Array, list[Any], PyTree]:
  """Runs `forward_with_targets` on a batch; the weak view is the target."""
  return forward_with_targets(task, model, *views(task, batch, key), key=key)


def adding_statistics(task: Task, model: Variables) -> Step:
  """Makes a step that adds up what its batches change in the statistics."""
  def step(sums, batch, key):
    del key
    _, stats = forward(
        task, model, *(rows for rows in batch[:2] if rows is not None))
    return tree.add(sums, tree.subtract(stats, model.stats)), {}
  return step


def strongly(task: Task, batch: Batch, key: jax.Array) -> Batch:
  """Returns the batch's strong view."""
  return batch._replace(inputs=task.strong(key, batch.inputs))


def blendable(task: Task, model: Variables, batch: Batch) -> Batch:
  """Returns the rows in a form that can be averaged: pixels or word vectors.

  Args:
    task: has the network.
    model: embeds token ids.
    batch: raw rows.

  Returns:
    Images as they are; word vectors float32[B, T, E] if the network embeds.

  Raises:
    ValueError: for token ids that the network does not embed.
  """
  ready, embed = task.preprocess(batch.inputs), task.model.embed
  is_ids = not jnp.issubdtype(ready.dtype, jnp.floating)
  if embed is None and is_ids:
    raise ValueError(f'Inputs of type {ready.dtype} cannot be blended: the '
                     'model has no vectors for them (Model.embed is None).')
  if embed is None:
    return batch
  return batch._replace(inputs=embed(model, ready) if is_ids else ready)


def of_blends(task: Task) -> Task:
  """Returns the task for blended rows: word vectors skip preprocessing."""
  if task.model.embed is None:
    return task
  return dataclasses.replace(task, preprocess=lambda x: x)
