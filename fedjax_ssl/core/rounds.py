"""A round is a chain of passes; the client axis is added here and nowhere else.

A pass is (state, federation, round, key) -> (state, metrics).
"""
from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl.core import (
  client_map,
  noting,
  partial_memory,
  sampling,
  tree,
)
from fedjax_ssl.core.common_expressions import merge_equal
from fedjax_ssl.core.noting import Aggregate, ClientUpdate, Work
from fedjax_ssl.core.types import (
  Client,
  Cohort,
  Context,
  Federation,
  MEASURABLE,
  Metrics,
  PASS_METRICS,
  PyTree,
  Ratio,
  Shard,
  State,
  Task,
  Update,
)

Pass = Callable[..., tuple[State, Metrics]]
# (server, client_id, group) -> what this client receives.
Broadcast = Callable[[PyTree, jax.Array, jax.Array], PyTree]

_LARGEST = float(jnp.finfo(jnp.float32).max)


def _default_work(shard: Shard) -> jax.Array:
  return jnp.asarray(shard.num_labeled + shard.num_unlabeled)


def whole_record(server: PyTree, client_id: jax.Array, group: jax.Array
                 ) -> PyTree:
  """Broadcasts the server's whole record to a client."""
  del client_id, group
  return server


def chain(*passes: Pass) -> Pass:
  """Runs passes one after another.

  A metric that several passes report is added up if it is in `PASS_METRICS`,
  or a Ratio, which then is the mean over all. Otherwise the last pass's value
  is kept.
  """
  def round_fn(state, federation, round_, key):
    metrics: Metrics = {}
    for i, one in enumerate(passes):
      state, new = one(state, federation, round_, jax.random.fold_in(key, i))
      for name, value in new.items():
        metrics[name] = (tree.add(metrics[name], value)
                         if name in metrics and _adds(name, value) else value)
    return state, metrics
  return round_fn


def _adds(name: str, value: Any) -> bool:
  """Returns whether a metric of several passes or groups is their sum."""
  return isinstance(value, Ratio) or name in PASS_METRICS


def check_fit(task: Task, federation: Federation) -> None:
  """Raises ValueError unless a task is made for what a federation holds."""
  if task.num_classes != federation.num_classes:
    raise ValueError(
        f'The task has num_classes={task.num_classes}, but the federation '
        f'{federation.num_classes}; give both the same number.')
  if task.input_shape is None:
    return
  inputs = federation.train.inputs
  found, wanted = tuple(inputs.shape[1:]), tuple(task.input_shape)
  if found != wanted:
    raise ValueError(f'The task has input_shape={wanted}, but an input of the '
                     f'federation has shape {found}.')
  kind = {1: 'integer', 2: 'floating', 3: 'uint8'}[len(wanted)]
  if not jnp.issubdtype(inputs.dtype, getattr(jnp, kind)):
    raise ValueError(f'The inputs of the federation are {inputs.dtype}; with '
                     f'input_shape={wanted} they must be {kind}'
                     f'{", 0 to 255" if kind == "uint8" else ""}.')


def server_pass(update: Callable[..., tuple[PyTree, Metrics]]) -> Pass:
  """Makes a pass in which only the server works.

  Args:
    update: (server, context, key) -> (server, metrics).

  Returns:
    A pass: (state, federation, round, key) -> (state, metrics).
  """
  def round_fn(state, federation, round_, key):
    server, metrics = merge_equal(update)(
        state.server, _context(federation, round_), key)
    return state._replace(server=server), metrics
  return round_fn


def _context(federation: Federation, round_: jax.Array) -> Context:
  return Context(round_, federation.train, federation.validation,
                 federation.server)


class _Slots(NamedTuple):
  """One group's clients, in canonical order."""

  ids: jax.Array  # int32[S], N where inactive.
  active: jax.Array  # bool[S]
  shard: Shard  # [S, ...], inactive ones empty.
  memory: PyTree  # [S, ...]


class _Result(NamedTuple):
  """What one client's slot gives back besides its message."""

  weight: jax.Array  # float32[], 0 if rejected or inactive.
  memory: PyTree
  metrics: Metrics
  rejected: jax.Array  # bool[]
  bytes_up: jax.Array  # float32[]
  bytes_down: jax.Array  # float32[]
  part: PyTree = ()  # Of the message, where a linear rule asks for it.


class _Group(NamedTuple):
  """What the training of a group gave; for all groups leaves are [G, ...]."""

  members: Cohort
  metrics: Metrics
  messages: PyTree  # [S, ...], or what `client_map.Plan.run` sums.
  results: Any  # `_Result`; () like the messages once they are aggregated.


