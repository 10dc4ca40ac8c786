"""Checks of the arguments of partitions, and the order of rows by class."""
from __future__ import annotations

import math

import numpy as np


def generator(given: object) -> None:
  """Refuses what cannot draw on the host, such as a number or a key of JAX."""
  if not isinstance(given, np.random.Generator):
    raise ValueError('rng must be a host generator, such as '
                     f'numpy.random.default_rng(0), not {type(given).__name__}')


def pool(labels: np.ndarray, where: np.ndarray | None
         ) -> tuple[np.ndarray, np.ndarray]:
  """Checks labels int[D] and where bool[D]; None selects every row.

  Labels may be -1, for unknown, in rows that are not selected.
  """
  labels = np.asarray(labels)
  if labels.ndim != 1 or labels.dtype.kind not in 'iu':
    raise ValueError('labels must be integers of shape [D], not '
                     f'{labels.dtype} of shape {labels.shape}')
  where = np.ones(labels.shape, bool) if where is None else np.asarray(where)
  if where.dtype != bool or where.shape != labels.shape:
    raise ValueError(f'where must be bool of shape {labels.shape}, not '
                     f'{where.dtype} of shape {where.shape}')
  if (labels < 0)[where].any():
    raise ValueError(f'labels must be >= 0, found {labels[where].min()}')
  return labels, where


def _number(name: str, value: object, allowed: str) -> float:
  """A plain number as float; text, None and booleans are refused."""
  if isinstance(value, (bool, np.bool_)) or not isinstance(
      value, (int, float, np.integer, np.floating)):
    raise ValueError(f'{name} must be {allowed}, not {value!r}')
  return float(value)


def count(name: str, value: object, minimum: int = 1) -> int:
  """Returns an integer argument; raises ValueError for anything else."""
  allowed = f'an integer >= {minimum}'
  number = _number(name, value, allowed)
  if not number.is_integer() or number < minimum:
    raise ValueError(f'{name} must be {allowed}, not {value!r}')
  return int(number)


def positive(name: str, value: object) -> float:
  """Returns a positive, finite number; raises ValueError for anything else."""
  number = _number(name, value, 'finite and > 0')
  if not (math.isfinite(number) and number > 0):
    raise ValueError(f'{name} must be finite and > 0, not {number}')
  return number


def fraction(name: str, value: object) -> float:
  """Returns a number in [0, 1]; raises ValueError for anything else."""
  number = _number(name, value, 'in [0, 1]')
  if not 0 <= number <= 1:
    raise ValueError(f'{name} must be in [0, 1], not {number}')
  return number


def by_class(rng: np.random.Generator | None, labels: np.ndarray,
             where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Orders the rows of `where` by class; ranks each within its class.

  Args:
    rng: shuffles inside each class; None keeps the order of the data set.
    labels: int[D].
    where: bool[D].

  Returns:
    rows int64[M] and ranks int64[M], M = where.sum().
  """
  rows = np.flatnonzero(where)
  if rng is not None:
    rows = rng.permutation(rows)
  rows = rows[np.argsort(labels[rows], kind='stable')]
  sizes = np.bincount(labels[rows])
  starts = np.cumsum(sizes) - sizes
  return rows, np.arange(rows.size) - starts[labels[rows]]
