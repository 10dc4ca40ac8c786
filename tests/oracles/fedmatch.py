"""How the rounds that FedMatch's scripts stored are run on ours."""
from __future__ import annotations

from collections.abc import Iterator
import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import methods
from fedjax_ssl.core.types import Federation, Method, Shard, State, Task
from fedjax_ssl.data import batching
from fedjax_ssl.methods.fedmatch import client, helpers, local_step, server
from fedjax_ssl.methods.fedmatch.settings import Settings
from fedjax_ssl.testing import keys
from tests.oracles import ours

# Our names for what make_fedmatch's KNOBS are called there.
NAMES = {'num_helpers': 'num_helpers', 'threshold': 'confidence',
         'psi_init': 'psi_factor', 'helper_interval': 'h_interval',
         'labeled_weight': 'lambda_s', 'consistency_weight': 'lambda_i',
         'agreement_weight': 'lambda_a', 'l2': 'lambda_l2', 'l1': 'lambda_l1',
         'delta_threshold': 'delta_thres'}
# The terms of the loss on unlabeled rows, as make_fedmatch's TERMS.
TERMS = ('consistency', 'agreement', 'l1', 'l2')


@dataclasses.dataclass(frozen=True)
class Round:
  """A round before it is run, and what it gave.

  Attributes:
    number: from 0.
    before: the state.
    after: the state.
    means: of its metrics.
  """

  number: int
  before: State
  after: State
  means: dict[str, np.ndarray]


