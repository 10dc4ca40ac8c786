"""Differences between runs of the same seeds, with their intervals."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import itertools
import math
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedjax_ssl.core import bounds, checks, registry
from fedjax_ssl.report import names, stored_runs, summary, verdict

_LEVEL = 0.95
_LEAST_GAP = 1.0  # Points; a share of a smaller one tells nothing.


class Pair(NamedTuple):
  """Two runs that are compared.

  Attributes:
    run: its index.
    against: index of the other one.
    note: why these two; '' where nothing was chosen.
  """

  run: int
  against: int
  note: str = ''


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

  @property
  def verdict(self) -> str:
    """Says on which side of 0 the interval lies; '' if there is none."""
    if self.low is None or self.high is None or math.isnan(self.low):
      return ''
    return ('higher' if self.low > 0 else
            'lower' if self.high < 0 else 'not told apart')


class Measured(Protocol):
  """A run with its metrics, as `fit` and `load` return it."""

  @property
  def metrics(self) -> Mapping[str, np.ndarray]:
    """Returns what was measured; with `seed` if there are several."""

  @property
  def states(self) -> Mapping[int, Any]:
    """Returns the state of each seed."""


def compare(run: Measured | Sequence[Measured],
            reference: Measured | Sequence[Measured], metric: str = 'accuracy'
            ) -> Difference:
  """Computes how far a run ends above another one, seed by seed.

  Args:
    run: what `fit` or `load` returns; or several with a seed each, as the
      folders of a sweep hold them.
    reference: another one, which has seeds in common with it.
    metric: name of one that both have, with one number a round.

  Returns:
    The difference of the last evaluations, whatever their rounds, in the
    metric's unit, in which 0.01 of an accuracy is a point, with its 95 %
    interval; see `interval`. NaN where a last evaluation has no number.

  Raises:
    ValueError: if a run has no such metric, they have no seed in common, or
      one of several repeats a seed of another.
  """
  ends = [_ends(side, metric) for side in (run, reference)]
  common = [seed for seed in ends[0] if seed in ends[1]]
  if not common:
    seeds = [', '.join(map(str, end)) for end in ends]
    raise ValueError('the runs have no seed in common: one has '
                     f'{seeds[0]}, the other {seeds[1]}.')
  return interval([ends[0][seed] - ends[1][seed] for seed in common])


def _ends(runs: Measured | Sequence[Measured], metric: str
          ) -> dict[int, float]:
  """Returns each seed's last number of a metric, of one run or of several."""
  # A loaded run is a tuple too, and a slip may be anything.
  given: Any = runs
  several = given if isinstance(given, list | tuple) and not hasattr(
      given, 'metrics') else [given]
  if not several:
    raise ValueError('one side has no run.')
  found: dict[int, float] = {}
  for run in several:
    if not hasattr(run, 'metrics'):
      raise ValueError(f'{run!r} is no run, as fit and load return it.')
    ends = _last(run, metric)
    if again := ends.keys() & found.keys():
      raise ValueError(f'seed {min(again)} is in two of the runs.')
    found |= ends
  return found


def _last(run: Measured, metric: str) -> dict[int, float]:
  """Returns each seed's last number of a metric."""
  metrics = run.metrics
  if not metrics:
    raise ValueError('a run has no metrics: a file that `save` wrote keeps '
                     'none; give the folder of the run.')
  checks.check('metric', metric, metrics.keys() - {'round', 'seed'})
  seeds = metrics.get('seed', [*run.states] * len(metrics[metric]))
  return {int(seed): float(value)  # Rows are in the order of rounds.
          for seed, value in zip(seeds, metrics[metric], strict=True)}


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


def of_finals(run: stored_runs.ReportedRun, reference: stored_runs.ReportedRun
              ) -> Difference:
  """Compares the accuracies after the last round, in points, seed by seed."""
  mine, other = _finals(run), _finals(reference)
  return interval([100 * (mine[seed] - other[seed])
                   for seed in mine if seed in other])


def gain(name: str, runs: summary.Runs) -> str:
  """Says how far a run is above training on its labels only.

  Args:
    name: of the run.
    runs: the run and its bounds by name, the rows of each seed; the seeds of
      all are in one order.

  Returns:
    One sentence; '' without the lower bound, without a final accuracy of each
    seed, or if the run trains on labels only itself.
  """
  few_name, all_name = (bounds.NAMES[labels] for labels in ('few', 'all'))
  if few_name not in runs or runs[name] == runs[few_name]:
    return ''
  ends = {one: 100 * np.array([summary.column(rows, 'accuracy')[-1]
                               for rows in seeds])
          for one, seeds in runs.items()}
  mine, few = ends[name], ends[few_name]
  found = interval([*(mine - few)])
  if found.mean is None or math.isnan(found.mean):
    return ''
  text = f'{name} is {found.mean:+.2f} points from labels only'
  if found.low is not None:
    text += (f' (95 % interval {found.low:+.2f} to {found.high:+.2f}, '
             f'{found.pairs} seeds: {found.verdict})')
  gap = ends[all_name].mean() - few.mean() if all_name in ends else 0.0
  if gap >= _LEAST_GAP:
    text += f', {100 * found.mean / gap:.0f} % of the gap to all labels'
  return f'{text}.'


