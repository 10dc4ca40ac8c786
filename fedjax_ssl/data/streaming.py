"""Streams: each client meets its unlabeled rows task by task."""
from __future__ import annotations

import numpy as np

from fedjax_ssl.data import partition
from fedjax_ssl.data.partition import checks


def deal_tasks(rng: np.random.Generator, labels: np.ndarray,
               owner: np.ndarray, *, num_tasks: int) -> np.ndarray:
  """Cuts each client's rows in T tasks whose class mix drifts.

  The paper deals unlabeled images to its 10 clients class-wise non-IID, by a
  picture without numbers, and cuts each client's in 10 tasks. Here it is the
  tasks that differ; over all of them a client's classes even out.

  The class mix of a client moves from row to row of `partition.bimb_rows`. On
  client k a row of class c gets the time (c - k - d + u) mod C, with u uniform
  in [0, 1) and d drawn from row 0 of that table. The client's rows, sorted by
  time, are cut in T parts whose sizes differ by one at most. With T = C and
  equal classes, task t of client k then has on average the class mix of row
  (k + t) mod C.

  Args:
    rng: host generator.
    labels: int[D] in [0, C), C the largest label plus one.
    owner: int32[D], client of each row, or -1 where not dealt: the unlabeled
      rows of a Partition.
    num_tasks: T; 1 puts everything in one task.

  Returns:
    int32[D] task in [0, T), -1 where `owner` is -1: the `stream` argument of
    `federation.federate`, which adds a client's labeled rows to every task.

  References:
    Jeong et al., 2020, https://arxiv.org/abs/2006.12097v1, section 3.
  """
  checks.generator(rng)
  labels, dealt = checks.pool(labels, np.asarray(owner) >= 0)
  num_tasks = checks.count('num_tasks', num_tasks)
  num_classes = int(labels.max(initial=0)) + 1
  rows = np.flatnonzero(dealt)
  client = np.asarray(owner, np.int64)[rows]
  offset = rng.choice(num_classes, rows.size,
                      p=partition.bimb_rows(num_classes)[0])
  moment = (labels[rows] - client - offset) % num_classes
  order = np.lexsort((moment + rng.random(rows.size), client))
  sizes = np.bincount(client)
  starts = np.cumsum(sizes) - sizes
  mine = client[order]
  task = np.full(labels.shape, -1, np.int32)
  task[rows[order]] = (
      (np.arange(rows.size) - starts[mine]) * num_tasks // sizes[mine])
  return task
