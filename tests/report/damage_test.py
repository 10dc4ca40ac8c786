"""Damaged runs are named and left out; the others are reported."""
from __future__ import annotations

import math
import os
from typing import Any

import pytest

from fedjax_ssl.cli import report
from fedjax_ssl.report import page, series, stored_runs, tables
from fedjax_ssl.training import metrics
from tests.report import fake

pytestmark = pytest.mark.usefixtures('undrawn')

CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    'text': ({'accuracy': 'abc'}, "accuracy='abc' must be a number"),
    'share': ({'accuracy': 1e308}, 'accuracy=1e+308 must be in [0, 1]'),
    'classes': ({'per_class_accuracy': 3}, 'per_class_accuracy=3'),
    'class': ({'per_class_accuracy': ['a']}, "per_class_accuracy='a'"),
    'loss': ({'loss': -1e308}, 'loss is beyond 1e+39'),
    'bytes': ({'bytes_up': 10**400}, 'bytes_up is beyond'),
    'round': ({'round': 10**30}, 'round is beyond')}


@pytest.mark.parametrize('name', CHANGES)
def test_values_that_no_run_writes(tmp_path, name):
  changes, words = CHANGES[name]
  good = fake.write(tmp_path / 'good', [fake.row(20, .5)])
  bad = fake.write(tmp_path / 'bad', [fake.row(5, .5), fake.row(20, .5)
                                      | changes], fake.config(alpha=.1))
  left_out: list[str] = []
  run, = stored_runs.load([good, bad], left_out)
  assert run.name == 'good'
  assert f'{bad} is damaged: ' in left_out[0] and words in left_out[0]


@pytest.mark.parametrize('flag, value', [('num_rounds', 'abc'),
                                         ('method', None)])
def test_configurations_that_no_run_writes(tmp_path, flag, value):
  made = fake.config()
  made['flags'][flag] = value
  bad = fake.write(tmp_path / 'bad', [fake.row(20, .5)], made)
  with pytest.raises(ValueError, match=f'bad is damaged: {flag}='):
    stored_runs.read(bad)


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_known(tmp_path, value):
  run = stored_runs.read(fake.write(
      tmp_path / 'run', [fake.row(5, .5), fake.row(20, value)]))
  assert stored_runs.outcome(run.seeds[0])['final'] is None
  assert stored_runs.default_target([run]) == 0.5
  assert tables.main_table([run]).rows[0][4] == (
      tables.Value(None))


@pytest.mark.parametrize('line', [
    '{"round": 1, "seed": null}', '{"round": 1, "seed": "a"}', 100_000 * '['])
def test_lines_that_are_no_rows(tmp_path, line):
  file = tmp_path / 'metrics.jsonl'
  file.write_text(f'{line}\n{{"round": 2, "seed": 0}}\n')
  assert metrics.read(tmp_path) == [{'round': 2, 'seed': 0}]


@pytest.mark.parametrize('federation', [
    None, 'x', {'labeled_classes': [[1, 2], [3]]},
    {'labeled_classes': [['a']]}, {'labeled_classes': [1]}])
def test_a_partition_that_is_none_is_not_drawn(tmp_path, federation):
  made = fake.config()
  made['facts']['federation'] = federation
  run = stored_runs.read(
      fake.write(tmp_path / 'run', [fake.row(20, .5)], made))
  assert not page._partitions([run])


def test_seeds_of_other_classes_have_no_bars(tmp_path):
  rows = [fake.row(20, .5, 0), fake.row(20, .5, 1)
          | {'per_class_accuracy': [.5, .5]}]
  run = stored_runs.read(
      fake.write(tmp_path / 'run', rows, fake.config([0, 1])))
  made = series.all_charts([run], stored_runs.compared([run]))
  assert 'accuracy' in [c.name for c in made]
  assert 'classes' not in [c.name for c in made]


def test_the_two_folders_of_one_seed_are_named(tmp_path):
  folders = [fake.write(tmp_path / name, [fake.row(20, .5)],
                        fake.config([seed]))
             for name, seed in (('a', 0), ('b', 1), ('copy_of_b', 1))]
  with pytest.raises(ValueError, match='/b and .*copy_of_b are the same run'):
    stored_runs.load(folders)


