"""Processes of a sweep: so many at a time, watched, retried, ended."""
from __future__ import annotations

import collections
from collections.abc import Sequence
import ctypes
import dataclasses
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from typing import IO

import cells as cells_lib
import grid

_TICK = 0.1  # Seconds between two looks at the processes.
_LOOK = 3.0  # Seconds between two looks at cells of another sweep.
_LINE = 60.0  # Seconds between two lines of status, where there is no terminal.
_GRACE = 60.0  # Seconds that a run has to save, once told to end.


def is_held(out: pathlib.Path, cell: grid.Cell) -> bool:
  """Whether somebody runs the cell now."""
  if not (out / '.sweep' / f'{cell.name}.lock').exists():
    return False
  handle = cells_lib.lock(out, cell)
  if handle is None:
    return True
  os.close(handle)
  return False


def _end_with_parent() -> None:
  """On Linux: the run saves and ends when the sweep is killed."""
  try:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
  except (OSError, AttributeError):
    pass  # Elsewhere it goes on, and keeps its lock.


@dataclasses.dataclass
class _Running:
  """A process and what it runs."""

  cell: grid.Cell
  process: subprocess.Popen
  lock: int
  log: IO[bytes]
  start: int  # Of this attempt in the log.
  began: float


class Sweep:
  """All cells, until each is done or has failed for good."""

  def __init__(self, out: pathlib.Path, cells: Sequence[grid.Cell], *,
               num_slots: int, retries: int, python: str,
               env: dict[str, str]):
    """See `run`; `env` may hold {slot}."""
    self._out, self._cells = out, list(cells)
    self._retries, self._python, self._env = retries, python, env
    self._slots: list[_Running | None] = [None] * num_slots
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
    old = {s: signal.signal(s, self._hear)
           for s in (signal.SIGINT, signal.SIGTERM)}
    try:
      while not self._heard and (
          self._queue or self._elsewhere or any(self._slots)):
        self._reap()
        self._fill()
        self._return_to_others()
        self._show()
        time.sleep(_TICK)
      if self._heard:
        self._end_all()
    finally:
      for number, handler in old.items():
        signal.signal(number, handler)
    self._summary()
    if self._heard:
      return 128 + self._heard
    return 1 if self._failed else 0

  def _hear(self, number, frame) -> None:
    del frame
    self._heard = number

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
      return None
    command = cells_lib.command(self._python, self._out, cell)
    self._attempts[cell.name] += 1
    log = open(cells_lib.log(self._out, cell), 'ab', buffering=0)
    log.write(f'== {shlex.join(command)}\n'.encode())
    start = log.tell()
    env = {name: value.replace('{slot}', str(slot))
           for name, value in self._env.items()}
    try:
      process = subprocess.Popen(
          command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
          env=os.environ | env, pass_fds=(handle,), start_new_session=True,
          preexec_fn=_end_with_parent)
    except OSError as error:
      log.write(f'{self._python} cannot be started: {error}\n'.encode())
      log.close()
      self._judge(cell, error.errno or 1, start, 0.0)
      os.close(handle)
      return None
    return _Running(cell, process, handle, log, start, time.monotonic())

  def _reap(self) -> None:
    """Takes in what has ended."""
    for slot, running in enumerate(self._slots):
      if running is not None and running.process.poll() is not None:
        self._slots[slot] = None
        running.log.close()
        self._judge(running.cell, running.process.returncode, running.start,
                    time.monotonic() - running.began)
        os.close(running.lock)

  def _judge(self, cell: grid.Cell, code: int, start: int, seconds: float
             ) -> None:
    """Writes down how an attempt ended, and whether another follows."""
    text = cells_lib.log(self._out, cell).read_bytes()[start:].decode(
        errors='replace')
    good = code == 0 and cells_lib.is_complete(
        cells_lib.folder(self._out, cell))
    attempts = self._attempts[cell.name]
    result = {'state': 'done' if good else 'failed', 'exit': code,
              'attempts': attempts, 'seconds': round(seconds, 1),
              'tail': [] if good else cells_lib.tail(text)}
    cells_lib.write_record(self._out, cell, **result)
    if good:
      self._done += 1
      self._seconds.append(seconds)
      self._say(f'done {cell.name} in {_duration(seconds)}')
      return
    again = attempts <= self._retries and not self._heard
    self._say(f'{_reason(code)}: {cell.name}'
              + (', trying again' if again else ''))
    if again:
      self._queue.append(cell)
    elif not self._heard:
      self._failed[cell.name] = result

  def _return_to_others(self) -> None:
    """Looks again at cells that another sweep had."""
    now = time.monotonic()
    if self._elsewhere and now - self._looked >= _LOOK:
      self._looked = now
      self._queue.extend(self._elsewhere)
      self._elsewhere = []

  def _end_all(self) -> None:
    """Tells all runs to save and end, and waits for them."""
    running = [r for r in self._slots if r is not None]
    self._say(f'ending {len(running)} runs; the same command continues')
    for one in running:
      _signal(one.process, signal.SIGTERM)
    until = time.monotonic() + _GRACE
    while any(r.process.poll() is None for r in running):
      if time.monotonic() > until:
        for one in running:
          _signal(one.process, signal.SIGKILL)
      time.sleep(_TICK)
    self._reap()

  def _eta(self) -> str:
    """Time left if the rest takes as long as what is done."""
    left = len(self._queue) + len(self._elsewhere)
    running = [r for r in self._slots if r is not None]
    if not self._seconds or not (left or running):
      return 'unknown' if left or running else '0s'
    mean = sum(self._seconds) / len(self._seconds)
    now = time.monotonic()
    work = mean * left + sum(max(mean - (now - r.began), 0) for r in running)
    return _duration(work / len(self._slots))

  def _line(self) -> str:
    running = sum(r is not None for r in self._slots)
    parts = [f'done {self._done + self._before}', f'running {running}',
             f'failed {len(self._failed)}']
    if self._elsewhere:
      parts.append(f'with another sweep {len(self._elsewhere)}')
    return f'{", ".join(parts)} of {len(self._cells)}, ETA {self._eta()}'

  def _show(self) -> None:
    now = time.monotonic()
    if self._live:
      print(f'\r\033[K{self._line()}', end='', file=sys.stderr, flush=True)
    elif now - self._said >= _LINE:
      self._said = now
      print(self._line(), file=sys.stderr, flush=True)

  def _say(self, text: str) -> None:
    """An event, with the state of everything where there is no live line."""
    head = '\r\033[K' if self._live else ''
    tail = '' if self._live else f' ({self._line()})'
    print(f'{head}{text}{tail}', file=sys.stderr, flush=True)

  def _summary(self) -> None:
    head = '\r\033[K' if self._live else ''
    before = f' ({self._before} before)' if self._before else ''
    left = (len(self._cells) - self._done - self._before - len(self._failed))
    rest = f', not finished {left}' if left else ''
    print(f'{head}done {self._done + self._before}{before}, failed '
          f'{len(self._failed)}{rest} of {len(self._cells)} in '
          f'{_duration(time.monotonic() - self._began)}')
    for name, result in self._failed.items():
      print(f'FAILED {name} ({_reason(result["exit"])}, '
            f'{result["attempts"]} attempts; {self._out / name}.log)')
      for line in result['tail']:
        print(f'    {line}')


def _signal(process: subprocess.Popen, number: int) -> None:
  """Signals a run and all that it started."""
  if process.poll() is None:
    try:
      os.killpg(process.pid, number)
    except ProcessLookupError:
      pass


def _reason(code: int) -> str:
  if code == 0:
    return 'ended before its last round'
  return f'killed by signal {-code}' if code < 0 else f'exit {code}'


def _duration(seconds: float) -> str:
  minutes, rest = divmod(round(seconds), 60)
  if minutes < 60:
    return f'{minutes}m{rest:02d}s' if minutes else f'{rest}s'
  return f'{minutes // 60}h{minutes % 60:02d}m'
