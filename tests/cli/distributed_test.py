"""Several processes are one run: its bits, its folder, its end."""
from __future__ import annotations

import hashlib
import json
import pathlib
import socket
import time
from typing import Any

import jax
import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl import config
from fedjax_ssl.core import checks
from fedjax_ssl.running import devices
from fedjax_ssl.training import checkpoint, processes
from fedjax_ssl.training.checkpoint import manifest
from tests import toy
from tests.cli import launcher

PLACED = pathlib.Path(__file__).with_name('placed.py')
ROUNDS = 12
ARGS = (*launcher.ON_ALL, '--checkpoint_every=1', '--eval_every=2')


_kept: list[socket.socket] = []


def address() -> str:
  """Where processes may meet; no other program is given this port meanwhile."""
  free = socket.socket()
  free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # As JAX's own.
  free.bind(('localhost', 0))
  _kept.append(free)
  return f'localhost:{free.getsockname()[1]}'


def pair(folder: pathlib.Path, *args: str, second: tuple[str, ...] = (),
         script: pathlib.Path = launcher.DIGITS) -> list[launcher.Started]:
  """Starts a run of two processes on this machine.

  The second one is told of a folder of its own, as on a machine that does not
  see the first one's disk.
  """
  cluster_args = ('--distributed', f'--coordinator_address={address()}',
                  '--num_processes=2')
  return [launcher.start(place, *args, *cluster_args, f'--process_id={i}',
                         *more, script=script)
          for i, (place, more) in enumerate((
              (folder, ()), (elsewhere(folder), second)))]


def until(started: list[launcher.Started], folder: pathlib.Path, round_: int
          ) -> None:
  """Waits for a checkpoint."""
  while all(s.running for s in started) and newest(folder) < round_:
    time.sleep(0.002)


def ends(started: list[launcher.Started], code: int = 0) -> list[str]:
  """What they printed, after all ended with this code."""
  codes = [s.wait() for s in started]
  output = [s.output() for s in started]
  assert codes == [code] * len(started), output
  return output


def elsewhere(folder: pathlib.Path) -> pathlib.Path:
  return folder.with_name(f'{folder.name}_elsewhere')


def content(folder: pathlib.Path) -> dict[str, Any]:
  """The hash of every leaf of the newest step, and the rows."""
  run = fedjax_ssl.load(folder)
  assert run.round == ROUNDS
  leaves = {name: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
            for name, leaf in manifest.named(run.states)}
  assert any('memory' in name for name in leaves)
  return {**leaves, 'checkpoint': launcher.header(folder, ROUNDS),
          'metrics': (folder / 'metrics.jsonl').read_text()}


def newest(folder: pathlib.Path) -> int:
  return checkpoint.Checkpoints(folder / 'checkpoints').latest() or 0


@pytest.fixture(scope='module')
def expected(tmp_path_factory) -> dict[str, Any]:
  """What one process with one device leaves."""
  folder = tmp_path_factory.mktemp('alone') / 'run'
  launcher.run(folder, *ARGS, '--num_devices=1', f'--num_rounds={ROUNDS}')
  return content(folder)


@pytest.mark.thorough
def test_processes_come_and_go_and_change_no_bit(tmp_path, expected):
  folder = tmp_path / 'run'
  started = pair(folder, *ARGS, '--num_devices=2', '--num_rounds=10',
                 script=launcher.held(tmp_path, 9))
  until(started, folder, 3)
  started[1].process.terminate()
  (tmp_path / 'go').touch()
  first, second = ends(started)
  reached = newest(folder)
  assert 3 <= reached < 10
  assert f'Stopped at round {reached}' in first
  assert 'round' not in second  # The first one speaks for both.
  assert not elsewhere(folder).exists()
  launcher.run(folder, *ARGS, '--num_devices=1', '--num_rounds=10')
  first, second = ends(pair(folder, *ARGS, '--num_devices=4',
                            f'--num_rounds={ROUNDS}'))
  assert f'Results: {folder}' in first and 'Results' not in second
  assert launcher.but_for_run(content(folder)) == launcher.but_for_run(
      expected)


