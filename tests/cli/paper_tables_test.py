"""Cells of papers run by information, inside the budget, and go on."""
from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from fedjax_ssl.cli import child, tables
from tests.report import fake

PROGRAM = [sys.executable, '-m', 'fedjax_ssl', 'tables']
FAKE = pathlib.Path(fake.__file__)
BOOK = """
title = "A paper"
paper = "Somebody"
runs = "3 runs"
cells = "{setting}.{method}{hard}"
words = {hard = ""}

[flags]
seeds = "0,1"

[methods]
other = "fixmatch"
base = "fedavg"
ours = "fedavg"
later = {missing = "it has yet to be written"}

[[tables]]
name = "one"
title = "A table"
source = "Table 1"
first = ["Ours", "Base"]
first_columns = ["hard"]
columns = [
  {title = "easy", setting = "exp"},
  {title = "hard", setting = "exp", words = {hard = "_hard"}},
]
rows = [
  {title = "Other", method = "other", flags = {}, values = [10.0, "-"]},
  {title = "Base", method = "base", flags = {}, values = [20.0, 21.5], std = [1.0, "-"]},
  {title = "Ours", method = "ours", flags = {}, values = ["-", "diverged"]},
  {title = "Later", method = "later", values = [30.0, "-"]},
]
"""  # noqa: E501


class Place:
  """A folder with a table and a fake experiment."""

  def __init__(self, root: pathlib.Path, capsys):
    self.root, self._capsys = root, capsys
    self._rows: dict[str, str] = {}
    (root / 'tables').mkdir()
    (root / 'exp.py').write_text(FAKE.read_text())
    self.change()

  def change(self, method='', flags='', text=BOOK):
    """Gives a row, by its method, these flags; writes the table."""
    self._rows[method] = flags
    for name, value in self._rows.items():
      text = text.replace(f'method = "{name}", flags = {{}}',
                          f'method = "{name}", flags = {{{value}}}')
    (self.root / 'tables' / 'paper.toml').write_text(text)

  def command(self, *words, budget=1.0, table='one'):
    at = self.root
    return [f'--table={table}',
            f'--budget_minutes={budget}', f'--runs={at}/runs',
            f'--results={at}/results', f'--tables={at}/tables',
            f'--scripts={at}', *words]

  def call(self, *words, code=0, **kwargs):
    got = tables.main(self.command(*words, **kwargs))
    printed = self._capsys.readouterr()
    assert got == code, printed
    return printed.out if code != 2 else printed.err

  def hold(self, run):
    """Has the first start of a run stay before its last round."""
    (self.root / 'holds').write_text(run)

  def results(self, folder='one'):
    return {f.stem: json.loads(f.read_text())
            for f in (self.root / 'results' / folder).glob('*.json')}

  def starts(self):
    return {str(f.parent.relative_to(self.root / 'runs' / 'one')):
            len(f.read_text()) for f in (self.root / 'runs').rglob('starts')}


def begun(rows):
  """Whether a run has written rows."""
  return rows.exists() and rows.stat().st_size > 0


def until(condition):
  """Waits; what hangs fails in the end."""
  end = time.monotonic() + 300
  while not condition():
    assert time.monotonic() < end, 'waited in vain'
    time.sleep(0.02)


@pytest.fixture
def place(tmp_path, capsys):
  return Place(tmp_path, capsys)  # Its row Other falls over.


def test_cells_run_in_order_and_once(place):
  printed = place.call(code=1)
  assert 'missing: Later | easy: it has yet to be written' in printed
  done = [line.split()[1:4] for line in printed.splitlines()
          if line.startswith('done ')]
  assert done == [['exp.ours_hard,', 'seed', '0,'],
                  ['exp.base_hard,', 'seed', '0,'], ['exp.base,', 'seed', '0,'],
                  ['exp.ours_hard,', 'seed', '1,'],
                  ['exp.base_hard,', 'seed', '1,'], ['exp.base,', 'seed', '1,']]
  assert 'failed exp.other, seed 0' in printed
  assert '    error: it fell over' in printed  # And the others went on.
  assert '; 1 more skipped of this cell; ' in printed
  assert printed.endswith('6 runs done, 1 failed, 1 skipped, 0 left; the same '
                          'command tries again.\n')
  stored = place.results()['exp.base']
  assert stored['seeds']['1']['final'] == 0.6
  assert stored['columns'] == ['easy'] and stored['run_flags']['alpha'] == 0.5
  assert stored['seeds']['0']['environment']['commit'] == 'abc'
  assert stored['cell'] == 'exp.base' and stored['flags'] == [
      '--method=fedavg', '--seeds=0,1']
  assert str(place.root) not in json.dumps(stored)
  before = place.starts()
  place.call(code=1)
  assert {k: v for k, v in place.starts().items() if 'other' not in k} == before
  listed = place.call('--list')
  assert place.call('--status') == listed
  assert listed.splitlines()[0] == (
      'done     Ours | hard: exp.ours_hard; paper: diverged (seeds done: 0, 1)')
  assert listed.count('to do ') == 1 and listed.count('missing ') == 1


