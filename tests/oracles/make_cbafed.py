"""Asks CBAFed's authors' code what it computes.

minglllli/CBAFed at 4f2eef4f3764eba4ac94a1709fbc1b8caa967ac5: three rounds of a
client with labels, by local_supervised.py, and two without, by local_PL.py, on
a small network with batch norm; and what the main program does with them, of
which the lines are taken out of its loop: classes, bars, mean, and residual
connection. In the repository's root, with PyTorch 2.13:

python -m tests.oracles.make_cbafed --checkout=DIR \
    --out=tests/oracles/cbafed.npz
"""
from __future__ import annotations

import copy
import logging
import pathlib
import types
from typing import Any

import numpy as np

from tests.oracles import authors

COMMIT = '4f2eef4f3764eba4ac94a1709fbc1b8caa967ac5'
WIDTH, HIDDEN, CLASSES = 6, 5, 4
KNOWN, UNKNOWN = (7, 2, 1, 0), (24, 20)  # Of each class; of each client.
BATCH, EPOCHS = 4, 11
RATE, SLOW, MOMENTUM, DECAY, NORM = 0.06, 0.04, 0.9, 5e-4, 0.5
ROUNDS = (4, 5, 10)  # All but the first have a residual connection.


def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
  """Draws the rows of all clients, those with labels first."""
  labels = np.concatenate([np.repeat(np.arange(CLASSES), KNOWN),
                           rng.integers(0, CLASSES, sum(UNKNOWN))])
  centers = rng.normal(size=(CLASSES, WIDTH)) * 1.5
  inputs = centers[labels] + rng.normal(size=(len(labels), WIDTH)) * .6
  return {'inputs': inputs[:, None], 'labels': labels}


def network(torch: Any, weights: dict[str, np.ndarray]) -> Any:
  """`authors.normalized` of logits alone."""
  net = authors.normalized(torch, weights)
  both = net.forward
  net.forward = lambda x: both(x)[1]
  return net


def clients(torch: Any, checkout: pathlib.Path, weights: dict[str, np.ndarray]
            ) -> tuple[list[Any], Any]:
  """Their three clients, and how they average."""
  average = authors.taken(checkout / 'FedAvg.py', ['FedAvg'], copy=copy,
                          torch=torch).FedAvg
  given = {'torch': torch, 'np': np, 'copy': copy, 'FedAvg': average,
           'F': torch.nn.functional, 'logging': logging}
  made = []
  for file, name in (('local_supervised', 'SupervisedLocalUpdate'),
                     *[('local_PL', 'PLUpdate')] * len(UNKNOWN)):
    kind = getattr(authors.taken(checkout / f'{file}.py', [name], **given),
                   name)
    one = kind.__new__(kind)  # Without their ResNet.
    one.model = network(torch, weights)
    one.base_lr, one.pl_lr, one.max_grad_norm = RATE, SLOW, NORM
    one.epoch = one.iter_num = 0
    one.optimizer = torch.optim.SGD(
        one.model.parameters(), RATE, MOMENTUM, weight_decay=DECAY)
    made.append(one)
  return made, average


def main() -> None:
  checkout, out = authors.arguments(__doc__, 'minglllli/CBAFed', COMMIT)
  import torch
  torch.set_default_dtype(torch.float64)
  authors.without_cuda(torch)
  rng = np.random.default_rng(39)
  weights = authors.draw_normalized(rng, WIDTH, HIDDEN, CLASSES, 2.5)
  rows = draw(rng)
  record = {k: weights[k] + .3 * np.abs(rng.normal(size=weights[k].shape))
            for k in weights}
  (known, *others), average = clients(torch, checkout, weights)
  args = types.SimpleNamespace(opt='sgd', base_lr=RATE, dataset='fmnist',
                               batch_size=1000)
  views, labels = torch.tensor(rows['inputs'][:, 0]), torch.tensor(
      rows['labels'])[:, None].double()
  starts = np.cumsum([sum(KNOWN), *UNKNOWN])
  parts = list(zip(torch.tensor_split(views, starts[:-1].tolist()),
                   torch.tensor_split(labels, starts[:-1].tolist())))
  space = {
      'args': args, 'torch': torch, 'copy': copy, 'FedAvg': average,
      'n_classes': CLASSES, 'T_base': 0.84, 'T_lower': 0.03, 'T_higher': 0.1,
      'T_upper': 0.95, 'sup_label': torch.tensor(KNOWN).double(),
      'record_w': authors.normalized(torch, record).state_dict(),
      'net_glob': authors.normalized(torch, weights)}
  program = checkout / 'train_main.py'
  exec(authors.lines(program, 'temp_sup_label = copy.deepcopy(sup_label)',
                     'print(class_confident)'), space)
  closing = authors.lines(program, 'local_label = local_label + sup_label',
                          'net_glob.load_state_dict(w)')
  found: dict[str, Any] = {'bars': [space['class_confident'].numpy()],
                           'levels': [], 'kept': []}
  states = [copy.deepcopy(c.optimizer.state_dict()) for c in (known, *others)]
  for round_ in ROUNDS:
    start = space['net_glob'].state_dict()
    loader = list(zip(range(9), *(x.split(BATCH) for x in parts[0])))
    w, _, states[0] = known.train(args, start, states[0], loader, CLASSES)
    sent, counts, seen = [w], [sum(KNOWN)], torch.zeros(CLASSES)
    for i, (client, (x, y)) in enumerate(zip(others, parts[1:]), 1):
      w, states[i], count, histogram = client.train(
          args, start, states[i], [(0, [x], y)], CLASSES,
          class_confident=space['class_confident'],
          second_c=space['second_class'])
      sent.append(w)
      counts.append(count)
      seen = seen + histogram
    space |= {'local_w': sent, 'local_num': counts, 'local_label': seen,
              'com_round': round_}
    exec(closing, space)
    found['bars'].append(space['class_confident'].numpy())
    found['levels'].append(space['local_label'].numpy())
    found['kept'].append([int(n) for n in counts[1:]])
    for name, value in authors.numbers_of(
        space['net_glob'], f'after{round_}_').items():
      found[name] = value
  authors.save(
      out, COMMIT, rate=RATE, slow=SLOW, momentum=MOMENTUM, decay=DECAY,
      max_norm=NORM, batch=BATCH, epochs=EPOCHS, known=KNOWN, unknown=UNKNOWN,
      rounds=ROUNDS, **rows, **weights, **found,
      **{f'record_{k}': v for k, v in record.items()})


if __name__ == '__main__':
  main()
