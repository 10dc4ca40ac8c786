"""Tables whose cells change, that are ended, or whose files are damaged."""
from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time

import pytest

from fedjax_ssl.cli import tables
from fedjax_ssl.papers import flags as paper_flags
from fedjax_ssl.papers import results
from tests.cli import paper_tables_test

place = paper_tables_test.place


def test_changed_flags_make_numbers_stale(place):
  place.change('other', 'method = "fedavg"')
  place.call()
  before = place.results()
  assert 'stale' not in place.call('--list')
  place.change('base', 'alpha = 0.1')
  listed = place.call('--list')
  assert listed.count('stale ') == 2 and 'stale    Base | easy' in listed
  place.change('base', 'alpha = 0.1, seeds = "0,9"')
  assert 'stale: Base | easy: its flags have changed since' in place.call()
  assert place.results() == before
  place.change('base', 'seeds = "0,1,9"')  # More seeds are no other cell.
  assert 'stale' not in place.call('--list')


@pytest.mark.parametrize('number, code', [
    (signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_its_run_ends_with_it(place, number, code):
  place.change('ours', 'seconds = 0.2, num_rounds = 500')
  process = subprocess.Popen(
      [*paper_tables_test.PROGRAM, *place.command()],
      stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
  rows = place.root / 'runs/one/exp.ours_hard/seed_0/metrics.jsonl'
  paper_tables_test.until(lambda: paper_tables_test.begun(rows))
  os.kill(process.pid, number)
  _, said = process.communicate(timeout=300)
  assert process.returncode == code
  assert said.splitlines() == [
      f'Ended by {number.name}; the same command continues.']
  kept = rows.read_text()
  time.sleep(0.5)
  assert kept and rows.read_text() == kept


@pytest.mark.parametrize('text', [
    '{"seeds": {}}', '[]', '{"seeds": 3}', '{', 100_000 * '[',
    json.dumps({'cell': '', 'flags': [], 'extra_flags': [], 'seeds': {}}),
    json.dumps({'cell': '', 'flags': [], 'extra_flags': [],
                'seeds': {'0': {}}})])
def test_damaged_results_are_one_line(tmp_path, text):
  (tmp_path / 'a.json').write_text(text)
  with pytest.raises(ValueError, match='a.json is damaged: .') as caught:
    results.read(tmp_path / 'a.json')
  assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize('flags, lines, found', [
    ({'alpha': .5}, ['--alpha=.50'], []),
    ({'alpha': .5}, ['--alpha=1', '--alpha=0.5'], []),
    ({'model': 'cnn'}, ['--model=resnet9'], ['model=cnn']),
    ({'method': "f(a=1, profile='paper')"},
     ['--profile=paper', '--method=f(a=1)'], []),
    ({'method': 'f(a=1,b=2)'}, ['--method=f(b=2, a=1)'], []),
    ({'bounds': True, 'x': False}, ['--nox'], []),
    ({'x': True}, ['--nox'], ['x=True']), ({}, ['--y=1'], []),
    ({'seeds': [0]}, ['--seeds=0,1'], [])])
def test_differences_of_flags(flags, lines, found):
  assert paper_flags.differences(flags, lines) == found


def test_a_cell_without_rows_stops_no_other(place):
  script = place.root / 'exp.py'
  script.write_text(script.read_text().replace(
      'signal.signal(', "if 'quiet' in flags: return\n  signal.signal(", 1))
  place.change('ours', 'quiet = 1')
  place.change('other', 'method = "fedavg"')
  said = place.call(code=1)
  assert 'failed exp.ours_hard, seed 0' in said
  assert 'seed_0 holds no run' in said and '6 runs done, 1 failed' in said


def test_a_run_that_is_killed_says_so_and_stops_no_other_seed(place):
  script = place.root / 'exp.py'
  script.write_text(script.read_text().replace(
      'signal.signal(', "if 'killed' in flags: signal.raise_signal(9)\n"
      '  signal.signal(', 1))
  place.change('ours', 'killed = 1')
  place.change('other', 'method = "fedavg"')
  said = place.call(code=1)
  for seed in (0, 1):
    log = place.root / f'runs/one/exp.ours_hard/seed_{seed}.log'
    assert f'started exp.ours_hard, seed {seed} ({log})\n' in said
    assert f'    killed by signal 9 [{log}]\nfailed exp.ours_hard, ' in said
    assert log.exists()
  assert 'skipped' not in said and '6 runs done, 2 failed, 0 left' in said


def test_results_are_locked_and_tried_before_hours_of_work(place):
  folder = place.root / 'results' / 'one'
  folder.mkdir(parents=True)
  lock = os.open(folder, os.O_RDONLY)
  fcntl.flock(lock, fcntl.LOCK_EX)  # As of a process with other --runs.
  assert 'results/one is in use' in place.call(code=2)
  os.close(lock)
  shutil.rmtree(place.root / 'results')
  (place.root / 'results').write_text('')
  said = place.call(code=2)
  assert '--results: ' in said and 'results/one cannot be used' in said
  assert len(said.splitlines()) == 1 and not place.starts()


def test_seeds_that_are_none_and_no_tables_are_named(place):
  place.change('base', 'seeds = "a,b"')
  assert 'exp.base has seeds a,b' in place.call(
      '--row=Base', '--column=easy', code=2)
  assert tables.main(['--list', f'--tables={place.root}/runs']) == 2


def test_only_flags_of_a_cell_alone_are_refused(place):
  for flag in ('--eval_only', '--seed=1', '--workdir=x'):
    said = place.call('--variant=a', '--', flag, code=2)
    assert f'{flag} cannot be given' in said
  assert 'to do' in place.call('--list', '--variant=a', '--', '--seed_map=map')
