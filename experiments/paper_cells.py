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

HERE = pathlib.Path(__file__).resolve().parent
TABLES = HERE / 'tables'
FLAGFILES = HERE / 'flagfiles'
RESULTS = HERE / 'results' / 'tables'
_KEYS = {'title', 'paper', 'unit', 'runs', 'flagfile', 'first',
         'first_columns', 'columns', 'rows'}


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
    table = Table(name, raw['title'], raw['paper'], raw['unit'], raw['runs'],
                  raw['columns'], raw['rows'], raw['flagfile'],
                  raw.get('first', []), raw.get('first_columns', []))
    _check(table)
  except KeyError as error:
    raise ValueError(f'{file}: the key {error} is missing.') from error
  except ValueError as error:
    raise ValueError(f'{file}: {error}.') from error
  return table


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
  match = re.findall(r'^--method=(\w+)', file.read_text(), re.MULTILINE)
  if match and match[-1] not in methods:
    return f'method {match[-1]} does not exist yet'
  return ''


def script_of(cell: Cell, flagfiles: pathlib.Path = FLAGFILES) -> pathlib.Path:
  """The experiment of a flagfile `a.b.flags`: `a.py` in the folder above."""
  return flagfiles.parent / f'{cell.flagfile.split(".")[0]}.py'


def seeds_of(cell: Cell, flagfiles: pathlib.Path = FLAGFILES) -> list[int]:
  """The seeds that a cell's flags name; [0] without any."""
  words = [*(flagfiles / cell.flagfile).read_text().splitlines(), *cell.flags]
  found = [word.partition('=')[2] for word in words
           if word.startswith(('--seeds=', '--seed='))]
  return [int(s) for s in found[-1].split(',')] if found else [0]


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
    dict(stored['seeds'])
    return stored
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{file} is damaged: {error}.') from error


def write_result(file: pathlib.Path, stored: dict[str, Any]) -> None:
  """Replaces a cell's file whole."""
  file.parent.mkdir(parents=True, exist_ok=True)
  partial = file.with_suffix('.partial')
  partial.write_text(json.dumps(stored, indent=1, sort_keys=True) + '\n')
  os.replace(partial, file)
