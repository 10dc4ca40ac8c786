"""What every partition asks of its arguments, and the order of rows."""
from __future__ import annotations

import math

import numpy as np


def pool(labels: np.ndarray, where: np.ndarray | None
         ) -> tuple[np.ndarray, np.ndarray]:
  """Checks labels int[D] and where bool[D]; None selects every row."""
  labels = np.asarray(labels)
  if labels.ndim != 1 or labels.dtype.kind not in 'iu':
    raise ValueError('labels must be integers of shape [D], not '
                     f'{labels.dtype} of shape {labels.shape}')
  if labels.size and labels.min() < 0:
    raise ValueError(f'labels must be >= 0, found {labels.min()}')
  if where is None:
    return labels, np.ones(labels.shape, bool)
  where = np.asarray(where)
  if where.dtype != bool or where.shape != labels.shape:
    raise ValueError(f'where must be bool of shape {labels.shape}, not '
                     f'{where.dtype} of shape {where.shape}')
  return labels, where


def count(name: str, value: int, minimum: int = 1) -> int:
  """Checks an integer argument."""
  if isinstance(value, bool) or int(value) != value or value < minimum:
    raise ValueError(f'{name} must be an integer >= {minimum}, not {value!r}')
  return int(value)


def positive(name: str, value: float) -> float:
  """Checks a positive, finite number."""
  value = float(value)
  if not (math.isfinite(value) and value > 0):
    raise ValueError(f'{name} must be finite and > 0, not {value}')
  return value


def fraction(name: str, value: float) -> float:
  """Checks a number in [0, 1]."""
  value = float(value)
  if not 0 <= value <= 1:
    raise ValueError(f'{name} must be in [0, 1], not {value}')
  return value


def by_class(rng: np.random.Generator | None, labels: np.ndarray,
             where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Rows of `where` ordered by class, and each one's rank in its class.

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
