"""CBAFed computes what its authors' code did; see `make_cbafed`."""
from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_ssl import methods
from fedjax_ssl.core.types import Variables
from fedjax_ssl.methods import cbafed
from tests.oracles import ours

STORED = ours.stored('cbafed')
SIZES = ((sum(STORED['known']), 0), *((0, n) for n in STORED['unknown']))


def _variables(prefix):
  stats = {k: jnp.asarray(STORED[prefix + k]) for k in ('mean', 'variance')}
  return Variables(ours.weights(STORED, prefix), stats)


def test_three_rounds_of_three_clients():
  """Bars, second classes, momentum, and residual connections in a row."""
  with ours.in_order():
    task = ours.task(
        STORED, 0, model=ours.perceptron(STORED, 'batch'),
        optimizer=ours.descent(STORED), cohort_size=len(SIZES),
        labeled_batch=int(STORED['batch']), unlabeled_batch=100,
        local_epochs=int(STORED['epochs']))
    slow = float(STORED['slow'] / STORED['rate'])
    method = methods.make(
        f'cbafed(warmup=0.0, clip_norm={STORED["max_norm"]}, '
        f'unlabeled_rate={slow})', task)
    data = ours.federation(STORED['inputs'], STORED['labels'],
                           STORED['b1'].size, *SIZES)
    state, metrics = None, dict[str, Any]()
    for i, round_ in enumerate(STORED['rounds']):
      state, metrics = ours.one_round(method, data, round_, state)
      want = _variables(f'after{round_}_')
      ours.close(state.server.model.params, want.params)
      ours.close(state.server.model.stats, want.stats)
      ours.close(cbafed.levels(state.server.shares), STORED['levels'][i], 1e-6)
      ours.close(cbafed.thresholds(state.server.shares),
                 STORED['bars'][i + 1], 1e-6)
      assert metrics['mask_rate'].total == STORED['kept'][i].sum()
      if round_ == 4:
        state = state._replace(server=state.server._replace(
            record=_variables('record_')))
  known = np.asarray(STORED['known'])
  ours.close(cbafed.thresholds(known / known.sum()), STORED['bars'][0])
  # The second round's model is far from what it is drawn back to.
  assert abs(STORED['record_w1'] - STORED['after5_w1']).max() > .1
