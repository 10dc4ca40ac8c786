"""Writes the generated parts of the pages below experiments/.

python experiments/pages.py           # after new results or settings
python experiments/pages.py --check   # exit code 1 if that was forgotten

Numbers come from `experiments/results/*.json` (studies of `results.py`) and
`experiments/results/tables/*/*.json` (cells of `fedjax-ssl tables`) and the
bench's table; each has a page beside it, and the bench's best rows stand in
README.md. What an experiment asks and shows is written by hand, outside of
the marks. The table of settings is made from the scripts' docstrings and the
papers' tables.
"""
from __future__ import annotations

import ast
import collections
from collections.abc import Mapping, Sequence
import functools
import pathlib
import re
import shlex
import sys
from typing import Any

import numpy as np

from fedjax_ssl.bench import page as bench_page
from fedjax_ssl.bench import picture, plan, records, standing
from fedjax_ssl.papers import cells as papers
from fedjax_ssl.papers import results as stored_results
from fedjax_ssl.report import canvas, stored_study, summary, verdict
from fedjax_ssl.training import environment

ROOT = pathlib.Path(__file__).resolve().parent.parent
_BEGIN = '<!-- {}: made by experiments/pages.py, do not edit -->'
_END = '<!-- end of {} -->'
# On one page.
_GROWTH = 'growth_million', 'growth_million_one', 'growth_kept', 'processes'
_BENCH = f'{records.VERSION}_'  # Tables of the bench; a bed's name follows.
_BEST = ('; in brackets, where it is known, the mean of their best rounds, '
         'chosen on the test set, as papers may')
_FIRST = 'clients'  # The bed whose best rows are in README.md.
_SHOWN = 8  # Of them, the bounds included.
# The method that no paper has, and its row in which clients with labels count
# more.
_OURS = 'steadymatch', 'steadymatch_weighted'
# A study whose runs are named LINE_LABELS, and drawn as lines over the labels.
_BY_LABELS = 'private_labels'
_DASHES = '-', '--', ':'


def replaced(text: str, part: str, body: str) -> str:
  """`text` with the body between the two marks of a part.

  Raises:
    ValueError: if the marks are not there once.
  """
  begin, end = _BEGIN.format(part), _END.format(part)
  if text.count(begin) != 1 or text.count(end) != 1:
    raise ValueError(f'the marks of {part!r} must be there once')
  head, _, rest = text.partition(begin)
  return f'{head}{begin}\n\n{body.strip()}\n\n{end}{rest.partition(end)[2]}'


def results(root: pathlib.Path = ROOT) -> dict[pathlib.Path, str]:
  """The page of each study and of each paper's table that has results.

  A page that is not there yet gets its title. A study's page without marks, as
  `results.py` writes it, stays as it is.
  """
  here = root / 'experiments' / 'results'
  made = {}
  for folder in sorted((here / 'tables').glob('*')):
    if folder.is_dir() and (found := _paper_part(here, folder)):
      page = folder.with_name(folder.name + '.md')
      made[page] = _on_page(page, *found)
  for file in sorted(here.glob('*.json')):
    page = file.with_suffix('.md')
    if file.stem.startswith(_BENCH):
      made[page] = _on_page(page, f'The bench, bed `{_bed(file).name}`',
                            _bench_part(file))
    elif not page.exists() or _BEGIN.format('table') in page.read_text():
      made[page] = _on_page(page, *stored_study.table(file))
  timings = [file for name in _GROWTH
             if (file := here / 'benchmarks' / f'{name}.json').exists()]
  if timings:
    page = here / 'growth.md'
    made[page] = _on_page(
        page, 'Growth: a million clients, teachers on disk, processes',
        '\n'.join(map(_timing, timings)))
  return made


def _timing(file: pathlib.Path) -> str:
  """The table of a benchmark, and how it was measured."""
  with stored_study.reading(file) as stored:
    return _timing_of(file, stored)


