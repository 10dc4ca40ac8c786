"""SAGE computes what its authors' code did; see `make_sage`."""
from __future__ import annotations

import jax
import numpy as np

from fedjax_ssl import losses, methods
from tests.oracles import ours

STORED = ours.stored('sage')


def test_the_blended_labels_of_every_step():
  local, received, theirs = (
      STORED[name].reshape(-1, STORED['b1'].size) for name in (
          'logits_u_w', 'logits_u_w_global', 'final_targets_u'))
  with ours.in_order():
    targets, accepted, share = jax.jit(losses.blended_label)(
        local, received, threshold=float(STORED['threshold']))
  sure = STORED['mask_local'].ravel()
  ours.close(targets, theirs)
  np.testing.assert_array_equal(accepted, STORED['mask_valid'].ravel())
  # So near that it shows where the code adds its 1e-6: to the gap.
  ours.close(share, sure * STORED['lambda_dynamic'].ravel(), 1e-9)
  # Both labels count in some rows, and some rows count only for the global one.
  assert np.any((theirs > 0.01).sum(-1) == 2)
  assert 0 < sure.sum() < np.sum(accepted) < accepted.size


def test_weights_and_statistics_after_eight_steps():
  """All views are one batch for the norm; the received model's is fixed."""
  with ours.in_order():
    task = ours.of_torchssl(
        STORED, model=ours.perceptron(STORED, 'batch'),
        optimizer=ours.descent(STORED))
    method = methods.make(
        f'sage(threshold={STORED["threshold"]}, keep_local=True, '
        f'unlabeled_weight={STORED["weight"]})', task)
    state, metrics = ours.one_round(method, ours.one_client(STORED))
    mine = ours.trained(state)
    stats = {k: v[0] for k, v in state.memory.model.stats.items()}
  means = ours.means(metrics)
  ours.close(means['labeled_loss'], STORED['Lx'].mean())
  ours.close(means['unlabeled_loss'], STORED['Lu'].mean())
  ours.close(means['mask_rate'], STORED['mask_valid'].mean())
  after = ours.weights(STORED, 'after_')
  ours.close(mine, after)
  ours.close(stats, {k: STORED[f'after_{k}'] for k in stats})
  assert len(after) == 6 and len(stats) == 2
