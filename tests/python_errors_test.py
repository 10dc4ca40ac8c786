"""What Python users get wrong, and what they are told."""
from __future__ import annotations

import dataclasses
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl import losses
from fedjax_ssl.core import checks, run_files
from fedjax_ssl.core.local_training import Aux
from fedjax_ssl.data.datasets import files
from fedjax_ssl.methods.parts import averaging, network
from fedjax_ssl.running import runs, settings
from fedjax_ssl.training import own_code, processes, runner, workdir
from tests import toy

LOGITS, MASK = jnp.eye(4) * 9, jnp.ones(4)


def _spec(**changes: Any) -> Any:
  return fedjax_ssl.TaskSpec(**{
      'num_classes': toy.NUM_CLASSES, 'input_shape': (toy.SIDE, toy.SIDE, 1),
      'model': 'linear', 'cohort_size': 4, **changes})


def _method(text='fedavg', **changes: Any) -> Any:
  return fedjax_ssl.make_method(text, fedjax_ssl.make_task(_spec(**changes)))


def _two_colors(federation):
  parts = {name: getattr(federation, name)
           for name in ('train', 'validation', 'test')}
  return dataclasses.replace(federation, **{
      name: part._replace(inputs=jnp.concatenate([part.inputs] * 3, -1))
      for name, part in parts.items()})


def _floats(federation):
  return dataclasses.replace(federation, train=federation.train._replace(
      inputs=federation.train.inputs / 255))


@pytest.mark.parametrize('changes, broken, words', [
    ({'num_classes': 2}, None, 'num_classes=2, but the federation 3'),
    ({'num_classes': 5}, None, 'num_classes=5, but the federation 3'),
    ({'input_shape': (9, 9, 1)}, None, r'input_shape=\(9, 9, 1\).*\(8, 8, 1\)'),
    ({}, _two_colors, r'input_shape=\(8, 8, 1\).*\(8, 8, 3\)'),
    ({}, _floats, 'float32.*uint8, 0 to 255')])
def test_a_federation_must_fit_the_task(changes, broken, words):
  federation, _ = toy.federation()
  federation = broken(federation) if broken else federation
  method = _method(**changes)
  with pytest.raises(ValueError, match=words):
    fedjax_ssl.train(method, [federation], num_rounds=1)
  # Of a method that was made without the registry, too.
  own = fedjax_ssl.methods.fedavg.fedavg(fedjax_ssl.make_task(_spec(**changes)))
  with pytest.raises(ValueError, match=words):
    fedjax_ssl.train(own, [federation], num_rounds=1)


def test_arguments_of_train():
  federation, _ = toy.federation()
  method, train = _method(), fedjax_ssl.train
  wrong: Any
  for wrong, words in (
      ((method, []), 'takes a Federation'), ((method, 3), 'takes a Federation'),
      ((method, [3]), 'list of them, one for each seed'),
      (('fixmatch', [federation]), r"make_method\('fixmatch', task\), not str"),
      ((federation, [method]), 'not Federation')):
    with pytest.raises(TypeError, match=words) as error:
      train(*wrong, num_rounds=1)
    assert '\n' not in str(error.value)
  for wrong in (-1, 2.5, '3', True):
    with pytest.raises(ValueError, match='num_rounds must be a whole number'):
      train(method, [federation], num_rounds=wrong)


def _with(part: str, **changes: Any) -> Any:
  federation, _ = toy.federation()
  return dataclasses.replace(federation, **{
      part: getattr(federation, part)._replace(**changes)})


@pytest.mark.parametrize('part, changes, words', [
    ('train', {'labels': jnp.zeros(7, int)}, 'train has 53 inputs and 7 lab'),
    ('train', {'labels': jnp.full(53, 3)}, 'label 3 is not below num_cl'),
    ('train', {'labels': jnp.full(53, -1)}, 'train has label -1; .* 0 to 2'),
    ('test', {'labels': jnp.zeros(20)}, r'test has labels float32\[20\]'),
    ('test', {'labels': jnp.full(20, -1)}, 'test has label -1'),
    ('test', {'inputs': jnp.zeros((20, 9, 9, 1))}, r'test has .*\(9, 9, 1\)'),
    ('test', {'inputs': jnp.zeros((0, 8, 8, 1)), 'labels': jnp.zeros(0, int)},
     'test has no examples'),
    ('clients', {'labeled': jnp.full((6, 7), 53)}, 'labeled names row 53'),
    ('clients', {'unlabeled': jnp.full((6, 12), -1)}, 'unlabeled names row -1'),
    ('clients', {'labeled': jnp.zeros((6, 7))}, 'clients.labeled is float32'),
    ('clients', {'num_labeled': jnp.full(6, -1)}, 'num_labeled has -1'),
    ('clients', {'unlabeled': jnp.zeros((5, 12), int)}, 'clients, 5 and 6'),
    ('clients', {'unlabeled': jnp.zeros((6, 3), int)}, 'shape .6, 3.')])
