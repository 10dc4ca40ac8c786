"""Asks Twin-sight's authors' code what it computes.

visitworld123/Twin-sight at 2dd5db0a54dbf5e6f3b6c37c52d781e9222096f6: a round of
a client with labels and one without, once with pseudo-labels and once as it is,
and a client with labels of some of its rows beside FedProx; by the class
NormalTrainer of trainers/normal_trainer.py, and the mean of the two clients, on
small networks with batch norm. Weight decay is off, as their optimizer leaves
out what has no gradient. In the repository's root, with PyTorch 2.13:

python -m tests.oracles.make_twinsight --checkout=DIR \
    --out=tests/oracles/twinsight.npz
"""
from __future__ import annotations

import types
from typing import Any

import numpy as np

from tests.oracles import authors, make_sage

COMMIT = '2dd5db0a54dbf5e6f3b6c37c52d781e9222096f6'
WIDTH, HIDDEN, CLASSES = 6, 5, 5
PROJECTED = (7, 6)  # Numbers between the projector's layers, and of it.
KNOWN, UNKNOWN, BATCH = 8, 11, 4  # Rows; the last batch of eleven has three.
RATE, MOMENTUM, THRESHOLD = 0.05, 0.9, 0.4
# Means over a client's rows, in the order in which they are stored.
TOLD = [(who, what) for who in ('labeled', 'unlabeled')
        for what in ('ce', 'instanceDis', 'sim')]
PROXIMAL, PARTLY = 0.5, 5.0  # Theirs for clients with labels of some rows.


def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
  """Draws both networks and the projector."""
  def net(prefix: str) -> dict[str, np.ndarray]:
    made = authors.draw_normalized(rng, WIDTH, HIDDEN, CLASSES, 1.2)
    return {prefix + name: value for name, value in made.items()}
  top = authors.draw_normalized(rng, HIDDEN, *PROJECTED)
  return {**net('s_'), **net('u_'),
          **{'p_' + name: value for name, value in top.items()}}


def chosen(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, Any]:
  """Those whose names begin so, without that."""
  return {name.removeprefix(prefix): value for name, value in arrays.items()
          if name.startswith(prefix)}


def places(twin: Any) -> dict[str, Any]:
  """The tensors of a SemiFed by the names of `draw`."""
  top = twin.unsup_model.online_encoder.classifier.net
  out = {}
  for prefix, net in (('s_', twin.sup_classifier),
                      ('u_', twin.unsup_model.online_encoder)):
    out.update({f'{prefix}w0': net.first.weight, f'{prefix}b0': net.first.bias})
    out.update({prefix + name: value for name, value in norm(net.norm).items()})
  out.update({'s_w1': twin.sup_classifier.classifier.weight,
              's_b1': twin.sup_classifier.classifier.bias,
              'p_w0': top[0].weight, 'p_b0': top[0].bias,
              'p_w1': top[3].weight, 'p_b1': top[3].bias})
  out.update({'p_' + name: value for name, value in norm(top[1]).items()})
  return out


def norm(layer: Any) -> dict[str, Any]:
  """The tensors of a batch norm."""
  return {'scale': layer.weight, 'bias': layer.bias,
          'mean': layer.running_mean, 'variance': layer.running_var}


def packed(twin: Any) -> np.ndarray:
  """All numbers of a SemiFed, in the order of their names."""
  return np.concatenate([place.detach().numpy().T.ravel()
                         for _, place in sorted(places(twin).items())])


def network(torch: Any, theirs: Any, weights: dict[str, np.ndarray],
            args: Any) -> Any:
  """Their SemiFed around small networks."""
  encoder = authors.normalized(torch, chosen(weights, 'u_'))
  encoder.feature_dim = HIDDEN
  unsupervised = theirs.SimCLRModel(
      encoder, projection_size=PROJECTED[1],
      projection_hidden_size=PROJECTED[0])
  encoder.classifier = encoder.fc
  del encoder.fc
  twin = theirs.SemiFed(
      unsupervised, authors.normalized(torch, chosen(weights, 's_')), args)
  with torch.no_grad():
    for name, place in places(twin).items():
      place.copy_(torch.tensor(weights[name].T))
  return twin


