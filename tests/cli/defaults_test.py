"""A run keeps what its texts stood for, whatever another version's defaults."""
from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest

import fedjax_ssl
from fedjax_ssl.training import metrics
from tests.cli import launcher

ARGS = (*launcher.SMALL, '--checkpoint_every=1', '--eval_every=1',
        '--schedule_rounds=4')
UDA = '--method=uda(temperature=0.5)'
# A version in which UDA's default was another.
OLD = """
import sys
from fedjax_ssl import cli
from fedjax_ssl.methods import uda
uda._PROFILES['official']['tsa'] = 'linear'
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
  place = tmp_path_factory.mktemp('defaults') / 'run'
  subprocess.run(
      [sys.executable, '-c', OLD, 'train', 'digits_dirdir', *ARGS, UDA,
       '--num_rounds=2', f'--workdir={place}'], check=True,
      capture_output=True)
  return place


@pytest.mark.thorough
def test_another_default_is_refused_with_the_knob_to_write(folder, tmp_path):
  before = launcher.fingerprints(folder)
  for words in (['train', 'digits_dirdir', *ARGS, UDA, '--num_rounds=4',
                 f'--workdir={folder}'], ['evaluate', str(folder)]):
    done = launcher.call(*words)
    assert done.returncode == 2
    line, = done.stderr.splitlines()
    assert "tsa='linear'" in line and "tsa='none'" in line
    assert launcher.fingerprints(folder) == before
  # It can be read, and repeated, as what it was.
  assert 'linear' in fedjax_ssl.load(folder).spec.method
  printed = launcher.call('repeat', str(folder), '--print').stdout
  advice, = re.findall(r'--method="(.*)"', line)
  assert advice in printed
  # The advice is followed: the same run as one that wrote the knob at once.
  straight = tmp_path / 'straight'
  launcher.run(straight, *ARGS, f'--method={advice}', '--num_rounds=4')
  launcher.run(folder, *ARGS, f'--method={advice}', '--num_rounds=4')
  launcher.run(folder, *ARGS, f'--method={advice}', '--num_rounds=4')
  assert metrics.read(folder) == metrics.read(straight)
  assert launcher.call('evaluate', str(folder)).returncode == 0
  assert fedjax_ssl.load(folder).round == 4


@pytest.mark.parametrize('method', [
    'uda(threshold=0.1)', 'fixmatch', 'fedprox', 'flexmatch'])
def test_another_text_is_refused_as_ever(folder, method):
  done = launcher.call(
      'train', 'digits_dirdir', *ARGS, f'--method={method}',
      '--num_rounds=4', f'--workdir={folder}')
  assert done.returncode == 2 and 'holds a run with other flags' in done.stderr
  assert f'--flagfile={folder / "run.flags"} --workdir={folder}' in done.stderr


def test_another_setting_is_refused_by_name(folder):
  done = launcher.call('train', 'cifar_iid', *ARGS, '--dataset=digits',
                       '--labels_per_class=10',
                       '--num_rounds=4', f'--workdir={folder}')
  assert done.returncode == 2 and (
      f'--workdir={folder}: holds a run of digits_dirdir, not of cifar_iid; '
      'give another folder.') in done.stderr


def test_a_method_with_the_knobs_of_another_is_another(tmp_path):
  """All of FedAvg's knobs are UDA's too, with the same defaults."""
  place = tmp_path / 'run'
  small = [word for word in ARGS if not word.startswith('--method')]
  launcher.run(place, *small, '--method=fedavg', '--num_rounds=1')
  for words in (['train', 'digits_dirdir', *small, f'--workdir={place}',
                 '--num_rounds=1', '--method=uda'],
                ['evaluate', str(place), '--method=uda']):
    done = launcher.call(*words)
    assert done.returncode == 2
    assert 'holds a run with other flags: method fedavg -> uda' in done.stderr


def test_a_folder_without_resolved_knobs_goes_on(tmp_path):
  place = tmp_path / 'run'
  launcher.run(place, *ARGS, '--num_rounds=1')
  stored = json.loads((place / 'config.json').read_text())
  del stored['facts']['choices']
  (place / 'config.json').write_text(json.dumps(stored))
  launcher.run(place, *ARGS, '--num_rounds=2')
  stored = json.loads((place / 'config.json').read_text())
  assert stored['facts']['choices']['method']['knobs']['threshold'] == 0.3


NEW = ('aggregator', 'server_optimizer', 'server_learning_rate', 'attack',
       'partition', 'min_size', 'max_rows', 'report')
# A version that had none of them.
YOUNGER = f"""
import sys
from fedjax_ssl import cli
from fedjax_ssl.running import job
old_build = job.build
def build(*args, **more):
  return old_build(*args, **more)._replace(new=frozenset({NEW!r}))
def without(made):
  task = made.facts['task']
  facts = dict(made.facts)
  facts['task'] = dict(task, spec={{k: v for k, v in task['spec'].items()
                                   if k not in {NEW!r}}})
  facts['choices'] = {{k: v for k, v in facts['choices'].items()
                      if k not in {NEW!r}}}
  return made._replace(facts=facts)
job.build = lambda *args, **more: without(build(*args, **more))
sys.exit(cli.main(sys.argv[1:]))
"""

@pytest.mark.thorough
def test_options_that_are_new_are_at_their_defaults(tmp_path):
  """A run of a version without them goes on, and stays as it is."""
  straight, old = tmp_path / 'straight', tmp_path / 'old'
  launcher.run(straight, *ARGS, '--num_rounds=4')
  subprocess.run(
      [sys.executable, '-c', YOUNGER, 'train', 'digits_dirdir', *ARGS,
       '--num_rounds=2', f'--workdir={old}'], check=True, capture_output=True)
  stored = json.loads((old / 'config.json').read_text())
  assert not {*NEW} & {*stored['flags'], *stored['facts']['choices'],
                       *stored['facts']['task']['spec']}
  done = launcher.call('train', 'digits_dirdir', *ARGS, '--num_rounds=4',
                       '--aggregator=median', f'--workdir={old}')
  assert done.returncode == 2
  assert 'aggregator absent -> median' in done.stderr
  for rounds in (3, 4):  # The second finds what the first has stored.
    launcher.run(old, *ARGS, f'--num_rounds={rounds}')
  assert metrics.read(old) == metrics.read(straight)
  assert fedjax_ssl.load(old).round == 4
