"""Images in a folder for each class, as torchvision's ImageFolder has them."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
import os
import pathlib
import shlex

import numpy as np

from fedjax_ssl.core import checks
from fedjax_ssl.data.datasets import files, table
from fedjax_ssl.data.datasets import names as names_lib
from fedjax_ssl.data.files import check_regular, DataError

# Folders of the parts; the last two are one.
_PARTS = {'train': 'train', 'test': 'test', 'val': 'validation',
          'validation': 'validation'}
_UNLABELED = 'unlabeled'  # In place of a class: of rows without a label.
_CLIENTS = 'clients.csv'  # Whose each image is.
_ENDINGS = frozenset(('.bmp', '.gif', '.jpeg', '.jpg', '.png', '.ppm', '.tif',
                      '.tiff', '.webp'))
# Pillow's modes without color, and with 16 bits.
_GRAY, _DEEP = frozenset(('1', 'L', 'LA', 'La')), 'I;16'
_TOO_DEEP = frozenset(('I', 'F'))
# What systems leave in folders.
_LEFT = frozenset(('Thumbs.db', 'desktop.ini'))


def holds(path: pathlib.Path) -> bool:
  """Returns whether a folder holds images to train on, see `read`."""
  return os.path.isdir(path / 'train')


def read(path: pathlib.Path, name: str) -> files.Source:
  """Reads `train/CLASS/*`, `test/CLASS/*` and, if it is there, `val/CLASS/*`.

  Classes are numbered in alphabetical order, images are in the order of their
  names. Images in `train/unlabeled/` have no label. Files whose name begins
  with a dot are left alone.

  Args:
    path: the folder. All images have one size; they are gray if all of them
      are, else RGB. Of 16 bits the upper 8 are taken. In `clients.csv` a column
      `image` names images to train on, all of them, as train/CLASS/NAME, and a
      column `client` whose each is.
    name: of the data set.

  Returns:
    A Source with inputs uint8[D, H, W, C] and labels int32[D].

  Raises:
    DataError: if a part is missing, or holds anything but images of one size
      in folders, or a class to train on has none, or is called -1, the mark of
      a row without label; or if the table of clients does not fit.
  """
  parts: dict[str, tuple[list[np.ndarray], list[str]]] = {}
  folders = {'train': 'train', 'test': 'test'}  # By part, as they are called.
  trained: list[str] = []  # As the table of clients names them.
  shape: tuple[int, ...] = ()
  for folder in _within(path):
    if not folder.is_dir():
      _check_table(folder)
      continue
    _check_unlabeled(folder)
    if folder.name not in _PARTS:
      continue
    part = _PARTS[folder.name]
    if part in parts:
      raise DataError(f'{folder}: {path} has two folders to validate on; leave '
                      'one')
    images, labels = parts.setdefault(part, ([], []))
    folders[part] = folder.name
    for file in _files(folder, part):
      pixels = read_image(file)
      shape = shape or pixels.shape[:2]
      if pixels.shape[:2] != shape:
        raise DataError(f'{file} has {_size(pixels.shape)} pixels, and others '
                        f'{_size(shape)}; `fedjax-ssl resize-images '
                        f'--images={shlex.quote(str(path))} --size=32 '
                        f'--out={shlex.quote(f"{path}32")}` brings all to one '
                        f'size; then give '
                        f'{checks.option("dataset", f"{name}32")}')
      images.append(pixels)
      if part == 'train':
        trained.append(file.relative_to(path).as_posix())
      labels.append(names_lib.NONE if (
          part == 'train' and file.parent.name == _UNLABELED)
          else file.parent.name)
  for part, called in folders.items():
    if part not in parts or not parts[part][0]:
      raise DataError(f'{path}: no image in {called}/; it has a folder for '
                      'each class, with its images')
  color = any(image.ndim == 3 for images, _ in parts.values()
              for image in images)
  place = path / _CLIENTS
  beside = {}
  if os.path.lexists(place):  # A link that leads nowhere is no consent.
    beside = {'client_train': _clients(place, trained)}
  try:
    return files.of_arrays({part: (
        np.stack([_with_channels(image, color) for image in images]),
        np.array(labels)) for part, (images, labels) in parts.items()}, beside)
  except DataError as error:
    raise DataError(f'{path}: {error}') from error


def _check_table(file: pathlib.Path) -> None:
  """Refuses a file that seems to be meant for an absent table of clients."""
  if not os.path.lexists(file.with_name(_CLIENTS)) and (
      file.stem.lower().rstrip('s') == 'client'):
    raise DataError(f'{file} is not read: name it {_CLIENTS} if you mean that, '
                    'or take it out')


def _clients(file: pathlib.Path, images: list[str]) -> np.ndarray:
  """Returns words [D], the client of each of the images."""
  with table.named(file):
    owners: dict[str, str] = {}
    known = set(images)
    for line, cells in table.read(file, ('image', 'client')):
      name, client = cells['image'].strip(), cells['client'].strip()
      if name not in known:
        raise DataError(f', line {line}: {name[:80]!r} is no image to train '
                        f'on; they are named as {images[0]!r}')
      if name in owners:
        raise DataError(f', line {line}: {name!r} is there twice')
      if not client:
        raise DataError(f', line {line}: an image to train on has no client')
      owners[name] = client
    absent = known - owners.keys()
    if absent:
      raise DataError(f'{min(absent)!r} is missing; each image to train on has '
                      'a client')
  return np.array([owners[name] for name in images])


def _check_unlabeled(folder: pathlib.Path) -> None:
  """Refuses a folder that seems to be meant for images without a label."""
  if 'unlabel' in folder.name.lower():
    raise DataError(f'{folder} is not read: images without a label lie in '
                    f'train/{_UNLABELED}/')


def _files(folder: pathlib.Path, part: str) -> Iterator[pathlib.Path]:
  """Yields the images of a part, by class and name."""
  for one in _within(folder):
    if not one.is_dir():
      raise DataError(f'{one} is in no folder of a class')
    if one != folder.parent / 'train' / _UNLABELED:
      _check_unlabeled(one)
    try:
      one.name.encode()
    except UnicodeEncodeError:
      raise DataError(f'{ascii(str(one))} has a name that is no UTF-8, by '
                      'which a class would be called; rename it') from None
    if one.name == names_lib.NONE:
      raise DataError(f'{one} would be the class {names_lib.NONE}, the mark of '
                      f'a row without label; such rows lie in '
                      f'train/{_UNLABELED}/')
    held = _within(one)
    if not held and part == 'train' and one.name != _UNLABELED:
      raise DataError(f'{one} holds no image to train on; add some, or remove '
                      'the class')
    for file in held:
      if not is_image(file):
        raise DataError(f'{file} is no image; take it out. Images end with '
                        f'{", ".join(sorted(_ENDINGS))}')
      yield file


def is_image(file: pathlib.Path) -> bool:
  """Returns whether a file is an image by its name, and not a hidden one."""
  return file.suffix.lower() in _ENDINGS and not file.name.startswith('.')


def below(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns all images in a folder and the folders in it, by name.

  What is no image by its name is left out.

  Raises:
    DataError: see `walk`, and if there is no image at all.
  """
  found = [one for one in walk(folder) if is_image(one) and not one.is_dir()]
  if not found:
    raise DataError(f'{folder} holds no image; images end with '
                    f'{", ".join(sorted(_ENDINGS))}')
  return found


