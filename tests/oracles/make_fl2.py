"""Asks the code of (FL)^2's authors what it computes.

seungjoo-ai/FLFL-NeurIPS24
at decdf7dd207feb31386b8671d5364d865a3ecd7d: the whole of runExperiment of
train_classifier_flfl.py, which is the server's warm-up and five rounds of five
clients, on a small network and rows of ours. Loading and division of data, the
log and the test are replaced; settings are those of their config.yml, but for
those of `settings`. Rows come in order. A batch that statistics are taken of is
as large as a client, or as the server's rows, so that it never has rows of two.
Of the first round there is more: the model that clients received, what each
learnt, its weight, and one step with its step uphill. In the repository's root,
with PyTorch 2.13 and PyYAML:

python -m tests.oracles.make_fl2 --checkout=DIR --out=tests/oracles/fl2.npz
"""
from __future__ import annotations

import collections
import importlib
import pathlib
import sys
import types
from typing import Any

import numpy as np

from tests.oracles import authors

REPOSITORY = 'seungjoo-ai/FLFL-NeurIPS24'
COMMIT = 'decdf7dd207feb31386b8671d5364d865a3ecd7d'
WIDTH, HIDDEN, CLASSES = 6, 5, 4
CLIENTS, ROWS = 5, 8  # So many of each, and of the server.
ROUNDS, EPOCHS, BATCH = 5, 2, 4  # Their program needs five or more rounds.
RATE = 0.1  # More than theirs, so that some rows become sure.


def settings(checkout: pathlib.Path) -> dict[str, Any]:
  """Reads their settings, and makes them small."""
  yaml: Any = importlib.import_module('yaml')
  read = (checkout / 'src/config/config.yml').read_text('utf-8')
  cfg: dict[str, Any] = yaml.safe_load(read)
  cfg['control_fl'] |= {'num_clients': CLIENTS, 'active_rate': 1.0}
  cfg['data'] |= {'num_classes': CLASSES}
  cfg['model'] |= {'type': 'small'}
  return cfg | {
      'num_rounds': ROUNDS, 'num_epochs': EPOCHS, 'batch_size': ROWS,
      'ulb_batch_size': BATCH, 'eval_batch_size': ROWS, 'num_workers': 0,
      'lr': RATE, 'device': 'cpu', 'model_tag': ''}


def import_theirs(checkout: pathlib.Path, weights: dict[str, np.ndarray]
                  ) -> tuple[Any, Any]:
  """Returns PyTorch and their modules, with a network of ours among theirs."""
  import torch
  torch.set_default_dtype(torch.float64)
  config = types.ModuleType('config')
  config.cfg = settings(checkout)  # type: ignore[attr-defined]
  authors.pretend('torchvision', 'torchvision.transforms', 'torchvision.utils',
                  'datasets', 'wandb')
  sys.modules['config'] = config
  source = checkout / 'src'
  sys.modules['datasets'].check_dataset_split = authors.taken(  # type: ignore[attr-defined]
      source / 'datasets/utils.py', ['check_dataset_split']).check_dataset_split
  theirs = types.SimpleNamespace(cfg=config.cfg, **{  # type: ignore[attr-defined]
      name: authors.load(source, name)
      for name in ('models', 'utils', 'data', 'algorithm', 'modules')})
  theirs.utils.process_control()

  class Small(torch.nn.Module):

    def __init__(self) -> None:
      super().__init__()
      self.net = authors.normalized(torch, weights)

    def forward(self, inputs: Any) -> dict[str, Any]:
      return {'logits': self.net(inputs)[1]}

  theirs.models.small = lambda track: Small().apply(
      lambda layer: theirs.models.process_bn_layer(layer, None, track))
  theirs.rows = authors.taken(
      source / 'datasets/cv_datasets/datasetbase.py', ['BasicDataset'], np=np,
      Dataset=torch.utils.data.Dataset,
      check_algorithm=theirs.utils.check_algorithm).BasicDataset
  return torch, theirs


