"""Sweeps survive what happens to them: failures, kills, company."""
from __future__ import annotations

import collections
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from fedjax_ssl.cli import sweep
from fedjax_ssl.cli.sweep import shares
from tests.thorough import wider

ROOT = pathlib.Path(__file__).resolve().parents[3]
SWEEP = ROOT / 'launch' / 'sweep.py'
FAKE = f'script: {pathlib.Path(__file__).parent / "fake_experiment.py"}'
# Seconds that only a process which hangs takes.
_LONG = 300.0


def start(out, *lines, options=(), env=()) -> subprocess.Popen:
  return subprocess.Popen(
      [sys.executable, str(SWEEP), f'--out={out}', *options, '--', *lines],
      cwd=ROOT, env={**os.environ, **dict(env)}, stdout=subprocess.PIPE,
      stderr=subprocess.PIPE, text=True)


def run(out, *lines, options=(), code=0, env=()) -> tuple[str, str]:
  """(stdout, stderr) of a sweep that must end with `code`."""
  process = start(out, *lines, options=options, env=env)
  printed = process.communicate(timeout=_LONG)
  assert process.returncode == code, printed
  return printed


def starts(out) -> collections.Counter[str]:
  file = pathlib.Path(out) / 'starts'
  return collections.Counter(file.read_text().split() if file.exists() else [])


def rounds(out, name) -> list[int]:
  lines = (pathlib.Path(out) / name / 'metrics.jsonl').read_text().splitlines()
  return [json.loads(line)['round'] for line in lines]


def until(condition):
  end = time.monotonic() + _LONG
  while not condition():
    assert time.monotonic() < end, 'waited in vain'
    time.sleep(0.02)


def test_everything_runs_once_and_then_nothing(tmp_path):
  lines = (FAKE, 'seeds: 0 1', '--x=1 | 2')
  printed, said = run(tmp_path, *lines, options=['--slots=3'])
  assert 'done 4, failed 0 of 4' in printed
  assert 'ETA' in said
  assert set(starts(tmp_path).values()) == {1} and len(starts(tmp_path)) == 4
  printed, _ = run(tmp_path, *lines)
  assert 'done 4 (4 before), failed 0 of 4' in printed
  assert sum(starts(tmp_path).values()) == 4
  state, _ = run(tmp_path, *lines, options=['--status'])
  assert state.count('done             2/2') == 4 and 'done 4 of 4' in state


def test_what_changed_runs_again(tmp_path):
  flagfile = tmp_path / 'cell.flags'
  flagfile.write_text('--num_rounds=2\n')
  lines = (FAKE, f'flagfile: "{flagfile}"')
  run(tmp_path / 'out', *lines)
  flagfile.write_text('--num_rounds=3\n')
  state, _ = run(tmp_path / 'out', *lines, options=['--status'])
  assert 'to do 1 of 1' in state
  run(tmp_path / 'out', *lines)
  assert rounds(tmp_path / 'out', 'cell') == [1, 2, 3]
  # Results that are gone are made again, whatever the record says.
  (tmp_path / 'out' / 'cell' / 'metrics.jsonl').unlink()
  run(tmp_path / 'out', *lines)
  assert rounds(tmp_path / 'out', 'cell') == [1, 2, 3]


def test_a_grid_edited_to_other_flags_says_so(tmp_path):
  run(tmp_path, FAKE, '--x=1')
  _, said = run(tmp_path, FAKE, '--x=2')
  assert 'a run with other flags' in said
  assert '(was --x=1, is --x=2)' in said
  _, said = run(tmp_path, FAKE, '--x=2')
  assert 'other flags' not in said


