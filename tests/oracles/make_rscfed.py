"""Asks RSCFed's authors' code what it computes.

xmed-lab/RSCFed at ae35f03e2f5730522fcd306521b7cf437e15ddbe: three rounds of
two clients with labels and four without, by the rounds of train_main.py, the
classes of local_supervised.py and local_unsupervised.py and the mean and the
distance of FedAvg.py, with SGD and with Adam, on a small network with batch
norm. The groups are GROUPS. The code was made for one client with labels; it
takes two if it is told so. It reads an option that its parser lacks, `un_dist`;
this is given as empty. The options, but for the optimizers' own, are such that
each changes the result. In the repository's root, with PyTorch 2.13:

python -m tests.oracles.make_rscfed --checkout=DIR \
    --out=tests/oracles/rscfed.npz
"""
from __future__ import annotations

import copy
import pathlib
import sys
import types
from typing import Any

import numpy as np

from tests.oracles import authors

COMMIT = 'ae35f03e2f5730522fcd306521b7cf437e15ddbe'
WIDTH, HIDDEN, CLASSES, BATCH = 5, 4, 3, 4
LABELED, UNLABELED = (10, 7), (14, 6, 11, 10)  # Rows of each client.
GROUPS = (((4, 0, 2), (3, 5, 2), (1, 0, 5)),
          ((1, 3, 4), (0, 3, 1), (2, 4, 5)),
          ((5, 2, 1), (3, 0, 4), (1, 2, 3)))
RATES = {'sgd': (0.06, 0.04), 'adam': (0.02, 0.03)}
OPTIONS = {'lambda_u': 1.5, 'ema_decay': 0.7, 'max_grad_norm': 0.5,
           'w_mul_times': 3, 'sup_scale': 4.0, 'dist_scale': 20.0}


def import_theirs(checkout: pathlib.Path) -> tuple[Any, Any]:
  """Returns PyTorch and their modules."""
  import torch
  torch.set_default_dtype(torch.float64)
  authors.without_cuda(torch)
  authors.pretend(
      'pytorch_metric_learning', 'pytorch_metric_learning.losses',
      'torchvision', 'torchvision.transforms')
  sys.argv = sys.argv[:1]  # They read the command line.
  return torch, types.SimpleNamespace(**{
      name: authors.load(checkout, name)
      for name in ('local_supervised', 'local_unsupervised', 'FedAvg')})


def network(torch: Any, weights: dict[str, np.ndarray]) -> Any:
  """`authors.normalized` with the outputs of their network."""
  class Net(torch.nn.Module):

    def __init__(self) -> None:
      super().__init__()
      self.body = authors.normalized(torch, weights)

    def forward(self, x: Any, model: Any = None) -> tuple[Any, Any, Any]:
      del model
      features, logits = self.body(x)
      return features, features, logits

  return Net()


def batches(args: Any, rows: Any, labels: Any, *names: Any, is_labeled: bool,
            **sizes: Any) -> tuple[list[Any], Any]:
  """What their get_dataloader gives, in the order of the rows."""
  del names, sizes
  made = []
  for i in range(0, len(rows), args.batch_size):
    views = rows[i:i + args.batch_size].unbind(1)
    made.append((0, views[0] if is_labeled else list(views),
                 labels[i:i + args.batch_size, None]))
  return made, rows


