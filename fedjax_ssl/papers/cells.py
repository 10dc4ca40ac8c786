"""The published tables as data, and the runs that fill them.

A file `tables/PAPER.toml` is one paper. It has the keys

    title, paper, runs   its name, its citation, and which runs its numbers are
                         from
    digits               after the decimal point, at least (default: 2)
    headline             patterns of the cells that have a stored flagfile; a
                         pattern that begins with ! takes cells away again
    cells                pattern of the cells' names, as in "{setting}.{method}"
    [flags]              what all its runs share
    [methods], [parts]   flags by name: methods for rows, parts for `use`
    [[tables]]           its tables: name, title, source (where in the paper),
                         unit, first and first_columns (what to run first),
                         columns and rows

A column has a `title` and a `setting`, the script that deals the data. Where a
run measures more than accuracy, a column names another `metric`, which is shown
times `scale` (default: 100). A row has a `title`, a `method`, `values` and
`std`, in the order of the columns. A value is a number, `-` (the paper has no
such cell), `diverged`, or `unprinted` (a curve, or nothing); a row without
values is unprinted. `values_of = "TABLE: ROW"` takes the values of another row,
of columns with the same title, and `only` names the columns that a row has.

Papers, tables, columns, rows, parts and methods may all have the keys

    use                  parts to take first
    flags                which override those said before; an empty text takes
                         one away
    words                replace {word} in flags, names and remarks
    differs, open, notes what is not as in the paper; what the paper leaves open
                         and we chose; and other remarks
    unprinted            what to say instead of a number
    missing              why its cells cannot be run

They are read in the order paper, table, column, method, row; later ones win. A
method that is only a name instead of a table is the value of --method.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import copy
import dataclasses
import difflib
import fnmatch
import functools
import pathlib
import tomllib
from typing import Any, Final, Literal

from fedjax_ssl.papers import schema

TABLES = pathlib.Path(__file__).resolve().parent / 'tables'
NONE: Final = '-'  # Of `values`.
UNPRINTED: Final = 'unprinted'
Value = float | Literal['-', 'diverged', 'unprinted']
_LISTS = ('differs', 'open', 'notes')


@dataclasses.dataclass(frozen=True)
class Number:
  """A published number, its column, and how ours is measured."""

  column: str
  value: Value
  std: float | None = None
  metric: str = 'accuracy'
  scale: float = 100.0


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run of a table, which fills one or several of its places.

  Attributes:
    name: of its files; cells with the same name have the same flags.
    table: the table that it is taken from.
    row: title of its row.
    setting: the script that deals the data.
    flags: all its flags, as `--name=value`.
    numbers: the published numbers of the places that it fills.
    differs: what is not as in the paper.
    open: what the paper does not state, and what it is here.
    notes: other remarks.
    unprinted: what to say of places without a number.
    missing: why it cannot be run; '' if it can.
  """

  name: str
  table: Table = dataclasses.field(repr=False)
  row: str
  setting: str
  flags: tuple[str, ...]
  numbers: tuple[Number, ...]
  differs: tuple[str, ...] = ()
  open: tuple[str, ...] = ()
  notes: tuple[str, ...] = ()
  unprinted: str = ''
  missing: str = ''

  @property
  def columns(self) -> tuple[str, ...]:
    """Returns the titles of the columns that it fills."""
    return tuple(number.column for number in self.numbers)

  def flag(self, name: str, default: str = '') -> str:
    """Returns the value of one of its flags."""
    return next((flag.partition('=')[2] for flag in self.flags
                 if flag.startswith(f'--{name}=')), default)

  def seeds(self) -> list[int]:
    """Returns the seeds that its flags name; [0] without any."""
    text = self.flag('seeds') or self.flag('seed', '0')
    try:
      return [int(seed) for seed in text.split(',')]
    except ValueError:
      raise ValueError(f'{self.name} has seeds {text}, which must be whole '
                       'numbers, separated by commas.') from None


