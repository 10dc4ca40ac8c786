"""What privacy costs: accuracy against the epsilon that was spent."""
from __future__ import annotations

from collections.abc import Sequence
import os
from typing import Any

import numpy as np

from fedjax_ssl.report import canvas, summary, verdict

_FAR_APART = 50  # Largest over smallest epsilon.
_LEVEL: Any = (0, (8, 2, 1, 2))  # A dash that no path has.


def path_of(rows: Sequence[summary.Row]) -> tuple[np.ndarray, np.ndarray]:
  """Returns epsilon and accuracy, float64[R] each, of rows that have both."""
  pairs = [(row['epsilon'], row['accuracy']) for row in rows
           if row.get('epsilon') is not None
           and row.get('accuracy') is not None]
  both = np.array(pairs, np.float64).reshape(-1, 2)
  return both[:, 0], both[:, 1]


def plot(runs: summary.Runs, path: str | os.PathLike[str]) -> None:
  """Draws accuracy against epsilon for every seed, over its evaluations.

  A run without epsilon is a level line at its mean final accuracy: what there
  would be without privacy. Runs that diverged or guess are marked. If the
  budgets are far apart the axis of epsilon is logarithmic.

  Args:
    runs: by name, one list of rows for each seed, as `summary.load` gives.
    path: file to write; its ending chooses the format.

  Raises:
    ValueError: if no run has spent any epsilon.
  """
  from matplotlib import figure
  chart = figure.Figure(figsize=(6.6, 4.2), layout='constrained')
  axes = chart.subplots()
  ends: list[float] = []
  found: list[list[verdict.Verdict | None]] = []
  for i, (name, seeds) in enumerate(runs.items()):
    look = canvas.line(i)
    paths = [path_of(rows) for rows in seeds]
    found.append([verdict.of(rows[-1]) for rows in seeds])
    title_of = verdict.marked(name, found[-1])
    if not any(x.size for x, _ in paths):
      level = [r for r in (summary.summary(rows)['final'] for rows in seeds)
               if r is not None]
      if level:
        axes.axhline(100 * np.mean(level), color=look['color'], linewidth=1.4,
                     linestyle=_LEVEL, label=title_of)
      continue
    ends += [x[-1] for x, _ in paths if x.size]
    for j, (x, y) in enumerate(paths):
      axes.plot(x, 100 * y, **look, linewidth=1.2, alpha=0.8,
                label='' if j else title_of)
      axes.plot(x[-1:], 100 * y[-1:], 'o', color=look['color'])
  if not ends:
    raise ValueError(f'None of the runs {", ".join(runs)} has an epsilon.')
  if max(ends) > _FAR_APART * min(ends):
    axes.set_xscale('log')
  axes.set_xlabel('epsilon spent')
  axes.set_ylabel('test accuracy, %')
  canvas.ground(axes)
  chart.legend(loc='outside right upper', frameon=False, fontsize='small',
               title='\n'.join(verdict.legend(found)), title_fontsize='small')
  canvas.as_they_are(chart)
  canvas.write(chart, path)
