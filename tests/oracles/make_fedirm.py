"""Asks FedIRM's authors' code what it computes.

liuquande/FedIRM at cfe0495bfeb0ed5dc83e4d63b01e8f901bafa612: the relation
matrix and the distance of two of them (confuse_matrix.py), and four rounds of
two clients with labels and two without, two of them a warm-up, by the classes
of local_supervised.py and local_unsupervised.py and the mean of FedAvg.py. They
are called as train_main.py does, on a network without dropout; its rates, batch
size and lengths are smaller. In the repository's root, with PyTorch 2.13:

python -m tests.oracles.make_fedirm --checkout=DIR \
    --out=tests/oracles/fedirm.npz
"""
from __future__ import annotations

import copy
import pathlib
import sys
import types
from typing import Any

import numpy as np

from tests.oracles import authors

COMMIT = 'cfe0495bfeb0ed5dc83e4d63b01e8f901bafa612'
WIDTH, HIDDEN, CLASSES, BATCH = 6, 5, 5, 4  # Their code has 5 classes.
LABELED, UNLABELED = (10, 7), (11, 9)  # Rows of each client.
ROUNDS, WARMUP, RAMP, RATE = 4, 2, 3, 0.02


def import_theirs(checkout: pathlib.Path) -> tuple[Any, Any]:
  """Returns PyTorch and their modules."""
  import torch
  torch.set_default_dtype(torch.float64)
  authors.without_cuda(torch)
  authors.pretend('networks', 'networks.models')
  sys.argv = sys.argv[:1]  # They read the command line.
  theirs = types.SimpleNamespace(**{
      name: authors.load(checkout, name)
      for name in ('local_supervised', 'local_unsupervised', 'FedAvg',
                   'confuse_matrix')})
  loader = torch.utils.data.DataLoader

  def in_order(rows, batch_size, shuffle):
    del shuffle
    return loader(rows, batch_size=batch_size)

  theirs.local_supervised.DataLoader = in_order
  theirs.local_unsupervised.DataLoader = in_order
  return torch, theirs


def functions(torch: Any, theirs: Any) -> dict[str, Any]:
  """A relation matrix, of which one class has no rows, and the distance."""
  rng = np.random.default_rng(0)
  logits, labels = rng.normal(size=(12, CLASSES)) * 2, rng.integers(0, 4, 12)
  target = np.exp(rng.normal(size=(CLASSES, CLASSES)))
  target /= target.sum(1, keepdims=True)
  leaf = torch.tensor(logits, requires_grad=True)
  matrix = theirs.confuse_matrix.get_confuse_matrix(
      leaf, torch.nn.functional.one_hot(torch.tensor(labels), CLASSES))
  distance = theirs.confuse_matrix.kd_loss(matrix, torch.tensor(target))
  distance.backward()
  return {'logits': logits, 'classes': labels, 'target': target,
          'matrix': matrix.detach().numpy(), 'distance': distance.item(),
          'gradient': leaf.grad.numpy()}


class _Net:
  """Makes a network that returns features and logits, as theirs does."""

  def __init__(self, torch: Any, weights: dict[str, np.ndarray]) -> None:
    class Net(torch.nn.Module):

      def __init__(self) -> None:
        super().__init__()
        self.body = authors.perceptron(torch, weights)

      def forward(self, x: Any) -> Any:
        return x, self.body(x)

    self.make = Net


def rounds(torch: Any, theirs: Any) -> dict[str, Any]:
  """Data, first weights, and the server's model after every round."""
  rng = np.random.default_rng(4)
  sizes = (*LABELED, *UNLABELED)
  labels = rng.integers(0, CLASSES, sum(sizes))
  centers = rng.normal(size=(CLASSES, WIDTH)) * 1.5
  inputs = centers[labels][:, None] + rng.normal(
      size=(labels.size, 2, WIDTH)) * 0.7
  weights = authors.draw_weights(rng, WIDTH, HIDDEN, CLASSES, 0.45)
  net = _Net(torch, weights)
  theirs.local_unsupervised.DenseNet121 = lambda **knobs: net.make()
  rows = [(0, 0, (torch.tensor(views[0]), torch.tensor(views[1])),
           torch.nn.functional.one_hot(torch.tensor(label), CLASSES))
          for views, label in zip(inputs, labels, strict=True)]
  args = types.SimpleNamespace(
      batch_size=BATCH, base_lr=RATE, local_ep=1, gpu='0', drop_rate=0.0,
      label_uncertainty='', ema_decay=0.99, consistency=1,
      consistency_rampup=RAMP)
  theirs.local_unsupervised.args = args
  owned = np.split(np.arange(labels.size), np.cumsum(sizes)[:-1])
  known = [theirs.local_supervised.SupervisedLocalUpdate(args, rows, i)
           for i in owned[:len(LABELED)]]
  other = [theirs.local_unsupervised.UnsupervisedLocalUpdate(args, rows, i)
           for i in owned[len(LABELED):]]
  for client in other:
    client.base_lr = RATE
  nets = [net.make() for _ in sizes]
  states = [torch.optim.Adam(one.parameters(), lr=RATE, betas=(0.9, 0.999),
                             weight_decay=5e-4).state_dict() for one in nets]
  shared = copy.deepcopy(nets[0].state_dict())
  history: list[dict[str, np.ndarray]] = []
  matrices: list[np.ndarray] = []
  losses: list[list[float]] = []
  for round_ in range(ROUNDS):
    sent, costs = [], [0.0] * len(sizes)
    for k, client in enumerate([*known, *other]):
      nets[k].load_state_dict(shared)
      if k < len(known):
        client.base_lr = RATE if round_ < WARMUP else 1.5 * RATE
        model, costs[k], states[k] = client.train(args, nets[k], states[k])
      elif round_ >= WARMUP:
        model, costs[k], states[k] = client.train(
            args, nets[k], states[k], round_, torch.tensor(matrices[-1]))
      else:
        continue
      sent.append(copy.deepcopy(model))
    shared = theirs.FedAvg.FedAvg(sent)
    matrices.append(np.mean([x.confuse_matrix.numpy() for x in known], 0))
    last = net.make()
    last.load_state_dict(shared)
    history.append(authors.weights_of(last.body))
    losses.append(costs)
  return {'inputs': inputs, 'labels': labels, **weights,
          **{f'after_{name}': np.array([model[name] for model in history])
             for name in weights},
          **authors.weights_of(other[0].ema_model.body, 'teacher_'),
          'matrices': np.array(matrices), 'losses': np.array(losses)}


def main() -> None:
  checkout, out = authors.arguments(__doc__, 'liuquande/FedIRM', COMMIT)
  torch, theirs = import_theirs(checkout)
  authors.save(out, COMMIT, rate=RATE, batch=BATCH, warmup=WARMUP, ramp=RAMP,
               labeled=LABELED, unlabeled=UNLABELED,
               **functions(torch, theirs), **rounds(torch, theirs))


if __name__ == '__main__':
  main()
