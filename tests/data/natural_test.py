"""Files that say whose row is whose, which part it is of, and class names."""
from __future__ import annotations

import numpy as np
import pytest

from fedjax_ssl import data
from fedjax_ssl.data.datasets import files, names

WORDS = np.array(['emu', 'cat', 'dog'])


def arrays(**change):
  labels = np.arange(12) % 3
  made = {
      'x_train': np.arange(12 * 16, dtype=np.uint8).reshape(12, 4, 4),
      'y_train': labels, 'x_test': np.zeros((3, 4, 4), np.uint8),
      'y_test': np.arange(3), 'client_train': np.arange(12) % 4}
  made.update(change)
  return {k: v for k, v in made.items() if v is not None}


def load(folder, **change):
  np.savez(folder / 'toy.npz', **arrays(**change))
  return data.load('toy', folder)


def test_clients_are_numbers_or_names(tmp_path):
  found = load(tmp_path)
  assert found.owner.tolist() == [*range(4)] * 3
  assert found.client_names == ('0', '1', '2', '3')
  named = load(tmp_path, client_train=np.array(['b', 'a', 'c'] * 4))
  assert named.client_names == ('a', 'b', 'c')
  assert named.owner.tolist() == [1, 0, 2] * 4
  subjects = load(tmp_path, client_train=np.array(['10', '9', '100'] * 4))
  assert subjects.client_names == ('9', '10', '100')
  assert subjects.owner.tolist() == [1, 0, 2] * 4
  plain = load(tmp_path, client_train=None)
  assert plain.owner is None and plain.client_names is None
  np.testing.assert_array_equal(plain.train.inputs, found.train.inputs)


@pytest.mark.parametrize('kind', [str, bytes])
def test_words_are_classes_by_alphabet(tmp_path, kind):
  words = WORDS if kind is str else np.char.encode(WORDS)
  found = load(tmp_path, y_train=words[np.arange(12) % 3], y_test=words)
  assert found.class_names == ('cat', 'dog', 'emu')
  assert found.train.labels.tolist() == [2, 0, 1] * 4
  assert found.test.labels.tolist() == [2, 0, 1]


def test_class_names_give_the_order(tmp_path):
  found = load(tmp_path, class_names=WORDS)
  assert found.class_names == ('emu', 'cat', 'dog')
  found = load(tmp_path, class_names=WORDS, y_train=WORDS[np.arange(12) % 3],
               y_test=WORDS)
  assert found.class_names == ('emu', 'cat', 'dog')
  assert found.train.labels.tolist() == [0, 1, 2] * 4


@pytest.mark.parametrize('change, words', [
    ({'client_train': None, 'clients_train': np.arange(12)},
     "name it 'client_train' if"),
    ({'x_validation': np.zeros((2, 4, 5, 3), np.uint8)},
     "'x_validation' is not read: name it 'x_val' if"),
    ({'client_train': None, 'clients': np.arange(12)},
     "key 'clients' is not read"),
    ({'class_name': np.array(['a', 'b', 'c'])}, "name it 'class_names' if"),
    ({'client_train': np.arange(11)}, '11 entries, and train 12 rows'),
    ({'client_train': np.zeros((), int)}, 'client_train has'),
    ({'client_train': np.arange(12) % 4 * 2}, 'client 1 has no row'),
    ({'client_train': np.arange(12) - 1}, 'client_train holds -1'),
    ({'client_train': np.arange(12) / 2}, 'float64'),
    ({'client_train': np.array(['a', ''] * 6)}, 'no word in row 1'),
    ({'class_names': np.array(['a', 'b'])}, '2 names, and train 3'),
    ({'class_names': np.array(['a', 'b', 'a'])}, 'more than once'),
    ({'class_names': np.arange(3)}, 'class_names is int64'),
    ({'y_train': np.array(['a', 'b', ''] * 4), 'y_test': np.array(['a'] * 3)},
     'no word in row 2'),
    ({'y_train': WORDS[np.arange(12) % 3]}, 'labels of test'),
    ({'y_train': WORDS[np.arange(12) % 3], 'y_test': np.array(['cow'] * 3)},
     "'cow', which train has not"),
    ({'y_train': WORDS[np.arange(12) % 3], 'y_test': np.array(
        ['cat', '-1', 'cat'])}, 'row 1 of test has no label'),
    ({'y_train': np.where(np.arange(12) == 4, np.nan, 1)}, 'row 4 is nan'),
    ({'y_train': np.arange(12) / 2}, 'float64')])
def test_wrong_arrays_get_one_line(tmp_path, change, words):
  with pytest.raises(data.DataError, match='toy.npz') as caught:
    load(tmp_path, **change)
  assert words in str(caught.value) and '\n' not in str(caught.value)


