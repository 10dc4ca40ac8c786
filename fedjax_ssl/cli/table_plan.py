"""What is to be run of a paper's table: cells, seeds, commands, folders."""
from __future__ import annotations

from collections.abc import Sequence
import pathlib
import shlex
import sys
from typing import NamedTuple

from fedjax_ssl.core import registry, run_files
from fedjax_ssl.papers import cells, flagfiles, results
from fedjax_ssl.running import settings


class Plan(NamedTuple):
  """What to run, where, and with which changes."""

  table: cells.Table
  variant: str
  flags: tuple[str, ...]
  runs: pathlib.Path
  results: pathlib.Path
  scripts: pathlib.Path | None  # Folder of scripts to run, not settings.
  chosen: tuple[cells.Cell, ...]  # In the order of running.
  data_dir: str | None = None  # Not among the flags: it changes no result.
  seeds: tuple[int, ...] = ()  # To run; () is all of the cells.

  def folder(self) -> pathlib.Path:
    """Returns the folder of all runs of the table."""
    name = self.table.name + (f'.{self.variant}' if self.variant else '')
    return self.runs / name

  def stored(self) -> pathlib.Path:
    """Returns the folder of the table's results."""
    return self.results / self.folder().name

  def result(self, cell: cells.Cell) -> pathlib.Path:
    """Returns the file of a cell's numbers."""
    return results.file_of(cell, self.results, self.variant)

  def program(self, cell: cells.Cell) -> list[str]:
    """Returns the command of a cell, without flags."""
    if self.scripts is None:
      return settings.program(cell.setting)
    return [sys.executable, str(self.scripts / f'{cell.setting}.py')]

  def workdir(self, step: Step) -> pathlib.Path:
    """Returns the folder of a run."""
    return self.folder() / step.cell.name / f'seed_{step.seed}'

  def command(self, step: Step, flags: Sequence[str]) -> list[str]:
    """Returns the command of a run.

    Args:
      step: what it runs.
      flags: of its cell, or the flagfile that holds them.
    """
    place = () if self.data_dir is None else (f'--data_dir={self.data_dir}',)
    shared = [flag for flag in flags if not flag.startswith('--seeds=')]
    return [*self.program(step.cell), *shared, *place, *self.flags,
            f'--seeds={step.seed}', f'--workdir={self.workdir(step)}']

  def dataset(self, cell: cells.Cell) -> str:
    """Returns a cell's data set, in words if only its script has the name."""
    given = [flag.partition('=')[2] for flag in (*cell.flags, *self.flags)
             if flag.startswith('--dataset=')]
    if given:
      return given[-1]
    return (settings.defaults_of(cell.setting)['dataset']
            if self.scripts is None else f'the data set of {cell.setting}')

  def lacks(self, cell: cells.Cell) -> str:
    """Says why a cell cannot be run yet; '' if it can."""
    if cell.missing:
      return cell.missing
    if cell.setting not in settings.SETTINGS if self.scripts is None else not (
        self.scripts / f'{cell.setting}.py').exists():
      return f'{cell.setting} does not exist yet'
    from fedjax_ssl import methods
    method = cell.flag('method')
    if not method or registry.is_own(method, methods.METHODS):
      return ''
    name = registry.name_of(method)
    known = methods.METHODS  # Entry points are looked up for others alone.
    return '' if name in known or name in known.entry_points() else (
        f'method {name} does not exist yet')


class Step(NamedTuple):
  """One seed of a cell."""

  cell: cells.Cell
  seed: int


def steps(chosen: Plan) -> list[Step]:
  """Returns what is left: every cell's first seed, then the second ones, ..."""
  wanted: list[tuple[int, Step]] = []
  for cell in chosen.chosen:
    if chosen.lacks(cell):
      continue
    stored = results.read(chosen.result(cell))
    if stored and stored['extra_flags'] != [*chosen.flags]:
      was, now = (' '.join(flags) or 'no flags' for flags in (
          stored['extra_flags'], chosen.flags))
      raise ValueError(f'{chosen.result(cell)} was made with {was}, not {now}; '
                       'give another --variant.')
    if results.is_stale(cell, stored):
      continue
    done = stored.get('seeds', {})
    wanted += [(i, Step(cell, seed)) for i, seed in enumerate(cell.seeds())
               if str(seed) not in done
               and seed in (chosen.seeds or cell.seeds())]
  return [step for _, step in sorted(wanted, key=lambda pair: pair[0])]


def missing(chosen: Plan) -> list[str]:
  """Returns a line for each cell that cannot be run yet."""
  return [f'missing: {cell.row} | {", ".join(cell.columns)}: {why}'
          for cell in chosen.chosen if (why := chosen.lacks(cell))]


def stale(chosen: Plan) -> list[str]:
  """Returns a line for each cell whose flags changed since it was run."""
  return [f'stale: {cell.row} | {", ".join(cell.columns)}: its flags have '
          f'changed since {file} was made; to run it again remove that file '
          f'and {chosen.folder() / cell.name}'
          for cell in chosen.chosen if (file := chosen.result(cell)).exists()
          and results.is_stale(cell, results.read(file))]


def commands(chosen: Plan) -> str:
  """Returns the commands of all runs that are left, in their order.

  The flags stand in them, as no flagfile is there before its cell is run.
  """
  return '\n'.join(
      shlex.join(chosen.command(step, step.cell.flags))
      for step in steps(chosen)) or nothing_left(chosen)


def nothing_left(chosen: Plan) -> str:
  """Says why no run is left."""
  if not any(chosen.result(cell).exists() for cell in chosen.chosen):
    return 'Nothing is to be run; see --status.'
  return (f'Nothing is to be run: {chosen.stored()} has the results; another '
          '--results=DIR runs these cells anew, --status lists them.')


def listing(chosen: Plan) -> str:
  """Lists every cell in the order of running, with its state."""
  lines = []
  for cell in chosen.chosen:
    why = chosen.lacks(cell)
    stored = results.read(chosen.result(cell))
    done = stored.get('seeds', {})
    left = [seed for seed in cell.seeds() if str(seed) not in done]
    begun = [str(seed) for seed in left
             if run_files.holds_run(chosen.workdir(Step(cell, seed)))]
    state = ('missing' if why else
             'stale' if results.is_stale(cell, stored) else
             'to do' if left else 'done')
    lines.append(f'{state:8} {cell.row} | {", ".join(cell.columns)}: '
                 + (why or f'{cell.name}; paper: {flagfiles.published(cell)}')
                 + (f' (seeds done: {", ".join(done)})' if done else '')
                 + (f' (seeds begun: {", ".join(begun)})' if begun else ''))
  return '\n'.join(lines)
