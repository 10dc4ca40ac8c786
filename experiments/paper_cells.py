"""The papers' tables as data, and the cells of them that have been run.

`experiments/tables/NAME.toml` holds one table: the paper's numbers by row and
column, and a pattern that names the flagfile of each. `{method}` is the row's,
all other names are the column's. A run may fill several columns, each with
another `metric` (default: accuracy), times its `scale` (default: 100). `values`
may be `-` (the paper has none) or `diverged`.
Results are `experiments/results/tables/NAME/CELL.json`, one file a cell.
"""
from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import re
import tomllib
from typing import Any

import paper_flags

HERE = pathlib.Path(__file__).resolve().parent
TABLES = HERE / 'tables'
FLAGFILES = HERE / 'flagfiles'
RESULTS = HERE / 'results' / 'tables'
_KEYS = {'title', 'paper', 'unit', 'runs', 'flagfile', 'first',
         'first_columns', 'columns', 'rows'}
_TEXTS = ('title', 'paper', 'unit', 'runs', 'flagfile')
_ROW_KEYS = {'title', 'method', 'values', 'std', 'flags'}
# What a column may hold besides the words of the pattern.
_COLUMN_KEYS = {'title', 'metric', 'scale', 'flags', 'setting', 'data'}


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run of a table; one or several of its places.

  Attributes:
    name: of its JSON file and folder.
    row: title of the row.
    columns: titles of the columns that it fills.
    flagfile: name of the flagfile.
    flags: what goes after it.
  """

  name: str
  row: str
  columns: tuple[str, ...]
  flagfile: str
  flags: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Table:
  """A table of a paper; see the file's own comments."""

  name: str
  title: str
  paper: str
  unit: str
  runs: str
  columns: list[dict[str, Any]]
  rows: list[dict[str, Any]]
  pattern: str
  first: list[str]
  first_columns: list[str]

  def value(self, row: int, column: int) -> tuple[float | str, float | None]:
    """The paper's number, or '-' or 'diverged', and its deviation."""
    value = self.rows[row]['values'][column]
    std = self.rows[row].get('std', ['-'] * len(self.columns))[column]
    return value, None if isinstance(std, str) else std

  def cell_of(self, row: int, column: int) -> Cell:
    """The cell of one place, as if it filled that place alone."""
    words = {**self.columns[column], 'method': self.rows[row]['method']}
    flagfile = self.pattern.format(**words)
    flags = (*self.columns[column].get('flags', ()),
             *self.rows[row].get('flags', ()))
    tail = '_'.join(re.sub(r'[^\w.]+', '', f) for f in flags)
    name = flagfile.removesuffix('.flags') + (f'-{tail}' if tail else '')
    return Cell(name, self.rows[row]['title'],
                (self.columns[column]['title'],), flagfile, flags)

  def cells(self) -> list[Cell]:
    """The runs that the table asks for, those that tell most first.

    The rows named by `first` come before all others, column by column (those
    of `first_columns` before the others), so that a comparison is whole before
    the next begins; then all remaining places, in the same order of columns.
    """
    def rank(title: str, first: Sequence[str]) -> int:
      return first.index(title) if title in first else len(first)

    places = [(r, c) for r in range(len(self.rows))
              for c in range(len(self.columns))
              if self.rows[r]['values'][c] != '-']
    def order(place):
      row, column = (self.rows[place[0]]['title'],
                     self.columns[place[1]]['title'])
      return (row not in self.first, rank(column, self.first_columns),
              place[1], rank(row, self.first), place[0])
    found: dict[str, Cell] = {}
    for row, column in sorted(places, key=order):
      cell = self.cell_of(row, column)
      known = found.get(cell.name)
      found[cell.name] = cell if known is None else dataclasses.replace(
          known, columns=known.columns + cell.columns)
    return list(found.values())


def names(folder: pathlib.Path = TABLES) -> list[str]:
  """The tables that there are."""
  return sorted(file.stem for file in folder.glob('*.toml'))


