"""A refusal names the flag that was given, and what to give instead."""
from __future__ import annotations

import os
import shutil
import threading
from unittest import mock

import numpy as np
import pytest

from fedjax_ssl.data import files
from fedjax_ssl.running import client_memory, dealing, settings

# The flags, and parts of the line.
LINES = {
    'lanes_without_number': (['--client_map=lanes'],
                             ['--client_map=lanes', '--chunk_size=0']),
    'knob_value': (["--method=uda(tsa='cubic')"],
                   ["--method=uda(tsa='cubic'): tsa", 'exp, linear']),
    'knob_name': (['--method=fixmatch(treshold=.8)'],
                  ['--method=fixmatch(treshold=.8): ', "mean 'threshold'"]),
    'own_name': (['--method=mine'], [
        "'mine' is unknown. Allowed", 'One of your own is FILE.py:NAME.']),
    'form': (['--method=fixmatch(threshold='], [
        "--method=fixmatch(threshold=: 'fixmatch(threshold=' is not of the"]),
    'knob_value_far': (["--method=uda(tsa='zzzzz')"], [
        "tsa 'zzzzz' is unknown. Allowed: exp, linear, log, none."]),
    'far_name': (['--method=fedopt'], ["'fedopt' is unknown. Allowed"]),
    'swapped_letters': (['--method=fedbd'], ["mean 'feddb'?"]),
    'aggregator_as_method': (['--method=krum'], [
        '--method=krum: it is given as --aggregator=krum.']),
    'server_as_method': (['--method=FedAdam'], [
        '--method=fedavg with --server_optimizer=adam.']),
    'server_of_several': (['--server_optimizer=none'], [
        '--server_optimizer=none: ', "'none' is unknown.", 'Allowed: ']),
    'attack_as_view': (['--weak=noise'], [
        "weak 'noise' is unknown. Did you mean 'none'? Allowed: cutout"]),
    'plain_server': (['--method=fedsgd'], [
        '--method=fedavg with --local_steps=1.']),
    'aggregator_as_attack': (['--attack=median'], [
        'it is given as --aggregator=median.']),
    'method_as_aggregator': (['--aggregator=fedavg'], [
        'it is given as --method=fedavg.']),
    'server_of_others': (['--method=fedavgm'], ['--server_optimizer=momentum']),
    'flag_as_knob': (['--method=fixmatch(learning_rate=.1)'], [
        "'learning_rate' is an option", 'give --learning_rate=0.1 beside it']),
    'knob_as_flag': (['--method=fixmatch(mu=.5)', '--threshold=0.8'],
                     ['--threshold=0.8', '"fixmatch(mu=0.5, threshold=0.8)"']),
    'knob_as_flag_without': (['--threshold=0.8'],
                             [' fixmatch, fl2, flexmatch',
                              '--method=fedavg has']),
    'knob_of_a_model': (['--model=cnn', '--width=8'], ['"cnn(width=8)"']),
    'word_as_flag': (['--method=fixmatch', '--labeler=global'],
                     ["fixmatch(labeler='global')"]),
    'initials': (['--lr=0.1'], ['--lr=0.1 is no flag.', '--learning_rate?']),
    'name_of_others': (['--clients_per_round=3'],
                       ['--clients_per_round=3 is no flag.', '--cohort_size?']),
    'names_of_others': (['--batch_size=8'],
                        ['--labeled_batch or --unlabeled_batch?']),
    'folder_of_others': (['--save_dir=x'], ['Did you mean --workdir?']),
    'knob_of_others': (['--method=fixmatch', '--tau=.9'],
                       ['"fixmatch(threshold=0.9)"']),
    'part_of_a_flag': (['--rounds=3'], ['--rounds=3', '--num_rounds or --']),
    'whole_number': (['--num_rounds=1e3'],
                     ['--num_rounds=1e3 is no whole number.']),
    'settings_of_the_optimizer': (
        ['--optimizer=adam(b1=.5)'], ['adamw, rmsprop; its settings are --l']),
    'how_many_labels': (['--labels=10'], ['few, all; how', '--labels_per_cl']),
    'number': (['--alpha=x'], ['--alpha=x is no number.']),
    'number_with_colon': (['--num_rounds=a: b'],
                          ['--num_rounds=a: b is no whole number.']),
    'number_in_their_words': (
        ['--alpha=could not convert string to float'],
        ['--alpha=could not convert string to float is no number.']),
    'boolean': (['--bounds=maybe'],
                ['--bounds=maybe is neither true nor false.']),
    'knob_typo': (['--method=fixmatch', '--treshold=.8'],
                  ['Did you mean the knob --method="fixmatch(threshold=0.8']),
    'switch_off': (['--method=fixmatch(mu=.5)', '--nokeep_local'],
                   ['knob: give --method="fixmatch(mu=0.5, keep_local=False)"'
                    ]),
    'switch_on': (['--method=fixmatch', '--keep_local'],
                  ['"fixmatch(keep_local=True)"']),
    'switch_with_value': (['--method=fixmatch', '--keep_local=True'],
                          ['"fixmatch(keep_local=True)"']),
    'switch_typo': (['--method=fixmatch', '--nokeep_locl'],
                    ['mean the knob --method="fixmatch(keep_local=False)"?']),
    'switch_off_with_value': (
        ['--method=fixmatch', '--nokeep_local=False'],
        ['knob: give --method="fixmatch(keep_local=...)".']),
    'number_off': (['--method=fixmatch', '--nothreshold'],
                   ['knob: give --method="fixmatch(threshold=...)".']),
    'number_off_typo': (['--method=fixmatch', '--notreshold'],
                        ['mean the knob --method="fixmatch(threshold=...)"?']),
    'knob_that_begins_with_no': (['--noise_multiplier'], [
        'knob of dpsgd, fedssl', '--method="dpsgd(noise_multiplier=...)"']),
    'misspelt_negation': (['--nobound'], ['mean --nobounds?']),
    'negation_of_two_words': (['--no-bounds'], ['mean --nobounds?']),
    'capitals_of_a_paper': (['--method=FixMatch'], ["mean 'fixmatch'?"]),
    'no_flag': (['--xyzzy'], ['--xyzzy is no flag', '--help']),
    'no_flag_of_three_letters': (['--foo'], ['--foo is no flag; --help']),
    'flag_off_typo': (['--nobonds'], ['mean --nobounds?']),
    'part_of_a_flag_typo': (['--learnign=1'], [
        'mean --learning_rate or --server_learning_rate?']),
    'parts_of_flags_typo': (['--clientz=3'], [
        'mean --num_clients or --num_labeled_clients or --']),
    'short_for_parts': (['--lrate=1'], ['mean --learning_rate or --server_l']),
    'part_without_vowels': (['--rnds=3'], ['mean --num_rounds or --']),
    'names_of_others_joined': (['--batchsize=8'],
                               ['--labeled_batch or --unlabeled_batch?']),
    'names_of_others_apart': (['--batch-size=8'],
                              ['--labeled_batch or --unlabeled_batch?']),
    'flag_of_absl_typo': (['--logtostder'], ['mean --logtostderr?']),
    'knob_typo_that_begins_with_no': (
        ['--method=fedmatch', '--nom_helpers=3'],
        ['mean the knob --method="fedmatch(num_helpers=3)"?']),
    'flagfile_typo': (['--flagfil=x'], ['mean --flagfile?']),
    'profile_name': (['--method=rscfed', '--profile=papr'],
                     ['--method=rscfed --profile=papr', 'official_isic']),
    'profile_empty': (['--profile='], ['--profile= and', 'fedmatch']),
    'profile_twice': (
        ["--method=rscfed(profile='paper')", '--profile=official'],
        ["profile='paper'", '--profile=official', 'leave one of the two out']),
    'labels_at': (['--method=feddure', '--labels_at=server'],
                  ['--method=feddure: --labels_at=server: give clients']),
    'view_and_image': (['--method=fixmatch', '--strong=ra_mc(cutout=999)'],
                       ['--strong=ra_mc(cutout=999): cutout', 'at most 8']),
    'weak_and_image': (['--weak=flip_crop(pad=8)'],
                       ['--weak=flip_crop(pad=8): pad=8', '[0, 8)']),
    'batch': (['--method=fixmatch', '--unlabeled_batch=1000000000'],
              ['--unlabeled_batch=1000000000', '[0, 65536]']),
    'epochs': (['--local_epochs=2000000000'],
               ['--local_epochs=2000000000', '[1, 10000]']),
    'views': (['--method=mixmatch(num_views=100000)'],
              ['--method=mixmatch(num_views=100000): num_views', 'most 64']),
    'threshold': (['--method=fixmatch(threshold=95)'],
                  ['threshold must be in [0, 1.1], not 95', 'a probability']),
    'epsilon': (['--method=fedssl(epsilon=8)'],
                ['epsilon=8 does nothing with dp_scope=None',
                 "write dp_scope='all'"]),
    'no_epsilon': (["--method=fedssl(dp_scope='all', epsilon=0)"],
                   ['epsilon must be above 0', 'leave epsilon and dp_scope out'
                    ]),
    'groups': (['--method=rscfed(groups=999999)'],
               ['groups must be a whole number', 'at most 1000, not 999999']),
    'norm': (['--model=cnn', '--norm=static', "--method=fixmatch(server='local"
              "')"], ['--norm=static: ']),
    'labeled_view': (['--labeled_view=flop'], ['--labeled_view=flop: ']),
    'lr_schedule': (['--lr_schedule=cosine(final=2)'],
                    ['--lr_schedule=cosine(final=2): final', '[0, 1]']),
    'labels_many': (['--labels_per_class=500'],
                    ['500 labels a class', '132 examples']),
    'aggregator': (['--aggregator=medan'],
                   ["--aggregator=medan: aggregator 'medan'", "'median'"]),
    'aggregator_knob': (['--aggregator=trimmed_mean(trim=.5)'],
                        ['--aggregator=trimmed_mean(trim=.5): trim must be',
                         '[0, 0.5), not 0.5']),
    'aggregator_as_flag': (['--aggregator=krum', '--share=.3'],
                           ['give --aggregator="krum(share=0.3)"']),
    'aggregator_for_nothing': (
        ['--method=rscfed', '--aggregator=median'],
        ['--method=rscfed: ', 'leave aggregator out']),
    'server_optimizer': (['--server_optimizer=adam(beta1=1)'],
                         ['--server_optimizer=adam(beta1=1): beta1', '[0, 1)'
                          ]),
    'server_rate': (['--server_learning_rate=0'],
                    ['--server_learning_rate=0', 'must be above 0']),
    'attack': (['--attack=noise(share=2)'],
               ['--attack=noise(share=2): share must be in [0, 1]']),
    'attack_for_nothing': (['--method=local', '--attack=noise'],
                           ['--method=local: ', 'leave attack out']),
    'alpha': (['--alpha=0.001'],
              ['--alpha=0.001: no draw', '20 clients', 'raise alpha']),
    'seeds_empty': (['--seeds='], ['--seeds=: must be different whole']),
    'flagfile_empty': (['--flagfile='], ['--flagfile= is empty; name a file']),
    'flagfile_in_one_word': (['--flagfile a.flags'],
                             ['--flagfile a.flags is no flag']),
    'data_dir_empty': (['--data_dir='], ['--data_dir=: is empty; give a pl']),
    'partition_file_empty': (['--partition_file='],
                             ['--partition_file=: is empty; give a place']),
    'dataset_empty': (['--dataset='], ["--dataset=: '' is no name of a"]),
    'dataset_path': (['--dataset=../x'], ["--dataset=../x: '../x' is no"]),
    'folder_of_too_long_a_name': (
        [f'--workdir={"a" * 300}'],
        [f'--workdir={"a" * 300} cannot be used: File name too long.']),
    'dataset_of_too_long_a_name': ([f'--dataset={"a" * 300}'],
                                   ['is no name of a data set', '100 at most']),
    'no_row_is_left': (
        ['--labeled_fraction=1', '--num_clients=4'],
        ['--labeled_fraction=1.0: leaves no row without a label to deal']),
    'few_rows_are_left': (['--labeled_fraction=.999'],
                          ['--min_size=10: there is 1 row to deal; give 0']),
    'folder_of_no_use': (['--workdir=/proc/x'],
                         ['--workdir=/proc/x: cannot be used']),
    'folder_with_a_quote': (["--workdir=/proc/it's"],
                            ["--workdir=/proc/it's: cannot be used"]),
    'home_of_nobody': (['--flagfile=~nobody_at_all/x'],
                       ['--flagfile=~nobody_at_all/x cannot be read: No such']),
    'private': (["--method=fedssl(dp_scope='all')"],
                ['--num_labeled_clients=-1: dp_scope', 'give 1 to 19']),
}


