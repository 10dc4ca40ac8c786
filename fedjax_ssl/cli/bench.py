r"""Compares methods on a bed of the bench: tunes all alike, then tests them.

fedjax-ssl bench clients --out=runs/bench
fedjax-ssl bench clients fixmatch feddure --out=runs/bench
fedjax-ssl bench clients 'fixmatch(threshold=[0.9, 0.5])' --out=runs/bench
fedjax-ssl bench clients --out=runs/bench --status
fedjax-ssl bench clients ./mine.py:mine --out=runs/mine --stored=clients.json
fedjax-ssl bench clients fixmatch --out=runs/look --configurations=1 -- \
    --num_rounds=20  # A look: one configuration of each row, short runs.

Row by row, both bounds first: every configuration of a row is run on one seed,
then the one with the best validation accuracy on the other seeds. OUT/BED.md
and OUT/BED.json hold the table and are written anew after each row, pictures
at the end. The same command again continues after an interruption of any kind
and skips what is finished; later commands with other rows add to the same
table. A method with knobs, or of your own, becomes a row of its own. Of it the
learning rate is tuned, and each knob that lists values, the default first. Most
rows have the knob weighting='uniform'.

Rows of a BED.json that an earlier bench has written enter the table by --stored
and stay in it; a row that is finished in OUT itself stays what it is. A stored
row is run again only if its method, the file or module of your own code, or
what is tuned has changed. The library's own commit is not compared: the page of
the stored results names each row's. Rows of other data are refused, where they
record them. Flags after `--` change every run; the page then says that it is
not the bench, and later commands for this folder must have the same. `--status`
takes them and --configurations from the folder where they are not given, and
refuses a folder that is not there, unless rows are stored. Exit code 1: some
run failed, and its row stands only where it has a result; 2: refused; 75: a
fault that may pass, such as a full disk; 130, 143 and 129: ended by SIGINT,
SIGTERM and SIGHUP.
"""
from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
import functools
import pathlib
import shlex
import sys
from typing import NamedTuple

import numpy as np

from fedjax_ssl import config, data
from fedjax_ssl.bench import page, picture, plan, records, standing, tables
from fedjax_ssl.cli import arguments, bench_flags, bench_runs
from fedjax_ssl.cli.check_methods import vouch
from fedjax_ssl.cli.sweep import cells as cells_lib
from fedjax_ssl.cli.sweep import slots
from fedjax_ssl.core import checks, disk, imports, knobs, registry, run_files
from fedjax_ssl.report import canvas, printing, summary
from fedjax_ssl.running import settings
from fedjax_ssl.training import environment, workdir


class _Data(NamedTuple):
  """What the bench needs of the data set."""

  labels: np.ndarray  # int[D], classes of all training rows.
  digest: str  # As runs store it.