def load(name: str, folder: pathlib.Path = TABLES) -> Table:
  """Reads a table.

  Raises:
    ValueError: if there is none of that name, or it is not as it should be.
  """
  file = folder / f'{name}.toml'
  if not file.exists():
    raise ValueError(f'--table={name}: there is no {file.name}. Tables: '
                     f'{", ".join(names(folder))}.')
  try:
    raw = tomllib.loads(file.read_text())
    unknown = set(raw) - _KEYS
    if unknown:
      raise ValueError(f'{sorted(unknown)[0]!r} is no key of a table')
    _check_types(raw)
    table = Table(name, raw['title'], raw['paper'], raw['unit'], raw['runs'],
                  raw['columns'], raw['rows'], raw['flagfile'],
                  raw.get('first', []), raw.get('first_columns', []))
    _check(table)
  except KeyError as error:
    raise ValueError(f'{file}: the key {error} is missing.') from error
  except ValueError as error:
    raise ValueError(f'{file}: {error}.') from error
  return table


def _check_types(raw: dict[str, Any]) -> None:
  """Raises ValueError or KeyError for what is missing or of a wrong type."""
  for key in _TEXTS:
    _must(isinstance(raw[key], str), f'{key} = {raw[key]!r} must be a text')
  for key in ('first', 'first_columns'):
    _must_be_texts(raw.get(key, []), key)
  words = set(re.findall(r'\{([^{}]*)\}', raw['flagfile']))
  plain = re.sub(r'\{\w+\}', '', raw['flagfile'])
  _must('{' not in plain and '}' not in plain,
        f'flagfile = {raw["flagfile"]!r}: only names may stand in braces')
  for kind in ('columns', 'rows'):
    _must(isinstance(raw[kind], list) and bool(raw[kind])
          and all(isinstance(part, dict) for part in raw[kind]),
          f'{kind} must be tables [[{kind}]]')
  for kind, needed, known in (
      ('row', {'title', 'method', 'values'}, _ROW_KEYS),
      ('column', {'title', *words} - {'method'}, _COLUMN_KEYS | words)):
    for i, part in enumerate(raw[f'{kind}s'], 1):
      where = f'{kind} {part.get("title", i)!r}'
      for key in sorted(needed - set(part)):
        raise ValueError(f'{where} lacks the key {key!r}')
      for key in sorted(set(part) - known):
        raise ValueError(f'{where}: {key!r} is no key of a {kind}')
      for key, value in part.items():
        if key in ('values', 'std'):
          _must(isinstance(value, list),
                f'{where}: {key} = {value!r} must be a list')
          for number in value:
            _must(isinstance(number, int | float | str)
                  and not isinstance(number, bool),
                  f'{where}: {number!r} in {key} is no number')
        elif key == 'scale':
          _must(isinstance(value, int | float) and not isinstance(value, bool),
                f'{where}: scale = {value!r} must be a number')
        elif key == 'flags':
          _must_be_texts(value, f'{where}: flags')
        else:
          _must(isinstance(value, str),
                f'{where}: {key} = {value!r} must be a text')


def _must(holds: bool, text: str) -> None:
  if not holds:
    raise ValueError(text)


def _must_be_texts(value: Any, where: str) -> None:
  _must(isinstance(value, list) and all(isinstance(x, str) for x in value),
        f'{where} = {value!r} must be a list of texts')


def _check(table: Table) -> None:
  """Raises ValueError if rows and columns do not go together."""
  titles = [row['title'] for row in table.rows]
  columns = [column['title'] for column in table.columns]
  for kind, found in (('row', titles), ('column', columns)):
    if len(set(found)) < len(found):
      raise ValueError(f'a {kind} comes twice')
  missing = [t for t in table.first if t not in titles]
  missing += [t for t in table.first_columns if t not in columns]
  if missing:
    raise ValueError(f'{missing[0]!r} is first, and no row or column')
  for row in table.rows:
    for key in ('values', 'std'):
      values = row.get(key, row['values'])
      if len(values) != len(columns):
        raise ValueError(f'row {row["title"]!r} has {len(values)} {key} for '
                         f'{len(columns)} columns')
      for value in values:
        if isinstance(value, str) and value not in ('-', 'diverged'):
          raise ValueError(f'row {row["title"]!r}: {value!r} is no number')


