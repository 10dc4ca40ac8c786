"""Makes a report's tables: Markdown, CSV, LaTeX and HTML of the same cells."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import html
import re
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.report import (
  clients,
  names,
  pairs,
  stored_runs,
  study,
  summary,
  verdict,
)
from fedjax_ssl.report.text import as_csv, sentences
from fedjax_ssl.training import metric_names

_NAMED = 3  # Runs of one data set, where a line lists them.


class Value(NamedTuple):
  """Mean and sample deviation over seeds; None is not known."""

  mean: float | None
  std: float | None = None
  digits: int = 2
  note: str = ''  # Shown after the mean, or in place of one that is not known.

  def text(self, sign: str = '±') -> str:
    """Formats the value for people."""
    if self.mean is None:
      return self.note or '-'
    mean = f'{self.mean:.{self.digits}f}'
    if self.std is None:
      return mean + (f' {self.note}' if self.note else '')
    return f'{mean} {sign} {self.std:.{self.digits}f}' + (
        f' {self.note}' if self.note else '')


class Grid(NamedTuple):
  """A table: texts and Values by row."""

  columns: list[str]
  rows: list[list[str | Value]]
  notes: list[str] = []  # One for each row, '' where there is nothing to say.
  best: int | None = None  # Index of the best row, which is shown bold.
  below: list[str] = []  # Sentences on several rows.

  def lines(self) -> list[str]:
    """Returns the notes with the names of their rows, and what is below."""
    return [*(f'{_text(row[0])}: {note}.'
              for row, note in zip(self.rows, self.notes) if note),
            *self.below]

  def for_people(self) -> Grid:
    """Drops columns that are empty, or repeat what the names of rows say."""
    kept = [i for i in range(len(self.columns)) if not i or not (
        all(_is_empty(row[i]) for row in self.rows)
        or all(_is_said(row[i], row[0]) for row in self.rows))]
    return self._replace(
        columns=[self.columns[i] for i in kept],
        rows=[[row[i] for i in kept] for row in self.rows])


def over_seeds(values: Sequence[float | None], *, scale: float = 1.0,
               digits: int = 2) -> Value:
  """Computes mean and deviation (n - 1); unknown if any seed's value is."""
  known = [v for v in values if v is not None]
  if not known or len(known) < len(values):
    return Value(None)
  scaled = np.array(known, np.float64) * scale
  std = float(scaled.std(ddof=1)) if len(known) > 1 else None
  return Value(float(scaled.mean()), std, digits)


def main_table(runs: Sequence[stored_runs.ReportedRun],
               more: Sequence[str] = ()) -> Grid:
  """Makes the table of accuracies in percent, times, and the papers' numbers.

  Args:
    runs: one for each row. Accuracies are marked if a run diverged or guesses.
    more: metrics of the last row that get a column too.

  Raises:
    FieldError: for a metric that no run has.
  """
  summary.check_columns(more, {run.name: run.seeds for run in runs})
  differ = _different_data(runs)
  methods = [run.config['flags'].get('method', '') for run in runs]
  called = names.short(methods)
  outcomes = [[stored_runs.outcome(seed) for seed in run.seeds] for run in runs]
  measured = {name for of_run in outcomes for o in of_run
              for name in o['metrics']}

  def accuracy(of: Callable[[Mapping[str, Any]], float | None]
               ) -> list[str | Value]:
    values = [over_seeds([of(o) for o in of_run], scale=100)
              for of_run in outcomes]
    return [value if value.mean is None
            else value._replace(note=verdict.mark(run.verdicts))
            for value, run in zip(values, runs, strict=True)]

  columns: list[tuple[str, list[str | Value]]] = [
      ('run', [run.name for run in runs])]
  if differ:
    columns.append(('dataset', [*map(_dataset, runs)]))
  columns += [
      ('method', [called[method] for method in methods]),
      ('seeds', [_of(len(run.seeds), len(run.planned)) for run in runs]),
      ('rounds', [*map(_rounds, runs)]),
      ('final, %', accuracy(lambda o: o['final'])),
      (f'last {summary.TAIL} evaluations, %', accuracy(lambda o: o['tail'])),
      ('validation-selected, %', accuracy(lambda o: o['selected']))]
  if 'local_accuracy' in measured:
    columns.append(('local models, %', accuracy(
        lambda o: o['metrics'].get('local_accuracy'))))
  columns += [(metric_names.title(name), [
      over_seeds([summary.last(rows, name) for rows in run.seeds])
      for run in runs]) for name in more]
  if 'epsilon' in measured and 'epsilon' not in more:
    columns.append(('epsilon', [
        study.spent(method, [o['metrics'].get('epsilon') for o in of_run])
        for method, of_run in zip(methods, outcomes, strict=True)]))
  columns += [
      ('paper, %', [*map(_paper, runs)]),
      ('MB sent', [*map(_megabytes, outcomes)]),
      ('minutes', [Value(None if run.seconds is None else run.seconds / 60,
                         digits=1) for run in runs])]
  titles, cells = zip(*columns, strict=True)
  return Grid([*titles], [[*row] for row in zip(*cells, strict=True)],
              _notes(runs),
              pairs.best(runs) if len(runs) > 1 and not differ else None,
              [*differ, *_few_rows(runs), *_deltas(runs, outcomes)])


