r"""Metrics: JSON lines, a row per evaluated round, equal after a resume.

`metrics.jsonl` holds values that depend on the configuration only, so that a
run that was killed and continued leaves the same bytes as one that was not.
Times depend on the machine and go to `timings.jsonl`.

Under privacy each round between two evaluations has a short row: `round`,
`seed` if there are several, and `epsilon`.

`training.metric_names` says what the names mean.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import errno
import hashlib
import json
import os
import pathlib
from typing import Any

from absl import logging
import numpy as np

from fedjax_ssl.core import checks, disk, run_files
from fedjax_ssl.training import metric_names, trackers, trusted_rows
from fedjax_ssl.training.checkpoint import sealed

METRICS, TIMINGS = run_files.ROWS, run_files.TIMINGS
# Also in the short rows of rounds between two evaluations.
BETWEEN = ('epsilon',)

Row = dict[str, Any]


class MetricsError(ValueError):
  """A row that does not fit the schema, or a file that cannot be written."""


class _GrowingFile:
  """A file that only grows, and what it should hold."""

  def __init__(self, file: pathlib.Path, data: bytes):
    """Makes the file hold `data`."""
    self._file = file
    self.data = bytearray(data)
    self._digest = hashlib.sha256(data)
    there = sealed.content(file)
    if there is not None and there.startswith(data):
      os.truncate(file, len(data))
    elif data:
      disk.replace(file, data)
    self._open()
    if there is None:  # A checkpoint must not outlast the file's name.
      disk.fsync(file.parent)

  def _open(self) -> None:
    # Unbuffered: a line that fails leaves nothing for `close` to write.
    self._stream = open(self._file, 'ab', buffering=0)
    self._known = _fingerprint(os.fstat(self._stream.fileno()))

  def append(self, line: bytes) -> None:
    """Adds a line, which is on the disk when this returns."""
    self._mend()
    if self._stream.write(line) != len(line):
      raise OSError(errno.ENOSPC, 'the disk is full')
    os.fsync(self._stream.fileno())
    self.data += line
    self._digest.update(line)
    self._known = _fingerprint(os.fstat(self._stream.fileno()))

  def seal(self) -> dict[str, Any]:
    """Mends the file; returns what a checkpoint stores about it."""
    self._mend()
    return {'bytes': len(self.data), 'sha256': self._digest.hexdigest()}

  def _mend(self) -> None:
    """Writes the file anew if others removed or changed it."""
    with contextlib.suppress(FileNotFoundError):
      if _fingerprint(os.stat(self._file)) == self._known:
        return
    if sealed.content(self._file) != self.data:
      logging.warning('%s was removed or changed while the run went on; it is '
                      'written anew.', self._file)
      disk.replace(self._file, self.data)
    self.close()
    self._open()

  def close(self) -> None:
    self._stream.close()


def _fingerprint(stat: os.stat_result) -> tuple[int, ...]:
  """Returns what changes when another program replaces or writes a file."""
  return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


class MetricsWriter:
  """Appends rows; each is on the disk when `write` returns."""

  def __init__(self, workdir: str | os.PathLike[str],
               resume_round: int | None = None, *,
               seals: Mapping[str, sealed.Seal] | None = None,
               track: Sequence[str] = (),
               config: Mapping[str, Any] | None = None):
    """Cuts both files back to the restored round.

    Rows of later rounds will be measured again, and a last line that a kill
    cut short is dropped.

    Args:
      workdir: folder of the two files.
      resume_round: round of the restored checkpoint, whose own row is kept;
        None drops all rows, because the run starts over.
      seals: by name, what that checkpoint stores about the files; see `seals`.
      track: where numbers are mirrored to, names of `trackers.PACKAGES`.
      config: the run's flags, which trackers show beside them.

    Raises:
      MetricsError: if the files cannot be written, are not what their seals
        say, or a tracker is not installed or cannot be opened.
    """
    folder = pathlib.Path(workdir)
    last = -1 if resume_round is None else int(resume_round)
    self._folder = folder
    self._learnt: dict[Any, float] = {}  # By seed, the best labeled_accuracy.
    self._mirrors: list[trackers.Mirror] = []
    if lacking := trackers.lacking(track):
      raise MetricsError(f'track: {lacking}')
    with disk.writing(f'Metrics in {folder}', MetricsError):
      whole = _whole(folder, last, seals)  # Both, before one is changed.
      self._files = {name: _GrowingFile(folder / name, data)
                     for name, data in whole.items()}
    rows = _rows(self._files[METRICS].data)  # Those that are kept.
    for row in rows:
      self._remember(row)
    for name in track:
      self._mirrors.append(_mirror(name, folder, config or {}, last, rows))

  def seals(self) -> dict[str, dict[str, Any]]:
    """Returns what the next checkpoint should store about the two files.

    A file that was removed or changed meanwhile is written anew first.

    Raises:
      MetricsError: if that is impossible.
    """
    with disk.writing(f'Metrics in {self._folder}', MetricsError):
      return {name: file.seal() for name, file in self._files.items()}

  def _remember(self, row: Row) -> None:
    """Keeps each seed's best labeled_accuracy, as it was written."""
    seed, now = row.get('seed'), row.get('labeled_accuracy')
    if now is not None:
      self._learnt[seed] = max(now, self._learnt.get(seed, 0.0))

  def _forgetting(self, row: Row) -> Row:
    """Returns the metric `forgetting`: how far a row is below its seed's best.

    It is made from the numbers as written, so that a resume leaves the same
    bytes.
    """
    now = row.get('labeled_accuracy')
    if now is None:
      return {}
    return {'forgetting': round(self._learnt[row.get('seed')] - now, 7)}

  def write(self, row: Mapping[str, Any],
            timings: Mapping[str, Any] | None = None) -> Row:
    """Appends one row.

    Args:
      row: deterministic values by name, `round` among them: numbers, arrays
        or None. NaN and infinities become null.
      timings: values for the other file, which gets the same round and seed.

    Returns:
      The row as `read` will give it.

    Raises:
      MetricsError: if the row breaks the schema or cannot be written.
    """
    plain = to_plain(row)
    validate(plain)
    self._remember(plain)
    plain = to_plain(plain | self._forgetting(plain))
    self._append(METRICS, plain)
    if timings is not None:
      place: Row = {k: plain[k] for k in ('round', 'seed') if k in plain}
      self._append(TIMINGS, to_plain(place | dict(timings)))
    for mirror in self._mirrors:
      mirror.write(plain)
    return plain

  def _append(self, name: str, row: Row) -> None:
    with disk.writing(self._folder / name, MetricsError):
      self._files[name].append(to_line(row).encode())

  def close(self) -> None:
    """Closes the files."""
    for file in self._files.values():
      file.close()
    for mirror in self._mirrors:
      mirror.close()

  def __enter__(self) -> MetricsWriter:
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()


