"""Code of the user's own: files and modules that a run names.

`PLACE:NAME` stands for what a file, or a module of an installed package, calls
NAME. A file is named by its path, and each process imports it once. Its folder
goes to the end of `sys.path`, so that it finds files beside it.
"""
from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
import contextlib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import itertools
import os
import pathlib
import re
import sys
import traceback
from types import ModuleType
from typing import NamedTuple

from fedjax_ssl.core import checks

# Fields of a run whose value is a name with knobs.
TEXTS = ('method', 'model', 'weak', 'labeled_view', 'strong', 'lr_schedule',
         'aggregator', 'server_optimizer', 'attack')

# What goes in place of Python's and NumPy's own, which JAX cannot trace.
_HINTS = {
    'TracerArrayConversionError': 'jax.numpy in place of numpy',
    'TracerBoolConversionError': 'jax.numpy.where in place of if',
    'TracerIntegerConversionError':
        'jax.numpy.take in place of an index, jax.lax.fori_loop of range',
    'NonConcreteBooleanIndexError': 'jax.numpy.where in place of an index',
    'ConcretizationTypeError': 'jax.numpy in place of float, int and math'}

_PREFIX = 'fedjax_ssl_user_'  # Of the names of the files' modules.
_PLAIN = re.compile(r'\s*[A-Za-z_]\w*\s*(\(|$)')
# A folder's name may look like a call, as in 'runs (copy)/mine.py:mine'; knobs
# have quotes around a place.
_FILE = re.compile(r'([^\'"=]+\.py):\s*([A-Za-z_]\w*)\s*(\(.*)?', re.DOTALL)
_PLACED = re.compile(r'\s*(.+?):\s*([A-Za-z_]\w*)\s*(\(.*)?', re.DOTALL)
_MODULE = re.compile(r'[A-Za-z_]\w*(\.[A-Za-z_]\w*)*')


class Placed(NamedTuple):
  """A text of the form `PLACE:NAME` or `PLACE:NAME(...)`."""

  place: str  # Path of a file, or name of a module.
  name: str
  rest: str  # The knobs with their brackets, or ''.

  @property
  def text(self) -> str:
    """The text itself."""
    return f'{self.place}:{self.name}{self.rest}'


class _File(NamedTuple):
  """A file that this process has imported."""

  module: ModuleType
  source: bytes  # What was run, whatever the file holds by now.


_FILES: dict[str, _File] = {}  # By absolute path.
_TRIES = itertools.count()
_TRIED: set[str] = set()  # Paths, also of files that failed.


def split(text: str) -> Placed | None:
  """Splits `PLACE:NAME(...)`; None for a text without a place."""
  found = _FILE.fullmatch(text.strip()) or (
      None if _PLAIN.match(text) else _PLACED.fullmatch(text.strip()))
  return found and Placed(found[1], found[2], found[3] or '')


def short(text: str) -> str:
  """Returns the text without its place, for people."""
  found = split(text)
  return found.name + found.rest if found else text


def is_file(place: str) -> bool:
  """Returns whether a place is a file's path, not a module's name."""
  return place.endswith('.py') or os.sep in place or place.startswith('~')


def name_of(place: str) -> str:
  """Returns a file's name without its folder, or a module's as it is."""
  return os.path.basename(place) if is_file(place) else place


def names_in(path: str) -> list[str]:
  """Returns the public functions and classes of a file, which is not run.

  There are none if it cannot be read.
  """
  with contextlib.suppress(OSError, SyntaxError, ValueError, MemoryError,
                           RecursionError):
    source = pathlib.Path(os.path.expanduser(path)).read_bytes()
    return [node.name for node in ast.parse(source).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and not node.name.startswith('_')]
  return []


def absolute(place: str) -> str:
  """Returns a file's absolute path, or a module's name as it is.

  Raises:
    ValueError: if there is no such file, or the place is no name of a module.
  """
  if not is_file(place):
    if not _MODULE.fullmatch(place):
      raise ValueError(f'{place!r} is neither the path of a file nor the name '
                       'of a module.')
    return place
  path = os.path.abspath(os.path.expanduser(place))
  if not os.path.isfile(path):
    raise ValueError(f'there is no file {path}.')
  return path


def load(place: str) -> ModuleType:
  """Imports a file or a module, once.

  Raises:
    ValueError: if there is none, or its code fails; the message ends with the
      error's last line.
  """
  place = absolute(place)
  if place in _FILES:
    return _FILES[place].module
  try:
    if is_file(place):
      return _load_file(place)
    module = importlib.import_module(place)
  except ModuleNotFoundError as error:
    if is_file(place) or not f'{place}.'.startswith(f'{error.name}.'):
      raise ValueError(_failed(place, error)) from error
    raise ValueError(f'there is no module {error.name!r}; install its package, '
                     'set PYTHONPATH, or give the path of a file, which ends '
                     'with .py.') from error
  except (Exception, SystemExit) as error:
    raise ValueError(_failed(place, error)) from error
  if module.__spec__ is not None and module.__spec__.origin is None:
    raise ValueError(f'{place} is a folder without an __init__.py, which holds '
                     'no code; give a file of it.')
  return module


