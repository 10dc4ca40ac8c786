"""FedTriNet computes what its authors' code did; see `make_fedtrinet`."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import optimizers, sampling
from fedjax_ssl.core.types import Cohort, Model, Variables
from tests.oracles import ours

STORED = ours.stored('fedtrinet')
KNOWN, OTHER = STORED['labeled'].tolist(), STORED['unlabeled'].tolist()
LAYERS = ('Conv_0', 'Conv_1', 'Dense_0', 'Dense_1')
PROFILES = ('paper', 'official')


def _network() -> Model:
  """`make_fedtrinet.network`, with layers by the names that ours have."""
  params = {name: {'kernel': jnp.asarray(STORED[f'w{i}']),
                   'bias': jnp.asarray(STORED[f'b{i}'])}
            for i, name in enumerate(LAYERS)}

  def apply(variables, x):
    for name in LAYERS:
      layer = variables.params[name]
      x = x @ layer['kernel'] + layer['bias']
      x = x if name == LAYERS[-1] else jnp.tanh(x)
    return x

  return Model(
      lambda key: Variables(params, {}), apply,
      lambda variables, x, mask, key=None: (apply(variables, x), {}), 'none')


def _method(profile: str, first_phase: float, **changes):
  return methods.make(
      f'fedtrinet(profile={profile!r}, pretrain={first_phase}, num_shared=2)',
      ours.task({'w1': STORED['w3']}, 0, **{
          'model': _network(), 'labeled_batch': 20, 'unlabeled_batch': 20,
          'local_epochs': int(STORED['epochs']), 'schedule_rounds': 4,
          'optimizer': optimizers.make(
              'sgd', learning_rate=float(STORED['rate']), momentum=0.5),
          **changes}))


def _data():
  """Each client's labeled rows; then its unlabeled ones."""
  starts = [np.cumsum([0, *KNOWN])[:-1],
            sum(KNOWN) + np.cumsum([0, *OTHER])[:-1]]
  order = np.concatenate([np.arange(start, start + size) for one in zip(
      zip(*starts, strict=True), zip(KNOWN, OTHER, strict=True), strict=True)
                          for start, size in zip(*one, strict=True)])
  return ours.federation(
      STORED['inputs'][order][:, None], STORED['labels'][order],
      STORED['b3'].size, *zip(KNOWN, OTHER, strict=True))


def _ours(model) -> dict[str, np.ndarray]:
  return {f'{letter}{i}': np.asarray(model.params[name][word])
          for i, name in enumerate(LAYERS)
          for letter, word in (('w', 'kernel'), ('b', 'bias'))}


def _theirs(prefix: str, *place: int) -> dict[str, np.ndarray]:
  return {k: STORED[f'{prefix}_{k}'][place] for k in _ours(
      _network().init(None))}


@pytest.mark.parametrize('which', range(2))
def test_two_rounds_of_each_phase(monkeypatch: pytest.MonkeyPatch, which: int):
  """Who votes, what is shared and frozen, and training on accepted rows."""
  cohorts = STORED['cohorts'].reshape(4, 1, -1)

  def drawn(num_groups, size):
    assert (num_groups, size) == cohorts.shape[1:]

    def sample(state, federation, key):
      del federation, key
      ids = jnp.asarray(cohorts, jnp.int32)[state.round]
      return Cohort(ids, jnp.ones(ids.shape, bool))
    return sample

  monkeypatch.setattr(sampling, 'groups', drawn)
  with ours.in_order():
    method = _method(PROFILES[which], 0.5, cohort_size=cohorts.shape[2])
    data = _data()
    state = method.init(jax.random.key(0), data)
    state = state._replace(server=state.server._replace(
        confidence=jnp.float32(STORED['confidence'][which])))
    for i, loss in enumerate(STORED['losses'][which]):
      state, metrics = ours.one_round(
          method, data, i, state._replace(round=jnp.int32(i)))
      ours.close(_ours(state.server.model), _theirs('after', which, i), 1e-6)
      ours.close(ours.means(metrics)['train_loss'], loss, 1e-6)
  labels = np.concatenate([
      row[:n] for row, n in zip(np.asarray(state.memory.labels), OTHER,
                                strict=True)])
  np.testing.assert_array_equal(labels, STORED['accepted'][which])
  assert 0 < (labels >= 0).sum() < labels.size  # The thresholds say something.


def test_a_client_with_many_labels_weighs_them_apart():
  """In round 15 of the second phase, where a has begun to rise."""
  given, later = OTHER[0] - 2, int(STORED['later'])
  with ours.in_order():
    method = _method('official', 1 / 100, schedule_rounds=100)
    rows = [*range(KNOWN[0]), *range(sum(KNOWN), sum(KNOWN) + given)]
    labels = np.where(np.arange(len(rows)) < KNOWN[0],
                      STORED['labels'][rows], 0)
    data = ours.federation(STORED['inputs'][rows][:, None], labels,
                           STORED['b3'].size, (KNOWN[0], given))
    state = method.init(jax.random.key(0), data)
    state = state._replace(
        round=jnp.int32(1 + later),
        server=state.server._replace(confidence=jnp.float32(1)),
        memory=state.memory._replace(
            labels=jnp.asarray(STORED['guesses'][None, :given], jnp.int32),
            harvests=jnp.ones(1, jnp.int32)))
    state, metrics = ours.one_round(method, data, 1 + later, state)
    ours.close(_ours(state.server.model), _theirs('later'), 1e-6)
    ours.close(ours.means(metrics)['train_loss'], STORED['later_loss'], 1e-6)