def test_a_name_of_two_lines_is_one_row(tmp_path):
  run = stored_runs.read(
      fake.write(tmp_path / 'a\nb', [fake.row(20, .5)]))
  table = tables.markdown(tables.main_table([run]))
  assert table.splitlines()[2].startswith('| a b |')


def test_nothing_is_written_where_not_all_can_be(tmp_path, capsys):
  run = fake.write(tmp_path / 'run', [fake.row(20, .5)])
  (tmp_path / 'out' / 'index.html').mkdir(parents=True)
  assert report.main([run, f'--out={tmp_path / "out"}']) == 2
  said = capsys.readouterr().err
  assert 'out cannot be written: Is a directory' in said
  assert len(said.splitlines()) == 1
  assert [p.name for p in (tmp_path / 'out').iterdir()] == ['index.html']


def test_an_old_report_stays_until_the_new_one_is_whole(tmp_path, capsys):
  run, out = fake.write(tmp_path / 'run', [fake.row(20, .5)]), tmp_path / 'out'
  assert report.main([run, f'--out={out}']) == 0
  before = (out / 'index.html').read_bytes()
  (out / 'table.tex').unlink()
  (out / 'table.tex').mkdir()  # The last file to be written.
  capsys.readouterr()
  assert report.main([run, f'--out={out}', '--title=New']) == 2
  assert len(capsys.readouterr().err.splitlines()) == 1
  assert (out / 'index.html').read_bytes() == before
  assert not list(out.glob('*.partial'))


def test_a_name_that_is_no_text_is_shown_with_a_mark(tmp_path, capsys):
  name = os.fsdecode(b'run\xff')
  run = fake.write(tmp_path / name, [fake.row(20, .5)], fake.config(
      data_dir=name, split=name))
  out = tmp_path / 'out'
  assert report.main([run, f'--out={out}', f'--title={name}']) == 0
  assert 'run?' in capsys.readouterr().out
  for file in out.iterdir():
    if file.suffix not in ('.pdf', '.svg') and 'partition' not in file.name:
      assert 'run?' in file.read_text(encoding='utf-8')


def test_a_run_that_cannot_be_shown_stops_no_report(tmp_path, capsys):
  good = fake.write(tmp_path / 'good', [fake.row(20, .5)])
  made = fake.config(alpha=.1)
  made['origin']['script'] = 5
  bad = fake.write(tmp_path / 'bad', [fake.row(20, .5)], made)
  out = tmp_path / 'out'
  assert report.main([good, bad, f'--out={out}']) == 0
  said = capsys.readouterr()
  assert said.err.startswith(f'left out: {bad} ')
  assert len(said.err.splitlines()) == 1 and '| good |' in said.out
  page = (out / 'index.html').read_text()
  assert f'left out: {bad} ' in page
  assert report.main([bad, f'--out={out}']) == 2
  assert (out / 'index.html').read_text() == page


def test_a_seed_that_comes_twice_stops_no_report(tmp_path, capsys):
  runs = [fake.write(tmp_path / name, [fake.row(20, .5)]) for name in 'ab']
  assert report.main([*runs, f'--out={tmp_path / "out"}']) == 0
  said = capsys.readouterr()
  assert said.err.startswith(f'left out: {runs[0]} and {runs[1]} are the same')
  assert '| a |' in said.out and '| b |' not in said.out


def test_a_report_needs_a_folder(tmp_path, capsys, monkeypatch):
  run = fake.write(tmp_path / 'run', [fake.row(20, .5)])
  monkeypatch.chdir(tmp_path)
  assert report.main([run, '--out=']) == 2
  assert capsys.readouterr().err == 'error: --out= is empty; name a folder.\n'
  assert [p.name for p in tmp_path.iterdir()] == ['run']


@pytest.mark.parametrize('rounds', [(5, 20, 20), (5, 5, 20), (20, 5)])
def test_rows_that_are_doubled_or_out_of_order(tmp_path, rounds):
  bad = fake.write(tmp_path / 'bad', [fake.row(r, .5) for r in rounds])
  with pytest.raises(ValueError, match='bad is damaged: A row of round'):
    stored_runs.read(bad)
