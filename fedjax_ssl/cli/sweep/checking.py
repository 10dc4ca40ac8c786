"""Checks each cell of a sweep as its run would before it loads any data.

The runs' interpreter does it, in a process of its own: the sweep itself loads
neither JAX nor code of the user's.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from absl import flags

from fedjax_ssl import config
from fedjax_ssl.cli import child, errors, exit_codes
from fedjax_ssl.cli.sweep import asked, grid
from fedjax_ssl.cli.sweep import cells as cells_lib
from fedjax_ssl.core import blame, checks, imports, registry, run_files
from fedjax_ssl.running import settings

_PROGRAM = ('-P', '-c', 'import sys; from fedjax_ssl.cli.sweep import checking;'
            ' sys.exit(checking.main())')
_ADDITIONS = 'aggregator', 'server_optimizer', 'attack'


def check(python: str, out: pathlib.Path, cells: Sequence[grid.Cell],
          env: Mapping[str, str]) -> None:
  """Refuses names, knobs and values with which a run would not start.

  Cells that differ in their seeds alone are checked once. Of a script of the
  user's own, which may register names and has other defaults, only the knobs
  of known names are checked. What an interpreter without this library would
  say is ignored, as the grid may be for another machine.

  Args:
    python: interpreter of the runs.
    out: folder of all runs.
    cells: those that will run.
    env: variables of the runs.

  Raises:
    grid.GridError: for the first such cell. A fault that may pass refuses none:
      the run meets it, or not.
  """
  known: dict[tuple[str, ...], str] = {}
  trains = functools.cache(cells_lib.is_experiment)
  for cell in cells:
    setting = asked.setting_of(cell)
    if not setting and not trains(cell.script):
      continue
    words = [arg for arg in cell.args if not arg.startswith('--seeds=')]
    words += cell.places
    if run_files.holds_run(cells_lib.folder(out, cell)):
      # A run that has begun may keep what a new one may not have.
      words.append(f'--workdir={cells_lib.folder(out, cell)}')
    file = cell.args[0].partition('--flagfile=')[2] if cell.args else ''
    known.setdefault((setting, *words), file or setting or cell.script)
  if not known:
    return
  told = [(shown, setting, words)
          for (setting, *words), shown in known.items()]
  try:
    done = subprocess.run(
        [python, *_PROGRAM], input=json.dumps(told),
        # What is checked needs no accelerator, which others may have taken.
        env=os.environ | env | {'JAX_PLATFORMS': 'cpu'},
        capture_output=True, text=True, errors='replace', check=False)
  except OSError:
    return
  if why := child.refusal(done):
    raise grid.GridError(why)


def main() -> int:
  """Checks the cells that the input lists; returns the exit code.

  A fault that may pass refuses no cell, and the others are checked.
  """
  child.end_with_parent()
  with checks.marking('--'):
    return _check_all(json.loads(sys.stdin.read()))


def _check_all(cells: Iterable[Sequence[Any]]) -> int:
  # By code of the user's own, after those without any.
  groups: dict[frozenset[str], list[list[Any]]] = {frozenset(): []}
  for shown, setting, words in cells:
    with _refusing(shown):
      groups.setdefault(_own_code(setting, words), []).append(
          [shown, setting, words])
  # Two files that register one name cannot be in one process.
  now, later = [*groups.values()][:2], [*groups.values()][2:]
  for shown, setting, words in itertools.chain(*now):
    with _refusing(shown):
      if setting:
        _check(setting, asked.options(setting, words)[0])
      else:
        _check_known(words)
  if not later:
    return 0
  return subprocess.run([sys.executable, *_PROGRAM], text=True, check=False,
                        input=json.dumps([*itertools.chain(*later)])
                        ).returncode


@contextlib.contextmanager
def _refusing(shown: str) -> Iterator[None]:
  """Ends the process with one line if a block raises what users can mend."""
  try:
    yield
  except (ValueError, OSError, MemoryError, flags.Error) as error:
    if (code := exit_codes.of(error)) == exit_codes.MAY_PASS:
      return
    from fedjax_ssl.cli import train
    print(f'error: {shown}: {errors.line(error, train.values())}',
          file=sys.stderr)
    sys.exit(code)


def _own_code(setting: str, words: Sequence[str]) -> frozenset[str]:
  """Returns the files and modules that a run of a setting imports."""
  if not setting:
    return frozenset()
  options, _ = asked.options(setting, words)
  return frozenset(imports.places(
      [getattr(options, name) for name in imports.TEXTS], options.imports))


def _check(setting: str, options: config.Config) -> None:
  """Makes the checks of `fedjax_ssl.running.runs.prepared` before the data.

  Raises:
    ValueError: for what the run would refuse.
  """
  from fedjax_ssl import task
  from fedjax_ssl.running import dealing, runs
  for place in options.imports:
    registry.import_place(place)
  if not options.eval_only:
    runs.check_read(settings.find(setting), options)
  texts = {name: getattr(options, name) for name in task.REGISTRIES}
  for name, text in {**texts, 'method': options.full_method}.items():
    _check_text(name, text)
  if options.workdir is None:
    dealing.check_asked(settings.find(setting).deal, options)
    given = [(name, getattr(options, name)) for name in _ADDITIONS]
    _check_method(options.full_method, options.labels_at,
                  tuple(one for one in given if one[1]))


@functools.cache
def _check_text(field: str, text: str | None) -> None:
  from fedjax_ssl import task
  task.check_texts({field: text})


@functools.cache
def _check_method(method: str, labels_at: str,
                  additions: tuple[tuple[str, str], ...]) -> None:
  """Refuses what a method cannot be combined with, whatever the data.

  The method is built for data that nobody has. Of its refusals only the one
  of --labels_at counts, and that of additions without which it is built. Code
  of the user's own is not run.

  Args:
    method: its text.
    labels_at: where the labels are.
    additions: names and texts of those of `_ADDITIONS` that are wanted.

  Raises:
    FieldError: if it refuses them.
  """
  from fedjax_ssl import methods, task
  if registry.is_own(method, methods.METHODS):
    return
  spec = task.TaskSpec(num_classes=10, input_shape=(8, 8, 1), model='linear',
                       method=method, labels_at=labels_at)
  try:
    methods.make(method, task.make_task(spec))
  except (ValueError, TypeError) as error:
    behind: BaseException | None = error
    while behind is not None:
      if isinstance(behind, checks.FieldError) and behind.field == 'labels_at':
        raise
      behind = behind.__cause__
    return
  if additions and not any(registry.is_own(text, task.REGISTRIES[name])
                           for name, text in additions):
    wanted: dict[str, Any] = dict(additions)
    with blame.naming('method', method, own=False):
      methods.make(method, task.make_task(dataclasses.replace(spec, **wanted)))


def _check_known(words: Sequence[str]) -> None:
  """Checks the knobs of known names among the flags of a user's script.

  Raises:
    FieldError: for one that the name does not take.
  """
  from fedjax_ssl import task
  from fedjax_ssl.cli import train
  try:
    asked.read({}, words)
  except flags.Error:
    return  # It may have flags of its own.
  said, named = train.values(), train.named()
  for field, known in task.REGISTRIES.items():
    text = said[field] if field in named else None
    if text is None or imports.split(text):
      continue
    name = registry.name_of(text)
    if name in known:
      _check_text(field, text)
