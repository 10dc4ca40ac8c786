from __future__ import annotations

import builtins

import numpy as np
import pytest

from fedjax_ssl.core.types import Examples
from fedjax_ssl.data import datasets


def _parts(num=12, classes=3, shape=(4, 5, 3), seed=0):
  """Good arrays in the layout of Keras' mnist.npz."""
  rng = np.random.default_rng(seed)
  return {
      'x_train': rng.integers(0, 256, (num, *shape), np.uint8),
      'y_train': np.arange(num) % classes,
      'x_test': rng.integers(0, 256, (classes, *shape), np.uint8),
      'y_test': np.arange(classes)}


def _save(folder, name='toy', **arrays):
  np.savez(folder / f'{name}.npz', **arrays)
  return folder


def _rows(*parts):
  """Multiset of examples."""
  return sorted((x.tobytes(), int(y)) for part in parts
                for x, y in zip(part.inputs, part.labels, strict=True))


def _fails(folder, *needles, name='toy', **kwargs):
  """Asserts one clear line that names the file."""
  with pytest.raises(datasets.DataError) as caught:
    datasets.load(name, folder, **kwargs)
  message = str(caught.value)
  assert '\n' not in message
  for needle in (str(folder / f'{name}.npz'), *needles):
    assert needle in message, message


def test_digits_are_complete_and_stratified():
  from sklearn.datasets import load_digits
  raw = load_digits()
  got = datasets.load('digits')
  assert len(got.train.labels) == 1437 and len(got.test.labels) == 360
  assert got.train.inputs.shape[1:] == (8, 8, 1) and not got.flip
  assert got.train.inputs.dtype == np.uint8 and got.num_classes == 10
  assert got.train.inputs.max() == 255
  pixels = np.rint(raw.images * 255 / 16).astype(np.uint8)[..., None]
  assert _rows(got.train, got.test) == _rows(
      Examples(pixels, raw.target))
  share = (np.bincount(got.test.labels) / np.bincount(raw.target))
  assert np.abs(share - .2).max() < .006


def test_digits_need_no_folder(monkeypatch):
  monkeypatch.setenv(datasets.DATA_DIR, '/no/such/folder')
  assert datasets.load('digits').name == 'digits'


def test_npz_keeps_every_row_in_order(tmp_path):
  parts = _parts()
  got = datasets.load('toy', _save(tmp_path, **parts))
  np.testing.assert_array_equal(got.train.inputs, parts['x_train'])
  np.testing.assert_array_equal(got.train.labels, parts['y_train'])
  np.testing.assert_array_equal(got.test.inputs, parts['x_test'])
  np.testing.assert_array_equal(got.test.labels, parts['y_test'])
  assert got.train.labels.dtype == np.int32 and got.validation is None
  assert got.num_classes == 3 and got.flip


def test_folder_from_the_environment(tmp_path, monkeypatch):
  monkeypatch.setenv(datasets.DATA_DIR, str(_save(tmp_path, **_parts())))
  assert datasets.load('toy').num_classes == 3


@pytest.mark.parametrize('dtype,scale', [
    ('int64', 1), ('uint16', 1), ('float64', 1), ('float32', 1 / 255),
    ('float64', 1 / 255), ('float16', 1 / 255)])
def test_other_dtypes_give_the_same_pixels(tmp_path, dtype, scale):
  parts = _parts()
  want = parts['x_train']
  for key in ('x_train', 'x_test'):
    parts[key] = (parts[key] * scale).astype(dtype)
  got = datasets.load('toy', _save(tmp_path, **parts))
  np.testing.assert_array_equal(got.train.inputs, want)


def test_a_dark_test_part_is_scaled_like_the_train_part(tmp_path):
  parts = _parts()
  parts['x_train'] = parts['x_train'].astype(float)
  parts['x_test'] = np.ones(parts['x_test'].shape)
  got = datasets.load('toy', _save(tmp_path, **parts))
  assert (got.test.inputs == 1).all()


@pytest.mark.parametrize('shape', [(4, 5), (4, 5, 1)])
def test_gray_images_get_a_channel(tmp_path, shape):
  got = datasets.load('toy', _save(tmp_path, **_parts(shape=shape)))
  assert got.train.inputs.shape == (12, 4, 5, 1) and len(got.mean) == 1


