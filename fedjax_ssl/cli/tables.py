r"""Lists, prints, writes and runs the cells of the papers' tables.

fedjax-ssl tables --list
fedjax-ssl tables --table=feddure1 --list
fedjax-ssl tables --table=feddure1 --row=FedDure \
    --column='CIFAR-10 (DIR, DIR)' --print_flags
fedjax-ssl tables --table=feddure1 --write_flagfiles=DIR
fedjax-ssl tables --table=feddure1 --data_dir=DIR --budget_minutes=120
fedjax-ssl tables --table=feddure1 --data_dir=DIR --budget_minutes=30 \
    --variant=short -- --num_rounds=60 --model=cnn --norm=auto

The tables are in `fedjax_ssl/papers/tables/`, a file a paper or setting.
Without --table, --write_flagfiles writes the headline cells, a folder a paper
that has some. With --check it only says which of these files differ from the
tables.

With a budget, the cells that tell most are run first, one seed of each before
the next seed of any. The same command again goes on where the budget ended;
what is finished is not run again. A run that meets the end of the budget saves
and is continued next time. After a failure no further seed of the cell is
tried, and if its data set was not found, no cell with this set. `--status`
shows where each cell stands, as --list does; `--dry_run` prints the commands.
Flags after `--` change every cell; they need a --variant, which names another
folder of results, so that these are never taken for the table itself.
"""
from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
import contextlib
import os
import pathlib
import re
import shlex
import sys
import tempfile
import time
from typing import NamedTuple

from fedjax_ssl import config
from fedjax_ssl.cli import arguments, child, places
from fedjax_ssl.core import checks, disk, registry
from fedjax_ssl.papers import cells, flagfiles, results
from fedjax_ssl.report import printing
from fedjax_ssl.running import settings

# Flags of the runs that a table sets, or that fit no cell.
_OWN = 'seed', 'seeds', 'workdir', 'eval_only'

_REFUSED = 2  # Exit code of a run that refuses its flags or data.
# What it says if its data set, or the folder of the sets, is not there.
_NO_DATA = re.compile(r'error: (data set .* not found|--data_dir=.* no folder)')


