"""Runs a bench whose trainings are made up, so that what is best is known."""
from __future__ import annotations

import json
import os
import pathlib
import stat
import sys

import pytest

from fedjax_ssl import cli
from fedjax_ssl.bench import plan

# Stands for the interpreter: trains in no time, and the better the nearer the
# rate is to .05; fixmatch has 20 points more on test rows.
TRAINER = f"""#!{sys.executable} -S
import json, os, sys
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


@pytest.fixture
def bench(tmp_path, capsys):
  """Runs `fedjax-ssl bench`; returns its exit code, output and errors."""
  trainer = tmp_path / 'trainer'
  trainer.write_text(TRAINER)
  trainer.chmod(trainer.stat().st_mode | stat.S_IEXEC)

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


CHANGED = ('--', '--dataset=digits')


def started(folder: pathlib.Path) -> list[str]:
  return (folder / 'started').read_text().split()


def rows(folder: pathlib.Path, skew: str) -> dict[str, dict]:
  stored = json.loads((folder / 'clients.json').read_text())
  return {row['row']: row for row in stored['rows'][skew]}


def test_each_row_is_tuned_and_then_measured(bench, out):
  code, said, _ = bench('clients', 'fixmatch', 'fedprox', *CHANGED)
  assert code == 0
  skews = plan.beds()['clients'].skews
  # Both bounds and two rows, eight tries and a run for each partition.
  assert len(started(out)) == 4 * (plan.CONFIGURATIONS + len(skews))
  for skew in skews:
    found = rows(out, skew)
    assert [*found] == ['all_labels', 'fixmatch', 'labels_only', 'fedprox']
    # The rate .05 is among those of every row, by the draws of this version.
    assert found['fixmatch']['learning_rate'] == .05
    assert found['fixmatch']['accuracy'] == pytest.approx([.9] * 3)
    assert found['fixmatch']['gap'] == pytest.approx(2 / 3)
    assert found['fixmatch']['rank'] == 1 and found['fedprox']['rank'] == 2
    assert found['labels_only']['rank'] is None
  assert 'Not the bench itself' in said
  for name in ('clients.md', *(f'clients_{skew}.svg' for skew in skews)):
    assert (out / name).stat().st_size > 0


def test_goes_on_and_adds_rows(bench, out):
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
  assert 'fixmatch                 8/8 tried, fixmatch' in said
  assert 'fedprox                  0/8 tried' in said


def test_row_that_fails_is_left_out(bench, out):
  code, said, _ = bench('clients', 'uda', 'fixmatch', *CHANGED)
  assert code == 1
  assert 'FAILED clients__uda__mild__final' in said
  assert 'it fell over' in said
  assert [*rows(out, 'mild')] == ['all_labels', 'fixmatch', 'labels_only']


@pytest.mark.parametrize('words, said', [
    (('cliens',), 'BED=cliens must be one of clients'),
    (('clients', 'fixmach'), "Did you mean 'fixmatch'"),
    (('clients', '--slots=0'), '--slots=0'),
    (('clients', '--', 'num_rounds=3'), 'num_rounds=3 behind --'),
])
def test_refuses(bench, out, words, said):
  code, _, errors = bench(*words)
  assert code == 2 and said in errors and len(errors.splitlines()) == 1
  assert not out.exists()


def test_folder_of_other_flags(bench, out):
  assert bench('clients', 'fixmatch', '--configurations=1', *CHANGED)[0] == 0
  before = sorted(os.listdir(out))
  code, _, errors = bench('clients', 'fixmatch')
  assert code == 2 and '--dataset=digits' in errors
  assert sorted(os.listdir(out)) == before
