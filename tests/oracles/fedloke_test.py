"""FedLoKe computes what its authors' code did; see `make_fedloke`."""
from __future__ import annotations

import jax
import numpy as np

from fedjax_ssl import methods
from fedjax_ssl.testing import keys
from tests.oracles import ours

STORED = ours.stored('fedloke')


def test_two_rounds_of_two_clients():
  """What is sent, what stays, and the statistics of both."""
  labeled, unlabeled, batch = (
      int(STORED[k]) for k in ('labeled', 'unlabeled', 'batch'))
  knobs = {k: float(STORED[k]) for k in ('decay', 'max_entropy',
                                         'max_gradient')}
  with ours.in_order():
    task = ours.task(
        STORED, float(STORED['rate']), model=ours.perceptron(STORED, 'batch'),
        labeled_batch=batch, unlabeled_batch=batch,
        local_steps=unlabeled // batch, cohort_size=2)
    method = methods.make(
        f'fedloke(ramp=0.0, unlabeled_weight={STORED["weight"]}, ' + ', '.join(
            f'{k}={v}' for k, v in knobs.items()) + ')', task)
    data = ours.federation(STORED['inputs'], STORED['labels'],
                           STORED['b1'].size, *[(labeled, unlabeled)] * 2)
    state, rates = method.init(keys.key(0), data), []
    for round_ in range(int(STORED['rounds'])):
      state, metrics = ours.one_round(method, data, round_, state)
      found = ours.means(metrics)
      rates += [found['mask_rate'], found['local_mask_rate']]
    sent = {**state.server.model.params, **state.server.model.stats}
    local = jax.tree.map(np.asarray, {**state.memory.params,
                                      **state.memory.stats})
  assert len(sent) == 8
  # They add 1e-8 to probabilities, and the mean of updates here is in float32.
  ours.close(sent, {k: STORED[f'after_{k}'] for k in sent})
  for i in range(2):
    mine = {k: v[i] for k, v in local.items()}
    ours.close(mine, {k: STORED[f'local{i}_{k}'] for k in mine})
    assert any(np.abs(mine[k] - STORED[f'after_{k}']).max() > 1e-2
               for k in mine)
  # Some rows are labels and some are not, and gradients are clipped.
  assert all(0 < rate < 1 for rate in rates)