class _ClientPass(NamedTuple):
  """The arguments of `client_pass`, with its defaults filled in."""

  task: Task
  client_update: Callable[..., Update]
  aggregate: Aggregate | None
  sample: sampling.Sampler
  broadcast: Broadcast
  relay: bool
  work: Work

  @property
  def summing(self) -> bool:
    """Whether the weighted sum of the messages is all that is needed."""
    return (self.aggregate is None
            or getattr(self.aggregate, 'is_linear', False))

  def part_of(self, message: PyTree) -> PyTree:
    """Returns what a linear rule gets of each client beside the mean."""
    each = getattr(self.aggregate, 'of_each', None)
    return () if each is None else each(message)


def _prepare(federation: Federation, memory: PyTree, ids: jax.Array,
             active: jax.Array, work: Callable[[Shard], jax.Array]) -> _Slots:
  """Gathers a group's clients, most work first, inactive slots last.

  So clients with about the same work share a chunk, and sums do not depend on
  the order in which the sampler named the clients.
  """
  shard = _if_active(tree.take(federation.clients, ids), active)
  amount = jnp.where(active, jax.vmap(work)(shard), -1)
  ids = jnp.where(active, ids, federation.num_clients).astype(jnp.int32)
  order = jnp.lexsort((ids, -amount))
  rows = partial_memory.take(memory, federation, ids)
  return tree.take(_Slots(ids, active, shard, rows), order)


def _if_active(shard: Shard, active: jax.Array) -> Shard:
  """Returns the rows of those that take part, and none of the others."""
  return shard._replace(
      num_labeled=jnp.where(active, shard.num_labeled, 0),
      num_unlabeled=jnp.where(active, shard.num_unlabeled, 0))


def _one_client(parts: _ClientPass, num_slots: int, server: PyTree,
                client: Client, active: jax.Array, key: jax.Array
                ) -> tuple[tuple[PyTree, PyTree], _Result]:
  """Trains the client of one of `num_slots` slots and judges its update.

  Message and counts come back as a pair; zeros if the update is not used.
  """
  payload = parts.broadcast(server, client.id, client.group)
  key = jax.random.fold_in(jax.random.fold_in(key, client.id), client.group)
  update = parts.client_update(payload, client, key)
  limit = parts.task.max_update_norm
  good = tree.all_finite((update.memory, update.weight, update.scalars,
                          update.scalars_down))
  # Weighted sums over all slots then stay finite; half is left for rounding.
  room = _LARGEST / (2 * num_slots)
  sent = (update.message, update.counts)
  good &= tree.within(sent, room / jnp.maximum(update.weight, 1))
  if limit < float('inf'):
    good &= tree.global_norm(update.message) <= limit
  good &= (update.weight >= 0) & (update.weight <= room)
  kept = good & active
  weight = jnp.where(kept, update.weight, 0).astype(jnp.float32)
  sends = active & jnp.not_equal(update.weight, 0)  # Others sit out.
  result = _Result(
      weight=weight,
      memory=tree.where(kept, update.memory, client.memory),
      metrics=jax.tree.map(
          lambda x: jnp.where(kept, x, 0).astype(jnp.float32),
          update.metrics),
      rejected=active & ~good,
      bytes_up=_traffic(sent, update.scalars, sends),
      bytes_down=_traffic(payload, update.scalars_down, active))
  taken = tree.where(kept, sent, tree.zeros_like(sent))
  return taken, result._replace(part=parts.part_of(taken[0]))


def _traffic(dense: PyTree, scalars: jax.Array | None, active: jax.Array
             ) -> jax.Array:
  """float32[] bytes of one slot: of all leaves, or of the numbers counted."""
  size = (jnp.float32(tree.num_bytes(dense)) if scalars is None
          else jnp.nan_to_num(4 * scalars, posinf=0, neginf=0))
  return jnp.where(active, size, 0)


def _models_sent(task: Task, results: _Result, active: jax.Array) -> Ratio:
  """A client's traffic, down and up, in units of one dense model."""
  model = task.model.shapes()
  traffic = results.bytes_up.sum() + results.bytes_down.sum()
  return Ratio(traffic / max(tree.num_bytes(model), 1),
               active.sum().astype(jnp.float32))


def _check_names(metrics: Metrics) -> None:
  """Refuses metrics of a client or a rule that the pass itself reports."""
  if taken := sorted(set(metrics) & set(PASS_METRICS)):
    raise ValueError(f'Metrics named {", ".join(taken)} are the pass\'s own.')


