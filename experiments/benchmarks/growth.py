r"""How the time of a round grows, with a plot and a JSON file for each study.

cohort: clients of a round; also the memory of the compiled round. FedAvg's
  mean is a linear rule, so time should be linear and memory flat.
clients: clients of the federation at one cohort; less than 5 % more time.
alpha: Dirichlet parameter of the labels: time and masked rows of clients one by
  one, in chunks under vmap, and in as many lanes.
seeds: runs of one program, one after another and under one vmap.
kept: clients of RSCFed, which keep a teacher each: few of them on the devices,
  many with --client_memory=disk; less than 30 % more time. All have a record,
  and no page of the file is in memory when a round begins.

Sizes of one study take turns, so that all see the same noise. Pixels are
random; but for `alpha` clients draw their rows from one pool, so that the data
do not grow with their number.

python experiments/benchmarks/growth.py
python experiments/benchmarks/growth.py --study=clients --num_clients=100,10000
python experiments/benchmarks/growth.py --study=kept --model=resnet9 \
    --num_clients=20,10000 --cohort_size=5 --rows=8 --batch=4 --repeats=5
"""
from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import os
import pathlib
import sys
import tempfile
import time
from typing import Any, NamedTuple

from absl import flags
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import counting, harness
import fedjax_ssl as fssl
from fedjax_ssl.core import tree
from fedjax_ssl.training import client_rows

FLAGS = flags.FLAGS

flags.DEFINE_multi_enum('study', ['cohort', 'clients', 'alpha', 'seeds'],
                        ['cohort', 'clients', 'alpha', 'seeds', 'kept'],
                        'Which; may be given several times.')
flags.DEFINE_list('cohort_sizes', ['8', '32', '128', '512'],
                  'Clients of a round.')
flags.DEFINE_list('num_clients', ['100', '1000', '10000', '100000'],
                  'Clients of the federation.')
flags.DEFINE_list('alphas', ['0.1', '1', '100'],
                  'Dirichlet parameters.')
flags.DEFINE_list('seed_counts', ['1', '2', '4', '8'], 'Seeds.')
flags.DEFINE_list('chunk_sizes', ['2', '5', '0'], 'Of masked shares under '
                  'vmap; 0 is the whole cohort.')
flags.DEFINE_integer('cohort_size', 10, 'Clients of a round, where they do not '
                     'grow.', lower_bound=1)
flags.DEFINE_integer('rows', 100, 'Rows of each client.', lower_bound=1)
flags.DEFINE_integer('pool', 5000, 'Rows that there are.', lower_bound=100)
flags.DEFINE_integer('batch', 20, 'Rows of a local step.', lower_bound=1)
flags.DEFINE_integer('side', 28, 'Of the gray images.', lower_bound=4)
flags.DEFINE_string('model', 'cnn', 'Network.')

_ALPHA_CLIENTS = 100

QUICK = {
    'cohort_sizes': ['2'], 'num_clients': ['10', '100'], 'alphas': ['100'],
    'seed_counts': ['2'], 'chunk_sizes': ['0', '2'],
    'cohort_size': 2, 'rows': 6, 'pool': 100, 'batch': 3, 'side': 4,
    'model': 'linear'}


class Study(NamedTuple):
  """What one study found.

  Attributes:
    name: of the study and its files.
    label: of the axis that grows.
    sizes: along it.
    lines: by name, a value for each size, times first.
    right: names of the lines that have an axis of their own.
    right_label: of that axis.
  """

  name: str
  label: str
  sizes: list[float]
  lines: dict[str, list[float]]
  right: tuple[str, ...] = ()
  right_label: str = ''


def spec_of(**changes: Any) -> fssl.TaskSpec:
  """The task of all studies: FedAvg on gray images."""
  return fssl.TaskSpec(**{
      'num_classes': 10, 'input_shape': (FLAGS.side, FLAGS.side, 1),
      'method': 'fedavg',
      'model': FLAGS.model, 'mean': (0.5,), 'std': (0.25,), 'weak': 'none',
      'strong': 'none', 'labeled_batch': FLAGS.batch,
      'cohort_size': FLAGS.cohort_size, **changes})


def drawn(num_clients: int, shape: tuple[int, ...] = ()) -> fssl.Federation:
  """Clients that draw --rows rows each from one pool of --pool rows."""
  shape = shape or (FLAGS.side, FLAGS.side, 1)
  if FLAGS.rows > FLAGS.pool:
    raise ValueError(f'--rows={FLAGS.rows} is more than --pool={FLAGS.pool}.')
  train = harness.examples(FLAGS.pool, shape)
  few = harness.federate(train, np.zeros(FLAGS.pool, np.int32), num_clients=1)
  rng = np.random.default_rng(0)
  # A window of the pool, which begins anywhere: distinct rows, cheaply drawn.
  begin = rng.integers(0, FLAGS.pool, (num_clients, 1))
  rows = (begin + np.arange(FLAGS.rows)) % FLAGS.pool
  nobody = np.zeros((num_clients, 1), np.int32)
  return dataclasses.replace(few, clients=fssl.Shard(
      rows.astype(np.int32), np.full(num_clients, FLAGS.rows, np.int32),
      nobody, nobody[:, 0]))


