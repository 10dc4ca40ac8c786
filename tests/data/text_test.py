"""Texts: tokens, the split, vectors, and what is refused."""
from __future__ import annotations

import csv

import jax
import numpy as np
import pytest

from fedjax_ssl import data
from fedjax_ssl.data import augment
from fedjax_ssl.data.datasets import text, tokens

TEXTS = [f'word{i} is number {i % 7}!' for i in range(60)] + ['', "don't @me"]


@pytest.fixture
def folder(tmp_path):
  with open(tmp_path / 'small.csv', 'w', newline='', encoding='utf-8') as file:
    writer = csv.writer(file)
    writer.writerow(['label', 'text', 'more'])
    writer.writerows([i % 2, t, 'x'] for i, t in enumerate(TEXTS))
  return tmp_path


def test_words():
  assert tokens.words("Don't @User: so #good!! 1 2") == [
      "don't", '@user', 'so', '#good', '!!', '1', '2']
  assert len(tokens.words('a ' * 50)) == tokens.MAX_TOKENS


def test_vocabulary_goes_by_frequency_then_alphabet():
  known = tokens.vocabulary(['b a b', 'c a b'], size=4)
  assert known == {'b': 2, 'a': 3}  # 0 and 1 are taken.
  ids = tokens.encode(['b c a', ''], known)
  assert ids.shape == (2, 40) and ids.dtype == np.int32
  np.testing.assert_array_equal(ids[0, :4], [2, tokens.UNKNOWN, 3, 0])
  assert not ids[1].any()


def test_a_data_set_encodes_texts_as_its_own(folder):
  whole = data.load('small', folder)
  test = [t for t in TEXTS if text.is_test(t)]
  np.testing.assert_array_equal(whole.encode(test), whole.test.inputs)
  mixed = data.load('small', folder, split='30/32')
  np.testing.assert_array_equal(mixed.encode(test), whole.test.inputs)
  with pytest.raises(ValueError, match='digits has no vocabulary'):
    data.load('digits').encode(test)
  with pytest.raises(TypeError, match=r"encode takes a list of texts: \['b'\]"):
    whole.encode('b')


def test_split_depends_on_the_text_alone():
  shares = [text.is_test(f'some text {i}') for i in range(5000)]
  assert abs(np.mean(shares) - 0.2) < 0.02
  assert text.is_test('some text 7') == shares[7]


def test_loads_as_a_data_set(folder):
  found = data.load('small', folder)
  held = np.array([text.is_test(t) for t in TEXTS])
  np.testing.assert_array_equal(
      found.test.labels, (np.arange(len(TEXTS)) % 2)[held])
  assert len(found.train.labels) == (~held).sum()
  assert found.num_classes == 2 and not found.flip
  # Words of test texts alone are unknown.
  known = tokens.vocabulary([t for t, h in zip(TEXTS, held, strict=True)
                           if not h])
  np.testing.assert_array_equal(found.test.inputs, tokens.encode(
      [t for t, h in zip(TEXTS, held, strict=True) if h], known))
  assert (found.test.inputs == tokens.UNKNOWN).any()


@pytest.mark.parametrize('words', [('0', '1'), ('no', 'yes')])
def test_an_empty_label_is_none(tmp_path, words):
  """As -1 is; such a text is not tested on, whatever its hash."""
  def loaded(none: str) -> data.Dataset:
    with open(tmp_path / 'half.csv', 'w', newline='', encoding='utf-8') as file:
      writer = csv.writer(file)
      writer.writerow(['label', 'text'])
      writer.writerows([none if i % 4 == 3 else words[i % 2], t]
                       for i, t in enumerate(TEXTS))
    return data.load('half', tmp_path)
  empty, said = loaded(' '), loaded('-1')
  np.testing.assert_array_equal(empty.train.labels, said.train.labels)
  np.testing.assert_array_equal(empty.train.inputs, said.train.inputs)
  assert (empty.train.labels < 0).sum() == len(TEXTS[3::4])
  assert len(empty.test.labels) == sum(
      text.is_test(t) for i, t in enumerate(TEXTS) if i % 4 != 3)


def test_a_class_that_is_only_tested_is_refused(folder):
  """But for a split that has it in train too."""
  held = [t for t in TEXTS if text.is_test(t)][:2]
  with open(folder / 'few.csv', 'w', newline='', encoding='utf-8') as file:
    writer = csv.writer(file)
    writer.writerow(['label', 'text'])
    writer.writerows([2 if t in held else i % 2, t]
                     for i, t in enumerate(TEXTS))
  with pytest.raises(data.DataError, match='of 3 classes no row to train on '
                     'is of class 2'):
    data.load('few', folder)
  found = [data.load('few', folder, split='80/20', split_seed=seed)
           for seed in (1, 2)]
  assert {one.num_classes for one in found} == {3}


