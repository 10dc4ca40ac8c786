"""Tables of papers: sound data, cells by information, inside the budget."""
from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import time

import paper_cells
import paper_flags
import paper_runs
import paper_tables
import pytest

from tests.experiments import launcher

SCRIPT = launcher.EXPERIMENTS / 'paper_tables.py'
FAKE = pathlib.Path(__file__).parent / 'fake.py'
TOML = """
title = "A table"
paper = "A paper"
unit = "%"
runs = "3 runs"
flagfile = "{setting}.{method}{data}.flags"
first = ["Ours", "Base"]
first_columns = ["hard"]

[[columns]]
title = "easy"
setting = "exp"
data = ""

[[columns]]
title = "hard"
setting = "exp"
data = "_hard"

[[rows]]
title = "Other"
method = "other"
values = [10.0, "-"]

[[rows]]
title = "Base"
method = "base"
values = [20.0, 21.5]
std = [1.0, "-"]

[[rows]]
title = "Ours"
method = "ours"
values = [30.0, "diverged"]
"""


class Place:
  """A folder with a table, flagfiles and a fake experiment."""

  def __init__(self, root: pathlib.Path, capsys):
    self.root, self._capsys = root, capsys
    (root / 'tables').mkdir()
    (root / 'tables' / 'one.toml').write_text(TOML)
    (root / 'flagfiles').mkdir()
    (root / 'exp.py').write_text(FAKE.read_text())

  def flagfile(self, name, *lines):
    (self.root / 'flagfiles' / f'{name}.flags').write_text(
        '\n'.join(['# Cell.', '--seeds=0,1', *lines]) + '\n')

  def command(self, *words, budget=1.0, table='one'):
    at = self.root
    return [f'--table={table}',
            f'--budget_minutes={budget}', f'--runs={at}/runs',
            f'--results={at}/results', f'--tables={at}/tables',
            f'--flagfiles={at}/flagfiles', *words]

  def call(self, *words, code=0, **kwargs):
    got = paper_tables.main(self.command(*words, **kwargs))
    printed = self._capsys.readouterr()
    assert got == code, printed
    return printed.out if code != 2 else printed.err

  def results(self, folder='one'):
    return {f.stem: json.loads(f.read_text())
            for f in (self.root / 'results' / folder).glob('*.json')}

  def starts(self):
    return {str(f.parent.relative_to(self.root / 'runs' / 'one')):
            len(f.read_text()) for f in (self.root / 'runs').rglob('starts')}


@pytest.fixture
def place(tmp_path, capsys):
  made = Place(tmp_path, capsys)
  for name in ('base', 'base_hard', 'ours_hard'):
    made.flagfile(f'exp.{name}', '--method=fedavg')
  made.flagfile('exp.other', '--method=fixmatch')  # Which falls over.
  return made


@pytest.mark.parametrize('name', paper_cells.names())
def test_tables_are_sound(name):
  table = paper_cells.load(name)
  cells = table.cells()
  filled = sum(len(cell.columns) for cell in cells)
  assert filled == sum(v != '-' for row in table.rows for v in row['values'])
  assert cells[0].row == table.first[0]
  for row in table.rows:
    for value in row['values']:
      assert isinstance(value, str) or 0 < value <= 200
  for i in range(len(table.rows)):
    for j, column in enumerate(table.columns):
      value, std = table.value(i, j)
      assert std is None or (value != '-' and 0 <= std < 5), column


@pytest.mark.parametrize('table, row, column, number', [
    ('feddure1', 'FedDure', 'CIFAR-10 (DIR, DIR)', (57.73, None)),
    ('fedmatch1', 'FedMatch-Dense', 'standard, G.Acc', (63.84, .01)),
    ('fedmatch2', 'FedAvg-FixMatch', 'F=.05', (32.33, .02)),
    ('fedssl1', 'FedSSL', '(3, 9), 1 %', (65.3, None)),
    ('fedssl4', 'Supervise', '(3, 9), .25 %', ('diverged', None)),
    ('twinsight', 'RSCFed', 'Fashion-MNIST', (76.58, None)),
    ('fedlabel2', 'FedLabel', 'CIFAR-100', (18.42, 1.46))])
def test_numbers_of_the_papers(table, row, column, number):
  found = paper_cells.load(table)
  i = [r['title'] for r in found.rows].index(row)
  j = [c['title'] for c in found.columns].index(column)
  assert found.value(i, j) == number


