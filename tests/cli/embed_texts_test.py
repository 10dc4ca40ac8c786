"""Vectors of texts from a small random BERT that the test makes."""
from __future__ import annotations

import pathlib
import sys
import types

import numpy as np
import pytest

from fedjax_ssl import data
from fedjax_ssl.cli import embed_texts

WORDS = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'good', 'bad', 'day',
         'so', '##ly', '!']
TEXTS = ['good day !', 'so bad', 'badly good so so so so', '']


@pytest.fixture(scope='module')
def bert(tmp_path_factory):
  torch = pytest.importorskip('torch', reason='the extra [text] is not there')
  transformers = pytest.importorskip(
      'transformers', reason='the extra [text] is not there')
  folder = tmp_path_factory.mktemp('bert')
  (folder / 'vocab.txt').write_text('\n'.join(WORDS))
  torch.manual_seed(0)
  transformers.BertTokenizerFast(str(folder / 'vocab.txt')).save_pretrained(
      folder)
  transformers.BertModel(transformers.BertConfig(
      vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=1,
      num_attention_heads=2, intermediate_size=8,
      max_position_embeddings=16)).save_pretrained(folder)
  return pathlib.Path(folder)


def test_vectors_of_own_tokens_come_first(bert):
  vectors = embed_texts.embed(TEXTS, bert, tokens=4, batch=3)
  assert vectors.shape == (4, 4, 8) and vectors.dtype == np.float16
  lengths = (vectors != 0).any(-1).sum(-1)
  np.testing.assert_array_equal(lengths, [3, 2, 4, 0])
  for row, length in zip(vectors, lengths, strict=True):
    assert row[:length].any(-1).all() and not row[length:].any()
  # The company of a batch does not matter.
  alone = embed_texts.embed(TEXTS[1:2], bert, tokens=4, batch=1)
  np.testing.assert_allclose(alone[0], vectors[1], atol=2e-3)


@pytest.mark.parametrize('knobs, word', [
    ({'tokens': 15, 'size': 0}, '--tokens=15 is more than the 14'),
    ({'tokens': 14, 'size': 9}, '--size=9 is more than the 8')])
def test_what_the_model_cannot_is_said_before_it_runs(
    knobs, word, tmp_path, monkeypatch):
  config = types.SimpleNamespace(hidden_size=8, max_position_embeddings=16)
  model = types.SimpleNamespace(eval=lambda: types.SimpleNamespace(
      config=config))
  tokenizer = types.SimpleNamespace(num_special_tokens_to_add=lambda: 2)
  def loading(found):
    return types.SimpleNamespace(from_pretrained=lambda *_, **__: found)
  monkeypatch.setitem(sys.modules, 'torch', types.SimpleNamespace())
  monkeypatch.setitem(sys.modules, 'transformers', types.SimpleNamespace(
      AutoTokenizer=loading(tokenizer), AutoModel=loading(model)))
  with pytest.raises(ValueError, match=word):
    embed_texts.embed(TEXTS, tmp_path, batch=1, **knobs)


@pytest.mark.parametrize('name', ['here.csv', 'nowhere/a.npz'])
def test_a_file_that_cannot_be_written_is_said_at_once(name, tmp_path, capsys):
  with pytest.raises(SystemExit):
    embed_texts.main([f'--texts={tmp_path}', f'--bert={tmp_path}',
                      f'--out={tmp_path / name}'])
  assert f'{name} must be FOLDER/NAME.npz' in capsys.readouterr().err


def test_special_tokens_are_dropped_and_order_is_kept():
  vectors = np.arange(10.0).reshape(1, 5, 2)
  special = np.array([[True, False, False, True, True]])
  got = embed_texts._without(vectors, special, 3)
  np.testing.assert_array_equal(got[0], [[2, 3], [4, 5], [0, 0]])


def test_principal_directions_keep_what_they_can():
  rng = np.random.default_rng(0)
  plane = rng.normal(size=(2, 6))
  vectors = (rng.normal(size=(5, 4, 2)) @ plane).astype(np.float16)
  vectors[0, 2:] = 0
  short = embed_texts.shorten(vectors, 2)
  assert short.shape == (5, 4, 2) and not short[0, 2:].any()
  def products(x):
    flat = x.reshape(-1, x.shape[-1]).astype(np.float32)
    return flat @ flat.T
  np.testing.assert_allclose(products(short), products(vectors), atol=0.15)


def test_the_file_is_read_back(bert, tmp_path):
  (tmp_path / 'few.csv').write_text('label,text\n' + '\n'.join(
      f'{i % 2},{"so " * (i % 3)}good day' + ' !' * i for i in range(30)))
  texts = data.datasets.text.read_rows(tmp_path / 'few.csv').texts
  vectors = embed_texts.embed(texts, bert, tokens=6, batch=8)
  np.savez(tmp_path / 'few.npz', texts=vectors,
           sha256=np.array(data.datasets.text.fingerprint(texts)))
  found = data.datasets.text.read_csv(tmp_path / 'few.csv',
                                      tmp_path / 'few.npz')
  assert found.parts['train'].inputs.shape[1:] == (6, 8)
