"""The run that the flags ask for, and its bounds: built, trained, shown."""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
import contextlib
import dataclasses
import os
import pathlib
import shlex
import sys
import time
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl import config, data
from fedjax_ssl import task as task_lib
from fedjax_ssl.config import Config
from fedjax_ssl.core import (
  bounds,
  checks,
  imports,
  run_files,
)
from fedjax_ssl.core.checks import FieldError
from fedjax_ssl.report import canvas, pairs, printing, study, summary
from fedjax_ssl.running import (
  convolutions,
  data_defaults,
  dealing,
  execution,
  partitions,
  settings,
  stopping,
  stored_texts,
)
from fedjax_ssl.running import job as job_lib
from fedjax_ssl.running.settings import Setting
from fedjax_ssl.training import processes
from fedjax_ssl.training import workdir as workdir_lib

# The data, the options as they decide them, and each seed's deal.
Dealt = tuple[data.Dataset, Config, Mapping[int, data.Partition]]


class Planned(NamedTuple):
  """A run, or a bound of one, before it is built."""

  name: str  # In tables.
  folder: str
  labels: str  # As `Config.labels`.
  method: str


def train(setting: Setting, options: Config, origin: Mapping[str, Any],
          given: Collection[str] = ()) -> list[pathlib.Path]:
  """Trains, or evaluates, the run and its bounds.

  Args:
    setting: how rows are dealt.
    options: what else is asked for.
    origin: what started the run, to be stored.
    given: names of options that the user gave.

  Returns:
    The folders of what was trained, the run's own first; none if they cannot
    be written.
  """
  is_new = options.workdir is None
  if is_new:
    options = dataclasses.replace(options, workdir=processes.once(
        lambda: _new_workdir(setting.name)))
  workdir = pathlib.Path(options.workdir or '')
  jobs = prepared(setting, options, origin,
                  lambda options: deal(setting, options, given, data.load(
                      options.dataset, options.data_dir, split=options.split,
                      embeddings=options.embeddings)))
  if options.eval_only:
    for job in jobs:
      execution.evaluate(job)
    return []
  runs = {}
  with contextlib.ExitStack() as stack:
    places = execution.open_folders(stack, jobs)
    stack.enter_context(stopping.working_in(options.workdir or ''))
    if is_new and processes.is_first():
      print(f'Working in {workdir}', file=sys.stderr)
    for job, place in zip(jobs, places, strict=True):
      try:
        runs[job.name] = execution.run(job, place)
      except execution.Stopped as stopped:
        if processes.is_first():
          printing.say(f'Stopped at round {stopped.round}; the same command '
                       f'with {stopping.given(options.workdir or "")} '
                       'continues.')
        raise
    writes = not places[0].is_read_only
    processes.once(lambda: _finish(workdir, jobs, runs,
                                   draws=writes,
                                   report=writes and options.report))
  return [job.folder for job in jobs] if writes else []


def prepared(setting: Setting, options: Config, origin: Mapping[str, Any],
             dealt: Callable[[Config], Dealt]) -> list[job_lib.Job]:
  """Builds and checks the jobs of a run and its bounds; no folder is touched.

  Args:
    setting: how rows are dealt.
    options: what else is asked for, with a workdir.
    origin: what started the run, to be stored.
    dealt: gives the data, the options as they decide them, each seed's deal.
  """
  workdir = pathlib.Path(options.workdir or '')
  if options.partition != 'natural':  # Else the data are asked first.
    processes.once(lambda: check_read(setting, options))
  horizon = processes.once(lambda: job_lib.schedule_rounds(options))
  options = dataclasses.replace(options, schedule_rounds=horizon)
  # As lists where they come from another process.
  plan = [Planned(*one) for one in processes.once(
      lambda: wanted(options, workdir))]
  # Before the data, which may take long to read.
  processes.once(lambda: task_lib.check_texts(
      {**vars(options), 'method': options.full_method}))
  dataset, options, deals = processes.together(lambda: dealt(options))
  options = convolutions.decided(options, dataset, deals)
  begun = processes.once(
      lambda: [one.folder for one in plan
               if run_files.holds_run(one.folder)])
  jobs = processes.together(
      lambda: build(dataset, deals, options, plan, origin, begun))
  # Once more: the data may name the clients.
  processes.once(lambda: check_read(setting, jobs[0].options))
  note_unread(setting, jobs[0].options, dataset)
  _note_absent(jobs[0])
  jobs = [stored_texts.begun(job) for job in jobs]
  for job in jobs:
    processes.check_same(
        {k: v for k, v in job.config.items() if k not in config.PER_PROCESS},
        'flags')
    processes.check_same(job.facts, 'data')
  return jobs


