r"""FedLoKe: a model that stays at the client labels rows for the one it sends.

Zhang et al., Non-IID always Bad? Semi-Supervised Heterogeneous Federated
Learning with Local Knowledge Enhancement, CIKM 2023,
https://doi.org/10.1145/3583780.3614991. The authors' code is zcfinal/FedLoKe.

A client keeps a local model. In a round it first becomes
:math:`\mu w_l + (1 - \mu) w_g` (equation 2). Then both models train on the same
rows: the local one on weak views of labeled rows, the received one on strong
views (equations 13 and 14), and each on strong views of the rows that the other
is sure of, with the other's soft labels of their weak views (equations 9, 10).
Only the received model is sent back.

Here and in the code local models start as the first global one; in the paper
each is drawn at random. The code repeats labeled rows until they fill a batch,
drops batches that are not full, and passes over the labeled rows as often as
one pass over the others has room for; here short batches count, and an epoch is
the task's.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl import aggregation, losses
from fedjax_ssl.core import checks, client_weights, knobs, tree
from fedjax_ssl.core.local_training import Aux, Given
from fedjax_ssl.core.types import (
  Array,
  Batch,
  Client,
  Federation,
  Method,
  Number,
  PyTree,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.data.batching import Pair
from fedjax_ssl.methods.parts import assemble, averaging, network, objective


class _Two(NamedTuple):
  """Something of both models."""

  sent: Any
  local: Any


class _Settings(NamedTuple):
  """`fedloke`'s knobs that its functions read."""

  decay: float
  max_entropy: float
  unlabeled_weight: float
  ramp: float
  weighting: str


def distill(logits: Array, teacher: Array, mask: Array, *,
            max_entropy: Number = 0.1) -> tuple[jax.Array, jax.Array]:
  r"""Computes equation 9 or 10: soft labels of the rows a teacher is sure of.

  :math:`\frac1n \sum_i 1[H(\hat y_i) < \delta] KL[\hat y_i \| p_i]`, n real
  rows.

  Args:
    logits: float[B, C], of strong views.
    teacher: float[B, C], the other model's logits of their weak views;
      constants for derivatives.
    mask: float32[B].
    max_entropy: delta, in nats; 0 takes no row, more than log C all.

  Returns:
    float32[], and float32[B], 1 for the rows that count.
  """
  labels = jax.nn.softmax(teacher)
  sure = _sure(labels, max_entropy)
  loss, _ = losses.target_kl(logits, labels, mask * sure, total=mask.sum())
  return loss, sure


def _sure(labels: jax.Array, max_entropy: Number) -> jax.Array:
  """Returns whether the entropy of soft labels is below the bar, float32[B]."""
  entropy = -jax.scipy.special.xlogy(labels, labels).sum(-1)
  return (entropy < max_entropy).astype(jnp.float32)


@knobs.checked(
    decay=knobs.Bound(0, 1, cases=(
        knobs.at(0, 'local models start each round as the received one'),
        knobs.at(1, 'local models are moved by their own training alone'))),
    max_entropy=knobs.Bound(cases=(
        knobs.at(0, 'no unlabeled row counts'),)),
    max_gradient=knobs.Bound(above=True, infinite=True))
def fedloke(task: Task, *, decay: float = 0.9, max_entropy: float = 0.1,
            unlabeled_weight: float = 1.0, ramp: float = 0.4,
            max_gradient: float = 0.1, weighting: str = 'examples') -> Method:
  """Trains the received and a local model, each on labels of the other.

  Of the code, and not of the paper, are `max_gradient`, and that both models
  label rows in training mode. Under batch normalization each view of a kind of
  rows is a batch of its own, as in the code. It adds 1e-8 to probabilities
  before their logarithm; here none of these can be that of 0.

  Args:
    task: the static choices; labels must be at the clients.
    decay: mu, how much of the local model is kept at the start of a round. The
      paper tunes it among 0.5, 0.7 and 0.9; the code's script has 0.9.
    max_entropy: delta, in nats; rows of at least this entropy are no labels.
    unlabeled_weight: of the soft labels; the paper's is 1.
    ramp: share of the run over which that weight rises from 0, step by step;
      the paper's 200 of 500 rounds, round by round.
    max_gradient: each number of a gradient is clipped to it, as in the code;
      infinity leaves gradients as they are.
    weighting: 'examples' counts labeled and unlabeled rows (equation 1); or
      'uniform', as in the code, where all clients hold the same number.

  Returns:
    The method. Local accuracy is that of the local models. `labeled_loss` and
    `unlabeled_loss` are of the model that is sent, `train_loss` of both;
    `mask_rate` is the share of rows that the former learns from,
    `local_mask_rate` that of the local one.

  Raises:
    ValueError: for labels at the server.
  """
  checks.labels_at_clients(task.labels_at,
                           'each needs labels to train a local labeler')
  if ramp:
    task.horizon(f'ramp={ramp}')
  s = _Settings(decay, max_entropy, unlabeled_weight, ramp, weighting)
  clip = optax.clip(max_gradient)
  clipped = dataclasses.replace(task, optimizer=lambda round_: optax.chain(
      clip, task.optimizer(round_)))
  return assemble.assemble(
      task, init=functools.partial(_init, task),
      client_update=functools.partial(_client_update, clipped, s),
      work=lambda shard: batching.num_steps(task, shard, 'both'),
      local_model=lambda row: row,
      pseudo_label=functools.partial(_pseudo_label, task, s))


