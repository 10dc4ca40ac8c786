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


def by_text(pairs: Iterable[tuple[str, str]]) -> list[str]:
  """Returns lines such as 'a, b: text.', one for all names of the same text.

  Args:
    pairs: a name and its text each; those without a text are left out.
  """
  said: dict[str, list[str]] = {}
  for name, text in pairs:
    if text:
      said.setdefault(text, []).append(name)
  return [f'{", ".join(names)}: {text}.' for text, names in said.items()]


def sentences(pairs: Sequence[tuple[str, str]]) -> list[str]:
  """Writes texts on names as sentences; one on all without their names."""
  said = {text for _, text in pairs}
  return [f'{said.pop()}.'] if len(said) == 1 and all(said) else by_text(pairs)


def as_csv(rows: Iterable[Sequence[object]]) -> str:
  """Writes rows as CSV, a line for each."""
  stream = io.StringIO()
  csv.writer(stream, lineterminator='\n').writerows(rows)
  return stream.getvalue()
