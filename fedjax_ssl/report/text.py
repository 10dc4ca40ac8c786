"""Text that every file can hold, and rows as text."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
import csv
import io

from fedjax_ssl.core import checks


def plain(text: str) -> str:
  """Returns the text with `?` for characters that UTF-8 cannot encode.

  Names of files need not be UTF-8; Python keeps their bytes as surrogates.
  """
  return text.encode(errors='replace').decode()


def line(cells: Iterable[str]) -> str:
  """Returns a line of a Markdown table."""
  return '| ' + ' | '.join(c.replace('|', '\\|') for c in cells) + ' |'


def of_error(error: ValueError | OSError) -> str:
  """Says on one line why something cannot be read."""
  if isinstance(error, OSError) and error.filename and error.strerror:
    return f'{error.filename} cannot be read: {error.strerror}.'
  return checks.one_line(error)


def as_csv(rows: Iterable[Sequence[object]]) -> str:
  """Writes rows as CSV, a line for each."""
  stream = io.StringIO()
  csv.writer(stream, lineterminator='\n').writerows(rows)
  return stream.getvalue()
