r"""Evaluates the newest checkpoint of a run.

fedjax-ssl evaluate runs/study/fixmatch
fedjax-ssl evaluate runs/study/fixmatch --data_dir=DIR

Prints one line of JSON for each seed and writes nothing. The flags are those of
the run's `config.json`; further ones may say where its data is.
"""
from __future__ import annotations

from collections.abc import Sequence
import pathlib
import re

from fedjax_ssl import cli
from fedjax_ssl.cli import arguments, places, repeat
from fedjax_ssl.report import printing
from fedjax_ssl.running import settings
from fedjax_ssl.training import command, own_code
from fedjax_ssl.training import workdir as workdir_lib


@arguments.refusing
def main(argv: Sequence[str]) -> int:
  """Evaluates the run that the first word names; returns an exit code."""
  if list(argv[:1]) in (['--help'], ['-h']):
    printing.say(__doc__)
    return 0
  if not argv or argv[0].startswith('-'):
    raise ValueError("name a run's folder first.")
  folder = argv[0]
  places.check_named([folder])
  if any(re.match('--?num_rounds', word) for word in argv):
    raise ValueError('--num_rounds does nothing here: the newest checkpoint '
                     'is evaluated.')
  config = own_code.found_again(
      workdir_lib.read_config(folder), folder, say=lambda line: None)
  setting = command.setting_of(config)
  if not settings.is_known(setting, config):
    [_, script] = repeat.program(config, pathlib.Path(folder))
    raise ValueError(f'--workdir={folder} is a run of {script}; evaluate it '
                     f'with that script and --eval_only.')
  # `is_known` has imported the user's own code, if the setting is from there.
  cli.run_setting(settings.SETTINGS[setting],
                  [f'--workdir={folder}', '--eval_only', *argv[1:]])
  return 0  # It has ended the process before.
