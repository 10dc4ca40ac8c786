r"""SemiFL: the received model labels once a round; the server fine-tunes.

Diao et al., SemiFL: Semi-Supervised Federated Learning for Unlabeled Clients
with Alternate Training, NeurIPS 2022, https://arxiv.org/abs/2106.01432.

With weak and strong views :math:`\alpha` and :math:`\omega`, a client that has
received the model f labels all its rows once,

  :math:`\hat y_i = \arg\max_c f(\alpha(x_i))_c`, FIX =
  :math:`\{i: \max_c f(\alpha(x_i))_c \ge \tau\}`,

draws as many rows MIX from all of them, and trains on

  :math:`\ell(f(\omega(x^{fix})), \hat y^{fix})
  + \lambda\, \ell(f(x^{mix}), \hat y^{fix})
  + (1 - \lambda)\, \ell(f(x^{mix}), \hat y^{mix})` with
  :math:`x^{mix} = \lambda \alpha(x^{fix}) + (1 - \lambda) \alpha(x)`.

The authors train with norm='static', nesterov (0.03, momentum 0.9, weight
decay 5e-4), lr_schedule='cosine', 5 epochs a round and batches of 10, at the
server of 250 with over 1000 labels. Their
code labels a weak view and draws one lambda a batch, which it uses as drawn,
not max(lambda, 1 - lambda); so does this. Four things differ. They report the
best round by the test set, which nobody has; here the last one counts. They
draw MIX anew in every epoch; here it is drawn once a round, with the rows of
all batches of a client. Their batch statistics are taken over the
pooled rows, here over each client's, whose rows nobody else may see. And the
variances that label rows and predict are unbiased there, biased here, as in
Flax.
"""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.core import knobs, local_training
from fedjax_ssl.core.local_training import Aux, LossFn
from fedjax_ssl.core.types import (
  Batch,
  Client,
  Method,
  Shard,
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


class _Mixing(NamedTuple):
  """How rows are mixed."""

  alpha: float
  weight: float


@knobs.checked(
    mix_weight=knobs.weight('mixing'))
def semifl(task: Task, *, threshold: float = 0.95, alpha: float = 0.75,
           mix_weight: float = 1.0, server_momentum: float = 0.5,
           clip_norm: float = 1.0, keep_momentum: bool = True,
           stats_clients: int = 0, warmup_passes: int = 0) -> Method:
  """Trains on confident labels that stay for the round, and on blends of them.

  A client without a confident row sits out. Those that train count the same.
  Then the server trains its own epochs on its labels, and its model is the one
  that predicts. With labels at the clients, which the paper does not have, a
  client adds the cross entropy of its own labels, and the server does not
  train.

  Args:
    task: the static choices; if it has a server optimizer, that replaces the
      momentum.
    threshold: confidence tau from which on a row is in FIX; 0 keeps all rows,
      1.1 none, which leaves the server's labels.
    alpha: of Beta(alpha, alpha), from which lambda is drawn; 0 mixes nothing:
      the weak view of FIX takes the place of the blends.
    mix_weight: weight of the loss on blends; 0 leaves strong views.
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
  knobs.check_mixing(alpha)
  s = alternate.Settings(
      server_momentum=server_momentum, clip_norm=clip_norm,
      keep_momentum=keep_momentum, stats_clients=stats_clients,
      warmup_passes=warmup_passes)
  task = alternate.with_clipping_and_momentum(task, s)
  return alternate.method(
      task, s, functools.partial(
          _client_update, task, s, threshold, _Mixing(alpha, mix_weight)),
      remember=lambda federation, opt_states: opt_states,
      pseudo_label=assemble.confident_labels(task, threshold))


def _client_update(task: Task, s: alternate.Settings, threshold: float,
                   mixing: _Mixing, payload: Any, client: Client,
                   key: jax.Array) -> Update:
  keys = jax.random.split(key, 5)
  table, spent = labeling.probabilities(task, payload.model, client, keys[0])
  labels = table.argmax(-1).astype(jnp.int32)
  kept = labeling.kept(task, client, labels, table.max(-1) >= threshold,
                       keys[1])
  made = kept.batches
  if mixing.weight:
    places = drawn(keys[2], client.shard)
    made = batching.together(made, batching.batches(
        task, client.train, kept.shard._replace(
            unlabeled=jnp.asarray(client.shard.unlabeled)[places]),
        keys[3], 'unlabeled', pseudo_labels=labels[places]))
  learner, metrics = local_training.resumed(
      task, alternate.descending(task, _loss_fn(task, mixing)),
      payload.model, client.memory, made, client.round, keys[4])
  return alternate.update(
      client, payload.model, learner,
      learner.opt_state if s.keep_momentum else (),
      (made.num_steps > 0).astype(jnp.float32), kept.shard.num_unlabeled,
      metrics, spent)


def drawn(key: jax.Array, shard: Shard) -> jax.Array:
  """Draws places of a client's unlabeled rows, uniformly with replacement.

  Args:
    key: PRNG key.
    shard: one client's rows.

  Returns:
    int32[U]; padding is never drawn, unless there is nothing else.
  """
  return jax.random.randint(key, shard.unlabeled.shape, 0,
                            jnp.maximum(shard.num_unlabeled, 1), jnp.int32)


def _loss_fn(task: Task, mixing: _Mixing) -> LossFn:
  """Makes the loss of a batch of FIX and, where rows are mixed, one of MIX."""
  def loss_fn(model, given, batch, key):
    del given
    batch, other = batch if mixing.weight else (batch, None)
    fixed, keys = batch.unlabeled, [*jax.random.split(key, 3)]
    (labeled, strong), stats = network.forward(
        task, model, network.labeled_view(task, batch.labeled, keys[0]),
        network.strongly(task, fixed, keys[1]), key=keys[0])
    loss, _ = losses.cross_entropy(strong, fixed.labels, fixed.mask)
    metrics = {}
    if other is not None:
      on_blends, stats = _mixed(task, mixing, model._replace(stats=stats),
                                fixed, other.unlabeled, keys[2])
      loss += mixing.weight * on_blends
      metrics['mixup_loss'] = network.over_rows(on_blends, fixed)
    loss, more = objective.total(
        batch, loss, objective.labeled(labeled, batch.labeled), labelings=0,
        views=2 if mixing.weight else 1)
    return loss, Aux(stats, {**metrics, **more})
  return loss_fn


def _mixed(task: Task, mixing: _Mixing, model: Variables, fixed: Batch,
           other: Batch, key: jax.Array) -> tuple[jax.Array, Any]:
  """Computes the loss of blends, in their own pass, and the new statistics."""
  keys = [*jax.random.split(key, 4)]
  ours, theirs = (network.blendable(task, model, network.weakly(
      task, rows, k)) for rows, k in zip((fixed, other), keys, strict=False))
  lam = losses.mixup_ratio(keys[2], alpha=mixing.alpha) if mixing.alpha else 1.0
  blend = fixed._replace(inputs=losses.mixup(lam, ours.inputs, theirs.inputs))
  (logits,), stats = network.forward(
      network.of_blends(task), model, blend, key=keys[3])
  first, second = (losses.cross_entropy(logits, rows.labels, fixed.mask)[0]
                   for rows in (fixed, other))
  return lam * first + (1 - lam) * second, stats
