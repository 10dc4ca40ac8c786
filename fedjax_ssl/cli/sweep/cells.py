"""The files of a sweep's cell: a lock, a record, and those of the run.

    OUT/NAME/               the run's folder
    OUT/NAME.log            what it printed, all attempts
    OUT/.sweep/NAME.json    how the last attempt ended
    OUT/.sweep/NAME.lock    held by the sweep and by the run it started

The lock is `flock`, and the run inherits it: a sweep that is killed leaves no
lock behind, and a run that outlives its sweep keeps its own.
"""
from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import hashlib
import json
import os
import pathlib
import subprocess
from typing import Any

from fedjax_ssl.cli import child, places
from fedjax_ssl.cli.sweep import grid
from fedjax_ssl.core import (
  bounds,
  disk,
  flagfile_lines,
  imports,
  run_files,
)

_MOST_FLAGS = 1000  # Of one command line.


def folder(out: pathlib.Path, cell: grid.Cell) -> pathlib.Path:
  """Returns the run's folder."""
  return out / cell.name


def log(out: pathlib.Path, cell: grid.Cell) -> pathlib.Path:
  """Returns the file with what the run printed."""
  return out / f'{cell.name}.log'


def command(python: str, out: pathlib.Path, cell: grid.Cell) -> list[str]:
  """Returns the command line of a cell."""
  # The last one counts: a flagfile may hold a --workdir of its own.
  return [*cell.program(python), *cell.args, *cell.places,
          f'--workdir={folder(out, cell)}']


def check_flags(python: str, cells: Sequence[grid.Cell],
                env: Mapping[str, str]) -> None:
  """Lets every program check all flags that it will get; nothing is trained.

  Only settings, and scripts that train one, can do so. An interpreter that
  cannot be started is ignored, as the grid may be for another machine.

  Raises:
    grid.GridError: for an unknown flag, or a value that a flag does not take.
  """
  asked: dict[tuple[str, ...], dict[str, None]] = {}
  for cell in cells:
    if cell.setting or is_experiment(cell.script):
      asked.setdefault((*cell.program(python), cell.setting or cell.script),
                       {}).update(dict.fromkeys((*cell.args, *cell.places)))
  for (*program, name), known in asked.items():
    args = list(known)
    for start in range(0, len(args), _MOST_FLAGS):
      with contextlib.suppress(OSError):
        done = subprocess.run(
            [*program, *args[start:start + _MOST_FLAGS], '--only_check_args'],
            env=os.environ | env, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors='replace', check=False)
        if why := child.refusal(done):
          raise grid.GridError(f'{name}: {why}')


def is_experiment(script: str) -> bool:
  """Returns whether a script trains a setting, and so checks its flags."""
  try:
    code = ast.parse(pathlib.Path(script).read_bytes())
  except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
    return False
  return any(isinstance(node, ast.ImportFrom) and node.module == 'fedjax_ssl'
             and any(alias.name == 'cli' for alias in node.names)
             for node in code.body)


def fingerprint(cell: grid.Cell) -> str:
  """Returns a hash of what the grid asks for, and of the flagfiles' texts.

  It is the same from every folder and for every place of the repository. Where
  a flagfile names another by a relative path, that is read from the current
  folder, as the run does.
  """
  # The name that sweeps used before there were settings.
  name = (f'experiments/{cell.setting}.py' if cell.setting
          else _place(cell.script))
  words, texts = [name], []
  for arg in cell.args:
    name, _, file = arg.partition('=')
    if name == '--flagfile':
      with contextlib.suppress(OSError):
        texts.append(pathlib.Path(os.path.expanduser(file)).read_bytes())
      # Besides its bytes, of which stored fingerprints are, those inside it.
      with contextlib.suppress(ValueError):  # The run refuses it.
        texts += ['\n'.join(['\0', *lines]).encode()
                  for _, lines in [*flagfile_lines.read([arg])][1:]]
    words.append(normal(arg))
  return hashlib.sha256(
      b''.join(['\0'.join(words).encode(), *texts])).hexdigest()


def normal(arg: str) -> str:
  """Returns a flag with the same words from every folder."""
  name, _, file = arg.partition('=')
  return f'{name}={_place(file)}' if name == '--flagfile' else arg


def _place(file: str) -> str:
  """Returns a path relative to the repository's root, absolute outside it."""
  path = pathlib.Path(os.path.expanduser(file)).resolve()
  root = places.repository()
  return (path.relative_to(root) if root and path.is_relative_to(root)
          else path).as_posix()


def lock(out: pathlib.Path, cell: grid.Cell) -> int | None:
  """Takes the cell's lock; returns None if another process has it."""
  file = out / '.sweep' / f'{cell.name}.lock'
  file.parent.mkdir(parents=True, exist_ok=True)
  handle, taken = os.open(file, os.O_RDWR | os.O_CREAT, 0o666), False
  try:
    taken = disk.try_lock(handle)
  finally:
    if not taken:
      os.close(handle)
  return handle if taken else None


def is_held(out: pathlib.Path, cell: grid.Cell) -> bool:
  """Returns whether a process runs the cell now; writes nothing."""
  return _is_held(out / '.sweep' / f'{cell.name}.lock')


