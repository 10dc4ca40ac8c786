"""Writes the generated parts of README.md and experiments/README.md.

python experiments/pages.py           # after new results or settings
python experiments/pages.py --check   # exit code 1 if that was forgotten

Numbers come from `experiments/results/*.json` (studies of `results.py`) and
`experiments/results/tables/*/*.json` (cells of `paper_tables.py`), pages of
settings from the scripts' docstrings and the papers' tables.
"""
from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
import json
import pathlib
import re
import sys
from typing import Any

from fedjax_ssl.cli import settings as setting_lib
from fedjax_ssl.papers import cells as papers
from fedjax_ssl.papers import results as stored_results
from fedjax_ssl.report import verdict

ROOT = pathlib.Path(__file__).resolve().parent.parent
_BEGIN = '<!-- {}: made by experiments/pages.py, do not edit -->'
_END = '<!-- end of {} -->'


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


def results(root: pathlib.Path = ROOT) -> str:
  """All results: the papers' tables first, then our studies."""
  here = root / 'experiments'
  parts = [_paper_part(here, folder)
           for folder in sorted((here / 'results' / 'tables').glob('*'))
           if folder.is_dir()]
  parts += [_study_part(root, file)
            for file in sorted((here / 'results').glob('*.json'))]
  return '\n\n'.join(part for part in parts if part)


def _mean_std(values: Sequence[float | None], scale: float = 100) -> str:
  """Percent, with the sample deviation where there are several seeds."""
  known = [scale * v for v in values if v is not None]
  if not known or len(known) < len(values):
    return '-'
  mean = sum(known) / len(known)
  if len(known) == 1:
    return f'{mean:.2f}'
  std = (sum((v - mean)**2 for v in known) / (len(known) - 1))**0.5
  return f'{mean:.2f} ± {std:.2f}'


def _paper_part(here: pathlib.Path, folder: pathlib.Path) -> str:
  """One table, the paper's numbers before ours; '' without results."""
  name, _, variant = folder.name.partition('.')
  table = papers.load(name)
  stored = {}
  for cell in table.cells():
    found = stored_results.read(stored_results.file_of(
        cell, here / 'results' / 'tables', variant))
    if found:
      stored[cell.name] = cell, found
  if not stored:
    return ''
  known = [found for _, found in stored.values()]
  lines = [f'### {table.title}' + (f', variant `{variant}`' if variant else ''),
           '', f'Paper / ours, {table.unit}. {table.citation}; {table.runs}. '
           'Ours: the last round, mean ± standard deviation over seeds. '
           + _how(name, variant, known), '',
           '| | ' + ' | '.join(c['title'] for c in table.columns) + ' |',
           '|---' * (len(table.columns) + 1) + '|']
  for i, row in enumerate(table.rows):
    places = []
    for j, column in enumerate(table.columns):
      value, std = table.value(i, j)
      text = table.text(value) + ('' if std is None else
                                  f' ± {table.text(std)}')
      cell, ours = stored.get(table.place(i, j).name, (table.place(i, j), {}))
      places.append(f'{text} / ' + (
          'stale' if stored_results.is_stale(cell, ours) else
          _ours(ours, column.get('metric', 'accuracy'),
                column.get('scale', 100))))
    lines.append(f'| {row["title"]} | ' + ' | '.join(places) + ' |')
  return '\n'.join([*lines, *_footnotes({
      name: _verdicts(ours) for name, (_, ours) in stored.items() if ours})])


def _footnotes(verdicts: Mapping[str, Sequence[verdict.Verdict | None]]
               ) -> list[str]:
  """What marks below a table mean, by the name of a run or cell."""
  said = verdict.footnotes(
      {f'`{name}`': found for name, found in verdicts.items()})
  return ['', ' '.join(said)] if said else []


def _how(name: str, variant: str, known: Sequence[dict[str, Any]]) -> str:
  """Command, commits and machines behind a table's cells."""
  flags = ' '.join(known[0]['extra_flags'])
  command = (f'`python experiments/paper_tables.py --table={name}'
             + (f' --variant={variant} -- {flags}' if variant else '') + '`')
  seeds = [s['environment'] for k in known for s in k['seeds'].values()]
  commits = sorted({str(e.get('commit', 'unknown'))[:7] for e in seeds})
  devices = sorted({str(e.get('devices', 'unknown')) for e in seeds})
  return f'{command}, commit {", ".join(commits)}, {", ".join(devices)}.'


