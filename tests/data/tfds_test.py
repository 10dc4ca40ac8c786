"""Reading image sets that TensorFlow Datasets has prepared on disk."""
from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from fedjax_ssl.data import datasets

_WHY = 'needs tensorflow-datasets, array_record, importlib_resources, pillow'
tfds = pytest.importorskip('tensorflow_datasets', reason=_WHY)
pytest.importorskip('array_record', reason=_WHY)
pytest.importorskip('importlib_resources', reason=_WHY)
pytest.importorskip('PIL', reason=_WHY)

_CLASSES = 3
_SIZES = {'train': 30, 'test': 12}


def _image(split, i):
  return np.random.default_rng([len(split), i]).integers(
      0, 256, (8, 9, 3), dtype=np.uint8)


def _png(pixels):
  from PIL import Image  # pylint: disable=g-import-not-at-top
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, 'png')
  file.seek(0)
  return file


_Builder: Any = tfds.core.GeneratorBasedBuilder


class FedjaxSslTiny(_Builder):
  """Random images as PNG bytes: prepared without TensorFlow."""

  VERSION = tfds.core.Version('1.0.0')

  def _info(self):
    return tfds.core.DatasetInfo(
        builder=self,
        features=tfds.features.FeaturesDict({
            'image': tfds.features.Image(shape=(8, 9, 3)),
            'label': tfds.features.ClassLabel(num_classes=_CLASSES)}))

  def _split_generators(self, dl_manager):
    del dl_manager
    return {split: self._generate_examples(split) for split in _SIZES}

  def _generate_examples(self, split):
    for i in range(_SIZES[split]):
      yield i, {'image': _png(_image(split, i)), 'label': i % _CLASSES}


def _prepare(folder, file_format):
  builder = FedjaxSslTiny(data_dir=str(folder), file_format=file_format)
  builder.download_and_prepare()


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  folder = tmp_path_factory.mktemp('prepared')
  _prepare(folder, 'array_record')
  return folder


def _multiset(examples):
  return sorted((image.tobytes(), int(label))
                for image, label in zip(*examples, strict=True))


def test_reads_back_what_was_prepared(prepared):
  dataset = datasets.load('fedjax_ssl_tiny', prepared)
  assert dataset.num_classes == _CLASSES
  for split, got in (('train', dataset.train), ('test', dataset.test)):
    assert got.inputs.dtype == np.uint8 and got.labels.dtype == np.int32
    want = sorted((_image(split, i).tobytes(), i % _CLASSES)
                  for i in range(_SIZES[split]))
    assert _multiset(got) == want


def test_reads_files_whose_builder_is_unknown_and_loads_no_tensorflow(
    prepared, run_python):
  code = (
      'import sys; from fedjax_ssl.data import datasets\n'
      'assert "tensorflow_datasets" not in sys.modules\n'
      'd = datasets.load("fedjax_ssl_tiny", sys.argv[1])\n'
      'assert d.train.inputs.shape == (30, 8, 9, 3), d.train.inputs.shape\n'
      'assert "tensorflow" not in sys.modules\n')
  run_python(code, str(prepared))


def test_unprepared_set_says_what_to_run(tmp_path):
  with pytest.raises(datasets.DataError) as caught:
    datasets.load('svhn', tmp_path)
  message = str(caught.value)
  assert '\n' not in message
  assert str(tmp_path / 'svhn.npz') in message and 'x_train' in message
  assert ('tfds build svhn_cropped --file_format=array_record '
          f'--data_dir={tmp_path}') in message


def test_other_file_format_says_how_to_prepare_again(tmp_path):
  pytest.importorskip('tensorflow', reason='writes tfrecord')
  _prepare(tmp_path, 'tfrecord')
  with pytest.raises(datasets.DataError, match='array_record .*--overwrite'):
    datasets.load('fedjax_ssl_tiny', tmp_path)


def test_unknown_set_names_the_file_and_the_library(tmp_path):
  with pytest.raises(datasets.DataError) as caught:
    datasets.load('no_such_set', tmp_path)
  message = str(caught.value)
  assert '\n' not in message
  assert str(tmp_path / 'no_such_set.npz') in message
  assert 'TensorFlow Datasets' in message
