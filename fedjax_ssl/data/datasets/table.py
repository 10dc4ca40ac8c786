"""Tables in CSV files, read strictly: what is odd is refused by its line."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import csv
import pathlib
from typing import TextIO

from fedjax_ssl.data import files
from fedjax_ssl.data.datasets.files import check_spelling
from fedjax_ssl.data.files import DataError

Rows = Sequence[tuple[int, dict[str, str]]]
_SHOWN = 8  # Names of columns in a message.


@contextlib.contextmanager
def named(path: pathlib.Path) -> Iterator[None]:
  """Puts the name of a table before what is wrong with it.

  Within it a message about one line begins with ', line'.
  """
  try:
    yield
  except DataError as error:
    text = str(error)
    mark = '' if text.startswith(', line') else ': '
    raise DataError(f'{path}{mark}{text}') from error


def read(path: pathlib.Path, wanted: Sequence[str], more: Sequence[str] = ()
         ) -> Rows:
  """Reads some columns of a CSV file in UTF-8; a byte order mark is skipped.

  Args:
    path: the file. Its first line names the columns; others are left alone
      unless they seem to be meant for an absent one of these.
    wanted: columns that must be there.
    more: columns that may be.

  Returns:
    The number of each row's first line, and its cells by column.

  Raises:
    DataError: if the file cannot be read, or has another form or no row.
  """
  files.check_regular(path)
  rows = list(_rows(path, wanted, more))
  if not rows:
    raise DataError('no row; a first line names the columns, with '
                    f'{wanted[0]!r}, and rows follow')
  return rows


def _rows(path: pathlib.Path, wanted: Sequence[str], more: Sequence[str]
          ) -> Iterator[tuple[int, dict[str, str]]]:
  """Yields the line and the cells of each row."""
  known = {*wanted, *more}
  begins = 1
  # A text may be long; a quote that is not closed is found at the end.
  longest = csv.field_size_limit(2**31 - 1)
  try:
    with _opened(path, newline='') as file:
      # Strict: else a quote that is never closed takes in all rows after it.
      reader = csv.reader(file, strict=True)
      header: list[str] = []
      for row in reader:
        if not header and row:
          header = row
          places = {name: _place(header, name) for name in (*wanted, *more)
                    if name in header or name in wanted}
          check_spelling('column', {*header} - known, known - {*header},
                         'client')
        elif row:
          if len(row) != len(header):
            raise DataError(f'line {begins} has {len(row)} columns, and the '
                            f'first line {len(header)}; a cell with commas '
                            'stands in quotes')
          yield begins, {name: row[at] for name, at in places.items()}
        begins = reader.line_num + 1
  except csv.Error as error:
    raise DataError(f'line {begins} cannot be read ({error}); a quote that is '
                    'not closed begins there, or one that is not doubled'
                    ) from None
  finally:
    csv.field_size_limit(longest)


def lines(path: pathlib.Path) -> list[tuple[int, str]]:
  """Reads a text file in UTF-8; a byte order mark is skipped.

  Returns:
    The number of each line that is not blank, from 1 on, and the line.

  Raises:
    DataError: if the file cannot be read, or has no such line.
  """
  files.check_regular(path)
  with _opened(path) as file:
    found = [(number, line.rstrip('\n')) for number, line in enumerate(file, 1)
             if line.strip()]
  if not found:
    raise DataError('no line but blank ones')
  return found


@contextlib.contextmanager
def _opened(path: pathlib.Path, newline: str | None = None
            ) -> Iterator[TextIO]:
  """Opens a file in UTF-8; says in one line why it cannot be read."""
  try:
    with open(path, encoding='utf-8-sig', newline=newline) as file:
      yield file
  except UnicodeDecodeError as error:
    raise DataError(f'cannot be read ({error}); save it as UTF-8') from None
  except OSError as error:
    raise DataError(f'cannot be read ({error})') from error


def _place(header: Sequence[str], name: str) -> int:
  if header.count(name) != 1:
    count = 'no' if name not in header else f'{header.count(name)} times the'
    some = ', '.join(map(repr, header[:_SHOWN]))
    raise DataError(f'{count} column {name!r}; the first line, whose columns '
                    f'are parted by commas, has {some}'
                    + (len(header) > _SHOWN) * f' and {len(header)} in all'
                    + (name == 'text') * '; a table of numbers goes as .npz')
  return header.index(name)
