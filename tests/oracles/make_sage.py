"""Asks SAGE's authors' code what it computes.

Jay-Codeman/SAGE at e90fa96e0766fc2d6e4ea64625b7eec8aa1fd506: eight steps of a
client by the class Local of SAGE.py, over two epochs of its rows in order, on a
small network with batch norm. In the repository's root, with PyTorch 2.13:

python -m tests.oracles.make_sage --checkout=DIR --out=tests/oracles/sage.npz
"""
from __future__ import annotations

import pathlib
import types
from typing import Any

import numpy as np

from tests.oracles import authors

COMMIT = 'e90fa96e0766fc2d6e4ea64625b7eec8aa1fd506'
WIDTH, HIDDEN, CLASSES = 6, 5, 4
LABELED, UNLABELED = 6, 12  # Rows.
LABELED_BATCH, RATIO = 3, 2
EPOCHS, THRESHOLD, WEIGHT = 2, 0.8, 0.7
RATE, MOMENTUM, DECAY = 0.1, 0.9, 1e-4  # Theirs but for the rate.


def start(checkout: pathlib.Path, name: str) -> tuple[Any, Any]:
  """Returns PyTorch and the module that trains, which takes rows in order."""
  import torch
  torch.set_default_dtype(torch.float64)
  authors.without_cuda(torch)
  authors.pretend(
      'torchvision', 'torchvision.transforms', 'pandas', 'tqdm', 'Dataset',
      'Dataset.dataset', 'Dataset.sample_dirichlet', 'Dataset.CINIC10',
      'Model', 'Model.resnet')
  theirs = authors.load(checkout, name)

  def in_order(dataset, batch_size, **knobs):
    knobs = {k: v for k, v in knobs.items() if k == 'drop_last'}
    return torch.utils.data.DataLoader(dataset, batch_size, **knobs)

  theirs.DataLoader = in_order
  return torch, theirs


def arguments() -> types.SimpleNamespace:
  """What their options would be."""
  return types.SimpleNamespace(
      gpu_id=0, num_classes=CLASSES, lr_local_training=RATE, mu=RATIO,
      batch_size_local_labeled_fixmatch=LABELED_BATCH, local_epochs=EPOCHS,
      T=1.0, threshold=THRESHOLD, lambda_u=WEIGHT)


def draw(rng: np.random.Generator, rows: int, noise: float = 0.5
         ) -> dict[str, np.ndarray]:
  """Draws rows, [D, 2, d]: of each a weak and a strong view."""
  labels = rng.integers(0, CLASSES, rows)
  centers = rng.normal(size=(CLASSES, WIDTH)) * 1.5
  clean = centers[labels] + rng.normal(size=(rows, WIDTH)) * noise
  views = clean[:, None] + rng.normal(size=(rows, 2, WIDTH)) * [[0.1], [0.7]]
  return {'inputs': views, 'labels': labels}


def datasets(torch: Any, inputs: np.ndarray, labels: np.ndarray, known: int
             ) -> tuple[list[Any], list[Any]]:
  """A client's rows as theirs are: (weak, label), and (weak, strong, label)."""
  x, y = torch.tensor(inputs), torch.tensor(labels)
  return ([(x[i, 0], y[i]) for i in range(known)],
          [(x[i, 0], x[i, 1], y[i]) for i in range(known, len(x))])


def main() -> None:
  checkout, out = authors.arguments(__doc__, 'Jay-Codeman/SAGE', COMMIT)
  torch, theirs = start(checkout, 'SAGE')
  theirs.logging = watch = authors.Watch(
      'logits_u_w', 'logits_u_w_global', 'final_targets_u', 'mask_valid',
      'mask_local', 'lambda_dynamic', 'Lx', 'Lu')
  rng = np.random.default_rng(2)
  rows = draw(rng, LABELED + UNLABELED)
  weights = authors.draw_normalized(rng, WIDTH, HIDDEN, CLASSES, 1.5)
  theirs.ResNet = lambda **knobs: authors.normalized(torch, weights)
  client = theirs.Local(arguments())
  client.fixmatch_train(
      arguments(), *datasets(torch, **rows, known=LABELED),
      authors.normalized(torch, weights).state_dict(), 0)
  authors.save(
      out, COMMIT, threshold=THRESHOLD, weight=WEIGHT, rate=RATE,
      momentum=MOMENTUM, decay=DECAY, num_labeled=LABELED,
      labeled_batch=LABELED_BATCH, unlabeled_batch=RATIO * LABELED_BATCH,
      steps=len(watch.rows), **rows, **weights, **watch.stacked(),
      **authors.numbers_of(client.local_model, 'after_'))


if __name__ == '__main__':
  main()
