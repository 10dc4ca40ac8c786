"""What reports and tables say is enough for those who read nothing else."""
from __future__ import annotations

import io
import pathlib
import sys

import pytest

from fedjax_ssl.cli import report, results
from fedjax_ssl.core import bounds as bounds_lib
from fedjax_ssl.report import (
  pairs,
  printing,
  stored_runs,
  study,
  summary,
  tables,
  verdict,
)
from tests.report import fake

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_a_letter_that_the_terminal_lacks_ends_nothing():
  stream = io.TextIOWrapper(io.BytesIO(), encoding='ascii')
  printing.say('93 ± 1 †', stream=stream)
  assert stream.buffer.getvalue() == b'93 ? 1 ?\n'


def test_what_stands_for_the_terminal_needs_only_write(monkeypatch):
  class Tee:
    """Writes, and knows of no letters."""
    text = ''

    def write(self, text: str) -> None:
      self.text += text

    def flush(self) -> None:
      pass
  monkeypatch.setattr(sys, 'stdout', tee := Tee())
  printing.say('93 ± 1')
  assert tee.text == '93 ± 1\n'
  monkeypatch.setattr(sys, 'stdout', None)  # As where it is closed.
  printing.say('nothing')


def with_bounds(folder: pathlib.Path, *labels: str, **flags) -> list[str]:
  """A run of FixMatch and its bounds, below its folder."""
  return [fake.write(folder, [fake.row(20, .5)],
                     fake.config(method='fixmatch', **flags)),
          *(fake.write(folder / f'labels_{word}', [fake.row(20, .4)],
                       fake.config(labels=word, **flags)) for word in labels)]


@pytest.mark.usefixtures('undrawn')
@pytest.mark.parametrize('labels', [['few'], ['all'], ['few', 'all']])
def test_a_runs_report_names_its_bounds_as_the_terminal_does(tmp_path, labels):
  """Also where only one of them is run, as no row has a hidden label."""
  folders = with_bounds(tmp_path / 'run', *labels)
  bounds = [bounds_lib.NAMES[word] for word in labels]
  assert [run.name for run in stored_runs.load(folders)][1:] == bounds
  out = tmp_path / 'out'
  report.write([*map(pathlib.Path, folders)], out, 'Mine')
  for file in ('table.md', 'differences.md', 'index.html'):
    assert all(name in (out / file).read_text() for name in bounds), file


def test_bounds_of_several_runs_are_told_apart(tmp_path):
  """FedAvg in a folder of its own is a method among others, and no bound."""
  folders = [*with_bounds(tmp_path / 'a', 'few'),
             *with_bounds(tmp_path / 'b', 'few', alpha=.1)]
  few = bounds_lib.NAMES['few']
  assert [run.name for run in stored_runs.load(folders)] == [
      'fixmatch, alpha=0.5', f'{few}, alpha=0.5',
      'fixmatch, alpha=0.1', f'{few}, alpha=0.1']
  alone = fake.write(tmp_path / 'labels_few', [fake.row(20, .4)])
  assert [run.name for run in stored_runs.load([folders[0], alone])] == [
      'fixmatch', 'fedavg']


def test_the_page_has_the_rule_of_the_marks():
  page = (ROOT / 'experiments' / 'README.md').read_text('utf-8')
  marks, = (' '.join(part.split()) for part in page.split('\n\n')
            if part.startswith('**Marks.**'))
  for largest in (.1, .2, .5):  # In between the margin is always the same.
    points = round(100 * (verdict.bar(largest) - largest), 6)
    assert (f'{verdict.MARKS[verdict.GUESSES]} one not above the largest class '
            f'by {points:g} points') in marks


def test_a_wrong_reference_is_answered_with_quoted_names(tmp_path):
  """They hold commas, and would else look like twice as many."""
  runs = stored_runs.load([
      fake.write(tmp_path / f'{method}_{rate}', [fake.row(20, .5)],
                 fake.config(method=method, learning_rate=rate))
      for method in ('fedavg', 'uda') for rate in (.01, .03)])
  plan = stored_runs.compared(runs)
  def refused(name: str) -> str:
    with pytest.raises(ValueError) as error:
      pairs.references(runs, plan, name)
    return str(error.value)
  known = ', '.join(repr(run.name) for run in runs)
  assert known.startswith("'fedavg, learning_rate=0.01', 'fedavg, learning")
  said = refused('uda, learning_rat=0.01')
  assert said == (
      '--reference=uda, learning_rat=0.01 is no row of the table. Did you mean '
      f"'uda, learning_rate=0.01'? There are {known}.")
  assert 'Did you mean' not in refused('nothing like it')


