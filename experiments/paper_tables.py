r"""Runs a paper's table cell by cell, within a budget of time.

python experiments/paper_tables.py --table=feddure1 --budget_minutes=120
python experiments/paper_tables.py --table=feddure1 --budget_minutes=30 \
    --variant=short -- --num_rounds=60 --model=cnn --norm=auto
python experiments/paper_tables.py --table=feddure1 --list
python experiments/paper_tables.py --table=fedssl3 --row=Supervise --row=Pseudo

The cells that tell most come first, one seed of each before the next seed of
any. The same command again goes on where the budget ended; what is finished is
not run again. A run that meets the end of the budget saves and is continued
next time. Flags after `--` change every cell and need a `--variant` of the
results' folder, so that they are never taken for the table itself.
"""
from __future__ import annotations

import time

_BEGAN = time.monotonic()  # The budget counts the imports below.

# ruff: noqa: E402
import argparse
from collections.abc import Iterator, Sequence
import contextlib
import fcntl
import os
import pathlib
import sys
import tempfile
from typing import NamedTuple

import paper_cells
import paper_runs
import printing
import report_data

from fedjax_ssl import methods


class Settings(NamedTuple):
  """Where things are and what is changed."""

  table: paper_cells.Table
  variant: str
  flags: tuple[str, ...]
  runs: pathlib.Path
  results: pathlib.Path
  flagfiles: pathlib.Path
  rows: tuple[str, ...] = ()  # Titles; none is all.
  columns: tuple[str, ...] = ()

  def cells(self) -> list[paper_cells.Cell]:
    """Of the chosen rows and columns, in the order of running."""
    return [cell for cell in self.table.cells()
            if (not self.rows or cell.row in self.rows)
            and (not self.columns or {*cell.columns} & {*self.columns})]

  def folder(self) -> pathlib.Path:
    """Of all runs of the table."""
    name = self.table.name + (f'.{self.variant}' if self.variant else '')
    return self.runs / name

  def result(self, cell: paper_cells.Cell) -> pathlib.Path:
    """The file of a cell's numbers."""
    return paper_cells.result_file(
        self.table.name, cell, self.variant, self.results)


class Step(NamedTuple):
  """One seed of a cell."""

  cell: paper_cells.Cell
  seed: int


def steps(chosen: Settings) -> list[Step]:
  """What is left to run: every cell's first seed, then every second one."""
  wanted: list[tuple[int, Step]] = []
  for cell in chosen.cells():
    if paper_cells.lacks(cell, [*methods.METHODS], chosen.flagfiles):
      continue
    stored = paper_cells.read_result(chosen.result(cell))
    if stored and stored['extra_flags'] != [*chosen.flags]:
      raise ValueError(
          f'{chosen.result(cell)} was made with {stored["extra_flags"]}, not '
          f'{[*chosen.flags]}; give another --variant.')
    if paper_cells.is_stale(cell, stored, chosen.flags, chosen.flagfiles):
      continue
    done = stored.get('seeds', {})
    wanted += [(i, Step(cell, seed)) for i, seed in enumerate(
        paper_cells.seeds_of(cell, chosen.flagfiles)) if str(seed) not in done]
  return [step for _, step in sorted(wanted, key=lambda pair: pair[0])]


def missing(chosen: Settings) -> list[str]:
  """A line for each cell that cannot be run yet."""
  return [f'missing: {cell.row} | {", ".join(cell.columns)}: {why}'
          for cell in chosen.cells()
          if (why := paper_cells.lacks(
              cell, [*methods.METHODS], chosen.flagfiles))]


def stale(chosen: Settings) -> list[str]:
  """A line for each cell whose flags changed since its numbers were made."""
  return [f'stale: {cell.row} | {", ".join(cell.columns)}: {cell.flagfile} has '
          f'changed since {file} was made; to run it again remove that file '
          f'and {chosen.folder() / cell.name}'
          for cell in chosen.cells()
          if (file := chosen.result(cell)).exists() and paper_cells.is_stale(
              cell, paper_cells.read_result(file), chosen.flags,
              chosen.flagfiles)]