@pytest.mark.thorough
def test_a_run_goes_on_though_one_process_alone_sees_its_folder(tmp_path):
  """Each has a disk of its own, so the same name is two folders."""
  places = [tmp_path / 'here', tmp_path / 'there']
  for place in places:
    place.mkdir()
  for rounds in (2, 4):
    where = address()
    started = [launcher.Started(
        [place / 'log'],
        ['--workdir=run', *ARGS, '--num_devices=2', f'--num_rounds={rounds}',
         '--distributed', f'--coordinator_address={where}',
         '--num_processes=2', f'--process_id={i}'],
        launcher.DIGITS, place=str(place)) for i, place in enumerate(places)]
    ends(started)
    assert newest(places[0] / 'run') == rounds
  assert [file.name for file in places[1].iterdir()] == ['log']


def test_one_that_is_lost_ends_the_other(tmp_path):
  folder = tmp_path / 'run'
  started = pair(folder, *ARGS, '--num_devices=2', '--num_rounds=100000')
  until(started, folder, 3)
  started[1].process.kill()
  output, = ends(started[:1], code=2)
  assert 'error: ' in output and 'Traceback' not in output
  assert 'Process 0 of 2 ends here; the loss of another' in output
  assert newest(folder) >= 3


def test_other_flags_of_one_process_are_refused_by_both(tmp_path):
  folder = tmp_path / 'run'
  started = pair(folder, *ARGS, '--num_devices=2', '--learning_rate=0.25',
                 second=('--learning_rate=0.5',))
  for output in ends(started, code=2):
    assert 'process 1 of 2' in output
    assert 'learning_rate is 0.5 there and 0.25' in output
    assert 'Traceback' not in output
  assert not folder.exists()


def test_each_process_holds_its_own_clients_only(tmp_path):
  said = [json.loads(output.splitlines()[-1]) for output in ends(
      pair(tmp_path / 'run', '--num_devices=2', '--cohort_size=2',
           script=PLACED))]
  half = toy.NUM_CLIENTS // 2
  for own, here in zip((range(half), range(half, 2 * half)), said,
                       strict=True):
    assert here == {'memory': [*own], 'labeled': [*own], 'unlabeled': [*own],
                    'inputs': 1.0}


ADDRESS = {'coordinator_address': 'localhost:1234'}


@pytest.mark.parametrize('flags, words', [
    ({'process_id': 0}, ['--process_id=0', 'needs distributed']),
    ({**ADDRESS, 'distributed': True}, ['--coordinator_address',
                                        'needs num_processes']),
    ({**ADDRESS, 'distributed': True, 'num_processes': 2, 'process_id': 2},
     ['num_processes=2', 'process_id=2']),
    ({'coordinator_address': 'here', 'distributed': True, 'num_processes': 2,
      'process_id': 0}, ['=here', 'HOST:PORT']),
    *[({'coordinator_address': address, 'distributed': True,
        'num_processes': 1, 'process_id': 0}, [address, 'from 1 to 65535'])
      for address in ('here:0', 'here:99999', 'http://here:1', 'a b:1')],
])
def test_what_does_not_go_together_is_refused(flags, words):
  with pytest.raises(config.FieldError) as refused:
    devices.cluster(config.resolve(flags))
  with checks.marking('--'):
    assert all(word in str(refused.value) for word in words), refused.value


def test_variables_stand_in_for_flags(monkeypatch):
  monkeypatch.setenv('JAX_COORDINATOR_ADDRESS', 'host:1')
  monkeypatch.setenv('JAX_NUM_PROCESSES', '3')
  monkeypatch.setenv('JAX_PROCESS_ID', '1')
  assert devices.cluster(config.Config()) is None
  assert devices.cluster(config.Config(distributed=True)) == ('host:1', 3, 1)
  assert devices.cluster(config.Config(distributed=True, process_id=2)) == (
      'host:1', 3, 2)


def test_one_process_agrees_with_itself():
  def fail():
    raise OSError('full')
  for way in (processes.once, processes.together):
    assert way(lambda: 3) == 3
    with pytest.raises(OSError, match='full'):
      way(fail)
  assert processes.share(b'ab') == b'ab'
  assert processes.gather([4, 5]).tolist() == [[4, 5]]
  processes.check_same({'a': 1}, 'flags')
  assert jax.process_count() == 1
