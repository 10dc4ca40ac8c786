"""Prints for a reader that may close early, as `head` and `less` do."""
from __future__ import annotations

import os
import sys


def plain(text: str) -> str:
  """The text with a mark for what no file of text can hold.

  Names of files need not be UTF-8; Python keeps their bytes as surrogates.
  """
  return text.encode(errors='replace').decode()


def say(text: str, end: str = '\n') -> None:
  """Prints to stdout at once; what a reader does not wait for is dropped.

  A program that writes files or runs experiments must not end for it.
  """
  try:
    print(plain(text), end=end, flush=True)
  except BrokenPipeError:
    # What is left in the buffer would fail once more at the end.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
