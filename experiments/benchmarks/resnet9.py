r"""Images per second of ResNet-9, beside a PyTorch loop.

4 clients train 4 local steps at batch 32, or 10 and 50 rows of FixMatch, on
32x32x3 images of random pixels; ResNet-9 without normalization (6,568,640
parameters). Ours is measured alone where PyTorch is missing, and on an
accelerator, since PyTorch's loop is on the CPU.

The network's part of a round is printed against the rate of a matrix product,
see `limit`, and so is the part of augmentation, apart.

python experiments/benchmarks/resnet9.py             # FedAvg and PyTorch
python experiments/benchmarks/resnet9.py --fixmatch  # FixMatch and PyTorch
python experiments/benchmarks/resnet9.py --compile   # FixMatch's compilation
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import flags
import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import harness, limit, torch_apart
import fedjax_ssl as fssl

FLAGS = flags.FLAGS

_CHILD = 'FEDJAX_SSL_COMPILE_ONCE'
_SIZES = ('num_clients', 'steps', 'batch', 'labeled', 'unlabeled')
QUICK = {'num_clients': 2, 'steps': 1, 'batch': 2, 'labeled': 2,
         'unlabeled': 2}

flags.DEFINE_integer('num_clients', 4, 'Clients, all in each round.',
                     lower_bound=1)
flags.DEFINE_integer('steps', 4, 'Local steps.', lower_bound=1)
flags.DEFINE_integer('batch', 32, "Rows of FedAvg's step.", lower_bound=1)
flags.DEFINE_integer('labeled', 10, "Rows with labels in FixMatch's step.",
                     lower_bound=1)
flags.DEFINE_integer('unlabeled', 50, 'Rows without.', lower_bound=1)
flags.DEFINE_bool('fixmatch', False, 'Measure a round of FixMatch, without '
                  'views and with them.')
flags.DEFINE_enum('compute_dtype', 'float32', ['float32', 'bfloat16'],
                  "Of our network's arithmetic, and of the limit; PyTorch "
                  'keeps float32.')
flags.DEFINE_bool('compile', False, 'Measure how long the round of FixMatch '
                  'compiles, without and with a filled compilation cache.')


def _spec(**changes) -> fssl.TaskSpec:
  return fssl.TaskSpec(**{
      'num_classes': 10, 'input_shape': (32, 32, 3), 'method': 'fedavg',
      'model': 'resnet9_fedmatch', 'mean': (0.5,) * 3, 'std': (0.25,) * 3,
      'weak': 'none', 'strong': 'none', 'learning_rate': 0.01,
      'labeled_batch': FLAGS.batch, 'cohort_size': FLAGS.num_clients,
      'compute_dtype': FLAGS.compute_dtype, **changes})


def _owner(rows: int) -> np.ndarray:
  return np.repeat(np.arange(FLAGS.num_clients, dtype=np.int32), rows)


def _fixmatch(mesh, **changes) -> harness.Simulation:
  """FixMatch on clients with --steps batches of either kind of rows."""
  federation = harness.two_pools(
      FLAGS.num_clients, FLAGS.steps * FLAGS.labeled,
      FLAGS.steps * FLAGS.unlabeled, (32, 32, 3))
  spec = _spec(method='fixmatch', labeled_batch=FLAGS.labeled,
               unlabeled_batch=FLAGS.unlabeled, **changes)
  return harness.Simulation(spec, federation, mesh)


def _compare() -> None:
  mesh = harness.make_mesh()
  owner = _owner(FLAGS.steps * FLAGS.batch)
  train = harness.examples(owner.size, (32, 32, 3))
  ours = harness.Simulation(
      _spec(), harness.federate(train, owner, num_clients=FLAGS.num_clients),
      mesh)
  rows = np.split(np.arange(owner.size), FLAGS.num_clients)
  flops = _flops(ours, 'labeled')
  pytorch = _pytorch(
      'torch_loop', ours, (train.inputs, train.labels, rows),
      batch=FLAGS.batch)
  runs = pytorch.runs if pytorch else {}
  products = limit.Products(mesh, FLAGS.compute_dtype, FLAGS.product_size)
  seconds = harness.interleave(
      {'ours': lambda: ours.advance(1), **runs, **products.runs})
  middle = harness.medians(seconds)
  reached = limit.shares({'network': (flops, middle['ours'])},
                         products.rate(middle))
  missing, beside, ratio = _beside(pytorch, seconds)
  harness.report(
      _named('resnet9'),
      [['', 's/round', 'images/s'],
       *[[name, middle[name], owner.size / middle[name]]
         for name in ('ours', *runs)], *missing],
      {'data': 'random pixels', 'seconds': seconds, 'limit': reached,
       **beside, **_sizes()}, ratio)


def _pytorch(kind: str, ours: harness.Simulation, data: Sequence[Any],
             **choices: Any) -> torch_apart.Loops | None:
  """PyTorch's rounds, normalized and with the rate as ours; None without it.

  Args:
    kind: as `torch_apart.Loops` has it, and so the rest.
    ours: the rounds that it is compared with.
    data: images, labels, and the clients' rows.
    **choices: batch sizes.
  """
  if harness.without_torch():
    return None
  return torch_apart.Loops(
      kind, ours, data, threads=FLAGS.num_devices, mean=0.5, std=0.25,
      learning_rate=0.01, **choices)


def _beside(pytorch: torch_apart.Loops | None,
            seconds: Mapping[str, list[float]]
            ) -> tuple[list[list[str]], dict[str, Any], float | None]:
  """The table's row where PyTorch is missing, what is measured, the ratio."""
  if pytorch is None:
    return [['PyTorch', '-', harness.without_torch()]], {}, None
  return [], {
      'quartiles': harness.quartiles(seconds, 'ours', pytorch.runs),
      **pytorch.about()}, harness.over_fastest(seconds, 'ours', pytorch.runs)


