"""Grids of images."""
from __future__ import annotations

import numpy as np
from PIL import Image
import pytest

from fedjax_ssl.training import pictures


@pytest.mark.parametrize('channels', [1, 3])
def test_a_cell_is_its_image_enlarged(tmp_path, channels):
  rng = np.random.default_rng(0)
  images = rng.integers(0, 255, (2, 3, 28, 28, channels), dtype=np.uint8)
  page = pictures.grid(images)
  assert page.shape == (2 * 57, 3 * 57, channels)
  np.testing.assert_array_equal(page[57:113:2, 114:170:2], images[1, 2])
  assert (page[56] == 255).all() and (page[:, 56] == 255).all()
  file = tmp_path / 'new' / 'page.png'
  pictures.write(file, images)
  read = np.asarray(Image.open(file))
  np.testing.assert_array_equal(
      read, page[..., 0] if channels == 1 else page)
  assert [x.name for x in file.parent.iterdir()] == ['page.png']


@pytest.mark.parametrize('images', [
    np.zeros((2, 28, 28, 1), np.uint8), np.zeros((1, 1, 4, 4, 2), np.uint8),
    np.zeros((1, 1, 4, 4, 1))])
def test_refuses(images):
  with pytest.raises(ValueError, match='images are'):
    pictures.grid(images)
