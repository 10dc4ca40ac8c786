"""What `fit` returns: the trained model, what was measured, and more of it."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import operator
import os
import pathlib
import shutil
import tempfile
from typing import Any, TextIO
import warnings
import weakref

import jax
import numpy as np

from fedjax_ssl import finished
from fedjax_ssl import task as task_lib
from fedjax_ssl.config import Config, FieldError
from fedjax_ssl.core import checks
from fedjax_ssl.core.types import Array, Federation, State
from fedjax_ssl.report import canvas, summary, verdict
from fedjax_ssl.running import client_memory, execution, runs, stopping
from fedjax_ssl.running import job as job_lib
from fedjax_ssl.training import columns, offloaded, runner
from fedjax_ssl.training import per_client as per_client_lib


def _depth() -> int:
  """Counts the frames from the caller to the first that is not of here."""
  depth, frame = 1, inspect.currentframe()
  while frame and frame.f_back and str(
      frame.f_back.f_globals.get('__name__')).startswith('fedjax_ssl.'):
    depth, frame = depth + 1, frame.f_back
  return depth


class Temporary:
  """A folder that is removed with the last run that holds this."""

  def __init__(self):
    """Makes the folder, `name`."""
    self.name = tempfile.mkdtemp(prefix='fedjax_ssl_')
    self.cleanup = weakref.finalize(self, shutil.rmtree, self.name,
                                    ignore_errors=True)


class Run:
  """A run of `fit`.

  Attributes:
    name: of the method, with its knobs.
    options: all that it was told; `config.json` has what it was trained with.
    round: rounds done.
    metrics: by name, float64[evaluations] of what was measured; with `round`,
      and `seed` if there are several. `pandas.DataFrame` takes it.
    class_metrics: the same for metrics with one number for each class, each
      float64[evaluations, C].
    states: the State of each seed; in most methods its `server.model` holds the
      model's variables, params and stats. With client_memory='disk' it reads
      what clients keep from the run's file, which a `resume` writes on.
    federations: the Federation of each seed.
    bounds: the runs of the two bounds by name, if the option bounds is given.
  """

  def __init__(self, jobs: Sequence[job_lib.Job],
               temporary: Temporary | None = None, *,
               stream: TextIO | None = None):
    """Gets ready to train; see `resume`.

    Args:
      jobs: the run and its bounds.
      temporary: the folder of a run that leaves nothing behind.
      stream: where progress is shown; default: standard error.
    """
    self._job, self._temporary, self._stream = jobs[0], temporary, stream
    self.name, self.round = self._job.name, 0
    self.states: dict[int, State] = {}
    self.metrics: dict[str, np.ndarray] = {}
    self.class_metrics: dict[str, np.ndarray] = {}
    self._rows: list[list[summary.Row]] = []
    self._finished: finished.LoadedRun | None = None
    self.bounds = {job.name: Run([job], temporary, stream=stream)
                   for job in jobs[1:]}

  def __repr__(self) -> str:
    return columns.text(f'Run of {self.name} ', self.round, self.states,
                        self.metrics)

  @property
  def options(self) -> Config:
    """Returns what the run was told."""
    return self._job.options

  @property
  def workdir(self) -> pathlib.Path | None:
    """Returns the folder of the run; None if it leaves nothing behind."""
    return None if self._temporary else self._job.folder

  @property
  def class_names(self) -> tuple[str, ...]:
    """Returns the names of the columns of `predict`; () for numbers."""
    return tuple(self._job.facts.get('class_names', ()))

  @property
  def federations(self) -> dict[int, Federation]:
    """Returns the federation of each seed."""
    return dict(zip(self._job.seeds, self._job.federations, strict=True))

  @property
  def state(self) -> State:
    """Returns the state of the first seed."""
    return next(iter(self.states.values()))

  def resume(self, rounds: int) -> Run:
    """Continues the training, up to so many rounds in all.

    Schedules and ramps span the rounds that were asked for first, unless `fit`
    was given schedule_rounds. Where the schedule ends at a rate of 0, as the
    default's cosine does, no more rounds than that are taken.

    Args:
      rounds: those done before included.

    Raises:
      FieldError: if more rounds are done already, or all added ones would
        have a rate of 0.
      KeyboardInterrupt: if a signal was heard; what is done is saved.
    """
    if not isinstance(rounds, bool):
      with contextlib.suppress(TypeError):  # Said with the other options.
        rounds = operator.index(rounds)
    if isinstance(rounds, int) and rounds < self.round:
      raise FieldError('num_rounds', rounds, 'the run is at round '
                       f'{self.round}; give as many or more.')
    everyone = [self, *self.bounds.values()]
    begun = [run.round for run in everyone]
    jobs = [run._job._replace(options=dataclasses.replace(
        run._job.options, num_rounds=rounds)) for run in everyone]
    with contextlib.ExitStack() as stack:
      places = execution.open_folders(stack, jobs)
      for run, job, place in zip(everyone, jobs, places, strict=True):
        run._job = job
        try:
          run._train(place)
        except execution.Stopped as stopped:
          stopping.answered()  # The error tells of them; the process goes on.
          goes_on = ('' if self._temporary else '; the same call with workdir='
                     f'{str(self._job.folder)!r} continues')
          raise KeyboardInterrupt(f'{run.name} stopped at round '
                                  f'{stopped.round}{goes_on}') from None
      if self._temporary is None and not places[0].is_read_only:
        runs.draw(self._job.folder, {run.name: run._rows for run in everyone})
    for run, since in zip(everyone, begun, strict=True):
      run._warn(since)
    return self

  def _train(self, place: Any) -> None:
    """Trains, and reads back what the folder holds."""
    job = self._job
    self._rows = execution.run(job, place, stream=self._stream)
    self.round, saved = execution.newest(job)
    self.states = offloaded.finished(
        client_memory.place(job.options, job.folder),
        runner.state_shape(job.method, job.federations[0]),
        {seed: saved[str(seed)]['state'] for seed in job.seeds})
    rows = sorted((row for seed in self._rows for row in seed),
                  key=lambda row: row['round'])
    self.metrics = columns.scalars(rows)
    self.class_metrics = columns.lists(rows)
    self._finished = finished.make(
        job.spec, task_lib.make_task(job.spec), job.method, self.states,
        self.round, job.facts, job.vocabulary)

  def _warn(self, since: int) -> None:
    """Warns where the numbers mislead, as the programs say; of rounds since."""
    ends = [verdict.of(rows[-1]) if rows else None for rows in self._rows]
    diverged = [v if v and v.kind == verdict.DIVERGED else None for v in ends]
    said = verdict.footnotes([(self.name, diverged)])
    lost = sum(int(row.get('num_rejected', 0))
               for rows, gone in zip(self._rows, diverged, strict=True)
               if gone is None for row in rows if row['round'] > since)
    if lost and self._stream is not None:  # Else a line has told of them.
      said.append(f'{self.name}: {lost} updates or means of them left out from '
                  f'round {since + 1} on: {execution.LEFT_OUT}.')
    for text in said:
      warnings.warn(text, stacklevel=_depth())

  @property
  def _model(self) -> finished.LoadedRun:
    if self._finished is None:
      raise ValueError('the run has not been trained.')
    return self._finished

  def predict(self, inputs: finished.Inputs, seed: int | None = None
              ) -> jax.Array:
    """Computes logits float32[B, C]; see `finished.LoadedRun.predict`.

    Args:
      inputs: images as stored, uint8[B, H, W, C] or [B, H, W]; paths of image
        files, of one, or of a folder of them; or texts.
      seed: which of the run's seeds; the first by default.
    """
    return self._model.predict(inputs, seed)

  def classify(self, inputs: finished.Inputs, seed: int | None = None
               ) -> list[tuple[str, float]]:
    """Returns the class of each input by name, and its probability.

    Args:
      inputs: as `predict` takes them.
      seed: which of the run's seeds; the first by default.
    """
    return self._model.classify(inputs, seed)

  def evaluate(self, inputs: finished.Inputs,
               labels: Array | Sequence[str], seed: int | None = None
               ) -> dict[str, Any]:
    """Judges the model on data of your own; see `finished.LoadedRun.evaluate`.

    Args:
      inputs: as `predict` takes them.
      labels: int[B] classes, or their names.
      seed: which of the run's seeds; the first by default.
    """
    return self._model.evaluate(inputs, labels, seed)

  def per_client(self, seed: int | None = None) -> dict[str, np.ndarray]:
    """Returns how good the models are for each client, in one row for each.

    Args:
      seed: which of the run's seeds; the first by default.

    Returns:
      By name an array [N]: client, its name where the data have one, rows,
      labels, accuracy on test rows weighed as the client's classes are and,
      where clients keep their models, local_accuracy; see
      `training.per_client`.
    """
    self._model.check_seed(seed)
    seed = self._job.seeds[0] if seed is None else seed
    found = per_client_lib.table(self._judges, self.states[seed],
                                 self.federations[seed])
    names = self._job.facts.get('client_names')
    return found if names is None else {
        'client': found.pop('client'), 'name': np.array(names), **found}

  @functools.cached_property
  def _judges(self) -> per_client_lib.Programs:
    return per_client_lib.programs(self._job.method)

  def plot(self, *panels: str, beside: Run | Iterable[Run] = (),
           path: str | os.PathLike[str] | None = None) -> Any:
    """Draws metrics over the rounds, with the bounds if there are any.

    Args:
      *panels: names of metrics; default: accuracy and loss.
      beside: another run to draw too, or several. One of a name that is taken
        is numbered.
      path: file to write as well: png, pdf or svg.

    Returns:
      A figure of matplotlib, which notebooks show.

    Raises:
      ValueError: for what is no metric, with one number a round, of any of the
        runs, or a file that cannot be written.
      TypeError: for anything but runs beside.
    """
    if isinstance(beside, finished.LoadedRun):  # It would be taken for several.
      raise TypeError('beside takes a run of fit, or several, and no loaded '
                      'one; fit(workdir=FOLDER) returns the run of a folder.')
    others = [*beside] if isinstance(beside, Iterable) else [beside]
    for run in others:
      if not isinstance(run, Run):
        raise TypeError('beside takes a run of fit, or several, and no '
                        f'{type(run).__name__}.')
    rows: dict[str, list[list[summary.Row]]] = {}
    for run in (self, *self.bounds.values(), *others):
      called = itertools.chain(
          [run.name], (f'{run.name} ({i})' for i in itertools.count(2)))
      rows[next(name for name in called if name not in rows)] = run._rows
    for panel in panels:
      if not isinstance(panel, str):
        raise TypeError(f'panels are names of metrics, not {panel!r}.')
      checks.check('metric', panel, summary.drawable(rows))
    chart = summary.curves(rows, panels=panels or ('accuracy', 'loss'))
    if path is not None:
      canvas.write(chart, path)
    def png() -> bytes:
      file = io.BytesIO()
      chart.savefig(file, format='png', dpi=100)
      return file.getvalue()
    chart._repr_png_ = png  # What notebooks ask for.
    return chart

  def save(self, path: str | os.PathLike[str], seed: int | None = None
           ) -> None:
    """Writes the global model: arrays by name, for `numpy.load`.

    `fedjax_ssl.load(path)` predicts with it. In another process what the run
    had of your own by name alone, not by its file, is registered there first.

    Args:
      path: of the file, which should end with .npz.
      seed: which of the run's seeds; the first by default.

    Raises:
      ValueError: if there is no global model.
    """
    self._model.save(path, seed)
