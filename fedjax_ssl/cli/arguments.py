"""Arguments of all commands but `train`."""
from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
import functools
import sys
from typing import NoReturn

from fedjax_ssl.core.checks import FieldError

Main = Callable[[Sequence[str]], int]


class Parser(argparse.ArgumentParser):
  """A parser that refuses wrong arguments in one line."""

  def __init__(self, command: str, description: str | None,
               epilog: str | None = None):
    """Makes the parser of `fedjax-ssl COMMAND`; texts are shown as written."""
    super().__init__(
        prog=f'fedjax-ssl {command}', description=description, epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)

  def error(self, message: str) -> NoReturn:
    """Ends the program with code 2."""
    self.exit(2, f'error: {message}; `{self.prog} --help` says more.\n')


def refusing(main: Main) -> Main:
  """Decorates a command: errors that users can mend are one line and code 2."""
  @functools.wraps(main)
  def run(argv: Sequence[str]) -> int:
    try:
      return main(argv)
    except (ValueError, OSError) as error:
      text = error.text('--') if isinstance(error, FieldError) else str(error)
      print(f'error: {" ".join(text.split())}', file=sys.stderr)
      return 2
  return run
