"""Prints for a reader that may close early, as `head` and `less` do."""
from __future__ import annotations

import os
import sys
from typing import TextIO

from fedjax_ssl.report.text import plain


def say(text: str, end: str = '\n', stream: TextIO | None = None) -> None:
  """Prints at once, to stdout; what a reader does not wait for is dropped.

  A program that writes files or runs experiments must not end for it.
  """
  stream = stream or sys.stdout
  try:
    print(plain(text), end=end, file=stream, flush=True)
  except BrokenPipeError:
    # What is left in the buffer would fail once more at the end.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
