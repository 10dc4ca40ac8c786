"""Ends a program that gets SIGTERM, SIGINT or SIGHUP, wherever it is.

Nothing is raised for it: Python drops exceptions in callbacks of its garbage
collector, and runs no handler before a long compilation is over. A thread
reads the signals' numbers from a pipe, to which the interpreter writes at once,
and ends the process. Every file is replaced whole or can be cut back, so any
moment will do. Once there are trained rounds to save, the loop hears the same
signals, saves, and ends the run with code 0; then a SIGINT after another signal
ends at once.

`cli.run_setting` listens before it imports what takes seconds. Until then
signals are the interpreter's: it ends at a SIGTERM, and answers a SIGINT with a
traceback or, now and then, not at all.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import os
import select
import shlex
import signal
import sys
import threading
import time
from typing import NoReturn

from fedjax_ssl.core import ending

_NAMES = {int(number): number.name for number in (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
# Seconds that an end may wait for a write to be over, and for a reader.
_GRACE = 1.0
_heard: list[int] = []  # Signals so far, which only the thread adds.
_ends = threading.Lock()  # Held by the thread that ends the process.
_pipes: list[tuple[int, int]] = []  # Of this process; none if it hears nothing.
_MARK = 255  # In a pipe: no signal, but what `answered` writes.
_caught_up = threading.Event()
_folder = ''  # Of the run; '' is not known yet.
_trained = False  # Whether the loop has rounds that it should save first.


def end(number: int) -> NoReturn:
  """Says in one line why, and ends the process with code 128 + `number`.

  Where another thread is about to do so, this one waits for that: else it could
  go on, or end the process with another code.
  """
  with _ends:
    until = time.monotonic() + _GRACE
    while _writes_cache() and time.monotonic() < until:
      time.sleep(0.01)
    # Not by `sys.stderr`, which the main thread may hold; nor into a full pipe
    # that is not read.
    with contextlib.suppress(OSError, ValueError):
      if select.select([], [2], [], _GRACE)[1]:
        _say(number)
    os._exit(128 + number)


@contextlib.contextmanager
def working_in(folder: str) -> Iterator[None]:
  """Says where the run of the block is, for the line at its end."""
  global _folder
  _folder = folder
  try:
    yield
  finally:
    _folder = ''


def _say(number: int) -> None:
  # Without a folder nothing may have begun, or an evaluation has.
  what = (f'the same command with {given(_folder)} continues' if _folder
          else 'give the same command again')
  os.write(2, os.fsencode(f'Stopped by {_NAMES[number]}; {what}.\n'))


def given(folder: str) -> str:
  """Returns the flag that gives a folder to a shell."""
  return f'--workdir={shlex.quote(folder)}'


def _writes_cache() -> bool:
  """Whether JAX writes a program to its cache, which would stay cut short."""
  frame = sys._current_frames().get(threading.main_thread().ident or 0)
  while frame is not None:
    code = frame.f_code
    if code.co_name == 'put' and code.co_filename.endswith('lru_cache.py'):
      return True
    frame = frame.f_back
  return False


def _watch(source: int) -> None:
  """Ends the process at a signal, unless the loop is to save first."""
  while (number := os.read(source, 1)[0]):
    if number == _MARK:
      _caught_up.set()
    elif number in _NAMES:
      again = bool(_heard)
      _heard.append(number)
      if number == signal.SIGHUP and _trained:
        ending.leave_terminal()
      if not _trained or (again and number == signal.SIGINT):
        end(number)
  os.close(source)


def _hear(number: int, frame: object) -> None:
  """Does nothing, but without a handler no number goes to the pipe."""


def listen() -> int:
  """Makes signals end the process from now on; may be called again.

  Returns:
    The file in which signals were noted before, as `signal.set_wakeup_fd` names
    it; -1 for none.
  """
  if _pipes or threading.current_thread() is not threading.main_thread():
    return -1
  source, sink = os.pipe()
  os.set_blocking(sink, False)
  before = signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
  for number in ending.signals():
    signal.signal(number, _hear)
  _pipes.append((source, sink))
  threading.Thread(target=_watch, args=(source,), daemon=True).start()
  return before


def _forget() -> None:
  """Stops listening in a forked process, whose signals are its own."""
  if _pipes:
    _pipes.clear()
    signal.set_wakeup_fd(-1)
    for number in ending.signals():
      signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def listening() -> Iterator[None]:
  """Makes signals end the process inside the block; see `listen`."""
  if _pipes or threading.current_thread() is not threading.main_thread():
    yield
    return
  old = {number: signal.getsignal(number) for number in ending.signals()}
  before = listen()
  try:
    yield
  finally:
    for number, handler in old.items():
      signal.signal(number, handler)
    # An event loop of the program has its own, which may be closed by now.
    signal.set_wakeup_fd(-1)
    with contextlib.suppress(OSError, ValueError):
      signal.set_wakeup_fd(before)
    _, sink = _pipes.pop()
    os.write(sink, b'\0')
    os.close(sink)


def answered() -> None:
  """Forgets the signals heard so far, for which a run was saved and ended.

  The process goes on, and these signals do not end its later runs.
  """
  global _trained
  if _pipes:  # Until the thread has read all that came before.
    _caught_up.clear()
    os.write(_pipes[0][1], bytes([_MARK]))
    _caught_up.wait()  # However slow; else a late one would end the process.
  _trained = False
  _heard.clear()


@contextlib.contextmanager
def saving() -> Iterator[Callable[[], None]]:
  """Leaves signals to the loop, once the yielded function was called.

  A signal that comes too late for the loop ends the process after the block. If
  the loop has saved for a signal, and ends the run with `SystemExit`, further
  ones are ignored, but for a SIGINT, which ends the process at once.
  """
  global _trained
  def begin() -> None:
    global _trained
    _trained = True
  try:
    yield begin
  except SystemExit:
    raise
  except BaseException:
    _trained = False
    raise
  _trained = False
  if _heard:
    end(_heard[-1])
