"""Asks FedTriNet's authors' code what it computes.

Michelingweo/FedTriNet at e70525b8dd9ee75e4f8b585504c32cfc33ef32ea: two rounds
of each phase by the loops of main_fed.py, with the classes of models/Update.py,
on a small network, in the two ways that it can run. As for its MNIST, where the
shared layers are frozen while they are tuned, with its option of selection off;
and as for its Fashion-MNIST, where nothing is frozen, with that option on. And
one client's tuning and training once it has had many labels accepted.

Every client takes part once in each phase: the code then takes true labels of
accepted rows, which ours never sees. Thresholds come from a given confidence.
In the repository's root, with PyTorch 2.13:

python -m tests.oracles.make_fedtrinet --checkout=DIR \\
    --out=tests/oracles/fedtrinet.npz
"""
from __future__ import annotations

import collections
import copy
import pathlib
import types
from typing import Any

import numpy as np

from tests.oracles import authors

COMMIT = 'e70525b8dd9ee75e4f8b585504c32cfc33ef32ea'
WIDTH, HIDDEN, CLASSES = 5, 4, 3
LABELED, UNLABELED = (4, 3, 5, 4, 6, 3), (7, 9, 5, 8, 6, 9)
COHORTS = (((0, 1, 2), (3, 4, 5)), ((0, 1, 3), (2, 4, 5)))
RATE, EPOCHS, CONFIDENCE = 0.3, 2, (0.83, 0.5)
LATER = 15  # The round of the second phase of the client alone.
LAYERS = ('conv1', 'conv2', 'fc1', 'fc2')


def network(torch: Any, weights: dict[str, np.ndarray]) -> Any:
  """Four dense layers by the names of their network, a tanh between them."""
  class Net(torch.nn.Module):

    def __init__(self, args: Any = None) -> None:
      super().__init__()
      del args
      for i, name in enumerate(LAYERS):
        layer = torch.nn.Linear(*weights[f'w{i}'].shape)
        with torch.no_grad():
          layer.weight.copy_(torch.tensor(weights[f'w{i}'].T))
          layer.bias.copy_(torch.tensor(weights[f'b{i}']))
        setattr(self, name, layer)

    def forward(self, x: Any) -> Any:
      for name in LAYERS[:-1]:
        x = torch.tanh(getattr(self, name)(x))
      return self.fc2(x)

  return Net


def numbers(state: Any) -> dict[str, np.ndarray]:
  """The weights of a state of `network`."""
  return {f'{letter}{i}': state[f'{name}.{word}'].detach().numpy().T.copy()
          for i, name in enumerate(LAYERS)
          for letter, word in (('w', 'weight'), ('b', 'bias'))}


class Choices:
  """Takes the place of `numpy.random`: the stored cohorts in turn."""

  def __init__(self) -> None:
    self._left = iter([ids for phase in COHORTS for ids in phase])

  def choice(self, *given: Any, **options: Any) -> np.ndarray:
    del given, options
    return np.array(next(self._left))


def options(**changes: Any) -> Any:
  return types.SimpleNamespace(**{
      'device': 'cpu', 'lr': RATE, 'local_ep': EPOCHS, 'local_bs': 100,
      'verbose': False, 'num_users': len(LABELED), 'frac': 0.5,
      'finetune': True, 'tp': True, 'p1epochs': 2, 'p2epochs': 2,
      'iid': 'iid', **changes})


