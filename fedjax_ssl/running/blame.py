"""Which option the errors of a run's first trace are due to."""
from __future__ import annotations

from collections.abc import Iterator
import contextlib
import pathlib
import re
import traceback

from fedjax_ssl import methods
from fedjax_ssl import task as task_lib
from fedjax_ssl.config import FieldError
from fedjax_ssl.core import imports


@contextlib.contextmanager
def naming_method(text: str) -> Iterator[None]:
  """Names the method in the errors of its first trace.

  Of a user's method in all of them: also where the library calls what has
  other arguments, or gives something else, than it should.
  """
  try:
    yield
  except FieldError:
    raise
  except ValueError as error:
    raise FieldError('method', text, str(error)) from error
  except (OSError, MemoryError):
    raise  # Of the system, not of the method.
  except Exception as error:
    if not methods.is_own(text):
      raise
    first = (str(error).strip().splitlines() or [''])[0]
    at = '' if imports.where(error) else _place_of(error)
    raise FieldError('method', text,
                     f'{type(error).__name__}: {first}{at}') from error


def _place_of(error: BaseException) -> str:
  """Returns ' (at FILE:LINE)' of the innermost line that is no library's."""
  found = ''
  for frame, line in traceback.walk_tb(error.__traceback__):
    file = frame.f_code.co_filename
    if pathlib.Path(file).is_file() and not re.search(
        r'/(fedjax_ssl|site-packages|lib/python[0-9.]+)/', file):
      found = f' (at {file}:{line})'
  return found


def knob_error(error: TypeError, spec: task_lib.TaskSpec) -> Exception:
  """Turns a TypeError into a FieldError that names the given knobs.

  Returns the error itself if none was given, or if a user's file raised it.
  """
  if imports.where(error):
    return error  # The author of that file needs the whole traceback.
  given = {name: text for name in task_lib.REGISTRIES
           if '(' in (text := getattr(spec, name) or '')}
  if not given:
    return error
  field = next(iter(given))
  return FieldError(field, given.pop(field), 'a knob has a wrong type: '
                    f'{str(error).splitlines()[0]}', **given)
