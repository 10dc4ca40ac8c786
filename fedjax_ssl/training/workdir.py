"""The folder of one run: one process at a time, one configuration for ever.

  config.json        flags, script, versions, commit, devices of the first start
  run.flags          all flags, for --flagfile
  partition_*.npz    who owns which row, a file a seed
  vocabulary.txt     words of texts (`data.datasets.tokens`)
  code/              copies of the user's own code (`training.own_code`)
  metrics.jsonl      what was measured, a row a line (`training.metrics`)
  timings.jsonl      how long it took
  checkpoints/       the newest steps (`training.checkpoint`)
  memory/            what clients keep, if on disk (`training.client_rows`)
  pictures/          what a generator makes, with --pictures
  curves.png         accuracy over the rounds, of a finished run
  labels_few/        bounds, runs of their own, and labels_all/ (`core.bounds`)
  lock               held by the running process, which it names; else empty

The lock is `flock`: the kernel frees it when the process ends, however it
ends, so the file that stays behind means nothing.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
import contextlib
import errno
import functools
import json
import math
import os
import pathlib
import shlex
import socket
from typing import Any

from absl import logging

from fedjax_ssl.core import checks, disk, run_files
from fedjax_ssl.core.run_files import (
  CONFIG,
  FLAGFILE,
  holds_run,
  LOCK,
  ROWS,
  TIMINGS,
)
from fedjax_ssl.training import changes as changes_lib
from fedjax_ssl.training import environment, processes
from fedjax_ssl.training.checkpoint import manifest, sealed

FIT = 'fedjax_ssl.fit'  # The script of a run that was given its data.
# Faults of a folder that cannot be written, but perhaps read.
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
# Files that only a run leaves; without a config they belong to no run.
_TRACES = (ROWS, TIMINGS, sealed.STEPS)
# Facts of the data that a run is on; others are of what is made of them.
_OF_DATA = ('data_hash', 'partition_hash', 'federation', 'class_names',
            'client_names')


class WorkdirError(ValueError):
  """The folder cannot be used for this run; the message says why."""


class UnusableError(WorkdirError, checks.FieldError):
  """No folder can be made or written there."""


class InUseError(WorkdirError):
  """Another process holds the folder."""

  may_pass = True  # It will end.


class Workdir:
  """An opened folder; leave it with `close` or a `with` block.

  Attributes:
    path: the folder, absolute.
    is_read_only: whether it cannot be written, and holds a finished run.
  """

  def __init__(self, path: pathlib.Path, lock: int | None,
               note: Callable[[], None] | None, *, is_read_only: bool):
    """Is called by `open_workdir`; `note` is what `begin` is to do."""
    self.path, self.is_read_only = path, is_read_only
    self._lock, self._note = lock, note

  def begin(self) -> None:
    """Notes that a round will be trained by this start.

    A start that only reads a finished run leaves its folder as it is.
    """
    if self._note is not None:
      self._note()
      self._note = None

  def close(self) -> None:
    """Frees the lock."""
    if self._lock is not None:
      with contextlib.suppress(OSError):
        os.truncate(self._lock, 0)
      os.close(self._lock)
      self._lock = None

  def __enter__(self) -> Workdir:
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()


def open_workdir(path: str | os.PathLike[str], config: Mapping[str, Any], *,
                 allow: Collection[str] = ('num_rounds',),
                 facts: Mapping[str, Any] | None = None,
                 origin: Mapping[str, Any] | None = None) -> Workdir:
  """Opens the folder of a run for this process alone.

  The first start writes `config.json`. A later start must bring the same
  flags, apart from those in `allow`; `num_rounds` is `least_rounds` or more.

  In a run of several processes all of them call this: the first one does the
  work, and all return or raise alike (see `processes.once`). The others need
  not see the folder.

  A folder that cannot be written is opened, without a lock, if its run is
  finished.

  Args:
    path: local folder; created if it is missing.
    config: flag values, anything JSON can hold.
    allow: flags that may differ from the first start.
    facts: what the flags imply but do not say, such as a partition's hash;
      JSON values, which later starts must bring too.
    origin: what started the run, kept from the first start and not compared.

  Returns:
    The opened folder. Close it.

  Raises:
    WorkdirError: if the folder cannot be created or written, is in use,
      belongs to a run with different flags or facts (the message names what
      differs, old and new), or holds results but no config.json. The folder is
      then left unchanged.
  """
  folder = pathlib.Path(path).absolute()
  lock: int | None = None
  note: Callable[[], None] | None = None

  def start() -> bool:
    nonlocal lock, note
    refused: OSError | None = None
    try:
      try:
        lock = _take(folder, str(path))
      except OSError as error:
        if error.errno not in _READ_ONLY or not holds_run(folder):
          raise
        refused = error
      note = _settle(folder, _plain(config), allow, _plain(facts or {}),
                     _plain(origin or {}), refused)
      if lock is not None:
        _sign(lock)
        disk.remove_partials(folder)
      return refused is not None
    except BaseException as error:
      if lock is not None:
        os.close(lock)
      if isinstance(error, OSError):
        inside = error.filename not in (None, path, str(folder))
        raise UnusableError(
            'workdir', str(path), 'cannot be used: '
            f'{f"{error.filename}: " if inside else ""}{_reason(error)}.'
        ) from error
      raise

  is_read_only = processes.once(start)
  return Workdir(folder, lock, note, is_read_only=is_read_only)


def check_workdir(path: str | os.PathLike[str], config: Mapping[str, Any], *,
                  allow: Collection[str], facts: Mapping[str, Any]) -> None:
  """Makes the checks of `open_workdir` without a lock, and writes nothing.

  `num_rounds` may differ in either direction.

  Raises:
    WorkdirError: if the folder holds no run, or one with other flags or facts.
  """
  def look() -> None:
    folder = pathlib.Path(path).absolute()
    stored = read_config(folder)
    flags = _plain(config)
    _compare(folder, stored, flags | {
        'num_rounds': stored['flags'].get('num_rounds')}, allow)
    _merged(folder, stored['facts'], _plain(facts))

  processes.once(look)


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Reads a run's `config.json`: flags, facts, environment, restarts.

  Raises:
    WorkdirError: if there is none, or it cannot be read.
  """
  file = pathlib.Path(path) / CONFIG
  try:
    stored = _object('it', json.loads(file.read_text('utf-8')))
    for name in ('flags', 'facts', 'environment'):
      stored[name] = _object(f'`{name}`', stored[name])
    if not isinstance(stored['restarts'], list):
      raise TypeError('`restarts` is no list')
    stored['restarts'] = [
        {**_object('a restart', restart), 'environment': _object(
            '`environment` of a restart', restart['environment'])}
        for restart in stored['restarts']]
    _check_inside(stored)
    return stored
  except FileNotFoundError:
    raise WorkdirError(f'{path} holds no run: {CONFIG} is missing.') from None
  except OSError as error:
    raise WorkdirError(f'{file} cannot be read: {_reason(error)}.') from error
  except (ValueError, TypeError, KeyError, RecursionError) as error:
    what = f'{error} is missing' if isinstance(error, KeyError) else error
    raise WorkdirError(f'{file} is damaged: {what}. Bring the old file back, '
                       'or take another folder.') from error


