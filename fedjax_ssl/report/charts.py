"""Draws the charts of a report: as SVG inside its page, and as files."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import io
import math
import re
from typing import Any

import matplotlib
from matplotlib import figure, patches, ticker
from matplotlib import lines as mlines
from matplotlib.backends import backend_pdf, backend_svg
import numpy as np

from fedjax_ssl.report import canvas, clients, names, series

_STYLE: Any = {
    'svg.fonttype': 'none', 'font.size': 10, 'svg.hashsalt': 'fedjax_ssl',
    'font.family': 'sans-serif', 'axes.spines.top': False,
    'axes.spines.right': False, 'text.parse_math': False}
# Inches; 360 points fit the narrowest screens unscaled.
_WIDTH, _HEIGHT = 4.6, 3.0
_ACROSS = 3  # Small charts side by side in a file.
_MOST_TICKS = 30  # Classes that all get a number; of more, only every few do.
_MOST_WORDS = 120  # Cells of a heat map that hold their number.
Looks = Sequence[names.Look]


def style(look: names.Look) -> dict[str, Any]:
  """Returns the colour and the dash of a run, the same in every chart."""
  return canvas.line(look.colour, look.dash)


def inline(chart: series.Chart, looks: Looks) -> list[tuple[str, str]]:
  """Draws each small chart separately: pairs of its title and SVG."""
  found = []
  for facet, lines in chart.facets.items():
    height = _HEIGHT
    if chart.kind == 'heat':
      height = 1.2 + 0.28 * len(lines)
    drawing, axes = _figure(_WIDTH, height)
    _fill(drawing, axes, chart, lines, looks)
    found.append((facet, _inner(_svg(drawing))))
  return found


def files(chart: series.Chart, looks: Looks) -> dict[str, bytes]:
  """Draws a chart with its legend as SVG and as PDF, by ending."""
  count = len(chart.facets)
  across = min(count, _ACROSS)
  down = math.ceil(count / across)
  height = (1.2 + 0.28 * len(chart.lines) if chart.kind == 'heat'
            else _HEIGHT * down)
  with matplotlib.rc_context(_STYLE):
    drawing = figure.Figure(figsize=(_WIDTH * across + 2, height),
                            layout='constrained')
    all_axes = drawing.subplots(down, across, squeeze=False).flatten()
    for axes in all_axes[count:]:
      axes.set_axis_off()
    for axes, (facet, lines) in zip(all_axes, chart.facets.items()):
      _ground(axes)
      _fill(drawing, axes, chart, lines, looks)
      axes.set_title(facet, fontsize=10)
    if chart.kind != 'heat':
      seen = dict(sorted({x.run: x.name for x in chart.lines}.items()))
      drawing.legend(
          handles=[_handle(chart, looks[run]) for run in seen],
          labels=[*seen.values()], loc='outside right upper', frameon=False,
          fontsize='small')
  return _files(drawing, _svg(drawing))


def heat_map(federation: Mapping[str, Any]) -> Any:
  """Draws the number of rows by class and client; None if it is unknown."""
  counts = clients.class_counts(federation)
  if not counts:
    return None
  with matplotlib.rc_context(_STYLE):
    drawing = figure.Figure(figsize=(_WIDTH, 3.4), layout='constrained')
    all_axes = drawing.subplots(1, len(counts), squeeze=False)[0]
    for axes, (kind, count) in zip(all_axes, counts.items()):
      image = axes.imshow(count, aspect='auto', cmap='viridis', vmin=0,
                          interpolation='nearest')
      axes.set_title(f'{kind}: {int(count.sum())} rows', fontsize=9)
      axes.set_xlabel('class')
      axes.spines[:].set_visible(False)
      for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
      bar = drawing.colorbar(image, ax=axes, location='bottom', shrink=0.9)
      bar.ax.tick_params(labelsize=7)
    all_axes[0].set_ylabel('client')
  return drawing


def of_heat_map(drawing: Any) -> tuple[str, dict[str, bytes]]:
  """Returns a drawing for the page, and as files by ending."""
  text = _svg(drawing)
  return _inner(text), _files(drawing, text)


def _files(drawing: Any, svg: str) -> dict[str, bytes]:
  drawing.set_layout_engine('none')  # Keeps the layout made for the SVG.
  return {'svg': svg.encode(), 'pdf': _pdf(drawing)}


def _figure(width: float, height: float) -> tuple[Any, Any]:
  with matplotlib.rc_context(_STYLE):
    drawing = figure.Figure(figsize=(width, height), layout='constrained')
    axes = drawing.subplots()
    _ground(axes)
  return drawing, axes


def _ground(axes: Any) -> None:
  canvas.ground(axes)
  axes.margins(x=0.02)


def _fill(drawing: Any, axes: Any, chart: series.Chart,
          lines: Sequence[series.Line], looks: Looks) -> None:
  """Draws one small chart."""
  axes.set_xlabel(chart.x_label)
  if chart.kind == 'heat':
    _heat(drawing, axes, lines)
    return
  axes.set_ylabel(chart.y_label)
  if chart.kind == 'bars':
    _bars(axes, lines, looks)
  else:
    for line in lines:
      _band(axes, line, looks[line.run])
    axes.xaxis.get_major_locator().set_params(integer=not chart.log_x)
  if chart.log_x:
    axes.set_xscale('log')
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
  axes.set_ylim(*series.limits(chart))


def _band(axes: Any, line: series.Line, look: names.Look) -> None:
  axes.plot(line.x, line.mean, linewidth=1.8, **style(look),
            marker='o' if len(line.x) == 1 else '')
  if line.low is not None:
    axes.fill_between(line.x, line.low, line.high, linewidth=0, alpha=0.18,
                      color=style(look)['color'])


def _bars(axes: Any, lines: Sequence[series.Line], looks: Looks) -> None:
  """Draws the bars of all runs side by side at each class."""
  width = 0.84 / len(lines)
  for i, line in enumerate(lines):
    error = None if line.low is None or line.high is None else np.stack(
        [line.mean - line.low, line.high - line.mean])
    left = line.x + (i - (len(lines) - 1) / 2) * width
    axes.bar(left, line.mean, width, yerr=error, error_kw={'linewidth': 0.7},
             **bar_style(looks[line.run]))
  places = lines[0].x
  axes.set_xticks(places[::math.ceil(len(places) / _MOST_TICKS)])
  axes.xaxis.set_major_formatter(ticker.FormatStrFormatter('%d'))
  axes.grid(visible=False, axis='x')


def bar_style(look: names.Look) -> dict[str, Any]:
  """Returns the colour of a bar; other dashes are fainter bars."""
  colour, dash = canvas.look(look.colour, look.dash)
  return {'color': colour, 'alpha': (1.0, .65, .45, .3)[dash]}


def _heat(drawing: Any, axes: Any, lines: Sequence[series.Line]) -> None:
  """Draws a row for each run and a column for each class."""
  width = max(len(line.x) for line in lines)
  cells = np.full((len(lines), width), np.nan)
  for i, line in enumerate(lines):
    cells[i, :len(line.x)] = line.mean
  image = axes.imshow(cells, aspect='auto', cmap='viridis', vmin=0, vmax=100,
                      interpolation='nearest')
  axes.set_yticks(range(len(lines)), [line.name for line in lines], fontsize=7)
  axes.grid(visible=False)
  axes.spines[:].set_visible(False)
  axes.xaxis.get_major_locator().set_params(integer=True)
  if cells.size <= _MOST_WORDS:
    for (row, column), value in np.ndenumerate(cells):
      if np.isfinite(value):
        axes.text(column, row, f'{value:.0f}', ha='center', va='center',
                  fontsize=7, color='white' if value < 60 else 'black')
  drawing.colorbar(image, ax=axes, shrink=0.9).ax.tick_params(labelsize=7)


def _handle(chart: series.Chart, look: names.Look) -> Any:
  if chart.kind == 'bars':
    return patches.Patch(**bar_style(look))
  return mlines.Line2D([], [], linewidth=1.8, **style(look))


def _svg(drawing: Any) -> str:
  stream = io.StringIO()
  with matplotlib.rc_context(_STYLE):
    backend_svg.FigureCanvasSVG(drawing).print_svg(
        stream, metadata={'Date': None, 'Creator': None, 'Format': None,
                          'Type': None})
  return stream.getvalue()


def _pdf(drawing: Any) -> bytes:
  stream = io.BytesIO()
  with matplotlib.rc_context({**_STYLE, 'pdf.fonttype': 42}):
    backend_pdf.FigureCanvasPdf(drawing).print_pdf(
        stream, metadata={'CreationDate': None, 'Creator': None,
                          'Producer': None})
  return stream.getvalue()


def _inner(text: str) -> str:
  """Removes from an SVG what only a file of its own needs.

  The page scales it, so a hundredth of a point is enough; ids are made unique
  by the page.
  """
  text = text[text.index('<svg'):]
  text = re.sub(r'<metadata>.*?</metadata>', '', text, flags=re.DOTALL)
  text = re.sub(r'\bd="[^"]*"', lambda found: re.sub(
      r'\d+\.\d{3,}', lambda n: f'{float(n[0]):.2f}', found[0]), text)
  return re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1', re.sub(
      r'(<svg[^>]*?) width="[^"]*"', r'\1', text, count=1), count=1)