def _sizes() -> dict[str, Any]:
  return {name: FLAGS[name].value for name in _SIZES}


def _flops(ours: harness.Simulation, streams: str = 'both') -> float:
  return limit.round_flops(ours.spec, ours.federation, ours.cohort(0), streams)


def _compare_fixmatch() -> None:
  """Ours on raw rows, as PyTorch's, and with views."""
  mesh = harness.make_mesh()
  plain = _fixmatch(mesh)
  full = _fixmatch(mesh, weak='flip_crop', strong='ra_mc')
  clients, train = plain.federation.clients, plain.federation.train
  flops, more = _flops(plain), _flops(full)
  pytorch = _pytorch(
      'torch_fixmatch', plain, (
          train.inputs, train.labels, clients.labeled, clients.unlabeled),
      batch=FLAGS.labeled, unlabeled_batch=FLAGS.unlabeled)
  runs = pytorch.runs if pytorch else {}
  products = limit.Products(mesh, FLAGS.compute_dtype, FLAGS.product_size)
  seconds = harness.interleave(
      {'ours': lambda: plain.advance(1), **runs,
       'ours, flip_crop and ra_mc': lambda: full.advance(1), **products.runs})
  middle = harness.medians(seconds)
  network, both = middle['ours'], middle['ours, flip_crop and ra_mc']
  share = 1 - network / both
  reached = limit.shares(
      {'network': (flops, network),
       'augmentation': (more - flops, both - network)},
      products.rate(middle))
  print(f'augmentation share of the round: {share:.3f} (goal: below 0.25)')
  rows = FLAGS.num_clients * FLAGS.steps * (FLAGS.labeled + FLAGS.unlabeled)
  missing, beside, ratio = _beside(pytorch, seconds)
  harness.report(
      _named('resnet9_fixmatch'),
      [['FixMatch', 's/round', 'images/s'],
       *[[name, s, rows / s] for name, s in middle.items()
         if name not in products.runs], *missing],
      {'seconds': seconds, 'augmentation_share': share, 'limit': reached,
       **beside, **_sizes()}, ratio)


def _compile() -> None:
  """Compiles in fresh processes, twice with one new cache folder."""
  found: dict[str, dict[str, float]] = {}
  with tempfile.TemporaryDirectory() as folder:
    for name in ('cold', 'cache filled'):
      done = subprocess.run(
          [sys.executable, __file__, f'--num_devices={FLAGS.num_devices}',
           *(f'--{size}={value}' for size, value in _sizes().items()),
           f'--compute_dtype={FLAGS.compute_dtype}'],
          env={**os.environ, _CHILD: folder}, capture_output=True, text=True,
          check=False)
      if done.returncode:
        raise RuntimeError(done.stderr)
      wall, busy = done.stdout.split()[-2:]
      found[name] = {'seconds': float(wall), 'CPU seconds': float(busy)}
  print('goals: cold below 40 s, cache filled below 5 s')
  harness.report(
      'resnet9_compile',
      [['FixMatch', 'seconds', 'CPU seconds'],
       *[[name, *values.values()] for name, values in found.items()]], found)


def _compile_once(folder: str) -> None:
  mesh = harness.make_mesh()
  jax.config.update('jax_compilation_cache_dir', folder)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
  made = _fixmatch(mesh, weak='flip_crop', strong='ra_mc')
  wall, busy = time.perf_counter(), time.process_time()
  made.compile()
  print(time.perf_counter() - wall, time.process_time() - busy)


def _named(benchmark: str) -> str:
  """The file's name: of float32 without the dtype."""
  dtype = FLAGS.compute_dtype
  return benchmark if dtype == 'float32' else f'{benchmark}_{dtype}'


def main() -> None:
  """Measures what the flags ask for."""
  if os.environ.get(_CHILD):
    _compile_once(os.environ[_CHILD])
  elif FLAGS.fixmatch or FLAGS.compile:
    if FLAGS.fixmatch:
      _compare_fixmatch()
    if FLAGS.compile:
      _compile()
  else:
    _compare()


if __name__ == '__main__':
  harness.run(main, QUICK, as_programs=True)
