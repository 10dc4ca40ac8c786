"""A report of finished runs: tables, curves, bars and partitions, one page."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import html
import pathlib
import re

from fedjax_ssl.report import charts, command, stored_runs, tables
from fedjax_ssl.report.text import plain
from fedjax_ssl.training import disk

# Curves, in this order, of those that some run has.
PANELS = ('accuracy', 'loss', 'val_accuracy', 'local_accuracy', 'train_loss',
          'mask_rate', 'pseudo_label_accuracy', 'epsilon')
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem;
  max-width: 70rem; color: #1a1a1a; background: #fff; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; overflow-wrap: normal; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: left;
  vertical-align: top; }
thead th { border-bottom: 2px solid #888; }
tbody th, thead th:first-child { position: sticky; left: 0;
  background: #fff; }
tbody th { min-width: 8rem; max-width: 18rem; overflow-wrap: anywhere; }
.notes { font-size: .9rem; }
@media (max-width: 40rem) { table { font-size: .8rem; }
  th, td { padding: .25rem .4rem; }
  tbody th { min-width: 5rem; max-width: 8rem; } }
th.n { text-align: right; }
td.n { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.charts { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; display: block; }
ul.key { list-style: none; padding: 0; display: flex; flex-wrap: wrap;
  gap: .2rem 1.2rem; }
ul.key svg { display: inline-block; width: 2rem; height: .6rem; }
pre { overflow-x: auto; background: #f5f5f5; padding: .6rem; }
"""


def page(runs: Sequence[stored_runs.Run], targets: Sequence[float],
         title: str, left_out: Sequence[str] = (),
         columns: Sequence[str] = ()) -> str:
  """The whole report as one HTML text."""
  main = tables.as_html(tables.main_table(runs, columns))
  parts = [f'<h1>{html.escape(title)}</h1>', _key(runs), main,
           '<p>Test accuracy, mean ± standard deviation over seeds. Minutes '
           "count compilation and all seeds. The paper's number is shown where "
           "the run's flagfile names one. * means that the run's flags differ "
           'from that flagfile, or that it is not here to be compared. "local" '
           'is the mean over the clients\u2019 own models. † marks a '
           'run that diverged, ‡ one that is hardly above the largest class; '
           'the notes say why.</p>']
  parts += [f'<p class="notes">left out: {html.escape(line)}</p>'
            for line in left_out]
  if targets:
    parts += ['<h2>Rounds and traffic to an accuracy</h2>',
              tables.as_html(tables.target_table(runs, targets)),
              '<p>The first evaluated round that reached it; MB both ways, all '
              'clients together.</p>']
  drawings = [(panel.replace('_', ' '), charts.curves(runs, panel))
              for panel in PANELS]
  drawings.append(('accuracy against traffic',
                   charts.communication(runs)))
  parts += _section('Curves', 'Line: mean over seeds; band: one standard '
                    'deviation to each side.', drawings)
  parts += _section('Accuracy in each class', 'After the last round.', [
      (run.name, charts.per_class(run, i))
      for i, run in enumerate(runs)])
  parts += _section('Partitions', 'Rows of each class on each client, first '
                    'seed.', list(_partitions(runs)))
  parts += ['<h2>To repeat them</h2>']
  for run in runs:
    made = command.program_of(run.config) or 'an experiment'
    facts = ', '.join(f'{k} {v}' for k, v in run.config['environment'].items())
    parts.append(f'<details><summary>{html.escape(run.name)}: '
                 f'{html.escape(made)}</summary><pre>'
                 f'{html.escape(_command(run))}</pre>'
                 f'<p>{html.escape(facts)}</p></details>')
  return ('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
          '<meta name="viewport" content="width=device-width, '
          f'initial-scale=1">\n<title>{html.escape(title)}</title>\n'
          f'<style>{_STYLE}</style>\n</head>\n<body>\n'
          + '\n'.join(parts) + '\n</body>\n</html>\n')


def _command(run: stored_runs.Run) -> str:
  """What makes all seeds of a run again, for a shell; but for its folders."""
  flags = {k: v for k, v in run.config['flags'].items() if k != 'data_dir'}
  flags |= {'seed': None, 'seeds': list(run.planned)}
  return command.for_shell(run.config, flags)


