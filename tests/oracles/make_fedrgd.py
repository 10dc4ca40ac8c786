"""Asks FedRGD's authors' code what it computes.

jhcknzzm/SSFL-Benchmarking-Semi-supervised-Federated-Learning
at 9a18e895da73a3d3d14c239c6fa10de0d1d2fef5: train of train_LocalSGD.py in two
rounds, the first of a step more, of ten users and the server in two groups,
with the groups and means of utils_v2.py and comm_helpers.py and the optimizer
of LocalSGD.py, on a small network. Every process of theirs is a thread here,
and their all_reduce adds up what the threads of a group hand over. Without
momentum: theirs stays with a place in a group. Their detach_ of a part of the
logits, which PyTorch refuses now, is a detach. In the repository's root, with
PyTorch 2.13:

python -m tests.oracles.make_fedrgd --checkout=DIR \
    --out=tests/oracles/fedrgd.npz
"""
from __future__ import annotations

from collections.abc import Callable
import concurrent.futures
import copy
import pathlib
import threading
import time
import types
from typing import Any

import numpy as np

from tests.oracles import authors

REPOSITORY = 'jhcknzzm/SSFL-Benchmarking-Semi-supervised-Federated-Learning'
COMMIT = '9a18e895da73a3d3d14c239c6fa10de0d1d2fef5'
WIDTH, HIDDEN, CLASSES = 6, 5, 4
USERS, BATCH, STEPS = 10, 3, 3  # Users and the server train so many steps.
ROWS = BATCH * (STEPS + 1)  # Of each; the first round has a step more.
RATE, DECAY = 0.2, 1e-4
# The users by their places; the servers of the groups are the first and last.
ORDERS = ((7, 2, 9, 4, 1, 3, 10, 6, 5, 8), (1, 10, 4, 8, 6, 2, 5, 9, 7, 3))


class Group:
  """A group of their processes: what they hand over is added up."""

  def __init__(self, ranks: list[int]) -> None:
    self._barrier = threading.Barrier(len(ranks), timeout=30)
    self._lock = threading.Lock()
    self._given: list[Any] = []

  def reduce(self, tensor: Any) -> None:
    with self._lock:
      self._given.append(tensor.clone())
    self._barrier.wait()
    total = sum(self._given)
    self._barrier.wait()
    tensor.copy_(total)
    self._given.clear()
    self._barrier.wait()


class Scheduler:
  """Their learning rate, which stays."""

  def step(self) -> None:
    pass


class Loader:
  """Batches in order, from the start whenever it is asked."""

  def __init__(self, batches: list[Any]) -> None:
    self._batches = batches

  def __iter__(self) -> Any:
    return iter(self._batches)


def loaders(torch: Any, rows: dict[str, np.ndarray]) -> list[Loader]:
  """By number of a user; 0 and 11 are the server."""
  made: list[Loader] = []
  for views, labels in zip(
      torch.tensor(rows['inputs']).split(ROWS),
      torch.tensor(rows['labels']).split(ROWS), strict=True):
    parts = list(zip(views.split(BATCH), labels.split(BATCH), strict=True))
    made.append(Loader(
        [((x[:, 0], x[:, 1]), y) for x, y in parts] if made
        else [(x[:, 0], y) for x, y in parts]))
  return [*made, made[0]]


def import_theirs(torch: Any, checkout: pathlib.Path, args: Any,
                  met: Callable[[int, Any], None]) -> tuple[Any, Any]:
  """Their train, and their optimizer; `met` is told of every mean."""
  talk = authors.load(checkout, 'comm_helpers')
  talk.dist = types.SimpleNamespace(
      all_reduce=lambda tensor, group: group.reduce(tensor))
  utils = authors.taken(
      checkout / 'utils_v2.py',
      ['get_groups', 'Get_group_num', 'Grouping_Avg',
       'save_model_of_each_group', 'save_each_group_avg_model'], np=np,
      copy=copy, SyncAllreduce_1=talk.SyncAllreduce_1)

  def average(args: Any, model: Any, rank: int, *rest: Any) -> Any:
    found = utils.Grouping_Avg(args, model, rank, *rest)
    met(rank, model)
    return found

  meters = types.SimpleNamespace(Meter=lambda **knobs: None)
  taken = authors.taken(
      checkout / 'train_LocalSGD.py', ['train'], **{
          **vars(utils), 'args': args, 'time': time, 'torch': torch,
          'F': torch.nn.functional, 'util': meters, 'util_1': utils,
          'device': 'cpu', 'Grouping_Avg': average})
  return taken.train, authors.load(checkout, 'LocalSGD').SGD


def train(torch: Any, checkout: pathlib.Path, weights: dict[str, np.ndarray],
          rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """After each round the models of both groups, and the server's."""
  args = types.SimpleNamespace(
      user_semi=0, H=1, dataset='cifar10', num_comm_ue=USERS,
      num_devices=USERS, labeled=0, ue_loss='CRL', eval_grad=0, cp=STEPS,
      epoch_interval=1000, epoch=1000, iteration=2 * STEPS)
  found: dict[int, list[dict[str, np.ndarray]]] = {
      rank: [] for rank in range(USERS + 2)}
  one, kind = import_theirs(
      torch, checkout, args,
      lambda rank, net: found[rank].append(authors.weights_of(net)))
  groups = [Group([0, *range(1, 6)]), Group([11, *range(6, 11)]),
            Group([0, 11])]
  places = [[0, *ORDERS[i > STEPS], USERS + 1] for i in range(2 * STEPS)]
  given = loaders(torch, rows)

  def run(rank: int) -> None:
    net = authors.perceptron(torch, weights)
    optimizer = kind(net.parameters(), .6, .7, 1, lr=RATE, weight_decay=DECAY)
    one(rank, net, torch.nn.CrossEntropyLoss(), optimizer, Scheduler(), None,
        None, given, [None], 1, None, [[], places], groups, None)

  with concurrent.futures.ThreadPoolExecutor(USERS + 2) as pool:
    list(pool.map(run, range(USERS + 2)))
  return {f'after_{k}': np.stack([
      [found[rank][i][k] for rank in (1, USERS, 0)] for i in (0, 1)])
          for k in weights}


def main() -> None:
  checkout, out = authors.arguments(__doc__, REPOSITORY, COMMIT)
  import torch
  torch.set_default_dtype(torch.float64)
  torch.set_num_threads(1)
  torch.Tensor.detach_ = torch.Tensor.detach
  rng = np.random.default_rng(17)
  labels = rng.integers(0, CLASSES, ROWS * (USERS + 1))
  centers = rng.normal(size=(CLASSES, WIDTH)) * 2
  clean = centers[labels] + rng.normal(size=(labels.size, WIDTH)) * 0.5
  noise = rng.normal(size=(labels.size, 2, WIDTH)) * [[0.1], [0.6]]
  rows = {'inputs': clean[:, None] + noise, 'labels': labels}
  weights = authors.draw_weights(rng, WIDTH, HIDDEN, CLASSES, 4)
  authors.save(
      out, COMMIT, rate=RATE, decay=DECAY, batch=BATCH, steps=STEPS,
      orders=ORDERS, rows=ROWS, **rows, **weights,
      **train(torch, checkout, weights, rows))


if __name__ == '__main__':
  main()