def test_a_failed_run_is_tried_again_and_stops_nobody(tmp_path):
  printed, said = run(
      tmp_path, FAKE, '--fail=0 | 1 | 9', options=['--retries=1'], code=1)
  name = 'fake_experiment__fail='
  assert starts(tmp_path) == {f'{name}0': 1, f'{name}1': 2, f'{name}9': 2}
  assert 'done 2, failed 1 of 3' in printed
  assert f'FAILED {name}9 (exit 3, 2 attempts' in printed
  assert '    error: fell over in round 1' in printed
  log = tmp_path / f'{name}1.log'
  assert (f'exit 3: {name}1, trying again: error: fell over in round 1 '
          f'[{log}] (done') in said
  state, _ = run(tmp_path, FAKE, '--fail=0 | 1 | 9', options=['--status'])
  assert 'done 2, failed 1 of 3' in state
  assert '    error: fell over in round 1' in state
  assert f'exit 3: {name}9: error: fell' in said and 'failed 1 of 3' in (
      said[said.index(f'exit 3: {name}9: error: fell'):].splitlines()[0])
  # A later sweep tries it anew.
  run(tmp_path, FAKE, '--fail=0 | 1 | 9', options=['--retries=0'], code=1)
  assert starts(tmp_path)[f'{name}9'] == 3 and starts(tmp_path)[f'{name}0'] == 1


def test_a_run_that_refuses_is_not_tried_again(tmp_path):
  lines = (FAKE, '--fail=9', '--code=2')
  printed, said = run(tmp_path, *lines, options=['--retries=3'], code=1)
  name, log = 'fake_experiment', tmp_path / 'fake_experiment.log'
  assert starts(tmp_path) == {name: 1} and 'trying again' not in said
  assert f'exit 2: {name}: error: fell over in round 1 [{log}]' in said
  assert f'FAILED {name} (exit 2, 1 attempt; {log})' in printed
  state, _ = run(tmp_path, *lines, options=['--status'])
  assert state.startswith('failed ') and 'failed 1 of 1' in state
  assert f'exit 2, {log}' in state and 'error: fell over in round 1' in state


def test_a_failed_run_is_failed_before_it_is_tried_again(tmp_path):
  lines = (FAKE, 'seeds: 0 1', '--fail=1', '--num_rounds=1')
  (tmp_path / 'holds').write_text('1')  # It comes before the other try.
  process = start(tmp_path, *lines)
  until(lambda: (tmp_path / '.sweep' / 'fake_experiment__seed=0.json').exists())
  process.kill()
  process.communicate(timeout=_LONG)
  until(lambda: 'running' not in run(tmp_path, *lines, options=['--status'])[0])
  state, _ = run(tmp_path, *lines, options=['--status'])
  assert re.search(r'^failed +\S+ +fake_experiment__seed=0$', state, re.M)
  assert 'exit 3' in state


@pytest.mark.parametrize('code, words', [
    (143, 'ended by SIGTERM'), (130, 'ended by SIGINT')])
def test_a_run_that_a_signal_ended_is_not_failed(tmp_path, code, words):
  printed, said = run(tmp_path, FAKE, '--fail=1', f'--code={code}',
                      options=['--retries=1'])
  assert 'done 1, failed 0 of 1' in printed
  assert f'{words}: fake_experiment, trying again' in said


# As experiments do; one that takes no such flags is left alone.
PACKAGE = """import sys
if '--only_check_args' not in sys.argv: sys.exit('it ran')
bad = [arg for arg in sys.argv if arg.startswith('--bad')]
if bad: sys.exit(print('a warning\\nerror: ' + bad[0] + ' is no flag.',
                       file=sys.stderr) or 2)
"""