def check_read(setting: Setting, options: Config) -> None:
  """Refuses options such as --alpha in a new run that does not read them.

  Runs that were stored by versions which took them go on, and a user's own way
  of dealing may read them.

  Args:
    setting: how rows are dealt.
    options: what is asked for.

  Raises:
    FieldError: for such an option that is not at its default.
  """
  if run_files.holds_run(options.workdir):
    return
  given = _given(setting, options)
  if options.partition_file:
    for name in sorted(given & config.HOW_MANY):
      raise FieldError(name, getattr(options, name), 'the file says which rows '
                       'are labeled; leave it out.',
                       partition_file=options.partition_file)
  natural = options.partition == 'natural'
  read = frozenset() if natural else dealing.reads(setting.deal)
  for name in sorted(given & {*dealing.SKEWS} - read):
    default = _default(setting, name)
    raise FieldError(
        name, getattr(options, name),
        f'the data name the clients; leave it out or at {default}, or give '
        'partition=setting to have the rows dealt.' if natural else
        f'only {_readers(name)} read it; leave it out or at {default}.')


def note_unread(setting: Setting, options: Config, dataset: data.Dataset
                ) -> None:
  """Says which options a new run does not read because of other ones.

  Unlike those of `check_read` they may stand in a flagfile of other runs.

  Args:
    setting: how rows are dealt.
    options: what is asked for.
    dataset: the examples.
  """
  if not processes.is_first() or run_files.holds_run(
      options.workdir):
    return
  given = _given(setting, options)
  if setting.any_data and options.dataset == setting.defaults['dataset']:
    processes.note(
        f'comes with the library; {checks.option("dataset", "NAME")} and '
        f'{checks.option("data_dir", "DIR")} train on your own data.',
        dataset=options.dataset)
  if given & {'num_labeled_clients'} and options.labels_at == 'server' and (
      dealing.rule_of(setting.deal) == 'pool'):
    processes.note('does nothing: the server has all labels.',
                   num_labeled_clients=options.num_labeled_clients)
  if options.local_steps and given & {'local_epochs'}:
    processes.note(
        'does not say how long clients train: each takes '
        f'{checks.option("local_steps", options.local_steps)}. With 0 it is by '
        'epochs.',
        local_epochs=options.local_epochs)
  if options.partition_file:
    for name in sorted(given & {'min_size', 'partition_seed',
                                'validation_fraction', *dealing.SKEWS}):
      processes.note(
          f'does nothing: {checks.option("partition_file")} says whose row is '
          'whose.', **{name: getattr(options, name)})
  elif dataset.validation is not None and given & {'validation_fraction'} and (
      options.validation_fraction):
    processes.note('does nothing: the data have a validation part.',
                   validation_fraction=options.validation_fraction)


def _note_absent(job: job_lib.Job) -> None:
  """Says that the partition file of a new run has no row of the last clients.

  Where the server has all rows of a file it says nothing.
  """
  file, total = job.options.partition_file, job.options.num_clients
  if not file or run_files.holds_run(job.folder):
    return
  first = job.partitions[0]
  count = 1 + max(first.labeled[first.labeled < total].max(initial=-1),
                  first.unlabeled.max(initial=-1))
  if 0 < count < total:
    who = (f'client {count}' if count + 1 == total else
           f'the clients {count} to {total - 1}')
    processes.note(
        f'has no row of {who}; give {checks.option("num_clients", count)} if '
        'there are no more.', partition_file=file)


def _given(setting: Setting, options: Config) -> set[str]:
  """Names of options with a value of the user's; a flagfile gives defaults."""
  return {name for name in config.OPTIONS if getattr(options, name) not in (
      None, _default(setting, name))}


def _default(setting: Setting, name: str) -> Any:
  return setting.defaults.get(name, config.OPTIONS[name].default)


def _readers(name: str) -> str:
  *others, last = [setting.name for setting in settings.SETTINGS.values()
                   if name in dealing.reads(setting.deal)]
  return f'{", ".join(others)} and {last}'


def deal(setting: Setting, options: Config, given: Collection[str],
         dataset: data.Dataset, partition: data.Partition | None = None
         ) -> Dealt:
  """Deals the data, once they and the options have decided the others.

  Args:
    setting: how rows are dealt.
    options: what is asked for.
    given: names that the user gave.
    dataset: the examples.
    partition: how they are dealt, for all seeds, if that is given.

  Raises:
    FieldError: see `data_defaults.decided`, and for what cannot be dealt; it
      says so where the folder holds a run on other data.
  """
  try:
    options = decided(setting, options, given, dataset)
    return dataset, options, (
        partitions.deal(setting, options, dataset) if partition is None else
        dict.fromkeys(options.all_seeds, partition))
  except FieldError as error:
    facts = workdir_lib.stored_config(options.workdir).get('facts', {})
    known = facts.get('data_hash')
    if known is None or known == job_lib.data_hash(dataset):
      raise
    raise error.because(
        f'{options.workdir} holds a run on other data, and these cannot be '
        f'dealt as those were: {error.reason}') from None


