"""Asks FedGGp's authors' code what it computes.

whatement/FedGGp at 7e0ed58060b8d66035fa330c2dbf93d90f471b3e: of alg/fedggp.py
an epoch of a client with both kinds of rows and of one without labels, by class
frequencies with a head, a middle and a tail, on a small network with batch
norm; and what the server makes of the frequencies. In the repository's root,
with PyTorch 2.13:

python -m tests.oracles.make_fedggp --checkout=DIR \
    --out=tests/oracles/fedggp.npz
"""
from __future__ import annotations

import types
from typing import Any

import numpy as np

from tests.oracles import authors

COMMIT = '7e0ed58060b8d66035fa330c2dbf93d90f471b3e'
WIDTH, HIDDEN, CLASSES, BATCH = 6, 5, 7, 8
LABELED, UNLABELED = 16, 32  # Rows of the client with both, and of either.
RATE, MOMENTUM, DECAY, EPOCHS = 0.1, 0.9, 5e-4, 4
# Middle classes just below the head have bars that feel the deviation.
PHI = (.155, .15, .145, .14, .06, .035, .01)


class Averager:
  """Their mean of losses, which nobody asks."""

  def add(self, value: float) -> None:
    del value

  def item(self) -> float:
    return 0.0


def draw(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
  """Draws rows, [D, 2, d]: of each a weak and a strong view."""
  labels = rng.integers(0, CLASSES, rows)
  centers = rng.normal(size=(CLASSES, WIDTH)) * 1.5
  clean = centers[labels] + rng.normal(size=(rows, WIDTH)) * .8
  return {'inputs': clean[:, None] + rng.normal(
      size=(rows, 2, WIDTH)) * [[0.1], [0.6]], 'labels': labels}


class Loader:
  """Batches of views in order, as often as it is asked, as theirs comes."""

  def __init__(self, torch: Any, inputs: np.ndarray, labels: np.ndarray):
    views = torch.tensor(inputs)
    self._batches = [
        ((x[:, 0], x[:, 1]), y) for x, y in zip(
            views.split(BATCH), torch.tensor(labels).split(BATCH))]

  def __len__(self) -> int:
    return len(self._batches)

  def __iter__(self) -> Any:
    return Iterator(iter(self._batches))


class Iterator:
  """An iterator with the method `next` of PyTorch's older ones."""

  def __init__(self, inner: Any):
    self._inner = inner

  def __iter__(self) -> Iterator:
    return self

  def __next__(self) -> Any:
    return next(self._inner)

  next = __next__


def main() -> None:
  checkout, out = authors.arguments(__doc__, 'whatement/FedGGp', COMMIT)
  import torch
  torch.set_default_dtype(torch.float64)
  rng = np.random.default_rng(36)
  weights = authors.draw_normalized(rng, WIDTH, HIDDEN, CLASSES, 1.2)
  rows = draw(rng, LABELED + 2 * UNLABELED)
  kind = authors.taken(
      checkout / 'alg/fedggp.py', ['FedGGp'], torch=torch, nn=torch.nn,
      F=torch.nn.functional, np=np, Averager=Averager,
      optimizer_opt=lambda parameters, options: torch.optim.SGD(
          parameters, RATE, MOMENTUM, weight_decay=DECAY)).FedGGp
  one = kind.__new__(kind)
  one.options = types.SimpleNamespace(num_classes=CLASSES, batch_size=BATCH,
                                      num_epochs=EPOCHS)
  one.device, one.T_base, one.k, one.m = 'cpu', 0.5, 2, 0.9
  one.lambda_pesudo, one.lambda_pesudo_pd = 0.1, 3
  one.Phi = torch.tensor(PHI)
  parts = [{k: v[a:b] for k, v in rows.items()} for a, b in (
      (0, LABELED), (LABELED, LABELED + UNLABELED),
      (LABELED + UNLABELED, None))]
  known, other, lone = (Loader(torch, **part) for part in parts)
  one.train_labeled_groups, one.train_unlabeled_groups = {0}, {0, 1}
  one.train_labeled_loaders = {0: known}
  one.train_unlabeled_loaders = {0: other, 1: lone}
  found: dict[str, Any] = {}
  for client in (0, 1):
    net = authors.normalized(torch, weights)
    _, total, count, labels = one.client_update(net, client)
    if client == 0:  # The other one's are not counted. All start at 1/C.
      found |= {'total': total.numpy() - 1 / CLASSES, 'count': count,
                'labels_used': labels}
    found |= authors.numbers_of(net, f'after{client}_')
  used = found['labels_used']
  share = torch.tensor(used / used.sum() - 1 / CLASSES)
  one.update_p_model(torch.tensor(found['total'] / found['count']),
                     share.clamp(min=1e-8))
  authors.save(
      out, COMMIT, rate=RATE, momentum=MOMENTUM, decay=DECAY, epochs=EPOCHS,
      batch=BATCH, labeled=LABELED, unlabeled=UNLABELED, phi=PHI,
      moved=one.Phi.numpy(), **rows, **weights, **found)


if __name__ == '__main__':
  main()
