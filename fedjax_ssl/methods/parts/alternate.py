"""Alternate training: clients learn pseudo-labels, then the server its labels.

Diao et al., SemiFL, NeurIPS 2022, https://arxiv.org/abs/2106.01432. Methods of
this kind share the order of a round, the momentum of the server and of each
client, clipped gradients, and statistics over all clients.
"""
from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.core import local_training, rounds, tree
from fedjax_ssl.core.local_training import Learner, LossFn, Step
from fedjax_ssl.core.types import (
  Array,
  Client,
  Context,
  Federation,
  Method,
  Metrics,
  PyTree,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import (
  all_statistics,
  assemble,
  averaging,
  labeling,
)


class Server(NamedTuple):
  """The server's record."""

  model: Variables
  opt_state: PyTree  # Of its training on its own labels; () if not kept.


class Settings(NamedTuple):
  """What such methods have in common.

  Attributes:
    server_momentum: beta of the server, m <- beta m + mean update; 0 is off.
    clip_norm: global norm to which gradients are scaled down; inf is off.
    keep_momentum: whether clients and server keep their optimizers.
    stats_clients: how many compute statistics under norm='static'; 0 is all.
    warmup_passes: before the first round the server trains as long as in this
      many rounds; 0 is off.
  """

  server_momentum: float
  clip_norm: float
  keep_momentum: bool
  stats_clients: int
  warmup_passes: int


def with_clipping_and_momentum(task: Task, s: Settings) -> Task:
  """Gives a task clipped gradients and the server's momentum.

  If the task has a server optimizer already, that replaces the momentum.
  """
  server = task.server_optimizer
  if server is None and s.server_momentum:
    server = optax.sgd(1.0, momentum=s.server_momentum)
  return dataclasses.replace(local_training.clipped(task, s.clip_norm),
                             server_optimizer=server)


def method(task: Task, s: Settings, client_update: Callable[..., Update],
           remember: Callable[[Federation, PyTree], PyTree],
           pseudo_label: Callable[..., Any],
           weigh: assemble.Weigh | None = None) -> Method:
  """Makes a method whose server fine-tunes the averaged model.

  In a round the clients train and are averaged; the server takes a step with
  momentum along the mean update, unless nobody took part; it trains on its own
  labels; and, under norm='static', the statistics of all rows are computed.
  Before the first round come the warm-up and the statistics of its model. With
  labels at the clients the server does not train.

  Args:
    task: as `with_clipping_and_momentum` made it.
    s: the settings.
    client_update: (payload with `model`, client, key) -> Update.
    remember: (federation, optimizer states [N, ...] or ()) -> the clients'
      memory.
    pseudo_label: see `Method`.
    weigh: see `assemble.assemble`.

  Returns:
    The method; its own server record is `Server`. The momentum is kept beside
    it, see `additions`.
  """
  def init(key: jax.Array, federation: Federation) -> tuple[Server, PyTree]:
    model = assemble.new_model(task, key)
    size = federation.num_clients
    if s.stats_clients > size:
      raise ValueError(f'stats_clients={s.stats_clients} is more than there '
                       f'are clients, {size}.')
    opt_state: PyTree = ()
    if s.keep_momentum:
      opt_state = task.optimizer(jnp.int32(0)).init(model.params)
    return Server(model, opt_state), remember(
        federation, tree.repeat(opt_state, size))

  renew = all_statistics.if_static(task, s.stats_clients)
  return assemble.assemble(
      task, init=init, client_update=client_update,
      broadcast=lambda server, client_id, group: assemble.Server(server.model),
      on_labels=functools.partial(_fine_tune, task, s), labels_last=True,
      opening=_opening(task, s, renew), renew=renew,
      work=lambda shard: batching.num_steps(task, shard, task.client_streams),
      pseudo_label=pseudo_label, weigh=weigh)


def _opening(task: Task, s: Settings, renew: rounds.Pass | None
             ) -> rounds.Pass | None:
  """Makes the warm-up, and the statistics that the first clients need."""
  passes = [] if renew is None else [renew]
  if s.warmup_passes and task.labels_at == 'server':
    longer = dataclasses.replace(
        task, local_epochs=s.warmup_passes * task.local_epochs,
        local_steps=s.warmup_passes * task.local_steps)
    passes.insert(0, rounds.server_pass(
        functools.partial(_fine_tune, longer, s)))
  return rounds.chain(*passes) if passes else None


def descending(task: Task, loss_fn: LossFn) -> Callable[..., Step]:
  """Makes a gradient step on a loss, for `local_training.resumed`.

  Under norm='static' it leaves the statistics as they are.
  """
  return functools.partial(
      local_training.gradient_step,
      averaging.keeping_stats(task, loss_fn))


def update(client: Client, received: Variables, learner: Learner,
           memory: PyTree, weight: jax.Array, count: Array, metrics: Metrics,
           labeling_metrics: Metrics) -> Update:
  """Makes the update that a client sends.

  Args:
    client: as it was before training.
    received: the model that it received.
    learner: what it has trained.
    memory: what it keeps.
    weight: float32[], 0 leaves the client out.
    count: int32[], unlabeled rows that it has trained on.
    metrics: of the training.
    labeling_metrics: of `labeling.probabilities`.

  Returns:
    The update, with the share of rows that it trained on as `mask_rate`.
  """
  all_metrics = labeling.metrics(client, count, metrics, labeling_metrics)
  return Update(tree.subtract(learner.model, received), weight, memory,
                all_metrics)


def _fine_tune(task: Task, s: Settings, record: Server, context: Context,
               key: jax.Array) -> tuple[Server, Metrics]:
  """Trains the server's model on its own labels."""
  order_key, step_key = jax.random.split(key)
  learner, metrics = local_training.resumed(
      task, descending(task, averaging.supervised(task)),
      record.model, record.opt_state,
      batching.batches(task, context.train, context.shard, order_key,
                       'labeled', context.round),
      context.round, step_key)
  after = Server(learner.model,
                 learner.opt_state if s.keep_momentum else ())
  return local_training.keep_if_finite(after, record, metrics)
