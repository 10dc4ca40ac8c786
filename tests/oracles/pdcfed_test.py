"""PDCFed computes what its authors' code did; see `make_pdcfed`."""
from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from fedjax_ssl import methods
from fedjax_ssl.methods import pdcfed
from fedjax_ssl.testing import keys
from tests.oracles import ours

STORED = ours.stored('pdcfed')


def test_two_rounds_of_two_clients():
  """Both stages, the entropy, what clients keep, and the weighted mean."""
  knobs = {'threshold': 'tau_upper', 'low_threshold': 'tau_lower',
           'least_weight': 'sigma', 'unlabeled_weight': 'lambda_u',
           'entropy_weight': 'lambda_e', 'temperature': 'temper',
           'decay': 'average', 'clip_norm': 'max_norm'}
  given = {name: float(STORED[theirs]) for name, theirs in knobs.items()}
  given['unlabeled_rate'] = float(STORED['slow'] / STORED['rate'])
  text = ', '.join(f'{name}={value}' for name, value in given.items())
  with ours.in_order():
    task = ours.task(
        STORED, 0, optimizer=ours.descent(STORED), cohort_size=2,
        labeled_batch=int(STORED['batch']),
        unlabeled_batch=int(STORED['batch']),
        local_epochs=int(STORED['epochs']))
    method = methods.make(f'pdcfed({text})', task)
    data = ours.federation(
        STORED['inputs'], STORED['labels'], STORED['b1'].size,
        (int(STORED['known']), 0), (0, int(STORED['unknown'])))
    state, metrics = method.init(keys.key(0), data), dict[str, Any]()
    ours.close([x[1] for x in state.memory.seen], STORED['start'], 1e-6)
    seen = pdcfed.Seen(*(jnp.full(2, x, jnp.float32) for x in STORED['seen']))
    state = state._replace(memory=state.memory._replace(seen=seen))
    for i in range(2):
      state, metrics = ours.one_round(method, data, i, state)
      ours.close(state.server.model.params, ours.weights(STORED, f'after{i}_'))
      ours.close(state.memory.seen.mean[1], STORED['mean'][i], 1e-6)
      ours.close(state.memory.seen.variance[1], STORED['variance'][i], 1e-6)
  second, both = metrics['second_rate'].total, metrics['mask_rate'].total
  assert 3 <= second <= both - 3 < STORED['unknown'] - 6