def walk(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields all that a folder holds, by name, each folder before what it holds.

  What is hidden is left out. A part of the folder, and a class of a part, may
  be a link to another one; further down links lead to a folder once, and none
  leads to where one is.

  Raises:
    DataError: if a folder cannot be read.
  """
  yield from _walk(folder, {_identity(folder)}, parted=2)


def _walk(folder: pathlib.Path, passed: set[tuple[int, int]], parted: int
          ) -> Iterator[pathlib.Path]:
  """Yields what a folder holds, without folders that were passed.

  Args:
    folder: where.
    passed: device and number of those folders; gets those that are walked.
    parted: over how many levels each folder has a set of its own.
  """
  for one in _within(folder):
    if not one.is_dir():
      yield one
    elif (place := _identity(one)) not in passed:
      mine = {*passed} if parted > 0 else passed
      mine.add(place)
      yield one
      yield from _walk(one, mine, parted - 1)


def _identity(folder: pathlib.Path) -> tuple[int, int]:
  found = folder.stat()
  return found.st_dev, found.st_ino


def _within(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns what a folder holds, in the same order on every system."""
  try:
    return sorted((one for one in folder.iterdir() if one.name not in _LEFT
                   and not one.name.startswith('.')), key=lambda one: one.name)
  except OSError as error:
    raise DataError(f'{folder} cannot be read: {error.strerror}') from error


def read_image(file: pathlib.Path) -> np.ndarray:
  """Reads an image: uint8[H, W] if it is gray, else uint8[H, W, 3].

  Raises:
    DataError: if it cannot be read, or has pixels of 32 bits.
  """
  from PIL import Image
  with table.named(file):
    check_regular(file)
  try:
    with Image.open(file) as found:
      if found.mode in _TOO_DEEP:
        raise DataError(f'{file} has pixels of 32 bits; save it with 8')
      if found.mode.startswith(_DEEP):
        return (np.asarray(found) >> 8).astype(np.uint8)
      return np.asarray(found.convert('L' if found.mode in _GRAY else 'RGB'))
  except DataError:
    raise
  except (OSError, ValueError, SyntaxError,
          Image.DecompressionBombError) as error:
    raise DataError(f'{file} cannot be read: {error}') from error


def fitted(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
  """Scales the largest part around the middle that has the result's shape.

  Args:
    pixels: uint8[H, W] or [H, W, 3].
    height: of the result.
    width: of the result.

  Returns:
    uint8[height, width] or [height, width, 3]; a copy if that is its size.
  """
  from PIL import Image
  tall, wide = pixels.shape[:2]
  share = min(tall / height, wide / width)
  tall_part, wide_part = (max(round(x * share), 1) for x in (height, width))
  top, left = (tall - tall_part) // 2, (wide - wide_part) // 2
  part = pixels[top:top + tall_part, left:left + wide_part]
  return np.asarray(Image.fromarray(part).resize(
      (width, height), Image.Resampling.LANCZOS))


def read_images(paths: Sequence[str | os.PathLike[str]], height: int,
                width: int, channels: int) -> np.ndarray:
  """Reads images of any size, as `fitted` brings them to one.

  Args:
    paths: of the files, B of them.
    height: of what is returned.
    width: of what is returned.
    channels: 1, and colors are read as their brightness; or 3.

  Returns:
    uint8[B, height, width, channels].

  Raises:
    DataError: see `read_image`.
  """
  from PIL import Image
  found = np.zeros((len(paths), height, width, channels), np.uint8)
  for image, path in zip(found, paths, strict=True):
    pixels = read_image(pathlib.Path(os.path.expanduser(path)))
    scaled = Image.fromarray(fitted(pixels, height, width))
    image[:] = np.asarray(scaled.convert(
        'L' if channels == 1 else 'RGB')).reshape(image.shape)
  return found


def _with_channels(image: np.ndarray, color: bool) -> np.ndarray:
  """Returns uint8[H, W, 3], or uint8[H, W, 1] if no image has color."""
  if image.ndim == 3:
    return image
  return np.repeat(image[..., None], 3 if color else 1, axis=-1)


def _size(shape: tuple[int, ...]) -> str:
  return f'{shape[1]} x {shape[0]}'