def any_is_held(out: pathlib.Path) -> bool:
  """Returns whether a process runs any cell of a folder now; writes nothing."""
  return any(map(_is_held, out.glob('.sweep/*.lock')))


def _is_held(lock: pathlib.Path) -> bool:
  try:
    handle = os.open(lock, os.O_RDONLY)
  except FileNotFoundError:
    return False
  try:
    return not disk.try_lock(handle, shared=True)
  finally:
    os.close(handle)


def record(out: pathlib.Path, cell: grid.Cell) -> dict[str, Any]:
  """Reads how the last attempt ended; {} if there was none."""
  try:
    stored = json.loads((out / '.sweep' / f'{cell.name}.json').read_text())
  except (OSError, ValueError, RecursionError):
    return {}
  if not isinstance(stored, dict) or not isinstance(
      stored.get('exit', 0), int) or not isinstance(
          stored.get('tail', []), list):
    return {}
  return stored


def write_record(out: pathlib.Path, cell: grid.Cell, **values: Any) -> None:
  """Replaces the record whole; `values` may hold an earlier fingerprint."""
  disk.replace(out / '.sweep' / f'{cell.name}.json', (json.dumps(
      {'fingerprint': fingerprint(cell), 'args': cell.args, **values},
      indent=1) + '\n').encode())


def other_flags(out: pathlib.Path, cell: grid.Cell) -> str:
  """Says how the flags of the run in the cell's folder differ; '' if equal.

  A folder's name holds what varies in a grid. So if lines that all cells share
  are edited, the name stays the same.
  """
  stored = record(out, cell)
  if stored.get('fingerprint', fingerprint(cell)) == fingerprint(cell) or (
      not run_files.holds_run(folder(out, cell))):
    return ''
  was = stored.get('args')
  was = was if isinstance(was, list) else []
  gone = ' '.join(str(arg) for arg in was if arg not in cell.args)
  new = ' '.join(arg for arg in cell.args if arg not in was)
  if not gone and not new:
    return 'its flagfile or script was another'
  return f'was {gone or "without"}, is {new or "without"}'


def is_done(out: pathlib.Path, cell: grid.Cell) -> bool:
  """Returns whether a cell of these flags succeeded and has its results."""
  stored = record(out, cell)
  return (stored.get('state') == 'done'
          and stored.get('fingerprint') == fingerprint(cell)
          and is_complete(folder(out, cell)))


def other_code(out: pathlib.Path, cell: grid.Cell) -> str:
  """Names a file of the user's own that has changed since a cell was run.

  Returns:
    '' if there is none; a file that is gone is none.
  """
  path = folder(out, cell)
  flags, facts = config_of(path, 'flags'), config_of(path, 'facts')
  code = facts.get('code')
  if not isinstance(code, dict):
    return ''
  texts = [str(flags.get(name) or '') for name in imports.TEXTS]
  for place in imports.places(texts, flags.get('imports') or ()):
    # As it is now: a bench may have imported it before it changed.
    with contextlib.suppress(OSError):
      now = hashlib.sha256(pathlib.Path(place).read_bytes()).hexdigest()
      if code.get(os.path.basename(place), now) != now:
        return os.path.basename(place)
  return ''


def progress(path: pathlib.Path) -> tuple[int, int] | None:
  """Returns a run's (rounds measured, rounds wanted); None without a run.

  A process that is told to end saves and exits with 0, so the exit code alone
  does not show that a run is finished.
  """
  flags = config_of(path, 'flags')
  wanted = flags.get('num_rounds')
  seeds = run_files.seeds(flags)
  if not isinstance(wanted, int) or not isinstance(seeds, list):
    return None
  last: dict[Any, int] = {}
  for row in _rows(path / run_files.ROWS):
    last[row.get('seed')] = row['round']
  return (min(last.values()) if len(last) >= len(seeds) else 0), wanted


def is_complete(path: pathlib.Path) -> bool:
  """Returns whether a run and its bounds reached their last round.

  The upper bound is none of them where no label is hidden. The folder of each
  that is run is there before anything trains.
  """
  parts = [path]
  if config_of(path, 'flags').get('bounds'):
    parts += [path / name for name in bounds.FOLDERS
              if name != bounds.folder('all') or (path / name).is_dir()]
  states = [progress(part) for part in parts]
  return all(s is not None and s[0] >= s[1] for s in states)


def config_of(path: pathlib.Path, part: str) -> dict[str, Any]:
  """Reads a part of a run's `config.json`; {} if missing or damaged."""
  try:
    return dict(json.loads((path / run_files.CONFIG).read_text())[part])
  except (OSError, ValueError, KeyError, TypeError, RecursionError):
    return {}


def _rows(file: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields the rows before the first that a kill or a broken disk damaged."""
  try:
    data = file.read_bytes()
  except OSError:
    return
  for _, row in run_files.parsed(data):
    if row is None:
      return
    yield row


def tail(text: str) -> list[str]:
  """Returns the last 5 lines that are not blank, the first 400 characters."""
  return [line[:400] for line in text.splitlines() if line.strip()][-5:]
