"""Who gains, who loses: what a global model is worth to each client."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_ssl.report import stored_runs
from fedjax_ssl.training import per_client

WORST = 0.1  # Share of the clients in the mean of the worst.


def class_counts(federation: Any) -> dict[str, np.ndarray]:
  """Returns int64[N, C] of labeled and unlabeled rows; {} if unknown."""
  if not isinstance(federation, Mapping):
    return {}
  try:
    counts = {kind: np.array(federation[f'{kind}_classes'], np.int64)
              for kind in ('labeled', 'unlabeled')
              if federation.get(f'{kind}_classes')}
  except (TypeError, ValueError, OverflowError):
    return {}
  return {} if any(count.ndim != 2 or not count.size
                   for count in counts.values()) else counts


def mixes(federation: Any) -> np.ndarray | None:
  """Returns float64[N, C], the share of each class in a client's own rows.

  NaN for a client without rows; None where the federation does not say.

  Args:
    federation: what `config.json` holds of it.
  """
  counts = [*class_counts(federation).values()]
  if not counts or counts[0].shape != counts[-1].shape:
    return None
  total = np.sum(counts, axis=0, dtype=np.float64)
  rows = total.sum(axis=1, keepdims=True)
  return np.divide(total, rows, out=np.full_like(total, np.nan),
                   where=rows > 0)


def accuracies(run: stored_runs.ReportedRun) -> dict[int, np.ndarray]:
  """Returns each client's accuracy on its own class mix, float64[N] by seed.

  A client's accuracy, 0 to 1, is the mean of the classes' test accuracies in
  the last row, weighed by the shares of the classes among the client's rows;
  classes without test examples are left out. It says how well the global model
  serves clients of that mix; it is not measured on their own rows. NaN for a
  client without rows that could be tested. Seeds whose partition or classes are
  not known are left out.
  """
  found = {}
  for seed, rows, federation in zip(run.numbers, run.seeds, run.federations):
    mine, recall = mixes(federation), rows[-1].get('per_class_accuracy')
    if mine is None or not recall or len(recall) != mine.shape[1]:
      continue
    right = np.array(recall, np.float64)  # None is NaN.
    found[seed] = per_client.weighed(right, np.nan_to_num(mine))
    if not np.isfinite(found[seed]).any():
      del found[seed]
  return found


def worst(accuracy: np.ndarray) -> float:
  """Returns the mean of the worst tenth of the clients, at least of one."""
  known = np.sort(accuracy[np.isfinite(accuracy)])
  return float(known[:max(1, round(WORST * len(known)))].mean())


def against(mine: Mapping[int, np.ndarray], other: Mapping[int, np.ndarray],
            same: Sequence[int]) -> np.ndarray:
  """Returns what clients gain, for all seeds together; empty if not known.

  Args:
    mine: float64[N] by seed, see `accuracies`.
    other: the same of the run to compare with.
    same: seeds in which both have the same clients.
  """
  parts = [mine[s] - other[s] for s in same if s in mine and s in other]
  gains = np.concatenate(parts) if parts else np.zeros(0)
  return gains[np.isfinite(gains)]


def same_clients(run: stored_runs.ReportedRun, other: stored_runs.ReportedRun
                 ) -> list[int]:
  """Returns the seeds in which the clients of two runs have the same mixes."""
  theirs = dict(zip(other.numbers, other.federations))
  found = []
  for seed, federation in zip(run.numbers, run.federations):
    mine, partner = mixes(federation), mixes(theirs.get(seed))
    if mine is not None and partner is not None and np.array_equal(
        mine, partner, equal_nan=True):
      found.append(seed)
  return found