def read(path: str | os.PathLike[str], name: str = METRICS) -> list[Row]:
  """Reads the rows of a run, oldest first.

  Args:
    path: a workdir, whose rows must match its newest checkpoint, or the file
      itself, which is not checked.
    name: METRICS or TIMINGS, if `path` is a folder.

  Returns:
    All valid rows, including short ones. For a workdir with sealed
    checkpoints, only the rows up to the newest one. Malformed lines (such as
    one cut off by a kill) are skipped. Empty if there is no file.

  Raises:
    SealError: if a row is not what the newest checkpoint was saved with; see
      `trusted_rows.read`.
  """
  file = pathlib.Path(path)
  if file.is_dir():
    return _rows(trusted_rows.read(file, name))
  return _rows(sealed.content(file) or b'')


def cut_back(workdir: str | os.PathLike[str], round_: int,
             seals: Mapping[str, sealed.Seal]) -> None:
  """Cuts the files of a run that is finished back to its last checkpoint.

  Raises:
    MetricsError: if they are not what the checkpoint says, or one cannot be
      written.
  """
  folder = pathlib.Path(workdir)
  with disk.writing(f'Metrics in {folder}', MetricsError):
    for name, data in _whole(folder, round_, seals).items():
      if (sealed.content(folder / name) or b'') != data:
        disk.replace(folder / name, data)


def keep_beyond(workdir: str | os.PathLike[str], round_: int) -> str:
  """Copies the rows of a run if there are any beyond a round.

  Returns:
    The copy's name; '' if there was nothing to copy.

  Raises:
    MetricsError: if it cannot be written.
  """
  file = pathlib.Path(workdir) / METRICS
  data = sealed.content(file) or b''
  if not any(row['round'] > round_ for row in _rows(data)):
    return ''
  copy = disk.aside(file)
  with disk.writing(f'Metrics in {file.parent}', MetricsError):
    disk.replace(copy, data)
  return copy.name


def _rows(data: bytes | bytearray) -> list[Row]:
  return [row for _, row in run_files.parsed(data) if row is not None]


def is_short(row: Mapping[str, Any]) -> bool:
  """Returns whether a row is of a round between two evaluations."""
  own = set(row) - {'round', 'seed'}
  return bool(own) and own <= set(BETWEEN)