def _check_inside(stored: Mapping[str, Any]) -> None:
  """Raises TypeError for what every reader of a run takes for granted."""
  facts = stored['facts']
  if not all(isinstance(value, str) for value in _object(
      '`code`', facts.get('code', {})).values()):
    raise TypeError('`code` has values that are no text')
  for field, chosen in _object('`choices`', facts.get('choices', {})).items():
    _object(f'`{field}` of `choices`', chosen)
  places = stored['flags'].get('imports') or []
  if not (isinstance(places, list) and all(
      isinstance(place, str) for place in places)):
    raise TypeError('`imports` is no list of texts')


def _object(name: str, value: Any) -> dict[str, Any]:
  if not isinstance(value, dict):
    raise TypeError(f'{name} is no object of JSON')
  return dict(value)


def stored_config(path: str | os.PathLike[str] | None) -> dict[str, Any]:
  """Reads as `read_config`; {} for no folder, or one without a run yet."""
  return read_config(path) if path and holds_run(path) else {}


def _take(folder: pathlib.Path, asked: str) -> int:
  """Creates and locks the folder; returns the descriptor of the lock."""
  if not _is_text(str(folder)):  # Checkpoints could not be saved there.
    raise WorkdirError(f'workdir={str(folder)!r} is not UTF-8; choose another '
                       'name.')
  if '://' in asked:
    raise WorkdirError(f'workdir={asked!r} is no local folder; mount it first.')
  traces = [t for t in _TRACES if (folder / t).exists()]
  if traces and not holds_run(folder):
    raise WorkdirError(f'{folder} holds {", ".join(traces)} but no {CONFIG}: '
                       'no run that could go on. Choose another folder.')
  if holds_run(folder):
    read_config(folder)
  folder.mkdir(parents=True, exist_ok=True)
  try:
    # Do not follow a symlink: its target is not our lock and must not be
    # truncated.
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW,
                   0o666)
  except OSError as error:
    if error.errno != errno.ELOOP:
      raise
    raise WorkdirError(f'{folder / LOCK} is a symbolic link, which no run '
                       'makes; remove it.') from None
  try:
    if not disk.try_lock(lock):
      holder = os.read(lock, 200).decode(errors='replace').strip()
      raise InUseError(f'{folder} is in use by {holder or "a process"}; wait '
                       'for it, or choose another folder.')
  except BaseException:
    os.close(lock)
    raise
  return lock


