"""Numbers from 0 on for the classes and clients that a file calls by name."""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import re

import numpy as np

from fedjax_ssl.core import checks
from fedjax_ssl.data.files import DataError

NONE = '-1'  # The label of a row without one, among words.
# What missing values become where they are converted to words.
_MISSING = ('None', 'nan', 'NaN', '<NA>', 'NaT')


def texts(values: np.ndarray, besides: Collection[int] = ()) -> np.ndarray:
  """Returns an array of objects that all are text, as pandas has, as str.

  Args:
    values: other arrays are returned as they are.
    besides: numbers that may stand among the texts.
  """
  are = [isinstance(word, str) for word in values.flat] if (
      values.dtype.kind == 'O') else []
  if any(are) and all(
      is_text or isinstance(word, int | np.integer) and word in besides
      for is_text, word in zip(are, values.flat, strict=True)):
    return values.astype(str)
  return values


def odd(values: np.ndarray) -> str:
  """Names the first entry of an array that is neither a word nor a number.

  Returns:
    ' (row 3 is None)', or '' if there is none.
  """
  if values.dtype.kind not in 'Of' or values.ndim != 1:
    return ''
  for row, value in enumerate(values):
    if not isinstance(value, str | int | float | np.number) or value != value:
      return f' (row {row} is {" ".join(str(value).split())[:40]})'
  return ''


def as_words(kind: str, values: np.ndarray) -> np.ndarray:
  """Converts an array of strings, or of UTF-8 bytes, to str[D].

  Raises:
    DataError: for other arrays, and for empty words.
  """
  values = texts(values)
  if values.ndim == 2 and values.shape[1] == 1:
    values = values[:, 0]
  if values.ndim != 1 or values.dtype.kind not in 'US':
    raise DataError(f'{kind} is {values.dtype}{list(values.shape)}'
                    f'{odd(values)}; allowed is one list of words')
  if values.dtype.kind == 'S':
    try:
      values = np.char.decode(values, 'utf-8')
    except UnicodeDecodeError:
      raise DataError(f'{kind} holds words that are no UTF-8') from None
  empty = np.flatnonzero(np.char.strip(values) == '')
  if empty.size:
    of_none = (f'; that of a row without a label is {NONE}'
               if kind == 'labels of train' else '')
    raise DataError(f'{kind} has no word in row {empty[0]}{of_none}')
  return values


def check_known(labels: np.ndarray) -> None:
  """Raises DataError for words in an array that stand for a missing value."""
  missing = np.flatnonzero(np.isin(labels, _MISSING))
  if missing.size:
    raise DataError(
        f'labels of train have {str(labels[missing[0]])!r} in row '
        f'{missing[0]}, as a missing value becomes; of a row without a label '
        f'it is {NONE}. If it is a class, add an array class_names')


def number(words: Mapping[str, np.ndarray],
           known: Sequence[str] | None = None
           ) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
  """Numbers the classes of all parts.

  Args:
    words: str[D] of each part, 'train' among them.
    known: names of the classes in their order; None takes those of train, in
      alphabetical order.

  Returns:
    int64[D] of each part, and the names.

  Raises:
    DataError: if a part has a class that is not known.
  """
  names = np.unique(words['train']) if known is None else np.array(known)
  order = np.argsort(names)
  numbered = {}
  for part, values in words.items():
    place = np.searchsorted(names, values, sorter=order)
    found = order[np.minimum(place, len(names) - 1)]
    strange = np.flatnonzero(names[found] != values)
    if strange.size and values[strange[0]] == NONE:
      raise DataError(f'row {strange[0]} of {part} has no label, {NONE}; rows '
                      'without one are to train on')
    if strange.size:
      where = 'class_names' if known is not None else 'train'
      odd = str(values[strange[0]])[:40]
      raise DataError(f'{part} has label {odd!r}, which {where} has not.'
                      f'{checks.near(odd, map(str, names))}')
    numbered[part] = found
  return numbered, tuple(map(str, names))


def check_names(names: np.ndarray) -> tuple[str, ...]:
  """Returns the names of classes, which must differ.

  Raises:
    DataError: for other arrays.
  """
  words = as_words('class_names', names)
  twice, counts = np.unique(words, return_counts=True)
  if counts.max(initial=1) > 1:
    raise DataError(f'class_names has {str(twice[np.argmax(counts)])!r} more '
                    'than once')
  return tuple(map(str, words))


def owners(values: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
  """Numbers the clients that training rows belong to.

  Args:
    values: integers [D], 0 to N-1, or words [D]. Words are numbered in
      alphabetical order, or by size if all of them are whole numbers.

  Returns:
    int32[D] owners, and the names of the N clients.

  Raises:
    DataError: for other arrays, and for a number that has no row.
  """
  values = texts(values)
  if values.ndim == 2 and values.shape[1] == 1:
    values = values[:, 0]
  if values.dtype.kind in 'iu' and values.ndim == 1:
    least, most = int(values.min()), int(values.max())
    if least < 0:
      raise DataError(f'client_train holds {least}; clients are 0 to N-1')
    ids = np.unique(values)
    if len(ids) <= most:
      absent = next(i for i, found in enumerate(ids) if i != found)
      raise DataError(f'client_train goes up to {most}, and client {absent} '
                      'has no row; number them 0 to N-1, or give names')
    return values.astype(np.int32), tuple(map(str, ids))
  if values.dtype.kind not in 'USiu':
    raise DataError(f'client_train is {values.dtype}{list(values.shape)}'
                    f'{odd(values)}; allowed are [D] integers or words')
  words = as_words('client_train', values)
  names = np.unique(words)
  if all(re.fullmatch('[0-9]{1,18}', name) for name in names):
    names = np.array(sorted(names, key=lambda name: (int(name), name)))
  order = np.argsort(names)
  place = order[np.searchsorted(names, words, sorter=order)]
  return place.astype(np.int32), tuple(map(str, names))
