"""Bad input ends in one clear line and code 2, and touches nothing."""
from __future__ import annotations

import json
import pathlib
import signal
import sys
import types
from typing import Any

import numpy as np
import pytest

from fedjax_ssl import data
from fedjax_ssl.data import partition as partition_lib
from tests.cli import launcher

# The flags, and what the line must say: flag or field, and value or limit.
BAD = {
    'flag': (['--alhpa=1'], ['--alhpa=1', 'mean --alpha']),
    'no_flag': (['digits'], ["'digits'", 'begin with --']),
    'no_value': (['--num_rounds'], ['num_rounds']),
    'no_number': (['--num_rounds=ten'], ['num_rounds', 'ten']),
    'flagfile': (['--flagfile=/nowhere'], ['--flagfile=/nowhere cannot']),
    'method': (['--method=fixmtach'], ['fixmtach', "mean 'fixmatch'"]),
    'method_lines': (['--method=fedprox(\n mu=1)'], ['--method=', 'one line']),
    'method_form': (['--method=fixmatch(0.9)'], ['fixmatch(0.9)', 'knob=']),
    'method_knob': (['--method=fixmatch(tau=1)'], ['tau', 'threshold']),
    'method_range': (['--method=fedprox(mu=-1)'],
                     ['--method=fedprox(mu=-1): mu', 'at least 0']),
    'method_type': (["--method=fixmatch(threshold='a')"],
                    ['method', 'threshold of type float', "'a'"]),
    'profile': (['--profile=paper'], ['--profile=paper', 'fedavg', 'rscfed']),
    'model': (['--model=cn'], ['--model=cn: ', 'resnet9']),
    'model_knob': (['--model=cnn(depth=2)'], ['depth', 'width']),
    'model_range': (['--model=cnn(width=0)'], ['width', '0', 'at least 1']),
    'model_type': (["--model=cnn(width='x')"],
                   ['model', 'width of type int', "'x'"]),
    'norm': (['--norm=batch'], ['--norm=batch', 'allowed: none']),
    'norm_name': (['--norm=layer'], ['--norm=layer', 'static']),
    'weak': (['--weak=flop'], ['--weak=flop: ', 'flip_crop']),
    'strong': (['--strong=rand'], ["'rand'", 'ra_mc']),
    'strong_range': (['--strong=ra_mc(cutout=-2)'], ['cutout=-2']),
    'lr_schedule': (['--lr_schedule=cos'], ["'cos'", "'cosine'"]),
    'optimizer': (['--optimizer=lion'], ['--optimizer=lion', 'adam']),
    'alpha_0': (['--alpha=0'], ['--alpha=0', 'above 0']),
    'alpha_negative': (['--alpha=-1'], ['--alpha=-1', 'above 0']),
    'alpha_nan': (['--alpha=nan'], ['--alpha=nan', 'finite']),
    'alpha_inf': (['--alpha=inf'], ['--alpha=inf', 'finite']),
    'alpha_tiny': (['--alpha=1e-9', '--num_clients=30'], ['alpha=1e-09']),
    'labels': (['--labels=some'], ['--labels=some', 'few, all']),
    'labels_per_class': (['--labels_per_class=500'],
                         ['--labels_per_class=500', '132']),
    'labels_none': (['--labels_per_class=0'], ['labels_per_class=0']),
    'labels_both': (['--labels_per_class=10', '--labeled_fraction=0.1'],
                    ['--labels_per_class', '--labeled_fraction', '10', '0.1']),
    'fraction': (['--labeled_fraction=1.5'], ['labeled_fraction=1.5', '1.0']),
    'fraction_nan': (['--labeled_fraction=nan'], ['labeled_fraction=nan']),
    'server_empty': (['--labels_at=server', '--labeled_fraction=0'],
                     ['--labels_at=server', 'give more']),
    'validation': (['--validation_fraction=nan'], ['validation_fraction=nan']),
    'validation_all': (['--validation_fraction=1'],
                       ['validation_fraction=1', '0.9']),
    'cohort': (['--cohort_size=21'], ['--cohort_size=21', '--num_clients=20']),
    'cohort_of_few': (['--cohort_size=5', '--num_clients=4'],
                      ['--cohort_size=5', '--num_clients=4: a round has at']),
    'cohort_0': (['--cohort_size=0'], ['cohort_size=0', 'range [1']),
    'clients': (['--num_clients=200'],
                ['--num_clients=200', '1265', 'at least 10']),
    'clients_many': (['--num_clients=1000000000'],
                     ['--num_clients=1000000000', '1437']),
    'clients_overflow': (['--num_clients=100000000000'],
                         ['--num_clients=100000000000', '2147483647']),
    'nobody_labeled': (['--labeled_fraction=0'],
                       ['--labeled_fraction=0.0', 'No client', 'give more']),
    'min_size': (['--min_size=100000'], ['--min_size=100000: ', '1265 rows']),
    'all_at_server': (
        ['--labels=all', '--labels_at=server', '--method=fixmatch'],
        ['--labels=all', '--labels_at=server', 'fixmatch', 'fedavg']),
    'labeled_clients': (['--num_labeled_clients=3'],
                        ['--num_labeled_clients=3', 'dealt to all clients']),
    'labeled_clients_many': (['--num_labeled_clients=21'],
                             ['num_labeled_clients=21', '20']),
    'stream': (['--rounds_per_task=3'], ['--rounds_per_task=3', 'no stream']),
    'labeled_batch': (['--labeled_batch=0'], ['labeled_batch=0']),
    'labeled_batch_negative': (['--labeled_batch=-1'], ['labeled_batch=-1']),
    'unlabeled_batch': (['--unlabeled_batch=-1'], ['unlabeled_batch=-1']),
    'local_epochs': (['--local_epochs=0'], ['local_epochs=0']),
    'rounds': (['--num_rounds=0'], ['num_rounds=0']),
    'schedule': (['--schedule_rounds=0'], ['schedule_rounds=0']),
    'rate_0': (['--learning_rate=0'], ['--learning_rate=0.0: ', 'above 0']),
    'rate_nan': (['--learning_rate=nan'], ['learning_rate=nan', 'finite']),
    'momentum': (['--momentum=1'], ['--momentum=1.0: ', '[0, 1)']),
    'weight_decay': (['--weight_decay=-1'], ['weight_decay', '-1.0']),
    'max_update_norm': (['--max_update_norm=-1'], ['max_update_norm=-1']),
    'chunk_size': (['--chunk_size=-1'], ['chunk_size=-1']),
    'devices': (['--num_devices=1000'], ['--num_devices=1000',
                                         'at most the number of devices, ']),
    'seeds_words': (['--seeds=a,b'], ['--seeds=a,b', 'whole numbers']),
    'seeds_equal': (['--seeds=1,1'], ['--seeds=1,1', 'different']),
    'seeds_negative': (['--seeds=-1'], ['--seeds=-1', 'from 0']),
    'seeds_large': (['--seeds=4294967296'], ['--seeds=4294967296']),
    'seed_and_seeds': (['--seed=3', '--seeds=1,2'], ['--seed', '3', '1,2']),
    'seed': (['--seed=-1'], ['seed=-1']),
    'partition_seed': (['--partition_seed=-1'], ['partition_seed=-1']),
    'dataset': (['--dataset=mnits'], ["'mnits'", 'mnits.npz', '--data_dir']),
    'dataset_name': (['--dataset=../x'], ["'../x'"]),
    'data_dir': (['--dataset=x', '--data_dir=/nowhere'], ['/nowhere']),
    'split': (['--split=half'], ['--split=half:', 'train/test']),
    'split_slip': (['--split=80/5/16'], ['--split=80/5/16:', 'sum to 100']),
    'split_large': (['--split=5000/100'], ['--split=5000/100:', '1797']),
    'partition_file': (['--partition_file=/nowhere'],
                       ['/nowhere', 'No such file']),
    'eval_only': (['--eval_only'], ['holds no run']),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_flags(name, refuse, tmp_path):
  args, words = BAD[name]
  folder = tmp_path / 'run'
  line = refuse(f'--workdir={folder}', *args)
  for word in words:
    assert word in line
  assert not folder.exists()


@pytest.mark.parametrize('flag', [
    '--model=cn', '--model=cnn(width=0)', '--strong=ra_mc(num_ops=-1)',
    '--strong=foo', '--method=fixmatch(treshold=.5)', '--aggregator=media',
    '--method=fixmatch(threshold=5)', '--attack=noise(share=2)'])
def test_texts_are_checked_before_data_are_read(flag, refuse):
  line = refuse('--dataset=absent', '--data_dir=/nowhere', flag)
  assert flag in line and '/nowhere' not in line


def test_alpha_is_checked_where_nothing_is_dirichlet(refuse):
  assert '--alpha=-1' in refuse('--alpha=-1', scheme='iid_random')


def test_eval_only_needs_a_workdir(refuse):
  assert '--eval_only: needs a workdir' in refuse('--eval_only')


def test_tensorboard_needs_its_package(refuse, tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'tensorboardX', None)
  folder = tmp_path / 'run'
  line = refuse('--tensorboard', f'--workdir={folder}')
  assert "pip install -e '.[tensorboard]' in this repository's folder" in line
  assert not folder.exists()


@pytest.mark.parametrize('words, text', [
    (['--track=aim'], "--track=aim: 'aim' is none of tensorboard, wandb, mlf"),
    (['--track=wandb,mlflow'], "pip install -e '.[mlflow]' in this"),
    (['--tensorboard', '--track=tensorboard,'], "'' is none of")])
def test_trackers_are_named_and_installed(
    refuse, tmp_path, monkeypatch, words, text):
  monkeypatch.setitem(sys.modules, 'wandb', types.ModuleType('wandb'))
  monkeypatch.setitem(sys.modules, 'mlflow', None)
  folder = tmp_path / 'run'
  assert text in refuse(*words, f'--workdir={folder}')
  assert not folder.exists()


def arrays(side: int = 8) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  labels = np.arange(400) % 4
  return {'x_train': rng.integers(0, 256, (400, side, side), dtype=np.uint8),
          'y_train': labels, 'y_test': labels[:40],
          'x_test': rng.integers(0, 256, (40, side, side), dtype=np.uint8)}


def without_2(labels):
  return np.where(labels == 2, 3, labels)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    'objects': ({'x_train': lambda x: x.astype(object)}, 'Python objects'),
    'labels_negative': ({'y_train': lambda y: y - 2}, '-2'),
    'labels_above': ({'y_test': lambda y: y + 3}, 'label 6'),
    'labels_text': ({'y_train': lambda y: y.astype(str)},
                    'labels of test are numbers, those of train words'),
    'labels_of_test_text': ({'y_test': lambda y: y.astype(str)},
                            'labels of test are words, those of train num'),
    'labels_short': ({'y_train': lambda y: y[:-1]}, '399 labels'),
    'class_absent': ({'y_train': without_2}, 'no example of train has label 2'),
    'nan': ({'x_train': lambda x: np.where(x > 9, np.nan, x)}, 'NaN'),
    'shape': ({'x_test': lambda x: x[:, :4]}, '(4, 8, 1)'),
    'key': ({'x_test': None}, "'x_test'"),
}


