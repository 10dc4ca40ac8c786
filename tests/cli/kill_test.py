"""Runs that are killed or damaged end in the bytes of those that are not."""
from __future__ import annotations

import hashlib
import pathlib
import random
import shlex
import signal
import time
from typing import Any

import jax
import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl.core import run_files
from fedjax_ssl.training import checkpoint, workdir
from fedjax_ssl.training.checkpoint import manifest
from tests.cli import launcher
from tests.thorough import wider

ROUNDS = 12
ARGS = (*launcher.ON_ALL, '--checkpoint_every=1', '--eval_every=2')


def args(num_rounds: int = ROUNDS) -> tuple[str, ...]:
  return (*ARGS, f'--num_rounds={num_rounds}')


def content(folder: pathlib.Path, round_: int) -> dict[str, Any]:
  """The hash of every leaf of every seed's state, and of the metrics."""
  run = fedjax_ssl.load(folder)
  assert run.round == round_
  leaves = {name: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
            for name, leaf in manifest.named(run.states)}
  assert any('memory' in name for name in leaves)
  return {**leaves, 'checkpoint': launcher.header(folder, round_),
          'metrics': (folder / 'metrics.jsonl').read_text()}


@pytest.fixture(scope='module')
def straight(tmp_path_factory) -> pathlib.Path:
  """A run that nothing disturbed."""
  folder = tmp_path_factory.mktemp('straight') / 'run'
  launcher.run(folder, *args())
  return folder


@pytest.fixture(scope='module')
def expected(straight) -> dict[str, Any]:
  return content(straight, ROUNDS)


def newest(folder: pathlib.Path) -> int:
  return checkpoint.Checkpoints(folder / 'checkpoints').latest() or 0


def until(started: launcher.Started, folder: pathlib.Path, round_: int) -> None:
  """Waits until a run has saved a round."""
  while started.running and newest(folder) < round_:
    time.sleep(0.002)


def kill(folder: pathlib.Path, number: int, *more: str) -> None:
  """Kills a run so often, and lets it end."""
  draw = random.Random(5)
  script = launcher.held(folder.parent, ROUNDS - 1)
  # Before the folder exists, and then anywhere, saves included.
  started = launcher.start(folder, *args(), *more, script=script)
  time.sleep(draw.uniform(0, 1))
  started.process.kill()
  started.wait()
  kills = 1
  while kills < number:
    started = launcher.start(folder, *args(), *more, script=script)
    until(started, folder,
          min(newest(folder) + draw.choice((0, 0, 1)), ROUNDS - 1))
    time.sleep(draw.uniform(0, 0.1))
    started.process.kill()
    if started.wait() != -signal.SIGKILL:
      break
    kills += 1
  assert kills == number, started.output()
  assert newest(folder) < ROUNDS
  launcher.run(folder, *args(), *more)


@pytest.mark.parametrize('number', [3, *wider(10)])
def test_kills_change_no_bit(tmp_path, expected, number):
  kill(tmp_path / 'run', number)
  assert content(tmp_path / 'run', ROUNDS) == expected


@pytest.mark.thorough
@pytest.mark.parametrize('number', [3, 10])
def test_nor_with_what_clients_keep_on_disk(tmp_path, expected, number):
  kill(tmp_path / 'run', number, '--client_memory=disk')
  found = content(tmp_path / 'run', ROUNDS)
  assert {**found, 'checkpoint': expected['checkpoint']} == expected
  folder = tmp_path / 'run' / 'memory'
  assert {path.name for path in folder.iterdir()} == {
      '0.rows', '0.first', '1.rows', '1.first'}


def test_sigterm_saves_and_exits_0(tmp_path, expected):
  folder = tmp_path / 'run'
  started = launcher.start(folder, *args(),
                           script=launcher.held(tmp_path, ROUNDS - 1))
  until(started, folder, 3)
  started.process.terminate()
  assert started.wait() == 0, started.output()
  reached = newest(folder)
  assert 3 <= reached < ROUNDS
  assert f'Stopped at round {reached}' in started.output()
  assert f'--workdir={shlex.quote(str(folder))}' in started.output()
  launcher.run(folder, *args())
  assert content(folder, ROUNDS) == expected


def test_sigterm_before_the_first_round_exits_143(tmp_path):
  folder = tmp_path / 'run'
  started = launcher.start(folder, *args(), script=launcher.held(tmp_path, 0))
  while started.running and not (folder / run_files.CONFIG).exists():
    time.sleep(0.002)
  started.process.terminate()
  assert started.wait() == 143, started.output()
  assert 'Traceback' not in started.output() and newest(folder) == 0


def test_a_finished_run_is_left_alone(straight, expected):
  before = launcher.fingerprints(straight)
  output = launcher.run(straight, *args())
  assert launcher.fingerprints(straight) == before
  assert '| fixmatch' in output and f'| {ROUNDS:6d} |' in output
  assert expected == content(straight, ROUNDS)


@pytest.mark.thorough
def test_other_intervals_change_no_bit_of_the_model(tmp_path, straight):
  folder = tmp_path / 'run'
  launcher.run(folder, *args(1), '--eval_every=0', '--checkpoint_every=0')
  launcher.run(folder, *args(), '--eval_every=7', '--checkpoint_every=4')
  states = [fedjax_ssl.load(f).states for f in (folder, straight)]
  jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize('changes, named', [
    (('--alpha=1',), 'alpha 0.5 -> 1.0'),
    (('--seeds=0,2',), 'seeds [0, 1] -> [0, 2]'),
    (('--num_rounds=3',), f'num_rounds {ROUNDS} -> 3'),
    (('--schedule_rounds=3',), f'schedule_rounds {ROUNDS} -> 3'),
])
def test_other_flags_are_refused(straight, changes, named):
  before = launcher.fingerprints(straight)
  started = launcher.start(straight, *args(), *changes)
  assert started.wait() == 2
  assert named in started.output()
  assert len(started.output().splitlines()) == 1
  assert launcher.fingerprints(straight) == before


def test_more_rounds_continue_after_a_full_disk_and_damage(tmp_path, expected):
  folder = tmp_path / 'run'
  launcher.run(folder, *args(4))
  saved = launcher.fingerprints(folder / 'checkpoints')
  rows = (folder / 'metrics.jsonl').read_bytes()
  # No step can be written any more.
  started = launcher.start(folder, *args(), largest=10_000)
  assert started.wait() == 75, started.output()
  assert started.output().splitlines()[-1].startswith(
      'error: Cannot save round 5 in ')
  assert 'Traceback' not in started.output()
  assert launcher.fingerprints(folder / 'checkpoints') == saved
  assert (folder / 'metrics.jsonl').read_bytes() == rows
  # The newest step and the last line are cut short, and one was begun.
  for file in (folder / 'checkpoints' / '4').rglob('*'):
    if file.is_file():
      file.write_bytes(file.read_bytes()[:file.stat().st_size // 2])
  (folder / 'metrics.jsonl').write_bytes(rows[:-20])
  (folder / 'checkpoints' / '5.orbax-checkpoint-tmp').mkdir()
  output = launcher.run(folder, *args())
  assert 'checkpoints/4 is damaged' in output
  assert (folder / 'metrics.jsonl').read_bytes().startswith(rows)
  assert workdir.read_config(folder)['flags']['schedule_rounds'] == 4
  assert launcher.but_for_run(content(folder, ROUNDS)) == (
      launcher.but_for_run(expected))
