r"""FedDB: debiased pseudo-labels, and client weights that balance classes.

Zhu et al., Estimating before Debiasing: A Bayesian Approach to Detaching Prior
Bias in Federated Semi-Supervised Learning, IJCAI 2024,
https://arxiv.org/abs/2405.19789. The authors' code is GuogangZhu/FedDB, which
builds on SemiFL's: rounds are SemiFL's without its blends.

A client that has received the model predicts a weak view of each row, as
:math:`p_i` for row i, with the mean :math:`s = mean_i\, p_i`. It keeps the rows
with

  :math:`\max_c p'_i(c) \ge \tau`, :math:`p'_i = norm(p_i / s)`,

and trains on its labels and on strong views of these rows. Every pass over them
moves s half of the way to the mean prediction for their weak views, every step
by its share of that. The client sends the model and s. The server weighs the
clients so that :math:`\sum_m w_m s_m` is uniform.

'paper' minimises the squared distance from uniform over all weights that sum to
one, which is our reading: the paper's formula was not at hand. 'code' does what
the authors' loop does: 100 times a gradient step of rate 1 on the mean square,
with a weight decay of .9, and then a softmax of the weights. On the clients of
the authors' code these weights stay nearly equal.

The authors' clients take one step an epoch, on all their labels and all rows
that they keep; here batches are the task's. Where they keep no row they train
on their labels alone, as here, but in batches of 64. Four more things differ:
there a batch's labels and strong views are normalized apart, a client's labeled
images are among its unlabeled rows too, and under norm='static' it labels them
by the statistics of its own batches, and tests by those of the test's, where
here both are of all clients, as in SemiFL.
"""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.core import checks, knobs, local_training, tree
from fedjax_ssl.core.local_training import Aux, LossFn
from fedjax_ssl.core.types import Client, Method, Number, Task, Update
from fedjax_ssl.losses import moving
from fedjax_ssl.methods.parts import (
  alternate,
  labeling,
  network,
  objective,
)

_PROFILES = {'paper': {'weights': 'balanced'}, 'code': {'weights': 'softmax'}}
_STEPS = 1000  # Of exponentiated gradients.
_LOOPS = 100  # Of the authors' code.


class Memory(NamedTuple):
  """What stays on a client."""

  opt_state: Any  # () if optimizers are not kept.
  shares: jax.Array  # float32[C], s of the model received in its last round.


class _Settings(NamedTuple):
  """`feddb`'s knobs besides those of `alternate.Settings`."""

  threshold: float
  debias: bool
  sends_shares: bool  # Whether the server weighs by s.
  unlabeled_weight: float


def balanced(shares: jax.Array, active: jax.Array) -> jax.Array:
  r"""Finds client weights whose mixed predictions are nearest to uniform.

  Minimises :math:`\|\sum_m w_m s_m - 1/C\|^2` by exponentiated gradients from
  equal weights, in 1000 steps so short that none makes it larger. For
  10 clients and classes under Dirichlet .1 they end up to .4 % of the way short
  of the least, where single weights are still up to .07 off (30 draws).

  Args:
    shares: float32[S, C], mean predictions.
    active: float32[S], 0 for a client that does not count.

  Returns:
    float32[S] of sum 1; zeros if nobody counts.
  """
  apart = jnp.where(active[:, None] > 0, shares - 1 / shares.shape[-1], 0)
  products = jnp.matmul(apart, apart.T, precision=lax.Precision.HIGHEST)
  rate = 1 / jnp.maximum(jnp.abs(products).max(), jnp.finfo(shares.dtype).tiny)

  def step(_: Any, logits: jax.Array) -> jax.Array:
    slope = jnp.matmul(products, _softmax(logits, active),
                       precision=lax.Precision.HIGHEST)
    return logits - rate * slope

  return _softmax(lax.fori_loop(0, _STEPS, step, jnp.zeros_like(apart[:, 0])),
                  active)


def softmax_weights(shares: jax.Array, active: jax.Array) -> jax.Array:
  """Finds client weights as the authors' code does; see the module's docstring.

  Args:
    shares: float32[S, C], mean predictions.
    active: float32[S], 0 for a client that does not count.

  Returns:
    float32[S] of sum 1; zeros if nobody counts.
  """
  size = shares.shape[-1]
  shares = jnp.where(active[:, None] > 0, shares, 0)

  def loop(_: Any, weights: jax.Array) -> jax.Array:
    missing = (weights[:, None] * shares).sum(0) - 1 / size
    slope = 2 / size * (shares * missing).sum(-1) + .9 * weights
    # 1.9: the first step of Nesterov's momentum .9. The optimizer is new each
    # time.
    return _softmax(weights - 1.9 * slope, active)

  return lax.fori_loop(0, _LOOPS, loop, _softmax(0 * shares[:, 0], active))


def _softmax(logits: jax.Array, active: jax.Array) -> jax.Array:
  """Computes the softmax float32[S] over those that count; zeros if none do."""
  most = jnp.where(active > 0, logits, -jnp.inf).max()
  powers = jnp.where(active > 0, jnp.exp(
      logits - jnp.where(jnp.isfinite(most), most, 0)), 0)
  total = powers.sum()
  return powers / jnp.where(total > 0, total, 1)


_WEIGHTS = {'balanced': balanced, 'softmax': softmax_weights}


