"""Makes a study: one table of finished runs, and what is needed to repeat them.

Every number comes from the runs' own files.
"""
from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import pathlib
from typing import Any

from fedjax_ssl.core import checks, disk, flag_kinds, registry
from fedjax_ssl.report import (
  names,
  stored_runs,
  summary,
  tradeoff,
  verdict,
)
from fedjax_ssl.report.text import by_text, line, plain, sentences
from fedjax_ssl.training import (
  command,
  environment,
  metric_names,
  metrics,
  workdir,
)

_SHOWN = ('final', 'tail', 'selected')
# Work and traffic, per client and round.
_COSTS = ('models_sent', 'forward_passes', 'backward_passes')
_LOCAL = 'local_accuracy'
_DENSE = ('cost_up', 'cost_down')  # Percent of one dense model, FedMatch's.
# In a table where a run has something to say.
MORE = (_LOCAL, 'epsilon', *_DENSE)


def read(folders: str | Sequence[str], columns: Sequence[str] = ()
         ) -> list[dict[str, Any]]:
  """Reads runs as rows: their flags, machines, and accuracies by seed.

  Args:
    folders: of the runs, see `load`.
    columns: see `rows_of`.

  Raises:
    ValueError: if one cannot be read, or no run has a column; the message names
      it.
  """
  return rows_of(load([folders] if isinstance(folders, str) else folders),
                 columns)


def load(folders: Sequence[str], left_out: list[str] | None = None
         ) -> list[stored_runs.ReportedRun]:
  """Reads runs. Their `folder_name` becomes their name in tables, unique.

  Args:
    folders: of the runs. Those that differ only in their seeds are one run; one
      that repeats a seed of another begins a new one.
    left_out: if given, each folder that cannot be read adds a line here.

  Raises:
    ValueError: if one cannot be read; with `left_out`, if none can.
  """
  with _naming(folders):
    runs = stored_runs.load(folders, left_out, repeats=True)
  times = collections.Counter(run.folder_name for run in runs)
  return [run if times[run.folder_name] == 1 else
          dataclasses.replace(run, folder_name=run.name) for run in runs]


def rows_of(runs: Sequence[stored_runs.ReportedRun], columns: Sequence[str] = ()
            ) -> list[dict[str, Any]]:
  """Makes a row of each run that `load` has read.

  Args:
    runs: one or more.
    columns: metrics of the last row that are wanted too.

  Raises:
    ValueError: if no run has a column, or one is damaged.
  """
  with _naming([str(folder) for run in runs for folder in run.folders]):
    summary.check_columns(
        columns, {str(i): run.seeds for i, run in enumerate(runs)})
    return [_row(run, columns) for run in runs]


@contextlib.contextmanager
def _naming(folders: Sequence[str]) -> Iterator[None]:
  """Turns what damaged files raise into `ValueError` with their folders."""
  try:
    yield
  except (AttributeError, KeyError, TypeError) as error:
    raise ValueError(
        f'{" ".join(folders)} is damaged: {error!r}.') from error
  except metrics.MetricsError as error:
    raise ValueError(f'{" ".join(folders)} is damaged: {error}') from error


def _row(run: stored_runs.ReportedRun, columns: Sequence[str]
         ) -> dict[str, Any]:
  configs = [workdir.read_config(folder) for folder in run.folders]
  seeds, flags = run.seeds, configs[0]['flags']
  if len(configs) > 1:  # Only then are there other seeds than these flags have.
    flags = {name: value for name, value in flags.items()
             if name not in flag_kinds.MACHINE
             or all(c['flags'].get(name) == value for c in configs)}
    flags |= {'seed': None, 'seeds': list(run.planned)}
  summaries = [summary.summary(rows) for rows in seeds]
  return {
      'run': plain(run.folder_name),
      'setting': command.setting_of(configs[0]),
      'method': flags['method'],
      'labels': flags['labels'],
      'seeds': list(run.numbers),
      'rounds': run.rounds,
      'notes': [*run.notes(paper=False), *filter(None, [run.few_rows])],
      'seconds': run.seconds,
      **{name: [s.get(name) for s in summaries]
         for name in (*_SHOWN, 'epsilon', 'verdict')},
      **{name: [rows[-1].get(name) for rows in seeds]
         for name in (*_COSTS, _LOCAL)},
      'columns': {name: [summary.last(rows, name) for rows in seeds]
                  for name in columns},
      **{name: [summary.over_rounds([(row['round'], row.get(name))
                                     for row in rows]) for rows in seeds]
         for name in _DENSE},
      # The rounds of each seed's evaluations, and the accuracy in each.
      'evaluated': [[row['round'] for row in rows] for rows in seeds],
      'curves': [[row.get('accuracy') for row in rows] for rows in seeds],
      'delta': delta(configs[0].get('facts', {}).get('choices')),
      'flags': flags,
      'environment': _united([environment.throughout(c) for c in configs]),
      'restarts': sum(len(config['restarts']) for config in configs),
  }