@pytest.mark.parametrize('options', [['--dry_run'], []])
def test_unknown_flags_are_refused_before_anything_runs(tmp_path, options):
  (tmp_path / 'fedjax_ssl').mkdir()
  (tmp_path / 'fedjax_ssl' / '__init__.py').write_text('')
  (tmp_path / 'fedjax_ssl' / 'cli.py').write_text(PACKAGE)
  script = tmp_path / 'mine.py'
  script.write_text('from fedjax_ssl import cli\n')
  _, said = run(tmp_path / 'out', f'script: {script}', '--good=1 | 2',
                '--bad=1 | 2', options=options, code=2)
  assert said == f'error: {script}: --bad=1 is no flag.\n'
  assert not (tmp_path / 'out').exists()
  if options:  # Known flags are printed, and nothing has run.
    printed, said = run(tmp_path / 'out', f'script: {script}', '--good=1 | 2',
                        options=options)
    assert len(printed.splitlines()) == 2 and not said
    # Where the runs' interpreter is not at hand, nobody can be asked.
    run(tmp_path / 'out', f'script: {script}', '--bad=1',
        options=[*options, '--python=/nowhere/python'])


@pytest.mark.parametrize('name', ['setting: digits_dirdir',
                                  'script: experiments/digits_dirdir.py'])
def test_settings_know_their_flags(tmp_path, name):
  _, said = run(tmp_path / 'out', name, '--num_rounds=1 --learning_rat=0.1',
                options=['--dry_run'], code=2)
  assert said == (f'error: {name.split()[1]}: --learning_rat=0.1 is no flag. '
                  'Did you mean --learning_rate?\n')
  assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('options', [['--dry_run'], []])
def test_a_misspelt_method_is_refused_before_anything_runs(tmp_path, options):
  grid = 'setting: digits_dirdir', '--method=fixmatch | fixmach(mu=1)'
  _, said = run(tmp_path / 'out', *grid, options=options, code=2)
  assert said.startswith("error: --method=fixmach(mu=1): method 'fixmach'")
  assert not (tmp_path / 'out').exists()


def test_exit_code_0_before_the_last_round_is_not_the_end(tmp_path):
  (tmp_path / 'holds').write_text('0')
  process = start(tmp_path, FAKE, '--num_rounds=5')
  name = 'fake_experiment'
  until(lambda: (tmp_path / name / 'metrics.jsonl').exists())
  # The run alone is told to end, as on a machine that is taken away.
  children = pathlib.Path(
      f'/proc/{process.pid}/task/{process.pid}/children')
  if not children.exists():
    process.terminate()
    process.wait()
    pytest.skip('no /proc here')
  subprocess.run(['kill', '-TERM', children.read_text().split()[0]],
                 check=True)
  printed, said = process.communicate(timeout=_LONG)
  assert process.returncode == 0, printed
  assert 'ended before its last round' in said
  assert rounds(tmp_path, name) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize('number', [
    signal.SIGKILL, *wider(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)])
def test_a_sweep_that_is_stopped_continues(tmp_path, number):
  lines = (FAKE, 'seeds: 0 1 2 3', '--seconds=0.15', '--num_rounds=3')
  (tmp_path / 'holds').write_text('1 2 3')
  process = start(tmp_path, *lines, options=['--slots=2'])
  first = 'fake_experiment__seed=0'
  until(lambda: (tmp_path / '.sweep' / f'{first}.json').exists())
  process.send_signal(number)
  _, said = process.communicate(timeout=_LONG)
  (tmp_path / 'holds').unlink()
  if number == signal.SIGKILL:
    assert process.returncode == -number
  else:
    assert process.returncode == 128 + number
    assert 'the same command continues' in said
    # Interrupted is not failed.
    state, _ = run(tmp_path, *lines, options=['--status'])
    assert 'failed' not in state and 'to do' in state
    assert 'stopped' in {
        json.loads(f.read_text())['state']
        for f in (tmp_path / '.sweep').glob('*.json')}
  printed, _ = run(tmp_path, *lines)
  assert 'failed 0 of 4' in printed
  assert starts(tmp_path)[first] == 1  # What was done stays done.
  for seed in range(4):
    assert rounds(tmp_path, f'fake_experiment__seed={seed}') == [1, 2, 3]


