"""Finished rows of a bench as JSON, which later benches add to their tables."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import itertools
import json
import pathlib
import types
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.bench import plan, standing
from fedjax_ssl.core import checks, disk

VERSION = 'bench_v3'
_SPACE = {'method', 'flags', 'learning_rate', 'knobs'}  # Besides `code`.
_NO_TABLE = 'is not a table that `fedjax-ssl bench` wrote.'


class _Damaged(ValueError):
  """A table has a value that it cannot have."""


class Record(NamedTuple):
  """A finished row.

  Attributes:
    space: what it was chosen from, as `plan.space` gives it.
    tried: by number of configuration, its validation accuracy; -inf where it
      diverged.
    measured: of each skew, its final seeds.
    environments: of each skew, commit, packages and machine.
    stored: folder and name of the table that it was taken from; '' if it was
      run for this one.
    data: of each skew, the hash of the data set where it is known.
  """

  space: Mapping[str, Any]
  tried: Mapping[int, float]
  measured: Mapping[str, standing.Measured]
  environments: Mapping[str, Mapping[str, Any]]
  stored: str = ''
  data: Mapping[str, str] = types.MappingProxyType({})

  def with_skews_of(self, other: Record) -> Record:
    """Adds the skews that only another record of the same row has.

    Returns:
      The record; as it is if the other has other data, was tuned otherwise, or
      had other results.
    """
    if (self.space, self.tried) != (other.space, other.tried) or len(
        {*self.data.values(), *other.data.values()}) > 1:
      return self
    return self._replace(measured={**other.measured, **self.measured},
                         environments={**other.environments,
                                       **self.environments},
                         data={**{skew: digest
                                  for skew, digest in other.data.items()
                                  if skew not in self.measured}, **self.data})


def compared(bed: plan.Bed, found: Mapping[str, Record]
             ) -> dict[str, list[standing.Line]]:
  """Compares rows on each skew that they have final seeds on."""
  return {skew: standing.compare([record.measured[skew]
                                  for record in found.values()
                                  if skew in record.measured])
          for skew in bed.skews}


def written(bed: plan.Bed, lines: Mapping[str, Sequence[standing.Line]],
            found: Mapping[str, Record], count: int = plan.CONFIGURATIONS,
            changed: Sequence[str] = ()) -> str:
  """Returns a bed's table as JSON, which `read` understands.

  Args:
    bed: the bed.
    lines: of each skew, as `compared` gives them.
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
      rows[skew].append({
          **_plain(line), 'environment': number,
          **({'data': record.data[skew]} if skew in record.data else {})})
  return disk.as_json({
      **_heading(bed, count, changed),
      'environments': [json.loads(text) for text in environments],
      'tuned': {name: {
          'space': record.space,
          'tried': {str(n): _number(value)
                    for n, value in record.tried.items()},
          **({'stored': record.stored} if record.stored else {})}
                for name, record in found.items()},
      'rows': rows})


def read(file: pathlib.Path, bed: plan.Bed, count: int = plan.CONFIGURATIONS,
         changed: Sequence[str] = (), *, whole: bool = True
         ) -> dict[str, Record]:
  """Reads the rows of a table that `written` has made.

  Whether a row's method and space are those that the reader wants is not
  looked at here: compare `Record.space` with `plan.space`.

  Args:
    file: the table.
    bed: the bed that they must be of.
    count: configurations that they must have had at most.
    changed: flags that their runs must have had besides the bed's.
    whole: whether to leave out rows that lack final seeds on any skew.

  Returns:
    The rows by name.

  Raises:
    FieldError: if the file cannot be read, is no such table, is damaged, or is
      of another bench.
  """
  def refuse(reason: str) -> checks.FieldError:
    return checks.FieldError('stored', file, reason)
  try:
    stored = json.loads(file.read_text('utf-8'))
  except OSError as error:
    raise refuse(f'cannot be read: {error.strerror}.') from error
  except (ValueError, RecursionError) as error:
    raise refuse(_NO_TABLE) from error
  # The version is the first: tables of others lack what this one's have.
  for name, value in _heading(bed, count, changed).items():
    if not isinstance(stored, dict) or name not in stored:
      raise refuse(_NO_TABLE)
    if stored[name] != value:
      raise refuse(f'was made with {_HEADING[name]} '
                   f'{_text(stored[name])}, this bench with {_text(value)}: '
                   'their rows cannot be compared.')
  try:
    found = _records(stored, bed, count, whole)
    _check_seeds(found)
    return found
  except _Damaged as error:
    raise refuse(f'is damaged: {error}.') from error
  except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
    raise refuse('is damaged: a value is missing, or is not what `fedjax-ssl '
                 'bench` writes.') from error


