"""Asks SemiFL's authors' code what it computes.

diaoenmao/SemiFL-Semi-Supervised-Federated-Learning-for-Unlabeled-Clients-with-Alternate-Training
at 4ec3663b87f87b0e749ca439afd0f335a4da472d: three rounds of three clients by
train_client and train_server of train_classifier_ssfl.py, the classes Server
and Client of modules.py, the statistics of data.py and the losses of
wresnet.py, on a small network. Rows come in order; MIX has the rows PLACES, and
lambda is LAMBDA. The batch that statistics are taken of is as large as a
client, so that it never has rows of two. In the repository's root, with PyTorch
2.13:

python -m tests.oracles.make_semifl --checkout=DIR \
    --out=tests/oracles/semifl.npz
"""
from __future__ import annotations

import datetime
import importlib
import pathlib
import sys
import time
import types
from typing import Any

import numpy as np

from tests.oracles import authors

REPOSITORY = ('diaoenmao/SemiFL-Semi-Supervised-Federated-Learning-for-'
              'Unlabeled-Clients-with-Alternate-Training')
COMMIT = '4ec3663b87f87b0e749ca439afd0f335a4da472d'
WIDTH, HIDDEN, CLASSES = 6, 5, 4
CLIENTS, ROWS = 3, 8  # So many of each, and of the server.
ROUNDS, EPOCHS, BATCH = 3, 2, 4
THRESHOLD, LAMBDA, PLACES = 0.7, 0.3, (3, 0, 7, 3) * 2
RATE, MOMENTUM, DECAY, SERVER_MOMENTUM = 0.1, 0.9, 5e-4, 0.5


def settings() -> dict[str, Any]:
  """What their config.yml and process_control would give."""
  def loop(batch: int) -> dict[str, Any]:
    return {'shuffle': {'train': False}, 'batch_size': {'train': batch},
            'num_epochs': EPOCHS}
  return {
      'device': 'cpu', 'model_name': 'small', 'data_name': 'CIFAR10',
      'num_workers': 0, 'seed': 0, 'model_tag': '', 'log_interval': 0.25,
      'verbose': False, 'loss_mode': f'fix@{THRESHOLD}-mix',
      'threshold': THRESHOLD, 'alpha': 0.75, 'num_clients': CLIENTS,
      'active_rate': 1.0, 'client': loop(BATCH), 'server': loop(BATCH),
      'global': {**loop(ROWS), 'num_epochs': ROUNDS, 'lr': 1,
                 'optimizer_name': 'SGD', 'momentum': SERVER_MOMENTUM,
                 'weight_decay': 0, 'nesterov': False,
                 'scheduler_name': 'CosineAnnealingLR'},
      'local': {'optimizer_name': 'SGD', 'lr': RATE, 'momentum': MOMENTUM,
                'weight_decay': DECAY, 'nesterov': True}}


def import_theirs(checkout: pathlib.Path, weights: dict[str, np.ndarray]
                  ) -> tuple[Any, Any]:
  """Returns PyTorch and their modules, with a network of ours among theirs."""
  torch: Any = importlib.import_module('torch')
  torch.set_default_dtype(torch.float64)
  torch.manual_seed(0)
  authors.pretend('torchvision', 'torchvision.transforms', 'torchvision.utils',
                  'datasets', 'yaml')
  vision = sys.modules['torchvision']
  vision.transforms = sys.modules['torchvision.transforms']  # type: ignore[attr-defined]
  config = types.ModuleType('config')
  config.cfg = settings()  # type: ignore[attr-defined]
  sys.modules['config'] = config
  source = checkout / 'src'
  theirs = types.SimpleNamespace(**{
      name: authors.load(source, name)
      for name in ('models', 'modules', 'data', 'utils')})

  class Small(torch.nn.Module):
    forward = theirs.models.wresnet.WideResNet.forward

    def __init__(self) -> None:
      super().__init__()
      self.net = authors.normalized(torch, weights)

    def f(self, x: Any) -> Any:
      return self.net(x)[1]

  def small(momentum: Any = None, track: bool = False) -> Any:
    return Small().apply(lambda layer: theirs.models.make_batchnorm(
        layer, momentum=momentum, track_running_stats=track))

  theirs.models.small = small
  theirs.loop = authors.taken(
      source / 'train_classifier_ssfl.py',
      ('make_server', 'make_client', 'train_client', 'train_server'),
      cfg=config.cfg, np=np, torch=torch, time=time,  # type: ignore[attr-defined]
      datetime=datetime, print=lambda *args: None,
      separate_dataset=theirs.data.separate_dataset,
      Server=theirs.modules.Server, Client=theirs.modules.Client)
  torch.randint = lambda low, high, size: torch.tensor(
      [PLACES[sys._getframe(1).f_locals['index']]])
  return torch, theirs


