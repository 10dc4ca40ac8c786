r"""Time of a round of some methods over FixMatch's, which take turns.

All clients hold both kinds of rows, and all take part. The network is the one
of SAGE's and ProxyFL's tables, a quarter as wide. Beside the ratio stand the
lines of the method's file.

python experiments/benchmarks/method_rounds.py
python experiments/benchmarks/method_rounds.py --methods=fixmatch,uda \
    --model='cnn(width=8)'
"""
from __future__ import annotations

import functools
import inspect
import pathlib
import sys
from typing import Any

from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import harness
import fedjax_ssl as fssl
from fedjax_ssl import methods
from fedjax_ssl.core import checks

FLAGS = flags.FLAGS

flags.DEFINE_list('methods', 'fixmatch,sage,proxyfl,fl2,steadymatch',
                  'Names; the first is what the others are compared with.')
flags.DEFINE_string('model', 'resnet8(width=16)', 'Network.')
flags.DEFINE_integer('side', 32, 'Of the images.', lower_bound=4)
flags.DEFINE_integer('channels', 3, 'Of the images.', lower_bound=1)
flags.DEFINE_integer('num_clients', 2, 'Clients, all in each round.',
                     lower_bound=1)
flags.DEFINE_integer('steps', 3, 'Local steps.', lower_bound=1)
flags.DEFINE_integer('labeled', 32, 'Rows with labels in a step.',
                     lower_bound=1)
flags.DEFINE_integer('unlabeled', 64, 'Rows without.', lower_bound=1)

QUICK = {'model': 'cnn(width=2)', 'side': 8, 'channels': 1, 'steps': 1,
         'labeled': 2, 'unlabeled': 2, 'methods': ['fixmatch', 'sage']}
# Ratios that these methods should stay below.
GOALS = {'sage': 1.35, 'proxyfl': 1.5, 'fl2': 3.6}


def rounds(method: str, mesh: Any) -> harness.Simulation:
  """Makes rounds of a method on random pixels."""
  shape = FLAGS.side, FLAGS.side, FLAGS.channels
  spec = fssl.TaskSpec(
      10, shape, method=method, model=FLAGS.model,
      mean=(0.5,) * FLAGS.channels, std=(0.25,) * FLAGS.channels,
      optimizer='sgd', learning_rate=1e-3, local_steps=FLAGS.steps,
      labeled_batch=FLAGS.labeled, unlabeled_batch=FLAGS.unlabeled,
      cohort_size=FLAGS.num_clients, schedule_rounds=1000)
  return harness.Simulation(spec, harness.two_pools(
      FLAGS.num_clients, FLAGS.steps * FLAGS.labeled,
      FLAGS.steps * FLAGS.unlabeled, shape), mesh)


def lines_of(method: str) -> int:
  """Counts the lines of a method's file or folder."""
  file = pathlib.Path(inspect.getfile(inspect.unwrap(methods.METHODS[method])))
  files = (file.parent.glob('*.py') if file.parent.name != 'methods'
           else [file])
  return sum(len(f.read_text().splitlines()) for f in files)


def main() -> None:
  """Measures and reports."""
  names = list(dict.fromkeys(FLAGS.methods))
  for name in names or ['']:
    checks.check('--methods', name, methods.METHODS)
  mesh = harness.make_mesh()
  runs = {name: rounds(name, mesh) for name in names}
  seconds = harness.interleave(
      {name: functools.partial(run.advance, 1) for name, run in runs.items()})
  ratios = {name: harness.paired(seconds, name, names[0]) for name in names}
  table: list[list[Any]] = [['method', 's/round', f'over {names[0]}', 'goal',
                             'lines']]
  table += [[name, harness.medians(seconds)[name], ratios[name],
             GOALS.get(name, '') if names[0] == 'fixmatch' else '',
             lines_of(name)] for name in names]
  harness.report('method_rounds', table, {
      'data': 'random pixels', 'seconds': seconds, 'ratios': ratios})


if __name__ == '__main__':
  harness.run(main, QUICK)
