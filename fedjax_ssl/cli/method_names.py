"""Refuses a misspelt method before the data are loaded."""
from __future__ import annotations

from importlib import metadata
import pathlib
import pkgutil

from fedjax_ssl import config
from fedjax_ssl.core import registry


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
  if name in known - {'parts'} or any(
      point.name == name
      for point in metadata.entry_points(group='fedjax_ssl.methods')):
    return
  from fedjax_ssl import task  # It knows what else the name may mean.
  task.check_texts({'method': text})