class _Rows:
  """A data set of theirs: rows hold all views, and a transform chooses."""

  def __init__(self, torch: Any, inputs: np.ndarray, labels: np.ndarray,
               transform: Any) -> None:
    self.transform = transform
    self.data, self.target = list(torch.tensor(inputs)), labels.tolist()
    self.other = {'id': list(range(len(labels)))}

  def __len__(self) -> int:
    return len(self.data)

  def __getitem__(self, index: int) -> dict[str, Any]:
    import torch  # Their copies of a data set cannot hold a module.
    row = {'data': self.data[index],
           'target': torch.tensor(self.target[index])}
    if callable(self.transform):
      return self.transform(row)
    return {**row, 'data': row['data'][0]}  # Theirs without any view.


def _views(row: dict[str, Any]) -> dict[str, Any]:
  return {**row, 'data': row['data'][1], 'aug': row['data'][2]}


class _Log:
  """Their metric and logger; keeps who was sure of what."""

  metric_name = {'train': None}

  def __init__(self) -> None:
    self.masks: list[np.ndarray] = []

  def evaluate(self, names: Any, given: Any, output: dict[str, Any]) -> None:
    if 'mask' in output:
      self.masks.append(output['mask'].numpy())

  def safe(self, *args: Any) -> None:
    pass

  append = write = lambda self, *args, **knobs: None


def train(torch: Any, theirs: Any, rows: dict[str, np.ndarray]
          ) -> dict[str, np.ndarray]:
  """All rounds: weights and statistics after each, and who was in FIX."""
  own, others = (_Rows(torch, rows['inputs'][part], rows['labels'][part],
                       _views) for part in (slice(ROWS), slice(ROWS, None)))
  everything = theirs.data.make_batchnorm_dataset_su(own, others)
  model = theirs.models.small()
  optimizer = theirs.utils.make_optimizer(model.parameters(), 'local')
  scheduler = theirs.utils.make_scheduler(optimizer, 'global')
  held = np.split(np.arange(len(others)), CLIENTS)
  server = theirs.loop.make_server(model)
  clients = theirs.loop.make_client(model, {'train': held, 'test': held})
  for client in clients:
    client.beta.sample = lambda: torch.tensor([LAMBDA])
  history, masks = [], []
  for epoch in range(1, ROUNDS + 1):
    log = _Log()
    # All take part, in their order.
    torch.randperm = torch.arange
    theirs.loop.train_client(everything, others, server, clients, optimizer,
                             log, log, epoch)
    masks.append(np.stack(log.masks))
    server.update(clients)
    theirs.loop.train_server(own, server, optimizer, log, log, epoch)
    scheduler.step()
    model.load_state_dict(server.model_state_dict)
    history.append(authors.numbers_of(theirs.data.make_batchnorm_stats(
        everything, model, 'global').net, 'after_'))
  return {'masks': np.stack(masks),
          **{k: np.stack([x[k] for x in history]) for k in history[0]}}


def main() -> None:
  checkout, out = authors.arguments(__doc__, REPOSITORY, COMMIT)
  rng = np.random.default_rng(93)
  labels = rng.integers(0, CLASSES, ROWS * (CLIENTS + 1))
  centers = rng.normal(size=(CLASSES, WIDTH)) * 1.5
  clean = centers[labels] + rng.normal(size=(labels.size, WIDTH)) * 0.6
  noise = rng.normal(size=(labels.size, 3, WIDTH)) * [[0], [0.2], [0.7]]
  rows = {'inputs': clean[:, None] + noise, 'labels': labels}
  weights = authors.draw_normalized(rng, WIDTH, HIDDEN, CLASSES)
  torch, theirs = import_theirs(checkout, weights)
  authors.save(
      out, COMMIT, threshold=THRESHOLD, ratio=LAMBDA, places=PLACES,
      clients=CLIENTS, rows=ROWS, batch=BATCH, epochs=EPOCHS, rate=RATE,
      momentum=MOMENTUM, decay=DECAY, server_momentum=SERVER_MOMENTUM,
      **rows, **weights, **train(torch, theirs, rows))


if __name__ == '__main__':
  main()
