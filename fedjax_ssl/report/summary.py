"""Sums up runs: by seed, as a table over seeds, and as curves."""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import os
from typing import Any

import numpy as np

from fedjax_ssl.core import checks, run_files
from fedjax_ssl.report import canvas, verdict
from fedjax_ssl.training import metric_names, metrics

Row = Mapping[str, Any]
Runs = Mapping[str, Sequence[Sequence[Row]]]

# Evaluations that the mean at the end covers.
TAIL = 5
# On so many rows an accuracy of a half has a standard error of 5 points.
_FEW_ROWS = 100
NOMINAL = 'A nominal epsilon is no guarantee: only the generator got noise.'
COLUMNS = {
    'final': 'final',
    'tail': f'last {TAIL} evaluations',
    'selected': 'validation-selected',
    'best': 'best',
}
_LABELS = {
    'accuracy': 'test accuracy, %',
    'loss': 'test loss, nats',
    'val_accuracy': 'validation accuracy, %',
    'local_accuracy': 'accuracy of local models, %',
    'pseudo_label_accuracy': 'right pseudo-labels, %',
    'mask_rate': 'pseudo-labels used, %',
    'train_loss': 'training loss',
    'epsilon': 'epsilon spent',
}


def label(name: str) -> str:
  """Returns what tables and charts call a metric, with its unit."""
  return _LABELS.get(name, metric_names.title(name))


def by_seed(rows: Sequence[Row]) -> list[list[Row]]:
  """Splits a file's rows by `seed`, sorted.

  Rows between evaluations are left out.
  """
  rows = [row for row in rows if not metrics.is_short(row)]
  seeds = sorted({row.get('seed', -1) for row in rows})
  return [[r for r in rows if r.get('seed', -1) == s] for s in seeds]


def load(workdirs: Mapping[str, Sequence[str | os.PathLike[str]]]
         ) -> dict[str, list[list[Row]]]:
  """Reads the rows of runs.

  Args:
    workdirs: by the name in tables and plots, the folders of its seeds. One
      folder may hold several seeds.

  Returns:
    By name, one list of rows for each seed.

  Raises:
    ValueError: if a folder holds no rows; the message names it.
  """
  runs: dict[str, list[list[Row]]] = {}
  for name, folders in workdirs.items():
    runs[name] = []
    for folder in folders:
      seeds = by_seed(metrics.read(folder))
      if not seeds:
        raise ValueError(f'{os.fspath(folder)} holds no rows for {name!r}.')
      runs[name] += seeds
  return runs


def summary(rows: Sequence[Row]) -> dict[str, Any]:
  """Sums up one seed.

  Args:
    rows: its rows, oldest first.

  Returns:
    round: of the last row.
    final: test accuracy of the last row.
    tail: mean test accuracy of the last `TAIL` rows; None if there are fewer
      after the start, as a mean of a rise says little.
    selected: test accuracy at the row with the best validation accuracy (first
      on ties).
    best: the highest test accuracy; as it is chosen on the test set, it is
      biased upwards.
    verdict: on the last row, see `report.verdict`.
    bytes_up, bytes_down, num_rejected: sums over the run; only if measured.
    epsilon: of the last row; only if measured.
    Missing values are None.

  Raises:
    ValueError: if there are no rows.
  """
  if not rows:
    raise ValueError('rows=[]: nothing was measured.')
  accuracy = column(rows, 'accuracy')
  validation = column(rows, 'val_accuracy')
  trained = sum(row['round'] > 0 for row in rows)
  chosen = np.where(np.isnan(accuracy), np.nan, validation)
  result: dict[str, Any] = {
      'round': rows[-1]['round'],
      'final': _value(accuracy[-1]),
      'tail': None if trained < TAIL else _value(accuracy[-TAIL:].mean()),
      'selected': (None if np.isnan(chosen).all()
                   else _value(accuracy[np.nanargmax(chosen)])),
      'best': None if np.isnan(accuracy).all() else _value(
          np.nanmax(accuracy)),
      'verdict': verdict.of(rows[-1]),
  }
  for name in run_files.SUMMED:
    if any(name in row for row in rows):
      result[name] = sum(row.get(name, 0) for row in rows)
  if 'epsilon' in rows[-1]:
    result['epsilon'] = rows[-1]['epsilon']
  return result


def few_rows(seeds: Sequence[Sequence[Row]], count: Any) -> str:
  """Says from how few rows validation-selected numbers come.

  Args:
    seeds: the rows of each seed.
    count: of validation rows, if it is known.

  Returns:
    A text; '' for enough rows, or if nothing is selected.
  """
  if not isinstance(count, int) or not 0 < count < _FEW_ROWS or not any(
      row.get('val_accuracy') is not None for rows in seeds for row in rows):
    return ''
  return (f'validation-selected is chosen on only {count} validation '
          f'row{"s" * (count > 1)}; ties go to the earliest round')


def last(rows: Sequence[Row], name: str) -> float | None:
  """Returns a number of a seed's last row, in percent if it is a share.

  None if the row has no such number.
  """
  value = rows[-1].get(name)
  if not isinstance(value, int | float):
    return None
  return metric_names.scale(name) * value