def test_the_budget_holds_and_the_rest_follows(place, monkeypatch):
  place.change('ours', 'num_rounds = 1')
  place.change('base', 'num_rounds = 9')
  place.hold('exp.base_hard/seed_0')
  rows = ('--row=Ours', '--row=Base')
  lines = place.root / 'runs/one/exp.base_hard/seed_0/metrics.jsonl'
  with monkeypatch.context() as during:
    # The time is over as soon as the second run has begun.
    during.setattr(time, 'monotonic', lambda: 580.0 * begun(lines))
    printed = place.call(*rows, budget=10.0)
  assert 'stopped exp.base_hard, seed 0' in printed
  assert '; 5 runs left\n1 runs done, 0 failed, 5 left; the same command ' in (
      printed)
  assert [*place.results()] == ['exp.ours_hard']
  kept = lines.read_text()
  assert 0 < kept.count('\n') < 9
  assert '(seeds begun: 0)' in place.call('--status', '--row=Base')
  assert ' 0 left.' in place.call(*rows)
  now = lines.read_text()
  assert now.startswith(kept) and now.count('\n') == 9
  assert place.starts()['exp.ours_hard/seed_0'] == 1
  assert place.starts()['exp.base_hard/seed_0'] == 2


def test_a_run_of_long_rounds_has_the_time_to_save(tmp_path, monkeypatch):
  """It is asked to end a round earlier, by what it says of its rounds."""
  run = f"""import pathlib, signal, time
def end(*unused):
  pathlib.Path({str(tmp_path / 'saved')!r}).touch()
  raise SystemExit(0)
signal.signal(signal.SIGTERM, end)
print('x: round 2/9, 80 s/round, 560s left', flush=True)
while True:  # One long sleep may begin just behind the signal.
  time.sleep(.05)
"""
  file, asked, ask = tmp_path / 'log', [], child._ask
  # Without the 120 s for its round it would have 115 s more.
  monkeypatch.setattr(time, 'monotonic', lambda: (
      865.0 if b' 80 s/round' in file.read_bytes() else 0.0))
  def noted(process, seconds):
    asked.append(seconds)
    ask(process, 300)
  monkeypatch.setattr(child, '_ask', noted)
  with open(file, 'ab') as log:
    log.write(b'x: round 9/9, 3e+03 s/round\n')  # Of an earlier start.
    assert child.run([sys.executable, '-c', run], log, 1000) is None
  # As long as a round, and what was kept of the budget.
  assert asked == [pytest.approx(135 - 0.2)]
  assert (tmp_path / 'saved').exists()


def test_killed_in_the_middle_it_continues(place):
  for name in ('base', 'ours', 'other'):
    place.change(name, 'method = "fedavg"')
  place.hold('exp.base_hard/seed_0')
  process = subprocess.Popen([*PROGRAM, *place.command()],
                             stdout=subprocess.DEVNULL)
  rows = place.root / 'runs/one/exp.base_hard/seed_0/metrics.jsonl'
  until(lambda: begun(rows))
  second = place.call(code=2)
  assert 'in use by another process' in second
  process.send_signal(signal.SIGKILL)
  process.wait()
  first = place.results()['exp.ours_hard']
  # The orphan, which writes no more, ends by itself.
  assert ', 0 failed, 0 left.' in place.call()
  assert place.results()['exp.ours_hard']['seeds']['0'] == first['seeds']['0']
  assert all([*r['seeds']] == ['0', '1'] for r in place.results().values())


