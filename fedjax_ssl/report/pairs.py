"""Differences between runs of the same seeds, with their intervals."""
from __future__ import annotations

from collections.abc import Sequence
import math
from typing import NamedTuple

import numpy as np

from fedjax_ssl.core import checks, registry
from fedjax_ssl.report import names, stored_runs, verdict

_LEVEL = 0.95


class Difference(NamedTuple):
  """A mean of differences and its 95 % confidence interval.

  Attributes:
    mean: over the pairs; None without any.
    low: end of the interval; None with fewer than two pairs.
    high: its other end.
    pairs: how many there are.
  """

  mean: float | None
  low: float | None
  high: float | None
  pairs: int


def interval(differences: Sequence[float]) -> Difference:
  """Computes the mean of paired differences with Student's t interval.

  mean ± t(n - 1) * deviation / sqrt(n). It is not corrected for several
  comparisons: of twenty without a true difference, about one interval leaves
  out 0 by chance.

  Args:
    differences: one for each pair.
  """
  from scipy import special
  count = len(differences)
  if not count:
    return Difference(None, None, None, 0)
  values = np.array(differences, np.float64)
  mean = float(values.mean())
  if count == 1:
    return Difference(mean, None, None, 1)
  width = float(special.stdtrit(count - 1, (1 + _LEVEL) / 2)
                * values.std(ddof=1) / math.sqrt(count))
  return Difference(mean, mean - width, mean + width, count)


def of_finals(run: stored_runs.Run, reference: stored_runs.Run) -> Difference:
  """Compares the accuracies after the last round, in points, seed by seed."""
  mine, other = _finals(run), _finals(reference)
  return interval([100 * (mine[seed] - other[seed])
                   for seed in mine if seed in other])


def references(runs: Sequence[stored_runs.Run], plan: names.Plan,
               name: str = '') -> list[int]:
  """Returns for each run the index of the one that it is compared with.

  That is the run of this name, if one is given. Else it is the first FedAvg run
  with few labels, if possible among the runs with the same other flags. Else it
  is the best run.

  Raises:
    ValueError: if no run has the name.
  """
  if name:
    for i, run in enumerate(runs):
      if run.name == name:
        return [i] * len(runs)
    known = [run.name for run in runs]  # Quoted, as they hold commas.
    raise ValueError(f'--reference={name} is no row of the table.'
                     f'{checks.near(name, known)} There are '
                     f'{", ".join(map(repr, known))}.')
  plain = [i for i, run in enumerate(runs) if _is_plain(run)]
  if not plain:
    found = best(runs)
    return [0 if found is None else found] * len(runs)
  return [next((i for i in plain if plan.peers[i] == mine), plain[0])
          for mine in plan.peers]


def best(runs: Sequence[stored_runs.Run]) -> int | None:
  """Returns the index of the best final mean; None if none is known.

  A run with all labels is a bound, and a mean with a seed that diverged or
  guesses is no result: such runs count only if there are no others.
  """
  means = [_mean(run) for run in runs]
  for good in ([not _is_bound(r) and not verdict.mark(r.verdicts)
                for r in runs], [True] * len(runs)):
    known = [(mean, -i) for i, mean in enumerate(means)
             if mean is not None and good[i]]
    if known:
      return -max(known)[1]  # The first of equals.
  return None


def _finals(run: stored_runs.Run) -> dict[int, float]:
  """Returns the accuracy in each seed's last row, where it is known."""
  return {seed: rows[-1]['accuracy']
          for seed, rows in zip(run.numbers, run.seeds, strict=True)
          if rows[-1].get('accuracy') is not None}


def _mean(run: stored_runs.Run) -> float | None:
  finals = _finals(run)
  return float(np.mean([*finals.values()])) if (
      len(finals) == len(run.seeds)) else None


def _is_bound(run: stored_runs.Run) -> bool:
  return run.config['flags'].get('labels') == 'all'


def _is_plain(run: stored_runs.Run) -> bool:
  try:
    name, _ = registry.parse(run.config['flags'].get('method', ''))
  except ValueError:
    return False
  return name == names.PLAIN and not _is_bound(run)
