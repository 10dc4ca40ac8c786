"""Signals that end a program."""
from __future__ import annotations

import contextlib
import os
import signal
import stat


def signals() -> list[signal.Signals]:
  """Returns SIGTERM, SIGINT and SIGHUP, which comes as a terminal closes.

  SIGHUP is left out where it is ignored, as under `nohup`.
  """
  found = [signal.SIGTERM, signal.SIGINT]
  if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    found.append(signal.SIGHUP)
  return found


def leave_terminal() -> None:
  """Turns output away from a terminal that has closed, or soon will.

  Writing there would fail what goes on, as a run that is to be saved.
  """
  for file in (1, 2):
    with contextlib.suppress(OSError), open(os.devnull, 'wb') as nowhere:
      # As a closed terminal is, too.
      if stat.S_ISCHR(os.fstat(file).st_mode):
        os.dup2(nowhere.fileno(), file)
