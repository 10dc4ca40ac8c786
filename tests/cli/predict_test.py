"""`fedjax-ssl predict` says what `predict` of a loaded run says."""
from __future__ import annotations

import csv
import io
import os
import pathlib
import sys
import textwrap
from typing import Any
import warnings

import jax
import numpy as np
from PIL import Image
import pytest

import fedjax_ssl
from fedjax_ssl import cli
from fedjax_ssl.cli import exit_codes
from fedjax_ssl.data.datasets import folder, text
from fedjax_ssl.training import evaluate
from tests.cli import launcher

LABELS = np.arange(20) % 2
PIXELS = np.random.default_rng(0).integers(0, 256, (20, 5, 5, 3), np.uint8)
VECTORS = np.random.default_rng(1).normal(size=(20, 4, 3)).astype(np.float32)
TEXTS = [f'the {("sad", "great")[k]} flight {i}' for i, k in enumerate(LABELS)]
SMALL: dict[str, Any] = {
    'clients': 1, 'cohort_size': 1, 'labels_per_class': 4, 'rounds': 1,
    'strong': 'none', 'progress': False}


@pytest.fixture(scope='module')
def images(tmp_path_factory) -> pathlib.Path:
  """A run of two seeds, whose classes have names."""
  words = np.array(['cat', 'dog'])[LABELS]
  place = tmp_path_factory.mktemp('predict') / 'images'
  fedjax_ssl.fit('fedavg', (PIXELS, words, PIXELS, words), model='linear',
                 weak='none', seeds=[0, 1], workdir=place, **SMALL)
  return place


@pytest.fixture(scope='module')
def texts(tmp_path_factory) -> pathlib.Path:
  """The model of a run, whose classes are numbers."""
  place = tmp_path_factory.mktemp('predict') / 'model.npz'
  fedjax_ssl.fit('fedavg', (TEXTS, LABELS, TEXTS, LABELS), model='text_mean',
                 **SMALL).save(place)
  return place


@pytest.fixture
def photos(tmp_path, monkeypatch) -> pathlib.Path:
  """A folder here, of gray and color, one hidden, of many sizes."""
  monkeypatch.chdir(tmp_path)
  place = pathlib.Path('photos')
  rng = np.random.default_rng(2)
  for name, shape in (('b/2.png', (5, 5)), ('b/10.png', (12, 31, 3)),
                      ('a.bmp', (5, 5, 3)), ('c,"d".PNG', (3, 9)),
                      ('.e.png', (5, 5)), ('.f/g.png', (5, 5))):
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(place / name)
  (place / 'b' / 'clients.csv').write_text('no image')
  return place


IN_ORDER = ['photos/a.bmp', 'photos/b/10.png', 'photos/b/2.png',
            'photos/c,"d".PNG']


def table(printed: str, code: int = 0
          ) -> tuple[list[str], list[str], np.ndarray]:
  """Returns the columns of what was printed."""
  assert code == 0
  header, *rows = csv.reader(io.StringIO(printed))
  assert header == ['input', 'class', 'probability']
  return ([row[0] for row in rows], [row[1] for row in rows],
          np.array([float(row[2]) for row in rows]))


@pytest.fixture
def call(capsys):
  """Runs the command; returns the columns of the CSV that it prints."""
  def run(*words):
    code = cli.main(['predict', *map(str, words)])
    printed = capsys.readouterr()
    assert not printed.err
    return table(printed.out, code)
  return run


def check(found, logits, names=None) -> None:
  """Holds classes and probabilities against logits of Python."""
  _, classes, sure = found
  wanted = np.asarray(logits.argmax(-1))
  assert classes == [names[k] if names else str(k) for k in wanted]
  np.testing.assert_allclose(sure, jax.nn.softmax(logits).max(-1), atol=1e-6)
  assert len(sure) and (sure >= .5).all()


def test_image_files_of_any_size(images, photos, call):
  found = call(images, photos)
  assert found[0] == IN_ORDER
  run = fedjax_ssl.load(images)
  check(found, run.predict(IN_ORDER), ('cat', 'dog'))
  other = call(images, photos, '--seed=1')
  check(other, run.predict(IN_ORDER, seed=1), ('cat', 'dog'))
  assert (other[2] != found[2]).all()


