"""Flower's client, in a module of its own: its actors import it by name."""
from __future__ import annotations

import functools
import pathlib

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
import peer_task
import torch
import torch_loop

app = ClientApp()


@functools.lru_cache(None)
def _loop(folder: str) -> torch_loop.Loop:
  """The task, read once by each actor, which has one thread."""
  torch.set_num_threads(1)
  return torch_loop.make(peer_task.load(pathlib.Path(folder)), 'contiguous')


@app.train()
def train(message: Message, context: Context) -> Message:
  """Trains the client that the message names, from the weights in it."""
  del context
  config = message.content['config']
  loop, client = _loop(config['folder']), config['client']
  loop.network.load_state_dict(message.content['arrays'].to_torch_state_dict())
  loop.train(client)
  return Message(
      RecordDict({'arrays': ArrayRecord(loop.network.state_dict()),
                  'metrics': MetricRecord(
                      {'num-examples': loop.size(client)})}),
      reply_to=message)
