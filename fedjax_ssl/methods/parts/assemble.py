"""Makes a method of two functions, one for a client and one for the server.

A method defines what one client does in a round (`client_update`) and what the
server does with the updates (`aggregate`). What all methods have in common is
here: labels at the server, normalization statistics that are recomputed, the
model that predicts, and the rule that averages.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import optax

from fedjax_ssl import aggregation, losses
from fedjax_ssl.core import (
  checks,
  client_weights,
  local_training,
  noting,
  rounds,
  sampling,
  tree,
)
from fedjax_ssl.core.types import (
  Client,
  Federation,
  Method,
  Metrics,
  PyTree,
  State,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import additions, aggregators, network

Aggregate = Callable[..., tuple[Any, Metrics]]
# (Update.counts of all clients [S, ...], float32[S] weights) -> float32[S].
Weigh = Callable[[PyTree, jax.Array], jax.Array]


class Server(NamedTuple):
  """The server's record of a method that keeps a model and nothing else."""

  model: Variables


def new_model(task: Task, key: jax.Array) -> Variables:
  """Draws the first model."""
  return jax.jit(task.model.init)(key)


def added(model: Variables, delta: Variables) -> Variables:
  """Adds an averaged update of parameters and statistics to a model."""
  return Variables(optax.apply_updates(model.params, delta.params),
                   tree.add(model.stats, delta.stats))


@aggregation.linear
def add_mean(server: Any, mean: Any, cohort: Any, context: Any, key: Any
             ) -> tuple[Any, Metrics]:
  """Adds the mean of the clients' updates to the server's model."""
  del cohort, context, key
  if isinstance(mean, rounds.Counted):
    mean = mean.mean
  return server._replace(model=added(server.model, mean)), {}


def assemble(
    task: Task,
    *,
    client_update: Callable[..., Update],
    aggregate: Aggregate | None = add_mean,
    init: Callable[[jax.Array, Federation], tuple[Any, PyTree]] | None = None,
    sample: sampling.Sampler | None = None,
    broadcast: rounds.Broadcast | None = None,
    work: noting.Work | None = None,
    on_labels: Callable[..., tuple[Any, Metrics]] | None = None,
    begin: Callable[..., State] | None = None,
    before: Sequence[rounds.Pass] = (),
    labels_last: bool = False,
    opening: rounds.Pass | None = None,
    renew: rounds.Pass | None = None,
    model: Callable[[Any], Variables] = lambda server: server.model,
    local_model: Callable[[PyTree], Variables] | None = None,
    pseudo_label: Callable[..., Any] | None = None,
    weigh: Weigh | None = None,
    report: Callable[..., Metrics] | None = None,
    pictures: Callable[..., Any] | None = None,
    splits_key: bool = True,
) -> Method:
  """Makes a method of what one client and the server do.

  A round has these passes: the server trains on its own labels, if it has
  some; the passes `before`; the clients train; and, under norm='static', the
  statistics of the new model are computed. With `labels_last` the server trains
  after the clients, so that its fine-tuned model predicts. `task.aggregator`
  replaces the mean of the clients' updates and nothing else. `additions` says
  what a server optimizer and an attack do.

  Args:
    task: the static choices.
    client_update: (payload, client, key) -> Update, for one client.
    aggregate: see `core.rounds.client_pass`; None where clients send nothing.
    init: (key, federation) -> the server's record and the clients' memory
      [N, ...]; by default a new model in `Server`, and no memory.
    sample: draws the cohort; see `core.rounds.client_pass`, as for the next
      two.
    broadcast: what a client of a group receives.
    work: steps of one client.
    on_labels: (server, context, key) -> (server, metrics), what the server
      learns from its own labels, as `averaging.on_labels` by cross entropy;
      not called where labels are at the clients. Labels at the server are
      refused without it, unless the method has an `aggregate` or a pass of its
      own that may see them.
    begin: (state, federation, round) -> state, before anything else.
    before: passes ahead of the clients'.
    labels_last: whether the server learns from its labels after the clients
      have trained, and not before.
    opening: a pass ahead of all others in the first round, which changes the
      server's record alone.
    renew: the pass that computes the statistics of norm='static'; by default
      `statistics`.
    model: server -> the model that predicts.
    local_model: a client's row of memory -> its own model; None where clients
      keep none.
    pseudo_label: see `Method`.
    weigh: computes new weights of the clients from what they send beside their
      updates. `task.aggregator` gets these too. None keeps the weights that the
      clients sent.
    report: metrics of the server's record, see `Method`.
    pictures: images to look at, see `Method`.
    splits_key: False: where a round has one pass only, that gets the round's
      key as it is, not split. It keeps the bits of runs that are stored, and
      does nothing else.

  Raises:
    ValueError: for an aggregator, a server's optimizer or an attack of the task
      that has nothing to act on, or labels at the server that nobody sees.
  """
  if task.labels_at == 'server' and aggregate is add_mean and not any(
      (on_labels, before, opening, begin, renew)):
    checks.refuse_idle(checks.FieldError(
        'labels_at', 'server', 'nothing of this method would see a label; give '
        'clients, or hand assemble on_labels, such as averaging.on_labels.'))
  _check(task, aggregate, alone=not before)
  adds = additions.wanted(task)
  own = additions.own if adds else _unchanged
  on_own = additions.on_own if adds else _unchanged
  update, finish = client_update, aggregate
  send = broadcast or rounds.whole_record
  if adds:
    update = additions.client_update(task, client_update)
    finish = None if aggregate is None else additions.aggregate(task, aggregate)
  if finish is not None and (task.aggregator or weigh) is not None:
    rule = task.aggregator or aggregation.weighted_mean
    finish = by_rule(aggregators.checked(rule), finish, weigh)
  clients = rounds.client_pass(
      task, update, finish, sample=sample,
      broadcast=lambda server, client_id, group: send(
          own(server), client_id, group),
      work=work)
  passes = _in_order(
      task, clients, on_own, before=before, on_labels=on_labels,
      labels_last=labels_last, opening=opening, renew=renew)
  one_round = (rounds.chain(*passes) if splits_key or len(passes) > 1
               else passes[0])

  def start(key, federation):
    server, memory = (init(key, federation) if init is not None
                      else (Server(new_model(task, key)), ()))
    state = State(server, memory, jnp.int32(0))
    return additions.start(task, state, client_update, send, federation,
                           key) if adds else state

  readers = _readers(
      task, own, model=None if aggregate is None else model,
      local_model=local_model, pseudo_label=pseudo_label, report=report,
      pictures=pictures)
  if begin is not None:
    one_round = _begun(begin, on_own, one_round)
  return Method(start, one_round, client_update=update, aggregate=finish,
                **readers)


