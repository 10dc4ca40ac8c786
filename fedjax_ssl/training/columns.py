"""Rows of metrics as columns: arrays by name, as data frames take them."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

_WHOLE = ('round', 'seed')


def scalars(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
  """Returns the metrics that have one number in each row.

  Args:
    rows: as `metrics.read` gives them.

  Returns:
    By name float64[rows], NaN where a row has none; round and seed int64.
  """
  return {name: np.array([row.get(name) for row in rows],
                         np.int64 if name in _WHOLE else np.float64)
          for name in _names(rows) if not _is_list(rows, name)}


def lists(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
  """Returns the metrics that have several numbers in each row, by class.

  Args:
    rows: as `metrics.read` gives them.

  Returns:
    By name float64[rows, C], NaN where there is no number.
  """
  found = {}
  for name in _names(rows):
    if _is_list(rows, name):
      width = max(len(row.get(name) or ()) for row in rows)
      found[name] = np.array([row.get(name) or [None] * width for row in rows],
                             np.float64)
  return found


def text(kind: str, round_: int, states: Iterable[Any],
         measured: Mapping[str, np.ndarray]) -> str:
  """Returns one line on a training, for a console."""
  number = len(list(states))
  told = [f'round {round_:,}', f'{number} seed{"s" * (number != 1)}']
  accuracy = measured.get('accuracy', np.zeros(0))
  last = accuracy[measured['round'] == measured['round'][-1]] if len(
      accuracy) else accuracy
  if len(last) and np.isfinite(last).all():
    told.append(f'accuracy {last.mean():.4f}')
  return f'{kind}({", ".join(told)})'


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """Every row's names, in the order in which they first come."""
  return list(dict.fromkeys(name for row in rows for name in row))


def _is_list(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
  return any(isinstance(row.get(name), list) for row in rows)
