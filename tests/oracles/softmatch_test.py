"""SoftMatch computes what its authors' code did; see `make_softmatch`."""
from __future__ import annotations

from tests.oracles import ours

STORED = ours.stored('softmatch')


def test_weights_losses_and_averages_of_nine_steps():
  assert len(set(STORED['util_ratio'])) > 2  # Rows are left out now and then.
  ours.hold_usb(
      STORED, f'softmatch(decay={STORED["decay"]}, '
      f'num_sigmas={STORED["sigmas"]}, '
      f'unlabeled_weight={STORED["weight"]}, keep_local=True)',
      'mean', 'variance', 'shares')
