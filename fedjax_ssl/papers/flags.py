"""Reads what flagfiles say, and compares their flags with those of a run."""
from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
import re
from typing import Any, NamedTuple

from fedjax_ssl.core import flag_kinds, registry

_PERCENT = r'([\d.]+)(?: \+- ([\d.]+))? ?%'
# The global model's number where a line has several.
_PRINTED = (('', rf'\bPaper: .*?\bglobal {_PERCENT}'),
            ('local', rf'\bPaper: local {_PERCENT}'),
            ('local', rf'\bPaper: {_PERCENT} local\b'),
            ('', rf'\bPaper: {_PERCENT}'),
            ('diverged', r'\bPaper: diverged\b()()'))


class Printed(NamedTuple):
  """A paper's number, in percent.

  Attributes:
    value: None if the paper says that the run diverged.
    std: its deviation over runs, if it is given.
    kind: 'local' for the mean over the clients' own models, 'diverged', or ''.
    digits: how many the paper prints after the decimal point.
  """

  value: float | None
  std: float | None = None
  kind: str = ''
  digits: int = 2


def printed(comments: Sequence[str]) -> Printed | None:
  """Reads the number of a flagfile's line `Paper: 39.95 % ...`, or None."""
  for line in comments:
    for kind, pattern in _PRINTED:
      if match := re.search(pattern, line):
        value, std = (float(x) if x else None for x in match.groups())
        digits = len((match[1] or '').partition('.')[2])
        return Printed(value, std, kind, digits)
  return None


def differences(flags: Mapping[str, Any], lines: Sequence[str],
                defaults: Mapping[str, Any] | None = None) -> list[str]:
  """Lists the flags of a run that are not as the lines say, as `name=value`.

  Args:
    flags: of `config.json`; names that it lacks are not compared.
    lines: of a flagfile and what follows it; of the same name the last counts.
    defaults: values of the flags that the lines do not name; a flag that is in
      neither is not compared.
  """
  wanted: dict[str, Any] = dict(defaults or {})
  if any(line.startswith('--labeled_fraction=') for line in lines):
    wanted['labels_per_class'] = None  # The fraction replaces this default.
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
    name, knobs = registry.parse(wanted['method'])
    wanted['method'] = registry.written(name, {**knobs, 'profile': profile})
  return [f'{name}={flags[name]}' for name, value in wanted.items()
          if name in flags and name not in flag_kinds.NOT_THE_CELL
          and not _equal(flags[name], value)]


def _equal(stored: Any, wanted: Any) -> bool:
  """Returns whether a value of `config.json` is what the text asks for."""
  if wanted is None:
    return stored is None
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
  return bool(_call(str(stored or '')) == _call(str(wanted)))


def _call(text: str) -> Any:
  """Parses `name(a=1, b=2)`, so that spaces, quotes and order do not matter."""
  try:
    tree = ast.parse(text, mode='eval').body
    if isinstance(tree, ast.Call):
      return (ast.unparse(tree.func), [ast.dump(a) for a in tree.args],
              sorted((str(k.arg), ast.dump(k.value)) for k in tree.keywords))
  except SyntaxError:
    pass
  return text
