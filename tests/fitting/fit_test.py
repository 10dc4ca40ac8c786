"""One call trains, shows, predicts, saves and goes on, as the programs do."""
from __future__ import annotations

import dataclasses
import functools
import json
import textwrap
from typing import Any

import jax
import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl import data
from fedjax_ssl.fitting import inputs
from fedjax_ssl.running import settings
from tests.cli import launcher

# What `launcher.SMALL` says, of one seed, and rounds of a few steps.
SMALL: dict[str, Any] = {
    'clients': 6, 'cohort_size': 3, 'model': 'linear', 'local_steps': 2,
    'unlabeled_batch': 20, 'lr_schedule': 'constant', 'checkpoint_every': 1,
    'strong': 'none', 'num_devices': 1, 'eval_every': 1, 'schedule_rounds': 4}
IMAGES = np.zeros((4, 8, 8), np.uint8)
METHOD = 'fixmatch(threshold=0.3, keep_local=True)'
ARGS = (*launcher.SMALL, '--seeds=0', '--eval_every=1', '--checkpoint_every=1',
        '--schedule_rounds=4')
fit = functools.partial(fedjax_ssl.fit, METHOD, 'digits', **SMALL)


@pytest.fixture(scope='module')
def straight(tmp_path_factory):
  """Four rounds in one go."""
  return fit(rounds=4, workdir=tmp_path_factory.mktemp('fit') / 'run')


@pytest.fixture(scope='module')
def images():
  return data.load('digits').test.inputs


def rows(folder) -> bytes:
  return (folder / 'metrics.jsonl').read_bytes()


def test_metrics_are_the_columns_of_the_file(straight):
  lines = [json.loads(line) for line in rows(straight.workdir).splitlines()]
  assert straight.metrics['round'].tolist() == [1, 2, 3, 4]
  assert straight.metrics['accuracy'].dtype == np.float64
  assert straight.metrics['accuracy'].tolist() == [
      line['accuracy'] for line in lines]
  assert all(column.shape == (4,) for column in straight.metrics.values())
  assert straight.class_metrics['per_class_accuracy'].shape == (4, 10)
  assert {*straight.metrics, *straight.class_metrics} == {*lines[0]}
  assert repr(straight) == (
      f'Run of {METHOD} (round 4, 1 seed, accuracy '
      f'{lines[-1]["accuracy"]:.4f})')


def test_a_resume_equals_a_straight_run(straight, images, tmp_path, capsys):
  run = fit(rounds=2, progress=False)
  assert run.workdir is None and run.round == 2
  assert run.resume(rounds=4) is run
  assert capsys.readouterr() == ('', '')
  for name, column in straight.metrics.items():
    np.testing.assert_array_equal(run.metrics[name], column, name)
  np.testing.assert_array_equal(run.predict(images), straight.predict(images))
  with pytest.raises(ValueError, match='num_rounds=3: the run is at round 4'):
    run.resume(rounds=3)


def test_what_clients_keep_may_be_on_disk(straight, tmp_path):
  folder = tmp_path / 'run'
  run = fit(rounds=2, workdir=folder, client_memory='disk')
  assert run.resume(rounds=4).per_client().keys() == (
      straight.per_client().keys())
  assert rows(folder) == rows(straight.workdir)
  for name, column in straight.per_client().items():
    np.testing.assert_array_equal(run.per_client()[name], column, name)
  of_own: Any = run._judges.of_own
  assert of_own._cache_size() == 1
  loaded = fedjax_ssl.load(folder).state.memory
  for leaf, other in zip(*map(jax.tree.leaves, (
      loaded, straight.states[0].memory)), strict=True):
    np.testing.assert_array_equal(leaf[3], other[3])
  with pytest.raises(ValueError, match='client_memory disk -> device'):
    fit(rounds=4, workdir=folder, client_memory='device')


def test_a_program_continues_a_fit(straight, tmp_path):
  folder = tmp_path / 'run'
  fit(rounds=2, workdir=folder)
  launcher.run(folder, *ARGS, '--num_rounds=4')
  assert rows(folder) == rows(straight.workdir)


