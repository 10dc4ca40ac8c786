"""Images in a folder for each class."""
from __future__ import annotations

import itertools
import os
import pathlib
import shutil
from typing import Any

import numpy as np
from PIL import Image
import pytest

from fedjax_ssl import data
from fedjax_ssl.core import checks
from fedjax_ssl.data.datasets import folder

SIDES = (5, 4)  # Height and width.
# By part and folder, how many images.
PARTS = {('train', 'dog'): 3, ('train', 'cat'): 2, ('train', 'unlabeled'): 4,
         ('test', 'dog'): 1, ('test', 'cat'): 2, ('val', 'cat'): 1}


def write(place: pathlib.Path, channels: int = 3) -> dict[str, np.ndarray]:
  """Writes a folder; returns all images by their place."""
  draw, made = np.random.default_rng(0), {}
  for (part, name), count in PARTS.items():
    (place / part / name).mkdir(parents=True)
    for i in range(count):
      shape = SIDES if channels == 1 else (*SIDES, channels)
      image = draw.integers(0, 256, shape, np.uint8)
      file = place / part / name / f'{i}.png'
      Image.fromarray(image).save(file)
      made[str(file.relative_to(place))] = image.reshape(*SIDES, channels)
  (place / 'train' / 'dog' / '.hidden').touch()
  (place / 'list_unlabeled.txt').touch()
  return made


@pytest.mark.parametrize('channels', [1, 3])
def test_a_folder_equals_a_file_of_its_arrays(tmp_path, channels):
  made = write(tmp_path / 'pets', channels)
  arrays: dict[str, Any] = {}
  for key, part in (('train', 'train'), ('val', 'val'), ('test', 'test')):
    files = sorted(file for file in made if file.startswith(part))
    arrays[f'x_{key}'] = np.stack([made[file] for file in files])
    arrays[f'y_{key}'] = np.array([
        file.split('/')[1].replace('unlabeled', '-1') for file in files])
  np.savez(tmp_path / 'other.npz', **arrays)
  ours, theirs = (data.load(name, tmp_path) for name in ('pets', 'other'))
  for part in ('train', 'validation', 'test'):
    for a, b in zip(getattr(ours, part), getattr(theirs, part), strict=True):
      np.testing.assert_array_equal(a, b)
  assert ours.class_names == theirs.class_names == ('cat', 'dog')
  assert ours.train.labels.tolist() == [0, 0, 1, 1, 1, -1, -1, -1, -1]
  assert ours.mean == theirs.mean and ours.num_classes == 2


def test_one_image_in_color_makes_all_of_them_rgb(tmp_path):
  made = write(tmp_path, 1)
  Image.new('RGB', SIDES[::-1], (9, 0, 0)).save(tmp_path / 'test/cat/x.png')
  found = folder.read(tmp_path, 'mine').parts
  assert found['train'].inputs.shape == (9, *SIDES, 3)
  for channel in range(3):
    np.testing.assert_array_equal(
        found['train'].inputs[..., channel][0], made['train/cat/0.png'][..., 0])
  assert found['test'].inputs[2, 0, 0].tolist() == [9, 0, 0]


def test_a_table_says_whose_each_image_is(tmp_path):
  made = write(tmp_path / 'pets')
  train = sorted(name for name in made if name.startswith('train'))
  owners = {name: ('10', '9', 'ann')[i % 3] for i, name in enumerate(train)}
  (tmp_path / 'pets/clients.csv').write_text('client,image,note\n' + ''.join(
      f'{owners[name]},{name},x\n' for name in reversed(train)))
  found = data.load('pets', tmp_path)
  assert found.client_names == ('10', '9', 'ann')
  assert found.owner is not None
  assert [found.client_names[i] for i in found.owner] == [
      owners[name] for name in train]


