r"""Runs a grid of experiments as processes of this machine.

fedjax-ssl sweep GRID.txt --out=runs/study --slots=2
fedjax-ssl sweep --out=runs/study --slots=2 -- \
    'setting: digits_dirdir' 'seeds: 0 1 2' \
    '--method=fixmatch | uda' --num_rounds=50

Grids are explained below. The same command again continues after an
interruption of any kind and skips what is finished; several sweeps may share a
folder, and a cell is then run by one of them. `--status` shows where each cell
stands, `--dry_run` prints the commands, `--shard=i/n` takes every n-th cell,
for n machines. A run that fails is tried again, but not if it refuses its flags
or data (its exit code 2).

Before anything runs all names, knobs and values are checked, as far as a run
could without its data. A folder is named by what varies in its grid: a run that
an edited grid would name otherwise is still taken for the cell of its flags;
folders that belong to no cell are named at the start and by `--status`; and a
cell whose folder has a run that cannot go on with its flags is refused.

Exit code 1: some cell failed; 2: the grid is wrong, a run would refuse its
flags, or the folder cannot be used; 75: a fault that may pass, such as a full
disk; 130, 143 and 129: ended by SIGINT, SIGTERM and SIGHUP.
"""
from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
import io
import pathlib
import shlex
import sys
from typing import Any

from fedjax_ssl.cli import arguments, child, exit_codes, method_names
from fedjax_ssl.cli.sweep import cells as cells_lib
from fedjax_ssl.cli.sweep import checking, grid, slots, study
from fedjax_ssl.report import printing


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
  parser = arguments.Parser('sweep', __doc__, epilog=grid.__doc__)
  parser.add_argument('grid', nargs='+', metavar='GRID',
                      help='a grid file, or after -- the lines of one')
  parser.add_argument('--out', required=True, help='folder of all runs')
  parser.add_argument('--slots', type=int, default=1,
                      help='runs at a time, each on its share of the '
                      'cores and of NVIDIA GPUs (default: 1)')
  parser.add_argument('--retries', type=int, default=1,
                      help='further attempts of a failed run (default: 1)')
  parser.add_argument('--shard', default='0/1', metavar='I/N',
                      help='only cells I, I+N, I+2N, ...')
  parser.add_argument('--env', action='append', default=[],
                      metavar='NAME=VALUE', help='variable of the runs; {slot} '
                      'is the slot, as in CUDA_VISIBLE_DEVICES={slot}')
  parser.add_argument('--python', default=sys.executable,
                      help='interpreter of the runs (default: this one)')
  parser.add_argument('--dry_run', action='store_true',
                      help='print the commands and stop')
  parser.add_argument('--status', action='store_true',
                      help='print where each cell stands and stop')
  return parser.parse_args(argv)


def read_cells(words: Sequence[str]) -> list[grid.Cell]:
  """Returns the cells of a grid file, or of a grid's lines.

  Raises:
    grid.GridError: if they cannot be read.
  """
  if len(words) == 1 and ':' not in words[0] and not words[0].startswith('--'):
    try:
      text = pathlib.Path(words[0]).read_text('utf-8')
    except (OSError, ValueError) as error:
      reason = getattr(error, 'strerror', None) or 'it is no text'
      raise grid.GridError(f'{words[0]} cannot be read: {reason}.') from error
    return grid.parse(text, words[0])
  return grid.parse('\n'.join(words), 'line')


def _environment(pairs: Sequence[str]) -> dict[str, str]:
  found = {}
  for pair in pairs:
    name, equals, value = pair.partition('=')
    if not name or not equals or '\0' in pair:
      shown = pair.replace('\0', r'\0')
      raise grid.GridError(f'--env={shown} must be NAME=VALUE.')
    found[name] = value
  return found


def status(out: pathlib.Path, cells: Sequence[grid.Cell]) -> str:
  """Returns a line for each cell: its state, its rounds and its name.

  Below a failed cell are the last lines that it printed.
  """
  lines = []
  counts: dict[str, int] = {}
  for cell in cells:
    stored = cells_lib.record(out, cell)
    now = cells_lib.progress(cells_lib.folder(out, cell))
    state, note = _state(out, cell, stored)
    counts[state] = counts.get(state, 0) + 1
    rounds = '-' if now is None else f'{now[0]}/{now[1]}'
    said = [note, f'in this grid {cell.renamed}' if cell.renamed else '']
    lines.append(f'{state:8} {rounds:>11}  {cell.name}'
                 + ''.join(f' ({words})' for words in said if words))
    if state == 'failed':
      lines.append(f'    {child.reason(int(stored.get("exit", 1)))}, '
                   f'{cells_lib.log(out, cell)}')
      lines += [f'    {line}' for line in stored.get('tail', ())]
  total = ', '.join(f'{state} {n}' for state, n in sorted(counts.items()))
  lines.append(f'{total} of {len(cells)}')
  if 'conflict' in counts:
    lines.append('A run cannot go on with other flags; give another --out.')
  return '\n'.join(lines)