@knobs.checked(_PROFILES, weights=knobs.word(*_WEIGHTS, 'uniform'))
def feddb(task: Task, *, profile: str = 'paper', weights: str | None = None,
          threshold: float = 0.95, debias: bool = True,
          unlabeled_weight: float = 1.0, server_momentum: float = 0.5,
          clip_norm: float = 1.0, keep_momentum: bool = True,
          stats_clients: int = 0, warmup_passes: int = 0) -> Method:
  """Runs SemiFL with debiased pseudo-labels and class-balancing client weights.

  A client without rows to train on sits out. FedDB is meant for labels at the
  clients. With labels at the server, the server trains on them after the
  clients, as in SemiFL.

  Args:
    task: the static choices; if it has a server optimizer, that replaces the
      momentum. If it has an aggregator, that gets FedDB's weights.
    profile: 'paper' or 'code', how the server weighs its clients; see the
      module's docstring.
    weights: 'balanced' as in the paper, 'softmax' as in the code, or 'uniform':
      all clients count the same, and neither update s in training nor send it.
      None is the profile's.
    threshold: confidence tau from which on a row is learnt; 0 keeps all rows,
      1.1 none.
    debias: whether predictions are divided by their mean.
    unlabeled_weight: of the loss on unlabeled rows; 0 leaves the supervised
      part.
    server_momentum: of the server's steps along the mean update; 0 is FedAvg.
    clip_norm: global norm of a gradient, at the clients and the server.
    keep_momentum: whether clients and server keep their optimizer's state
      between rounds, which takes as much memory as a model each; else it starts
      anew.
    stats_clients: how many random clients compute statistics after each round
      under norm='static'; 0 is all.
    warmup_passes: before the first round the server trains as long as in this
      many rounds; 0 is off. With labels at the clients there is no such
      training.

  Returns:
    The method.

  Raises:
    ValueError: for an unknown choice or a number out of range.
  """
  chosen = checks.profile(_PROFILES, profile, weights=weights)['weights']
  s = alternate.Settings(
      server_momentum=server_momentum, clip_norm=clip_norm,
      keep_momentum=keep_momentum, stats_clients=stats_clients,
      warmup_passes=warmup_passes)
  task = alternate.with_clipping_and_momentum(task, s)
  own = _Settings(threshold, debias, chosen != 'uniform', unlabeled_weight)

  def remember(federation: Any, opt_states: Any) -> Memory:
    return Memory(opt_states, jnp.zeros(
        (federation.num_clients, task.num_classes)))

  def pseudo_label(record, memory: Memory, inputs):
    p = jax.nn.softmax(task.apply(record.model, inputs))
    if debias:
      p = debiased(p, memory.shares)
    return losses.hard_label(p, threshold=threshold)

  return alternate.method(
      task, s, functools.partial(_client_update, task, s, own), remember,
      pseudo_label, weigh=_WEIGHTS.get(chosen))


def debiased(probabilities: jax.Array, shares: jax.Array) -> jax.Array:
  """Computes p' float32[B, C] of predictions with the mean `shares` float32[C].

  A mean of zeros changes nothing.
  """
  return moving.aligned(probabilities, shares, 1.0, epsilon=1e-12)


def _client_update(task: Task, s: alternate.Settings, own: _Settings,
                   payload: Any, client: Client, key: jax.Array) -> Update:
  # As in SemiFL, where the two keys not used here draw the rows to blend with.
  keys = jax.random.split(key, 5)
  table, spent = labeling.probabilities(task, payload.model, client, keys[0])
  shares = table.sum(0) / jnp.maximum(client.shard.num_unlabeled, 1)
  after = debiased(table, shares) if own.debias else table
  kept = labeling.kept(
      task, client, after.argmax(-1).astype(jnp.int32),
      after.max(-1) >= own.threshold, keys[1])
  learner, metrics = local_training.resumed(
      task, alternate.descending(task, _loss_fn(
          task, own, kept.shard.num_unlabeled)), payload.model,
      client.memory.opt_state, kept.batches, client.round, keys[4],
      memory=shares)
  takes_part = kept.batches.num_steps > 0
  memory = Memory(learner.opt_state if s.keep_momentum else (), shares)
  update = alternate.update(
      client, payload.model, learner,
      tree.where(takes_part, memory, client.memory),
      takes_part.astype(jnp.float32), kept.shard.num_unlabeled, metrics,
      spent)
  if not own.sends_shares:
    return update
  # A client without unlabeled rows has nothing to balance.
  return update._replace(counts=jnp.where(
      shares.sum() > 0, learner.memory, 1 / task.num_classes))


def _loss_fn(task: Task, own: _Settings, num_kept: Number) -> LossFn:
  """Makes the loss on labels and kept rows; it moves s if that is sent."""
  def loss_fn(model, shares, batch, key):
    rows, keys = batch.unlabeled, [*jax.random.split(key, 3)]
    (labeled, strong), stats = network.forward(
        task, model, network.labeled_view(task, batch.labeled, keys[0]),
        network.strongly(task, rows, keys[1]), key=keys[0])
    if own.sends_shares:
      (weak,), _ = network.forward(
          task, jax.lax.stop_gradient(model),
          network.weakly(task, rows, keys[2]), key=keys[2])
      shares = moving.moved(
          shares, moving.row_mean(jax.nn.softmax(weak), rows.mask), rows.mask,
          decay=0.5 ** (rows.mask.sum() / jnp.maximum(num_kept, 1)))
    loss, _ = losses.cross_entropy(strong, rows.labels, rows.mask)
    loss, metrics = objective.total(
        batch, loss, objective.labeled(labeled, batch.labeled),
        weight=own.unlabeled_weight, labelings=int(own.sends_shares))
    return loss, Aux(stats, metrics, shares)
  return loss_fn
