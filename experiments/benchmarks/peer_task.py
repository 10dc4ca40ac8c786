"""What the peers' scripts share: the task on disk, and the orders they take.

A script runs in its system's own environment, which has numpy and not this
library. It gets a folder with the task, says on standard output that it is
ready, and then obeys orders from standard input, one a line:

  advance N    trains N more rounds
  save FILE    writes the global weights
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
import json
import os
import pathlib
import sys
from typing import Any, NamedTuple, Protocol

import numpy as np


class Task(NamedTuple):
  """FedAvg on images, the same for every system.

  Attributes:
    images: uint8[D, H, W, C].
    labels: int64[D].
    clients: rows of each client.
    cohorts: int[R, S], who takes part in each round.
    params: initial weights by layer and name, convolutions [h, w, in, out].
    mean: of the pixels in 0..1.
    std: the same.
    batch: rows of a local step.
    epochs: local passes over a client's rows.
    learning_rate: of plain SGD.
    threads: processor threads to use.
  """

  images: np.ndarray
  labels: np.ndarray
  clients: list[np.ndarray]
  cohorts: np.ndarray
  params: dict[str, dict[str, np.ndarray]]
  mean: float
  std: float
  batch: int
  epochs: int
  learning_rate: float
  threads: int

  def cohort(self, round_: int) -> list[int]:
    """Ids of a round's clients."""
    return [int(k) for k in self.cohorts[round_]]

  def floats(self) -> np.ndarray:
    """float32[D, H, W, C], normalized once and not in every step."""
    x = self.images.astype(np.float32) / 255
    return (x - np.float32(self.mean)) / np.float32(self.std)


class System(Protocol):
  """A simulator with a task."""

  def advance(self, count: int) -> None:
    """Trains `count` rounds more, to the end."""

  def params(self) -> dict[str, dict[str, np.ndarray]]:
    """The global weights, named and laid out as in `Task.params`."""


def flat(params: dict[str, Any]) -> dict[str, np.ndarray]:
  """{'layer/name': array} of nested weights."""
  return {f'{layer}/{name}': np.asarray(leaf)
          for layer, leaves in params.items() for name, leaf in leaves.items()}


def nested(arrays: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
  """The inverse of `flat`."""
  made: dict[str, dict[str, np.ndarray]] = {}
  for name, leaf in arrays.items():
    layer, _, name = name.partition('/')
    made.setdefault(layer, {})[name] = leaf
  return made


def save(folder: pathlib.Path, task: Task) -> None:
  """Writes a task for `load`."""
  sizes = np.array([len(rows) for rows in task.clients])
  np.savez(folder / 'arrays.npz', images=task.images, labels=task.labels,
           rows=np.concatenate(task.clients), sizes=sizes,
           cohorts=task.cohorts)
  write_params(folder / 'params.npz', task.params)
  numbers = {name: getattr(task, name) for name in Task._fields[5:]}
  (folder / 'numbers.json').write_text(json.dumps(numbers))


def load(folder: pathlib.Path) -> Task:
  """Reads what `save` wrote."""
  with np.load(folder / 'arrays.npz', allow_pickle=False) as arrays:
    clients = np.split(arrays['rows'], np.cumsum(arrays['sizes'])[:-1])
    parts = arrays['images'], arrays['labels'], clients, arrays['cohorts']
  return Task(*parts, read_params(folder / 'params.npz'),
              **json.loads((folder / 'numbers.json').read_text()))


def write_params(path: pathlib.Path, params: dict[str, Any]) -> None:
  """Writes weights for `read_params`."""
  arrays: dict[str, Any] = dict(flat(params))
  np.savez(path, **arrays)


def read_params(path: pathlib.Path) -> dict[str, dict[str, np.ndarray]]:
  """Weights as `write_params` writes them."""
  with np.load(path, allow_pickle=False) as arrays:
    return nested(dict(arrays))


class Orders:
  """The conversation with the benchmark.

  Args:
    packages: whose versions are told.
  """

  def __init__(self, packages: Sequence[str]):
    # The answers have standard output to themselves: what the system prints
    # goes to the log, which is standard error.
    self._answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)
    self._packages = packages

  def serve(self, system: System) -> None:
    """Obeys until the orders end."""
    self._answer({name: metadata.version(name) for name in self._packages})
    for line in sys.stdin:
      order, _, value = line.strip().partition(' ')
      if order == 'advance':
        system.advance(int(value))
      elif order == 'save':
        write_params(pathlib.Path(value), system.params())
      else:
        raise ValueError(f'{line!r} is no order.')
      self._answer('done')

  def _answer(self, value: Any) -> None:
    print(json.dumps(value), file=self._answers, flush=True)


def main(make: Callable[..., System], packages: Sequence[str]) -> None:
  """Runs a script: `make(task, *words)` with the words of the command line."""
  orders = Orders(packages)
  orders.serve(make(load(pathlib.Path(sys.argv[1])), *sys.argv[2:]))
