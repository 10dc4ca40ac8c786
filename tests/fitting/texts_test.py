"""Texts given in Python: trained on, predicted from, kept with their words."""
from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl.data.datasets import tokens

WORDS = (('awful', 'sad'), ('great', 'love'))
LABELS = np.arange(60) % 2
TEXTS = [f'the {WORDS[k][i % 3 == 0]} flight {i}' for i, k in enumerate(LABELS)]
SMALL: dict[str, Any] = {
    'clients': 3, 'cohort_size': 3, 'labels_per_class': 9, 'rounds': 2,
    'model': 'text_mean', 'strong': 'none', 'local_steps': 40,
    'learning_rate': 0.3, 'lr_schedule': 'constant', 'progress': False}


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  return fedjax_ssl.fit('fedavg', (TEXTS, LABELS, TEXTS, LABELS), **SMALL,
                        workdir=tmp_path_factory.mktemp('texts') / 'run')


def test_texts_are_learnt_and_predicted(trained):
  known = tokens.vocabulary(TEXTS)
  federation = trained.federations[0]
  np.testing.assert_array_equal(federation.test.inputs,
                                tokens.encode(TEXTS, known))
  logits = trained.predict(TEXTS)
  np.testing.assert_array_equal(logits, trained.predict(federation.test.inputs))
  assert np.mean(logits.argmax(-1) == LABELS) == trained.metrics['accuracy'][-1]
  assert trained.metrics['accuracy'][-1] > 0.9
  # Words that are unknown, and their order, mean nothing to this model.
  np.testing.assert_allclose(trained.predict(['love THE flight zzz yyy']),
                             trained.predict(['flight qqq www love the']),
                             rtol=1e-5)


def test_a_loaded_run_knows_the_words(trained, tmp_path):
  trained.save(tmp_path / 'model.npz')
  expected = trained.predict(TEXTS)
  for place in (trained.workdir, tmp_path / 'model.npz'):
    loaded = fedjax_ssl.load(place)
    np.testing.assert_array_equal(loaded.predict(TEXTS), expected)
    np.testing.assert_array_equal(
        loaded.predict(np.array(TEXTS, object)), expected)


def test_a_run_without_words_says_so(trained, tmp_path):
  trained.save(tmp_path / 'model.npz')
  with np.load(tmp_path / 'model.npz') as file:
    arrays = dict(file)
  about = json.loads(str(arrays['about']))
  del about['vocabulary']  # As of a version that kept none.
  np.savez(tmp_path / 'old.npz', **arrays | {
      'about': np.array(json.dumps(about))})
  old = fedjax_ssl.load(tmp_path / 'old.npz')
  with pytest.raises(ValueError, match='keeps no words; a Dataset'):
    old.predict(TEXTS)
  assert old.predict(tokens.encode(TEXTS, tokens.vocabulary(TEXTS))).shape == (
      60, 2)


def test_no_texts_have_no_logits(trained):
  assert trained.predict([]).shape == (0, 2)


def test_other_words_are_no_continuation(trained, tmp_path):
  folder = tmp_path / 'run'
  shutil.copytree(trained.workdir, folder)
  renamed = [text.replace('great', 'grand') for text in TEXTS]
  options = {**SMALL, 'rounds': 3, 'schedule_rounds': 2}
  with pytest.raises(ValueError, match='vocabulary.txt has other words'):
    fedjax_ssl.fit('fedavg', (renamed, LABELS, renamed, LABELS), **options,
                   workdir=folder)
  # A run of a version that kept none gets it as it goes on.
  kept = (folder / 'vocabulary.txt').read_bytes()
  (folder / 'vocabulary.txt').unlink()
  assert fedjax_ssl.load(folder).vocabulary is None
  fedjax_ssl.fit('fedavg', (TEXTS, LABELS, TEXTS, LABELS), **options,
                 workdir=folder)
  assert (folder / 'vocabulary.txt').read_bytes() == kept


@pytest.mark.parametrize('inputs, words', [
    ('great', r"a list of texts, \['great'\]"),
    (['great', 1], 'row 1 of inputs is no text but 1'),
    ([['great']], r'texts of shape \(1, 1\)')])
def test_texts_to_predict_are_one_list(trained, inputs, words):
  with pytest.raises(ValueError, match=words):
    trained.predict(inputs)


def test_the_tokens_of_one_text_are_a_batch_of_one(trained):
  rows = tokens.encode(TEXTS, tokens.vocabulary(TEXTS))
  np.testing.assert_array_equal(trained.predict(rows[0]),
                                trained.predict(rows[:1]))


@pytest.mark.parametrize('train, test, words', [
    ([*TEXTS[:-1], None], TEXTS, 'row 59 of train inputs is no text but None'),
    (TEXTS, np.zeros((60, 8, 8), np.uint8), 'train has texts, and test none'),
    (TEXTS, np.array(TEXTS, 'S'), 'test inputs are bytes; give texts as str'),
    (np.array([one.encode() for one in TEXTS], object), TEXTS,
     'train inputs are bytes; give texts as str'),
    (TEXTS[:-1], TEXTS, 'train has 59 texts and 60 labels')])
def test_texts_that_make_no_data(train, test, words):
  with pytest.raises(ValueError, match=words):
    fedjax_ssl.fit('fedavg', (train, LABELS, test, LABELS), **SMALL)


def test_texts_in_a_file_of_arrays(tmp_path):
  np.savez(tmp_path / 'few.npz', x_train=np.array(TEXTS), y_train=LABELS,
           x_test=np.array(TEXTS[:10]), y_test=LABELS[:10])
  found = fedjax_ssl.data.load('few', tmp_path)
  np.testing.assert_array_equal(
      found.test.inputs, tokens.encode(TEXTS[:10], tokens.vocabulary(TEXTS)))
  np.testing.assert_array_equal(found.encode(TEXTS), found.train.inputs)
  with pytest.raises(ValueError, match='embeddings=v.npz: they go with texts'):
    fedjax_ssl.data.load('few', tmp_path, embeddings='v.npz')
