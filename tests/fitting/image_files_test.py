"""A trained model predicts image files of any size."""
from __future__ import annotations

import jax
import numpy as np
from PIL import Image
import pytest

import fedjax_ssl
from fedjax_ssl.cli import resize_images
from fedjax_ssl.data.datasets import folder

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
  np.testing.assert_array_equal(trained.predict(files), wanted)
  np.testing.assert_array_equal(
      trained.predict([str(file) for file in files]), wanted)
  assert not np.allclose(wanted[1], wanted[2])


def test_a_file_or_a_folder_is_taken_as_well(trained, files, tmp_path):
  wanted = trained.predict(files)
  for whole in (tmp_path, str(tmp_path)):
    np.testing.assert_array_equal(trained.predict(whole), wanted)
  for one in (files[2], str(files[2])):
    np.testing.assert_allclose(trained.predict(one), wanted[2:], atol=1e-5)


def test_classes_are_told_by_name_or_number(trained, files):
  logits = trained.predict(files)
  found = trained.classify(files)
  assert [name for name, _ in found] == [*map(str, logits.argmax(-1))]
  np.testing.assert_allclose([sure for _, sure in found],
                             jax.nn.softmax(logits).max(-1))
  assert [name for name, _ in trained._model._replace(
      class_names=('cat', 'dog')).classify(files)] == [
          ('cat', 'dog')[k] for k in logits.argmax(-1)]


def test_files_are_judged(trained, files):
  classes = np.asarray(trained.predict(files)).argmax(-1)
  found = trained.evaluate(files, classes)
  assert found['accuracy'] == 1 and found['confusion'].trace() == 3


@pytest.mark.parametrize('size, part', [
    ((2, 6), np.s_[4:8]), ((6, 2), np.s_[:, 4:8])])
def test_the_middle_of_the_same_proportions_is_kept(size, part):
  bright = np.zeros((12, 12), np.uint8)
  bright[part] = 200
  np.testing.assert_array_equal(folder.fitted(bright, *size),
                                np.full(size, 200))


@pytest.mark.parametrize('shape, size', [
    ((5, 5), (1, 13)), ((5, 5, 3), (64, 2)), ((1, 1), (64, 28))])
def test_no_image_is_too_small(shape, size):
  found = folder.fitted(np.full(shape, 200, np.uint8), *size)
  np.testing.assert_array_equal(found, np.full((*size, *shape[2:]), 200))


def test_what_is_no_list_of_files_is_refused(trained, files, tmp_path):
  (tmp_path / 'x.png').write_bytes(b'no image')
  (tmp_path / 'empty').mkdir()
  for wrong, words in ((str(tmp_path / 'empty'), 'empty holds no image'),
                       (tmp_path / 'gone', 'gone: cannot be read'),
                       ([tmp_path / 'x.png'], 'x.png cannot be read'),
                       ([tmp_path / 'none.png'], 'none.png: cannot be read'),
                       ([files[0], 3], 'inputs'), (5, 'inputs')):
    with pytest.raises(ValueError, match=words):
      trained.predict(wrong)
