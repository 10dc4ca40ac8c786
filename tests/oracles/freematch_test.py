"""FreeMatch computes what its authors' code did; see `make_freematch`."""
from __future__ import annotations

from tests.oracles import ours

STORED = ours.stored('freematch')


def test_weights_losses_and_averages_of_nine_steps():
  assert len(set(STORED['util_ratio'])) > 2  # Rows are left out now and then.
  ours.hold_usb(
      STORED, f'freematch(decay={STORED["decay"]}, '
      f'fairness_weight={STORED["fairness"]}, '
      f'unlabeled_weight={STORED["weight"]}, keep_local=True)',
      'confidence', 'shares', 'histogram')