def test_inputs_are_told_in_their_order(images, photos, call):
  np.save('x.npy', PIXELS[:3])
  named = './photos/b/2.png'
  found = call(images, named, 'x.npy', named, 'photos/b')
  assert found[0] == [named, 'x.npy:0', 'x.npy:1', 'x.npy:2', named,
                      'photos/b/10.png', 'photos/b/2.png']
  assert len({(class_, sure) for name, class_, sure in zip(
      *found, strict=True) if name.endswith('2.png')}) == 1


def test_a_folder_is_predicted_in_parts(images, photos, call, monkeypatch):
  whole, read = call(images, photos, photos), []
  monkeypatch.setattr(evaluate, 'BATCH', 3)
  real = folder.read_images

  def counted(paths, *shape):
    read.append(len(paths))
    return real(paths, *shape)
  monkeypatch.setattr(folder, 'read_images', counted)
  parts = call(images, photos, photos)
  assert parts[:2] == whole[:2] and read == [3, 3, 2]
  np.testing.assert_allclose(parts[2], whole[2], atol=2e-6)


@pytest.mark.parametrize('scale', [1, 255])
def test_arrays_count_as_in_python(images, call, tmp_path, scale):
  """Floats of 0 to 1 are known by all rows of an array."""
  given = PIXELS / 255 if scale == 255 else PIXELS
  np.save(tmp_path / 'x.npy', given)
  np.savez(tmp_path / 'x.npz', x=given, y=LABELS)
  np.savez(tmp_path / 'one.NPZ.npz', images=given)
  wanted = fedjax_ssl.load(images).predict(given)
  for name in ('x.npy', 'x.npz', 'one.NPZ.npz'):
    found = call(images, tmp_path / name)
    check(found, wanted, ('cat', 'dog'))
    assert found[0] == [f'{tmp_path / name}:{row}' for row in range(20)]
  np.save(tmp_path / 'x.npy', given[0])
  alone = call(images, tmp_path / 'x.npy')
  check(alone, wanted[:1], ('cat', 'dog'))
  assert alone[0] == [f'{tmp_path / "x.npy"}:0']


def test_texts_are_named_by_their_lines(texts, call, tmp_path):
  given = ['a sad,\nlong flight', 'great', 'zzz']
  with open(tmp_path / 't.csv', 'w', newline='') as file:
    csv.writer(file).writerows(
        [['id', 'text'], *enumerate(given)])
  found = call(texts, tmp_path / 't.csv')
  assert [name.removeprefix(f'{tmp_path}/') for name in found[0]] == [
      't.csv:2', 't.csv:4', 't.csv:5']
  run = fedjax_ssl.load(texts)
  check(found, run.predict(given))
  (tmp_path / 't.TXT').write_bytes('\ufeffa sad flight\r\n \r\ngreat'.encode())
  found = call(texts, tmp_path / 't.TXT')
  assert [name.removeprefix(f'{tmp_path}/') for name in found[0]] == [
      't.TXT:1', 't.TXT:3']
  check(found, run.predict(['a sad flight', 'great']))
  tokens = np.random.default_rng(0).integers(0, 9, (3, 40))
  np.save(tmp_path / 'tokens.npy', tokens)
  check(call(texts, tmp_path / 'tokens.npy'), run.predict(tokens))
  np.savez(tmp_path / 'words.npz', np.array(given))
  check(call(texts, tmp_path / 'words.npz'), run.predict(given))


def test_one_class_for_many_inputs_is_noted(texts, tmp_path, capsys):
  """As no word of the training texts is in them."""
  def said(count: int) -> str:
    (tmp_path / 't.txt').write_text('zzz\n' * count)
    assert cli.main(['predict', str(texts), str(tmp_path / 't.txt')]) == 0
    printed = capsys.readouterr()
    assert len(table(printed.out)[0]) == count
    return printed.err
  assert not said(19)
  line = said(20)
  assert line.startswith('Note: All 20 inputs are taken for class ')
  assert line.count('\n') == 1 and ', of 2; ' in line