def check_columns(columns: Sequence[str], runs: Runs) -> None:
  """Checks that columns asked for are numbers of some run's last row.

  Raises:
    FieldError: for the first column that is not, with those that are.
  """
  known = {name for seeds in runs.values() for rows in seeds
           for name, value in rows[-1].items()
           if isinstance(value, int | float)} - {'round', 'seed'}
  for name in columns:
    if name not in known:
      raise checks.FieldError(
          'columns', name, 'no run ends with such a number.'
          f'{checks.near(name, known)} There are: '
          f'{", ".join(sorted(known)) or "none"}.')


def table(runs: Runs, *, nominal: Collection[str] = (),
          below: Sequence[str] = ()) -> str:
  """Makes a Markdown table of test accuracies in percent, mean ± std.

  The standard deviation is that of a sample (n - 1); one seed has none.

  Args:
    runs: by name, one list of rows for each seed, as `load` gives.
    nominal: names of runs whose epsilon guarantees nothing.
    below: sentences that go below the table, before its footnotes.

  Returns:
    The table, a line for each name in the given order, readable as plain text.
    A name whose seeds stopped at different rounds shows the range of rounds.
    If any run reports epsilon, a last column shows the largest over its seeds.
    Accuracies of a name with a seed that diverged or guesses have a mark, and
    a footnote below says what was found.
  """
  head = ['method', 'seeds', 'rounds', *COLUMNS.values()]
  body: list[list[str]] = []
  spent: list[str] = []
  verdicts: dict[str, list[verdict.Verdict | None]] = {}
  for name, seeds in runs.items():
    results = [summary(rows) for rows in seeds]
    rounds = sorted(r['round'] for r in results)
    found = verdicts[name] = [r['verdict'] for r in results]
    body.append([
        name, str(len(seeds)),
        '-'.join(str(r) for r in sorted({rounds[0], rounds[-1]})),
        *(verdict.marked(percent([r[c] for r in results]), found)
          for c in COLUMNS)])
    spent.append(epsilon([r.get('epsilon') for r in results], name in nominal)
                 if any('epsilon' in r for r in results) else '')
  if any(spent):
    head.append('epsilon')
    body = [[*row, cell] for row, cell in zip(body, spent, strict=True)]
  widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]

  def line(cells: Sequence[str]) -> str:
    first = cells[0].ljust(widths[0])
    rest = (c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))
    return f'| {" | ".join([first, *rest])} |'

  rule = ['-' * widths[0], *('-' * (w - 1) + ':' for w in widths[1:])]
  notes = [*below, *verdict.footnotes(verdicts.items())]
  notes = [*notes, *[NOMINAL] * any(spent[i] and name in nominal
                                    for i, name in enumerate(runs))]
  below = '\n' + '\n\n'.join(notes) + '\n' if notes else ''
  return '\n'.join(map(line, [head, rule, *body])) + '\n' + below


def curves(runs: Runs, *, panels: Sequence[str] = ('accuracy', 'loss')) -> Any:
  """Draws metrics against rounds: a line for each name, a band over its seeds.

  The line is the mean over seeds and the band one standard deviation to each
  side, at the rounds that all seeds of the name have. The legend goes from
  the best final accuracy to the worst.

  Args:
    runs: by name, one list of rows for each seed, as `load` gives.
    panels: metrics to draw, one panel each; those that no run has are left out.

  Returns:
    A figure of matplotlib.

  Raises:
    ValueError: if none of the panels has anything to draw.
  """
  from matplotlib import figure
  drawn = {panel: {name: found for name, seeds in runs.items()
                   if (found := curve(seeds, panel)) is not None}
           for panel in panels}
  drawn = {panel: lines for panel, lines in drawn.items() if lines}
  if not drawn:
    known = drawable(runs)
    near = checks.near(panels[0], known) if len(panels) == 1 else ''
    raise ValueError(f'No run has any of panels={list(panels)}.{near} There '
                     f'are: {", ".join(known) or "none"}.')
  chart = figure.Figure(
      figsize=(4.6 * len(drawn) + 2.2, 3.8), layout='constrained')
  style = {name: canvas.line(i) for i, name in enumerate(runs)}
  handles = {}
  all_axes = chart.subplots(1, len(drawn), squeeze=False)[0]
  for axes, (panel, lines) in zip(all_axes, drawn.items(), strict=True):
    scale = metric_names.scale(panel)
    for name, (rounds, values) in lines.items():
      values = values * scale
      mean = values.mean(axis=0)
      handles[name], = axes.plot(
          rounds, mean, linewidth=1.8, **style[name],
          marker='o' if len(rounds) == 1 else '')
      if len(values) > 1:
        axes.fill_between(rounds, *band(values, percent=scale == 100),
                          linewidth=0, color=style[name]['color'], alpha=0.18)
    axes.set_xlabel('round')
    axes.set_ylabel(label(panel))
    canvas.ground(axes)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.margins(x=0.02)
  final = {name: _final(runs[name]) for name in handles}
  order = sorted(handles, key=lambda name: -np.nan_to_num(final[name]))
  verdicts = {name: [verdict.of(rows[-1]) for rows in runs[name]]
              for name in order}
  chart.legend(
      handles=[handles[name] for name in order],
      labels=[name if np.isnan(final[name]) else verdict.marked(
          f'{name}  {100 * final[name]:.1f}', verdicts[name])
              for name in order],
      loc='outside right upper', frameon=False, fontsize='small',
      title='\n'.join([
          'final accuracy, %', *['(bands: 1 std over seeds)'] * any(
              len(runs[name]) > 1 for name in order), *verdict.legend(
                  verdicts.values())]),
      title_fontsize='small', alignment='left')
  canvas.as_they_are(chart)
  return chart


