"""Reads what the flags of a sweep's cell ask for, as the run would."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

from fedjax_ssl import config
from fedjax_ssl.cli import places
from fedjax_ssl.cli.sweep import grid
from fedjax_ssl.running import settings


def setting_of(cell: grid.Cell) -> str:
  """Returns the setting that a cell trains; '' for a script of the user's."""
  root, path = places.repository(), pathlib.Path(cell.script)
  if not cell.setting and root and path.stem in settings.SETTINGS and (
      path.resolve() == root / 'experiments' / f'{path.stem}.py'):
    return path.stem
  return cell.setting


def options(setting: str, words: Sequence[str]
            ) -> tuple[config.Config, frozenset[str]]:
  """Returns the options of a run, and the names of those that flags give.

  Args:
    setting: its name, which decides the defaults.
    words: flags.

  Raises:
    absl.flags.Error: for an unknown flag, or a value that one does not take.
    ValueError: for options that exclude each other, or a value out of range.
  """
  read(settings.find(setting, settings.imported(words)).defaults, words)
  from fedjax_ssl.cli import train
  return train.options(setting), frozenset(train.named())


def read(defaults: Mapping[str, Any], words: Sequence[str]) -> None:
  """Sets the flags of this process to what a command says.

  Args:
    defaults: of a setting, by option.
    words: the command's flags.

  Raises:
    absl.flags.Error: see `options`.
  """
  from fedjax_ssl.cli import train  # It defines the flags.
  train.begin(defaults)
  train.read(['sweep', *words])
