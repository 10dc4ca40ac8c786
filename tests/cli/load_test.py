"""A finished run predicts as it was evaluated."""
from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl import data
from tests.cli import launcher

ARGS = (*launcher.SMALL, '--num_rounds=2', '--eval_every=1',
        '--checkpoint_every=1')


@pytest.fixture(scope='module')
def finished(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp('load') / 'run'
  launcher.run(folder, *ARGS)
  return folder


@pytest.fixture(scope='module')
def test_set():
  return data.load('digits').test


def last_rows(folder: pathlib.Path) -> dict[int, dict]:
  lines = (folder / 'metrics.jsonl').read_text().splitlines()
  return {row['seed']: row for row in map(json.loads, lines)}


def accuracy(logits, labels) -> float:
  return float(np.mean(np.asarray(logits).argmax(-1) == labels))


def test_predictions_have_the_accuracy_of_the_last_row(finished, test_set):
  run = fedjax_ssl.load(finished)
  rows = last_rows(finished)
  assert [*run.states] == [*rows] == [0, 1] and run.round == 2
  assert rows[0]['accuracy'] != rows[1]['accuracy']
  for seed, row in rows.items():
    logits = run.predict(test_set.inputs, seed=seed)
    assert logits.shape == (360, 10)
    assert accuracy(logits, test_set.labels) == pytest.approx(
        row['accuracy'], abs=1e-6)
  np.testing.assert_array_equal(run.predict(test_set.inputs[:7]),
                                run.predict(test_set.inputs[:7], seed=0))


def test_own_data_are_judged_as_the_test_set_was(finished, test_set, tmp_path):
  run, rows = fedjax_ssl.load(finished), last_rows(finished)
  named = run._replace(class_names=tuple('abcdefghij'))
  run.save(tmp_path / 'model.npz', seed=1)
  for seed, found in {
      0: run.evaluate(test_set.inputs, test_set.labels),
      1: fedjax_ssl.load(tmp_path / 'model.npz').evaluate(*test_set)}.items():
    confusion = found.pop('confusion')
    np.testing.assert_array_equal(
        confusion.sum(1), np.bincount(test_set.labels, minlength=10))
    np.testing.assert_allclose(np.diag(confusion) / confusion.sum(1),
                               found['per_class_accuracy'], rtol=1e-6)
    assert confusion.sum(0).max() == pytest.approx(
        found['most_predicted'] * 360, rel=1e-6)
    assert found.keys() < rows[seed].keys() and 'loss' in found
    for name, value in found.items():
      np.testing.assert_allclose(value, rows[seed][name], rtol=1e-5, atol=1e-7,
                                 err_msg=name)
  words = np.array(named.class_names)[test_set.labels]
  np.testing.assert_equal(named.evaluate(test_set.inputs, words),
                          run.evaluate(*test_set))
  few = run.evaluate(test_set.inputs[:1], test_set.labels[:1])
  assert np.isfinite(few['per_class_accuracy']).sum() == 1


@pytest.mark.parametrize('labels, words', [
    ([0, 10], 'labels have class 10; allowed are 0 to 9'),
    ([0, -1], 'from -1 to 0; allowed is 0 to C-1'),
    ([0], '2 inputs and 1 labels'), (np.zeros(0, int), 'empty'),
    ([0.5, 1], 'float64'), ([None, 1], 'row 0 is None'),
    (np.ma.masked_equal([0, 1], 1), 'labels has masked entries'),
    (None, 'labels is of type NoneType; give an array or a list'),
    (['a', 'b'], 'classes of the run are numbers, 0 to 9')])
def test_labels_of_another_kind_are_refused(finished, test_set, labels, words):
  with pytest.raises(ValueError, match=words):
    fedjax_ssl.load(finished).evaluate(test_set.inputs[:2], labels)


def test_an_unknown_class_is_named(finished, test_set):
  run = fedjax_ssl.load(finished)._replace(class_names=tuple('abcdefghij'))
  with pytest.raises(ValueError, match="has label 'x'"):
    run.evaluate(test_set.inputs[:2], ['a', 'x'])


def test_classes_called_by_other_numbers_need_their_names(finished, test_set):
  names = tuple(sorted(map(str, range(1, 11))))  # '1', '10', '2', ...
  run = fedjax_ssl.load(finished)._replace(class_names=names)
  with pytest.raises(ValueError, match='in another order: 1, 10, 2, 3, ...'):
    run.evaluate(*test_set)
  words = np.array(names)[test_set.labels]
  assert run.evaluate(test_set.inputs, words)['accuracy'] == (
      fedjax_ssl.load(finished).evaluate(*test_set)['accuracy'])


def test_what_was_measured_is_of_the_loaded_round(
    finished, tmp_path, monkeypatch):
  monkeypatch.chdir(finished.parent)
  run = fedjax_ssl.load(finished.name)
  monkeypatch.chdir(tmp_path)
  assert set(run.metrics['round']) == {1, 2}
  assert set(run._replace(round=1).metrics['round']) == {1}
  with pytest.raises(ValueError, match='nowhere is gone'):
    run._replace(workdir=tmp_path / 'nowhere').metrics  # noqa: B018


def test_a_loaded_run_has_what_was_measured(finished, tmp_path):
  run, rows = fedjax_ssl.load(finished), last_rows(finished)
  assert set(run.metrics['round']) == {1, 2}
  last = run.metrics['round'] == 2
  np.testing.assert_array_equal(run.metrics['seed'][last], [0, 1])
  for name in ('accuracy', 'loss', 'val_accuracy'):
    np.testing.assert_array_equal(run.metrics[name][last],
                                  [row[name] for row in rows.values()])
  assert run.class_metrics['per_class_accuracy'].shape == (len(last), 10)
  run.save(tmp_path / 'model.npz')
  assert fedjax_ssl.load(tmp_path / 'model.npz').metrics == {}


def test_a_metric_that_is_none_is_told_with_those_that_are(finished):
  run = fedjax_ssl.load(finished)
  with pytest.raises(KeyError, match="'acuracy' .*Did you mean 'accuracy'"):
    run.metrics['acuracy']  # noqa: B018
  with pytest.raises(KeyError, match='It is in class_metrics. There are: rou'):
    run.metrics['per_class_accuracy']  # noqa: B018
  with pytest.raises(KeyError, match='It is in metrics. There are: per_class'):
    run.class_metrics['accuracy']  # noqa: B018
  assert jax.tree.map(len, run.metrics) == jax.tree.map(
      len, dict(run.metrics))


def test_the_model_of_a_program_is_saved_alone(finished, test_set, tmp_path):
  run, file = fedjax_ssl.load(finished), tmp_path / 'model.npz'
  run.save(file, seed=1)
  alone = fedjax_ssl.load(file)
  assert [*alone.states] == [1] and alone.round == run.round
  np.testing.assert_array_equal(alone.predict(test_set.inputs),
                                run.predict(test_set.inputs, seed=1))
  again = tmp_path / 'again.npz'
  alone.save(again)
  for name, array in np.load(file).items():
    np.testing.assert_array_equal(np.load(again)[name], array)
  with pytest.raises(ValueError, match='seed=5'):
    run.save(file, seed=5)
  for name in ('config.json', 'run.flags', 'metrics.jsonl', 'partition_0.npz'):
    kept = (finished / name).read_bytes()
    with pytest.raises(ValueError, match=f'{name} belongs to the run'):
      run.save(finished / name)
    assert (finished / name).read_bytes() == kept


def test_inputs_may_lack_the_one_channel(finished, test_set):
  run = fedjax_ssl.load(str(finished))
  images = test_set.inputs[:5]
  want = run.predict(images)
  np.testing.assert_array_equal(run.predict(images[..., 0]), want)
  np.testing.assert_array_equal(run.predict(images.astype(np.int64)), want)
  assert run.predict(images[:0]).shape == (0, 10)
  # One alone, of [8, 8, 1] and [8, 8], is a batch of one.
  for one in (images[0], images[0, ..., 0]):
    np.testing.assert_array_equal(run.predict(one), run.predict(images[:1]))


def test_one_program_predicts_inputs_of_many_sizes(finished, test_set):
  run, images = fedjax_ssl.load(str(finished)), test_set.inputs
  for size in (5, 8, 6, 7):
    np.testing.assert_array_equal(run.predict(images[:size]),
                                  run.predict(images[:8])[:size])
  compiled: Any = run.method.predict
  assert compiled.__wrapped__._cache_size() == 1


@pytest.mark.parametrize('change, words', [
    (lambda x: x[:, :4], '[B, 8, 8, 1]'), (lambda x: x[0, 0], 'not [8, 1]'),
    (lambda x: x / 3, 'floats neither'), (lambda x: x * 1j, 'complex128')])
def test_other_inputs_are_refused(finished, test_set, change, words):
  run = fedjax_ssl.load(finished)
  with pytest.raises(ValueError) as info:
    run.predict(change(test_set.inputs))
  assert words in str(info.value) and '\n' not in str(info.value)


def test_other_seeds_are_refused(finished, test_set):
  with pytest.raises(ValueError, match='seed=5: .* 0, 1'):
    fedjax_ssl.load(finished).predict(test_set.inputs, seed=5)


def test_no_run(finished, tmp_path):
  def message(folder) -> str:
    with pytest.raises(ValueError) as info:
      fedjax_ssl.load(folder)
    assert str(folder) in str(info.value) and '\n' not in str(info.value)
    return str(info.value)

  assert message(tmp_path / 'nowhere').startswith('there is no ')
  assert 'config.json is missing' in message(tmp_path)
  shutil.copy(finished / 'config.json', tmp_path)
  assert 'no checkpoint' in message(tmp_path)
  stored = json.loads((finished / 'config.json').read_text())
  stored['facts']['task']['spec']['gone'] = 1
  (tmp_path / 'config.json').write_text(json.dumps(stored))
  assert 'another version' in message(tmp_path)
  # As of a class that `fit` was given, in another process.
  stored['facts']['task']['spec'].pop('gone')
  stored['facts']['task']['spec']['model'] = 'Net(width=3)'
  (tmp_path / 'config.json').write_text(json.dumps(stored))
  line = message(tmp_path)
  assert "model 'Net' is unknown. Allowed: " in line and line.endswith(
      'If it is your own, register it first, as in '
      "fedjax_ssl.task.REGISTRIES['model'].register('Net'); a run with "
      'model="./FILE.py:Net" finds it by itself.')
  for place, value, said in (
      ('task', {'spec': None}, 'another version'),
      ('choices', [], 'config.json is damaged: `choices` is no object')):
    facts = stored['facts'] | {place: value}
    (tmp_path / 'config.json').write_text(json.dumps(stored | {'facts': facts}))
    assert said in message(tmp_path)
  del stored['facts']['task']
  (tmp_path / 'config.json').write_text(json.dumps(stored))
  assert "'task'" in message(tmp_path)
  (tmp_path / 'config.json').write_text('{"flags": {}, "facts": {}}')
  assert 'damaged' in message(tmp_path)
  (tmp_path / 'config.json').write_text('{')
  assert 'damaged' in message(tmp_path)


def test_eval_only_prints_the_last_row_and_writes_nothing(finished):
  before = launcher.fingerprints(finished)
  times = {p: p.stat().st_mtime_ns for p in finished.rglob('*')}
  output = launcher.run(finished, *ARGS, '--eval_only')
  printed = [json.loads(line) for line in output.splitlines()]
  assert [row['seed'] for row in printed] == [0, 1]
  for row in printed:
    assert row.pop('run').startswith('fixmatch')
    want = last_rows(finished)[row['seed']]
    names = {'round', 'accuracy', 'loss', 'val_accuracy', 'local_accuracy',
             'per_class_accuracy', 'pseudo_label_rate'}
    assert names <= {*row} and {k: row[k] for k in names} == {
        k: want[k] for k in names}
  assert launcher.fingerprints(finished) == before
  assert {p: p.stat().st_mtime_ns for p in finished.rglob('*')} == times


def test_eval_only_without_a_checkpoint(finished, tmp_path):
  folder = tmp_path / 'run'
  folder.mkdir()
  shutil.copy(finished / 'config.json', folder)
  started = launcher.start(folder, *ARGS, '--eval_only')
  assert started.wait() == 2
  line, = started.output().splitlines()
  assert 'no checkpoint that can be evaluated' in line and str(folder) in line
  assert [p.name for p in folder.iterdir()] == ['config.json']