@pytest.mark.parametrize('name', LINES)
def test_lines(name, refuse):
  args, words = LINES[name]
  line = refuse(*args)
  for word in words:
    assert word in line


def test_a_flagfile_is_text(refuse, tmp_path):
  file = tmp_path / 'binary.flags'
  file.write_bytes(b'\xff\xfe--x')
  assert refuse(f'--flagfile={file}') == (
      f'error: --flagfile={file} cannot be read: it is no text.')
  outer = tmp_path / 'outer.flags'
  outer.write_text(f'--num_rounds=2\n--flagfile={file}\n')
  assert refuse(f'--flagfile={outer}') == (
      f'error: --flagfile={file} cannot be read: it is no text.')
  outer.write_text('--num_rounds=2\n--flagfile=\n')
  assert refuse(f'--flagfile={outer}') == (
      'error: --flagfile= is empty; name a file or leave it out. '
      f'(at {outer}:2)')


def test_a_slip_in_a_flagfile_that_a_flagfile_names(refuse, tmp_path):
  inner, outer = tmp_path / 'inner.flags', tmp_path / 'outer.flags'
  outer.write_text(f'--num_rounds=2\n--flagfile={inner}\n')
  inner.write_text('# Mine.\n\n--num_rounds=two\n')
  line = 'error: --num_rounds=two is no whole number.'
  assert refuse(f'--flagfile={outer}') == f'{line} (at {inner}:3)'
  # Neither of these is read by absl.
  for text in (f'  --flagfile={inner}', f'--flagfile\n{inner}',
               f'--flagfile {inner}'):
    outer.write_text(f'# Mine.\n{text}\n')
    said = refuse(f'--flagfile={outer}')
    assert ' is not read here; write --flagfile=NAME from the' in said
    assert said.endswith(f' (at {outer}:2)')