@arguments.refusing
def main(argv: Sequence[str]) -> int:
  """Runs the bench; returns the exit code."""
  words = list(argv)
  cut = words.index('--') if '--' in words else len(words)
  args = _arguments(words[:cut])
  try:
    bench = _Bench(args, tuple(words[cut + 1:]))
    if args.dry_run or args.status:
      printing.say(bench.commands() if args.dry_run else bench.status())
      if args.dry_run:
        print(bench.extent(), file=sys.stderr)
      elif not bench.has_begun():
        print(f'Note: --out={args.out} holds nothing of the bed {args.bed} '
              'yet.', file=sys.stderr)
      return 0
    bench.check_data()
    bench.keep_changed()
    return bench.run()
  except OSError as error:
    place, out = pathlib.Path(str(error.filename or args.out)), args.out
    if not place.absolute().is_relative_to(pathlib.Path(out).absolute()):
      raise  # It names the file.
    inside = '' if place == pathlib.Path(out) else f'{place}: '
    raise ValueError(f'--out={out} cannot be used: {inside}'
                     f'{error.strerror or error}.') from error


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
  passed = {*map(checks.flag, config.OPTIONS)} - {*bench_flags.OWN}
  parser = arguments.Parser('bench', __doc__, passes_on=passed)
  parser.usage = ('%(prog)s BED [ROW ...] --out=OUT [--NAME=VALUE ...] '
                  '[-- --flag=value ...]')
  # Both may be missing, so that one message names both.
  parser.add_argument('bed', metavar='BED', nargs='?',
                      help=f'one of {", ".join(plan.beds())}')
  parser.add_argument('rows', nargs='*', default=[], metavar='ROW',
                      help='a row of the bench, or a method with knobs; '
                      'default: all rows')
  parser.add_argument('--out', help='folder of all runs')
  parser.add_argument('--slots', type=int, default=1,
                      help='runs at a time, each on its share of the '
                      'cores and of NVIDIA GPUs (default: 1)')
  parser.add_argument('--configurations', type=int, metavar='N',
                      help=f'tried of a row (default: {plan.CONFIGURATIONS})')
  parser.add_argument('--stored', metavar='FILE', action='append', default=[],
                      help='the BED.json of an earlier bench; its rows are not '
                      'run again; of several files the first with a row counts')
  parser.add_argument('--data_dir', help='as of `fedjax-ssl train`')
  parser.add_argument('--python', default=sys.executable,
                      help='interpreter of the runs (default: this one)')
  parser.add_argument('--dry_run', action='store_true',
                      help='print the commands of all tries, of stored rows '
                      'those that repeat them, and stop')
  parser.add_argument('--status', action='store_true',
                      help='print where each row stands and stop')
  args = parser.parse_intermixed_args(argv)
  given = {'BED': args.bed, '--out': args.out}
  if missing := [name for name, value in given.items() if value is None]:
    parser.error('the following arguments are required: '
                 f'{", ".join(missing)}')
  return args


