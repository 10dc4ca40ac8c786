"""The accelerator's script does slice after slice, and each once."""
import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

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
  done = json.loads((tmp_path / 'quick/good' / script.DONE).read_text())
  assert done['seconds'] > 0


def test_a_slice_is_done_by_its_own_command(script, tmp_path):
  part = _slice(script, 'one', 'pass')
  assert script.run(part, 60) == 0 and script.is_done(part)
  assert not script.is_done(_slice(script, 'one', 'pass  # Another.'))
  flags.FLAGS['quick'].value = False
  assert not script.is_done(part)


def test_results_may_be_moved(script, tmp_path):
  def part():
    folder = script._folder('one')
    return _slice(script, 'one', 'pass')._replace(command=[
        '-c', 'pass', f'--out={folder}', f'--workdir={folder / "run"}'])
  assert script.run(part(), 60) == 0
  (tmp_path / 'quick').rename(tmp_path / 'moved')
  (tmp_path / 'new').mkdir()
  (tmp_path / 'moved').rename(tmp_path / 'new' / 'quick')
  flags.FLAGS['out'].value = str(tmp_path / 'new')
  assert script.is_done(part())


@pytest.mark.parametrize('name', ['done.json', 'cut_off.json'])
@pytest.mark.parametrize('text', [
    'garbage', '{', '{"a":1}', '[]', '{"command":null}', '{"command":[1]}',
    '{"command":["-c","pass"],"minutes":"9"}', 100_000 * '[', None, 'pipe'])
def test_damaged_records_are_as_none(script, name, text):
  part = _slice(script, 'one', 'pass')._replace(command=['-c', 'pass'])
  first = _slice(script, 'two', 'pass')
  file = script._folder('one') / name
  file.parent.mkdir(parents=True)
  if text is None:
    file.mkdir()
  elif text == 'pipe':
    os.mkfifo(file)
  else:
    file.write_text(text)
  if name == script.DONE and '"minutes"' in (text or ''):
    assert script.is_done(part)  # Of a done one only the command counts.
  else:
    assert script.in_turn([part, first]) == [part, first]


def test_other_flags_have_another_folder(script, monkeypatch, tmp_path):
  """A run refuses to go on with other flags, those of a flagfile too."""
  def folders():
    return {word for part in script.plan() for word in part.command
            if word.startswith('--workdir=')}
  before = folders()
  assert before == folders() and all('/quick/' in word for word in before)
  file = tmp_path / 'own.flags'
  file.write_text('--alpha=1')
  command = [f'--flagfile={file}']
  first = script._digest(command)
  file.write_text('--alpha=2')
  assert script._digest(command) != first
  flags.FLAGS['quick'].value = False
  assert not {pathlib.Path(word).name for word in before} & {
      pathlib.Path(word).name for word in folders()}


def test_a_slice_is_cut_off_and_goes_on(script, monkeypatch, tmp_path, capfd):
  file, listens = tmp_path / 'progress', tmp_path / 'listens'
  code = ('import pathlib, signal, sys, time\n'
          f'file = pathlib.Path({str(file)!r})\n'
          'if file.exists(): sys.exit()\n'
          'signal.signal(signal.SIGTERM, lambda *_: (file.write_text("saved"),'
          ' sys.exit(143)))\n'
          f'pathlib.Path({str(listens)!r}).touch()\n'
          # One long sleep may begin just behind the signal.
          'while True: time.sleep(.05)\n')
  over: list[bool] = []
  class Popen(subprocess.Popen):
    """The time is over once it listens, however late that is."""

    def wait(self, timeout=None):
      if over:
        return super().wait(300)
      over.append(True)
      while not listens.exists():
        assert self.poll() is None
        time.sleep(0.02)
      raise subprocess.TimeoutExpired(self.args, timeout)
  monkeypatch.setattr(script.subprocess, 'Popen', Popen)
  monkeypatch.setattr(script, 'plan', lambda: [
      _slice(script, 'long', code, resumes=True)])
  flags.FLAGS['minutes'].value = 10.
  assert script.main(['']) == 0
  assert 'goes on in the next call' in capfd.readouterr().out
  assert file.read_text() == 'saved'
  assert script.main(['']) == 0
  assert 'long: done' in capfd.readouterr().out


def test_a_slice_that_took_too_long_comes_last(script, monkeypatch, capfd):
  monkeypatch.setattr(script, 'plan', lambda: [
      _slice(script, 'long', 'import time; time.sleep(600)'),
      _slice(script, 'short', 'pass')])
  flags.FLAGS['minutes'].value = 3 / 60
  assert script.main(['']) == 0
  said = capfd.readouterr().out
  assert 'long: cut off; it comes last' in said
  names = [[part.name for part in script.in_turn(script.plan())]]
  flags.FLAGS['minutes'].value = 6 / 60  # There may be room for it now.
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


