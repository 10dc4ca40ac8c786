"""Peers: what is missing is said, and all do the same rounds."""
from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import time

from absl import flags
import numpy as np
import pytest

import fedjax_ssl as fssl


@pytest.fixture
def fleet(bench, tmp_path):
  """The benchmark with tiny sizes, and no environment at all."""
  made = bench('fedavg_peers')
  flags.FLAGS(['', f'--peers_dir={tmp_path / "peers"}', '--num_clients=3',
               '--rows=4', '--cohort_size=2', '--batch=2', '--side=8',
               '--num_devices=1', f'--out={tmp_path / "out"}'])
  return made


def install(bench, folder, name):
  """Makes an environment look made, with this interpreter."""
  envs = bench('peer_envs')
  python = envs.interpreter(folder, name)
  python.parent.mkdir(parents=True)
  python.symlink_to(sys.executable)
  envs.mark(folder, name)
  return python


def test_missing_environments_are_named_with_the_command(fleet, bench,
                                                         tmp_path):
  install(bench, tmp_path / 'peers', 'pfl')
  systems, out = fleet.find()
  assert list(systems) == ['pfl-research']
  assert set(out) == set(fleet.SYSTEMS) - set(systems)
  assert out['Flower'].startswith('missing: make_peers.py --peers_dir=')
  assert out['Flower'].endswith('--peers=flower')


def test_an_environment_of_other_versions_does_not_count(fleet, bench,
                                                         tmp_path):
  folder = tmp_path / 'peers'
  install(bench, folder, 'fedjax')
  envs = bench('peer_envs')
  assert envs.complaint(folder, 'fedjax') is None
  mark = folder / 'fedjax' / 'made.json'
  mark.write_text(mark.read_text().replace('0.0.17', '0.0.16'))
  assert envs.complaint(folder, 'fedjax') == 'of other versions'


def test_a_missing_peer_stands_in_the_table(fleet, capsys):
  systems, out = fleet.find()
  assert not systems
  ratios = fleet.report({'ours': [1.0, 3.0], 'FedJAX': [4.0, 4.0]},
                        {'FedJAX': 1e-6}, {'FedJAX': {'jax': '0'}}, out)
  assert ratios == {'FedJAX': 0.5}
  lines = capsys.readouterr().out.splitlines()
  assert any(line.startswith('Flower') and 'missing: make_peers.py' in line
             for line in lines)
  path = next(line for line in lines if line.startswith('Written'))
  saved = json.loads(open(path.split(': ')[1]).read())
  assert saved['measured']['not_run'] == out
  assert saved['measured']['peer_versions'] == {'FedJAX': {'jax': '0'}}


def test_require_peers_fails_before_anything_is_measured(root, tmp_path):
  script = root / 'experiments' / 'benchmarks' / 'fedavg_peers.py'
  done = subprocess.run(
      [sys.executable, str(script), f'--peers_dir={tmp_path}',
       '--require_peers'], capture_output=True, text=True, check=False,
      env={'PYTHONPATH': str(root), 'PATH': ''}, timeout=300)
  assert done.returncode == 2
  (line,) = [x for x in done.stderr.splitlines() if x.startswith('error: ')]
  assert '--require_peers' in line and 'Flower: missing' in line


def test_a_task_travels_unchanged(fleet, bench, tmp_path):
  task_lib = bench('peer_task')
  _, task = fleet.make_task(batch=2, epochs=3, rounds=4, rows=4, mesh=None)
  task_lib.save(tmp_path, task)
  got = task_lib.load(tmp_path)
  for name in ('images', 'labels', 'cohorts'):
    np.testing.assert_array_equal(getattr(got, name), getattr(task, name))
  assert task.cohorts.shape == (4, 2)
  np.testing.assert_array_equal(np.stack(got.clients), np.stack(task.clients))
  assert got[5:] == task[5:] and got.epochs == 3
  assert fleet.distance(got.params, task.params, {
      layer: {k: v - 1 for k, v in leaves.items()}
      for layer, leaves in task.params.items()}) == (0.0, 1.0)


def test_distance_counts_in_units_of_our_change(fleet):
  def at(x):
    return {'a': {'b': np.full(4, x)}}
  assert fleet.distance(at(3.0), at(2.0), at(0.0)) == (0.5, 1.5)
  with pytest.raises(ValueError, match='other names'):
    fleet.distance({'a': {'c': np.zeros(4)}}, at(2.0), at(0.0))


def test_a_killed_peer_takes_its_children_along(bench, tmp_path):
  """They hold its output open, and would disturb what is timed next."""
  process = bench('peer_process')
  script = tmp_path / 'parent.py'
  script.write_text("""
import os, signal, subprocess, sys
print('{"numpy": "1"}', flush=True)
child = subprocess.Popen(['sleep', '600'])
input()
print('\\x1b[92mINFO\\x1b[0m', child.pid, file=sys.stderr, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""")
  peer = process.Peer(sys.executable, str(script), [], log=tmp_path / 'log',
                      timeout=300)
  with pytest.raises(process.PeerError,
                     match=r'^INFO \d+ \(signal SIGKILL\)$') as raised:
    peer.advance(1)
  peer.close()
  child = int(str(raised.value).split()[1])
  for _ in range(3000):
    try:
      if pathlib.Path(f'/proc/{child}/stat').read_text().split()[2] == 'Z':
        return
    except OSError:  # Also where it ends between being opened and read.
      return
    time.sleep(.1)
  pytest.fail('the child is alive')


