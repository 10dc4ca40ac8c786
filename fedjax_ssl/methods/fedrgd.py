r"""FedRGD: clients in random groups, whose models are averaged apart.

Zhang et al., Improving Semi-supervised Federated Learning by Reducing the
Gradient Diversity of Models, https://arxiv.org/abs/2008.11364. The authors'
code is
jhcknzzm/SSFL-Benchmarking-Semi-supervised-Federated-Learning.

A round deals the clients that take part to S groups :math:`G_i` at random. A
client of a group starts from the group's model :math:`w_i` and minimises
FixMatch's loss of rows without labels, with weak and strong views
:math:`\alpha` and :math:`\omega`,

  :math:`mean_b\, 1[\max p_b \ge \tau]\, \ell(f(\omega(u_b)), \arg\max p_b)`
  with :math:`p_b = f(\alpha(u_b))`.

At the same time the server trains on its labels from the mean of all groups'
models to :math:`w_s`, and is a member of every group:

  :math:`w_i \to (w_s + \sum_{k \in G_i} w_k) / (|G_i| + 1)`.

The mean of these predicts. With S = 1 this is FedAvg with the server as one
more client. The paper's other proposal is norm='group' for norm='batch'.

Where labels are at the clients, the server is no member, and clients add the
cross entropy of their labels. Then 'paper' and 'code' differ: in the code each
view of an unlabeled row, weak or strong, learns the pseudo-label of its own
prediction. With labels at the server both are the same.

In the code momentum belongs to a place in a group and passes to the client that
takes this place next, and an epoch's first round has one step more. Here
optimizers start afresh in each round, and the task sets the number of steps.
The code averages parameters alone; here statistics of norm='batch' are averaged
with them. There each group trains a copy of the server's model on batches of
its own; here all groups share :math:`w_s`.
With labels at the clients the code then averages the first client of the first
group with the last one of the last, and lets these two go on from that; here
all clients go on from their groups' models. SemiFL's tables have another
FedRGD: all clients of the next round receive the mean of the groups,
apart=False, and the server has a momentum.
"""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl import aggregation, losses
from fedjax_ssl.core import (
  checks,
  client_weights,
  knobs,
  sampling,
  tree,
)
from fedjax_ssl.core.local_training import Aux, LossFn
from fedjax_ssl.core.types import (
  Client,
  Cohort,
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
  network,
  objective,
)

_PROFILES = {'paper': {'own_labels': False}, 'code': {'own_labels': True}}


class Server(NamedTuple):
  """The server's record.

  Attributes:
    model: the mean of the groups' models, which predicts; within a round what
      the server has made of it by its labels.
    groups: the models [S, ...], of which clients receive their group's.
  """

  model: Variables
  groups: Variables


def group_means(groups: Variables, moves: Variables, weights: jax.Array,
                own: Variables, own_weight: jax.Array | float) -> Variables:
  """Averages every group's models, and the server's with each.

  Args:
    groups: [S, ...], models that the groups' clients started from.
    moves: [S, K, ...], what these changed.
    weights: float32[S, K], how much each counts.
    own: the server's model.
    own_weight: how much that counts; 0 leaves it out.

  Returns:
    The models [S, ...]; a group whose weights are all 0 keeps its model.
  """
  def one(model: Variables, moves: Variables, weights: jax.Array) -> Variables:
    all_moves = jax.tree.map(
        lambda x, mine: jnp.concatenate([x, mine[None]]), moves,
        tree.subtract(own, model))
    return assemble.added(model, aggregation.weighted_mean(
        all_moves, jnp.append(weights, own_weight)))
  return jax.vmap(one)(groups, moves, weights)


@knobs.checked(_PROFILES, groups=knobs.Bound(1, 1000, whole=True, cases=(
    knobs.at(1, 'all clients are one group'),)))