def references(runs: Sequence[stored_runs.ReportedRun], plan: names.Plan,
               name: str = '') -> list[int]:
  """Returns for each run the index of the one that it is compared with.

  Runs of different data are not compared. Of those of its own it is the run of
  this name, if one is given. Else it is the first FedAvg run with few labels,
  if possible among the runs with the same other flags. Else it is the first run
  with few labels: chosen by its accuracy, it would be another one as a study
  grows, and luck would be part of the choice.

  Raises:
    ValueError: if no run has the name.
  """
  known = [run.name for run in runs]
  if name and name not in known:  # Quoted, as they hold commas.
    raise ValueError(f'--reference={name} is no row of the table.'
                     f'{checks.near(name, known)} There are '
                     f'{", ".join(map(repr, known))}.')
  parts = names.data_parts([run.config for run in runs])
  found = []
  for mine, peers in zip(parts, plan.peers, strict=True):
    mates = [i for i, part in enumerate(parts) if part == mine]
    plain = [i for i in mates if _is_plain(runs[i])]
    found.append(next(itertools.chain(
        (i for i in mates if name and known[i] == name),
        (i for i in plain if plan.peers[i] == peers), plain,
        (i for i in mates if not _is_bound(runs[i])), mates)))
  return found


def at_their_best(runs: Sequence[stored_runs.ReportedRun]) -> list[Pair]:
  """Pairs every method with FedAvg, each with the best of what was tried.

  Without FedAvg the method of the first run takes its place. The best is the
  run with the highest final validation accuracy, of those that differ in
  `flag_kinds.TUNED` and in knobs alone, and of these the ones with the most
  rounds, then seeds; the test accuracy chooses where a method has no validation
  rows. Runs with all labels are left out, and settings in which each method was
  tried once.
  """
  tried: dict[Any, dict[str, list[int]]] = {}
  for i, run in enumerate(runs):
    with contextlib.suppress(ValueError):  # Of a damaged method.
      if not _is_bound(run):
        setting, method = names.setting_of(run.config), names.method_of(
            run.config)
        tried.setdefault(setting, {}).setdefault(method, []).append(i)
  found = []
  for methods in tried.values():
    plain = methods.pop(names.PLAIN if names.PLAIN in methods
                        else next(iter(methods)))
    for mine in methods.values():
      if len(mine) == len(plain) == 1:
        continue
      for key, rows in (('val_accuracy', 'validation'), ('accuracy', 'test')):
        first, other = (_highest(runs, some, key) for some in (mine, plain))
        if first is not None and other is not None:
          found.append(Pair(first, other, f'against {runs[other].name} it is '
                            'the best of each method, chosen by its accuracy '
                            f'on the {rows} rows'))
          break
  return found


def _highest(runs: Sequence[stored_runs.ReportedRun], some: Sequence[int],
             key: str) -> int | None:
  """Returns which run has the highest mean, of those that went furthest."""
  done = {i: (runs[i].rounds, len(runs[i].seeds)) for i in some}
  means = {i: mean for i in some if done[i] == max(done.values())
           and (mean := _mean(runs[i], key)) is not None}
  return max(means, key=lambda i: means[i], default=None)


def compared(references: Sequence[int], more: Sequence[Pair]) -> list[Pair]:
  """Returns a pair for each run that has a reference, then those beside.

  Args:
    references: of each run, see `references`; its own index if it has none.
    more: as `at_their_best` gives them.
  """
  notes = {pair[:2]: pair.note for pair in more}
  usual = [*enumerate(references)]
  return [Pair(i, other, notes.get((i, other), ''))
          for i, other in usual if i != other] + [
              pair for pair in more if pair[:2] not in usual]


def best(runs: Sequence[stored_runs.ReportedRun]) -> int | None:
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


def _finals(run: stored_runs.ReportedRun, key: str = 'accuracy'
            ) -> dict[int, float]:
  """Returns the accuracy in each seed's last row, where it is known."""
  return {seed: rows[-1][key]
          for seed, rows in zip(run.numbers, run.seeds, strict=True)
          if rows[-1].get(key) is not None}


def _mean(run: stored_runs.ReportedRun, key: str = 'accuracy') -> float | None:
  finals = _finals(run, key)
  return float(np.mean([*finals.values()])) if (
      len(finals) == len(run.seeds)) else None


def _is_bound(run: stored_runs.ReportedRun) -> bool:
  return run.config['flags'].get('labels') == 'all'


def _is_plain(run: stored_runs.ReportedRun) -> bool:
  try:
    name, _ = registry.parse(run.config['flags'].get('method', ''))
  except ValueError:
    return False
  return name == names.PLAIN and not _is_bound(run)
