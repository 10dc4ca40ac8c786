"""The run that the flags ask for, and its bounds: built, trained, shown."""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import contextlib
import dataclasses
import os
import pathlib
import sys
import time
from typing import Any

import numpy as np

from fedjax_ssl import config, data
from fedjax_ssl.cli import (
  auto,
  convolutions,
  dealing,
  printing,
  settings,
  words,
)
from fedjax_ssl.cli import job as job_lib
from fedjax_ssl.cli.settings import Setting
from fedjax_ssl.config import Config
from fedjax_ssl.core import imports
from fedjax_ssl.training import processes
from fedjax_ssl.training import workdir as workdir_lib

# Where bounds live below the workdir, by name in tables: (folder, flags).
BOUNDS = {
    'labels only (lower bound)': ('labels_few', 'few'),
    'all labels (upper bound)': ('labels_all', 'all'),
}


def train(setting: Setting, options: Config, origin: Mapping[str, Any],
          given: Collection[str] = ()) -> None:
  """Trains, or evaluates, the run and its bounds.

  Args:
    setting: how rows are dealt.
    options: what else is asked for.
    origin: what started the run, to be stored.
    given: names of options that the user gave.
  """
  is_new = options.workdir is None
  if is_new:
    options = dataclasses.replace(options, workdir=processes.once(
        lambda: _new_workdir(setting.name)))
  workdir = pathlib.Path(options.workdir or '')
  processes.once(lambda: _check_dirichlet(setting, options, workdir))
  horizon = processes.once(lambda: job_lib.schedule_rounds(options))
  options = dataclasses.replace(options, schedule_rounds=horizon)
  names = processes.once(lambda: wanted(options, workdir))
  jobs = processes.together(
      lambda: _build(setting, options, given, names, origin))
  jobs = [words.begun(job) for job in jobs]
  for job in jobs:
    processes.check_same(
        {k: v for k, v in job.config.items() if k not in config.OWN}, 'flags')
    processes.check_same(job.facts, 'data')
  if options.eval_only:
    for job in jobs:
      job_lib.evaluate(job)
    return
  runs = {}
  with contextlib.ExitStack() as stack:
    # All folders first: a refusal comes before hours of work, and no second
    # process gets between two runs.
    places = [stack.enter_context(job_lib.open_folder(job)) for job in jobs]
    if is_new and processes.is_first():
      print(f'Working in {workdir}', file=sys.stderr)
    for job, place in zip(jobs, places, strict=True):
      try:
        runs[job.name] = job_lib.run(job, place)
      except job_lib.Stopped as stopped:
        if processes.is_first():
          printing.say(f'Stopped at round {stopped.round}; the same command '
                       f'with --workdir={options.workdir} continues.')
        raise
    processes.once(lambda: _finish(workdir, runs))
  if options.report and processes.is_first():
    from fedjax_ssl.cli import report
    page = report.write([job.folder for job in jobs], workdir / 'report',
                        title=f'{setting.name}: {options.dataset}')
    printing.say(f'Report: {page}')


def _check_dirichlet(setting: Setting, options: Config, workdir: pathlib.Path
                     ) -> None:
  """Refuses --dirichlet in a new run whose setting does not read it.

  Runs stored by versions that took it go on, and a user's own setting may read
  it.
  """
  if settings.SETTINGS.get(setting.name) is not setting or (
      setting.deal is dealing.one_pool):
    return
  default = settings.defaults_of(setting.name)['dirichlet']
  # A stored run's flagfile gives the default too.
  if options.dirichlet != default and not (
      workdir / workdir_lib.CONFIG).exists():
    readers = ' and '.join(name for name, other in settings.SETTINGS.items()
                           if other.deal is dealing.one_pool)
    raise config.FieldError(
        'dirichlet', options.dirichlet, f'only {readers} read it; leave it out '
        f'or at {default}.')


def _build(setting: Setting, options: Config, given: Collection[str],
           names: Sequence[Sequence[str]], origin: Mapping[str, Any]
           ) -> list[job_lib.Job]:
  """The jobs, of which none has touched its folder."""
  dataset = data.load(options.dataset, options.data_dir, split=options.split,
                      embeddings=options.embeddings)
  options = auto.decided(options, given, dataset)
  options = convolutions.decided(options, dataset)
  deals = deal(setting, options, dataset)
  return build(dataset, deals, options, names, origin)


