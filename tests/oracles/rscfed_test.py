"""RSCFed computes what its authors' code did; see `make_rscfed`."""
from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import optimizers, sampling
from fedjax_ssl.core.types import Method
from tests.oracles import ours

STORED = ours.stored('rscfed')
KNOWN, OTHER = STORED['labeled'].tolist(), STORED['unlabeled'].tolist()


def _method(which: int, literal: bool) -> Method:
  """With the stored options, and the optimizer of this number."""
  name, (fast, slow) = str(STORED['optimizers'][which]), STORED['rates'][which]
  told = {knob: float(STORED[option]) for knob, option in (
      ('unlabeled_weight', 'lambda_u'), ('decay', 'ema_decay'),
      ('clip_norm', 'max_grad_norm'), ('labeled_multiplier', 'w_mul_times'),
      ('labeled_beta', 'sup_scale'), ('beta', 'dist_scale'))}
  told['unlabeled_rate'] = float(slow / fast)
  knobs = ', '.join(f'{knob}={value}' for knob, value in told.items())
  batch = int(STORED['batch'])
  return methods.make(f'rscfed(warmup=0.0, literal={literal}, {knobs})', (
      ours.task(
          STORED, 0, model=ours.perceptron(STORED, 'batch'),
          weak=ours.in_turns(2), labeled_view=lambda key, views: views,
          labeled_batch=batch, unlabeled_batch=batch,
          cohort_size=STORED['groups'].shape[2], optimizer=optimizers.make(
              name, learning_rate=fast, weight_decay=5e-4,
              momentum=0.9 if name == 'sgd' else 0.0))))


def _theirs(name: str, *place: int) -> dict[str, np.ndarray]:
  return {k: STORED[f'{name}_{k}'][place] for k in (
      *ours.weights(STORED), 'mean', 'variance')}


def _ours(model) -> dict[str, np.ndarray]:
  return {k: np.asarray(v) for k, v in {**model.params, **model.stats}.items()}


def _data():
  return ours.federation(
      STORED['inputs'], STORED['labels'], STORED['b1'].size,
      *((n, 0) for n in KNOWN), *((0, n) for n in OTHER))


@pytest.mark.parametrize('which', range(len(STORED['optimizers'])))
def test_three_rounds_of_groups(monkeypatch: pytest.MonkeyPatch, which: int):
  """Clients, their teachers and optimizers, and the mean of the groups."""
  monkeypatch.setattr(sampling, 'groups', ours.drawn(STORED['groups']))
  with ours.in_order():
    method, data, state = _method(which, True), _data(), None
    for i, losses in enumerate(STORED['losses'][which]):
      if state is not None:
        state = state._replace(round=jnp.int32(i))
      state, metrics = ours.one_round(method, data, i, state)
      ours.close(_ours(state.server.model), _theirs('after', which, i))
      ours.close(ours.means(metrics)['train_loss'], losses.mean(), 1e-6)
    assert state is not None
    teachers = _ours(state.memory.teacher)
    ours.close({k: v[len(KNOWN):] for k, v in teachers.items()},
               _theirs('teacher', which), 1e-6)


def test_what_is_not_literal_differs(monkeypatch: pytest.MonkeyPatch):
  """So the stored results tell the two readings apart."""
  monkeypatch.setattr(sampling, 'groups', ours.drawn(STORED['groups']))
  with ours.in_order():
    state, _ = ours.one_round(_method(0, False), _data())
  found, theirs = _ours(state.server.model), _theirs('after', 0, 0)
  assert max(abs(found[k] - v).max() for k, v in theirs.items()) > 1e-3