@pytest.mark.parametrize('own', ['method', 'import'])
def test_a_knob_of_ones_own_method_comes_before_a_like_flag(
    refuse, tmp_path, own):
  file = tmp_path / 'mine.py'
  file.write_text(
      'from fedjax_ssl import methods\n@methods.register("knobbed")\n'
      'def knobbed(task, *, weight: float = .1):\n  raise ValueError\n')
  words, name = (([f'--method={file}:knobbed'], f'{file}:knobbed')
                 if own == 'method' else
                 ([f'--import={file}', '--method=knobbed'], 'knobbed'))
  assert refuse(*words, '--weight=0.2') == (
      'error: --weight=0.2 is no flag but a knob: give '
      f'--method="{name}(weight=0.2)".')
  assert 'Did you mean --weight_decay?' in refuse(*words, '--weight_dcay=0.2')


def test_a_slip_beside_an_empty_flagfile_or_a_pipe(refuse, tmp_path):
  empty, pipe = tmp_path / 'empty.flags', tmp_path / 'pipe'
  empty.touch()
  line = 'error: --num_rounds=two is no whole number.'
  assert refuse(f'--flagfile={empty}', '--num_rounds=two') == line
  os.mkfifo(pipe)
  writer = threading.Thread(
      target=pipe.write_text, args=('--num_rounds=two\n',), daemon=True)
  writer.start()
  assert refuse(f'--flagfile={pipe}') == line
  writer.join(300)
  assert not writer.is_alive()


