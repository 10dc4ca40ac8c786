r"""Meta pseudo-labels with UDA: what FedDure's released code trains.

Each client has a teacher, which is sent, and a student. The student learns the
teacher's pseudo-labels. The teacher learns from labels, from its own confident
predictions (UDA), and from the student: the change of the student's labeled
loss is the weight of the teacher's cross entropy with its own hard predictions
for the strong view.

Pham et al., Meta Pseudo Labels, https://arxiv.org/abs/2003.10580; Bai et al.,
FedDure, https://arxiv.org/abs/2307.05358.
"""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl import losses
from fedjax_ssl.core import client_weights, local_training
from fedjax_ssl.core.types import (
  Array,
  Batch,
  Client,
  Metrics,
  PyTree,
  Shard,
  Task,
  Variables,
  WORK,
)
from fedjax_ssl.data import batching
from fedjax_ssl.data.batching import Pair
from fedjax_ssl.methods.parts import network

# Final weight of the consistency, and the steps over which it rises. It starts
# again in each round, which has far fewer steps.
_WEIGHT, _RAMP = 8.0, 20


class Learner(NamedTuple):
  """What a client's loop carries."""

  teacher: Variables
  student: PyTree  # Parameters.
  teacher_state: PyTree  # Of the optimizer.
  student_state: PyTree
  done: jax.Array  # int32[], steps done in the round, for the warm-up.


class Schedule(NamedTuple):
  """Steps of a round, and its warm-up.

  The defaults are those for CIFAR-10; CINIC-10 has 100, 10, 100 and 0.

  Attributes:
    fine_tune: supervised steps of the teacher that come first.
    main: steps of both that follow; 1 or more.
    warmup: steps until the learning rate has its full value.
    wait: the student's first steps, in which its rate is 0, so that the reward
      is 0 as well.
  """

  fine_tune: int = 5
  main: int = 5
  warmup: int = 10
  wait: int = 2


def factor(step: Array, schedule: Schedule, *, wait: int = 0) -> jax.Array:
  """Computes the factor on the learning rate: 0, a rise, half a cosine to 0.

  As in the authors' code, the rise ends at `warmup + wait`; the cosine spans
  the main steps that are left then, at least 1. After a long warm-up the factor
  therefore jumps between 1 and 0.

  Args:
    step: int32[], from 0.
    schedule: the steps.
    wait: steps of rate 0.

  Returns:
    float32[] in [0, 1].
  """
  end = schedule.warmup + wait
  rising = step / max(end, 1)
  wave = jnp.pi * (step - end) / max(schedule.main - end, 1)
  after = jnp.where(step < end, rising, 0.5 * (1 + jnp.cos(wave)))
  return jnp.where(step < wait, 0.0, after).astype(jnp.float32)


def num_steps(schedule: Schedule, shard: Shard) -> jax.Array:
  """Counts the steps of a client in a round, int32[]; 0 without rows."""
  rows = client_weights.rows_held(shard, 'both')
  steps = schedule.fine_tune + schedule.main
  return jnp.where(rows > 0, steps, 0).astype(jnp.int32)


def start(model: Variables, optimizer: optax.GradientTransformation
          ) -> Learner:
  """Starts teacher and student at the received model with fresh optimizers."""
  state = optimizer.init(model.params)
  return Learner(model, model.params, state, state, jnp.int32(0))


def fine_tune_step(
    task: Task, schedule: Schedule,
    optimizer: optax.GradientTransformation) -> local_training.Step:
  """Makes a supervised step of the teacher; batch statistics see all views."""
  def step(learner: Learner, batch: Pair, key: jax.Array):
    weak, labeled, strong = network.views(task, batch, key)
    assert labeled is not None

    def loss_of(params):
      _, (logits, _), stats = network.forward_with_targets(
          task, learner.teacher._replace(params=params), weak, labeled, strong,
          key=key)
      loss, _ = losses.cross_entropy(logits, labeled.labels, labeled.mask)
      return loss, stats

    grads, stats = jax.grad(loss_of, has_aux=True)(learner.teacher.params)
    params, state = local_training.descend(
        optimizer, grads, learner.teacher_state, learner.teacher.params,
        factor(learner.done, schedule), moves=labeled.mask.sum() > 0)
    return learner._replace(
        teacher=Variables(params, stats), teacher_state=state,
        done=learner.done + 1), batching.passes(
            batch, 2 * network.is_coupled(task), 0)
  return step


