"""What a flagfile asks for, beside what a run was given."""
from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
import hashlib
import pathlib
from typing import Any

# Say where, how often or how long to look, and not what is run.
_FREE = {'workdir', 'data_dir', 'embeddings', 'seed', 'seeds', 'eval_only',
         'bounds', 'tensorboard', 'num_devices', 'seed_map', 'eval_every',
         'checkpoint_every', 'pictures', 'chunk_size', 'schedule_rounds'}


def lines_of(file: pathlib.Path) -> list[str]:
  """A flagfile's flags without comments and blank lines."""
  lines = [line.strip() for line in file.read_text().splitlines()]
  return [line for line in lines if line and not line.startswith(('#', '//'))]


def digest(lines: Sequence[str]) -> str:
  """Hex digest of flags; seeds leave it alone, for more may be added."""
  kept = [line for line in lines
          if line.lstrip('-').partition('=')[0] not in ('seed', 'seeds')]
  return hashlib.sha256('\n'.join(kept).encode()).hexdigest()


def differences(flags: Mapping[str, Any], lines: Sequence[str]) -> list[str]:
  """Flags of a run that are not as the lines say, as `name=value`.

  Args:
    flags: of `config.json`; names that it lacks are not compared.
    lines: of a flagfile and what follows it; the last of a name counts.
      Flags that they do not name are not compared.
  """
  wanted: dict[str, Any] = {}
  for line in lines:
    name, equals, value = line.lstrip('-').partition('=')
    if equals:
      wanted[name] = value
    elif name.startswith('no') and name not in flags:
      wanted[name[2:]] = False
    else:
      wanted[name] = True
  profile = wanted.pop('profile', None)
  if profile and 'method' in wanted:
    name, _, knobs = wanted['method'].partition('(')
    knobs = knobs.rstrip(')')
    wanted['method'] = (f'{name}({knobs}{", " if knobs else ""}'
                        f'profile={profile!r})')
  return [f'{name}={flags[name]}' for name, value in wanted.items()
          if name in flags and name not in _FREE
          and not _equal(flags[name], value)]


def _equal(stored: Any, wanted: Any) -> bool:
  """Whether a value of `config.json` is what the text asks for."""
  if isinstance(stored, list):
    stored = ','.join(map(str, stored))
  if isinstance(stored, bool):
    return str(stored).lower() == {'1': 'true', '0': 'false'}.get(
        str(wanted), str(wanted)).lower()
  if isinstance(stored, int | float):
    try:
      return float(stored) == float(wanted)
    except ValueError:
      return False
  return _call(str(stored or '')) == _call(str(wanted))


def _call(text: str) -> Any:
  """`name(a=1, b=2)` so that spaces, quotes and order do not matter."""
  try:
    tree = ast.parse(text, mode='eval').body
    if isinstance(tree, ast.Call):
      return (ast.unparse(tree.func), [ast.dump(a) for a in tree.args],
              sorted((str(k.arg), ast.dump(k.value)) for k in tree.keywords))
  except SyntaxError:
    pass
  return text
