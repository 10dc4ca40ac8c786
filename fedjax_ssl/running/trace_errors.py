"""Which option the errors of a run's first trace are due to."""
from __future__ import annotations

import contextlib

from fedjax_ssl import methods
from fedjax_ssl import task as task_lib
from fedjax_ssl.config import FieldError
from fedjax_ssl.core import imports, registry


def naming_method(text: str) -> contextlib.AbstractContextManager[None]:
  """Names the method in the errors of its first trace; see `registry.naming`.

  Of the library's methods in ValueErrors alone; of a user's method in all,
  also where its functions take other arguments, or return something else, than
  the library expects.
  """
  return registry.naming('method', text, methods.is_own)


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
