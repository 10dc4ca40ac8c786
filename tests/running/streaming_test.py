"""The settings of FedMatch's tables: who gets what, in which task."""
from __future__ import annotations

import numpy as np
import pytest

from fedjax_ssl import config, data
from fedjax_ssl.running import settings


@pytest.mark.parametrize('place', ['clients', 'server'])
def test_streaming_shares(place):
  labels = np.repeat(np.arange(10), 1890)
  options = config.Config(
      num_clients=10, labels_per_class=50, labels_at=place)
  owner, unlabeled, task = settings.SETTINGS['fmnist_streaming'].deal(
      np.random.default_rng(0), labels, np.ones(labels.size, bool), options)
  mine = np.stack([np.bincount(labels[owner == k], minlength=10)
                   for k in range(11)])
  if place == 'clients':
    assert (mine[:10] == 5).all() and not mine[10].any()
  else:  # The server is owner N.
    assert (mine[10] == 50).all() and not mine[:10].any()
  counts = np.zeros((10, 10, 10), int)
  rows = unlabeled >= 0
  np.add.at(counts, (unlabeled[rows], task[rows], labels[rows]), 1)
  assert (counts.sum((1, 2)) == 1840).all() and (counts.sum(2) == 184).all()
  for k in range(10):  # One class dominates, the next one in the next task.
    top = counts[k].argmax(1)
    assert np.mean(top == (k + np.arange(10)) % 10) > .9
  made = data.Partition(owner, unlabeled, np.zeros(labels.size, bool), task)
  data.partition.check_partition(made, labels.size, 10)
