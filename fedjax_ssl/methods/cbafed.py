r"""CBAFed: labels kept for a round, with lower thresholds for rare classes.

Li, Li and Wang, Class Balanced Adaptive Pseudo Labeling for Federated
Semi-Supervised Learning, CVPR 2023. What follows is the authors' code,
minglllli/CBAFed; their paper was not at hand.

The server keeps how many rows of each class the clients of the last round
learnt from, labeled and pseudo-labeled. Let :math:`q_c` be the share of class c
times C / 10, which is 0.1 for all classes if they are equal. The threshold of a
class is

  :math:`t_c = \min(q_c + b - std(q), t_{max})`,

with the unbiased deviation over the classes. A client without labels predicts
a weak view of each of its rows once, by the received model and its running
statistics. If the confidence in its likeliest class c is above :math:`t_c`, a
row keeps that label. Else it keeps its second class, at any confidence, if that
class is rare: :math:`q_c < r`. The client passes once over the rows that have
kept a label, in the same views.

Two residual connections slow the models down. Within a round, after 6, 11, 16,
... epochs, a client with labels replaces its model by 4/5 of the recorded one
plus 1/5 of its own, and records the result; the first record is the model after
its first epoch. The server does so after 6, 11, ... rounds of all clients, with
halves; its first record is the model at the end of the warm-up.

A client counts by the rows that it learnt from. These include rows with second
classes, as the code returns the sum of its histogram, which includes them. The
code divides by zero where no row is sure; here a client then counts by its rows
with second classes, and sits out if it keeps nothing.

The authors first train the client with labels alone for 501 epochs, in one go;
here this is a share of the rounds, with as many epochs each as other rounds.
Their residual chain goes through all these epochs, here it begins anew in each
round, and so holds the model back less.
Without a warm-up the server's first record is its model after the first round,
not a random one. A last batch of one row counts here and is skipped there. A
client with both kinds of rows, which the authors do not have, trains as one
with labels, with kept rows in each step.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl import aggregation, losses
from fedjax_ssl.core import (
  client_weights,
  knobs,
  local_training,
  tree,
)
from fedjax_ssl.core.local_training import Aux, LossFn, Step
from fedjax_ssl.core.types import (
  Array,
  Batch,
  Client,
  Context,
  Examples,
  Federation,
  Method,
  Metrics,
  PyTree,
  Shard,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import (
  assemble,
  labeled_clients,
  labeling,
  mean_teacher,
  network,
)


class Server(NamedTuple):
  """The server's record; clients receive it without the last field."""

  model: Variables
  shares: jax.Array  # float32[C], of the classes in the last round's rows.
  record: Any  # The model that the next residual connection goes back to.


class _Settings(NamedTuple):
  """The knobs of `cbafed`, resolved."""

  base: float
  max_threshold: float
  rare: float
  passes: int
  interval: int
  local_residual: float
  server_residual: float
  unlabeled_rate: float
  clip_norm: float
  labeled_client_weight: float
  keep_momentum: bool
  warm: int  # Rounds.


class _Learner(NamedTuple):
  """What a step of a client with residual connections carries."""

  own: mean_teacher.Learner
  record: Variables
  steps: jax.Array  # int32[]


def levels(shares: Array) -> jax.Array:
  """Computes q float32[C] of the shares float32[C]; 0.1 for equal classes."""
  return jnp.asarray(shares) * jnp.shape(shares)[0] / 10


def thresholds(shares: Array, *, base: float = 0.84, max_threshold: float = 0.95
         ) -> jax.Array:
  """Computes the threshold of each class, t; see the module's docstring.

  Args:
    shares: float32[C], of sum 1.
    base: b.
    max_threshold: no class has a higher one.

  Returns:
    float32[C].
  """
  q = levels(shares)
  return jnp.minimum(q + base - jnp.std(q, ddof=1), max_threshold)


def kept_labels(probabilities: Array, shares: Array, *, base: float = 0.84,
                max_threshold: float = 0.95, rare: float = 0.03
                ) -> tuple[jax.Array, jax.Array]:
  """Labels sure rows by their likeliest class, others by a rare second class.

  Args:
    probabilities: float[B, C].
    shares: float32[C], of sum 1.
    base: see `thresholds`.
    max_threshold: the same.
    rare: level below which a class may be a second choice; 0 is none.

  Returns:
    int32[B] classes, and bool[B], which rows are kept.
  """
  p = jnp.asarray(probabilities)
  first = p.argmax(-1)
  sure = p.max(-1) > thresholds(
      shares, base=base, max_threshold=max_threshold)[first]
  is_first = jnp.arange(p.shape[-1]) == first[:, None]
  second = jnp.where(is_first, -1, p).argmax(-1)
  helps = levels(shares)[second] < rare
  return jnp.where(sure, first, second).astype(jnp.int32), sure | helps