def _united(environments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns what the seeds of a row were run on; several values in a row."""
  found = {}
  for name in dict.fromkeys(k for one in environments for k in one):
    values = [*{_text(one[name]): one[name]
                for one in environments if name in one}.values()]
    found[name] = (values[0] if len(values) == 1 else
                   ' and '.join(map(_text, values)))
  return found


def _mean(values: Sequence[float | None]) -> str:
  known = [v for v in values if v is not None]
  return f'{sum(known) / len(known):.4g}' if known else '-'


def more(row: Mapping[str, Any], name: str) -> str:
  """Formats a cell of a column of `MORE`, whose number the row has."""
  if name == _LOCAL:
    return summary.percent(row[name])
  if name in _DENSE:
    return _mean(row[name])
  return spent(row['method'], row.get('epsilon') or ())


def spent(method: str, values: Sequence[float | None]) -> str:
  """Formats the epsilon of a run, the largest of its seeds; '' without one."""
  values = values or [None]
  # A method of a user's own has told that it is private by reporting one.
  if noisy_networks(method) is None and all(v is None for v in values):
    return ''
  return summary.epsilon(values, is_nominal(method))


def delta(choices: Mapping[str, Any] | None) -> float | None:
  """Returns the delta of a run's method; None if it has or stores none.

  Args:
    choices: what `task.resolved` says of the run, or said when it began.
  """
  found = ((choices or {}).get('method') or {}).get('knobs', {}).get('delta')
  return found if isinstance(found, float) else None


def deltas(found: Iterable[tuple[str, float | None]]) -> list[str]:
  """Says at which delta epsilons are, of which each alone means little.

  Args:
    found: the names of private runs, and their deltas.
  """
  return sentences([(name, 'the delta of epsilon is not stored' if value is None
                     else f'epsilon is at delta={value:g}')
                    for name, value in found])


def is_nominal(method: str) -> bool:
  """Returns whether the epsilon of a method guarantees nothing."""
  return noisy_networks(method) == 'generator'


def noisy_networks(method: str) -> str | None:
  """Returns which networks get noise, or None; the method as it is stored."""
  try:
    name, given = registry.parse(method)
  except ValueError:  # Of a file that somebody has changed.
    return None
  return 'all' if name == 'dpsgd' else given.get('dp_scope')


def _same(rows: list[dict[str, Any]], part: str) -> dict[str, Any]:
  """Returns what all runs share of their flags or environments."""
  first = rows[0][part]
  return {k: v for k, v in first.items()
          if all(r[part].get(k) == v for r in rows)}


def _other(rows: list[dict[str, Any]], part: str,
           without: Sequence[str] = ()) -> str:
  """Lists what the runs do not share: the commonest value, then the others.

  Each is followed by its runs, the commonest by words for those that are not
  named. A run of another commit that lacks a flag is left out for that flag.
  """
  parts = []
  for key in sorted({k for r in rows for k in r[part]} - set(without)):
    runs: dict[str, list[str]] = {}
    for row in rows:
      if key in row[part]:
        runs.setdefault(_text(row[part][key]), []).append(row['run'])
    said = _told(key, {_text(row[part][key]): row[part][key]
                       for row in rows if key in row[part]})
    most = max(runs, key=lambda value: len(runs[value]))
    others = ''.join(f', {said[value]} ({" ".join(held)})'
                     for value, held in runs.items() if value != most)
    if others:
      rest = ('the others' if all(key in row[part] for row in rows) else
              'the others that have it')
      rest = rest if len(runs[most]) > 1 else runs[most][0]
      parts.append(f'{key} {said[most]} ({rest}){others}')
  return '; '.join(parts)


def _deltas(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  return deltas((row['run'], row['delta']) for row in rows
                if any(v is not None for v in row['epsilon']))


def _notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns a line for all runs with the same notes."""
  return by_text((row['run'], '; '.join(row.get('notes') or ()))
                 for row in rows)


def _told(key: str, values: Mapping[str, Any]) -> dict[str, str]:
  """Values by their texts, without paths of a machine; still all different."""
  short = {full: _text(command.portable({key: value})[key])
           for full, value in values.items()}
  if len({*short.values()}) < len(short):  # Files of one name.
    return {full: name if name == full else '/'.join(
        (pathlib.Path(full).parent.name, name)) for full, name in short.items()}
  return short


def _text(value: Any) -> str:
  return (','.join(map(str, value)) if isinstance(value, list | tuple)
          else str(value))


def _shared_flags(rows: list[dict[str, Any]],
                  defaults: Callable[[str], Mapping[str, Any]]) -> str:
  """Says which flags the runs share, but for defaults of their settings."""
  names_ = list(dict.fromkeys(row['setting'] for row in rows))
  known = [defaults(name) for name in names_]
  same = _same(rows, 'flags')
  short = command.portable(same)
  told = [f'--{checks.flag(name)}={_text(short[name])}'
          for name, value in sorted(same.items())
          if value not in (None, []) and name not in (
              *flag_kinds.ONE_START, 'data_dir')
          and not all(name in of and (
              of[name] == value or _text(of[name]) == _text(value))
                      for of in known)]
  but = (f', where they are not defaults of {" and ".join(names_)}'
         if all(known) else '')
  return f'Flags that all runs share{but}: ' + (
      f'`{" ".join(told)}`' if told else 'none')


def head(more_: Sequence[str]) -> list[str]:
  """Makes the head of a table of runs: columns of all tables, then more."""
  columns = ['run', 'method', 'labels', 'seeds', 'rounds',
             *(summary.COLUMNS[name] for name in _SHOWN), *more_]
  return [line(columns), '|---|---|---|' + (len(columns) - 3) * '---:|']


def first(row: Mapping[str, Any], method: str) -> list[str]:
  """Makes the cells of a run in the columns that all tables have."""
  return [row['run'], f'`{method}`', row['labels'], str(len(row['seeds'])),
          str(row['rounds']),
          *(verdict.marked(summary.percent(row[name]), verdict.stored(row))
            for name in _SHOWN)]


def markdown(rows: list[dict[str, Any]], note: str,
             defaults: Callable[[str], Mapping[str, Any]] = lambda name: {}
             ) -> str:
  """Makes the table and, below it, what the runs share.

  Args:
    rows: what `read` made of the runs.
    note: one line above the table.
    defaults: values of all flags of a setting, by its name; {} if they are not
      known. Flags with these values are left out.
  """
  lines = [note, ''] if note else []
  extra = [name for name in MORE
           if any(any(r[name]) for r in rows)
           or name == 'epsilon' and any(
               noisy_networks(row['method']) for row in rows)]
  asked = list(rows[0].get('columns', {}))
  lines += head(['seconds', 'models sent', 'forward', 'backward',
                 *map(metric_names.title, asked), *extra])
  called = names.short(row['method'] for row in rows)
  for row in rows:
    cells = [*first(row, called[row['method']]),
             '-' if row['seconds'] is None else f'{row["seconds"]:.0f}',
             *(_mean(row[name]) for name in _COSTS),
             *(summary.mean_std(row['columns'][name]) for name in asked),
             *(more(row, name) for name in extra)]
    lines.append(line(cells))
  facts = ', '.join(f'{k} {v}' for k, v in _same(
      rows, 'environment').items())
  lines += ['', 'Test accuracy in percent, mean ± standard deviation over '
            'seeds; seconds include compilation and all seeds; models sent '
            '(down and up) and examples through the network are per client '
            'and round.'
            + f' {summary.NOMINAL}' * any(
                is_nominal(row['method']) for row in rows)
            + (' Costs are percent of one dense model per client and round, '
               'mean over the run.' if 'cost_up' in extra else ''),
            *(text for said in [*_deltas(rows), *_notes(rows)]
              for text in ('', said)),
            *(text for said in verdict.footnotes(
                (row['run'], verdict.stored(row)) for row in rows)
              for text in ('', said)),
            '', _shared_flags(rows, defaults)]
  flags_not_shared = _other(
      rows, 'flags', ('workdir', 'data_dir', 'method', 'labels', 'profile'))
  if flags_not_shared:
    lines += ['', f'Flags that differ: {flags_not_shared}.']
  lines += ['', f'Environment: {facts}.']
  facts_not_shared = _other(rows, 'environment')
  if facts_not_shared:
    lines += ['', f'Where it differs: {facts_not_shared}.']
  lines.append('')
  return '\n'.join(lines)


def write(out: pathlib.Path, rows: list[dict[str, Any]], text: str,
          note: str) -> None:
  """Stores the study as <out>.json and <out>.md.

  Args:
    out: path without ending.
    rows: what `read` made of the runs.
    text: what `markdown` made of them.
    note: one line above the table.

  Raises:
    ValueError: if they cannot be written.
  """
  for row in rows:  # Paths of one machine.
    row['flags'] = command.portable(row['flags'])
    row['method'] = row['flags']['method']
  # Not `with_suffix`, which would cut `.1` off `alpha0.1`.
  stored = disk.as_json({'note': note, 'runs': rows})
  with disk.writing(f'--out={out}'):
    out.parent.mkdir(parents=True, exist_ok=True)
    disk.replace_all(out.parent, {
        f'{out.name}.json': stored.encode(),
        f'{out.name}.md': plain(text).encode()})


def draw_epsilon(out: pathlib.Path, runs: Sequence[stored_runs.ReportedRun]
                 ) -> None:
  """Draws accuracy against epsilon, to <out>_epsilon.png."""
  tradeoff.plot({run.folder_name: run.seeds for run in runs},
                out.with_name(out.name + '_epsilon.png'))
