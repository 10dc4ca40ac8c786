"""Runs a bench whose trainings are made up, so that what is best is known."""
from __future__ import annotations

import json
import os
import pathlib
import shlex
import shutil
import sys

import numpy as np
import pytest

from fedjax_ssl import cli
from fedjax_ssl.bench import plan, records, standing

# Stands for the interpreter: trains in no time, and the better the nearer the
# rate is to .05; fixmatch has 20 points more on test rows. Not started by its
# first line alone, in which no path may have a space.
TRAINER = """import json, os, sys
if '--only_check_args' in sys.argv:
  sys.exit(0)
flags = dict(a[2:].split('=', 1) for a in sys.argv if a.startswith('--'))
seeds = [int(s) for s in flags['seeds'].split(',')]
method, folder = flags['method'], flags['workdir']
with open(os.path.join(os.path.dirname(folder), 'started'), 'a') as file:
  print(os.path.basename(folder), file=file)
if method.startswith('uda') and 'final' in folder:
  print('error: it fell over')
  sys.exit(1)
good = .7 - abs(float(flags['learning_rate']) - .05)
best = good + .2 * method.startswith('fixmatch') + .3 * (
    flags.get('labels') == 'all')
os.mkdir(folder)
with open(folder + '/metrics.jsonl', 'w') as file:
  for seed in seeds:
    for r in range(1, 11):
      print(json.dumps(dict(round=r, seed=seed, accuracy=best * r / 10,
                            loss=1.0, val_accuracy=good * r / 10)), file=file)
with open(folder + '/timings.jsonl', 'w') as file:
  print(json.dumps(dict(round=10, seconds=7.0)), file=file)
with open(folder + '/config.json', 'w') as file:
  json.dump(dict(flags=dict(method=method, seeds=seeds, num_rounds=10),
                 facts=dict(), origin=dict(), environment=dict(commit='abc'),
                 restarts=[]), file)
"""


COUNT = 3
TRIES = (f'--configurations={COUNT}',)
CHANGED = (*TRIES, '--', '--dataset=digits')
BED = plan.beds()['clients']


@pytest.fixture
def bench(tmp_path, capsys):
  """Runs `fedjax-ssl bench`; returns its exit code, output and errors."""
  (tmp_path / 'trainer.py').write_text(TRAINER)
  trainer = tmp_path / 'trainer'
  trainer.write_text('#!/bin/sh\nexec ' + shlex.join(
      [sys.executable, '-S', str(tmp_path / 'trainer.py')]) + ' "$@"\n')
  trainer.chmod(0o755)

  def run(*given):
    words = list(given)
    cut = words.index('--') if '--' in words else len(words)
    words[cut:cut] = [f'--python={trainer}', f'--out={tmp_path / "out"}']
    code = cli.main(['bench', *words])
    return (code, *capsys.readouterr())
  return run


@pytest.fixture
def out(tmp_path):
  """Where the bench of `bench` writes."""
  return tmp_path / 'out'


@pytest.fixture(scope='module')
def finished() -> dict:
  """The stored table of one row, made up."""
  entry = plan.entries()['fixmatch']
  lines = {skew: standing.compare([standing.Measured(
      entry, plan.configurations(entry, BED, COUNT)[0], np.ones(3), (4,),
      np.ones((3, 1)), np.ones(3), None, None, None, None, ())])
           for skew in BED.skews}
  return json.loads(records.written(BED, lines, {'fixmatch': records.Record(
      dict.fromkeys(range(COUNT), .5),
      {skew: line.measured for skew, (line,) in lines.items()},
      dict.fromkeys(lines, {}))}, COUNT, ['--dataset=digits']))


def started(folder: pathlib.Path) -> list[str]:
  return (folder / 'started').read_text().split()


def rows(folder: pathlib.Path, skew: str) -> dict[str, dict]:
  stored = json.loads((folder / 'clients.json').read_text())
  return {row['row']: row for row in stored['rows'][skew]}


def test_each_row_is_tuned_and_then_measured(bench, out):
  code, said, _ = bench('clients', 'fixmatch', 'fedprox', *CHANGED)
  assert code == 0
  # Both bounds and two rows, their tries and a run for each partition.
  assert len(started(out)) == 4 * (COUNT + len(BED.skews))
  best = {}
  for name in ('fixmatch', 'fedprox'):
    tries = plan.configurations(plan.entries()[name], BED, COUNT)
    best[name] = min((c.learning_rate for c in tries),
                     key=lambda rate: abs(rate - .05))
  for skew in BED.skews:
    found = rows(out, skew)
    assert {*found} == {'all_labels', 'fixmatch', 'labels_only', 'fedprox'}
    means = [row['accuracy'][0] for row in found.values()]
    assert means == sorted(means, reverse=True)
    for name, rate in best.items():
      assert found[name]['learning_rate'] == rate
    mean = .9 - abs(best['fixmatch'] - .05)
    assert found['fixmatch']['accuracy'] == pytest.approx([mean] * 3)
    few, most = (found[name]['accuracy'][0] for name in (plan.FEW, plan.ALL))
    assert found['fixmatch']['gap'] == pytest.approx(
        (mean - few) / (most - few))
    assert found['fixmatch']['rank'] == 1 and found['fedprox']['rank'] == 2
    assert found['labels_only']['rank'] is None
  assert 'Not the bench itself' in said
  for name in ('clients.md', 'clients.svg',
               *(f'clients_{skew}.svg' for skew in BED.skews)):
    assert (out / name).stat().st_size > 0