@dataclasses.dataclass(frozen=True)
class Table:
  """One table or figure of a paper."""

  name: str
  paper: str  # Name of its file.
  title: str
  citation: str
  unit: str
  runs: str
  digits: int
  columns: Sequence[Mapping[str, Any]]
  rows: Sequence[Mapping[str, Any]]
  first: Sequence[str]
  first_columns: Sequence[str]
  book: Mapping[str, Any] = dataclasses.field(repr=False)  # The paper's file.
  raw: Mapping[str, Any] = dataclasses.field(repr=False)

  def value(self, row: int, column: int) -> tuple[Value, float | None]:
    """Returns what the paper has in one place, and its deviation."""
    mine, title = self.rows[row], self.columns[column]['title']
    if title not in mine.get('only', [title]):
      return NONE, None
    if 'values_of' in mine:
      return _borrowed(self.book, mine['values_of'], title)
    values = mine.get('values', [UNPRINTED] * len(self.columns))
    std = mine.get('std', [NONE] * len(self.columns))[column]
    return values[column], None if isinstance(std, str) else std

  def text(self, value: Value) -> str:
    """Formats a number with as many digits as the paper prints."""
    if isinstance(value, str):
      return value
    digits = len(repr(float(value)).partition('.')[2])
    return f'{value:.{max(self.digits, digits)}f}'

  def place(self, row: int, column: int) -> Cell:
    """Returns the cell of one place, as if it filled that place alone."""
    mine, other = self.rows[row], self.columns[column]
    value, std = self.value(row, column)
    number = Number(other['title'], value, std,
                    other.get('metric', 'accuracy'), other.get('scale', 100))
    layers = [*_layers(self.book, self.book), *_layers(self.book, self.raw),
              *_layers(self.book, other), *_method(self.book, mine['method']),
              *_layers(self.book, mine)]
    words = {'setting': other['setting'], 'method': mine['method']}
    flags: dict[str, Any] = {'dataset': '', 'method': ''}  # These come first.
    for layer in layers:
      words |= layer.get('words', {})
      flags |= layer.get('flags', {})
    try:
      texts = {key: tuple(
          text.format(**words) for layer in layers
          for text in layer.get(key, ())) for key in _LISTS}
      lines = tuple(f'--{name}={str(value).format(**words)}'
                    for name, value in flags.items() if value != '')
      name = _last(layers, 'cells').format(**words)
    except (LookupError, AttributeError, ValueError) as error:
      what = (f'has no word {error}' if isinstance(error, KeyError) else
              f'has bad braces: {error}')
      raise ValueError(f'{self.name}: {mine["title"]} | {other["title"]} '
                       f'{what}.') from None
    return Cell(name, self, mine['title'], other['setting'], lines, (number,),
                **texts, unprinted=_last(layers, 'unprinted') or
                'no number is printed', missing=_last(layers, 'missing'))

  def cells(self) -> list[Cell]:
    """Returns the runs that the table asks for, the most telling ones first.

    The rows named by `first` come before all others. They are taken column by
    column, those of `first_columns` first, so that one comparison is complete
    before the next begins. Then come the other rows, in the same order of
    columns.
    """
    def rank(title: str, first: Sequence[str]) -> int:
      return first.index(title) if title in first else len(first)

    places = [(r, c) for r in range(len(self.rows))
              for c in range(len(self.columns)) if self.value(r, c)[0] != NONE]
    def order(place: tuple[int, int]) -> tuple[Any, ...]:
      row, column = (self.rows[place[0]]['title'],
                     self.columns[place[1]]['title'])
      return (row not in self.first, rank(column, self.first_columns),
              place[1], rank(row, self.first), place[0])
    found: dict[tuple[str, str], Cell] = {}
    for row, column in sorted(places, key=order):
      cell = self.place(row, column)
      known = found.get((cell.row, cell.name))
      found[cell.row, cell.name] = (
          cell if known is None else dataclasses.replace(
              known, numbers=known.numbers + cell.numbers))
    return list(found.values())

  def choose(self, rows: Sequence[str] = (), columns: Sequence[str] = ()
             ) -> list[Cell]:
    """Returns its cells in the rows and columns of these titles; () is all.

    Raises:
      ValueError: if there is no such row or column; it names similar ones.
    """
    for flag, titles, parts in (('row', rows, self.rows),
                                ('column', columns, self.columns)):
      for title in titles:
        known = [part['title'] for part in parts]
        if title not in known:
          raise ValueError(f'--{flag}={title} is not in {self.name}; '
                           f'{near(title, known)}.')
    return [cell for cell in self.cells() if (not rows or cell.row in rows)
            and (not columns or {*cell.columns} & {*columns})]