def _init(task: Task, key: jax.Array, federation: Federation
          ) -> tuple[assemble.Server, PyTree]:
  model = assemble.new_model(task, key)
  return assemble.Server(model), tree.repeat(model, federation.num_clients)


def _part(pair: Variables, name: str) -> Variables:
  return Variables(getattr(pair.params, name), getattr(pair.stats, name))


def _client_update(task: Task, s: _Settings, payload: assemble.Server,
                   client: Client, key: jax.Array) -> Update:
  sent = payload.model
  local = aggregation.ema(client.memory, sent, s.decay)
  if task.model.norm == 'static':  # Nobody recomputes a local model's own.
    local = local._replace(stats=sent.stats)
  pair = Variables(_Two(sent.params, local.params),
                   _Two(sent.stats, local.stats))
  loss_fn = averaging.keeping_stats(
      task, functools.partial(_loss, task, s))
  trained, _, metrics = averaging.train_locally(
      task, loss_fn, pair, client.train, client.shard, client.round, key,
      'both')
  weight = client_weights.client_weight(client.shard, 'both',
                                        weighting=s.weighting)
  memory = tree.where(weight > 0, _part(trained, 'local'), client.memory)
  return Update(tree.subtract(_part(trained, 'sent'), sent), weight, memory,
                metrics)


def _loss(task: Task, s: _Settings, pair: Variables, given: Given, batch: Pair,
          key: jax.Array) -> tuple[jax.Array, Aux]:
  """Adds the losses of both models, which share no parameter."""
  del given
  assert batch.labeled is not None and batch.unlabeled is not None
  view_key, labeled_key = jax.random.split(key)
  weak, labeled, strong = network.views(task, batch, view_key)
  views = _Two(network.strongly(task, batch.labeled, labeled_key), labeled)
  passed = _Two(*(
      _passes(task, _part(pair, name), weak, getattr(views, name), strong,
              jax.random.fold_in(key, i))
      for i, name in enumerate(_Two._fields)))
  weight: Number = s.unlabeled_weight
  if s.ramp:
    assert batch.progress is not None
    weight *= losses.ramp_up(batch.progress, s.ramp, shape='linear')
  rows = batch.unlabeled.mask
  total, reports = jnp.float32(0), []
  for own, other in (passed, passed[::-1]):
    taught, sure = distill(own.strong, other.weak, rows,
                           max_entropy=s.max_entropy)
    loss, metrics = objective.total(
        batch, taught, objective.labeled(own.labeled, batch.labeled),
        weight=weight, mask_rate=losses.masked_mean(sure, rows), labelings=2,
        views=2, labeled_views=2)
    total += loss
    reports.append(metrics)
  metrics = {**reports[0], 'local_mask_rate': reports[1]['mask_rate']}
  return total, Aux(_Two(*(x.stats for x in passed)), metrics)


class _Passed(NamedTuple):
  """What a model made of a step's rows."""

  weak: jax.Array
  labeled: jax.Array
  strong: jax.Array
  stats: PyTree


def _passes(task: Task, model: Variables, weak: Batch, labeled: Batch,
            strong: Batch, key: jax.Array) -> _Passed:
  """Passes the views through a model; each is a batch of its own."""
  if not network.is_coupled(task):
    target, (known, learnt), stats = network.forward_with_targets(
        task, model, weak, labeled, strong, key=key)
    return _Passed(target, known, learnt, stats)
  (known, target, learnt), stats = network.forward_apart(
      task, model, labeled, weak, strong, key=key)
  return _Passed(jax.lax.stop_gradient(target), known, learnt, stats)


def _pseudo_label(task: Task, s: _Settings, record: assemble.Server,
                  memory: Variables, inputs: Array
                  ) -> tuple[jax.Array, jax.Array]:
  """Labels inputs as the local model does, which teaches what is sent."""
  del record
  logits = task.apply(memory, inputs)
  return (logits.argmax(-1).astype(jnp.int32),
          _sure(jax.nn.softmax(logits), s.max_entropy))