def _failed(place: str, error: BaseException) -> str:
  """One line: the error, and the line of the user's file that raised it."""
  last = checks.lines(error)[-1]
  at = f' (at {where(error)})' if where(error) else ''
  return f'{place} cannot be imported: {type(error).__name__}: {last}{at}.'


def _load_file(path: str) -> ModuleType:
  source = pathlib.Path(path).read_bytes()
  # Files may share a name, a file that failed may be imported again, and none
  # may hide an installed module.
  tag = f'{hashlib.sha256(path.encode()).hexdigest()[:8]}_{next(_TRIES)}'
  stem = re.sub(r'[^0-9A-Za-z_]', '_', pathlib.Path(path).stem)
  name = f'{_PREFIX}{stem}_{tag}'
  loader = importlib.machinery.SourceFileLoader(name, path)
  spec = importlib.util.spec_from_loader(name, loader)
  assert spec is not None
  module = importlib.util.module_from_spec(spec)
  if os.path.dirname(path) not in sys.path:
    sys.path.append(os.path.dirname(path))
  sys.modules[name] = module
  _TRIED.add(path)
  _FILES[path] = _File(module, source)
  try:
    # Without this module's own imports from `__future__`.
    exec(compile(source, path, 'exec', dont_inherit=True), module.__dict__)
  except BaseException:
    del sys.modules[name], _FILES[path]
    raise
  return module


def has_failed(module: str) -> bool:
  """Returns whether a module is a user's file whose import failed."""
  return module.startswith(_PREFIX) and not path_of(module)


def path_of(module: str) -> str:
  """Returns the path of the user's file with this module name; '' if none."""
  return next((path for path, file in _FILES.items()
               if file.module.__name__ == module), '')


def find(text: str) -> Placed | None:
  """Splits a text as `split` does, and imports its place.

  Returns:
    The parts, with the absolute path of a file; None without a place.

  Raises:
    ValueError: as `load`.
  """
  found = split(text)
  if found is None:
    return None
  load(found.place)
  return found._replace(place=absolute(found.place))


def where(error: BaseException) -> str:
  """Returns FILE:LINE of the user's code behind an error; '' if none is.

  It is the innermost such line of the first error in the chain that has one.
  """
  behind: BaseException | None = error
  while behind is not None:
    trace, found = behind.__traceback__, ''
    while trace is not None:
      if trace.tb_frame.f_code.co_filename in _TRIED:
        found = f'{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}'
      trace = trace.tb_next
    if isinstance(behind, SyntaxError) and is_file(behind.filename or ''):
      found = found or f'{behind.filename}:{behind.lineno}'
    if found:
      return found
    behind = behind.__cause__ or behind.__context__
  return ''


def said(error: BaseException) -> str:
  """Returns an error's type, its first line, and where the user's code is.

  The place is left out if `where` finds one, which the programs add.
  """
  kind = type(error).__name__
  first = checks.lines(error)[0]
  hint = f' (use {_HINTS[kind]})' if kind in _HINTS else ''
  at = '' if where(error) else _place_of(error)
  return f'{kind}: {first}{hint}{at}'


def _place_of(error: BaseException) -> str:
  """' (at FILE:LINE)' of the innermost line that is no library's."""
  found = ''
  for frame, line in traceback.walk_tb(error.__traceback__):
    file = frame.f_code.co_filename
    if pathlib.Path(file).is_file() and not re.search(
        r'/(fedjax_ssl|site-packages|lib/python[0-9.]+)/', file):
      found = f' (at {file}:{line})'
  return found


def hashes(places: Iterable[str]) -> dict[str, str]:
  """Computes SHA-256 of the code of places, as this process runs it.

  Args:
    places: paths of files, names of modules.

  Returns:
    The hashes, by file name or by module.

  Raises:
    ValueError: if two files have one name, or a place cannot be imported.
  """
  found: dict[str, str] = {}
  paths: dict[str, str] = {}
  for place in map(absolute, places):
    load(place)
    if not is_file(place):
      file = getattr(sys.modules[place], '__file__', None)
      if file:
        found[place] = sha256_of(file)
      continue
    name = os.path.basename(place)
    if paths.setdefault(name, place) != place:
      raise ValueError(f'{paths[name]} and {place} have one name; rename one.')
    found[name] = hashlib.sha256(source(place)).hexdigest()
  return found


def source(path: str) -> bytes:
  """Returns what a file held when this process imported it."""
  load(path)
  return _FILES[absolute(path)].source


def sha256_of(path: str | os.PathLike[str]) -> str:
  """Computes SHA-256 of a file as this process imported it, else as it is now.

  Returns '' if it is not there, or cannot be read.
  """
  held = _FILES.get(str(path))
  if held is not None and os.path.isfile(path):
    return hashlib.sha256(held.source).hexdigest()
  with contextlib.suppress(OSError):
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
  return ''


def places(texts: Iterable[str | None], imports: Iterable[str] = ()
           ) -> Iterator[str]:
  """Yields the places that texts and --import name, each once."""
  named = [found.place for text in texts if text and (found := split(text))]
  yield from dict.fromkeys([*named, *imports])
