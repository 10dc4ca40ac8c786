from __future__ import annotations

import numpy as np
import pytest

from fedjax_ssl.data import partition
from tests.by_hand import rows_by_class

C = 10
LABELS = np.repeat(np.arange(C), 100)[np.random.default_rng(7).permutation(
    1000)]


def _rng(seed=0):
  return np.random.default_rng(seed)


@pytest.mark.parametrize('first', [False, True])
def test_choose_labeled_counts_over_the_federation(first):
  where = np.arange(1000) >= 100
  chosen = partition.choose_labeled(
      _rng(), LABELS, per_class=7, where=where, first=first)
  assert not (chosen & ~where).any()
  assert (np.bincount(LABELS[chosen]) == 7).all()
  for c in range(C) if first else ():
    rows = np.flatnonzero(where & (LABELS == c))[:7]
    assert chosen[rows].all()
  again = partition.choose_labeled(
      _rng(1), LABELS, per_class=7, where=where, first=first)
  assert (chosen == again).all() == first


@pytest.mark.parametrize('first', [False, True])
@pytest.mark.parametrize('fraction', [0.0, .013, .5, 1.0])
def test_choose_labeled_fraction_keeps_class_shares(fraction, first):
  labels = np.repeat([0, 1, 2], [600, 300, 9])
  chosen = partition.choose_labeled(
      _rng(), labels, fraction=fraction, first=first)
  assert chosen.sum() == round(fraction * 909)
  counts = np.bincount(labels[chosen], minlength=3)
  assert np.abs(counts - fraction * np.array([600, 300, 9])).max() <= 1


@pytest.mark.parametrize('knobs,match', [
    ({}, 'either per_class or fraction'),
    ({'per_class': 1, 'fraction': .1}, 'either per_class or fraction'),
    ({'per_class': 101}, '101 labels a class .* the 100 examples of class 0'),
    ({'per_class': -1}, 'per_class'), ({'per_class': 1.5}, 'per_class'),
    ({'fraction': 1.1}, 'fraction'), ({'fraction': float('nan')}, 'fraction'),
    ({'per_class': 1, 'num_classes': 11}, 'the 0 examples of class 10'),
    ({'per_class': 1, 'where': LABELS != 4}, 'the 0 examples of class 4')])
def test_choose_labeled_refuses(knobs, match):
  with pytest.raises(ValueError, match=match):
    partition.choose_labeled(_rng(), LABELS, **knobs)


@pytest.mark.parametrize('fraction', [0.0, .05, .2, 1.0])
def test_label_within_takes_each_clients_share(fraction):
  owner = partition.dirichlet_capped(_rng(), LABELS, 10, alpha=.3)
  owner[:50] = -1
  labeled, unlabeled = partition.label_within(
      _rng(), LABELS, owner, fraction=fraction)
  np.testing.assert_array_equal(np.maximum(labeled, unlabeled), owner)
  assert ((labeled < 0) | (unlabeled < 0)).all()
  sizes = np.bincount(owner[owner >= 0], minlength=10)
  got = np.bincount(labeled[labeled >= 0], minlength=10)
  assert np.abs(got - fraction * sizes).max() <= .5


def test_label_within_needs_an_owner_for_each_label():
  with pytest.raises(ValueError, match=r'owner must have the shape of labels, '
                     r'\(3,\), not \(4,\)'):
    partition.label_within(np.random.default_rng(0), np.zeros(3, int),
                           np.zeros(4, int), fraction=.5)


def test_label_within_first_of_each_class():
  owner = (np.arange(1000) % 3).astype(np.int32)
  labeled, _ = partition.label_within(
      _rng(), LABELS, owner, per_class=5, first=True)
  assert (rows_by_class(labeled, LABELS, 3) == 5).all()
  rows = np.flatnonzero((owner == 2) & (LABELS == 4))
  np.testing.assert_array_equal(
      np.flatnonzero((labeled == 2) & (LABELS == 4)), rows[:5])


def test_label_clients_and_shift():
  owner = np.array([0, 1, 2, -1, 2, 0], np.int32)
  labeled, unlabeled = partition.label_clients(owner, 1)
  assert labeled.tolist() == [0, -1, -1, -1, -1, 0]
  assert unlabeled.tolist() == [-1, 1, 2, -1, 2, -1]
  assert partition.shift(owner, 3).tolist() == [3, 4, 5, -1, 5, 3]
