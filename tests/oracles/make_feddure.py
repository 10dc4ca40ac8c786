"""Asks FedDure's authors' code what it computes.

White1973/FedDure at 50ecb777ec5435e7b4be50514b8be29388bcb13c: two rounds of
two clients by FedDureClientSSL of base_ssl.py and the mean of strategies.py, on
a small network with batch norm. Each round is done with the steps of SCHEDULES:
those of the settings for CIFAR-10, and others that come to every branch of the
learning rate. Of both, also what the first client's teacher and student are
after the first round. The class has no fine regulator; but WNet of model.py,
which the program never trains, is one: its weights of some rows, and their
gradients. In the repository's root, with PyTorch 2.13:

python -m tests.oracles.make_feddure --checkout=DIR \
    --out=tests/oracles/feddure.npz
"""
from __future__ import annotations

import copy
import pathlib
import types
from typing import Any

import numpy as np

from tests.oracles import authors

COMMIT = '50ecb777ec5435e7b4be50514b8be29388bcb13c'
WIDTH, HIDDEN, CLASSES = 5, 4, 3
CLIENTS = ((7, 18), (15, 18))  # Labeled and unlabeled rows of each.
ROUNDS, BATCH, RATE, THRESHOLD, RAMP = 2, 4, 0.05, 0.6, 20
# Fine-tuning and main steps, warm-up, and for how long the student waits.
SCHEDULES = ((5, 5, 10, 2), (2, 6, 3, 1))


def import_theirs(checkout: pathlib.Path) -> tuple[Any, Any, Any]:
  """Returns PyTorch, their client's class and how they average."""
  import torch
  torch.set_default_dtype(torch.float64)
  authors.pretend(  # What sends, stores, tracks and draws.
      'torchvision',
      'easyfl.client.service', 'easyfl.communication', 'easyfl.pb',
      'easyfl.pb.common_pb2', 'easyfl.pb.server_service_pb2',
      'easyfl.tracking', 'easyfl.tracking.client', 'easyfl.tracking.evaluation',
      'easyfl.tracking.metric', 'easyfl.datasets', 'easyfl.datasets.utils',
      'easyfl.datasets.utils.util')
  client = authors.load(checkout, 'groups.client_ssl.base_ssl').FedDureClientSSL
  mean = authors.taken(
      checkout / 'easyfl' / 'server' / 'strategies.py',
      ('federated_averaging', 'weighted_sum'), copy=copy, torch=torch)
  # Called where clients report.
  client.track = client.upload = lambda self, *given: None
  return torch, client, mean.federated_averaging


def network(torch: Any, weights: dict[str, np.ndarray]) -> Any:
  """`authors.normalized` of logits alone."""
  class Net(torch.nn.Module):

    def __init__(self) -> None:
      super().__init__()
      self.body = authors.normalized(torch, weights)

    def forward(self, x: Any) -> Any:
      return self.body(x)[1]

  return Net()


class _Rows:
  """One client's rows of a kind, in their order, as their data sets give them.

  Unlabeled rows have the weak and the strong view.
  """

  def __init__(self, inputs: Any, labels: Any, labeled: bool) -> None:
    self._inputs, self._labels, self._labeled = inputs, labels, labeled

  def size(self, client: int) -> int:
    del client
    return len(self._labels)

  def get_num_per_class(self, client: int) -> dict[int, int]:
    del client
    return {}

  def loader(self, batch: int, client: int, **knobs: Any) -> list[Any]:
    del client, knobs
    return [(x[:, 0] if self._labeled else (x[:, 0], x[:, 1]), y)
            for x, y in zip(self._inputs.split(batch),
                            self._labels.split(batch), strict=True)]


