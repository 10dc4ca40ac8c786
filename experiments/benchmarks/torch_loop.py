"""FedAvg as a plain PyTorch loop over clients, to measure against."""
from __future__ import annotations

from collections.abc import Sequence
import importlib
import re
from typing import Any

import numpy as np
import torch
from torch import nn
import torch.nn.functional as F

LAYOUTS = {'contiguous': torch.contiguous_format,
           'channels_last': torch.channels_last}


class FedAvgCNN(nn.Module):
  """The library's 'fedavg_cnn': 1,663,370 parameters for 28x28x1.

  Args:
    side: of the images, divisible by 4.
  """

  def __init__(self, side: int = 28):
    super().__init__()
    self.convs = nn.ModuleList([nn.Conv2d(1, 32, 5, padding=2),
                                nn.Conv2d(32, 64, 5, padding=2)])
    self.dense = nn.ModuleList([nn.Linear(64 * (side // 4)**2, 512),
                                nn.Linear(512, 10)])

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    """float[B, 1, H, W] -> logits [B, 10]."""
    for conv in self.convs:
      x = F.relu(F.max_pool2d(conv(x), 2))
    return self.dense[1](F.relu(self.dense[0](x.flatten(1))))


class ResNet9(nn.Module):
  """The library's 'resnet9_fedmatch', or its 'resnet9'.

  Args:
    whole: with biases and batch normalization, as 'resnet9'.
  """

  def __init__(self, whole: bool = False):
    super().__init__()
    widths = (3, 64, 128, 128, 128, 256, 512, 512, 512)
    self.convs = nn.ModuleList([
        nn.Conv2d(i, o, 3, padding=1, bias=whole)
        for i, o in zip(widths[:-1], widths[1:], strict=True)])
    self.norms = nn.ModuleList([
        nn.BatchNorm2d(o) if whole else nn.Identity() for o in widths[1:]])
    self.dense = nn.ModuleList([nn.Linear(512, 10, bias=whole)])

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    """float[B, 3, 32, 32] -> logits [B, 10]."""
    def block(x, i, pool=False):
      x = self.norms[i](self.convs[i](x))
      return F.relu(F.max_pool2d(x, 2) if pool else x)
    x = block(block(x, 0), 1, pool=True)
    x = x + block(block(x, 2), 3)
    x = block(block(x, 4, pool=True), 5, pool=True)
    x = x + block(block(x, 6), 7)
    return self.dense[0](F.max_pool2d(x, 4).flatten(1))


NETWORKS = ('fedavg_cnn', 'resnet9', 'resnet9_fedmatch')


def network_of(model: str, params: Any, side: int) -> Any:
  """The network of a model in `NETWORKS`, with the library's parameters.

  Args:
    model: the library's name.
    params: its parameters.
    side: of the images: gray ones for 'fedavg_cnn', 32 and colored else.
  """
  made: Any = (FedAvgCNN(side) if model == 'fedavg_cnn'
               else ResNet9(whole=model == 'resnet9'))
  load_flax(made, params)
  return made


@torch.no_grad()
def load_flax(network: Any, params: Any) -> None:
  """Copies the library's parameters into the network of the same shape."""
  convs = _in_order(params, 'Conv')
  dense = _in_order(params, 'Dense')
  for layer, made in zip(network.convs, convs, strict=True):
    kernel = np.transpose(np.asarray(made['kernel']), (3, 2, 0, 1))
    layer.weight.copy_(torch.tensor(kernel))
  # The first dense layer sees (row, column, channel) flat, not channel first.
  channels = convs[-1]['kernel'].shape[-1]
  for i, (layer, made) in enumerate(zip(network.dense, dense, strict=True)):
    kernel = np.asarray(made['kernel'])
    if i == 0:
      kernel = kernel.reshape(-1, channels, kernel.shape[1]).swapaxes(0, 1)
    layer.weight.copy_(torch.tensor(
        kernel.reshape(layer.in_features, -1).T.copy()))
  for layer, made in zip([*network.convs, *network.dense], [*convs, *dense],
                         strict=True):
    if layer.bias is not None:
      layer.bias.copy_(torch.tensor(np.asarray(made['bias'])))
  for layer, made in zip(getattr(network, 'norms', ()),
                         _in_order(params, 'Norm'), strict=False):
    layer.weight.copy_(torch.tensor(np.asarray(made['scale'])))
    layer.bias.copy_(torch.tensor(np.asarray(made['bias'])))


def to_flax(network: Any) -> dict[str, dict[str, np.ndarray]]:
  """The inverse of `load_flax`: parameters named and laid out as ours."""
  made = {}
  for i, layer in enumerate(network.convs):
    made[f'Conv_{i}'] = {'kernel': layer.weight.permute(2, 3, 1, 0)}
  channels = network.convs[-1].out_channels
  for i, layer in enumerate(network.dense):
    kernel = layer.weight.T
    if i == 0:
      kernel = kernel.reshape(channels, -1, layer.out_features).swapaxes(0, 1)
    made[f'Dense_{i}'] = {'kernel': kernel.reshape(-1, layer.out_features)}
  for name, layer in zip(made, [*network.convs, *network.dense], strict=True):
    if layer.bias is not None:
      made[name]['bias'] = layer.bias
  return {name: {k: v.detach().numpy().copy() for k, v in leaves.items()}
          for name, leaves in made.items()}


def _in_order(params: Any, kind: str) -> list[Any]:
  """The layers of a kind, by the number that Flax gave them."""
  found = {}
  for name, leaves in params.items():
    match = re.fullmatch(kind + r'_(\d+)', name)
    if match:
      found[int(match.group(1))] = leaves
  return [found[i] for i in sorted(found)]


class Loop:
  """One model, trained by client after client and averaged.

  Args:
    network: holds the initial weights.
    images: uint8[D, H, W, C].
    labels: int[D].
    clients: rows of each client.
    mean: of the pixels in 0..1.
    std: the same.
    batch: rows of a step; the last one of an epoch may be short.
    learning_rate: of plain SGD.
    layout: a key of `LAYOUTS`.
    epochs: local passes over a client's rows.
  """

  def __init__(self, network: Any, images: np.ndarray, labels: np.ndarray,
               clients: Sequence[np.ndarray], *, mean: float, std: float,
               batch: int, learning_rate: float, layout: str,
               epochs: int = 1):
    memory = LAYOUTS[layout]
    self.network = network.to(memory_format=memory).train()
    # Normalized once: cheaper than in every step.
    x = (torch.tensor(images).permute(0, 3, 1, 2).float() / 255 - mean) / std
    self._images = x.contiguous(memory_format=memory)
    self._labels = torch.tensor(labels).long()
    self._clients = [torch.tensor(rows).long() for rows in clients]
    self._batch, self._epochs = batch, epochs
    self._optimizer = torch.optim.SGD(
        self.network.parameters(), lr=learning_rate, fused=True)
    self._params = list(self.network.parameters())
    self._server = [p.detach().clone() for p in self._params]
    self._order = torch.Generator().manual_seed(0)

  def round(self, cohort: Sequence[int] | np.ndarray) -> None:
    """Local epochs of every client in the cohort; the weighted mean."""
    totals = [torch.zeros_like(p) for p in self._server]
    rows = sum(self.size(k) for k in cohort)
    for k in cohort:
      self._receive()
      self.train(k)
      share = self.size(k) / rows
      for total, p in zip(totals, self._params, strict=True):
        total.add_(p.detach(), alpha=share)
    self._server = totals
    self._receive()

  @torch.no_grad()
  def _receive(self) -> None:
    for p, value in zip(self._params, self._server, strict=True):
      p.copy_(value)

  def size(self, client: int) -> int:
    """What a client counts in the mean: its rows."""
    return len(self._clients[client])

  def _shuffled(self, rows: torch.Tensor) -> torch.Tensor:
    return rows[torch.randperm(len(rows), generator=self._order)]

  def train(self, client: int) -> None:
    """Local epochs of a client from the weights in the network."""
    rows = self._clients[client]
    for _ in range(self._epochs):
      for part in self._shuffled(rows).split(self._batch):
        self._optimizer.zero_grad(set_to_none=True)
        logits = self.network(self._images[part])
        F.cross_entropy(logits, self._labels[part]).backward()
        self._optimizer.step()


def made(kind: str, threads: int, model: str, params: Any, data: Sequence[Any],
         choices: dict[str, Any]) -> tuple[Loop, str]:
  """Makes a loop for `torch_apart.Loops`.

  Args:
    kind: module whose `Loop` it is.
    threads: of PyTorch.
    model: one of `NETWORKS`.
    params: the library's initial parameters.
    data: the loop's arguments that follow the network, images first.
    choices: its other arguments.

  Returns:
    The loop, and PyTorch's version.
  """
  torch.set_num_threads(threads)
  loop = importlib.import_module(f'experiments.benchmarks.{kind}').Loop(
      network_of(model, params, data[0].shape[1]), *data, **choices)
  return loop, str(torch.__version__)


def make(task: Any, layout: str) -> Loop:
  """A loop for a task of `peer_task.py`, at its initial weights."""
  network = FedAvgCNN(side=task.images.shape[1])
  load_flax(network, task.params)
  return Loop(network, task.images, task.labels, task.clients, mean=task.mean,
              std=task.std, batch=task.batch, epochs=task.epochs,
              learning_rate=task.learning_rate, layout=layout)
