"""FedDure as a plain PyTorch loop over clients, to measure against.

The step of `fedjax_ssl.methods.feddure.bilevel` with both regulators, as users
of PyTorch write it: the virtual step keeps its graph, and the gradient of F-reg
goes through it, second order.
"""
from __future__ import annotations

from collections.abc import Sequence
import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
import torch.nn.functional as F

from experiments.benchmarks import torch_fixmatch

_VIRTUAL_RATE = 5e-4


class FineRegulator(nn.Module):
  """F-reg: one hidden layer and a sigmoid, on probabilities."""

  def __init__(self, num_classes: int, hidden: int = 128):
    super().__init__()
    self.hidden = nn.Linear(num_classes, hidden)
    self.out = nn.Linear(hidden, 1)

  def forward(self, logits: torch.Tensor) -> torch.Tensor:
    """float[B, C] -> weights [B] in (0, 1)."""
    x = F.relu(self.hidden(logits.softmax(1)))
    return self.out(x).squeeze(1).sigmoid()


@torch.no_grad()
def load_fine(fine: FineRegulator, made: Any) -> None:
  """Copies a `regulation.Fine`."""
  fine.hidden.weight.copy_(torch.tensor(np.asarray(made.kernel).T.copy()))
  fine.hidden.bias.copy_(torch.tensor(np.asarray(made.bias)))
  fine.out.weight.copy_(torch.tensor(np.asarray(made.out_kernel))[None])
  fine.out.bias.copy_(torch.tensor(np.asarray(made.out_bias)).reshape(1))


class Trio:
  """The local model, C-reg and F-reg with their optimizers.

  Args:
    network: theta, trained in place; C-reg starts as its copy.
    fine: F-reg, trained in place.
    learning_rate: of all three.
    optimizer: 'adam' or 'sgd'.
  """

  def __init__(self, network: Any, fine: FineRegulator, *,
               learning_rate: float, optimizer: str = 'adam'):
    self.network, self.fine = network, fine
    self.coarse = copy.deepcopy(network)
    batch_norms = [m for m in network.modules()
                   if isinstance(m, nn.BatchNorm2d)]
    # Running statistics are those of the local model alone.
    for module in self.coarse.modules():
      if isinstance(module, nn.BatchNorm2d):
        module.track_running_stats = False
        module.running_mean = module.running_var = None
        module.num_batches_tracked = None
    self._joint = bool(batch_norms)
    kind = {'adam': torch.optim.Adam, 'sgd': torch.optim.SGD}[optimizer]
    self._optimizers = [
        kind(x.parameters(), lr=learning_rate, fused=True)
        for x in (self.network, self.coarse, self.fine)]

  def step(self, labeled: torch.Tensor, labels: torch.Tensor,
           weak: torch.Tensor, strong: torch.Tensor) -> None:
    """One local iteration on images float[., C, H, W] and labels int[.]."""
    sizes = [len(weak), len(labeled), len(strong)]
    if self._joint:  # Batch statistics are those of all views together.
      first, known, bold = self.network(
          torch.cat([weak, labeled, strong])).split(sizes)
    else:
      with torch.no_grad():
        first = self.network(weak)
      known, bold = self.network(torch.cat([labeled, strong])).split(sizes[1:])
    target = first.detach().argmax(1)
    self._train_fine(labeled, labels, strong, target)
    reward = self._train_coarse(labeled, labels)
    each = F.cross_entropy(bold, target, reduction='none')
    weights = self.fine(bold).detach()
    loss = (F.cross_entropy(known, labels) + (weights * each).mean()
            + reward * each.mean())
    self._descend(0, torch.autograd.grad(loss, self._params(0)))

  def _train_fine(self, labeled, labels, strong, target) -> None:
    """F-reg's step, through a virtual one of C-reg."""
    self._ahead = self.coarse(strong), target
    grads = torch.autograd.grad(
        self._weighted(), self._params(1), create_graph=True)
    names = [name for name, _ in self.coarse.named_parameters()]
    virtual = {name: p - _VIRTUAL_RATE * g for name, p, g in zip(
        names, self._params(1), grads, strict=True)}
    loss = F.cross_entropy(
        functional_call(self.coarse, virtual, (labeled,)), labels)
    self._descend(2, torch.autograd.grad(
        loss, self._params(2), retain_graph=True))

  def _train_coarse(self, labeled, labels) -> torch.Tensor:
    """C-reg's step; returns by how much it lowers the labeled loss."""
    grads = torch.autograd.grad(self._weighted(), self._params(1))
    with torch.no_grad():
      before = F.cross_entropy(self.coarse(labeled), labels)
      self._descend(1, grads)
      return before - F.cross_entropy(self.coarse(labeled), labels)

  def _weighted(self) -> torch.Tensor:
    logits, target = self._ahead
    each = F.cross_entropy(logits, target, reduction='none')
    return (self.fine(logits) * each).mean()

  def _params(self, i: int) -> list[torch.Tensor]:
    return list((self.network, self.coarse, self.fine)[i].parameters())

  def _descend(self, i: int, grads: Sequence[torch.Tensor]) -> None:
    for p, grad in zip(self._params(i), grads, strict=True):
      # A fused optimizer reads both as they lie in memory, and a convolution
      # may lay its gradient out as its images. `backward` would mend that.
      p.grad = (grad if grad.stride() == p.stride()
                else torch.empty_like(p).copy_(grad))
    self._optimizers[i].step()


class Loop(torch_fixmatch.Loop):
  """Rounds of FedDure, with raw rows as their own views.

  Every client keeps its F-reg; the other two start from the received model,
  and all optimizers anew. Running statistics are not averaged.

  Args:
    network: holds the initial weights.
    *data: images, labels, and the clients' labeled and unlabeled rows.
    optimizer: see `Trio`.
    **choices: of `torch_fixmatch.Loop`.
  """

  def __init__(self, network: Any, *data: Any, optimizer: str = 'adam',
               **choices: Any):
    super().__init__(network, *data, **choices)
    self._rate, self._kind = choices['learning_rate'], optimizer
    classes = network.dense[-1].out_features
    self.fine = [FineRegulator(classes) for _ in self._clients]

  def load_fine(self, stacked: Any) -> None:
    """Copies every client's `regulation.Fine`, leaves [N, ...]."""
    for client, fine in enumerate(self.fine):
      load_fine(fine, type(stacked)(*[leaf[client] for leaf in stacked]))

  def train(self, client: int) -> None:
    """Local epochs of a client from the weights in the network."""
    self._trio = Trio(self.network, self.fine[client],
                      learning_rate=self._rate, optimizer=self._kind)
    super().train(client)

  def _step(self, known: torch.Tensor, unknown: torch.Tensor) -> None:
    views = self._images[unknown]
    self._trio.step(self._images[known], self._labels[known], views, views)