def _timing_of(file: pathlib.Path, stored: Mapping[str, Any]) -> str:
  head, *rows = stored['table']
  on = stored['environment']
  words = [x for x in stored['command'] if not x.startswith('--out=')]
  def cell(value: Any) -> str:
    return f'{value:.4g}' if isinstance(value, float) else str(value)
  lines = [f'| {" | ".join(head)} |', '|---' + '|---:' * (len(head) - 1) + '|',
           *(f'| {" | ".join(map(cell, row))} |' for row in rows), '',
           f'`{" ".join(words)}`, seed '
           f'{stored["measured"].get("seed", 0)}, commit '
           f'{str(on.get("commit"))[:7]}, {on["machine"]}, load '
           f'{stored["load_average"][0]:.1f}; `benchmarks/{file.name}`.', '']
  return '\n'.join(lines)


def _on_page(page: pathlib.Path, title: str, body: str) -> str:
  """The page's text with a new table."""
  text = page.read_text() if page.exists() else (
      f'# {title}\n\n{_BEGIN.format("table")}\n\n{_END.format("table")}\n')
  return replaced(text, 'table', body)


def index(root: pathlib.Path, made: Mapping[pathlib.Path, str]) -> str:
  """A line for each page of results, by its title."""
  here = root / 'experiments' / 'results'
  texts = {page: page.read_text() for page in here.glob('*.md')
           if page.name != 'README.md'} | dict(made)
  lines = ['| page | what was run |', '|---|---|']
  for page, text in sorted(texts.items()):
    name = page.relative_to(here).as_posix()
    title = text.partition('\n')[0].removeprefix('# ').replace('|', '\\|')
    lines.append(f'| [{name.removesuffix(".md")}]({name}) | {title} |')
  return '\n'.join(lines)


def _paper_part(here: pathlib.Path, folder: pathlib.Path
                ) -> tuple[str, str] | None:
  """Title and table, the paper's numbers before ours; None without results.

  Only columns in which something has been run, and of a variant such rows.
  """
  name, _, variant = folder.name.partition('.')
  table = papers.load(name)
  stored = {}
  for cell in table.cells():
    found = stored_results.read(stored_results.file_of(
        cell, here / 'tables', variant))
    if found:
      stored[cell.name] = cell, found
  if not stored:
    return None
  known = [found for _, found in stored.values()]
  title = table.title + (f', variant `{variant}`' if variant else '')
  lines = [f'Paper / ours, {table.unit}. {table.citation}; {table.runs}. '
           'Ours: the last round, mean ± standard deviation over seeds'
           f'{_BEST if any(map(_best, known)) else ""}. '
           + _how(name, variant, known), '']
  shape = len(table.rows), len(table.columns)
  run = np.array([[table.place(i, j).name in stored
                   for j in range(shape[1])] for i in range(shape[0])])
  columns = [(j, table.columns[j])
             for j in np.flatnonzero(run.any(0)).tolist()]
  lines += ['| | ' + ' | '.join(c['title'] for _, c in columns) + ' |',
            '|---' * (len(columns) + 1) + '|']
  for i in np.flatnonzero(run.any(1) | (not variant)).tolist():
    row, places = table.rows[i], []
    for j, column in columns:
      value, std = table.value(i, j)
      text = table.text(value) + ('' if std is None else
                                  f' ± {table.text(std)}')
      cell, ours = stored.get(table.place(i, j).name, (table.place(i, j), {}))
      places.append(f'{text} / ' + (
          'stale' if stored_results.is_stale(cell, ours) else
          _ours(ours, column.get('metric', 'accuracy'),
                column.get('scale', 100))))
    lines.append(f'| {row["title"]} | ' + ' | '.join(places) + ' |')
  return title, '\n'.join([*lines, *stored_study.footnotes(
      (name, _verdicts(ours)) for name, (_, ours) in stored.items() if ours)])


def _how(name: str, variant: str, known: Sequence[dict[str, Any]]) -> str:
  """Command, commits and machines behind a table's cells."""
  flags = shlex.join(known[0]['extra_flags'])
  command = (f'`fedjax-ssl tables --table={name}'
             + (f' --variant={variant} -- {flags}' if variant else '') + '`')
  seeds = [s['environment'] for k in known for s in k['seeds'].values()]
  commits = sorted({environment.commit(e) for e in seeds})
  devices = sorted({str(e.get('devices', 'unknown')) for e in seeds})
  return f'{command}, commit {", ".join(commits)}, {", ".join(devices)}.'