def test_flagfiles_of_a_table_name_the_papers_number():
  """Where flagfile and table both exist, they say the same."""
  compared = 0
  for name in paper_cells.names():
    table = paper_cells.load(name)
    for i in range(len(table.rows)):
      for j, column in enumerate(table.columns):
        cell = table.cell_of(i, j)
        file = paper_cells.FLAGFILES / cell.flagfile
        value, std = table.value(i, j)
        if value == '-' or cell.flags or not file.exists() or (
            column.get('metric', 'accuracy') != 'accuracy'):
          continue
        if (name, cell.row) == ('feddure2', 'Baseline') and j > 0:
          continue  # Table 1 has other numbers for the same runs.
        said = paper_flags.printed(file.read_text().splitlines())
        assert said, file
        assert (said.kind if said.value is None else said.value) == value, file
        assert said.std in (None, std), file
        compared += 1
  assert compared >= 300


def test_what_tells_most_comes_first():
  table = paper_cells.load('feddure1')
  rows = [(c.row, c.columns[0]) for c in table.cells()]
  assert rows[:4] == [(row, 'CIFAR-10 (DIR, DIR)') for row in table.first]
  assert rows[4][1] == 'Fashion-MNIST (DIR, DIR)'
  assert len(set(rows)) == len(rows) == 81


def test_a_run_fills_all_its_columns():
  cells = paper_cells.load('fedmatch1').cells()
  dense, = [c for c in cells if c.name == 'fmnist_streaming.fedmatch_dense']
  assert dense.columns == ('standard, L.Acc', 'standard, G.Acc', 'standard, C')


def test_cells_run_in_order_and_once(place):
  printed = place.call(code=1)
  assert 'missing: Ours | easy: exp.ours.flags does not exist yet' in printed
  done = [line.split()[1:4] for line in printed.splitlines()
          if line.startswith('done ')]
  assert done == [['exp.ours_hard,', 'seed', '0,'],
                  ['exp.base_hard,', 'seed', '0,'], ['exp.base,', 'seed', '0,'],
                  ['exp.ours_hard,', 'seed', '1,'],
                  ['exp.base_hard,', 'seed', '1,'], ['exp.base,', 'seed', '1,']]
  assert 'failed exp.other, seed 0' in printed
  assert '    error: it fell over' in printed  # And the others went on.
  assert '6 runs done, 1 failed, 2 left' in printed
  stored = place.results()['exp.base']
  assert stored['seeds']['1']['final'] == 0.6
  assert stored['columns'] == ['easy'] and stored['run_flags']['alpha'] == 0.5
  assert stored['seeds']['0']['environment']['commit'] == 'abc'
  assert str(place.root) not in json.dumps(stored)
  before = place.starts()
  place.call(code=1)
  assert {k: v for k, v in place.starts().items() if 'other' not in k} == before
  listed = place.call('--list')
  assert listed.splitlines()[0] == (
      'done     Ours | hard: exp.ours_hard.flags (seeds 0, 1)')
  assert listed.count('to do ') == 1 and listed.count('missing ') == 1


def test_the_budget_holds_and_the_rest_follows(place):
  (place.root / 'flagfiles' / 'exp.other.flags').unlink()
  place.flagfile('exp.ours_hard', '--method=fedavg', '--num_rounds=1')
  slow = ('--method=fedavg', '--seconds=0.3', '--num_rounds=9')
  for name in ('base', 'base_hard'):
    place.flagfile(f'exp.{name}', *slow)
  began = time.monotonic()
  printed = place.call(budget=0.03)
  assert time.monotonic() - began < 1.9
  assert 'stopped exp.base_hard, seed 0' in printed
  assert '5 left; the same command continues.' in printed
  assert [*place.results()] == ['exp.ours_hard']
  rows = place.root / 'runs/one/exp.base_hard/seed_0/metrics.jsonl'
  kept = rows.read_text()
  assert 0 < kept.count('\n') < 9
  for name in ('base', 'base_hard'):
    place.flagfile(f'exp.{name}', '--method=fedavg', '--num_rounds=9')
  assert ' 0 left.' in place.call()
  assert rows.read_text().startswith(kept) and rows.read_text().count('\n') == 9
  assert place.starts()['exp.ours_hard/seed_0'] == 1
  assert place.starts()['exp.base_hard/seed_0'] == 2


