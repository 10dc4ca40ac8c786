"""Tells the classes of images, texts or arrays by the model of a run.

fedjax-ssl predict runs/a photos more/x.jpg --out=classes.csv
fedjax-ssl predict model.npz texts.csv --seed=1

RUN is the folder of a run, or a file that `save` wrote. INPUT is what the run
was trained on:

  images: a file, or a folder, for all images below it, in the order of their
    names; they are brought to the model's size as `resize-images` does
  texts: a .csv with a column `text`, or a .txt with one text a line, where
    blank lines are passed over
  arrays: an .npy, or an .npz with an array `x` or one array only, as `predict`
    takes them in Python: images, tokens of texts, or vectors of these

Prints CSV with a line for each input, in order: `input,class,probability`.
The input is the file; of texts FILE:LINE, the line it begins at, counted from 1
as editors do; of arrays FILE:INDEX, counted from 0. The class goes by its name,
if the data had names, else by its number. If any input is wrong, nothing is
printed or written.
"""
from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
import itertools
import os
import pathlib
import sys
from typing import TypeVar
import warnings

import numpy as np

from fedjax_ssl import finished
from fedjax_ssl.cli import arguments
from fedjax_ssl.core import checks, disk
from fedjax_ssl.data import files
from fedjax_ssl.data.datasets import folder, table
from fedjax_ssl.report import printing, text
from fedjax_ssl.training import evaluate

_HEADER = 'input', 'class', 'probability'
_TEXTS, _ARRAYS = ('.csv', '.txt'), ('.npy', '.npz')
# By the axes of one input.
_TAKES = {
    1: 'texts (a .csv with a column text, or a .txt with one a line), or their '
       'tokens (.npy, .npz)',
    2: 'vectors of texts (.npy, .npz)',
    3: 'images (files, folders, .npy or .npz)'}

Item = TypeVar('Item')
# What is predicted at a time: what it is, the name of each input, the inputs.
_Part = tuple[str, Sequence[str], finished.Inputs]


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
  parser = arguments.Parser('predict', __doc__)
  parser.add_argument('run', metavar='RUN',
                      help='folder of a run, or a file that `save` wrote')
  parser.add_argument('inputs', metavar='INPUT', nargs='+',
                      help='file, or folder of images')
  parser.add_argument('--out', type=pathlib.Path,
                      help='the .csv to write; default: it is printed')
  parser.add_argument('--seed', type=int,
                      help="which of the run's seeds; default: the first")
  # So that flags may stand between inputs.
  found = parser.parse_intermixed_args(argv)
  if found.out and not _may_be_written(found.out):
    parser.error(f'--out={found.out} must be FOLDER/NAME.csv, in a folder that '
                 'can be written')
  if found.out and any(_is_same(found.out, given) for given in found.inputs):
    parser.error(f'--out={found.out} is an INPUT')
  return found


def _may_be_written(out: pathlib.Path) -> bool:
  place = out.absolute().parent
  return (out.suffix.lower() == '.csv' and place.is_dir()
          and os.access(place, os.W_OK)
          and (out.is_file() or not os.path.lexists(out)))


def _is_same(out: pathlib.Path, given: str) -> bool:
  return out.exists() and os.path.exists(given) and out.samefile(given)


def _files(given: str, run: finished.LoadedRun) -> list[str]:
  """Returns a file, or all images of a folder.

  Raises:
    ValueError: if it is not there, or nothing that the run takes.
  """
  with table.named(pathlib.Path(given)):
    if not os.path.isdir(given):
      files.check_regular(given)
  axes = len(run.spec.input_shape)
  if not (_ends(given, _ARRAYS) or axes == 1 and _ends(given, _TEXTS)
          or axes == 3 and not _ends(given, _TEXTS)):
    raise ValueError(f'{given}: the run takes {_TAKES[axes]}.')
  return ([*map(str, folder.below(pathlib.Path(given)))]
          if os.path.isdir(given) else [given])