@pytest.mark.parametrize('rows, more', [('""\ngreat', ''),
                                        ('""\ngreat\n" "', ' and of 1 more')])
def test_an_empty_text_is_noted(texts, tmp_path, capsys, rows, more):
  (tmp_path / 't.csv').write_text(f'text\n{rows}\n')
  assert cli.main(['predict', str(texts), str(tmp_path / 't.csv')]) == 0
  assert capsys.readouterr().err == (
      f'Note: {tmp_path / "t.csv"}: the text of line 2{more} is empty; the '
      'class told there means nothing.\n')


def test_a_file_is_written_whole_or_not_at_all(images, photos, tmp_path,
                                               capsys):
  cli.main(['predict', str(images), 'photos'])
  printed = capsys.readouterr().out
  words = ['predict', str(images), 'photos', '--out=out.csv']
  (photos / 'z.png').write_bytes(b'no image')
  assert cli.main(words) == 2
  line = capsys.readouterr()
  assert not line.out and line.err.startswith(
      'error: photos/z.png cannot be read: ') and line.err.count('\n') == 1
  assert os.listdir(tmp_path) == ['photos']
  assert cli.main(words[:-1]) == 2 and not capsys.readouterr().out
  (photos / 'z.png').unlink()
  for _ in range(2):  # A file there is replaced.
    assert cli.main(words) == 0
    assert capsys.readouterr().out == 'out.csv: 4 rows\n'
    assert pathlib.Path('out.csv').read_text() == printed
    pathlib.Path('out.csv').write_text('old')
  assert sorted(os.listdir(tmp_path)) == ['out.csv', 'photos']
  assert cli.main(['predict', str(images), 'photos/a.bmp', words[-1]]) == 0
  assert capsys.readouterr().out == 'out.csv: 1 row\n'


def test_a_name_that_is_no_utf_8(images, photos, call, capsys):
  odd = os.fsdecode(b'photos/\xff.png')
  os.rename('photos/a.bmp', odd)
  assert call(images, odd)[0] == ['photos/?.png']
  assert cli.main(['predict', str(images), odd, '--out=o.csv']) == 0
  assert table(pathlib.Path('o.csv').read_text('utf-8'))[0] == ['photos/?.png']


@pytest.mark.parametrize('words', [
    ('--seed=1', 'RUN', 'a.png', 'b.png'),
    ('RUN', 'a.png', 'b.png', '--seed=1'),
    ('--seed=1', '--', 'RUN', '-a.png'), ('--', 'RUN', '-a.png')])
def test_flags_stand_on_both_sides_and_not_after_two_dashes(
    images, photos, call, words):
  for name in ('a.png', 'b.png', '-a.png'):
    Image.fromarray(PIXELS[0]).save(name)
  names, _, sure = call(*(images if word == 'RUN' else word for word in words))
  assert names == [word for word in words if word.endswith('.png')]
  logits = fedjax_ssl.load(images).predict(PIXELS[:1], int('--seed=1' in words))
  np.testing.assert_allclose(sure, jax.nn.softmax(logits).max(), atol=1e-6)