def test_flags_that_differ_say_whose_the_first_value_is(tmp_path):
  rows = study.read([
      fake.write(tmp_path / name, [fake.row(20, .5)], fake.config(
          lr_schedule=schedule, alpha=alpha))
      for name, schedule, alpha in (('a', 'constant', 1), ('b', 'cosine', 1),
                                    ('c', 'constant', 2))])
  text = study.markdown(rows, '')
  assert ('Flags that differ: alpha 1 (the others), 2 (c); '
          'lr_schedule constant (the others), cosine (b).') in text
  # A single run is named, and one that lacks the flag is no other.
  assert 'lr_schedule constant (a), cosine (b).' in study.markdown(
      rows[:2], '')
  del rows[2]['flags']['lr_schedule']
  rows.append(rows[0] | {'run': 'd'})
  assert 'constant (the others that have it), cosine (b).' in (
      study.markdown(rows, ''))


@pytest.mark.parametrize('main, words, meant', [
    (report.main, ['--refrence=uda'], 'reference'),
    (report.main, ['--ref', 'uda'], 'reference'),
    (results.main, ['--colums=auc'], 'columns'), (results.main, ['--x=1'], '')])
def test_a_misspelt_flag_is_answered_with_the_nearest(
    tmp_path, capsys, main, words, meant):
  folder = fake.write(tmp_path / 'run', [fake.row(20, .5)])
  with pytest.raises(SystemExit) as ended:
    main([folder, f'--out={tmp_path / "out"}', *words])
  said = capsys.readouterr().err
  assert ended.value.code == 2 and len(said.splitlines()) == 1
  assert f'unrecognized arguments: {" ".join(words)}' in said
  assert (f'. Did you mean --{meant}? `fedjax-ssl' if meant else
          '--x=1; `fedjax-ssl') in said


def dealt(count: object, **flags) -> dict:
  """The configuration of a run with so many validation rows."""
  made = fake.config(**flags)
  made['facts']['federation']['num_validation'] = count
  return made


@pytest.mark.parametrize('count, said', [
    (1, 'on only 1 validation row;'), (13, 'on only 13 validation rows;'),
    (99, 'on only 99 validation rows;'), (100, ''), (0, ''), (None, ''),
    ('13', '')])
def test_a_choice_by_few_rows_is_said_once_below_the_table(
    tmp_path, count, said):
  folders = [fake.write(tmp_path / method, [fake.row(20, .5)],
                        dealt(count, method=method))
             for method in ('fedavg', 'uda')]
  texts = [tables.markdown(tables.main_table(stored_runs.load(folders))),
           study.markdown(study.read(folders), '')]
  for text in texts:
    assert text.count('validation-selected is chosen') == bool(said)
    assert said in text


def test_runs_with_few_validation_rows_are_named_beside_others(tmp_path):
  """But not those without any validation accuracy."""
  folders = [fake.write(tmp_path / method, [fake.row(20, .5) | more],
                        dealt(count, method=method))
             for method, count, more in (
                 ('fedavg', 13, {}), ('fixmatch', 400, {}),
                 ('uda', 13, {'val_accuracy': None}))]
  line, = tables.main_table(stored_runs.load(folders)).lines()
  assert line == ('fedavg: validation-selected is chosen on only 13 validation '
                  'rows; ties go to the earliest round.')
  assert study.read(folders)[0]['notes'] == [
      line.removeprefix('fedavg: ').rstrip('.')]


def test_the_first_of_equal_rounds_is_selected():
  """As in all stored results, and as the note on few rows says."""
  rows = [fake.row(r, r / 10, val_accuracy=v)
          for r, v in ((1, .2), (2, .7), (3, .7))]
  assert summary.summary(rows)['selected'] == .2
  assert 'ties go to the earliest round' in summary.few_rows([rows], 13)
