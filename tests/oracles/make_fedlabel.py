"""Asks FedLabel's authors' code what it computes.

microsoft/msrflute at 8bfe0854ab293c6226df66856b3d96b39dbe61fe: two rounds of
three clients, the first of them the warm-up, by `Trainer.run_train_epoch_sup`
of core/trainer.py, the choice of labels in utils/utils.py, and both sides of
core/strategies/fedlabels.py. The classes are taken from their files. Batches
are slices in order, the network is small, and the rate, of which one is a
number in the code, is larger.

The loop never clears the gradients of the model that learns unlabeled rows, so
each step adds those of all steps before. It is run as it is. In the
repository's root, with PyTorch 2.13:

python -m tests.oracles.make_fedlabel --checkout=DIR \
    --out=tests/oracles/fedlabel.npz
"""
from __future__ import annotations

import copy
import itertools
import logging
import pathlib
import types
from typing import Any

import numpy as np

from tests.oracles import authors, torchssl

COMMIT = '8bfe0854ab293c6226df66856b3d96b39dbe61fe'
CLIENTS, LABELED, UNLABELED, BATCH = 3, 8, 16, 4
THRESHOLD, CONSISTENCY, RATE = 0.5, 0.8, 0.2
LABELED_STEPS, UNLABELED_STEPS, ROUNDS, WARMUP = 5, 6, 2, 1


class Rows(list):
  """Rows of a client, of which batches are slices in order."""

  def __init__(self, rows: list[Any]) -> None:
    super().__init__(rows)
    self.turns = itertools.cycle(
        range(i, i + BATCH) for i in range(0, len(rows), BATCH))


def take_theirs(torch: Any, checkout: pathlib.Path) -> Any:
  """Their classes and functions."""
  plain = torch.optim.SGD
  torch.optim.SGD = lambda params, lr, momentum: plain(params, RATE, momentum)

  def loader(rows: Any, batch_size: int, shuffle: bool) -> list[Any]:
    del batch_size
    if shuffle:  # The labeled rows, of which they use the first batch.
      rows = [rows[i] for i in next(rows.turns)]
    return [tuple(torch.stack(column) for column in zip(*rows))]

  given: dict[str, Any] = {
      'torch': torch, 'np': np, 'copy': copy, 'logging': logging,
      'DataLoader': loader, 'to_device': lambda x: x,
      'print_rank': lambda *args, **kwargs: None,
      'random': types.SimpleNamespace(
          # Asked for the rows of one unlabeled batch; `turns` is of these.
          sample=lambda places, size: list(next(given['turns']))),
      'turns': None,
      'run': types.SimpleNamespace(log=None), 'BaseStrategy': object}
  given['get_label_VAT'] = authors.taken(
      checkout / 'utils' / 'utils.py', ['get_label_VAT'],
      **given).get_label_VAT
  given['BaseStrategy'] = authors.taken(
      checkout / 'core' / 'strategies' / 'base.py', ['BaseStrategy'],
      abstractmethod=lambda x: x).BaseStrategy
  found = authors.taken(checkout / 'core' / 'trainer.py',
                        ['TrainerBase', 'Trainer'], **given)
  strategy = authors.taken(
      checkout / 'core' / 'strategies' / 'fedlabels.py',
      ['FedLabels', 'aggregate_gradients_inplace'], **given)
  return types.SimpleNamespace(
      given=given, labels=given['get_label_VAT'], Trainer=found.Trainer,
      FedLabels=strategy.FedLabels)


def labels(torch: Any, theirs: Any) -> dict[str, np.ndarray]:
  """What they choose for predictions of a received and a local model."""
  rng = np.random.default_rng(2)
  logits = rng.normal(size=(2, 12, torchssl.CLASSES)) * rng.uniform(
      0.2, 3, (2, 12, 1))
  logits[1, 2] = logits[0, 2]  # As sure as the other.
  got, places, ratio, _ = theirs.labels(
      *torch.tensor(logits).softmax(-1), THRESHOLD, 'var')
  return {'logits': logits, 'chosen': got.numpy(), 'places': np.array(places),
          'ratio': ratio.numpy()}


