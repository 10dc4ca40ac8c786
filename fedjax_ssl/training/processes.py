"""What all processes of one run must do, and what only the first one does.

A run of several processes (`jax.distributed`) is one program: all processes
start the same computations in the same order, or they wait for each other for
ever. Hence they tell each other what only one of them knows: a signal that it
heard, its pace, an error. The first process alone reads and writes the run's
folder, so that the others need not see it. With one process nothing is sent,
and errors keep their types.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import json
import sys
from typing import Any, TypeVar

import jax
import numpy as np

from fedjax_ssl.core import checks
from fedjax_ssl.training import changes

T = TypeVar('T')
# Bytes on their way at a time: the buffers are on every device.
_CHUNK = 1 << 26
# Bytes of the message in which a process tells the others its error.
_WORDS = 1000


class AgreedError(ValueError):
  """An error that all processes of a run raise together."""


class AgreedExit(SystemExit):
  """An exit that all processes of a run make together."""


def count() -> int:
  """Returns how many processes the run has."""
  return jax.process_count()


def index() -> int:
  """Returns which of the processes this one is, from 0."""
  return jax.process_index()


def is_first() -> bool:
  """Returns whether this process reads and writes the run's files."""
  return index() == 0


def note(text: str, **options: Any) -> None:
  """Says something that changes nothing, once for all processes.

  Args:
    text: what is said; `checks.option` names what it advises.
    **options: values of options that it is about; they come before it.
  """
  if is_first():
    words = [checks.given(options)] if options else []
    print('Note:', *words, text, file=sys.stderr)


def gather(numbers: Sequence[int]) -> np.ndarray:
  """Gathers M numbers of each process on all: int32[processes, M]."""
  own = np.asarray(numbers, np.int32)
  if count() == 1:
    return own[None]
  from jax.experimental import multihost_utils
  return np.asarray(multihost_utils.process_allgather(own))


def share(data: bytes | None) -> bytes:
  """Sends the first process's bytes to all; those of others are not read."""
  if count() == 1:
    return data or b''
  from jax.experimental import multihost_utils
  own = data if is_first() and data else b''
  # Two numbers, as JAX cuts integers to 32 bits.
  high, low = gather(divmod(len(own), 1 << 30))[0]
  size, parts = (int(high) << 30) + int(low), []
  for start in range(0, size, _CHUNK):
    length = min(_CHUNK, size - start)
    # Few different sizes, as each needs a program of its own.
    padded = max(1 << 12, 1 << (length - 1).bit_length())
    part = np.zeros(padded, np.uint8)
    mine = np.frombuffer(own[start:start + length], np.uint8)
    part[:mine.size] = mine
    part = np.asarray(multihost_utils.broadcast_one_to_all(part), np.uint8)
    parts.append(part[:length].tobytes())
  return b''.join(parts)


def once(work: Callable[[], T]) -> T:
  """Runs `work` on the first process; all get its result or its error.

  Args:
    work: returns a value that JSON can hold; uses no array that is spread over
      processes.

  Returns:
    What `work` returned.

  Raises:
    AgreedError: on all processes, with the message of what `work` raised; with
      one process, what it raised itself.
  """
  if count() == 1:
    return work()
  outcome: dict[str, Any] = {}
  if is_first():
    try:
      outcome = {'value': work()}
    except Exception as error:  # The others must not wait for ever.
      outcome = {'error': checks.one_line(error)}
  outcome = json.loads(share(json.dumps(outcome).encode()))
  if 'error' in outcome:
    raise AgreedError(outcome['error'])
  return outcome['value']


def together(work: Callable[[], T]) -> T:
  """Runs `work` on every process; none goes on if it fails on one.

  Args:
    work: does not communicate.

  Returns:
    This process's own result.

  Raises:
    AgreedError: on all processes, naming one on which `work` failed; with one
      process, what it raised itself.
  """
  if count() == 1:
    return work()
  result: Any = None
  text = ''
  try:
    result = work()
  except Exception as error:
    text = checks.one_line(error)
  raw = text.encode()[:_WORDS]
  said = gather([*raw.ljust(_WORDS, b'\0')])
  for process, codes in enumerate(said):
    words = codes.astype(np.uint8).tobytes().rstrip(b'\0')
    if words:
      raise AgreedError(f'process {process} of {count()}: '
                        f'{words.decode(errors="replace")}')
  return result


def check_same(value: Mapping[str, Any], what: str) -> None:
  """Compares a value with the first process's.

  Args:
    value: whatever JSON can hold, by name.
    what: for the message.

  Raises:
    AgreedError: on all processes, if one has another value; the message names
      the first entry that differs.
  """
  if count() == 1:
    return
  mine = json.loads(json.dumps(value))
  first = json.loads(share(json.dumps(value).encode()))

  def compare() -> None:
    if found := changes.between(changes.flat(first), changes.flat(mine)):
      name, (theirs, own) = next(iter(found.items()))
      difference = f'{name} is {own!r} there and {theirs!r} at process 0'[:300]
      raise ValueError(f'it was started with other {what} than process 0: '
                       f'{difference}.')
  together(compare)
