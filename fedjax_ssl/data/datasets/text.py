"""Short texts from CSV files: split, tokenized, with vectors if wanted.

A text with a label is in the test part if a hash of it says so, as of one in
five, so that the split depends neither on the order of the file nor on a seed,
and copies of one text stay together. Of few texts that may be far from a fifth,
and texts without a label are never tested on. A column `split` gives the part
instead, and a column `client` the client of each row.
"""
from __future__ import annotations

from collections.abc import Sequence
import hashlib
import os
import pathlib
import re
from typing import NamedTuple

import numpy as np

from fedjax_ssl.core import checks
from fedjax_ssl.core.types import Examples
from fedjax_ssl.data import files
from fedjax_ssl.data.datasets import names as names_lib
from fedjax_ssl.data.datasets import table, tokens
from fedjax_ssl.data.datasets.files import Source
from fedjax_ssl.data.files import DataError

_TEST_PERCENT = 20
_COLUMNS, _MORE = ('label', 'text'), ('split', 'client')
_PARTS = ('train', 'validation', 'test')
_NUMBER = re.compile(r'[-+]?([0-9.]+(e[-+]?[0-9]+)?|inf)', re.IGNORECASE)


def is_test(text: str) -> bool:
  """Returns whether a text belongs to the test part; about one in five does."""
  digest = hashlib.sha256(text.encode()).digest()
  return int.from_bytes(digest[:8], 'big') % 100 < _TEST_PERCENT


class Rows(NamedTuple):
  """The rows of a CSV file in their order.

  Attributes:
    texts: D of them.
    labels: int32[D]; -1 for a row without one.
    class_names: where labels are words.
    splits: 'train', 'validation' or 'test' of each row, if a column says so.
    clients: words [D], if a column says so; '' for a row without a client.
  """

  texts: list[str]
  labels: np.ndarray
  class_names: tuple[str, ...] | None
  splits: np.ndarray | None
  clients: np.ndarray | None


def read_rows(path: pathlib.Path) -> Rows:
  """Reads a CSV file with columns `text`, `label`, perhaps `split`, `client`.

  A byte order mark is skipped.

  Raises:
    DataError: if the file has another form, where the message names the line;
      or if labels are neither words nor 0 to C-1, of one class only, or
      missing of a row to test or to validate.
  """
  with table.named(path):
    rows = table.read(path, _COLUMNS, _MORE)
    labels, names = _labels(rows)
    splits, clients = _splits(rows), _clients(rows)
    for (line, _), label, part in () if splits is None else zip(
        rows, labels, splits, strict=True):
      if label < 0 and part != 'train':
        raise DataError(f', line {line}: a row of the part {str(part)!r} has '
                        'no label; only those of train may have none')
  return Rows([cells['text'] for _, cells in rows], labels, names, splits,
              clients)


def _labels(rows: table.Rows) -> tuple[np.ndarray, tuple[str, ...] | None]:
  """int32[D], -1 for none, and the names where labels are words."""
  words = [cells['label'].strip() or names_lib.NONE for _, cells in rows]
  known = np.array([word != names_lib.NONE for word in words])
  told = [word for word in words if word != names_lib.NONE]
  if not told:
    raise DataError(f'no row has a label: {names_lib.NONE}, or an empty cell, '
                    'is none')
  for (line, _), word in zip(rows, words, strict=True):
    if word.lower() == 'nan':
      raise DataError(f', line {line}: no label but {word!r}; of a row without '
                      f'any it is empty or {names_lib.NONE}')
  if not any(_NUMBER.fullmatch(word) for word in told):
    numbers, names = names_lib.number({'train': np.array(told)})
    if len(names) < 2:
      raise DataError(f'all labels are {names[0][:40]!r}; one class is nothing '
                      'to tell apart')
    found = np.full(len(words), -1, np.int32)
    found[known] = numbers['train']
    return found, names
  numbers_too = [bool(_NUMBER.fullmatch(word)) for word in words]
  if 2 * sum(numbers_too) < len(words):  # The odd ones are the numbers.
    line, odd = next((line, word) for (line, _), word, is_one in zip(
        rows, words, numbers_too, strict=True) if is_one)
    raise DataError(f', line {line}: labels must be words all of them, or '
                    f'whole numbers below 2**31, not {odd[:40]!r} beside words')
  labels = []
  for (line, _), word in zip(rows, words, strict=True):
    try:
      labels.append(np.int32(int(word)))
    except (ValueError, OverflowError):
      raise DataError(f', line {line}: labels must be whole numbers below '
                      f'2**31, or words all of them, not {word[:40]!r}'
                      ) from None
  found = np.array(labels, np.int32)
  known = found >= 0
  missing = np.setdiff1d(np.arange(min(found.max(), len(found))), found)
  if found.min() < -1 or missing.size:
    odd = (f'no label is {missing[0]}, and one is {found.max()}'
           if missing.size else f'one is {found.min()}')
    raise DataError('labels must be 0 to C-1, each present, or '
                    f'{names_lib.NONE} for a row without a label; {odd}')
  if not found[known].any():
    raise DataError('all labels are 0; one class is nothing to tell apart')
  return found, None


def _splits(rows: table.Rows) -> np.ndarray | None:
  """Returns the part of each row."""
  if 'split' not in rows[0][1]:
    return None
  words = [cells['split'].strip() for _, cells in rows]
  for (line, _), word in zip(rows, words, strict=True):
    if word not in _PARTS:
      raise DataError(f', line {line}: split {word[:40]!r} must be '
                      f'{", ".join(_PARTS[:-1])} or {_PARTS[-1]}')
  for part in ('train', 'test'):
    if part not in words:
      raise DataError(f"no row's split is {part}")
  return np.array(words)


