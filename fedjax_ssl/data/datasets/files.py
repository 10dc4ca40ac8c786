"""Arrays, as of `.npz` files, checked before use; what every file gives."""
from __future__ import annotations

from collections.abc import Collection, Mapping
import difflib
import pathlib
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.core.types import Examples
from fedjax_ssl.data import files
from fedjax_ssl.data.datasets import names as names_lib
from fedjax_ssl.data.datasets import tokens
from fedjax_ssl.data.files import DataError as DataError

_CLIENTS, _CLASSES = 'client_train', 'class_names'
_KINDS = {**dict.fromkeys('US', 'words'), **dict.fromkeys('iuf', 'numbers')}

# Key names of the parts: Keras' mnist.npz, and MedMNIST.
PARTS = {'train': ('x_train', 'y_train'), 'validation': ('x_val', 'y_val'),
         'test': ('x_test', 'y_test')}
_LAYOUTS = (
    PARTS,
    {'train': ('train_images', 'train_labels'),
     'validation': ('val_images', 'val_labels'),
     'test': ('test_images', 'test_labels')},
)


class Source(NamedTuple):
  """What a file holds.

  Attributes:
    parts: 'train', 'test' and, where the file has it, 'validation'.
    clients: integers or words, the client of each row; of some parts or none.
    class_names: of the C classes; None where they have numbers only.
    vocabulary: of texts, the tokens of words; None of anything else.
  """

  parts: dict[str, Examples]
  clients: Mapping[str, np.ndarray] = {}
  class_names: tuple[str, ...] | None = None
  vocabulary: Mapping[str, int] | None = None

  def owners(self) -> tuple[np.ndarray | None, tuple[str, ...] | None]:
    """Returns int32[D] clients of the training rows and their N names, if any.

    Raises:
      DataError: see `names.owners`.
    """
    if 'train' not in self.clients:
      return None, None
    return names_lib.owners(self.clients['train'])


def read_npz(path: pathlib.Path) -> Source:
  """Reads 'train', 'test' and, where the file has it, 'validation'.

  Args:
    path: .npz with keys x_train, y_train, x_test, y_test (and x_val, y_val),
      or train_images, train_labels, ... as MedMNIST names them. Images [D, H,
      W], [D, H, W, 1] or [D, H, W, 3]: uint8, other integers in 0..255, or
      floats in [0, 1] or whole in 0..255. Labels [D] or [D, 1], integers or
      words; of a training row -1 is no label. In place of images there may be
      texts [D]; those of train give the vocabulary. There may be two more keys:
      `class_names`, words [C], and `client_train`, the client of each training
      row: integers 0 to N-1, or words. Nothing is unpickled.

  Returns:
    A Source with inputs uint8[D, H, W, C], of texts int32[D, 40], and labels
    int32[D].

  Raises:
    DataError: if the file is broken or the arrays do not make a data set.
  """
  try:
    return of_arrays(*_read(path))
  except DataError as error:
    raise DataError(f'{path}: {error}') from error


Arrays = dict[str, tuple[np.ndarray, np.ndarray]]


# Of examples given as arrays, and what may be said of them.
KEYS = PARTS['train'] + PARTS['test']
BESIDE = (_CLIENTS, _CLASSES)
_INPUTS = 'x_', 'inputs'  # What keys of inputs begin with.


def as_array(key: str, value: Any) -> np.ndarray:
  """Converts what is given under a key; masked labels are unknown, -1.

  Raises:
    DataError: for lists that make no array, for what is neither list nor array,
      and for masked entries of anything but numbers of y_train.
  """
  # An array of pandas has a mask of its own, which numpy would take for one.
  if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
    if key.startswith(_INPUTS):
      raise DataError(f'{key} has masked entries; fill them, as by .filled(0)')
    if key != 'y_train' or value.dtype.kind not in 'iu':
      raise DataError(f'{key} has masked entries; only numbers of y_train may '
                      'be masked, in rows without a label')
    return np.ma.filled(value.astype(np.int64), -1)
  try:
    made = (tokens.as_array if key.startswith(_INPUTS) else np.asarray)(value)
  except ValueError as error:
    raise DataError(f'{key} is no array: {error}') from error
  if made.dtype == object and not made.ndim:
    raise DataError(f'{key} is of type {type(value).__name__}; give an array '
                    'or a list')
  return made