def _summary(results: _Result, plan: client_map.Plan) -> Metrics:
  """One group's metrics: means over the clients that took part."""
  metrics = dict(results.metrics)
  _check_names(metrics)
  out: Metrics = {
      'bytes_up': results.bytes_up.sum(),
      'bytes_down': results.bytes_down.sum(),
      'num_rejected': results.rejected.sum().astype(jnp.float32)}
  took_part = (results.weight > 0).astype(jnp.float32)
  used = metrics.pop('rows_used', None)
  processed = metrics.pop('rows_processed', None)
  for name, value in metrics.items():
    ratio = value if isinstance(value, Ratio) else Ratio(
        value * took_part, took_part)
    measured = (jnp.abs(ratio.total) <= MEASURABLE) & (
        jnp.abs(ratio.rows) <= MEASURABLE)
    out[name] = Ratio(*(jnp.where(measured, x, 0).sum() for x in ratio))
  if used is not None and processed is not None:
    total = plan.processed(processed)
    out['masked_share'] = Ratio(total - used.sum(), total)
  out['num_participants'] = took_part.sum()
  return out


def client_pass(
    task: Task,
    client_update: ClientUpdate,
    aggregate: Aggregate | None,
    *,
    sample: sampling.Sampler | None = None,
    broadcast: Broadcast | None = None,
    relay: bool = False,
    work: Work | None = None,
) -> Pass:
  """Makes the pass in which clients train.

  The pass samples a cohort of G groups. For each group it gathers the clients'
  rows and memories, runs `broadcast` and `client_update` for every slot, leaves
  out broken updates and scatters the memories back. Then the server aggregates,
  once or after each group. Memory is carried from group to group.

  An update is broken if its message, memory, weight or numbers of scalars are
  not finite, if its weight is negative, if weight or message are so large
  that a weighted sum over the cohort could overflow, or if the message's
  global norm, without `Update.counts`, exceeds `task.max_update_norm`. A
  broken update gets weight 0, its client keeps the old memory, and
  `num_rejected` counts it. An aggregation that makes a finite number of the
  server's record infinite or NaN is counted there too, the record stays as it
  was, and nobody took part.

  A client's metric that is not finite, or beyond `types.MEASURABLE`, counts as
  not measured.

  Args:
    task: cohort size, client map, mesh.
    client_update: (payload, client, key) -> Update, for one client.
    aggregate: (server, updates, cohort, context, key) -> (server, metrics).
      Fields of the updates are [G, S, ...] ([1, S, ...] under relay), in the
      order of the cohort it gets; a slot of that is active if its weight is
      positive. A rule that `aggregation.linear` marks gets, instead of the
      updates, the weighted mean of the messages as `paired` returns it; zeros
      if all weights are 0. If the mark names a part of each message, these
      parts come along, [G, S, ...]. None leaves the server as it is.
    sample: (state, federation, key) -> Cohort; default uniform.
    broadcast: (server, client_id, group) -> payload; default the server's
      record.
    relay: whether to aggregate after each group, so that the next group starts
      from the result.
    work: Shard -> int32[], steps of one client, by which slots are sorted;
      default its number of rows.

  Returns:
    A pass: (state, federation, round, key) -> (state, metrics).
  """
  sample = sample or sampling.uniform(task.cohort_size)
  client_update, aggregate = noting.note(sample, work, client_update, aggregate)
  parts = _ClientPass(
      task, client_update, aggregate, sample,
      broadcast or whole_record, relay, work or _default_work)
  return functools.partial(_client_round, parts)


def _client_round(parts: _ClientPass, state: State, federation: Federation,
                  round_: jax.Array, key: jax.Array) -> tuple[State, Metrics]:
  """A `client_pass`: all groups one after another, then the aggregation."""
  check_fit(parts.task, federation)
  cohort = parts.sample(state, federation, jax.random.fold_in(key, 0))
  num_groups = cohort.ids.shape[0]
  context = _context(federation, round_)
  run_key, close_key = (jax.random.fold_in(key, i) for i in (1, 2))

  def step(carry, group):
    server, memory = carry
    memory, done = _run_group(parts, server, memory, federation, cohort,
                              round_, group, run_key)
    if parts.relay:
      messages, results, members = jax.tree.map(
          lambda x: x[None], (done.messages, done.results, done.members))
      server, metrics = _aggregate_or_keep(
          parts, server, _Group(members, done.metrics, messages, results),
          context, jax.random.fold_in(close_key, group))
      done = _Group(done.members, metrics, (), ())
    return (server, memory), done

  carry = (state.server, state.memory)
  if num_groups == 1:
    carry, groups = step(carry, jnp.int32(0))
    groups = jax.tree.map(lambda x: x[None], groups)
  else:
    carry, groups = lax.scan(
        step, carry, jnp.arange(num_groups, dtype=jnp.int32))
  server, memory = carry
  groups = groups._replace(metrics=_over_groups(groups.metrics))
  metrics = groups.metrics
  if not parts.relay:
    server, metrics = _aggregate_or_keep(
        parts, server, groups, context, close_key)
  memory, told = partial_memory.told(state.memory, memory, cohort, federation)
  return state._replace(server=server, memory=memory), {**metrics, **told}