@pytest.mark.parametrize('line, words', [
    ('--learning_rate .1',
     '--learning_rate .1 is no flag; write --learning_rate=.1'),
    ('--learning_rate\t.1',
     '--learning_rate .1 is no flag; write --learning_rate=.1'),
    ('--learning_rate = .1',
     '--learning_rate = .1 is no flag; write --learning_rate=.1'),
    ('--num_rounds=2 --model=linear', '--num_rounds=2 --model=linear is no '
     'whole number. A line of a flagfile has one flag.'),
    ('--num_rounds=two', '--num_rounds=two is no whole number.'),
    ('--num_rounds=two: x', '--num_rounds=two: x is no whole number.'),
    ('--num_rounds\ntwo', '--num_rounds=two is no whole number.'),
    ('--num_rounds=3 # few', '--num_rounds=3 # few is no whole number. '
     'A comment has a line of its own.'),
    ('--labels_at=all', '--labels_at=all must be one of clients, server.'),
    ('--labels_at=server --alpha=1', '--labels_at=server --alpha=1 must be one '
     'of clients, server. A line of a flagfile has one flag.'),
    ('--bounds # yes',
     '--bounds # yes is no flag; a comment has a line of its own'),
    ('--learning_rte .1',
     '--learning_rte .1 is no flag. Did you mean --learning_rate?'),
    ('--learning_rte=.1',
     '--learning_rte=.1 is no flag. Did you mean --learning_rate?')])
def test_a_flagfile_with_a_slip(refuse, tmp_path, line, words):
  file = tmp_path / 'mine.flags'
  file.write_text(f'# Mine.\n{line}\n')
  assert refuse(f'--flagfile={file}') == f'error: {words} (at {file}:2)'