def options(**changes: Any) -> types.SimpleNamespace:
  """Their configuration, with the smaller numbers of this script."""
  given = {
      'model': 'SemiFed_SimCLR', 'sim': 1.0, 'insDis': 0.5,
      'num_classes': CLASSES, 'batch_size': BATCH, 'SSL_method': 'fixmatch',
      'fixmatch_T': 0.5, 'fixmatch_threshold': THRESHOLD, 'dataset': 'cifar10',
      'PC_use_pesudo_label': False, 'PC_ulb_loss_ratio': 0.5,
      'PD_ulb_loss_ratio': PARTLY, 'fedprox': True, 'fedprox_mu': PROXIMAL,
      'record_tool': 'none'}
  return types.SimpleNamespace(**{**given, **changes})


def batches(torch: Any, rows: dict[str, np.ndarray], begin: int, end: int,
            labels: bool) -> list[tuple[Any, ...]]:
  """Batches of (weak, strong) and perhaps classes, in order."""
  x, y = torch.tensor(rows['inputs']), torch.tensor(rows['labels'])
  cuts = [slice(i, min(i + BATCH, end)) for i in range(begin, end, BATCH)]
  return [(x[c, 0], x[c, 1], *([y[c]] if labels else [])) for c in cuts]


def main() -> None:
  checkout, out = authors.arguments(
      __doc__, 'visitworld123/Twin-sight', COMMIT)
  import torch
  torch.set_default_dtype(torch.float64)
  authors.pretend('torchvision', 'torchvision.models',
                  'torchvision.models.resnet',
                  'torchvision.transforms', 'torchvision.datasets', 'PIL',
                  'PIL.Image', 'wandb', 'matplotlib', 'matplotlib.pyplot',
                  'tensorboardX', 'torch.utils.tensorboard')
  trainers = authors.load(checkout, 'trainers.normal_trainer')
  simclr = authors.load(checkout, 'ssl_model.SimCLR')
  twin = authors.load(checkout, 'model.SemiFed')
  mean = authors.load(checkout, 'algorithms_standalone.basePS.strategies')
  theirs = types.SimpleNamespace(SimCLRModel=simclr.SimCLRModel,
                                 SemiFed=twin.SemiFed)
  told: dict[str, float] = {}
  trainers.log_info = lambda kind, name, value, *rest, **knobs: told.update(
      {name.removeprefix('SemiFed_client_0_'): value})
  rng = np.random.default_rng(11)
  weights = draw(rng)
  make_sage.WIDTH, make_sage.CLASSES = WIDTH, CLASSES
  rows = make_sage.draw(rng, KNOWN + UNKNOWN)
  known = batches(torch, rows, 0, KNOWN, True)
  unknown = batches(torch, rows, KNOWN, KNOWN + UNKNOWN, False)

  def trainer(**changes: Any) -> Any:
    args = options(**changes)
    net = network(torch, theirs, weights, args)
    return trainers.NormalTrainer(
        net, 'cpu', torch.nn.CrossEntropyLoss(), torch.optim.SGD(
            net.parameters(), lr=RATE, momentum=MOMENTUM), args,
        role='client', client_index=0)

  stored: dict[str, Any] = {}
  for name, use in (('plain', False), ('taught', True)):
    first, second = (trainer(PC_use_pesudo_label=use) for _ in range(2))
    first.train_semiFed_model_labeled_client_PC(0, 0, known, 'cpu')
    second.train_semiFed_model_unlabeled_client_PC(0, 0, unknown, 'cpu')
    averaged = mean.federated_averaging_by_params(
        [first.get_model_params(), second.get_model_params()],
        [KNOWN, UNKNOWN])
    after = network(torch, theirs, weights, options())
    after.load_state_dict(averaged)
    stored[name] = packed(after)
    stored[f'{name}_told'] = [told[f'{who}_{k}_loss'] for who, k in TOLD]
  partly = trainer()
  partly.train_semiFed_model_PD(
      0, 0, {k: v.clone() for k, v in partly.get_model_params().items()},
      known, unknown, 'cpu')
  stored['partly'] = packed(partly.model)
  authors.save(
      out, COMMIT, rate=RATE, momentum=MOMENTUM, decay=0.0,
      threshold=THRESHOLD, known=KNOWN, unknown=UNKNOWN, batch=BATCH,
      mu=2 * PROXIMAL, partly_weight=PARTLY, **rows, **weights, **stored)


if __name__ == '__main__':
  main()
