"""Short texts from CSV files: split, tokenized, with vectors if wanted.

A text is in the test part if a hash of it says so, so that the split depends
neither on the order of the file nor on a seed, and copies of one text stay
together. Token 0 is padding, 1 a word outside the vocabulary.
"""
from __future__ import annotations

import collections
from collections.abc import Sequence
import csv
import hashlib
import os
import pathlib
import re

import numpy as np

from fedjax_ssl.core.types import Examples
from fedjax_ssl.data.datasets_files import DataError

MAX_TOKENS = 40  # FedSSL, IJCAI 2022, section 5.1.
VOCABULARY = 10_000
PADDING, UNKNOWN = 0, 1
_TEST_PERCENT = 20
_WORD = re.compile(r"[#@]?\w+(?:'\w+)?|[!?]+")


def is_test(text: str) -> bool:
  """Whether a text belongs to the test part, about one in five."""
  digest = hashlib.sha256(text.encode()).digest()
  return int.from_bytes(digest[:8], 'big') % 100 < _TEST_PERCENT


def words(text: str, *, limit: int = MAX_TOKENS) -> list[str]:
  """The first words of a text in lower case; marks ! and ? are words."""
  return _WORD.findall(text.lower())[:limit]


def vocabulary(texts: Sequence[str], *, size: int = VOCABULARY
               ) -> dict[str, int]:
  """Ids from 2 on, the most frequent words first, below `size`.

  Words of equal frequency go by alphabet.
  """
  counts = collections.Counter(w for text in texts for w in words(text))
  order = sorted(counts, key=lambda w: (-counts[w], w))[:max(size - 2, 0)]
  return {word: i + 2 for i, word in enumerate(order)}


def encode(texts: Sequence[str], known: dict[str, int]) -> np.ndarray:
  """Token ids int32[D, 40], padded with 0."""
  out = np.full((len(texts), MAX_TOKENS), PADDING, np.int32)
  for row, text in enumerate(texts):
    ids = [known.get(word, UNKNOWN) for word in words(text)]
    out[row, :len(ids)] = ids
  return out


def read_rows(path: pathlib.Path) -> tuple[list[str], np.ndarray]:
  """Texts and labels int32[D] of a CSV file with columns `text`, `label`.

  Raises:
    DataError: for another form, or labels that are not 0 to C-1.
  """
  try:
    with open(path, encoding='utf-8', newline='') as file:
      rows = list(csv.DictReader(file))
  except (OSError, UnicodeDecodeError, csv.Error) as error:
    raise DataError(f'{path}: cannot be read ({error})') from None
  absent = [c for c in ('label', 'text') if not rows or rows[0].get(c) is None]
  if absent:
    raise DataError(f'{path}: no column {absent[0]!r}')
  try:
    labels = np.array([int(row['label']) for row in rows], np.int32)
  except (TypeError, ValueError):
    raise DataError(f'{path}: labels must be whole numbers') from None
  if labels.min() < 0 or len(np.unique(labels)) <= labels.max():
    raise DataError(f'{path}: labels must be 0 to C-1, each present')
  return [row['text'] for row in rows], labels


def read_csv(path: pathlib.Path,
             embeddings: str | os.PathLike[str] | None = None
             ) -> dict[str, Examples]:
  """Reads 'train' and 'test'.

  Args:
    path: CSV with the columns `text` and `label`.
    embeddings: .npz with either `words` [V] and `vectors` float[V, E]; or
      `texts` float[D, T, E], one entry for each line of the CSV in its order,
      and `sha256`, the `fingerprint` of those texts. None gives token ids.

  Returns:
    Examples with inputs int32[D, 40] or float16[D, T, E], zeros where a text
    is shorter or, with `words`, where a word has no vector.

  Raises:
    DataError: if a file is missing or broken, or they do not fit each other.
  """
  texts, labels = read_rows(path)
  held = np.array([is_test(text) for text in texts])
  if held.all() or not held.any():
    raise DataError(f'{path}: {len(texts)} texts are too few to split')
  if embeddings is None:
    known = vocabulary([t for t, h in zip(texts, held, strict=True) if not h])
    inputs = encode(texts, known)
  else:
    inputs = _vectors(pathlib.Path(embeddings), texts)
  return {name: Examples(inputs[rows], labels[rows])
          for name, rows in (('train', ~held), ('test', held))}


def fingerprint(texts: Sequence[str]) -> str:
  """Hex digest of texts in their order."""
  return hashlib.sha256('\0'.join(texts).encode()).hexdigest()


def _vectors(path: pathlib.Path, texts: Sequence[str]) -> np.ndarray:
  """float16[D, T, E]; see `read_csv`."""
  try:
    with np.load(path, allow_pickle=False) as archive:
      arrays = {name: archive[name] for name in archive.files}
  except (OSError, ValueError) as error:
    raise DataError(f'{path}: cannot be read ({error})') from None
  if 'texts' in arrays:
    if str(arrays.get('sha256')) != fingerprint(texts):
      raise DataError(f'{path}: made for other texts, or in another order')
    return _finite(path, arrays['texts'], len(texts), 3)
  if not {'words', 'vectors'} <= set(arrays):
    raise DataError(f"{path}: needs 'words' and 'vectors', or 'texts' and "
                    f"'sha256'; it has {', '.join(sorted(arrays))}")
  table = _finite(path, arrays['vectors'], len(arrays['words']), 2)
  row = {str(word): i + 1 for i, word in enumerate(arrays['words'])}
  table = np.concatenate([np.zeros_like(table[:1]), table])
  ids = np.zeros((len(texts), MAX_TOKENS), np.int64)
  for i, text in enumerate(texts):
    found = [row.get(word, 0) for word in words(text)]
    ids[i, :len(found)] = found
  return table[ids]


def _finite(path: pathlib.Path, array: np.ndarray, rows: int, ndim: int
            ) -> np.ndarray:
  if (array.ndim != ndim or len(array) != rows or array.dtype.kind != 'f'
      or not np.isfinite(array).all()):
    raise DataError(f'{path}: {array.dtype}{list(array.shape)} should be '
                    f'finite floats with {rows} rows and {ndim} axes')
  with np.errstate(over='ignore'):
    small = array.astype(np.float16)
  if not np.isfinite(small).all():
    raise DataError(f'{path}: holds numbers beyond 65504, the limit of float16')
  return small
