r"""Whether a run that is repeated or continued has the same bits here.

The same few rounds are trained by processes of their own: once; once more with
the programs that the first has compiled; stopped half-way and continued; and
with nothing compiled before, where a GPU may choose other algorithms. All
models are compared with the first. With XLA_FLAGS in the environment it is
asked of other programs, as below.

python experiments/benchmarks/same_bits.py
XLA_FLAGS=--xla_gpu_deterministic_ops=true \
    python experiments/benchmarks/same_bits.py --model=resnet9
"""
from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from absl import flags
import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import harness
import fedjax_ssl as fssl

FLAGS = flags.FLAGS

flags.DEFINE_string('method', 'fixmatch', 'Method.')
flags.DEFINE_string('model', 'resnet8(width=16)', 'Network.')
flags.DEFINE_integer('rounds', 6, 'Rounds of a run.', lower_bound=2)
flags.DEFINE_list('train_flags', [], 'More flags of `fedjax-ssl train`, as '
                  'compute_dtype=bfloat16.')

_ROOT = pathlib.Path(__file__).resolve().parents[2]
QUICK = {'model': 'cnn(width=2)', 'rounds': 2,
         'train_flags': ['local_steps=1', 'num_clients=4', 'cohort_size=2']}


class Trained(NamedTuple):
  """What a run left.

  Attributes:
    leaves: of the server's state.
    seconds: of its last process.
  """

  leaves: list[np.ndarray]
  seconds: float


def trained(folder: pathlib.Path, cache: pathlib.Path, *ends: int) -> Trained:
  """Trains up to each of some rounds in turn, in processes of their own.

  Args:
    folder: of the run.
    cache: the user's, with the compiled programs.
    *ends: rounds.

  Raises:
    ValueError: if a process fails.
  """
  seconds = 0.
  for end in ends:
    begin = time.monotonic()
    made = subprocess.run(
        [sys.executable, '-m', 'fedjax_ssl', 'train', 'digits_dirdir',
         f'--method={FLAGS.method}', f'--model={FLAGS.model}', '--nobounds',
         f'--schedule_rounds={FLAGS.rounds}', f'--num_rounds={end}',
         *(f'--{words}' for words in FLAGS.train_flags),
         f'--workdir={folder}'], cwd=_ROOT, check=False, capture_output=True,
        text=True, env=harness.variables(cache))
    if made.returncode:
      raise ValueError(f'the run ended with {made.returncode}: '
                       f'{(made.stderr.strip().splitlines() or ["?"])[-1]}')
    seconds = time.monotonic() - begin
  return Trained([np.asarray(x) for x in jax.tree.leaves(
      fssl.load(folder).state.server)], seconds)


def compared(one: Trained, other: Trained) -> tuple[bool, float]:
  """Returns whether all bits are the same, and the largest difference."""
  pairs = [*zip(one.leaves, other.leaves, strict=True)]
  same = all(a.tobytes() == b.tobytes() for a, b in pairs)
  floats = [np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0)
            for a, b in pairs if a.dtype.kind not in 'OUS']
  return same, 0. if same else float(max(floats, default=0))


def main() -> None:
  """Trains, compares and reports."""
  half = FLAGS.rounds // 2
  with tempfile.TemporaryDirectory() as place:
    folder = pathlib.Path(place)
    cache = folder / 'cache'
    first = trained(folder / 'first', cache, FLAGS.rounds)
    others = {
        'again': trained(folder / 'again', cache, FLAGS.rounds),
        'continued': trained(folder / 'continued', cache, half, FLAGS.rounds),
        'compiled anew': trained(folder / 'anew', folder / 'other',
                                 FLAGS.rounds)}
  table: list[list[Any]] = [['run', 'same bits', 'difference', 'seconds'],
                            ['first', '-', '-', first.seconds]]
  found: dict[str, Any] = {'xla_flags': os.environ.get('XLA_FLAGS', '')}
  for name, run in others.items():
    same, most = compared(first, run)
    table.append([name, 'yes' if same else 'no', most, run.seconds])
    found[name] = {'same': same, 'difference': most, 'seconds': run.seconds}
  harness.report('same_bits', table, found)


if __name__ == '__main__':
  harness.run(main, QUICK)
