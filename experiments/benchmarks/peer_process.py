"""A peer in its own environment, as a process that obeys orders."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import threading
import time
from typing import Any

_HERE = pathlib.Path(__file__).resolve().parent
_PATIENCE = 30.0  # Seconds that a peer has to end by itself.
# Seconds between looks whether it has ended.
_LOOK = 1.
_COLOR = re.compile('\x1b\\[[0-9;]*m')


class PeerError(ValueError):
  """A peer ended, or did not answer in time; its log says why."""


class Peer:
  """Starts one; see `peer_task.py` for the orders.

  Args:
    python: the environment's interpreter.
    script: file name in `peers/`.
    arguments: of the script.
    log: file that gets all it prints.
    timeout: seconds for each answer.

  Raises:
    PeerError: if it does not get ready.
  """

  def __init__(self, python: pathlib.Path, script: str,
               arguments: Sequence[str], *, log: pathlib.Path,
               timeout: float):
    self._log, self._timeout = log, timeout
    with log.open('wb') as file:
      self._process = subprocess.Popen(
          [str(python), str(_HERE / 'peers' / script), *arguments],
          stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
          env=_variables(os.environ), start_new_session=True, text=True)
    self._lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=self._read, daemon=True).start()
    try:
      self.versions: dict[str, str] = self._answer()
    except BaseException:
      self.close()
      raise

  def advance(self, count: int) -> None:
    """Trains `count` rounds, to the end."""
    self._order(f'advance {count}')

  def save(self, path: pathlib.Path) -> None:
    """Writes the global weights."""
    self._order(f'save {path}')

  def close(self) -> None:
    """Ends it, and what it has started, at the latest by force."""
    if self._process.stdin and not self._process.stdin.closed:
      try:
        self._process.stdin.close()
      except BrokenPipeError:
        pass  # It has ended already.
    try:
      self._process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
      pass
    # What it has started may outlive it, and would disturb the others.
    try:
      os.killpg(self._process.pid, signal.SIGKILL)
    except ProcessLookupError:
      pass  # Nothing is left.
    self._process.wait()

  def _order(self, line: str) -> None:
    assert self._process.stdin is not None
    try:
      self._process.stdin.write(line + '\n')
      self._process.stdin.flush()
    except BrokenPipeError:
      raise PeerError(self._last_words()) from None
    self._answer()

  def _read(self) -> None:
    assert self._process.stdout is not None
    for line in self._process.stdout:
      self._lines.put(line)
    self._lines.put('')

  def _answer(self) -> Any:
    line, end = None, time.monotonic() + self._timeout
    while line is None:
      # Its children may hold its output open after its end.
      ended = self._process.poll() is not None
      try:
        line = self._lines.get(timeout=_LOOK)
      except queue.Empty:
        if ended:
          raise PeerError(self._last_words()) from None
        if time.monotonic() > end:
          raise PeerError(f'no answer in {self._timeout:.0f} s') from None
    if not line:
      raise PeerError(self._last_words())
    try:
      return json.loads(line)
    except ValueError:
      raise PeerError(f'it answered {line.strip()[:80]!r}') from None

  def _last_words(self) -> str:
    try:
      code = self._process.wait(_LOOK)
    except subprocess.TimeoutExpired:
      return 'it closed its output'
    how = ending(code)
    log = _COLOR.sub('', self._log.read_text(errors='replace'))
    words = [line.strip() for line in log.splitlines() if line.strip()]
    return f'{words[-1]} ({how})' if words else how


def ending(code: int) -> str:
  """Returns how a process ended, by the code that `subprocess` gives."""
  if code >= 0:
    return f'exit status {code}'
  try:
    return f'signal {signal.Signals(-code).name}'
  except ValueError:  # A real-time signal has no name.
    return f'signal {-code}'


def _variables(inherited: Mapping[str, str]) -> dict[str, str]:
  """The peer sees our scripts, and nothing of our environment's packages."""
  kept = {name: value for name, value in inherited.items()
          if not name.startswith(('PYTHON', 'JAX_', 'XLA_', 'VIRTUAL_ENV'))}
  return {**kept, 'PYTHONPATH': str(_HERE.parents[1]), 'PYTHONUNBUFFERED': '1',
          # Flower and Ray report home by default.
          'FLWR_TELEMETRY_ENABLED': '0', 'RAY_USAGE_STATS_ENABLED': '0'}
