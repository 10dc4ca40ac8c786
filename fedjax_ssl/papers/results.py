"""Stores our numbers of the tables' cells, one JSON file for each cell."""
from __future__ import annotations

from collections.abc import Sequence
import json
import pathlib
from typing import Any

from fedjax_ssl.core import disk
from fedjax_ssl.papers import cells

# What a knob was called when some numbers were made, and is called today.
_RENAMED = 'labeled_say=', 'labeled_client_weight='


def file_of(cell: cells.Cell, folder: pathlib.Path, variant: str = ''
            ) -> pathlib.Path:
  """Returns where a cell's numbers go below the folder of all results."""
  name = cell.table.name + (f'.{variant}' if variant else '')
  return folder / name / f'{cell.name}.json'


def is_stale(cell: cells.Cell, stored: dict[str, Any]) -> bool:
  """Returns whether a cell's flags changed since its numbers were made.

  Seeds do not count, as more may be added at any time, nor does the order, nor
  that a knob had another name then.
  """
  def kept(flags: Sequence[str]) -> list[str]:
    return sorted(flag.replace(*_RENAMED) for flag in flags
                  if not flag.startswith(('--seed=', '--seeds=')))
  return bool(stored) and kept(stored['flags']) != kept(cell.flags)


def read(file: pathlib.Path) -> dict[str, Any]:
  """Reads a cell's numbers; {} if it has none.

  Raises:
    ValueError: if the file is damaged.
  """
  if not file.exists():
    return {}
  try:
    stored: dict[str, Any] = json.loads(file.read_text('utf-8'))
    for key in ('cell', 'flags', 'extra_flags', 'seeds'):
      stored[key]
    for key in ('flags', 'extra_flags'):
      disk.texts(stored[key])
    if not stored['seeds']:
      raise ValueError('it holds no seeds')
    for seed in dict(stored['seeds']).values():
      dict(seed['metrics']), dict(seed['environment']), seed['final']
    return stored
  except KeyError as error:
    raise ValueError(f'{file} is damaged: {error} is missing.') from error
  except (ValueError, TypeError, AttributeError, RecursionError) as error:
    raise ValueError(f'{file} is damaged: {error}.') from error


def write(file: pathlib.Path, stored: dict[str, Any]) -> None:
  """Replaces a cell's file as a whole."""
  file.parent.mkdir(parents=True, exist_ok=True)
  disk.replace(file, (json.dumps(stored, indent=1, sort_keys=True) + '\n'
                      ).encode())
