"""The accelerator's script does slice after slice, and each once."""
import json
import subprocess
import sys

from absl import flags
import pytest


@pytest.fixture
def script(bench, tmp_path):
  """The script, with all results in a folder of its own."""
  made = bench('accelerator')
  flags.FLAGS(['', f'--out={tmp_path}', '--quick', '--minutes=5'])
  return made


def _slice(script, name, code, **changes):
  return script.Slice(name, 'a test', 1, ['-c', code], **changes)


def test_a_slice_that_is_done_is_not_run_again(script, monkeypatch, tmp_path,
                                               capfd):
  code = f"open({str(tmp_path / 'runs')!r}, 'a').write('x')"
  monkeypatch.setattr(script, 'plan', lambda: [
      _slice(script, 'good', code), _slice(script, 'bad', 'raise SystemExit(3)')
  ])
  assert script.main(['']) == 1
  said = capfd.readouterr().out
  assert 'good: done' in said and 'bad: failed, exit 3' in said
  assert script.main(['']) == 1
  assert (tmp_path / 'runs').read_text() == 'x'
  done = json.loads((tmp_path / 'good' / script.DONE).read_text())
  assert done['seconds'] > 0


def test_a_slice_is_cut_off_and_goes_on(script, monkeypatch, tmp_path, capfd):
  file = tmp_path / 'progress'
  code = ('import pathlib, signal, sys, time\n'
          f'file = pathlib.Path({str(file)!r})\n'
          'if file.exists(): sys.exit()\n'
          'signal.signal(signal.SIGTERM, lambda *_: (file.write_text("saved"),'
          ' sys.exit(143)))\n'
          'time.sleep(60)\n')
  monkeypatch.setattr(script, 'plan', lambda: [
      _slice(script, 'long', code, resumes=True)])
  flags.FLAGS['minutes'].value = 1.5 / 60
  assert script.main(['']) == 0
  assert 'goes on in the next call' in capfd.readouterr().out
  assert file.read_text() == 'saved'
  assert script.main(['']) == 0
  assert 'long: done' in capfd.readouterr().out


def test_a_slice_that_took_too_long_comes_last(script, monkeypatch, capfd):
  monkeypatch.setattr(script, 'plan', lambda: [
      _slice(script, 'long', 'import time; time.sleep(60)'),
      _slice(script, 'short', 'pass')])
  flags.FLAGS['minutes'].value = 1 / 60
  assert script.main(['']) == 0
  said = capfd.readouterr().out
  assert 'long: cut off; it comes last' in said
  names = [[part.name for part in script.in_turn(script.plan())]]
  flags.FLAGS['minutes'].value = 2 / 60  # There may be room for it now.
  names += [[part.name for part in script.in_turn(script.plan())]]
  assert names == [['short', 'long'], ['long', 'short']]


def test_cells_come_by_their_worth_a_minute(script):
  names = [part.name for part in script.plan()
           if part.name.startswith('cell')]
  assert names[:4] == ['cell_fedavg_few', 'cell_fedavg_all', 'cell_fixmatch',
                       'cell_feddure']


def test_what_cannot_end_in_time_is_not_begun(script, monkeypatch, capfd):
  monkeypatch.setattr(script, 'plan', lambda: [_slice(script, 'late', '1/0')])
  flags.FLAGS['quick'].value, flags.FLAGS['minutes'].value = False, 1.
  assert script.main(['']) == 0
  assert 'late: left for the next call' in capfd.readouterr().out


def test_the_plan_is_printed(script, capfd):
  flags.FLAGS['dry_run'].value = True
  assert script.main(['']) == 0
  said = capfd.readouterr().out
  for part in script.plan():
    assert f'{part.name}: ' in said
  assert said.strip().endswith('minutes are left.')


def test_without_data_only_what_needs_none(script, monkeypatch, tmp_path):
  flags.FLAGS['quick'].value = False
  monkeypatch.delenv('FEDJAX_SSL_DATA', raising=False)
  assert {part.needs_data for part in script.chosen(script.plan())} == {False}
  flags.FLAGS['data_dir'].value = str(tmp_path)
  with pytest.raises(ValueError, match='--data_dir=.* holds no cifar10.npz'):
    script.chosen(script.plan())
  (tmp_path / 'cifar10.npz').touch()
  assert script.chosen(script.plan()) == script.plan()


@pytest.mark.parametrize('words,said', [
    (['--only=speed'], '--only=speed: allowed: '), (['speed'], 'no flag')])
def test_bad_words_are_one_line(root, tmp_path, words, said):
  done = subprocess.run(
      [sys.executable, 'experiments/benchmarks/accelerator.py',
       f'--out={tmp_path}', *words], cwd=root, capture_output=True, text=True,
      check=False)
  assert done.returncode == 2
  line, = done.stderr.splitlines()
  assert said in line


def test_a_slice_that_trains(script, tmp_path):
  flags.FLAGS['only'].value = ['cell_fixmatch']
  assert script.main(['']) == 0
  assert (tmp_path / 'cell_fixmatch' / 'run' / 'metrics.jsonl').exists()


@pytest.mark.thorough
def test_slices_that_measure(script, tmp_path):
  """The scripts themselves: `benchmarks_test`, `profile_test`."""
  flags.FLAGS['only'].value = ['speed_resnet9_float32', 'profile_fixmatch']
  assert script.main(['']) == 0
  found = json.loads(next(
      (tmp_path / 'speed_resnet9_float32').glob('round_speed*')).read_text())
  assert found['measured']['2']['fields']['chosen']['client_map'] in (
      'map', 'vmap')


@pytest.mark.thorough
def test_the_whole_plan_runs(script):
  assert script.main(['']) == 0
