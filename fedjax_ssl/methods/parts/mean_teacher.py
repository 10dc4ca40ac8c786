"""One kind of rows at a time, and mean teachers that stay on the client.

For federations in which only some clients hold labels. RSCFed, FedIRM,
Fed-Consist and CBAFed share a step that spends no time on a kind of rows
(labeled or unlabeled) that the client does not have. RSCFed and FedIRM also
have a teacher, which stays on the client, as its optimizer does.

A loss here is for rows of one kind. It is `(model, teacher, batch, key) ->
(loss, Aux)`, the form of `core.local_training.LossFn` with the client's mean
teacher as `given`. Its metrics are `Ratio`s.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import optax

from fedjax_ssl import aggregation
from fedjax_ssl.core import local_training, tree
from fedjax_ssl.core.local_training import Aux, LossFn
from fedjax_ssl.core.types import (
  Array,
  Batch,
  Client,
  Metrics,
  Number,
  PyTree,
  Task,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import assemble, labeled_clients, network


class Memory(NamedTuple):
  """What a client keeps from round to round, and from group to group."""

  teacher: Variables | None  # Not used while `steps` is 0.
  opt_state: PyTree
  steps: jax.Array  # int32[], steps on unlabeled rows so far.


class Learner(NamedTuple):
  """What a local step carries."""

  model: Variables
  teacher: Variables | None  # None where the method has no teachers.
  opt_state: PyTree
  steps: jax.Array  # int32[], steps on unlabeled rows so far.


def teacher_decay(steps: Number, *, max_decay: float = 0.999) -> jax.Array:
  r"""Computes a mean teacher's decay, :math:`\min(1 - 1 / (it + 1), \alpha)`.

  Args:
    steps: it, steps that the client made before; at 0 the teacher becomes a
      copy of the student.
    max_decay: alpha, the decay in the long run; 0 keeps teacher and student
      equal.

  Returns:
    float32[].

  References:
    Tarvainen and Valpola, Mean teachers, https://arxiv.org/abs/1703.01780.
  """
  return jnp.minimum(1 - 1 / (jnp.asarray(steps, jnp.float32) + 1), max_decay)


def supervised(task: Task) -> LossFn:
  """Makes the cross entropy of the labeled view."""
  def labeled_loss(model, teacher, batch, key):
    del teacher
    loss, stats = network.on_labels(task, model, batch, key)
    return loss, Aux(stats, {'labeled_loss': network.over_rows(loss, batch)})
  return labeled_loss


def _part(present: Array, loss_fn: Callable[[Variables], Any],
          model: Variables) -> tuple[jax.Array, PyTree, PyTree, Metrics]:
  """Computes loss, gradients, statistics and metrics of one kind of rows.

  If there are no such rows they are 0, but for the model's own statistics.
  """
  def run(model):
    def of(params):
      return loss_fn(model._replace(params=params))
    (loss, aux), grads = jax.value_and_grad(of, has_aux=True)(model.params)
    return loss, grads, aux.stats, aux.metrics

  shape = jax.eval_shape(run, model)
  def skip(model):
    loss, grads, _, metrics = tree.zeros_like(shape)
    return loss, grads, model.stats, metrics
  return lax.cond(present, run, skip, model)


def step(task: Task, labeled_loss: LossFn, unlabeled_loss: LossFn,
         optimizer: optax.GradientTransformation, *, decay: float = 0.999,
         clip_norm: float = float('inf'), labeled_rate: Number = 1.0,
         unlabeled_rate: Number = 1.0, teacher_stats: str = 'first',
         labelings: int = 1, labeled_views: int = 1
         ) -> local_training.Step:
  """Makes an optimizer step on the kinds of rows that the batch holds.

  Labeled and unlabeled rows go through the network separately; the gradients
  of a client with both are added. A kind that the client does not have costs
  no time where clients are mapped one by one.

  Args:
    task: its `model.norm` 'static' freezes the statistics.
    labeled_loss: see the module's docstring.
    unlabeled_loss: the same.
    optimizer: of both kinds.
    decay: see `teacher_decay`; the teacher moves after each step on unlabeled
      rows.
    clip_norm: gradients are scaled down to this global norm; inf is off.
    labeled_rate: factor on the step of a client with labels.
    unlabeled_rate: factor on the step of a client without.
    teacher_stats: normalization statistics of the teacher: 'first', those it
      was made with, or 'student', those of the student after each step.
    labelings: forward passes of an unlabeled row that only label it; like the
      next they are counted in the metrics.
    labeled_views: passes of a labeled row that train.

  Returns:
    (learner, pair, key) -> (learner, metrics), metrics with `train_loss`.
  """
  def one(learner: Learner, batch: batching.Pair, key: jax.Array
          ) -> tuple[Learner, Metrics]:
    known, other = _real(batch.labeled), _real(batch.unlabeled)
    keys = jax.random.split(key)
    model = learner.model
    loss, grads, stats, metrics = _part(
        known, lambda m: labeled_loss(
            m, learner.teacher, batch.labeled, keys[0]), model)
    more, grads_u, stats, metrics_u = _part(
        other, lambda m: unlabeled_loss(
            m, learner.teacher, batch.unlabeled, keys[1]),
        model._replace(stats=stats))
    params, opt_state = local_training.descend(
        optimizer, local_training.clip(tree.add(grads, grads_u), clip_norm),
        learner.opt_state, model.params,
        jnp.where(known, labeled_rate, unlabeled_rate))
    student = Variables(params, network.next_stats(task, model.stats, stats))
    teacher = learner.teacher
    if teacher is not None:
      teacher = tree.where(other, _taught(
          teacher, student, teacher_decay(learner.steps, max_decay=decay),
          teacher_stats), teacher)
    return Learner(
        student, teacher, opt_state, learner.steps + other.astype(jnp.int32)
    ), {'train_loss': loss + more, **batching.passes(
        batch, labelings, labeled_views=labeled_views),
        **metrics, **metrics_u}
  return one


def _taught(teacher: Variables, student: Variables, decay: jax.Array,
            stats: str) -> Variables:
  """Moves the teacher after a step; `stats` is `teacher_stats` of `step`."""
  params = aggregation.ema(teacher.params, student.params, decay)
  return Variables(params, student.stats if stats == 'student'
                   else teacher.stats)


def _real(batch: Batch | None) -> jax.Array:
  assert batch is not None  # Both streams are asked for.
  return batch.mask.sum() > 0


def remember(task: Task, model: Variables, num_clients: int) -> Memory:
  """Makes the memories [N, ...] of clients that have not trained yet."""
  optimizer = task.optimizer(jnp.int32(0))
  return tree.repeat(
      Memory(model, optimizer.init(model.params), jnp.int32(0)), num_clients)


def train(task: Task, one: local_training.Step, model: Variables,
          client: Client, key: jax.Array) -> tuple[Variables, PyTree, Metrics]:
  """Trains a client for its local epochs from `model`, with its memory.

  A client that has not trained on unlabeled rows yet takes `model` as its
  teacher. A client without `Memory` has no teacher and a fresh optimizer.

  Returns:
    The trained model, the client's next memory (the old one if it has no
    rows), and the metrics, with `labeled_share`, 1 for a client with labels.
  """
  order_key, step_key = jax.random.split(key)
  memory = client.memory
  if isinstance(memory, Memory):
    teacher = tree.where(memory.steps > 0, memory.teacher, model)
    learner = Learner(model, teacher, memory.opt_state, memory.steps)
  else:
    optimizer = task.optimizer(client.round)
    learner = Learner(model, None, optimizer.init(model.params), jnp.int32(0))
  made = batching.batches(task, client.train, client.shard, order_key, 'both',
                          client.round)
  learner, metrics = local_training.train(one, learner, made, step_key)
  if isinstance(memory, Memory):
    kept = Memory(learner.teacher, learner.opt_state, learner.steps)
    memory = tree.where(made.num_steps > 0, kept, memory)
  metrics['labeled_share'] = labeled_clients.has_labels(
      client.shard).astype(jnp.float32)
  metrics.update(labeled_clients.processed(task, made, client.shard))
  return learner.model, memory, metrics


def teacher_labels(task: Task) -> Callable[..., Any]:
  """Makes a `pseudo_label` by a client's teacher.

  A client that has no teacher yet uses the server's model.
  """
  def pseudo_label(record, memory: Memory, inputs):
    model = tree.where(memory.steps > 0, memory.teacher, record.model)
    return assemble.confident_labels(task, 0.0)(assemble.Server(model),
                                                 memory, inputs)
  return pseudo_label
