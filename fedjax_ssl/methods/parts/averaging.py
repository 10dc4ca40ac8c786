"""The shape most methods share: train locally, average the updates.

A loss for `averaging` is `loss_fn(model, anchor, batch, key) -> (loss,
(stats, metrics))`: `model` and `anchor` are `Variables`, the anchor being what
the client received; `batch` is a `data.batching.Pair` in which a stream that
is not used is None; `stats` are the normalization statistics after the batch.
A loss that keeps something on the client takes one argument more, `memory`,
and returns (stats, metrics, memory).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl import aggregation, losses
from fedjax_ssl.core import (
    checks,
    client_weights,
    knobs,
    local_training,
    rounds,
    sampling,
    tree,
)
from fedjax_ssl.core.types import (
  Array,
  Batch,
  Client,
  Context,
  Examples,
  Federation,
  Method,
  Metrics,
  PyTree,
  Ratio,
  Shard,
  State,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching

LossFn = Callable[..., tuple[jax.Array, tuple[PyTree, Metrics]]]
# (updates with a leading axis of clients, float32[S] weights) -> one update.
Aggregator = Callable[[PyTree, jax.Array], PyTree]

SERVERS = ('fedavg', 'fedprox', 'local')
# Norms whose statistics couple the rows of a batch: all views go through the
# network together, as in the authors' code of most methods.
_COUPLED = ('batch', 'static')


class Server(NamedTuple):
  """The server's record of a method that only averages."""

  model: Variables


def over_rows(mean: jax.Array, batch: Batch) -> Ratio:
  """A batch's mean as a metric in which every real row counts the same."""
  rows = batch.mask.sum()
  return Ratio(mean * rows, rows)


def forward(task: Task, model: Variables, *views: Batch | None,
            key: jax.Array | None = None) -> tuple[list[Any], PyTree]:
  """One training pass of the network over several views together.

  Args:
    task: has the network.
    model: its variables.
    *views: raw inputs with masks; None is passed over.
    key: of the step, for networks with dropout; None drops nothing.

  Returns:
    Logits float32[B, C] per view (None for None) and the new statistics.
  """
  real = [view for view in views if view is not None]
  inputs = jnp.concatenate([view.inputs for view in real])
  mask = jnp.concatenate([view.mask for view in real])
  key = None if key is None else jax.random.fold_in(key, 0xd0)
  logits, stats = task.apply_train(model, inputs, mask, key)
  ends = [sum(v.mask.shape[0] for v in real[:i + 1])
          for i in range(len(real) - 1)]
  parts = iter(jnp.split(logits, ends))
  return [None if view is None else next(parts) for view in views], stats


def forward_with_targets(task: Task, model: Variables, targets: Batch,
                         *views: Batch | None, key: jax.Array | None = None
                         ) -> tuple[jax.Array, list[Any], PyTree]:
  """As `forward`, with one more view that only serves as a target.

  Without batch statistics the target view needs no gradient and gets its own
  pass; with them it belongs to the batch.

  Returns:
    The target's logits with gradients stopped, the views' logits, statistics.
  """
  if task.model.norm in _COUPLED:
    (target, *rest), stats = forward(task, model, targets, *views, key=key)
    return jax.lax.stop_gradient(target), rest, stats
  fixed = jax.lax.stop_gradient(model)
  (target,), _ = forward(task, fixed, targets)
  rest, stats = forward(task, model, *views, key=key)
  return jax.lax.stop_gradient(target), rest, stats


def joined(batches: Sequence[Batch]) -> Batch:
  """One batch of all rows; places in tables are dropped."""
  return Batch(jnp.concatenate([b.inputs for b in batches]),
               jnp.concatenate([b.labels for b in batches]),
               jnp.concatenate([b.mask for b in batches]))


def weakly(task: Task, batch: Any, key: jax.Array) -> Any:
  """The batch's weak view; None for None."""
  if batch is None:
    return None
  return batch._replace(inputs=task.weak(key, batch.inputs))


def labeled_view(task: Task, batch: Any, key: jax.Array) -> Any:
  """The labeled rows as the loss sees them; None for None."""
  if batch is None or task.labeled_view is None:
    return weakly(task, batch, key)
  return batch._replace(inputs=task.labeled_view(key, batch.inputs))


def strongly(task: Task, batch: Batch, key: jax.Array) -> Batch:
  """The batch's strong view."""
  return batch._replace(inputs=task.strong(key, batch.inputs))


def supervised(task: Task) -> LossFn:
  """Cross entropy on the weakly augmented labeled rows."""
  def loss_fn(model, anchor, batch, key):
    del anchor
    (logits,), stats = forward(
        task, model, labeled_view(task, batch.labeled, key), key=key)
    loss = losses.cross_entropy(logits, batch.labeled.labels,
                                batch.labeled.mask)[0]
    return loss, (stats, {})
  return loss_fn