def test_a_reader_that_closes_early_is_no_error(place):
  process = subprocess.Popen(
      [*PROGRAM, *place.command('--list')],
      stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  assert process.stdout is not None and process.stderr is not None
  process.stdout.close()
  assert process.wait(timeout=300) == 0
  assert not process.stderr.read()


def test_a_variant_is_never_taken_for_the_table(place):
  place.change('other', 'method = "fedavg"')
  assert '--variant' in place.call('--', '--num_rounds=2', code=2)
  assert '--variant' in place.call('--variant=short', code=2)
  assert 'cannot be given' in place.call('--variant=a', '--', '--seeds=1',
                                         code=2)
  place.call('--variant=short', '--', '--num_rounds=2')
  assert 'done     Ours' in place.call('--variant=short', '--status')
  assert not place.results()
  stored = place.results('one.short')['exp.base']
  assert stored['extra_flags'] == ['--num_rounds=2']
  assert stored['seeds']['0']['rounds'] == 2
  said = place.call('--variant=short', '--', '--num_rounds=1', code=2)
  assert 'was made with --num_rounds=2, not --num_rounds=1; give' in said


def test_unknown_tables_and_budgets(place):
  assert "--table=two does not exist; there are 'one'." in place.call(
      table='two', code=2)
  assert 'must be positive' in place.call(budget=0, code=2)
  assert '--scripts=/nowhere is no folder.' in place.call(
      '--scripts=/nowhere', code=2)
  assert '--tables=/nowhere holds no tables.' in place.call(
      '--tables=/nowhere', code=2)
  place.change('base', 'method = "unheard_of"')
  assert 'Base | easy: method unheard_of does not exist yet' in place.call(
      '--list')


def test_rows_and_columns_can_be_chosen(place):
  place.call('--row=Base', '--column=hard')
  assert [*place.results()] == ['exp.base_hard']
  assert [line.split(' |')[0].split()[-1] for line in place.call(
      '--list', '--row=Ours', '--row=Base', '--column=hard').splitlines()
          ] == ['Ours', 'Base']
  said = place.call('--column=Hard', code=2)
  assert "--column=Hard is not in one; near: 'hard'." in said


def test_seeds_can_be_chosen(place):
  chosen = '--row=Ours', '--column=hard', '--seeds=1'
  assert '--seeds=0' not in place.call(*chosen, '--dry_run')
  place.call(*chosen)
  assert [*place.results()['exp.ours_hard']['seeds']] == ['1']
  assert 'Nothing is to be run' in place.call(*chosen)
  place.call(*chosen[:2])
  assert {*place.results()['exp.ours_hard']['seeds']} == {'0', '1'}
  for text in ('2', 'x', '0,', ''):
    assert f'--seeds={text}: the cells have seeds 0,1; name' in place.call(
        f'--seeds={text}', code=2)


def test_what_is_for_cells_needs_a_table(place, capsys):
  folder = f'--tables={place.root}/tables'
  for word in ('--row=Ours', '--column=easy', '--seeds=0', '--variant=x',
               '--data_dir=/x'):
    assert tables.main([folder, '--list', word]) == 2
    assert capsys.readouterr().err == (
        f'error: {word} is for the cells of a --table; name one.\n')
  assert '--data_dir= is empty' in place.call('--data_dir=', code=2)


def test_a_cell_is_printed_as_a_flagfile(place):
  place.change('ours', 'alpha = 0.1')
  printed = place.call('--row=Ours', '--print_flags')
  assert '# Paper: diverged; 3 runs.' in printed
  assert [x for x in printed.splitlines() if not x.startswith('#')] == [
      '--method=fedavg', '--seeds=0,1', '--alpha=0.1']
  said = place.call('--row=Later', '--print_flags', code=2)
  assert 'Later | easy: it has yet to be written' in said
  assert 'give one of' in place.call('--print_flags', '--list', code=2)


def test_a_table_is_written_to_a_folder(place):
  target = place.root / 'flags'
  assert 'wrote 4 flagfiles' in place.call(f'--write_flagfiles={target}')
  assert {f.stem for f in target.iterdir()} == {
      'exp.other', 'exp.base', 'exp.base_hard', 'exp.ours_hard'}
  file = target / 'exp.other.flags'
  said = place.call(f'--write_flagfiles={file}', code=2)
  assert said.startswith(f'error: --write_flagfiles={file} cannot be written')


def test_the_headline_is_written_and_compared(place, capsys):
  place.change(text='headline = ["exp.base*"]\n' + BOOK)
  target = place.root / 'flags'
  words = [f'--tables={place.root}/tables', f'--write_flagfiles={target}']
  assert tables.main([*words, '--check']) == 1
  assert 'exp.base.flags is missing' in capsys.readouterr().err
  assert tables.main(words) == tables.main([*words, '--check']) == 0
  assert len([*target.glob('paper/*.flags')]) == 2