def rounds(torch: Any, theirs: Any, program: pathlib.Path, which: int,
           weights: dict[str, np.ndarray], rows: dict[str, np.ndarray]
           ) -> dict[str, Any]:
  """The server's model after each round, the losses and the labels."""
  args = options(dataset=('mnist', 'fmnist')[which], pseudo_select=bool(which))
  made = network(torch, weights)
  owned = np.arange(sum(LABELED + UNLABELED))
  known, other = (np.split(part, np.cumsum(sizes)[:-1]) for part, sizes in (
      (owned[:sum(LABELED)], LABELED), (owned[sum(LABELED):], UNLABELED)))
  table = np.stack([np.where(owned < sum(LABELED), 1, -1), owned, np.where(
      owned < sum(LABELED), rows['labels'], -1)], 1)
  history: list[dict[str, np.ndarray]] = []
  losses: list[float] = []

  def test(net: Any, *given: Any) -> tuple[float, float]:
    del given
    history.append(numbers(net.state_dict()))
    return 0.0, 0.0

  class Sheet:

    def write(self, row: int, column: int, value: Any) -> None:
      del row
      if column == 2:
        losses.append(value)

  pixels = torch.tensor(rows['inputs'])
  clients = range(len(LABELED))
  space = {
      'args': args, 'torch': torch, 'F': torch.nn.functional, 'copy': copy,
      'np': types.SimpleNamespace(random=Choices()), 'test_img': test,
      'OrderedDict': collections.OrderedDict, 'print': lambda *given: None,
      'DataLoader': torch.utils.data.DataLoader, 'FedAvg': theirs.FedAvg,
      'LocalUpdate': theirs.Update.LocalUpdate, 'sheet1': Sheet(),
      'DatasetSplit': theirs.Update.DatasetSplit, 'CNNMnist': made,
      'mask_vector': table, 'label_refer': rows['labels'], 'initial_round': 0,
      'dataset_train': list(zip(pixels, rows['labels'].tolist(), strict=True)),
      'dataset_test': None, 'm': len(COHORTS[0][0]), 'net_glob': made(),
      'localNet_dic': {}, 'localNet_last2_dic': {}, 'loss_train': [],
      'dict_users': {i: {*known[i].tolist(), *other[i].tolist()}
                     for i in clients},
      'dict_users_label': {i: {*known[i].tolist()} for i in clients},
      'dict_pseudo': {i: set() for i in clients},
      'localifpseudo_dic': dict.fromkeys(clients, 0),
      'max_prob': torch.tensor([CONFIDENCE[which]])}
  space['dict_train'] = space['dict_users_label']
  for first in ('for iter in range(args.p1epochs):',
                'for iter in range(int(args.p2epochs)):'):
    exec(authors.lines(program, first, first), space)
  said = np.where(table[:, 0] == 0, table[:, 2], -1)
  return {'losses': np.array(losses), 'accepted': said[sum(LABELED):],
          **{f'after_{k}': np.stack([x[k] for x in history])
             for k in history[0]}}


def one_client(torch: Any, theirs: Any, weights: dict[str, np.ndarray],
               rows: dict[str, np.ndarray]) -> dict[str, Any]:
  """The first client's model after its labels are weighed apart."""
  net = network(torch, weights)()
  known = [*range(LABELED[0])]
  given = [*range(sum(LABELED), sum(LABELED) + UNLABELED[0] - 2)]
  table = np.zeros((len(rows['labels']), 3), int)
  table[:, 2] = rows['labels']
  table[given, 2] = rows['guesses'][:len(given)]
  pixels = torch.tensor(rows['inputs'])
  data = [*zip(pixels, rows['labels'].tolist(), strict=True)]
  args = options(dataset='fmnist', pseudo_select=True)
  update = theirs.Update.LocalUpdate
  state, _ = update(args=args, maskv=table, dataset=data,
                    idxs=known).fine_tune(net)
  net.load_state_dict(state)
  state, loss = update(args=args, maskv=table, dataset=data, idxs=known,
                       idxs2=given).semitrain_Ratio(net, LATER)
  return {'later_loss': loss,
          **{f'later_{k}': v for k, v in numbers(state).items()}}


def main() -> None:
  checkout, out = authors.arguments(__doc__, 'Michelingweo/FedTriNet', COMMIT)
  import torch
  torch.set_default_dtype(torch.float64)
  authors.without_cuda(torch)
  theirs = types.SimpleNamespace(
      Update=authors.load(checkout, 'models.Update'),
      FedAvg=authors.load(checkout, 'models.Fed').FedAvg)
  rng = np.random.default_rng(9)
  labels = rng.integers(0, CLASSES, sum(LABELED + UNLABELED))
  centers = rng.normal(size=(CLASSES, WIDTH)) * 2
  rows = {'labels': labels, 'inputs': centers[labels] + rng.normal(
      size=(labels.size, WIDTH)) * 0.7,
          'guesses': rng.integers(0, CLASSES, UNLABELED[0])}
  sizes = (WIDTH, HIDDEN, HIDDEN, HIDDEN, CLASSES)
  weights = {}
  for i in range(len(LAYERS)):
    weights[f'w{i}'] = rng.normal(size=sizes[i:i + 2]) * 0.9
    weights[f'b{i}'] = rng.normal(size=sizes[i + 1]) * 0.1
  found = [rounds(torch, theirs, checkout / 'main_fed.py', which, weights,
                  rows) for which in (0, 1)]
  authors.save(
      out, COMMIT, labeled=LABELED, unlabeled=UNLABELED, cohorts=COHORTS,
      rate=RATE, epochs=EPOCHS, confidence=CONFIDENCE, later=LATER, **rows,
      **weights, **one_client(torch, theirs, weights, rows),
      **{k: np.stack([x[k] for x in found]) for k in found[0]})


if __name__ == '__main__':
  main()