@pytest.mark.parametrize('action', ['error', 'ignore', 'default'])
def test_images_of_another_scale_are_noted_once(
    images, tmp_path, capsys, monkeypatch, action):
  """Of all batches, though each has its own brightest number."""
  monkeypatch.setattr(evaluate, 'BATCH', 3)
  monkeypatch.chdir(tmp_path)
  np.save('x.npy', PIXELS)
  for i in range(7):
    Image.fromarray(PIXELS[i] // (100 - i)).save(f'{i}.png')
  with warnings.catch_warnings():
    warnings.simplefilter(action)
    assert cli.main(['predict', str(images), 'x.npy', *(
        f'{i}.png' for i in range(7))]) == 0
  printed = capsys.readouterr()
  assert len(table(printed.out)[0]) == 27
  assert printed.err.startswith(
      'Note: 0.png to 2.png: No number in the images reaches ')
  assert printed.err.count('\n') == 1


def test_an_output_that_is_full_may_pass_and_a_closed_one_ends_nothing(
    texts, tmp_path, capsys, monkeypatch):
  (tmp_path / 't.txt').write_text('great')
  words = ['predict', str(texts), str(tmp_path / 't.txt')]
  monkeypatch.setattr(sys, 'stdout', launcher.Full())
  assert cli.main(words) == exit_codes.MAY_PASS
  assert capsys.readouterr().err == (
      'error: <full> cannot be used: No space left on device.\n')
  monkeypatch.setattr(sys, 'stdout', None)
  assert cli.main(words) == 0
  read, write = os.pipe()
  os.close(read)
  with open(write, 'w') as nobody:
    monkeypatch.setattr(sys, 'stdout', nobody)
    assert cli.main(words) == 0
  assert not capsys.readouterr().err


def test_a_link_to_a_folder_above_is_not_followed(images, photos, call):
  (photos / 'b' / 'loop').symlink_to('..')
  (photos / 'again').symlink_to('.')
  assert call(images, photos)[0] == IN_ORDER


def test_a_model_of_the_user(photos, call, tmp_path):
  (tmp_path / 'mine.py').write_text(textwrap.dedent("""
      from flax import linen as nn

      class Net(nn.Module):
        num_classes: int
        width: int = 3

        @nn.compact
        def __call__(self, x, train: bool):
          x = nn.relu(nn.Dense(self.width)(x.reshape(len(x), -1)))
          return nn.Dense(self.num_classes)(x)
      """))
  run = fedjax_ssl.fit(
      'fedavg', (PIXELS, LABELS, PIXELS, LABELS), weak='none',
      model=f'{tmp_path / "mine.py"}:Net(width=5)', workdir='own', **SMALL)
  check(call('own', photos), run.predict(IN_ORDER))


@pytest.fixture
def refuse(capsys):
  """Runs the command; returns its one line of error."""
  def run(*words) -> str:
    code: Any
    try:
      code = cli.main(['predict', *map(str, words)])
    except SystemExit as ended:
      code = ended.code
    printed = capsys.readouterr()
    assert code == 2 and not printed.out
    assert printed.err.startswith('error: ') and printed.err.count('\n') == 1
    return printed.err.removeprefix('error: ')
  return run


def test_inputs_that_are_refused(images, texts, photos, refuse):
  pathlib.Path('empty').mkdir()
  for name, content in (
      ('t.csv', b'text\ngreat\n'), ('other.csv', b'words\ngreat\n'),
      ('blank.txt', b'\n \n'), ('latin.txt', b'\xe4\n'), ('x.npz', b'PK'),
      ('no.npy', b'text'), ('no.jpg', b'text')):
    pathlib.Path(name).write_bytes(content)
  np.savez('two.npz', a=PIXELS, b=PIXELS)
  np.save('small.npy', PIXELS[:, :4])
  np.save('none.npy', PIXELS[:0])
  np.save('words.npy', np.array(['photos/a.bmp']))
  np.save('one.npy', np.float32(1))
  takes = 'the run takes images (files, folders, .npy or .npz).\n'
  for name, line in (
      ('empty', 'empty holds no image; images end with .bmp, '),
      ('gone.png', 'gone.png: cannot be read (No such file or directory)\n'),
      ('', f"'': {takes}"),
      ('x' * 300, f'{"x" * 300}: cannot be read (File name too long)'),
      ('no.jpg', 'no.jpg cannot be read: '),
      ('/dev/null', '/dev/null: must be a file, and is a device\n'),
      ('t.csv', f't.csv: {takes}'), ('blank.txt', f'blank.txt: {takes}'),
      ('words.npy', f'words.npy: {takes[:-2]}\n'),
      ('two.npz', 'two.npz: it must have an array x, or one array only, not a, '
       'b\n'),
      ('x.npz', 'x.npz: truncated, or no .npz'),
      ('no.npy', 'no.npy: it is no .npy array'),
      ('small.npy', 'small.npy: inputs must be of shape [B, 5, 5, 3], not '),
      ('one.npy', 'one.npy: inputs must be of shape [B, 5, 5, 3], not [].'),
      ('none.npy', 'none.npy has no row.\n')):
    assert refuse(images, 'photos/a.bmp', name).startswith(line)
  takes = ('the run takes texts (a .csv with a column text, or a .txt with one '
           'a line), or their tokens (.npy, .npz).\n')
  for name, line in (
      ('photos', f'photos: {takes}'),
      ('photos/a.bmp', f'photos/a.bmp: {takes}'),
      ('other.csv', "other.csv: no column 'text'; the first line"),
      ('a great flight', f'a great flight: {takes}'),
      ('blank.txt', 'blank.txt: no line but blank ones\n'),
      ('latin.txt', 'latin.txt: cannot be read (')):
    assert refuse(texts, name).startswith(line)


def test_a_pipe_is_not_waited_for(images, photos, refuse):
  os.mkfifo(photos / 'b' / 'pipe.png')
  assert refuse(images, photos) == (
      'photos/b/pipe.png: must be a file, and is a pipe\n')


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_a_model_that_has_diverged_tells_no_class(
    images, photos, refuse, value):
  fedjax_ssl.load(images).save('model.npz')
  with np.load('model.npz') as file:
    arrays = dict(file)
  bias, = (name for name in arrays if name.endswith('bias'))
  np.savez('model.npz', **{**arrays, bias: np.array([0, value], np.float32)})
  assert refuse('model.npz', 'photos').startswith(
      'photos/a.bmp: the model gives NaN or infinity; ')


def test_vectors_of_texts_go_as_arrays(tmp_path, call, refuse):
  rows = ['label,text,split', *(
      f'{label},{one},{("train", "test")[i > 15]}'
      for i, (label, one) in enumerate(zip(LABELS, TEXTS, strict=True)))]
  (tmp_path / 'small.csv').write_text('\n'.join(rows))
  np.savez(tmp_path / 'vectors.npz', texts=VECTORS,
           sha256=np.array(text.fingerprint(TEXTS)))
  fedjax_ssl.fit('fedavg', 'small', data_dir=tmp_path, model='text_mean',
                 embeddings=str(tmp_path / 'vectors.npz'),
                 workdir=tmp_path / 'run', **SMALL)
  np.save(tmp_path / 'x.npy', VECTORS)
  check(call(tmp_path / 'run', tmp_path / 'x.npy'),
        fedjax_ssl.load(tmp_path / 'run').predict(VECTORS))
  assert refuse(tmp_path / 'run', tmp_path / 'small.csv') == (
      f'{tmp_path / "small.csv"}: the run takes vectors of texts (.npy, '
      '.npz).\n')


def test_runs_that_are_refused(images, photos, refuse):
  fedjax_ssl.fit('local', (PIXELS, LABELS, PIXELS, LABELS), model='linear',
                 weak='none', workdir='alone', **SMALL)
  for words, line in (
      (('alone', photos), 'local has no global model; '),
      (('nowhere', photos), 'there is no nowhere; give the folder of a run'),
      ((photos, photos), 'photos holds no run: config.json is missing'),
      (('photos/a.bmp', photos), 'photos/a.bmp holds no model that Run.save'),
      ((images, photos, '--seed=5'), '--seed=5: allowed are those of the run, '
       '0, 1.\n'),
      ((images, photos, '--seed=a'), "argument --seed: invalid int value: 'a'"),
      ((images,), 'the following arguments are required: INPUT')):
    assert refuse(*words).startswith(line)


def test_a_file_that_cannot_be_written_is_refused_first(texts, photos, refuse):
  pathlib.Path('is.csv').mkdir()
  pathlib.Path('t.csv').write_text('text\ngreat\n')
  for out in ('none/o.csv', 'is.csv', 'photos', 'o.txt', 't.csv/o.csv', ''):
    assert refuse('no run', photos, f'--out={out}').startswith(
        f'--out={out or "."} must be FOLDER/NAME.csv, in a folder that can be')
  assert refuse(texts, 't.csv', '--out=./t.csv').startswith(
      '--out=t.csv is an INPUT')
  assert pathlib.Path('t.csv').read_text() == 'text\ngreat\n'