def test_the_parts_of_a_federation_must_fit_each_other(part, changes, words):
  with pytest.raises(ValueError, match=words) as error:
    fedjax_ssl.train(_method(), _with(part, **changes), num_rounds=1)
  assert '\n' not in str(error.value)


def test_clients_may_have_tables_without_a_column():
  """As where one makes the tables by hand, and nobody has such rows."""
  federation = _with('clients', unlabeled=np.zeros((6, 0), np.int32),
                     num_unlabeled=np.zeros(6, np.int32))
  padded = _with('clients', num_unlabeled=np.zeros(6, np.int32))
  found, same = (fedjax_ssl.train(_method('semifl'), one, num_rounds=1)
                 for one in (federation, padded))
  chex.assert_trees_all_equal(found.states, same.states)


def test_labels_that_nobody_holds_may_be_unknown():
  federation, hidden = toy.federation()
  labels = jnp.where(hidden, -1, federation.train.labels)
  fedjax_ssl.train(_method(), _with('train', labels=labels), num_rounds=0)


def test_no_labels_are_called_so():
  """NumPy makes floats of no numbers, which nobody gave."""
  with pytest.raises(ValueError, match='test labels are empty'):
    files.class_labels('test', np.asarray([]))


def test_a_link_to_nothing_is_no_misspelt_name(tmp_path):
  (tmp_path / 'dead.csv').symlink_to('nowhere')
  with pytest.raises(ValueError, match='dead.csv is a link to nowhere, which'):
    fedjax_ssl.data.load('dead', tmp_path)
  wrong: Any
  for wrong in (None, ['digits'], 3):
    with pytest.raises(ValueError, match="dataset=.*: must be a name, as 'dig"):
      fedjax_ssl.data.load(wrong, tmp_path)


@pytest.mark.parametrize('options, words', [
    ({'widht': 4}, r"Did you mean the knob model='cnn\(width=4\)'"),
    ({'notemper': True}, "has no option 'notemper'"),
    ({'nokeep_local': True}, r"give method='fixmatch\(keep_local=False\)'"),
    ({'temperature': .5}, "a knob of .*, and method='fixmatch' has none"),
    ({'method': 'fedmatch', 'aggregation': 'mean'},
     r"give method=\"fedmatch\(aggregation='mean'\)\""),
    ({'method': 'fixmatch(', 'threshold': .8}, "has no option 'threshold'"),
    ({'method': None, 'setting': 'cifar_pairs', 'temperature': .5},
     "has no option 'temperature'")])
def test_an_unknown_option_of_fit_may_be_a_knob(options, words):
  options = {'method': 'fixmatch', 'model': 'cnn', **options}
  with pytest.raises(TypeError, match=words):
    fedjax_ssl.fit(dataset='digits', **options)


def test_a_function_is_not_said_to_have_no_such_knob():
  def mine(task, *, threshold: float = .9):
    raise NotImplementedError

  with pytest.raises(TypeError, match="^fit has no option 'threshold'"):
    fedjax_ssl.fit(mine, 'digits', threshold=.8)


def test_arguments_of_make():
  task, make = fedjax_ssl.make_task(_spec()), fedjax_ssl.make_method
  wrong: Any
  for wrong in ((task, 'fixmatch'), ('fixmatch', _spec()), ('fixmatch', None)):
    with pytest.raises(TypeError, match=r"make_method\('fixmatch', make_task"):
      make(*wrong)
  wrong = 'fixmatch'
  with pytest.raises(TypeError, match="takes a TaskSpec, not 'fixmatch'"):
    fedjax_ssl.make_task(wrong)


