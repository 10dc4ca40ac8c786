"""A round is a chain of passes; the client axis is added here and nowhere else.

A pass is (state, federation, round, key) -> (state, metrics).
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl.core import client_map, sampling, tree
from fedjax_ssl.core.common_expressions import once
from fedjax_ssl.core.types import (
  Client,
  Cohort,
  Context,
  Federation,
  MEASURABLE,
  Metrics,
  OWN,
  PyTree,
  Ratio,
  Shard,
  State,
  Task,
  Update,
)

Pass = Callable[..., tuple[State, Metrics]]
Work = Callable[[Shard], jax.Array]

_noted: list[list[Work]] = []  # Lists that `noting_work` fills now.
_LARGEST = float(jnp.finfo(jnp.float32).max)


@contextlib.contextmanager
def noting_work() -> Iterator[list[Work]]:
  """Lists the `work` of each `client_pass` that is built within, if it has one.

  A method is built of passes, and does not say how many steps they take.
  """
  works: list[Work] = []
  _noted.append(works)
  try:
    yield works
  finally:
    _noted.remove(works)


def _default_work(shard: Shard) -> jax.Array:
  return jnp.asarray(shard.num_labeled + shard.num_unlabeled)


def _identity_broadcast(server: PyTree, client_id: jax.Array) -> PyTree:
  del client_id
  return server


def chain(*passes: Pass) -> Pass:
  """Runs passes one after another.

  Metrics that both have add up, so a Ratio becomes the mean over both; of a
  plain number, the last counts.
  """
  def round_fn(state, federation, round_, key):
    metrics: Metrics = {}
    for i, one in enumerate(passes):
      state, new = one(state, federation, round_, jax.random.fold_in(key, i))
      for name, value in new.items():
        adds = isinstance(value, Ratio) or name in OWN
        metrics[name] = (tree.add(metrics[name], value)
                         if adds and name in metrics else value)
    return state, metrics
  return round_fn


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
  """A pass in which only the server works.

  Args:
    update: (server, context, key) -> (server, metrics).

  Returns:
    The pass.
  """
  def round_fn(state, federation, round_, key):
    server, metrics = once(update)(
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
  """What one client's slot gives back; the message apart."""

  weight: jax.Array  # float32[], 0 if rejected or inactive.
  memory: PyTree
  metrics: Metrics
  rejected: jax.Array  # bool[]
  bytes_up: jax.Array  # float32[]
  bytes_down: jax.Array  # float32[]


def _prepare(federation: Federation, memory: PyTree, ids: jax.Array,
             active: jax.Array, work: Callable[[Shard], jax.Array]) -> _Slots:
  """Gathers a group, the most work first and inactive slots last.

  The order depends on the clients alone: it makes chunks of equals, and sums
  that do not depend on the order in which the sampler named the clients.
  """
  shard = tree.take(federation.clients, ids)
  shard = shard._replace(
      num_labeled=jnp.where(active, shard.num_labeled, 0),
      num_unlabeled=jnp.where(active, shard.num_unlabeled, 0))
  amount = jnp.where(active, jax.vmap(work)(shard), -1)
  ids = jnp.where(active, ids, federation.num_clients).astype(jnp.int32)
  order = jnp.lexsort((ids, -amount))
  slots = _Slots(ids, active, shard, tree.take_bits(memory, ids))
  return tree.take(slots, order)


def _one_client(client_update, broadcast, limit: float, num_slots: int,
                server: PyTree, client: Client, active: jax.Array,
                key: jax.Array) -> tuple[tuple[PyTree, PyTree], _Result]:
  """Broadcast, train, and judge the update of one of `num_slots` slots.

  Message and counts come back as a pair, zeros if they are not taken.
  """
  payload = broadcast(server, client.id)
  key = jax.random.fold_in(jax.random.fold_in(key, client.id), client.group)
  update: Update = client_update(payload, client, key)
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
  result = _Result(
      weight=weight,
      memory=tree.where(kept, update.memory, client.memory),
      metrics=jax.tree.map(
          lambda x: jnp.where(kept, x, 0).astype(jnp.float32),
          update.metrics),
      rejected=active & ~good,
      bytes_up=_traffic(sent, update.scalars, active),
      bytes_down=_traffic(payload, update.scalars_down, active))
  return tree.where(kept, sent, tree.zeros_like(sent)), result


