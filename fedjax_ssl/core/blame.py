"""Errors of a user's code as one line that names the field that chose it."""
from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
from typing import ParamSpec, TypeVar

from fedjax_ssl.core import checks, imports

P = ParamSpec('P')
T = TypeVar('T')

# JAX's errors, by name as JAX may not be imported, and how the one begins that
# a device with too little memory raises.
_JAX_ERRORS = ('JaxRuntimeError', 'XlaRuntimeError')
_FULL = 'RESOURCE_EXHAUSTED'


def is_full(error: BaseException) -> bool:
  """Returns whether a device had too little memory for a program of JAX's."""
  text = str(error).lstrip()
  return (type(error).__name__ in _JAX_ERRORS and text.startswith(_FULL)
          and 'memory' in text.lower())


def full_memory(error: BaseException) -> str:
  """Returns a sentence on a memory that is full; '' for other errors."""
  if not isinstance(error, MemoryError) and not is_full(error):
    return ''
  where = '' if isinstance(error, MemoryError) else ' of a device'
  said = checks.lines(error)[0]
  return f'The memory{where} is full{f" ({said})" if said else ""}.'


@contextlib.contextmanager
def one_line(own: bool) -> Iterator[None]:
  """Turns whatever a block of a user's code raises into ValueErrors.

  Faults of the system, as a full memory, are raised as they are.

  Args:
    own: whether it is a user's. The library raises nothing but ValueErrors on
      purpose, and other errors of its own need the whole traceback.

  Raises:
    ValueError: with the error's type and first line, for any error of a
      user's code.
  """
  try:
    yield
  except (ValueError, OSError, MemoryError):
    raise
  except (Exception, SystemExit) as error:
    if not own or is_full(error):
      raise
    raise ValueError(imports.said(error)) from error


@contextlib.contextmanager
def naming(field: str, text: str, *, own: bool, outermost: bool = False
           ) -> Iterator[None]:
  """Names a field in the errors of a block that runs what its text names.

  Args:
    field: its name.
    text: its value.
    own: whether that is code of a user's, see `one_line`.
    outermost: whether to name it too where the error names a field already,
      which then is one of its knobs.

  Raises:
    FieldError: for such an error.
  """
  try:
    with one_line(own):
      yield
  except ValueError as error:
    if isinstance(error, checks.FieldError) and not outermost:
      raise
    raise checks.FieldError(field, text.strip(), str(error)) from error


def named(field: str, text: str, function: Callable[P, T], own: bool, *,
          outermost: bool = False) -> Callable[P, T]:
  """Returns a function that names a field in its errors, see `naming`."""
  def call(*args: P.args, **words: P.kwargs) -> T:
    with naming(field, text, own=own, outermost=outermost):
      return function(*args, **words)
  return call


def check(field: str, text: str, made: object, fits: bool, wanted: str) -> None:
  """Refuses what a user's builder gave, unless it is what is wanted.

  Args:
    field: its name.
    text: its value.
    made: what the builder that it names gave.
    fits: whether that is what is wanted.
    wanted: what that is, as 'Method'.

  Raises:
    FieldError: if it is not.
  """
  if not fits:
    raise checks.FieldError(field, text.strip(), f'gives no {wanted} but '
                            f'{type(made).__name__}; does it end with return?')