@pytest.mark.parametrize('changes, words', [
    ({'num_classes': 1}, 'num_classes=1: must be .* at least 2'),
    ({'num_classes': 2.5}, 'num_classes=2.5: must be a whole number'),
    ({'num_classes': '3'}, 'num_classes=3: must be a number, no text'),
    ({'input_shape': [8, 8, 1]}, r'input_shape=\[8, 8, 1\]: must be'),
    ({'input_shape': (8, 8, 1, 1)}, 'input_shape=.*: must be'),
    ({'input_shape': (8, 0, 1)}, 'input_shape=.*: must be'),
    ({'input_shape': 64}, 'input_shape=.*: must be the tuple'),
    ({'std': (0.,)}, r'std=\(0.0,\): must be numbers above 0 and fin'),
    ({'std': (1., -1.)}, r'std=.*: must be numbers above 0'),
    ({'mean': (np.nan,)}, r'mean=\(nan,\): must be numbers finite'),
    ({'mean': ('dark',)}, r'mean=.*: must be numbers finite'),
    ({'mean': ((1., 2.), (3.,))}, r'mean=.*: must be numbers finite'),
    ({'std': (1e-50,)}, r'std=.*: must be numbers above 0'),
    ({'std': (10**400,)}, r'std=.*: must be numbers above 0'),
    ({'mean': '0.5'}, 'mean=0.5: must be numbers finite'),
    ({'unlabeled_batch': 10**9}, 'unlabeled_batch=.* at most 65536'),
    ({'labeled_batch': 10**9}, 'labeled_batch=.* at most 65536'),
    ({'local_epochs': 10**9}, 'local_epochs=.* at most 10000'),
    ({'model': None}, 'model=None: must be'),
    ({'schedule_rounds': 0}, 'schedule_rounds=0: must be')])
def test_fields_of_a_spec(changes, words):
  with pytest.raises((ValueError, TypeError), match=words) as error:
    fedjax_ssl.make_task(_spec(**changes))
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('changes', [
    {'method': "uda(tsa='exp')"}, {'method': "mixmatch(profile='original')"},
    {'method': "pseudo_label(form='hard')"}, {'method': 'rscfed'},
    {'method': 'fedirm'}, {'method': 'fedtrinet'}, {'method': 'fedlabel'},
    {'method': 'fedssl(ramp=0.5)'}, {'method': "fedssl(dp_scope='all')"},
    {'method': 'fed_consist(warmup=0.1)'}, {'lr_schedule': 'cosine'},
    {'lr_schedule': 'linear'}, {'lr_schedule': 'warmup_cosine'},
    {'lr_schedule': 'fixmatch_cosine'}])
def test_what_spans_the_run_asks_for_its_length(changes):
  """A length nobody gave would be anybody's guess."""
  text = changes.get('method', 'fedavg')
  federation, _ = toy.federation()
  def trace(method):
    state = runner.state_shape(method, federation)
    jax.eval_shape(method.round, state, federation, jnp.int32(0),
                   jax.random.key(0))
  method = _method(text, **changes)  # As `train` will be asked for one.
  with pytest.raises(ValueError, match=r'TaskSpec\(schedule_rounds=R\)'):
    trace(method)
  if 'lr_schedule' in changes:
    trace(method.spanning(7))
  else:
    assert method.spanning(7).spanning is None


@pytest.mark.parametrize('text', [
    'fixmatch', 'flexmatch', 'mixmatch', 'pseudo_label', 'fedssl(gan_width=4)',
    "uda(tsa='none')", 'fedirm(ramp=0.0, warmup=0.0)'])
def test_others_train_without(text):
  federation, _ = toy.federation()
  method = _method(text, strong='none', weak='none')
  state = runner.state_shape(method, federation)
  jax.eval_shape(method.round, state, federation, jnp.int32(0),
                 jax.random.key(0))


def test_notes_of_a_spec_name_every_choice():
  spec = _spec(method='fixmatch(threshold=0)', strong='ra_mc(cutout=0)',
               weak='flip_crop(pad=0)', lr_schedule='cosine(final=0.5)')
  assert fedjax_ssl.task.notes(spec) == [
      'fixmatch(threshold=0): every unlabeled row counts',
      'flip_crop(pad=0): images are not moved',
      'ra_mc(cutout=0): nothing is cut out']
  assert fedjax_ssl.task.notes(_spec()) == []


def test_a_square_larger_than_the_image_names_its_view():
  federation, _ = toy.federation()
  for text in ('ra_mc(cutout=999)', 'ra_mc(cutout=9)'):
    method = _method('fixmatch', strong=text)
    with pytest.raises(ValueError, match=r'strong=ra_mc\(cutout=\d+\): '
                       'cutout=.*at most 8'):
      fedjax_ssl.train(method, [federation], num_rounds=1)
  jax.eval_shape(_method('fixmatch', strong='ra_mc(cutout=8)').round,
                 runner.state_shape(method, federation), federation,
                 jnp.int32(0), jax.random.key(0))


