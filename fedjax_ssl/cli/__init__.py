"""The command `fedjax-ssl`, which is also `python -m fedjax_ssl`.

Importing this package loads none of the programs, nor JAX.
"""
from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # See `fedjax_ssl`.
if TYPE_CHECKING:
  from collections.abc import Sequence

  from fedjax_ssl.running.settings import Setting

# Command: its module, whose `main` takes the words after it, and what it does.
_COMMANDS = {
    'train': ('', 'trains a setting, as in `fedjax-ssl train digits_dirdir`'),
    'evaluate': ('evaluate', "evaluates a run's newest checkpoint"),
    'predict': ('predict', 'predicts classes of your images or texts'),
    'repeat': ('repeat', 'runs again what a run or its config.json says'),
    'sweep': ('sweep', 'runs a grid of settings, flags and seeds'),
    'bench': ('bench', 'compares methods on one bed, each tuned alike'),
    'report': ('report', 'makes one page of tables and charts from runs'),
    'results': ('results', 'makes one table of runs, to be stored'),
    'tables': ('tables', "lists, prints, writes and runs the papers' tables"),
    'list': ('catalog', 'lists methods, models, data sets, views, settings'),
    'resize-images': ('resize_images', 'brings a folder of images to one size'),
    'embed-texts': ('embed_texts', 'precomputes vectors of texts by a BERT'),
}
# What is done by no command, or by another one: how.
_ELSEWHERE = {
    'resume': 'The command that began a run goes on with it; `train SETTING '
              '--flagfile=RUN/run.flags --workdir=RUN` does too.',
    'compare': '`fedjax-ssl report RUN RUN` compares runs.',
    'plot': '`fedjax-ssl report RUN` draws curves.'}
_FIRST = 'The setting comes first: `fedjax-ssl train SETTING --FLAG=VALUE`.'
# Those that train or evaluate in this process.
_TRAINING = ('train', 'evaluate', 'repeat')


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command of `fedjax-ssl`; returns the exit code.

  Those that train or evaluate end the process instead, see `run_setting`.

  Args:
    argv: the command and what follows it; default: the process's own.
  """
  command, *words = [*(sys.argv[1:] if argv is None else argv)] or ['--help']
  if argv is None:
    _open_streams()
  if argv is None and command in _TRAINING:
    _begin(may_restart=True)
  if command in ('--help', '-h', 'help'):
    return _say(_usage())
  if command == '--version':
    from fedjax_ssl import __version__
    return _say(f'fedjax_ssl {__version__}')
  if command not in _COMMANDS:
    return _refuse('command', command, _COMMANDS, _ELSEWHERE.get(command, ''))
  if command == 'train':
    return _train(words)
  try:
    module = importlib.import_module(f'{__name__}.{_COMMANDS[command][0]}')
  except OSError as error:  # Matplotlib's, which finds no room for its cache.
    from fedjax_ssl.cli import arguments
    return arguments.refuse(error)
  try:
    return module.main(words)
  except KeyboardInterrupt:  # Those that train have handlers of their own.
    if argv is not None:
      raise
    print('Ended by SIGINT.', file=sys.stderr)
    return 130


def run_setting(setting: str | Setting, argv: Sequence[str] | None = None
                ) -> None:
  """Trains a setting; the scripts `experiments/*.py` do just this.

  Args:
    setting: a name of `settings.SETTINGS`, or a setting of your own.
    argv: flags; default: those of the process.

  Raises:
    SystemExit: in any case, with the exit code. `fedjax_ssl.fit` trains inside
      a program that goes on.
  """
  if argv is None:
    _open_streams()
    _begin(may_restart=_is_script())
  from fedjax_ssl.cli import train
  from fedjax_ssl.running import settings
  words = sys.argv[1:] if argv is None else argv
  if isinstance(setting, str):
    setting = settings.SETTINGS.get(setting) or settings.find(
        setting, settings.imported(words))
  train.main(setting, words)


def _open_streams() -> None:
  """Opens on nothing the standard streams that the shell has closed.

  Else the next file would get the number of one, and in it what libraries
  print.
  """
  import os
  for name, mode in (('stdin', 'r'), ('stdout', 'w'), ('stderr', 'w')):
    if getattr(sys, name) is None:
      # The lowest number that is free.
      setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _begin(may_restart: bool) -> None:
  """Takes huge pages, and lets signals end this process from now on.

  Called only if the command is the whole process. A process that calls `main`
  with arguments of its own may go on after it, by catching `SystemExit`, so
  there `train.main` handles signals, and gives them back at its end.

  Args:
    may_restart: whether nothing has been done that would be done twice.
  """
  from fedjax_ssl.running import huge_pages, stopping
  if may_restart:
    huge_pages.restart()
  stopping.listen()


def _is_script() -> bool:
  """Whether this process is a script in experiments/, not one of a user's."""
  import pathlib

  from fedjax_ssl.cli import places
  root = places.repository()
  return root is not None and (
      pathlib.Path(sys.argv[0]).resolve().parent == root / 'experiments')


def _train(words: list[str]) -> int:
  from fedjax_ssl.cli import arguments, exit_codes
  from fedjax_ssl.core.checks import FieldError
  from fedjax_ssl.running import settings
  if not words or words[0] in ('--help', '-h'):
    code = _say('\n'.join([
        'fedjax-ssl train SETTING [--FLAG=VALUE ...], where SETTING is one of',
        '', *(f'  {found.name:18} {found.about}'
              for found in settings.SETTINGS.values()),
        '', '`fedjax-ssl train SETTING --help` lists the flags.']))
    return code or (0 if words else exit_codes.REFUSED)
  try:
    imports = settings.imported(words)
  except ValueError as error:
    return arguments.refuse(error)
  try:
    settings.find(words[0], imports)
  except ValueError as error:
    known = settings.names()
    if words[0] not in known and not isinstance(error, FieldError):
      return _refuse('setting', words[0], known, _FIRST * (
          words[0][:1] == '-'), more=' --import=FILE.py brings your own.')
    return arguments.refuse(error)
  run_setting(words[0], words[1:])
  return 0  # It has ended the process before.


def _usage() -> str:
  lines = [f'  {name:12} {text}' for name, (_, text) in _COMMANDS.items()]
  return '\n'.join(['fedjax-ssl COMMAND [...], where COMMAND', *lines, '',
                    '`fedjax-ssl COMMAND --help` says more.'])


def _refuse(kind: str, name: str, known: Sequence[str] | object,
            how: str = '', more: str = '') -> int:
  """Prints in one line which names there are; returns the exit code.

  Args:
    kind: what is asked for, as 'command'.
    name: the word that is none.
    known: the names.
    how: what to do instead; default: to take the name that is near.
    more: the end of the line.
  """
  from fedjax_ssl.cli import exit_codes
  from fedjax_ssl.core import checks
  names = [*known]  # type: ignore[misc]
  how = f' {how}' if how else checks.near(name, names)
  print(f'error: {name!r} is no {kind}.{how} '
        f'There are: {", ".join(names)}.{more}', file=sys.stderr)
  return exit_codes.REFUSED


def _say(text: str) -> int:
  """Prints; returns the exit code."""
  from fedjax_ssl.report import printing
  try:
    printing.say(text)
  except OSError as error:
    from fedjax_ssl.cli import arguments
    return arguments.refuse(error)
  return 0
