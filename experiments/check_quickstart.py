"""Compares a finished quickstart with its table in the results.

python experiments/check_quickstart.py runs/quickstart
python experiments/check_quickstart.py runs/quickstart --picture

Exit code 1 if a mean or a deviation is not within a point of the table's, if
FixMatch is not clearly above labels only, or if it is not stable over seeds.
With --picture a run that passes is drawn for experiments/results/README.md as
well.
"""
from __future__ import annotations

from collections.abc import Sequence
import pathlib
import re
import sys

import numpy as np

from fedjax_ssl.report import canvas, printing, summary
from fedjax_ssl.training import metrics

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / 'experiments' / 'results'
PAGE = RESULTS / 'README.md'
PICTURE = RESULTS / 'quickstart.svg'
# Rows of the table, by how they begin, and their folders below the run's.
ROWS = {'FixMatch': '.', 'labels only': 'labels_few',
        'all labels': 'labels_all'}
_TOLERANCE = 1.0  # Points; a machine of another kind rounds otherwise.
_GAIN = 1.5  # Points that FixMatch must be above labels only.
_SPREAD = 1.5  # Points below which its deviation must be.

Numbers = dict[str, tuple[float, float]]  # By row: mean and deviation, %.


def printed(text: str) -> Numbers:
  """What the page's table says.

  Raises:
    ValueError: if a row is not there once.
  """
  found = {}
  for name in ROWS:
    cells = re.findall(
        rf'^\| {name}[^|\n]*\| (\d+\.\d+) ± (\d+\.\d+) % \|$', text,
        re.MULTILINE)
    if len(cells) != 1:
      raise ValueError(f'{PAGE} must have one row {name!r} with a mean and a '
                       f'deviation; it has {len(cells)}.')
    found[name] = float(cells[0][0]), float(cells[0][1])
  return found


def measured(folder: pathlib.Path) -> Numbers:
  """What a run and its bounds came to.

  Raises:
    ValueError: if one is not there, or has a single seed.
  """
  found = {}
  for name, place in ROWS.items():
    finals = [summary.summary(rows)['final'] for rows in summary.by_seed(
        metrics.read(folder / place))]
    if len(finals) < 2 or None in finals:
      raise ValueError(f'{folder / place} holds no accuracies of several '
                       'seeds.')
    found[name] = 100 * float(np.mean(finals)), 100 * float(
        np.std(finals, ddof=1))
  return found


def faults(ours: Numbers, told: Numbers) -> list[str]:
  """A line for each thing that is not as it should be."""
  lines = []
  for name, numbers in ours.items():
    for what, mine, theirs in zip(('mean', 'deviation'), numbers, told[name],
                                  strict=True):
      # Not `>`, so that NaN is a fault; the table has two digits.
      if not abs(mine - theirs) <= _TOLERANCE + 0.005:
        lines.append(f"{name}: the {what} is {mine:.2f}, the table's "
                     f'{theirs:.2f}, more than {_TOLERANCE} apart')
  gain = ours['FixMatch'][0] - ours['labels only'][0]
  if not gain >= _GAIN:
    lines.append(f'FixMatch is {gain:.2f} points above labels only, which '
                 f'should be {_GAIN} at least')
  if not ours['FixMatch'][1] < _SPREAD:
    lines.append(f'FixMatch deviates by {ours["FixMatch"][1]:.2f} points over '
                 f'seeds, which should be below {_SPREAD}')
  return lines


def draw(folder: pathlib.Path, picture: pathlib.Path) -> None:
  """Draws the accuracies of a run and its bounds, as an SVG file."""
  import matplotlib
  runs = summary.load({name: [folder / place] for name, place in ROWS.items()})
  # The same run makes the same bytes.
  with matplotlib.rc_context({'svg.hashsalt': 'fedjax_ssl'}):
    canvas.write(summary.curves(runs, panels=('accuracy',)), picture)
  text = picture.read_text('utf-8')
  text = re.sub(r'\n *<metadata>.*?</metadata>', '', text, flags=re.DOTALL)
  picture.write_text(text, 'utf-8')


def main(argv: Sequence[str], picture: pathlib.Path = PICTURE) -> int:
  """Checks one run, and draws it if asked to; returns an exit code."""
  if not argv or argv[1:] not in ([], ['--picture']):
    print(__doc__, file=sys.stderr)
    return 2
  try:
    found = faults(measured(pathlib.Path(argv[0])),
                   printed(PAGE.read_text(encoding='utf-8')))
  except (ValueError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  for line in found:
    print(line, file=sys.stderr)
  if not found:
    printing.say("The quickstart's table is the stored one, within a point.")
    if argv[1:]:
      draw(pathlib.Path(argv[0]), picture)
      printing.say(f'wrote {picture}')
  return 1 if found else 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