def test_a_peer_obeys_and_its_last_words_are_kept(fleet, bench, tmp_path):
  """A script without a system of its own: it moves weights by one a round."""
  process, task_lib = bench('peer_process'), bench('peer_task')
  _, task = fleet.make_task(batch=2, epochs=1, rounds=1, rows=4, mesh=None)
  task_lib.save(tmp_path, task)
  script = tmp_path / 'moves.py'
  script.write_text("""
from experiments.benchmarks import peer_task
class Moves:
  def __init__(self, task, word):
    self.made, self.word = task.params, word
  def advance(self, count):
    print('not an answer')
    if self.word == 'breaks':
      raise RuntimeError('it broke')
    for leaves in self.made.values():
      for name in leaves:
        leaves[name] = leaves[name] + count
  def params(self):
    return self.made
peer_task.main(Moves, ['numpy'])
""")
  def start(word):
    return process.Peer(sys.executable, str(script), [str(tmp_path), word],
                        log=tmp_path / 'log', timeout=300)
  peer = start('moves')
  assert peer.versions == {'numpy': np.__version__}
  peer.advance(2)
  peer.save(tmp_path / 'weights.npz')
  peer.close()
  got = task_lib.flat(task_lib.read_params(tmp_path / 'weights.npz'))
  for name, leaf in task_lib.flat(task.params).items():
    np.testing.assert_allclose(got[name], leaf + 2)
  peer = start('breaks')
  with pytest.raises(process.PeerError, match='RuntimeError: it broke'):
    peer.advance(1)
  peer.close()


@pytest.mark.parametrize('required', [False, True])
def test_a_peer_that_ends_while_it_is_timed_is_a_row(
    fleet, bench, tmp_path, monkeypatch, capsys, required):
  """The others go on, and what they did is saved."""
  script = tmp_path / 'ends.py'
  script.write_text("""
from experiments.benchmarks import peer_task
class Moves:
  def __init__(self, task, rounds):
    self.made, self.left = task.params, int(rounds)
    self.task, self.done = task, 0
  def advance(self, count):
    self.left -= count
    for _ in range(count):
      self.task.cohort(self.done)  # There are enough for all rounds.
      self.done += 1
    if self.left < 0:
      raise RuntimeError('it broke')
  def params(self):
    return {layer: {name: leaf + 1e-3 for name, leaf in leaves.items()}
            for layer, leaves in self.made.items()}
peer_task.main(Moves, ['numpy'])
""")
  systems = {
      name: fleet.System('fedjax', str(script), 0.5, (rounds,))
      for name, rounds in (('lasts', '99'), ('breaks', '2'))}
  monkeypatch.setattr(fleet, 'SYSTEMS', systems)
  monkeypatch.setattr(fleet, 'find', lambda: (systems, {}))
  monkeypatch.setattr(fleet, 'agreement', lambda systems, mesh: (
      dict.fromkeys(systems, 0.0), {}))
  # They do not train, but move by as little as they like.
  monkeypatch.setattr(fleet, '_SPREAD', float('inf'))
  monkeypatch.setattr(bench('peer_envs'), 'interpreter',
                      lambda folder, name: sys.executable)
  monkeypatch.setattr(bench('harness'), 'make_mesh', lambda: None)
  flags.FLAGS['repeats'].value = 2
  flags.FLAGS['require_peers'].value = required
  if required:
    with pytest.raises(ValueError, match='breaks: failed: .*it broke'):
      fleet.main()
  else:
    fleet.main()
  saved = json.loads((tmp_path / 'out' / 'fedavg_peers.json').read_text())
  measured = saved['measured']
  assert set(measured['seconds']) == {'ours', 'lasts'}
  assert len(measured['seconds']['lasts']) == 2
  assert set(measured['ratios']) == set(measured['peer_versions']) == {'lasts'}
  assert measured['not_run'] == {
      'breaks': 'failed: RuntimeError: it broke (exit status 1)'}
  assert 'breaks' in capsys.readouterr().out


def test_our_weights_and_pytorchs_are_inverses(fleet, bench):
  pytest.importorskip('torch')
  task_lib, torch_loop = bench('peer_task'), bench('torch_loop')
  ours, task = fleet.make_task(batch=2, epochs=1, rounds=2, rows=4, mesh=None)
  assert isinstance(ours.spec, fssl.TaskSpec)
  loop = torch_loop.make(task, 'channels_last')
  got = task_lib.flat(torch_loop.to_flax(loop.network))
  want = task_lib.flat(task.params)
  assert got.keys() == want.keys()
  for name, leaf in want.items():
    np.testing.assert_array_equal(got[name], leaf)