def rounds(torch: Any, kind: Any, average: Any, schedule: tuple[int, ...],
           weights: dict[str, np.ndarray], rows: dict[str, np.ndarray]
           ) -> dict[str, Any]:
  """The server's model after each round, one client's two, and the rewards."""
  fine_tune, main_steps, warmup, wait = schedule
  conf = types.SimpleNamespace(
      batch_size=BATCH, track=False, is_distributed=False, seed=0,
      fine_tune_steps=fine_tune, total_steps=main_steps, uda_steps=RAMP,
      teacher_thre=THRESHOLD, optimizer=types.SimpleNamespace(
          type='Adam', lr=RATE, momentum=0.9, weight_decay=5e-4),
      scheduler=types.SimpleNamespace(
          warmup_steps=warmup, student_wait_steps=wait))
  sizes = [n for client in CLIENTS for n in client]
  parts = zip(torch.tensor(rows['inputs']).split(sizes),
              torch.tensor(rows['labels']).split(sizes), strict=True)
  clients = []
  for number in range(len(CLIENTS)):
    known, other = (_Rows(*next(parts), labeled) for labeled in (True, False))
    clients.append(kind(number, conf, known, other, None, 'cpu'))
  model = network(torch, weights)
  found: dict[str, Any] = {}
  history, dots = [], []
  for round_ in range(ROUNDS):
    for client in clients:
      client.run_emsemble_train(model, conf, False)
      dots.append(client.dot_product)
    model = average([client.teacher_model for client in clients],
                    [sum(client) for client in CLIENTS])
    history.append(authors.numbers_of(model.body))
    if not round_:
      found = {**authors.numbers_of(clients[0].teacher_model.body, 'teacher_'),
               **authors.numbers_of(clients[0].model.body, 'student_')}
      # A student's statistics are not used.
      del found['student_mean'], found['student_variance']
  return {**found, 'rewards': np.reshape(dots, (ROUNDS, len(CLIENTS), -1)),
          'unlabeled_batches': [client.u_bs for client in clients],
          **{f'after_{k}': np.stack([x[k] for x in history]) for k in weights}}


def regulator(torch: Any, kind: Any) -> dict[str, np.ndarray]:
  """What WNet makes of probabilities, and the sum's gradients."""
  rng = np.random.default_rng(25)
  logits = torch.tensor(rng.normal(size=(6, CLASSES)) * 2, requires_grad=True)
  net = kind(CLASSES, HIDDEN, 1)
  with torch.no_grad():
    for value in net.parameters():
      value.copy_(torch.tensor(rng.normal(size=value.shape)))
  made = net(torch.softmax(logits, 1))[:, 0]
  made.sum().backward()
  return {'logits': logits.detach().numpy(), 'row_weights':
          made.detach().numpy(), 'logits_slope': logits.grad.numpy(),
          **{f'fine{i}': value.detach().numpy().copy()
             for i, value in enumerate(net.parameters())},
          **{f'fine{i}_slope': value.grad.numpy()
             for i, value in enumerate(net.parameters())}}


def main() -> None:
  checkout, out = authors.arguments(__doc__, 'White1973/FedDure', COMMIT)
  torch, kind, average = import_theirs(checkout)
  rng = np.random.default_rng(24)
  labels = rng.integers(0, CLASSES, np.sum(CLIENTS))
  centers = rng.normal(size=(CLASSES, WIDTH)) * 1.5
  clean = centers[labels] + rng.normal(size=(labels.size, WIDTH)) * 0.6
  noise = rng.normal(size=(labels.size, 2, WIDTH)) * [[0.2], [0.7]]
  rows = {'inputs': clean[:, None] + noise, 'labels': labels}
  weights = authors.draw_normalized(rng, WIDTH, HIDDEN, CLASSES)
  found = [rounds(torch, kind, average, schedule, weights, rows)
           for schedule in SCHEDULES]
  rewards = {f'rewards{i}': x.pop('rewards') for i, x in enumerate(found)}
  authors.save(
      out, COMMIT, clients=CLIENTS, batch=BATCH, rate=RATE,
      threshold=THRESHOLD, schedules=SCHEDULES, **rows, **weights, **rewards,
      **regulator(torch, authors.load(checkout, 'groups.models.model').WNet),
      **{k: np.stack([x[k] for x in found]) for k in found[0]})


if __name__ == '__main__':
  main()