@knobs.checked(
    base=knobs.Bound(-1, 1), rare=knobs.Bound(cases=(
        knobs.at(0, 'no row keeps its second class'),)),
    interval=knobs.Bound(1, 2**31 - 1, whole=True),
    local_residual=knobs.Bound(0, 1, below=True, cases=(
        knobs.at(0, 'clients have no residual connection'),)),
    server_residual=knobs.Bound(0, 1, below=True, cases=(
        knobs.at(0, 'the server has no residual connection'),)))
def cbafed(task: Task, *, base: float = 0.84, max_threshold: float = 0.95,
           rare: float = 0.03, passes: int = 1, interval: int = 5,
           local_residual: float = 0.8, server_residual: float = 0.5,
           unlabeled_rate: float = 2 / 3, clip_norm: float = 5.0,
           labeled_client_weight: float = 1.0, keep_momentum: bool = True,
           warmup: float = 0.083) -> Method:
  """Keeps confident labels for a round, by thresholds that follow class shares.

  Meant for clients with all labels beside clients with none, all of them in
  every round; if only some take part, the shares are those of these. Clients
  with labels train for the task's local epochs, the authors' for 11.

  Args:
    task: the static choices; its learning rate is that of labeled clients.
    base: b of the threshold q_c + b - std(q), with q_c the share of class c
      times C / 10.
    max_threshold: largest one; the authors' is 0.9 for SVHN and skin lesions.
    rare: share of a class, times C / 10, below which rows may keep it as their
      second class; 0 is none.
    passes: epochs over the rows that a client without labels has kept; not
      beside --local_steps.
    interval: epochs, and rounds, between two residual connections.
    local_residual: share of the earlier model in a client's; 0 is off.
    server_residual: the same of the server; 0 is off.
    unlabeled_rate: learning rate of clients without labels over that of the
      others; the authors' are 0.02 and 0.03.
    clip_norm: gradients are scaled down to this norm; inf is off.
    labeled_client_weight: factor on the weight of a client with labels, the
      authors' 10 for skin lesions.
    keep_momentum: whether clients keep their optimizer's state between rounds,
      which takes as much memory as a model each; else it starts anew.
    warmup: share of the run, rounded up to whole rounds, in which only clients
      with labels train, on their labels. The default is the authors' 501 epochs
      in rounds of 11.

  Returns:
    The method.

  Raises:
    ValueError: for labels at the server, or a number out of range.
  """
  labeled_clients.check_placement(task)
  labeled_clients.check_passes(task, passes)
  s = _Settings(base, max_threshold, rare, passes, interval, local_residual,
                server_residual, unlabeled_rate, clip_norm,
                labeled_client_weight, keep_momentum,
                labeled_clients.warmup_rounds(task, warmup))

  def pseudo_label(record: Server, memory: Any, inputs: Array):
    del memory
    labels, sure = _labels(
        s, jax.nn.softmax(task.apply(record.model, inputs)), record.shares)
    return labels, sure.astype(jnp.float32)

  return assemble.assemble(
      task, init=functools.partial(_init, task, s),
      client_update=functools.partial(_client_update, task, s),
      aggregate=_finish(s), sample=labeled_clients.cohorts(task, 1, warmup),
      broadcast=lambda server, client_id, group: server._replace(record=()),
      work=lambda shard: labeled_clients.num_steps(task, shard, passes),
      splits_key=False, pseudo_label=pseudo_label)


def _labels(s: _Settings, probabilities: Array, shares: Array
            ) -> tuple[jax.Array, jax.Array]:
  return kept_labels(probabilities, shares, base=s.base,
                     max_threshold=s.max_threshold, rare=s.rare)


def _init(task: Task, s: _Settings, key: jax.Array, federation: Federation
          ) -> tuple[Server, PyTree]:
  model = assemble.new_model(task, key)
  counts = jax.vmap(functools.partial(
      _labels_held, task, federation.train))(federation.clients).sum(0)
  shares = jnp.where(counts.sum() > 0, counts / jnp.maximum(counts.sum(), 1),
                     1 / task.num_classes)
  memory: PyTree = ()
  if s.keep_momentum:
    memory = tree.repeat(task.optimizer(jnp.int32(0)).init(model.params),
                         federation.num_clients)
  return Server(model, shares, model if s.server_residual else ()), memory


def _labels_held(task: Task, examples: Examples, shard: Shard) -> jax.Array:
  """Counts a client's labeled rows of each class, float32[C]."""
  real = jnp.arange(shard.labeled.shape[-1]) < shard.num_labeled
  return _histogram(task, jnp.take(examples.labels, shard.labeled), real)


def _histogram(task: Task, labels: Array, counts: Array) -> jax.Array:
  hot = jax.nn.one_hot(labels, task.num_classes)
  return jnp.where(jnp.asarray(counts)[:, None], hot, 0).sum(0)


def _own_view(task: Task, key: jax.Array, rows: Batch, places: Array) -> Batch:
  """Makes the weak view that each row of a client has in the whole round."""
  keys = jax.vmap(functools.partial(jax.random.fold_in, key))(places)
  return rows._replace(inputs=jax.vmap(
      lambda one, x: task.weak(one, x[None])[0])(keys, rows.inputs))