def with_server_rule(task: Task, loss_fn: LossFn, server: str, mu: float
                      ) -> LossFn:
  """Adds the proximal term; freezes statistics where nobody trains them."""
  def wrapped(model, anchor, batch, key, *memory):
    loss, (stats, *rest) = loss_fn(model, anchor, batch, key, *memory)
    if server == 'fedprox':
      loss += losses.proximal(model.params, anchor.params, mu=mu)
    if task.model.norm == 'static':
      stats = model.stats
    return loss, (stats, *rest)
  return wrapped


def train_locally(task: Task, loss_fn: LossFn, model: Variables,
                  examples: Examples, shard: Shard, round_: Array,
                  key: jax.Array, streams: str, memory: PyTree = None
                  ) -> tuple[Variables, Metrics, PyTree]:
  """A client's or the server's local epochs from `model`.

  With a `memory` the loss takes and returns it, else None comes back.
  """
  order_key, step_key = jax.random.split(key)
  optimizer = task.optimizer(round_)

  def loss(now, memory, batch, key):
    if not keeps:
      value, (stats, metrics) = loss_fn(now, model, batch, key)
      return value, (stats, metrics, ())
    return loss_fn(now, model, batch, key, memory)

  keeps = memory is not None
  learner, metrics = local_training.train(
      local_training.gradient_step(loss, optimizer),
      local_training.start(model, optimizer, memory if keeps else ()),
      batching.batches(task, examples, shard, order_key, streams, round_),
      step_key)
  return learner.model, metrics, learner.memory if keeps else None


def server_training(task: Task, loss_fn: LossFn) -> rounds.Pass:
  """The pass in which the server trains on its own labels."""
  loss_fn = with_server_rule(task, loss_fn, 'fedavg', 0.0)

  def update(server, context: Context, key):
    model, metrics, _ = train_locally(
        task, loss_fn, server.model, context.train, context.shard,
        context.round, key, 'labeled')
    good = tree.all_finite(model)
    return (server._replace(model=tree.where(good, model, server.model)),
            local_training.of_server(metrics, good))
  return rounds.server_pass(update)


def statistics(task: Task) -> rounds.Pass:
  """Recomputes normalization statistics at the averaged model (SemiFL).

  A cohort of its own averages the batch statistics over one epoch of its rows;
  rows that the server holds do not enter.
  """
  once = dataclasses.replace(task, local_epochs=1, local_steps=0)

  def client_update(payload: Server, client: Client, key) -> Update:
    def step(sums, batch, key):
      del key
      _, stats = forward(task, payload.model, batch.labeled, batch.unlabeled)
      return tree.add(sums, tree.subtract(stats, payload.model.stats)), {}
    made = batching.batches(once, client.train, client.shard, key)
    sums, metrics = local_training.train(step,
                                         tree.zeros_like(payload.model.stats),
                                         made, key)
    steps = jnp.maximum(made.num_steps, 1)
    weight = client_weights.of(client.shard, 'both', weighting='examples')
    del metrics
    return Update(tree.scale(sums, 1 / steps), weight, client.memory, {})

  @aggregation.linear
  def finish(server, mean, cohort, context, key):
    del cohort, context, key
    stats = tree.add(server.model.stats, mean)
    return server._replace(model=server.model._replace(stats=stats)), {}

  return rounds.client_pass(
      task, client_update, finish, sample=sampling.uniform(task.cohort_size),
      work=functools.partial(batching.num_steps, once))


def confident_labels(task: Task, threshold: float, *, strict: bool = False
                     ) -> Callable[..., Any]:
  """The likeliest class of raw inputs, weight 1 from (or above) `threshold`."""
  bar = jnp.nextafter(jnp.float32(threshold), 2) if strict else threshold
  def pseudo_label(record, memory, inputs):
    del memory
    return losses.pseudo_label(task.apply(record.model, inputs), threshold=bar)
  return pseudo_label


def by_rule(rule: Aggregator, finish: Callable[..., Any]
            ) -> Callable[..., Any]:
  """What the server does with updates, by a rule of the user's.

  Args:
    rule: see `averaging`.
    finish: (server, update, cohort, context, key) -> (server, metrics).

  Returns:
    `aggregate` of `core.rounds.client_pass`, for updates of all groups.
  """
  def aggregate(server, updates: Update, cohort, context, key):
    stacked = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:]), updates.message)
    return finish(server, rule(stacked, updates.weight.reshape(-1)), cohort,
                  context, key)
  return aggregate


class _Memory(NamedTuple):
  """A client's memory: what its loss keeps, and its last model."""

  kept: PyTree  # None if the loss keeps nothing.
  model: PyTree  # None if local models are not kept.


