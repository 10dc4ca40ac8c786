"""Trains a job in its folder: locked, recorded, saved, resumed, evaluated."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import io
import json
import pathlib
import sys
import time
from typing import Any, TextIO

import jax
import numpy as np

from fedjax_ssl import config, data
from fedjax_ssl.config import FieldError
from fedjax_ssl.core import run_files
from fedjax_ssl.data.datasets import tokens
from fedjax_ssl.report import printing, summary
from fedjax_ssl.running import (
  client_memory,
  start_line,
  stopping,
  stored_texts,
)
from fedjax_ssl.running.job import Job
from fedjax_ssl.training import (
  checkpoint,
  command,
  loop,
  metrics,
  offloaded,
  own_code,
  pictures,
  processes,
  progress,
  runner,
)
from fedjax_ssl.training import workdir as workdir_lib
from fedjax_ssl.training.checkpoint import sealed

# Why updates are.
LEFT_OUT = 'NaN, infinite, beyond max_update_norm, or of a negative weight'


class Stopped(processes.AgreedExit):
  """A signal ended the run; `round` is saved."""

  def __init__(self, round_: int):
    """Takes the round reached."""
    super().__init__(0)
    self.round = round_


def _check_folder(job: Job) -> None:
  """Raises ValueError unless the job continues the run of its folder."""
  processes.once(lambda: _check_setting(job))
  workdir_lib.check_workdir(
      job.folder, job.config, allow=stored_texts.may_differ(job),
      facts=job.facts)
  def look() -> None:
    _check_length(job, workdir_lib.read_config(job.folder)['flags'])
    words = tokens.load(job.folder)
    if words is not None and job.vocabulary not in (None, words):
      raise ValueError(f'{job.folder / tokens.FILE} has other words than the '
                       'texts now. Bring the old texts back.')
    for seed, partition in zip(job.seeds, job.partitions, strict=True):
      file = run_files.partition(job.folder, seed)
      if file.exists() and data.partition_hash(partition) != _hash_of(
          file, job):
        raise ValueError(f'{file} is not the partition that this run began '
                         'with. Bring the old file back, or remove it to have '
                         'it written anew.')

  processes.once(look)


def _check_setting(job: Job) -> None:
  """Refuses another setting than the folder's, which deals other rows."""
  was = command.setting_of(workdir_lib.read_config(job.folder))
  now = job.origin.get('setting', '')
  if was and now and was != now:
    raise FieldError('workdir', str(job.folder), f'holds a run of {was}, not '
                     f'of {now}; give another folder.')


def _hash_of(file: pathlib.Path, job: Job) -> str:
  """Returns the hash of a stored partition, '' if it cannot be read."""
  try:
    return data.partition_hash(data.load_partition(
        file, len(job.labels), job.options.num_clients, labels=job.labels))
  except ValueError:
    return ''


def _check_length(job: Job, stored: Mapping[str, Any]) -> None:
  """Refuses a longer run of which no added round would learn anything."""
  last, asked = start_line.last_learning(job), job.options.num_rounds
  if asked > stored.get('num_rounds', 0) >= last:
    raise FieldError(
        'num_rounds', asked, f'{job.name} learns nothing after round {last:,}, '
        f'where its schedule, {job.spec.lr_schedule}, has fallen to 0. To '
        f'train longer begin anew, elsewhere, with {asked:,} rounds. What '
        'begins with a larger schedule_rounds than its rounds can go on later.')


def open_folder(job: Job) -> workdir_lib.Workdir:
  """Locks a job's folder and stores there what a later reader needs."""
  # Together, as the others may not see the folder, and what is checked is told.
  if processes.once(lambda: run_files.holds_run(job.folder)):
    _check_folder(job)
  place = workdir_lib.open_workdir(
      job.folder, job.config, facts=job.facts, origin=job.origin,
      allow=stored_texts.may_differ(job))
  def describe() -> None:
    if place.is_read_only:
      return
    command.write(place.path)
    own_code.keep(place.path, vars(job.options))
    if job.vocabulary is not None and not (place.path / tokens.FILE).exists():
      tokens.save(place.path, job.vocabulary)
    for seed, partition in zip(job.seeds, job.partitions, strict=True):
      file = run_files.partition(place.path, seed)
      if not file.exists():
        data.save_partition(
            file, partition, num_clients=job.options.num_clients,
            labels=job.labels)

  try:
    processes.once(describe)
  except BaseException:
    place.close()
    raise
  return place