def unfit(names: Collection[str]) -> str:
  """Says which of `KEYS` is missing, or what is none; '' if it is a data set.

  `x_val` and `y_val` may be there too, both, and each of `BESIDE`.
  """
  held_out = PARTS['validation']
  wanted = (*KEYS, *(held_out if {*held_out} & {*names} else ()))
  absent = [key for key in wanted if key not in names]
  strange = [key for key in names if key not in (*KEYS, *held_out, *BESIDE)]
  return (f'{absent[0]} is missing' if absent else
          f'{strange[0]!r} is none of them, nor of '
          f'{", ".join((*held_out, *BESIDE))}' if strange else '')


def of_arrays(arrays: Mapping[str, tuple[np.ndarray, np.ndarray]],
              beside: Mapping[str, np.ndarray]) -> Source:
  """Makes a Source of raw arrays; see `read_npz`.

  Args:
    arrays: images or texts, and labels, of each part.
    beside: some of `BESIDE`.

  Raises:
    DataError: if the arrays do not make a data set.
  """
  vocabulary, arrays = _encoded(arrays)
  parts, names = _named_parts(arrays, beside.get(_CLASSES),
                              'images' if vocabulary is None else 'texts')
  if _CLIENTS not in beside:
    return Source(parts, {}, names, vocabulary)
  owners, rows = np.asarray(beside[_CLIENTS]), len(parts['train'].labels)
  if len(np.atleast_1d(owners)) != rows:
    raise DataError(f'{_CLIENTS} has {len(np.atleast_1d(owners))} entries, and '
                    f'train {rows} rows')
  source = Source(parts, {'train': owners}, names, vocabulary)
  source.owners()  # Raises for what names no clients.
  return source


def _encoded(arrays: Mapping[str, tuple[np.ndarray, np.ndarray]]
             ) -> tuple[dict[str, int] | None,
                        Mapping[str, tuple[np.ndarray, np.ndarray]]]:
  """Returns the vocabulary of texts, and the parts with tokens for texts.

  Without texts it is None, and the parts are as they were.
  """
  found = {part: tokens.as_texts(f'{part} inputs', inputs)
           for part, (inputs, _) in arrays.items()}
  texts = {part: one for part, one in found.items() if one is not None}
  if not texts:
    return None, arrays
  if absent := [part for part in found if part not in texts]:
    raise DataError(f'{next(iter(texts))} has texts, and {absent[0]} none')
  known = tokens.vocabulary(texts['train'])
  return known, {part: (tokens.encode(one, known), arrays[part][1])
                 for part, one in texts.items()}


def _named_parts(arrays: Mapping[str, tuple[np.ndarray, np.ndarray]],
                 given: np.ndarray | None, kind: str
                 ) -> tuple[dict[str, Examples], tuple[str, ...] | None]:
  """Converts raw parts, whose labels may be words; see `read_npz`.

  Args:
    arrays: inputs and labels of each part.
    given: words [C], names of the classes.
    kind: of the inputs, see `check_parts`.

  Returns:
    Examples of each part, and the names of the C classes if there are any.

  Raises:
    DataError: if the arrays do not make a data set.
  """
  numbered, names = _numbered(dict(arrays), given)
  parts = check_parts(numbered, kind)
  num_classes = int(parts['train'].labels.max()) + 1
  if names is not None and len(names) != num_classes:
    raise DataError(f'{_CLASSES} has {len(names)} names, and train '
                    f'{num_classes} classes')
  return parts, names


def _numbered(arrays: Arrays, given: np.ndarray | None
              ) -> tuple[Arrays, tuple[str, ...] | None]:
  """Returns the arrays with numbers for words, and the names of the classes."""
  names = None if given is None else names_lib.check_names(given)
  none = int(names_lib.NONE)
  arrays = {part: (inputs, names_lib.texts(labels, {none}))
            for part, (inputs, labels) in arrays.items()}
  kinds = {part: _KINDS.get(labels.dtype.kind)
           for part, (_, labels) in arrays.items() if labels.size}
  for part, kind in kinds.items():
    if None not in (kind, kinds.get('train')) and kind != kinds['train']:
      raise DataError(f'labels of {part} are {kind}, those of train '
                      f'{kinds["train"]}; name the classes alike in all parts')
  if arrays['train'][1].dtype.kind not in 'US':
    return arrays, names
  words = {part: names_lib.as_words(f'labels of {part}', labels)
           for part, (_, labels) in arrays.items()}
  if names is None:
    names_lib.check_known(words['train'])
  known = words['train'] != names_lib.NONE
  if not known.any():
    raise DataError(f'no row of train has a label, all are {names_lib.NONE}')
  numbers, names = names_lib.number(
      {**words, 'train': words['train'][known]}, names)
  found = np.full(known.shape, -1)
  found[known] = numbers['train']
  numbers['train'] = found
  return {part: (inputs, numbers[part])
          for part, (inputs, _) in arrays.items()}, names


