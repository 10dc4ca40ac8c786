from __future__ import annotations

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from fedjax_ssl.data import partition, streaming


def _rng(seed=0):
  return np.random.default_rng(seed)


def _counts(task, labels, mine, num_tasks, num_classes):
  table = np.zeros((num_tasks, num_classes), int)
  np.add.at(table, (task[mine], labels[mine]), 1)
  return table


@hypothesis.settings(max_examples=50)
@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(-1, 3)), min_size=1,
             max_size=80), st.integers(1, 7), st.integers(0, 9))
def test_every_row_has_one_task_and_tasks_are_equal(rows, num_tasks, seed):
  labels, owner = np.array(rows).T
  task = streaming.deal_tasks(_rng(seed), labels, owner, num_tasks=num_tasks)
  assert task.dtype == np.int32
  np.testing.assert_array_equal(task >= 0, owner >= 0)
  assert task.max() < num_tasks
  for k in set(owner[owner >= 0]):
    sizes = np.bincount(task[owner == k], minlength=num_tasks)
    assert np.ptp(sizes) <= 1


def test_class_mix_drifts_along_the_rolled_rows():
  labels = np.tile(np.arange(10), 3 * 1000)
  owner = np.repeat(np.arange(3), 10_000)
  task = streaming.deal_tasks(_rng(), labels, owner, num_tasks=10)
  rows = partition.bimb_rows(10)
  for k in range(3):
    counts = _counts(task, labels, owner == k, 10, 10)
    want = np.stack([rows[(k + t) % 10] for t in range(10)]) * 1000
    assert np.abs(counts - want).max() < 80


@pytest.mark.parametrize('num_classes,num_tasks', [(2, 2), (7, 7), (10, 5)])
def test_other_sizes_drift_too(num_classes, num_tasks):
  labels = np.tile(np.arange(num_classes), 2000)
  owner = np.zeros(labels.size, int)
  task = streaming.deal_tasks(_rng(), labels, owner, num_tasks=num_tasks)
  counts = _counts(task, labels, owner == 0, num_tasks, num_classes)
  top = counts.argmax(1)
  step = num_classes // num_tasks
  assert (top // step == np.arange(num_tasks)).all()


def test_deterministic_in_the_seed():
  labels = _rng().integers(0, 10, 500)
  owner = partition.iid_random(_rng(), labels, 5)
  deal = [streaming.deal_tasks(_rng(s), labels, owner, num_tasks=4)
          for s in (1, 1, 2)]
  np.testing.assert_array_equal(deal[0], deal[1])
  assert (deal[0] != deal[2]).any()


@pytest.mark.parametrize('num_tasks', [0, -1, 1.5])
def test_bad_number_of_tasks(num_tasks):
  with pytest.raises(ValueError, match='num_tasks'):
    streaming.deal_tasks(_rng(), np.zeros(4, int), np.zeros(4, int),
                         num_tasks=num_tasks)