def _ours(stored: dict[str, Any], metric: str, scale: float) -> str:
  """A cell's mean over its seeds, in the unit of the paper."""
  if not stored:
    return '-'
  seeds = stored['seeds'].values()
  values = ([s['final'] for s in seeds] if metric == 'accuracy'
            else [s['metrics'].get(metric) for s in seeds])
  best = _best(stored) if metric == 'accuracy' else None
  return verdict.marked(
      summary.percent(values, scale) + (
          f' ({scale * best:.1f})' if best else ''), _verdicts(stored))


def _best(stored: Mapping[str, Any]) -> float | None:
  """The mean over seeds of their best round; None if not stored for all."""
  values = [seed.get('best') for seed in stored['seeds'].values()]
  return None if None in values else float(np.mean(values))


def _verdicts(stored: Mapping[str, Any]) -> list[verdict.Verdict | None]:
  """Of a cell's seeds."""
  return [verdict.of(s['metrics']) for s in stored['seeds'].values()]


def _bed(file: pathlib.Path) -> plan.Bed:
  """The bed that a table of the bench is of.

  Raises:
    ValueError: if there is none of that name.
  """
  name, beds = file.stem.removeprefix(_BENCH), plan.beds()
  if name not in beds:
    raise ValueError(f'{file} is named after a bed {name!r}; there are '
                     f'{", ".join(beds)}')
  return beds[name]


def _bench(file: pathlib.Path) -> tuple[dict[str, records.Record], dict[
    str, list[standing.Line]]]:
  """The rows of the bench, and how they compare on each skew.

  Raises:
    ValueError: if a row is not one that the bench has today, or a bound is
      missing.
  """
  return _bench_of(file, file.read_bytes())


@functools.lru_cache(maxsize=8)  # Five tables and pictures are made of each.
def _bench_of(file: pathlib.Path, content: bytes
              ) -> tuple[dict[str, records.Record], dict[
                  str, list[standing.Line]]]:
  del content  # Part of the key: what the file holds now.
  bed, known = _bed(file), plan.entries()
  found = records.read(file, bed)
  for name, record in found.items():
    if name not in known:
      raise ValueError(f'{file} has a row {name} that no bench has')
    if keys := plan.differing(record.space, plan.space(known[name], bed)):
      raise ValueError(f'the row {name} of {file} has other '
                       f'{", ".join(keys)} than the bench')
  if missing := [name for name in (plan.ALL, plan.FEW) if name not in found]:
    raise ValueError(f'{file} has no row {" and no row ".join(missing)}')
  return found, records.compared(bed, found)


def _bench_part(file: pathlib.Path) -> str:
  """The bench's own page without its title, and what has run the rows."""
  bed = _bed(file)
  found, lines = _bench(file)
  text = bench_page.markdown(
      bed, lines, found,
      f'fedjax-ssl bench {bed.name} --out=runs/bench --data_dir=DATA')
  runs: dict[str, list[str]] = collections.defaultdict(list)
  for name, record in found.items():
    for on in record.environments.values():
      place = (f'commit {environment.commit(on)}, {on["machine"]}, '
               f'jax {on["jax"]}')
      if f'`{name}`' not in runs[place]:
        runs[place].append(f'`{name}`')
  every = {entry.name for entry in plan.chosen([], bed)}
  return '\n'.join([
      f'{len(every & {*found})} of the {len(every)} rows of this bed were run.',
      text[text.index('\n## '):].rstrip(), '', '## What has run them', '',
      *(f'- {place}: {", ".join(rows)}.' for place, rows in runs.items())])


def best_rows(file: pathlib.Path) -> str:
  """The table of the best row of each method, between the bounds."""
  _, lines = _bench(file)
  by_row: dict[str, list[standing.Line]] = collections.defaultdict(list)
  for rows in lines.values():
    for line in rows:
      by_row[line.measured.entry.name].append(line)
  def gap(name: str) -> float:
    return float(np.mean([-np.inf if line.gap is None else line.gap
                          for line in by_row[name]]))
  bounds = plan.ALL, plan.FEW
  by_gap = sorted((name for name in by_row if name not in bounds),
                  key=lambda name: (-gap(name), name))
  of_method: dict[str, str] = {}
  for name in by_gap:
    method = by_row[name][0].measured.entry.method.partition('(')[0]
    of_method.setdefault(method, name)
  best = [*of_method.values()]
  text = ['| method | ' + ' | '.join(
      f'{skew} skew | gap' for skew in lines) + ' |',
          '|---' + '|---:' * 2 * len(lines) + '|']
  for name in (plan.ALL, *best[:_SHOWN - 2], plan.FEW):
    title = name.replace('_', ' ') if name in bounds else f'`{name}`'
    text.append(f'| {title} | ' + ' | '.join(
        f'{bench_page.percent(line.measured.accuracy)} | '
        f'{bench_page.gap(line)}' for line in by_row[name]) + ' |')
  return '\n'.join(text)