def _ends(file: str, endings: tuple[str, ...]) -> bool:
  return file.lower().endswith(endings) and not os.path.isdir(file)


def _parts(found: Iterable[str], shape: tuple[int, ...]) -> Iterator[_Part]:
  """Reads files as they are needed; images and texts a batch at a time.

  Args:
    found: names of the files.
    shape: of one input of the run.

  Yields:
    What it is, the name of each input, and the inputs.

  Raises:
    DataError: for a file that cannot be read.
  """
  for is_image, some in itertools.groupby(
      found, lambda file: not _ends(file, _TEXTS + _ARRAYS)):
    if is_image:
      for batch in _batches([*some]):
        yield (batch[0] if len(batch) == 1 else f'{batch[0]} to {batch[-1]}',
               batch, folder.read_images(batch, *shape))
    else:
      for file in some:
        yield from ([_of_array(file, shape)] if _ends(file, _ARRAYS) else
                    _of_texts(file))


def _of_array(file: str, shape: tuple[int, ...]) -> _Part:
  with table.named(pathlib.Path(file)):
    array = files.read_array(file)
    if array.dtype.kind == 'U' and len(shape) == 3:  # Not names of files.
      raise files.DataError(f'the run takes {_TAKES[3]}')
  rows = range(len(array) if array.ndim else 1)
  return file, [f'{file}:{row}' for row in rows], array


def _of_texts(file: str) -> Iterator[_Part]:
  path = pathlib.Path(file)
  with table.named(path):
    texts = table.lines(path) if _ends(file, ('.txt',)) else [
        (line, cells['text']) for line, cells in table.read(path, ('text',))]
  for batch in _batches(texts):
    yield (file, [f'{file}:{line}' for line, _ in batch],
           [one for _, one in batch])


def _batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
  """Yields parts of the size that predictions are compiled for."""
  for start in range(0, len(items), evaluate.BATCH):
    yield items[start:start + evaluate.BATCH]


def _rows(run: finished.LoadedRun, part: _Part, seed: int | None
          ) -> Iterator[tuple[str, str, str]]:
  """Yields the name, the class and its probability of each input.

  What Python would warn of is noted.
  """
  what, names, inputs = part
  with warnings.catch_warnings(record=True) as said:
    try:
      logits = np.asarray(run.predict(inputs, seed))
    except ValueError as error:
      raise ValueError(f'{what}: {error}') from error
  if not names:
    raise ValueError(f'{what} has no row.')
  for line in dict.fromkeys(checks.one_line(one.message) for one in said
                            if isinstance(one.message, UserWarning)):
    printing.say(f'Note: {what}: {line}', stream=sys.stderr)
  classes = logits.argmax(-1)
  # Of the softmax, that of the largest.
  certain = 1 / np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)
  for name, class_, probability in zip(names, classes, certain, strict=True):
    yield (name, run.class_names[class_] if run.class_names else str(class_),
           f'{probability:.6f}')


@arguments.refusing
def main(argv: Sequence[str]) -> int:
  """Predicts all inputs, then prints or writes; returns the exit code."""
  asked = _arguments(argv)
  run = finished.load(asked.run)
  if asked.seed not in (None, *run.states):
    raise checks.FieldError('seed', asked.seed, 'allowed are those of the run, '
                            f'{", ".join(map(str, run.states))}.')
  run.global_model()  # Raises where there is none.
  found = [file for given in asked.inputs for file in _files(given, run)]
  rows = [row for part in _parts(found, tuple(run.spec.input_shape))
          for row in _rows(run, part, asked.seed)]
  table_ = text.as_csv([_HEADER, *rows])
  if asked.out is None:
    printing.say(table_, end='')
  else:
    disk.replace(asked.out, text.plain(table_).encode())
    printing.say(f'{asked.out}: {len(rows)} row{"s" * (len(rows) != 1)}')
  return 0
