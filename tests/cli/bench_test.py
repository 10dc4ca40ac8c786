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
TRAINER = """import hashlib, json, os, sys
if '--only_check_args' in sys.argv:
  sys.exit(0)
flags = dict(a[2:].split('=', 1) for a in sys.argv if a.startswith('--'))
seeds = [int(s) for s in flags['seeds'].split(',')]
method, folder = flags['method'], flags['workdir']
with open(os.path.join(os.path.dirname(folder), 'started'), 'a') as file:
  print(os.path.basename(folder), file=file)
if method.startswith('uda') and 'final' in folder or method.startswith('moon'):
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
place = method.partition('.py:')[0] + '.py'
facts = {}
if os.path.exists(place):
  with open(place, 'rb') as file:
    facts['code'] = {'own.py': hashlib.sha256(file.read()).hexdigest()}
with open(folder + '/config.json', 'w') as file:
  json.dump(dict(flags=dict(method=method, seeds=seeds, num_rounds=10),
                 facts=facts, origin=dict(), environment=dict(commit='abc'),
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
      plan.space(entry, BED), dict.fromkeys(range(COUNT), .5),
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
  assert [line.split()[1:] for line in said.splitlines()] == [
      ['in', 'clients.json']] * 3
  assert 'Nothing is to be run' in bench(
      'clients', 'fixmatch', stored, '--dry_run', *CHANGED)[1]
  assert bench('clients', stored, 'fedprox', *CHANGED)[0] == 0
  assert {name.split('__')[1] for name in started(out)} == {'fedprox'}
  assert without_origin(out) == whole
  again = (out / 'clients.md').read_text()
  assert again.startswith(table[0].split('Accuracy is')[0])
  assert 'Taken from clients.json' in again and '`fixmatch`.' in again
  assert again.splitlines()[-5:] == table[1].splitlines()[-5:]
  # Its rows stay in the folder's table.
  ran = started(out)
  os.remove(file)
  assert bench('clients', 'fedprox', *CHANGED)[0] == 0
  assert started(out) == ran
  assert without_origin(out) == whole


def without_origin(folder: pathlib.Path) -> dict:
  """The table, without where its rows were taken from."""
  stored = json.loads((folder / 'clients.json').read_text())
  for row in stored['tuned'].values():
    row.pop('stored', None)
  return stored


def test_stored_rows_of_other_choices_do_not_count(
    bench, out, tmp_path, finished):
  """They are run, as are those of another method of the same name."""
  file = tmp_path / 'clients.json'
  changed = json.loads(json.dumps(finished))
  changed['tuned']['fixmatch']['space']['flags'] = {'cohort_size': 3}
  file.write_text(json.dumps(changed))
  code, _, errors = bench('clients', 'fixmatch', f'--stored={file}', *CHANGED)
  assert code == 0 and f'The row fixmatch of {file} does not count' in errors
  assert any('fixmatch' in name for name in started(out))
  assert rows(out, 'mild')['fixmatch']['accuracy'] != [1., 1., 1.]


def test_own_rows_stay_though_their_file_is_gone(bench, out, tmp_path):
  """And other code under the same name is another row."""
  own = tmp_path / 'own.py'
  own.write_text('from fedjax_ssl.methods.fixmatch import fixmatch as mine\n')
  assert bench('clients', f'{own}:mine', *CHANGED)[0] == 0
  ran = started(out)
  table = rows(out, 'mild')
  file = shutil.copy(out / 'clients.json', tmp_path)
  text = own.read_text()
  own.unlink()
  assert bench('clients', 'labels_only', *CHANGED)[0] == 0
  assert started(out) == ran and rows(out, 'mild') == table
  own.write_text(text + '# Edited.\n')
  code, _, errors = bench('clients', f'{own}:mine', *CHANGED)
  assert code == 2 and 'holds runs of mine with other code' in errors
  shutil.rmtree(out)
  code, _, errors = bench(
      'clients', f'{own}:mine', f'--stored={file}', *CHANGED)
  assert code == 0 and 'The row mine of' in errors
  assert {name.split('__')[1] for name in started(out)} == {'mine'}


def test_own_rows_are_known_by_their_code_wherever_it_is(
    bench, out, tmp_path):
  own = tmp_path / 'own.py'
  own.write_text('from fedjax_ssl.methods.fixmatch import fixmatch as mine\n')
  assert bench('clients', f'{own}:mine', *CHANGED)[0] == 0
  table = (out / 'clients.json').read_text()
  assert str(tmp_path) not in table
  file = shutil.copy(out / 'clients.json', tmp_path)
  shutil.rmtree(out)
  (tmp_path / 'there').mkdir()
  moved = shutil.move(own, tmp_path / 'there')
  assert bench('clients', f'{moved}:mine', f'--stored={file}', *CHANGED)[0] == 0
  assert not (out / 'started').exists()
  assert 'mine' in rows(out, 'mild')


def test_rows_stay_in_the_folders_table(bench, out):
  """Though runs are gone, or only one skew has a result."""
  assert bench('clients', 'fixmatch', 'uda(threshold=0.5)', *CHANGED)[0] == 1
  for skew in BED.skews:
    assert 'fixmatch' in rows(out, skew)
  for config in out.glob('clients__fixmatch__*/config.json'):
    shutil.rmtree(config.parent)
  assert bench('clients', 'labels_only', *CHANGED)[0] == 0
  for skew in BED.skews:
    assert 'fixmatch' in rows(out, skew)
  # A table that is not this bench's is kept beside it.
  code, _, errors = bench('clients', 'labels_only', '--configurations=2',
                          *CHANGED[1:])
  assert code == 0 and 'is kept as' in errors
  assert 'fixmatch' in (out / 'clients.json.old').read_text()
  (out / 'changed.json').write_text('5')
  code, _, errors = bench('clients', 'labels_only', *CHANGED)
  assert code == 2 and 'changed.json is damaged' in errors


def _row(finished: dict, **values) -> dict:
  first, *others = BED.skews
  return {'rows': {first: [finished['rows'][first][0] | values],
                   **{skew: finished['rows'][skew] for skew in others}}}


def _space(finished: dict, **values) -> dict:
  return finished['tuned']['fixmatch']['space'] | values


def _tuned(finished: dict, **values) -> dict:
  return {'tuned': {'fixmatch': finished['tuned']['fixmatch'] | values}}


@pytest.mark.parametrize('change, said', [
    (lambda _: {'version': 'bench_v1'}, 'the version bench_v1, this bench'),
    (lambda _: {'changed': []},
     'the flags behind -- none, this bench with --dataset=digits'),
    (lambda _: {'seeds': [0, 1]}, 'the seeds 0 1, this bench with 0 1 2'),
    (lambda _: {'rows': {}}, 'is damaged'),
    (lambda _: {'tuned': None}, 'is damaged'),
    (lambda f: _tuned(f, tried={'0': .5}), 'its 3 configurations'),
    (lambda f: _tuned(f, tried={'7': .5, '8': .5, '9': .5}),
     'its 3 configurations'),
    (lambda f: _tuned(f, tried={'k': .5}), 'is damaged'),
    (lambda f: _tuned(f, space={}), 'is damaged'),
    (lambda f: _tuned(f, space=_space(f, learning_rate=[.5, .1])),
     'other learning rates'),
    (lambda f: _tuned(f, space=_space(f, knobs={'threshold': [1, 1]})),
     'the values (1, 1) of threshold'),
    (lambda f: _row(f, accuracy=[93, 93, 94]), '93 is no share of 1'),
    (lambda f: _row(f, accuracy=[.9, .8]), 'another number of values'),
    (lambda f: _row(f, accuracy=.5), '0.5 is no list'),
    (lambda f: _row(f, curves=[[.5], [.5], []]), 'is damaged'),
    (lambda f: _row(f, rounds=[4, 8]), 'another number of values'),
    (lambda f: _row(f, seconds='58'), "'58' is no number"),
    (lambda f: _row(f, notes='hi'), 'are no texts'),
    (lambda f: _row(f, notes=[1]), 'are no texts'),
    (lambda f: _row(f, learning_rate=7), 'is not fixmatch'),
    (lambda f: {'rows': {skew: 2 * rows for skew, rows in f['rows'].items()}},
     'is there 2 times'),
])
def test_refuses_stored_rows_of_another_bench(
    bench, out, tmp_path, finished, change, said):
  file = tmp_path / 'clients.json'
  file.write_text(json.dumps(finished | change(finished)))
  code, _, errors = bench('clients', 'fixmatch', f'--stored={file}', *CHANGED)
  assert code == 2 and len(errors.splitlines()) == 1 and said in errors
  assert f'--stored={file}' in errors
  assert not out.exists()


def test_refuses_two_rows_of_one_name(bench, out, tmp_path):
  own = tmp_path / 'own.py'
  own.write_text('from fedjax_ssl.methods.uda import uda as fixmatch\n')
  code, _, errors = bench('clients', f'{own}:fixmatch', *CHANGED)
  assert code == 2 and 'the name of the row fixmatch' in errors
  assert not out.exists()


@pytest.mark.thorough
def test_row_that_fails_is_left_out(bench, out):
  code, said, _ = bench('clients', 'uda', 'moon', 'fixmatch', *CHANGED)
  assert code == 1
  assert 'FAILED clients__uda__mild__final' in said
  assert 'it fell over' in said
  assert [*rows(out, 'mild')] == ['all_labels', 'fixmatch', 'labels_only']
  assert 'Without a result, as a run failed or has not ended: `uda`' in said
  assert 'not all their configurations have a result: `moon` (0 have).' in said
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