def everywhere(root: pathlib.Path = ROOT) -> str:
  """The gap that each row closes on each bed and skew; the largest are bold.

  Those that have run in most places come first, then the larger mean.
  """
  here = root / 'experiments' / 'results'
  places: dict[str, dict[str, standing.Line]] = {}
  for name in plan.beds():
    file = here / f'{_BENCH}{name}.json'
    if file.exists():
      for skew, lines in _bench(file)[1].items():
        places[f'`{name}`, {skew}'] = {
            line.measured.entry.name: line for line in lines
            if line.rank is not None}
  def closed(line: standing.Line) -> float:
    return -np.inf if line.gap is None else line.gap
  gaps: dict[str, list[float]] = collections.defaultdict(list)
  for lines_of in places.values():
    for name, line in lines_of.items():
      gaps[name].append(closed(line))
  largest = {place: max(map(closed, lines_of.values()), default=0)
             for place, lines_of in places.items()}
  text = ['| method | ' + ' | '.join(places) + ' |',
          '|---' + '|---:' * len(places) + '|']
  for name in sorted(gaps, key=lambda n: (
      -len(gaps[n]), -float(np.mean(gaps[n])), n)):
    cells = []
    for place, lines_of in places.items():
      found = lines_of.get(name)
      cell = '' if found is None else bench_page.gap(found)
      first = found is not None and closed(found) == largest[place]
      cells.append(f'**{cell}**' if first else cell)
    text.append(f'| `{name}` | ' + ' | '.join(cells) + ' |')
  return '\n'.join(text)


def beside_published(root: pathlib.Path = ROOT) -> str:
  """Our own method and the best row of another method on each bed.

  By what all were tuned on, and by the test set of each skew: each time another
  row may be the best. Ours is the row of it that did best in tuning.
  """
  here = root / 'experiments' / 'results'
  text: list[str] = []
  for name, bed in plan.beds().items():
    file = here / f'{_BENCH}{name}.json'
    if not file.exists():
      continue
    found, lines = _bench(file)
    tuned = {row: max(record.tried.values()) for row, record in found.items()}
    mine = [row for row in _OURS if row in found]
    if not mine:
      continue
    ours = max(mine, key=lambda row: tuned[row])
    if not text:
      test = ' | '.join(f'test, {skew}' for skew in bed.skews)
      text = [f'| bed | row | validation, {next(iter(bed.skews))} | {test} |',
              '|---|---|---:' + '|---:' * len(bed.skews) + '|']
    cells = [_ours_and_best(ours, {
        row: np.array([share]) for row, share in tuned.items()})]
    cells += [_ours_and_best(ours, {
        x.measured.entry.name: x.measured.accuracy for x in rows})
              for rows in lines.values()]
    text.append(f'| [`{name}`]({file.stem}.md) | `{ours}` | '
                + ' | '.join(cells) + ' |')
  return '\n'.join(text)


def _ours_and_best(ours: str, shares: Mapping[str, np.ndarray]) -> str:
  """A cell: our row's accuracy, then the best other row with its accuracy."""
  mean = {row: found.mean() for row, found in shares.items()
          if np.isfinite(found).all()}
  others = [row for row in mean if row not in (plan.ALL, plan.FEW)
            and not row.startswith(_OURS[0])]
  if ours not in mean or not others:
    return '-'
  best = max(others, key=lambda row: mean[row])
  mine, other = (bench_page.percent(shares[row]) for row in (ours, best))
  if mean[ours] > mean[best]:
    mine = f'**{mine}**'
  return f'{mine}, `{best}` {other}'


