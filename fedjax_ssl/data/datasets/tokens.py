"""Tokens of texts: numbers of words, by a vocabulary of the training texts.

Token 0 is padding, 1 a word outside the vocabulary.
"""
from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
import pathlib
import re
from typing import Any

import numpy as np

from fedjax_ssl.core import disk
from fedjax_ssl.data.files import DataError

MAX_TOKENS = 40  # FedSSL, IJCAI 2022, section 5.1.
VOCABULARY = 10_000
PADDING, UNKNOWN = 0, 1
FILE = 'vocabulary.txt'  # In the folder of a run: a word a line.
_FIRST = 2  # Token of a vocabulary's first word.
_WORD = re.compile(r"[#@]?\w+(?:'\w+)?|[!?]+")


def words(text: str) -> list[str]:
  """Returns the first words of a text, in lower case; ! and ? are words."""
  return _WORD.findall(text.lower())[:MAX_TOKENS]


def vocabulary(texts: Sequence[str], *, size: int = VOCABULARY
               ) -> dict[str, int]:
  """Numbers words from 2 on to below `size`, the most frequent first.

  Words of equal frequency are in alphabetical order.
  """
  counts = collections.Counter(w for text in texts for w in words(text))
  order = sorted(counts, key=lambda w: (-counts[w], w))
  return numbered(order[:max(size - _FIRST, 0)])


def numbered(known: Sequence[str]) -> dict[str, int]:
  """Numbers the words of a vocabulary, given in the order of their tokens."""
  return {word: i for i, word in enumerate(known, start=_FIRST)}


def encode(texts: Sequence[str], known: Mapping[str, int]) -> np.ndarray:
  """Encodes texts as token ids int32[D, 40], padded with 0."""
  out = np.full((len(texts), MAX_TOKENS), PADDING, np.int32)
  for row, text in enumerate(texts):
    ids = [known.get(word, UNKNOWN) for word in words(text)]
    out[row, :len(ids)] = ids
  return out


def as_array(given: Any) -> np.ndarray:
  """Makes an array; of a list of texts one of objects.

  Of an array of text each entry would take the room of the longest, and numbers
  in the list would become texts.
  """
  is_text = isinstance(given, list | tuple) and any(
      isinstance(one, str) for one in given)
  return np.asarray(given, object if is_text else None)


def as_texts(name: str, given: Any) -> list[str] | None:
  """Returns texts as a list; None if something else is given.

  Args:
    name: what it is, for messages.
    given: a list or an array.

  Raises:
    DataError: if only some are texts, or they are not in one list, or bytes.
  """
  found = as_array(given)
  are = [isinstance(text, str) for text in found.flat] if (
      found.dtype.kind in 'OU') else []
  if not any(are):
    if found.dtype.kind in 'OS' and any(
        isinstance(one, bytes) for one in found.flat):
      raise DataError(f'{name} are bytes; give texts as str, as decode() makes '
                      'of them')
    return None
  if found.ndim != 1:
    raise DataError(f'{name} are texts of shape {found.shape}; allowed is one '
                    'list of them')
  if not all(are):
    row = are.index(False)
    raise DataError(f'row {row} of {name} is no text but {found[row]!r}')
  return [str(text) for text in found]


def listed(known: Mapping[str, int]) -> list[str]:
  """Returns the words of a vocabulary in the order of their tokens."""
  return sorted(known, key=known.__getitem__)


def save(place: pathlib.Path, known: Mapping[str, int]) -> None:
  """Writes a vocabulary into the folder of a run."""
  disk.replace(place / FILE,
               ''.join(f'{word}\n' for word in listed(known)).encode())


def load(place: pathlib.Path) -> dict[str, int] | None:
  """Reads what `save` wrote; None if the run has none.

  Raises:
    ValueError: if the file is there and cannot be read.
  """
  try:
    return numbered((place / FILE).read_text('utf-8').split('\n')[:-1])
  except FileNotFoundError:
    return None
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'{place / FILE} cannot be read: {error}') from error
