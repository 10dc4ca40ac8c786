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
from collections.abc import Sequence
import os
import pathlib
import sys
import time

from fedjax_ssl import config
from fedjax_ssl.cli import arguments, child, places, table_plan, table_runs
from fedjax_ssl.cli.sweep import cells as sweep_cells
from fedjax_ssl.cli.sweep import checking, grid
from fedjax_ssl.cli.table_plan import Plan
from fedjax_ssl.core import checks, disk
from fedjax_ssl.papers import cells, flagfiles
from fedjax_ssl.report import printing

# Flags of the runs that a table sets, or that fit no cell.
_OWN = 'seed', 'seeds', 'workdir', 'eval_only'


def _results() -> pathlib.Path:
  """Returns the folder of results: in the repository, or else here."""
  root = places.repository()
  return pathlib.Path(
      'results' if root is None else root / 'experiments' / 'results', 'tables')


def _plan(args: argparse.Namespace) -> Plan:
  flags = tuple(args.flags[1:] if args.flags[:1] == ['--'] else args.flags)
  reads = args.list or args.status
  if flags and not args.variant or args.variant and not flags and not reads:
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
  chosen = tuple(table.choose(args.row, args.column))
  return Plan(table, args.variant, flags, pathlib.Path(args.runs),
              pathlib.Path(args.results),
              pathlib.Path(args.scripts) if args.scripts else None,
              chosen, args.data_dir, _seeds(args.seeds, chosen))


def _seeds(text: str | None, chosen: Sequence[cells.Cell]) -> tuple[int, ...]:
  """Returns the seeds that --seeds names, each one of a chosen cell."""
  known = sorted({seed for cell in chosen for seed in cell.seeds()})
  words = [] if text is None else text.split(',')
  if not {*words} <= {*map(str, known)}:
    raise ValueError(f'--seeds={text}: the cells have seeds '
                     f'{",".join(map(str, known))}; name some of these.')
  return tuple(map(int, words))


def _check(chosen: Plan) -> None:
  """Refuses flags of a variant with which no run would start.

  Scripts check theirs as they start.

  Raises:
    GridError: naming the first setting that refuses them.
  """
  if chosen.scripts is not None or not chosen.flags:
    return
  left = {step.cell.name: grid.Cell(
      step.cell.name, '', (*step.cell.flags, *chosen.flags),
      step.cell.setting) for step in table_plan.steps(chosen)}
  sweep_cells.check_flags(sys.executable, [*left.values()], {})
  checking.check(sys.executable, chosen.folder(), [*left.values()], {})


def _all_tables(args: argparse.Namespace) -> int:
  """Does what needs no --table; returns an exit code."""
  if flags := [flag for flag in args.flags if flag != '--']:
    raise ValueError(f'{flags[0]} is for the cells of a --table; name one.')
  for name in ('row', 'column', 'seeds', 'variant', 'data_dir'):
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
    with disk.writing(f'--write_flagfiles={target}'):
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
    printing.say(table_plan.listing(chosen))
  elif args.dry_run:
    printing.say(table_plan.commands(chosen))
  elif args.print_flags:
    for cell in chosen.chosen:
      if cell.missing:
        raise ValueError(f'{cell.row} | {cell.columns[0]}: {cell.missing}.')
      printing.say(flagfiles.text(cell), end='')
  elif args.write_flagfiles:
    target = pathlib.Path(args.write_flagfiles)
    with disk.writing(f'--write_flagfiles={target}'):
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
  parser.add_argument('--seeds', metavar='0,1',
                      help='run these seeds of the cells only')
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
    for line in table_plan.missing(chosen) + table_plan.stale(chosen):
      printing.say(line)
    with child.ending_on_signals():
      _check(chosen)
      return table_runs.run(chosen, 60 * args.budget_minutes, began)
  except child.Ended as ended:
    print(f'Ended by {ended}; the same command continues.', file=sys.stderr)
    return 128 + ended.number
