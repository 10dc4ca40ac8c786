"""Charts of a report as SVG text that stands inside a page."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import io
import re
from typing import Any

import matplotlib
from matplotlib import figure, ticker
from matplotlib.backends import backend_svg
import numpy as np

from fedjax_ssl.report import stored_runs, summary
from fedjax_ssl.training import metrics

# Okabe and Ito's colours: told apart by colour-blind readers and in print.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9',
           '#000000')
DASHES: tuple[Any, ...] = ('-', (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1, 1, 1)))
_STYLE: Any = {
    'svg.fonttype': 'none', 'font.size': 10, 'svg.hashsalt': 'fedjax_ssl',
    'font.family': 'sans-serif', 'axes.spines.top': False,
    'axes.spines.right': False}
# Inches; 360 points fit the narrowest screens unscaled.
_WIDTH = 4.6
_MANY = 10  # Times the traffic, from which on a scale is logarithmic.
_MAX_CLASSES = 30  # Bars of more would be thinner than a pixel.
_NAME = 16  # Characters of the name of a class that are shown.


def style(index: int) -> dict[str, Any]:
  """Colour and dash of a run, the same in every chart."""
  return {'color': COLOURS[index % len(COLOURS)],
          'linestyle': DASHES[index // len(COLOURS) % len(DASHES)]}


def curves(runs: Sequence[stored_runs.Run], metric: str) -> str:
  """Mean over seeds against rounds, one deviation to each side; '' if none."""
  scale = 100 if metric in metrics.SHARES else 1
  lines = []
  for i, run in enumerate(runs):
    found = _curve(run.seeds, metric)
    if found is not None:
      lines.append((i, found[0], found[1] * scale))
  if not lines:
    return ''
  chart, axes = _figure()
  for i, rounds, values in lines:
    _band(axes, i, rounds, values)
  axes.set_xlabel('round')
  axes.set_ylabel(summary.LABELS.get(metric, metric.replace('_', ' ')))
  axes.xaxis.get_major_locator().set_params(integer=True)
  return _svg(chart)


def communication(runs: Sequence[stored_runs.Run]) -> str:
  """Accuracy against megabytes sent both ways so far; '' if none is known."""
  totals = []
  chart, axes = _figure()
  for i, run in enumerate(runs):
    pairs = [stored_runs.traffic(rows) for rows in run.seeds]
    size = min(len(sent) for sent, _ in pairs)
    sent = np.mean([s[:size] for s, _ in pairs], axis=0) / 1e6
    if not sent[-1] > 0:
      continue
    _band(axes, i, sent, 100 * np.stack([a[:size] for _, a in pairs]))
    totals.append(sent[-1])
  if not totals:
    return ''
  if max(totals) > _MANY * min(totals):
    axes.set_xscale('log')
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
  axes.set_xlabel('MB sent, both ways')
  axes.set_ylabel(summary.LABELS['accuracy'])
  return _svg(chart)


def per_class(run: stored_runs.Run, index: int) -> str:
  """Bars of the last row's accuracy in each class; '' if not measured."""
  rows = [seed[-1].get('per_class_accuracy') or [] for seed in run.seeds]
  if any(not row or len(row) != len(rows[0]) for row in rows):
    return ''
  values = 100 * np.array([[np.nan if v is None else v for v in row]
                           for row in rows], np.float64)
  mean, places = values.mean(axis=0), np.arange(values.shape[1])
  chart, axes = _figure(height=2.4)
  colour = COLOURS[index % len(COLOURS)]
  if len(places) > _MAX_CLASSES:
    axes.bar(places, np.sort(mean), color=colour, width=1.0)
    axes.set_xlabel('classes, sorted')
  else:
    error = values.std(axis=0, ddof=1) if len(values) > 1 else None
    axes.bar(places, mean, color=colour, yerr=error, capsize=2,
             error_kw={'linewidth': 0.8})
    axes.set_xticks(places)
    axes.tick_params(axis='x', labelsize=8)
    axes.set_xlabel('class')
    names = run.config['facts'].get('class_names') or ()
    if len(names) == len(places):
      axes.set_xticklabels([str(name)[:_NAME] for name in names], rotation=30,
                           ha='right', parse_math=False)
  axes.set_ylim(0, 100)
  axes.set_ylabel('right, %')
  return _svg(chart)


def heat_map(federation: Mapping[str, Any]) -> str:
  """Rows of each class on each client, labeled and unlabeled; '' if unknown."""
  kinds = [k for k in ('labeled', 'unlabeled')
           if federation.get(f'{k}_classes')]
  if not kinds:
    return ''
  try:
    counts = [np.array(federation[f'{k}_classes'], np.int64) for k in kinds]
  except (TypeError, ValueError, OverflowError):
    return ''
  if any(count.ndim != 2 or not count.size for count in counts):
    return ''
  chart = figure.Figure(figsize=(_WIDTH, 3.4), layout='constrained')
  all_axes = chart.subplots(1, len(kinds), squeeze=False)[0]
  for axes, kind, count in zip(all_axes, kinds, counts):
    image = axes.imshow(count, aspect='auto', cmap='viridis', vmin=0,
                        interpolation='nearest')
    axes.set_title(f'{kind}: {int(count.sum())} rows', fontsize=9)
    axes.set_xlabel('class')
    axes.spines[:].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
      axis.get_major_locator().set_params(integer=True)
    bar = chart.colorbar(image, ax=axes, location='bottom', shrink=0.9)
    bar.ax.tick_params(labelsize=7)
  all_axes[0].set_ylabel('client')
  return _svg(chart)


def _curve(seeds: Sequence[Sequence[stored_runs.Row]], name: str
           ) -> tuple[np.ndarray, np.ndarray] | None:
  """Rounds that all seeds have, and float64[seeds, R] values there."""
  series = [{r['round']: r[name] for r in rows
             if isinstance(r.get(name), int | float)} for rows in seeds]
  rounds = sorted(set.intersection(*map(set, series)))
  if not rounds:
    return None
  return np.array(rounds), np.array([[s[r] for r in rounds] for s in series],
                                    np.float64)


def _figure(height: float = 3.0) -> tuple[Any, Any]:
  with matplotlib.rc_context(_STYLE):
    chart = figure.Figure(figsize=(_WIDTH, height), layout='constrained')
    axes = chart.subplots()
    axes.grid(color='#dddddd', linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
  return chart, axes


def _band(axes: Any, index: int, x: np.ndarray, values: np.ndarray) -> None:
  mean = values.mean(axis=0)
  axes.plot(x, mean, linewidth=1.8, **style(index),
            marker='o' if len(x) == 1 else '')
  if len(values) > 1:
    std = values.std(axis=0, ddof=1)
    axes.fill_between(x, mean - std, mean + std, linewidth=0, alpha=0.18,
                      color=style(index)['color'])


def _svg(chart: Any) -> str:
  """The drawing without what only a file of its own needs."""
  stream = io.StringIO()
  with matplotlib.rc_context(_STYLE):
    backend_svg.FigureCanvasSVG(chart).print_svg(
        stream, metadata={'Date': None, 'Creator': None, 'Format': None,
                          'Type': None})
  text = stream.getvalue()
  text = text[text.index('<svg'):]
  text = re.sub(r'<metadata>.*?</metadata>', '', text, flags=re.DOTALL)
  # The page scales it; ids are made unique by the page.
  return re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1', re.sub(
      r'(<svg[^>]*?) width="[^"]*"', r'\1', text, count=1), count=1)
