"""The data of a report's charts: lines and bars, not drawn yet."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_ssl.report import clients, names, stored_runs, summary
from fedjax_ssl.report.text import as_csv
from fedjax_ssl.training import metric_names

# Metrics with a curve each, in this order, if any run has them.
PANELS = ('accuracy', 'loss', 'val_accuracy', 'local_accuracy', 'train_loss',
          'mask_rate', 'pseudo_label_accuracy', 'epsilon')
_MANY = 10  # A larger ratio of runs' traffic makes the scale logarithmic.
_MOST_BARS = 60  # More in one chart would be too thin; then it is a heat map.
_MOST_NAMES = 12  # Of classes, below a chart.


class Line(NamedTuple):
  """A run in a chart.

  Attributes:
    run: its index.
    name: its name.
    x: float64[R].
    values: float64[seeds, R]; NaN is not known.
    low: float64[R], one deviation below the mean; None for one seed.
    high: the same above.
  """

  run: int
  name: str
  x: np.ndarray
  values: np.ndarray
  low: np.ndarray | None
  high: np.ndarray | None

  @property
  def mean(self) -> np.ndarray:
    """float64[R], over seeds."""
    return self.values.mean(axis=0)


class Chart(NamedTuple):
  """A chart, or a row of small ones with the same axes.

  Attributes:
    name: of its files.
    title: for people.
    x_label: below.
    y_label: at the side.
    facets: by title, the lines of each small chart; one without a title if
      the runs are not divided.
    kind: 'lines', 'bars', or 'heat': a row for each run, a column for each x.
    percent: whether its values are shares, 0 to 100.
    log_x: whether the horizontal scale is logarithmic.
  """

  name: str
  title: str
  x_label: str
  y_label: str
  facets: dict[str, list[Line]]
  kind: str = 'lines'
  percent: bool = False
  log_x: bool = False

  @property
  def lines(self) -> list[Line]:
    """The lines of all facets."""
    return [line for lines in self.facets.values() for line in lines]


def line(run: int, name: str, x: Sequence[float] | np.ndarray,
         values: np.ndarray, percent: bool) -> Line:
  """Makes a line; its band stays in the range of possible values.

  Args:
    run: index of the run.
    name: of the run.
    x: R numbers.
    values: float64[seeds, R].
    percent: whether they are shares, 0 to 100.
  """
  low, high = summary.band(values, percent=percent) if len(values) > 1 else (
      None, None)
  return Line(run, name, np.array(x, np.float64), values, low, high)


def all_charts(runs: Sequence[stored_runs.ReportedRun], plan: names.Plan
               ) -> list[Chart]:
  """Returns every chart that has something to show."""
  found = [_curves(runs, plan, metric) for metric in PANELS]
  found += [_traffic(runs, plan), _classes(runs, plan), _clients(runs, plan)]
  return [chart for chart in found if chart is not None]


def _divided(plan: names.Plan, lines: Sequence[Line]) -> dict[str, list[Line]]:
  """Divides lines by facet, in the facets' order."""
  return {facet: mine for facet in names.facets(plan.looks) if (
      mine := [x for x in lines if plan.looks[x.run].facet == facet])}


def _lines(runs: Sequence[stored_runs.ReportedRun], percent: bool,
           read: Callable[[stored_runs.ReportedRun],
                          tuple[np.ndarray, np.ndarray] | None]) -> list[Line]:
  """Makes a line of each run for which `read` gives x and values."""
  found = []
  for i, run in enumerate(runs):
    pair = read(run)
    if pair is not None:
      found.append(line(i, run.name, pair[0], pair[1], percent))
  return found


def _curves(runs: Sequence[stored_runs.ReportedRun], plan: names.Plan,
            metric: str) -> Chart | None:
  """Makes the chart of a metric against rounds; None if no run has it."""
  scale = metric_names.scale(metric)
  percent = scale == 100
  def read(run):
    found = summary.curve(run.seeds, metric)
    return found and (found[0], found[1] * scale)
  lines = _lines(runs, percent, read)
  return Chart(
      metric, metric.replace('_', ' '), 'round',
      summary.label(metric),
      _divided(plan, lines), percent=percent) if lines else None


