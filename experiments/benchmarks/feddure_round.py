r"""Seconds of a FedDure round, second order, beside a PyTorch loop.

4 clients train 4 local steps of 10 labeled and 90 unlabeled rows with Adam; of
a ResNet, 2 clients and 2 steps, so that it ends in a few minutes. Pixels are
random, and raw rows are their own views in both, so that the networks alone are
compared. Networks: FedAvg's CNN on 28x28x1 images, or, on 32x32x3 images,
FedDure's ResNet-9 or FedMatch's, which does not normalize.

python experiments/benchmarks/feddure_round.py
python experiments/benchmarks/feddure_round.py --model=resnet9
"""
from __future__ import annotations

import pathlib
import sys

from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import harness, torch_apart
import fedjax_ssl as fssl

FLAGS = flags.FLAGS

flags.DEFINE_integer('num_clients', 4, 'Clients, all in each round; of a '
                     'ResNet 2 if not given.', lower_bound=1)
flags.DEFINE_integer('steps', 4, 'Local steps; the same holds.', lower_bound=1)
flags.DEFINE_integer('labeled', 10, 'Rows with labels in a step.',
                     lower_bound=1)
flags.DEFINE_integer('unlabeled', 90, 'Rows without.', lower_bound=1)
flags.DEFINE_enum('model', 'fedavg_cnn', [
    'fedavg_cnn', 'resnet9', 'resnet9_fedmatch'], 'Network.')

_RATE = 5e-4

_RESNET = {'num_clients': 2, 'steps': 2, 'repeats': 3}

QUICK = {'num_clients': 2, 'steps': 1, 'labeled': 2, 'unlabeled': 2}


def make(mesh) -> harness.Simulation:
  """Ours."""
  shape = (28, 28, 1) if FLAGS.model == 'fedavg_cnn' else (32, 32, 3)
  spec = fssl.TaskSpec(
      10, shape, method='feddure', mean=(0.5,) * shape[2],
      std=(0.25,) * shape[2], model=FLAGS.model, weak='none', strong='none',
      optimizer='adam', learning_rate=_RATE, labeled_batch=FLAGS.labeled,
      unlabeled_batch=FLAGS.unlabeled, cohort_size=FLAGS.num_clients)
  return harness.Simulation(spec, harness.two_pools(
      FLAGS.num_clients, FLAGS.steps * FLAGS.labeled,
      FLAGS.steps * FLAGS.unlabeled, shape), mesh)


def main() -> None:
  """Times both and reports."""
  if FLAGS.model != 'fedavg_cnn' and not FLAGS.quick:
    harness.default(_RESNET)
  harness.need_torch()
  mesh = harness.make_mesh()
  ours = make(mesh)
  train, clients = ours.federation.train, ours.federation.clients
  pytorch = torch_apart.Loops(
      'torch_feddure', ours, (
          train.inputs, train.labels, clients.labeled, clients.unlabeled),
      threads=FLAGS.num_devices, mean=0.5, std=0.25, batch=FLAGS.labeled,
      unlabeled_batch=FLAGS.unlabeled, learning_rate=_RATE)
  runs = pytorch.runs
  seconds = harness.interleave({'ours': lambda: ours.advance(1), **runs})
  middle = harness.medians(seconds)
  rows = FLAGS.num_clients * FLAGS.steps * (FLAGS.labeled + FLAGS.unlabeled)
  harness.report(
      f'feddure_round_{FLAGS.model}',
      [['FedDure', 's/round', 'images/s'],
       *[[name, s, rows / s] for name, s in middle.items()]],
      {'data': 'random pixels', 'model': FLAGS.model, 'steps': FLAGS.steps,
       'labeled': FLAGS.labeled, 'unlabeled': FLAGS.unlabeled,
       'seconds': seconds,
       'quartiles': harness.quartiles(seconds, 'ours', runs),
       **pytorch.about()},
      harness.over_fastest(seconds, 'ours', runs))


if __name__ == '__main__':
  harness.run(main, QUICK, as_programs=True)
