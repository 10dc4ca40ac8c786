"""FixMatch computes what TorchSSL's code computed; see `make_fixmatch`."""
from __future__ import annotations

import jax
import numpy as np

from fedjax_ssl import losses, methods
from tests.oracles import ours

STORED = ours.stored('fixmatch')


def test_the_loss_its_labels_and_its_gradient():
  weak, strong = (STORED[f'{k}_logits'] for k in ('weak', 'strong'))
  threshold = float(STORED['threshold'])
  with ours.in_order():
    labels, accepted = losses.pseudo_label(weak, threshold=threshold)
    (loss, metrics), slope = jax.value_and_grad(
        losses.fixmatch, has_aux=True)(strong, weak, threshold=threshold)
  np.testing.assert_array_equal(labels, STORED['chosen'])
  np.testing.assert_array_equal(accepted, STORED['accepted'])
  ours.close(metrics['mask_rate'], STORED['mask_rate'])
  ours.close(loss, STORED['loss'], 1e-9)
  ours.close(slope, STORED['gradient'], 1e-9)


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