def test_goes_on_and_adds_rows(bench, out):
  """With the same flags; of others it says which."""
  assert bench('clients', 'fixmatch', *CHANGED)[0] == 0
  first = started(out)
  table = (out / 'clients.json').read_bytes()
  assert bench('clients', 'fixmatch', *CHANGED)[0] == 0
  assert started(out) == first
  assert (out / 'clients.json').read_bytes() == table
  assert bench('clients', 'fixmatch(threshold=0.9)', *CHANGED)[0] == 0
  assert all('threshold' in name for name in started(out)[len(first):])
  assert {'fixmatch', 'fixmatch_threshold=0.9'} < {*rows(out, 'mild')}
  _, said, _ = bench('clients', 'fixmatch', 'fedprox', '--status', *CHANGED)
  assert 'fixmatch                 3/3 tried, fixmatch' in said
  assert 'fedprox                  0/3 tried' in said
  before = sorted(os.listdir(out))
  code, _, errors = bench('clients', 'fixmatch')
  assert code == 2 and '--dataset=digits' in errors
  assert sorted(os.listdir(out)) == before


def test_stored_rows_are_not_run_again(bench, out, tmp_path):
  """Their table is the one of a bench that has run all of them."""
  assert bench('clients', 'fixmatch', 'fedprox', *CHANGED)[0] == 0
  whole = json.loads((out / 'clients.json').read_text())
  table = (out / 'clients.md').read_text().split('Command:')
  shutil.rmtree(out)
  assert bench('clients', 'fixmatch', *CHANGED)[0] == 0
  file = shutil.copy(out / 'clients.json', tmp_path)
  shutil.rmtree(out)
  stored = f'--stored={file}'
  _, said, _ = bench('clients', 'fixmatch', stored, '--status', *CHANGED)
  assert [line.split()[1] for line in said.splitlines()] == ['in'] * 3
  assert bench('clients', 'fedprox', stored, *CHANGED)[0] == 0
  assert {name.split('__')[1] for name in started(out)} == {'fedprox'}
  assert json.loads((out / 'clients.json').read_text()) == whole
  again = (out / 'clients.md').read_text().split('Command:')
  assert again[0] == table[0]
  assert again[1].splitlines()[1:] == table[1].splitlines()[1:]


@pytest.mark.parametrize('change, said', [
    ({'version': 'bench_v1'}, "version 'bench_v1', and this bench"),
    ({'changed': []}, "changed [], and this bench ['--dataset=digits']"),
    ({'tried': {'fixmatch': {'0': .5}}}, 'tuned over another space'),
    ({'rows': {}}, 'is damaged'),
])
def test_refuses_stored_rows_of_another_bench(
    bench, out, tmp_path, finished, change, said):
  file = tmp_path / 'clients.json'
  file.write_text(json.dumps(finished | change))
  code, _, errors = bench('clients', 'fixmatch', f'--stored={file}', *CHANGED)
  assert code == 2 and said in errors and len(errors.splitlines()) == 1
  assert not out.exists()


@pytest.mark.thorough
def test_row_that_fails_is_left_out(bench, out):
  code, said, _ = bench('clients', 'uda', 'fixmatch', *CHANGED)
  assert code == 1
  assert 'FAILED clients__uda__mild__final' in said
  assert 'it fell over' in said
  assert [*rows(out, 'mild')] == ['all_labels', 'fixmatch', 'labels_only']
  assert 'Without a result, as a run failed or has not ended: `uda`' in said
  assert '--configurations=3' in said


@pytest.mark.parametrize('words, said', [
    (('cliens',), 'BED=cliens must be one of clients'),
    (('clients', 'fixmach'), "Did you mean 'fixmatch'"),
    (('clients', '--slots=0'), '--slots=0 must be at least 1'),
    (('clients', 'fixmatch(thresh=0.9)'), "has no knob 'thresh'"),
    (('clients', 'fixmatch(threshold=7)'), 'threshold'),
    (('clients', '--data_dir=/nowhere'), '/nowhere'),
    (('clients', '--', 'num_rounds=3'), 'num_rounds=3 behind --'),
])
def test_refuses(bench, out, words, said):
  code, _, errors = bench(*words)
  assert code == 2 and said in errors and len(errors.splitlines()) == 1
  assert not out.exists()
