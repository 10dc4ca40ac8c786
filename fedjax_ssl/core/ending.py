"""Signals that end a program."""
from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import os
import signal
import stat
import threading
import types


def signals() -> list[signal.Signals]:
  """Returns SIGTERM, SIGINT and SIGHUP, which comes as a terminal closes.

  SIGHUP is left out where it is ignored, as under `nohup`.
  """
  found = [signal.SIGTERM, signal.SIGINT]
  if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    found.append(signal.SIGHUP)
  return found


@contextlib.contextmanager
def handled(handler: Callable[[int, types.FrameType | None], None]
            ) -> Iterator[None]:
  """Has a handler called for each of `signals` within the block.

  In another thread than the main one, where Python allows none, it does
  nothing.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  old = {number: signal.signal(number, handler) for number in signals()}
  try:
    yield
  finally:
    for number, former in old.items():
      signal.signal(number, former)


def leave_terminal() -> None:
  """Turns output away from a terminal that has closed, or soon will.

  Writing there would fail what goes on, as a run that is to be saved.
  """
  for file in (1, 2):
    with contextlib.suppress(OSError), open(os.devnull, 'wb') as nowhere:
      # As a closed terminal is, too.
      if stat.S_ISCHR(os.fstat(file).st_mode):
        os.dup2(nowhere.fileno(), file)
