"""Makes the page of a report: tables that compare runs, charts, partitions."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import html
from importlib import resources
import pathlib
import re
from typing import Any, NamedTuple

from fedjax_ssl.core import disk
from fedjax_ssl.report import (
  charts,
  clients,
  interactive,
  names,
  pairs,
  series,
  stored_runs,
  summary,
  tables,
)
from fedjax_ssl.report.text import as_csv, plain
from fedjax_ssl.training import command, environment, workdir

_OWN_HEADING = ('classes', 'clients')  # All other charts are curves.


class Options(NamedTuple):
  """What a reader of a report wants to see.

  Attributes:
    targets: test accuracies to reach, as in `0.7,0.8`; None is the highest
      multiple of 0.05 that every run reaches.
    title: of the page.
    columns: metrics of the last row to show in the table too.
    reference: name of the run that the others are compared with; for '' see
      `pairs.references`.
    refresh: seconds after which a browser reloads the page; 0 is never.
  """

  targets: str | None = None
  title: str = 'Report'
  columns: Sequence[str] = ()
  reference: str = ''
  refresh: int = 0


class _Drawn(NamedTuple):
  """A chart and its small drawings: pairs of a title and SVG or HTML."""

  chart: series.Chart
  facets: list[tuple[str, str]]


def _page(runs: Sequence[stored_runs.ReportedRun], plan: names.Plan,
          grids: Mapping[str, tables.Grid], options: Options,
          left_out: Sequence[str], drawn: Sequence[_Drawn], library: str,
          partitions: Sequence[tuple[str, str]]) -> str:
  """Makes the whole report as one HTML text."""
  parts = [f'<h1>{html.escape(options.title)}</h1>',
           *_tables(grids, plan, left_out)]
  if drawn:
    parts += ['<div class="compared">', _key(runs, plan.looks), '<div>',
              *_charts(drawn, bool(library)), '</div>', '</div>']
  parts += _stills('Partitions', 'Rows of each class on each client, first '
                   'seed.', partitions)
  parts += ['<h2>To repeat them</h2>']
  for run in runs:
    made = command.program_of(run.config) or 'an experiment'
    facts = '; '.join(dict.fromkeys(
        ', '.join(f'{k} {v}' for k, v in environment.throughout(
            workdir.read_config(folder)).items()) for folder in run.folders))
    places = ', '.join(folder.name for folder in run.folders)
    parts.append(f'<details><summary>{html.escape(run.name)}: '
                 f'{html.escape(made)}</summary><pre>'
                 f'{html.escape(_command(run))}</pre>'
                 f'<p>In {html.escape(places)}. {html.escape(facts)}</p>'
                 '</details>')
  if library:
    parts += [f'<script>{library}</script>',
              f'<script>{_source("page.js")}</script>']
  again = (f'<meta http-equiv="refresh" content="{options.refresh}">\n'
           if options.refresh else '')
  return ('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
          '<meta name="viewport" content="width=device-width, '
          f'initial-scale=1">\n{again}'
          f'<title>{html.escape(options.title)}</title>\n'
          f'<style>{_source("page.css")}</style>\n</head>\n<body>\n'
          + '\n'.join(parts) + '\n</body>\n</html>\n')


def _source(name: str) -> str:
  return resources.files('fedjax_ssl.report').joinpath(name).read_text('utf-8')


def _tables(grids: Mapping[str, tables.Grid], plan: names.Plan,
            left_out: Sequence[str]) -> list[str]:
  """Makes all tables, with what they mean."""
  parts = [tables.as_html(grids['table']),
           '<p>Test accuracy, mean ± standard deviation over seeds. Minutes '
           "count compilation and all seeds. The paper's number is shown where "
           "the run's flagfile names one. * means that the run's flags differ "
           'from that flagfile, or that it is not here to be compared. "local" '
           'is the mean over the clients\u2019 own models. † marks a '
           'run that diverged, ‡ one that is hardly above the largest class; '
           'the notes say why. Bold: the best final mean, but for runs with '
           'all labels or a mark.</p>']
  if plan.others:
    parts.append('<p>The runs differ too in '
                 f'{html.escape(", ".join(plan.others))}.</p>')
  parts += [f'<p class="notes">left out: {html.escape(line)}</p>'
            for line in left_out]
  for name, title, note in (
      ('differences', 'Differences over seeds', 'Accuracy after the last round '
       'less that of the run it is compared with, in points, over the seeds '
       'that both have; with Student\u2019s t interval of 95 %, each row for '
       'itself. Not told apart: the interval holds 0.'),
      ('targets', 'Rounds and traffic to an accuracy', 'The first evaluated '
       'round that reached it; MB both ways, all clients together.'),
      ('clients', 'Who gains, who loses', "A client's accuracy is that of each "
       'class after the last round, weighed as the classes are among its own '
       'rows. Mean over the clients, mean of the worst tenth, and deviation '
       'over the clients, ± over seeds; then how many have more, or less, than '
       'with the run it is compared with.')):
    if name in grids:
      parts += [f'<h2>{title}</h2>', tables.as_html(grids[name]),
                f'<p>{note}</p>']
  return parts


def _command(run: stored_runs.ReportedRun) -> str:
  """Returns the shell command that repeats a run's seeds, without folders."""
  flags = {k: v for k, v in run.config['flags'].items() if k != 'data_dir'}
  flags |= {'seed': None, 'seeds': list(run.planned)}
  return command.for_shell(run.config, flags)