class _Log:
  """Their metric and their logger; keeps the losses of steps."""

  def __init__(self) -> None:
    self.metric_name = dict.fromkeys(('train_clients', 'train_server', 'test'))
    self.steps: list[tuple[int, float]] = []

  def evaluate(self, names: Any, given: Any, output: dict[str, Any]) -> Any:
    self.steps.append((len(given['targets']), output['loss'].item()))
    return collections.defaultdict(float)

  append = write = print_info = reset = save = close = (
      lambda self, *args, **knobs: None)


def _gathered(arrays: Any) -> np.ndarray:
  """One vector of all numbers, in the order of `authors.numbers_of`."""
  return np.concatenate([np.ravel(x) for x in arrays])


def _of_parameters(model: Any, of: Any) -> np.ndarray:
  return _gathered(of(p).detach().numpy().T for p in model.parameters())


def _numbers(model: Any) -> np.ndarray:
  return _gathered(authors.numbers_of(model.net).values())


def watch_first_step(theirs: Any, found: dict[str, np.ndarray]) -> None:
  """Keeps of the first step what goes uphill, how far, and the gradient."""
  uphill = theirs.algorithm.sam.ASAM.first_step
  whole = theirs.algorithm.flfl.FLFL.forward_ulb

  def first_step(self: Any, zero_grad: bool = False) -> None:
    found.setdefault('slope', _of_parameters(self.model, lambda p: p.grad))
    uphill(self, zero_grad)
    found.setdefault('uphill', _of_parameters(
        self.model, lambda p: self.state[p]['eps']))

  def forward_ulb(self: Any, model: Any, *args: Any, **knobs: Any) -> Any:
    output = whole(self, model, *args, **knobs)
    found.setdefault('gradient', _of_parameters(model, lambda p: p.grad))
    return output

  theirs.algorithm.sam.ASAM.first_step = first_step
  theirs.algorithm.flfl.FLFL.forward_ulb = forward_ulb