@pytest.mark.parametrize('name', BROKEN)
def test_broken_data(name, refuse, tmp_path):
  changes, words = BROKEN[name]
  parts = arrays()
  for key, change in changes.items():
    if change is None:
      del parts[key]
    else:
      parts[key] = change(parts[key])
  np.savez(tmp_path / 'mine.npz', **parts)  # type: ignore[arg-type]
  folder = tmp_path / 'run'
  line = refuse('--dataset=mine', f'--data_dir={tmp_path}',
                f'--workdir={folder}')
  assert 'mine.npz' in line
  assert words in line
  assert not folder.exists()


def test_a_truncated_file(refuse, tmp_path):
  np.savez(tmp_path / 'mine.npz', **arrays())  # type: ignore[arg-type]
  whole = (tmp_path / 'mine.npz').read_bytes()
  for size in (0, 100, len(whole) - 10):
    (tmp_path / 'mine.npz').write_bytes(whole[:size])
    assert 'mine.npz' in refuse('--dataset=mine', f'--data_dir={tmp_path}')


def test_images_too_small_for_the_model(refuse, tmp_path):
  np.savez(tmp_path / 'mine.npz', **arrays(side=3))  # type: ignore[arg-type]
  line = refuse('--dataset=mine', f'--data_dir={tmp_path}', '--model=cnn')
  assert '(3, 3, 1)' in line and 'at least 4x4' in line


