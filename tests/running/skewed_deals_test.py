"""Deals of two settings: SAGE's pairs of clients, and SemiFL's shards."""
from __future__ import annotations

import numpy as np
import pytest

from fedjax_ssl import config
from fedjax_ssl.running import settings

LABELS = np.arange(6000) % 10
CLIENTS = 6


def owners(setting, **options):
  deal = settings.SETTINGS[setting].deal
  return deal(np.random.default_rng(0), LABELS, np.ones(LABELS.size, bool),
              config.Config(**{'labels_per_class': 60, **options}))


def shares(alpha):
  """Of each class at each client, float[2, N, C]: labeled and unlabeled."""
  counts = np.array([[np.bincount(LABELS[owner == k], minlength=10)
                      for k in range(CLIENTS)] for owner in owners(
                          'cifar_pairs', num_clients=CLIENTS, alpha=alpha)])
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


@pytest.mark.parametrize('place', ['clients', 'server'])
def test_a_client_has_two_shards_of_images(place):
  """Of the 5,400 without labels each of 20 shards; labels know no shards."""
  labeled, unlabeled = owners('cifar_iidshards', num_clients=10,
                              labels_at=place)
  counts = np.array([np.bincount(LABELS[unlabeled == k], minlength=10)
                     for k in range(10)])
  assert {*np.unique(counts)} <= {0, 270, 540} and (counts > 0).sum() > 10
  assert (counts.sum(0) == 540).all() and (counts.sum(1) == 540).all()
  if place == 'server':
    assert {*labeled} == {-1, 10}
  else:
    assert (np.bincount(labeled[labeled >= 0]) == 60).all()
    assert min(np.unique(LABELS[labeled == k]).size for k in range(10)) > 5


def test_shards_that_do_not_divide_are_refused():
  with pytest.raises(config.FieldError, match='num_clients=7: per_client=2'):
    owners('cifar_iidshards', num_clients=7)