def draw() -> dict[str, np.ndarray]:
  """The rows of all clients, a clean and a strong view each, and weights."""
  rng = np.random.default_rng(6)
  size = CLIENTS * (LABELED + UNLABELED)
  labels_ = rng.integers(0, torchssl.CLASSES, size)
  centers = rng.normal(size=(torchssl.CLASSES, torchssl.WIDTH))
  inputs = centers[labels_][:, None] + rng.normal(
      size=(size, 2, torchssl.WIDTH)) * [[0.6], [0.9]]
  inputs[-UNLABELED:] *= 1e-3  # Rows of which no model is sure.
  return {'inputs': inputs, 'labels': labels_, **authors.draw_weights(
      rng, torchssl.WIDTH, torchssl.HIDDEN, torchssl.CLASSES, 0.5)}


def client(torch: Any, theirs: Any, rows: tuple[Any, Any], model: Any,
           round_: int) -> Any:
  """Their trainer after a client's round."""
  inputs, classes = (torch.tensor(x) for x in rows)
  other = range(LABELED, LABELED + UNLABELED)
  data = [Rows([(inputs[i, 0], classes[i]) for i in range(LABELED)]),
          Rows([(inputs[i, 0], classes[i]) for i in other]),
          Rows([(inputs[i, 1], classes[i]) for i in other])]
  trainer = theirs.Trainer.__new__(theirs.Trainer)
  trainer.model, trainer.step = copy.deepcopy(model), 0
  trainer.reset_gradient_power = trainer.estimate_sufficient_stats = (
      lambda: None)
  theirs.given['turns'] = data[1].turns
  (trainer.num_samples, trainer.train_loss,
   trainer.algo_computation) = trainer.run_train_epoch_sup(algo_payload={
       'iter': round_, 'data': data, 'config': {
           'train_ep': LABELED_STEPS, 'unsuptrain_ep': UNLABELED_STEPS,
           'eta': RATE, 'burnout_round': WARMUP, 'unl_bs': BATCH, 'bs': BATCH,
           'temp': 1, 'thre': THRESHOLD, 'comp': 'var', 'uda': 1,
           'vat_consis': CONSISTENCY, 'l2_lambda': 10, 'unsup_lamb': 1,
           'ensize': 1}})
  return trainer


def rounds(torch: Any, theirs: Any, given: dict) -> dict[str, Any]:
  """The server's weights after each round, and the rows that were labeled."""
  net = authors.perceptron(torch, given)
  parts = [np.split(given[key], CLIENTS) for key in ('inputs', 'labels')]
  config: dict[str, Any] = {
      f'{name}_config': {} for name in ('model', 'client', 'server')}
  sender = theirs.FedLabels('client', config)
  history, used = [], []
  for round_ in range(ROUNDS):
    server = theirs.FedLabels('server', config)
    updater = types.SimpleNamespace(
        model=copy.deepcopy(net), update_model=lambda: None,
        run_lr_scheduler=lambda force_run_val: None)
    for rows in zip(*parts, strict=True):
      trainer = client(torch, theirs, rows, net, round_)
      used.append(trainer.num_samples)
      server.process_individual_payload(
          updater, sender.generate_client_payload(trainer))
    server.combine_payloads(updater, round_, CLIENTS, CLIENTS, {},
                            logger=lambda *args: None)
    net = updater.model
    history.append(authors.weights_of(net))
  return {**{f'after_{key}': np.array([model[key] for model in history])
             for key in history[0]},
          'used': np.reshape(used, (ROUNDS, CLIENTS))}


def main() -> None:
  checkout, out = authors.arguments(__doc__, 'microsoft/msrflute', COMMIT)
  import torch
  torch.set_default_dtype(torch.float64)
  theirs, given = take_theirs(torch, checkout), draw()
  authors.save(
      out, COMMIT, threshold=THRESHOLD, consistency=CONSISTENCY, rate=RATE,
      batch=BATCH, labeled_steps=LABELED_STEPS,
      unlabeled_steps=UNLABELED_STEPS, warmup=WARMUP,
      clients=[(LABELED, UNLABELED)] * CLIENTS, **labels(torch, theirs),
      **given, **rounds(torch, theirs, given))


if __name__ == '__main__':
  main()
