"""What differs between two configurations, in words that fit a line."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Changes = dict[str, tuple[Any, Any]]

ABSENT = 'absent'
# Changes, and characters of a value, that a message shows.
_SHOWN = 10
_WIDTH = 60


def between(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
  """Returns the names whose values differ, with the old and new value."""
  return {name: (old.get(name, ABSENT), new.get(name, ABSENT))
          for name in sorted({*old, *new})
          if old.get(name, ABSENT) != new.get(name, ABSENT)}


def listed(changes: Changes) -> str:
  """Returns `name old -> new, ...`, with long values and long lists cut."""
  shown = [f'{name} {_short(old)} -> {_short(new)}'
           for name, (old, new) in changes.items()]
  more = len(shown) - _SHOWN
  return ', '.join(shown[:_SHOWN]) + (f' and {more} more' if more > 0 else '')


def flat(values: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Flattens nested dicts into one with dotted names."""
  result: dict[str, Any] = {}
  for name, value in values.items():
    result |= (flat(value, f'{prefix}{name}.') if isinstance(value, dict)
               else {f'{prefix}{name}': value})
  return result


def _short(value: Any) -> str:
  text = str(value)
  return text if len(text) <= _WIDTH else f'{text[:_WIDTH - 3]}...'