def test_a_wrong_value_is_where_it_is(refuse, tmp_path):
  file = tmp_path / 'mine.flags'
  file.write_text('--num_rounds=2\n--num_rounds=two\n')
  line = 'error: --num_rounds=two is no whole number.'
  assert refuse(f'--flagfile={file}') == f'{line} (at {file}:2)'
  file.write_text('--num_rounds=2\n')
  assert refuse(f'--flagfile={file}', '--num_rounds=two') == line


def test_a_device_is_no_flagfile(refuse):
  assert refuse('--flagfile=/dev/zero') == (
      'error: --flagfile=/dev/zero is a device; name a file.')
  assert '--flagfile=' + 'x' * 300 in refuse('--flagfile=' + 'x' * 300)


def test_a_file_alone_names_no_method(refuse, tmp_path):
  mine = tmp_path / 'mine.py'
  mine.write_text('1 / 0\ndef _part(): ...\ndef best(task): ...\n')
  line = refuse(f'--method={mine}')
  assert f' --method={mine}: ' in line and line.endswith(
      'NAME being best')
  mine.write_text('def :')
  assert refuse(f'--method={mine}').endswith(':NAME(knob=...)')


def test_a_folder_holds_no_code(refuse, tmp_path, monkeypatch):
  (tmp_path / 'empty_folder').mkdir()
  monkeypatch.syspath_prepend(tmp_path)
  line = refuse('--import=empty_folder')
  assert '--import=empty_folder: empty_folder is a folder without' in line


def test_own_data_are_named(refuse, tmp_path):
  """A folder alone would train on the default, and look like one's own."""
  for name in ('pets.npz', 'notes.csv', 'other.txt'):
    (tmp_path / name).touch()
  own = settings.SETTINGS['own_data']
  line = refuse(f'--data_dir={tmp_path}', setting=own)
  assert line == (f'error: --data_dir={tmp_path}: which of its data sets? Give '
                  '--dataset=NAME, one of notes, pets.')
  (tmp_path / 'bare').mkdir()
  assert 'holds no .npz' in refuse(f'--data_dir={tmp_path}/bare', setting=own)
  assert refuse(f'--data_dir={tmp_path}/none', setting=own) == (
      f'error: --data_dir={tmp_path}/none: is no folder.')
  assert refuse('--data_dir=gs://mine', setting=own) == (
      'error: --data_dir=gs://mine: which of its data sets? Give '
      '--dataset=NAME.')


@pytest.mark.parametrize('args, words', [
    (['--data_dir=DIR/pets.npz'], '--data_dir=DIR, and its name, '
     '--dataset=pets.'),
    (['--data_dir=DIR', '--dataset=pets.npz'],
     '--dataset=pets.npz: is a file: give pets, and its folder as --data_dir.'),
    (['--dataset=DIR/pets.npz'],
     'give pets, and its folder, DIR, as --data_dir.')])
def test_a_file_is_told_from_a_data_set(refuse, tmp_path, args, words):
  (tmp_path / 'pets.npz').touch()
  line = refuse(*(word.replace('DIR', str(tmp_path)) for word in args),
                setting=settings.SETTINGS['own_data'])
  assert words.replace('DIR', str(tmp_path)) in line


def test_all_labels_where_none_is_hidden(refuse, tmp_path):
  labels = np.where(np.arange(60) < 20, np.arange(60) % 3, -1)
  np.savez(tmp_path / 'pets.npz', x_train=np.zeros((60, 8, 8, 1), np.uint8),
           y_train=labels, x_test=np.zeros((6, 8, 8, 1), np.uint8),
           y_test=np.arange(6) % 3)
  line = refuse(f'--data_dir={tmp_path}', '--dataset=pets', '--labels=all',
                f'--workdir={tmp_path / "run"}',
                setting=settings.SETTINGS['own_data'])
  assert line == ('error: --labels=all: 40 of 60 rows have no label, and none '
                  'a hidden one; leave it out.')


def test_a_default_is_not_blamed_on_the_user(refuse):
  words = '(--labels_per_class has its default.)'
  assert refuse(labels_per_class=500).endswith(words)
  assert words not in refuse('--labels_per_class=500')


def test_a_folder_of_the_environment_is_no_default(refuse, monkeypatch):
  monkeypatch.setenv('FEDJAX_SSL_DATA', '/nowhere')
  assert refuse(dataset='pets') == 'error: --data_dir=/nowhere: is no folder.'


