"""Flower's client, in a module of its own: its actors import it by name."""
from __future__ import annotations

import functools
import pathlib

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
import torch
from torch import nn
from torch.utils import data

from experiments.benchmarks import peer_task, torch_loop

app = ClientApp()


@functools.lru_cache(None)
def _task(folder: str) -> peer_task.Task:
  """The task, read once by each actor."""
  return peer_task.load(pathlib.Path(folder))


@functools.lru_cache(None)
def _loop(folder: str) -> torch_loop.Loop:
  """The network and the images, made once by each actor of one thread."""
  torch.set_num_threads(1)
  return torch_loop.make(_task(folder), 'contiguous')


class _Images(data.Dataset):
  """A client's rows, normalized as they are read.

  Args:
    task: the task.
    rows: of the client.
  """

  def __init__(self, task: peer_task.Task, rows):
    self._task, self._rows = task, rows

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int):
    task, row = self._task, self._rows[index]
    image = torch.from_numpy(task.images[row]).permute(2, 0, 1).float() / 255
    return (image - task.mean) / task.std, task.labels[row]


def _kept(folder: str, client: int, weights) -> tuple[nn.Module, int]:
  """The cheapest way: nothing is made anew for a message."""
  loop = _loop(folder)
  loop.network.load_state_dict(weights)
  loop.train(client)
  return loop.network, loop.size(client)


def _documented(folder: str, client: int, weights) -> tuple[nn.Module, int]:
  """As Flower's PyTorch guide trains: all is made anew for each message."""
  task = _task(folder)
  images = _Images(task, task.clients[client])
  loader = data.DataLoader(images, batch_size=task.batch, shuffle=True)
  network = torch_loop.FedAvgCNN(side=task.images.shape[1])
  network.load_state_dict(weights)
  network.train()
  criterion = nn.CrossEntropyLoss()
  optimizer = torch.optim.SGD(network.parameters(), lr=task.learning_rate)
  for _ in range(task.epochs):
    for inputs, labels in loader:
      optimizer.zero_grad()
      criterion(network(inputs), labels).backward()
      optimizer.step()
  return network, len(images)


@app.train()
def train(message: Message, context: Context) -> Message:
  """Trains the client that the message names, from the weights in it."""
  del context
  config = message.content['config']
  way = _documented if config['documented'] else _kept
  network, size = way(config['folder'], config['client'],
                      message.content['arrays'].to_torch_state_dict())
  return Message(
      RecordDict({'arrays': ArrayRecord(network.state_dict()),
                  'metrics': MetricRecord({'num-examples': size})}),
      reply_to=message)