def open_folders(stack: contextlib.ExitStack, jobs: Sequence[Job]
                 ) -> list[workdir_lib.Workdir]:
  """Opens the folders of a run and its bounds until a stack is closed.

  All of them first: a refusal comes before hours of work, and no second process
  gets between two runs.
  """
  return [stack.enter_context(open_folder(job)) for job in jobs]


def run(job: Job, place: workdir_lib.Workdir, *, stream: TextIO | None = None
        ) -> list[list[summary.Row]]:
  """Trains a job to the end, from the newest checkpoint in its folder.

  Args:
    job: what `build` made.
    place: what `open_folder` opened.
    stream: where progress is shown; default: standard error.

  Returns:
    The rows, one list for each seed.

  Raises:
    Stopped: if a signal was heard; what is done is saved.
  """
  stream = (stream or sys.stderr) if processes.is_first() else io.StringIO()
  checkpoints = _checkpoints(job)
  saved = _restore(job, checkpoints)
  done = saved[0] if saved else 0
  if saved is None and processes.once(
      (place.path / run_files.ROWS).exists):  # An earlier start's.
    kept = processes.once(lambda: metrics.keep_beyond(
        place.path, job.options.checkpoint_every))
    print(f'{job.folder} has no checkpoint and starts over'
          f'{f"; its rows are kept in {kept}" if kept else ""}.', file=stream)
  seals = processes.once(
      lambda: checkpoints.metadata(done).get(sealed.FILES)) if saved else None
  if done < job.options.num_rounds:
    processes.once(place.begin)
    warnings = start_line.warnings(job) if processes.is_first() else []
    if processes.is_first():
      print(start_line.text(job, done), *warnings, sep='\n', file=stream)
    with contextlib.ExitStack() as stack:
      recorder = _Recorder(job, checkpoints, stream)
      processes.once(lambda: recorder.open(
          stack, place.path, done if saved else None, seals))
      _train(job, recorder, saved)
    for line in warnings:
      print(line, file=stream)  # Again, where the numbers are read.
  else:
    if seals:
      processes.once(lambda: metrics.cut_back(place.path, done, seals))
    print(f'{job.name} was finished at round {done}; nothing was run.',
          file=stream)
  rows = processes.once(lambda: summary.by_seed(metrics.read(place.path)))
  if not rows:
    raise ValueError(f'{place.path / run_files.ROWS} holds no rows, at round '
                     f'{done}; remove {job.folder} and run again.')
  return rows


def _checkpoints(job: Job) -> checkpoint.Checkpoints:
  """Returns the checkpoints of a job, which refuse steps of other runs."""
  return checkpoint.Checkpoints(
      job.folder / sealed.STEPS, run=sealed.identity(
          job.facts, {**job.config, **stored_texts.first(job.facts)},
          config.MAY_CHANGE))


def _restore(job: Job, checkpoints: checkpoint.Checkpoints) -> Any:
  first = job.federations[0]
  return checkpoints.restore(runner.checkpoint_template(
      job.method, first, runner.state_shape(job.method, first), job.seeds,
      client_memory.place(job.options, job.folder)))


