"""MOON computes what its authors' code did; see `make_moon`."""
from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import sampling
from tests.oracles import ours

STORED = ours.stored('moon')
NAMES = (*ours.weights(STORED), 'mean', 'variance')


def _numbers(model) -> dict[str, np.ndarray]:
  return {k: np.asarray(v) for k, v in {**model.params, **model.stats}.items()}


def test_four_rounds_in_which_clients_sit_out(monkeypatch: pytest.MonkeyPatch):
  """The last models of clients, fixed networks' norms, and both losses."""
  monkeypatch.setattr(sampling, 'groups', ours.drawn(STORED['cohorts']))
  rows, mu = STORED['rows'], float(STORED['mu'])
  state = None
  with ours.in_order():
    data = ours.federation(
        STORED['inputs'], STORED['labels'], STORED['b1'].size,
        *((n, 0) for n in rows.tolist()))
    method = methods.make(
        f'moon(mu={mu}, temperature={STORED["temperature"]})', ours.task(
            STORED, 0, model=ours.perceptron(STORED, 'batch'),
            labeled_batch=int(STORED['batch']),
            local_epochs=int(STORED['epochs']),
            cohort_size=STORED['cohorts'].shape[1],
            optimizer=ours.descent(STORED)))
    for i, (cohort, losses) in enumerate(zip(
        STORED['cohorts'], STORED['losses'], strict=True)):
      if state is not None:
        state = state._replace(round=jnp.int32(i))
      state, metrics = ours.one_round(method, data, i, state)
      ours.close(_numbers(state.server.model),
                 {k: STORED[f'after_{k}'][i] for k in NAMES}, 1e-6)
      if not i:
        # Theirs has no last networks yet; ours has the global one, so that the
        # contrast of a row is log 2 whatever the network.
        losses = losses + [0, mu * np.log(2)]
      found, losses = ours.means(metrics), losses.mean(1)
      ours.close(found['train_loss'], losses.sum(-1).mean(), 1e-6)
      # Theirs are means over steps, of which clients do as many as rows allow.
      ours.close(found['contrastive_loss'],
                 np.average(losses[:, 1], 0, rows[cohort]) / mu, 1e-6)
    assert state is not None
    ours.close(_numbers(state.memory.model),
               {k: STORED[f'last_{k}'] for k in NAMES}, 1e-6)
