"""Errors of a user's code as one line that names the field that chose it."""
from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
from typing import ParamSpec, TypeVar

from fedjax_ssl.core import checks, imports

P = ParamSpec('P')
T = TypeVar('T')


@contextlib.contextmanager
def one_line(own: Callable[[], bool]) -> Iterator[None]:
  """Turns whatever a block of a user's code raises into ValueErrors.

  Faults of the system are raised as they are.

  Args:
    own: whether it is a user's. The library raises nothing but ValueErrors on
      purpose, and other errors of its own need the whole traceback.

  Raises:
    ValueError: with the error's type and first line, for any error.
  """
  try:
    yield
  except (ValueError, OSError, MemoryError):
    raise
  except (Exception, SystemExit) as error:
    if not own():
      raise
    raise ValueError(imports.said(error)) from error


@contextlib.contextmanager
def naming(kind: str, text: str, own: Callable[[str], bool]) -> Iterator[None]:
  """Names a field in the errors of a block that runs what its text names.

  Args:
    kind: the field.
    text: its value.
    own: text -> whether it names code of a user's, see `one_line`.

  Raises:
    FieldError: for such an error.
  """
  try:
    with one_line(lambda: own(text)):
      yield
  except checks.FieldError:
    raise
  except ValueError as error:
    raise checks.FieldError(kind, text.strip(), str(error)) from error


def named(kind: str, text: str, function: Callable[P, T],
          own: Callable[[str], bool]) -> Callable[P, T]:
  """Returns a function that names a field in its errors, see `naming`."""
  def call(*args: P.args, **words: P.kwargs) -> T:
    with naming(kind, text, own):
      return function(*args, **words)
  return call


def form(kind: str, text: str, made: object, is_form: bool, wanted: str
         ) -> None:
  """Refuses what a user's builder gave, unless it is what is wanted.

  Args:
    kind: the field.
    text: its value.
    made: what the builder that it names gave.
    is_form: whether that is what is wanted.
    wanted: what that is, as 'Method'.

  Raises:
    FieldError: if it is not.
  """
  if not is_form:
    raise checks.FieldError(kind, text, f'gives no {wanted} but '
                            f'{type(made).__name__}; does it end with return?')
