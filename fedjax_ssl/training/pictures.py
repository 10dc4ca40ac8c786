"""Grids of images, written as PNG."""
from __future__ import annotations

import io
import os
import pathlib

import numpy as np
import numpy.typing as npt

from fedjax_ssl.core import disk

_GAP = 1  # White pixels between images.
_LEAST_SIDE = 56  # Of an image on the page; smaller ones are enlarged.


def grid(images: npt.ArrayLike) -> np.ndarray:
  """Lays images out with white lines between.

  Args:
    images: uint8[rows, columns, H, W, C], C 1 or 3.

  Returns:
    uint8[height, width, C], small images enlarged by a whole factor.

  Raises:
    ValueError: for another shape or type.
  """
  cells = np.asarray(images)
  if cells.ndim != 5 or cells.shape[-1] not in (1, 3) or (
      cells.dtype != np.uint8):
    raise ValueError(f'images are {cells.dtype}{list(cells.shape)}; allowed '
                     'is uint8[rows, columns, H, W, C], C 1 or 3.')
  factor = max(1, _LEAST_SIDE // min(cells.shape[2:4]))
  cells = cells.repeat(factor, 2).repeat(factor, 3)
  cells = np.pad(cells, ((0, 0), (0, 0), (0, _GAP), (0, _GAP), (0, 0)),
                 constant_values=255)
  rows, columns, height, width, channels = cells.shape
  return cells.transpose(0, 2, 1, 3, 4).reshape(
      rows * height, columns * width, channels)


def write(path: str | os.PathLike[str], images: npt.ArrayLike) -> None:
  """Writes a grid; the file is whole at any moment.

  Args:
    path: a .png file; its folder is made.
    images: see `grid`.

  Raises:
    ValueError: if `images` make no grid.
  """
  from PIL import Image
  page = grid(images)
  file = pathlib.Path(path)
  file.parent.mkdir(parents=True, exist_ok=True)
  shown, drawn = page[..., 0] if page.shape[-1] == 1 else page, io.BytesIO()
  Image.fromarray(shown).save(drawn, format='PNG')
  disk.replace(file, drawn.getvalue())
