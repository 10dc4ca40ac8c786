"""Asks FedCon's authors' code what it computes.

zewei-long/fedcon-pytorch at 54732ec05c19845734567c186b63e3ddedb10798: the
server's and the clients' steps of fedcon-main.py, the networks of
models/byol.py, the optimizer and schedule of optimizers/, with a small backbone
and last layer; three trainings of the server with two rounds of two clients
between them. What stays on a client is its own, which there is stored under a
wrong name. In the repository's root, with PyTorch 2.13:

python -m tests.oracles.make_fedcon --checkout=DIR \
    --out=tests/oracles/fedcon.npz
"""
from __future__ import annotations

import copy
import pathlib
from typing import Any

import numpy as np

from tests.oracles import authors

COMMIT = '54732ec05c19845734567c186b63e3ddedb10798'
WIDTH, HIDDEN, CLASSES, PROJECTOR = 6, 5, 4, 7
CLIENTS, ROWS, BATCH, ROUNDS = 2, 12, 4, 2
RATE, MOMENTUM = 0.3, 0.5  # Of the server.
BASE = 40.0  # Of the clients, for 256 rows and times theirs of a batch.
DECAY, EPOCHS = 1.5e-6, 2


def import_theirs(checkout: pathlib.Path) -> Any:
  """Returns PyTorch, their modules, and lines of their program."""
  import torch
  torch.set_default_dtype(torch.float64)
  torch.manual_seed(0)
  authors.without_cuda(torch)
  authors.pretend('torchvision', 'torchvision.models',
                  'torchvision.models.resnet')
  byol, optimizers = (authors.load(checkout, name)
                      for name in ('models.byol', 'optimizers'))
  byol.HPS['mlp_hidden_size'] = PROJECTOR
  program = checkout / 'fedcon-main.py'
  names = ['get_current_consistency_weight', 'sigmoid_rampup',
           'softmax_kl_loss', 'FedAvg']
  taken = authors.taken(program, names, np=np, F=torch.nn.functional,
                        copy=copy, torch=torch)
  of_server = authors.lines(program, 'labels = labels.cuda()',
                            'optimizer.step()')
  of_client = authors.lines(program, 'model_local.zero_grad()',
                            'model_local.update_moving_average()')
  return torch, byol, optimizers, taken, of_server, of_client


def network(torch: Any, weights: dict[str, np.ndarray]) -> Any:
  """Their backbone, and the last layer."""
  net = authors.perceptron(torch, {**weights, 'b1': np.zeros(CLASSES)})
  backbone, last = net[:2], torch.nn.Linear(HIDDEN, CLASSES, bias=False)
  with torch.no_grad():
    last.weight.copy_(net[2].weight)
  backbone.output_dim = HIDDEN
  return backbone, last


def batches(torch: Any, rows: dict[str, np.ndarray], first: int) -> Any:
  """Of a client, or of the server: both views, and labels."""
  part = slice(first * ROWS, (first + 1) * ROWS)
  inputs, labels = (torch.tensor(rows[k][part]) for k in ('inputs', 'labels'))
  return list(zip(inputs.split(BATCH), labels.split(BATCH), strict=True))


def main() -> None:
  checkout, out = authors.arguments(
      __doc__, 'zewei-long/fedcon-pytorch', COMMIT)
  torch, byol, optimizers, taken, of_server, of_client = import_theirs(checkout)
  rng = np.random.default_rng(61)
  labels = rng.integers(0, CLASSES, ROWS * (CLIENTS + 1))
  centers = rng.normal(size=(CLASSES, WIDTH)) * 1.5
  clean = centers[labels] + rng.normal(size=(labels.size, WIDTH)) * 0.6
  rows = {'inputs': clean[:, None] + 0.4 * rng.normal(
      size=(labels.size, 2, WIDTH)), 'labels': labels}
  weights = authors.draw_weights(rng, WIDTH, HIDDEN, CLASSES)
  del weights['b1']
  found: list[dict[str, Any]] = []
  first: dict[str, list[Any]] = {}

  backbone, last = network(torch, weights)
  byol.fc_Cifar = lambda size: last
  model = byol.global_net(backbone)
  clients = [byol.BYOL(copy.deepcopy(backbone)) for _ in range(CLIENTS)]
  for client in clients:
    one, norm, _ = client.projector.layer1
    two = client.projector.layer2
    for name, value in {'w0': one.weight, 'b0': one.bias, 'scale': norm.weight,
                        'bias': norm.bias, 'w1': two.weight,
                        'b1': two.bias}.items():
      first.setdefault(f'projector_{name}', []).append(
          value.detach().numpy().T.copy())
  space: dict[str, Any] = {
      **vars(taken), 'torch': torch, 'device': 'cpu',
      'loss1_func': torch.nn.CrossEntropyLoss(),
      'loss2_func': taken.softmax_kl_loss, 'loss_local': []}

  for turn in range(ROUNDS + 1):
    space.update(model_glob=model, iter=turn, optimizer=torch.optim.SGD(
        model.parameters(), lr=RATE, momentum=MOMENTUM))
    for _ in range(EPOCHS):
      for i, (x, y) in enumerate(batches(torch, rows, 0)):
        space.update(images1=x[:, 0], images2=x[:, 1], labels=y, batch_idx=i)
        exec(of_server, space)
    found.append({'w0': backbone[0].weight, 'b0': backbone[0].bias,
                  'w1': last.weight})
    found[-1] = {k: v.detach().numpy().T.copy() for k, v in found[-1].items()}
    if turn == ROUNDS:
      break
    sent = []
    for i, client in enumerate(clients):
      client.backbone.load_state_dict(backbone.state_dict())
      if not turn:
        client.target_encoder.load_state_dict(
            client.online_encoder.state_dict())
      rate = BASE * BATCH / 256
      optimizer = optimizers.get_optimizer(
          'lars_simclr', client, lr=rate, momentum=.9, weight_decay=DECAY)
      mine = batches(torch, rows, i + 1)
      space.update(
          model_local=client, optimizer=optimizer,
          lr_scheduler=optimizers.LR_Scheduler(
              optimizer, 10, 0, 200, rate, 0, len(mine),
              constant_predictor_lr=True))
      for _ in range(EPOCHS):
        for x, _ in mine:
          space.update(images1=x[:, 0], images2=x[:, 1])
          exec(of_client, space)
      sent.append(copy.deepcopy(client.backbone.state_dict()))
    backbone.load_state_dict(taken.FedAvg(sent))
  targets = [c.target_encoder[0][0].weight.detach().numpy().T for c in clients]
  authors.save(
      out, COMMIT, rate=RATE, momentum=MOMENTUM, decay=0.0, batch=BATCH,
      epochs=EPOCHS, rows=ROWS, clients=CLIENTS, hidden=PROJECTOR,
      contrast_rate=BASE * BATCH / 256, targets=np.stack(targets), **rows,
      **weights,
      **{k: np.stack(v) for k, v in first.items()},
      **{f'after_{k}': np.stack([x[k] for x in found]) for k in found[0]})


if __name__ == '__main__':
  main()