def test_a_fit_continues_a_program(straight, tmp_path):
  folder = tmp_path / 'run'
  launcher.run(folder, *ARGS, '--num_rounds=2')
  files = {path.name for path in folder.iterdir()}
  run = fedjax_ssl.fit(METHOD, workdir=folder, rounds=4)  # The rest is there.
  assert rows(folder) == rows(straight.workdir)
  assert run.metrics['round'].tolist() == [1, 2, 3, 4]
  assert {path.name for path in folder.iterdir()} == files == {
      path.name for path in straight.workdir.iterdir()}
  with pytest.raises(ValueError, match='alpha'):
    fedjax_ssl.fit(METHOD, workdir=folder, alpha=0.1)


STOPPED = """
import signal, sys
import fedjax_ssl
from fedjax_ssl.running import stopping
from fedjax_ssl.training import progress
from tests.fitting import fit_test

def fit():
  return fit_test.fit(rounds=4, workdir=sys.argv[1])

def update(self, round_, accuracy=None):
  if round_ == 2:
    signal.raise_signal(signal.SIGTERM)

with stopping.listening():  # As in a process in which a program ran before.
  kept, progress.Progress.update = progress.Progress.update, update
  try:
    fit()
  except KeyboardInterrupt as error:
    print(error)
  progress.Progress.update = kept
  fit()
"""


@pytest.mark.thorough
def test_a_signal_saves(straight, tmp_path, run_python):
  """In a process of its own, which may end for the signal."""
  said = run_python(STOPPED, str(tmp_path / 'run'))
  assert 'stopped at round 2; ' in said and str(tmp_path / 'run') in said
  assert rows(tmp_path / 'run') == rows(straight.workdir)


def test_bounds_are_runs_beside_it(straight):
  run = fit(rounds=1, bounds=True, progress=False)
  lower, upper = run.bounds.values()
  assert [*run.bounds] == ['labels only (lower bound)',
                           'all labels (upper bound)']
  assert run.resume(rounds=2) is run
  assert lower.round == upper.round == 2
  everything = fedjax_ssl.fit('fedavg', 'digits', rounds=2, labels='all',
                              progress=False, **SMALL)
  for one, other in ((run, straight), (upper, everything)):
    np.testing.assert_array_equal(one.metrics['loss'],
                                  other.metrics['loss'][:2])
  assert lower.federations[0].clients.num_labeled.sum() == 100
  assert not upper.federations[0].clients.num_unlabeled.sum()
  assert len(run.plot('accuracy').axes[0].lines) == 3


def test_compiled_programs_are_kept(tmp_path, monkeypatch):
  """As the programs do; a folder that the user names stays."""
  named, kept = 'jax_compilation_cache_dir', jax.config
  before = getattr(kept, named)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  try:
    for folder, then in ((None, str(tmp_path / 'fedjax_ssl' / 'xla')),
                         ('', ''), (str(tmp_path), str(tmp_path))):
      jax.config.update(named, folder)
      with pytest.raises(ValueError, match='fixmach'):
        fedjax_ssl.fit('fixmach')
      assert getattr(kept, named) == then
  finally:
    jax.config.update(named, before)


def test_labels_of_arrays_may_be_words(straight):
  digits = data.load('digits')
  words = np.array('nil one two three four five six seven eight nine'.split())
  source = inputs.source((digits.train.inputs, words[digits.train.labels],
                          digits.test.inputs, words[digits.test.labels]))
  found = source.load(straight.options)
  assert found.class_names == tuple(sorted(words))
  for part in ('train', 'test'):
    assert [found.class_names[i] for i in getattr(found, part).labels] == (
        words[getattr(digits, part).labels].tolist())


def test_a_model_knows_the_names_of_its_classes(straight, tmp_path):
  digits = data.load('digits')
  words = np.array([f'digit {i}' for i in range(10)])
  run = fedjax_ssl.fit(
      'fedavg', (digits.train.inputs, words[digits.train.labels],
                 digits.test.inputs, words[digits.test.labels]),
      rounds=1, progress=False, workdir=tmp_path / 'run', **SMALL)
  run.save(tmp_path / 'model.npz')
  assert run.class_names == tuple(words) and straight.class_names == ()
  for place in ('run', 'model.npz'):
    assert fedjax_ssl.load(tmp_path / place).class_names == tuple(words)