def train(torch: Any, theirs: Any, source: pathlib.Path,
          rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """All rounds: weights, labels and thresholds; and more of the first."""
  def data_set(part: slice, is_ulb: bool = False, view: int = 1) -> Any:
    return theirs.rows(
        'flfl', list(torch.tensor(rows['inputs'][part]).double()),
        rows['labels'][part], CLASSES, lambda row: row[view], is_ulb,
        lambda row: row[2])

  data = {'train_lb': data_set(slice(ROWS)),
          'train_ulb': data_set(slice(ROWS, None), is_ulb=True),
          'eval': data_set(slice(ROWS), view=0)}
  found: dict[str, np.ndarray] = {}
  history: dict[str, list[Any]] = collections.defaultdict(list)
  log, gaps, clients = _Log(), [], []
  watch_first_step(theirs, found)

  def kldiv(*args: Any) -> Any:
    gap = theirs.algorithm.criterion.kldiv_with_mask(*args)
    gaps.append(gap.item())
    return gap

  def numbers(state: dict[str, Any], track: bool) -> np.ndarray:
    model = theirs.models.small(track)
    model.load_state_dict(state, strict=False)
    return _numbers(model)

  class Client(theirs.modules.Client):  # type: ignore[misc, name-defined]

    def __init__(self, *args: Any) -> None:
      super().__init__(*args)
      self.algorithm.kldiv_with_mask = kldiv
      clients.append(self)

    def train(self, *args: Any) -> None:
      found.setdefault('received', numbers(self.model_state_dict, True))
      log.steps.clear()
      gaps.clear()
      super().train(*args)
      if not history['after']:  # The first round.
        sizes, losses = np.array(log.steps).T
        history['train_loss'].append((losses + gaps).mean())
        history['sharpness_loss'].append(np.average(gaps, weights=sizes))
        history['trained'].append(numbers(self.model_state_dict, False))

  def test(loader: Any, model: Any, *args: Any) -> None:
    for name, kept in (('chosen', 'pseudo_targets'),
                       ('sure', 'fix_pseudo_targets')):
      history[name].append(getattr(data['train_ulb'], kept).reshape(
          CLIENTS, ROWS).astype(np.int8))
    for name, kept in (('overall', 'global_t'), ('shares', 'local_t')):
      history[name].append(np.stack(
          [getattr(client.algorithm, kept).numpy() for client in clients]))
    history['after'].append(_numbers(model))

  # Clients hold rows one after the other. All take part, and rows come in
  # their order.
  theirs.data.iid = lambda rows, count: dict(enumerate(
      np.arange(len(rows)).reshape(count, -1).tolist()))
  torch.randperm = lambda size, generator=None: torch.arange(size)
  program = authors.taken(
      source / 'train_classifier_flfl.py',
      ('runExperiment', 'make_server', 'make_clients', 'train_clients',
       'train_server'), cfg=theirs.cfg, print=lambda *args: None,
      set_seed=lambda: None, get_dataset=lambda **knobs: data, test=test,
      Metric=lambda names: log, make_logger=lambda: log, Client=Client,
      Server=theirs.modules.Server,
      save_model_state_dict=theirs.modules.client.save_model_state_dict,
      get_algorithm=theirs.algorithm.get_algorithm,
      **{name: getattr(theirs.utils, name) for name in (
          'get_model', 'make_optimizer', 'make_scheduler', 'check_algorithm',
          'select_clients')},
      **{name: getattr(theirs.data, name) for name in (
          'make_data_loader', 'split_dataset', 'make_sbn_stats')})
  program.runExperiment()
  return found | {name: np.stack(x) for name, x in history.items()}


def shares(torch: Any, theirs: Any, overall: np.ndarray) -> np.ndarray:
  """How their server weighs clients of the first round's confidences."""
  class Shares(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A weight for each client, so that a mean tells how each counts."""

    def __init__(self) -> None:
      super().__init__()
      self.weight = torch.nn.Parameter(torch.zeros(CLIENTS))

  theirs.models.small = lambda track: Shares()
  server = theirs.modules.Server(Shares())
  server.update(None, [types.SimpleNamespace(
      active=True, model_state_dict={'weight': row},
      algorithm=types.SimpleNamespace(global_t=torch.tensor(sure)))
                       for row, sure in zip(
                           torch.eye(CLIENTS), overall, strict=True)])
  out: np.ndarray = server.model_state_dict['weight'].numpy()
  return out


def main() -> None:
  checkout, out = authors.arguments(__doc__, REPOSITORY, COMMIT)
  rng = np.random.default_rng(104)
  own = np.arange(ROWS) % CLASSES
  others = [rng.choice(CLASSES, ROWS, p=rng.dirichlet(np.ones(CLASSES)))
            for _ in range(CLIENTS)]
  labels = np.concatenate([own, *others])
  centers = rng.normal(size=(CLASSES, WIDTH)) * 1.5
  clean = centers[labels] + rng.normal(size=(labels.size, WIDTH)) * 0.8
  noise = rng.normal(size=(labels.size, 3, WIDTH)) * [[0], [0.2], [0.7]]
  rows = {'inputs': (clean[:, None] + noise).astype(np.float32),
          'labels': labels}
  weights = authors.draw_normalized(rng, WIDTH, HIDDEN, CLASSES)
  torch, theirs = import_theirs(checkout, weights)
  cfg = theirs.cfg
  found = train(torch, theirs, checkout / 'src', rows)
  authors.save(
      out, COMMIT, clients=CLIENTS, rows=ROWS, batch=BATCH, epochs=EPOCHS,
      rate=cfg['lr'], momentum=cfg['momentum'], decay=cfg['weight_decay'],
      rho=cfg['control_sam']['rho'], **rows, **weights, **found,
      weights=shares(torch, theirs, found['overall'][0]))


if __name__ == '__main__':
  main()
