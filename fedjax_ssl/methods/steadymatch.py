"""SteadyMatch: FixMatch whose labels two models give to rows as they are.

No paper has it: it was found on the bench, by taking apart which model labels a
row, in which view, and how fast clients without labels move; see
experiments/results/steadymatch.md. The mean of two predictions labels a row:
that of the model in training, which knows the client's own labels, and that of
a moving average of the server's models, which no cohort moves far.

Strong views learn as in FixMatch (Sohn et al., NeurIPS 2020,
https://arxiv.org/abs/2001.07685). Labels of rows as they are, and a smaller
rate for clients without labels, are those of Fed-Consist (Yang et al., Medical
Image Analysis 2021, https://arxiv.org/abs/2011.11750).
"""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl import aggregation, losses
from fedjax_ssl.core import client_weights, knobs, tree
from fedjax_ssl.core.local_training import Aux, LossFn
from fedjax_ssl.core.types import (
  Client,
  Federation,
  Method,
  State,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import assemble, averaging, network, objective


class Server(NamedTuple):
  """The server's record; clients receive both models."""

  model: Variables
  teacher: Variables  # The moving average of what was `model`.


@knobs.checked(
    decay=knobs.AVERAGE,
    local_share=knobs.share(
        knobs.at(0, 'the model in training labels nothing'),
        knobs.at(1, 'only the model in training labels')))
def steadymatch(task: Task, *, threshold: float = 0.9,
                unlabeled_weight: float = 1.0, local_share: float = 0.5,
                decay: float = 0.8, unlabeled_rate: float = 1.0,
                weighting: str = 'uniform',
                labeled_client_weight: float = 1.0) -> Method:
  r"""Trains strong views on the labels of two models for the plain rows.

  The loss is :math:`L_s + \lambda_u L_u`, with L_u the mean over the batch of
  :math:`1[\max q \ge \tau] CE(\arg\max q, p(A_s(u)))` and
  :math:`q = s\, p(u) + (1 - s)\, \bar p(u)`, p of the model in training and
  :math:`\bar p` of the averaged one, held constant. Rows are labeled as they
  are, without a weak view.

  The average starts at the model that the first round made. It is the plain
  mean of the models after the rounds until its weight on the past reaches
  `decay`. With labels at the server, the server trains on them after the
  clients, and its model is then averaged and predicts.

  Args:
    task: the static choices.
    threshold: confidence tau of the mean prediction from which on a row counts;
      0 keeps all rows, 1.1 none, which leaves the supervised part.
    unlabeled_weight: lambda_u; 0 leaves the supervised part.
    local_share: s; 1 is FixMatch on plain rows, and sends no average; 0 leaves
      labels to the average alone.
    decay: of the average, by rounds. 0 is the model that the client receives
      anyway, which then is all that is sent; 1 averages all rounds alike.
    unlabeled_rate: factor on the steps of clients that hold no labels while
      others do; 1 trains them like the others.
    weighting: 'uniform', or 'examples' counts labeled and unlabeled rows.
    labeled_client_weight: factor on the weight of a client that holds labels;
      1 is no difference.

  Raises:
    ValueError: for an unknown choice or a number out of range.
  """
  client_weights.check_factor(task, labeled_client_weight)
  averages = decay > 0 and local_share < 1
  loss_fn = averaging.keeping_stats(
      task, _loss_fn(task, threshold, unlabeled_weight, local_share))
  streams = task.client_streams

  def init(key: jax.Array, federation: Federation) -> tuple[Any, Any]:
    del federation
    model = assemble.new_model(task, key)
    return (Server(model, jax.tree.map(jnp.copy, model)) if averages
            else assemble.Server(model)), ()

  def begin(state: State, federation: Federation, round_: jax.Array) -> State:
    del federation
    past = jnp.maximum(round_ - 1, 0)
    weight = jnp.minimum(decay, past / jnp.maximum(round_, 1))
    record = state.server
    return state._replace(server=record._replace(teacher=aggregation.ema(
        record.teacher, record.model, weight)))

  def client_update(payload: Any, client: Client, key: jax.Array) -> Update:
    holds = client.shard.num_labeled > 0
    factor = (jnp.where(holds, 1.0, unlabeled_rate)
              if task.labels_at == 'clients' else jnp.float32(1))
    model, _, metrics = averaging.train_locally(
        task, loss_fn, payload.model, client.train, client.shard, client.round,
        key, streams, factor=factor,
        received=payload.teacher if averages else payload.model)
    weight = client_weights.client_weight(
        client.shard, streams, weighting=weighting,
        labeled_client_weight=labeled_client_weight)
    return Update(tree.subtract(model, payload.model), weight, client.memory,
                  metrics)

  return assemble.assemble(
      task, init=init, client_update=client_update,
      begin=begin if averages else None,
      on_labels=functools.partial(averaging.on_labels, task), labels_last=True,
      work=lambda shard: batching.num_steps(task, shard, streams),
      pseudo_label=functools.partial(_pseudo_label, task, threshold,
                                     local_share))


def _loss_fn(task: Task, threshold: float, unlabeled_weight: float,
             local_share: float) -> LossFn:
  """Makes the loss; `given.received` is the averaged model."""
  def loss_fn(model, given, batch, key):
    plain = batch.unlabeled
    _, *views = network.views(task, batch, key)
    parts = []
    if local_share > 0:
      own, (labeled, strong), stats = network.forward_with_targets(
          task, model, plain, *views, key=key)
      parts.append(local_share * jax.nn.softmax(own))
    else:
      (labeled, strong), stats = network.forward(task, model, *views, key=key)
    if local_share < 1:
      parts.append((1 - local_share) * jax.nn.softmax(
          task.apply(given.received, plain.inputs)))
    labels, accepted = losses.hard_label(
        functools.reduce(jnp.add, parts), threshold=threshold)
    loss, _ = losses.cross_entropy(
        strong, labels, plain.mask * accepted, total=plain.mask.sum())
    loss, metrics = objective.total(
        batch, loss, objective.labeled(labeled, batch.labeled),
        weight=unlabeled_weight, labelings=len(parts),
        mask_rate=losses.masked_mean(accepted, plain.mask))
    return loss, Aux(stats, metrics)
  return loss_fn


def _pseudo_label(task: Task, threshold: float, local_share: float, record: Any,
                  memory: Any, inputs: jax.Array
                  ) -> tuple[jax.Array, jax.Array]:
  """Labels raw inputs as a client does in its first step, see `Method`.

  The average is that of the round that has ended: the newest model enters it
  when the next one begins.
  """
  del memory
  mean = jax.nn.softmax(task.apply(record.model, inputs))
  if isinstance(record, Server):
    mean = local_share * mean + (1 - local_share) * jax.nn.softmax(
        task.apply(record.teacher, inputs))
  return losses.hard_label(mean, threshold=threshold)
