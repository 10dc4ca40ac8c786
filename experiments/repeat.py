r"""Runs again what a `config.json` says.

python experiments/repeat.py runs/study/fixmatch --workdir=runs/again
python experiments/repeat.py any_name.json --print

Flags after the first word beat those of the run. Every run writes the same
flags to `run.flags` in its folder, for `--flagfile`.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import os
import pathlib
import sys
import tempfile
from typing import Any

import printing

from fedjax_ssl.training import workdir as workdir_lib

FLAGFILE = 'run.flags'
ROOT = pathlib.Path(__file__).resolve().parent.parent
# Say where a run is and not what it is, or are no flags of a whole run.
_LEFT_OUT = ('workdir', 'eval_only', 'distributed', 'coordinator_address',
             'num_processes', 'process_id')


def origin(argv: Sequence[str]) -> dict[str, Any]:
  """What started a run: its script, and what its flagfiles say of themselves.

  Args:
    argv: the command line, the script first.

  Returns:
    script: relative to the repository where it is inside. flagfiles: names.
    comments: the comment lines of all of them, without `#`.
  """
  script = pathlib.Path(argv[0]).resolve()
  if script.is_relative_to(ROOT):
    script = script.relative_to(ROOT)
  files = [pathlib.Path(file) for file in _flagfiles(argv[1:])]
  comments = [line.lstrip('# ').rstrip()
              for file in files if file.is_file()
              for line in file.read_text().splitlines()
              if line.startswith('#')]
  return {'script': script.as_posix(), 'flagfiles': [f.name for f in files],
          'comments': comments}


def _flagfiles(words: Sequence[str]) -> list[str]:
  """Values of --flagfile=X and of --flagfile X, with one dash or two."""
  found: list[str] = []
  for i, word in enumerate(words):
    name, equals, value = word.lstrip('-').partition('=')
    if word.startswith('-') and name == 'flagfile':
      found += [value] if equals else words[i + 1:i + 2]
  return found


def flags_of(config: Mapping[str, Any]) -> list[str]:
  """The command line flags that make a configuration again."""
  lines = []
  for name, value in sorted(config['flags'].items()):
    if name in _LEFT_OUT or value is None:
      continue
    if isinstance(value, bool):
      lines.append(f'--{name}' if value else f'--no{name}')
    elif isinstance(value, list):
      lines.append(f'--{name}={",".join(map(str, value))}')
    else:
      lines.append(f'--{name}={value}')
  return lines


def text_of(config: Mapping[str, Any]) -> str:
  """A flagfile that repeats a run."""
  made = _origin(config)
  head = [f'All flags of a run of {made.get("script", "an experiment")}.']
  if made.get('flagfiles'):
    head.append(f'From {", ".join(made["flagfiles"])}, which says:')
    head += [f'  {line}' for line in made.get('comments', [])]
  # A flag of two lines, which only older runs have, is a method or the like.
  return '\n'.join([*(' '.join(f'# {line}'.splitlines()).rstrip()
                      for line in head),
                    *(' '.join(flag.splitlines())
                      for flag in flags_of(config))]) + '\n'


def _origin(config: Mapping[str, Any]) -> dict[str, Any]:
  """What a configuration says of its start; {} of older ones.

  Raises:
    ValueError: if it is damaged.
  """
  made = config.get('origin', {})
  if not isinstance(made, dict) or not isinstance(
      made.get('script', ''), str) or not all(
          isinstance(made.get(key, []), list)
          and all(isinstance(x, str) for x in made.get(key, []))
          for key in ('flagfiles', 'comments')):
    raise ValueError(f'origin={made!r} of the configuration is damaged.')
  return made


def write(folder: str | os.PathLike[str]) -> None:
  """Puts `run.flags` beside a run's `config.json`, if it is not there.

  Raises:
    WorkdirError: if the folder holds no run.
  """
  file = pathlib.Path(folder) / FLAGFILE
  text = text_of(workdir_lib.read_config(folder))
  if file.exists() and file.read_bytes() == text.encode():
    return
  partial = file.with_name(f'{file.name}.partial')
  partial.write_text(text, encoding='utf-8')
  os.replace(partial, file)


def _config_of(path: pathlib.Path) -> dict[str, Any]:
  """The configuration in a run's folder, or in a file of any name."""
  if path.is_dir() or not path.exists() or path.name == workdir_lib.CONFIG:
    return workdir_lib.read_config(
        path.parent if path.name == workdir_lib.CONFIG else path)
  with tempfile.TemporaryDirectory() as folder:
    (pathlib.Path(folder) / workdir_lib.CONFIG).write_bytes(path.read_bytes())
    try:
      return workdir_lib.read_config(folder)
    except workdir_lib.WorkdirError as error:
      raise ValueError(str(error).replace(
          str(pathlib.Path(folder) / workdir_lib.CONFIG), str(path))) from None


def main(argv: Sequence[str]) -> int:
  """Starts the run again, or prints its flags; returns an exit code."""
  words = [word for word in argv[1:] if word != '--print']
  if not words or words[0].startswith('-'):
    print("error: name a run's folder or its config.json first.",
          file=sys.stderr)
    return 2
  path = pathlib.Path(words[0])
  try:
    config = _config_of(path)
    made = _origin(config).get('script')
    script = ROOT / str(made)
    if '--print' in argv[1:]:
      printing.say(text_of(config), end='')
      return 0
    if not made or not script.is_file():
      raise ValueError(f'{path} was made by {made or "an older version"}, '
                       'which is not here.')
    command = [sys.executable, str(script), *flags_of(config), *words[1:]]
    if '\0' in ''.join(command):
      raise ValueError(f'{path} has a flag with a zero byte.')
  except (ValueError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  os.execv(sys.executable, command)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
