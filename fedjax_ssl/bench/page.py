"""The bench as one page: tables, what was tried, curves."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import shlex
from typing import Any

import numpy as np

from fedjax_ssl.bench import plan, records, standing
from fedjax_ssl.report import summary

_HEAD = ('rank', 'method', 'accuracy, %', 'gap closed', 'rounds to labels only',
         'worst tenth, %', 'MB up', 'MB down', 'passes', 'seconds')
_CURVES = 7  # Rows that are drawn beside the bounds.


def markdown(bed: plan.Bed, lines: Mapping[str, Sequence[standing.Line]],
             found: Mapping[str, records.Record], command: str,
             count: int = plan.CONFIGURATIONS, changed: Sequence[str] = (),
             missing: Mapping[str, tuple[int, int]] | None = None) -> str:
  """Returns the page of a bed.

  Args:
    bed: the bed.
    lines: of each skew, as `standing.compare` gives them.
    found: the same rows by name, with what was tried of them.
    command: the one that makes and continues the bench.
    count: configurations that each row had at most.
    changed: flags that were given to all runs besides the bed's; such a page
      does not count as the bench.
    missing: rows that were asked for and not tuned to the end, each with the
      number of configurations that have a result, and of all it has.
  """
  text = [f'# {records.VERSION}: {bed.name}', '', bed.about, '']
  if changed or count != plan.CONFIGURATIONS:
    why = [f'all runs have `{" ".join(changed)}` besides'] * bool(changed)
    if count != plan.CONFIGURATIONS:
      why.append(f'rows had {count} of {plan.CONFIGURATIONS} configurations')
    text += [f'**Not the bench itself**: {", and ".join(why)}.', '']
  for skew, rows in lines.items():
    there = {row.measured.entry.name for row in rows}
    lost = [f'`{name}`' for name in found if name not in there]
    if rows:
      text += [f'## {skew}', '', *table(rows), '', *_notes(rows)]
    if lost:
      text += [*([] if rows else [f'## {skew}', '']), 'Without a result, as a '
               f'run failed or has not ended: {", ".join(lost)}.', '']
  if missing:
    text += ['Not in the table, as not all their configurations have a result: '
             + ', '.join(f'`{name}` ({number} of {every})'
                         for name, (number, every) in missing.items()) + '.',
             '']
  if unknown := [f'`{n}`' for n, record in found.items() if not record.data]:
    text += ['Their tables hold no hash of the data, so it was not compared '
             f'with that of the other rows: {", ".join(unknown)}.', '']
  for file in sorted({record.stored for record in found.values()} - {''}):
    rows_of = [f'`{n}`' for n, record in found.items() if record.stored == file]
    text += [f'Taken from {file}, where other machines may have run them: '
             f'{", ".join(rows_of)}.', '']
  text += [
      'Accuracy is on the test set, the mean over the last tenth of the '
      f'rounds and over {len(plan.SEEDS)} seeds, ± their standard deviation. '
      'Gap '
      'closed is the share of the way from labels only to all labels. A rank '
      'has in brackets the best and the worst that paired t intervals of 95 % '
      'leave open, each pair of rows for itself. Rounds to labels only: the '
      'first evaluated round whose mean is at least the end of labels only. '
      'The worst tenth is the mean over these clients; that of a client is on '
      'test rows weighed as its own classes. Bytes '
      'are of all clients together; passes are rows through the network '
      'forward and backward, a client and round; seconds are of one seed by '
      'the clock.', '',
      f'Flags of the bed: `{" ".join(_flags(bed.flags))}`; '
      + '; '.join(_skew(bed, name) for name in bed.skews) + '.', '',
      f'Command: `{command}`; of some rows alone with their names after '
      f'`{bed.name}`.', '', '## What was tried', '',
      f'Up to {count} configuration{"s" * (count > 1)} a row, the default '
      f'first, on the validation rows of seed {plan.SEARCH_SEED} and on '
      f'{next(iter(bed.skews))}.', '', *_search(lines, found)]
  return '\n'.join(text).rstrip() + '\n'


def _flags(flags: Mapping[str, Any]) -> list[str]:
  """Flags as a shell takes them."""
  return [shlex.quote(f'--{name}={value}') for name, value in flags.items()]


def _skew(bed: plan.Bed, name: str) -> str:
  """Returns what the runs of a skew have besides the flags of the bed."""
  flags = {**bed.skews[name]}
  words = ['fedjax-ssl train', flags.pop('setting', bed.setting)]
  return f'{name}: `{" ".join([*words, *_flags(flags)])}`'


def table(rows: Sequence[standing.Line]) -> list[str]:
  """Returns the lines of a markdown table, as `standing.compare` orders."""
  found = [f'| {" | ".join(_HEAD)} |',
           '|' + '|'.join('---' if h == 'method' else '---:' for h in _HEAD)
           + '|']
  return [*found, *(f'| {" | ".join(_cells(row))} |' for row in rows)]


def drawn(rows: Sequence[standing.Line]) -> list[standing.Line]:
  """Returns the rows whose curves are drawn: the bounds and the best."""
  best = [row for row in rows if row.rank is not None][:_CURVES]
  return [row for row in rows if row.rank is None or row in best]


def _cells(row: standing.Line) -> tuple[str, ...]:
  m = row.measured
  name = f'`{m.entry.name}`' + (r' \*' if m.notes else '')
  rank = ('' if row.rank is None or row.between is None
          else f'{row.rank} ({row.between[0]}-{row.between[1]})')
  return (rank, name, percent(m.accuracy), gap(row),
          '-' if row.reached is None else str(row.reached), percent(m.worst),
          _megabytes(m.bytes_up), _megabytes(m.bytes_down),
          '-' if m.passes is None else f'{m.passes:.0f}',
          '-' if m.seconds is None else f'{m.seconds:.0f}')


def _notes(rows: Sequence[standing.Line]) -> list[str]:
  found = [rf'\* `{row.measured.entry.name}`: {"; ".join(row.measured.notes)}.'
           for row in rows if row.measured.notes]
  return [*found, ''] if found else []


def _search(lines: Mapping[str, Sequence[standing.Line]],
            found: Mapping[str, records.Record]) -> list[str]:
  chosen = {line.measured.entry.name: line.measured
            for rows in lines.values() for line in rows}
  text = ['| row | chosen | validation, % | default | tuned |',
          '|---|---|---:|---:|---|']
  for name, record in found.items():
    if name not in chosen:
      continue
    entry, best = chosen[name].entry, chosen[name].configuration
    values, space = record.tried, record.space
    spaces = {'learning_rate': space['learning_rate'], **space['knobs']}
    text.append(
        f'| `{name}` | `{plan.shown(plan.method_of(entry, best))}`, rate '
        f'{best.learning_rate:g} | {percent([values.get(best.number)])} | '
        f'{percent([values.get(0)])} | '
        + '; '.join(f'{knob} {", ".join(map(_short, choices))}'
                    for knob, choices in spaces.items()) + ' |')
  return text


def gap(row: standing.Line) -> str:
  """Says which share of the gap between the bounds a row closes."""
  return '-' if row.gap is None else f'{100 * row.gap:.0f} %'


def percent(shares: Iterable[float | None]) -> str:
  """Says mean and deviation of shares in percent; '-' if one is not known."""
  return summary.percent([
      share if share is not None and np.isfinite(share) else None
      for share in shares])


def _megabytes(count: float | None) -> str:
  return '-' if count is None else f'{count / 1e6:.0f}'


def _short(value: Any) -> str:
  return f'{value:g}' if isinstance(value, float) else str(value)