def _read(path: pathlib.Path) -> tuple[Arrays, dict[str, np.ndarray]]:
  """Arrays of the layout whose training keys a file has, and other arrays."""
  layout: dict[str, tuple[str, str]] = {}

  def choose(names: list[str]) -> list[str]:
    known = next((keys for keys in _LAYOUTS if set(keys['train']) & set(names)),
                 _LAYOUTS[0])
    for part, keys in known.items():
      absent = [key for key in keys if key not in names]
      if part == 'validation' and len(absent) == len(keys):
        continue
      if absent:
        raise DataError(f'no key {absent[0]!r}; it has '
                        f'{", ".join(sorted(names)) or "none"}')
      layout[part] = keys
    used = {*(key for keys in layout.values() for key in keys),
            *(key for key in (_CLIENTS, _CLASSES) if key in names)}
    check_spelling('key', {*names} - used, {
        *known['validation'], _CLIENTS, _CLASSES} - used, _CLIENTS)
    return sorted(used)

  arrays = files.read_arrays(path, choose)
  return {part: (arrays[inputs], arrays[labels])
          for part, (inputs, labels) in layout.items()}, {
              key: arrays[key] for key in (_CLIENTS, _CLASSES)
              if key in arrays}


def check_spelling(kind: str, spare: Collection[str], absent: Collection[str],
                   clients: str) -> None:
  """Refuses a name that seems to be meant for one that may be absent.

  Passed over, it would leave a run whose clients or classes are others than
  the file says.

  Args:
    kind: what the names name, 'key' or 'column'.
    spare: names that are not read.
    absent: names that would be read.
    clients: the one that says whose a row is; all that begins with 'client' is
      taken for it.

  Raises:
    DataError: for the first such name.
  """
  for name in sorted(spare):
    if 'unlabel' in name.lower():
      raise DataError(f'{kind} {name!r} is not read: rows without a label are '
                      f'rows to train on, with the label {names_lib.NONE}')
    near = difflib.get_close_matches(
        name.replace('validation', 'val'), sorted(absent), 1, 0.75)
    if clients in absent and name.startswith('client'):
      near = [clients]
    if near:
      raise DataError(f'{kind} {name!r} is not read: name it {near[0]!r} if '
                      'you mean that, or take it out')


def check_parts(arrays: Mapping[str, tuple[np.ndarray, np.ndarray]],
                kind: str = 'images') -> dict[str, Examples]:
  """Converts raw parts to Examples; see `read_npz`.

  Args:
    arrays: inputs and labels of each part.
    kind: 'images', or 'texts', which are tokens already.
  """
  inputs = {k: v[0] for k, v in arrays.items()}
  if kind == 'images':
    inputs = as_stored(inputs)
  labels = {k: class_labels(k, v[1]) for k, v in arrays.items()}
  num_classes = int(labels['train'].max(initial=-1)) + 1
  if not num_classes:
    raise DataError('no row of train has a label, all are -1')
  for part in arrays:
    if len(inputs[part]) != len(labels[part]):
      raise DataError(f'{part} has {len(inputs[part])} {kind} and '
                      f'{len(labels[part])} labels')
    if inputs[part].shape[1:] != inputs['train'].shape[1:]:
      raise DataError(f'{part} images have shape {inputs[part].shape[1:]}, '
                      f'train images {inputs["train"].shape[1:]}')
    if labels[part].max() >= num_classes:
      raise DataError(f'{part} has label {labels[part].max()}, train has only '
                      f'0 to {num_classes - 1}')
  if num_classes < 2:
    raise DataError('train has one class only, all labels are 0; there is '
                    'nothing to tell apart')
  known = labels['train'][labels['train'] >= 0]
  absent = np.flatnonzero(np.bincount(known) == 0)
  if absent.size:
    raise DataError(f'labels must be 0 to C-1: the largest is '
                    f'{num_classes - 1}, but no example of train has label '
                    f'{absent[0]}' + (
                        '; a label of -1 is 255 in an array of uint8'
                        if num_classes == 256 else
                        '; subtract 1 if they begin at 1'
                        if [*absent] == [0] else ''))
  return {part: Examples(inputs[part], labels[part]) for part in arrays}


