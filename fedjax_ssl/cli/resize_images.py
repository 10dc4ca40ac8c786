"""Brings a folder of images to one size, as training on them needs.

fedjax-ssl resize-images --images=DIR/NAME --size=32 --out=DIR/NAME32

Each image's largest square around its middle is scaled to size x size pixels
and written without loss, as PNG, whatever its name ends with: names stay, so
that a clients.csv still fits. What is no image is copied; what is hidden, as
.git, is left out.
"""
from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent import futures
import os
import pathlib
import shutil
import tempfile

from fedjax_ssl.cli import arguments
from fedjax_ssl.data import files
from fedjax_ssl.data.datasets import folder, table


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
  parser = arguments.Parser('resize-images', __doc__)
  parser.add_argument('--images', type=pathlib.Path, required=True,
                      help='folder with train/CLASS/ and test/CLASS/')
  parser.add_argument('--size', type=int, required=True,
                      help='pixels of a side, at least 1')
  parser.add_argument('--out', type=pathlib.Path, required=True,
                      help='the folder to make')
  found = parser.parse_args(argv)
  if not found.images.is_dir():
    parser.error(f'--images={found.images} is no folder')
  if found.size < 1:
    parser.error(f'--size={found.size} must be at least 1')
  parser.check_out(found.out)
  if found.images.resolve() in found.out.resolve().parents:
    parser.error(f'--out={found.out} must not lie in --images')
  return found


def resized(file: pathlib.Path, target: pathlib.Path, size: int) -> None:
  """Writes an image of size x size pixels.

  Args:
    file: the image.
    target: where, as PNG; a file there is replaced.
    size: pixels of a side.

  Raises:
    DataError: if the file is no image that a folder of images may hold.
  """
  from PIL import Image
  pixels = folder.fitted(folder.read_image(file), size, size)
  Image.fromarray(pixels).save(target, format='PNG')


def resize(images: pathlib.Path, out: pathlib.Path, size: int) -> int:
  """Copies a folder with all its images in one size.

  Args:
    images: the folder.
    out: the new one; it is there whole, or not at all.
    size: pixels of a side.

  Returns:
    How many images there are.

  Raises:
    DataError: see `resized` and `folder.walk`.
    OSError: if something cannot be read or written.
  """
  with tempfile.TemporaryDirectory(prefix=f'.{out.name}.',
                                   dir=out.absolute().parent) as beside:
    made = pathlib.Path(beside) / out.name
    made.mkdir()
    are = []
    for one in folder.walk(images):
      target = made / one.relative_to(images)
      if one.is_dir():
        target.mkdir()
      elif folder.is_image(one):
        are.append((one, target))
      else:
        with table.named(one):
          files.check_regular(one)
        shutil.copyfile(one, target)
    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
      for _ in pool.map(lambda pair: resized(pair[0], pair[1], size), are):
        pass  # An error is raised here, the first of them.
    made.rename(out)
  return len(are)


@arguments.refusing
def main(argv: Sequence[str]) -> int:
  """Writes the new folder; returns the exit code."""
  asked = _arguments(argv)
  count = resize(asked.images, asked.out, asked.size)
  print(f'{asked.out}: {count} images of {asked.size} x {asked.size} pixels')
  return 0
