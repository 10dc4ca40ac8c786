"""Rows of metrics as columns: arrays by name, as data frames take them."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_ssl.core import checks

_WHOLE = ('round', 'seed')


class Columns(dict[str, np.ndarray]):
  """Metrics by name, whose KeyError says which there are."""

  # Those that another attribute of a run has, and which.
  elsewhere: tuple[frozenset[str], str] = frozenset(), ''

  def __missing__(self, name: str) -> np.ndarray:
    names, attribute = self.elsewhere
    hint = (f' It is in {attribute}.' if name in names
            else checks.near(str(name), self))
    raise KeyError(f'no metric {name!r} here.{hint} There are: '
                   f'{", ".join(self) or "none"}')


# As a dict is, for `jax.tree.map` over what was measured.
jax.tree_util.register_pytree_with_keys(
    Columns, lambda columns: (
        [(jax.tree_util.DictKey(name), columns[name])
         for name in sorted(columns)], tuple(sorted(columns))),
    lambda names, values: Columns(zip(names, values, strict=True)))


def scalars(rows: Sequence[Mapping[str, Any]]) -> Columns:
  """Returns the metrics that have one number in each row.

  Args:
    rows: as `metrics.read` gives them.

  Returns:
    By name float64[rows], NaN where a row has none; round and seed int64.
  """
  of_lists, single = _kinds(rows)
  found = Columns({name: np.array([row.get(name) for row in rows],
                                  np.int64 if name in _WHOLE else np.float64)
                   for name in single})
  found.elsewhere = frozenset(of_lists), 'class_metrics'
  return found


def lists(rows: Sequence[Mapping[str, Any]]) -> Columns:
  """Returns the metrics that have several numbers in each row, by class.

  Args:
    rows: as `metrics.read` gives them.

  Returns:
    By name float64[rows, C], NaN where there is no number.
  """
  of_lists, single = _kinds(rows)
  found = Columns()
  found.elsewhere = frozenset(single), 'metrics'
  for name in of_lists:
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


def _kinds(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
  """Names of lists and of numbers, in the order in which they first come."""
  names = dict.fromkeys(name for row in rows for name in row)
  of_lists = [name for name in names
            if any(isinstance(row.get(name), list) for row in rows)]
  return of_lists, [name for name in names if name not in of_lists]