@pytest.mark.parametrize('number', [signal.SIGINT, *wider(signal.SIGTERM)])
def test_a_sweep_that_is_stopped_while_it_checks_leaves_nothing(
    tmp_path, number):
  python, seen = tmp_path / 'python', tmp_path / 'pid'
  python.write_text(f'#!/bin/sh\necho $$ > "{seen}.new"\n'
                    f'mv "{seen}.new" "{seen}"\nexec sleep 600\n')
  python.chmod(0o755)
  process = start(tmp_path / 'out', 'setting: digits_dirdir',
                  options=[f'--python={python}'])
  until(seen.exists)
  process.send_signal(number)
  _, said = process.communicate(timeout=_LONG)
  assert process.returncode == 128 + number
  assert said == f'Ended by {number.name}; nothing was started.\n'
  with pytest.raises(ProcessLookupError):
    os.kill(int(seen.read_text()), 0)
  assert not (tmp_path / 'out').exists()


@pytest.mark.skipif(sys.platform != 'linux', reason='the kernel ends the runs')
def test_runs_end_with_a_sweep_that_is_killed(tmp_path):
  lines = (FAKE, '--seconds=0.1', '--num_rounds=500')
  process = start(tmp_path, *lines)
  rows = tmp_path / 'fake_experiment' / 'metrics.jsonl'
  until(lambda: rows.exists())
  process.kill()
  process.communicate(timeout=_LONG)
  until(lambda: 'running' not in run(tmp_path, *lines, options=['--status'])[0])
  size = rows.stat().st_size
  time.sleep(0.4)
  assert rows.stat().st_size == size


def test_two_sweeps_share_a_folder(tmp_path):
  lines = (FAKE, 'seeds: 0 1 2 3 4 5', '--seconds=0.1')
  both = [start(tmp_path, *lines, options=['--slots=2']) for _ in range(2)]
  printed = [p.communicate(timeout=_LONG) for p in both]
  assert [p.returncode for p in both] == [0, 0], printed
  assert len(starts(tmp_path)) == 6 and set(starts(tmp_path).values()) == {1}
  for out, _ in printed:
    assert 'done 6' in out and 'failed 0 of 6' in out


def test_shards_run_everything_once(tmp_path):
  lines = (FAKE, 'seeds: 0 1 2')
  for i in range(2):
    run(tmp_path, *lines, options=[f'--shard={i}/2'])
  assert len(starts(tmp_path)) == 3 and set(starts(tmp_path).values()) == {1}


def test_a_run_with_bounds_is_finished_with_them(tmp_path):
  lines = (FAKE, '--bounds')
  printed, _ = run(tmp_path, *lines, options=['--retries=0'], code=1)
  assert 'ended before its last round' in printed
  for bound in ('labels_few', 'labels_all'):
    subprocess.run([sys.executable, FAKE.split(': ')[1],
                    f'--workdir={tmp_path}/fake_experiment/{bound}'],
                   check=True)
  run(tmp_path, *lines)


def test_dry_run_prints_what_would_run_and_touches_nothing(tmp_path):
  out = tmp_path / 'a folder'
  printed, _ = run(out, FAKE, '--x=a b | c', options=['--dry_run'])
  assert len(printed.splitlines()) == 2 and not out.exists()
  done = subprocess.run(printed.splitlines()[0], shell=True, cwd=ROOT,
                        check=False)
  assert done.returncode == 0
  assert (out / 'fake_experiment__x=c').exists() is False
  assert [p.name for p in out.glob('fake*')][0].startswith(
      'fake_experiment__x=a_b__')


def test_variables_of_a_slot(tmp_path):
  script = tmp_path / 'experiment.py'
  script.write_text('import os, sys\nprint("slot", os.environ["MY_SLOT"])\n'
                    'sys.exit(1)\n')
  run(tmp_path / 'out', f'script: {script}', 'seeds: 0',
      options=['--env=MY_SLOT=gpu{slot}', '--retries=0'], code=1)
  assert 'slot gpu0' in (tmp_path / 'out' / 'experiment__seed=0.log'
                         ).read_text()