def fedrgd(task: Task, *, profile: str = 'paper', groups: int = 2,
           threshold: float = 0.95, unlabeled_weight: float = 1.0,
           apart: bool = True, own_labels: bool | None = None) -> Method:
  """Trains FixMatch in random groups, which a server with labels joins.

  All clients with rows count the same. Pseudo-labels and accuracy are those of
  the mean of the groups' models.

  Args:
    task: the static choices.
    profile: 'paper' or 'code', see the module's docstring. It stands for
      `own_labels` where that is not given.
    groups: S, at most the clients of a round; 1 is FedAvg's mean. The authors'
      2 are for 10 clients, and 5 for 47.
    threshold: confidence tau from which on a row counts; 0 keeps all rows, 1.1
      none.
    unlabeled_weight: of the loss of rows without labels; 0 leaves labels.
    apart: whether groups go on from their own models; False: all receive the
      mean.
    own_labels: whether, with labels at the clients, every view learns its own
      pseudo-label, instead of the strong view that of the weak one.

  Returns:
    The method; its server's record is `Server`.

  Raises:
    ValueError: for an unknown profile, or more groups than clients in a round.
  """
  chosen = checks.profile(_PROFILES, profile, own_labels=own_labels)
  at_clients = task.labels_at == 'clients'
  streams = task.client_streams
  loss_fn = averaging.keeping_stats(
      task, (_own_labels if chosen['own_labels'] and at_clients
             else objective.fixmatch)(task, threshold, unlabeled_weight))

  def init(key: jax.Array, federation: Federation) -> tuple[Server, PyTree]:
    del federation
    model = assemble.new_model(task, key)
    return Server(model, tree.repeat(model, groups)), ()

  def client_update(payload: Any, client: Client, key: jax.Array) -> Update:
    model, _, metrics = averaging.train_locally(
        task, loss_fn, payload.model, client.train, client.shard, client.round,
        key, streams)
    return Update(
        tree.subtract(model, payload.model), client_weights.client_weight(
            client.shard, streams, weighting='uniform'),
        client.memory, metrics)

  return assemble.assemble(
      task, init=init, client_update=client_update,
      aggregate=functools.partial(_aggregate, at_clients, apart),
      sample=sampling.split(groups, task.cohort_size),
      broadcast=lambda server, client_id, group: assemble.Server(
          tree.take(server.groups, group)),
      work=lambda shard: batching.num_steps(task, shard, streams),
      on_labels=functools.partial(averaging.on_labels, task),
      renew=all_statistics.if_static(task),
      pseudo_label=assemble.confident_labels(task, threshold))


def _own_labels(task: Task, threshold: float, weight: float) -> LossFn:
  """Makes the loss in which each view learns its own label."""
  def loss_fn(model, given, batch, key):
    del given
    weak, labeled, strong = network.views(task, batch, key)
    (known, *other), stats = network.forward(
        task, model, labeled, weak, strong, key=key)
    logits = jnp.concatenate(other)
    loss, used = losses.fixmatch(
        logits, jax.lax.stop_gradient(logits),
        jnp.concatenate([strong.mask, strong.mask]), threshold=threshold)
    loss, metrics = objective.total(
        batch, loss, objective.labeled(known, batch.labeled), weight=weight,
        mask_rate=used['mask_rate'], labelings=0, views=2)
    return loss, Aux(stats, metrics)
  return loss_fn


def _aggregate(at_clients: bool, apart: bool, server: Server, updates: Update,
               cohort: Cohort, context: Context, key: jax.Array
               ) -> tuple[Server, Metrics]:
  del cohort, key
  member = (0.0 if at_clients
            else jnp.asarray(context.shard.num_labeled > 0, jnp.float32))
  after = group_means(server.groups, updates.message, updates.weight,
                      server.model, member)
  mean = jax.tree.map(lambda x: tree.narrowed(x.mean(0), x.dtype), after)
  if not apart:
    after = jax.tree.map(lambda x, y: jnp.broadcast_to(y, x.shape), after,
                         mean)
  return Server(mean, after), {}