def _times(runs: dict[Any, harness.Simulation]) -> list[float]:
  seconds = harness.interleave(
      {str(x): functools.partial(run.advance, 1) for x, run in runs.items()})
  return list(harness.medians(seconds).values())


def cohort(mesh: Any) -> Study:
  """Clients of a round."""
  sizes = sorted(harness.numbers('cohort_sizes'))
  federation = drawn(max(sizes))
  specs = {s: spec_of(cohort_size=s) for s in sizes}
  memory = [counting.round_memory(specs[s], federation)['temporaries'] / 1e6
            for s in sizes]
  times = _times({s: harness.Simulation(specs[s], federation, mesh)
                  for s in sizes})
  print('rounds a second: ' + ', '.join(
      f'{1 / t:.4g} of {s} clients' for t, s in zip(times, sizes, strict=True)))
  return Study('cohort', 'clients of a round', sizes, {
      's/round': times,
      'ms/client': [1e3 * t / s for t, s in zip(times, sizes, strict=True)],
      'MB of temporaries': memory}, ('MB of temporaries',), 'MB')


def clients(mesh: Any) -> Study:
  """Clients of the federation; the start is until the rounds are compiled."""
  sizes = sorted(harness.numbers('num_clients', least=FLAGS.cohort_size))
  runs, begun, tables = {}, [], []
  for size in sizes:
    start = time.perf_counter()
    federation = drawn(size)
    runs[size] = harness.Simulation(spec_of(), federation, mesh)
    runs[size].compile()
    begun.append(time.perf_counter() - start)
    tables.append(tree.num_bytes(federation.clients) / 1e6)
  times = _times(runs)
  more = [100 * (t / times[0] - 1) for t in times]
  print(f'{sizes[-1]} clients: {more[-1]:+.1f} % of the time of {sizes[0]} '
        '(goal: below 5)')
  return Study('clients', 'clients of the federation', sizes, {
      's/round': times, 's to start': begun, 'MB of tables': tables,
      '% more': more}, ('% more',), '% more time')


def alpha(mesh: Any) -> Study:
  """Dirichlet parameter, over 100 clients of --rows rows on average."""
  alphas = sorted(harness.numbers('alphas', float, 1e-3))
  train = harness.examples(FLAGS.rows * _ALPHA_CLIENTS,
                           (FLAGS.side, FLAGS.side, 1))
  labels = np.asarray(train.labels)
  lines: dict[str, list[float]] = {}
  for value in alphas:
    owner = fssl.data.dirichlet_capped(
        np.random.default_rng(1), labels, _ALPHA_CLIENTS, alpha=value,
        min_size=0)
    federation = harness.federate(train, owner, num_clients=_ALPHA_CLIENTS)
    for name, number in _unequal(federation, mesh).items():
      lines.setdefault(name, []).append(number)
  masked = tuple(name for name in lines if name.startswith('masked'))
  return Study('alpha', 'Dirichlet parameter', alphas, lines, masked,
               'masked rows, %')


def _unequal(federation: fssl.Federation, mesh: Any) -> dict[str, float]:
  """Time a used row, and masked shares in percent, for each way of a device."""
  ways: dict[str, dict[str, Any]] = {'one by one': {'client_map': 'map'}}
  for size in harness.numbers('chunk_sizes', least=0):
    ways[f'chunk {size or "all"}'] = {'client_map': 'vmap', 'chunk_size': size}
    if size:
      ways[f'{size} lanes'] = {'client_map': 'lanes', 'chunk_size': size}
  runs = {name: harness.Simulation(spec_of(**changes), federation, mesh)
          for name, changes in ways.items()}
  alone = runs['one by one']
  work = counting.count(alone.task, federation, 'labeled')
  seconds = harness.interleave({
      name: functools.partial(run.advance, 1) for name, run in runs.items()})
  # Of two rounds the second is timed.
  cohorts = np.stack([
      alone.cohort(2 * turn + 1) for turn in range(FLAGS.repeats)])
  timed = cohorts[:len(seconds['one by one'])]
  rows = max(work.used[timed].sum(), 1)
  return {
      **{f'us/row, {name}': 1e6 * sum(taken) / rows
         for name, taken in seconds.items()},
      **{f'masked, {name}': 100 * counting.masked_share(
          fssl.make_task(spec_of(**changes)), work, cohorts)
         for name, changes in ways.items()}}