def _ours(stored: dict[str, Any], metric: str, scale: float) -> str:
  """A cell's mean over its seeds, in the unit of the paper."""
  if not stored:
    return '-'
  seeds = stored['seeds'].values()
  values = ([s['final'] for s in seeds] if metric == 'accuracy'
            else [s['metrics'].get(metric) for s in seeds])
  return verdict.marked(_mean_std(values, scale), _verdicts(stored))


def _verdicts(stored: Mapping[str, Any]) -> list[verdict.Verdict | None]:
  """Of a cell's seeds."""
  return [verdict.of(s['metrics']) for s in stored['seeds'].values()]


def _study_part(root: pathlib.Path, file: pathlib.Path) -> str:
  """A study's runs, as `results.py` stored them."""
  stored = json.loads(file.read_text())
  runs = stored['runs']
  title, *rest = re.split(r'[:.] ', stored.get('note', '') + ' ', maxsplit=1)
  note = ''.join(rest).strip()
  commits = sorted({str(r['environment'].get('commit', 'unknown'))[:7]
                    for r in runs})
  where = file.with_suffix('.md').relative_to(root).as_posix()
  lines = [f'### {title.strip() or file.stem}', '',
           *([note[0].upper() + note[1:], ''] if note else []),
           f'Test accuracy in percent, mean ± standard deviation over seeds; '
           f'commit {", ".join(commits)}; all flags, seeds and machines: '
           f'[{file.stem}]({where}).', '',
           '| run | method | labels | seeds | rounds | final | tail | '
           'validation-selected |', '|---|---|---|---:|---:|---:|---:|---:|']
  for run in runs:
    lines.append('| ' + ' | '.join([
        run['run'], f'`{run["method"]}`', run['labels'],
        str(len(run['seeds'])), str(run['rounds']),
        *(verdict.marked(_mean_std(run[k]), verdict.stored(run))
          for k in ('final', 'tail', 'selected'))]) + ' |')
  return '\n'.join([*lines, *_footnotes(
      {run['run']: verdict.stored(run) for run in runs})])


def settings(root: pathlib.Path = ROOT) -> str:
  """One page a setting."""
  return '\n\n'.join(_page(root, script) for script in scripts(root))


def scripts(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
  """The experiments: files that train a setting."""
  return [p for p in sorted((root / 'experiments').glob('*.py'))
          if re.search(r'^  cli\.run_setting\(', p.read_text(), re.MULTILINE)]


def _page(root: pathlib.Path, script: pathlib.Path) -> str:
  tree = ast.parse(script.read_text())
  first, *paragraphs = (ast.get_docstring(tree) or script.stem).split('\n\n')
  parts = [f'## {script.stem}', first]
  for text in paragraphs:
    parts.append(f'```\n{text}\n```' if text.startswith('python ') else text)
  known = setting_lib.SETTINGS.get(script.stem)
  defaults = [f'`--{name}={_text(value)}`' for name, value in (
      known.defaults if known else {}).items()]
  if defaults:
    parts.append(f'Its own defaults: {", ".join(defaults)}.')
  parts.append(_results_of(root, script.stem))
  return '\n\n'.join(parts)


def _text(value: Any) -> str:
  return ','.join(map(str, value)) if isinstance(value, list) else str(value)


def _results_of(root: pathlib.Path, setting: str) -> str:
  """The papers' tables and our studies that use a setting."""
  studies = [f'[{file.stem}](results/{file.stem}.md)'
             for file in sorted((root / 'experiments' / 'results').glob(
                 '*.json')) if re.search(rf'\b{setting}\.py\b',
                                         file.read_text())]
  tables = [f'`{name}`' for name, table in papers.tables().items()
            if any(c['setting'] == setting for c in table.columns)]
  lines = [f'{kind}: {", ".join(found)}.' for kind, found in (
      ('Tables of papers', tables), ('Studies', studies)) if found]
  return '\n\n'.join(lines or ['No paper has it. Its result is in the main '
                               'README.'])


def pages(root: pathlib.Path = ROOT) -> dict[pathlib.Path, str]:
  """What each file should hold."""
  return {file: replaced(file.read_text(), part, body(root))
          for file, part, body in (
              (root / 'README.md', 'results', results),
              (root / 'experiments' / 'README.md', 'settings', settings))}


def main(argv: Sequence[str], root: pathlib.Path = ROOT) -> int:
  """Writes or checks the pages; returns an exit code."""
  if argv not in ([], ['--check']):
    print(__doc__, file=sys.stderr)
    return 2
  try:
    stale = {f: text for f, text in pages(root).items()
             if f.read_text() != text}
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
