"""Words of the commands that are not `train`."""
from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
  """Refuses wrong words in one line."""

  def __init__(self, command: str, description: str | None,
               epilog: str | None = None):
    """For `fedjax-ssl COMMAND`; the description is shown as it is written."""
    super().__init__(
        prog=f'fedjax-ssl {command}', description=description, epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)

  def error(self, message: str) -> NoReturn:
    """Ends the program with code 2."""
    self.exit(2, f'error: {message}; `{self.prog} --help` says more.\n')