def test_medmnist_layout(tmp_path):
  parts = _parts(shape=(4, 5))
  got = datasets.load('bloodmnist', _save(
      tmp_path, 'bloodmnist', train_images=parts['x_train'],
      train_labels=parts['y_train'][:, None].astype(np.uint8),
      val_images=parts['x_train'][:4], val_labels=parts['y_train'][:4, None],
      test_images=parts['x_test'], test_labels=parts['y_test'][:, None]))
  np.testing.assert_array_equal(got.train.labels, parts['y_train'])
  assert got.validation is not None and got.flip
  np.testing.assert_array_equal(
      got.validation.inputs[..., 0], parts['x_train'][:4])


def test_a_mirrored_organ_is_another_class(tmp_path):
  path = _save(tmp_path, 'organamnist', **_parts())
  assert not datasets.load('organamnist', path).flip


@pytest.mark.parametrize('change,needle', [
    ({'x_train': None}, "'x_train'"),
    ({'y_test': None}, "'y_test'"),
    ({'y_train': np.arange(11) % 3}, '12 images and 11 labels'),
    ({'y_train': np.arange(12) % 3 - 2}, '-2'),
    ({'y_train': np.arange(12) % 3 + 1},
     'no example of train has label 0; subtract 1 if they begin at 1'),
    ({'y_train': np.eye(3, dtype=int)[np.arange(12) % 3]},
     'one-hot rows give y.argmax(1)'),
    ({'y_train': np.arange(12) % 3 * 10**8}, '200000000'),
    ({'y_test': np.array([0, 1, 3])}, 'label 3'),
    ({'y_train': np.arange(12) % 3 / 1.0}, 'float64'),
    ({'y_train': np.eye(12, 3, dtype=int)}, '(12, 3)'),
    ({'y_train': np.array(['a'] * 12)}, 'labels of test'),
    ({'x_train': np.full((12, 4, 5, 3), np.nan)}, 'NaN'),
    ({'x_train': np.full((12, 4, 5, 3), np.inf)}, 'infinity'),
    ({'x_train': np.full((12, 4, 5, 3), -1)}, '-1'),
    ({'x_train': np.full((12, 4, 5, 3), 256)}, '256'),
    ({'x_train': np.full((12, 4, 5, 3), 2.5)}, 'whole'),
    ({'x_train': np.zeros((12, 3, 4, 5), np.uint8)}, 'moveaxis(x, 1, -1)'),
    ({'x_train': np.zeros((12, 20), np.uint8)}, '(12, 20)'),
    ({'x_train': np.zeros((12, 6, 5, 3), np.uint8)}, '(6, 5, 3)'),
    ({'x_train': np.zeros((12, 4, 5), complex)}, 'complex128'),
    ({'x_test': np.zeros((0, 4, 5, 3), np.uint8),
      'y_test': np.zeros(0, int)}, 'empty'),
    ({'y_test': np.zeros(0, int)}, 'empty'),
    ({'x_train': np.array([None] * 12)}, 'Python objects'),
    ({'y_train': np.array([1] * 11 + [None])}, 'Python objects'),
])
def test_bad_arrays(tmp_path, change, needle):
  arrays = {k: v for k, v in {**_parts(), **change}.items() if v is not None}
  _fails(_save(tmp_path, **arrays), needle)