@pytest.mark.parametrize('header, name', [
    ('text,label,clients,split', 'client'),
    ('text,label,client,splits', 'split')])
def test_a_misspelt_column_is_named(tmp_path, header, name):
  with pytest.raises(data.DataError, match=f"is not read: name it '{name}'"):
    table(tmp_path, ROWS, header)
  (tmp_path / 'more').mkdir()
  table(tmp_path / 'more', [f'{row},5' for row in ROWS],
        'text,label,client,split,stars')


def test_a_new_split_needs_a_client_of_every_row(tmp_path):
  load(tmp_path)
  with pytest.raises(ValueError, match='official'):
    data.load('toy', tmp_path, split='60/40')


def table(folder, rows, header='text,label,client,split'):
  (folder / 'toy.csv').write_text('\n'.join([header, *rows]) + '\n')
  return data.load('toy', folder)


ROWS = ['a b,good,ann,train', 'b c,bad,bob,train', 'c d,good,bob,train',
        'd e,bad,,validation', 'e f,bad,eve,test']


def test_columns_of_texts(tmp_path):
  found = table(tmp_path, ROWS)
  assert found.class_names == ('bad', 'good')
  assert found.client_names == ('ann', 'bob')
  assert found.owner.tolist() == [0, 1, 1]
  assert found.train.labels.tolist() == [1, 0, 1]
  assert found.validation.labels.tolist() == [0]
  assert found.test.labels.tolist() == [0]
  with pytest.raises(ValueError, match='official'):
    data.load('toy', tmp_path, split='60/40')


def test_a_new_split_keeps_rows_with_their_clients(tmp_path):
  rows = [f'w{i} x,{"ab"[i % 2]},{"ab"[i % 2]},train' for i in range(30)]
  table(tmp_path, [*rows, 'z,a,a,test'])
  found = data.load('toy', tmp_path, split='20/5')
  assert found.client_names == ('a', 'b') and len(found.train.labels) == 20
  assert np.asarray(found.owner).tolist() == found.train.labels.tolist()


@pytest.mark.parametrize('rows, words', [
    (['a,good,ann,trane', *ROWS],
     "line 2: split 'trane' must be train, validation"),
    ([*ROWS, 'x,good,,train'], 'line 7: a row to train on has no client'),
    (['a,0.0,ann,train', 'b,1.0,ann,test'], 'line 2: labels must be whole'),
    (['a,0,ann,train', 'b,good,ann,test'], "words all of them, not 'good'"),
    (['a,good,ann,train', 'c,bad,ann,train', 'b,,ann,test'],
     "line 4: a row of the part 'test' has no label; only those of train"),
    (ROWS[:3], "no row's split is test"),
    (['a,x,ann,train', 'b,y,ann,test'], "label 'y'"),
    (['a,x,ann,train', 'b,x,ann,test'], 'one class')])
def test_wrong_tables_get_one_line(tmp_path, rows, words):
  with pytest.raises(data.DataError, match='toy.csv') as caught:
    table(tmp_path, rows)
  assert words in str(caught.value) and '\n' not in str(caught.value)


class _NotKnown:
  """As pandas.NA: no comparison with it is true or false."""

  def __hash__(self):
    return 0

  def __eq__(self, other):
    return self

  def __ne__(self, other):
    return self

  def __bool__(self):
    raise TypeError('boolean value of NA is ambiguous')

  def __repr__(self):
    return '<NA>'


@pytest.mark.parametrize('word', ['None', 'nan', 'NaN', '<NA>', 'NaT'])
def test_a_missing_value_that_was_made_a_word_is_no_class(word):
  """As np.asarray and astype(str) of pandas make it of lists with NaN."""
  labels = np.array(['low', word, 'high', 'low'])
  inputs = np.zeros((4, 2, 2, 1), np.uint8)
  parts = {'train': (inputs, labels),
           'test': (inputs, np.array(['low', 'high'] * 2))}
  with pytest.raises(data.DataError, match=(
      f"labels of train have '{word}' in row 1, as a missing value becomes; of "
      'a row without a label it is -1')):
    files.of_arrays(parts, {})
  # A class may be called so, and a client.
  named = files.of_arrays(parts, {
      'class_names': np.array(['high', 'low', word])})
  assert named.parts['train'].labels.tolist() == [1, 2, 0, 1]
  assert names.owners(labels)[1] == tuple(np.unique(labels))


@pytest.mark.parametrize('missing, told', [
    (None, 'row 1 is None'), (float('nan'), 'row 1 is nan'),
    (_NotKnown(), 'row 1 is <NA>')])
@pytest.mark.parametrize('take', [names.owners, names.check_names])
def test_a_missing_word_is_no_word(take, missing, told):
  words = np.array(['a', missing, 'b'], object)
  with pytest.raises(data.DataError, match=told):
    take(words)
