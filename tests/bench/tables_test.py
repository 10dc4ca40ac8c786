"""Tables that a bench refuses, before it runs anything."""
from __future__ import annotations

import json

import pytest

from fedjax_ssl import cli
from fedjax_ssl.bench import plan, records
from tests.bench import made_up
from tests.bench.made_up import BED, COUNT


@pytest.fixture
def bench(tmp_path, capsys):
  """Calls `fedjax-ssl bench` with a table; returns code, file and errors."""
  def run(stored):
    file = tmp_path / 'clients.json'
    file.write_text(json.dumps(stored))
    code = cli.main([
        'bench', 'clients', 'fixmatch', f'--stored={file}',
        f'--out={tmp_path / "out"}', f'--configurations={COUNT}', '--',
        *made_up.CHANGED])
    return code, file, capsys.readouterr().err
  return run


def _with_seeds(row: dict, num: int) -> dict:
  return row | {name: row[name][:num] for name in ('accuracy', 'worst',
                                                   'curves')}


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
    (lambda _: {'bed': 'server'}, 'with BED server, this bench with clients'),
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
    (lambda f: _row(f, accuracy=[93, 93, 94]), '93 is not between 0 and 1'),
    (lambda f: _row(f, accuracy=[.9, .8]), 'do not match its seeds'),
    (lambda f: {'rows': {skew: [_with_seeds(rows[0], 2)]
                         for skew, rows in f['rows'].items()}},
     'have the values of 2 seeds'),
    (lambda f: _row(f, accuracy=.5), '0.5 is no list'),
    (lambda f: _row(f, curves=[[.5], [.5], []]), 'is damaged'),
    (lambda f: _row(f, rounds=[4, 8]), 'do not match its seeds or rounds'),
    (lambda f: _row(f, rounds=[4, 4], curves=3 * [[.5, .6]]),
     'the rounds of the row fixmatch do not increase'),
    (lambda f: _row(f, rounds=[8, 4], curves=3 * [[.5, .6]]),
     'the rounds of the row fixmatch do not increase'),
    (lambda f: _tuned(f, tried={'0': .5, '1': .5, '2': .6}),
     'has configuration 0, and of what was tried 2 is the best'),
    (lambda f: _tuned(f, tried={'0': None, '1': .5, '2': .5}),
     'has configuration 0, and of what was tried 1 is the best'),
    (lambda f: _row(f, seconds='58'), "'58' is not a number"),
    (lambda f: _row(f, notes='hi'), 'are not a list of strings'),
    (lambda f: _row(f, notes=[1]), 'are not a list of strings'),
    (lambda f: _row(f, configuration=3), 'has no configuration 3'),
    (lambda f: _row(f, environment=-1), '-1 is not a number of at least 0'),
    (lambda f: _row(f, environment=1), 'has no environment 1'),
    (lambda f: _row(f, data=1), 'are not a hash'),
    (lambda f: _row(f, row='uda'), 'not say how the row uda was tuned'),
    # No code that a table names is opened.
    (lambda f: _tuned(f, space=_space(f, method='/nowhere/own.py:fixmatch')),
     'has the path of a file'),
    (lambda f: _row(f, learning_rate=7), 'is not fixmatch'),
    (lambda f: {'rows': {skew: 2 * rows for skew, rows in f['rows'].items()}},
     'appears 2 times'),
])
def test_refuses_stored_rows_of_another_bench(bench, change, said):
  finished = made_up.table()
  code, file, errors = bench(finished | change(finished))
  assert code == 2 and len(errors.splitlines()) == 1 and said in errors
  assert f'--stored={file}' in errors and 'Error' not in errors
  assert not (file.parent / 'out').exists()


@pytest.mark.parametrize('stored, said', [
    ({'version': 'bench_v1', 'bed': 'clients'}, 'the version bench_v1'),
    ({'bed': 'clients'}, 'is not a table that `fedjax-ssl bench` wrote.'),
    ([], 'is not a table that `fedjax-ssl bench` wrote.'),
    ({'version': records.VERSION}, 'is not a table that'),
])
def test_refuses_files_that_are_no_table(bench, stored, said):
  code, file, errors = bench(stored)
  assert code == 2 and len(errors.splitlines()) == 1 and said in errors
  assert 'Error' not in errors and not (file.parent / 'out').exists()


def test_a_row_gains_skews_on_the_same_data_alone(tmp_path):
  file = tmp_path / 'clients.json'
  file.write_text(json.dumps(made_up.table()))
  whole = records.read(file, BED, COUNT, made_up.CHANGED)['fixmatch']
  def only(skew, data):
    return whole._replace(measured={skew: whole.measured[skew]},
                          environments={skew: whole.environments[skew]},
                          data={skew: data})
  first, second, *_ = BED.skews
  mine = only(first, 'a')
  assert mine.with_skews_of(only(second, 'b')) is mine
  both = mine.with_skews_of(only(second, 'a'))
  assert {*both.measured} == {*both.environments} == {first, second}
  assert both.data == {first: 'a', second: 'a'}


@pytest.mark.parametrize('text', ['{"configurations": Infinity}', '{', '[]'])
def test_a_damaged_table_has_the_default_number(tmp_path, text):
  file = tmp_path / 'clients.json'
  file.write_text(text)
  assert records.configurations(file) == plan.CONFIGURATIONS
