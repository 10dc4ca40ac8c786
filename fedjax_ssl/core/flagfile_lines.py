"""The flagfiles that a command names, and those that these name."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import os
import pathlib


def read(words: Sequence[str], *, nested: bool = True
         ) -> Iterator[tuple[str, list[str]]]:
  """Reads the flagfiles that words name, as `--flagfile=X` or `--flagfile X`.

  Args:
    words: of a command.
    nested: whether those that flagfiles name follow, each behind its own. One
      that names itself comes once, as absl reads it.

  Yields:
    A file as it is named, and its lines. None for what cannot be opened, which
    whoever uses it says, nor for a pipe, which can be read once.

  Raises:
    ValueError: if a name is empty, as of an unset variable, or is that of a
      device, which may have no end, or if a file is no text.
  """
  return _read(words, '', (), nested)


def _read(words: Sequence[str], place: str, outer: tuple[str, ...],
          nested: bool) -> Iterator[tuple[str, list[str]]]:
  """Reads what the lines of a file name; `outer` are the files around it."""
  for number, word in enumerate(words, start=1):
    if word == '--' and not place:  # What follows are no flags.
      return
    flag, equals, name = word.strip().lstrip('-').partition('=')
    # In a file a space may part the two, which absl says of a command's word.
    known = flag.split()[:1] == ['flagfile'] if place else flag == 'flagfile'
    if not word.strip().startswith('-') or not known:
      continue
    # absl would leave it out.
    if place and not word.startswith(('-flagfile=', '--flagfile=')):
      raise ValueError(f'{word.strip()} is not read here; write '
                       '--flagfile=NAME from the start of a line. (at '
                       f'{place}:{number})')
    name = name.strip() if equals else ''.join(words[number:number + 1])
    if not name:
      raise ValueError('--flagfile= is empty; name a file or leave it out.' + (
          f' (at {place}:{number})' if place else ''))
    if name in outer:
      continue
    lines: list[str] = []
    try:
      path, endless = pathlib.Path(os.path.expanduser(name)), False
      with contextlib.suppress(OSError):
        endless = path.is_char_device() and name != os.devnull
        lines = path.read_text('utf-8').splitlines() if path.is_file() else []
    except UnicodeDecodeError:
      raise ValueError(f'--flagfile={name} cannot be read: it is no text.'
                       ) from None
    if endless:
      raise ValueError(f'--flagfile={name} is a device; name a file.')
    if lines and lines[0].startswith('\ufeff'):  # absl reads it as letters.
      raise ValueError(f'--flagfile={name} begins with a byte order mark; save '
                       'it without one.')
    yield name, lines
    if nested:
      yield from _read(lines, name, (*outer, name), nested)