def test_a_run_of_long_rounds_has_the_time_to_save(tmp_path):
  """It is asked to end a round earlier, by what it says of its rounds."""
  run = f"""import pathlib, signal, time
def end(*unused):
  time.sleep(.8)
  pathlib.Path({str(tmp_path / 'saved')!r}).touch()
  raise SystemExit(0)
signal.signal(signal.SIGTERM, end)
print('x: round 2/9, 0.8 s/round, 6s left', flush=True)
time.sleep(60)
"""
  with open(tmp_path / 'log', 'ab') as log:
    log.write(b'x: round 9/9, 3e+03 s/round\n')  # Of an earlier start.
    deadline = time.monotonic() + 3
    assert paper_runs.run([sys.executable, '-c', run], log, deadline) is None
  assert time.monotonic() < deadline
  assert (tmp_path / 'saved').exists()


def test_killed_in_the_middle_it_continues(place):
  for name in ('base', 'base_hard', 'ours_hard', 'other'):
    place.flagfile(f'exp.{name}', '--method=fedavg', '--seconds=0.1')
  process = subprocess.Popen([sys.executable, str(SCRIPT), *place.command()],
                             stdout=subprocess.DEVNULL)
  while not place.results():
    time.sleep(0.02)
  second = place.call(code=2)
  assert 'in use by another process' in second
  process.send_signal(signal.SIGKILL)
  process.wait()
  first = place.results()['exp.ours_hard']
  time.sleep(0.5)  # The orphan ends by itself.
  assert ', 0 failed, 0 left.' in place.call()
  assert place.results()['exp.ours_hard']['seeds']['0'] == first['seeds']['0']
  assert all([*r['seeds']] == ['0', '1'] for r in place.results().values())


def test_a_reader_that_closes_early_is_no_error(place):
  process = subprocess.Popen(
      [sys.executable, str(SCRIPT), *place.command('--list')],
      stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  assert process.stdout is not None and process.stderr is not None
  process.stdout.close()
  assert process.wait(timeout=60) == 0
  assert not process.stderr.read()


def test_a_variant_is_never_taken_for_the_table(place):
  (place.root / 'flagfiles' / 'exp.other.flags').unlink()
  assert '--variant' in place.call('--', '--num_rounds=2', code=2)
  assert '--variant' in place.call('--variant=short', code=2)
  assert 'cannot be given' in place.call('--variant=a', '--', '--seeds=1',
                                         code=2)
  place.call('--variant=short', '--', '--num_rounds=2')
  assert not place.results()
  stored = place.results('one.short')['exp.base']
  assert stored['extra_flags'] == ['--num_rounds=2']
  assert stored['seeds']['0']['rounds'] == 2
  assert 'was made with' in place.call('--variant=short', '--',
                                       '--num_rounds=1', code=2)


@pytest.mark.parametrize('change, words', [
    (('title = "A table"\n', ''), "key 'title' is missing"),
    (('values = [10.0, "-"]', 'values = [10.0]'), '1 values for 2 columns'),
    (('"Ours", "Base"', '"Mine"'), "'Mine' is first"),
    (('"diverged"', '"?"'), "'?' is no number"),
    (('title = "Other"', 'title = "Base"'), 'a row comes twice'),
    (('unit =', 'units ='), "'units' is no key"),
    (('[[rows]]', '[[rows'), 'one.toml')])
def test_bad_tables_are_named(place, change, words):
  (place.root / 'tables' / 'one.toml').write_text(TOML.replace(*change))
  said = place.call('--list', code=2)
  assert words in said and 'one.toml' in said and len(said.splitlines()) == 1


def test_unknown_tables_and_budgets(place):
  assert 'Tables: one.' in place.call(table='two', code=2)
  assert 'must be positive' in place.call(budget=0, code=2)
  place.flagfile('exp.base', '--method=unheard_of')
  assert 'Base | easy: method unheard_of does not exist yet' in place.call(
      '--list')


def test_rows_and_columns_can_be_chosen(place):
  place.call('--row=Base', '--column=hard')
  assert [*place.results()] == ['exp.base_hard']
  assert [line.split(' |')[0].split()[-1] for line in place.call(
      '--list', '--row=Ours', '--row=Base', '--column=hard').splitlines()
          ] == ['Ours', 'Base']
  said = place.call('--column=Hard', code=2)
  assert "--column=Hard is not in one; it has 'easy', 'hard'." in said