def test_a_partition_of_something_else(refuse, tmp_path):
  labels = np.asarray(data.load('digits').train.labels)
  nobody = np.full(labels.size, -1)
  owner = np.arange(labels.size) % 20
  file = tmp_path / 'partition.npz'
  flag = f'--partition_file={file}'

  def save(partition, labels=labels, clients=20):
    data.save_partition(file, partition, num_clients=clients, labels=labels)

  good = partition_lib.make_partition(np.where(owner < 5, owner, -1),
                             np.where(owner >= 5, owner, -1))
  save(good, clients=7)
  assert 'partition.npz: made for 7 clients, not 20' in refuse(flag)
  save(good, labels=labels[::-1])
  assert 'other labels' in refuse(flag)
  save(partition_lib.make_partition(nobody[:9], nobody[:9]), labels=labels[:9])
  assert '1437' in refuse(flag)
  save(partition_lib.make_partition(owner, owner))
  assert 'twice' in refuse(flag)
  file.write_bytes(file.read_bytes()[:300])
  assert 'partition.npz' in refuse(flag)
  save(good)
  assert 'client 4' in refuse(flag, '--num_labeled_clients=2')
  save(partition_lib.make_partition(nobody, owner))
  line = refuse(flag)
  assert f'{flag}' in line and 'No client has a labeled example in it.' in line
  assert line.count('partition.npz') == 1


