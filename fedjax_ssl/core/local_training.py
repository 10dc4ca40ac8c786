"""Training on one client: a loop over its own batches."""
from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import optax

from fedjax_ssl.core import lanes, tree
from fedjax_ssl.core.types import (
  Array,
  COUNTED,
  MEASURABLE,
  Metrics,
  Number,
  PyTree,
  Ratio,
  Task,
  Variables,
)

_PROCESSED = 'rows_processed'


class Batches(NamedTuple):
  """A client's batches of one round, made as they are needed.

  num_steps: int32[], the client's own number of steps.
  width: rows of one step, padding included.
  start: () -> cursor.
  next: (cursor, step int32[]) -> (cursor, batch, real rows float32[]).
  """

  num_steps: jax.Array
  width: int
  start: Callable[[], PyTree]
  next: Callable[[PyTree, jax.Array], tuple[PyTree, Any, jax.Array]]


class Learner(NamedTuple):
  """What the usual local loop carries."""

  model: Variables
  opt_state: PyTree
  memory: PyTree = None  # The client's own, for losses that keep one.


class Given(NamedTuple):
  """What a loss may read besides the model in training; constants.

  Attributes:
    anchor: the model as the client received it.
    memory: what the loss returned as `Aux.memory` in the client's last step, of
      this round or an earlier one. Before its first step it is the client's row
      of what `remember` of `methods.parts.averaging.averaging` makes; None if
      the loss keeps nothing.
    received: what the server sent beside the model; None if the method sends
      nothing else.
  """

  anchor: Variables
  memory: PyTree = None
  received: PyTree = None


class Aux(NamedTuple):
  """What a loss returns besides its value.

  Attributes:
    stats: normalization statistics after the batch, as
      `methods.parts.network.forward` returns them.
    metrics: numbers by name, averaged over steps and clients; a `Ratio` is
      averaged over rows. `objective.total` makes the usual ones.
    memory: what the loss keeps for the client's next step and round, of the
      structure of `Given.memory`.
  """

  stats: PyTree
  metrics: Metrics
  memory: PyTree = None


# Every loss is (model Variables, given, batch, key) -> (loss float32[], Aux),
# and its gradient is taken in `model.params`. `given` is a `Given`, except from
# `gradient_step`, which passes the learner's memory.
LossFn = Callable[..., tuple[jax.Array, Aux]]
Step = Callable[[Any, Any, jax.Array], tuple[Any, Metrics]]


def start(model: Variables, optimizer: optax.GradientTransformation,
          memory: PyTree = None) -> Learner:
  """Returns a learner at `model` with a fresh optimizer state."""
  return Learner(model, optimizer.init(model.params), memory)


def clip(gradients: PyTree, clip_norm: float) -> PyTree:
  """Scales gradients down to a global norm of at most `clip_norm`; inf is off.

  What is not finite makes NaN, not zeros as in `privacy.clip`: a client that
  diverges must be seen, so that its update is refused. A factor below what
  float32 holds, 1.2e-38, is 0.
  """
  if clip_norm == float('inf'):
    return gradients
  norm = tree.global_norm(gradients)
  return tree.scale(gradients, clip_norm / jnp.maximum(norm, clip_norm))


def clipped(task: Task, clip_norm: float) -> Task:
  """Returns the task whose optimizer gets gradients of `clip`; inf is off."""
  if math.isinf(clip_norm):
    return task
  def optimizer(round_: Number) -> optax.GradientTransformation:
    return optax.chain(
        optax.stateless(lambda gradients, _: clip(gradients, clip_norm)),
        task.optimizer(round_))
  return dataclasses.replace(task, optimizer=optimizer)


