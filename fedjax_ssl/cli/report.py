r"""A report of finished runs: tables, curves, bars, partitions, one page.

fedjax-ssl report runs/study/* --out=runs/study_report

A folder of runs, such as a sweep's, stands for all of them. Runs that differ in
their seeds only are one line. OUT gets `table.md`,
`table.csv`, `table.tex`, `targets.*` with rounds and bytes to a test accuracy,
and `index.html`, which is a single file and needs no network. Folders that hold
no run are passed over when others do; runs that cannot be read, or whose rows
are not those that their checkpoints were saved with, are named on stderr and on
the page. A run that goes on is shown up to its newest checkpoint.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import pathlib
import sys
from typing import Any

from fedjax_ssl.cli import arguments, places, printing, settings
from fedjax_ssl.report import page, stored_runs


def _defaults(name: str) -> Mapping[str, Any]:
  """Defaults of a setting's flags; {} of a user's own."""
  return settings.defaults_of(name) if name in settings.SETTINGS else {}


def write(folders: Sequence[pathlib.Path], out: pathlib.Path, title: str
          ) -> pathlib.Path:
  """Writes a report on runs, and returns its page."""
  left_out: list[str] = []
  runs = stored_runs.load([str(folder) for folder in folders], left_out,
                          _defaults)
  page.write(page.texts_of_good(runs, None, title, left_out, []), out)
  return out / 'index.html'


def main(argv: Sequence[str]) -> int:
  """Writes a report; returns an exit code."""
  parser = arguments.Parser('report', __doc__)
  parser.add_argument('workdirs', nargs='+', help='folders of finished runs')
  parser.add_argument('--out', required=True, help='folder to write')
  parser.add_argument('--target', help='test accuracies to reach, as in '
                      '0.7,0.8; default: the highest multiple of 0.05 that '
                      'every run reaches')
  parser.add_argument('--columns', default='', help='metrics of the last row '
                      'to show in the table too, as in macro_recall,auc')
  parser.add_argument('--title', default='Report', help='above everything')
  args = parser.parse_args(argv)
  try:
    if not args.out:
      raise ValueError('--out= is empty; name a folder.')
    left_out: list[str] = []
    runs = stored_runs.load(places.runs_in(args.workdirs), left_out,
                            _defaults)
    columns = [name for name in args.columns.split(',') if name]
    texts = page.texts_of_good(runs, args.target, args.title, left_out, columns)
    page.write(texts, pathlib.Path(args.out))
  except (ValueError, OSError) as error:
    print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
    return 2
  for line in left_out:
    print(f'left out: {line}', file=sys.stderr)
  printing.say(texts['table.md'])
  printing.say(f'Report: {pathlib.Path(args.out) / "index.html"}')
  return 0