def test_a_named_slice_without_its_data_is_refused(script, monkeypatch, capfd):
  flags.FLAGS['quick'].value = False
  flags.FLAGS['only'].value = ['method_fixmatch']
  monkeypatch.delenv('FEDJAX_SSL_DATA', raising=False)
  assert script.main(['']) == 2
  assert capfd.readouterr().err == (
      'error: --only=method_fixmatch needs cifar10.npz; neither --data_dir nor '
      'FEDJAX_SSL_DATA names its folder.\n')
  monkeypatch.setenv('FEDJAX_SSL_DATA', '/nope')
  assert script.main(['']) == 2
  assert 'needs cifar10.npz; FEDJAX_SSL_DATA=/nope holds no' in (
      capfd.readouterr().err)
  flags.FLAGS['only'].value = []
  flags.FLAGS['dry_run'].value = True
  assert script.main(['']) == 0
  said, *_ = capfd.readouterr().out.splitlines()
  assert said.startswith('Left out, as FEDJAX_SSL_DATA=/nope holds no '
                         'cifar10.npz: method_fixmatch, ')
  assert 'speed' not in said


def test_a_folder_that_cannot_be_used_is_one_line(script, monkeypatch, tmp_path,
                                                  capfd):
  monkeypatch.setattr(script, 'plan', lambda: [_slice(script, 'one', 'pass')])
  out = tmp_path / 'file'
  out.write_text('')
  flags.FLAGS['out'].value = str(out)
  assert script.main(['']) == 2
  line, = capfd.readouterr().err.splitlines()
  assert line == f'error: --out={out}: {out}/quick/one cannot be written: ' + (
      'Not a directory.')
  flags.FLAGS['out'].value = str(tmp_path)
  for make in (os.mkdir, os.mkfifo):
    log = tmp_path / 'quick/one/log.txt'
    log.parent.mkdir(parents=True, exist_ok=True)
    make(log)
    assert script.main(['']) == 2
    line, = capfd.readouterr().err.splitlines()
    assert line == f'error: --out={tmp_path}: {log} is no file.'
    log.rmdir() if make is os.mkdir else log.unlink()
  def full(file, data):
    del data
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
  monkeypatch.setattr(script.disk, 'replace', full)
  assert script.main(['']) == 2
  line, = capfd.readouterr().err.splitlines()
  assert line.endswith('done.json cannot be written: No space left on device.')


@pytest.mark.parametrize('number, code', [
    (signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_what_runs_ends_with_it(root, tmp_path, number, code):
  """Also where it does not listen."""
  pids = tmp_path / 'pids'
  child = ('import os, pathlib, signal, subprocess, sys, time\n'
           'signal.signal(signal.SIGTERM, signal.SIG_IGN)\n'
           'other = subprocess.Popen(["sleep", "600"])\n'
           f'part = pathlib.Path({str(pids)!r} + ".part")\n'
           'part.write_text(f"{os.getpid()} {other.pid}")\n'
           f'part.rename({str(pids)!r})\n'
           'time.sleep(600)\n')
  program = (
      'import sys\n'
      'from absl import app\n'
      'from experiments.benchmarks import accelerator as script\n'
      'script._GRACE = 0.5\n'
      f'script.plan = lambda: [script.Slice("a", "", 1, ["-c", {child!r}])]\n'
      'app.run(lambda argv: sys.exit(script.main(argv)))\n')
  process = subprocess.Popen(
      [sys.executable, '-c', program, f'--out={tmp_path}', '--quick'], cwd=root,
      stderr=subprocess.PIPE, text=True)
  until = time.monotonic() + 300
  while not pids.exists() and time.monotonic() < until:
    time.sleep(0.05)
  process.send_signal(number)
  _, said = process.communicate(timeout=300)
  assert process.returncode == code
  assert said == f'Ended by {number.name}; the same command continues.\n'
  until = time.monotonic() + 300
  alive = pids.read_text().split()
  while alive and time.monotonic() < until:
    time.sleep(0.05)  # Whoever adopts it must first read its exit code.
    alive = [pid for pid in alive if _is_alive(pid)]
  assert not alive


def _is_alive(pid):
  try:
    return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(
        ')')[2].split()[0] != 'Z'
  except OSError:
    return False


@pytest.mark.parametrize('words,said', [
    (['--only=speed'], '--only=speed: allowed: '), (['speed'], 'no flag'),
    (['--minutes=nan'], '--minutes=nan: must be finite'),
    (['--minutes=inf'], '--minutes=inf: must be finite')])
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
  assert [*(tmp_path / 'quick/cell_fixmatch').glob('run_*/metrics.jsonl')]


@pytest.mark.thorough
def test_slices_that_measure(script, tmp_path):
  """The scripts themselves: `benchmarks_test`, `profile_test`."""
  flags.FLAGS['only'].value = ['speed_resnet9_float32_20', 'profile_fixmatch']
  assert script.main(['']) == 0
  folder = tmp_path / 'quick' / 'speed_resnet9_float32_20'
  found = json.loads(next(folder.glob('round_speed*')).read_text())
  assert found['measured']['2']['fields']['chosen']['client_map'] in (
      'map', 'vmap')


@pytest.mark.thorough
def test_the_whole_plan_runs(script):
  assert script.main(['']) == 0