def _begun(begin: Callable[..., State],
           on_own: Callable[[rounds.Pass], rounds.Pass],
           one_round: rounds.Pass) -> rounds.Pass:
  """Puts `begin`, which draws nothing and needs no key, ahead of a round."""
  def first(state, federation, round_, key):
    del key
    return begin(state, federation, round_), {}

  def begun(state, federation, round_, key):
    state, _ = on_own(first)(state, federation, round_, key)
    return one_round(state, federation, round_, key)
  return begun


def _in_order(task: Task, clients: rounds.Pass,
              on_own: Callable[[rounds.Pass], rounds.Pass], *,
              before: Sequence[rounds.Pass],
              on_labels: Callable[..., tuple[Any, Metrics]] | None,
              labels_last: bool, opening: rounds.Pass | None,
              renew: rounds.Pass | None) -> list[rounds.Pass]:
  """Puts the passes of a round around that of the clients; see `assemble`.

  `on_own` makes all but `clients` see the method's own record only.
  """
  passes = [*map(on_own, before), clients]
  if task.labels_at == 'server' and on_labels is not None:
    passes.insert(len(passes) if labels_last else 0,
                  on_own(rounds.server_pass(on_labels)))
  if task.model.norm == 'static':
    passes.append(on_own(renew or statistics(task)))
  if opening is not None:
    passes.insert(0, on_own(once(opening)))
  return passes


def _readers(task: Task, own: Callable[[Any], Any], *,
             model: Callable[[Any], Variables] | None,
             local_model: Callable[[PyTree], Variables] | None,
             pseudo_label: Callable[..., Any] | None,
             report: Callable[..., Metrics] | None,
             pictures: Callable[..., Any] | None) -> dict[str, Any]:
  """Makes the fields of `Method` that read records, by their `own` parts.

  A field is None if the function that it calls is None. `predict` calls
  `model`, and `local_predict` calls `local_model`.
  """
  return {
      'predict': None if model is None else (
          lambda server, inputs: task.apply(model(own(server)), inputs)),
      'local_predict': None if local_model is None else (
          lambda server, row, inputs: task.apply(
              local_model(own(row)), inputs)),
      'pseudo_label': None if pseudo_label is None else (
          lambda server, row, inputs: pseudo_label(
              own(server), own(row), inputs)),
      'report': None if report is None else (
          lambda server, round_: report(own(server), round_)),
      'pictures': None if pictures is None else (
          lambda server, *rest: pictures(own(server), *rest))}


def _unchanged(x: Any) -> Any:
  return x


def _check(task: Task, aggregate: Aggregate | None, alone: bool) -> None:
  """Refuses an addition of the task that would have nothing to act on.

  `alone` is whether clients send updates in one pass of a round only.
  """
  names = [name for name in ('aggregator', 'server_optimizer')
           if getattr(task, name) is not None]
  mean_only = alone and getattr(aggregate, 'is_replaceable', False)
  for name in names:
    if aggregate is None:
      raise ValueError('clients that send nothing have nothing to aggregate; '
                       f'leave {name} out.')
    if not mean_only:
      raise ValueError('this has an aggregation of its own in place of the '
                       f'mean; leave {name} out.')
  if task.attack is None:
    return
  if aggregate is None and task.attack.send is not None:
    raise ValueError('clients that send nothing cannot send anything hostile; '
                     'leave attack out.')
  if task.attack.flips_labels and task.labels_at == 'server':
    raise checks.FieldError('labels_at', 'server', 'no client has labels to '
                            'flip; leave attack out, or give '
                            'clients.')
  if not alone:
    raise ValueError('no attack is written for a method with passes of its '
                     'own; leave attack out.')


