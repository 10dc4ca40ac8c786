"""What a `name(knob=value)` stands for: every knob, defaults included.

The text alone does not tell, as defaults and profiles change between versions.
So a run stores the knobs that its texts stood for, and a later version can
check whether the texts still stand for them.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
import json
import re
from typing import Any

from fedjax_ssl.core import knobs
from fedjax_ssl.core.registry import (
  find,
  literal,
  parse,
  with_new_names,
  written,
)

Registry = Mapping[str, Callable[..., Any]]
GONE = 'no knob any more'


def resolved(text: str, registry: Registry,
             nested: Mapping[str, Registry] | None = None) -> dict[str, Any]:
  """Returns all knobs of what a text asks for, as JSON can hold them.

  Args:
    text: a name, with knobs if any, that `registry.build` accepts.
    registry: name to builder.
    nested: knobs whose value is such a text itself, with their registries.

  Returns:
    The value of each knob: the given one, else the profile's, else the
    default. What a profile fixes that is no knob is named `profile.NAME`. For
    a nested text KNOB holds the name alone, and `KNOB.NAME` its own knobs.
  """
  name, given = parse(text)
  function = find(registry, name)
  parameters = knobs.names(function)
  given = with_new_names(given, parameters)
  values = {knob: given.get(knob, p.default) for knob, p in parameters.items()}
  values = {k: _plain(v, parameters[k].annotation) for k, v in values.items()}
  # Parameters that the data fill in, if the text sets them all the same.
  values |= {k: _plain(v) for k, v in given.items() if k not in values}
  for knob, value in knobs.profiles_of(function).get(
      str(values.get('profile')), {}).items():
    if knob not in values:
      values[f'profile.{knob}'] = _plain(value)
    elif values[knob] is None:
      values[knob] = _plain(value)
  for knob, inner in (nested or {}).items():
    if isinstance(values.get(knob), str):
      part = values[knob]
      values |= {knob: parse(part)[0], **{
          f'{knob}.{k}': v for k, v in resolved(part, inner).items()}}
  return values


def _plain(value: Any, annotation: Any = '') -> Any:
  """Returns the value as JSON gives it back; float knobs as floats."""
  words = re.findall(r'\w+', str(annotation))
  if 'float' in words and 'int' not in words and type(value) is int:
    value = float(value)
  # A default of a user's builder may be a function.
  return json.loads(json.dumps(value, default=lambda x: getattr(
      x, '__qualname__', type(x).__name__)))


def changed(was: Mapping[str, Any], now: Mapping[str, Any]
            ) -> dict[str, tuple[Any, Any]]:
  """Returns old and new value of every knob that is not as it was.

  New knobs are left out: their defaults are meant to change nothing.
  """
  return {knob: (old, now.get(knob, GONE))
          for knob, old in with_new_names(was, now).items()
          if knob not in now or now[knob] != old}


def restated(text: str, was: Mapping[str, Any], registry: Registry,
             nested: Mapping[str, Registry] | None = None) -> str:
  """Returns a text that stands today for what `text` stood for.

  Args:
    text: a name with knobs if any.
    was: what it stood for, as `resolved` said then.
    registry: name to builder.
    nested: see `resolved`.

  Raises:
    ValueError: if no knobs can say it today; the message names what is lost.
  """
  name, given = parse(text)
  differs = changed(was, resolved(text, registry, nested))
  if not differs:
    return text
  words = {**given, **{
      knob: old for knob, (old, new) in differs.items()
      if new != GONE and '.' not in knob}}
  for knob, inner in (nested or {}).items():
    if _below(knob, differs):
      words[knob] = restated(given.get(knob, was[knob]), _below(knob, was),
                             inner)
  fresh = written(name, words)
  if lost := changed(was, resolved(fresh, registry, nested)):
    raise ValueError(f'{text} stood for {listed(lost, 0)}, which no knob says '
                     'today; use the version that it began with.')
  return fresh


def _below(knob: str, values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the entries of a nested text, by its own knobs."""
  start = f'{knob}.'
  return {k.removeprefix(start): v for k, v in values.items()
          if k.startswith(start)}


def listed(differs: Mapping[str, tuple[Any, Any]], which: int) -> str:
  """Returns the old (0) or the new (1) values as `knob=value, ...`."""
  return ', '.join(f'{knob}={literal(pair[which])}'
                   for knob, pair in differs.items())
