"""FixMatch as a plain PyTorch loop over clients, to measure against."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from experiments.benchmarks import torch_loop


class Loop(torch_loop.Loop):
  """`torch_loop.Loop` with unlabeled rows, whose views are the rows themselves.

  Both streams last one epoch, with as many batches of each.

  Args:
    network: holds the initial weights.
    images: uint8[D, H, W, C].
    labels: int[D].
    clients: labeled rows of each client.
    unlabeled: unlabeled rows of each client.
    unlabeled_batch: of them in a step.
    threshold: confidence from which on a row counts.
    **choices: of `torch_loop.Loop`.
  """

  def __init__(self, network: Any, images: np.ndarray, labels: np.ndarray,
               clients: Sequence[np.ndarray], unlabeled: Sequence[np.ndarray],
               *, unlabeled_batch: int, threshold: float = 0.95,
               **choices: Any):
    super().__init__(network, images, labels, clients, **choices)
    self._unlabeled = [torch.tensor(rows).long() for rows in unlabeled]
    self._unlabeled_batch, self._threshold = unlabeled_batch, threshold

  def size(self, client: int) -> int:
    """What a client counts in the mean: its rows of both kinds."""
    return super().size(client) + len(self._unlabeled[client])

  def train(self, client: int) -> None:
    """Local epochs of a client from the weights in the network."""
    for _ in range(self._epochs):
      streams = (
          self._shuffled(self._clients[client]).split(self._batch),
          self._shuffled(self._unlabeled[client]).split(self._unlabeled_batch))
      for known, unknown in zip(*streams, strict=True):
        self._step(known, unknown)

  def _step(self, known: torch.Tensor, unknown: torch.Tensor) -> None:
    with torch.no_grad():
      sure, target = self.network(self._images[unknown]).softmax(1).max(1)
    self._optimizer.zero_grad(set_to_none=True)
    logits = self.network(self._images[torch.cat([known, unknown])])
    labeled, strong = logits.split([len(known), len(unknown)])
    each = F.cross_entropy(strong, target, reduction='none')
    loss = F.cross_entropy(labeled, self._labels[known])
    (loss + (each * (sure >= self._threshold)).mean()).backward()
    self._optimizer.step()