def test_masked_labels_are_unknown(straight):
  labels = np.array([0, 1, 1, 0], np.uint8)
  masked = np.ma.array(labels, mask=[False, True, False, False])
  found = inputs.source((IMAGES, masked, IMAGES, labels)).load(straight.options)
  assert found.train.labels.tolist() == [0, -1, 1, 0]
  assert found.test.labels.tolist() == labels.tolist()


def test_labels_may_be_words_that_are_objects(straight):
  """As a column of a table is."""
  words = np.array(['no', 'yes', 'no', 'yes'], object)
  found = inputs.source((IMAGES, words, IMAGES, words)).load(straight.options)
  assert found.class_names == ('no', 'yes')
  with pytest.raises(ValueError, match=r'dtype object \(row 2 is None\)'):
    inputs.source((IMAGES, [0, 'yes', None, 'yes'], IMAGES, words))


def test_images_of_any_scale_that_data_may_have_are_predicted(straight, images):
  logits = np.asarray(straight.predict(images))
  for same in (images.astype(float), images / 255, images.astype(np.int64)):
    np.testing.assert_allclose(straight.predict(same), logits, atol=1e-5)
  with pytest.warns(UserWarning, match='No number in the images reach'):
    straight.predict(images // 16)
  for wrong, words in ((images.astype(int) + 100, 'hold values 100 to'),
                       (images * 0.5, 'neither in .0, 1. nor whole'),
                       (images[:, :5], r'of shape \[B, 8, 8, 1\], not')):
    with pytest.raises(ValueError, match=words):
      straight.predict(wrong)


def test_a_saved_model_predicts_the_same(straight, images, tmp_path):
  file = tmp_path / 'model.npz'
  straight.save(file)
  loaded = fedjax_ssl.load(file)
  logits = np.asarray(straight.predict(images))
  np.testing.assert_array_equal(loaded.predict(images), logits)
  assert loaded.round == 4
  assert repr(loaded).startswith(
      f'Loaded run of {loaded.spec.method} (round 4, seeds ')
  assert straight.evaluate(images, data.load('digits').test.labels)[
      'accuracy'] == pytest.approx(straight.metrics['accuracy'][-1], abs=1e-6)
  # The arrays alone say it too: a linear model on centered pixels.
  arrays = dict(np.load(file))
  about = json.loads(str(arrays.pop('about')))['task']['spec']
  kernel, bias = sorted(arrays.values(), key=lambda x: -x.ndim)
  pixels = (images / 255 - about['mean'][0]) / about['std'][0]
  np.testing.assert_allclose(
      pixels.reshape(len(images), -1) @ kernel + bias, logits, atol=1e-4)
  (tmp_path / 'other.npz').write_bytes(b'no zip')
  with pytest.raises(ValueError, match='other.npz holds no model'):
    fedjax_ssl.load(tmp_path / 'other.npz')


def test_clients_are_weighed_by_their_classes(straight):
  found = straight.per_client()
  federation = straight.federations[0]
  mix = np.add(*data.class_counts(federation))
  per_class = straight.class_metrics['per_class_accuracy'][-1]
  np.testing.assert_allclose(found['accuracy'], mix @ per_class / mix.sum(1),
                             atol=1e-6)
  np.testing.assert_array_equal(found['rows'], mix.sum(1))
  assert found['labels'].sum() == 100
  assert found['client'].tolist() == [*range(6)]
  assert found['local_accuracy'].shape == (6,)
  assert np.ptp(found['local_accuracy']) > 0
  # As evaluation has it, over all test rows alike.
  assert 0 < found['local_accuracy'].mean() <= 1


def test_plot(straight, tmp_path):
  chart = straight.plot('accuracy', path=tmp_path / 'curves.svg')
  line, = chart.axes[0].lines
  np.testing.assert_allclose(line.get_ydata(),
                             100 * straight.metrics['accuracy'])
  assert (tmp_path / 'curves.svg').exists()
  assert chart._repr_png_().startswith(b'\x89PNG')
  with pytest.raises(ValueError, match="Did you mean 'accuracy'[?] Allowed: "
                     '.*loss'):
    straight.plot('acuracy')
  with pytest.raises(ValueError, match='nonsense'):
    straight.plot('accuracy', 'nonsense')
  with pytest.raises(ValueError, match="'per_class_accuracy'.* Allowed: "):
    straight.plot('accuracy', 'per_class_accuracy')
  lines = straight.plot('accuracy', beside=straight).axes[0].lines
  assert len(lines) == 2
  with pytest.raises(TypeError, match='beside takes a run .* no int'):
    straight.plot(beside=[3])
  with pytest.raises(ValueError, match='x.png cannot be written: '):
    straight.plot(path=tmp_path / 'curves.svg' / 'x.png')
  np.testing.assert_array_equal(*(line.get_ydata() for line in lines))


def test_labels_that_come_by_task_are_not_given_to_all(straight):
  """`fit` deals labels once, so it would give each task those of all."""
  given = straight.federations[0]
  clients = jax.tree.map(np.asarray, given.clients)
  nothing_new = clients._replace(num_unlabeled=0 * clients.num_unlabeled)

  def source(second):
    stream = jax.tree.map(lambda *x: np.stack(x), clients, second)
    return inputs.source(dataclasses.replace(
        given, stream=stream, rounds_per_task=2))
  assert source(nothing_new).options['rounds_per_task'] == 2
  with pytest.raises(ValueError, match='labeled rows of task 1 of the stream'):
    source(nothing_new._replace(num_labeled=clients.num_labeled // 2))


def test_a_federation_keeps_its_rows(straight):
  given = straight.federations[0]
  run = fedjax_ssl.fit(METHOD, given, rounds=1, progress=False,
                       setting='digits_dirdir', **SMALL)
  jax.tree.map(np.testing.assert_array_equal, run.federations[0].clients,
               given.clients)
  assert run.metrics['accuracy'][0] == straight.metrics['accuracy'][0]
  with pytest.raises(ValueError, match='^clients=5: the given .* 6'):
    fedjax_ssl.fit(METHOD, given, clients=5)
  with pytest.raises(ValueError, match='alpha=0.1: rows have their owners alr'):
    fedjax_ssl.fit(METHOD, given, alpha=0.1)
  with pytest.raises(ValueError, match='data_dir=x: the examples are given'):
    fedjax_ssl.fit(METHOD, given, data_dir='x')


def test_files_are_imported_first(tmp_path):
  """And again where the run goes on: its method is known by no other way."""
  file = tmp_path / 'mine.py'
  file.write_text(textwrap.dedent("""
      from fedjax_ssl import methods
      @methods.register('of_a_file')
      def of_a_file(task, *, mu: float = 0.1):
        return methods.METHODS['fedprox'](task, mu=mu)
      """))
  folder = tmp_path / 'run'
  run = fedjax_ssl.fit('of_a_file', rounds=1, progress=False, workdir=folder,
                       imports=str(file), **SMALL)
  assert run.options.imports == (str(file),)
  fedjax_ssl.methods.METHODS.pop('of_a_file')
  again = fedjax_ssl.fit('of_a_file', rounds=1, progress=False, workdir=folder)
  np.testing.assert_array_equal(again.metrics['accuracy'],
                                run.metrics['accuracy'])


def test_arrays_functions_and_seeds():
  digits = data.load('digits')
  def mine(task, *, mu: float = 0.1):
    return fedjax_ssl.methods.METHODS['fedprox'](task, mu=mu)
  run = fedjax_ssl.fit(
      functools.partial(mine, mu=0.2), (*digits.train, *digits.test), rounds=1,
      seeds=[3, 4], progress=False, **SMALL)
  assert run.name == 'mine(mu=0.2)' and [*run.states] == [3, 4]
  assert run.metrics['seed'].tolist() == [3, 4]
  # What `fedjax-ssl train own_data` has where nobody says otherwise.
  own = settings.defaults_of('own_data')
  for name in ('alpha', 'labels_per_class', 'learning_rate', 'momentum',
               'labeled_batch'):
    assert getattr(run.options, name) == own[name]
  known, _ = data.class_counts(run.federations[3])
  assert known.sum(0).tolist() == [own['labels_per_class']] * 10
  assert run.predict(digits.test.inputs[:2], seed=4).shape == (2, 10)


def test_arrays_may_name_classes_and_clients():
  """As the keys of a file: clients keep their rows, predictions have names."""
  rng = np.random.default_rng(0)
  sizes = {'train': 90, 'test': 30}
  owner = np.array(['ann', 'bob', 'cid'])[rng.integers(3, size=90)]
  given = {'class_names': np.array(['no', 'yes']), 'client_train': owner}
  for part, size in sizes.items():
    given[f'x_{part}'] = rng.integers(256, size=(size, 8, 8), dtype=np.uint8)
    given[f'y_{part}'] = np.arange(size) % 2
  run = fedjax_ssl.fit('fedavg', given, rounds=1, model='linear', cohort_size=2,
                       local_steps=1, labels_per_class=9, progress=False)
  assert run.class_names == ('no', 'yes')
  federation, = run.federations.values()
  held = np.sum(data.class_counts(federation), axis=0)
  dealt = np.unique(owner, return_counts=True)[1]
  # But for those held out for validation.
  assert len(held) == 3 and (held.sum(1) <= dealt).all()
  assert held.sum() == 90 - len(federation.validation.labels)
  # As a column of pandas has it.
  again = inputs.source({**given, 'client_train': owner.astype(object),
                         'class_names': given['class_names'].astype(object)})
  assert again.dataset is not None
  assert again.dataset.client_names == ('ann', 'bob', 'cid')
  assert again.dataset.class_names == ('no', 'yes')
  with pytest.raises(ValueError, match='client_train has 89 entries'):
    fedjax_ssl.fit('fedavg', {**given, 'client_train': owner[1:]})


def test_rounds_at_a_rate_of_zero(capsys):
  begin = functools.partial(
      fedjax_ssl.fit, 'fedavg', 'digits', model='linear', clients=2, seed=0,
      lr_schedule='cosine', local_steps=1)
  # Asked for at the start, they are said at both ends.
  begin(rounds=2, schedule_rounds=1)
  lines = capsys.readouterr().err.splitlines()
  said = [i for i, line in enumerate(lines) if 'learns nothing after' in line]
  measured = [i for i, line in enumerate(lines) if 'round 2' in line]
  assert len(said) == 2 and said[0] < measured[-1] < said[1]
  # Added alone, they are refused, and the run is what it was; numbers of
  # NumPy's are numbers.
  run = begin(rounds=1, progress=False)
  with pytest.raises(ValueError, match=r'num_rounds=3: fedavg learns nothing '
                     'after round 1, where its schedule, cosine, has fallen'):
    run.resume(rounds=np.int64(3))  # type: ignore[arg-type]
  assert run.resume(rounds=1).options.num_rounds == run.round == 1


def median(stacked, weights):
  raise NotImplementedError


@pytest.mark.parametrize('options, error, words', [
    ({'label_per_class': 5}, TypeError, "'label_per_class'. .*'labels_per_cl"),
    ({'lr': .1}, TypeError, "'lr'. Did you mean 'learning_rate'"),
    ({'eval_only': True}, TypeError, 'It is of the programs'),
    ({'method': 'fixmatch', 'threshold': .8}, TypeError,
     r"but a knob: give method='fixmatch\(threshold=0.8\)'"),
    ({'method': 'fixmatch(threshold=.8)', 'weighting': 'uniform'}, TypeError,
     r'''method="fixmatch\(threshold=0.8, weighting='uniform'\)"'''),
    ({'method': 'fixmatch', 'task': 3}, TypeError, "option 'task'. Did you"),
    ({'rounds': 1, 'num_rounds': 2}, TypeError, 'num_rounds is given twice'),
    ({'clients': 0}, ValueError, '^clients=0: must be'),
    ({'rounds': 0}, ValueError, '^rounds=0: must be'),
    ({'rounds': 2.5}, ValueError, '^rounds=2.5: must be a whole number'),
    ({'rounds': 2.0}, ValueError, '^rounds=2.0: must be a whole number'),
    ({'num_rounds': True}, ValueError, '^num_rounds=True: must be'),
    ({'seeds': 3}, ValueError, 'seeds=3: must be several'),
    ({'seeds': '3,3'}, ValueError, 'seeds=3,3: must be different'),
    ({'seeds': [0.9, 1.2]}, ValueError, 'seeds=0.9,1.2: must be different'),
    ({'seeds': [None, 1]}, ValueError, 'seeds=None,1: must be different'),
    ({'dataset': ([[1, 2], [3]], [0, 1], IMAGES, [0, 1])}, ValueError,
     'x_train is no array'),
    ({'dataset': (IMAGES, [0, 1, 1, 0], np.ma.masked_equal(IMAGES, 0),
                  [0, 1, 1, 0])}, ValueError, 'x_test has masked entries'),
    ({'setting': 'digits'}, ValueError, "setting=digits: .* 'digits_dirdir'"),
    ({'setting': []}, ValueError, r'setting=\[\]: unknown. Allowed'),
    ({'progress': 'no'}, ValueError, "progress='no': must be True or False"),
    ({'dataset': 3}, TypeError, 'dataset must be a name, .* not int'),
    ({'dataset': {'x_train': 1}}, TypeError, 'y_train is missing'),
    ({'dataset': ([], [])}, TypeError, 'not a tuple of 2'),
    ({'dataset': ([1], [0], [1], [0])}, ValueError, 'images have shape'),
    ({'dataset': (IMAGES, [0, -2, 1, 0], IMAGES, [0, 1, 1, 0])}, ValueError,
     'train labels run from -2 to 1; .* and -1 for a row without a label'),
    ({'dataset': (['a text', 'b'], [0, 1], IMAGES, [0, 1, 1, 0])}, ValueError,
     'train has texts, and test none'),
    ({'setting': 'cifar_iid', 'alpha': 0.1}, ValueError,
     'alpha=0.1: only cifar_dirdir, .* read it'),
    ({'method': 3}, TypeError, "method must be a text, such as 'fixmatch'"),
    ({'method': 'fixmatch(threshold=high)'}, ValueError, 'threshold=high: all'),
    ({'method': 'fixmach'}, ValueError, "fixmach.*'fixmatch'"),
    ({'method': lambda task: None}, TypeError,
     r'a function with a name, \(task, .*, not a lambda[.]$'),
    ({'aggregator': lambda stacked, weights: stacked}, TypeError,
     r"aggregator must be a text, such as 'median', .*, not a lambda[.]$"),
    ({'aggregator': 3}, ValueError, 'aggregator=3: must be of type str'),
    ({'aggregator': median}, ValueError,
     'aggregator=median: a rule of the library has this name'),
    ({'dataset': {'x_train': IMAGES, 'y_train': [0, 1, 1, 0],
                  'x_test': IMAGES, 'y_test': [0, 1, 1, 0],
                  'y_val': [0]}}, TypeError, 'x_val is missing'),
    ({'clients': '4'}, ValueError, '^clients=4: must be'),
    ({'report': True}, TypeError, 'It is of the programs'),
    ({'imports': '/nowhere.py'}, ValueError, 'imports=/nowhere.py: '),
    ({'dataset': (IMAGES, [0, 1, 1, 0], IMAGES, [0, 1, 1, 0]),
      'split': '80/20'}, ValueError, 'split=80/20: the examples are given'),
    ({'learning_rate': np.ones(2)}, ValueError, 'learning_rate='),
    ({'workdir': 3}, ValueError, 'workdir=3: must be the path of a folder'),
    ({'workdir': ''}, ValueError, 'workdir')])
def test_what_is_refused(options, error, words):
  with pytest.raises(error, match=words) as info:
    fedjax_ssl.fit(**{'dataset': 'digits', 'model': 'linear', **options})
  assert '\n' not in str(info.value)


TWICE = """
import sys
import numpy as np
import fedjax_ssl

rng = np.random.default_rng(0)
x = rng.integers(0, 255, (160, 8, 8, 1)).astype(np.uint8)
y = (np.arange(160) % 2).astype(np.int32)
run = fedjax_ssl.fit(
    'fedavg(keep_local=True)', (x[:140], y[:140], x[140:], y[140:]),
    workdir=sys.argv[1], setting='cifar_iid', clients=4, cohort_size=2,
    rounds=8, local_steps=1, labels_per_class=20, validation_fraction=0.0,
    weak='none', strong='none', model='linear', schedule_rounds=20,
    unlabeled_batch=10, progress=False, num_devices=2)
print('reached', run.round)
"""


@pytest.mark.thorough
def test_local_models_are_evaluated_by_a_program_from_the_cache(
    tmp_path, run_python):
  """In one program with the global model's, its devices waited for ever."""
  for i in range(3):
    assert 'reached 8' in run_python(
        TWICE, str(tmp_path / str(i)), devices=2, env={'XLA_FLAGS': ''})