def _key(runs: Sequence[stored_runs.ReportedRun], looks: Sequence[names.Look]
         ) -> str:
  """Makes the legend beside all charts, where runs are switched on and off."""
  items = ''
  for i, run in enumerate(runs):
    look = charts.style(looks[i])
    dash = look['linestyle']
    dashes = '' if dash == '-' else (
        f' stroke-dasharray="{" ".join(str(2 * d) for d in dash[1])}"')
    items += (f'<li><label data-run="{i}"><svg viewBox="0 0 32 8" '
              f'aria-hidden="true"><path d="M0 4H32" stroke="{look["color"]}" '
              f'stroke-width="3"{dashes}/></svg>'
              f'<span>{html.escape(run.name)}</span></label></li>')
  return (f'<aside class="beside"><ul class="key">{items}</ul>'
          '<p class="switches"></p></aside>')


def _drawn(all_charts: Sequence[series.Chart], looks: Sequence[names.Look],
           live: bool) -> list[_Drawn]:
  """Makes static drawings, or the data of charts that the browser draws."""
  if not live:
    return [_Drawn(chart, [
        (facet, _own_ids(svg, f'{chart.name}-{i}-'))
        for i, (facet, svg) in enumerate(charts.inline(chart, looks))])
            for chart in all_charts]
  most = interactive.most_points(all_charts)
  return [_Drawn(chart, [
      (facet, '<div class="plot"><script type="application/json">'
       f'{interactive.figure(chart, lines, looks, most)}</script></div>')
      for facet, lines in chart.facets.items()]) for chart in all_charts]


def _charts(drawn: Sequence[_Drawn], live: bool) -> list[str]:
  """Puts the charts under their headings."""
  script = ['<noscript>These charts need JavaScript; chart_*.svg beside this '
            'page are the same ones.</noscript>'] * live
  curves = [d for d in drawn if d.chart.name not in _OWN_HEADING]
  parts = _section('Curves', 'Line: mean over seeds; band: one standard '
                   'deviation to each side, as far as the metric goes.', curves)
  for name, title, note in (
      ('classes', 'Accuracy in each class', 'After the last round.'),
      ('clients', 'Accuracy of each client', 'After the last round, from the '
       'client with the least.')):
    parts += _section(title, note, [d for d in drawn if d.chart.name == name])
  return script + parts


def _section(title: str, note: str, drawn: Sequence[_Drawn]) -> list[str]:
  """Makes a heading and its charts; nothing if there are none."""
  if not drawn:
    return []
  parts = [f'<h2>{title}</h2>', f'<p>{note}</p>', '<div class="charts">']
  for chart, facets in drawn:
    divided = len(facets) > 1
    if divided:
      parts.append(f'<div class="facets"><h3>{html.escape(chart.title)}</h3>'
                   '<div class="charts">')
    for facet, body in facets:
      parts.append(_figure(
          facet if divided else chart.title,
          ' '.join(filter(None, (title, chart.title, facet))), body))
    parts += ['</div></div>'] * divided
  return [*parts, '</div>']


def _figure(caption: str, label: str, body: str) -> str:
  """Makes one drawing, with a description for screen readers."""
  label = f' role="img" aria-label="{html.escape(label)}"'
  body = re.sub('^<(svg|div)', lambda found: found[0] + label, body)
  return (f'<figure><figcaption>{html.escape(caption)}</figcaption>{body}'
          '</figure>')


def _stills(title: str, note: str, drawings: Sequence[tuple[str, str]]
            ) -> list[str]:
  """Makes a heading and static drawings."""
  if not drawings:
    return []
  return [f'<h2>{title}</h2>', f'<p>{note}</p>', '<div class="charts">',
          *(_figure(name, f'{title}: {name}',
                    _own_ids(svg, f'{title.lower()}-{i}-'))
            for i, (name, svg) in enumerate(drawings)), '</div>']


def _own_ids(svg: str, prefix: str) -> str:
  """Makes a drawing's ids unique in the page, and drops unused ones."""
  used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
  svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{prefix}{m[1]}"'
               if m[1] in used else '', svg)
  svg = re.sub(r'(href="#|url\(#)', rf'\g<1>{prefix}', svg)
  return re.sub(r'<!--.*?-->', '', svg, flags=re.DOTALL)


def _partitions(runs: Sequence[stored_runs.ReportedRun]
                ) -> list[tuple[str, Any, dict[str, Any]]]:
  """Returns (names of its runs, drawing, class counts) of each partition."""
  users: dict[str, list[stored_runs.ReportedRun]] = {}
  for run in runs:
    key = repr((run.config['facts'].get('partition_hash'),
                run.config['flags'].get('labels')))
    users.setdefault(key, []).append(run)
  found = []
  for same in users.values():
    federation = same[0].config['facts'].get('federation')
    drawing = charts.heat_map(federation)
    if drawing is not None:
      found.append((', '.join(run.name for run in same), drawing,
                    clients.class_counts(federation)))
  return found


