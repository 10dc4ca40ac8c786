"""FlexMatch computes what its authors' code did; see `make_flexmatch`."""
from __future__ import annotations

import numpy as np
import pytest

from fedjax_ssl import losses, methods
from tests.oracles import ours

STORED = ours.stored('flexmatch')


def test_the_loss_its_bars_and_its_gradient():
  with ours.in_order():
    # Shares of the most frequent class, of which there are 20.
    ours.hold_fixmatch(STORED, 'sure', losses.flexmatch_thresholds(
        20 * STORED['shares'], threshold=float(STORED['threshold'])))


@pytest.mark.parametrize('steps', [4, 9])
def test_memory_bars_and_weights_of_every_step(steps):
  """Stops before the end too, where the bars of the next step can be seen."""
  with ours.in_order():
    task = ours.of_torchssl({**STORED, 'steps': steps})
    method = methods.make(
        f'flexmatch(threshold={STORED["threshold"]}, '
        f'unlabeled_weight={STORED["weight"]}, keep_local=True)', task)
    state, metrics = ours.one_round(method, ours.one_client(STORED))
    means = ours.means(metrics)
    kept = np.asarray(state.memory.kept[0])
    mine = ours.trained(state)
  for name, theirs in (('labeled_loss', STORED['sup_loss']),
                       ('unlabeled_loss', STORED['unsup_loss']),
                       ('mask_rate', 1 - STORED['mask_ratio'])):
    ours.close(means[name], theirs[:steps].mean())
  if steps == STORED['steps']:
    np.testing.assert_array_equal(kept, STORED['memory'])
    ours.close(mine, ours.weights(STORED, 'after_'), 1e-9)
    return
  counts = np.bincount(kept + 1, minlength=task.num_classes + 1)
  bars = losses.flexmatch_thresholds(
      counts[1:], threshold=float(STORED['threshold']), num_unused=counts[0])
  beta = STORED['betas'][steps]
  ours.close(bars, STORED['threshold'] * beta / (2 - beta), 1e-6)
