"""Signals that end a program."""
from __future__ import annotations

import signal


def signals() -> list[signal.Signals]:
  """Returns SIGTERM, SIGINT and SIGHUP, which comes as a terminal closes.

  SIGHUP is left out where it is ignored, as under `nohup`.
  """
  found = [signal.SIGTERM, signal.SIGINT]
  if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    found.append(signal.SIGHUP)
  return found
