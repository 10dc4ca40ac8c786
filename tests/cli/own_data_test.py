"""One's own data: what the data decide, and the setting for them."""
from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from fedjax_ssl import config, data, methods, task
from fedjax_ssl.running import data_defaults as defaults
from fedjax_ssl.running import dealing, partitions, runs, settings
from tests.cli import launcher

LABELS = np.arange(400) % 4
OWNER = (np.arange(400) // 100).astype(np.int32)


def toy(shape=(28, 28, 1), owner=None, kind=np.uint8):
  def part(rows):
    return data.datasets.Examples(np.zeros((rows, *shape), kind),
                                  np.arange(rows) % 2)
  names = None if owner is None else tuple(map(str, range(max(owner) + 1)))
  return data.Dataset('toy', part(6), part(2), 2, (0.,), (1.,), True,
                      owner=owner, client_names=names)


def auto(**change) -> config.Config:
  return config.resolve({**settings.defaults_of('own_data'), **change})


@pytest.mark.parametrize('shape, model, norm', [
    ((3, 9, 1), 'linear', 'auto'),
    ((8, 8, 1), 'cnn', 'auto'),
    ((28, 28, 1), 'cnn', 'auto'),
    ((32, 32, 3), 'cnn', 'auto'),
    ((63, 80, 3), 'cnn', 'auto'),
    ((64, 64, 3), 'cnn(stride=2)', 'auto'),
    ((224, 224, 3), 'cnn(stride=4)', 'auto')])
def test_a_network_for_the_size(shape, model, norm):
  found = defaults.decided(auto(), (), toy(shape))
  assert (found.model, found.norm) == (model, norm)
  cutout = min(shape[:2]) // 4
  assert (found.weak, found.strong) == (
      'flip_crop', f'ra_mc(cutout={cutout})')
  kept = defaults.decided(auto(model='resnet18', weak='none'), (), toy(shape))
  assert (kept.model, kept.norm, kept.weak) == ('resnet18', 'auto', 'none')


@pytest.mark.parametrize('shape', [(1, 12, 1), (12, 1, 1)])
def test_rows_of_a_table_are_no_images(shape):
  found = defaults.decided(auto(), (), toy(shape))
  assert (found.model, found.weak, found.strong) == ('mlp', 'none', 'none')


def test_texts_have_views_and_a_network_of_their_own():
  found = defaults.decided(auto(), (), toy((40,), kind=np.int32))
  assert (found.model, found.norm, found.weak, found.strong) == (
      'text_mean', 'auto', 'none', 'token_dropout')


def test_clients_that_the_data_name():
  named = toy(owner=np.array([0, 1, 2, 0, 1, 2], np.int32))
  found = defaults.decided(auto(), (), named)
  assert (found.partition, found.num_clients, found.cohort_size) == (
      'natural', 3, 3)
  assert defaults.decided(auto(), (), toy()).partition == 'setting'
  # Fewer than usually take part.
  assert defaults.decided(
      auto(num_clients=1), ['num_clients'], toy()).cohort_size == 1
  with pytest.raises(config.FieldError, match='at most'):
    defaults.decided(auto(num_clients=1), ['num_clients', 'cohort_size'], toy())
  dealt = defaults.decided(auto(partition='setting', num_clients=8), (), named)
  assert (dealt.partition, dealt.num_clients) == ('setting', 8)
  assert defaults.decided(auto(num_clients=3), ['num_clients'], named) == found
  with pytest.raises(config.FieldError, match='the data name 3 clients'):
    defaults.decided(auto(num_clients=20), ['num_clients'], named)
  with pytest.raises(config.FieldError, match='at most all clients'):
    defaults.decided(auto(), ['cohort_size'], named)
  with pytest.raises(config.FieldError, match='client_train'):
    defaults.decided(auto(partition='natural'), (), toy())


def test_a_setting_deals_no_row_that_is_held_out():
  def everything(rng, labels, pool, options):
    del rng, pool, options
    return np.zeros(labels.size, np.int32), np.full(labels.size, -1, np.int32)
  own = settings.Setting('mine', 'Mine.', '', everything, {})
  with pytest.raises(ValueError, match='setting=mine: .*it deals 2 rows for '
                     'which pool is False, first row 1: .*where.pool, owner'):
    partitions._owners(
        own, everything, np.random.default_rng(0), np.arange(5) % 2,
        np.array([1, 0, 1, 0, 1], bool), config.Config(num_clients=2))


def test_a_cohort_that_nobody_gave_is_no_larger_than_the_federation():
  asked = {'num_clients': 4, 'cohort_size': 10}
  assert config.resolve(asked, ['num_clients']).cohort_size == 4
  assert config.resolve({'num_clients': 40}, ['num_clients']).cohort_size == (
      config.Config.cohort_size)
  with pytest.raises(config.FieldError, match='at most all clients'):
    config.resolve(asked, ['num_clients', 'cohort_size'])


def test_a_settings_cohort_waits_for_the_number_that_the_data_name():
  many = config.Config.num_clients + 3
  asked = config.resolve({'partition': 'natural', 'cohort_size': many - 1})
  for clients, cohort in ((many, many - 1), (3, 3)):
    named = toy(owner=np.arange(many) % clients)
    assert defaults.decided(asked, (), named).cohort_size == cohort


def deal(**change):
  options = config.Config(**{
      'num_clients': 4, 'num_labeled_clients': -1, 'labels_per_class': None,
      'labeled_fraction': 0.1, 'labels_at': 'clients', 'rounds_per_task': 0,
      'min_size': None, 'alpha': 0.3, **change})
  pool = np.arange(400) >= 40
  return pool, dealing.natural(OWNER)(
      np.random.default_rng(0), LABELS, pool, options)


@pytest.mark.parametrize('change, labeled', [
    ({}, [6, 10, 10, 10]),
    ({'num_labeled_clients': 2, 'labeled_fraction': None}, [60, 100, 0, 0]),
    ({'labels_at': 'server'}, [0, 0, 0, 0, 36])])
def test_rows_stay_with_the_clients_that_the_data_name(change, labeled):
  pool, (known, unknown) = deal(**change)
  assert np.bincount(known[known >= 0],
                     minlength=len(labeled)).tolist() == labeled
  owner = np.maximum(known, unknown)
  np.testing.assert_array_equal((known >= 0) ^ (unknown >= 0), pool)
  kept = pool & (owner < 4)
  np.testing.assert_array_equal(owner[kept], OWNER[kept])


@pytest.mark.parametrize('given, per_class, fraction', [
    ({'num_labeled_clients': 3}, None, None),
    ({'num_labeled_clients': -1}, 10, None),
    ({'num_labeled_clients': 3, 'labels_at': 'server'}, 10, None),
    ({'num_labeled_clients': 3, 'labeled_fraction': 0.2}, None, 0.2),
    ({'num_labeled_clients': 3, 'labels_per_class': 5}, 5, None)])
def test_clients_that_hold_all_labels_beat_the_default(
    given, per_class, fraction):
  found = decided(**given)
  assert (found.labels_per_class, found.labeled_fraction) == (
      per_class, fraction)


def decided(**given) -> config.Config:
  """What `train own_data` makes of flags."""
  return runs.decided(
      settings.SETTINGS['own_data'],
      config.resolve({**settings.defaults_of('own_data'), **given}, given),
      given, toy())


def test_whole_clients_hold_the_labels_of_own_data():
  known, unknown = settings.SETTINGS['own_data'].deal(
      np.random.default_rng(0), LABELS, np.ones(400, bool),
      decided(num_labeled_clients=3, num_clients=8))
  assert set(known[known >= 0]) == {0, 1, 2}
  assert set(unknown[unknown >= 0]) == {3, 4, 5, 6, 7}
  assert ((known >= 0) ^ (unknown >= 0)).all()


def test_a_setting_without_such_clients_says_so(refuse):
  line = refuse('--num_labeled_clients=3', deal=dealing.one_pool,
                labels_per_class=None, labeled_fraction=0.2)
  assert '--num_labeled_clients=3: here every client holds labels' in line


def test_labels_of_each_class_where_the_data_name_clients():
  _, (known, _) = deal(labels_per_class=3, labeled_fraction=None)
  assert np.bincount(LABELS[known >= 0]).tolist() == [3] * 4
  for refused in ({'rounds_per_task': 2}, {'min_size': 3}):
    with pytest.raises(config.FieldError, match=next(iter(refused))):
      deal(**refused)


@pytest.mark.parametrize('name, change', [
    ('own_data', {}), ('labeled_clients', {'num_labeled_clients': 2}),
    ('cifar_dirdir', {'labels_per_class': 20}),
    ('cross_device', {'dirichlet': 'capped', 'labeled_fraction': 0.1})])
def test_the_least_rows_of_a_client(name, change):
  values = {**settings.defaults_of(name), 'num_clients': 8, 'alpha': 0.5,
            'cohort_size': 2, **change}
  options = config.resolve(values)
  def owners(**other):
    return settings.SETTINGS[name].deal(
        np.random.default_rng(3), LABELS, np.ones(400, bool),
        dataclasses.replace(options, **other))
  plain = owners()
  for one, other in zip(plain, owners(min_size=10), strict=True):
    np.testing.assert_array_equal(one, other)  # 10 is the default.
  _, unlabeled = owners(min_size=25)
  least = np.bincount(np.maximum(*owners(min_size=25)), minlength=8).min()
  assert least >= 25 or np.bincount(
      unlabeled[unlabeled >= 0], minlength=8).min() >= 25
  with pytest.raises(config.FieldError, match='min_size') as caught:
    owners(min_size=51)
  assert caught.value.field == 'num_clients'
  with pytest.raises(config.FieldError, match='min_size') as caught:
    owners(num_clients=100)
  assert 'num_clients=100: too many for' in str(caught.value)


def dealt(**change) -> data.Partition:
  """What `train own_data` deals of a set of 400 rows."""
  def part(labels):
    return data.datasets.Examples(np.zeros((len(labels), 1), np.uint8), labels)
  made = data.Dataset('toy', part(LABELS), part(LABELS[:4]), 4, (0.,), (1.,),
                      True)
  given = {'partition': 'setting', 'num_clients': 4, 'cohort_size': 2,
           'alpha': 1.0, **change}
  options = config.resolve({**settings.defaults_of('own_data'), **given}, given)
  return partitions.deal(settings.SETTINGS['own_data'], options, made)[0]


def test_no_more_rows_are_dealt_than_asked_for():
  everything = dealt(max_rows=0, labeled_fraction=0.1)
  some = dealt(max_rows=100, labeled_fraction=0.1)
  np.testing.assert_array_equal(some.validation, everything.validation)
  owned = np.maximum(some.labeled, some.unlabeled) >= 0
  assert owned.sum() == 100 and not (owned & some.validation).any()
  assert (some.labeled >= 0).sum() in range(9, 12)
  assert 15 < np.bincount(LABELS[owned]).min()  # Drawn from all classes.
  for enough in (380, 400):  # 20 are held out.
    all_of_them = dealt(max_rows=enough, labeled_fraction=0.1)
    for one, other in zip(all_of_them[:3], everything[:3],
                          strict=True):
      np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize('flag', [
    '--max_rows=5', '--labels_per_class=3', '--labeled_fraction=0.3'])
def test_a_file_says_itself_which_rows_are_dealt(flag, tmp_path, refuse):
  line = refuse(flag, f'--partition_file={tmp_path / "p.npz"}')
  assert flag in line and '--partition_file' in line


@pytest.mark.parametrize('change', [
    {'alpha': .01}, {'min_size': 33}, {'partition_seed': 7},
    {'validation_fraction': .5}])
def test_what_a_file_of_rows_makes_idle_is_noted(change, tmp_path, capsys):
  """It may stand in the flagfile of the run that the file is from."""
  setting = settings.SETTINGS['digits_dirdir']
  asked = config.resolve({**settings.defaults_of('digits_dirdir'),
                          'partition_file': 'p.npz', **change})
  runs.check_read(setting, asked)
  runs.note_unread(setting, asked, toy())
  (name, value), = change.items()
  assert capsys.readouterr().err == (
      f'Note: {name}={value} does nothing: partition_file says whose row is '
      'whose.\n')
  # A run that has begun was told so.
  (tmp_path / 'config.json').touch()
  runs.note_unread(setting, dataclasses.replace(asked, workdir=str(tmp_path)),
                   toy())
  assert not capsys.readouterr().err


@pytest.mark.parametrize('name, holders, says', [
    ('digits_dirdir', -1, False), ('digits_dirdir', 2, True),
    ('agents_iid', 3, False)])  # There others get the rows without labels.
def test_holders_of_labels_that_the_server_has_are_noted(
    name, holders, says, capsys):
  setting = settings.SETTINGS[name]
  runs.note_unread(setting, config.resolve({
      **settings.defaults_of(name), 'labels_at': 'server',
      'num_labeled_clients': holders}), toy())
  said = capsys.readouterr().err
  assert (f'num_labeled_clients={holders} does nothing: the server has all '
          'labels.' in said) == says


@pytest.mark.parametrize('steps', [0, 5])
def test_epochs_beside_steps_are_noted(steps, capsys):
  setting = settings.SETTINGS['digits_dirdir']
  for epochs, says in ((1, False), (3, bool(steps))):
    runs.note_unread(setting, config.resolve({
        **settings.defaults_of('digits_dirdir'), 'local_steps': steps,
        'local_epochs': epochs}), toy())
    assert (f'local_epochs={epochs} does not say how long clients train: '
            f'each takes local_steps={steps}.'
            in capsys.readouterr().err) == says


@pytest.mark.parametrize('fraction, says', [(.5, True), (0., False),
                                            (.02, False)])
def test_rows_are_held_out_once(fraction, says, capsys):
  """None of data with a validation part; 0 and the default say nothing else."""
  setting = settings.SETTINGS['cifar_dirdir']
  held = toy()._replace(validation=toy().test)
  asked = auto(validation_fraction=fraction)
  runs.note_unread(setting, asked, held)
  assert ('the data have a validation part' in capsys.readouterr().err) == says
  runs.note_unread(setting, asked, toy())
  assert not capsys.readouterr().err


@pytest.mark.parametrize('change, name', [
    ({}, 'fixmatch'), ({'aggregator': 'krum', 'labels': 'all'},
                       'fixmatch, krum, all labels'),
    ({'aggregator': './mine.py:half', 'attack': 'noise(share=.2)',
      'server_optimizer': 'adam'}, 'fixmatch, half, adam, noise(share=.2)')])
def test_a_run_is_named_by_what_it_does(change, name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'mine.py').touch()
  options = auto(method='fixmatch', bounds=False, **change)
  assert runs.wanted(options, pathlib.Path('x'))[0][0] == name


def test_a_knob_of_a_users_own_may_have_a_views_name():
  @methods.register('mirrored')
  def mirrored(task, *, flip: bool = False):
    return flip
  task.check_texts({'method': 'mirrored(flip=True)', 'weak': 'none'})
  with pytest.raises(config.FieldError, match="no knob 'num_classes'"):
    task.check_texts({'model': 'cnn(num_classes=3)'})


def test_min_size_where_no_partition_has_one(refuse):
  line = refuse('--min_size=3', scheme='iid_random')
  assert '--min_size=3' in line and 'iid_random' in line


def test_a_file_and_the_data_cannot_both_say_it(refuse, tmp_path):
  line = refuse('--partition=natural', f'--partition_file={tmp_path / "p.npz"}')
  assert '--partition=natural' in line and '--partition_file' in line


def test_data_that_name_no_clients(refuse):
  line = refuse('--partition=natural')
  assert 'client_train' in line and '--dataset=digits' in line


def test_own_data_ends_with_both_bounds_and_a_page(tmp_path):
  rng = np.random.default_rng(0)
  names = np.array(['cat', 'dog', 'emu'])
  labels = rng.integers(0, 3, 240)
  images = (rng.integers(0, 60, (240, 8, 8)) + 70 * labels[:, None, None])
  np.savez(tmp_path / 'pets.npz', x_train=images[:180].astype(np.uint8),
           y_train=names[labels[:180]], x_test=images[180:].astype(np.uint8),
           y_test=names[labels[180:]],
           client_train=np.array(['ann', 'bob', 'eve'])[np.arange(180) % 3])
  done = launcher.call(
      'train', 'own_data', f'--data_dir={tmp_path}', '--dataset=pets',
      '--model=linear', '--weak=none', '--strong=none', '--num_rounds=2',
      '--local_steps=2', f'--workdir={tmp_path / "run"}')
  assert done.returncode == 0, done.stderr
  assert '3 clients, 3 a round' in done.stderr
  assert 'rows are with the clients that the data name' in done.stderr
  for name in ('fixmatch', 'labels only', 'all labels'):
    assert name in done.stdout
  page = (tmp_path / 'run' / 'report' / 'index.html').read_text()
  assert 'own_data: pets' in page and 'emu' in page
  stored = json.loads((tmp_path / 'run' / 'config.json').read_text())
  assert stored['flags']['partition'] == 'natural'
  assert stored['flags']['num_clients'] == 3
  assert stored['facts']['class_names'] == ['cat', 'dog', 'emu']


def test_a_run_of_which_the_data_decided_is_evaluated(tmp_path):
  """Some rows have no label; the labels that were asked for still count."""
  draw = np.random.default_rng(0)
  labels = np.arange(120) % 2
  images = (100 + 100 * labels[:, None, None] + draw.integers(
      0, 20, (120, 4, 4))).astype(np.uint8)
  np.savez(tmp_path / 'mine.npz', x_train=images, x_test=images[:20],
           y_train=np.where(np.arange(120) < 60, labels, -1),
           y_test=labels[:20])
  done = launcher.call(
      'train', 'own_data', '--dataset=mine', f'--data_dir={tmp_path}',
      '--labels_per_class=4', '--model=linear', '--num_clients=4',
      '--local_steps=1', '--unlabeled_batch=4', '--num_rounds=1', '--nobounds',
      '--noreport', '--weak=none', '--strong=none', '--workdir=run',
      '--method=fedavg', place=str(tmp_path))
  assert done.returncode == 0, done.stderr
  rows = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
  done = launcher.call('evaluate', 'run', place=str(tmp_path))
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout)['accuracy'] == json.loads(rows[-1])['accuracy']