def seeds(mesh: Any) -> Study:
  """Runs of one program."""
  counts = sorted(harness.numbers('seed_counts'))
  federation, lines = drawn(_ALPHA_CLIENTS), {}
  runs = {(name, n): harness.Simulation(
      spec_of(), federation, mesh, num_seeds=n, together=name == 'vmap')
          for name in ('map', 'vmap') for n in counts}
  times = iter(_times(runs))
  for name in ('map', 'vmap'):
    lines[f's/round, {name}'] = [next(times) for _ in counts]
  return Study('seeds', 'seeds', [float(n) for n in counts], lines)


def kept(mesh: Any) -> Study:
  """Clients that keep a teacher each, few on the devices and many on disk."""
  few, *_, many = sorted(harness.numbers('num_clients',
                                         least=FLAGS.cohort_size))
  shape = harness.image_shape(FLAGS.model, FLAGS.side)
  spec = spec_of(
      method='rscfed(warmup=0.0)', input_shape=shape, mean=(0.5,) * shape[-1],
      std=(0.25,) * shape[-1], unlabeled_batch=FLAGS.batch)
  pathlib.Path(FLAGS.out).mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=FLAGS.out) as folder:
    begun, runs = [], {}
    for count, kind in ((few, 'device'), (many, 'disk')):
      start = time.perf_counter()
      runs[count] = harness.Simulation(
          spec, _halved(drawn(count, shape)), mesh,
          place=client_rows.Place(kind, pathlib.Path(folder)))
      begun.append(time.perf_counter() - start)
    runs[many].fill()
    def cold() -> None:
      _forget(pathlib.Path(folder))
      runs[many].advance(1)
      _forget(pathlib.Path(folder))
    times = list(harness.medians(harness.interleave(
        {'few': functools.partial(runs[few].advance, 1), 'many': cold}
    )).values())
    sizes = [tree.num_bytes(runs[few].memory) / 1e6, sum(
        file.stat().st_size for file in pathlib.Path(folder).iterdir()) / 1e6]
  print(f'{many} clients on disk: {times[1] / times[0]:.3f} of the time of '
        f'{few} on the devices (goal: below 1.3)')
  return Study('kept', 'clients that keep a teacher', [few, many], {
      's/round': times, 's to start': begun, 'MB': sizes}, ('MB',),
      'MB on the device, and in files')


def _forget(folder: pathlib.Path) -> None:
  """Writes what is in memory of a folder's files, and frees it."""
  for file in folder.iterdir():
    descriptor = os.open(file, os.O_RDONLY)
    try:
      os.fsync(descriptor)
      if hasattr(os, 'posix_fadvise'):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
      os.close(descriptor)


def _halved(federation: fssl.Federation) -> fssl.Federation:
  """The second half of each client's rows without labels."""
  rows, half = np.asarray(federation.clients.labeled), FLAGS.rows // 2
  sizes = np.full(len(rows), half, np.int32)
  return dataclasses.replace(federation, clients=fssl.Shard(
      rows[:, :half], sizes, rows[:, half:2 * half], sizes))


def draw(study: Study, path: Any) -> None:
  """Writes the plot: both axes logarithmic, those on the right linear."""
  import matplotlib
  matplotlib.use('agg')
  from matplotlib import pyplot
  figure, left = pyplot.subplots(figsize=(6, 4), layout='constrained')
  right = left.twinx() if study.right else None
  for i, (name, values) in enumerate(study.lines.items()):
    axes = right if name in study.right and right is not None else left
    style = 'o--' if axes is right else 'o-'
    axes.plot(study.sizes, values, style, color=f'C{i}', label=name)
  left.set(xscale='log', yscale='log', xlabel=study.label, ylabel='time')
  if right is not None:
    right.set_ylabel(study.right_label)
    right.set_ylim(bottom=min(0, right.get_ylim()[0]))
  figure.legend(loc='outside upper center', ncols=3, fontsize='small')
  figure.savefig(path, dpi=120)
  pyplot.close(figure)


def table(study: Study) -> list[Sequence[Any]]:
  """A row for each size."""
  columns = zip(*study.lines.values(), strict=True)
  return [[study.label, *study.lines],
          *[[f'{size:g}', *values]
            for size, values in zip(study.sizes, columns, strict=True)]]


def main() -> None:
  """Runs the studies that are asked for."""
  mesh = harness.make_mesh()
  for name in dict.fromkeys(FLAGS.study):
    study = {'cohort': cohort, 'clients': clients, 'alpha': alpha,
             'seeds': seeds, 'kept': kept}[name](mesh)
    path = harness.report(f'growth_{name}', table(study), {
        'task': {flag: FLAGS[flag].value for flag in (
            'model', 'side', 'rows', 'batch', 'pool', 'cohort_size')},
        'seed': 0, 'sizes': study.sizes, 'lines': study.lines})
    draw(study, path.with_suffix('.png'))
    print(f'Drawn: {path.with_suffix(".png")}')


if __name__ == '__main__':
  harness.run(main, QUICK)