@pytest.mark.parametrize('rows, words', [
    ('train/cat/0.png,a\n', "'train/cat/1.png' is missing; each image to"),
    ('train/cat/0.png,a\ntrain/cat/0.png,b\n', ", line 3: 'train/cat/0.png' is "
     'there twice'),
    ('cat/0.png,a\n', ", line 2: 'cat/0.png' is no image to train on; they are "
     "named as 'train/cat/0.png'"),
    ('train/cat/0.png,\n', ', line 2: an image to train on has no client'),
    ('train/cat/0.png\n', 'line 2 has 1 columns'),
    ('', "no row; .* with 'image', and rows follow")])
def test_a_table_of_clients_that_does_not_fit_is_refused(tmp_path, rows, words):
  write(tmp_path / 'pets')
  file = tmp_path / 'pets/clients.csv'
  file.write_text(f'image,client\n{rows}')
  with pytest.raises(data.DataError, match=words) as error:
    data.load('pets', tmp_path)
  assert str(error.value).startswith(str(file))


@pytest.mark.parametrize('name', ['client.csv', 'Clients.csv', 'clients.txt'])
def test_a_misnamed_table_of_clients_is_refused(tmp_path, name):
  write(tmp_path / 'pets')
  (tmp_path / 'pets' / name).touch()
  with pytest.raises(data.DataError, match=f'{name} is not read: name it clie'):
    data.load('pets', tmp_path)
  (tmp_path / 'pets/clients.csv').symlink_to('/nowhere')
  with pytest.raises(data.DataError, match='clients.csv'):
    data.load('pets', tmp_path)


@pytest.mark.parametrize('order', ['<', '>'])
def test_of_16_bits_the_upper_8_are_taken(tmp_path, order):
  write(tmp_path, 1)
  deep = (np.arange(20) * 3000).astype(f'{order}u2').reshape(SIDES)
  Image.fromarray(deep).save(tmp_path / 'train/cat/9.tif')
  found = folder.read(tmp_path, 'mine').parts['train'].inputs
  np.testing.assert_array_equal(found[2, ..., 0], deep >> 8)


def _small(place: pathlib.Path) -> None:
  Image.new('L', (3, 5)).save(place / 'train/dog/9.png')


def _second(place: pathlib.Path) -> None:
  (place / 'validation/dog').mkdir(parents=True)


def _none_to_test(place: pathlib.Path) -> None:
  for file in place.glob('test/*/*'):
    file.unlink()


def _none_to_validate(place: pathlib.Path) -> None:
  (place / 'val/cat/0.png').unlink()


def _deep(place: pathlib.Path) -> None:
  Image.fromarray(np.full(SIDES, 30000, np.int32)).save(
      place / 'train/dog/x.tif')


def _strange(place: pathlib.Path) -> None:
  (place / 'test/cow').mkdir()
  Image.new('L', SIDES[::-1]).save(place / 'test/cow/0.png')


@pytest.mark.parametrize('change, words', [
    (_small, '9.png has 3 x 5 pixels, and others 4 x 5; `fedjax-ssl resize-'),
    (_second, 'two folders to validate on'),
    (_none_to_test, 'no image in test/; it has a folder for each class'),
    (_none_to_validate, 'no image in val/; it has a folder for each'),
    *((lambda place, name=name: (place / name).mkdir(), f'{name} is not read: '
       'images without a label lie in train/unlabeled/') for name in (
           'unlabeled', 'Unlabelled', 'train/unlabelled', 'train/Unlabeled',
           'test/unlabeled')),
    (lambda place: (place / 'train/cow').mkdir(), 'train/cow holds no image '
     'to train on; add some, or remove the class'),
    (lambda place: (place / 'train/-1').mkdir(), '-1 would be the class -1, '
     'the mark of a row without label; such rows lie in train/unlabeled/'),
    (_deep, 'x.tif has pixels of 32 bits; save it with 8'),
    (lambda place: (place / 'train/dog/x.png').symlink_to('/gone.png'),
     'x.png: cannot be read .No such file'),
    (lambda place: os.mkfifo(place / 'train/dog/x.png'), 'x.png: must be a '
     'file, and is a pipe'),
    (_strange, "test has label 'cow', which train has not"),
    (lambda place: os.mkdir(os.fsencode(place / 'train') + b'/\xe4pfel'),
     'has a name that is no UTF-8, by which a class would be called'),
    (lambda place: (place / 'train/0.png').touch(), 'is in no folder of a'),
    (lambda place: (place / 'train/dog/x.txt').touch(), 'x.txt is no image'),
    (lambda place: (place / 'train/dog/x.png').touch(), 'x.png cannot be read'),
    (lambda place: (place / 'train/dog/x.png').write_bytes(
        (place / 'train/dog/0.png').read_bytes()[:60]), 'x.png cannot be')])
