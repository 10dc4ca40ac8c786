"""FedTriNet: a client's three networks vote for pseudo-labels, which it keeps.

Che et al., FedTriNet: A Pseudo Labeling Method with Three Players for Federated
Semi-supervised Learning, IEEE Big Data 2021, https://arxiv.org/abs/2109.05612.
Details that the paper leaves open are those of the authors' code. The profile
'official' follows that code but for one thing: there the accepted rows join
the labeled ones. Networks are tuned on them with their true labels, which a
client does not have, the loss on labels counts them too, with their
pseudo-labels, batches mix both kinds, and an epoch ends with the accepted rows.
Here labels are the client's alone, and each step has a batch of either kind, so
that there are fewer. Three more things differ: before the first phase the code
has int(clients / cohort) rounds in which all clients train on their labels, so
that each has a last network of its own; a harvest may be one row short there,
as a first row that is refused counts; and there labelling, row by row, moves
the running statistics of the third network.
"""
from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import optax

from fedjax_ssl import aggregation, losses
from fedjax_ssl.core import checks, knobs, local_training, tree
from fedjax_ssl.core.local_training import Aux, LossFn
from fedjax_ssl.core.types import (
  Array,
  Batch,
  Client,
  Context,
  Federation,
  Method,
  Metrics,
  Number,
  PyTree,
  Ratio,
  Shard,
  Task,
  Update,
  Variables,
  WORK,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.fedtrinet import shared_layers
from fedjax_ssl.methods.parts import assemble, averaging, labeling, network

# Whether the shared layers are frozen while the others are tuned; whether
# networks label in training mode: with dropout, and statistics of one image;
# and whether the client's last network votes. `frozen` was `freezes` when three
# always voted, so that runs of then are not continued as others.
_PROFILES: dict[str, dict[str, bool]] = {
    'paper': {'frozen': True, 'labels_in_training': False,
              'last_votes': True},
    'official': {'frozen': False, 'labels_in_training': True,
                 'last_votes': False},
}
_OUT_OF_REACH = 4.0  # Three probabilities sum to 3 at most.
_FEW = 10  # A round that accepts this many new labels is called a harvest.
_MEASURES = 0xc0  # Folded into the key of what is measured.
_RAMP = (50, 150)  # Epochs between which pseudo-labels gain weight.


class Server(NamedTuple):
  """The server's record."""

  model: Variables
  confidence: jax.Array  # float32[], mean largest probability; 0 is unknown.
  threshold: jax.Array  # float32[], of the next round.


class Memory(NamedTuple):
  """What stays on a client."""

  model: Variables  # As it was after its last round.
  seen: jax.Array  # int32[], rounds it has trained in.
  labels: jax.Array  # int32[U], accepted for good; -1 is none yet.
  harvests: jax.Array  # int32[], rounds that accepted `_FEW` labels or more.


class _Trained(NamedTuple):
  """What a client's round gives in either phase."""

  model: Variables
  rows: jax.Array  # int32[], rows that it learnt from.
  memory: Memory
  metrics: Metrics


class _Settings(NamedTuple):
  """The knobs of `fedtrinet`, resolved."""

  frozen: bool
  labels_in_training: bool
  last_votes: bool
  first_phase: int  # Rounds.
  num_shared: int
  scale: float
  protected: bool
  final_weight: float


def threshold_at(confidence: Number, phase_round: Number, *,
                 scale: float = 2.8, protected: bool = True) -> jax.Array:
  """Computes the sum of three probabilities that a label needs.

  With b = scale * confidence: b in the first 10 rounds of the second phase,
  b (100 - 2 t) / 100 in its rounds 10 to 34, then b / 2.

  Args:
    confidence: float32[], mean largest probability of the global model; 0 is
      unknown and accepts nothing.
    phase_round: t, int32[], from 0; below 0 nothing is accepted.
    scale: factor on the confidence; 3 would be three networks as sure as that.
    protected: whether it is b / 2 from round 35 on; else it falls on to 0.

  Returns:
    float32[].
  """
  t = jnp.asarray(phase_round, jnp.float32)
  bar = scale * jnp.asarray(confidence, jnp.float32)
  falling = bar * jnp.maximum(100 - 2 * t, 0) / 100
  late = bar / 2 if protected else falling
  value = jnp.where(t < 10, bar, jnp.where(t < 35, falling, late))
  return jnp.where((t >= 0) & (jnp.asarray(confidence) > 0), value,
                   _OUT_OF_REACH)


def vote(logits: Array, threshold: Number) -> tuple[jax.Array, jax.Array]:
  """Finds the class with the largest sum of probabilities over the networks.

  Args:
    logits: float[V, B, C], one prediction per network.
    threshold: float32[], what that sum must reach; 0 accepts all, above V
      none.

  Returns:
    int32[B] classes and float32[B], 1 for an accepted row.
  """
  total = jax.nn.softmax(jnp.asarray(logits, jnp.float32)).sum(0)
  return losses.hard_label(total, threshold=threshold)


@knobs.checked(
    _PROFILES, scale=knobs.Bound(0, 6, cases=(
        knobs.at(0, 'every unlabeled row gets a label'),)),
    final_weight=knobs.weight('learning from accepted labels'),
    num_shared=knobs.whole(0, 2**31 - 1),
    pretrain=knobs.share(
        knobs.at(1, 'only labels are learnt, in the first phase')))
def fedtrinet(task: Task, *, profile: str = 'paper', pretrain: float = 0.4,
              num_shared: int = 1, scale: float = 2.8,
              protected: bool = True, final_weight: float = 0.15,
              keep_local: bool = False) -> Method:
  """Trains on labels, then also on labels that a client's networks vote for.

  The first phase is FedAvg with equal weights. In the second, a client has
  three networks: the received one; its own last one (the received one in its
  first round); and a third one, with the first layers of the received network
  and the later layers of its own last one, which it tunes on its labels. For
  each row the probabilities of the three are added, in 'official' those of the
  first and the third. A row whose largest sum reaches a threshold gets that
  class as its label for good. Then the client trains the third network and
  sends it. The loss is the cross entropy of labeled and accepted rows together.
  Once a round has accepted 10 labels, it is (CE_labeled + a CE_accepted) / 2,
  where a rises from 0. All clients count the same. The thresholds and a follow
  the rounds and epochs of the authors' phase 2 of 60 rounds, not shares of a
  run: a shorter one ends before they do.
  Clients without labels are ours: a is small, so after their first harvest they
  hardly move.

  Args:
    task: the static choices; labels must be at the clients. The authors train
      5 epochs a round with batches of 50.
    profile: 'paper'; or 'official', as in the authors' code for color images:
      nothing is frozen while tuning, labels come from networks in training
      mode, image by image, and a client's own last network does not vote (the
      code's option of selection, which is on). The threshold stays, so where
      the received network is sure, two may not reach it in the first 10 rounds.
      Both profiles measure on the clients' unlabeled images, where the code
      takes the test images.
    pretrain: share of the run that is the first phase, at least a round; the
      authors' is 40 of 100 rounds, 1 is the first phase alone.
    num_shared: first layers that the third network takes from the server:
      convolutions with their normalization, or dense layers in networks
      without. The authors share 1, or 2 of their network for digits.
    scale: the first threshold over the mean largest probability, 0 to 6; 0
      accepts every row. That is measured in the last round of phase 1 on the
      model which the clients receive in it, one average before the authors'.
    protected: whether the threshold, which falls from round 10 of the second
      phase on, goes back to half of its first value in round 35; else it falls
      on to 0 in round 50.
    final_weight: of accepted labels, the last value of a; the code has .5 in a
      routine that it does not call.
    keep_local: report the accuracy of the clients' last models, which are kept
      in any case.

  Returns:
    The method; evaluation judges the labels that these networks would give in
    prediction, the third one untuned.

  Raises:
    ValueError: for an unknown profile, a number out of range, or labels at
      the server.
  """
  chosen = _PROFILES[checks.check('profile', profile, _PROFILES)]
  checks.labels_at_clients(task.labels_at,
                           'they tune and train on labels of their own')
  first_phase = max(1, round(
      pretrain * task.horizon(f'pretrain={pretrain}')))
  s = _Settings(**chosen, first_phase=first_phase, num_shared=num_shared,
                scale=scale, protected=protected, final_weight=final_weight)
  return assemble.assemble(
      task, init=functools.partial(_init, task, s),
      client_update=functools.partial(_client_update, task, s),
      aggregate=aggregation.linear(
          functools.partial(_finish, s), replaceable=False),
      work=functools.partial(_work, task),
      local_model=(lambda row: row.model) if keep_local else None,
      pseudo_label=functools.partial(_pseudo_label, task, s))


def _init(task: Task, s: _Settings, key: jax.Array, federation: Federation
          ) -> tuple[Server, Memory]:
  if federation.stream is not None:
    raise ValueError('fedtrinet keeps a label for each unlabeled row of a '
                     'client, so it cannot run on a stream of tasks.')
  model = assemble.new_model(task, key)
  shared_layers.shared_layers(model.params, s.num_shared)  # Refuses too many.
  size = federation.num_clients
  rows = federation.clients.unlabeled.shape
  none = jnp.zeros(size, jnp.int32)
  return (Server(model, jnp.float32(0), jnp.float32(_OUT_OF_REACH)),
          Memory(tree.repeat(model, size), none,
                 jnp.full(rows, -1, jnp.int32), none))


def _work(task: Task, shard: Shard) -> jax.Array:
  """Counts the steps of a client, int32[]."""
  return (batching.num_steps(task, shard, 'labeled')
          + batching.num_steps(task.one_pass(), shard, 'unlabeled'))


def _supervised(task: Task) -> LossFn:
  return averaging.keeping_stats(task, averaging.supervised(task))


def _three(s: _Settings, received: Variables, memory: Memory
           ) -> tuple[Variables, Variables]:
  """Returns the client's last model, and the third one, not tuned yet."""
  last = tree.where(memory.seen > 0, memory.model, received)
  shared = shared_layers.shared_layers(last.params, s.num_shared)
  return last, Variables(*(shared_layers.combine(first, later, shared)
                           for first, later in zip(received, last,
                                                   strict=True)))


def _voters(s: _Settings, received: Variables, last: Variables,
            third: Variables) -> tuple[Variables, ...]:
  """Returns the networks whose probabilities are added."""
  return (received, last, third) if s.last_votes else (received, third)


def _client_update(task: Task, s: _Settings, payload: Server, client: Client,
                   key: jax.Array) -> Update:
  """Does one client's round.

  In the first phase it trains on its labels (`_pretraining`), in the second
  also on labels that its three networks vote for (`_with_labels`). In the last
  round of the first phase, and later if the server still has no `confidence`,
  the client measures that of the received model on its unlabeled rows. It sends
  the sum and the number of these rows in `Update.counts`, and 1 if it trained.
  """
  model, rows, memory, metrics = lax.cond(
      client.round < s.first_phase, functools.partial(_pretraining, task),
      functools.partial(_with_labels, task, s), payload, client, key)
  sureness = labeling.confidence_sum(
      task, functools.partial(_predict, task, s, payload.model), client,
      jax.random.fold_in(key, _MEASURES),
      kind='unlabeled', wanted=(client.round >= s.first_phase - 1)
      & (payload.confidence == 0))
  metrics['forward_passes'] += sureness[1]
  trained = rows > 0
  share = trained.astype(jnp.float32)
  metrics['train_loss'] = Ratio(metrics['train_loss'] * share, share)
  memory = memory._replace(
      model=tree.where(trained, model, memory.model),
      seen=memory.seen + trained)
  metrics['mask_rate'] = Ratio(
      (memory.labels >= 0).sum().astype(jnp.float32),
      jnp.asarray(client.shard.num_unlabeled, jnp.float32))
  delta = tree.subtract(model, payload.model)
  counts = jnp.append(sureness, share)
  # A client that only measures has a weight, so that its counts arrive;
  # `_finish` divides by the share of those that trained.
  weight = jnp.maximum(share, sureness[1] > 0)
  return Update(delta, weight, memory, metrics, counts=counts)


def _pretraining(task: Task, payload: Server, client: Client, key: jax.Array
                 ) -> _Trained:
  """Does a client's round in the first phase: FedAvg."""
  model, _, metrics = averaging.train_locally(
      task, _supervised(task), payload.model, client.train, client.shard,
      client.round, key, 'labeled')
  rows = jnp.asarray(client.shard.num_labeled)
  return _Trained(model, rows, client.memory, metrics)


def _with_labels(task: Task, s: _Settings, payload: Server, client: Client,
                 key: jax.Array) -> _Trained:
  """Does a client's round in the second phase: tune, label, train on both."""
  memory: Memory = client.memory
  keys = jax.random.split(key, 3)
  last, third = _three(s, payload.model, memory)
  third, tuned = _tune(task, s, third, client, keys[0])
  labels, labeled = _label_rows(
      task, s, _voters(s, payload.model, last, third), client,
      payload.threshold, keys[1])
  new = ((labels >= 0) & (memory.labels < 0)).sum()
  harvests = memory.harvests + (new >= _FEW)
  model, metrics = _train_on_both(task, s, third, client, labels, harvests,
                                  keys[2])
  for name in WORK:
    metrics[name] += tuned[name] + labeled[name]
  rows = jnp.asarray(client.shard.num_labeled) + (labels >= 0).sum(
      dtype=jnp.int32)
  memory = memory._replace(labels=labels, harvests=harvests.astype(jnp.int32))
  return _Trained(model, rows, memory, metrics)


def _predict(task: Task, s: _Settings, model: Variables, inputs: jax.Array,
             key: jax.Array) -> jax.Array:
  """Computes the logits float32[B, C] by which a network votes."""
  if not s.labels_in_training:
    return task.apply(model, inputs)
  def alone(image, key):
    return task.apply_train(model, image[None], jnp.ones(1), key)[0][0]
  return jax.vmap(alone)(inputs, jax.random.split(key, inputs.shape[0]))


def _label_rows(task: Task, s: _Settings, models: Sequence[Variables],
                client: Client, threshold: jax.Array, key: jax.Array
                ) -> tuple[jax.Array, Metrics]:
  """Adds the labels that the three networks accept now to a client's table."""
  labels = client.memory.labels
  shard, order = batching.select_unlabeled(client.shard, labels < 0)
  order_key, step_key = jax.random.split(key)

  def step(labels, batch, key):
    rows = batch.unlabeled
    found, sure = vote(jnp.stack([
        _predict(task, s, m, rows.inputs, jax.random.fold_in(key, i))
        for i, m in enumerate(models)]), threshold)
    # Rows not accepted go to a place beyond the table, where they are dropped.
    place = jnp.where(sure * rows.mask > 0, order[rows.slots],
                      labels.shape[0])
    return labels.at[place].set(found, mode='drop'), {
        'forward_passes': len(models) * rows.mask.sum(),
        'backward_passes': jnp.float32(0)}

  return local_training.train(
      step, labels, batching.batches(task.one_pass(), client.train, shard,
                                     order_key, 'unlabeled'), step_key)


def _tune(task: Task, s: _Settings, model: Variables, client: Client,
          key: jax.Array) -> tuple[Variables, Metrics]:
  """Tunes the third network on labels, for the task's epochs."""
  shared = shared_layers.shared_layers(model.params, s.num_shared)
  def frozen(round_: Number) -> optax.GradientTransformation:
    return shared_layers.freeze(task.optimizer(round_), model.params, shared)
  tuned, _, metrics = averaging.train_locally(
      dataclasses.replace(task, optimizer=frozen) if s.frozen else task,
      _supervised(task), model, client.train, client.shard, client.round, key,
      'labeled')
  if s.frozen:
    tuned = tuned._replace(stats=shared_layers.combine(
        model.stats, tuned.stats, shared))
  return tuned, metrics


def _train_on_both(task: Task, s: _Settings, model: Variables, client: Client,
                   labels: jax.Array, harvests: jax.Array, key: jax.Array
                   ) -> tuple[Variables, Metrics]:
  """Trains the third network on the client's labels and the accepted ones."""
  shard, order = batching.select_unlabeled(client.shard, labels >= 0)
  order_key, step_key = jax.random.split(key)
  made = batching.batches(task, client.train, shard, order_key, 'both',
                          client.round, pseudo_labels=labels[order])
  t = client.round - s.first_phase
  optimizer = task.optimizer(client.round)

  def loss(now, step, batch, key):
    keys = jax.random.split(key)
    known = network.labeled_view(task, batch.labeled, keys[0])
    given = network.weakly(task, batch.unlabeled, keys[1])
    (ours, theirs), stats = _pass(task, now, known, given, harvests, key)
    on_known = losses.cross_entropy(ours, known.labels, known.mask)[0]
    on_given = losses.cross_entropy(theirs, given.labels, given.mask)[0]
    n, m = known.mask.sum(), given.mask.sum()
    together = (n * on_known + m * on_given) / jnp.maximum(n + m, 1)
    epoch = step * task.local_epochs // jnp.maximum(made.num_steps, 1)
    clock = jnp.clip((5 * t + epoch - _RAMP[0]) / (_RAMP[1] - _RAMP[0]), 0, 1)
    apart = (on_known + s.final_weight * clock * on_given) / 2
    stats = network.next_stats(task, now.stats, stats)
    return jnp.where(harvests > 0, apart, together), Aux(stats, {}, step + 1)

  learner, metrics = local_training.train(
      local_training.gradient_step(loss, optimizer),
      local_training.start(model, optimizer, jnp.int32(0)), made, step_key)
  return learner.model, metrics


def _pass(task: Task, model: Variables, known: Batch, given: Batch,
          harvests: jax.Array, key: jax.Array
          ) -> tuple[list[jax.Array], PyTree]:
  """Passes both kinds of rows; after a harvest each is a batch of its own."""
  together, apart = (functools.partial(run, task, model, known, given, key=key)
                     for run in (network.forward, network.forward_apart))
  # Without batch statistics they are the same.
  return (lax.cond(harvests > 0, apart, together)
          if network.is_coupled(task) else together())


def _finish(s: _Settings, record: Server, mean: Any, cohort: Any,
            context: Context, key: Any) -> tuple[Server, Metrics]:
  """Adds the mean over those that trained; sets the next round's threshold."""
  del cohort, key
  delta, (top, rows, share) = mean
  confidence = jnp.where(rows > 0, top / jnp.maximum(rows, 1e-30),
                         record.confidence)
  delta = tree.scale(delta, 1 / jnp.where(share > 0, share, 1))
  bar = threshold_at(confidence, context.round + 1 - s.first_phase,
                     scale=s.scale, protected=s.protected)
  return Server(assemble.added(record.model, delta), confidence, bar), {}


def _pseudo_label(task: Task, s: _Settings, record: Server, memory: Memory,
                  inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Labels rows as the three networks would, the third one not tuned."""
  last, third = _three(s, record.model, memory)
  return vote(jnp.stack([task.apply(m, inputs) for m in _voters(
      s, record.model, last, third)]), record.threshold)