class _Recorder:
  """Writes and shows what a job measures, and makes its checkpoints.

  Every process has one and calls the same methods; the first one has files.
  """

  def __init__(self, job: Job, checkpoints: checkpoint.Checkpoints,
               stream: TextIO):
    """Is ready to `open` its files.

    Args:
      job: what is trained.
      checkpoints: where it is saved.
      stream: where progress is shown.
    """
    self.stream = stream
    self._job, self._checkpoints = job, checkpoints
    self._writer: metrics.MetricsWriter | None = None
    self._began = time.monotonic()
    self._since = 0  # The round at which this start went on.
    self._left_out = 0  # Updates since then.
    self._warned = False  # Whether a line has told of them.
    self._accuracies: list[float] = []  # By seed, at the last evaluated round.

  def open(self, stack: contextlib.ExitStack, folder: pathlib.Path,
           done: int | None, seals: Mapping[str, sealed.Seal] | None) -> None:
    """Opens the files of rows; the stack closes them.

    Args:
      stack: of what is open.
      folder: of the files.
      done: the round of the checkpoint; None for a run that starts over.
      seals: what the checkpoint says of the files.
    """
    options, self._since = self._job.options, done or 0
    self._writer = stack.enter_context(metrics.MetricsWriter(
        folder, done, seals=seals, track=options.trackers,
        config=self._job.config))

  def observer(self, bar: progress.Progress, trained: Callable[[], None]
               ) -> loop.Observer:
    """Returns the functions that the training calls.

    Args:
      bar: shows how far it is.
      trained: called when there are rounds to save.
    """
    def on_row(row: loop.Row) -> None:
      processes.once(lambda: self._record(row, bar))

    def on_report(row: loop.Row) -> None:
      processes.once(lambda: self._write(row))

    def on_progress(round_: int) -> None:
      trained()
      if round_ < self._job.options.num_rounds:
        bar.update(round_)  # The last one comes with its accuracy.

    return loop.Observer(on_row, self._save, on_progress, on_report)

  def say_left_out(self) -> None:
    """Says how many updates this start left out, if any were."""
    if self._warned:
      since = f'since round {self._since}' if self._since else 'in all'
      print(f'{self._job.name}: {self._left_out} updates or means of them were '
            f'left out {since}.', file=self.stream)

  def _write(self, row: loop.Row, times: Mapping[str, Any] | None = None
             ) -> metrics.Row:
    assert self._writer is not None
    return self._writer.write(row.by_name(len(self._job.seeds) > 1), times)

  def _record(self, row: loop.Row, bar: progress.Progress) -> None:
    """Writes and shows an evaluated round of one seed."""
    # With what came before the rounds, and with this evaluation.
    written = self._write(row, {'seconds': time.monotonic() - self._began,
                                'since': self._since})
    self._left_out += written.get('num_rejected', 0)
    if self._left_out and not self._warned:
      self._warned = True
      print(f'{self._job.name}: {self._left_out} updates or means of them left '
            f'out from round {self._since + 1} to {row.round}: {LEFT_OUT}.',
            file=self.stream)
    self._accuracies.append(float(row.values['accuracy']))
    if row.seed == self._job.seeds[-1]:
      bar.update(row.round, float(np.mean(self._accuracies)))
      self._accuracies.clear()

  def _save(self, round_: int, saved: Any) -> None:
    """Makes a checkpoint; `training.checkpoint` tells the order of writes."""
    if self._job.options.pictures:
      processes.once(lambda: _draw(self._job, round_, saved))
    seals = processes.once(self._seals)
    self._checkpoints.save(
        round_, saved, {'seeds': self._job.seeds, sealed.FILES: seals})

  def _seals(self) -> dict[str, dict[str, Any]]:
    assert self._writer is not None
    return self._writer.seals()


def _train(job: Job, recorder: _Recorder, saved: Any) -> None:
  options = job.options
  compilation = progress.Compilation()
  bar = progress.Progress(
      job.name, options.num_rounds, start=saved[0] if saved else 0,
      stream=recorder.stream, compiled=compilation.seconds)
  with stopping.saving() as trained, compilation.listening(), bar:
    # Processes stop together, so SIGTERM saves from the very first round.
    if processes.count() > 1:
      trained()
    result = loop.train(
        job.method, job.federations, num_rounds=options.num_rounds,
        seeds=job.seeds, eval_every=options.eval_every,
        checkpoint_every=options.checkpoint_every, seed_map=options.seed_map,
        mesh=job.mesh, saved=saved, observer=recorder.observer(bar, trained),
        place=client_memory.place(options, job.folder))
    bar.close()
    recorder.say_left_out()
    if result.interrupted:
      raise Stopped(result.round)


def _draw(job: Job, round_: int, saved: Any) -> None:
  """Writes what the method generates from the first seed's state."""
  state, federation = saved[str(job.seeds[0])]['state'], job.federations[0]
  known = federation.validation
  examples = known if len(known.labels) else federation.test
  # From the host: this process alone computes.
  server = jax.tree.map(jax.device_get, state.server)
  made = job.method.pictures and job.method.pictures(
      server, examples, jax.random.key(0))
  if made is not None:
    pictures.write(job.folder / 'pictures' / f'round_{round_:05d}.png', made)


def newest(job: Job) -> tuple[int, Any]:
  """Returns the round of the newest checkpoint, and what it holds.

  Raises:
    FieldError: if there is none.
  """
  found = _restore(job, _checkpoints(job))
  if found is None:
    raise FieldError('workdir', job.folder, 'holds no checkpoint that can be '
                     'evaluated.')
  return found


def evaluate(job: Job) -> None:
  """Evaluates the newest checkpoint, prints it, and writes nothing."""
  _check_folder(job)
  round_, saved = newest(job)
  runs = offloaded.runs(
      job.method, job.federations, job.seeds, job.mesh,
      client_memory.place(job.options, job.folder), reads_only=True)
  runs.start(saved)
  for row in runs.scores(round_):
    plain = metrics.to_plain(row.by_name(True))
    if processes.is_first():
      printing.say(json.dumps({'run': job.name, **plain}))
