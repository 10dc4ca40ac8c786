"""Runs a command as a child process, which on Linux ends with its parent."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
import types
from typing import IO

from fedjax_ssl.cli import exit_codes
from fedjax_ssl.core import ending

_GRACE = 20.0  # Seconds kept for a run to save in; a tenth of short budgets.
_ROUNDS = 1.5  # Kept besides, as a run completes its round before it saves.
_LOOK = 0.5  # Seconds between two looks at how long a round takes.
# Codes of a run that was told to end: in training it saves first.
TOLD = (0, *(code for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
             for code in (128 + number, -number)))
_SAID = 'error: '  # Its last line begins so.
# Loaded before the fork; a child of a large program should not search files.
_LIBC = ctypes.CDLL(None)


class Ended(Exception):
  """A signal asks this process to end; `number` is the signal's."""

  def __init__(self, number: int):
    super().__init__(signal.Signals(number).name)
    self.number = number


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
  """Makes signals that end a process raise `Ended` once; later ones do nothing.

  See `core.ending` for what these are.
  """
  def end(number: int, frame: types.FrameType | None) -> None:
    del frame
    for each in ending.signals():
      signal.signal(each, signal.SIG_IGN)
    raise Ended(number)
  with ending.handled(end):
    yield


def end_with_parent() -> None:
  """Makes a child save and end when its parent is killed, on Linux.

  Elsewhere it goes on, and keeps the locks that it was given.
  """
  with contextlib.suppress(OSError, AttributeError):
    _LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
  # An ignored signal would stay ignored in the child.
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(command: Sequence[str], log: IO[bytes], deadline: float) -> int | None:
  """Runs a command until a deadline.

  Args:
    command: what to run, in a session of its own.
    log: gets what it prints.
    deadline: by `time.monotonic()`; before it the run is asked to save and end.

  Returns:
    The exit code; None if the time ran out and the run was ended.

  Raises:
    Ended: if a signal came. The run was asked to save, and has ended.
  """
  log.flush()
  start, whole = log.tell(), grace(deadline - time.monotonic())
  process = subprocess.Popen(
      command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
      start_new_session=True, preexec_fn=end_with_parent)
  try:
    while True:
      left = (deadline - time.monotonic() - whole
              - _ROUNDS * _round_seconds(log, start))
      with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(min(max(left, 0.1), _LOOK))
      if left <= _LOOK:
        break
    _ask(process, deadline - time.monotonic() - 0.2)
    return None
  except Ended:
    _ask(process, _GRACE + _ROUNDS * _round_seconds(log, start))
    raise
  finally:
    if process.poll() is None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()


def refusal(done: subprocess.CompletedProcess[str]) -> str:
  """Returns why a program refuses its flags or data; '' if it does not."""
  line = done.stderr.strip().rpartition('\n')[2]
  refused = done.returncode == exit_codes.REFUSED and line.startswith(_SAID)
  return line.removeprefix(_SAID) if refused else ''


def reason(code: int) -> str:
  """Says how a run ended that is not done."""
  if code == 0:
    return 'ended before its last round'
  if code in TOLD and code > 0:
    return f'ended by {signal.Signals(code - 128).name}'
  return f'killed by signal {-code}' if code < 0 else f'exit {code}'


def _round_seconds(log: IO[bytes], start: int) -> float:
  """Reads from the log how long a round takes; 0 if it does not say yet."""
  with contextlib.suppress(OSError), open(log.name, 'rb') as file:
    file.seek(start)
    said = re.findall(rb', (\d[\d.]*(?:e[+-]\d+)?) s/round', file.read())
    return float(said[-1]) if said else 0.0
  return 0.0


def _ask(process: subprocess.Popen, seconds: float) -> None:
  """Asks the run to save and end, and waits for it."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGTERM)
  with contextlib.suppress(subprocess.TimeoutExpired):
    process.wait(max(seconds, 0.1))


def grace(seconds: float) -> float:
  """Returns the seconds of a budget that are kept for a run to save in."""
  return min(_GRACE, 0.1 * seconds)