def descend(optimizer: optax.GradientTransformation, grads: PyTree,
            opt_state: PyTree, params: PyTree, factor: Number | None = None,
            *, moves: jax.Array | None = None) -> tuple[PyTree, PyTree]:
  """Returns parameters and optimizer state after a step.

  Args:
    optimizer: makes the step.
    grads: of a loss, for `params`.
    opt_state: of the optimizer, before.
    params: before.
    factor: multiplies the step; None is 1.
    moves: bool[], whether there are rows to learn from. Without, parameters
      and optimizer rest; a gradient of 0 would leave weight decay and momentum
      at work. None always moves.
  """
  updates, after = optimizer.update(grads, opt_state, params)
  if factor is not None:
    updates = tree.scale(updates, factor)
  moved = optax.apply_updates(params, updates), after
  return moved if moves is None else tree.where(
      moves, moved, (params, opt_state))


def checked(loss_fn: LossFn) -> LossFn:
  """Makes a loss check what it returns, when it is traced.

  The loss raises ValueError if it does not return its value and an `Aux`, or if
  the value or a metric is not one real number.
  """
  def call(*args: Any) -> tuple[jax.Array, Aux]:
    found = loss_fn(*args)
    if not (isinstance(found, tuple) and len(found) == 2
            and hasattr(found[0], 'shape') and isinstance(found[1], tuple)
            and len(found[1]) == len(Aux._fields)
            and isinstance(found[1][1], Mapping)):
      shown = ', '.join(
          'an array' if hasattr(part, 'shape') else type(part).__name__
          for part in (found if isinstance(found, tuple) else (found,)))
      raise ValueError(f'its loss returns {shown}; allowed is '
                       '(loss, Aux(stats, metrics)).')
    for name, value in (('loss', found[0]), *(
        (f'metric {name!r}', value) for name, value in found[1][1].items())):
      for leaf in jax.tree.leaves(value):
        if jnp.shape(leaf):
          raise ValueError(f'its {name} has the shape {list(jnp.shape(leaf))}; '
                           'allowed is one number, as the mean over rows.')
        if not _is_real(leaf, whole=name != 'loss'):
          raise ValueError(f'its {name} is of type '
                           f'{getattr(leaf, "dtype", type(leaf).__name__)}; '
                           'allowed is a float.')
    return found
  return call


def _is_real(number: Any, *, whole: bool) -> bool:
  """Returns whether something is a real number, or a `whole` one or a bool."""
  try:
    kind = jnp.result_type(number)
  except TypeError:
    return False
  return jnp.issubdtype(kind, jnp.floating) or (
      whole and (kind == jnp.bool_ or jnp.issubdtype(kind, jnp.integer)))


def gradient_step(loss_fn: LossFn, optimizer: optax.GradientTransformation,
                  factor: Number | None = None) -> Step:
  """Makes a step of local training: one optimizer step on a loss.

  Args:
    loss_fn: see `LossFn`; it is given the learner's memory.
    optimizer: applied to `model.params`.
    factor: float32[] that multiplies its steps; None is 1.

  Returns:
    (learner, batch, key) -> (learner, metrics), metrics with `train_loss`.
  """
  loss_fn = checked(loss_fn)

  def step(learner, batch, key):
    def loss_of(params):
      return loss_fn(learner.model._replace(params=params), learner.memory,
                     batch, key)
    (loss, (stats, metrics, memory)), grads = jax.value_and_grad(
        loss_of, has_aux=True)(learner.model.params)
    params, opt_state = descend(optimizer, grads, learner.opt_state,
                                learner.model.params, factor)
    return (Learner(Variables(params, stats), opt_state, memory),
            {'train_loss': loss, **metrics})
  return step


def loop(first: Number, end: Number, body: Callable[[Array, Any], Any],
         carry: Any) -> Any:
  """Runs a client's local steps: a `lax.fori_loop` that lanes recognize."""
  with jax.named_scope(lanes.STEPS):
    return lax.fori_loop(first, end, body, carry)


