"""Prints for a reader that may close early, as `head` and `less` do."""
from __future__ import annotations

import os
import sys
from typing import TextIO

from fedjax_ssl.report.text import plain


def say(text: str, end: str = '\n', stream: TextIO | None = None) -> None:
  """Prints at once, by default to stdout; drops text if the reader has closed.

  A program that writes files or runs experiments must not end because of that,
  nor because of a letter that the stream cannot write, which becomes `?`.

  Raises:
    OSError: if the stream cannot be written, as on a full disk; it names it.
  """
  stream = stream or sys.stdout
  # What a program has put in place of its output may have none, or be None.
  coded = getattr(stream, 'encoding', None) or 'utf-8'
  text = plain(text).encode(coded, 'replace').decode(coded)
  try:
    print(text, end=end, file=stream, flush=True)
  except BrokenPipeError:
    # The rest of the buffer would fail once more at the end of the process.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
  except OSError as error:
    if error.errno is None:
      raise
    raise OSError(error.errno, error.strerror,
                  getattr(stream, 'name', 'the output')) from error
