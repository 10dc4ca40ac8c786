"""Global labels train as SAGE's authors' code where the client is never sure.

See `make_sage_unsure`, also for what this is not.
"""
from __future__ import annotations

import numpy as np
import pytest

from fedjax_ssl import methods
from tests.oracles import ours

STORED = ours.stored('sage_unsure')


def _trained(method: str):
  """The weights, the statistics and the means of metrics after the steps."""
  with ours.in_order():
    task = ours.of_torchssl(
        STORED, model=ours.perceptron(STORED, 'batch'),
        optimizer=ours.descent(STORED))
    state, metrics = ours.one_round(methods.make(method.format(
        f'threshold={STORED["threshold"]}, keep_local=True, '
        f'unlabeled_weight={STORED["weight"]}'), task), ours.one_client(STORED))
    stats = {k: v[0] for k, v in state.memory.model.stats.items()}
    return ours.trained(state), stats, ours.means(metrics)


def test_the_rows_are_of_that_kind():
  accepted = STORED['mask_valid'] > 0
  assert not STORED['mask_local'].any()
  assert 0 < accepted.sum() < accepted.size
  differ = STORED['targets_u_local'] != STORED['targets_u_global']
  assert np.any(differ & accepted)


@pytest.mark.parametrize('method', [
    "fixmatch(labeler='global', weak_in_batch=True, {})", 'sage({})'])
def test_weights_and_statistics_after_eight_steps(method):
  mine, stats, means = _trained(method)
  ours.close(means['labeled_loss'], STORED['Lx'].mean())
  ours.close(means['unlabeled_loss'], STORED['Lu'].mean())
  ours.close(means['mask_rate'], STORED['mask_valid'].mean())
  after = ours.weights(STORED, 'after_')
  ours.close(mine, after, 1e-7)
  ours.close(stats, {k: STORED[f'after_{k}'] for k in stats}, 1e-7)
  assert len(after) == 6 and len(stats) == 2


@pytest.mark.parametrize('method', [
    "fixmatch(labeler='global', {})", 'fixmatch({})'])
def test_neither_other_batches_nor_other_labels_train_so(method):
  mine, stats, _ = _trained(method)
  for found in (mine, stats):
    assert max(np.abs(np.asarray(x) - STORED[f'after_{k}']).max()
               for k, x in found.items()) > 1e-3