def settings(root: pathlib.Path = ROOT) -> str:
  """A line for each setting."""
  lines = ['| setting | what it is | number of tables |', '|---|---|---|']
  for script in scripts(root):
    doc = ast.get_docstring(ast.parse(script.read_text())) or script.stem
    tables = collections.Counter(
        re.split(r'[\d_]', name)[0] for name, table in papers.tables().items()
        if any(c['setting'] == script.stem for c in table.columns))
    counts = ', '.join(f'{paper} {n}' for paper, n in tables.items())
    lines.append(f'| `{script.stem}` | {doc.partition(chr(10))[0]} | '
                 f'{counts} |')
  return '\n'.join(lines)


def scripts(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
  """The experiments: files that train a setting."""
  return [p for p in sorted((root / 'experiments').glob('*.py'))
          if re.search(r'^  cli\.run_setting\(', p.read_text(), re.MULTILINE)]


def pages(root: pathlib.Path = ROOT) -> dict[pathlib.Path, str]:
  """What each file should hold."""
  made = results(root)
  here = root / 'experiments'
  for file, part, body in (
      (here / 'results' / 'README.md', 'index', index(root, made)),
      (here / 'results' / 'README.md', 'beds', everywhere(root)),
      (here / 'results' / f'{_OURS[0]}.md', 'beds', beside_published(root)),
      (here / 'README.md', 'settings', settings(root)),
      (root / 'README.md', 'bench', best_rows(
          here / 'results' / f'{_BENCH}{_FIRST}.json'))):
    made[file] = replaced(made.get(file) or file.read_text(), part, body)
  return made


def by_labels(file: pathlib.Path) -> bytes:
  """Draws final accuracy against labels, a line for each name, as SVG."""
  lines: dict[str, dict[int, float]] = collections.defaultdict(dict)
  with stored_study.reading(file) as stored:
    for run in stored['runs']:
      name, _, labels = run['run'].rpartition('_')
      lines[name.replace('_', ' ')][int(labels)] = 100 * np.mean(run['final'])
  ends = [*dict.fromkeys(name.rpartition(' ')[2] for name in lines)]
  kinds = [*dict.fromkeys(name.rpartition(' ')[0] for name in lines)]

  def draw(chart: Any, axes: Any) -> None:
    for name, found in sorted(lines.items()):
      kind, _, end = name.rpartition(' ')
      axes.plot(*zip(*sorted(found.items()), strict=True), marker='o',
                markersize=4, label=name,
                color=canvas.COLOURS[kinds.index(kind) % len(canvas.COLOURS)],
                linestyle=_DASHES[ends.index(end) % len(_DASHES)])
    axes.set_xscale('log')
    ticks = sorted({x for found in lines.values() for x in found})
    axes.set_xticks(ticks, [f'{x:,}' for x in ticks], minor=False)
    axes.minorticks_off()
    axes.set_xlabel('labels')
    axes.set_ylabel('test accuracy, %')
    axes.grid(color='#dddddd', linewidth=0.6)
    axes.spines[['top', 'right']].set_visible(False)
    chart.legend(loc='outside right upper', frameon=False, fontsize='small')
  return picture.drawn((7.2, 4.2), draw)


def _draw(root: pathlib.Path) -> None:
  """Draws the pictures anew; another version of matplotlib has other bytes."""
  here = root / 'experiments' / 'results'
  for file in sorted(here.glob(f'{_BENCH}*.json')):
    if drawn := picture.svg(_bench(file)[1]):
      file.with_suffix('.svg').write_bytes(drawn)
    else:
      file.with_suffix('.svg').unlink(missing_ok=True)
  if (file := here / f'{_BY_LABELS}.json').exists():
    file.with_suffix('.svg').write_bytes(by_labels(file))


def main(argv: Sequence[str], root: pathlib.Path = ROOT) -> int:
  """Writes or checks the pages; returns an exit code."""
  if argv not in ([], ['--check']):
    print(__doc__, file=sys.stderr)
    return 2
  try:
    stale = {f: text for f, text in pages(root).items()
             if not f.exists() or f.read_text() != text}
    if not argv:
      _draw(root)
  except (ValueError, KeyError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  for file, text in stale.items():
    if argv:
      print(f'{file.relative_to(root)} is not up to date: run python '
            'experiments/pages.py', file=sys.stderr)
    else:
      file.write_text(text)
      print(f'wrote {file.relative_to(root)}')
  return 1 if stale and argv else 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