def train(step: Step, learner: PyTree, batches: Batches, key: jax.Array
          ) -> tuple[PyTree, Metrics]:
  """Runs a client's own number of steps.

  The number of steps is a traced value. So a client that runs alone takes the
  time of its own steps. Under vmap a chunk takes as long as its longest client,
  and clients that are done keep their results. In lanes, a lane takes its next
  client as soon as its own has finished the last such loop.

  Args:
    step: (learner, batch, key) -> (learner, metrics).
    learner: any pytree.
    batches: the client's batches.
    key: split by step number.

  Returns:
    The learner and the metrics. Metrics are means over the steps, except for
    sums: each Ratio, `rows_used`, `rows_processed` (padding included), and the
    passes through the network, `COUNTED`. Unless the step reports these itself,
    a row counts as one pass forward and one backward, and all rows of a step's
    batch as processed.
  """
  def body(t, carry):
    learner, cursor, sums, used = carry
    cursor, batch, rows = batches.next(cursor, t)
    learner, metrics = step(learner, batch, jax.random.fold_in(key, t))
    return learner, cursor, tree.add(sums, metrics), used + rows

  cursor = batches.start()
  _, batch, _ = jax.eval_shape(batches.next, cursor, jnp.int32(0))
  _, shapes = jax.eval_shape(step, learner, batch, key)
  learner, _, sums, used = loop(
      0, batches.num_steps, body,
      (learner, cursor, tree.zeros_like(shapes), jnp.float32(0)))
  steps = batches.num_steps.astype(jnp.float32)
  metrics = {name: value if isinstance(value, Ratio)
             or name in (*COUNTED, _PROCESSED)
             else value / jnp.maximum(steps, 1)
             for name, value in sums.items()}
  return learner, {**dict.fromkeys(COUNTED, used),
                   _PROCESSED: steps * batches.width, **metrics,
                   'rows_used': used}


def keep_if_finite(after: PyTree, before: PyTree, metrics: Metrics
                   ) -> tuple[PyTree, Metrics]:
  """Keeps what a server has trained on its own labels, if it is finite.

  Args:
    after: what it has trained.
    before: what it had, of the same structure.
    metrics: of `train`.

  Returns:
    `after`, or `before` if a number of `after` is not finite; and
    `server_metrics`.
  """
  good = tree.all_finite(after)
  return tree.where(good, after, before), server_metrics(metrics, good)


def server_metrics(metrics: Metrics, good: jax.Array) -> Metrics:
  """Makes the metrics of a server that has trained on its own labels.

  Args:
    metrics: of `train`.
    good: bool[], whether the trained model is taken.

  Returns:
    `server_loss`, a Ratio of `rows` 1 if the server had rows to train on, its
    model is taken and the loss is finite, else 0 for nothing measured; and
    `num_rejected`, 1 if the model is not taken.
  """
  loss = metrics['train_loss']
  counts = good & (metrics['rows_used'] > 0) & (jnp.abs(loss) <= MEASURABLE)
  return {'server_loss': Ratio(jnp.where(counts, loss, 0.0),
                               counts.astype(jnp.float32)),
          'num_rejected': 1.0 - good.astype(jnp.float32)}


def resumed(task: Task, step: Callable[[optax.GradientTransformation], Step],
            model: Variables, opt_state: PyTree, batches: Batches,
            round_: Array, key: jax.Array, *, memory: PyTree = None
            ) -> tuple[Learner, Metrics]:
  """Trains with the optimizer's state of the last round, if it is kept.

  Args:
    task: makes the optimizer.
    step: optimizer -> a step of `train`.
    model: the start.
    opt_state: the optimizer's state; () is a fresh one.
    batches: to train on.
    round_: int32[], for the learning rate.
    key: of the steps.
    memory: what the loss keeps from step to step, at its start.

  Returns:
    The learner, and the metrics of `train`.
  """
  optimizer = task.optimizer(round_)
  learner = start(model, optimizer, memory)
  if jax.tree.leaves(opt_state):
    learner = learner._replace(opt_state=opt_state)
  return train(step(optimizer), learner, batches, key)
