"""FixMatch computes what TorchSSL's code computed; see `make_fixmatch`."""
from __future__ import annotations

from fedjax_ssl import methods
from tests.oracles import ours

STORED = ours.stored('fixmatch')


def test_the_loss_its_labels_and_its_gradient():
  with ours.in_order():
    ours.hold_fixmatch(STORED, 'accepted', float(STORED['threshold']))


def test_the_weights_after_nine_steps():
  with ours.in_order():
    task = ours.of_torchssl(STORED)
    method = methods.make(
        f'fixmatch(threshold={STORED["threshold"]}, '
        f'unlabeled_weight={STORED["weight"]}, keep_local=True)', task)
    state, metrics = ours.one_round(method, ours.one_client(STORED))
    ours.close(ours.trained(state), ours.weights(STORED, 'after_'), 1e-9)
    means = ours.means(metrics)
  ours.close(means['labeled_loss'], STORED['sup_loss'].mean())
  ours.close(means['unlabeled_loss'], STORED['unsup_loss'].mean())
  ours.close(means['mask_rate'], 1 - STORED['mask_ratio'].mean())