def has_rows(file: pathlib.Path) -> bool:
  """Returns whether a table has rows; True for a file that is no table."""
  try:
    stored = json.loads(file.read_text('utf-8'))
    return any(map(bool, stored['rows'].values()))
  except FileNotFoundError:
    return False
  except (OSError, ValueError, KeyError, TypeError, AttributeError,
          RecursionError):
    return True


def configurations(file: pathlib.Path) -> int:
  """Reads how many a table's rows had at most; the default if unknown."""
  try:
    stored = json.loads(file.read_text('utf-8'))
    return max(1, int(stored['configurations']))
  except (OSError, ValueError, KeyError, TypeError, OverflowError,
          RecursionError):
    return plan.CONFIGURATIONS


# Words for what two tables must have in common.
_HEADING = {'version': 'the version', 'bed': 'BED', 'seeds': 'the seeds',
            'configurations': '--configurations',
            'changed': 'the flags behind --'}


def _heading(bed: plan.Bed, count: int, changed: Sequence[str]
             ) -> dict[str, Any]:
  return {'version': VERSION, 'bed': bed.name, 'seeds': list(plan.SEEDS),
          'configurations': count, 'changed': list(changed)}


def _text(value: Any) -> str:
  return ' '.join(map(str, value)) or 'none' if isinstance(value, list) else (
      str(value))


def _records(stored: Mapping[str, Any], bed: plan.Bed, count: int,
             whole: bool) -> dict[str, Record]:
  found = {}
  for row in (row for skew in bed.skews for row in stored['rows'][skew]):
    if row['row'] not in stored['tuned']:
      raise _Damaged(f'it does not say how the row {row["row"]} was tuned')
  for name, tuned in stored['tuned'].items():
    rows: dict[str, Mapping[str, Any]] = {}
    for skew in bed.skews:
      mine = [row for row in stored['rows'][skew] if row['row'] == name]
      if len(mine) > 1:
        raise _Damaged(f'the row {name} appears {len(mine)} times')
      if mine:
        rows[skew] = mine[0]
    if not rows or whole and len(rows) < len(bed.skews):
      continue
    entry = _entry(name, tuned['space'], bed)
    configurations = plan.configurations(entry, bed, count)
    tried = {int(n): -np.inf if v is None else _share(v)
             for n, v in tuned['tried'].items()}
    if [*tried] != [c.number for c in configurations]:
      raise _Damaged(f'the row {name} does not have its '
                     f'{len(configurations)} configurations')
    found[name] = Record(
        tuned['space'], tried,
        {skew: _measured(row, entry, configurations)
         for skew, row in rows.items()},
        {skew: _environment(row, stored['environments'])
         for skew, row in rows.items()}, str(tuned.get('stored', '')),
        {skew: _hash(row) for skew, row in rows.items() if 'data' in row})
    best = standing.choose([(c, tried[c.number]) for c in configurations])
    for measured in found[name].measured.values():
      if (number := measured.configuration.number) != best.number:
        raise _Damaged(f'the row {name} has configuration {number}, and of '
                       f'what was tried {best.number} is the best')
  return found


def _check_seeds(found: Mapping[str, Record]) -> None:
  """Raises _Damaged if a row does not have all seeds."""
  counts = {len(measured.accuracy) for record in found.values()
            for measured in record.measured.values()}
  if counts - {len(plan.SEEDS)}:
    raise _Damaged('its rows have the values of '
                   f'{" and ".join(map(str, sorted(counts)))} seeds')


def _entry(name: str, space: Mapping[str, Any], bed: plan.Bed) -> plan.Entry:
  """Reads the row that a space describes; _Damaged if it is no space."""
  # Not compared with `plan.space` of the row, which opens the file or module
  # that its method names.
  if {*space} - {'code'} != _SPACE:
    raise _Damaged(f'the space of the row {name} has '
                   f'{", ".join(space) or "nothing"}')
  entry = plan.from_space(name, space)
  if plan.shown(entry.method) != entry.method:
    raise _Damaged(f'the method of the row {name} has the path of a file')
  if space['learning_rate'] != list(bed.rates):
    raise _Damaged(f'the row {name} has other learning rates')
  for knob, values in entry.knobs.items():
    if not values or len({*values}) < len(values):
      raise _Damaged(f'the row {name} has the values {values} of {knob}')
  return entry


