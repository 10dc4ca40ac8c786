"""A run's folder knows its flags, and its partitions are not to be changed."""
from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from fedjax_ssl import data
from fedjax_ssl.cli import evaluate
from tests.cli import launcher

ARGS = (*launcher.SMALL, '--method=fedavg',
        '--num_rounds=1', '--local_steps=1', '--labeled_fraction=0.1')


@pytest.fixture(scope='module')
def finished(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp('stored') / 'run'
  launcher.run(folder, *ARGS)
  return folder


def test_evaluation_needs_the_folder_alone(finished):
  before = launcher.fingerprints(finished)
  output = launcher.run(finished, '--eval_only')
  rows = [json.loads(x) for x in output.splitlines() if x.startswith('{')]
  kept = [json.loads(x) for x in
          (finished / 'metrics.jsonl').read_text().splitlines()]
  assert [r['seed'] for r in rows] == [0, 1]
  for row, other in zip(rows, kept, strict=True):
    assert row['accuracy'] == other['accuracy']
  assert launcher.fingerprints(finished) == before


@pytest.mark.parametrize('flag, words', [
    ('--alpha=0.1', 'alpha 0.5 -> 0.1'), ('--profile=original', 'profile'),
    ('--seed=0', 'seeds [0, 1] -> [0]')])
def test_flags_that_are_given_must_agree(finished, flag, words):
  before = launcher.fingerprints(finished)
  started = launcher.start(finished, '--eval_only', flag)
  assert started.wait() == 2
  line, = started.output().splitlines()
  assert line.startswith('error: ') and words in line
  assert launcher.fingerprints(finished) == before


def test_another_script_is_refused(finished):
  started = launcher.start(finished, '--eval_only',
                           script=launcher.EXPERIMENTS / 'cifar_iid.py')
  assert started.wait() == 2
  line, = started.output().splitlines()
  assert str(finished) in line
  assert 'a run of digits_dirdir, not of cifar_iid' in line


def test_a_changed_partition_is_named(finished):
  file = finished / 'partition_1.npz'
  good = file.read_bytes()
  labels = np.asarray(data.load('digits').train.labels)
  partition = data.load_partition(file, labels.size, 6)
  data.save_partition(file, partition._replace(
      unlabeled=np.full_like(partition.unlabeled, -1)), num_clients=6,
      labels=labels)
  changed = file.read_bytes()
  for text, more in ((changed, '--num_rounds=2'), (good[:200], '--eval_only')):
    file.write_bytes(text)
    before = launcher.fingerprints(finished)
    started = launcher.start(finished, *ARGS, more)
    assert started.wait() == 2
    line, = started.output().splitlines()
    assert str(file) in line
    assert launcher.fingerprints(finished) == before
  file.unlink()
  launcher.run(finished, *ARGS)  # Written anew, as the flags make it.
  again = data.load_partition(file, labels.size, 6)
  assert data.partition_hash(again) == data.partition_hash(partition)


@pytest.mark.parametrize('more', [
    ('--eval_only',), (*ARGS, '--conv_impl=measure')])
def test_a_stored_flag_that_no_run_has_is_the_files_fault(finished, more):
  file = finished / 'config.json'
  good = file.read_text()
  stored = json.loads(good)
  stored['flags']['conv_impl'] = 'evil'
  file.write_text(json.dumps(stored))
  started = launcher.start(finished, *more)
  assert started.wait() == 2
  file.write_text(good)
  line, = started.output().splitlines()
  assert line.startswith(
      f'error: {file} is damaged: conv_impl=evil: unknown.')


def test_rounds_say_nothing_to_an_evaluation(finished, capsys):
  assert evaluate.main([str(finished), '--num_rounds=3']) == 2
  line, = capsys.readouterr().err.splitlines()
  assert line.startswith('error: --num_rounds ') and 'newest' in line
