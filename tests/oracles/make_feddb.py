"""Asks FedDB's authors' code what it computes.

GuogangZhu/FedDB at 9f9248e343585c0a2fa9938446a6830f73e6a135: of
src/modules/modules.py a client's labels, five steps of its training and what it
says of its classes afterwards, and the server's weights of clients. Data
loading, networks and logging are replaced. In the repository's root, with
PyTorch 2.13:

python -m tests.oracles.make_feddb --checkout=DIR \
    --out=tests/oracles/feddb.npz
"""
from __future__ import annotations

import collections
import copy
import itertools
import pathlib
import types
from typing import Any

import numpy as np

from tests.oracles import authors, torchssl

REPOSITORY = 'GuogangZhu/FedDB'
COMMIT = '9f9248e343585c0a2fa9938446a6830f73e6a135'
RATE, MOMENTUM, DECAY, EPOCHS, THRESHOLD = 0.1, 0.9, 5e-4, 5, 0.5


class Rows:
  """A data set as the authors' code takes it: views [V, d] and classes."""

  def __init__(self, views: np.ndarray, labels: np.ndarray) -> None:
    self.data, self.target = list(views), list(labels)
    self.other: dict[str, Any] = {}

  def __len__(self) -> int:
    return len(self.data)


def modules(torch: Any, checkout: pathlib.Path, given: dict[str, np.ndarray]
            ) -> Any:
  """Their clients and server, on `authors.perceptron`."""
  source = checkout / 'src'
  loss = authors.taken(source / 'models/utils.py', ['loss_fn'], torch=torch,
                       F=torch.nn.functional)
  theirs = authors.taken(
      source / 'models/wresnet.py', ['WideResNet'], nn=torch.nn, torch=torch,
      loss_fn=loss.loss_fn)

  class Network(theirs.WideResNet):  # type: ignore[misc, name-defined]
    """Their losses on the small network."""

    def __init__(self) -> None:
      torch.nn.Module.__init__(self)
      self.net = authors.perceptron(torch, given)

    def f(self, inputs: Any) -> tuple[None, Any]:
      return None, self.net(inputs)

  class Shares(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A weight for each client, so that a mean tells how each counts."""

    def __init__(self) -> None:
      super().__init__()
      self.weight = torch.nn.Parameter(torch.zeros(4))

  def loader(rows: dict[str, Rows], *args: Any, **knobs: Any) -> Any:
    """All rows in one batch."""
    del args, knobs
    views = torch.tensor(np.array(rows['train'].data))
    return {'train': [{'data': views[:, 0], 'aug': views[:, -1],
                       'target': torch.tensor(rows['train'].target)}]}

  def optimizer(parameters: Any, tag: str = 'local') -> Any:
    if tag == 'global':
      return torch.optim.SGD(parameters, 1.0)
    return torch.optim.SGD(parameters, RATE, MOMENTUM, weight_decay=DECAY,
                           nesterov=True)

  cfg = {'device': 'cpu', 'model_name': 'Network', 'threshold': THRESHOLD,
         'alpha': 0.75, 'verbose': False, 'client': {'num_epochs': EPOCHS}}
  same = lambda x, *unused: x  # noqa: E731
  found = authors.taken(
      source / 'modules/modules.py',
      ['Server', 'Client', 'save_model_state_dict',
       'save_optimizer_state_dict'],
      torch=torch, np=np, F=torch.nn.functional, copy=copy, cfg=cfg,
      models=types.SimpleNamespace(Network=Network, Shares=Shares),
      compress=itertools.compress, make_data_loader=loader, collate=same,
      to_device=same, make_optimizer=optimizer)
  found.cfg = cfg
  return found


def weights(torch: Any, found: Any, shares: np.ndarray) -> np.ndarray:
  """How their server weighs clients of these mean predictions, [S, C]."""
  found.cfg['model_name'] = 'Shares'
  clients = [types.SimpleNamespace(
      active=True, client_id=i, p_s=torch.tensor(row),
      model_state_dict={'weight': torch.eye(len(shares))[i]})
             for i, row in enumerate(shares)]
  server = found.Server(found.models.Shares())
  server.update(clients)
  out: np.ndarray = server.model_state_dict['weight'].numpy()
  return out


def main() -> None:
  checkout, out = authors.arguments(__doc__, REPOSITORY, COMMIT)
  torch = torchssl.start(checkout)
  problem = torchssl.problem(15)
  found = modules(torch, checkout, problem)
  known = int(problem['num_labeled'])
  labeled, unlabeled = (Rows(problem['inputs'][part], problem['labels'][part])
                        for part in (slice(known), slice(known, None)))
  client = found.Client(0, found.models.Network(), None, None)
  metric = types.SimpleNamespace(
      evaluate=lambda *unused: collections.defaultdict(float), metric_name={})
  logger: dict[str, list[float]] = collections.defaultdict(list)
  client.model_state_dict = found.models.Network().state_dict()
  kept = client.make_dataset(unlabeled, metric, logger)
  first = client.p_s.numpy().copy()
  client.train(labeled, kept, RATE, metric, logger)
  net = found.models.Network()
  net.load_state_dict(client.model_state_dict)
  rng = np.random.default_rng(2)
  shares = rng.dirichlet(np.ones(torchssl.CLASSES), 4)
  authors.save(
      out, COMMIT, rate=RATE, momentum=MOMENTUM, decay=DECAY, epochs=EPOCHS,
      threshold=THRESHOLD, num_kept=len(kept[0]), kept=kept[0].target,
      first=first, last=client.p_s.numpy(), shares=shares,
      weights=weights(torch, found, shares), **problem,
      **authors.weights_of(net.net, 'after_'))


if __name__ == '__main__':
  main()