def _plain(line: standing.Line) -> dict[str, Any]:
  m = line.measured
  return {
      'row': m.entry.name, 'rank': line.rank, 'between': line.between,
      'configuration': m.configuration.number,
      'method': plan.shown(plan.method_of(m.entry, m.configuration)),
      'learning_rate': m.configuration.learning_rate,
      'accuracy': _finite(m.accuracy), 'worst': _finite(m.worst),
      'gap': _number(line.gap), 'reached': line.reached, 'bytes_up': m.bytes_up,
      'bytes_down': m.bytes_down, 'passes': m.passes, 'seconds': m.seconds,
      'rounds': m.rounds, 'curves': [_finite(curve) for curve in m.curves],
      'notes': m.notes}


def _measured(row: Mapping[str, Any], entry: plan.Entry,
              configurations: Sequence[plan.Configuration]
              ) -> standing.Measured:
  """Reads a row on a skew; _Damaged if a value is none that it can have."""
  number = row['configuration']
  if _whole(number) >= len(configurations):
    raise _Damaged(f'the row {entry.name} has no configuration {number}')
  chosen = configurations[_whole(number)]
  if (plan.method_of(entry, chosen), chosen.learning_rate) != (
      row['method'], row['learning_rate']):
    raise _Damaged(f'configuration {number} of the row {entry.name} is not '
                   f'{row["method"]} with the rate {row["learning_rate"]}')
  accuracy, worst = (_array(row[k], _share) for k in ('accuracy', 'worst'))
  rounds = tuple(_whole(r) for r in row['rounds'])
  if any(after <= before for before, after in itertools.pairwise(rounds)):
    raise _Damaged(f'the rounds of the row {entry.name} do not increase')
  curves = np.array([_array(curve, _share) for curve in row['curves']])
  if worst.shape != accuracy.shape or curves.shape != (
      len(accuracy), len(rounds)):
    raise _Damaged(f'the row {entry.name} has values that do not match its '
                   'seeds or rounds')
  notes = row['notes']
  if not isinstance(notes, list) or not all(isinstance(n, str) for n in notes):
    raise _Damaged(f'the notes of the row {entry.name} are not a list of '
                   'strings')
  up, down, passes, seconds = (
      None if row[k] is None else _positive(row[k])
      for k in ('bytes_up', 'bytes_down', 'passes', 'seconds'))
  return standing.Measured(entry, chosen, accuracy, rounds, curves, worst, up,
                           down, passes, seconds, tuple(notes))


def _environment(row: Mapping[str, Any], environments: Sequence[Any]
                 ) -> dict[str, Any]:
  number = _whole(row['environment'])
  if number >= len(environments):
    raise _Damaged(f'the row {row["row"]} has no environment {number}')
  return dict(environments[number])


def _hash(row: Mapping[str, Any]) -> str:
  if not isinstance(row['data'], str):
    raise _Damaged(f'the data of the row {row["row"]} are not a hash')
  return row['data']


def _array(values: Any, one: Callable[[Any], float]) -> np.ndarray:
  if not isinstance(values, list):
    raise _Damaged(f'{values!r} is no list')
  return np.array([np.nan if v is None else one(v) for v in values], float)


def _positive(value: Any) -> float:
  if isinstance(value, bool) or not isinstance(value, (int, float)) or not (
      0 <= value < 1e300):
    raise _Damaged(f'{value!r} is not a number of at least 0')
  return value


def _share(value: Any) -> float:
  if _positive(value) > 1:
    raise _Damaged(f'{value!r} is not between 0 and 1')
  return value


def _whole(value: Any) -> int:
  if _positive(value) != int(value):
    raise _Damaged(f'{value!r} is no whole number')
  return int(value)


def _finite(values: np.ndarray) -> list[float | None]:
  return [_number(v) for v in values]


def _number(value: float | None) -> float | None:
  """Returns the number as JSON can hold it: None for what is not finite."""
  return None if value is None or not np.isfinite(value) else float(value)
