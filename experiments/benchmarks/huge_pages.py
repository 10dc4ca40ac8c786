r"""Seconds of a round with pages of 4 KB and with pages of 2 MB.

Large arrays of a CPU are on huge pages where the C library asks for them, as
`fedjax_ssl.running.huge_pages` makes it do. Processes with and without them
take turns; in each, the first round is not timed.

python experiments/benchmarks/huge_pages.py --model=resnet9
"""
from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import harness
import fedjax_ssl as fssl

FLAGS = flags.FLAGS

flags.DEFINE_string('model', 'resnet9', 'Network.')
flags.DEFINE_string('method', 'fixmatch', 'Method.')
flags.DEFINE_integer('num_clients', 2, 'Clients, all in each round.',
                     lower_bound=1)
flags.DEFINE_integer('steps', 2, 'Local steps.', lower_bound=1)
flags.DEFINE_integer('labeled', 10, 'Rows with labels in a step.',
                     lower_bound=1)
flags.DEFINE_integer('unlabeled', 50, 'Rows without.', lower_bound=1)
flags.DEFINE_integer('turns', 3, 'Processes of either kind; if not given, '
                     'fewer where they would last over 8 minutes.',
                     lower_bound=1)

QUICK = {'model': 'cnn(width=2)', 'labeled': 2, 'unlabeled': 2, 'turns': 1}
_SIZES = ('model', 'method', 'num_clients', 'steps', 'labeled', 'unlabeled',
          'repeats', 'num_devices')
_CHILD = 'FEDJAX_SSL_TIMED_ROUNDS'
_PAGES = {'4 KB': 0, '2 MB': 1}


def _rounds() -> list[float]:
  """Seconds of rounds in this process."""
  mesh = harness.make_mesh()
  shape = harness.image_shape(FLAGS.model)
  spec = fssl.TaskSpec(
      10, shape, method=FLAGS.method, model=FLAGS.model,
      mean=(0.5,) * shape[2], std=(0.25,) * shape[2], weak='none',
      strong='none', learning_rate=0.01, labeled_batch=FLAGS.labeled,
      unlabeled_batch=FLAGS.unlabeled, cohort_size=FLAGS.num_clients)
  ours = harness.Simulation(spec, harness.two_pools(
      FLAGS.num_clients, FLAGS.steps * FLAGS.labeled,
      FLAGS.steps * FLAGS.unlabeled, shape), mesh)
  return harness.interleave({'': lambda: ours.advance(1)})['']


def _in_a_process(huge: int) -> list[float]:
  flags_ = [f'--{name}={FLAGS[name].value}' for name in _SIZES]
  done = subprocess.run(
      [sys.executable, __file__, *flags_], capture_output=True, text=True,
      check=False, env={**os.environ, _CHILD: '1',
                        'GLIBC_TUNABLES': f'glibc.malloc.hugetlb={huge}'})
  if done.returncode:
    lines = done.stderr.strip().splitlines() or ['it says nothing']
    raise ValueError(f'A process of rounds ended: {lines[-1]}')
  seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
  return seconds


def main() -> None:
  """Times rounds of both kinds and reports."""
  if _CHILD in os.environ:
    print(json.dumps(_rounds()))
    return
  seconds: dict[str, list[float]] = {name: [] for name in _PAGES}
  for _ in harness.turns('turns'):
    for name, huge in _PAGES.items():
      seconds[name] += _in_a_process(huge)
  middle = harness.medians(seconds)
  small, large = _PAGES
  plain = FLAGS.model.partition('(')[0]
  harness.report(
      f'huge_pages_{plain}',
      [['pages', 's/round', 'share'],
       *[[name, s, s / middle[small]] for name, s in middle.items()]],
      {'data': 'random pixels', 'seconds': seconds,
       'ratio': harness.paired(seconds, large, small),
       **{name: FLAGS[name].value for name in _SIZES}})


if __name__ == '__main__':
  harness.run(main, QUICK)