def test_bad_files(tmp_path):
  _save(tmp_path, **_parts())
  path = tmp_path / 'toy.npz'
  whole = path.read_bytes()
  path.write_bytes(b'')
  _fails(tmp_path, 'truncated')
  path.write_bytes(b'not a zip at all' * 100)
  _fails(tmp_path, 'no .npz')
  path.write_bytes(whole[:len(whole) // 2])
  _fails(tmp_path, 'truncated')
  at = whole.index(b'x_train.npy') + 300  # Inside the pixels: a CRC mismatch.
  path.write_bytes(whole[:at] + bytes(b ^ 255 for b in whole[at:at + 9])
                   + whole[at + 9:])
  _fails(tmp_path, 'cannot be read')
  with open(path, 'wb') as file:
    np.save(file, np.zeros(3))
  _fails(tmp_path, 'no .npz')
  path.unlink()
  path.mkdir()
  _fails(tmp_path)


@pytest.mark.parametrize('name', ['', '../toy', '/toy', 'a/b/c', 'a b', '.x'])
def test_names_cannot_leave_the_folder(tmp_path, name):
  with pytest.raises(datasets.DataError, match='no name .*; allowed are let'):
    datasets.load(name, tmp_path)


def test_missing_folder(tmp_path):
  with pytest.raises(ValueError, match='nowhere: is no folder'):
    datasets.load('toy', tmp_path / 'nowhere')


def test_missing_file_says_what_to_do_without_tfds(tmp_path, monkeypatch):
  real = builtins.__import__
  def fake(name, *args, **kwargs):
    if name.startswith('tensorflow_datasets'):
      raise ImportError(name)
    return real(name, *args, **kwargs)
  monkeypatch.setattr(builtins, '__import__', fake)
  _fails(tmp_path, 'x_train', "pip install -e '.[tfds]'",
         'tfds build svhn_cropped --file_format=array_record '
         f'--data_dir={tmp_path}', name='svhn')
  monkeypatch.delenv(datasets.DATA_DIR, raising=False)
  with pytest.raises(datasets.DataError, match=r'emnist\.npz'):
    datasets.load('emnist')


@pytest.mark.parametrize('name', ['arrays', 'federation'])
def test_data_that_fit_was_given_are_in_no_file(tmp_path, name):
  """A flagfile that `fit` wrote has such a name."""
  with pytest.raises(datasets.DataError, match='call it again with these data'):
    datasets.load(name, tmp_path)
  assert datasets.load(name, _save(tmp_path, name, **_parts())).name == name


def test_moments_are_those_of_the_pixels(tmp_path):
  parts = _parts(shape=(4, 5, 3))
  parts['x_train'][..., 1] = 7
  got = datasets.load('toy', _save(tmp_path, **parts))
  pixels = parts['x_train'] / 255
  np.testing.assert_allclose(got.mean, pixels.mean((0, 1, 2)), rtol=1e-12)
  want = pixels.std((0, 1, 2))
  want[1] = 1  # A constant channel must not divide by 0.
  np.testing.assert_allclose(got.std, want, rtol=1e-12)


def test_moments_of_parts_are_those_of_the_whole(monkeypatch):
  images = np.random.default_rng(0).integers(0, 256, (7, 3, 2, 3), np.uint8)
  whole = datasets.moments(images)
  monkeypatch.setattr(datasets, '_AT_ONCE', 40)
  assert datasets.moments(images) == whole


def test_known_constants_only_for_their_channels(tmp_path):
  _save(tmp_path, 'svhn', **_parts())
  got = datasets.load('svhn', tmp_path)
  assert got.mean == (.4377, .4438, .4728) and not got.flip
  _save(tmp_path, 'cifar10', **_parts(shape=(4, 5)))
  assert len(datasets.load('cifar10', tmp_path).mean) == 1


@pytest.mark.parametrize('split,sizes', [
    ('80/20', (12, 0, 3)), ('60/20/20', (9, 3, 3)), ('10/2/3', (10, 2, 3)),
    ('9/3', (9, 0, 3)), ('33.5/33.5/33', (5, 5, 5)),
    ('70.1/19.8/10.1', (11, 2, 2))])
def test_resplit_deals_every_row_once(tmp_path, split, sizes):
  folder = _save(tmp_path, **_parts())
  whole = datasets.load('toy', folder)
  got = datasets.load('toy', folder, split=split)
  parts = [p for p in (got.train, got.validation, got.test) if p is not None]
  assert [len(p.labels) for p in parts] == [s for s in sizes if s]
  everything = _rows(whole.train, whole.test)
  if sum(sizes) == 15:
    assert _rows(*parts) == everything
  else:
    assert set(_rows(*parts)) < set(everything)


def test_resplit_follows_its_seed(tmp_path):
  folder = _save(tmp_path, **_parts(num=60))
  def rows(seed):
    return _rows(datasets.load('toy', folder, split='50/50',
                               split_seed=seed).test)
  assert rows(0) == rows(0) != rows(1)


@pytest.mark.parametrize('split', [
    '', 'a/b', '100', '80/30', '-1/2', '1/2/3/4', '16/1', '0/15', '0/100',
    '1e1/2', '8.5/2', 'nan/1', '1/14'])
def test_bad_splits(tmp_path, split):
  folder = _save(tmp_path, **_parts())
  with pytest.raises(ValueError, match='split'):
    datasets.load('toy', folder, split=split)


@pytest.mark.parametrize('fraction', [0.0, .05, .3, 1.0])
def test_split_validation_is_stratified(fraction):
  labels = np.repeat([0, 1, 2], [100, 40, 7]).astype(np.int32)
  examples = Examples(np.arange(147, dtype=np.int32)[:, None], labels)
  rest, held = datasets.split_validation(
      np.random.default_rng(0), examples, fraction)
  assert len(held.labels) == round(fraction * 147)
  assert _rows(rest, held) == _rows(examples)
  counts = np.bincount(held.labels, minlength=3)
  assert np.abs(counts - fraction * np.array([100, 40, 7])).max() <= 1


def test_importing_the_package_stays_light(run_python):
  run_python(
      'import sys, fedjax_ssl.data\n'
      'heavy = {"sklearn", "tensorflow_datasets", "PIL", "matplotlib",'
      ' "orbax", "flax", "tensorflow"} & set(sys.modules)\n'
      'assert not heavy, heavy\n')


@pytest.mark.parametrize('name,train,shape,classes', [
    ('mnist', 60000, (28, 28, 1), 10),
    ('fashion_mnist', 60000, (28, 28, 1), 10),
    ('cifar10', 50000, (32, 32, 3), 10),
    ('tiny_imagenet100', 50000, (32, 32, 3), 100),
    ('isic2018', 5984, (64, 64, 3), 7)])
def test_real_sets(data_dir, name, train, shape, classes):
  if not (data_dir / f'{name}.npz').exists():
    pytest.skip(f'{name}.npz is not in FEDJAX_SSL_DATA')
  got = datasets.load(name, data_dir)
  assert got.train.inputs.shape == (train, *shape)
  assert got.num_classes == classes
  # The papers' constants fit the pixels; other means were computed from them.
  sample = np.asarray(got.train.inputs[::50]) / 255
  np.testing.assert_allclose(got.mean, sample.mean((0, 1, 2)), atol=.03)


def test_the_newest_word_on_mirrors_counts():
  """A name may be registered again, as in a notebook, and be a known one."""
  def toy():
    rows = (np.zeros((4, 3, 3), np.uint8), np.arange(4) % 2)
    return {'train': rows, 'test': rows}
  found = {}
  for name, flip in (('mirrored', False), ('mirrored', True),
                     ('mirrored', None), ('usps', None), ('usps', True)):
    datasets.DATASETS.pop(name, None)
    datasets.register(name, flip=flip)(toy)
    found[name, flip] = datasets.load(name).flip
  assert found == {('mirrored', False): False, ('mirrored', True): True,
                   ('mirrored', None): True, ('usps', None): False,
                   ('usps', True): True}


def test_a_registered_set_says_whose_its_rows_are_and_hides_what_is_masked():
  images = np.zeros((6, 3, 3), np.uint8)
  labels = np.arange(6) % 2
  hidden = np.ma.array(labels, mask=np.arange(6) > 3)
  made = {'x_train': images, 'y_train': hidden, 'x_test': images,
          'y_test': labels, 'client_train': ['b', 'a', 'b', 'a', 'b', 'b'],
          'class_names': ['no', 'yes']}
  datasets.register('masked')(lambda: made)
  got = datasets.load('masked')
  np.testing.assert_array_equal(got.train.labels, [0, 1, 0, 1, -1, -1])
  np.testing.assert_array_equal(got.owner, [1, 0, 1, 0, 1, 1])
  assert (got.client_names, got.class_names) == (('a', 'b'), ('no', 'yes'))
  for bad, words in (({'y_test': hidden}, 'y_test has masked entries'),
                     ({'client_train': [[1], [2, 3]]}, 'client_train is no'),
                     ({'x_test': iter(images)}, 'x_test is of type'),
                     ({'x_test': None}, 'x_test is of type NoneType; give')):
    datasets.DATASETS.pop('masked')
    datasets.register('masked')(lambda bad=bad: {**made, **bad})
    with pytest.raises(datasets.DataError, match=f'masked: {words}'):
      datasets.load('masked')
