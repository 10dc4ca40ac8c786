"""A trained model predicts image files of any size."""
from __future__ import annotations

import numpy as np
from PIL import Image
import pytest

import fedjax_ssl
from fedjax_ssl.cli import resize_images

LABELS = np.arange(20) % 2


@pytest.fixture(scope='module', params=[1, 3])
def channels(request):
  return request.param


@pytest.fixture(scope='module')
def trained(channels):
  images = np.random.default_rng(0).integers(
      0, 256, (20, 5, 5, channels), np.uint8)
  return fedjax_ssl.fit(
      'fedavg', (images, LABELS, images, LABELS), model='linear', clients=1,
      cohort_size=1, labels_per_class=4, rounds=1, weak='none', progress=False)


@pytest.fixture
def files(tmp_path):
  """Files of photos: one in gray, two in color, of which one is not square."""
  rng = np.random.default_rng(1)
  (tmp_path / 'a').mkdir()
  for name, shape in (('a', (5, 5)), ('b', (5, 5, 3)), ('c', (12, 31, 3))):
    pixels = rng.integers(0, 256, shape, np.uint8)
    Image.fromarray(pixels).save(tmp_path / 'a' / f'{name}.png')
  return sorted((tmp_path / 'a').iterdir())


def test_files_count_as_what_resize_images_writes(trained, channels, files,
                                                  tmp_path):
  resize_images.resize(tmp_path / 'a', tmp_path / 'small', 5)
  pixels = []
  for file in files:
    with Image.open(tmp_path / 'small' / file.name) as image:
      found = np.asarray(image.convert('L' if channels == 1 else 'RGB'))
      pixels.append(found.reshape(5, 5, channels))
  wanted = trained.predict(np.stack(pixels))
  # Brightness before or after scaling: they may differ in a step of a pixel.
  close = 0.05 if channels == 1 else 1e-6
  np.testing.assert_allclose(trained.predict(files), wanted, atol=close)
  np.testing.assert_allclose(
      trained.predict([str(file) for file in files]), wanted, atol=close)
  assert not np.allclose(wanted[1], wanted[2], atol=close)


def test_files_are_judged(trained, files):
  found = trained.evaluate(files, [0, 1, 1])
  assert found['confusion'].sum() == 3


def test_what_is_no_list_of_files_is_refused(trained, files, tmp_path):
  (tmp_path / 'x.png').write_bytes(b'no image')
  for wrong, words in ((str(files[0]), 'a list of files'),
                       ([tmp_path / 'x.png'], 'x.png cannot be read'),
                       ([tmp_path / 'none.png'], 'none.png cannot be read'),
                       ([files[0], 3], 'inputs')):
    with pytest.raises(ValueError, match=words):
      trained.predict(wrong)
