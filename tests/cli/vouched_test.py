"""A run's folder that others have been at: mended, or refused in one line."""
from __future__ import annotations

import json
import pathlib
import re
import shutil

import pytest

import fedjax_ssl
from fedjax_ssl.report import stored_runs
from fedjax_ssl.training import metrics
from fedjax_ssl.training.checkpoint import manifest
from tests.cli import launcher
from tests.cli.kill_test import newest, until
from tests.thorough import wider

ROUNDS = 6
ARGS = (*launcher.SMALL, '--checkpoint_every=1', '--eval_every=2')


def args(num_rounds: int = ROUNDS) -> tuple[str, ...]:
  return (*ARGS, f'--num_rounds={num_rounds}')


@pytest.fixture(scope='module')
def finished(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp('finished') / 'run'
  launcher.run(folder, *args())
  return folder


@pytest.fixture
def folder(finished, tmp_path) -> pathlib.Path:
  return pathlib.Path(shutil.copytree(finished, tmp_path / 'run'))


def results(folder: pathlib.Path) -> dict[str, str]:
  """All files but the configuration, which says where the folder is now."""
  return {name: digest for name, digest in launcher.fingerprints(
      folder).items() if name != 'config.json'}


def refused(folder: pathlib.Path, *more: str) -> str:
  """The one line with which a start ends that changes no result."""
  before = results(folder)
  started = launcher.start(folder, *args(), *more)
  assert started.wait() == 2, started.output()
  line, = started.output().splitlines()
  assert line.startswith('error: ')
  assert results(folder) == before
  return line


def flip(file: pathlib.Path, row: int) -> None:
  lines = file.read_text().splitlines(keepends=True)
  at = lines[row].index('"accuracy": 0.') + len('"accuracy": 0.')
  digit = '7' if lines[row][at] != '7' else '8'
  lines[row] = lines[row][:at] + digit + lines[row][at + 1:]
  file.write_text(''.join(lines))


def test_a_flipped_digit_of_a_finished_run(finished, folder):
  file = folder / metrics.METRICS
  flip(file, -1)
  line = refused(folder)
  assert f'{file} has other content' in line
  assert f'remove {folder}/checkpoints/6 and give' in line
  assert 'goes on from round 5' in line
  left_out: list[str] = []
  run, = stored_runs.load([finished, folder], left_out)
  assert run.folders == [finished]
  assert left_out == [line.removeprefix('error: ')]
  table = launcher.call('results', str(folder))
  assert table.returncode == 2 and not table.stdout
  assert table.stderr.splitlines() == [line]
  # As the line says.
  shutil.rmtree(folder / 'checkpoints' / '6')
  launcher.run(folder, *args())
  assert file.read_bytes() == (finished / metrics.METRICS).read_bytes()
  assert launcher.header(folder, 6) == launcher.header(finished, 6)


def test_what_stands_behind_the_end_is_cut_off(finished, folder):
  file = folder / metrics.METRICS
  want = file.read_bytes()
  file.write_bytes(want + want.splitlines(keepends=True)[-1])
  assert stored_runs.read(folder).rounds == ROUNDS
  launcher.run(folder, *args())
  assert file.read_bytes() == want


@pytest.mark.thorough
def test_steps_of_another_run_are_refused(finished, tmp_path):
  folder = tmp_path / 'run'
  other = '--learning_rate=0.01'
  launcher.run(folder, *args(), other)
  shutil.rmtree(folder / 'checkpoints')
  shutil.copytree(finished / 'checkpoints', folder / 'checkpoints')
  shutil.copy(finished / metrics.METRICS, folder)
  shutil.copy(finished / metrics.TIMINGS, folder)
  for more in ((), ('--eval_only',)):
    line = refused(folder, other, *more)
    assert 'checkpoints/6 is of another run: it differs in flags, task' in line
  for read in (fedjax_ssl.load, stored_runs.read):
    with pytest.raises(ValueError, match='another run: it differs in task'):
      read(folder)


@pytest.mark.parametrize('name', [
    metrics.METRICS, *wider(metrics.TIMINGS)])
def test_a_file_removed_under_a_running_job(finished, tmp_path, name):
  folder = tmp_path / 'run'
  started = launcher.start(folder, *args(), script=launcher.held(tmp_path, 2))
  until(started, folder, 2)
  assert newest(folder) == 2
  (folder / name).unlink()
  (tmp_path / 'go').touch()
  assert started.wait() == 0, started.output()
  want = (finished / metrics.METRICS).read_bytes()
  assert (folder / metrics.METRICS).read_bytes() == want
  assert len(metrics.read(folder, metrics.TIMINGS)) == len(want.splitlines())


def test_a_run_of_an_earlier_version_goes_on(finished, folder):
  for header in folder.glob('checkpoints/*/header/metadata'):
    said = json.loads(header.read_text())
    del said['metadata']['run'], said['metadata']['files']
    said['sha256'] = manifest.header_hash(said)
    header.write_text(json.dumps(said))
  shutil.rmtree(folder / 'checkpoints' / '6')
  output = launcher.run(folder, *args())
  assert len(re.findall('^W.* [^ ]*] Checkpoint .* earlier version', output,
                        re.MULTILINE)) == 1, output
  assert (folder / metrics.METRICS).read_bytes() == (
      finished / metrics.METRICS).read_bytes()
  assert launcher.header(folder, 6) == launcher.header(finished, 6)
