"""Asks FedLoKe's authors' code what it computes.

zcfinal/FedLoKe at cd60a419f8e783512b65f2c416119992341e2354: the function train
of run.py, two rounds of two clients with their rows in order, on a small
network with batch norm. The rate is 1 in place of 0.01, and soft labels weigh
half, as in round 100. In the repository's root, with PyTorch 2.13:

python -m tests.oracles.make_fedloke --checkout=DIR \
    --out=tests/oracles/fedloke.npz
"""
from __future__ import annotations

import copy
import types
from typing import Any

import numpy as np

from tests.oracles import authors

COMMIT = 'cd60a419f8e783512b65f2c416119992341e2354'
WIDTH, HIDDEN, CLASSES = 6, 5, 4
CLIENTS, LABELED, UNLABELED, BATCH, ROUNDS = 2, 12, 12, 3, 2
RATE, DECAY, ENTROPY, ROUND, MOST = 1.0, 0.7, 1.0, 100, 0.1


def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
  """Draws rows, [D, 2, d]: of each a weak and a strong view, in 255ths.

  Their code makes bytes of what goes to the strong view, so only numbers that
  this leaves as they are can be compared.
  """
  size = CLIENTS * (LABELED + UNLABELED)
  labels = rng.integers(0, CLASSES, size)
  centers = rng.uniform(0.2, 0.8, (CLASSES, WIDTH))
  views = centers[labels][:, None] + (
      rng.normal(size=(size, 2, WIDTH)) * [[0.06], [0.2]])
  whole = np.arange(256)
  exact = whole[(whole / 255 * 255).astype(np.uint8) == whole]
  nearest = np.abs(views[..., None] * 255 - exact).argmin(-1)
  return {'inputs': exact[nearest] / 255, 'labels': labels}


def main() -> None:
  checkout, out = authors.arguments(__doc__, 'zcfinal/FedLoKe', COMMIT)
  import torch
  torch.set_default_dtype(torch.float64)
  authors.without_cuda(torch)
  rng = np.random.default_rng(8)
  rows = draw(rng)
  weights = authors.draw_normalized(rng, WIDTH, HIDDEN, CLASSES, 1.8)

  class Net(torch.nn.Module):  # As their ResNet9.

    def __init__(self) -> None:
      super().__init__()
      self.inner = authors.normalized(torch, weights)

    def forward(self, x: Any, label: Any = None) -> Any:
      logits = self.inner(x)[1]
      return logits, None if label is None else (
          torch.nn.functional.cross_entropy(logits, label, reduction='none'))

  def in_order(dataset: Any, batch_size: int, shuffle: bool, drop_last: bool
               ) -> Any:
    del shuffle
    return torch.utils.data.DataLoader(dataset, batch_size,
                                       drop_last=drop_last)

  def descent(groups: list[dict[str, Any]]) -> Any:
    return torch.optim.SGD([{**group, 'lr': RATE} for group in groups])

  size = LABELED + UNLABELED
  held = {i: np.arange(i * size, (i + 1) * size) for i in range(CLIENTS)}
  received = Net()
  local = [copy.deepcopy(received) for _ in range(CLIENTS)]
  args = types.SimpleNamespace(
      sample_ratio=1, num_users=CLIENTS, ema_weight=DECAY,
      per_device_train_batch_size=BATCH, entropy_threshold=ENTROPY)
  theirs = authors.taken(
      checkout / 'run.py', ['train'], copy=copy, torch=torch, nn=torch.nn,
      F=torch.nn.functional, optim=types.SimpleNamespace(SGD=descent),
      random=types.SimpleNamespace(sample=lambda keys, count: list(keys)),
      DataLoader=in_order, TensorDataset=torch.utils.data.TensorDataset,
      train_users=held, train_users_dict=held, user_model=local,
      train_images=torch.tensor(rows['inputs']),
      train_labels=torch.tensor(rows['labels']), LABELED_DATA_NUM=LABELED,
      UNLABELED_DATA_NUM=UNLABELED, range_length=size,
      weak_aug=lambda x: x[:, 0], strong_aug=lambda x: x[:, 1])
  state = copy.deepcopy(received.state_dict())
  for _ in range(ROUNDS):
    state = theirs.train(ROUND, received, state, 1, args)
  received.load_state_dict(state)
  after = authors.numbers_of(received.inner, 'after_')
  for i, model in enumerate(local):
    after |= authors.numbers_of(model.inner, f'local{i}_')
  authors.save(
      out, COMMIT, **rows, **weights, **after, rate=RATE, decay=DECAY,
      max_entropy=ENTROPY, weight=min(1, ROUND / 200), max_gradient=MOST,
      labeled=LABELED, unlabeled=UNLABELED, batch=BATCH, rounds=ROUNDS)


if __name__ == '__main__':
  main()