def by_rule(rule: Callable[[PyTree, jax.Array], PyTree], finish: Aggregate,
            weigh: Weigh | None = None) -> Aggregate:
  """Replaces the mean of the messages by a rule that the user chose.

  `Update.counts` are averaged as before.

  Args:
    rule: see `Task.aggregator`.
    finish: (server, update, cohort, context, key) -> (server, metrics).
    weigh: see `assemble`.

  Returns:
    `aggregate` of `core.rounds.client_pass`, for updates of all groups.
  """
  part = getattr(finish, 'of_each', None)

  def aggregate(server, updates: Update, cohort, context, key):
    each = () if part is None else jax.vmap(jax.vmap(part))(updates.message)
    message, counts = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:]),
        (updates.message, updates.counts))
    weights = updates.weight.reshape(-1)
    if weigh is not None:
      weights = weigh(counts, weights)
    mean = rounds.paired(rule(message, weights),
                         aggregation.weighted_mean(counts, weights), each)
    return finish(server, mean, cohort, context, key)
  return aggregate


def once(one: rounds.Pass) -> rounds.Pass:
  """Makes a pass over the server's record run in the first round only.

  In all other rounds it costs nothing, and its metrics are 0.
  """
  def run(state, federation, round_, key):
    def made(server):
      after, metrics = one(state._replace(server=server), federation, round_,
                           key)
      return after.server, metrics
    def skipped(server):
      return server, tree.zeros_like(shapes)
    _, shapes = jax.eval_shape(made, state.server)
    server, metrics = lax.cond(round_ == 0, made, skipped, state.server)
    return state._replace(server=server), metrics
  return run


def measuring(one: rounds.Pass) -> rounds.Pass:
  """Makes a pass's clients measure only: they are no participants.

  What they send counts as traffic of the clients that train. Their memory stays
  as it is, and they do not see it.
  """
  def run(state, federation, round_, key):
    after, metrics = one(state._replace(memory=()), federation, round_, key)
    del metrics['num_participants']
    sent = metrics['models_sent']
    metrics['models_sent'] = sent._replace(rows=jnp.zeros_like(sent.rows))
    return after._replace(memory=state.memory), metrics
  return run


def statistics(task: Task) -> rounds.Pass:
  """Recomputes normalization statistics at the averaged model (SemiFL).

  Draws a cohort for this; each of its clients receives the model and averages
  the statistics of the batches of one epoch, as it would train on them: where
  it has few rows of one kind they come again. The server's rows are not used.
  """
  one_pass = task.one_pass()

  def client_update(payload: Any, client: Client, key) -> Update:
    made = batching.batches(one_pass, client.train, client.shard, key)
    sums, _ = local_training.train(
        network.adding_statistics(task, payload.model),
        tree.zeros_like(payload.model.stats), made, key)
    steps = jnp.maximum(made.num_steps, 1)
    weight = client_weights.client_weight(client.shard, 'both',
                                          weighting='examples')
    # Beside a change of no numbers, whose norm may be limited.
    return Update((), weight, client.memory, {},
                  counts=tree.scale(sums, 1 / steps))

  @aggregation.linear
  def finish(server, update, cohort, context, key):
    del cohort, context, key
    if not jax.tree.leaves(server.model.stats):
      return server, {}
    stats = tree.add(server.model.stats, update.counts)
    return server._replace(model=server.model._replace(stats=stats)), {}

  return measuring(rounds.client_pass(
      task, client_update, finish, sample=sampling.uniform(task.cohort_size),
      broadcast=lambda server, client_id, group: Server(server.model),
      work=functools.partial(batching.num_steps, one_pass)))


def confident_labels(task: Task, threshold: float | Callable[[Any], Any], *,
                     strict: bool = False) -> Callable[..., Any]:
  """Makes a `pseudo_label` that gives raw inputs their likeliest class.

  The weight is 1 from the confidence `threshold` on, else 0.

  Args:
    task: has the network.
    threshold: a number; or a client's memory -> float32[C], one of each class.
    strict: whether a confidence must be above a number.
  """
  bar: Any = threshold
  if strict and not callable(threshold):
    bar = jnp.nextafter(jnp.float32(threshold), 2)
  def pseudo_label(record, memory, inputs):
    return losses.pseudo_label(
        task.apply(record.model, inputs),
        threshold=bar(memory) if callable(bar) else bar)
  return pseudo_label
