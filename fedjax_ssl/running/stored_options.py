"""Reads options of a stored run, as they take the place of flags."""
from __future__ import annotations

from collections.abc import Collection, Mapping
import os
import pathlib
from typing import Any

from fedjax_ssl import config
from fedjax_ssl.core import checks, run_files


def read(folder: str | os.PathLike[str] | None, names: Collection[str]
         ) -> dict[str, Any]:
  """Returns those options that a folder's run has stored.

  Args:
    folder: of the run; None, or one without a run yet, stores nothing.
    names: of options.

  Raises:
    WorkdirError: if the file is damaged.
  """
  from fedjax_ssl.training import workdir  # Loads JAX.
  flags = workdir.stored_config(folder).get('flags', {})
  found = {name: flags[name] for name in names if name in flags}
  check(folder or '', found)
  return found


def check(folder: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
  """Checks values that come from a folder's run, and not from the user.

  Else the refusal would name a flag that nobody gave.

  Args:
    folder: of the run.
    values: by the names of options. Lists are left to `config.resolve`.

  Raises:
    WorkdirError: for a value that the option does not take.
  """
  from fedjax_ssl.training import workdir  # Loads JAX.
  for name, value in values.items():
    if config.OPTIONS[name].kind is tuple:
      continue
    try:
      config.check(name, value)
    except config.FieldError as error:
      with checks.marking(''):  # Named as in the file.
        raise workdir.WorkdirError(
            f'{pathlib.Path(folder) / run_files.CONFIG} is damaged: {error}'
        ) from error
