"""Text that every file can hold."""
from __future__ import annotations


def plain(text: str) -> str:
  """Returns the text with a mark for what no file of text can hold.

  Names of files need not be UTF-8; Python keeps their bytes as surrogates.
  """
  return text.encode(errors='replace').decode()
