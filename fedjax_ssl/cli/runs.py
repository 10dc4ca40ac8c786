"""The run that the flags ask for, and its bounds: built, trained, shown."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import os
import pathlib
import sys
import time
from typing import Any

import numpy as np

from fedjax_ssl import data
from fedjax_ssl.cli import flags, printing, words
from fedjax_ssl.cli import job as job_lib
from fedjax_ssl.cli.settings import Setting
from fedjax_ssl.training import processes

FLAGS = flags.FLAGS

# Where bounds live below the workdir, by name in tables: (folder, flags).
BOUNDS = {
    'labels only (lower bound)': ('labels_few', 'few'),
    'all labels (upper bound)': ('labels_all', 'all'),
}


def train(setting: Setting, origin: Mapping[str, Any]) -> None:
  """Trains, or evaluates, the run and its bounds.

  Args:
    setting: how rows are dealt.
    origin: what started the run, to be stored.
  """
  is_new = FLAGS.workdir is None
  if is_new:
    FLAGS['workdir'].value = processes.once(lambda: _new_workdir(setting.name))
  workdir = pathlib.Path(FLAGS.workdir)
  wanted = processes.once(lambda: _wanted(workdir))
  horizon = processes.once(job_lib.schedule_rounds)
  jobs = processes.together(lambda: _build(
      setting, origin, wanted, horizon))
  jobs = [words.begun(job) for job in jobs]
  for job in jobs:
    processes.check_same(
        {k: v for k, v in job.config.items() if k not in flags.OWN}, 'flags')
    processes.check_same(job.facts, 'data')
  if FLAGS.eval_only:
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
      runs[job.name] = job_lib.run(job, place)
    processes.once(lambda: _finish(workdir, runs))


def _build(setting: Setting, origin: Mapping[str, Any],
           wanted: Sequence[Sequence[str]], horizon: int
           ) -> list[job_lib.Job]:
  """The jobs, of which none has touched its folder."""
  dataset = data.load(FLAGS.dataset, FLAGS.data_dir, split=FLAGS.split,
                      embeddings=FLAGS.embeddings)
  _check_sizes(dataset)
  deals = {seed: _partition(setting, dataset, seed) for seed in flags.seeds()}
  return [job_lib.build(dataset, deals, name, pathlib.Path(folder), labels,
                        method, horizon, origin)
          for name, folder, labels, method in wanted]


def _wanted(workdir: pathlib.Path) -> list[tuple[str, str, str, str]]:
  """(name, folder, labels, method) of the run and of the bounds it needs."""
  name = flags.method() + (', all labels' if FLAGS.labels == 'all' else '')
  wanted = [(name, str(workdir), FLAGS.labels, flags.method())]
  if FLAGS.bounds:
    wanted += [(name, str(workdir / folder), labels, 'fedavg')
               for name, (folder, labels) in BOUNDS.items()
               if not FLAGS.eval_only or (workdir / folder).exists()]
  return wanted


def _finish(workdir: pathlib.Path, runs: dict[str, list[Any]]) -> None:
  """Prints the table and draws the curves, if they are not drawn already."""
  from fedjax_ssl.report import summary
  printing.say(summary.table(runs))
  printing.say(f'Results: {workdir}')
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


def _partition(setting: Setting, dataset: data.Dataset, seed: int
               ) -> data.Partition:
  """One seed's partition: from a file, or dealt."""
  labels = np.asarray(dataset.train.labels)
  if FLAGS.partition_file:
    return data.load_partition(
        FLAGS.partition_file, labels.size, FLAGS.num_clients, labels=labels)
  if FLAGS.partition_seed is not None:
    seed = FLAGS.partition_seed
  rng = np.random.default_rng([seed, 0x5353])
  validation = np.zeros(labels.size, bool)
  if dataset.validation is None:
    validation = data.choose_validation(
        rng, labels, fraction=FLAGS.validation_fraction)
  labeled, unlabeled, *tasks = setting.deal(
      rng, labels, ~validation, flags.options())
  return data.Partition(labeled, unlabeled, validation, *tasks)


def _check_sizes(dataset: data.Dataset) -> None:
  """Raises ValueError if clients do not fit the data, or their cohort."""
  num_train = len(dataset.train.labels)
  if FLAGS.num_clients > num_train:
    raise ValueError(f'--num_clients={FLAGS.num_clients} is more than the '
                     f'{num_train} training examples of '
                     f'--dataset={FLAGS.dataset}.')
  if FLAGS.cohort_size > FLAGS.num_clients:
    raise ValueError(f'--cohort_size={FLAGS.cohort_size} is more than '
                     f'--num_clients={FLAGS.num_clients}.')
  if not len(dataset.test.labels):
    raise ValueError(f'--dataset={FLAGS.dataset} has no test examples.')
