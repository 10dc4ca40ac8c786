"""Mirrors rows to TensorBoard, Weights & Biases or MLflow, each row once.

Each is written by its own client, to the place that its own environment
variables name: WANDB_MODE and WANDB_PROJECT, MLFLOW_TRACKING_URI and
MLFLOW_EXPERIMENT_NAME. TensorBoard's files stand in the workdir, and so do
wandb's under WANDB_MODE=offline and, without a server, MLflow's database.

`tracked_<name>.json` in the workdir says what the tracker calls the run, and
which rows it has. A run that was stopped goes on in the same place: rows that
it measures again are not sent again, and rows that had not arrived are sent
first.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import importlib.util
import json
import os
import pathlib
import time
from typing import Any, NamedTuple, Protocol
import uuid

from absl import logging

from fedjax_ssl.core import disk

Row = Mapping[str, Any]
# Name: the package that it needs.
PACKAGES = {'tensorboard': 'tensorboardX', 'wandb': 'wandb', 'mlflow': 'mlflow'}
_PROJECT = 'fedjax_ssl'
_MOST_PARAMS = 100  # In one message to MLflow.
_LONGEST_PARAM = 500  # Characters; its limit on older servers.


class Place(NamedTuple):
  """Where a tracker is to write.

  Attributes:
    folder: the run's.
    config: flags of the run.
    run: what the tracker calls the run.
    known: whether the run was begun there before.
    purge: first round of which the tracker has no row, or should have none.
  """

  folder: pathlib.Path
  config: Mapping[str, Any]
  run: str
  known: bool
  purge: int


class Tracker(Protocol):
  """A place that rows are mirrored to."""

  run: str  # The tracker's name for the run, which it may choose itself.

  def write(self, row: Row) -> None:
    """Sends the numbers of a row."""

  def close(self) -> None:
    """Waits until everything has arrived."""


def lacking(names: Sequence[str]) -> str:
  """Returns what is wrong with the trackers asked for; '' if nothing is."""
  for name in names:
    if name not in PACKAGES:
      return f'{name!r} is none of {", ".join(PACKAGES)}.'
  for name in names:
    package = PACKAGES[name]
    try:
      found = importlib.util.find_spec(package) is not None
    except ValueError:  # A module that was put into sys.modules by hand.
      found = True
    if not found:
      return (f"{name} needs the package {package}: pip install -e '.[{name}]' "
              "in this repository's folder.")
  return ''


class Mirror:
  """Sends each row to one tracker once, whatever happens to the run."""

  def __init__(self, name: str, folder: pathlib.Path,
               config: Mapping[str, Any], last: int, rows: Sequence[Row]):
    """Continues or begins a run at the tracker; sends the rows it lacks.

    Args:
      name: one of `PACKAGES`.
      folder: the run's.
      config: its flags.
      last: round of the restored checkpoint; -1 for a run that starts over,
        which is another run there.
      rows: those of the run so far.
    """
    self._name, self._file = name, folder / f'tracked_{name}.json'
    stored = self._stored() if last >= 0 else None
    self._rounds: dict[str, int] = (stored or {}).get('rounds', {})
    # Boards of earlier versions have all rows and no file.
    self._before = (last if stored is None and (folder / name).exists() else -1)
    purge = 1 + max([self._before, *self._rounds.values()])
    self._tracker: Tracker | None = _OPEN[name](Place(
        folder, config, (stored or {}).get('run') or uuid.uuid4().hex[:16],
        stored is not None, purge))
    self._run = self._tracker.run
    self._store()
    for row in rows:
      self.write(row)

  def _stored(self) -> dict[str, Any] | None:
    try:
      found = json.loads(self._file.read_bytes())
      return {'run': str(found['run']), 'rounds': {
          str(seed): int(round_) for seed, round_ in found['rounds'].items()}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
      return None

  def _store(self) -> None:
    disk.replace(self._file, json.dumps(
        {'run': self._run, 'rounds': self._rounds}).encode())

  def write(self, row: Row) -> None:
    """Sends a row that is not there yet; if that fails, the run goes on."""
    seed = str(row.get('seed', ''))
    if self._tracker is None or (
        row['round'] <= self._rounds.get(seed, self._before)):
      return
    try:
      self._tracker.write(row)
    except Exception as error:  # A network may fail in many ways.
      logging.warning('%s took no row of round %d: %s. The run goes on without '
                      'it; the rows are sent when it is continued.',
                      self._name, row['round'], error)
      self._tracker = None
      return
    self._rounds[seed] = row['round']
    self._store()

  def close(self) -> None:
    """Waits until all rows have arrived."""
    if self._tracker is None:
      return
    try:
      self._tracker.close()
    except Exception as error:
      logging.warning('%s was not closed: %s.', self._name, error)


def _numbers(row: Row) -> dict[str, float]:
  """The numbers of a row, by name; with its seed in the name if it has one."""
  group = f'seed_{row["seed"]}/' if 'seed' in row else ''
  return {group + name: value for name, value in row.items()
          if name not in ('round', 'seed') and isinstance(value, int | float)}


class _TensorBoard:
  """Event files under `<workdir>/tensorboard`."""

  def __init__(self, place: Place):
    import tensorboardX
    self.run = place.run
    self._board = tensorboardX.SummaryWriter(
        str(place.folder / 'tensorboard'), purge_step=place.purge,
        # Two starts within a second would write the same file.
        filename_suffix=f'.{place.purge}')

  def write(self, row: Row) -> None:
    for name, value in _numbers(row).items():
      self._board.add_scalar(name, value, row['round'])
    self._board.flush()

  def close(self) -> None:
    self._board.close()


class _Wandb:
  """A run of Weights & Biases; the round is its step."""

  def __init__(self, place: Place):
    os.environ.setdefault('WANDB_ERROR_REPORTING', 'false')
    import wandb
    self.run = place.run
    self._run = wandb.init(
        project=os.environ.get('WANDB_PROJECT') or _PROJECT,
        dir=place.folder, id=place.run, resume='allow',
        name=place.folder.name, config=dict(place.config),
        reinit='create_new', settings=wandb.Settings(
            console='off', silent=True))

  def write(self, row: Row) -> None:
    self._run.log(_numbers(row), step=row['round'])

  def close(self) -> None:
    self._run.finish()


class _Mlflow:
  """A run of MLflow; the round is the step."""

  def __init__(self, place: Place):
    os.environ.setdefault('MLFLOW_DISABLE_TELEMETRY', 'true')
    import mlflow
    from mlflow import entities
    self._entities = entities
    self._client = mlflow.MlflowClient(
        os.environ.get('MLFLOW_TRACKING_URI')
        or f'sqlite:///{place.folder.resolve()}/mlflow.db')
    if place.known:
      self.run = place.run
      self._client.update_run(self.run, status='RUNNING')
      return
    title = os.environ.get('MLFLOW_EXPERIMENT_NAME') or _PROJECT
    known = self._client.get_experiment_by_name(title)
    experiment = (known.experiment_id if known
                  else self._client.create_experiment(title))
    made = self._client.create_run(experiment, run_name=place.folder.name)
    self.run = made.info.run_id
    params = [entities.Param(name, str(value)[:_LONGEST_PARAM])
              for name, value in place.config.items() if value is not None]
    for i in range(0, len(params), _MOST_PARAMS):
      self._client.log_batch(self.run, params=params[i:i + _MOST_PARAMS])

  def write(self, row: Row) -> None:
    now = int(1000 * time.time())
    self._client.log_batch(self.run, metrics=[
        self._entities.Metric(name, value, now, row['round'])
        for name, value in _numbers(row).items()])

  def close(self) -> None:
    self._client.set_terminated(self.run)


_OPEN: dict[str, Callable[[Place], Tracker]] = {
    'tensorboard': _TensorBoard, 'wandb': _Wandb, 'mlflow': _Mlflow}
