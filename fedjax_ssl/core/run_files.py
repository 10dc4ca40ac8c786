"""Files of a run's folder that programs read which load no JAX.

`fedjax_ssl.training.workdir` says what else is there.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
import json
import os
import pathlib
from typing import Any

CONFIG = 'config.json'
FLAGFILE = 'run.flags'  # All flags of the run, for --flagfile.
ROWS = 'metrics.jsonl'  # What is measured, a row a line.
TIMINGS = 'timings.jsonl'  # How long it took.
LOCK = 'lock'  # Who has the folder.
# Metrics of a row that add up over the rounds since the row before; all others
# are averaged over them.
SUMMED = ('bytes_down', 'bytes_up', 'num_rejected')
_PARTITION = 'partition_'  # A seed follows.


def holds_run(path: str | os.PathLike[str] | None) -> bool:
  """Returns whether a run has begun in a folder; False for no folder."""
  return bool(path) and (pathlib.Path(path or '') / CONFIG).exists()


def check_free(path: pathlib.Path) -> None:
  """Raises ValueError for a file by which the run of its folder goes on."""
  if holds_run(path.parent) and (
      path.name in (CONFIG, FLAGFILE, ROWS, TIMINGS, LOCK)
      or path.match(f'{_PARTITION}*.npz')):
    raise ValueError(f'{path} belongs to the run in its folder; choose another '
                     'name.')


def seeds(flags: Mapping[str, Any]) -> Any:
  """Returns the seeds of a run by its stored flags, as they stand there."""
  return flags.get('seeds') or [flags.get('seed') or 0]


def partition(folder: pathlib.Path, seed: int) -> pathlib.Path:
  """Returns the file that says who owns which row."""
  return folder / f'{_PARTITION}{seed}.npz'


def parsed(data: bytes | bytearray
           ) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
  """Yields the lines of `ROWS`, each with its row.

  Args:
    data: the file's content.

  Yields:
    A line and its row, whose NaN is None; or None for a line that holds no
    whole row, as a kill or a broken disk leaves it.
  """
  for line in data.splitlines(keepends=True):
    try:
      row = json.loads(line, parse_constant=lambda text: None)
    except (ValueError, RecursionError):
      row = None
    whole = line.endswith(b'\n') and isinstance(row, dict) and isinstance(
        row.get('round'), int) and isinstance(row.get('seed', 0), int)
    yield bytes(line), row if whole else None
