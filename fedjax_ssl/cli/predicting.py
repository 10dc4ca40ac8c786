"""What `fedjax-ssl predict` prints: classes and their probabilities.

Apart from the command, whose --help can do without JAX.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import itertools
import os
import pathlib
from typing import Literal, TypeVar
import warnings

import numpy as np

from fedjax_ssl import finished
from fedjax_ssl.data import files
from fedjax_ssl.data.datasets import folder, table
from fedjax_ssl.training import evaluate, processes

_Kind = Literal['images', 'texts', 'array']
_KINDS: dict[str, _Kind] = {'.csv': 'texts', '.txt': 'texts', '.npy': 'array',
                            '.npz': 'array'}
# By the axes of one input: a kind that goes besides arrays, and all in words.
_TAKES = {
    1: ('texts', 'texts (a .csv with a column text, or a .txt with one a '
        'line), or their tokens (.npy, .npz)'),
    2: ('array', 'vectors of texts (.npy, .npz)'),
    3: ('images', 'images (files, folders, .npy or .npz)')}

_MANY = 20  # Inputs of which it is odd that all get one class.

Item = TypeVar('Item')
# The name of an input, its class, and the probability.
Row = tuple[str, str, str]
# What is predicted at a time: what it is, the name of each input, the inputs.
# Rows of an array have no names; their numbers stand for them.
_Part = tuple[str, Sequence[str] | None, finished.Inputs]


def rows(where: str, inputs: Iterable[str], seed: int | None) -> list[Row]:
  """Predicts all inputs; says after that, once each, what Python warned of.

  Args:
    where: folder or file of the run.
    inputs: files and folders.
    seed: which of the run's seeds; None is the first.

  Raises:
    ValueError: if the run has no such seed or no global model, or an input
      cannot be read or predicted.
  """
  run = finished.load(where)
  run.global_model(seed)  # Raises where there is none.
  shape = tuple(run.spec.input_shape)
  found = [one for given in inputs for one in _files(given, len(shape))]
  made: list[Row] = []
  said: dict[str, str] = {}  # By text, what it was said of first.
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always', UserWarning)
    for part in _parts(found, shape):
      made += _of_part(run, part, seed)
      for one in caught:
        said.setdefault(' '.join(str(one.message).split()), part[0])
      caught.clear()
  for line, what in said.items():
    processes.note(f'{what}: {line}')
  classes = {class_ for _, class_, _ in made}
  if len(made) >= _MANY and len(classes) == 1 < run.spec.num_classes:
    processes.note(f'All {len(made)} inputs are taken for class '
                   f'{classes.pop()}, of {run.spec.num_classes}; if they are '
                   'not of it, the model may have learned little, or they are '
                   'unlike its training data.')
  return made


def _kind(file: str) -> _Kind:
  """Returns what a file holds by its name; a folder holds images."""
  return 'images' if os.path.isdir(file) else _KINDS.get(
      pathlib.Path(file).suffix.lower(), 'images')


def _files(given: str, axes: int) -> list[tuple[str, _Kind]]:
  """Returns a file, or all images of a folder, and their kind.

  Raises:
    ValueError: if it is not there, or nothing that the run takes.
  """
  is_folder, kind = os.path.isdir(given), _kind(given)
  beside, words = _TAKES.get(axes, ('array', 'arrays (.npy, .npz)'))
  # First, as who gives a text itself should not read that no file is so called.
  if not given or kind not in ('array', beside):
    raise ValueError(f"{given or repr('')}: the run takes {words}.")
  with table.named(pathlib.Path(given)):
    if not is_folder:
      files.check_regular(given)
  return [(str(file), kind) for file in (
      folder.below(pathlib.Path(given)) if is_folder else [given])]


def _parts(found: Iterable[tuple[str, _Kind]], shape: tuple[int, ...]
           ) -> Iterator[_Part]:
  """Reads files as they are needed; images and texts a batch at a time.

  Args:
    found: names of the files, and their kinds.
    shape: of one input of the run.

  Yields:
    What it is, the name of each input, if it has one, and the inputs.

  Raises:
    DataError: for a file that cannot be read.
  """
  for kind, some in itertools.groupby(found, lambda one: one[1]):
    names = [file for file, _ in some]
    if kind == 'images':
      for batch in _batches(names):
        yield (batch[0] if len(batch) == 1 else f'{batch[0]} to {batch[-1]}',
               batch, folder.read_images(batch, *shape))
    else:
      for file in names:
        yield from ([_of_array(file, shape)] if kind == 'array' else
                    _of_texts(file))


def _of_array(file: str, shape: tuple[int, ...]) -> _Part:
  with table.named(pathlib.Path(file)):
    array = files.read_array(file)
    if array.dtype.kind == 'U' and len(shape) == 3:  # Not names of files.
      raise files.DataError(f'the run takes {_TAKES[3][1]}')
  return file, None, array


def _of_texts(file: str) -> Iterator[_Part]:
  path = pathlib.Path(file)
  with table.named(path):
    texts = table.lines(path) if path.suffix.lower() == '.txt' else [
        (line, cells['text']) for line, cells in table.read(path, ('text',))]
  if empty := [line for line, one in texts if not one.strip()]:
    warnings.warn(f'the text of line {empty[0]}'
                  + (len(empty) > 1) * f' and of {len(empty) - 1} more'
                  + ' is empty; the class told there means nothing.',
                  stacklevel=1)
  for batch in _batches(texts):
    yield (file, [f'{file}:{line}' for line, _ in batch],
           [one for _, one in batch])


def _batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
  """Yields parts of the size that predictions are compiled for."""
  for start in range(0, len(items), evaluate.BATCH):
    yield items[start:start + evaluate.BATCH]


def _of_part(run: finished.LoadedRun, part: _Part, seed: int | None
             ) -> Iterator[Row]:
  """Yields the name, the class and its probability of each input.

  Raises:
    ValueError: for inputs that the run does not take, and for logits that are
      not finite.
  """
  what, names, inputs = part
  try:
    logits = run.predict(inputs, seed)
  except ValueError as error:
    raise ValueError(f'{what}: {error}') from error
  if names is None:
    names = [f'{what}:{row}' for row in range(len(logits))]
  if not names:
    raise ValueError(f'{what} has no row.')
  if odd := [name for name, row in zip(names, np.asarray(logits), strict=True)
             if not np.isfinite(row).all()]:
    raise ValueError(f'{odd[0]}: the model gives NaN or infinity; its training '
                     'has diverged, or the input holds such numbers.')
  for name, (class_, sure) in zip(names, evaluate.named(
      logits, run.class_names), strict=True):
    yield name, class_, f'{sure:.6f}'
