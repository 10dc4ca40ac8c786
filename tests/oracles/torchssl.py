"""Runs a method of TorchSSL on a small network and fixed batches.

For the scripts of its methods; needs PyTorch. The whole loop of a method's
class runs, on the processor and in float64; only loading of data, evaluation
and storing are replaced.
"""
from __future__ import annotations

import importlib
import pathlib
import types
from typing import Any

import numpy as np

from tests.oracles import authors

REPOSITORY = 'TorchSSL/TorchSSL'
COMMIT = 'f26e1d42967cec7f7c8a00c2e7ff9219d8ab7c92'

# The sizes of the problem: features, hidden units, classes.
WIDTH, HIDDEN, CLASSES = 6, 5, 4
STEPS, LABELED_BATCH, UNLABELED_BATCH = 9, 4, 8
RATE, MOMENTUM = 0.1, 0.9


def start(checkout: pathlib.Path) -> Any:
  """Returns PyTorch, ready for the checkout's modules."""
  import torch
  torch.set_default_dtype(torch.float64)
  authors.without_cuda(torch)
  authors.pretend('torchvision', 'torchvision.models', 'pandas', 'sklearn',
                  'sklearn.metrics', 'custom_writer',
                  'torch.utils.tensorboard')
  # A class of PyTorch's that they import and do not use is gone by now.
  optimizer: Any = importlib.import_module('torch.optim.optimizer')
  optimizer.required = getattr(optimizer, 'required', object())
  return torch


def problem(seed: int, rows: int = 24, labeled: int = 8
            ) -> dict[str, np.ndarray]:
  """Draws weights and rows: `inputs` [D, 2, d] has a weak and a strong view.

  The labeled rows come first; of them the first view is used.
  """
  rng = np.random.default_rng(seed)
  labels = rng.integers(0, CLASSES, labeled + rows)
  centers = rng.normal(size=(CLASSES, WIDTH)) * 1.5
  clean = centers[labels] + rng.normal(size=(labeled + rows, WIDTH)) * 0.6
  views = clean[:, None] + rng.normal(size=(labeled + rows, 2, WIDTH)) * [
      [0.1], [0.7]]
  return {'inputs': views, 'labels': labels, 'num_labeled': np.array(labeled),
          **authors.draw_weights(rng, WIDTH, HIDDEN, CLASSES, 0.8)}


def slices(size: int, batch: int, steps: int) -> list[np.ndarray]:
  """Places of each step's batch: slices in order, again and again."""
  pieces = [np.arange(i, min(i + batch, size)) for i in range(0, size, batch)]
  return [pieces[i % len(pieces)] for i in range(steps)]


class _Log:
  """Takes what a step reports."""

  def __init__(self) -> None:
    self.rows: list[dict[str, float]] = []

  def update(self, terms: dict[str, Any], step: int) -> None:
    del step
    self.rows.append({name.removeprefix('train/'): float(value)
                      for name, value in terms.items()
                      if name.endswith(('_loss', 'mask_ratio'))})


def train(torch: Any, checkout: pathlib.Path, method: type, given: dict,
          weight: float, *, extra_views: bool = False, steps: int = STEPS,
          args: dict[str, Any] | None = None, **knobs: Any
          ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """Trains with a class of TorchSSL.

  Args:
    torch: the module.
    checkout: of TorchSSL.
    method: the class.
    given: `problem`.
    weight: lambda_u.
    extra_views: unlabeled rows come without their places.
    steps: how many.
    args: more of the loop's arguments.
    **knobs: of the class.

  Returns:
    The weights afterwards, and every term of the loss, [steps].
  """
  utils = authors.load(checkout, 'train_utils')
  n = int(given['num_labeled'])
  x, y = (torch.tensor(given[k]) for k in ('inputs', 'labels'))
  labeled = [(rows, x[rows, 0], y[rows])
             for rows in slices(n, LABELED_BATCH, steps)]
  unlabeled = [(torch.tensor(rows), x[n + rows, 0], x[n + rows, 1])
               for rows in slices(len(x) - n, UNLABELED_BATCH, steps)]
  log = _Log()
  trainer = method(
      net_builder=lambda num_classes: authors.perceptron(torch, given),
      num_classes=CLASSES, ema_m=0.999, lambda_u=weight, num_eval_iter=1,
      tb_log=log, logger=types.SimpleNamespace(info=lambda *a: None), **knobs)
  trainer.evaluate = lambda args: {'eval/top-1-acc': 0.0}
  trainer.save_model = lambda *a: None
  trainer.set_data_loader({'train_lb': labeled, 'train_ulb': unlabeled})
  if hasattr(trainer, 'set_dset'):
    trainer.set_dset(range(len(x) - n))
  optimizer = utils.get_optimizer(trainer.model, 'SGD', RATE, MOMENTUM)
  trainer.set_optimizer(optimizer, torch.optim.lr_scheduler.ConstantLR(
      optimizer, 1.0))
  trainer.train(types.SimpleNamespace(**{
      'resume': False, 'amp': False, 'gpu': None, 'clip': 0,
      'num_train_iter': 10**6, 'num_classes': CLASSES, 'hard_label': True,
      'dataset': 'IMAGENET', 'num_labels': n, 'save_dir': '', 'save_name': '',
      'multiprocessing_distributed': False, 'rank': 0, **(args or {})}))
  assert len(log.rows) == steps
  terms = {name: np.array([row[name] for row in log.rows])
           for name in log.rows[0]}
  return authors.weights_of(trainer.model, 'after_'), terms


def logits(seed: int, rows: int = 12) -> dict[str, np.ndarray]:
  """Draws predictions: of weak views, some sure of themselves, and strong."""
  rng = np.random.default_rng(seed)
  scale = rng.uniform(0.5, 4.0, (rows, 1))
  return {'weak_logits': rng.normal(size=(rows, CLASSES)) * scale,
          'strong_logits': rng.normal(size=(rows, CLASSES)) * 2}


def gradient(torch: Any, loss: Any, strong: np.ndarray
             ) -> tuple[Any, np.ndarray]:
  """What `loss` returns for strong logits, and its first item's gradient."""
  leaf = torch.tensor(strong, requires_grad=True)
  out = loss(leaf)
  first = out[0] if isinstance(out, tuple) else out
  first.backward()
  return out, leaf.grad.numpy()


def settings() -> dict[str, Any]:
  """How it is trained, for `ours.of_torchssl`."""
  return {'rate': RATE, 'momentum': MOMENTUM, 'labeled_batch': LABELED_BATCH,
          'unlabeled_batch': UNLABELED_BATCH, 'steps': STEPS}
