"""Runs the processes of a sweep: some at a time, watched, retried, ended."""
from __future__ import annotations

import collections
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from typing import IO

from fedjax_ssl.cli import child, exit_codes
from fedjax_ssl.cli.sweep import cells as cells_lib
from fedjax_ssl.cli.sweep import grid, shares
from fedjax_ssl.core import durations, ending
from fedjax_ssl.report.printing import say

_TICK = 0.02  # Seconds between two looks at the processes.
_LOOK = 3.0  # Seconds between two looks at cells of another sweep.
_LIVE = 0.1  # Seconds between two lines of status on a terminal.
_LINE = 60.0  # Seconds between two lines of status, where there is no terminal.
_GRACE = 60.0  # Seconds that a run has to save, once told to end.
_TAIL = 1 << 16  # Bytes at the end of a log that are looked at.


@dataclasses.dataclass
class _Running:
  """A process and what it runs."""

  cell: grid.Cell
  process: subprocess.Popen
  lock: int
  log: IO[bytes]
  start: int  # Where this attempt begins in the log.
  asked: str  # Fingerprint at the start; a flagfile may change meanwhile.
  began: float


class Sweep:
  """Runs cells until each is done or has failed for good."""

  def __init__(self, out: pathlib.Path, cells: Sequence[grid.Cell], *,
               num_slots: int, retries: int, python: str,
               env: dict[str, str], title: str = ''):
    """Makes a sweep; nothing runs before `run`.

    Args:
      out: folder of all runs.
      cells: what to run.
      num_slots: runs at a time.
      retries: further attempts of a failed run.
      python: interpreter of the runs.
      env: variables of the runs; values may hold {slot}.
      title: what these cells are part of, before each line of progress.
    """
    self._title = f'{title}: ' if title else ''
    self._out, self._cells = out, list(cells)
    self._retries, self._python, self._env = retries, python, env
    # No more slots than cells, so that the cells share all cores.
    self._slots: list[_Running | None] = [None] * min(
        num_slots, max(len(cells), 1))
    self._queue = collections.deque(cells)
    self._attempts: collections.Counter[str] = collections.Counter()
    self._elsewhere: list[grid.Cell] = []
    self._done = self._before = 0
    self._failed: dict[str, dict] = {}
    self._seconds: list[float] = []
    self._heard = 0  # Signal that ends the sweep.
    self._began = self._said = self._looked = time.monotonic()
    self._live = sys.stderr.isatty()

  def run(self) -> int:
    """Runs all cells; returns the exit code."""
    with ending.handled(self._hear):
      try:
        self._run_all()
      except OSError as error:  # The folder fails; without it no run can go on.
        self._end_all()
        say(f'error: {error.filename or self._out} cannot be used: '
            f'{error.strerror or error}.', stream=sys.stderr)
        return exit_codes.of(error)
    self._summary()
    if self._heard:
      return 128 + self._heard
    return 1 if self._failed else 0

  def _run_all(self) -> None:
    self._warn()
    while not self._heard and (
        self._queue or self._elsewhere or any(self._slots)):
      self._reap()
      self._fill()
      self._return_to_others()
      self._show()
      time.sleep(_TICK)
    if self._heard:
      self._say(f'ending {sum(map(bool, self._slots))} runs; the same '
                'command continues')
      self._end_all()
      self._reap()

  def _hear(self, number, frame) -> None:
    del frame
    self._heard = number
    if number == signal.SIGHUP:
      ending.leave_terminal()

  def _warn(self) -> None:
    """Names cells whose folders have runs with other flags, by difference."""
    found: dict[str, list[str]] = {}
    for cell in self._cells:
      if other := cells_lib.other_flags(self._out, cell):
        found.setdefault(other, []).append(cell.name)
    for other, names in found.items():
      more = f' and {len(names) - 1} more' if len(names) > 1 else ''
      self._say(f'{names[0]}{more}: a run with other flags is there, which may '
                f'refuse these ({other}); another --out leaves it alone')

  def _fill(self) -> None:
    """Starts cells in free slots."""
    for slot, running in enumerate(self._slots):
      while running is None and self._queue:
        running = self._slots[slot] = self._start(self._queue.popleft(), slot)
        if running is not None:
          self._say(f'started {running.cell.name}')

  def _start(self, cell: grid.Cell, slot: int) -> _Running | None:
    handle = cells_lib.lock(self._out, cell)
    if handle is None:
      self._elsewhere.append(cell)
      return None
    if cells_lib.is_done(self._out, cell):
      os.close(handle)
      self._before += 1
      if file := cells_lib.other_code(self._out, cell):
        self._say(f'{cell.name} was run with an earlier {file}; remove '
                  f'{cells_lib.folder(self._out, cell)} to run it again')
      return None
    command = cells_lib.command(self._python, self._out, cell)
    self._attempts[cell.name] += 1
    log = open(cells_lib.log(self._out, cell), 'ab', buffering=0)
    log.write(f'== {shlex.join(command)}\n'.encode())
    start, asked = log.tell(), cells_lib.fingerprint(cell)
    count = len(self._slots)
    env = {name: value.replace('{slot}', str(slot))
           for name, value in self._env.items()}
    # Who names the GPUs of a slot has shared them.
    if 'CUDA_VISIBLE_DEVICES' not in env:
      env |= shares.gpus(slot, count, os.environ | env)
    try:
      process = subprocess.Popen(
          command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
          env=os.environ | env, pass_fds=(handle,), start_new_session=True,
          preexec_fn=functools.partial(_begin, shares.cores(slot, count)))
    except OSError as error:
      log.write(f'{self._python} cannot be started: {error}\n'.encode())
      log.close()
      self._judge(cell, error.errno or 1, start, asked, 0.0)
      os.close(handle)
      return None
    return _Running(cell, process, handle, log, start, asked,
                    time.monotonic())

  def _reap(self) -> None:
    """Frees the slots of runs that have ended, and judges these."""
    for slot, running in enumerate(self._slots):
      if running is not None and running.process.poll() is not None:
        self._slots[slot] = None
        running.log.close()
        self._judge(running.cell, running.process.returncode, running.start,
                    running.asked, time.monotonic() - running.began)
        os.close(running.lock)

  def _judge(self, cell: grid.Cell, code: int, start: int, asked: str,
             seconds: float) -> None:
    """Writes down how an attempt ended, and whether another follows."""
    text = ''
    with contextlib.suppress(OSError), open(
        cells_lib.log(self._out, cell), 'rb') as log:
      # A run may have printed more than fits the memory.
      log.seek(max(start, log.seek(0, os.SEEK_END) - _TAIL))
      text = log.read(_TAIL).decode(errors='replace')
    good = code == 0 and cells_lib.is_complete(
        cells_lib.folder(self._out, cell))
    attempts = self._attempts[cell.name]
    again = (attempts <= self._retries and not self._heard
             and code != exit_codes.REFUSED)
    # Stopped means: not by a fault of the run, and not for good.
    stopped = (self._heard and code in (*child.TOLD, -signal.SIGKILL)
               or again and code in child.TOLD)
    state = 'done' if good else 'stopped' if stopped else 'failed'
    said = [] if good else cells_lib.tail(text)
    result = {'state': state, 'exit': code, 'fingerprint': asked,
              'attempts': attempts, 'seconds': round(seconds, 1),
              'tail': said}
    cells_lib.write_record(self._out, cell, **result)
    if good:
      self._done += 1
      self._seconds.append(seconds)
      self._say(f'done {cell.name} in {durations.text(seconds)}')
      return
    if again:
      self._queue.append(cell)
    elif state == 'failed':
      self._failed[cell.name] = result
    last = ''.join(f': {line}' for line in said[-1:])
    self._say(f'stopped {cell.name}' if self._heard and stopped else
              f'{child.reason(code)}: {cell.name}'
              + (', trying again' if again else '')
              + f'{last} [{cells_lib.log(self._out, cell)}]')

  def _return_to_others(self) -> None:
    """Queues cells again that another sweep held."""
    now = time.monotonic()
    if self._elsewhere and now - self._looked >= _LOOK:
      self._looked = now
      self._queue.extend(self._elsewhere)
      self._elsewhere = []

  def _end_all(self) -> None:
    """Tells all runs to save and end, and waits for them."""
    running = [r for r in self._slots if r is not None]
    for one in running:
      _signal(one.process, signal.SIGTERM)
    until = time.monotonic() + _GRACE
    while any(r.process.poll() is None for r in running):
      if time.monotonic() > until:
        for one in running:
          _signal(one.process, signal.SIGKILL)
      time.sleep(_TICK)

  def _eta(self) -> str:
    """Estimates the time left from the mean duration of finished runs."""
    left = len(self._queue) + len(self._elsewhere)
    running = [r for r in self._slots if r is not None]
    if not self._seconds or not (left or running):
      return 'unknown' if left or running else '0s'
    mean = sum(self._seconds) / len(self._seconds)
    now = time.monotonic()
    work = mean * left + sum(max(mean - (now - r.began), 0) for r in running)
    # A run that takes longer than the mean tells nothing about its end.
    return durations.text(work / len(self._slots)) if work else 'unknown'

  def _line(self) -> str:
    running = sum(r is not None for r in self._slots)
    parts = [f'done {self._done + self._before}', f'running {running}',
             f'failed {len(self._failed)}']
    if self._elsewhere:
      parts.append(f'with another sweep {len(self._elsewhere)}')
    return (f'{self._title}{", ".join(parts)} of {len(self._cells)}, '
            f'ETA {self._eta()}')

  def _show(self) -> None:
    now = time.monotonic()
    if now - self._said < (_LIVE if self._live else _LINE):
      return
    self._said = now
    if self._live:
      say(f'\r\033[K{self._line()}', end='', stream=sys.stderr)
    else:
      say(self._line(), stream=sys.stderr)

  def _say(self, text: str) -> None:
    """Prints an event, with the whole state if there is no live line."""
    head = '\r\033[K' if self._live else ''
    tail = '' if self._live else f' ({self._line()})'
    say(f'{head}{text}{tail}', stream=sys.stderr)

  def _summary(self) -> None:
    head = '\r\033[K' if self._live else ''
    before = f' ({self._before} before)' if self._before else ''
    left = (len(self._cells) - self._done - self._before - len(self._failed))
    rest = f', not finished {left}' if left else ''
    lines = [f'{head}{self._title}done {self._done + self._before}{before}, '
             f'failed {len(self._failed)}{rest} of {len(self._cells)} in '
             f'{durations.text(time.monotonic() - self._began)}']
    for name, result in self._failed.items():
      count = result['attempts']
      lines.append(f'FAILED {name} ({child.reason(result["exit"])}, {count} '
                   f'attempt{"s" * (count > 1)}; {self._out / name}.log)')
      lines += [f'    {line}' for line in result['tail']]
    say('\n'.join(lines))


def _begin(cores: set[int]) -> None:
  """Prepares a process before its run starts."""
  child.end_with_parent()
  if cores:
    os.sched_setaffinity(0, cores)


def _signal(process: subprocess.Popen, number: int) -> None:
  """Signals a run and all processes that it started."""
  if process.poll() is None:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, number)