def run_step(chosen: Settings, step: Step, deadline: float) -> str:
  """Runs one seed of a cell; returns 'done', 'stopped' or 'failed'."""
  workdir = chosen.folder() / step.cell.name / f'seed_{step.seed}'
  workdir.parent.mkdir(parents=True, exist_ok=True)
  log = workdir.with_suffix('.log')
  flagfile = chosen.flagfiles / step.cell.flagfile
  digest = paper_cells.digest(step.cell, chosen.flags, chosen.flagfiles)
  command = [sys.executable,
             str(paper_cells.script_of(step.cell, chosen.flagfiles)),
             f'--flagfile={flagfile}', *step.cell.flags, *chosen.flags,
             f'--seeds={step.seed}', f'--workdir={workdir}']
  with open(log, 'ab') as file:
    code = paper_runs.run(command, file, deadline)
  if code is None:
    return 'stopped'
  try:
    good = not code and _store(chosen, step, workdir, digest)
  except ValueError as error:  # Of this cell; the others go on.
    printing.say(f'    {error}')
    good = False
  if not good:
    tail = log.read_text(errors='replace').splitlines()[-3:]
    for line in tail:
      printing.say(f'    {line[:200]}')
    return 'failed'
  return 'done'


def _store(chosen: Settings, step: Step, workdir: pathlib.Path, digest: str
           ) -> bool:
  """Adds a seed's numbers to the cell's file; whether it was finished."""
  run = report_data.read(workdir)
  if run.rounds < run.config['flags']['num_rounds']:
    return False
  file = chosen.result(step.cell)
  stored = paper_cells.read_result(file) or {
      'table': chosen.table.name, 'variant': chosen.variant,
      'row': step.cell.row, 'columns': step.cell.columns,
      'flagfile': step.cell.flagfile, 'flags': step.cell.flags,
      'extra_flags': chosen.flags, 'digest': digest, 'seeds': {}}
  if stored.get('digest', digest) != digest:
    printing.say(f'    {step.cell.flagfile} has changed since {file.name} was '
                 'made')
    return False
  rows, = run.seeds
  stored['seeds'][str(step.seed)] = {
      'rounds': run.rounds, 'seconds': run.seconds,
      **report_data.outcome(rows),
      'environment': run.config['environment'],
      'restarts': len(run.config['restarts'])}
  stored['run_flags'] = {
      k: v for k, v in run.config['flags'].items()
      if k not in ('workdir', 'data_dir', 'seeds', 'seed')}
  paper_cells.write_result(file, stored)
  return True


@contextlib.contextmanager
def _alone(folder: pathlib.Path, results: pathlib.Path) -> Iterator[None]:
  """Holds the table's folders, so that two processes do not share cells.

  Raises:
    ValueError: if another process has one, or it cannot be written, which
      should show before hours of work.
  """
  with contextlib.ExitStack() as stack:
    for flag, place in (('runs', folder), ('results', results)):
      try:
        place.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
        lock = os.open(*((folder / 'lock', os.O_RDWR | os.O_CREAT, 0o666)
                         if flag == 'runs' else (place, os.O_RDONLY)))
        stack.callback(os.close, lock)
      except OSError as error:
        raise ValueError(f'--{flag}: {place} cannot be used: '
                         f'{error.strerror}.') from error
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except (BlockingIOError, PermissionError):  # The latter on some NFS.
        raise ValueError(f'{place} is in use by another process.') from None
      except OSError as error:
        # Some file systems lock no folder; a lock file among the results would
        # be taken for one of them.
        if flag == 'runs':
          raise ValueError(f'{place} cannot be locked: '
                           f'{error.strerror}.') from error
    yield


def run(chosen: Settings, budget: float, began: float) -> int:
  """Runs steps until all are done or the budget is spent.

  Args:
    chosen: what to run and where.
    budget: seconds.
    began: when they began to count.

  Returns:
    An exit code: 1 if some cell failed.
  """
  # The rest is for saving and for the table's own end.
  deadline = began + budget - min(1.0, 0.05 * budget)
  counts = {'done': 0, 'stopped': 0, 'failed': 0}
  results = chosen.results / chosen.folder().name
  with _alone(chosen.folder(), results):
    left = steps(chosen)
    failed: set[str] = set()
    while left and deadline - time.monotonic() > 2 * paper_runs.grace(budget):
      step = left.pop(0)
      if step.cell.name in failed:
        continue
      tick = time.monotonic()
      state = run_step(chosen, step, deadline)
      counts[state] += 1
      if state == 'failed':
        failed.add(step.cell.name)
      printing.say(f'{state} {step.cell.name}, seed {step.seed}, in '
                   f'{time.monotonic() - tick:.0f} s; {len(left)} runs left')
      if state == 'stopped':
        break
  rest = len(steps(chosen))
  printing.say(f'{counts["done"]} runs done, {counts["failed"]} failed, {rest} '
               'left' + ('; the same command continues.' if rest else '.'))
  return 1 if counts['failed'] else 0


