"""The bench as one picture: the accuracy of each row, between the bounds."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import io
import re
from typing import Any

import numpy as np

from fedjax_ssl.bench import standing
from fedjax_ssl.report.canvas import COLOURS

_MARKS = 'osD^v'  # Of the skews.
_BELOW = 25.0  # Points that the axis goes below the lower bounds.


def svg(lines: Mapping[str, Sequence[standing.Line]]) -> bytes | None:
  """Draws every row of every skew: the seeds' mean and deviation.

  Rows are sorted by the first skew. Dashed lines are labels only and all
  labels, in the colour of their skew. A row far below the bounds is an arrow at
  the left edge, so that the others stay apart.

  Args:
    lines: of each skew, as `standing.compare` gives them.

  Returns:
    The SVG file, the same bytes for the same numbers; None without any row.
  """
  names = {line.measured.entry.name: None
           for rows in lines.values() for line in rows if line.rank is not None}
  if not names:
    return None
  places = {name: -i for i, name in enumerate(names)}
  means = [line.measured.accuracy.mean() for rows in lines.values()
           for line in rows if line.rank is None]
  bounds = [mean for mean in means if np.isfinite(mean)]  # Not diverged.
  left = 100 * min(bounds) - _BELOW if bounds else -np.inf

  def draw(chart: Any, axes: Any) -> None:
    for i, (skew, rows) in enumerate(lines.items()):
      _draw(axes, skew, rows, places, i, len(lines), left)
    axes.set_yticks([*places.values()], [*places])
    axes.set_ylim(-len(names) + 0.4, 0.6)
    axes.set_xlabel('test accuracy, %; dashed: labels only and all labels; '
                    'arrow: further left')
    axes.grid(axis='x', color='#dddddd', linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[['top', 'right', 'left']].set_visible(False)
    axes.tick_params(axis='y', left=False)
    chart.legend(loc='outside upper right', ncols=len(lines), frameon=False)
  return drawn((7.2, 1.2 + 0.24 * len(names)), draw)


def drawn(size: tuple[float, float], draw: Callable[[Any, Any], None]
          ) -> bytes:
  """Makes an SVG file of one chart, the same bytes whenever it is drawn.

  Args:
    size: width and height in inches.
    draw: fills matplotlib's figure and its only axes.
  """
  import matplotlib
  from matplotlib import figure
  with matplotlib.rc_context({
      'svg.fonttype': 'none', 'svg.hashsalt': 'fedjax_ssl',
      'font.sans-serif': ['DejaVu Sans']}):  # Each text names all of them.
    chart = figure.Figure(figsize=size, layout='constrained')
    draw(chart, chart.subplots())
    file = io.BytesIO()
    chart.savefig(file, format='svg', metadata={'Date': None})
  # No indentation, and no digits beyond hundredths of a point.
  return re.sub(rb'(\.\d\d)\d+|(?m:^ +)', rb'\1', file.getvalue())


def _draw(axes: Any, skew: str, rows: Sequence[standing.Line],
          places: Mapping[str, int], which: int, count: int, left: float
          ) -> None:
  """Draws the rows of one skew, a little below those of the one before."""
  colour = COLOURS[which % len(COLOURS)]
  shift = 0.25 * ((count - 1) / 2 - which)
  for line in rows:
    if line.rank is None:
      axes.axvline(100 * line.measured.accuracy.mean(), color=colour,
                   linewidth=1, linestyle='--')
  ranked = [line for line in rows if line.rank is not None]
  values = [100 * line.measured.accuracy for line in ranked]
  means = np.array([v.mean() for v in values])
  off = np.array([np.std(v, ddof=1) if len(v) > 1 else 0 for v in values])
  heights = np.array([places[line.measured.entry.name] for line in ranked])
  heights = heights + shift
  far = means < left
  axes.plot(np.full(far.sum(), left), heights[far], '<', color=colour,
            markersize=4.5)
  means, off, heights = means[~far], off[~far], heights[~far]
  # One broken line for all deviations: the file would grow by a path a row.
  ends = np.stack([np.maximum(means - off, left), means + off,
                   np.full_like(means, np.nan)], 1)
  axes.plot(ends.ravel(), np.repeat(heights, 3), color=colour, linewidth=1.2)
  axes.plot(means, heights, _MARKS[which % len(_MARKS)], color=colour,
            markersize=4.5, label=skew)
