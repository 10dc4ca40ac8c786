"""A process that trains a PyTorch loop; it loads nothing of ours.

`torch_apart.Apart` starts it with the number of a pipe. The first thing that it
reads is a function and its arguments, then come cohorts. It answers (version,
error) to the first, and an error to each cohort; '' is none.
"""
from __future__ import annotations

import importlib
from multiprocessing import connection
import sys
from typing import Any


def serve(pipe: Any) -> None:
  """Trains a round for each cohort that comes, until the other side is gone."""
  try:
    place, arguments = pipe.recv()
    try:
      module, _, name = place.partition(':')
      loop, version = getattr(importlib.import_module(module), name)(*arguments)
    except Exception as error:  # It is told in the other process.
      pipe.send(('', f'{type(error).__name__}: {error}'))
      return
    pipe.send((version, ''))
    while True:
      cohort = pipe.recv()
      try:
        loop.round(cohort)
      except Exception as error:
        pipe.send(f'{type(error).__name__}: {error}')
        return
      pipe.send('')
  except (EOFError, OSError, KeyboardInterrupt):
    return  # Nobody is left to be told.


if __name__ == '__main__':
  serve(connection.Connection(int(sys.argv[1])))