def listing(chosen: Settings) -> str:
  """Every cell in the order of running, with its state."""
  lines = []
  for cell in chosen.cells():
    why = paper_cells.lacks(cell, [*methods.METHODS], chosen.flagfiles)
    stored = paper_cells.read_result(chosen.result(cell))
    done = stored.get('seeds', {})
    all_done = not why and done and all(
        str(s) in done for s in paper_cells.seeds_of(cell, chosen.flagfiles))
    state = ('missing' if why else 'stale' if paper_cells.is_stale(
        cell, stored, chosen.flags, chosen.flagfiles)
             else 'done' if all_done else 'to do')
    lines.append(f'{state:8} {cell.row} | {", ".join(cell.columns)}: '
                 + (why or ' '.join([cell.flagfile, *cell.flags]))
                 + (f' (seeds {", ".join(done)})' if done else ''))
  return '\n'.join(lines)


def _settings(args: argparse.Namespace) -> Settings:
  flags = tuple(args.flags[1:] if args.flags[:1] == ['--'] else args.flags)
  if bool(flags) != bool(args.variant):
    raise ValueError('Flags after -- need a --variant=NAME, and a variant '
                     f'needs flags; got --variant={args.variant} and '
                     f'{[*flags]}.')
  if args.variant and not args.variant.replace('_', '').isalnum():
    raise ValueError(f'--variant={args.variant} must be letters and digits.')
  bad = [f for f in flags if not f.startswith('--')
         or f[2:].partition('=')[0] in (
             'seed', 'seeds', 'workdir', 'flagfile', 'eval_only')]
  if bad:
    raise ValueError(f'{bad[0]} cannot be given to all cells.')
  table = paper_cells.load(args.table, pathlib.Path(args.tables))
  for flag, titles, parts in (('row', args.row, table.rows),
                              ('column', args.column, table.columns)):
    known = [part['title'] for part in parts]
    for title in titles:
      if title not in known:
        raise ValueError(f'--{flag}={title} is not in {table.name}; it has '
                         f'{", ".join(map(repr, known))}.')
  return Settings(table, args.variant, flags, pathlib.Path(args.runs),
                  pathlib.Path(args.results), pathlib.Path(args.flagfiles),
                  tuple(args.row), tuple(args.column))


def _since_start() -> float:
  """Seconds since the imports began, if this is the program."""
  return time.monotonic() - _BEGAN if __name__ == '__main__' else 0.0


def main(argv: Sequence[str]) -> int:
  """Runs or lists a table; returns an exit code."""
  began = time.monotonic() - _since_start()
  parser = argparse.ArgumentParser(
      description=__doc__, allow_abbrev=False,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--table', help='a file of experiments/tables')
  parser.add_argument('--row', action='append', default=[], metavar='TITLE',
                      help='run these rows only; may be repeated')
  parser.add_argument('--column', action='append', default=[], metavar='TITLE',
                      help='run these columns only; may be repeated')
  parser.add_argument('--budget_minutes', type=float, default=60.0,
                      metavar='N', help='time for all runs (default: 60)')
  parser.add_argument('--variant', default='', metavar='NAME',
                      help='name of the results with the flags after --')
  parser.add_argument('--list', action='store_true',
                      help='show the cells, or without --table the tables')
  parser.add_argument('--runs', default='runs/tables', help='folder of runs')
  parser.add_argument('--results', default=str(paper_cells.RESULTS),
                      help='folder of results, a file a cell')
  parser.add_argument('--tables', default=str(paper_cells.TABLES),
                      help='folder of tables')
  parser.add_argument('--flagfiles', default=str(paper_cells.FLAGFILES),
                      help='folder of flagfiles, below that of the scripts')
  parser.add_argument('flags', nargs=argparse.REMAINDER,
                      help='flags of all cells, after --')
  args = parser.parse_args(argv)
  try:
    if args.table is None:
      if not args.list:
        raise ValueError('name a --table, or give --list.')
      found = paper_cells.names(pathlib.Path(args.tables))
      if not found:
        raise ValueError(f'--tables={args.tables} holds no tables.')
      for name in found:
        table = paper_cells.load(name, pathlib.Path(args.tables))
        printing.say(f'{name:18} {len(table.cells()):3} cells  {table.title}')
      return 0
    chosen = _settings(args)
    if args.list:
      printing.say(listing(chosen))
      return 0
    if not args.budget_minutes > 0:
      raise ValueError(f'--budget_minutes={args.budget_minutes} must be '
                       'positive.')
    for line in missing(chosen) + stale(chosen):
      printing.say(line)
    with paper_runs.ending_on_signals():
      return run(chosen, 60 * args.budget_minutes, began)
  except paper_runs.Ended as ended:
    print(f'Ended by {ended}; the same command continues.', file=sys.stderr)
    return 128 + ended.number
  except (ValueError, OSError) as error:
    print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
    return 2


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