def _traffic(runs: Sequence[stored_runs.ReportedRun], plan: names.Plan
             ) -> Chart | None:
  """Makes accuracy against megabytes sent both ways; None if not known."""
  def read(run):
    shared = set.intersection(*({row['round'] for row in rows}
                                for rows in run.seeds))
    by_seed = []
    for rows in run.seeds:
      chosen = [row['round'] in shared for row in rows]
      by_seed.append([x[chosen] for x in stored_runs.traffic(rows)])
    sent = np.mean([s for s, _ in by_seed], axis=0) / 1e6
    return (sent, 100 * np.stack([a for _, a in by_seed])) if (
        sent.size and sent[-1] > 0) else None
  lines = _lines(runs, True, read)
  if not lines:
    return None
  totals = [x.x[-1] for x in lines]
  return Chart('traffic', 'accuracy against traffic', 'MB sent, both ways',
               summary.label('accuracy'), _divided(plan, lines), percent=True,
               log_x=max(totals) > _MANY * min(totals))


def _classes(runs: Sequence[stored_runs.ReportedRun], plan: names.Plan
             ) -> Chart | None:
  """Makes the last row's accuracy in each class, all runs side by side."""
  def read(run):
    rows = [seed[-1].get('per_class_accuracy') or [] for seed in run.seeds]
    if any(not row or len(row) != len(rows[0]) for row in rows):
      return None
    values = 100 * np.array(rows, np.float64)  # None is NaN.
    return np.arange(values.shape[1]), values
  lines = _lines(runs, True, read)
  if not lines:
    return None
  facets = _divided(plan, lines)
  bars = max(sum(len(x.x) for x in facet) for facet in facets.values())
  label = _class_label(runs)
  if bars <= _MOST_BARS:
    return Chart('classes', 'accuracy in each class', label, 'right, %',
                 facets, 'bars', True)
  return Chart('classes', 'accuracy in each class, %', label, 'run',
               {'': lines}, 'heat', True)


def _class_label(runs: Sequence[stored_runs.ReportedRun]) -> str:
  """Returns 'class', with the classes' names if all runs have the same few."""
  known = {tuple(map(str, run.config['facts'].get('class_names') or ()))
           for run in runs}
  names_ = known.pop() if len(known) == 1 else ()
  if not 0 < len(names_) <= _MOST_NAMES:
    return 'class'
  return 'class: ' + ', '.join(f'{i} {name}' for i, name in enumerate(names_))


def _clients(runs: Sequence[stored_runs.ReportedRun], plan: names.Plan
             ) -> Chart | None:
  """Makes the clients' accuracies in the last row, from worst to best."""
  def read(run):
    known = [np.sort(a[np.isfinite(a)]) for a in
             clients.accuracies(run).values()]
    if not known or any(len(a) != len(known[0]) for a in known):
      return None
    size = len(known[0])
    return 100 * (np.arange(size) + .5) / size, 100 * np.stack(known)
  lines = _lines(runs, True, read)
  return Chart('clients', 'accuracy of each client',
               'clients from the worst to the best, %', 'right, %',
               _divided(plan, lines), percent=True) if lines else None


def limits(chart: Chart) -> tuple[float, float]:
  """Returns the vertical range that all its small charts share."""
  if chart.kind == 'bars':
    return 0.0, 100.0
  ends = [np.concatenate([part for part in (x.mean, x.low, x.high)
                          if part is not None]) for x in chart.lines]
  known = np.concatenate(ends)
  known = known[np.isfinite(known)]
  if not known.size:
    return 0.0, 1.0
  low, high = float(known.min()), float(known.max())
  room = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
  low = max(low - room, 0.0) if low >= 0 else low - room
  return low, min(high + room, 100.0) if chart.percent else high + room


def comma_separated(chart: Chart) -> str:
  """Writes all numbers as CSV, unrounded, a line for each point of a run."""
  seeds = max(len(x.values) for x in chart.lines)
  rows = [['run', 'facet', chart.x_label, 'mean', 'low', 'high',
           *(f'value {i + 1}' for i in range(seeds))]]
  for facet, lines in chart.facets.items():
    for one in lines:
      for i, x in enumerate(one.x):
        ends = (one.mean, one.low, one.high, *one.values)
        cells = ['' if part is None or not np.isfinite(part[i])
                 else repr(float(part[i])) for part in ends]
        rows.append([one.name, facet, repr(float(x)), *cells])
  return as_csv(rows)
