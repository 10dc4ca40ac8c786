"""Finished rows of a bench as JSON, which later benches add to their tables."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.bench import plan, standing

VERSION = 'bench_v2'


class Record(NamedTuple):
  """A finished row.

  Attributes:
    tried: by number of configuration, its validation accuracy; -inf where it
      diverged.
    measured: of each skew, its final seeds.
    environments: of each skew, commit, packages and machine.
  """

  tried: Mapping[int, float]
  measured: Mapping[str, standing.Measured]
  environments: Mapping[str, Mapping[str, Any]]


def written(bed: plan.Bed, lines: Mapping[str, Sequence[standing.Line]],
            found: Mapping[str, Record], count: int = plan.CONFIGURATIONS,
            changed: Sequence[str] = ()) -> str:
  """Returns a bed's table as JSON, which `read` understands.

  Args:
    bed: the bed.
    lines: of each skew, as `standing.compare` gives them.
    found: the same rows by name, with what was tried of them.
    count: configurations that each row had at most.
    changed: flags that were given to all runs besides the bed's.
  """
  environments: dict[str, int] = {}  # As text, numbered as they come.
  rows: dict[str, list[dict[str, Any]]] = {}
  for skew, ordered in lines.items():
    rows[skew] = []
    for line in ordered:
      record = found[line.measured.entry.name]
      text = json.dumps(record.environments[skew], sort_keys=True)
      number = environments.setdefault(text, len(environments))
      rows[skew].append({**_plain(line), 'environment': number})
  text = json.dumps({
      'version': VERSION, 'bed': bed.name, 'configurations': count,
      'changed': list(changed),
      'environments': [json.loads(text) for text in environments],
      'tried': {name: {str(n): _number(value)
                       for n, value in record.tried.items()}
                for name, record in found.items()},
      'rows': rows}, indent=1)
  # A list of numbers takes a line, not a line for each of them.
  return re.sub(r'\[\s+([-+\w.,\s]+?)\s+\]', lambda found: '[' + ' '.join(
      found[1].split()) + ']', text) + '\n'


def read(file: pathlib.Path, bed: plan.Bed, count: int = plan.CONFIGURATIONS,
         changed: Sequence[str] = ()) -> dict[str, Record]:
  """Reads the rows of a table that `written` has made.

  Args:
    file: the table.
    bed: the bed that they must be of.
    count: configurations that they must have had at most.
    changed: flags that their runs must have had besides the bed's.

  Returns:
    The rows that have final seeds on every skew, by name.

  Raises:
    ValueError: if the file is none, or if its rows were run or tuned otherwise.
  """
  try:
    stored = json.loads(file.read_text('utf-8'))
    same = {name: stored[name] for name in
            ('version', 'bed', 'configurations', 'changed')}
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{file} is no table of `fedjax-ssl bench` of this '
                     f'version ({type(error).__name__}: {error}).') from error
  wanted = {'version': VERSION, 'bed': bed.name, 'configurations': count,
            'changed': list(changed)}
  for name, value in wanted.items():
    if same[name] != value:
      raise ValueError(f'{file} has {name} {same[name]!r}, and this bench '
                       f'{value!r}: their rows cannot be compared.')
  try:
    return _records(stored, bed, count)
  except (KeyError, TypeError, IndexError) as error:
    raise ValueError(f'{file} is damaged ({type(error).__name__}: {error}).'
                     ) from error


def _records(stored: Mapping[str, Any], bed: plan.Bed, count: int
             ) -> dict[str, Record]:
  known = plan.entries()
  found = {}
  for name, tried in stored['tried'].items():
    rows = {skew: row for skew in bed.skews
            for row in stored['rows'][skew] if row['row'] == name}
    if len(rows) < len(bed.skews):
      continue
    first = next(iter(rows.values()))
    entry = known.get(name) or plan.own_entry(first['entry'])
    space = plan.configurations(entry, bed, count)
    chosen = next((c for c in space if c.number == first['configuration']),
                  None)
    if chosen is None or len(space) != len(tried) or (
        plan.method_of(entry, chosen), chosen.learning_rate) != (
            first['method'], first['learning_rate']):
      raise ValueError(f'The row {name} was tuned over another space than '
                       'entries.toml has now; leave it out of the file.')
    found[name] = Record(
        {int(n): -np.inf if v is None else v for n, v in tried.items()},
        {skew: _measured(row, entry, chosen) for skew, row in rows.items()},
        {skew: stored['environments'][row['environment']]
         for skew, row in rows.items()})
  return found


def _plain(line: standing.Line) -> dict[str, Any]:
  m = line.measured
  return {
      'row': m.entry.name, 'rank': line.rank, 'between': line.between,
      'entry': m.entry.method, 'configuration': m.configuration.number,
      'method': plan.method_of(m.entry, m.configuration),
      'learning_rate': m.configuration.learning_rate,
      'accuracy': _finite(m.accuracy), 'worst': _finite(m.worst),
      'gap': _number(line.gap), 'reached': line.reached, 'bytes_up': m.bytes_up,
      'bytes_down': m.bytes_down, 'passes': m.passes, 'seconds': m.seconds,
      'rounds': m.rounds, 'curves': [_finite(curve) for curve in m.curves],
      'notes': m.notes}


def _measured(row: Mapping[str, Any], entry: plan.Entry,
              configuration: plan.Configuration) -> standing.Measured:
  return standing.Measured(
      entry, configuration, _array(row['accuracy']),
      tuple(row['rounds']), _array(row['curves']), _array(row['worst']),
      row['bytes_up'], row['bytes_down'], row['passes'], row['seconds'],
      tuple(row['notes']))


def _array(values: Sequence[Any]) -> np.ndarray:
  return np.array(values, float)  # None becomes NaN.


def _finite(values: np.ndarray) -> list[float | None]:
  return [_number(v) for v in values]


def _number(value: float | None) -> float | None:
  """The number as JSON can hold it: None for what is not finite."""
  return None if value is None or not np.isfinite(value) else float(value)