# One slot would take both runs if the first had ended before the second begins.
BOTH_RUN = """
import pathlib, time
place = pathlib.Path([arg for arg in sys.argv if arg.startswith('--workdir=')
                     ][0].removeprefix('--workdir=')).with_suffix('.begun')
place.touch()
until = time.monotonic() + 300
while (len([*place.parent.glob('*.begun')]) < 2
       and time.monotonic() < until): time.sleep(.01)
"""


@pytest.mark.skipif(not hasattr(os, 'sched_getaffinity'),
                    reason='this system has no affinity to cores')
def test_slots_divide_the_cores(tmp_path):
  """Between them they have all, and none has another's."""
  script = tmp_path / 'experiment.py'
  script.write_text(
      'import os, sys\nprint("cores", *os.sched_getaffinity(0))\n'
      f'{BOTH_RUN}\nsys.exit(2)\n')
  run(tmp_path / 'out', f'script: {script}', 'seeds: 0 1',
      options=['--slots=2', '--retries=0'], code=1)
  logs = [(tmp_path / 'out' / f'experiment__seed={i}.log').read_text()
          for i in (0, 1)]
  found = [{int(core) for line in re.findall('cores (.*)', log)
            for core in line.split()} for log in logs]
  mine = os.sched_getaffinity(0)
  assert found[0] | found[1] == mine
  assert not found[0] & found[1] or len(mine) < 2
  thirds = [shares.cores(i, 3) for i in range(3)]
  assert not any(thirds) if len(mine) < 3 else set().union(*thirds) == mine
  assert shares.cores(0, 1) == set()


def test_slots_divide_the_gpus(tmp_path):
  """But where --env names them, or does not let runs see any."""
  script = tmp_path / 'experiment.py'
  script.write_text(
      'import os, sys\nprint("sees", os.environ.get("CUDA_VISIBLE_DEVICES"),\n'
      '      os.environ.get("XLA_CLIENT_MEM_FRACTION"))\n'
      f'{BOTH_RUN}\nsys.exit(2)\n')

  def sees(name, visible, *options):
    run(tmp_path / name, f'script: {script}', 'seeds: 0 1', code=1,
        options=['--slots=2', '--retries=0', *options],
        env={'CUDA_VISIBLE_DEVICES': visible, 'JAX_PLATFORMS': ''})
    return {seen for log in (tmp_path / name).glob('*.log')
            for seen in re.findall('sees (.*)', log.read_text())}
  assert sees('one', '3') == {'3 0.375'}
  assert sees('four', '4,5,6,7') == {'4,5 None', '6,7 None'}
  assert sees('own', '4,5', '--env=CUDA_VISIBLE_DEVICES=g{slot}') == {
      'g0 None', 'g1 None'}
  assert sees('cpu', '4,5', '--env=JAX_PLATFORMS=cpu') == {'4,5 None'}


@pytest.mark.parametrize('options, lines, words', [
    ([], ['hello: you'], 'error: line:1: '),
    (['--shard=3/2'], [FAKE], '--shard=3/2'),
    (['--slots=0'], [FAKE], '--slots=0'),
    (['--env=A'], [FAKE], '--env=A must be NAME=VALUE'),
    (['--shard=0/' + 5000 * '9'], [FAKE], 'must be i/n'),
    (['--out='], [FAKE], '--out= is empty'),
    ([], ['nowhere.txt'], 'nowhere.txt cannot be read')])
def test_what_is_wrong_is_said_in_one_line(tmp_path, options, lines, words):
  printed, said = run(tmp_path / 'out', *lines, options=options, code=2)
  assert words in said and len(said.splitlines()) == 1 and not printed
  assert not (tmp_path / 'out').exists()


def test_a_folder_that_cannot_be(tmp_path):
  (tmp_path / 'file').write_text('mine')
  _, said = run(tmp_path / 'file', FAKE, code=2)
  assert 'file cannot be used' in said and len(said.splitlines()) == 1


