"""FedMatch's server: trains on its labels, picks helpers, averages clients."""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl import aggregation, sparse
from fedjax_ssl.core import local_training, tree
from fedjax_ssl.core.types import (
  Cohort,
  Context,
  Federation,
  Metrics,
  PyTree,
  State,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.fedmatch import helpers, local_step
from fedjax_ssl.methods.fedmatch.client import Memory, Payload, SCORE
from fedjax_ssl.methods.fedmatch.settings import Settings
from fedjax_ssl.methods.parts import assemble, plateau


class Server(NamedTuple):
  """The server's record."""

  sigma: PyTree
  psi: PyTree
  stats: PyTree  # Normalization statistics, of networks that have some.
  agents: helpers.Ranking | helpers.Bank | None  # None without helpers.
  rate: plateau.Plateau | None  # Of its own labels, or of everybody.


def predicted(s: Settings, server: Server) -> Variables:
  """Returns the global model: sigma, and psi without negligible numbers."""
  return local_step.whole(server.sigma, sparse.cut(server.psi, s.psi_threshold),
                          server.stats)


def init(task: Task, s: Settings, key: jax.Array, federation: Federation
         ) -> tuple[Server, Memory]:
  """Makes the first record and memory.

  Raises:
    ValueError: if validation rows are missing, or memory exceeds `max_gib`.
  """
  sigma, stats = assemble.new_model(task, key)
  psi = tree.scale(sigma, s.psi_init)
  if s.undivided:
    sigma, psi = tree.zeros_like(sigma), sigma
  count = federation.num_clients
  if s.validates and not federation.validation.labels.shape[0]:
    raise ValueError('fedmatch needs validation rows for reliability and '
                     "lr_decay; without any, give lr_decay='none', "
                     "aggregation='uniform' and helper_choice='similarity'.")
  num_helpers = s.weights.num_helpers
  ranked = num_helpers + 1 if num_helpers and not s.bank else 0
  stacks = ((count * s.bank + ranked, psi), (count * s.copies, (sigma, psi)),
            (count * s.keep_local, (sigma, stats)))
  need = sum(rows * tree.num_bytes(part) for rows, part in stacks) / 2**30
  if need > s.max_gib:
    raise ValueError(
        f'fedmatch would keep {need:.2g} GiB of weights for {count} clients '
        f'and {num_helpers} helpers, more than max_gib={s.max_gib}; raise it, '
        "or give helper_choice='reliability', sending='values', "
        'keep_local=False and fewer helpers.')
  agents: Any = None
  if s.bank:
    agents = helpers.no_bank(psi, count, task.num_classes)
  elif ranked:
    agents = helpers.no_ranking(psi, num_helpers)
  own_rates = s.lr_decay == 'clients'
  memory = Memory(
      tree.repeat(plateau.full_rate(), count) if own_rates else None,
      tree.repeat((sigma, psi), count) if s.copies else None,
      tree.repeat(local_step.whole(sigma, psi, stats), count)
      if s.keep_local else None)
  rate = s.lr_decay == 'server' or (own_rates and s.at_server)
  server = Server(sigma, psi, stats, agents,
                  plateau.full_rate() if rate else None)
  return server, memory


def learn(task: Task, s: Settings, server: Server, context: Context,
          key: jax.Array) -> tuple[Server, Metrics]:
  """Trains sigma on the server's own labels; psi stays."""
  order_key, step_key = jax.random.split(key)
  optimizer = task.optimizer(context.round)
  rate = server.rate
  step = functools.partial(
      local_step.step, task, optimizer=optimizer, weights=s.weights,
      factor=1.0 if rate is None else rate.factor)
  learner, metrics = local_training.train(
      step, local_step.start(server.sigma, server.psi, server.stats, optimizer),
      batching.batches(task, context.train, context.shard, order_key,
                       'labeled', context.round), step_key)
  good = tree.all_finite((learner.sigma, learner.stats))
  reported = local_training.server_metrics(metrics, good)
  if rate is not None and s.lr_decay == 'clients':
    rate = plateau.after(
        task, rate, predicted(s, server._replace(
            sigma=learner.sigma, stats=learner.stats)), context.validation,
        reported['server_loss'].rows > 0, patience=s.patience)
  new = server._replace(sigma=learner.sigma, stats=learner.stats, rate=rate)
  return tree.where(good, new, server), reported


def on_tasks(s: Settings, state: State, federation: Federation,
             round_: jax.Array) -> State:
  """Starts learning rates again with each task of a stream.

  The rate for the server's own labels goes on.
  """
  rate, memory = state.server.rate, state.memory
  if s.lr_decay == 'server' and rate is not None:
    rate = plateau.restarted(rate, federation, round_)
  if memory.rate is not None:
    memory = memory._replace(rate=plateau.restarted(
        memory.rate, federation, round_))
  return state._replace(server=state.server._replace(rate=rate),
                        memory=memory)


def broadcast(s: Settings, server: Server, client_id: jax.Array,
              group: jax.Array) -> Payload:
  """Returns what one client receives: both parts, and its helpers."""
  del group
  agents = None
  if isinstance(server.agents, helpers.Bank):
    agents = helpers.most_similar(server.agents, client_id,
                                  s.weights.num_helpers)
  elif server.agents is not None:
    agents = helpers.most_reliable(server.agents, client_id)
  factor = None
  if s.lr_decay == 'server' and server.rate is not None:
    factor = server.rate.factor
  return Payload(server.sigma, server.psi, server.stats, agents, factor)


def aggregate(task: Task, s: Settings, server: Server, updates: Update,
              cohort: Cohort, context: Context, key: jax.Array
              ) -> tuple[Server, Metrics]:
  """Averages both parts by equation 4, or evenly; then renews the helpers.

  A client without labels counts for sigma, and one with labels alone for psi,
  as if they had trained it and it had not moved: the paper, whose clients hold
  rows of both kinds, does not say. The record stays as it is if nobody took
  part. Reports `psi_density`.
  """
  del key
  message = tree.take(updates.message, 0)
  ids, weights = cohort.ids[0], updates.weight[0]
  active = weights > 0
  scores = weights
  if s.judges:
    scores = jnp.where(active, updates.metrics[SCORE][0], 0)
  if s.aggregation == 'reliability':
    weights *= jnp.where(scores.sum() > 0, scores, 1)
  sent = (server.sigma, server.psi, server.stats)
  new, each = [], []
  for old, gaps in zip(sent, message, strict=True):
    # Averages what clients hold, not the gaps, so that a number that all have
    # as 0 is exactly 0.
    each.append(tree.repeat(old, ids.shape[0]) if gaps is None
                else jax.tree.map(jnp.add, old, gaps))
    new.append(old if gaps is None else aggregation.reliability_weighted_mean(
        each[-1], weights))
  agents = server.agents
  if isinstance(agents, helpers.Ranking):
    agents = helpers.rank(agents, each[1], ids, scores, active)
  elif agents is not None:
    image = helpers.noise_image(context.train.inputs)
    answers = lax.map(lambda parts: helpers.answer(
        task, local_step.whole(*parts), image), tuple(each))
    agents = helpers.report(agents, each[1], answers, ids, active)
  after = Server(new[0], new[1], new[2], agents, server.rate)
  if s.lr_decay == 'server' and server.rate is not None:
    after = after._replace(rate=plateau.after(
        task, server.rate, predicted(s, after), context.validation,
        active.any(), patience=s.patience))
  after = tree.where(active.any(), after, server)
  kept = sparse.num_nonzero(sparse.cut(after.psi, s.psi_threshold))
  return after, {'psi_density': kept / sparse.size(after.psi)}
