r"""Makes one table of finished runs, with what is needed to repeat them.

fedjax-ssl results runs/study/fixmatch runs/study/uda \
    --out=experiments/results/my_study --note="which question this answers"

A folder of runs, such as a sweep's, stands for all of them, and for those of
the folders there; other files, such as logs, are skipped. Beside a run alone
are its bounds. Runs that differ only in their seeds are one row. Prints the
table; with --out writes <out>.json and <out>.md, with --epsilon also a plot.
Every number comes from the runs' own files.
"""
from __future__ import annotations

import argparse
from collections.abc import Sequence
import os
import pathlib
import sys

from fedjax_ssl.cli import arguments, places
from fedjax_ssl.core import checks, run_files
from fedjax_ssl.report import printing, study
from fedjax_ssl.running import settings


def _parser() -> argparse.ArgumentParser:
  parser = arguments.Parser('results', __doc__)
  parser.add_argument('workdirs', nargs='*', help='folders of finished runs, '
                      'or of such folders')
  parser.add_argument('--out', help='path of the table without ending; '
                      'default: it is printed only')
  parser.add_argument('--epsilon', action=argparse.BooleanOptionalAction,
                      default=False, help='also draw accuracy against epsilon, '
                      'to <out>_epsilon.png')
  parser.add_argument('--columns', default='', help='metrics of the last row '
                      'that get a column too, as in macro_recall,auc')
  parser.add_argument('--note', default='',
                      help='one line that goes above the table')
  return parser


@arguments.refusing
def main(argv: Sequence[str]) -> int:
  """Makes the table of the runs named on the command line."""
  args = _parser().parse_args(argv)
  columns = checks.words(args.columns)
  if not args.workdirs:
    raise ValueError('name at least one finished run.')
  if args.out == '':
    raise ValueError('--out= is empty; name a table, or leave it out.')
  if args.epsilon and not args.out:
    raise ValueError('--epsilon draws to <out>_epsilon.png; give --out.')
  named = places.runs_in(args.workdirs)
  folders, without = places.with_bounds(named)
  left_out: list[str] = []
  runs = study.load(folders, left_out)
  read = {os.path.normpath(place) for run in runs for place in run.folders}
  # One of many runs may be left out, or a bound that nobody asked for.
  if any(os.path.normpath(place) not in read for place in folders
         if place in args.workdirs or folders == [place]):
    raise ValueError(' '.join(left_out))
  rows = study.rows_of(runs, columns)
  text = study.markdown(rows, args.note, settings.known_defaults)
  if args.out:
    out = pathlib.Path(args.out)
    if out.suffix in ('.json', '.md'):
      out = out.with_suffix('')
    run_files.check_free(out.parent / f'{out.name}.json')
    if args.epsilon:  # First, as it may be refused.
      study.draw_epsilon(out, runs)
    study.write(out, rows, text, args.note)
  printing.say(text)
  for line in filter(None, [without, *left_out]):
    printing.say(f'left out: {line.rstrip(".")}', stream=sys.stderr)
  return 0