def _counts(kinds: Mapping[str, Any]) -> str:
  """Writes the numbers of a partition as CSV."""
  classes = max(count.shape[1] for count in kinds.values())
  return as_csv([
      ['rows', 'client', *(f'class {c}' for c in range(classes))],
      *([kind, i, *row] for kind, count in kinds.items()
        for i, row in enumerate(count.tolist()))])


def grids_of(runs: Sequence[stored_runs.ReportedRun], options: Options
             ) -> dict[str, tables.Grid]:
  """Makes the tables, by name; those without rows are left out.

  Raises:
    ValueError: for bad targets or columns, or a reference that is no run.
  """
  marks = _targets(options.targets, runs)
  against = pairs.references(runs, stored_runs.compared(runs),
                             options.reference)
  compared = pairs.compared(
      against, [] if options.reference else pairs.at_their_best(runs))
  grids = {'table': tables.main_table(runs, options.columns),
           'differences': tables.difference_table(runs, compared),
           'clients': tables.client_table(runs, against)}
  if marks:
    grids['targets'] = tables.target_table(runs, marks)
  return {name: grid for name, grid in grids.items() if grid.rows}


def texts_of(runs: Sequence[stored_runs.ReportedRun], options: Options,
             left_out: Sequence[str] = ()) -> dict[str, str | bytes]:
  """Makes all files of a report, by name.

  Raises:
    ValueError: see `grids_of`.
  """
  grids, plan = grids_of(runs, options), stored_runs.compared(runs)
  library = interactive.library()
  all_charts, partitions = series.all_charts(runs, plan), []
  texts: dict[str, str | bytes] = {'index.html': ''}  # To be written first.
  for chart in all_charts:
    texts |= _files(f'chart_{chart.name}', charts.files(chart, plan.looks),
                    series.comma_separated(chart))
  for i, (title, drawing, kinds) in enumerate(_partitions(runs), 1):
    still, made = charts.of_heat_map(drawing)
    partitions.append((title, still))
    texts |= _files(f'chart_partition_{i}', made, _counts(kinds))
  texts['index.html'] = _page(
      runs, plan, grids, options, left_out,
      _drawn(all_charts, plan.looks, bool(library)), library, partitions)
  for name, grid in grids.items():
    texts[f'{name}.md'] = tables.markdown(grid)
    texts[f'{name}.csv'] = tables.comma_separated(grid)
    texts[f'{name}.tex'] = tables.latex(grid)
  return texts


def _files(name: str, drawings: Mapping[str, bytes], numbers: str
           ) -> dict[str, str | bytes]:
  return {**{f'{name}.{ending}': data for ending, data in drawings.items()},
          f'{name}.csv': numbers}


def texts_of_good(runs: Sequence[stored_runs.ReportedRun], options: Options,
                  left_out: list[str]) -> dict[str, str | bytes]:
  """Makes the files of a report of all runs that can be shown.

  Raises:
    ValueError: for bad options, or if no run can be shown.
  """
  _targets(options.targets, runs)
  pairs.references(runs, stored_runs.compared(runs), options.reference)
  summary.check_columns(options.columns, {run.name: run.seeds for run in runs})
  try:
    return texts_of(runs, options, left_out)
  except Exception as error:  # Damaged runs fail in many ways.
    good = []
    for run in runs:
      try:
        texts_of([run], Options(title=options.title))
        good.append(run)
      except Exception as fault:
        left_out.append(f'{run.folders[0]} cannot be shown: {fault!r}.')
    if not good and left_out:
      raise ValueError(' '.join(left_out)) from error
    if not good or len(good) == len(runs):
      if isinstance(error, ValueError):
        raise
      raise ValueError(repr(error)) from error
  return texts_of(stored_runs.named(good), options, left_out)


def write(texts: Mapping[str, str | bytes], out: pathlib.Path) -> None:
  """Writes all files of a report into a folder, or leaves it as it is."""
  with disk.writing(f'--out={out}'):
    try:
      out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
      raise ValueError(f'--out={out} must be a folder; it is, or is below, a '
                       'file.') from None
    disk.replace_all(out, {
        name: text if isinstance(text, bytes) else plain(text).encode()
        for name, text in texts.items()})


def _targets(text: str | None, runs: Sequence[stored_runs.ReportedRun]
             ) -> list[float]:
  if text is None:
    guess = stored_runs.default_target(runs)
    return [guess] if guess > 0 else []
  try:
    targets = [float(word) for word in text.split(',')]
  except ValueError:
    targets = [-1.0]
  if not all(0 < t <= 1 for t in targets):
    raise ValueError(f'--target={text} must be accuracies in (0, 1], as in '
                     '0.7,0.8.')
  return targets