def test_who_has_no_row_in_a_partition_file_is_said(tmp_path):
  labels = np.asarray(data.load('digits').train.labels)
  owner = np.arange(labels.size) % 4
  file = tmp_path / 'mine.npz'
  np.savez(file, labeled=np.where(owner < 2, owner, -1),
           unlabeled=np.where(owner < 2, -1, owner))
  flags = ('digits_dirdir', '--model=linear', '--num_rounds=1', '--nobounds',
           '--num_devices=1', '--num_clients=6', '--cohort_size=4',
           f'--partition_file={file}', f'--workdir={tmp_path / "run"}')
  first, again = (launcher.call('train', *flags, place=str(tmp_path))
                  for _ in range(2))
  assert (first.returncode, again.returncode) == (0, 0), again.stderr
  assert (f'Note: --partition_file={file} has no row of the clients 4 to 5; '
          'give --num_clients=4 if there are no more.\n') in first.stderr
  assert 'no row of' not in again.stderr  # It was told when it began.


def test_a_workdir_that_cannot_be(refuse, tmp_path):
  file = tmp_path / 'file'
  file.write_text('mine')
  for folder in (file, file / 'run'):
    line = refuse(f'--workdir={folder}')
    assert str(folder) in line and 'a file' in line
  assert 'local folder' in refuse('--workdir=gs://bucket/run')
  assert '--workdir=' in refuse('--workdir=')
  assert file.read_text() == 'mine'
  assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize('files', [
    {'config.json': '{"model_type": "other"}'}, {'config.json': 'no JSON'},
    {'metrics.jsonl': '{}\n'}])