@pytest.mark.parametrize('broken', ['{}.log', '.sweep/{}.lock',
                                    '.sweep/{}.json'])
def test_a_folder_that_becomes_unusable_ends_the_sweep(tmp_path, broken):
  # A folder where a file must be: a failure even for root.
  name = 'fake_experiment__seed=1'
  (tmp_path / broken.format(name)).mkdir(parents=True)
  script = tmp_path / 'fake_experiment.py'
  script.write_text('import sys, time\n'
                    'time.sleep(600 * ("--seeds=0" in sys.argv))\n')
  printed, said = run(tmp_path, f'script: {script}', 'seeds: 0 1',
                      options=['--slots=2', '--retries=0'], code=2)
  # It did not last: the other run was told to end.
  error = said.splitlines()[-1]
  assert error.startswith('error: ') and 'cannot be used' in error
  assert 'Traceback' not in said and not printed
  state = subprocess.run(
      [sys.executable, str(SWEEP), f'--out={tmp_path}', '--status', '--',
       f'script: {script}', 'seeds: 0'], cwd=ROOT, capture_output=True,
      text=True, check=True)
  assert 'to do 1 of 1' in state.stdout


def test_nobody_has_to_listen(tmp_path):
  process = start(tmp_path, FAKE, 'seeds: 0 1')
  for stream in (process.stdout, process.stderr):
    assert stream is not None
    stream.close()
  assert process.wait(timeout=_LONG) == 0
  assert sum(starts(tmp_path).values()) == 2
  for option in ('--dry_run', '--status'):  # As before `| head -1`.
    process = start(tmp_path, FAKE, 'seeds: 0 1', options=[option])
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=_LONG) == 0
    assert not process.stderr.read()


def test_paths_with_spaces_and_brackets(tmp_path):
  folder = tmp_path / 'a [b] c'
  folder.mkdir()
  script = folder / 'fake.py'
  script.write_text(pathlib.Path(FAKE.split(': ')[1]).read_text())
  (folder / 'x y.flags').write_text('--num_rounds=1\n')
  printed, _ = run(folder / 'my out', f'script: {script}',
                   f'flagfile: "{folder}/x y.flags"')
  assert 'done 1, failed 0 of 1' in printed


def test_a_real_experiment(tmp_path):
  grid = tmp_path / 'grid.txt'
  grid.write_text("""# One round of a linear model on the digits.
script: experiments/digits_dirdir.py
seeds: 3
--method=fedavg
--model=linear
--nobounds
--num_rounds=1
--local_steps=1
--strong=none
""")
  process = subprocess.run(
      [sys.executable, str(SWEEP), str(grid), f'--out={tmp_path / "out"}'],
      cwd=ROOT, capture_output=True, text=True, check=False)
  assert process.returncode == 0, process.stderr + process.stdout
  config = json.loads(
      (tmp_path / 'out' / 'digits_dirdir__seed=3' / 'config.json').read_text())
  assert config['flags']['seeds'] == [3]


@pytest.mark.parametrize('argv, words', [
    (['GRID', '--out=a\0b'], '--out='), (['GRID\0', '--out=a'], 'GRID'),
    (['GRID', '--out=a', '--python=a\0b'], '--python='),
    (['GRID', '--out=a', '--env=A=\0'], '--env=A=')])
def test_zero_bytes_are_refused(argv, words, capsys):
  """No shell can give one, but Python can."""
  assert sweep.main(argv) == 2
  said = capsys.readouterr().err
  assert said.startswith('error: ') and words in said
  assert len(said.splitlines()) == 1


def test_a_sweep_may_run_in_another_thread(tmp_path, capsys):
  """Where Python lets nobody handle signals."""
  codes: list[int] = []
  other = threading.Thread(target=lambda: codes.append(sweep.main(
      [f'--out={tmp_path}', '--', FAKE, '--x=1'])))
  other.start()
  other.join()
  assert codes == [0] and 'done 1, failed 0 of 1' in capsys.readouterr().out
