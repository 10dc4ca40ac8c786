r"""Images per second of ResNet-9, beside a PyTorch loop.

4 clients train 4 local steps at batch 32 on 32x32x3 images of random pixels;
ResNet-9 without normalization (6,568,640 parameters).

The network's part of a round is printed against the rate of a matrix product,
see `limit`, and so is the part of augmentation, apart.

python experiments/benchmarks/resnet9.py             # FedAvg and PyTorch
python experiments/benchmarks/resnet9.py --fixmatch  # FixMatch and PyTorch
python experiments/benchmarks/resnet9.py --compile   # FixMatch's compilation
"""
from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time

from absl import flags
import harness
import jax
import limit
import numpy as np

import fedjax_ssl as fssl

FLAGS = flags.FLAGS

_CLIENTS, _STEPS, _BATCH = 4, 4, 32
_LABELED, _UNLABELED = 10, 50
_CHILD = 'FEDJAX_SSL_COMPILE_ONCE'

flags.DEFINE_bool('fixmatch', False, 'Measure a round of FixMatch, batches of '
                  '10 and 50, without views and with them.')
flags.DEFINE_enum('compute_dtype', 'float32', ['float32', 'bfloat16'],
                  "Of our network's arithmetic, and of the limit; PyTorch "
                  'keeps float32.')
flags.DEFINE_bool('compile', False, 'Measure how long the round of FixMatch '
                  'compiles, without and with a filled compilation cache.')


def _spec(**changes) -> fssl.TaskSpec:
  return fssl.TaskSpec(**{
      'num_classes': 10, 'input_shape': (32, 32, 3),
      'model': 'resnet9_fedmatch', 'mean': (0.5,) * 3, 'std': (0.25,) * 3,
      'weak': 'none', 'strong': 'none', 'learning_rate': 0.01,
      'labeled_batch': _BATCH, 'cohort_size': _CLIENTS,
      'compute_dtype': FLAGS.compute_dtype, **changes})


def _owner(rows: int) -> np.ndarray:
  return np.repeat(np.arange(_CLIENTS, dtype=np.int32), rows)


def _fixmatch(mesh, **changes) -> harness.Simulation:
  """FixMatch on clients with 4 batches of labeled and of unlabeled rows."""
  federation = harness.two_pools(
      _CLIENTS, _STEPS * _LABELED, _STEPS * _UNLABELED, (32, 32, 3))
  spec = _spec(method='fixmatch', labeled_batch=_LABELED,
               unlabeled_batch=_UNLABELED, **changes)
  return harness.Simulation(spec, federation, mesh)


def _compare() -> None:
  harness.need_torch()
  import torch
  import torch_loop
  mesh = harness.make_mesh()
  torch.set_num_threads(FLAGS.num_devices)
  owner = _owner(_STEPS * _BATCH)
  train = harness.examples(owner.size, (32, 32, 3))
  ours = harness.Simulation(
      _spec(), harness.federate(train, owner, num_clients=_CLIENTS), mesh)
  rows = np.split(np.arange(owner.size), _CLIENTS)

  def pytorch(layout):
    network = torch_loop.ResNet9()
    torch_loop.load_flax(network, ours.model.params)
    loop = torch_loop.Loop(
        network, train.inputs, train.labels, rows, mean=0.5, std=0.25,
        batch=_BATCH, learning_rate=0.01, layout=layout)
    rounds = itertools.count()
    return lambda: loop.round(ours.cohort(next(rounds)))

  runs = {f'PyTorch, {layout}': pytorch(layout)
          for layout in torch_loop.LAYOUTS}
  products = limit.Products(mesh, FLAGS.compute_dtype, FLAGS.product_size)
  seconds = harness.interleave(
      {'ours': lambda: ours.advance(1), **runs, **products.runs},
      FLAGS.repeats)
  middle = harness.medians(seconds)
  ratio = harness.over_fastest(seconds, 'ours', runs)
  reached = limit.shares(
      {'network': (_flops(ours, 'labeled'), middle['ours'])},
      products.rate(middle))
  harness.report(
      'resnet9',
      [['', 's/round', 'images/s'],
       *[[name, middle[name], owner.size / middle[name]]
         for name in ('ours', *runs)]],
      {'data': 'random pixels', 'seconds': seconds, 'limit': reached}, ratio)


def _flops(ours: harness.Simulation, streams: str = 'both') -> float:
  return limit.round_flops(ours.spec, ours.federation, ours.cohort(0), streams)


def _compare_fixmatch() -> None:
  """Ours on raw rows, as PyTorch's, and with views."""
  harness.need_torch()
  import torch
  import torch_fixmatch
  import torch_loop
  mesh = harness.make_mesh()
  torch.set_num_threads(FLAGS.num_devices)
  plain = _fixmatch(mesh)
  full = _fixmatch(mesh, weak='flip_crop', strong='ra_mc')
  clients, train = plain.federation.clients, plain.federation.train

  def pytorch(layout):
    network = torch_loop.ResNet9()
    torch_loop.load_flax(network, plain.model.params)
    loop = torch_fixmatch.Loop(
        network, train.inputs, train.labels, clients.labeled,
        clients.unlabeled, mean=0.5, std=0.25, batch=_LABELED,
        unlabeled_batch=_UNLABELED, learning_rate=0.01, layout=layout)
    rounds = itertools.count()
    return lambda: loop.round(plain.cohort(next(rounds)))

  runs = {f'PyTorch, {layout}': pytorch(layout)
          for layout in torch_loop.LAYOUTS}
  products = limit.Products(mesh, FLAGS.compute_dtype, FLAGS.product_size)
  seconds = harness.interleave(
      {'ours': lambda: plain.advance(1), **runs,
       'ours, flip_crop and ra_mc': lambda: full.advance(1), **products.runs},
      FLAGS.repeats)
  middle = harness.medians(seconds)
  network, both = middle['ours'], middle['ours, flip_crop and ra_mc']
  share = 1 - network / both
  flops = _flops(plain)
  reached = limit.shares(
      {'network': (flops, network),
       'augmentation': (_flops(full) - flops, both - network)},
      products.rate(middle))
  print(f'augmentation share of the round: {share:.3f} (goal: below 0.25)')
  harness.report(
      'resnet9_fixmatch',
      [['FixMatch', 's/round'],
       *[[name, s] for name, s in middle.items() if name not in products.runs]],
      {'seconds': seconds, 'augmentation_share': share, 'limit': reached},
      harness.over_fastest(seconds, 'ours', runs))


def _compile() -> None:
  """Compiles in fresh processes, twice with one new cache folder."""
  found: dict[str, dict[str, float]] = {}
  with tempfile.TemporaryDirectory() as folder:
    for name in ('cold', 'cache filled'):
      done = subprocess.run(
          [sys.executable, __file__, f'--num_devices={FLAGS.num_devices}'],
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
  harness.run(main)