def _deltas(runs: Sequence[stored_runs.ReportedRun],
            outcomes: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
  """Says at which delta the epsilons are, of which each alone means little."""
  return study.deltas(
      (run.name, study.delta(run.config['facts'].get('choices')))
      for run, of_run in zip(runs, outcomes, strict=True)
      if any(o['metrics'].get('epsilon') is not None for o in of_run))


def _megabytes(outcomes: Sequence[Mapping[str, Any]]) -> Value:
  sent = [o['metrics'].get('bytes_up', 0) + o['metrics'].get('bytes_down', 0)
          for o in outcomes]
  return over_seeds([s / 1e6 for s in sent]) if any(sent) else Value(None)


def _different_data(runs: Sequence[stored_runs.ReportedRun]) -> list[str]:
  """Says which runs are of which data, unless all are of the same."""
  parts: dict[int, list[stored_runs.ReportedRun]] = {}
  for part, run in zip(names.data_parts([run.config for run in runs]), runs,
                       strict=True):
    parts.setdefault(part, []).append(run)
  if len(parts) < 2:
    return []
  each = [f'{_dataset(some[0])} '
          f'({", ".join(run.name for run in some[:_NAMED])}'
          + f' and {len(some) - _NAMED} more' * (len(some) > _NAMED) + ')'
          for some in parts.values()]
  return ['The runs are of different data and compared only within the same: '
          f'{"; ".join(each)}.']


def _dataset(run: stored_runs.ReportedRun) -> str:
  return str(run.config['flags'].get('dataset', '?'))


def _few_rows(runs: Sequence[stored_runs.ReportedRun]) -> list[str]:
  """Says which runs have few validation rows; of all of them without names."""
  return sentences([(run.name, run.few_rows) for run in runs])


def _paper(run: stored_runs.ReportedRun) -> Value:
  """Returns the paper's number; it is marked if the run has other flags."""
  if run.paper is None:
    return Value(None)
  marks = [run.paper.kind, '' if run.changed == () else '*']
  return Value(run.paper.value, run.paper.std, run.paper.digits,
               ' '.join(filter(None, marks)))


def _of(done: int, planned: int) -> str:
  return str(done) if done >= planned else f'{done} of {planned}'


def _rounds(run: stored_runs.ReportedRun) -> str:
  """Says how far the seeds are: `20`, or `1 of 2`."""
  return _of(run.rounds, run.num_rounds)


def _notes(runs: Sequence[stored_runs.ReportedRun], paper: bool = True
           ) -> list[str]:
  return ['; '.join(run.notes(paper)) for run in runs]


def target_table(runs: Sequence[stored_runs.ReportedRun],
                 targets: Sequence[float]) -> Grid:
  """Makes the table of rounds and megabytes to reach a test accuracy."""
  columns = ['run']
  for target in targets:
    columns += [f'rounds to {100 * target:g} %', f'MB to {100 * target:g} %']
  rows: list[list[str | Value]] = []
  for run in runs:
    row: list[str | Value] = [run.name]
    for target in targets:
      found = [stored_runs.reached(seed, target) for seed in run.seeds]
      known = [f for f in found if f is not None]
      if len(known) < len(found):
        note = f'{len(known)} of {len(found)} seeds' if known else 'not reached'
        row += [Value(None, note=note)] * 2
      else:
        row.append(over_seeds([f[0] for f in known], digits=1))
        row.append(over_seeds([f[1] / 1e6 for f in known]))
    rows.append(row)
  return Grid(columns, rows, _notes(runs, paper=False))


def difference_table(runs: Sequence[stored_runs.ReportedRun],
                     compared: Sequence[pairs.Pair]) -> Grid:
  """Makes the table of final accuracies minus a reference's, seed by seed.

  Args:
    runs: that are compared.
    compared: a row each.
  """
  rows: list[list[str | Value]] = []
  notes = []
  for pair in compared:
    run, other = runs[pair.run], runs[pair.against]
    notes.append('; '.join(filter(None, (
        pair.note, '' if run.rounds == other.rounds else
        f'it ended at round {run.rounds}, the other at {other.rounds}'))))
    found = pairs.of_finals(run, other)
    rows.append([run.name, other.name, str(found.pairs), Value(found.mean),
                 Value(found.low), Value(found.high), found.verdict or '-'])
  return Grid(['run', 'against', 'pairs', 'difference, points', '95 % from',
               '95 % to', 'which is'], rows, notes)


def client_table(runs: Sequence[stored_runs.ReportedRun],
                 references: Sequence[int]) -> Grid:
  """Makes the table of how final accuracy varies over clients' class mixes.

  Args:
    runs: one for each row; those whose clients are not known are left out.
    references: for each run the index of the one that it is compared with.
  """
  known = [clients.accuracies(run) for run in runs]
  rows: list[list[str | Value]] = []
  for run, mine, other in zip(runs, known, references, strict=True):
    if not mine:
      continue
    row: list[str | Value] = [run.name, str(len(mine))]
    for read in (np.nanmean, clients.worst, np.nanstd):
      row.append(over_seeds([float(read(a)) for a in mine.values()],
                            scale=100))
    gains = clients.against(mine, known[other], clients.same_clients(
        run, runs[other])) if runs[other] is not run else np.zeros(0)
    row += [runs[other].name if gains.size else '-',
            *(Value(100 * float(share.mean()), digits=1) if gains.size
              else Value(None) for share in (gains > 0, gains < 0))]
    rows.append(row)
  return Grid(['run', 'seeds', 'mean of clients, %', 'worst tenth, %',
               'deviation over clients', 'against', 'clients that gain, %',
               'clients that lose, %'], rows)


def _is_empty(cell: str | Value) -> bool:
  return _text(cell) in ('', '-')


def _is_said(cell: str | Value, name: str | Value) -> bool:
  return not _is_number(cell) and _text(cell) in _text(name).split(', ')


def _text(cell: str | Value, sign: str = '±') -> str:
  return cell if isinstance(cell, str) else cell.text(sign)


def _is_number(cell: str | Value) -> bool:
  return isinstance(cell, Value) or bool(
      re.fullmatch(r'\d+(?: (?:of|to) \d+)*', cell))


def _numeric(grid: Grid) -> list[bool]:
  """Returns for each column whether all its cells are numbers.

  Such columns are aligned to the right.
  """
  return [all(_is_number(row[i]) for row in grid.rows)
          for i in range(len(grid.columns))]


def markdown(grid: Grid) -> str:
  """Formats for Markdown: numbers to the right, best row bold, notes below."""
  grid = grid.for_people()
  def line(number: int, row: Sequence[str | Value]) -> list[str]:
    cells = [' '.join(_text(c).replace('|', '\\|').split()) for c in row]
    return cells if number != grid.best else [
        f"**{c.replace('*', chr(92) + '*')}**" for c in cells]
  lines = [grid.columns, ['---:' if n else '---' for n in _numeric(grid)],
           *(line(i, row) for i, row in enumerate(grid.rows))]
  table = '\n'.join(f'| {" | ".join(line)} |' for line in lines) + '\n'
  notes = '\n'.join('- ' + line.replace('*', '\\*') for line in grid.lines())
  return table + (f'\n{notes}\n' if notes else '')


def comma_separated(grid: Grid) -> str:
  """Formats as CSV: means and deviations, unrounded, and the notes."""
  head: list[str] = []
  values = [any(isinstance(r[i], Value) for r in grid.rows)
            for i in range(len(grid.columns))]
  for name, is_value in zip(grid.columns, values):
    head += [name, f'{name} std'] if is_value else [name]
  notes = grid.notes or [''] * len(grid.rows)
  head.append('note')
  lines = [head]
  for row, note in zip(grid.rows, notes):
    cells: list[str] = []
    for cell, is_value in zip(row, values):
      if isinstance(cell, Value):
        cells += ['' if cell.mean is None else repr(cell.mean),
                  '' if cell.std is None else repr(cell.std)]
      else:
        cells += [cell, ''] if is_value else [cell]
    lines.append([*cells, note])
  return as_csv(lines)


_ESCAPES = {'\\': r'\textbackslash{}', '&': r'\&', '%': r'\%', '$': r'\$',
            '#': r'\#', '_': r'\_', '{': r'\{', '}': r'\}',
            '~': r'\textasciitilde{}', '^': r'\textasciicircum{}',
            '±': r'$\pm$', '†': r'$\dagger$', '‡': r'$\ddagger$'}


def latex(grid: Grid) -> str:
  """Formats as a LaTeX tabular without packages: best row bold, notes below."""
  grid = grid.for_people()
  def line(cells: Sequence[str], form: str = '{}') -> str:
    return ' & '.join(form.replace('{}', ''.join(
        _ESCAPES.get(c, c) for c in cell)) for cell in cells) + r' \\'
  def note(text: str) -> str:
    return '\n\\par ' + ''.join(_ESCAPES.get(c, c) for c in text)
  kinds = ''.join('r' if n else 'l' for n in _numeric(grid))
  body = [line([_text(c) for c in row],
               r'\textbf{{}}' if i == grid.best else '{}')
          for i, row in enumerate(grid.rows)]
  return '\n'.join([rf'\begin{{tabular}}{{{kinds}}}', r'\hline',
                    line(grid.columns), r'\hline', *body, r'\hline',
                    r'\end{tabular}']) + ''.join(
                        map(note, grid.lines())) + '\n'


def as_html(grid: Grid) -> str:
  """Formats as HTML; the first column names the row, the best row is bold."""
  grid = grid.for_people()
  head = ''.join(f'<th scope="col"{" class=n" if number else ""}>'
                 f'{html.escape(name)}</th>'
                 for name, number in zip(grid.columns, _numeric(grid)))
  body = ''
  for i, row in enumerate(grid.rows):
    first, *rest = row
    cells = ''.join(
        f'<td{" class=n" if _is_number(c) else ""}>'
        f'{html.escape(_text(c))}</td>' for c in rest)
    kind = ' class=best' if i == grid.best else ''
    body += (f'<tr{kind}><th scope="row">{html.escape(_text(first))}</th>'
             f'{cells}</tr>\n')
  notes = ''.join(f'<li>{html.escape(x)}</li>' for x in grid.lines())
  return (f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
          f'<tbody>\n{body}</tbody></table></div>\n'
          + (f'<ul class="notes">{notes}</ul>\n' if notes else ''))