def _results() -> pathlib.Path:
  """Returns the folder of results: in the repository, or else here."""
  root = places.repository()
  return pathlib.Path(
      'results' if root is None else root / 'experiments' / 'results', 'tables')


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

  def folder(self) -> pathlib.Path:
    """Returns the folder of all runs of the table."""
    name = self.table.name + (f'.{self.variant}' if self.variant else '')
    return self.runs / name

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
    return [*self.program(step.cell), *flags, *place, *self.flags,
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
    name = method.partition('(')[0]
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
      raise ValueError(
          f'{chosen.result(cell)} was made with {stored["extra_flags"]}, not '
          f'{[*chosen.flags]}; give another --variant.')
    if results.is_stale(cell, stored):
      continue
    done = stored.get('seeds', {})
    wanted += [(i, Step(cell, seed)) for i, seed in enumerate(cell.seeds())
               if str(seed) not in done]
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


def run_step(chosen: Plan, step: Step, deadline: float) -> str:
  """Runs one seed of a cell.

  Returns:
    'done', 'stopped', 'failed', or 'no data' if its data set was not found.
  """
  workdir = chosen.workdir(step)
  workdir.parent.mkdir(parents=True, exist_ok=True)
  log = workdir.with_suffix('.log')
  flagfile = workdir.with_name(f'{step.cell.name}{flagfiles.ENDING}')
  flagfile.write_text(
      flagfiles.text(step.cell, workdir.parent.as_posix()), 'utf-8')
  with open(log, 'ab') as file:
    start = file.tell()
    code = child.run(chosen.command(step, [f'--flagfile={flagfile}']), file,
                     deadline)
  if code is None:
    return 'stopped'
  try:
    good = not code and _store(chosen, step, workdir)
  except ValueError as error:  # Only this cell fails; the others go on.
    printing.say(f'    {error}')
    good = False
  if good:
    return 'done'
  said = log.read_bytes()[start:].decode(errors='replace').splitlines()[-3:]
  for line in said:
    printing.say(f'    {line[:200]}')
  return ('no data' if code == _REFUSED and any(map(_NO_DATA.match, said))
          else 'failed')


def _store(chosen: Plan, step: Step, workdir: pathlib.Path) -> bool:
  """Adds a seed's numbers to the cell's file; returns whether it finished."""
  from fedjax_ssl.report import stored_runs
  from fedjax_ssl.training import environment
  run = stored_runs.read(workdir)
  if run.rounds < run.config['flags']['num_rounds']:
    return False
  file = chosen.result(step.cell)
  cell = step.cell
  stored = results.read(file) or {
      'table': chosen.table.name, 'variant': chosen.variant, 'row': cell.row,
      'columns': cell.columns, 'cell': cell.name, 'flags': cell.flags,
      'extra_flags': chosen.flags, 'seeds': {}}
  rows, = run.seeds
  stored['seeds'][str(step.seed)] = {
      'rounds': run.rounds, 'seconds': run.seconds,
      **stored_runs.outcome(rows),
      'environment': environment.throughout(run.config),
      'restarts': len(run.config['restarts'])}
  stored['run_flags'] = {
      k: v for k, v in run.config['flags'].items()
      if k not in ('workdir', 'data_dir', 'seeds', 'seed')}
  results.write(file, stored)
  return True


@contextlib.contextmanager
def _alone(folder: pathlib.Path, results_folder: pathlib.Path
           ) -> Iterator[None]:
  """Locks the table's folders, so that two processes do not share cells.

  Raises:
    ValueError: if another process has one, or one cannot be written, which
      should show before hours of work.
  """
  with contextlib.ExitStack() as stack:
    for flag, place in (
        ('runs', folder), ('results', results_folder)):
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
        if not disk.try_lock(lock):
          raise ValueError(f'{place} is in use by another process.')
      except OSError as error:
        # Some file systems cannot lock folders. A lock file is no way out here:
        # among the results it would be taken for one.
        if flag == 'runs':
          raise ValueError(f'{place} cannot be locked: '
                           f'{error.strerror}.') from error
    yield


def run(chosen: Plan, budget: float, began: float) -> int:
  """Runs steps until all are done or the budget is spent.

  Args:
    chosen: what to run and where.
    budget: seconds.
    began: when they began, by `time.monotonic()`.

  Returns:
    An exit code: 1 if some cell failed.
  """
  # The rest of the budget is for the last steps of this function.
  deadline = began + budget - min(1.0, 0.05 * budget)
  done = failed = skipped = 0
  stored = chosen.results / chosen.folder().name
  with _alone(chosen.folder(), stored):
    printing.say(f'Results: {stored}')
    left = steps(chosen)
    while left and deadline - time.monotonic() > 2 * child.grace(budget):
      step = left.pop(0)
      tick = time.monotonic()
      state = run_step(chosen, step, deadline)
      said = f'seed {step.seed}, in {time.monotonic() - tick:.0f} s'
      if state == 'done':
        done += 1
      elif state == 'stopped':
        left.insert(0, step)
      else:
        failed += 1
        others = [other for other in left
                  if not _would_fail(chosen, state, step.cell, other.cell)]
        if count := len(left) - len(others):
          said += f'; {count} more skipped ' + (
              'of this cell' if state == 'failed' else
              f'as {chosen.dataset(step.cell)} was not found')
        skipped, left = skipped + count, others
        state = 'failed'
      printing.say(f'{state} {step.cell.name}, {said}; {len(left)} runs left')
      if state == 'stopped':
        break
  printing.say(
      f'{done} runs done, {failed} failed, '
      + (f'{skipped} skipped, ' if skipped else '') + f'{len(left)} left'
      + ('; the same command continues.' if left else
         '; the same command tries again.' if failed else '.'))
  return 1 if failed else 0


def _would_fail(chosen: Plan, state: str, failed: cells.Cell,
                other: cells.Cell) -> bool:
  """Returns whether a cell would fail for the same reason as one that did."""
  return other.name == failed.name or state == 'no data' and (
      chosen.dataset(other) == chosen.dataset(failed))


def commands(chosen: Plan) -> str:
  """Returns the commands of all runs that are left, in their order.

  The flags stand in them, as no flagfile is there before its cell is run.
  """
  return '\n'.join(
      shlex.join(chosen.command(step, step.cell.flags))
      for step in steps(chosen)) or 'Nothing is to be run; see --status.'


def listing(chosen: Plan) -> str:
  """Lists every cell in the order of running, with its state."""
  lines = []
  for cell in chosen.chosen:
    why = chosen.lacks(cell)
    stored = results.read(chosen.result(cell))
    done = stored.get('seeds', {})
    all_done = not why and done and all(str(s) in done for s in cell.seeds())
    state = ('missing' if why else
             'stale' if results.is_stale(cell, stored) else
             'done' if all_done else 'to do')
    lines.append(f'{state:8} {cell.row} | {", ".join(cell.columns)}: '
                 + (why or f'{cell.name}; paper: {flagfiles.published(cell)}')
                 + (f' (seeds done: {", ".join(done)})' if done else ''))
  return '\n'.join(lines)


def _plan(args: argparse.Namespace) -> Plan:
  flags = tuple(args.flags[1:] if args.flags[:1] == ['--'] else args.flags)
  if bool(flags) != bool(args.variant):
    raise ValueError('Flags after -- need a --variant=NAME, and a variant '
                     f'needs flags; got --variant={args.variant} and '
                     f'{[*flags]}.')
  if args.variant and not args.variant.replace('_', '').isalnum():
    raise ValueError(f'--variant={args.variant} must be letters and digits.')
  arguments.check_passed(flags, _OWN, 'a table', switches=True)
  place = args.data_dir
  if place == '':
    raise ValueError('--data_dir= is empty; name a folder or leave it out.')
  # A bucket is read by the runs alone.
  if place is not None and '://' not in place and not (
      os.path.isdir(os.path.expanduser(place))):
    raise ValueError(f'--data_dir={place} is no folder.')
  if args.scripts and not pathlib.Path(args.scripts).is_dir():
    raise ValueError(f'--scripts={args.scripts} is no folder.')
  table = cells.load(args.table, pathlib.Path(args.tables))
  return Plan(table, args.variant, flags, pathlib.Path(args.runs),
              pathlib.Path(args.results),
              pathlib.Path(args.scripts) if args.scripts else None,
              tuple(table.choose(args.row, args.column)), args.data_dir)


@contextlib.contextmanager
def _writing(folder: pathlib.Path) -> Iterator[None]:
  """Turns an error of writing into one that names the flag."""
  try:
    yield
  except OSError as error:
    raise ValueError(f'--write_flagfiles={folder} cannot be written: '
                     f'{error.strerror}.') from error


def _all_tables(args: argparse.Namespace) -> int:
  """Does what needs no --table; returns an exit code."""
  if flags := [flag for flag in args.flags if flag != '--']:
    raise ValueError(f'{flags[0]} is for the cells of a --table; name one.')
  for name in ('row', 'column', 'variant', 'data_dir'):
    if value := getattr(args, name):
      value = value[0] if isinstance(value, list) else value
      raise ValueError(f'--{name}={value} is for the cells of a --table; name '
                       'one.')
  folder = pathlib.Path(args.tables)
  found = cells.tables(folder)
  if not found:
    raise ValueError(f'--tables={folder} holds no tables.')
  if args.write_flagfiles:
    target = pathlib.Path(args.write_flagfiles)
    if args.check:
      lines = [*flagfiles.faults(target, folder)]
      for line in lines:
        print(f'error: {line}.', file=sys.stderr)
      return 1 if lines else 0
    with _writing(target):
      count = flagfiles.write_headline(target, folder)
    printing.say(f'wrote {count} flagfiles below {target}')
    return 0
  if not args.list and not args.status:
    raise ValueError('name a --table, or give --list.')
  for name, table in found.items():
    printing.say(f'{name:22} {len(table.cells()):3} cells  {table.title}')
  return 0


def _show(chosen: Plan, args: argparse.Namespace) -> bool:
  """Prints or writes cells, if that was asked for."""
  if args.list or args.status:
    printing.say(listing(chosen))
  elif args.dry_run:
    printing.say(commands(chosen))
  elif args.print_flags:
    for cell in chosen.chosen:
      if cell.missing:
        raise ValueError(f'{cell.row} | {cell.columns[0]}: {cell.missing}.')
      printing.say(flagfiles.text(cell), end='')
  elif args.write_flagfiles:
    target = pathlib.Path(args.write_flagfiles)
    with _writing(target):
      names = flagfiles.write(chosen.chosen, target)
    printing.say(f'wrote {len(names)} flagfile{"s" * (len(names) != 1)} into '
                 f'{target}')
  else:
    return False
  return True


def _parser() -> argparse.ArgumentParser:
  passed = {*map(checks.flag, config.OPTIONS)} - {*_OWN}
  parser = arguments.Parser('tables', __doc__, passes_on=passed)
  parser.add_argument('--table', help='one of those that --list names')
  parser.add_argument('--row', action='append', default=[], metavar='TITLE',
                      help='these rows only; may be repeated')
  parser.add_argument('--column', action='append', default=[], metavar='TITLE',
                      help='these columns only; may be repeated')
  parser.add_argument('--list', action='store_true',
                      help='show the cells, or without --table the tables')
  parser.add_argument('--status', action='store_true', help='as --list')
  parser.add_argument('--dry_run', action='store_true',
                      help='print the commands of all runs left and stop')
  parser.add_argument('--print_flags', action='store_true',
                      help="print the cells' flags, as flagfiles")
  parser.add_argument('--write_flagfiles', metavar='DIR',
                      help='write a flagfile for each cell into this folder')
  parser.add_argument('--check', action='store_true',
                      help='with --write_flagfiles: compare, write nothing')
  parser.add_argument('--budget_minutes', type=float, default=60.0,
                      metavar='N', help='time for all runs (default: 60)')
  parser.add_argument('--data_dir', help='as of `fedjax-ssl train`')
  parser.add_argument('--variant', default='', metavar='NAME',
                      help='name of the results with the flags after --')
  parser.add_argument('--runs', default='runs/tables',
                      help='folder of runs (default: %(default)s)')
  parser.add_argument('--results', default=str(_results()),
                      help='folder of results, a file a cell (default: '
                      '%(default)s)')
  parser.add_argument('--tables', default=str(cells.TABLES),
                      help="folder of the papers' tables")
  parser.add_argument('--scripts', help='folder with a script for each '
                      'setting, instead of those of `fedjax-ssl train`')
  parser.add_argument('flags', nargs=argparse.REMAINDER,
                      help='flags of all cells, after --')
  return parser


@arguments.refusing
def main(argv: Sequence[str]) -> int:
  """Runs or lists a table; returns an exit code."""
  began = time.monotonic()  # The budget counts what is imported from here on.
  args = _parser().parse_args(argv)
  try:
    if sum(map(bool, (args.list, args.status, args.dry_run, args.print_flags,
                      args.write_flagfiles))) > 1:
      raise ValueError('give one of --list, --status, --dry_run, '
                       '--print_flags and --write_flagfiles.')
    if args.check and (args.table or not args.write_flagfiles):
      raise ValueError('--check goes with --write_flagfiles, without --table.')
    if args.table is None:
      return _all_tables(args)
    if not args.budget_minutes > 0:
      raise ValueError(f'--budget_minutes={args.budget_minutes} must be '
                       'positive.')
    chosen = _plan(args)
    if _show(chosen, args):
      return 0
    for line in missing(chosen) + stale(chosen):
      printing.say(line)
    with child.ending_on_signals():
      return run(chosen, 60 * args.budget_minutes, began)
  except child.Ended as ended:
    print(f'Ended by {ended}; the same command continues.', file=sys.stderr)
    return 128 + ended.number