def test_word_vectors_replace_tokens(folder):
  vectors = np.array([[1., 2.], [3., 4.]], np.float32)
  np.savez(folder / 'v.npz', words=np.array(['is', 'number']),
           vectors=vectors)
  found = data.load('small', folder, embeddings=folder / 'v.npz')
  first = found.train.inputs[0]  # word, is, number, digit, !
  assert found.train.inputs.shape[1:] == (40, 2)
  assert found.train.inputs.dtype == np.float16
  np.testing.assert_array_equal(first[:5], [
      [0, 0], [1, 2], [3, 4], [0, 0], [0, 0]])


def test_vectors_of_whole_texts_belong_to_their_texts(folder):
  vectors = np.random.default_rng(0).normal(size=(len(TEXTS), 5, 3))
  made = folder / 'bert.npz'
  np.savez(made, texts=vectors, sha256=np.array(text.fingerprint(TEXTS)))
  found = data.load('small', folder, embeddings=made)
  held = np.array([text.is_test(t) for t in TEXTS])
  np.testing.assert_array_equal(
      found.test.inputs, vectors[held].astype(np.float16))
  np.savez(made, texts=vectors, sha256=np.array(text.fingerprint(TEXTS[:-1])))
  with pytest.raises(ValueError, match='embeddings=.*other texts'):
    data.load('small', folder, embeddings=made)


@pytest.mark.parametrize('arrays, words', [
    ({'x': np.zeros(3)}, "'words'"),
    ({'words': np.array(['a']), 'vectors': np.full((1, 2), np.nan)}, 'finite'),
    ({'words': np.array(['a']), 'vectors': np.full((1, 2), 1e6)}, '65504'),
    ({'words': np.array(['a', 'b']), 'vectors': np.ones((1, 2))}, '2 rows')])
def test_refuses_broken_vectors(folder, arrays, words):
  np.savez(folder / 'v.npz', **arrays)
  with pytest.raises(ValueError, match=f'embeddings=.*v.npz: .*{words}'):
    data.load('small', folder, embeddings=folder / 'v.npz')


@pytest.mark.parametrize('content, words', [
    ('a,b\n1,2\n', "'label'"), ('label,text\n0,a\n2,b\n', '0 to C-1'),
    ('label,text\nx,a\n', 'one class'),
    ('label,text\nx,a\ny,b\nnan,c\n', "line 4: no label but 'nan'; of a row"),
    ('label,text\n,a\n-1,b\n', 'no row has a label'),
    ('label,text\nx,a\ny,b\ninf,c\n', "line 4: .* not 'inf' beside words"),
    ('label,text\n', "'label'")])
def test_refuses_broken_files(tmp_path, content, words):
  (tmp_path / 'bad.csv').write_text(content)
  with pytest.raises(data.DataError, match=words):
    data.load('bad', tmp_path)


def test_images_take_no_embeddings(tmp_path):
  with pytest.raises(ValueError, match='images'):
    data.load('digits', tmp_path, embeddings='v.npz')


@pytest.mark.parametrize('shape', [(400, 40), (400, 40, 3)])
def test_token_dropout(shape):
  texts = np.ones(shape, np.int32 if len(shape) == 2 else np.float16)
  view = augment.make_strong('token_dropout(rate=0.3)')
  seen = np.asarray(view(jax.random.key(0), texts))
  assert seen.dtype == texts.dtype
  gone = (seen == 0).reshape(400, 40, -1)
  assert (gone == gone[..., :1]).all()  # Whole words.
  assert abs(gone.mean() - 0.3) < 0.02
  kept = augment.make_weak('token_dropout(rate=0.0)')(
      jax.random.key(0), texts)
  np.testing.assert_array_equal(kept, texts)
  with pytest.raises(ValueError, match='rate'):
    augment.make_weak('token_dropout(rate=2.0)')


def test_token_dropout_refuses_images():
  with pytest.raises(ValueError, match=(
      r'takes texts, int32.B, T. or .*; inputs here are uint8.2, 8, 8, 1.')):
    augment.make_strong('token_dropout')(
        jax.random.key(0), np.zeros((2, 8, 8, 1), np.uint8))
