"""Benchmarks say in one line what is wrong, and destroy nothing."""
from __future__ import annotations

import sys

from absl import flags
import pytest


@pytest.fixture
def call(bench, capsys, monkeypatch, tmp_path):
  """Runs `main` of a benchmark with flags; returns code and stderr."""
  def run(main, *words):
    harness = bench('harness')
    bench('growth')
    monkeypatch.setattr(sys, 'argv', ['x', f'--out={tmp_path}', *words])
    with pytest.raises(SystemExit) as ended:
      harness.run(main)
    return ended.value.code, capsys.readouterr().err
  flags.FLAGS.mark_as_parsed()
  return run


@pytest.mark.parametrize('words, text', [
    (['--num_devices=0'], 'num_devices=0'), (['--nonsense'], 'nonsense'),
    (['--repeats=x'], 'repeats=x'), (['word'], "'word' is no flag"),
    (['--study=some'], 'study=some'),
    (['--out=/dev/null/x'], '--out=/dev/null/x cannot be written'),
    # Nobody can write there, though rights say that root can.
    (['--out=/proc/x'], '--out=/proc/x cannot be written')])
def test_bad_flags_are_one_line(call, words, text):
  def main():
    raise AssertionError('it ran')
  code, said = call(main, *words)
  assert code == 2 and text in said and len(said.splitlines()) == 1


def test_a_trial_of_out_leaves_nothing(call, tmp_path):
  """Not even folders; but those that were there, empty or not, stay."""
  (tmp_path / 'old').mkdir()
  def main():
    assert not any((tmp_path / 'old').iterdir())
    raise ValueError('it ran')
  code, said = call(main, f'--out={tmp_path}/old/new/newer')
  assert code == 2 and said == 'error: it ran\n'
  assert [path.name for path in tmp_path.iterdir()] == ['old']


@pytest.mark.parametrize('name', [
    'conv_layers', 'conv_tiles', 'fedavg_cnn', 'feddure_round',
    'feddure_step', 'growth', 'huge_pages', 'memory', 'method_rounds',
    'padding', 'processes', 'profile_round', 'resnet9'])
def test_quick_sizes_are_flags(bench, name):
  """And none overrides what is on the command line."""
  made, harness = bench(name), bench('harness')
  first, *others = made.QUICK
  flags.FLAGS(['', '--quick', f'--{first}={flags.FLAGS[first].default}'])
  before = flags.FLAGS[first].value
  harness.shrink(made.QUICK)
  assert flags.FLAGS[first].value == before
  for other in others:
    assert flags.FLAGS[other].value == made.QUICK[other]


@pytest.mark.parametrize('error', [MemoryError('no room'), OSError('no room')])
def test_what_a_machine_lacks_is_one_line(call, error):
  def main():
    raise error
  code, said = call(main)
  assert code == 2 and said == 'error: no room\n'


def test_a_home_is_found_in_folders(call, bench, monkeypatch, tmp_path):
  """A shell leaves the ~ of --out=~/x alone."""
  bench('make_peers')
  monkeypatch.setenv('HOME', str(tmp_path))
  def main():
    raise ValueError(f'{flags.FLAGS.out} {flags.FLAGS.peers_dir}')
  code, said = call(main, '--out=~/a', '--peers_dir=~/b')
  assert code == 2 and said == f'error: {tmp_path}/a {tmp_path}/b\n'


def test_environments_of_others_are_left_alone(bench, tmp_path):
  """A user's own environment may have the name of a peer."""
  peers, envs = bench('make_peers'), bench('peer_envs')
  home = tmp_path / 'torch'
  home.mkdir()
  (home / 'pyvenv.cfg').write_text('mine')
  with pytest.raises(ValueError, match='was not made by this script'):
    peers.make(tmp_path, 'torch')
  assert (home / 'pyvenv.cfg').read_text() == 'mine'
  envs.begin(tmp_path, 'pfl')
  assert envs.complaint(tmp_path, 'pfl') == 'unfinished'
  assert envs.is_ours(tmp_path, 'pfl') and not envs.is_ours(tmp_path, 'torch')
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='--peers_dir=.*file cannot be written'):
    peers.make(tmp_path / 'file', 'torch')


def test_a_peer_that_talks_nonsense_is_a_peer_that_failed(bench, tmp_path):
  process = bench('peer_process')
  program = tmp_path / 'python'
  program.write_text('#!/bin/sh\necho Warning: hello\n')
  program.chmod(0o755)
  with pytest.raises(process.PeerError, match="it answered 'Warning: hello'"):
    process.Peer(program, 'x.py', [], log=tmp_path / 'log', timeout=300)
