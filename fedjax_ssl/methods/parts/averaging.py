"""The shape most methods share: train locally, average the updates.

A loss for `averaging` is `loss_fn(model, given, batch, key) -> (loss, Aux)`,
the form of `core.local_training.LossFn`. `given.anchor` is the model that the
client received, `given.memory` what the loss has kept on this client, and
`given.received` what the server sent beside the model. `batch` is a
`data.batching.Pair`; a stream that is not used is None. The labels of its
unlabeled rows are -1: a method cannot read them.
"""
from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import losses
from fedjax_ssl.core import (
    checks,
    client_weights,
    knobs,
    local_training,
    tree,
)
from fedjax_ssl.core.local_training import Aux, Given, LossFn
from fedjax_ssl.core.types import (
  Array,
  Client,
  Context,
  Examples,
  Federation,
  Method,
  Metrics,
  PyTree,
  Shard,
  STREAMS,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import assemble, network, plateau

# (shard, what the loss has kept, metrics) -> float32[], not below 0.
Weighting = Callable[[Shard, PyTree, Metrics], Array]


def supervised(task: Task) -> LossFn:
  """Makes the cross entropy on the weakly augmented labeled rows."""
  def loss_fn(model, given, batch, key):
    del given
    loss, stats = network.on_labels(task, model, batch.labeled, key)
    return loss, Aux(stats, {})
  return loss_fn


def keeping_stats(task: Task, loss_fn: LossFn) -> LossFn:
  """Leaves the statistics of norm='static' as they are.

  Those are recomputed by a pass of their own, `assemble.statistics`.
  """
  def wrapped(model, given, batch, key):
    loss, aux = loss_fn(model, given, batch, key)
    return loss, aux._replace(stats=network.next_stats(
        task, model.stats, aux.stats))
  return wrapped


def with_proximal_term(task: Task, loss_fn: LossFn, server: str, mu: float
                       ) -> LossFn:
  """Adds FedProx's term if that is the server; keeps statistics as above."""
  def wrapped(model, given, batch, key):
    loss, aux = loss_fn(model, given, batch, key)
    return loss + losses.proximal(
        model.params, given.anchor.params, mu=mu), aux
  return keeping_stats(task, wrapped if server == 'fedprox' else loss_fn)


def train_locally(task: Task, loss_fn: LossFn, model: Variables,
                  examples: Examples, shard: Shard, round_: Array,
                  key: jax.Array, streams: str, memory: PyTree = None, *,
                  factor: Array | None = None, received: PyTree = None
                  ) -> tuple[Variables, PyTree, Metrics]:
  """Trains a model for the local epochs of a client, or of the server.

  Args:
    task: the static choices.
    loss_fn: see the module's docstring.
    model: the start, which the loss also gets as `given.anchor`.
    examples: the data that the shard indexes.
    shard: the rows to train on.
    round_: int32[], for the learning rate and the loss's progress.
    key: draws the order of the rows and the views.
    streams: 'both', 'labeled' or 'unlabeled'.
    memory: what the loss has kept so far; None if it keeps nothing.
    factor: float32[] that multiplies the optimizer's steps; None is 1.
    received: what the loss gets as `given.received`.

  Returns:
    The trained model, what the loss has kept after the last step, and the
    metrics of `core.local_training.train`.
  """
  order_key, step_key = jax.random.split(key)
  optimizer = task.optimizer(round_)

  def loss(now, memory, batch, key):
    return loss_fn(now, Given(model, memory, received), batch, key)

  one = local_training.gradient_step(loss, optimizer, factor)

  def step(learner, batch, key):
    after, metrics = one(learner, batch, key)
    if fault := tree.unlike(after.memory, learner.memory):
      raise ValueError(f'its loss {fault} as Aux.memory; it must keep the form '
                       'of Given.memory.')
    return after, metrics

  learner, metrics = local_training.train(
      step,
      local_training.start(model, optimizer, memory),
      batching.batches(task, examples, shard, order_key, streams, round_),
      step_key)
  return learner.model, learner.memory, metrics


def train_on_server_labels(
    task: Task, loss_fn: LossFn, model: Variables, context: Context,
    key: jax.Array, *, first: PyTree = None, last: PyTree = None,
    factor: Array | None = None) -> tuple[Variables, PyTree, Metrics]:
  """Trains the server's model on the labels that the server holds.

  Args:
    task: the static choices.
    loss_fn: see the module's docstring.
    model: the start.
    context: the round, and the server's rows.
    key: draws the order of the rows and the views.
    first: what the loss gets as `given.memory` in the first step.
    last: what it had kept after the last round.
    factor: float32[] that multiplies the optimizer's steps; None is 1.

  Returns:
    The trained model and what the loss has kept, or `model` and `last` if
    these are not finite; and the metrics of the server.
  """
  trained, kept, metrics = train_locally(
      task, loss_fn, model, context.train, context.shard, context.round, key,
      'labeled', first, factor=factor)
  (model, kept), metrics = local_training.keep_if_finite(
      (trained, kept), (model, kept if last is None else last), metrics)
  return model, None if last is None else kept, metrics


def on_labels(task: Task, record: Any, context: Context, key: jax.Array
              ) -> tuple[Any, Metrics]:
  """Trains the server's `record.model` on its labels, by cross entropy."""
  model, _, metrics = train_on_server_labels(
      task, keeping_stats(task, supervised(task)), record.model, context, key)
  return record._replace(model=model), metrics


class _Memory(NamedTuple):
  """A client's memory: what its loss keeps, and its last model."""

  kept: PyTree  # None if the loss keeps nothing.
  model: PyTree  # None if local models are not kept.


class ServerWithMemory(NamedTuple):
  """The server's record where its loss keeps something for the clients."""

  model: Variables
  # What it has kept; clients get it as `given.received`. Checkpoints have the
  # field's name.
  told: PyTree


class _Settings(NamedTuple):
  """The arguments of `averaging`, checked and resolved."""

  client_loss: LossFn
  labels_loss: LossFn  # Of the server, if it holds the labels.
  streams: str
  weighting: str | Weighting
  labeled_client_weight: float
  keep_local: bool
  alone: bool  # Whether clients send nothing.
  falls: bool  # Whether learning rates fall when the validation loss does not.
  remember: Callable[[Federation], PyTree] | None
  sees_last: bool  # Whether the loss is given the client's last model.
  server_memory: PyTree  # See `averaging`.

  def own(self, row: Any) -> _Memory:
    """Returns a client's memory without the state of its learning rate."""
    return row.own if self.falls else row

  def weight(self, shard: Shard, kept: PyTree, metrics: Metrics
             ) -> tuple[jax.Array, jax.Array]:
    """Returns how much a client counts, and bool[] whether it has learnt.

    Without rows it counts 0, whatever a function says. One that counts 0 by a
    function has learnt all the same.
    """
    word = self.weighting if isinstance(self.weighting, str) else 'uniform'
    weight = client_weights.client_weight(
        shard, self.streams, weighting=word,
        labeled_client_weight=self.labeled_client_weight)
    if isinstance(self.weighting, str):
      return weight, weight > 0
    own = self.weighting(shard, kept, metrics)
    try:
      own = jnp.asarray(own, jnp.float32)
      said = f'{own.dtype}{list(own.shape)}'
    except (TypeError, ValueError):
      said = repr(own)[:60]
    if np.shape(own) or not isinstance(own, jax.Array):
      raise ValueError(f"weighting returns {said}; one client's weight is a "
                       'number, float32[].')
    return jnp.where(weight > 0, weight * own, 0), weight > 0


@knobs.checked()
def averaging(task: Task, loss_fn: LossFn, *, streams: str,
              server: str = 'fedavg', mu: float = 0.0,
              weighting: str | Weighting = 'examples',
              labeled_client_weight: float = 1.0,
              keep_local: bool = False, lr_decay: str = 'none',
              remember: Callable[[Federation], PyTree] | None = None,
              sees_last: bool = False,
              server_loss: LossFn | None = None, server_memory: PyTree = None,
              pseudo_label: Callable[..., Any] | None = None) -> Method:
  """Makes FedAvg or FedProx over a client loss, or local training alone.

  With labels at the server a round first trains the server's model on them;
  then the clients learn from what they hold.

  Args:
    task: the static choices. Another rule than the mean is among them:
      `dataclasses.replace(task, aggregator=rule)`.
    loss_fn: see the module's docstring.
    streams: rows the loss needs: 'both', 'labeled' or 'unlabeled'. With
      labels at the server 'both' becomes 'unlabeled' at the clients.
    server: 'fedavg'; 'fedprox', which adds mu/2 ||w - w_received||^2; or
      'local': clients go on from their own last model and send nothing. Only
      the cohort trains in a round, so all clients train equally much only if
      all are in it.
    mu: weight of FedProx's term; 0 is FedAvg, and the others ignore it.
    weighting: clients count by their 'examples' used, 'uniform', or by a
      function (shard, kept, metrics) -> float32[]: `kept` is what the loss has
      kept after the client's last step, and a metric that is a `Ratio` holds
      the sum and count of all its steps. A weight that is negative or not
      finite leaves the client's update out, as a broken one.
    labeled_client_weight: see `core.client_weights.client_weight`.
    keep_local: keep each client's last trained model, to evaluate it.
    lr_decay: 'none', or 'plateau': each client, and the server for its own
      labels, divides its rate by 3 after 3 epochs without a lower loss of its
      trained model on the validation rows; a client's starts again with each
      task of a stream.
    remember: federation -> [N, ...], what the loss keeps on the clients.
    sees_last: the loss gets the client's last model as `given.memory`, in place
      of what it keeps. The last models are then kept.
    server_loss: what the server minimises on its labels; by default cross
      entropy.
    server_memory: with labels at the server, what the server's loss gets as
      `given.memory` in its first step of a round. What it has kept after the
      last one goes to the clients beside the model, as `given.received`.
    pseudo_label: (server, memory_row, inputs) -> (label, weight), for
      evaluation.

  Returns:
    The method; its server record is `assemble.Server`, `plateau.Server` or
    `ServerWithMemory`.

  Raises:
    ValueError: for an unknown server, weighting or decay, a number out of
      bounds, or local training with labels at the server or static
      normalization; or in `init` for a decay without validation rows.
  """
  _check(task, server, labeled_client_weight)
  if not callable(weighting):
    checks.check('weighting', str(weighting), client_weights.WEIGHTINGS)
  elif server == 'local':
    raise ValueError("a weighting does nothing with server='local', which "
                     'averages no models; leave it out.')
  checks.check('streams', streams, STREAMS)
  alone, falls = server == 'local', lr_decay == 'plateau'
  if task.labels_at == 'clients':
    server_memory = None
  elif server_memory is not None and falls:
    raise ValueError('a server with a memory has no lr_decay.')
  if streams == 'both':
    streams = task.client_streams
  s = _Settings(
      with_proximal_term(task, local_training.checked(loss_fn), server, mu),
      keeping_stats(task, server_loss or supervised(task)),
      streams, weighting, labeled_client_weight,
      keep_local or alone or sees_last, alone, falls, remember, sees_last,
      server_memory)
  return assemble.assemble(
      task, init=functools.partial(_init, task, s),
      client_update=functools.partial(_client_update, task, s),
      aggregate=None if alone else assemble.add_mean,
      on_labels=functools.partial(_on_labels, task, s),
      broadcast=functools.partial(_broadcast, s),
      begin=plateau.begin if falls else None,
      work=lambda shard: batching.num_steps(task, shard, streams),
      local_model=(lambda row: s.own(row).model) if s.keep_local else None,
      pseudo_label=None if alone or pseudo_label is None else (
          lambda record, row, inputs: pseudo_label(
              record, row and s.own(row), inputs)))


def _init(task: Task, s: _Settings, key: jax.Array, federation: Federation
          ) -> tuple[Any, PyTree]:
  model = assemble.new_model(task, key)
  memory = _Memory(
      None if s.remember is None else s.remember(federation),
      tree.repeat(model, federation.num_clients) if s.keep_local else None)
  if s.falls:
    return plateau.start(task, model, memory, federation)
  if s.server_memory is not None:
    return ServerWithMemory(model, s.server_memory), memory
  return assemble.Server(model), memory


def _client_update(task: Task, s: _Settings, payload: Any, client: Client,
                   key: jax.Array) -> Update:
  memory = s.own(client.memory)
  first = memory.model if s.alone else payload.model
  model, kept, metrics = train_locally(
      task, s.client_loss, first, client.train, client.shard, client.round,
      key, s.streams, memory.model if s.sees_last else memory.kept,
      factor=client.memory.rate.factor if s.falls else None,
      received=None if s.server_memory is None else payload.told)
  weight, learnt = s.weight(client.shard, kept, metrics)
  if s.keep_local:
    memory = memory._replace(model=tree.where(learnt, model, memory.model))
  memory = memory._replace(kept=None if s.sees_last else kept)
  message = () if s.alone else tree.subtract(model, first)
  if not s.falls:
    return Update(message, weight, memory, metrics)
  # The rate depends on the model that the server can make of the message.
  reached = memory.model if s.alone else tree.add(payload.model, message)
  rate = plateau.after(task, client.memory.rate, reached, client.validation,
                       learnt)
  return Update(message, weight, plateau.Memory(rate, memory), metrics)


def _on_labels(task: Task, s: _Settings, record: Any, context: Context,
               key: jax.Array) -> tuple[Any, Metrics]:
  """Trains the server's model on its own labels."""
  model, kept, metrics = train_on_server_labels(
      task, s.labels_loss, record.model, context, key, first=s.server_memory,
      last=None if s.server_memory is None else record.told,
      factor=record.rate.factor if s.falls else None)
  record = record._replace(model=model)
  if s.server_memory is not None:
    record = record._replace(told=kept)
  if s.falls:
    record = record._replace(rate=plateau.after(
        task, record.rate, record.model, context.validation,
        metrics['server_loss'].rows > 0))
  return record, metrics


def _broadcast(s: _Settings, record: Any, client_id: jax.Array,
               group: jax.Array) -> PyTree:
  del client_id, group
  if s.server_memory is not None:
    return record
  return () if s.alone else assemble.Server(record.model)


def _check(task: Task, server: str, labeled_client_weight: float) -> None:
  """Refuses choices that exclude each other."""
  client_weights.check_factor(task, labeled_client_weight)
  if server != 'local':
    return
  if task.labels_at == 'server':
    raise checks.FieldError('labels_at', 'server', "with server='local' "
                            'clients would never see a label; give clients.')
  if task.model.norm == 'static':
    raise checks.FieldError('norm', 'static', "with server='local' nobody "
                            'recomputes the statistics; give another norm.')
  if labeled_client_weight != 1:
    checks.refuse_idle(ValueError(
        f'labeled_client_weight={labeled_client_weight:g} would do nothing '
        "with server='local', which averages no models; leave it at 1."))
