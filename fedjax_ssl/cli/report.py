r"""Reports finished runs on one page: tables, curves, bars, partitions.

fedjax-ssl report runs/study/* --out=runs/study_report
fedjax-ssl report runs/study --out=runs/study_report --watch

A folder of runs, such as a sweep's, stands for all of them, and for those of
the folders there. Beside a run that is the only one of its data are its bounds.
Runs that differ only in their seeds are one line; lines are named by what
differs between them. Runs of different data are not compared with each other.
OUT gets `index.html`, which is a single file and needs no network, and further
files for its tables and charts:
  table.*        accuracy; the best row is bold
  differences.*  to the first labels-only run, seed by seed, with intervals;
                 where rates or knobs vary, also of each method's best
  targets.*      rounds and bytes to a test accuracy
  clients.*      who gains and who loses
  chart_*.*      SVG, PDF, and the numbers as CSV
With the extra [report] charts answer to the mouse. Folders that hold no run are
skipped if others do; runs that cannot be read, or whose rows are not those that
their checkpoints were saved with, are named on stderr and on the page. A run
that goes on is shown up to its newest checkpoint.
"""
from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
import contextlib
import pathlib
import sys
import time

from fedjax_ssl.cli import arguments, places
from fedjax_ssl.core import checks, run_files
from fedjax_ssl.report import page, printing, stored_runs
from fedjax_ssl.running import settings

_EVERY = 30  # Seconds between two looks.
_DAY = 24 * 60 * 60  # Seconds.
_FILES = run_files.ROWS, run_files.CONFIG, 'checkpoints'


def write(folders: Sequence[pathlib.Path], out: pathlib.Path, title: str
          ) -> pathlib.Path:
  """Writes a report on runs, and returns its page."""
  _written([str(folder) for folder in folders], out, page.Options(title=title),
           [])
  return out / 'index.html'


def _written(folders: Sequence[str], out: pathlib.Path, options: page.Options,
             left_out: list[str]) -> Mapping[str, str | bytes]:
  runs = stored_runs.load(folders, left_out, settings.known_defaults)
  texts = page.texts_of_good(runs, options, left_out)
  page.write(texts, out)
  return texts


@arguments.refusing
def main(argv: Sequence[str]) -> int:
  """Writes a report; returns an exit code."""
  args = _parser().parse_args(argv)
  if args.watch is not None:
    return _watch(args)
  left_out: list[str] = []
  texts = _write(args, left_out)
  for line in left_out:
    print(f'left out: {line}', file=sys.stderr)
  for name in ('table.md', 'differences.md'):
    if name in texts:
      printing.say(str(texts[name]))
  printing.say(f'Report: {pathlib.Path(args.out) / "index.html"}')
  return 0


def _parser() -> arguments.Parser:
  parser = arguments.Parser('report', __doc__)
  parser.add_argument('workdirs', nargs='+', help='folders of finished runs')
  parser.add_argument('--out', required=True, help='folder to write')
  parser.add_argument('--target', help='test accuracies to reach, as in '
                      '0.7,0.8; default: the highest multiple of 0.05 that '
                      'every run reaches')
  parser.add_argument('--columns', default='', help='metrics of the last row '
                      'to show in the table too, as in macro_recall,auc')
  parser.add_argument('--reference', default='', help='row that the others are '
                      'compared with; default: fedavg with few labels, else '
                      'the first with few labels')
  parser.add_argument('--title', default='Report', help='above everything')
  parser.add_argument('--watch', nargs='?', type=_seconds, const=_EVERY,
                      metavar='SECONDS', help='write the report anew every so '
                      f'many seconds, {_EVERY} if not said, while runs go on; '
                      'Ctrl-C ends it')
  return parser


def _seconds(text: str) -> int:
  """Reads a whole number from 1 to those of a day.

  Raises:
    argparse.ArgumentTypeError: for any other text.
  """
  if not text.isdecimal() or not 1 <= int(text) <= _DAY:
    raise argparse.ArgumentTypeError(
        f'{text!r} must be a whole number from 1 to {_DAY}')
  return int(text)


def _write(args: argparse.Namespace, left_out: list[str], refresh: int = 0
           ) -> Mapping[str, str | bytes]:
  """Reads the runs and writes their report; returns its files.

  Raises:
    ValueError: if there is nothing to report, or an argument is wrong.
  """
  if not args.out:
    raise ValueError('--out= is empty; name a folder.')
  folders, without = places.with_bounds(places.runs_in(args.workdirs))
  if without:
    left_out.append(without)
  return _written(folders, pathlib.Path(args.out), page.Options(
      args.target, args.title, checks.words(args.columns), args.reference,
      refresh), left_out)


def _watch(args: argparse.Namespace) -> int:
  """Writes the report whenever a run has more rows, until Ctrl-C.

  An error is printed once and does not end it, as it may pass: a run may have
  no rows yet. At the end the page is written without its automatic refresh.

  Returns:
    The exit code, 1 if a page that was written could not be at the end.
  """
  index = pathlib.Path(args.out) / 'index.html'
  said, seen, shown = '', None, False
  def why_not(refresh: int, left_out: list[str]) -> str:
    try:
      _write(args, left_out, refresh)
    except (ValueError, OSError) as error:
      return checks.one_line(error)
    return ''
  with contextlib.suppress(KeyboardInterrupt):
    while True:
      now = _state(args.workdirs)
      if now != seen:
        seen, left_out = now, list[str]()
        missing = why_not(args.watch, left_out)
        shown |= not missing
        news = f'waiting: {missing}' if missing else '\n'.join(
            [f'Report: {index}', *(f'left out: {line}' for line in left_out)])
        if news != said:
          said = news
          printing.say(said, stream=sys.stderr)
      time.sleep(args.watch)
  with contextlib.suppress(KeyboardInterrupt):  # One more ends it at once.
    if (missing := why_not(0, [])) and shown:
      printing.say(f'{index} goes on renewing itself: {missing}',
                   stream=sys.stderr)
      return 1
  return 0


def _state(words: Sequence[str]) -> list[tuple[str, int, int]]:
  """Returns what changes when a run goes on: its files' sizes and times."""
  found = []
  for folder in places.with_bounds(places.runs_in(words))[0]:
    for name in _FILES:
      with contextlib.suppress(OSError):
        stat = (pathlib.Path(folder) / name).stat()
        found.append((f'{folder}/{name}', stat.st_size, stat.st_mtime_ns))
  return found