@pytest.mark.parametrize('options, words', [
    ({'batch_size': 8}, "mean 'labeled_batch' or 'unlabeled_batch'?"),
    ({'num_epochs': 2}, "mean 'local_epochs'?"),
    ({'clients_per_round': 3}, "mean 'cohort_size'?"),
    ({'cohort': 3}, "mean 'cohort_size'?"),
    ({'lambda_u': 3}, "but a knob: give method='fixmatch(unlabeled_weight=3)'"),
    ({'clients': np.array(['cy', 'bob'])}, "'client_train': clients"),
    ({'dataset': {'x_train': (), 'y_train': (), 'x_test': (), 'y_test': (),
                  'client': ()}}, 'client_train')])
def test_what_fit_is_told_in_other_words(options, words):
  with pytest.raises(TypeError) as error:
    fedjax_ssl.fit('fixmatch', **{'dataset': 'digits', **options})
  assert words in str(error.value)


def test_of_a_long_value_the_beginning_is_shown():
  with pytest.raises(fedjax_ssl.config.FieldError) as error:
    fedjax_ssl.fit('fixmatch', 'digits', alpha=np.arange(1000.))
  assert str(error.value).startswith('alpha=[0.0, 1.0, 2.0, ')
  assert len(str(error.value)) < 200


@pytest.mark.parametrize('call', [
    lambda: losses.cross_entropy(LOGITS, np.eye(4, dtype=int), MASK),
    lambda: losses.cross_entropy(LOGITS, jnp.ones((4, 1)), MASK),
    lambda: losses.cross_entropy(LOGITS, jnp.ones(4), MASK),
    lambda: losses.cross_entropy(LOGITS, jnp.zeros(3, int), MASK),
    lambda: losses.cross_entropy(LOGITS[0], jnp.zeros(4, int), MASK),
    lambda: losses.fixmatch(LOGITS, LOGITS[:, :3], MASK),
    lambda: losses.fixmatch(LOGITS, LOGITS[:3], MASK),
    lambda: losses.fixmatch(LOGITS[:, :1], LOGITS, MASK),
    lambda: losses.uda(LOGITS, LOGITS[:1], MASK),
    lambda: losses.uda(LOGITS, LOGITS[:, :1], MASK),
    lambda: losses.kl_rows(LOGITS, LOGITS[:, :1]),
    lambda: losses.consistency(LOGITS, MASK[:, None], MASK),
    lambda: losses.squared_error(LOGITS, np.eye(4, dtype=int), MASK),
    lambda: losses.accuracy(LOGITS, np.eye(4, dtype=int), MASK),
    lambda: losses.tsa_cross_entropy(LOGITS, np.eye(4, dtype=int), MASK,
                                     threshold=1.0),
    lambda: losses.inter_client_kl(LOGITS, LOGITS, MASK),
    lambda: losses.relation_matrix(LOGITS, np.eye(4, dtype=int), MASK),
    lambda: losses.relation_matching(LOGITS, LOGITS[:1])])
def test_losses_refuse_shapes_that_would_broadcast(call):
  with pytest.raises(ValueError, match='shape') as error:
    call()
  assert '\n' not in str(error.value)


def test_one_hot_floats_are_the_classes():
  classes, _ = losses.cross_entropy(LOGITS, jnp.arange(4), MASK)
  found, _ = losses.cross_entropy(LOGITS, np.eye(4), MASK)
  np.testing.assert_allclose(found, classes, rtol=1e-6)


def test_a_methods_own_knob_may_be_called_weak(tmp_path):
  """Of a strong view it names a weak one, elsewhere it is a word."""
  (tmp_path / 'mine.py').write_text(
      'from fedjax_ssl.methods.fedavg import fedavg\n'
      "def mine(task, *, weak: str = 'gentle'):\n  return fedavg(task)\n")
  spec = _spec(method=f'{tmp_path}/mine.py:mine',
               strong="ra_mc(weak='flip_shift')")
  found = fedjax_ssl.task.resolved(spec)
  assert found['method']['knobs'] == {'weak': 'gentle'}
  assert found['strong']['knobs']['weak'] == 'flip_shift'


FLAG = re.compile(r'--[a-z]')
SMALL: dict[str, Any] = {'model': 'linear', 'clients': 4, 'cohort_size': 2,
                         'rounds': 1, 'local_steps': 1}
