"""Arguments of all commands but `train`."""
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
import functools
import itertools
import os
import pathlib
import sys
from typing import NoReturn

from fedjax_ssl.cli import exit_codes
from fedjax_ssl.core import blame, checks

Main = Callable[[Sequence[str]], int]


class Parser(argparse.ArgumentParser):
  """A parser that refuses wrong arguments in one line."""

  def __init__(self, command: str, description: str | None,
               epilog: str | None = None, passes_on: Set[str] = frozenset()):
    """Makes the parser of `fedjax-ssl COMMAND`; texts are shown as written.

    `passes_on` are names of flags that its runs take after `--`.
    """
    super().__init__(
        prog=f'fedjax-ssl {command}', description=description, epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    self._passes_on = passes_on
    self._words: list[str] = []  # Of the command, once they are parsed.

  def parse_known_args(self, args=None, namespace=None):
    """Parses as its base; keeps the words, for messages on a missing flag."""
    self._words = [*(sys.argv[1:] if args is None else args)]
    return super().parse_known_args(args, namespace)

  def error(self, message: str) -> NoReturn:
    """Ends the program with code 2; of an unknown flag it says the nearest."""
    more = self._meant(message) or ';'
    self.exit(exit_codes.REFUSED, f'error: {message}{more} '
              f'`{self.prog} --help` says more.\n')

  def check_out(self, out: pathlib.Path, ending: str = '') -> None:
    """Refuses a value of --out that cannot be written, before any work.

    Args:
      out: the value.
      ending: of the file, which may be there; without one `out` is a folder,
        which must not.
    """
    place = out.absolute().parent
    is_new = not os.path.lexists(out)
    fits = is_new if not ending else (
        out.suffix.lower() == ending and (is_new or out.is_file()))
    if not (fits and place.is_dir() and os.access(place, os.W_OK)):
      what = f'FOLDER/NAME{ending}' if ending else 'new'
      self.error(f'--out={out} must be {what}, in a folder that can be written')

  def _meant(self, message: str) -> str:
    """Returns what a message on a wrong flag goes on with, or ''."""
    if required := message.partition('are required: ')[2]:
      return next((f'; {word} is no flag. Did you mean --{near}?'
                   for word, _, nearest in self._unknown(self._words)
                   for near in nearest if f'--{near}' in required.split(', ')),
                  '')
    for _, name, nearest in self._unknown(
        message.partition('unrecognized arguments: ')[2].split()):
      if self._passes_on & {name, name.removeprefix('no')}:
        return ', a flag of the runs: give it after `--`, as --NAME=VALUE;'
      if nearest:
        return f'. Did you mean --{nearest[0]}?'
    return ''

  def _unknown(self, words: Iterable[str]
               ) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yields words before `--` that give no flag of it, names, the nearest."""
    known = [option[2:] for option in self._option_string_actions
             if option.startswith('--')]
    for word in itertools.takewhile(lambda word: word != '--', words):
      name = word[2:].partition('=')[0]
      if word.startswith('--') and name and name not in known:
        yield word, name, checks.nearest(name, known) or [
            full for full in known if full.startswith(name)]


def refusing(main: Main) -> Main:
  """Decorates a command: errors that users can mend are one line."""
  @functools.wraps(main)
  def run(argv: Sequence[str]) -> int:
    try:
      with checks.marking('--'):
        return main(argv)
    except Exception as error:
      if not (isinstance(error, ValueError | OSError | MemoryError)
              or blame.is_full(error)):
        raise
      return refuse(error)
  return run


def refuse(error: Exception) -> int:
  """Prints an error in one line; returns the exit code."""
  text = blame.full_memory(error)
  if isinstance(error, OSError) and error.filename and error.strerror:
    text = f'{error.filename} cannot be used: {error.strerror}.'
  with checks.marking('--'):
    print(f'error: {checks.one_line(error, text)}', file=sys.stderr)
  return exit_codes.of(error)


def check_passed(flags: Sequence[str], own: Sequence[str], who: str, *,
                 switches: bool = False) -> None:
  """Checks words behind `--`, which are given to all runs of a command.

  Args:
    flags: the words.
    own: names of flags that the command sets, or that fit no run of it.
    who: the command, for the message.
    switches: whether --flag without a value may be among them.

  Raises:
    ValueError: for the first that cannot be given to all.
  """
  for flag in flags:
    name, equals, _ = flag.removeprefix('--').partition('=')
    if flag.startswith('--') and name in own:
      raise ValueError(f'{flag} cannot be given behind --: {who} sets '
                       f'{", ".join(own)}, or needs none of them.')
    if not flag.startswith('--') or not (equals or switches):
      raise ValueError(f'{flag} behind -- must be of the form --flag=value.')
    if name == 'flagfile':
      raise ValueError(f'{flag} cannot be given behind --: give the flags '
                       'that it holds.')
