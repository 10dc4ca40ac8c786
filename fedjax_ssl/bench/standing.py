"""The results of a bench: which configuration is best, and how rows compare."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.bench import plan
from fedjax_ssl.core import run_files
from fedjax_ssl.report import clients, pairs, stored_runs
from fedjax_ssl.training import per_client


class Measured(NamedTuple):
  """The final seeds of a row on one skew.

  Attributes:
    entry: the row.
    configuration: the chosen one.
    accuracy: float64[S], of the test set over the last tenth of the run, 0 to
      1; NaN where it is not finite.
    rounds: those that all seeds were evaluated at, R of them.
    curves: float64[S, R], accuracy at these rounds.
    worst: float64[S], mean accuracy of the worst tenth of the clients, each on
      test rows weighed by the classes of its own rows; NaN where unknown.
    bytes_up: of one seed, all clients together; None if not measured.
    bytes_down: the same the other way.
    passes: rows through the network forward and backward, a client and round;
      None if not measured.
    seconds: of one seed, by the clock; None if lost.
    notes: what a reader must know, such as that a seed diverged.
  """

  entry: plan.Entry
  configuration: plan.Configuration
  accuracy: np.ndarray
  rounds: tuple[int, ...]
  curves: np.ndarray
  worst: np.ndarray
  bytes_up: float | None
  bytes_down: float | None
  passes: float | None
  seconds: float | None
  notes: tuple[str, ...]

  def evaluations(self) -> list[list[dict[str, Any]]]:
    """Returns the curve of each seed as a run's log has it."""
    return [[{'round': r, 'accuracy': v} for r, v in
             zip(self.rounds, curve.tolist(), strict=True)]
            for curve in self.curves]


class Line(NamedTuple):
  """A line of the table: a row between the bounds and among the others.

  Attributes:
    measured: what it is made from.
    gap: share of the way from labels only to all labels; None without both
      bounds.
    reached: first evaluated round at which the mean curve is as high as labels
      only at the end; None if never.
    rank: 1 is the best; bounds have none.
    between: (best, worst) rank that paired seeds leave open at 95 %.
  """

  measured: Measured
  gap: float | None
  reached: int | None
  rank: int | None
  between: tuple[int, int] | None


def last_tenth(rows: Sequence[Mapping[str, Any]], name: str) -> float:
  """Averages a metric over the evaluations of the last tenth of the rounds.

  Returns:
    The mean; NaN where a value is missing or not finite.
  """
  end = rows[-1]['round']
  recent = [row.get(name) for row in rows if row['round'] > 0.9 * end]
  return float(np.mean(np.array(recent, np.float64)))  # None is NaN.


def validation(folder: pathlib.Path) -> float:
  """Returns a configuration's validation accuracy, or -inf without one.

  Raises:
    ValueError: if the folder holds no run, or not all of its rounds.
  """
  run = _finished(folder)
  found = np.mean([last_tenth(rows, 'val_accuracy') for rows in run.seeds])
  return float(found) if np.isfinite(found) else -math.inf


def _finished(folder: pathlib.Path) -> stored_runs.ReportedRun:
  """Reads a run; ValueError if it has not all rows."""
  run = stored_runs.read(folder)
  if run.rounds < run.num_rounds:
    raise ValueError(f'{folder} has {run.rounds} of its {run.num_rounds} '
                     'rounds; remove it, and it is run again.')
  return run


def choose(tried: Sequence[tuple[plan.Configuration, float]]
           ) -> plan.Configuration:
  """Returns the configuration with the highest value, the first of equals."""
  return max(tried, key=lambda pair: (pair[1], -pair[0].number))[0]


def measure(folder: pathlib.Path, entry: plan.Entry,
            configuration: plan.Configuration, labels: np.ndarray | None
            ) -> Measured:
  """Reads the final seeds of a row.

  Args:
    folder: of the run.
    entry: the row.
    configuration: the one that the run has.
    labels: int[D], classes of all training rows; None leaves `worst` unknown.

  Raises:
    ValueError: if the folder holds no run, or not all of its rounds.
  """
  run = _finished(folder)
  seeds = run.seeds
  rounds = tuple(sorted(set.intersection(
      *({row['round'] for row in rows} for rows in seeds))))
  by_round = [{row['round']: row.get('accuracy') for row in rows}
              for rows in seeds]
  curves = np.array([[b[r] for r in rounds] for b in by_round], float)
  worst = [_worst(folder, rows, seed, labels)
           for rows, seed in zip(seeds, run.numbers, strict=True)]
  passes = [sum(_mean(rows, f'{way}_passes') for way in ('forward', 'backward'))
            for rows in seeds]
  return Measured(
      entry, configuration,
      np.array([last_tenth(rows, 'accuracy') for rows in seeds]), rounds,
      curves, np.array(worst), _sent(seeds, 'bytes_up'),
      _sent(seeds, 'bytes_down'), _known(float(np.mean(passes))),
      None if run.seconds is None else run.seconds / len(seeds),
      tuple(run.notes()))