class Run:
  """One of the stored runs; use it within `ours.in_order`.

  Attributes:
    stored: what the script wrote.
    data: the federation.
    task: of the rounds.
    method: fedmatch with the stored knobs.
  """

  data: Federation
  task: Task
  method: Method

  def __init__(self, stored: dict[str, np.ndarray], run: str) -> None:
    self.stored, self._run = stored, run
    clients, batch = stored['clients'].tolist(), int(stored['batch'])
    at_server = int(stored.get('server', 0))
    knobs = {**{mine: stored[theirs] for mine, theirs in NAMES.items()},
             'psi_threshold': self.theirs('l1_thres')}
    text = "fedmatch(profile='v3code', lr_decay='none', {})".format(', '.join(
        f'{name}={value}' for name, value in knobs.items()))
    self.data = ours.federation(
        stored['inputs'], stored['labels'], 4, *clients, server=at_server)
    self.task = ours.task(
        stored, float(stored['lr']), cohort_size=len(clients),
        labeled_batch=batch, unlabeled_batch=2 * batch,
        labels_at='server' if at_server else 'clients')
    self.method = methods.make(text, self.task)

  def theirs(self, name: str) -> np.ndarray:
    """What was stored of this run."""
    return self.stored[f'{self._run}_{name}']

  def rounds(self) -> Iterator[Round]:
    """Runs as many rounds as were stored, with the stored noise image."""
    noise = jnp.asarray(np.stack([self.stored['noise']] * 2, 1))  # Both views.
    state = self.method.init(keys.key(0), self.data)
    step = jax.jit(self.method.round)
    with mock.patch.object(helpers, 'noise_image', lambda like: noise):
      for i in range(len(self.theirs('up'))):
        after, metrics = step(state, self.data, jnp.int32(i), keys.key(i))
        yield Round(i, state, after, ours.means(metrics))
        state = after

  def hold(self) -> None:
    """Asserts that weights, costs and numbers of confident rows are theirs."""
    unlabeled = int(self.stored['clients'][0, 1])
    for one in self.rounds():
      for part in ('sigma', 'psi'):
        mine = getattr(one.after.server, part)
        ours.close(mine['w0'], self.theirs(f'{part}0')[one.number], 1e-6)
        ours.close(mine['w1'], self.theirs(f'{part}1')[one.number], 1e-6)
      for mine, name in (('cost_up', 'up'), ('cost_down', 'down')):
        ours.close(one.means[mine], 100 * self.theirs(name)[one.number], 1e-9)
      ours.close(one.means['mask_rate'],
                 self.theirs('confident')[one.number].mean() / unlabeled,
                 1e-9)

  def hold_helpers(self) -> None:
    """Asserts that every client has their helpers, the nearest one first."""
    wide, interval = (
        int(self.stored[k]) for k in ('num_helpers', 'h_interval'))
    ids = jnp.arange(len(self.stored['clients']))
    for one in self.rounds():
      found = jax.vmap(lambda i, bank=one.before.server.agents: (
          helpers.most_similar(bank, i, wide).ids))(ids)
      due = (one.number + 1) % interval == 0
      np.testing.assert_array_equal(
          found if due else np.full_like(found, -1),
          self.theirs('helpers')[one.number])

  def hold_terms(self) -> None:
    """Asserts that in every step of every client the losses are theirs."""
    tell = jax.jit(self._losses)
    for one in self.rounds():
      known, others = tell(one.before.server, jnp.int32(one.number))
      ours.close(known, self.theirs('supervised')[one.number])
      ours.close(others, self.theirs('terms')[one.number], 1e-6)

  def learned(self, record: server.Server) -> local_step.Learner:
    """What the server's labels make of a record."""
    return self._on_labels(record)[0]

  def _settings(self) -> Settings:
    update: Any = self.method.client_update  # A partial function.
    return update.args[1]

  def _on_labels(self, record: server.Server) -> Any:
    s = self._settings()
    return self._steps(record, self.data.server, 'labeled', s.weights)

  def _losses(self, record: server.Server, round_: jax.Array
              ) -> tuple[Any, jax.Array]:
    """All losses on labels, and of those on other rows the terms."""
    s = self._settings()
    due = (round_ + 1) % s.helper_interval == 0
    at_server, known = self.task.labels_at == 'server', None
    if at_server:
      learner, known, _ = self._on_labels(record)
      record = record._replace(sigma=learner.sigma)

    def one(who: jax.Array, shard: Shard) -> Any:
      agents = server.broadcast(s, record, who, jnp.int32(0)).agents
      assert agents is not None
      return self._steps(
          record, shard, s.streams, s.weights, panel=client.panel(
              self.task, s, record.sigma, record.stats, agents, due),
          present=jnp.where(due, agents.present, 0))[1:]

    each, terms = jax.vmap(one)(
        jnp.arange(self.data.num_clients), self.data.clients)
    return known if at_server else each, terms

  def _steps(self, record: server.Server, shard: Shard, streams: str,
             weights: local_step.Weights, **helped: Any
             ) -> tuple[local_step.Learner, jax.Array, jax.Array]:
    """Trains as one round does; of every step the losses, on labels first."""
    key, optimizer = keys.key(0), self.task.optimizer(jnp.int32(0))
    learner = local_step.start(
        record.sigma, record.psi, record.stats, optimizer)
    made = batching.batches(self.task, self.data.train, shard, key, streams)
    cursor, known, others = made.start(), [], []
    for i in range(2):
      cursor, batch, _ = made.next(cursor, jnp.int32(i))
      for name in ('labeled', 'unlabeled'):
        part = batch._replace(**{
            other: None for other in ('labeled', 'unlabeled') if other != name})
        if name == 'unlabeled' and part.unlabeled is not None:
          others.append([local_step.unlabeled_loss(
              self.task, *learner[:3], part.unlabeled, key,
              weights=_only(weights, term), **helped)[0] for term in TERMS])
        learner, metrics = local_step.step(
            self.task, learner, part, key, optimizer=optimizer,
            weights=weights, **helped)
        if name == 'labeled':
          known.append(metrics['train_loss'])
    return learner, jnp.array(known), jnp.array(others)


def _only(weights: local_step.Weights, term: str) -> local_step.Weights:
  """The weights, of `TERMS` with this one alone."""
  others: dict[str, Any] = {x: 0.0 for x in TERMS if x != term}
  return dataclasses.replace(weights, **others)
