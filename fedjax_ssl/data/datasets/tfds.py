"""Images prepared by TensorFlow Datasets, read without TensorFlow."""
from __future__ import annotations

import os
from typing import Any

import numpy as np

from fedjax_ssl.core import checks
from fedjax_ssl.core.types import Examples
from fedjax_ssl.data.datasets.files import check_parts
from fedjax_ssl.data.files import DataError

# Our names where TensorFlow Datasets has others.
_NAMES = {
    'emnist': 'emnist/balanced',
    'svhn': 'svhn_cropped',
    'tiny_imagenet': 'tiny_imagenet200',
}
_ROWS_AT_A_TIME = 1024


def read_tfds(name: str, data_dir: str | os.PathLike[str] | None,
              advice: str) -> dict[str, Examples]:
  """Reads 'train', 'test' and, where there is one, 'validation'.

  A set without a test split is tested on its validation split.

  Args:
    name: ours, or any name of TensorFlow Datasets (`name/config`), of an
      image classification set prepared with file format array_record.
    data_dir: its folder; None is the library's own, ~/tensorflow_datasets.
    advice: first half of the message if the set is not available.

  Returns:
    Examples with inputs uint8[D, H, W, C] and labels int32[D].

  Raises:
    DataError: if TensorFlow Datasets is not installed, the set is not
      prepared, or it is no image classification set.
  """
  tfds_name = _NAMES.get(name, name)
  try:
    import tensorflow_datasets as tfds  # pylint: disable=g-import-not-at-top
  except ImportError:
    raise DataError(
        f"{advice}, or pip install -e '.[tfds]' in this repository's folder "
        'and run '
        f'{_command(tfds_name, data_dir)}') from None
  where = None if data_dir is None else os.fspath(data_dir)
  prepare = f'{advice}, or run {_command(tfds_name, data_dir)}'
  try:
    builder = tfds.builder(tfds_name, data_dir=where)
  except (tfds.core.registered.DatasetNotFoundError, ImportError,
          ValueError) as error:
    raise DataError(f'{advice}; TensorFlow Datasets cannot give '
                    f'{tfds_name!r} either ({checks.lines(error)[0]})'
                    ) from None
  try:
    splits = set(builder.info.splits)
    if 'train' not in splits:
      raise DataError(prepare)
    sources = {'train': 'train'}
    if 'test' in splits:
      sources['test'] = 'test'
      if 'validation' in splits:
        sources['validation'] = 'validation'
    elif 'validation' in splits:
      sources['test'] = 'validation'
    else:
      raise DataError(f'TensorFlow Datasets {tfds_name!r} has no test or '
                      f'validation split, only {", ".join(sorted(splits))}')
    return check_parts({part: _read(builder, split)
                        for part, split in sources.items()})
  except DataError:
    raise
  except (NotImplementedError, AssertionError, OSError, ImportError,
          ValueError) as error:
    # Without --overwrite a set that is prepared in another format stays so.
    raise DataError(f'{prepare} --overwrite '
                    f'({checks.lines(error)[0] or repr(error)})') from error


def _command(tfds_name: str, data_dir: str | os.PathLike[str] | None) -> str:
  command = f'tfds build {tfds_name} --file_format=array_record'
  if data_dir is not None:
    command += f' --data_dir={os.fspath(data_dir)}'
  return command


def _read(builder: Any, split: str) -> tuple[np.ndarray, np.ndarray]:
  """All images and labels of a split."""
  source = builder.as_data_source(split=split)
  images, labels = [], []
  for start in range(0, len(source), _ROWS_AT_A_TIME):
    rows = range(start, min(start + _ROWS_AT_A_TIME, len(source)))
    for row in source.__getitems__(list(rows)):
      if 'image' not in row or 'label' not in row:
        raise DataError(f'TensorFlow Datasets {builder.info.full_name!r} has '
                        f'no image and label, only {", ".join(sorted(row))}')
      images.append(row['image'])
      labels.append(row['label'])
  if len({image.shape for image in images}) > 1:
    raise DataError(f'TensorFlow Datasets {builder.info.full_name!r} has '
                    'images of several sizes; resize them into an .npz')
  return np.stack(images), np.asarray(labels)
