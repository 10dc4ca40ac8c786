"""Finds the repository, and the runs that arguments name."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import os
import pathlib
from typing import Any

from fedjax_ssl.core import bounds, run_files


def repository() -> pathlib.Path | None:
  """Returns the checkout's root; None for an installed copy."""
  root = pathlib.Path(__file__).resolve().parents[2]
  found = (root / 'setup.py').is_file() and (root / 'experiments').is_dir()
  return root if found else None


def check_named(words: Sequence[str]) -> None:
  """Refuses an empty word, as of a variable that is not set.

  As a path it would be the current folder.

  Raises:
    ValueError: for that.
  """
  if '' in words:
    raise ValueError("'' names no run; name its folder.")


def runs_in(words: Sequence[str]) -> list[str]:
  """Returns the folders of the runs that words name; other words stay.

  A folder of runs, such as a sweep's, stands for all of them, and for those of
  the folders beside them; other files, such as logs, are skipped. If there is
  no run, returns all words.

  Raises:
    ValueError: see `check_named`.
  """
  check_named(words)
  found: list[str] = []
  for word in words:
    path = pathlib.Path(word)
    if run_files.holds_run(path) or not path.exists():
      found.append(word)
    else:
      for child in sorted(path.glob('*/')):  # Bounds are below their run.
        files = [child / run_files.CONFIG] if run_files.holds_run(child) else (
            sorted(child.glob(f'*/{run_files.CONFIG}')))
        found += [str(file.parent) for file in files]
  return [*dict.fromkeys(found or words)]


def with_bounds(folders: Sequence[str]) -> tuple[list[str], str]:
  """Adds the bounds of each run that is the only one of its data.

  Args:
    folders: of runs.

  Returns:
    The folders, and a line on bounds that are left out: of several runs they
    would mostly be the same ones. A bound without rows yet is neither.
  """
  from fedjax_ssl.report import names  # Loads JAX.
  named = set(map(os.path.normpath, folders))
  parts = names.data_parts([_config(folder) for folder in folders])
  found: list[str] = []
  without: list[str] = []
  for folder, part in zip(folders, parts, strict=True):
    below = [place for name in bounds.FOLDERS
             if os.path.normpath(place := os.path.join(folder, name))
             not in named and _has_rows(pathlib.Path(place))]
    alone = parts.count(part) == 1
    found += [folder, *below * alone]
    without += below * (not alone)
  return found, '' if not without else (
      f'{len(without)} bounds of these runs, such as {without[0]}; name their '
      'folders to add them')


def _config(folder: str) -> Mapping[str, Any]:
  """Returns what a run was told; nothing of one that cannot be read."""
  from fedjax_ssl.training import workdir  # Loads JAX.
  try:
    return workdir.read_config(folder)
  except ValueError:
    return {}


def _has_rows(folder: pathlib.Path) -> bool:
  try:
    return run_files.holds_run(folder) and (
        (folder / run_files.ROWS).stat().st_size > 0)
  except OSError:
    return False
