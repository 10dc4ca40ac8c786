"""Asks PDCFed's authors' code what it computes.

maxiaum/PDCFed at 7c5ff1c63383da3a1e65740d05360226cc564d2c: two rounds of a
client with labels and of one without, by local_update.py, on a small network
without normalization; and the mean that main.py makes of them. In the
repository's root, with PyTorch 2.13:

python -m tests.oracles.make_pdcfed --checkout=DIR \
    --out=tests/oracles/pdcfed.npz
"""
from __future__ import annotations

import copy
import logging
import types
from typing import Any

import numpy as np

from tests.oracles import authors

COMMIT = '7c5ff1c63383da3a1e65740d05360226cc564d2c'
WIDTH, HIDDEN, CLASSES, BATCH = 6, 5, 6, 8
KNOWN, UNKNOWN, ROUNDS = 20, 48, 2
RATE, SLOW, MOMENTUM, DECAY, NORM = 0.1, 0.07, 0.9, 5e-4, 0.5
# Theirs would hardly move in so few steps, nor F be felt from a variance of 1.
AVERAGE, MEAN, VARIANCE = 0.8, 0.4, 0.02
KNOBS = {'lambda_u': 0.9, 'lambda_e': 0.3, 'tau_upper': 0.85, 'tau_lower': 0.4,
         'sigma': 0.5, 'temper': 0.9}
REST = {'L_divisor': 4.0, 'R_divisor': 9.0, 'lambda_max': 0.999,
        'lambda_scale': 1.0, 'w_mul_times': 6, 'local_ep': 1, 'su_epoch': 2,
        'base_lr': RATE, 'unsup_lr': SLOW, 'max_grad_norm': NORM,
        'model': 'net', 'out_dim': 0, 'dataset': '', 'gpu': '0'}


def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
  """Draws rows, [D, 2, d]: of each a weak and a strong view."""
  labels = rng.integers(0, CLASSES, KNOWN + UNKNOWN)
  centers = rng.normal(size=(CLASSES, WIDTH)) * 1.5
  clean = centers[labels] + rng.normal(size=(len(labels), WIDTH)) * .6
  return {'inputs': clean[:, None] + rng.normal(
      size=(len(labels), 2, WIDTH)) * [[0.1], [0.5]], 'labels': labels}


def main() -> None:
  checkout, out = authors.arguments(__doc__, 'maxiaum/PDCFed', COMMIT)
  import torch
  torch.set_default_dtype(torch.float64)
  authors.without_cuda(torch)
  rng = np.random.default_rng(13)
  weights = authors.draw_weights(rng, WIDTH, HIDDEN, CLASSES, 1.5)
  rows = draw(rng)
  args = types.SimpleNamespace(**KNOBS, **REST)

  def network(*unused: Any, **knobs: Any) -> Any:
    net = authors.perceptron(torch, weights)
    inner = net.forward
    net.forward = lambda x, model: (None, None, inner(x))
    return net

  theirs = authors.taken(
      checkout / 'local_update.py',
      ['SupervisedLocalUpdate', 'UnsupervisedLocalUpdate'], args=args,
      torch=torch, nn=torch.nn, F=torch.nn.functional, np=np, copy=copy,
      logging=logging, ModelFedCon=network)
  average = authors.taken(checkout / 'FedAvg.py', ['FedAvg'], copy=copy)
  closing = authors.lines(
      checkout / 'main.py',
      'each_lenth_this_round = [each_lenth[i] for i in clt_this_round]',
      'net_glob.load_state_dict(w_glob)')
  known, other = theirs.SupervisedLocalUpdate(
      args, None, CLASSES), theirs.UnsupervisedLocalUpdate(args, None, CLASSES)
  other.ema_beta = AVERAGE
  found: dict[str, Any] = {
      'start': [other.prob_max_mu_t, other.prob_max_var_t],
      'seen': [MEAN, VARIANCE], 'mean': [], 'variance': []}
  other.prob_max_mu_t, other.prob_max_var_t = MEAN, VARIANCE
  views, labels = torch.tensor(rows['inputs']), torch.tensor(rows['labels'])
  labeled = [(0, x[:, 0], y[:, None]) for x, y in zip(
      views[:KNOWN].split(BATCH), labels[:KNOWN].split(BATCH))]
  unlabeled = [(0, [x[:, 0], x[:, 1]], y[:, None]) for x, y in zip(
      views[KNOWN:].split(BATCH), labels[KNOWN:].split(BATCH))]
  states = [torch.optim.SGD(net.parameters(), rate, MOMENTUM, weight_decay=DECAY
                            ).state_dict() for net, rate in (
                                (known.model, RATE), (other.model, SLOW))]
  space = {'args': args, 'torch': torch, 'each_lenth': [KNOWN, UNKNOWN],
           'clt_this_round': [0, 1], 'chosen_sup': [0],
           'FedAvg': average.FedAvg, 'net_glob': network()}
  for round_ in range(ROUNDS):
    start = space['net_glob'].state_dict()
    first, _, states[0] = known.train(args, start, states[0], labeled, CLASSES,
                                      round_)
    second, _, states[1] = other.train(args, start, states[1], 1, unlabeled,
                                       CLASSES, round_, UNKNOWN)
    exec(closing, space | {'w_locals_this_round': [first, second]})
    found['mean'].append(float(other.prob_max_mu_t))
    found['variance'].append(float(other.prob_max_var_t))
    found |= authors.weights_of(space['net_glob'], f'after{round_}_')
  authors.save(
      out, COMMIT, rate=RATE, slow=SLOW, momentum=MOMENTUM, decay=DECAY,
      max_norm=NORM, batch=BATCH, known=KNOWN, unknown=UNKNOWN,
      average=AVERAGE, **KNOBS, epochs=REST['su_epoch'], **rows, **weights,
      **found)


if __name__ == '__main__':
  main()