def compare(measured: Sequence[Measured]) -> list[Line]:
  """Ranks rows that were run with the same seeds, the best first.

  A row's rank lies between 1 + the number of better rows and the number of all
  rows - that of worse ones. A row is better or worse if the 95 % interval of
  the mean difference over paired seeds (Student's t, each pair for itself)
  leaves out 0. The bounds have no rank.
  """
  bounds = {m.entry.name: m for m in measured
            if m.entry.name in (plan.FEW, plan.ALL)}
  order = sorted(measured, key=lambda m: -np.nan_to_num(m.accuracy.mean()))
  ranked = [m for m in order if m.entry.name not in bounds]
  lines = []
  for row in order:
    rank = between = None
    if row.entry.name not in bounds:
      others = [m for m in ranked if m is not row]
      signs = [_sign(row.accuracy, other.accuracy) for other in others]
      rank = 1 + ranked.index(row)
      between = (1 + signs.count(-1), len(ranked) - signs.count(1))
    lines.append(Line(row, _gap(row, bounds), _reached(row, bounds), rank,
                      between))
  return lines


def _sign(mine: np.ndarray, other: np.ndarray) -> int:
  """1 if `mine` is better, -1 if it is worse, 0 if the seeds leave it open."""
  if len(mine) != len(other):
    return 0
  found = pairs.interval(np.nan_to_num(mine) - np.nan_to_num(other))
  if found.low is None or found.high is None:
    return 0
  return int(found.low > 0) - int(found.high < 0)


def _gap(row: Measured, bounds: Mapping[str, Measured]) -> float | None:
  if len(bounds) < 2:
    return None
  few, most = (bounds[n].accuracy.mean() for n in (plan.FEW, plan.ALL))
  gap = float((row.accuracy.mean() - few) / (most - few)) if most > few else (
      math.nan)
  return gap if math.isfinite(gap) else None


def _reached(row: Measured, bounds: Mapping[str, Measured]) -> int | None:
  if plan.FEW not in bounds:
    return None
  end = bounds[plan.FEW].accuracy.mean()
  return next((r for r, value in zip(
      row.rounds, row.curves.mean(axis=0), strict=True) if value >= end), None)


def _worst(folder: pathlib.Path, rows: Sequence[Mapping[str, Any]], seed: int,
           labels: np.ndarray | None) -> float:
  """Mean accuracy of the worst tenth of the clients over the last tenth."""
  file = run_files.partition(folder, seed)
  recalls = [row.get('per_class_accuracy') or [] for row in rows
             if row['round'] > 0.9 * rows[-1]['round']]
  if labels is None or not file.exists() or not all(recalls):
    return math.nan
  recall = np.mean(np.array(recalls, np.float64), axis=0)  # None is NaN.
  return clients.worst(per_client.weighed(
      recall, client_rows(file, labels, len(recall))))


def client_rows(file: pathlib.Path, labels: np.ndarray, num_classes: int
                ) -> np.ndarray:
  """Counts each client's rows by class: float64[N, C].

  Args:
    file: the partition that a run has written.
    labels: int[D], of all training rows.
    num_classes: C.

  Raises:
    ValueError: if the labels are of other data.
  """
  with np.load(file) as stored:
    owners = [stored[kind] for kind in ('labeled', 'unlabeled')]
    num_clients = int(stored['num_clients'].item())
  if len(owners[0]) != len(labels):
    raise ValueError(f'{file} deals {len(owners[0])} rows, and the data set '
                     f'has {len(labels)}.')
  counts = np.zeros((num_clients, num_classes))
  for owner in owners:
    # The server is no client, and a hidden label no class.
    mine = (owner >= 0) & (owner < num_clients) & (labels >= 0)
    np.add.at(counts, (owner[mine], labels[mine]), 1)
  return counts


def _sent(seeds: Sequence[Sequence[Mapping[str, Any]]], name: str
          ) -> float | None:
  """Bytes one way over a run, the mean of the seeds."""
  if not any(name in row for rows in seeds for row in rows):
    return None
  return float(np.mean(
      [sum(row.get(name) or 0 for row in rows) for rows in seeds]))


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
  values = [row[name] for row in rows if row.get(name) is not None]
  return float(np.mean(values)) if values else math.nan


def _known(value: float) -> float | None:
  return value if math.isfinite(value) else None