def rounds(torch: Any, theirs: Any, program: pathlib.Path, optimizer: str,
           weights: dict[str, np.ndarray], rows: dict[str, np.ndarray]
           ) -> dict[str, Any]:
  """The server's model and the clients' losses over the rounds; teachers."""
  def made(*sizes: Any, **knobs: Any) -> Any:
    del sizes, knobs
    return network(torch, weights)

  theirs.local_supervised.ModelFedCon = made
  theirs.local_unsupervised.ModelFedCon = made
  fast, slow = RATES[optimizer]
  start = 1  # Every sixth round would write a file.
  args = types.SimpleNamespace(
      **OPTIONS, opt=optimizer, base_lr=fast, unsup_lr=slow, batch_size=BATCH,
      local_ep=1, rounds=start + len(GROUPS), meta_round=len(GROUPS[0]),
      meta_client_num=len(GROUPS[0][0]), num_warmup_epochs=0, un_dist='',
      confidence_threshold=0.9, resume=False, gpu='0', model='small',
      out_dim=0, dataset='SVHN', datadir='', pre_sz=0, input_sz=0)
  sizes = (*LABELED, *UNLABELED)
  owned = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
  groups = iter([group for drawn in GROUPS for group in drawn])
  history: list[dict[str, np.ndarray]] = []
  losses: list[float] = []

  def test(round_: int, state: Any, *given: Any) -> tuple[float, float]:
    del round_, given
    net = made()
    net.load_state_dict(state)
    history.append(authors.numbers_of(net.body))
    return 0.0, 0.0

  def scalar(name: str, value: float, global_step: int) -> None:
    del global_step
    if 'loss' in name:
      losses.append(value)

  ids = range(len(sizes))
  space = {
      'args': args, 'torch': torch, 'np': np, 'copy': copy, 'test': test,
      'trange': range, 'start_epoch': start, 'print': lambda *given: None,
      'FedAvg': theirs.FedAvg.FedAvg, 'model_dist': theirs.FedAvg.model_dist,
      'SupervisedLocalUpdate': theirs.local_supervised.SupervisedLocalUpdate,
      'UnsupervisedLocalUpdate':
          theirs.local_unsupervised.UnsupervisedLocalUpdate,
      'random': types.SimpleNamespace(
          sample=lambda clients, size: list(next(groups))),
      'logger': types.SimpleNamespace(info=lambda message: None),
      'writer': types.SimpleNamespace(add_scalar=scalar),
      'get_dataloader': batches, 'net_dataidx_map': dict(enumerate(owned)),
      'X_train': torch.tensor(rows['inputs']), 'X_test': None, 'y_test': None,
      'y_train': torch.tensor(rows['labels']).double(), 'n_classes': CLASSES,
      'net_glob': made().train(), 'sup_num': len(LABELED),
      'total_num': len(sizes), 'supervised_user_id': [*ids[:len(LABELED)]],
      'unsupervised_user_id': [*ids[len(LABELED):]]}
  exec(authors.lines(program, 'w_glob = net_glob.state_dict()',
                     'for com_round in trange(start_epoch, args.rounds):'),
       space)
  teachers = [authors.numbers_of(one.ema_model.body)
              for one in space['unlab_trainer_locals']]
  return {'losses': np.reshape(losses, (len(GROUPS), -1)),
          **{f'after_{k}': np.stack([x[k] for x in history]) for k in weights},
          **{f'teacher_{k}': np.stack([x[k] for x in teachers])
             for k in weights}}


def main() -> None:
  checkout, out = authors.arguments(__doc__, 'xmed-lab/RSCFed', COMMIT)
  torch, theirs = import_theirs(checkout)
  rng = np.random.default_rng(22)
  labels = rng.integers(0, CLASSES, sum(LABELED + UNLABELED))
  centers = rng.normal(size=(CLASSES, WIDTH)) * 1.5
  inputs = centers[labels][:, None] + rng.normal(
      size=(labels.size, 2, WIDTH)) * 0.7
  rows = {'inputs': inputs, 'labels': labels}
  weights = authors.draw_normalized(rng, WIDTH, HIDDEN, CLASSES)
  found = [rounds(torch, theirs, checkout / 'train_main.py', name, weights,
                  rows) for name in RATES]
  authors.save(
      out, COMMIT, batch=BATCH, labeled=LABELED, unlabeled=UNLABELED,
      groups=GROUPS, optimizers=[*RATES], rates=[*RATES.values()], **OPTIONS,
      **rows, **weights,
      **{k: np.stack([x[k] for x in found]) for k in found[0]})


if __name__ == '__main__':
  main()
