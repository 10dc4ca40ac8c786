"""The systems that we compare with: the real ones, and Flower's two scripts."""
from __future__ import annotations

import json
import os
import pathlib
import sys

from absl import flags
import numpy as np
import pytest

from tests.experiments import fake_flower

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


@pytest.mark.parametrize('name', [
    'PyTorch, contiguous', 'PyTorch, channels_last', 'pfl-research', 'FedJAX',
    'Flower', 'Flower, as documented'])
def test_a_system_ends_a_round_at_our_weights(fleet, bench, name):
  folder = os.environ.get('FEDJAX_SSL_PEERS')
  if not folder:
    pytest.skip('FEDJAX_SSL_PEERS names no folder of make_peers.py')
  system = fleet.SYSTEMS[name]
  missing = bench('peer_envs').complaint(
      pathlib.Path(folder), system.environment)
  if missing:
    pytest.skip(f'{system.environment} in FEDJAX_SSL_PEERS is {missing}')
  flags.FLAGS['peers_dir'].value = folder
  gaps, failed = fleet.agreement({name: system}, None)
  assert not failed and gaps[name] < 1e-3


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
