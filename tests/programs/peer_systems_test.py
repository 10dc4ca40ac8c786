"""The systems that we compare with: the real ones, and Flower's two scripts."""
from __future__ import annotations

import json
import os
import pathlib
import sys

from absl import flags
import numpy as np
import pytest

from tests.programs import fake_flower

# Runs a script as `peer_process` starts it, its orders given beforehand.
_SCRIPT = """
import io, runpy, sys
script, orders, *words = sys.argv[1:]
sys.argv, sys.stdin = [script, *words], io.StringIO(orders)
runpy.run_path(script, run_name='__main__')
"""


@pytest.fixture
def fleet(bench):
  """The benchmark with tiny sizes."""
  made = bench('fedavg_peers')
  flags.FLAGS(['', '--num_clients=4', '--rows=6', '--cohort_size=3',
               '--batch=2', '--side=8', '--num_devices=1'])
  return made


def peers_dir(envs) -> pathlib.Path:
  """The folder that FEDJAX_SSL_PEERS names, with one environment at least."""
  text = os.environ.get('FEDJAX_SSL_PEERS')
  if not text:
    pytest.skip('FEDJAX_SSL_PEERS names no folder of make_peers.py')
  folder = pathlib.Path(text).absolute()
  if all(envs.complaint(folder, name) == 'missing'
         for name in envs.ENVIRONMENTS):
    pytest.fail(f'FEDJAX_SSL_PEERS={text} has no environment of '
                'make_peers.py; name a folder that has, or leave it out.')
  return folder


@pytest.mark.parametrize('name', [
    'PyTorch, contiguous', 'PyTorch, channels_last', 'pfl-research', 'FedJAX',
    'Flower', 'Flower, as documented'])
def test_a_system_ends_a_round_at_our_weights(fleet, bench, name):
  envs = bench('peer_envs')
  folder = peers_dir(envs)
  system = fleet.SYSTEMS[name]
  missing = envs.complaint(folder, system.environment)
  if missing:
    pytest.skip(f'{folder / system.environment} is {missing}')
  flags.FLAGS['peers_dir'].value = str(folder)
  gaps, failed = fleet.agreement({name: system}, None)
  assert not failed and gaps[name] < 1e-3


def test_a_folder_without_any_system_is_no_reason_to_skip(
    bench, monkeypatch, tmp_path):
  envs = bench('peer_envs')
  (tmp_path / 'file').write_text('')
  for text in (tmp_path, tmp_path / 'file', tmp_path / 'none'):
    monkeypatch.setenv('FEDJAX_SSL_PEERS', str(text))
    with pytest.raises(pytest.fail.Exception,
                       match=f'FEDJAX_SSL_PEERS={text} has no environment'):
      peers_dir(envs)
  envs.begin(tmp_path, 'pfl')
  monkeypatch.setenv('FEDJAX_SSL_PEERS', str(tmp_path))
  assert peers_dir(envs) == tmp_path


def test_every_system_is_tried(fleet):
  marks = test_a_system_ends_a_round_at_our_weights.pytestmark
  assert marks[0].args[1] == list(fleet.SYSTEMS)


@pytest.mark.parametrize('words, batch, epochs', [
    ([], 2, 1), (['documented'], 6, 2)], ids=['kept', 'documented'])
def test_flowers_scripts_are_the_loop_over_clients(
    root, run_python, fleet, bench, tmp_path, words, batch, epochs):
  """Steps in an order of their own, and on all rows where that differs."""
  pytest.importorskip('torch')
  task_lib, torch_loop = bench('peer_task'), bench('torch_loop')
  _, task = fleet.make_task(batch=batch, epochs=epochs, rounds=3, rows=6,
                            mesh=None)
  clients = np.split(np.arange(24), [3, 9, 11])  # Their shares differ.
  if words:
    clients = [rows[:batch] for rows in clients]
  task = task._replace(clients=clients, learning_rate=0.1)
  task_lib.save(tmp_path, task)
  fake_flower.install(tmp_path / 'packages')
  scripts = root / 'experiments' / 'benchmarks'
  said = run_python(
      _SCRIPT, str(scripts / 'peers' / 'flower_worker.py'),
      f'advance 1\nadvance 2\nsave {tmp_path / "got.npz"}\n', str(tmp_path),
      *words, env={'PYTHONPATH': os.pathsep.join([
          str(tmp_path / 'packages'), str(scripts), str(scripts / 'peers'),
          *sys.path])})
  versions, *answers = map(json.loads, said.splitlines())
  assert set(versions) == {'flwr', 'ray', 'torch'} and answers == 3 * ['done']
  loop = torch_loop.make(task, 'contiguous')
  for cohort in task.cohorts:
    loop.round(cohort)
  gap, length = fleet.distance(
      task_lib.read_params(tmp_path / 'got.npz'),
      torch_loop.to_flax(loop.network), task.params)
  assert gap < 1e-4 and abs(length - 1) < 1e-4