def band(values: np.ndarray, *, percent: bool
         ) -> tuple[np.ndarray, np.ndarray]:
  """Computes mean - and + one deviation, in the range of possible values.

  Args:
    values: float64[seeds, R], of two seeds or more.
    percent: whether they are shares, 0 to 100.

  Returns:
    float64[R] low and high.
  """
  mean, std = values.mean(axis=0), values.std(axis=0, ddof=1)
  low, high = mean - std, mean + std
  if percent:
    high = np.minimum(high, 100)
  # A deviation may reach below 0; what was measured does not.
  least = values.min(axis=0)
  return np.where((low < 0) & (least >= 0), np.minimum(least, mean), low), high


def column(rows: Sequence[Row], name: str) -> np.ndarray:
  """Returns a metric by row, float64[R], NaN where a row lacks it."""
  return np.array([row.get(name) for row in rows], np.float64)


def _value(number: Any) -> float | None:
  return None if np.isnan(number) else float(number)


def over_rounds(rows: Sequence[tuple[int, float | None]]) -> float | None:
  """Averages a metric over the rounds of a run.

  Args:
    rows: pairs of a round and the mean since the row before; None is unknown.

  Returns:
    The mean, each row weighted by the rounds it covers; None if all are
    unknown.
  """
  total = weight = 0.0
  before = 0
  for round_, value in rows:
    if value is not None:
      total += value * (round_ - before)
      weight += round_ - before
    before = round_
  return total / weight if weight else None


def elapsed(times: Sequence[Row]) -> float | None:
  """Sums the seconds of a run over its starts; the clock begins anew with each.

  Args:
    times: rows of `timings.jsonl`. `since` is the round at which a start went
      on; among rows of older versions, which lack it, a start shows by an
      earlier time.

  Returns:
    Seconds; None without times, or if a row says that earlier ones are lost.
  """
  known = [row for row in times if 'seconds' in row]
  total = last = 0.0
  since = known[0].get('since') if known else None
  for row in known:
    now = row['seconds']
    if now is None:
      return None
    if now < last or row.get('since') != since:
      total += last
    last, since = now, row.get('since')
  return round(total + last, 1) if known else None


def mean_std(values: Sequence[float | None]) -> str:
  """Returns `50.00 ± 1.00`, a sample's deviation; `-` if one is unknown."""
  numbers = [v for v in values if v is not None]
  if not numbers or len(numbers) < len(values):
    return '-'
  if len(numbers) == 1:
    return f'{numbers[0]:.2f}'
  return f'{np.mean(numbers):.2f} ± {np.std(numbers, ddof=1):.2f}'


def percent(values: Sequence[float | None], scale: float = 100) -> str:
  """Formats mean and deviation over seeds of shares, multiplied by `scale`."""
  return mean_std([None if v is None else scale * v for v in values])


def epsilon(values: Sequence[float | None], nominal: bool) -> str:
  """Formats the largest epsilon of a run's seeds; None is no bound."""
  known = [v for v in values if v is not None]
  text = f'{max(known):.2f}' if len(known) == len(values) else 'unbounded'
  return text + ', nominal' * nominal


def _final(seeds: Sequence[Sequence[Row]]) -> float:
  """Computes the mean final accuracy; NaN if a seed has none."""
  return float(np.mean([column(rows, 'accuracy')[-1] for rows in seeds]))


def curve(seeds: Sequence[Sequence[Row]], name: str
          ) -> tuple[np.ndarray, np.ndarray] | None:
  """Returns int[R] rounds that all seeds have, and float64[seeds, R] values.

  None if there is no such round.
  """
  series = [{row['round']: row[name] for row in rows
             if isinstance(row.get(name), int | float)} for rows in seeds]
  rounds = sorted(set.intersection(*map(set, series))) if series else []
  return (np.array(rounds), np.array(
      [[s[r] for r in rounds] for s in series], np.float64)) if rounds else None


def drawable(runs: Runs) -> list[str]:
  """Returns the metrics that `curves` has something to draw of, sorted."""
  known = {name for seeds in runs.values() for rows in seeds for row in rows
           for name in row} - {'round', 'seed'}
  return sorted(name for name in known if any(
      curve(seeds, name) is not None for seeds in runs.values()))
