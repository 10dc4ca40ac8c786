"""Runs a method of USB on a small network and fixed batches.

For the scripts of its methods; needs PyTorch. A method's class is made as it
is, with its hooks, and its `train_step` and USB's update run, on the processor
and in float64; loading of data, networks, the scheduler, evaluation and storing
are left out. The problem is that of `torchssl`.
"""
from __future__ import annotations

import pathlib
import sys
import types
from typing import Any

import numpy as np

from tests.oracles import authors, torchssl

REPOSITORY = 'microsoft/Semi-supervised-learning'
COMMIT = '1ef4cbebcc0b368158315aeb425053858cf6c845'


def start(checkout: pathlib.Path) -> Any:
  """Returns PyTorch, ready for the checkout's modules."""
  torch = torchssl.start(checkout)
  # What the package imports first are data sets and networks.
  package = types.ModuleType('semilearn')
  package.__path__ = [str(checkout / 'semilearn')]
  sys.modules['semilearn'] = package
  authors.pretend('ruamel', 'ruamel.yaml', 'semilearn.datasets',
                  'semilearn.nets', 'semilearn.nets.utils', 'wandb', 'aim')
  return torch


def method(checkout: pathlib.Path, name: str, class_name: str) -> type:
  """The class of a method."""
  authors.load(checkout, 'semilearn.core')
  found: type = getattr(authors.load(
      checkout, f'semilearn.algorithms.{name}.{name}'), class_name)
  return found


def train(torch: Any, algorithm: type, given: dict[str, np.ndarray],
          weight: float, **knobs: Any
          ) -> tuple[Any, dict[str, np.ndarray], dict[str, np.ndarray]]:
  """Trains with a class of USB.

  Args:
    torch: the module.
    algorithm: the class.
    given: `torchssl.problem`.
    weight: lambda_u.
    **knobs: the method's own arguments.

  Returns:
    The algorithm, the weights afterwards, and what each step reports, [steps].
  """
  net = authors.perceptron(torch, given)

  class Network(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Gives logits as USB's networks do."""

    def __init__(self) -> None:
      super().__init__()
      self.net = net

    def forward(self, inputs: Any) -> dict[str, Any]:
      return {'logits': self.net(inputs), 'feat': inputs}

  def optimizer(self: Any) -> tuple[Any, None]:
    return torch.optim.SGD(self.model.parameters(), torchssl.RATE,
                           torchssl.MOMENTUM, nesterov=True), None

  def nothing(self: Any) -> None:
    del self

  driven = type('Driven', (algorithm,), {
      'set_dataset': nothing, 'set_data_loader': nothing,
      'set_model': lambda self: Network(), 'set_ema_model': nothing,
      'set_optimizer': optimizer})
  made = driven(types.SimpleNamespace(**{
      'num_classes': torchssl.CLASSES, 'ema_m': 0.0, 'epoch': 1,
      'num_train_iter': torchssl.STEPS, 'num_eval_iter': 1, 'num_log_iter': 1,
      'ulb_loss_ratio': weight, 'use_cat': True, 'amp': False, 'clip_grad': 0,
      'save_name': '', 'save_dir': '', 'resume': False, 'algorithm': '',
      'gpu': None, 'rank': 0, 'distributed': False, 'world_size': 1,
      'use_wandb': False, 'use_aim': False, 'T': 0.5, 'hard_label': True,
      **knobs}), None)
  n = int(given['num_labeled'])
  x, y = (torch.tensor(given[k]) for k in ('inputs', 'labels'))
  reported = []
  batches = zip(
      torchssl.slices(n, torchssl.LABELED_BATCH, torchssl.STEPS),
      torchssl.slices(len(x) - n, torchssl.UNLABELED_BATCH, torchssl.STEPS),
      strict=True)
  for known, rows in batches:
    made.out_dict, made.log_dict = made.train_step(
        x[known, 0], y[known], x[n + rows, 0], x[n + rows, 1])
    made.hooks_dict['ParamUpdateHook'].after_train_step(made)
    reported.append({name.removeprefix('train/'): float(value)
                     for name, value in made.log_dict.items()})
  return made, authors.weights_of(net, 'after_'), {
      name: np.array([row[name] for row in reported]) for name in reported[0]}
