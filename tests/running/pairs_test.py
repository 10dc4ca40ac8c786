"""SAGE's dealing: labels and images are both skewed inside pairs of clients."""
from __future__ import annotations

import numpy as np
import pytest

from fedjax_ssl import config
from fedjax_ssl.running import settings

LABELS = np.arange(6000) % 10
CLIENTS = 6


def shares(alpha):
  """Of each class at each client, float[2, N, C]: labeled and unlabeled."""
  deal = settings.SETTINGS['cifar_pairs'].deal
  owners = deal(np.random.default_rng(0), LABELS, np.ones(LABELS.size, bool),
                config.Config(num_clients=CLIENTS, alpha=alpha,
                              labels_per_class=60))
  counts = np.array([[np.bincount(LABELS[owner == k], minlength=10)
                      for k in range(CLIENTS)] for owner in owners])
  assert (counts.sum((1, 2)) == [600, 5400]).all()
  assert (np.ptp(counts.sum(2), 1) <= 1).all()  # Equal parts.
  return counts / counts.sum(2, keepdims=True)


@pytest.mark.parametrize('pool', [0, 1], ids=['labels', 'images'])
def test_alpha_skews_both_pools(pool):
  skewed, even = (shares(alpha)[pool] for alpha in (0.1, 1000.0))
  assert skewed.max(1).mean() > 0.2 > 0.15 > even.max(1).mean()


def test_pairs_hold_nearly_the_same_classes():
  pairs = shares(0.1).reshape(2, CLIENTS // 2, 2, 10).mean(2)
  assert np.abs(pairs - 0.1).max() < 0.05
