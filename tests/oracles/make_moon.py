"""Asks MOON's authors' code what it computes.

QinbinLi/MOON at 8fcba3c4efc9a47eb24687a91ba94cfb2005103f: the rounds of main.py
with --alg=moon, whole, with its train_net_fedcon and the accuracy of utils.py;
four rounds of two of three clients, over two epochs of their rows in order, on
a small network with batch norm in place of theirs. It has no projection head,
as with --use_project_head=0, and every client's first network is the global
one, which theirs draws for each. In the repository's root, with PyTorch 2.13:

python -m tests.oracles.make_moon --checkout=DIR --out=tests/oracles/moon.npz
"""
from __future__ import annotations

import copy
import sys
import types
from typing import Any

import numpy as np

from tests.oracles import authors

COMMIT = '8fcba3c4efc9a47eb24687a91ba94cfb2005103f'
WIDTH, HIDDEN, CLASSES = 6, 5, 4
ROWS, BATCH, EPOCHS = (4, 12, 8), 4, 2  # Theirs leaves out what fills no batch.
# The third client is new in the second round and sits out the third; the first
# comes back after a round, and the second after two.
COHORTS = ((0, 1), (0, 2), (1, 0), (2, 1))
RATE, MOMENTUM, DECAY = 0.2, 0.9, 0.01  # The momentum is theirs.
MU, TEMPERATURE = 3.0, 0.4


class Logger:
  """Keeps what a client's epochs logged: the means of both parts of the loss.

  Attributes:
    rows: [epochs], [cross entropy, weighted contrast].
  """

  def __init__(self) -> None:
    self.rows: list[list[float]] = []

  def info(self, message: str) -> None:
    there = sys._getframe(1).f_locals
    if message.startswith('Epoch'):
      self.rows.append([there['epoch_loss1'], there['epoch_loss2']])


def network(torch: Any, weights: dict[str, np.ndarray]) -> Any:
  """What their networks without a head return: twice features, and logits."""
  class Net(torch.nn.Module):

    def __init__(self) -> None:
      super().__init__()
      self.inner = authors.normalized(torch, weights)

    def forward(self, x: Any) -> Any:
      features, logits = self.inner(x)
      return features, features, logits

  return Net()


def main() -> None:
  checkout, out = authors.arguments(__doc__, 'QinbinLi/MOON', COMMIT)
  import torch
  torch.set_default_dtype(torch.float64)
  authors.without_cuda(torch)
  rng = np.random.default_rng(8)
  labels = rng.integers(0, CLASSES, sum(ROWS))
  centers = rng.normal(size=(CLASSES, WIDTH)) * 1.5
  inputs = centers[labels] + rng.normal(size=(labels.size, WIDTH))
  weights = authors.draw_normalized(rng, WIDTH, HIDDEN, CLASSES, 1.5)
  places = np.split(np.arange(labels.size), np.cumsum(ROWS)[:-1])

  def loader(dataset: str, folder: str, size: int, test_size: int,
             rows: Any = None) -> Any:
    rows = np.arange(labels.size) if rows is None else rows
    made = [(torch.tensor(inputs[part]), torch.tensor(labels[part]))
            for part in np.split(rows, len(rows) // size)]
    return made, made, None, None

  logger, model = Logger(), network(torch, weights)
  after: list[dict[str, np.ndarray]] = []
  shared = {
      'torch': torch, 'nn': torch.nn, 'optim': torch.optim, 'np': np,
      'copy': copy, 'logger': logger, 'get_dataloader': loader,
      # It makes a folder at the end of each round.
      'mkdirs': lambda path: after.append(authors.numbers_of(model.inner)),
      'compute_accuracy': authors.taken(
          checkout / 'utils.py', ['compute_accuracy'], torch=torch,
          nn=torch.nn, np=np, confusion_matrix=lambda *lists: None
      ).compute_accuracy}
  taken = authors.taken(checkout / 'main.py',
                        ['train_net_fedcon', 'local_train_net'], **shared)
  whole = loader('', '', BATCH, BATCH)[0]
  space = dict(
      **shared, local_train_net=taken.local_train_net, device='cpu',
      args=types.SimpleNamespace(
          alg='moon', load_pool_file=None, load_first_net=1, pool_option='FIFO',
          model_buffer_size=1, server_momentum=0, save_model=0, modeldir='',
          n_parties=len(ROWS), dataset='', datadir='', batch_size=BATCH,
          epochs=EPOCHS, lr=RATE, optimizer='sgd', reg=DECAY, mu=MU,
          temperature=TEMPERATURE),
      nets={i: copy.deepcopy(model) for i in range(len(ROWS))},
      global_model=model, n_comm_rounds=len(COHORTS),
      party_list_rounds=COHORTS, net_dataidx_map=dict(enumerate(places)),
      train_dl=None, test_dl=whole, train_dl_global=whole)
  exec(authors.lines(checkout / 'main.py', 'old_nets_pool = []',
                     'for round in range(n_comm_rounds):'), space)
  last = [authors.numbers_of(space['nets'][i].inner, 'last_')
          for i in range(len(ROWS))]
  authors.save(
      out, COMMIT, rate=RATE, momentum=MOMENTUM, decay=DECAY, mu=MU,
      temperature=TEMPERATURE, batch=BATCH, epochs=EPOCHS, rows=ROWS,
      cohorts=COHORTS, inputs=inputs[:, None], labels=labels, **weights,
      losses=np.reshape(logger.rows, (len(COHORTS), 2, EPOCHS, 2)),
      **{f'after_{k}': np.stack([x[k] for x in after]) for k in weights},
      **{k: np.stack([x[k] for x in last]) for k in last[0]})


if __name__ == '__main__':
  main()