def _run_group(parts: _ClientPass, server: PyTree, memory: PyTree,
               federation: Federation, cohort: Cohort, round_: jax.Array,
               group: jax.Array, key: jax.Array) -> tuple[PyTree, _Group]:
  """Trains one group's clients; the memory after it, and what they sent."""
  ids, active = cohort.ids[group], cohort.active[group]
  plan = client_map.plan(parts.task, ids.shape[0])
  slots = _prepare(federation, memory, ids, active, parts.work)
  shared = (server, federation.train, federation.validation, round_, group,
            key)

  def body(shared, slot: _Slots):
    server, train, validation, round_, group, key = shared
    # `client_map` fills up its chunks and devices with inactive slots.
    shard = _if_active(slot.shard, slot.active)
    client = Client(slot.ids, shard, slot.memory, train, validation, round_,
                    group)
    return _one_client(parts, cohort.ids.size, server, client, slot.active,
                       key)

  messages, results = plan.run(merge_equal(body), shared, slots,
                               summing=parts.summing)
  memory = partial_memory.put(memory, federation, slots.ids, results.memory)
  metrics = _summary(results, plan)
  metrics['models_sent'] = _models_sent(parts.task, results, slots.active)
  return memory, _Group(Cohort(slots.ids, results.weight > 0), metrics,
                        messages, results)


def _aggregate_or_keep(parts: _ClientPass, server: PyTree, groups: _Group,
                       context: Context, key: jax.Array
                       ) -> tuple[PyTree, Metrics]:
  """The server's record after aggregation, or the old one if it would break.

  Leaves of `groups` are [G, ...] but for its metrics, those of all groups.
  """
  if parts.aggregate is None:
    return server, groups.metrics
  after, more = merge_equal(functools.partial(_aggregated, parts))(
      server, groups.messages, groups.results, groups.members, context, key)
  _check_names(more)
  broken = tree.lost(server, after)
  rejected = groups.metrics['num_rejected'] + broken.astype(jnp.float32)
  counted = jnp.where(broken, 0, groups.metrics['num_participants'])
  return (tree.where(broken, server, after),
          {**groups.metrics, **more, 'num_rejected': rejected,
           'num_participants': counted})


def _aggregated(parts: _ClientPass, server: PyTree, messages: PyTree,
                results: _Result, cohort: Cohort, context: Context,
                key: jax.Array) -> tuple[PyTree, Metrics]:
  """Calls the rule with the updates or, if it is linear, with their mean."""
  assert parts.aggregate is not None
  if parts.summing:
    # `aggregation.weighted_mean` divides the weights before it sums; here
    # `client_map.Plan.run` has summed before all weights were known.
    sums, like = messages
    weight = tree.sum_in_order(results.weight.reshape(-1))
    weight = jnp.where(weight > 0, weight, 1)
    mean, counts = jax.tree.map(
        lambda x, y: tree.narrowed(tree.sum_in_order(x) / weight, y.dtype),
        sums, like)
    return parts.aggregate(server, paired(mean, counts, results.part), cohort,
                           context, key)
  message, counts = messages
  updates = Update(message, results.weight, results.memory, results.metrics,
                   counts=counts)
  return parts.aggregate(server, updates, cohort, context, key)


def _over_groups(metrics: dict[str, Any]) -> Metrics:
  """Sums metrics that add up; averages those of a rule over the groups."""
  def one(name, value):
    adds = _adds(name, value)
    return jax.tree.map(lambda x: x.sum(0) if adds else x.mean(0), value)
  return {name: one(name, value) for name, value in metrics.items()}


class Counted(NamedTuple):
  """The mean of the messages, where clients send counts too."""

  mean: PyTree
  counts: PyTree  # The mean of `Update.counts`.


class Detailed(NamedTuple):
  """The same for a rule that needs a part of every message as well."""

  mean: PyTree
  counts: PyTree
  # What `aggregation.linear` names, [G, S, ...]; zeros for a client that does
  # not count.
  each: PyTree


def paired(mean: PyTree, counts: PyTree, each: PyTree = ()) -> PyTree:
  """Returns what a linear rule gets: the mean message and what goes with it.

  Args:
    mean: mean of the messages.
    counts: mean of `Update.counts`.
    each: part of every message, if the rule asks for one.

  Returns:
    `Detailed` if there are parts, else `Counted` if there are counts, else
    `mean` alone.
  """
  if jax.tree.leaves(each):
    return Detailed(mean, counts, each)
  return Counted(mean, counts) if jax.tree.leaves(counts) else mean
