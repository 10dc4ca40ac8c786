"""What a process of `torch_apart` trains in the tests, without PyTorch."""
from __future__ import annotations

import os
import signal
import time


class Loop:
  """Fails where the first client of a cohort says so."""

  def round(self, cohort):
    if cohort[0] == 7:
      time.sleep(600)
    if cohort[0] == 8:
      raise RuntimeError('no memory')
    if cohort[0] == 9:
      os.kill(os.getpid(), signal.SIGKILL)


def made(fails):
  if fails:
    raise ValueError('no such layout')
  return Loop(), os.environ.get('GLIBC_TUNABLES', '')
