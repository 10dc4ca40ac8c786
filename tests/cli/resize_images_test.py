"""Folders of images of many sizes become folders that can be trained on."""
from __future__ import annotations

import os
import pathlib
import shlex

import numpy as np
from PIL import Image
import pytest

from fedjax_ssl import data
from fedjax_ssl.cli import resize_images

SIZES = ((9, 7), (8, 8), (6, 12), (40, 31))
TABLE = 'image,client\n' + ''.join(
    f'train/{name}/{i}.jpg,c{i % 2}\n' for name in ('cat', 'dog')
    for i in range(len(SIZES)))


@pytest.fixture
def photos(tmp_path):
  """A folder of JPEG of many sizes: cats are dark left and bright right."""
  place = tmp_path / 'photos'
  for part in ('train', 'test'):
    for name, (left, right) in {'cat': (0, 255), 'dog': (255, 0)}.items():
      (place / part / name).mkdir(parents=True)
      for i, (height, width) in enumerate(SIZES):
        pixels = np.full((height, width, 3), left, np.uint8)
        pixels[:, width // 2:] = right
        Image.fromarray(pixels).save(place / part / name / f'{i}.jpg')
  (place / 'clients.csv').write_text(TABLE)
  return place


def run(*args: str) -> int:
  return resize_images.main([*args])


def test_a_folder_of_photos_becomes_a_data_set(photos, tmp_path, capsys):
  with pytest.raises(ValueError, match='brings all to one size') as told:
    data.load('photos', tmp_path)
  command = shlex.split(str(told.value).split('`')[1].replace('=32', '=4'))
  assert command[:2] == ['fedjax-ssl', 'resize-images']
  assert run(*command[2:]) == 0
  out = tmp_path / 'photos32'
  assert capsys.readouterr().out == f'{out}: 16 images of 4 x 4 pixels\n'
  assert str(told.value).endswith('; then give dataset=photos32')
  found = data.load('photos32', tmp_path)
  assert found.train.inputs.shape == (8, 4, 4, 3)
  assert found.class_names == ('cat', 'dog')
  assert found.client_names == ('c0', 'c1')
  side = found.train.inputs.astype(int)
  right = (side[:, :, 3] - side[:, :, 0]).mean((1, 2)) > 100
  np.testing.assert_array_equal(right, found.train.labels == 0)
  assert {path.name for path in tmp_path.iterdir()} == {'photos', 'photos32'}


def test_the_middle_is_kept_and_gray_stays_gray(tmp_path):
  pixels = np.zeros((4, 12), np.uint8)
  pixels[:, 4:8] = 200
  Image.fromarray(pixels).save(tmp_path / 'wide.png')
  resize_images.resized(tmp_path / 'wide.png', tmp_path / 'out.png', 2)
  with Image.open(tmp_path / 'out.png') as image:
    assert image.mode == 'L'
    np.testing.assert_array_equal(np.asarray(image), np.full((2, 2), 200))


def test_images_of_that_size_stay_as_they_are(tmp_path):
  pixels = np.random.default_rng(0).integers(0, 256, (5, 5, 3), np.uint8)
  (tmp_path / 'a' / 'b').mkdir(parents=True)
  Image.fromarray(pixels).save(tmp_path / 'a' / 'b' / 'x.png')
  assert resize_images.resize(tmp_path / 'a', tmp_path / 'c', 5) == 1
  with Image.open(tmp_path / 'c' / 'b' / 'x.png') as image:
    np.testing.assert_array_equal(np.asarray(image), pixels)


def test_links_and_what_is_hidden(tmp_path):
  """A link to a folder above would never end."""
  place, there = tmp_path / 'a', tmp_path / 'there'
  for one in (place / 'b', place / '.git', there, place / 'empty'):
    one.mkdir(parents=True)
  for one in (there / '0.png', place / '.git' / '0.png'):
    Image.new('L', (3, 2)).save(one)
  for link, to in (('b/loop', '..'), ('b/out', there)):
    (place / link).symlink_to(to)
  (place / 'notes.txt').write_text('mine')
  assert resize_images.resize(place, tmp_path / 'c', 5) == 1
  assert sorted(path.relative_to(tmp_path / 'c').as_posix()
                for path in (tmp_path / 'c').rglob('*')) == [
      'b', 'b/out', 'b/out/0.png', 'empty', 'notes.txt']
  assert (tmp_path / 'c' / 'notes.txt').read_text() == 'mine'


@pytest.mark.parametrize('name', ['x.png', 'x.txt'])
def test_a_pipe_is_refused(photos, tmp_path, capsys, name):
  os.mkfifo(photos / name)
  assert run(f'--images={photos}', '--size=4', f'--out={tmp_path}/new') == 2
  assert capsys.readouterr().err == (
      f'error: {photos / name}: must be a file, and is a pipe\n')


def test_a_broken_image_leaves_nothing(photos, tmp_path, capsys):
  broken = photos / 'train' / 'dog' / '2.jpg'
  broken.write_bytes(b'no image')
  assert run(f'--images={photos}', '--size=4', f'--out={tmp_path}/new') == 2
  line = capsys.readouterr().err
  assert line.startswith(f'error: {broken} cannot be read: ')
  assert line.count('\n') == 1
  assert [path.name for path in tmp_path.iterdir()] == ['photos']


@pytest.mark.parametrize('args, words', [
    (('--images={0}/none', '--size=4', '--out={0}/new'), 'none is no folder'),
    (('--images={0}/photos', '--size=0', '--out={0}/new'), '--size=0 must be'),
    (('--images={0}/photos', '--size=4', '--out={0}/photos'), 'must be new'),
    (('--images={0}/photos', '--size=4', '--out={0}/photos/x'), 'not lie in'),
    (('--images={0}/photos', '--size=4', '--out={0}/a/b'),
     'new, in a folder that can be written')])
def test_what_is_refused(photos, tmp_path, capsys, args, words):
  with pytest.raises(SystemExit) as ended:
    run(*(arg.format(tmp_path) for arg in args))
  assert ended.value.code == 2 and words in capsys.readouterr().err
  assert [path.name for path in pathlib.Path(tmp_path).iterdir()] == ['photos']
