"""Charts of a report as plotly draws them in the reader's browser.

plotly.js has what a reader of curves wants: hovering, zooming, log scales,
lines that are switched on and off. It has been maintained by a company and many
others since 2015, and comes inside plotly's Python package, so that no network
is needed to write or read the page. Its full build is 4.8 MB; there are no
smaller builds on the Python package index. uPlot and Vega-Lite would have to be
copied into this repository. The extra `[report]` brings plotly; without it a
page has the same charts as static drawings.

Figures are written in plotly's documented JSON: its Python objects would take
seconds to load.
"""
from __future__ import annotations

from collections.abc import Sequence
import json
from typing import Any

import numpy as np

from fedjax_ssl.report import canvas, charts, names, series

_MOST_NUMBERS = 120_000  # Of all curves in a page, about 8 bytes each.
_DASH = ('solid', 'dash', 'dot', 'dashdot')


def library() -> str:
  """Returns the source of plotly.js; '' if plotly is not installed."""
  try:
    from plotly import offline
  except ImportError:
    return ''
  return offline.get_plotlyjs()


def most_points(all_charts: Sequence[series.Chart]) -> int:
  """Returns how many points a line may have, so that a page stays small."""
  lines = sum(len(chart.lines) for chart in all_charts)
  return max(20, _MOST_NUMBERS // (7 * max(1, lines)))  # Band, mean, label.


def figure(chart: series.Chart, lines: Sequence[series.Line],
           looks: Sequence[names.Look], most: int = 1000) -> str:
  """Returns one small chart as JSON that may stand inside a page's script.

  Args:
    chart: the chart that the small one belongs to.
    lines: what it shows.
    looks: of all runs.
    most: the most points of a curve; of a longer one this many are shown,
      evenly spaced, the first and the last among them.
  """
  if chart.kind == 'lines':
    lines = [_thinned(line, most) for line in lines]
  if chart.kind == 'heat':
    traces = [_heat(lines)]
  elif chart.kind == 'bars':
    traces = [_bars(line, looks[line.run]) for line in lines]
  else:
    traces = [trace for line in lines
              for trace in _curve(chart, line, looks[line.run])]
  text = json.dumps({'data': traces, 'layout': _layout(chart, len(lines))},
                    allow_nan=False)
  return text.replace('<', '\\u003c')  # No name may end the script.


def _thinned(line: series.Line, most: int) -> series.Line:
  if len(line.x) <= most:
    return line
  kept = np.linspace(0, len(line.x) - 1, most).round().astype(int)
  return line._replace(
      x=line.x[kept], values=line.values[:, kept],
      low=None if line.low is None else line.low[kept],
      high=None if line.high is None else line.high[kept])


def _curve(chart: series.Chart, line: series.Line, look: names.Look
           ) -> list[dict[str, Any]]:
  """Makes the mean, and behind it the band between two invisible lines."""
  colour, dash = canvas.look(look.colour, look.dash)
  x = _numbers(line.x)
  found = []
  if line.low is not None and line.high is not None:
    edge = {'x': x, 'mode': 'lines', 'line': {'width': 0}, 'hoverinfo': 'skip',
            'meta': line.run}
    found = [edge | {'y': _numbers(line.low)},
             edge | {'y': _numbers(line.high), 'fill': 'tonexty',
                     'fillcolor': f'rgba({_rgb(colour)},0.18)'}]
  said, spread = _spread(line)
  return [*found, {
      'x': x, 'y': _numbers(line.mean), 'name': _plain(line.name),
      'mode': 'lines+markers' if len(x) == 1 else 'lines', 'meta': line.run,
      'line': {'color': colour, 'width': 2,
               'dash': _DASH[dash]},
      'customdata': spread,
      'hovertemplate': f'%{{y:.4~g}}{said}<br>{chart.x_label} %{{x}}'}]


def _bars(line: series.Line, look: names.Look) -> dict[str, Any]:
  said, spread = _spread(line)
  error = {} if line.low is None or line.high is None else {'error_y': {
      'type': 'data', 'symmetric': False, 'thickness': 1, 'width': 2,
      'array': _numbers(line.high - line.mean),
      'arrayminus': _numbers(line.mean - line.low)}}
  bar = charts.bar_style(look)
  return {'type': 'bar', 'x': _numbers(line.x), 'y': _numbers(line.mean),
          'name': _plain(line.name), 'meta': line.run,
          'marker': {'color': bar['color'], 'opacity': bar['alpha']},
          'customdata': spread, **error,
          'hovertemplate': f'%{{y:.4~g}}{said}<br>class %{{x}}'}


def _heat(lines: Sequence[series.Line]) -> dict[str, Any]:
  return {'type': 'heatmap', 'z': [_numbers(line.mean) for line in lines],
          'y': [_plain(line.name) for line in lines], 'zmin': 0, 'zmax': 100,
          'colorscale': 'Viridis', 'hoverongaps': False,
          'hovertemplate': '%{y}<br>class %{x}: %{z:.4~g} %<extra></extra>'}


def _spread(line: series.Line) -> tuple[str, list[float | None]]:
  """Returns how a label shows the deviation over seeds, and its numbers."""
  if len(line.values) < 2:
    return '', []
  return ' ± %{customdata:.3~g}', _numbers(line.values.std(axis=0, ddof=1))


def _layout(chart: series.Chart, rows: int) -> dict[str, Any]:
  axis = {'gridcolor': '#ddd', 'zeroline': False, 'automargin': True}
  layout: dict[str, Any] = {
      'margin': {'l': 50, 'r': 10, 't': 28, 'b': 45}, 'height': 300,
      'showlegend': False, 'hovermode': 'closest',
      'hoverlabel': {'namelength': -1}, 'plot_bgcolor': '#fff',
      'font': {'family': 'system-ui, sans-serif', 'size': 12,
               'color': '#1a1a1a'},
      'xaxis': axis | {'title': {'text': chart.x_label}},
      'yaxis': axis | {'title': {'text': chart.y_label}}}
  if chart.kind == 'heat':
    layout['height'] = 120 + 24 * rows
    layout['yaxis'] = {'autorange': 'reversed', 'automargin': True}
    return layout
  if chart.log_x:
    layout['xaxis']['type'] = 'log'
  layout['yaxis']['range'] = [*series.limits(chart)]
  return layout


def _numbers(values: np.ndarray) -> list[float | None]:
  """Rounds to six digits, more than a chart can show; NaN becomes null."""
  return [float(f'{v:.6g}') if np.isfinite(v) else None for v in values]


def _rgb(colour: str) -> str:
  return ','.join(str(int(colour[i:i + 2], 16)) for i in (1, 3, 5))


def _plain(name: str) -> str:
  """Escapes a name, so that plotly shows it as it is; `<` begins formatting."""
  return name.replace('&', '&amp;').replace('<', '&lt;')