def _clients(rows: table.Rows) -> np.ndarray | None:
  """Returns the client of each row; rows to test and validate need none."""
  if 'client' not in rows[0][1]:
    return None
  words = [cells['client'].strip() for _, cells in rows]
  for (line, cells), word in zip(rows, words, strict=True):
    if not word and cells.get('split', 'train').strip() == 'train':
      raise DataError(f', line {line}: a row to train on has no client')
  return np.array(words)


def read_csv(path: pathlib.Path,
             embeddings: str | os.PathLike[str] | None = None) -> Source:
  """Reads 'train' and 'test', and 'validation' where a column says so.

  Args:
    path: CSV with the columns `text` and `label`, classes 0 to C-1 or words;
      -1, or an empty cell, for a row without one, which is never a test row.
      A column `split` with the words train, validation and test replaces the
      hash; a column `client` names the client of each row.
    embeddings: .npz with either `words` [V] and `vectors` float[V, E]; or
      `texts` float[D, T, E], one entry for each line of the CSV in its order,
      and `sha256`, the `fingerprint` of those texts. None gives token ids.

  Returns:
    A Source with inputs int32[D, 40] or float16[D, T, E], zeros where a text is
    shorter or, with `words`, where a word has no vector.

  Raises:
    DataError: if the table is missing or broken.
    FieldError: if the vectors are, or do not fit the texts.
  """
  rows = read_rows(path)
  texts = rows.texts
  held = np.array([is_test(text) for text in texts])
  splits = rows.splits
  if splits is None:
    known = rows.labels >= 0  # The others cannot be tested on.
    tested = {text for text, one in zip(texts, held & known, strict=True)
              if one}
    again = ~known & np.array([text in tested for text in texts])
    held &= known
    splits = np.where(held, 'test', np.where(again, 'neither', 'train'))
    if held.all() or not held.any():
      raise DataError(f'{path}: its {len(texts)} texts, {len(set(texts))} of '
                      'them different, are too few to split')
  train = splits == 'train'
  absent = np.setdiff1d(rows.labels, rows.labels[train])
  if rows.splits is not None and absent.size:  # Others may be cut anew.
    name = rows.class_names[absent[0]] if rows.class_names else absent[0]
    raise DataError(f'{path}: no row with label {str(name)[:40]!r} is one to '
                    'train on')
  vocabulary = None
  if embeddings is None:
    vocabulary = tokens.vocabulary(
        [t for t, own in zip(texts, train, strict=True) if own])
    inputs = tokens.encode(texts, vocabulary)
  else:
    inputs = _vectors(pathlib.Path(embeddings), texts)
  parts = {part: splits == part for part in _PARTS if (splits == part).any()}
  clients = rows.clients
  return Source(
      {part: Examples(inputs[where], rows.labels[where])
       for part, where in parts.items()},
      {} if clients is None else {
          part: clients[where] for part, where in parts.items()},
      rows.class_names, vocabulary)


def fingerprint(texts: Sequence[str]) -> str:
  """Computes a hex digest of texts in their order."""
  return hashlib.sha256('\0'.join(texts).encode()).hexdigest()


def _vectors(path: pathlib.Path, texts: Sequence[str]) -> np.ndarray:
  """float16[D, T, E]; see `read_csv`."""
  try:
    arrays = files.read_arrays(path, _choose)
  except DataError as error:
    raise _wrong(path, str(error)) from error
  if 'texts' in arrays:
    if str(arrays['sha256']) != fingerprint(texts):
      raise _wrong(path, 'made for other texts, or in another order')
    return _finite(path, arrays['texts'], len(texts), 3)
  spelled = arrays['words']
  if spelled.ndim != 1 or spelled.dtype.kind != 'U' or not spelled.size:
    raise _wrong(path, f"'words' is {spelled.dtype}{list(spelled.shape)}; it "
                 'should be one list of words')
  table = _finite(path, arrays['vectors'], len(spelled), 2)
  row = {str(word): i + 1 for i, word in enumerate(spelled)}
  table = np.concatenate([np.zeros_like(table[:1]), table])
  ids = np.zeros((len(texts), tokens.MAX_TOKENS), np.int64)
  for i, text in enumerate(texts):
    found = [row.get(word, 0) for word in tokens.words(text)]
    ids[i, :len(found)] = found
  if not ids.any():
    raise _wrong(path, 'has no vector for any word of the texts')
  return table[ids]


def _wrong(path: pathlib.Path, reason: str) -> checks.FieldError:
  """Returns the error of a file with vectors."""
  return checks.FieldError('embeddings', str(path), f'{reason}.')


def _choose(names: list[str]) -> list[str]:
  """Returns the arrays to read: of whole texts, or of words."""
  for wanted in (['texts', 'sha256'], ['words', 'vectors']):
    if set(wanted) <= set(names):
      return wanted
  raise DataError("needs 'words' and 'vectors', or 'texts' and 'sha256'; it "
                  f'has {", ".join(sorted(names)) or "nothing"}')


def _finite(path: pathlib.Path, array: np.ndarray, rows: int, ndim: int
            ) -> np.ndarray:
  if (array.ndim != ndim or len(array) != rows or array.dtype.kind != 'f'
      or not array.size or not np.isfinite(array).all()):
    raise _wrong(path, f'{array.dtype}{list(array.shape)} should be finite '
                 f'floats with {rows} rows and {ndim} axes, none of them empty')
  with np.errstate(over='ignore'):
    small = array.astype(np.float16)
  if not np.isfinite(small).all():
    raise _wrong(path, 'holds numbers beyond 65504, the limit of float16')
  return small