def decided(setting: Setting, options: Config, given: Collection[str],
            dataset: data.Dataset) -> Config:
  """Returns the options with what the data, or each other, decide.

  Where the first clients hold all labels, no default says how many there are.
  Of a user's own data of which some rows have no label, all known labels count:
  nobody hides labels that are rare.

  Args:
    setting: how rows are dealt.
    options: what is asked for.
    given: names that the user gave.
    dataset: the examples.

  Raises:
    FieldError: see `data_defaults.decided`.
  """
  options = data_defaults.decided(options, given, dataset)
  own = setting.any_data
  if config.HOW_MANY.intersection(given):
    return options
  if dealing.holders_alone(options):
    if own or options.partition == 'natural':
      options = dataclasses.replace(
          options, labels_per_class=None, labeled_fraction=None)
  elif own and not options.partition_file and (
      np.asarray(dataset.train.labels) < 0).any():
    options = dataclasses.replace(
        options, labels_per_class=None, labeled_fraction=1.0)
  return options


def build(dataset: data.Dataset, deals: Mapping[int, data.Partition],
          options: Config, plan: Sequence[Planned],
          origin: Mapping[str, Any], begun: Collection[str]
          ) -> list[job_lib.Job]:
  """Builds the jobs of a run and its bounds; see `wanted`.

  Their folders are not touched, nor looked at. Where the data have no more
  labels than the run gets, nobody can train on all, and that bound is left out.
  """
  truth = np.asarray(dataset.train.labels)
  if (truth < 0).any() and not any(
      (truth[deal.unlabeled >= 0] >= 0).any() for deal in deals.values()):
    first, *beside = plan
    if first.labels == 'all':
      raise FieldError(
          'labels', 'all', f'{int((truth < 0).sum())} of {len(truth)} rows '
          'have no label, and none a hidden one; leave it out.')
    plan = [first, *(bound for bound in beside if bound.labels != 'all')]
    if len(plan) <= len(beside):
      processes.note('No upper bound is run: no row has a label that is '
                     'hidden.')
  jobs = [job_lib.build(
      dataset, deals, one.name, pathlib.Path(one.folder), dataclasses.replace(
          options, labels=one.labels, method=one.method, seed=None,
          seeds=tuple(deals)), origin, has_begun=one.folder in begun)
          for one in plan]
  if options.pictures and all(job.method.pictures is None for job in jobs):
    processes.note(f'does nothing: {jobs[0].name} generates nothing to draw; '
                   'fedssl does.', pictures=options.pictures)
  return jobs


def wanted(options: Config, workdir: pathlib.Path) -> list[Planned]:
  """Lists the run, and the bounds that it needs."""
  method = options.full_method
  # The name leaves out what is at its default.
  beside = [getattr(options, name) for name in (
      'aggregator', 'server_optimizer', 'attack')
            if getattr(options, name) != config.OPTIONS[name].default]
  beside += ['all labels'] if options.labels == 'all' else []
  name = ', '.join(map(imports.short, [method, *beside]))
  plan = [Planned(name, str(workdir), options.labels, method)]
  if options.bounds:
    plan += [Planned(name, str(place), labels, 'fedavg')
             for labels, name in bounds.NAMES.items()
             if (place := workdir / bounds.folder(labels)).exists()
             or not options.eval_only]
  return plan


def _finish(workdir: pathlib.Path, jobs: Sequence[job_lib.Job],
            runs: dict[str, list[Any]], *, draws: bool, report: bool) -> None:
  """Draws the curves and prints the table, which the terminal may refuse."""
  if draws:
    draw(workdir, runs)
  printing.say(summary.table(
      runs,
      nominal=[job.name for job in jobs if study.is_nominal(job.spec.method)],
      below=study.deltas(
          (job.name, study.delta(job.facts['choices'])) for job in jobs
          if any(rows[-1].get('epsilon') is not None
                 for rows in runs[job.name]))))
  few = summary.few_rows([rows for seeds in runs.values() for rows in seeds],
                         jobs[0].facts['federation']['num_validation'])
  if few:
    printing.say(f'{few}.\n')
  if gain := pairs.gain(next(iter(runs)), runs):
    printing.say(f'{gain}\n')
  printing.say(f'Results: {workdir}' + ('' if report else (
      '; as a page: fedjax-ssl report '
      f'{shlex.quote(str(workdir))} --out=FOLDER')))


def draw(workdir: pathlib.Path, runs: dict[str, list[Any]]) -> None:
  """Draws the curves of runs to a folder, if they are not drawn already.

  Args:
    workdir: the folder.
    runs: by name, the rows of each seed.

  Raises:
    ValueError: if the file cannot be written.
  """
  try:
    canvas.write(summary.curves(runs), workdir / 'curves.png')
  except OSError as error:  # Matplotlib's, which finds no room for its cache.
    processes.note(f'curves.png is not drawn: {checks.one_line(error)}')


def _new_workdir(name: str) -> str:
  return os.path.join('runs', f'{name}_{time.strftime("%Y%m%d_%H%M%S")}_'
                      f'{os.getpid()}')