@knobs.checked()
def averaging(task: Task, loss_fn: LossFn, *, streams: str,
              server: str = 'fedavg', mu: float = 0.0,
              weighting: str = 'examples', labeled_say: float = 1.0,
              keep_local: bool = False,
              remember: Callable[[Federation], PyTree] | None = None,
              server_loss: LossFn | None = None,
              pseudo_label: Callable[..., Any] | None = None,
              aggregator: Aggregator | None = None) -> Method:
  """FedAvg or FedProx over a client loss, or every client for itself.

  With labels at the server a round first trains the server's model on them;
  then the clients learn from what they hold.

  Args:
    task: the static choices.
    loss_fn: see the module's docstring.
    streams: rows the loss needs: 'both', 'labeled' or 'unlabeled'. With
      labels at the server 'both' becomes 'unlabeled' at the clients.
    server: 'fedavg'; 'fedprox', which adds mu/2 ||w - w_received||^2; or
      'local': clients go on from their own last model and send nothing. Only
      the cohort trains in a round: let it be everyone for equal effort.
    mu: weight of FedProx's term; 0 is FedAvg, and the others ignore it.
    weighting: clients count by their 'examples' used, or 'uniform'.
    labeled_say: see `say.of`.
    keep_local: keep each client's last trained model, to evaluate it.
    remember: federation -> [N, ...], what the loss keeps on the clients.
    server_loss: what the server minimises on its labels; default cross
      entropy.
    pseudo_label: (server, memory_row, inputs) -> (label, weight), for
      evaluation.
    aggregator: the rule in place of the weighted mean: (updates [S, ...],
      float32[S] weights) -> one update. A client that is left out has weight 0
      and an update of zeros. All else of a round stays: the server's training
      on its labels, and the statistics of norm='static'.

  Returns:
    The method; its server record is `Server`.

  Raises:
    ValueError: for an unknown server or weighting, labeled_say <= 0, mu < 0,
      or local training with labels at the server or static normalization.
  """
  checks.check('server', server, SERVERS)
  client_weights.check(weighting, labeled_say)
  alone = server == 'local'
  if alone and task.labels_at == 'server':
    raise ValueError("server='local' needs labels_at='clients': clients that "
                     'receive nothing would never see a label.')
  if alone and task.model.norm == 'static':
    raise ValueError("server='local' has nobody to recompute the statistics "
                     "of norm='static'; give another norm.")
  if alone and aggregator is not None:
    raise ValueError("server='local' has nothing to aggregate; leave "
                     'aggregator out.')
  keep_local = keep_local or alone
  if task.labels_at == 'server' and streams == 'both':
    streams = 'unlabeled'
  client_loss = with_server_rule(task, loss_fn, server, mu)

  def init(key: jax.Array, federation: Federation) -> State:
    model = jax.jit(task.model.init)(key)
    memory = _Memory(
        None if remember is None else remember(federation),
        tree.repeat(model, federation.num_clients) if keep_local else None)
    return State(Server(model), memory, jnp.int32(0))

  def client_update(payload: Any, client: Client, key) -> Update:
    memory = client.memory
    first = memory.model if alone else payload.model
    model, metrics, kept = train_locally(
        task, client_loss, first, client.train, client.shard, client.round,
        key, streams, memory.kept)
    weight = client_weights.of(client.shard, streams, weighting=weighting,
                               labeled_say=labeled_say)
    if keep_local:
      memory = memory._replace(
          model=tree.where(weight > 0, model, memory.model))
    return Update(() if alone else tree.subtract(model, first), weight,
                  memory._replace(kept=kept), metrics)

  @aggregation.linear
  def finish(record, mean, cohort, context, key):
    del cohort, context, key
    return record._replace(model=Variables(
        optax.apply_updates(record.model.params, mean.params),
        tree.add(record.model.stats, mean.stats))), {}

  aggregate = finish if aggregator is None else by_rule(aggregator, finish)
  passes = [rounds.client_pass(
      task, client_update, None if alone else aggregate,
      broadcast=(lambda record, client_id: ()) if alone else None,
      work=lambda shard: batching.num_steps(task, shard, streams))]
  if task.labels_at == 'server':
    passes.insert(0, server_training(task, server_loss or supervised(task)))
  if task.model.norm == 'static' and not alone:
    passes.append(statistics(task))
  return Method(
      init, rounds.chain(*passes),
      None if alone else lambda s, x: task.apply(s.model, x),
      local_predict=(lambda s, row, x: task.apply(row.model, x))
      if keep_local else None,
      pseudo_label=None if alone else pseudo_label,
      client_update=client_update, aggregate=None if alone else aggregate)
