"""AdaMatch computes what USB's code did; see `make_adamatch`."""
from __future__ import annotations

from tests.oracles import ours

STORED = ours.stored('adamatch')


def test_weights_losses_and_averages_of_nine_steps():
  assert len(set(STORED['util_ratio'])) > 2  # Rows are left out now and then.
  ours.hold_usb(
      STORED, f'adamatch(profile="usb", decay={STORED["decay"]}, '
      f'threshold={STORED["threshold"]}, '
      f'unlabeled_weight={STORED["weight"]}, keep_local=True)',
      'shares', 'target')
