"""RSCFed: mean teachers, sub-consensus models, distance-reweighted means.

Liang et al., RSCFed: Random Sampling Consensus Federated Semi-supervised
Learning, CVPR 2022, https://arxiv.org/abs/2203.13993.
"""
from __future__ import annotations

from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl import aggregation, losses
from fedjax_ssl.core import checks, client_weights, knobs, tree
from fedjax_ssl.core.local_training import Aux, LossFn
from fedjax_ssl.core.types import (
  Array,
  Client,
  Cohort,
  Context,
  Federation,
  Method,
  Metrics,
  Number,
  PyTree,
  Task,
  Update,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import (
  assemble,
  labeled_clients,
  mean_teacher,
  network,
)

# `stats` is `teacher_stats` of `mean_teacher.step`; the others are knobs.
_PROFILES: dict[str, dict[str, Any]] = {
    'official': {
        'labeled_beta': 100.0, 'beta': 1e4, 'labeled_multiplier': 6.0,
        'distance': 'sum_of_norms', 'unlabeled_rate': 0.7, 'stats': 'first'},
    'official_isic': {
        'labeled_beta': 0.01, 'beta': 0.01, 'labeled_multiplier': 200.0,
        'distance': 'sum_of_norms', 'unlabeled_rate': 0.5, 'stats': 'first'},
    'paper': {
        'labeled_beta': 1e4, 'beta': 1e4, 'labeled_multiplier': 1.0,
        'distance': 'global_norm', 'unlabeled_rate': 0.7, 'stats': 'student'},
}


def mean_teacher_loss(logits: Array, teacher_logits: Array, mask: Array, *,
                      temperature: Number = 0.5, total: Number | None = None
                      ) -> tuple[jax.Array, Metrics]:
  r"""Computes the squared distance to a sharpened teacher.

  :math:`\frac1B \sum_i \sum_c (p_{ic} - q_{ic}^{1/T} / \sum_v q_{iv}^{1/T})^2`.

  Args:
    logits: float[B, C] of the student on one view.
    teacher_logits: float[B, C] of the teacher on another, constants.
    mask: float32[B].
    temperature: T; 1 does not sharpen, 0 is one-hot.
    total: rows to divide by; None is the number of real ones.

  Returns:
    float32[], and the metrics of `losses.consistency`.
  """
  targets = losses.soft_pseudo_label(
      teacher_logits[None], temperature=temperature)
  return losses.consistency(logits, targets, mask, total=total)


def aggregate_groups(updates: PyTree, num_examples: Array, labeled: Array, *,
                     beta: Number = 1e4, labeled_beta: Number = 100.0,
                     labeled_multiplier: Number = 6.0,
                     distance: str = 'sum_of_norms',
                     first_multiplier: Array | None = None) -> PyTree:
  r"""Aggregates as RSCFed does: the plain mean of the groups' weighted means.

  Inside a group the weights are those of
  `aggregation.distance_reweighted_mean`, with `labeled_beta` where a client
  of the group has labels and `beta` where none has.

  Args:
    updates: pytree of [G, S, ...], the clients' updates or models.
    num_examples: float32[G, S], rows of each client; 0 leaves it out.
    labeled: bool[G, S].
    beta: examples per unit of distance; 0 is FedAvg, infinity takes the nearest
      client alone.
    labeled_beta: the same for groups with labels.
    labeled_multiplier: factor on the weight of labeled clients, before the mean
      from which distances are measured and once more after it; 1 is off.
    distance: 'sum_of_norms' or 'global_norm'.
    first_multiplier: float32[G], replaces the first of the two factors; None is
      `labeled_multiplier`.

  Returns:
    The pytree without the two axes. Groups in which nobody has examples do not
    count; if there are no others it is 0.

  References:
    Liang et al., RSCFed, CVPR 2022, https://arxiv.org/abs/2203.13993.
  """
  groups, size = num_examples.shape
  present = num_examples > 0
  flat = jax.tree.map(lambda x: x.reshape(groups * size, *x.shape[2:]),
                      updates)
  mean = aggregation.sub_consensus_mean(
      flat, num_examples.reshape(-1),
      jnp.arange(groups * size).reshape(groups, size),
      beta=jnp.where((labeled & present).any(1), labeled_beta, beta),
      labeled=labeled.reshape(-1), labeled_multiplier=labeled_multiplier,
      distance=distance, first_multiplier=first_multiplier)
  filled = present.any(1).sum()
  return tree.scale(mean, groups / jnp.maximum(filled, 1))


@knobs.checked(
    _PROFILES, distance=knobs.word(*aggregation.DISTANCES),
    beta=knobs.Bound(infinite=True, cases=(
        knobs.at(0, 'groups are averaged as in FedAvg'),)),
    groups=knobs.whole(1, 1000),
    labeled_beta=knobs.Bound(infinite=True, cases=(
        knobs.at(0, 'groups with labels are averaged as in FedAvg'),)),
    labeled_multiplier=knobs.Bound(cases=(
        knobs.at(0, 'clients with labels do not count in their groups'),)))
def rscfed(task: Task, *, profile: str = 'official', groups: int = 3,
           unlabeled_weight: float = 0.02, temperature: float = 0.5,
           decay: float = 0.999, clip_norm: float = 5.0,
           unlabeled_rate: float | None = None, beta: float | None = None,
           labeled_beta: float | None = None,
           labeled_multiplier: float | None = None,
           distance: str | None = None, warmup: float = 0.007,
           literal: bool = False) -> Method:
  """Averages models of random groups of clients; near models count more.

  Clients with labels minimise cross entropy on weak views, the others the
  squared distance to their own sharpened mean teacher on another weak view; a
  client with both kinds of rows minimises the sum. A round draws `groups`
  groups of `task.cohort_size` clients (the paper's: 3 groups of 5). All
  start from the server's model; teacher and optimizer stay on the client, and
  one that is in two groups takes them from the first to the second.
  Normalization statistics are averaged and measured like parameters.

  Args:
    task: the static choices; its learning rate is that of labeled clients.
    profile: 'official', the authors' settings for SVHN and CIFAR-100;
      'official_isic', theirs for ISIC 2018; or 'paper', our reading of the
      method without the code's additions: one beta of 1e4 for all groups, one
      norm over all numbers, no multiplier, and a teacher with its student's
      normalization statistics. In the code it keeps those of its first round.
    groups: M, 1 to 1000.
    unlabeled_weight: lambda_u; 0 leaves unlabeled clients where they start,
      but for weight decay.
    temperature: of the sharpening; 1 does not sharpen.
    decay: of the teacher in the long run; it is lower in the first steps.
    clip_norm: gradients are scaled down to this norm; inf is off.
    unlabeled_rate: learning rate of clients without labels over that of the
      others; None is the profile's, as for the next four.
    beta: scale of the distance in groups without labels, in examples per unit
      of distance: with more rows a client it should be larger. 0 is FedAvg,
      infinity takes the nearest client alone.
    labeled_beta: the same for groups in which a client has labels.
    labeled_multiplier: factor on the weight of labeled clients, before the mean
      from which distances are measured and once more after it; 1 is off. The
      authors' first release ran without the first of the two.
    distance: 'sum_of_norms' over layers, or 'global_norm'.
    warmup: share of the run, rounded up to whole rounds, in which only clients
      with labels train, one group of them, averaged by examples. The authors
      start at round 7 from a model trained like this: for their 1000 rounds
      that is the default, for their 800 of ISIC it is 0.00875.
    literal: whether to follow the released code even where it seems to have a
      slip. It leaves out the first of the two factors in a group without client
      0, even if others in it have labels; with two labeled clients and
      multiplier 6 shares differ by up to .42. And under norm='batch' each
      layer's counter of steps enters the distance, so that a client that takes
      more or fewer steps than the mean counts as far away; the metric
      counted_steps, the steps of a client, is then reported. False multiplies
      labeled clients twice in every group and measures only the model. Both are
      the same if only client 0 has labels and norm is not 'batch'.

  Raises:
    ValueError: for labels at the server, an unknown name or a number out of
      range.
  """
  labeled_clients.check_placement(task)
  chosen = checks.profile(
      _PROFILES, profile, beta=beta, labeled_beta=labeled_beta,
      distance=distance, labeled_multiplier=labeled_multiplier,
      unlabeled_rate=unlabeled_rate)
  counts = literal and task.model.norm == 'batch'
  unlabeled_loss = _unlabeled_loss(task, unlabeled_weight, temperature)

  def client_update(payload: assemble.Server, client: Client, key) -> Update:
    one = mean_teacher.step(task, mean_teacher.supervised(task), unlabeled_loss,
                            task.optimizer(client.round), decay=decay,
                            clip_norm=clip_norm,
                            unlabeled_rate=chosen['unlabeled_rate'],
                            teacher_stats=chosen['stats'])
    model, memory, metrics = mean_teacher.train(task, one, payload.model,
                                                client, key)
    rows = client_weights.client_weight(client.shard, 'both',
                                        weighting='examples')
    if counts:
      metrics['counted_steps'] = jnp.float32(
          batching.num_steps(task, client.shard, 'both'))
    return Update(tree.subtract(model, payload.model), rows, memory, metrics)

  return assemble.assemble(
      task, init=functools.partial(_init, task), client_update=client_update,
      aggregate=functools.partial(
          _aggregate, task, chosen, labeled_clients.warmup_rounds(task, warmup),
          literal),
      sample=labeled_clients.cohorts(task, groups, warmup),
      work=functools.partial(batching.num_steps, task), splits_key=False,
      pseudo_label=mean_teacher.teacher_labels(task))


def _init(task: Task, key: jax.Array, federation: Federation
          ) -> tuple[assemble.Server, mean_teacher.Memory]:
  model = assemble.new_model(task, key)
  return (assemble.Server(model),
          mean_teacher.remember(task, model, federation.num_clients))


def _unlabeled_loss(task: Task, weight: float, temperature: float) -> LossFn:
  """Makes the distance to the sharpened teacher, each on its own weak view."""
  def loss_fn(model, teacher, batch, key):
    keys = jax.random.split(key)
    target = task.apply(teacher, network.weakly(task, batch, keys[0]).inputs)
    (logits,), stats = network.forward(
        task, model, network.weakly(task, batch, keys[1]), key=key)
    loss = mean_teacher_loss(
        logits, target, batch.mask, temperature=temperature,
        total=task.unlabeled_batch or None)[0]
    return weight * loss, Aux(stats, {
        'unlabeled_loss': network.over_rows(loss, batch)})
  return loss_fn


def _aggregate(task: Task, chosen: Mapping[str, Any], warm: int, literal: bool,
               server: assemble.Server, updates: Update, cohort: Cohort,
               context: Context, key: Any) -> tuple[assemble.Server, Metrics]:
  """Moves the server's model by the updates [G, S, ...] of all groups.

  `chosen` are the profile's values; in the first `warm` rounds updates are
  averaged by examples.
  """
  del key
  warming = context.round < warm
  counters: list[jax.Array] = []
  first = None
  if literal:
    there = (cohort.ids == 0) & (updates.weight > 0)
    first = jnp.where(there.any(1), chosen['labeled_multiplier'], 1.0)
    if task.model.norm == 'batch':  # A mean and a variance each.
      layers = len(jax.tree.leaves(server.model.stats)) // 2
      counters = [updates.metrics['counted_steps']] * layers
  mean, _ = aggregate_groups(
      (updates.message, counters), updates.weight,
      updates.metrics['labeled_share'] > 0,
      beta=jnp.where(warming, 0.0, chosen['beta']),
      labeled_beta=jnp.where(warming, 0.0, chosen['labeled_beta']),
      labeled_multiplier=chosen['labeled_multiplier'],
      distance=chosen['distance'], first_multiplier=first)
  return server._replace(model=assemble.added(server.model, mean)), {}
