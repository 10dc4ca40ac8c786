"""Large arrays on huge pages, which a CPU needs for large networks.

A compiled program's arrays are given back to the system at its end, and in the
next one the first touch of every page of 4 KB costs a fault. Pages of 2 MB make
it one in 512: a FixMatch round on ResNet-9 then takes .96 of its time with 10
local steps and .86 with 2 (`experiments/benchmarks/huge_pages.py`). The C
library asks for them if a variable says so before the process starts, so the
command and the scripts in experiments/ start once more, before they have loaded
anything; benchmarks that time our side as its programs run do so too. For a
script of your own, or a notebook, set GLIBC_TUNABLES=glibc.malloc.hugetlb=1.
"""
from __future__ import annotations

from collections.abc import Mapping
import os
import pathlib
import re
import sys

_VARIABLE = 'GLIBC_TUNABLES'
_TUNABLE = 'glibc.malloc.hugetlb'
_MODES = '/sys/kernel/mm/transparent_hugepage/enabled'
_FIRST = (2, 35)  # The C library that knows the tunable.


def restart() -> None:
  """Calls `begin_again`, unless NumPy is loaded: then the work has begun."""
  if 'numpy' not in sys.modules:
    begin_again()


def begin_again() -> None:
  """Starts this process again with huge pages, where that changes something.

  It keeps its number and its arguments. Call it first of all, and only where
  all that the process has done before may be done again. It returns if the
  system gives huge pages to all or to nobody, if the variable already says
  how, if the program is not in a file, as a pipe cannot be read twice, or if
  another process has made this one to work for it.
  """
  if not sys.executable or not _can_begin_again():
    return
  environ = asking(os.environ)
  if environ == dict(os.environ):
    return
  os.environ.update(environ)
  sys.stdout.flush()
  sys.stderr.flush()
  os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _can_begin_again() -> bool:
  """Returns whether the same words would start the same program once more."""
  multiprocessing = sys.modules.get('multiprocessing')
  if '--multiprocessing-fork' in sys.orig_argv or (
      multiprocessing and multiprocessing.parent_process()):
    return False
  # Links such as /dev/stdin lead to files that have been read.
  program = pathlib.Path(sys.argv[0])
  return program.is_file() and not program.is_relative_to('/dev') and (
      not program.is_relative_to('/proc'))


def wanted(environ: Mapping[str, str], modes: str, libc: str) -> str | None:
  """Returns the variable's value with huge pages; None to leave it.

  Args:
    environ: the process's variables.
    modes: of the system, as 'always [madvise] never'; '' if there are none.
    libc: name and version of the C library, as 'glibc 2.36'.
  """
  found = re.match(r'glibc (\d+)\.(\d+)', libc)
  if '[madvise]' not in modes or not found:
    return None
  if tuple(map(int, found.groups())) < _FIRST:
    return None
  before = environ.get(_VARIABLE, '')
  if _TUNABLE in before:
    return None
  return ':'.join([*filter(None, [before]), f'{_TUNABLE}=1'])


def asking(environ: Mapping[str, str]) -> dict[str, str]:
  """Returns the variables, asking for huge pages where that changes something.

  They are the same where the system gives such pages to all or to nobody, or
  where the variables already say how.
  """
  variable = wanted(environ, _modes(), _libc())
  return {**environ, **({} if variable is None else {_VARIABLE: variable})}


def without(environ: Mapping[str, str]) -> dict[str, str]:
  """Returns the variables without any word on huge pages."""
  rest = [word for word in environ.get(_VARIABLE, '').split(':')
          if word and not word.startswith(f'{_TUNABLE}=')]
  kept = {name: value for name, value in environ.items() if name != _VARIABLE}
  return {**kept, **({_VARIABLE: ':'.join(rest)} if rest else {})}


def said(environ: Mapping[str, str]) -> str:
  """Returns how pages are given, for reports: the system's way, the tunable."""
  chosen = re.search(r'\[(\w+)\]', _modes())
  return f'{chosen[1] if chosen else "none"}; {environ.get(_VARIABLE, "")}'


def _modes() -> str:
  try:
    return pathlib.Path(_MODES).read_text('utf-8')
  except OSError:
    return ''


def _libc() -> str:
  try:
    return os.confstr('CS_GNU_LIBC_VERSION') or ''
  except (AttributeError, OSError, ValueError):
    return ''
