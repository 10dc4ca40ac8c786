r"""Runs again what a `config.json` says.

fedjax-ssl repeat runs/study/fixmatch --workdir=runs/again
fedjax-ssl repeat any_name.json --print

Flags after the first word override those of the run. Every run also writes its
flags to `run.flags` in its folder, for `--flagfile`.
"""
from __future__ import annotations

from collections.abc import Sequence
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

from fedjax_ssl.cli import arguments, places
from fedjax_ssl.config import RIVALS
from fedjax_ssl.core import registry, run_files
from fedjax_ssl.report import printing
from fedjax_ssl.running import settings
from fedjax_ssl.training import command, own_code
from fedjax_ssl.training import workdir as workdir_lib


def _config_of(path: pathlib.Path) -> dict[str, Any]:
  """Reads the configuration in a run's folder, or in a file of any name."""
  if path.is_dir() or not path.exists() or path.name == run_files.CONFIG:
    return workdir_lib.read_config(
        path.parent if path.name == run_files.CONFIG else path)
  if path.suffix == '.flags':
    raise ValueError(f'{path} holds flags: give it to `fedjax-ssl train` as '
                     '--flagfile, or name the folder of a run here.')
  with tempfile.TemporaryDirectory() as folder:
    (pathlib.Path(folder) / run_files.CONFIG).write_bytes(path.read_bytes())
    try:
      return workdir_lib.read_config(folder)
    except workdir_lib.WorkdirError as error:
      if _is_table(path):
        raise ValueError(f'{path} holds a table of runs, and not the flags of '
                         'one, as its config.json does.') from None
      raise ValueError(str(error).replace(
          str(pathlib.Path(folder) / run_files.CONFIG), str(path))) from error


def _is_table(path: pathlib.Path) -> bool:
  """Whether a file is that of a bench or of a study."""
  try:
    found = json.loads(path.read_bytes())
  except (OSError, ValueError, RecursionError):
    return False
  return isinstance(found, dict) and not found.keys().isdisjoint(
      ('rows', 'runs'))


def _today(config: dict[str, Any]) -> dict[str, Any]:
  """Returns the configuration; knobs whose default has changed are explicit."""
  choices = config['facts'].get('choices', {})
  if not choices:
    return config
  from fedjax_ssl import task  # Loads JAX.
  try:
    texts = {field: task.restated(field, config['flags'][field], was['knobs'])
             for field, was in choices.items()}
  except (AttributeError, KeyError, TypeError) as error:
    raise ValueError(f'Its configuration is damaged: {error!r}.') from error
  return {**config, 'flags': {**config['flags'], **texts}}


def program(config: dict[str, Any], path: pathlib.Path) -> list[str]:
  """Returns the command that a run was started with, without flags.

  Raises:
    ValueError: if it is not here.
  """
  setting = command.setting_of(config)
  if settings.is_known(setting, config):
    return settings.program(setting)
  script = command.origin_of(config).get('script', '')
  if script == workdir_lib.FIT:
    raise ValueError(f'{path} was made in Python, by fedjax_ssl.fit of data '
                     'that were given there; call it with them again, with '
                     'workdir= for the same run.')
  # Earlier versions stored paths relative to the repository's root.
  place = (places.repository() or pathlib.Path()) / script
  if not script or not place.is_file():
    raise ValueError(f'{path} was made by '
                     f'{setting or script or "an older version"}, which is '
                     'not here.')
  return [sys.executable, str(place)]


def _name(word: str) -> str:
  return word.lstrip('-').partition('=')[0]


@arguments.refusing
def main(argv: Sequence[str]) -> int:
  """Starts the run again, or prints its flags; returns an exit code."""
  words = [word for word in argv if word != '--print']
  if words[:1] in (['--help'], ['-h']):
    printing.say(__doc__)
    return 0
  if not words or words[0].startswith('-'):
    raise ValueError("name a run's folder or its config.json first.")
  places.check_named(words[:1])
  path = pathlib.Path(words[0])
  folder = path if path.is_dir() else path.parent
  config = own_code.found_again(_config_of(path), folder)
  for place in config['flags'].get('imports') or ():
    registry.import_place(place)
  config = _today(config)
  if '--print' in argv:
    if words[1:]:
      raise ValueError(f'--print shows the flags of the run; leave {words[1]} '
                       'out.')
    printing.say(command.text_of(config), end='')
    return 0
  # Of two that exclude each other the run's gives way.
  given = {_name(word) for word in words[1:]}
  rivals = {name for pair in RIVALS if pair & given for name in pair - given}
  stored = [flag for flag in command.flags_of(config)
            if _name(flag) not in rivals]
  line = [*program(config, path), *stored, *words[1:]]
  if '\0' in ''.join(line):
    raise ValueError(f'{path} has a flag with a zero byte.')
  os.execv(sys.executable, line)