# The clients of its rows are known.
OWNED = {'x_train': np.arange(60, dtype=np.uint8).repeat(64).reshape(60, 8, 8),
         'y_train': np.arange(60) % 3, 'x_test': np.zeros((6, 8, 8), np.uint8),
         'y_test': np.arange(6) % 3, 'client_train': np.arange(60) // 20}


def test_notes_name_options_and_no_flags(capsys):
  fedjax_ssl.fit('fedavg', 'digits', setting='own_data', **SMALL,
                 local_epochs=3, pictures=True, progress=False)
  pictures, dataset, epochs = capsys.readouterr().err.splitlines()
  assert pictures.startswith('Note: pictures=True does nothing: fedavg gener')
  assert dataset.startswith('Note: dataset=digits comes with')
  assert epochs.startswith('Note: local_epochs=3 does not say')
  assert not FLAG.search(pictures + dataset + epochs)


def test_notes_of_a_program_name_flags(capsys):
  with checks.marking('--'):
    processes.note('does nothing.', imports='a.py', bounds=True)
  processes.note('does nothing.', imports='a.py', bounds=True)
  processes.note('It does nothing.')
  assert capsys.readouterr().err == (
      'Note: --import=a.py and --bounds does nothing.\n'
      'Note: imports=a.py and bounds=True does nothing.\n'
      'Note: It does nothing.\n')


def _changed(folder):
  own_code.begun(folder, {'mine.py': '1'}, {'mine.py': '2'}, {})


def _new(folder):
  own_code.begun(folder, {'mine.py': '1'}, {}, {})


def _other(folder, name='alpha'):
  (folder / run_files.FLAGFILE).touch()
  for value in (2, 0):
    with workdir.open_workdir(folder, {'num_rounds': 3, name: value}):
      pass


@pytest.mark.parametrize('call, flags', [
    (_changed, ['workdir']), (_new, ['workdir']),
    (_other, ['flagfile', 'workdir', 'workdir']),
    (lambda folder: _other(folder, 'num_rounds'), ['num_rounds', 'workdir']),
    (lambda folder: fedjax_ssl.data.load('pets'), ['data_dir'])])
def test_what_is_advised_is_an_option_in_python_and_a_flag_in_a_program(
    monkeypatch, tmp_path, call, flags):
  monkeypatch.delenv('FEDJAX_SSL_DATA', raising=False)
  with pytest.raises(ValueError) as error:
    call(tmp_path)
  assert not FLAG.search(str(error.value)) and flags[-1] in str(error.value)
  with checks.marking('--'), pytest.raises(ValueError) as error:
    call(tmp_path)
  assert re.findall(r'--([a-z_]+)', str(error.value)) == flags


def test_notes_of_a_program_advise_flags(capsys):
  own = settings.SETTINGS['own_data']
  options = fedjax_ssl.config.resolve({
      **settings.defaults_of('own_data'), 'local_steps': 2, 'local_epochs': 3})
  with checks.marking('--'):
    runs.note_unread(own, options, fedjax_ssl.data.load('digits'))
  dataset, epochs = capsys.readouterr().err.splitlines()
  assert dataset.endswith(
      '; --dataset=NAME and --data_dir=DIR train on your own data.')
  assert 'each takes --local_steps=2.' in epochs


def unviewed(task):
  """A method that makes no view of its rows."""
  def loss_fn(model, given, batch, key):
    rows = batch.labeled
    (logits,), stats = network.forward(task, model, rows, key=key)
    loss, _ = losses.cross_entropy(logits, rows.labels, rows.mask)
    return loss, Aux(stats, {})
  return averaging.averaging(task, loss_fn, streams='labeled')


@pytest.mark.parametrize('method, options, words', [
    ('dpsgd', {'bounds': True, 'max_update_norm': 1e-6},
     ['(bounds=False)', 'beyond max_update_norm']),
    (unviewed, {}, ['weak and strong do nothing'])])
def test_what_a_run_says_names_options_and_no_flags(
    capsys, method, options, words):
  fedjax_ssl.fit(method, 'digits', **SMALL, **options)
  said = capsys.readouterr().err
  assert all(word in said for word in words)
  assert not FLAG.search(said)


@pytest.mark.parametrize('dataset, options, words', [
    ('digits', {'clients': 20, 'alpha': .001}, 'raise alpha, or lower num_cl'),
    ('digits', {'clients': 200}, 'or a lower min_size'),
    ('digits', {'labels_per_class': None, 'labeled_fraction': 1.0},
     'labels=all in its place, or min_size=0'),
    (OWNED, {'alpha': .1}, 'or give partition=setting'),
    (OWNED, {'clients': 5}, 'or give partition=setting')])
def test_refusals_of_fit_name_options_and_no_flags(
    capsys, dataset, options, words):
  small = {k: v for k, v in SMALL.items() if k != 'clients' or (
      dataset == 'digits')}
  with pytest.raises(fedjax_ssl.config.FieldError) as error:
    fedjax_ssl.fit('fedavg', dataset, **{**small, **options})
  assert words in str(error.value)
  assert not FLAG.search(str(error.value) + capsys.readouterr().err)