def _is_text(path: str) -> bool:
  """Returns whether the bytes of a name are those of a text."""
  try:
    path.encode()
  except UnicodeEncodeError:
    return False
  return True


def _sign(lock: int) -> None:
  """Writes into the lock which process holds it."""
  os.truncate(lock, 0)
  os.write(lock, f'pid {os.getpid()} on {socket.gethostname()}\n'.encode())


def _settle(folder: pathlib.Path, flags: dict[str, Any],
            allow: Collection[str], facts: dict[str, Any],
            origin: dict[str, Any], refused: OSError | None
            ) -> Callable[[], None] | None:
  """Writes the configuration if it is new; else compares it.

  Raises `refused`, why the folder cannot be written, if the run goes on.

  Returns:
    What writes that flags or machine have changed, if all steps seem to be
    there; it is to be called if a round is trained all the same, as where the
    newest step is damaged. None if that is written.
  """
  now = environment.describe()
  if not holds_run(folder):
    disk.replace(folder / CONFIG, _text(
        {'flags': flags, 'facts': facts, 'origin': origin,
         'environment': now, 'restarts': []}))
    return None
  stored = {'origin': origin, **read_config(folder)}
  changes = _compare(folder, stored, flags, allow)
  stored['facts'] = _merged(folder, stored['facts'], facts)
  note = functools.partial(_note, folder, stored, flags, changes, now)
  done = max(manifest.rounds(folder / sealed.STEPS), default=0)
  if done >= flags.get('num_rounds', done + 1) and changes.keys().isdisjoint(
      ('bounds', 'num_rounds')):
    if refused is None:
      _write(folder, stored)  # What a run of an older version lacks.
    return note
  if refused is not None:
    raise refused
  note()
  return None


def _note(folder: pathlib.Path, stored: dict[str, Any], flags: dict[str, Any],
          changes: changes_lib.Changes, now: dict[str, Any]) -> None:
  """Writes the flags and the machine of a later start.

  Args:
    folder: of the run.
    stored: its configuration, with the facts of this start.
    flags: those of this start.
    changes: of flags.
    now: the environment.
  """
  before = stored['environment']
  for restart in stored['restarts']:
    before = before | restart['environment']
  differs = {k: v for k, v in now.items() if before.get(k) != v}
  if differs:
    moved = changes_lib.between({k: before.get(k) for k in differs}, differs)
    logging.warning(
        'The run in %s continues under other conditions: %s. Equal bits are '
        'promised for equal versions and machines only.', folder,
        changes_lib.listed(moved))
  stored['flags'] = flags
  if changes or differs:
    stored['restarts'] = [*stored['restarts'], {
        'flags': {k: new for k, (_, new) in changes.items()},
        'environment': differs}]
  _write(folder, stored)


def _write(folder: pathlib.Path, stored: dict[str, Any]) -> None:
  """Writes the configuration, unless it is there."""
  if _text(stored) != (folder / CONFIG).read_bytes():
    disk.replace(folder / CONFIG, _text(stored))


def _compare(folder: pathlib.Path, stored: Mapping[str, Any],
             flags: Mapping[str, Any], allow: Collection[str]
             ) -> changes_lib.Changes:
  """Returns the changes of flags, all of which are allowed."""
  known = stored['flags'].get('num_rounds', 0)
  if not isinstance(known, int):
    raise WorkdirError(f'{folder / CONFIG} is damaged: its num_rounds is '
                       f'{known!r}.')
  changes = changes_lib.between(stored['flags'], flags)
  least = least_rounds(folder, known) if 'num_rounds' in changes else 0
  refused = {k: v for k, v in changes.items()
             if k not in allow or not _may_become(k, *v, least)}
  if refused:
    raise WorkdirError(f'{folder} holds a run with other flags: '
                       f'{changes_lib.listed(refused)}.'
                       + _way_on(folder, refused, stored, flags, least))
  return changes


