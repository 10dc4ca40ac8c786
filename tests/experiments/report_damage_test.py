"""Damaged runs are named and left out; the others are reported."""
from __future__ import annotations

import math
from typing import Any

import pytest
import report
import report_charts
import report_data
import report_tables

from fedjax_ssl.training import metrics
from tests.experiments import fake

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
  run, = report_data.load([good, bad], left_out)
  assert run.name == 'good'
  assert f'{bad} is damaged: ' in left_out[0] and words in left_out[0]


@pytest.mark.parametrize('flag, value', [('num_rounds', 'abc'),
                                         ('method', None)])
def test_configurations_that_no_run_writes(tmp_path, flag, value):
  made = fake.config()
  made['flags'][flag] = value
  bad = fake.write(tmp_path / 'bad', [fake.row(20, .5)], made)
  with pytest.raises(ValueError, match=f'bad is damaged: {flag}='):
    report_data.read(bad)


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_known(tmp_path, value):
  run = report_data.read(fake.write(
      tmp_path / 'run', [fake.row(5, .5), fake.row(20, value)]))
  assert report_data.outcome(run.seeds[0])['final'] is None
  assert report_data.default_target([run]) == 0.5
  assert report_tables.main_table([run]).rows[0][4] == (
      report_tables.Value(None))


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
  run = report_data.read(
      fake.write(tmp_path / 'run', [fake.row(20, .5)], made))
  assert [drawing for _, drawing in report._partitions([run])] == ['']


def test_seeds_of_other_classes_have_no_bars(tmp_path):
  rows = [fake.row(20, .5, 0), fake.row(20, .5, 1)
          | {'per_class_accuracy': [.5, .5]}]
  run = report_data.read(
      fake.write(tmp_path / 'run', rows, fake.config([0, 1])))
  assert report_charts.per_class(run, 0) == ''


def test_the_two_folders_of_one_seed_are_named(tmp_path):
  folders = [fake.write(tmp_path / name, [fake.row(20, .5)],
                        fake.config([seed]))
             for name, seed in (('a', 0), ('b', 1), ('copy_of_b', 1))]
  with pytest.raises(ValueError, match='/b and .*copy_of_b are the same run'):
    report_data.load(folders)


def test_a_name_of_two_lines_is_one_row(tmp_path):
  run = report_data.read(
      fake.write(tmp_path / 'a\nb', [fake.row(20, .5)]))
  table = report_tables.markdown(report_tables.main_table([run]))
  assert table.splitlines()[2].startswith('| a b |')


def test_nothing_is_written_where_not_all_can_be(tmp_path, capsys):
  run = fake.write(tmp_path / 'run', [fake.row(20, .5)])
  (tmp_path / 'out' / 'index.html').mkdir(parents=True)
  assert report.main([run, f'--out={tmp_path / "out"}']) == 2
  said = capsys.readouterr().err
  assert 'out cannot be written: Is a directory' in said
  assert len(said.splitlines()) == 1
  assert [p.name for p in (tmp_path / 'out').iterdir()] == ['index.html']
