"""Refuses a misspelt method before data are loaded; a slip, before JAX is."""
from __future__ import annotations

from importlib import metadata
import pathlib
import pkgutil

from fedjax_ssl import config
from fedjax_ssl.core import checks, registry

# A letter of seven is a slip, one of four, as in fedavgm, another name.
_NEAR = 0.86


def check(text: str) -> None:
  """Refuses a name that is nowhere; others, as of a file, are left to `make`.

  Args:
    text: as --method has it.

  Raises:
    FieldError: if the name is neither of a module of `fedjax_ssl.methods` nor
      one that an installed package registers.
  """
  name = registry.name_of(text)
  if not name.isidentifier():
    return
  folder = pathlib.Path(config.__file__).parent / 'methods'
  known = {module.name for module in pkgutil.iter_modules([str(folder)])}
  known -= {'parts'}
  # Reading what is installed takes long.
  if name in known or name in (installed := {
      point.name for point in metadata.entry_points(
          group='fedjax_ssl.methods')}):
    return
  known |= installed
  if checks.nearest(name, known, _NEAR):
    raise checks.FieldError('method', text, f'method {name!r} is '
                            f'{checks.unknown(name, known)}')
  from fedjax_ssl import task  # Loads JAX, and knows what else it may mean.
  task.check_texts({'method': text})