def _layers(book: Mapping[str, Any], part: Mapping[str, Any]
            ) -> list[Mapping[str, Any]]:
  """Returns the parts that a part uses, and then the part itself."""
  used = [layer for name in part.get('use', ())
          for layer in _layers(book, book['parts'][name])]
  return [*used, part]


def _method(book: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
  part = book['methods'][name]
  if isinstance(part, str):
    return [{'flags': {'method': part}}]
  return _layers(book, part)


def _last(layers: Sequence[Mapping[str, Any]], key: str) -> str:
  return next((layer[key] for layer in reversed(layers) if key in layer), '')


def _borrowed(book: Mapping[str, Any], source: str, column: str
              ) -> tuple[Value, float | None]:
  name, _, row = source.partition(': ')
  table = _tables(book)[name]
  i = [each['title'] for each in table.rows].index(row)
  j = [each['title'] for each in table.columns].index(column)
  return table.value(i, j)


def _tables(book: Mapping[str, Any]) -> dict[str, Table]:
  return {raw['name']: Table(
      raw['name'], book['file'], raw['title'],
      f'{book["paper"]}, {raw["source"]}', raw.get('unit', '%'),
      raw.get('runs', book['runs']), book.get('digits', 2), raw['columns'],
      raw['rows'], raw.get('first', []), raw.get('first_columns', []), book,
      raw) for raw in book['tables']}


def near(name: str, known: Sequence[str]) -> str:
  """Says which known names begin with it, else which are alike, else all."""
  folded = {each.lower(): each for each in known}
  found = [each for each in folded if name and each.startswith(name.lower())
           ][:10] or difflib.get_close_matches(name.lower(), folded, 3, 0.6)
  if found:
    return 'near: ' + ', '.join(repr(folded[each]) for each in found)
  return 'there are ' + ', '.join(map(repr, known))


def papers(folder: pathlib.Path = TABLES) -> list[str]:
  """Returns the names of the papers."""
  return sorted(file.stem for file in folder.glob('*.toml'))


def _read(paper: str, folder: pathlib.Path) -> dict[str, Any]:
  """Reads a paper's file; raises ValueError if it does not fit the schema."""
  file = folder / f'{paper}.toml'
  try:
    book = copy.deepcopy(_parsed(file.read_text('utf-8')))
  except ValueError as error:
    raise ValueError(f'{file}: {" ".join(str(error).split())}.') from error
  return {**book, 'file': paper}


@functools.cache
def _parsed(text: str) -> dict[str, Any]:
  book = tomllib.loads(text)
  schema.check(book)
  return book


def tables(folder: pathlib.Path = TABLES) -> dict[str, Table]:
  """Returns all tables by name.

  Raises:
    ValueError: if a file does not fit the schema, or two tables have one name.
  """
  found: dict[str, Table] = {}
  for paper in papers(folder):
    for name, table in _tables(_read(paper, folder)).items():
      if name in found:
        raise ValueError(f'{folder / paper}.toml: the table {name} is in '
                         f'{found[name].paper}.toml too.')
      found[name] = table
  return found


def load(name: str, folder: pathlib.Path = TABLES) -> Table:
  """Returns a table.

  Raises:
    ValueError: if no table has that name, or a file does not fit the schema.
  """
  found = tables(folder)
  if not found:
    raise ValueError(f'--tables={folder} holds no tables.')
  if name not in found:
    raise ValueError(f'--table={name} does not exist; {near(name, [*found])}.')
  return found[name]


def headline(folder: pathlib.Path = TABLES) -> Iterator[Cell]:
  """Yields the cells that have a stored flagfile, each once."""
  seen = set()
  for table in tables(folder).values():
    for cell in table.cells():
      mark = table.paper, cell.name
      if mark not in seen and not cell.missing and _is_headline(
          cell.name, table.book.get('headline', [])):
        seen.add(mark)
        yield cell


def _is_headline(name: str, patterns: Sequence[str]) -> bool:
  """Returns whether the last pattern that fits a cell's name includes it."""
  taken = False
  for pattern in patterns:
    if fnmatch.fnmatchcase(name, pattern.removeprefix('!')):
      taken = not pattern.startswith('!')
  return taken
