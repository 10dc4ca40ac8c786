"""Text that every file can hold, and rows as text."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
import csv
import io


def plain(text: str) -> str:
  """Returns the text with `?` for characters that UTF-8 cannot encode.

  Names of files need not be UTF-8; Python keeps their bytes as surrogates.
  """
  return text.encode(errors='replace').decode()


def as_csv(rows: Iterable[Sequence[object]]) -> str:
  """Writes rows as CSV, a line for each."""
  stream = io.StringIO()
  csv.writer(stream, lineterminator='\n').writerows(rows)
  return stream.getvalue()
