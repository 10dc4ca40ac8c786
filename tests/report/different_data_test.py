"""Runs of different data are told as such, and not compared."""
from __future__ import annotations

import csv
import itertools
import pathlib

import pytest

from fedjax_ssl.cli import places, report
from fedjax_ssl.core import bounds
from fedjax_ssl.report import names, pairs, stored_runs
from tests.report import fake


def _config(digest: str | None = 'd', **flags) -> dict:
  made = fake.config(**flags)
  made['facts']['data_hash'] = digest
  return made


@pytest.mark.parametrize('one, other, same', [
    (_config('a'), _config('a'), True),
    (_config('a'), _config('b'), False),
    (_config('a', dataset='x'), _config('a', dataset='y'), True),
    (_config(None, dataset='x'), _config(None, dataset='y'), False),
    (_config(None), _config('a'), True),
    (_config('a'), _config('b', embeddings='v.npz'), True),
    (_config('a', dataset='x'), _config('b', dataset='y', embeddings='v.npz'),
     False),
    (_config('a'), {}, False)])
def test_what_is_the_same_data(one, other, same):
  assert names.data_parts([one, other]) == [0, int(not same)]


@pytest.mark.parametrize('configs, parts', [
    # What is of unknown data joins no two that are known to differ.
    ([_config('a'), _config('b'), _config(None)], 'abc'),
    ([_config('a'), _config('a'), _config(None)], 'aaa'),
    # Nor do other vectors.
    ([_config('a'), _config('b'), _config('e', embeddings='v.npz')], 'abc'),
    ([_config('a'), _config('f', embeddings='w.npz'),
      _config('e', embeddings='v.npz')], 'aaa'),
    ([_config('a'), _config('b'), _config('b', dataset='x'),
      _config(None, dataset='x')], 'abbb')])
def test_the_order_of_runs_parts_none(configs, parts):
  for order in itertools.permutations(range(len(configs))):
    found = names.data_parts([configs[i] for i in order])
    wanted = ''.join(parts[i] for i in order)
    first = [*dict.fromkeys(wanted)]
    assert found == [first.index(part) for part in wanted]


def _run(folder: pathlib.Path, accuracy: float, digest: str, **flags) -> str:
  return fake.write(folder, [fake.row(20, accuracy + .01 * seed, seed)
                             for seed in range(2)],
                    _config(digest, seeds=range(2), **flags))


def _with_bounds(folder: pathlib.Path, accuracy: float, digest: str, **flags
                 ) -> str:
  made = _run(folder, accuracy, digest, method='uda', **flags)
  for labels, place in zip(bounds.NAMES, bounds.FOLDERS, strict=True):
    _run(folder / place, .1, digest, labels=labels, **flags)
  return made


@pytest.mark.usefixtures('undrawn')
@pytest.mark.parametrize('other', ['digits', 'shapes'])
def test_each_is_compared_with_its_own_bounds(tmp_path, capsys, other):
  """Also where both data sets have one name."""
  folders = [_with_bounds(tmp_path / 'a', .5, 'd'),
             _with_bounds(tmp_path / 'b', .9, 'e', dataset=other)]
  out = tmp_path / 'out'
  assert report.main([*folders, f'--out={out}']) == 0
  said, told = capsys.readouterr()
  assert 'left out' not in told
  runs = stored_runs.load(places.with_bounds(folders)[0])
  first, second = ([run.name for run in runs if str(run.folders[0]).startswith(
      folder)] for folder in folders)
  line = ('The runs are of different data and compared only within the same: '
          f'digits ({", ".join(first)}); {other} ({", ".join(second)}).')
  assert line in said and line in (out / 'index.html').read_text()
  assert '**' not in (out / 'table.md').read_text()  # None is the best.
  with open(out / 'table.csv', newline='') as file:
    assert {row['run']: row['dataset'] for row in csv.DictReader(file)} == {
        **dict.fromkeys(first, 'digits'), **dict.fromkeys(second, other)}
  rows = [[cell.strip() for cell in row.split('|')[1:3]] for row in (
      out / 'differences.md').read_text().splitlines()[2:]
          if row.startswith('|')]
  assert sorted(rows) == sorted([
      [first[0], first[1]], [first[2], first[1]],
      [second[0], second[1]], [second[2], second[1]]])


def test_a_reference_is_one_of_its_own_data(tmp_path):
  runs = stored_runs.load([
      _run(tmp_path / 'a', .5, 'd'),
      _run(tmp_path / 'b', .6, 'd', method='uda'),
      _run(tmp_path / 'c', .7, 'e', method='uda', dataset='x'),
      _run(tmp_path / 'd', .8, 'e', method='fixmatch', dataset='x')])
  plan = stored_runs.compared(runs)
  assert pairs.references(runs, plan) == [0, 0, 2, 2]
  assert pairs.references(runs, plan, runs[1].name) == [1, 1, 2, 2]


def test_several_runs_of_one_data_set_bring_no_bounds(tmp_path):
  one, two = (_with_bounds(tmp_path / name, .5, 'd') for name in 'ab')
  alone = _with_bounds(tmp_path / 'c', .5, 'e')
  found, said = places.with_bounds([one, two, alone])
  assert found == [one, two, alone, *(
      f'{alone}/{place}' for place in bounds.FOLDERS)]
  assert said.startswith('4 bounds of these runs')
