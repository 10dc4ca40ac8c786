"""Text that every file can hold."""
from __future__ import annotations


def plain(text: str) -> str:
  """Returns the text with `?` for characters that UTF-8 cannot encode.

  Names of files need not be UTF-8; Python keeps their bytes as surrogates.
  """
  return text.encode(errors='replace').decode()
