"""FedProx computes what its authors' code did; see `make_fedprox`."""
from __future__ import annotations

import jax.numpy as jnp
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import sampling
from tests.oracles import ours

STORED = ours.stored('fedprox')


def test_three_rounds_of_two_of_three_clients(monkeypatch: pytest.MonkeyPatch):
  """The pull in every step, last batches that are not full, and the mean."""
  monkeypatch.setattr(sampling, 'groups', ours.drawn(STORED['cohorts']))
  state = None
  with ours.in_order():
    data = ours.federation(
        STORED['inputs'], STORED['labels'], STORED['b1'].size,
        *((n, 0) for n in STORED['rows'].tolist()))
    method = methods.make(f'fedprox(mu={STORED["mu"]})', ours.task(
        STORED, float(STORED['rate']), labeled_batch=int(STORED['batch']),
        local_epochs=int(STORED['epochs']),
        cohort_size=STORED['cohorts'].shape[1]))
    for i in range(len(STORED['cohorts'])):
      if state is not None:
        state = state._replace(round=jnp.int32(i))
      state, _ = ours.one_round(method, data, i, state)
      ours.close(state.server.model.params, {
          k: v[i] for k, v in ours.weights(STORED, 'after_').items()}, 1e-6)
