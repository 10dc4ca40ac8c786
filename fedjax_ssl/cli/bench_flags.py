"""Flags behind `--`, which all runs of a bench have besides the bed's."""
from __future__ import annotations

from collections.abc import Sequence
import json
import pathlib

from fedjax_ssl.cli.sweep import cells as cells_lib
from fedjax_ssl.core import disk, run_files

# Flags by which the runs of one bed differ, or that fit none of them.
OWN = ('method', 'learning_rate', 'labels', 'seed', 'seeds', 'workdir',
       'eval_only')
_FILE = 'changed.json'  # One a folder.


def given(out: pathlib.Path, flags: tuple[str, ...], *, looking: bool
          ) -> tuple[str, ...]:
  """Returns the flags of a folder: who only looks need not give them.

  Args:
    out: the folder.
    flags: behind `--`.
    looking: whether nothing is to be run.

  Raises:
    ValueError: if the folder's runs have others, or its file is damaged.
  """
  kept = out / _FILE
  if not kept.exists():
    return flags
  try:
    found = tuple(disk.texts(json.loads(kept.read_text('utf-8'))))
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{kept} is damaged; remove it, and give the flags '
                     'behind -- that its runs have, if any.') from error
  if looking and not flags:
    return found
  # A run that has begun and is not there yet has a lock.
  if found != flags and (any(out.glob(f'*/{run_files.CONFIG}'))
                         or cells_lib.any_is_held(out)):
    raise ValueError(f'--out={out} holds runs with '
                     f'{" ".join(found) or "no flags"} behind --; give the '
                     'same, or another folder.')
  return flags


def keep(out: pathlib.Path, flags: tuple[str, ...]) -> None:
  """Stores the flags of a folder's runs."""
  disk.replace(out / _FILE, (json.dumps(flags) + '\n').encode())


def pairs(flags: Sequence[str]) -> list[tuple[str, str]]:
  """Returns names and values, in the order given; a name may come twice."""
  return [(name, value) for name, _, value in (
      flag.removeprefix('--').partition('=') for flag in flags)]
