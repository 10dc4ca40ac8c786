"""The user's own code that a run was made with: hashed, kept, found again.

A run stores the SHA-256 of every file that its texts and --import name, and a
copy of it in `<workdir>/code/`. What a file imports is not followed. A run is
never continued with other code: its rows would be of two methods. If a file has
changed or is gone, the run is read and repeated with the copy.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
import os
import pathlib
import sys
from typing import Any

from fedjax_ssl.core import checks, disk, imports, registry

FOLDER = 'code'
_VERSION = 'version '  # Before that of a package, in place of a hash.


def of(flags: Mapping[str, Any], setting: str = '') -> dict[str, Any]:
  """Returns the fact `code` of a run; {} if it has no code of its own.

  By name it has the SHA-256 of a file or module; or the version of a package
  whose entry points are used.

  Args:
    flags: by name, as a `config.Config` has them.
    setting: name of the run's setting.
  """
  texts = [flags.get(name) or '' for name in imports.TEXTS]
  names = [registry.name_of(str(text)) for text in texts]
  packages = registry.packages([*names, flags.get('dataset') or '', setting])
  found = {**imports.hashes(_places(flags)),
           **{name: _VERSION + of for name, of in packages.items()}}
  return {'code': found} if found else {}


def _places(flags: Mapping[str, Any]) -> list[str]:
  return [*imports.places((flags.get(name) for name in imports.TEXTS),
                          flags.get('imports') or ())]


def keep(folder: pathlib.Path, flags: Mapping[str, Any]) -> None:
  """Puts a copy of every file into a run's folder, if it is not there."""
  for place in _places(flags):
    copy = folder / FOLDER / os.path.basename(place)
    if imports.is_file(place) and not copy.exists():
      copy.parent.mkdir(exist_ok=True)
      disk.replace(copy, imports.source(place))


def begun(folder: pathlib.Path, now: Mapping[str, str],
          was: Mapping[str, str], flags: Mapping[str, Any]) -> None:
  """Compares the code of a start with that of the run's first one.

  If a module of an installed package has changed, it only prints so, as for a
  new version of any package.

  Args:
    folder: of the run.
    now: the fact `code` of this start.
    was: that of the first one.
    flags: those of the first one. A file that one of them names and this start
      does not is left to whoever compares the flags.

  Raises:
    ValueError: if a file has changed, is missing or is new.
  """
  ours, theirs = ({k: v for k, v in code.items() if k.endswith('.py')}
                  for code in (now, was))
  named = {imports.name_of(place) for place in imports.places(
      str(flags.get(name) or '') for name in imports.TEXTS)}
  for name in sorted({*ours, *theirs} - (named - {*ours})):
    if ours.get(name) == theirs.get(name):
      continue
    copy = folder / FOLDER / name
    if name not in theirs:
      raise ValueError(f'{folder} began without {name}; leave it out, or '
                       f'choose another {checks.option("workdir")}.')
    what = 'has changed since' if name in ours else 'was imported when'
    raise ValueError(f'{name} {what} the run in {folder} began; go on with '
                     f'{copy}, its copy, in its place, or begin anew: in '
                     f'another {checks.option("workdir")}, or here once that '
                     'folder is removed.')
  for name in sorted({*now} & {*was}):
    if now[name] != was[name] and name not in theirs:
      print(f'{name} has changed since the run in {folder} began.',
            file=sys.stderr)


def same_name(now: str, was: str) -> bool:
  """Returns whether two names are equal, whatever folders files are in."""
  first, second = imports.split(now), imports.split(was)
  if first is None or second is None:
    return now == was
  return (first.name == second.name
          and imports.name_of(first.place) == imports.name_of(second.place))


def found_again(config: Mapping[str, Any], folder: str | os.PathLike[str],
                say: Callable[[str], None] | None = None) -> dict[str, Any]:
  """Returns a run's configuration, which names its code where it is today.

  Args:
    config: as `workdir.read_config` returns it.
    folder: of the run.
    say: gets a line on each copy that is taken; default: standard error.

  Returns:
    The configuration, with copies in place of files that changed or are gone.

  Raises:
    ValueError: if neither a file nor its copy is there, or a package is not
      installed whose entry points were taken.
  """
  code = config['facts'].get('code')
  if not code:
    return dict(config)
  for name, was in code.items():
    _check_package(folder, name, was)
  say = say or (lambda line: print(line, file=sys.stderr))
  told: dict[str, str] = {}

  def today(place: str) -> str:
    if not imports.is_file(place):
      return place
    if place not in told:
      told[place] = _today(place, code, pathlib.Path(folder), say)
    return told[place]

  def texts(values: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(values)
    for name in {*imports.TEXTS} & {*values}:
      if found := imports.split(str(values[name] or '')):
        changed[name] = found._replace(place=today(found.place)).text
    return changed

  facts, flags = {**config['facts']}, texts(config['flags'])
  flags['imports'] = [today(place) for place in flags.get('imports') or ()]
  if 'spec' in facts.get('task', {}):
    facts['task'] = {**facts['task'], 'spec': texts(facts['task']['spec'])}
  return {**config, 'flags': flags, 'facts': facts}


def _check_package(folder: str | os.PathLike[str], name: str, was: str
                   ) -> None:
  """Raises ValueError for a package that is not installed any more."""
  if not was.startswith(_VERSION):
    return
  try:
    metadata.distribution(name)
  except metadata.PackageNotFoundError:
    raise ValueError(f'{os.fspath(folder)} is a run with code of the package '
                     f'{name} {was.removeprefix(_VERSION)}, which is not '
                     'installed; install it.') from None


def _today(place: str, code: Mapping[str, str], folder: pathlib.Path,
           say: Callable[[str], None]) -> str:
  name = os.path.basename(place)
  wanted = code.get(name, '')
  if imports.sha256_of(place) == wanted:
    return place
  copy = (folder / FOLDER / name).absolute()
  if imports.sha256_of(copy) != wanted:
    raise ValueError(f'{folder} is a run with code of {place}, which is '
                     f'{"another" if os.path.isfile(place) else "not here"}, '
                     f'and has no copy {copy}; bring back the file of SHA-256 '
                     f'{wanted[:12]}.')
  say(f'{place} has {"changed" if os.path.isfile(place) else "gone"}; its copy '
      f'{copy} is taken.')
  return str(copy)