def test_what_is_no_folder_of_images_is_refused(tmp_path, change, words):
  write(tmp_path / 'pets')
  change(tmp_path / 'pets')
  with pytest.raises(data.DataError, match=words) as error:
    data.load('pets', tmp_path)
  line = str(error.value)
  assert str(tmp_path / 'pets') in line and '\n' not in line


def test_folders_that_link_to_each_other_are_walked_once(tmp_path):
  for name, other in ('ab', 'ba'):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'to').symlink_to(tmp_path / other)
    Image.new('L', (1, 1)).save(tmp_path / name / f'{name}.png')
  found = [str(one.relative_to(tmp_path)) for one in folder.below(tmp_path)]
  assert found == ['a/a.png', 'a/to/b.png', 'b/b.png', 'b/to/a.png']


def test_many_folders_that_link_to_each_other_are_walked_once_a_class(tmp_path):
  """Each way through all of them would be 7! parts long."""
  names = 'abcdefg'
  for name in names:
    (tmp_path / name).mkdir()
    Image.new('L', (1, 1)).save(tmp_path / name / f'{name}.png')
    for other in names:
      (tmp_path / name / f'to_{other}').symlink_to(tmp_path / other)
  found = [*folder.walk(tmp_path)]
  assert {*folder.below(tmp_path)} < {*found}
  for name, other in itertools.permutations(names, 2):
    files = [one.name for one in found
             if one.suffix and tmp_path / name / f'to_{other}' in one.parents]
    assert sorted(files) == [f'{x}.png' for x in names if x != name]


def test_a_class_that_is_a_link_to_another_is_read_too(tmp_path):
  """Whichever comes first by name, and also as images without a label."""
  write(tmp_path / 'pets')
  shutil.rmtree(tmp_path / 'pets/train/unlabeled')
  for name in ('unlabeled', 'alias'):
    (tmp_path / 'pets/train' / name).symlink_to('dog')
  held = {one.name: len(folder.below(one))
          for one in folder.walk(tmp_path / 'pets') if one.is_dir()
          and one.parent.name == 'train'}
  assert held['unlabeled'] == held['alias'] == held['dog'] > 0
  walked = {one.relative_to(tmp_path / 'pets').parts[1]
            for one in folder.below(tmp_path / 'pets')
            if one.parent.parent.name == 'train'}
  assert walked == {*held}


def test_a_part_that_is_a_link_to_another_is_walked_too(tmp_path):
  """As where one validates on what one tests on."""
  write(tmp_path)
  shutil.rmtree(tmp_path / 'val')
  (tmp_path / 'val').symlink_to('test')
  def held(part):
    return [one.relative_to(tmp_path / part)
            for one in folder.walk(tmp_path) if part in one.parts]
  assert held('val') == held('test') and len(held('val')) > 2


@pytest.mark.parametrize('place', ['{}/pets', 'pets', '../{}/pets', './pets'])
def test_a_path_is_told_how_it_is_given(tmp_path, monkeypatch, place):
  write(tmp_path / 'pets')
  monkeypatch.chdir(tmp_path)
  place = place.format(tmp_path.name if place.startswith('..') else tmp_path)
  with pytest.raises(checks.FieldError, match='is a folder: give its name, '
                     f'pets, and the folder that it is in, {tmp_path}, as'):
    data.load(place)