def _traffic(dense: PyTree, scalars: jax.Array | None, active: jax.Array
             ) -> jax.Array:
  """float32[] bytes of one slot: of all leaves, or of the numbers counted."""
  size = (jnp.float32(tree.num_bytes(dense)) if scalars is None
          else 4 * jnp.nan_to_num(scalars))
  return jnp.where(active, size, 0)


def _models_sent(task: Task, results: _Result, active: jax.Array) -> Ratio:
  """Models down and up for a client, in units of one dense model."""
  model = jax.eval_shape(task.model.init, jax.random.key(0))
  traffic = results.bytes_up.sum() + results.bytes_down.sum()
  return Ratio(traffic / max(tree.num_bytes(model), 1),
               active.sum().astype(jnp.float32))


def _summary(results: _Result, plan: client_map.Plan) -> Metrics:
  """One group's metrics: means over the clients that took part."""
  metrics = dict(results.metrics)
  if taken := sorted(set(metrics) & set(OWN)):
    raise ValueError(f'Metrics named {", ".join(taken)} are the pass\'s own.')
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
    client_update: Callable[..., Update],
    aggregate: Callable[..., tuple[PyTree, Metrics]] | None,
    *,
    sample: sampling.Sampler | None = None,
    broadcast: Callable[[PyTree, jax.Array], PyTree] | None = None,
    relay: bool = False,
    work: Work | None = None,
) -> Pass:
  """The pass in which clients train.

  A cohort of G groups is sampled; per group the clients' rows and memories
  are gathered, `broadcast` and `client_update` run for every slot, broken
  updates are left out, memories are scattered back; then the server
  aggregates, once or after each group. Memory is carried from group to group.

  An update is broken if its message, memory or weight is not finite, its
  message is so large that a weighted sum over the cohort could overflow, its
  weight is negative, or its global norm, in which the message counts and
  `Update.counts` do not, exceeds `task.max_update_norm`: it
  gets weight 0, its client keeps the old memory, and it is counted in
  `num_rejected`. So is an aggregation after which a number of the server's
  record is no longer finite: the record then stays as it was. What is large
  but can be summed is taken, as long as `task.max_update_norm` allows it.

  A client's metric that is not finite, or beyond `types.MEASURABLE`, counts as
  not measured.

  Args:
    task: cohort size, client map, mesh.
    client_update: (payload, client, key) -> Update, for one client.
    aggregate: (server, updates, cohort, context, key) -> (server, metrics)
      with Update fields [G, S, ...] ([1, S, ...] under relay), in the order of
      the cohort it gets, of which those with a say are active. Marked by
      `aggregation.linear` it gets the weighted mean of the messages instead of
      the updates, or what `paired` makes of it; zeros if all weights are 0.
      None leaves the server as it is.
    sample: (state, federation, key) -> Cohort; default uniform.
    broadcast: (server, client_id) -> payload; default the server's record.
    relay: aggregate after each group, so that the next starts from it.
    work: Shard -> int32[], steps of one client, to chunk equals together;
      default its number of rows.

  Returns:
    The pass.
  """
  sample = sample or sampling.uniform(task.cohort_size)
  broadcast = broadcast or _identity_broadcast
  if work is not None:
    for works in _noted:
      works.append(work)
  work = work or _default_work
  summing = aggregate is None or getattr(aggregate, 'is_linear', False)

  def run_group(server, memory, federation, cohort, round_, group, key):
    ids, active = cohort.ids[group], cohort.active[group]
    plan = client_map.plan(task, ids.shape[0])
    slots = _prepare(federation, memory, ids, active, work)
    shared = (server, federation.train, federation.validation, round_, group,
              key)

    def body(shared, slot: _Slots):
      server, train, validation, round_, group, key = shared
      client = Client(slot.ids, slot.shard, slot.memory, train, validation,
                      round_, group)
      return _one_client(
          client_update, broadcast, task.max_update_norm, cohort.ids.size,
          server, client, slot.active, key)

    messages, results = plan.run(once(body), shared, slots, summing=summing)
    memory = tree.put(memory, slots.ids, results.memory)
    metrics = _summary(results, plan)
    metrics['models_sent'] = _models_sent(task, results, slots.active)
    return (memory, Cohort(slots.ids, results.weight > 0), messages, results,
            metrics)

  def close(server, metrics, messages, results, cohort, context, key):
    """Aggregates groups stacked as [G, ...]; keeps the record finite."""
    if aggregate is None:
      return server, metrics
    after, more = once(combined)(
        server, messages, results, cohort, context, key)
    broken = tree.lost(server, after)
    rejected = metrics['num_rejected'] + broken.astype(jnp.float32)
    return (tree.where(broken, server, after),
            {**metrics, **more, 'num_rejected': rejected})

  def combined(server, messages, results, cohort, context, key):
    assert aggregate is not None
    if summing:
      sums, like = messages
      weight = _sum_in_order(results.weight.reshape(-1))
      weight = jnp.where(weight > 0, weight, 1)
      mean, counts = jax.tree.map(
          lambda x, y: (_sum_in_order(x) / weight).astype(y.dtype), sums, like)
      return aggregate(server, paired(mean, counts), cohort, context, key)
    message, counts = messages
    updates = Update(message, results.weight, results.memory,
                     results.metrics, counts=counts)
    return aggregate(server, updates, cohort, context, key)

  def round_fn(state, federation, round_, key):
    check_fit(task, federation)
    cohort = sample(state, federation, jax.random.fold_in(key, 0))
    num_groups = cohort.ids.shape[0]
    context = _context(federation, round_)
    run_key, close_key = (jax.random.fold_in(key, i) for i in (1, 2))

    def step(carry, group):
      server, memory = carry
      memory, members, messages, results, metrics = run_group(
          server, memory, federation, cohort, round_, group, run_key)
      if relay:
        sent, back, who = jax.tree.map(
            lambda x: x[None], (messages, results, members))
        server, metrics = close(server, metrics, sent, back, who, context,
                                jax.random.fold_in(close_key, group))
        return (server, memory), (members, metrics)
      return (server, memory), (members, metrics, messages, results)

    carry = (state.server, state.memory)
    if num_groups == 1:
      carry, outputs = step(carry, jnp.int32(0))
      outputs = jax.tree.map(lambda x: x[None], outputs)
    else:
      carry, outputs = lax.scan(
          step, carry, jnp.arange(num_groups, dtype=jnp.int32))
    server, memory = carry
    metrics = _over_groups(outputs[1])
    if not relay:
      members, _, messages, results = outputs
      server, metrics = close(server, metrics, messages, results, members,
                              context, close_key)
    return state._replace(server=server, memory=memory), metrics

  return round_fn


def _over_groups(metrics: dict[str, Any]) -> Metrics:
  """Sums what adds up, means of what a rule reports after each group."""
  def one(name, value):
    adds = isinstance(value, Ratio) or name in OWN
    return jax.tree.map(lambda x: x.sum(0) if adds else x.mean(0), value)
  return {name: one(name, value) for name, value in metrics.items()}


class Counted(NamedTuple):
  """The mean of the messages, where clients send counts too."""

  mean: PyTree
  counts: PyTree  # The mean of `Update.counts`.


def paired(mean: PyTree, counts: PyTree) -> PyTree:
  """What a linear rule gets: the mean, and that of the counts if there are any.

  Args:
    mean: of the messages.
    counts: of `Update.counts`.

  Returns:
    `mean` where there are no counts, else both as `Counted`.
  """
  return Counted(mean, counts) if jax.tree.leaves(counts) else mean


def _sum_in_order(x: jax.Array) -> jax.Array:
  """Sum over the leading axis, first to last: the same bits everywhere."""
  return lax.fori_loop(1, x.shape[0], lambda i, s: s + x[i], x[0])