class _Bench:
  """A bed, its rows, and the folder where their runs are."""

  def __init__(self, args: argparse.Namespace, changed: tuple[str, ...]):
    """Raises ValueError for what cannot be run."""
    beds = plan.beds()
    if args.bed not in beds:
      raise ValueError(f'BED={args.bed} must be one of {", ".join(beds)}.')
    if not args.out:
      raise ValueError('--out= is empty; name a folder.')
    if args.data_dir == '':
      raise ValueError('--data_dir= is empty; name a folder or leave it out.')
    self._bed, self._out = beds[args.bed], pathlib.Path(args.out)
    for place in (self._out, *self._out.parents):
      if place.exists() and not place.is_dir():
        raise ValueError(f'--out={args.out} cannot be used: {place} is no '
                         'folder.')
    # A misspelt folder must not look as if all work were lost.
    if args.status and not args.stored and not self._out.is_dir():
      near = checks.near(self._out.name, (
          file.parent.name for file in self._out.parent.glob(
              f'*/{self._table.name}')))
      raise ValueError(f'--out={args.out} is no folder: no bench has been run '
                       f'there.{near}')
    if args.configurations is None:
      args.configurations = (records.configurations(self._table) if args.status
                             else plan.CONFIGURATIONS)
    for name in ('slots', 'configurations'):
      if getattr(args, name) < 1:
        raise ValueError(f'--{name}={getattr(args, name)} must be at least 1.')
    arguments.check_passed(changed, bench_flags.OWN, 'the bench')
    self._args = args
    self._told: set[str] = set()  # Damage that a line has told.
    self._changed = bench_flags.given(self._out, changed,
                                      looking=args.status)
    self._runs = bench_runs.Runs(self._bed, self._out, args.configurations,
                                 self._changed, args.data_dir)
    from fedjax_ssl import methods  # Every method; --help can do without.
    self._entries = plan.chosen(args.rows, self._bed)
    for entry in self._entries:
      for method in plan.methods_of(entry):
        try:
          knobs.check('ROW', method, methods.METHODS)
        except checks.FieldError as error:  # ROW is no flag.
          raise ValueError(f'ROW={method}: {error.reason}') from error
    self._check_code()
    self._stored = self._needing_no_run()
    vouch(self._to_run(), self._bed, self._changed)
    cells_lib.check_flags(args.python, [
        self._runs.cell(plan.search_run(entry, self._bed, configuration))
        for entry in self._to_run()
        for configuration in self._runs.tries(entry)], {})

  def _check_code(self) -> None:
    """Raises ValueError if a row has runs here with other code of one's own."""
    instead = 'give another folder, or the function another name.'
    for entry in self._entries:
      code, placed = (plan.space(entry, self._bed).get('code'),
                      imports.split(entry.method))
      if placed is None or not code:
        continue
      for file in self._out.glob(
          f'{self._bed.name}__{entry.name}__*/{run_files.CONFIG}'):
        flags = cells_lib.config_of(file.parent, 'flags')
        if not flags:
          continue  # Damaged: it is refused when its turn comes.
        method = str(flags.get('method'))
        was, known = imports.split(method), cells_lib.config_of(
            file.parent, 'facts').get('code', {})
        if was is None or was.place != placed.place:
          raise ValueError(
              f'--out={self._args.out} holds runs of {entry.name} from '
              f'{was.place if was else method}, not {placed.place}; {instead}')
        if known and code not in known.values():
          raise ValueError(
              f'{entry.name} in --out={self._args.out} was run with an earlier '
              f'version of {placed.place}; {instead}')

  def _needing_no_run(self) -> dict[str, records.Record]:
    """Reads the rows of tables that need no run here.

    Returns:
      By name the rows of stored tables, except those that are finished in the
      folder. Such a row is there itself if its runs are gone.

    Raises:
      FieldError: if a table cannot be read, or a row is of other data.
    """
    kept = self._kept(say=True)
    mine = {name: record for name, record in kept.items() if not record.stored}
    known = self._known_data
    found: dict[str, records.Record] = {}
    for text in self._args.stored:
      file = pathlib.Path(text)
      if self._table.exists() and file.exists() and file.samefile(self._table):
        continue
      for name, record in self._reader.read(file).items():
        if name in found:
          continue
        if name in kept and (keys := plan.differing(
            kept[name].space, record.space)):
          tables.say_lost(name, file, keys, f'in {self._table}')
          continue
        tables.check_data(file, name, record.data.values(), known)
        found[name] = record._replace(
            stored=record.stored or tables.last_two(file))
    found = {name: record for name, record in kept.items()
             if record.stored} | found
    return {name: self._whole(mine.get(name)) or record
            for name, record in found.items()
            if name not in self._known or not self._runs.is_finished(
                self._known[name])}

  def _whole(self, record: records.Record | None) -> records.Record | None:
    """Returns a record if it has all skews, else None."""
    return record if record and {*record.measured} == {*self._bed.skews} else (
        None)

  @functools.cached_property
  def _known_data(self) -> dict[str, tuple[str, str]]:
    """The hash of the data of all rows and runs: a row of it, and its place.

    Raises:
      ValueError: if they are of several.
    """
    found: dict[str, tuple[str, str]] = {}
    for name, record in self._kept().items():
      tables.check_data(self._table, name, record.data.values(), found)
    for file in self._out.glob(
        f'{self._bed.name}__*/{run_files.CONFIG}'):
      # A run whose file is damaged is refused when its turn comes.
      if digest := cells_lib.config_of(file.parent, 'facts').get('data_hash'):
        tables.check_data(file.parent, file.parent.name.split('__')[1],
                          [digest], found, 'out')
    return found

  @functools.cached_property
  def _known(self) -> dict[str, plan.Entry]:
    """All rows of the bed and those that were asked for, by name."""
    return {e.name: e for e in (
        *plan.chosen((), self._bed), *self._entries)}

  @functools.cached_property
  def _reader(self) -> tables.Reader:
    return tables.Reader(self._bed, self._args.configurations, self._changed,
                         self._known)

  @property
  def _table(self) -> pathlib.Path:
    """The folder's own table."""
    return self._out / f'{self._bed.name}.json'

  def _kept(self, say: bool = False) -> dict[str, records.Record]:
    """Reads the rows of the folder's own table that count.

    Args:
      say: whether to print a line for each row that does not.

    Returns:
      The rows by name; {} if it is no table of this bench.
    """
    try:
      return self._reader.read(self._table, whole=False, say=say)
    except checks.FieldError:
      return {}

  def check_data(self) -> None:
    """Raises ValueError for data that are not there, or not a table's.

    Without this check five runs would find so, one after the other.
    """
    if not self._to_run():
      return
    ours = self._data.digest
    for digest, (name, place) in self._known_data.items():
      if digest != ours:
        raise ValueError(
            f'The row {name} of {place} was run on other data than the runs '
            'here would be: rows of both cannot be compared.')

  def keep_changed(self) -> None:
    """Stores in the folder the flags that its runs have besides the bed's."""
    (self._out / '.sweep').mkdir(parents=True, exist_ok=True)
    bench_flags.keep(self._out, self._changed)
    self._reader.keep(self._table)

  def commands(self) -> str:
    """Returns the commands of all tries; later runs depend on their results.

    Of stored rows, which are not run, they are those of the final seeds.
    """
    runs = [run for entry in self._entries
            for run in self._runs.first(entry, self._stored.get(entry.name))]
    return '\n'.join(shlex.join(cells_lib.command(
        self._args.python, self._out, self._runs.cell(run))) for run in runs)

  def extent(self) -> str:
    """Says how many runs these are, and how many follow."""
    rows = self._to_run()
    tries = sum(len(self._runs.tries(entry)) for entry in rows)
    finals = len(rows) * len(self._bed.skews)
    known = len(self._entries) - len(rows)
    return (f'Rows: {len(rows)}. Tries: {tries}. Then the best of each row: '
            f'{finals} runs of {len(plan.SEEDS)} seeds.' + bool(known) *
            f' Shown are also the runs that repeat {known} stored rows.')

  def status(self) -> str:
    """Returns a line for each row: its tries, the choice, its final seeds.

    Without names of rows, those of your own that the folder has come last.
    """
    said = {name: self._where(record)
            for name, record in self._stored.items()}
    lines = [f'{e.name:24} {said.get(e.name) or self._runs.progress(e)}'
             for e in self._entries]
    if not self._args.rows:
      others = dict.fromkeys(self._runs.names() - {*self._known},
                             'has runs here; name it to see more')
      others |= {name: self._where(record)
                 for name, record in self._kept().items()
                 if name not in self._known}
      lines += [f'{name:24} {said}' for name, said in sorted(others.items())]
    return '\n'.join(lines)

  def has_begun(self) -> bool:
    """Returns whether the folder has a table or runs of this bed."""
    return self._table.exists() or any(
        self._out.glob(f'{self._bed.name}__*'))

  def _where(self, record: records.Record) -> str:
    """Says in which table a record is, and what was chosen."""
    said = f'in {record.stored or self._table.name}'
    for best in record.measured.values():
      return f'{said}, {bench_runs.choice(best.entry, best.configuration)}'
    return said  # No seed has come to an end.

  def run(self) -> int:
    """Runs all rows; returns the exit code."""
    worst, lines = 0, self._write()
    rows = self._to_run()
    for number, entry in enumerate(rows, 1):
      title = f'row {number} of {len(rows)}, {entry.name}'
      code = self._sweep(f'{title}, tries', (
          plan.search_run(entry, self._bed, configuration)
          for configuration in self._runs.tries(entry)))
      if code == 0:
        try:
          best = standing.choose(self._runs.tried(entry))
        except ValueError as error:  # Damaged rows stop no other.
          print(f'error: {entry.name}: {error}', file=sys.stderr)
          code = 1
        else:
          code = self._sweep(f'{title}, final seeds',
                             self._runs.finals(entry, best))
      if code > 1:
        return code
      worst = max(worst, code)
      lines = self._write()
    self._draw(lines)
    printing.say((self._out / f'{self._bed.name}.md').read_text('utf-8'))
    return worst

  def _to_run(self) -> list[plan.Entry]:
    """Returns the rows that were asked for and that no file has."""
    return [e for e in self._entries if e.name not in self._stored]

  def _sweep(self, title: str, runs: Iterable[plan.Run]) -> int:
    cells = [self._runs.cell(run) for run in runs]
    if all(cells_lib.is_done(self._out, cell) for cell in cells):
      return 0
    return slots.Sweep(self._out, cells, num_slots=self._args.slots, retries=1,
                       python=self._args.python, env={}, title=title).run()

  def _found(self, entry: plan.Entry) -> records.Record | None:
    """Returns a row whose configurations were all tried, or None.

    None is a row of which some run is damaged, too, which a line says.
    """
    if entry.name in self._stored:
      return self._stored[entry.name]
    try:
      return self._measured(entry)
    except ValueError as error:
      if str(error) not in self._told:
        self._told.add(str(error))
        print(f'left out: {entry.name}: {error}', file=sys.stderr)
      return None

  def _measured(self, entry: plan.Entry) -> records.Record | None:
    """Reads a row's runs; see `_found`. Raises ValueError for damaged ones."""
    tried = self._runs.tried(entry)
    if len(tried) < len(self._runs.tries(entry)):
      return None
    best = standing.choose(tried)
    measured, environments, digests = {}, {}, {}
    for skew in self._bed.skews:
      run = plan.final_run(entry, self._bed, skew, best)
      if self._runs.done(run):
        folder = self._out / run.name
        measured[skew] = standing.measure(
            folder, entry, best, self._data.labels)
        config = workdir.read_config(folder)
        environments[skew] = environment.throughout(config)
        if digest := config['facts'].get('data_hash'):
          digests[skew] = digest
    return records.Record(
        plan.space(entry, self._bed), {c.number: v for c, v in tried}, measured,
        environments, data=digests)

  def _write(self) -> dict[str, list[standing.Line]]:
    """Writes the table of all rows that are finished, and returns it."""
    with disk.exclusive(self._out / '.sweep' / f'{self._bed.name}.table'):
      return self._written()

  def _written(self) -> dict[str, list[standing.Line]]:
    found = {name: record for name, entry in self._known.items()
             if (record := self._found(entry)) is not None}
    # Another bench may have added rows meanwhile, and runs may be gone.
    for name, record in {**self._kept(), **self._stored}.items():
      new = found.get(name, record).with_skews_of(record)
      # What was finished stays until what is run anew is finished too.
      found[name] = self._whole(new) or self._whole(record) or new
    lines = records.compared(self._bed, found)
    text = page.markdown(
        self._bed, lines, found, self._command(), self._args.configurations,
        self._changed,
        {e.name: (len(self._runs.done_tries(e)), len(self._runs.tries(e)))
         for e in self._entries if e.name not in found})
    stored = records.written(self._bed, lines, found,
                             self._args.configurations, self._changed)
    disk.replace_all(self._out, {f'{self._bed.name}.md': text.encode(),
                                 f'{self._bed.name}.json': stored.encode()})
    return lines

  def _draw(self, lines: Mapping[str, Sequence[standing.Line]]) -> None:
    """Draws all rows in one picture, and the best rows' curves of each skew."""
    file = self._out / f'{self._bed.name}.svg'
    if drawn := picture.svg(lines):
      disk.replace(file, drawn)
    else:
      file.unlink(missing_ok=True)
    for skew, rows in lines.items():
      curves = {row.measured.entry.name: row.measured.evaluations()
                for row in page.drawn(rows)}
      if curves:
        canvas.write(summary.curves(curves, panels=('accuracy',)),
                     self._out / f'{self._bed.name}_{skew}.svg')

  def _command(self) -> str:
    """Returns the command that goes on with this table."""
    args = self._args
    given = [f'--out={args.out}']
    if args.configurations != plan.CONFIGURATIONS:
      given.append(f'--configurations={args.configurations}')
    given += [f'--stored={file}' for file in args.stored]
    if args.data_dir:
      given.append('--data_dir=DATA')
    if self._changed:
      given += ['--', *self._changed]
    return shlex.join(
        ['fedjax-ssl', 'bench', self._bed.name, *args.rows, *given])

  @functools.cached_property
  def _data(self) -> _Data:
    """Reads the bed's data set."""
    from fedjax_ssl.running import job
    for place in settings.imported(self._changed):
      registry.import_place(place)  # It may register the data set.
    flags = {**self._bed.flags, **dict(bench_flags.pairs(self._changed))}
    found = data.load(flags['dataset'],
                      self._args.data_dir or flags.get('data_dir'),
                      split=flags['split'], embeddings=flags.get('embeddings'))
    return _Data(np.asarray(found.train.labels), job.data_hash(found))