def test_a_folder_of_somebody_else(refuse, tmp_path, files):
  for name, text in files.items():
    (tmp_path / name).write_text(text)
  before = launcher.fingerprints(tmp_path)
  assert str(tmp_path) in refuse(f'--workdir={tmp_path}')
  assert launcher.fingerprints(tmp_path) == before


@pytest.fixture(scope='module')
def finished(tmp_path_factory) -> pathlib.Path:
  """A small run with one of its bounds' folders."""
  folder = tmp_path_factory.mktemp('cli') / 'run'
  launcher.run(folder, *launcher.SMALL, '--num_rounds=1')
  return folder


def test_another_configuration_is_named(finished):
  before = launcher.fingerprints(finished)
  started = launcher.start(finished, *launcher.SMALL, '--num_rounds=1',
                           '--alpha=0.1', '--learning_rate=1')
  assert started.wait() == 2
  line, = started.output().splitlines()
  assert line.startswith('error: ') and str(finished) in line
  assert 'alpha 0.5 -> 0.1' in line and 'learning_rate 0.05 -> 1.0' in line
  started = launcher.start(finished, *launcher.SMALL, '--alpha=0.1',
                           '--eval_only')
  assert started.wait() == 2 and 'alpha 0.5 -> 0.1' in started.output()
  assert launcher.fingerprints(finished) == before


def test_other_data_under_the_same_name_are_named(tmp_path):
  folder = tmp_path / 'run'
  args = (*launcher.SMALL, '--dataset=mine', f'--data_dir={tmp_path}',
          '--num_clients=3', '--labels_per_class=5')
  parts = arrays()
  np.savez(tmp_path / 'mine.npz', **parts)  # type: ignore[arg-type]
  launcher.run(folder, *args, '--num_rounds=1')
  parts['y_train'] = np.roll(parts['y_train'], 1)
  np.savez(tmp_path / 'mine.npz', **parts)  # type: ignore[arg-type]
  before = launcher.fingerprints(folder)
  started = launcher.start(folder, *args, '--num_rounds=2')
  assert started.wait() == 2
  line, = started.output().splitlines()
  assert 'other data' in line and 'partition_hash' in line and len(line) < 2000
  few = {name: values[:12] for name, values in parts.items()}
  np.savez(tmp_path / 'mine.npz', **few)  # type: ignore[arg-type]
  started = launcher.start(folder, *args, '--num_rounds=2')
  assert started.wait() == 2
  line, = started.output().splitlines()
  assert 'other data' in line and '--labels_per_class=5' in line
  assert launcher.fingerprints(folder) == before


def test_a_second_process_is_refused(tmp_path):
  folder = tmp_path / 'run'
  args = (*launcher.SMALL, '--num_rounds=100000', '--eval_every=0')
  first = launcher.start(folder, *args)
  while first.running and 'pid' not in lock(folder):
    pass
  holder = lock(folder)
  config = json.loads((folder / 'config.json').read_text())
  second = launcher.start(tmp_path / 'second', *args, f'--workdir={folder}')
  assert second.wait() == 75
  line, = second.output().splitlines()
  assert f'{folder} is in use by {holder.strip()}' in line
  assert lock(folder) == holder
  assert json.loads((folder / 'config.json').read_text()) == config
  first.process.kill()
  assert first.wait() == -signal.SIGKILL


def lock(folder: pathlib.Path) -> str:
  file = folder / 'lock'
  return file.read_text() if file.exists() else ''


def test_bounds_are_refused_before_anything_is_trained(finished):
  blocked = finished / 'labels_all'
  blocked.write_text('mine')
  before = launcher.fingerprints(finished / 'checkpoints')
  started = launcher.start(finished, *launcher.SMALL, '--num_rounds=1',
                           '--bounds')
  assert started.wait() == 2
  line, = started.output().splitlines()
  assert str(blocked) in line
  assert launcher.fingerprints(finished / 'checkpoints') == before
  assert not (finished / 'labels_few' / 'checkpoints').exists()
  assert blocked.read_text() == 'mine'
