"""Runs the cells of a paper's table, seed after seed, within a budget."""
from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
import pathlib
import re
import tempfile
import time

from fedjax_ssl.cli import child, exit_codes
from fedjax_ssl.cli.table_plan import nothing_left, Plan, Step, steps
from fedjax_ssl.core import disk
from fedjax_ssl.papers import cells, flagfiles, results
from fedjax_ssl.report import printing

# What it says if its data set, or the folder of the sets, is not there.
_NO_DATA = re.compile(r'error: (data set .* not found|--data_dir=.* no folder)')


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
  with _alone(chosen.folder(), chosen.stored()):
    printing.say(f'Results: {chosen.stored()}')
    left = steps(chosen)
    if not left:
      printing.say(nothing_left(chosen))
    while left and deadline - time.monotonic() > 2 * child.grace(budget):
      step = left.pop(0)
      tick = time.monotonic()
      printing.say(f'started {step.cell.name}, seed {step.seed} '
                   f'({_log(chosen, step)})')
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
              f'as {chosen.dataset(step.cell)} was not found'
              if state == 'no data' else 'of this cell')
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


def run_step(chosen: Plan, step: Step, deadline: float) -> str:
  """Runs one seed of a cell.

  Returns:
    'done'; 'stopped' at the deadline; or 'failed', of these 'no data' if its
    data set was not found and 'killed' if a signal ended it.
  """
  workdir = chosen.workdir(step)
  workdir.parent.mkdir(parents=True, exist_ok=True)
  log = _log(chosen, step)
  flagfile = workdir.with_name(f'{step.cell.name}{flagfiles.ENDING}')
  disk.replace(flagfile, flagfiles.text(
      step.cell, workdir.parent.as_posix()).encode())
  with open(log, 'ab') as file:
    start = file.tell()
    code = child.run(chosen.command(step, [f'--flagfile={flagfile}']), file,
                     deadline)
  if code is None:
    return 'stopped'
  why = child.reason(code)
  try:
    if not code and _store(chosen, step, workdir):
      return 'done'
  except ValueError as error:  # Only this cell fails; the others go on.
    why = str(error)
  said = log.read_bytes()[start:].decode(errors='replace').splitlines()[-3:]
  for line in said:
    printing.say(f'    {line[:200]}')
  printing.say(f'    {why} [{log}]')
  if code == exit_codes.REFUSED and any(map(_NO_DATA.match, said)):
    return 'no data'
  return 'killed' if code < 0 or code and code in child.TOLD else 'failed'


def _log(chosen: Plan, step: Step) -> pathlib.Path:
  """Returns the file that gets what a run prints."""
  return chosen.workdir(step).with_suffix('.log')


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


def _would_fail(chosen: Plan, state: str, failed: cells.Cell,
                other: cells.Cell) -> bool:
  """Returns whether a cell would fail for the same reason as one that did."""
  if state == 'no data':
    return chosen.dataset(other) == chosen.dataset(failed)
  return state == 'failed' and other.name == failed.name
