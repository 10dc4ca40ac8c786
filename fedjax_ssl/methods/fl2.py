r"""(FL)^2: client thresholds, sharpness-aware consistency, status-aware means.

Lee et al., (FL)^2: Overcoming Few Labels in Federated Semi-Supervised Learning,
NeurIPS 2024, https://arxiv.org/abs/2410.23227.

Rounds are SemiFL's. A client that has received the model predicts a weak view
of each row, as :math:`q_b` for row b, and labels all its rows once,
:math:`\hat y_b = \arg\max_c q_b(c)`. With

  :math:`\tau_k = mean_b \max_c q_b(c)`, :math:`p_k = mean_b\, q_b`,
  :math:`\tau_k(c) = \tau_k\, p_k(c) / \max_v p_k(v)`,

it keeps the rows with :math:`\max_c q_b \ge \tau_k(\hat y_b)`, and steps along
the gradients of

  :math:`\ell(f_W(\omega(u_b)), \hat y_b)` at W, and of
  :math:`h_b\, KL[f_W(\omega(u_b)) \| f_{W + \epsilon}(\omega(u_b))]` at
  :math:`W + \epsilon`,

with h_b = 1 where :math:`\max_c q_b \ge 0.95`, and epsilon the step of ASAM
that makes the cross entropy of those rows worse. The weight of a client is
:math:`1 - \tau_k`.

The paper's learning rate falls along a cosine, the released script keeps it
constant, and here `lr_schedule` sets it. In the script a client that keeps no
row, which only rounding can cause, sends the model as it received it; here it
sits out. Where all clients are sure of all rows the script divides 0 by 0; here
each weight has 1e-8 more. Under norm='static' the script takes statistics of 10
rows of the server, and of 2048 of all clients together, at a time; here those
of a batch are one holder's, see `parts.all_statistics`. A fairness loss that
the paper names once has no formula, and is left out.

Kwon et al., ASAM, ICML 2021, https://arxiv.org/abs/2102.11600.
"""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.core import knobs, local_training, tree
from fedjax_ssl.core.local_training import Learner, Step
from fedjax_ssl.core.types import (
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
from fedjax_ssl.methods.parts import (
  alternate,
  assemble,
  labeling,
  network,
  objective,
)

_ETA = 0.01  # Of ASAM, so that parameters of 0 can move.
_LEAST = 1e-8  # Added to weights: a client sure of all its rows counts too.


class Memory(NamedTuple):
  """What stays on a client."""

  opt_state: PyTree  # () if optimizers are not kept.
  thresholds: jax.Array  # float32[C], of its last round.


class _Settings(NamedTuple):
  """`fl2`'s knobs besides those of `alternate.Settings`."""

  threshold: float
  thresholds: str
  rho: float
  sharpness_weight: float
  unlabeled_weight: float
  weighting: str


def client_thresholds(probabilities: jax.Array, num_rows: Number
                      ) -> tuple[jax.Array, jax.Array]:
  r"""Computes how sure a model is of a client's rows, overall and by class.

  Args:
    probabilities: float32[U, C], zeros for padding.
    num_rows: int32[], how many rows are not padding.

  Returns:
    float32[] :math:`\tau_k` and float32[C] :math:`\tau_k(c)`, the largest of
    which is :math:`\tau_k`; 0 without rows.
  """
  rows = jnp.maximum(num_rows, 1)
  overall = probabilities.max(-1).sum() / rows
  shares = probabilities.sum(0) / rows
  most = shares.max()
  return overall, overall * shares / jnp.where(most > 0, most, 1)


def ascent(params: PyTree, gradient: PyTree, *, rho: float) -> PyTree:
  r"""Computes ASAM's step uphill, :math:`\rho\, T^2 g / \|T g\|`.

  Args:
    params: W. T is :math:`|W| + 0.01`, and 1 for biases.
    gradient: g.
    rho: length of the step divided by T; 0 does not move.

  Returns:
    The step, of the form of `params`; zeros if the gradient is 0.
  """
  def unit(path: Any, weight: jax.Array) -> jax.Array:
    is_bias = getattr(path[-1], 'key', None) == 'bias'
    return jnp.ones_like(weight) if is_bias else jnp.abs(weight) + _ETA
  units = jax.tree_util.tree_map_with_path(unit, params)
  scaled = jax.tree.map(jnp.multiply, units, gradient)
  norm = tree.global_norm(scaled)
  length = jnp.where(norm > 0, rho / jnp.where(norm > 0, norm, 1), 0)
  return tree.scale(jax.tree.map(jnp.multiply, units, scaled), length)


@knobs.checked(
    rho=knobs.Bound(cases=(
        knobs.at(0, 'what sharpness-aware consistency teaches is nothing'),)),
    sharpness_weight=knobs.weight('sharpness-aware consistency'),
    thresholds=knobs.word('client', 'fixed'),
    weighting=knobs.word('status', 'uniform'))
def fl2(task: Task, *, threshold: float = 0.95, thresholds: str = 'client',
        rho: float = 0.1, sharpness_weight: float = 1.0,
        unlabeled_weight: float = 1.0, weighting: str = 'status',
        server_momentum: float = 0.5, clip_norm: float = 1.0,
        keep_momentum: bool = True, stats_clients: int = 0,
        warmup_passes: int = 10) -> Method:
  """Trains on rows whose confidence reaches the client's own thresholds.

  Each of the paper's three parts can be switched off: thresholds='fixed',
  sharpness_weight=0 and weighting='uniform'. With labels at the clients, which
  the paper does not have, a client adds the cross entropy of its own labels,
  and the server does not train; tau_k of a client that has labeled rows alone
  is its mean largest probability of these. `sharpness_loss` is the mean of the
  consistency over steps and rows.

  Args:
    task: the static choices; if it has a server optimizer, that replaces the
      momentum.
    threshold: confidence from which on a row counts in the consistency; 0 keeps
      all rows, 1.1 none.
    thresholds: which rows are learnt: those that reach the 'client' thresholds,
      or the 'fixed' `threshold`.
    rho: length of the step uphill; the paper's are 0.1, and 1 for CIFAR-100.
    sharpness_weight: of the consistency; 0 takes no step uphill.
    unlabeled_weight: of the cross entropy of pseudo-labels.
    weighting: clients count by their 'status', 1 - tau_k, or 'uniform'.
    server_momentum: of the server's steps along the mean update; 0 is FedAvg.
    clip_norm: global norm of a gradient, at the clients and the server.
    keep_momentum: whether clients and server keep their optimizer's state
      between rounds, which takes as much memory as a model each; else it starts
      anew.
    stats_clients: how many random clients compute statistics after each round
      under norm='static'; 0 is all.
    warmup_passes: before the first round the server trains as long as in this
      many rounds; the paper's 10 are 50 epochs of CIFAR-10, 0 is off. With
      labels at the clients there is no such training.

  Returns:
    The method.

  Raises:
    ValueError: for an unknown choice or a number out of range.
  """
  own = _Settings(threshold, thresholds, rho, sharpness_weight,
                  unlabeled_weight, weighting)
  s = alternate.Settings(
      server_momentum=server_momentum, clip_norm=clip_norm,
      keep_momentum=keep_momentum, stats_clients=stats_clients,
      warmup_passes=warmup_passes)
  task = alternate.with_clipping_and_momentum(task, s)

  def remember(federation: Federation, opt_states: PyTree) -> Memory:
    return Memory(opt_states, jnp.full(
        (federation.num_clients, task.num_classes), threshold, jnp.float32))

  return alternate.method(
      task, s, functools.partial(_client_update, task, s, own), remember,
      assemble.confident_labels(task, lambda memory: memory.thresholds))


def _client_update(task: Task, s: alternate.Settings, own: _Settings,
                   payload: Any, client: Client, key: jax.Array) -> Update:
  keys = jax.random.split(key, 4)
  memory: Memory = client.memory
  table, spent = labeling.probabilities(task, payload.model, client, keys[0])
  labels, sure = table.argmax(-1).astype(jnp.int32), table.max(-1)
  overall, bars = client_thresholds(table, client.shard.num_unlabeled)
  if own.thresholds == 'fixed':
    bars = jnp.full_like(bars, own.threshold)
  kept = labeling.kept(task, client, labels, sure >= bars[labels], keys[1])
  weight = jnp.float32(1)
  if own.weighting == 'status':  # Before the steps: lanes cut the last loop.
    weight, passes = _status(task, payload.model, client, overall, keys[3])
    spent = {**spent, 'forward_passes': spent['forward_passes'] + passes}
  step = functools.partial(_step, task, own, sure[kept.order] >= own.threshold)
  learner, metrics = local_training.resumed(
      task, step, payload.model, memory.opt_state, kept.batches,
      client.round, keys[2])
  takes_part = kept.batches.num_steps > 0
  after = Memory(learner.opt_state if s.keep_momentum else (), bars)
  return alternate.update(
      client, payload.model, learner, tree.where(takes_part, after, memory),
      jnp.where(takes_part, weight, 0), kept.shard.num_unlabeled, metrics,
      spent)


def _status(task: Task, model: Variables, client: Client, overall: jax.Array,
            key: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Computes the weight of a client, float32[], and counts passes for it.

  Without unlabeled rows it is by how sure the model is of the labeled ones;
  else such a client would count most of all.
  """
  rows = jnp.float32(0)
  if task.labels_at == 'clients':
    alone = client.shard.num_unlabeled == 0
    top, rows = labeling.confidence_sum(
        task, lambda inputs, key: task.apply(model, inputs), client, key,
        kind='labeled', wanted=alone)
    overall = jnp.where(alone, top / jnp.maximum(rows, 1), overall)
  # A rounded mean may be above 1, and a compiler may add up two constants, of
  # which 1 would be left.
  return jnp.maximum(1 - overall, 0) + _LEAST, rows


def _step(task: Task, own: _Settings, is_sure: jax.Array, optimizer: Any
          ) -> Step:
  """Makes a step along the two gradients, for `core.local_training.train`.

  Args:
    task: the static choices.
    own: the settings.
    is_sure: bool[U], h_b of each place of the client's table.
    optimizer: of the model.
  """
  def one(learner: Learner, batch: batching.Pair, key: jax.Array) -> Any:
    model, rows = learner.model, batch.unlabeled
    assert rows is not None
    keys = jax.random.split(key)
    views = (network.labeled_view(task, batch.labeled, keys[0]),
             network.strongly(task, rows, keys[1]))

    def forward(params):
      return network.forward(task, model._replace(params=params), *views,
                             key=key)

    def loss_of(logits):
      known, ours = logits
      loss, _ = losses.cross_entropy(ours, rows.labels, rows.mask)
      return objective.total(
          batch, loss, objective.labeled(known, batch.labeled),
          weight=own.unlabeled_weight, labelings=0)

    logits, pull, stats = jax.vjp(forward, model.params, has_aux=True)
    (loss, metrics), slope = jax.value_and_grad(loss_of, has_aux=True)(logits)
    gradient, = pull(slope)
    if own.sharpness_weight:
      gap, uphill = _sharpness(own, forward, model, logits, pull, rows,
                               rows.mask * is_sure[rows.slots])
      loss += own.sharpness_weight * gap
      gradient = tree.add(gradient, tree.scale(uphill, own.sharpness_weight))
      metrics |= {'sharpness_loss': network.over_rows(gap, rows),
                  'forward_passes': 2 * metrics['forward_passes'],
                  'backward_passes': 3 * metrics['backward_passes']}
    params, opt_state = local_training.descend(
        optimizer, gradient, learner.opt_state, model.params)
    stats = network.next_stats(task, model.stats, stats)
    return (Learner(Variables(params, stats), opt_state, learner.memory),
            {'train_loss': loss, **metrics})
  return one


def _sharpness(own: _Settings, forward: Any, model: Variables, logits: Any,
               pull: Any, rows: Any, sure: jax.Array
               ) -> tuple[jax.Array, PyTree]:
  """Computes the consistency with the model uphill, and its gradient there.

  Args:
    own: the settings.
    forward: parameters -> ((labeled, strong) logits, statistics).
    model: W.
    logits: of W.
    pull: the pullback at W, cotangents of the logits -> gradient.
    rows: unlabeled rows of the batch.
    sure: float32[B], h_b.

  Returns:
    float32[], and the gradient at W + epsilon.
  """
  def confident(logits):
    return losses.cross_entropy(logits[1], rows.labels, sure)[0]

  uphill, = pull(jax.grad(confident)(logits))
  worse = tree.add(model.params, ascent(model.params, uphill, rho=own.rho))

  def gap(params):
    (_, theirs), _ = forward(params)
    gaps = losses.kl_rows(jax.lax.stop_gradient(logits[1]), theirs)
    return losses.masked_mean(gaps, sure, total=rows.mask.sum())

  found: tuple[jax.Array, PyTree] = jax.value_and_grad(gap)(worse)
  return found