def _student_step(task: Task, schedule: Schedule,
                  optimizer: optax.GradientTransformation, learner: Learner,
                  labels: jax.Array, weak: Batch, labeled: Batch,
                  key: jax.Array) -> tuple[PyTree, PyTree, jax.Array]:
  """Trains the student on the teacher's `labels` of the rows `weak`.

  Returns its parameters, its optimizer's state, and float32[], by how much its
  labeled loss rose.
  """
  def run(params, rows):
    return task.apply_train(
        learner.teacher._replace(params=params), rows.inputs, rows.mask,
        jax.random.fold_in(key, 0xd1))[0]
  def known(params):
    return losses.cross_entropy(
        run(params, labeled), labeled.labels, labeled.mask)[0]
  grads = jax.grad(lambda params: losses.cross_entropy(
      run(params, weak), labels, weak.mask)[0])(learner.student)
  rate = factor(learner.done - schedule.fine_tune, schedule,
                wait=schedule.wait)
  params, state = local_training.descend(
      optimizer, grads, learner.student_state, learner.student, rate,
      moves=weak.mask.sum() > 0)
  return params, state, known(params) - known(learner.student)


def main_step(task: Task, schedule: Schedule,
              optimizer: optax.GradientTransformation, *,
              threshold: float = 0.6) -> local_training.Step:
  r"""Makes a step of both: the student's, then the teacher's.

  The teacher minimises :math:`L_s + \lambda L_{uda} + dot\, CE(\arg\max p, p)`,
  p its predictions for the strong view. :math:`dot` is the student's labeled
  loss after its step minus that before. So pseudo-labels that help the student
  push the teacher away from these predictions; the paper's d has the opposite
  sign.

  Args:
    task: has the network and the views.
    schedule: the steps and warm-up.
    optimizer: of both.
    threshold: confidence of the weak view from which on a row counts for the
      teacher; the student learns from all.

  Returns:
    (learner, batch, key) -> (learner, metrics).
  """
  def step(learner: Learner, batch: Pair, key: jax.Array
           ) -> tuple[Learner, Metrics]:
    weak, labeled, strong = network.views(task, batch, key)
    assert labeled is not None
    ramp = jnp.minimum((learner.done - schedule.fine_tune + 1) / _RAMP, 1)

    def loss_of(params):
      target, logits, stats = network.forward_with_targets(
          task, learner.teacher._replace(params=params), weak, labeled, strong,
          key=key)
      labeled_logits, strong_logits = logits
      labels, sure = losses.pseudo_label(target, threshold=threshold)
      student, state, dot = jax.lax.stop_gradient(_student_step(
          task, schedule, optimizer, learner, labels, weak, labeled, key))
      supervised = losses.cross_entropy(
          labeled_logits, labeled.labels, labeled.mask)[0]
      consistent = losses.cross_entropy(
          strong_logits, jax.nn.softmax(target), strong.mask * sure,
          total=strong.mask.sum())[0]
      own = losses.cross_entropy(
          strong_logits, strong_logits.argmax(-1), strong.mask)[0]
      n, m = labeled.mask.sum(), strong.mask.sum()
      metrics = {
          'forward_passes': 3 * n + 3 * m,
          'backward_passes': n + 2 * m,
          'reward': network.over_rows(-dot, labeled),
          'mask_rate': network.over_rows(
              losses.masked_mean(sure, strong.mask), strong),
          'labeled_loss': network.over_rows(supervised, labeled),
          'unlabeled_loss': network.over_rows(consistent, strong)}
      loss = supervised + _WEIGHT * ramp * consistent
      return loss + dot * own, (
          stats, student, state, {**metrics, 'train_loss': loss})

    grads, (stats, student, student_state, metrics) = jax.grad(
        loss_of, has_aux=True)(learner.teacher.params)
    params, state = local_training.descend(
        optimizer, grads, learner.teacher_state, learner.teacher.params,
        factor(learner.done, schedule))
    return Learner(Variables(params, stats), student, state, student_state,
                   learner.done + 1), metrics
  return step


def train(task: Task, schedule: Schedule, model: Variables, client: Client,
          key: jax.Array, *, threshold: float = 0.6
          ) -> tuple[Learner, Metrics]:
  """Does a client's round: supervised steps, then those of both networks.

  Args:
    task: the static choices; its batch sizes are used, but not its numbers of
      epochs and steps.
    schedule: the steps and warm-up.
    model: as received.
    client: has the rows.
    key: draws orders and views, anew for each of the two parts.
    threshold: see `main_step`.

  Returns:
    The learner after the round, and the metrics of the second part; rows and
    passes are those of both.
  """
  optimizer = task.optimizer(client.round)
  learner = start(model, optimizer)
  sums = dict.fromkeys(WORK, jnp.float32(0))
  metrics: Metrics = {}
  for part, make, steps in (
      (0, fine_tune_step(task, schedule, optimizer), schedule.fine_tune),
      (1, main_step(task, schedule, optimizer, threshold=threshold),
       schedule.main)):
    order_key, step_key = jax.random.split(jax.random.fold_in(key, part))
    made = batching.batches(task, client.train, client.shard, order_key,
                            round_=client.round)
    made = made._replace(
        num_steps=jnp.where(made.num_steps > 0, steps, 0).astype(jnp.int32))
    learner, metrics = local_training.train(make, learner, made, step_key)
    sums = {name: value + metrics[name] for name, value in sums.items()}
  return learner, {**metrics, **sums}