def lacks(cell: Cell, methods: Sequence[str],
          flagfiles: pathlib.Path = FLAGFILES) -> str:
  """Why a cell cannot be run yet; '' if it can."""
  file = flagfiles / cell.flagfile
  if not file.exists():
    return f'{cell.flagfile} does not exist yet'
  script = script_of(cell, flagfiles)
  if not script.exists():
    return f'{script.name} does not exist yet'
  match = re.findall(r'^--method=(\w+)', '\n'.join(
      paper_flags.lines_of(file)), re.MULTILINE)
  if match and match[-1] not in methods:
    return f'method {match[-1]} does not exist yet'
  return ''


def script_of(cell: Cell, flagfiles: pathlib.Path = FLAGFILES) -> pathlib.Path:
  """The experiment of a flagfile `a.b.flags`: `a.py` in the folder above."""
  return flagfiles.parent / f'{cell.flagfile.split(".")[0]}.py'


def seeds_of(cell: Cell, flagfiles: pathlib.Path = FLAGFILES) -> list[int]:
  """The seeds that a cell's flags name; [0] without any."""
  words = [*paper_flags.lines_of(flagfiles / cell.flagfile), *cell.flags]
  found = [word.partition('=')[2] for word in words
           if word.startswith(('--seeds=', '--seed='))]
  try:
    return [int(s) for s in found[-1].split(',')] if found else [0]
  except ValueError:
    raise ValueError(f'{cell.flagfile} has seeds {found[-1]}, which must be '
                     'whole numbers, separated by commas.') from None


def _lines(cell: Cell, extra: Sequence[str], flagfiles: pathlib.Path
           ) -> list[str]:
  return [*paper_flags.lines_of(flagfiles / cell.flagfile), *cell.flags, *extra]


def digest(cell: Cell, extra: Sequence[str] = (),
           flagfiles: pathlib.Path = FLAGFILES) -> str:
  """Hex digest of all flags of a cell, seeds and comments left out."""
  return paper_flags.digest(_lines(cell, extra, flagfiles))


def is_stale(cell: Cell, stored: dict[str, Any], extra: Sequence[str] = (),
             flagfiles: pathlib.Path = FLAGFILES) -> bool:
  """Whether a cell's flags have changed since its numbers were made.

  Results without a digest are judged by the flags that their runs had.
  """
  if not stored or not (flagfiles / cell.flagfile).exists():
    return False
  if 'digest' in stored:
    return stored['digest'] != digest(cell, extra, flagfiles)
  return bool(paper_flags.differences(
      stored.get('run_flags', {}), _lines(cell, extra, flagfiles)))


def result_file(table: str, cell: Cell, variant: str = '',
                results: pathlib.Path = RESULTS) -> pathlib.Path:
  """Where a cell's numbers go."""
  return results / (f'{table}.{variant}' if variant else table) / (
      f'{cell.name}.json')


def read_result(file: pathlib.Path) -> dict[str, Any]:
  """A cell's numbers; {} if it has none.

  Raises:
    ValueError: if the file is damaged.
  """
  if not file.exists():
    return {}
  try:
    stored = json.loads(file.read_text())
    for key in ('flagfile', 'flags', 'extra_flags', 'seeds'):
      stored[key]
    if not stored['seeds']:
      raise ValueError('it holds no seeds')
    for seed in dict(stored['seeds']).values():
      dict(seed['metrics']), dict(seed['environment']), seed['final']
    return stored
  except KeyError as error:
    raise ValueError(f'{file} is damaged: {error} is missing.') from error
  except (ValueError, TypeError, AttributeError, RecursionError) as error:
    raise ValueError(f'{file} is damaged: {error}.') from error


def write_result(file: pathlib.Path, stored: dict[str, Any]) -> None:
  """Replaces a cell's file whole."""
  file.parent.mkdir(parents=True, exist_ok=True)
  partial = file.with_suffix('.partial')
  partial.write_text(json.dumps(stored, indent=1, sort_keys=True) + '\n')
  os.replace(partial, file)