def _state(out: pathlib.Path, cell: grid.Cell, stored: Mapping[str, Any]
           ) -> tuple[str, str]:
  """Returns the state of a cell, and what else there is to say or ''."""
  if cells_lib.is_done(out, cell):
    file = cells_lib.other_code(out, cell)
    return 'done', f'with an earlier {file}' if file else ''
  if cells_lib.is_held(out, cell):
    return 'running', ''
  if differs := study.conflict(out, cell):
    return 'conflict', f'its run has other flags: {differs}'
  if stored.get('state') == 'failed' and (
      stored.get('fingerprint') == cells_lib.fingerprint(cell)):
    return 'failed', ''
  other = cells_lib.other_flags(out, cell)
  return 'to do', f'its run has other flags: {other}' if other else ''


def _check_methods(cells: Sequence[grid.Cell]) -> None:
  """Refuses misspelt methods of settings before any run begins.

  Raises:
    FieldError: naming the first one.
  """
  for cell in cells:
    texts = [word.partition('=')[2] for word in cell.args
             if word.startswith('--method=')]
    if texts and cell.setting and not any(
        word.startswith('--import') for word in cell.args):
      method_names.check(texts[-1])


def _check(python: str, out: pathlib.Path, cells: Sequence[grid.Cell],
           env: Mapping[str, str]) -> None:
  """Refuses what no run could do, before any of them begins.

  Raises:
    ValueError: naming flag, value and what is allowed.
  """
  _check_methods(cells)
  cells_lib.check_flags(python, cells, env)
  # What is finished will not run, and may be of an earlier version.
  left = [cell for cell in cells if not cells_lib.is_done(out, cell)]
  checking.check(python, out, left, env)
  study.check(out, left)


@arguments.refusing
def main(argv: Sequence[str]) -> int:
  """Runs the sweep; returns the exit code."""
  if isinstance(sys.stdout, io.TextIOWrapper):  # Names may have any letters.
    sys.stdout.reconfigure(errors='backslashreplace')
  args = _arguments(argv)
  try:
    with child.ending_on_signals():
      chosen = _prepared(args)
  except child.Ended as ended:
    print(f'Ended by {ended}; nothing was started.', file=sys.stderr)
    return 128 + ended.number
  return chosen if isinstance(chosen, int) else chosen.run()


def _prepared(args: argparse.Namespace) -> slots.Sweep | int:
  """Returns what is to be run, or an exit code if there is nothing."""
  out = pathlib.Path(args.out)
  try:
    if not args.out:
      raise grid.GridError('--out= is empty; name a folder.')
    for name in ('out', 'python'):
      if '\0' in getattr(args, name):
        raise grid.GridError(f'--{name}={getattr(args, name)!r} holds a zero '
                             'byte, which no file has.')
    for name, least in (('slots', 1), ('retries', 0)):
      if getattr(args, name) < least:
        raise grid.GridError(f'--{name}={getattr(args, name)} must be at '
                             f'least {least}.')
    env = _environment(args.env)
    known = study.recognised(out, read_cells(args.grid))
    cells = grid.shard(known, args.shard)
    if args.status:
      _check_methods(cells)
      printing.say('\n'.join([status(out, cells), *study.notes(out, known)]))
      return 0
    _check(args.python, out, cells, env)
    for line in study.notes(out, known):
      printing.say(line, stream=sys.stderr)
    if args.dry_run:
      for cell in cells:
        printing.say(shlex.join(cells_lib.command(args.python, out, cell)))
      return 0
    (out / '.sweep').mkdir(parents=True, exist_ok=True)
  except OSError as error:
    print(f'error: --out={out} cannot be used: {error.strerror}.',
          file=sys.stderr)
    return exit_codes.of(error)
  return slots.Sweep(out, cells, num_slots=args.slots, retries=args.retries,
                     python=args.python, env=env)
