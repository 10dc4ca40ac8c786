"""The table script: names of tables, and damaged runs."""
from __future__ import annotations

import subprocess
import sys

import pytest

from fedjax_ssl.report import study
from tests.report import fake


def _call(*args):
  return subprocess.run(
      [sys.executable, '-m', 'fedjax_ssl', 'results', *args],
      capture_output=True, text=True, check=False)


def test_a_point_in_the_name_of_a_table_is_kept(tmp_path):
  """Or the tables of alpha 0.1 and 0.5 would be one file."""
  run = fake.write(tmp_path / 'a', [fake.row(20, .5)])
  (tmp_path / 'alpha0.json').write_text('of another study')
  for name in ('alpha0.1', 'alpha0.5.json'):
    assert _call(run, f'--out={tmp_path}/{name}').returncode == 0
  assert {p.name for p in tmp_path.glob('alpha*')} == {
      'alpha0.json', 'alpha0.1.json', 'alpha0.1.md', 'alpha0.5.json',
      'alpha0.5.md'}
  assert (tmp_path / 'alpha0.json').read_text() == 'of another study'


def test_a_damaged_run_is_named(tmp_path):
  run = fake.write(tmp_path / 'a', [fake.row(20, .5)])
  config = tmp_path / 'a' / 'config.json'
  config.write_text(config.read_text().replace('"labels"', '"label"'))
  done = _call(run)
  assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
  assert f"{run} is damaged: KeyError('labels')" in done.stderr
  made = fake.config() | {'origin': {'setting': 3}}
  other = fake.write(tmp_path / 'b', [fake.row(20, .5)], made)
  with pytest.raises(ValueError, match=f'{other} is damaged: origin='):
    study.read(other)


def test_a_doubled_row_is_refused_with_the_name_of_the_run(tmp_path):
  run = fake.write(tmp_path / 'a', [fake.row(20, .5), fake.row(20, .5)])
  done = _call(run)
  assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
  assert f'{run} is damaged: A row of round 20' in done.stderr


def test_a_table_needs_a_name_and_old_ones_stay(tmp_path):
  run = fake.write(tmp_path / 'a', [fake.row(20, .5)])
  done = _call(run, '--out=')
  assert done.returncode == 2 and not done.stdout
  assert done.stderr.splitlines() == [
      'error: --out= is empty; name a table, or leave it out.']
  (tmp_path / 'table.json').write_text('old')
  (tmp_path / 'table.md').mkdir()
  assert _call(run, f'--out={tmp_path}/table').returncode == 2
  assert (tmp_path / 'table.json').read_text() == 'old'