def _key(runs: Sequence[stored_runs.Run]) -> str:
  """The legend, once for all charts."""
  items = ''
  for i, run in enumerate(runs):
    look = charts.style(i)
    dash = look['linestyle']
    dashes = '' if dash == '-' else (
        f' stroke-dasharray="{" ".join(str(2 * d) for d in dash[1])}"')
    items += (f'<li><svg viewBox="0 0 32 8" aria-hidden="true"><path d="M0 '
              f'4H32" stroke="{look["color"]}" stroke-width="3"{dashes}/></svg>'
              f' {html.escape(run.name)}</li>')
  return f'<ul class="key">{items}</ul>'


def _section(title: str, note: str, drawings: Sequence[tuple[str, str]]
             ) -> list[str]:
  """A heading and its charts; nothing if there are none."""
  figures: list[str] = []
  for name, svg in drawings:
    if not svg:
      continue
    prefix = re.sub(r'\W+', '-', f'{title}-{len(figures)}-').lower()
    label = f' role="img" aria-label="{html.escape(f"{title}: {name}")}"'
    figures.append(f'<figure><figcaption>{html.escape(name)}</figcaption>'
                   + _own_ids(svg, prefix).replace('<svg', f'<svg{label}', 1)
                   + '</figure>')
  if not figures:
    return []
  return [f'<h2>{title}</h2>', f'<p>{note}</p>',
          '<div class="charts">', *figures, '</div>']


def _own_ids(svg: str, prefix: str) -> str:
  """Ids that no other drawing of the page has; unused ones are dropped."""
  used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
  svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{prefix}{m[1]}"'
               if m[1] in used else '', svg)
  svg = re.sub(r'(href="#|url\(#)', rf'\g<1>{prefix}', svg)
  return re.sub(r'<!--.*?-->', '', svg, flags=re.DOTALL)


def _partitions(runs: Sequence[stored_runs.Run]):
  """(names of the runs, drawing) of each partition, once."""
  users: dict[str, list[stored_runs.Run]] = {}
  for run in runs:
    key = repr((run.config['facts'].get('partition_hash'),
                run.config['flags'].get('labels')))
    users.setdefault(key, []).append(run)
  for same in users.values():
    federation = same[0].config['facts'].get('federation')
    drawing = charts.heat_map(
        federation if isinstance(federation, dict) else {})
    yield ', '.join(run.name for run in same), drawing


def texts_of(runs: Sequence[stored_runs.Run], targets: str | None, title: str,
             left_out: Sequence[str] = (), columns: Sequence[str] = ()
             ) -> dict[str, str]:
  """All files of a report, by name."""
  marks = _targets(targets, runs)
  grids = {'table': tables.main_table(runs, columns)}
  if marks:
    grids['targets'] = tables.target_table(runs, marks)
  texts = {'index.html': page(runs, marks, title, left_out, columns)}
  for name, grid in grids.items():
    texts[f'{name}.md'] = tables.markdown(grid)
    texts[f'{name}.csv'] = tables.comma_separated(grid)
    texts[f'{name}.tex'] = tables.latex(grid)
  return texts


def texts_of_good(runs: Sequence[stored_runs.Run], targets: str | None,
                 title: str, left_out: list[str],
                 columns: Sequence[str] = ()) -> dict[str, str]:
  """The files of a report of all runs that can be shown.

  Raises:
    ValueError: for bad targets, or if no run can be shown.
  """
  _targets(targets, runs)
  try:
    return texts_of(runs, targets, title, left_out, columns)
  except Exception as error:  # Damaged runs fail in many ways.
    good = []
    for run in runs:
      try:
        texts_of([run], None, title)
        good.append(run)
      except Exception as fault:
        left_out.append(f'{run.folders[0]} cannot be shown: {fault!r}.')
    if not good or len(good) == len(runs):
      raise ValueError(' '.join(left_out) or repr(error)) from error
  return texts_of(good, targets, title, left_out, columns)


def write(texts: Mapping[str, str], out: pathlib.Path) -> None:
  """Writes all files of a report into a folder, or leaves it as it is."""
  try:
    out.mkdir(parents=True, exist_ok=True)
    disk.replace_all(out, {name: plain(text).encode()
                           for name, text in texts.items()})
  except (FileExistsError, NotADirectoryError):
    raise ValueError(f'--out={out} must be a folder; it is, or is below, a '
                     'file.') from None
  except OSError as error:
    raise ValueError(f'--out={out} cannot be written: '
                     f'{error.strerror}.') from error


def _targets(text: str | None, runs: Sequence[stored_runs.Run]) -> list[float]:
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
