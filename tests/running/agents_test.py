"""Agents with labels and agents without: who holds what."""
from __future__ import annotations

import functools

import numpy as np
import pytest

from fedjax_ssl import config
from fedjax_ssl.running import dealing

LABELS = np.repeat(np.arange(10), 30)


def _deal(scheme, holders, total, per_class=4):
  options = config.Config(
      num_labeled_clients=holders, num_clients=total,
      labels_per_class=per_class, labeled_fraction=None)
  return dealing.agents(scheme)(
      np.random.default_rng(0), LABELS, np.ones(LABELS.size, bool), options)


@pytest.mark.parametrize('holders, others', [(2, 6), (3, 9), (1, 3)])
@pytest.mark.parametrize('scheme', ['iid_random', 'round_robin'])
def test_agents_hold_one_kind_of_rows(scheme, holders, others):
  labeled, unlabeled = _deal(scheme, holders, holders + others)
  assert set(labeled[labeled >= 0]) == set(range(holders))
  assert set(unlabeled[unlabeled >= 0]) == set(
      range(holders, holders + others))
  assert ((labeled >= 0) != (unlabeled >= 0)).all()
  np.testing.assert_array_equal(np.bincount(LABELS[labeled >= 0]), 4)


def test_round_robin_is_the_papers_example():
  labeled, unlabeled = _deal('round_robin', 3, 12)
  classes = functools.partial(_classes, LABELS)
  assert [classes(labeled, k) for k in range(3)] == [
      [0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
  assert [classes(unlabeled, 3 + k) for k in range(9)] == [
      [0, 9], *([k] for k in range(1, 9))]


def _classes(labels, owner, client):
  return sorted(set(labels[owner == client].tolist()))


@pytest.mark.parametrize('holders', [-1, 0, 8])
def test_refuses_a_federation_without_either_kind(holders):
  with pytest.raises(ValueError, match=f'num_labeled_clients={holders}'):
    _deal('iid_random', holders, 8)