def deal(setting: Setting, options: Config, dataset: data.Dataset
         ) -> dict[int, data.Partition]:
  """Deals the rows of a data set, for each seed.

  Raises:
    FieldError: if the set has too few examples.
  """
  num_train = len(dataset.train.labels)
  if options.num_clients > num_train:
    raise config.FieldError(
        'num_clients', options.num_clients, 'there are more clients than the '
        f'{num_train} training examples.', dataset=options.dataset)
  if not len(dataset.test.labels):
    raise config.FieldError('dataset', options.dataset, 'no test examples.')
  return {seed: _partition(setting, options, dataset, seed)
          for seed in options.all_seeds}


def build(dataset: data.Dataset, deals: Mapping[int, data.Partition],
          options: Config, names: Sequence[Sequence[str]],
          origin: Mapping[str, Any]) -> list[job_lib.Job]:
  """Builds the jobs of a run and its bounds; see `wanted`."""
  return [job_lib.build(
      dataset, deals, name, pathlib.Path(folder), dataclasses.replace(
          options, labels=labels, method=method, seed=None,
          seeds=tuple(deals)), origin)
          for name, folder, labels, method in names]


def wanted(options: Config, workdir: pathlib.Path
           ) -> list[tuple[str, str, str, str]]:
  """(name, folder, labels, method) of the run and of the bounds it needs."""
  method = options.full_method
  name = imports.short(method) + (
      ', all labels' if options.labels == 'all' else '')
  names = [(name, str(workdir), options.labels, method)]
  if options.bounds:
    names += [(name, str(workdir / folder), labels, 'fedavg')
              for name, (folder, labels) in BOUNDS.items()
              if not options.eval_only or (workdir / folder).exists()]
  return names


def _finish(workdir: pathlib.Path, runs: dict[str, list[Any]]) -> None:
  """Prints the table and draws the curves."""
  from fedjax_ssl.report import summary
  printing.say(summary.table(runs))
  printing.say(f'Results: {workdir}')
  draw(workdir, runs)


def draw(workdir: pathlib.Path, runs: dict[str, list[Any]]) -> None:
  """Draws the curves of runs to a folder, if they are not drawn already.

  Args:
    workdir: the folder.
    runs: by name, the rows of each seed.

  Raises:
    ValueError: if the file cannot be written.
  """
  from fedjax_ssl.report import summary
  chart, drawn = workdir / 'curves.png', workdir / 'curves.partial.png'
  try:
    summary.plot_curves(runs, drawn)
    if chart.exists() and chart.read_bytes() == drawn.read_bytes():
      drawn.unlink()
    else:
      drawn.replace(chart)
  except OSError as error:
    raise ValueError(f'{chart} cannot be written: '
                     f'{error.strerror or error}.') from error


def _new_workdir(name: str) -> str:
  return os.path.join('runs', f'{name}_{time.strftime("%Y%m%d_%H%M%S")}_'
                      f'{os.getpid()}')


def _partition(setting: Setting, options: Config, dataset: data.Dataset,
               seed: int) -> data.Partition:
  """One seed's partition: from a file, or dealt."""
  labels = np.asarray(dataset.train.labels)
  if options.partition_file:
    return data.load_partition(options.partition_file, labels.size,
                               options.num_clients, labels=labels)
  if options.partition_seed is not None:
    seed = options.partition_seed
  deal = setting.deal
  if options.partition == 'natural' and dataset.owner is not None:
    deal = dealing.natural(dataset.owner)
  rng = np.random.default_rng([seed, 0x5353])
  validation = np.zeros(labels.size, bool)
  if dataset.validation is None:
    validation = data.choose_validation(
        rng, labels, fraction=options.validation_fraction)
  pool = _drawn(seed, ~validation, options.max_rows)
  labeled, unlabeled, *tasks = deal(rng, labels, pool, options)
  return data.Partition(labeled, unlabeled, validation, *tasks)


def _drawn(seed: int, pool: np.ndarray, most: int) -> np.ndarray:
  """Draws so many rows of a pool bool[D] by a generator of its own; 0: all."""
  rows = np.flatnonzero(pool)
  if not most or len(rows) <= most:
    return pool
  rng = np.random.default_rng([seed, 0x4D52])
  drawn = np.zeros_like(pool)
  drawn[rng.choice(rows, most, replace=False)] = True
  return drawn
