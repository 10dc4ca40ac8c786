"""What the benchmark needs of Flower, in one process: a Flower for tests.

As in Flower, clients register one by one, their numbers are no small ones, what
travels is copied, and the server's mean counts each client's examples.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
import pathlib
import random
import types
from typing import Any

import numpy as np

# Where the real one has its names.
_MODULES = {
    'app': ('ArrayRecord', 'ConfigRecord', 'Context', 'Message',
            'MetricRecord', 'RecordDict'),
    'clientapp': ('ClientApp',),
    'serverapp': ('ServerApp',),
    'serverapp.strategy': ('FedAvg',),
    'simulation': ('run_simulation',)}


def install(folder: pathlib.Path) -> None:
  """Writes packages that look like Flower's and Ray's.

  And a version of PyTorch, which may lie on the path without one.
  """
  for name, names in _MODULES.items():
    place = folder.joinpath('flwr', *name.split('.'))
    place.mkdir(parents=True)
    (place / '__init__.py').write_text(
        f'from fake_flower import {", ".join(names)}\n')
  (folder / 'flwr' / '__init__.py').write_text('')
  for name in ('flwr', 'ray', 'torch'):
    place = folder / f'{name}-0.0.0.dist-info'
    place.mkdir()
    (place / 'METADATA').write_text(
        f'Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.0\n')
  (folder / 'fake_flower.py').write_text(pathlib.Path(__file__).read_text())


class Context:
  """A node's own state, which nobody here has."""


class ConfigRecord(dict):
  """Numbers, texts and truth values."""


class MetricRecord(dict):
  """Numbers."""


class RecordDict(dict):
  """Records by name."""


class ArrayRecord:
  """Copies of a network's arrays by name."""

  def __init__(self, state_dict):
    self.arrays = {name: np.array(x) for name, x in state_dict.items()}

  def to_torch_state_dict(self) -> dict[str, Any]:
    import torch
    return {name: torch.tensor(x) for name, x in self.arrays.items()}


class Message:
  """To a node, or in reply to a message."""

  def __init__(self, content, *, message_type=None, dst_node_id=None,
               reply_to=None):
    assert (message_type is None) == (dst_node_id is None) != (
        reply_to is None)
    self.content, self.type, self.node = content, message_type, dst_node_id
    self.reply_to = reply_to


class ClientApp:
  """Keeps the function that trains."""

  def train(self) -> Callable[..., Any]:
    def keep(function):
      self.trained = function
      return function
    return keep


class ServerApp:
  """Keeps the function that is the server."""

  def main(self) -> Callable[..., Any]:
    def keep(function):
      self.serve = function
      return function
    return keep


class FedAvg:
  """Rounds of the messages of `configure_train`."""

  def __init__(self, fraction_evaluate: float = 1.0):
    assert not fraction_evaluate, 'nothing here evaluates'

  def configure_train(self, server_round, arrays, config, grid
                      ) -> Iterable[Message]:
    raise NotImplementedError

  def start(self, grid, initial_arrays, num_rounds: int = 3) -> Any:
    arrays = initial_arrays
    for i in range(num_rounds):
      replies = grid.send_and_receive(
          list(self.configure_train(i + 1, arrays, ConfigRecord(), grid)))
      counts = [r.content['metrics']['num-examples'] for r in replies]
      weights = np.array(counts) / sum(counts)
      arrays = ArrayRecord({name: sum(
          np.float32(w) * r.content['arrays'].arrays[name]
          for w, r in zip(weights, replies, strict=True))
                            for name in arrays.arrays})
    return types.SimpleNamespace(arrays=arrays)


class _Grid:
  """The nodes, of which one more is there each time that one looks."""

  def __init__(self, app: ClientApp, size: int):
    self._app, self._seen = app, 0
    self._nodes = random.Random(0).sample(range(10**9, 2**63), size)

  def get_node_ids(self) -> list[int]:
    self._seen += 1
    return self._nodes[:self._seen]

  def send_and_receive(self, messages: list[Message]) -> list[Message]:
    nodes = [message.node for message in messages]
    assert set(nodes) <= set(self._nodes) and len(set(nodes)) == len(nodes)
    assert all(message.type == 'train' for message in messages)
    replies = [self._app.trained(message, Context()) for message in messages]
    assert [reply.reply_to for reply in replies] == messages
    return replies


def run_simulation(server_app: ServerApp, client_app: ClientApp,
                   num_supernodes: int, backend_config: dict[str, Any]) -> None:
  """Runs the server to its end."""
  one, all_ = (backend_config[name]['num_cpus']
               for name in ('client_resources', 'init_args'))
  assert 1 <= one <= all_
  server_app.serve(_Grid(client_app, num_supernodes), Context())