def as_stored(parts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Converts images to uint8[D, H, W, C]; all parts are scaled alike.

  Args:
    parts: [D, H, W] or [D, H, W, C], C being 1 or 3: numbers of 0 to 255, or
      floats of 0 to 1, if no part holds larger ones.

  Raises:
    DataError: for other shapes, types or values.
  """
  for part, images in parts.items():
    if images.ndim not in (3, 4) or (
        images.ndim == 4 and images.shape[-1] not in (1, 3)):
      raise DataError(
          f'{part} images have shape {images.shape}; allowed are [D, H, W], '
          '[D, H, W, 1] and [D, H, W, 3]' + (
              '; a table of features [D, F] goes as [D, 1, F] with columns '
              'scaled to 0 to 1 by train, rows to test clipped to that, of '
              'which 256 steps are kept; own_data then takes model=mlp, '
              'weak=none and strong=none' if images.ndim == 2 else
              '; move the channel last, as by numpy.moveaxis(x, 1, -1)'
              if images.shape[1:2] in ((1,), (3,)) else ''))
    if not images.size:
      raise DataError(f'{part} images are empty, shape {images.shape}')
    if images.dtype.kind not in 'buif':
      raise DataError(f'{part} images have dtype {images.dtype}; allowed are '
                      'integers and floats')
    if images.dtype.kind == 'f' and not np.isfinite(images).all():
      raise DataError(f'{part} images hold NaN or infinity')
    if images.min() < 0 or images.max() > 255:
      raise DataError(f'{part} images hold values {images.min()} to '
                      f'{images.max()}; allowed are 0 to 255, or 0 to 1 for '
                      'floats' + (', to which the columns of a table are '
                                  'scaled, by the rows of train'
                                  if images.shape[1] == 1 else ''))
  unit = all(x.dtype.kind == 'b' or x.dtype.kind == 'f' and x.max() <= 1
             for x in parts.values())
  result = {}
  for part, given in parts.items():
    images = given
    if unit:
      images = np.rint(images.astype(np.float32) * 255)
    elif images.dtype.kind in 'bf' and images.min() < images.max() <= 1:
      kind = 'bools' if images.dtype.kind == 'b' else 'floats in [0, 1]'
      raise DataError(f'{part} images are {kind}, those of another part are '
                      'not; all must have one scale')
    elif images.dtype.kind == 'f' and (images != np.rint(images)).any():
      raise DataError(f'{part} images are floats neither in [0, 1] nor whole; '
                      'divide them by the value of white, such as 255')
    if unit and images.min() == images.max() and given.min() < given.max():
      raise DataError(f'{part} images hold {given.min()} to {given.max()}, of '
                      'which 256 steps from 0 to 1 leave one; scale them')
    images = images if images.ndim == 4 else images[..., None]
    result[part] = np.ascontiguousarray(images.astype(np.uint8))
  return result


def _as_integers(labels: np.ndarray) -> str:
  """Says how to make integers of labels that are whole numbers; else ''."""
  whole = all(isinstance(x, int | float | np.integer | np.floating)
              and float(x).is_integer() for x in labels.tolist())
  return '; give y.astype(int)' if whole else ''


def class_labels(part: str, labels: np.ndarray) -> np.ndarray:
  """Converts the classes of a part to int32[D]; -1: a row of train without one.

  Raises:
    DataError: for anything but one integer from 0 a row, or -1 in train.
  """
  if labels.ndim == 2 and labels.shape[1] == 1:
    labels = labels[:, 0]
  if labels.ndim != 1:
    raise DataError(f'{part} labels have shape {labels.shape}; allowed are '
                    '[D] and [D, 1], one class each'
                    + ('; of one-hot rows give y.argmax(1)'
                       if labels.ndim == 2 else ''))
  if not labels.size:
    raise DataError(f'{part} labels are empty')
  if labels.dtype.kind not in 'iu':
    raise DataError(f'{part} labels have dtype {labels.dtype}'
                    f'{names_lib.odd(labels)}; allowed are integers and words'
                    + (', -1 for a row without a label' if part == 'train'
                       else '') + _as_integers(labels))
  least = -1 if part == 'train' else 0
  if labels.min() < least or labels.max() >= 2**31 - 1:
    raise DataError(f'{part} labels run from {labels.min()} to '
                    f'{labels.max()}; allowed is 0 to C-1'
                    + (', and -1 for a row without a label' if least else ''))
  if int(labels.max()) >= max(labels.size, 1000) and part == 'train':
    raise DataError(f'{part} has label {labels.max()} but only {labels.size} '
                    'examples; labels must be 0 to C-1')
  return labels.astype(np.int32)