def _client_update(task: Task, s: _Settings, payload: Server, client: Client,
                   key: jax.Array) -> Update:
  keys = jax.random.split(key, 4)
  view = functools.partial(_own_view, task, keys[0])
  table, labeled = labeling.probabilities(
      task, payload.model, client, keys[1],
      view=lambda rows, unused: view(rows, rows.slots))
  labels, sure = _labels(s, table, payload.shares)
  real = jnp.arange(sure.shape[0]) < client.shard.num_unlabeled
  sure &= real & (client.round >= s.warm)
  kept = labeling.kept(dataclasses.replace(task, local_epochs=1), client,
                       labels, sure, keys[2])
  made = kept.batches._replace(
      num_steps=labeled_clients.num_steps(
          task, client.shard, s.passes, kept.shard))

  def of_kept(model, teacher, batch, key):
    del teacher
    rows = view(batch, kept.order[batch.slots])
    (logits,), stats = network.forward(task, model, rows, key=key)
    loss = losses.cross_entropy(logits, rows.labels, rows.mask)[0]
    return loss, Aux(stats, {'unlabeled_loss': network.over_rows(loss, rows)})

  learner, metrics = _trained(task, s, of_kept, payload.model, client,
                              kept.shard, made, keys[3])
  counts = (_labels_held(task, client.train, client.shard)
            + _histogram(task, labels, sure))
  weight = counts.sum() * jnp.where(
      labeled_clients.has_labels(client.shard), s.labeled_client_weight, 1)
  metrics.update(labeled_clients.processed(task, made, kept.shard))
  metrics = labeling.metrics(client, kept.shard.num_unlabeled, metrics, labeled)
  return Update(tree.subtract(learner.model, payload.model), weight,
                learner.opt_state if s.keep_momentum else (), metrics,
                counts=client_weights.unweighted(counts, weight))


def _trained(task: Task, s: _Settings, of_kept: LossFn, model: Variables,
             client: Client, kept: Shard, made: local_training.Batches,
             key: jax.Array) -> tuple[mean_teacher.Learner, Metrics]:
  """Trains on labels and kept rows, with residual connections."""
  optimizer = task.optimizer(client.round)
  learner = mean_teacher.Learner(
      model, None, client.memory if s.keep_momentum else optimizer.init(
          model.params), jnp.int32(0))
  step = mean_teacher.step(
      task, mean_teacher.supervised(task), of_kept, optimizer,
      clip_norm=s.clip_norm, unlabeled_rate=s.unlabeled_rate, labelings=0)
  if not s.local_residual:
    return local_training.train(step, learner, made, key)
  epoch = batching.num_steps(task.one_pass(), kept)
  after, metrics = local_training.train(
      _connected(s, step, epoch, labeled_clients.has_labels(client.shard)),
      _Learner(learner, model, jnp.int32(0)), made, key)
  return after.own, metrics


def _connected(s: _Settings, step: Step, epoch: jax.Array, known: jax.Array
               ) -> Step:
  """Adds the residual connection of a client with labels to a step.

  Args:
    s: the settings.
    step: of `mean_teacher.Learner`.
    epoch: int32[], steps of one epoch.
    known: bool[], whether the client has labels.
  """
  def one(learner: _Learner, batch: Any, key: jax.Array
          ) -> tuple[_Learner, Metrics]:
    own, metrics = step(learner.own, batch, key)
    steps = learner.steps + 1
    ended = steps // jnp.maximum(epoch, 1) - 1  # Epochs after the first.
    due = known & (steps % jnp.maximum(epoch, 1) == 0) & (
        ended % s.interval == 0)
    mixed = aggregation.ema(learner.record, own.model, s.local_residual)
    model = tree.where(due & (ended > 0), mixed, own.model)
    record = tree.where(due, model, learner.record)
    return _Learner(own._replace(model=model), record, steps), metrics
  return one


def _finish(s: _Settings) -> Any:
  """Makes the aggregation: mean, class shares and residual connection."""
  @aggregation.linear
  def finish(server: Server, update: Any, cohort: Any, context: Context,
             key: Any) -> tuple[Server, Metrics]:
    del cohort, key
    model = assemble.added(server.model, update.mean)
    total = update.counts.sum()
    shares = jnp.where(total > 0, update.counts / jnp.where(
        total > 0, total, 1), server.shares)
    if not s.server_residual:
      return Server(model, shares, ()), {}
    after = context.round - s.warm  # Rounds since the first of all clients.
    due = (after > 0) & (after % s.interval == 0) & (total > 0)
    model = tree.where(due, aggregation.ema(
        server.record, model, s.server_residual), model)
    # The warm-up's last model or, without one, that of the first round.
    first = context.round == max(s.warm, 1) - 1
    return Server(model, shares, tree.where(
        due | first, model, server.record)), {}
  return finish
