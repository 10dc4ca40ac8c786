"""What started a run, and the flags that make it again."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import os
import pathlib
import re
import shlex
from typing import Any

from fedjax_ssl.core import (
  checks,
  disk,
  flag_kinds,
  flagfile_lines,
  imports,
  run_files,
)
from fedjax_ssl.training import workdir as workdir_lib

_TEXTS = ('setting', 'script', 'dealt_by')
# Flags that say how a data set is read, and how its rows are dealt.
READING = frozenset(('data_dir', 'embeddings', 'split'))
DEALING = frozenset(('alpha', 'dirichlet', 'min_size', 'partition',
                     'partition_file', 'partition_seed',
                     'validation_fraction'))


def origin(words: Sequence[str], *, setting: str = '', script: str = ''
           ) -> dict[str, Any]:
  """Says what started a run, and what its flagfiles say of themselves.

  Args:
    words: the flags of the command line.
    setting: its name, if it is one of this library's.
    script: path of the program, if the setting is the user's own.

  Returns:
    setting, or else script, with an absolute path. flagfiles: their names.
    comments: the comment lines of all of them, without `#`.
  """
  files = dict(flagfile_lines.read(words, nested=False))
  comments = [line.lstrip('# ').rstrip() for lines in files.values()
              for line in lines if line.startswith('#')]
  who = {'setting': setting} if setting else {
      'script': pathlib.Path(script).resolve().as_posix()}
  return {**who, 'flagfiles': [pathlib.Path(file).name for file in files],
          'comments': comments}


def origin_of(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what a configuration says of its start; {} for older ones.

  Raises:
    ValueError: if it is damaged.
  """
  made = config.get('origin', {})
  if not isinstance(made, dict) or not all(
      isinstance(made.get(key, ''), str) for key in _TEXTS) or not all(
          isinstance(made.get(key, []), list)
          and all(isinstance(x, str) for x in made.get(key, []))
          for key in ('flagfiles', 'comments')):
    raise ValueError(f'origin={made!r} of the configuration is damaged.')
  return made


def setting_of(config: Mapping[str, Any]) -> str:
  """Returns the name of a run's setting; '' if a user's script started it.

  Runs of earlier versions name `experiments/NAME.py`.
  """
  made = origin_of(config)
  old = re.fullmatch(r'experiments/(\w+)\.py', made.get('script', ''))
  return made.get('setting') or (old[1] if old else '')


def dealt_by(config: Mapping[str, Any]) -> str:
  """Returns the setting that dealt the rows; '' for the default or a script's.

  Of data given in Python no program can repeat a run, but a setting may have
  dealt them.
  """
  return setting_of(config) or origin_of(config).get('dealt_by', '')


def program_of(config: Mapping[str, Any]) -> str:
  """Returns what people call the program of a run; '' if nothing says it."""
  return setting_of(config) or origin_of(config).get('script', '')


def flags_of(config: Mapping[str, Any]) -> list[str]:
  """Returns the command line flags that make a configuration again."""
  lines = []
  for name, value in sorted(config['flags'].items()):
    if name in flag_kinds.ONE_START or value is None or value == []:
      continue
    name = checks.flag(name)
    if isinstance(value, bool):
      lines.append(f'--{name}' if value else f'--no{name}')
    elif isinstance(value, list):
      lines.append(f'--{name}={",".join(map(str, value))}')
    else:
      lines.append(f'--{name}={value}')
  return lines


def portable(flags: Mapping[str, Any]) -> dict[str, Any]:
  """Returns flags without paths of one machine: of files the names are left."""
  found = {k: v for k, v in flags.items() if k not in ('workdir', 'data_dir')}
  for name in imports.TEXTS:
    placed = imports.split(str(found.get(name) or ''))
    if placed and imports.is_file(placed.place):
      found[name] = placed._replace(place=os.path.basename(placed.place)).text
  for name in ('partition_file', 'embeddings'):
    if found.get(name):
      found[name] = os.path.basename(found[name])
  if found.get('imports'):
    found['imports'] = [
        os.path.basename(place) if imports.is_file(place) else place
        for place in found['imports']]
  return found


def for_shell(config: Mapping[str, Any], flags: Mapping[str, Any]) -> str:
  """Returns the command line of a run with these flags.

  Of a call of `fedjax_ssl.fit` it is that call, with DATA for what it was
  given.
  """
  setting = setting_of(config)
  script = origin_of(config).get('script', 'SCRIPT')
  if not setting and script == workdir_lib.FIT:
    told = [f'{name}={value!r}' for name, value in sorted(flags.items())
            if value is not None and value is not False and value != []
            and name not in {
                *flag_kinds.ONE_START, *READING, 'method', 'dataset', 'report',
                *(DEALING if flags.get('dataset') == 'federation' else ())}]
    if dealt_by(config):
      told.append(f'setting={dealt_by(config)!r}')
    words = ', '.join([repr(flags.get('method')), 'DATA', *told])
    return f'{workdir_lib.FIT}({words})'
  program = ['fedjax-ssl', 'train', setting] if setting else ['python', script]
  return shlex.join([*program, *flags_of({'flags': flags})])


def text_of(config: Mapping[str, Any]) -> str:
  """Returns a flagfile that repeats a run."""
  made = origin_of(config)
  head = [f'All flags of a run of {program_of(config) or "an experiment"}.']
  if made.get('flagfiles'):
    head.append(f'From {", ".join(made["flagfiles"])}, which says:')
    head += [f'  {line}' for line in made.get('comments', [])]
  # A flag of two lines, which only older runs have, is a method or the like.
  return '\n'.join([*(' '.join(f'# {line}'.splitlines()).rstrip()
                      for line in head),
                    *(' '.join(flag.splitlines())
                      for flag in flags_of(config))]) + '\n'


def write(folder: str | os.PathLike[str]) -> None:
  """Puts `run.flags` beside a run's `config.json`, if it is not there.

  Raises:
    WorkdirError: if the folder holds no run.
  """
  file = pathlib.Path(folder) / run_files.FLAGFILE
  data = text_of(workdir_lib.read_config(folder)).encode()
  if not (file.exists() and file.read_bytes() == data):
    disk.replace(file, data)