def test_a_stream_needs_rounds_for_its_tasks(refuse):
  line = refuse(deal=dealing.in_tasks(
      dealing.two_pools('iid_random', 'iid_random'), 2))
  assert '--rounds_per_task=0' in line and 'at least 1' in line


def test_dirichlet_is_refused_where_nothing_reads_it(refuse):
  line = refuse('--dirichlet=shares', setting=settings.SETTINGS['cifar_dirdir'])
  assert line == ('error: --dirichlet=shares: only cross_device and cross_silo '
                  'read it; leave it out or at clients.')


@pytest.mark.parametrize('name', [
    'agents_iid', 'cifar_batch_iid', 'cifar_iid', 'fmnist_streaming'])
def test_alpha_is_refused_where_nothing_reads_it(refuse, name):
  line = refuse('--alpha=0.1', setting=settings.SETTINGS[name])
  assert line == (
      'error: --alpha=0.1: only cifar_dirdir, cifar_iiddir, cifar_pairs, '
      'cross_device, cross_silo, digits_dirdir, labeled_clients and own_data '
      'read it; leave it out or at 0.5.')


def test_alpha_is_refused_where_the_data_name_the_clients(refuse, tmp_path):
  rng = np.random.default_rng(0)
  np.savez(tmp_path / 'pets.npz', x_train=rng.integers(0, 255, (60, 8, 8)),
           y_train=np.arange(60) % 3, x_test=rng.integers(0, 255, (6, 8, 8)),
           y_test=np.arange(6) % 3, client_train=np.arange(60) // 20)
  own = (f'--data_dir={tmp_path}', '--dataset=pets', '--alpha=0.1')
  line = refuse(*own, setting=settings.SETTINGS['own_data'])
  assert line == ('error: --alpha=0.1: the data name the clients; leave it '
                  'out or at 0.3, or give partition=setting to have the rows '
                  'dealt.')


def test_alpha_and_dirichlet_go_on_in_settings_that_read_it_and_in_stored_runs(
    refuse, tmp_path):
  missing = f'--data_dir={tmp_path / "none"}'
  (tmp_path / 'config.json').write_text('{}')
  for args, setting in (
      (['--dirichlet=capped'], 'cross_silo'),
      (['--dirichlet=clients'], 'cifar_dirdir'),
      (['--alpha=0.1'], 'cifar_iiddir'),
      (['--alpha=0.5'], 'cifar_iid'),
      (['--alpha=0.1', f'--workdir={tmp_path}', '--schedule_rounds=2'],
       'cifar_iid'),
      (['--dirichlet=shares', f'--workdir={tmp_path}',
        '--schedule_rounds=2'], 'cifar_dirdir')):
    line = refuse(*args, missing, setting=settings.SETTINGS[setting])
    assert '--dirichlet' not in line and '--alpha' not in line
    assert 'none' in line


def test_more_clients_than_their_memory_allows(refuse, monkeypatch):
  monkeypatch.setattr(client_memory, 'memory', lambda count: 2**20)
  line = refuse('--method=fixmatch(keep_local=True)', '--model=mlp(width=256)')
  assert '--num_clients=20 and --method=fixmatch(keep_local=True): ' in line
  assert 'there are 1.0 MiB' in line
  assert 'Take client_memory=host, client_memory=disk, fewer' in line


KEEPS = ('--method=fixmatch(keep_local=True)', '--model=mlp(width=256)')


def test_a_host_without_room_says_that_the_disk_has_it(refuse, monkeypatch):
  monkeypatch.setattr(files, 'memory', lambda: 2**20)
  line = refuse(*KEEPS, '--client_memory=host')
  assert '--num_clients=20 and --method=fixmatch(keep_local=True)' in line
  assert '--client_memory=host: ' in line and 'host has 1.0 MiB' in line
  assert 'Take client_memory=disk, fewer clients' in line


def test_a_disk_without_room(refuse, monkeypatch):
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: mock.Mock(free=2**20))
  line = refuse(*KEEPS, '--client_memory=disk')
  assert '--client_memory=disk: ' in line and 'has 1.0 MiB of disk' in line
  assert 'Take fewer clients' in line


@pytest.mark.parametrize('args, words', [
    (['--seeds=0,1', '--seed_map=vmap'], ['--seed_map=vmap', 'seed_map=map']),
    (['--client_memory=floppy'], ['disk'])])
def test_what_does_not_go_with_memory_on_the_host(refuse, args, words):
  line = refuse(*KEEPS, '--client_memory=host', *args)
  assert '--client_memory' in line
  assert all(word in line for word in words)