def validate(row: Mapping[str, Any]) -> None:
  """Checks a plain row against the schema.

  Raises:
    MetricsError: that names the first value that breaks it.
  """
  if 'round' not in row:
    raise MetricsError(f'A row needs a round; it has {sorted(row)}.')
  for name, value in row.items():
    for item in value if isinstance(value, list) else [value]:
      _check(name, item)


def validate_all(rows: Sequence[Mapping[str, Any]]) -> None:
  """Checks the rows of one seed: each, and that their rounds rise.

  Raises:
    MetricsError: that names the first that breaks a rule.
  """
  before = -1
  for row in rows:
    validate(row)
    if row['round'] <= before:
      raise MetricsError(f'A row of round {row["round"]} comes after the row '
                         f'of round {before}.')
    before = row['round']


def to_plain(row: Mapping[str, Any]) -> Row:
  """Turns arrays into numbers and lists, with names in the fixed order.

  A float32 becomes the shortest decimal that reads back as the same float32,
  so the text does not depend on how it was converted.
  """
  return {name: _plain(name, row[name])
          for name in sorted(row, key=metric_names.rank)}


def to_line(row: Mapping[str, Any]) -> str:
  """Returns the row as one line of the file."""
  return json.dumps(row, allow_nan=False) + '\n'


def _plain(name: str, value: Any) -> Any:
  if value is None or isinstance(value, bool | str):
    return value
  array = np.asarray(value)
  if array.ndim:
    return [_plain(name, item) for item in array]
  if array.dtype.kind in 'iu':
    return int(array)
  if array.dtype.kind == 'b':
    return bool(array)
  if not (array.dtype.kind == 'f' or array.dtype.name == 'bfloat16'):
    raise MetricsError(f'{name}={value!r} is no number.')
  if array.dtype.name == 'bfloat16':
    array = array.astype(np.float32)
  if not np.isfinite(array):
    return None
  number = float(str(array[()]))
  # Sums of counts come as floats from the device.
  counted = metric_names.kind(name) == 'count' and number.is_integer()
  return int(number) if counted else number


def _check(name: str, value: Any) -> None:
  kind = metric_names.kind(name)
  if value is None and kind != 'count':
    return
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise MetricsError(f'{name}={value!r} must be a number.')
  if kind == 'count' and (not isinstance(value, int) or value < 0):
    raise MetricsError(f'{name}={value!r} must be a whole number from 0.')
  if kind == 'share' and not -1e-6 <= value <= 1 + 1e-6:
    raise MetricsError(f'{name}={value!r} must be in [0, 1].')


def _whole(folder: pathlib.Path, last: int,
           seals: Mapping[str, sealed.Seal] | None) -> dict[str, bytes]:
  """Reads what both files hold of the rounds up to `last`."""
  return {name: _kept(folder, name, last, (seals or {}).get(name))
          for name in (METRICS, TIMINGS)}


def _kept(folder: pathlib.Path, name: str, last: int,
          wanted: sealed.Seal | None) -> bytes:
  """Returns the bytes of a file up to round `last`."""
  data, reason = sealed.content(folder / name), ''
  if wanted is not None:
    held, reason = sealed.checked_bytes(name, wanted, data, last)
    if data is None and held:
      logging.warning('%s is missing; the times up to round %d are unknown.',
                      folder / name, last)
    if not reason:
      return held
  kept, dropped = [], []
  for number, (line, row) in enumerate(run_files.parsed(data or b''), 1):
    if row is None:
      dropped.append(number)
    elif row['round'] <= last:
      kept.append(line)
  rest = b''.join(kept)
  if wanted is not None and sealed.seal(rest) != wanted:
    raise MetricsError(sealed.refusal(folder, name, last, reason))
  for number in dropped:
    logging.warning('Line %d of %s is not a valid row and is dropped.', number,
                    folder / name)
  return rest


def _mirror(name: str, folder: pathlib.Path, config: Mapping[str, Any],
            last: int, rows: Sequence[Row]) -> trackers.Mirror:
  """Opens a tracker.

  Raises:
    MetricsError: if that is impossible, as without a network or a login.
  """
  try:
    return trackers.Mirror(name, folder, config, last, rows)
  except Exception as error:  # Each client has errors of its own.
    hint = ' Or set WANDB_MODE=offline.' if name == 'wandb' else ''
    raise MetricsError(f'track: {name} cannot be opened: '
                       f'{checks.one_line(error)}{hint}') from error