def _way_on(folder: pathlib.Path, refused: changes_lib.Changes,
            stored: Mapping[str, Any], flags: Mapping[str, Any], least: int
            ) -> str:
  """Returns what to do: give the run's own flags, or another folder.

  `least` is the least `num_rounds`.
  """
  if gone := sorted({*refused} - {*flags}):
    version = stored['environment'].get('fedjax_ssl', 'unknown')
    return (f' This version has no {", ".join(gone)}; version {version} made '
            'the run.')
  by_fit = stored.get('origin', {}).get('script') == FIT
  other = checks.option('workdir')
  if list(refused) != ['num_rounds']:
    if not (folder / FLAGFILE).exists():
      return ''
    if by_fit:
      return f' Call fit as for that run, or give another {other}.'
    if not checks.mark():
      return (f' {folder / FLAGFILE} has its own; give these, or another '
              f'{other}.')
    own, place = (shlex.quote(str(x)) for x in (folder / FLAGFILE, folder))
    return (f' Continue it with --flagfile={own} --workdir={place}, or give '
            f'another {other}.')
  rounds = (f'rounds={least}' if by_fit else
            checks.option('num_rounds', least))
  return f' Give {rounds} or more, or another {other}.'


def _merged(folder: pathlib.Path, known: Mapping[str, Any],
            new: Mapping[str, Any]) -> dict[str, Any]:
  """All facts; those known already must be equal."""
  changes = changes_lib.between(
      changes_lib.flat({k: v for k, v in known.items() if k in new}),
      changes_lib.flat({k: v for k, v in new.items() if k in known}))
  if changes:
    is_data = all(name.startswith(_OF_DATA) for name in changes)
    what = 'a run on other data' if is_data else 'another run'
    raise WorkdirError(f'{folder} holds {what}: '
                       f'{changes_lib.listed(changes)}.')
  return {**new, **known}


def as_known(known: Any, now: Any) -> Any:
  """Returns facts of this start, with the numbers of a run's first start.

  Earlier versions summed in an order of the machine's; a checkpoint knows the
  numbers of the first start.

  Args:
    known: the stored facts, or a part of them.
    now: those of this start; JSON values as well.

  Returns:
    `now`, where numbers that differ from `known` by rounding alone (relative
    1e-12) are those of `known`.
  """
  if isinstance(known, dict) and isinstance(now, dict):
    return {name: as_known(known.get(name), value)
            for name, value in now.items()}
  if isinstance(known, list | tuple) and isinstance(now, list | tuple) and (
      len(known) == len(now)):
    return [as_known(*both) for both in zip(known, now, strict=True)]
  alike = isinstance(known, float) and isinstance(now, float) and math.isclose(
      known, now, rel_tol=1e-12)
  return known if alike else now


def least_rounds(folder: pathlib.Path, planned: int) -> int:
  """Returns the least `num_rounds` with which a run may go on.

  It is what is done, if that was evaluated, as the last round must be; else
  one more, and not more than was planned.
  """
  done = max(manifest.rounds(folder / sealed.STEPS), default=0)
  content = sealed.content(folder / ROWS) or b''
  for line in reversed(content.splitlines(keepends=True)):
    for _, row in run_files.parsed(line):
      if row and row['round'] == done and 'accuracy' in row:
        return min(planned, done)
  return min(planned, done + 1)


def _may_become(name: str, old: Any, new: Any, least: int) -> bool:
  """Returns whether a flag may change; `least` is the least `num_rounds`."""
  if name != 'num_rounds':
    return True
  return isinstance(new, int) and isinstance(old, int) and new >= least


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the same values as they come back from a JSON file."""
  try:
    return json.loads(json.dumps(dict(config), sort_keys=True))
  except TypeError as error:
    raise WorkdirError(f'config={config!r} is no JSON: {error}.') from None


def _text(stored: Mapping[str, Any]) -> bytes:
  return (json.dumps(stored, indent=2, sort_keys=True) + '\n').encode()


def _reason(error: OSError) -> str:
  hints = {errno.ENOSPC: 'the disk is full', errno.EROFS: 'it is read-only',
           errno.ENOTDIR: 'part of the path is a file',
           errno.EEXIST: 'it is a file, or a link to nothing',
           errno.EACCES: 'no permission'}
  return hints.get(error.errno or 0, error.strerror or str(error))
