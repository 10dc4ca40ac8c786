"""Reports of runs that are unfinished, damaged, or not the paper's."""
from __future__ import annotations

import csv
import dataclasses
import io
import pathlib
import types

import pytest

from fedjax_ssl import config
from fedjax_ssl.cli import report
from fedjax_ssl.fitting import inputs, start
from fedjax_ssl.report import stored_runs, study, tables
from fedjax_ssl.training import command, workdir
from tests.report import fake

pytestmark = pytest.mark.usefixtures('undrawn')


def flagged(root: pathlib.Path, monkeypatch, *, paper=True, **flags) -> str:
  """A run of a paper's cell that asks for 20 rounds of alpha=0.5."""
  monkeypatch.setattr(stored_runs, '_cells', lambda: {
      'x': ('--num_rounds=20', '--alpha=.5', '--seeds=0,1,2')})
  made = fake.config([0], **flags)
  made['origin'] |= {'flagfiles': ['x.flags'],
                     'comments': ['Paper: 57.73 %.'] if paper else []}
  return fake.write(root / 'run', [fake.row(20, .5)], made)


def test_one_damaged_run_does_not_block_the_others(tmp_path, capsys):
  good = fake.write(tmp_path / 'good', [fake.row(20, .5)])
  empty = fake.write(tmp_path / 'empty', [])
  torn = fake.write(tmp_path / 'torn', [fake.row(20, .5)])
  (tmp_path / 'torn' / 'config.json').write_text('{"flags"')
  out = tmp_path / 'out'
  assert report.main([good, empty, torn, f'--out={out}']) == 0
  lines = capsys.readouterr().err.splitlines()
  assert [x.split(':')[0] for x in lines] == ['left out'] * 2
  assert 'empty has no evaluated round' in lines[0] and 'torn' in lines[1]
  page = (out / 'index.html').read_text()
  assert page.count('left out: ') == 2 and 'empty has no evaluated' in page
  assert report.main([empty, torn, f'--out={out}']) == 2
  assert len(capsys.readouterr().err.splitlines()) == 1


def test_unfinished_seeds_and_rounds_show_in_all_formats(tmp_path):
  rows = [fake.row(5, .4, 0), fake.row(10, .5, 0), fake.row(5, .4, 2)]
  run = stored_runs.read(
      fake.write(tmp_path / 'run', rows, fake.config([0, 1, 2])))
  assert list(run.numbers) == [0, 2]
  grid = tables.main_table([run])
  for text in (tables.markdown(grid), tables.latex(grid),
               tables.comma_separated(grid),
               tables.as_html(grid)):
    assert '5 of 20' in text and '2 of 3' in text
    assert 'not finished, 5 of 20 rounds' in text
    assert 'no rows yet of 1' in text
    assert '40.0' in text
    assert '50.0' not in text
  finished = stored_runs.read(fake.write(tmp_path / 'b', [fake.row(20, .5)]))
  assert not finished.notes()


def test_a_seed_that_is_behind_enters_no_mean(tmp_path):
  folders = [fake.write(tmp_path / f'seed{s}', rows, fake.config([s]))
             for s, rows in ((0, [fake.row(10, .3), fake.row(20, .8)]),
                             (1, [fake.row(10, .2)]),
                             (2, [fake.row(10, .3), fake.row(20, .9)]))]
  for order in (folders, folders[::-1], folders[1:] + folders[:1]):
    run, = stored_runs.load(order)
    assert list(run.numbers) == [0, 2] and run.planned == (0, 1, 2)
    assert run.notes() == [
        'without seeds that are not as far (seed 1: round 10)']
  grid = tables.main_table([run])
  assert '85.00 ± 7.07' in tables.markdown(grid)
  assert '2 of 3' in tables.markdown(grid)
  assert study.read(folders)[0]['final'] == [.8, .9]


def test_an_unfinished_run_joins_its_other_seeds(tmp_path):
  several = fake.write(tmp_path / 'a_seeds', [fake.row(20, .4, 0)],
                       fake.config([0, 1]))
  single = fake.write(tmp_path / 'a_seed1', [fake.row(20, .6)],
                      fake.config([1]))
  run, = stored_runs.load([single, several])
  assert list(run.numbers) == [0, 1]
  assert [r[-1]['accuracy'] for r in run.seeds] == [.4, .6]
  assert not run.notes()


def _stood_for(seed, code='x', **knobs):
  made = fake.config([seed])
  made['facts'] |= {'code': {'mine.py': code}, 'choices': {
      'method': {'text': 'mine', 'knobs': knobs}}}
  return made


@pytest.mark.parametrize('other, joined', [
    (_stood_for(1, threshold=.95), True),
    (_stood_for(1, threshold=.95, new=0), True),  # Of a later version.
    (_stood_for(1, threshold=.5), False),
    (_stood_for(1, 'y', threshold=.95), False)])
def test_seeds_are_of_one_method(tmp_path, other, joined):
  """Equal flags may stand for other code, or for another default."""
  folders = [
      fake.write(tmp_path / 'a', [fake.row(20, .9)],
                 _stood_for(0, threshold=.95)),
      fake.write(tmp_path / 'b', [fake.row(20, .3)], other)]
  runs = stored_runs.load(folders)
  assert [list(run.numbers) for run in runs] == (
      [[0, 1]] if joined else [[0], [1]])
  notes = [run.notes(paper=False) for run in runs]
  assert not notes[0] and (joined or f'those of {folders[0]}' in notes[1][0])


@pytest.mark.parametrize('order', [(0, 1, 2), (1, 2, 0), (2, 1, 0)])
def test_the_order_of_folders_joins_no_others(tmp_path, order):
  """One knows less: it may be of either of two that differ, not of both."""
  made = [fake.write(tmp_path / name, [fake.row(20, .9)], _stood_for(
      seed, **knobs)) for seed, (name, knobs) in enumerate(
          (('old', {}), ('x', {'new': 0}), ('y', {'new': 1})))]
  runs = stored_runs.load([made[i] for i in order])
  assert sorted(list(run.numbers) for run in runs) == [[0, 1], [2]]


@pytest.mark.parametrize('facts, damaged', [
    ({'choices': {'method': {'text': 'm'}}}, 'bad'),
    # What no reader can go on with is said of its file.
    ({'code': ['x']}, 'bad/config.json'),
    ({'choices': [1]}, 'bad/config.json')])
def test_facts_that_no_run_has_are_said(tmp_path, facts, damaged):
  made = fake.config([0])
  made['facts'] |= facts
  bad = fake.write(tmp_path / 'bad', [fake.row(20, .9)], made)
  good = fake.write(tmp_path / 'good', [fake.row(20, .9)], fake.config([1]))
  left_out: list[str] = []
  run, = stored_runs.load([bad, good], left_out)
  assert list(run.numbers) == [1]
  assert left_out[0].startswith(f'{tmp_path / damaged} is damaged: ')


def test_a_call_of_fit_can_be_called():
  """As printed, with the data in place of DATA."""
  told = config.Config(method='fixmatch', dataset='arrays', report=True,
                       split='official', alpha=0.1, num_clients=5,
                       data_dir='/x', seeds=(0, 1), seed=None)
  flags = {name: list(value) if isinstance(value, tuple) else value
           for name, value in vars(told).items()}
  calls = []
  def fit(method, data, **options):
    inputs.check_free(start._given(method, options), data)
    calls.append((method, options))
  examples = inputs.Source('', unread=command.READING)
  dealt = inputs.Source('', unread=command.READING | command.DEALING)
  for name, source in (('arrays', examples), ('federation', dealt)):
    text = command.for_shell({'origin': {'script': workdir.FIT}},
                             flags | {'dataset': name})
    eval(text, {'DATA': source,
                'fedjax_ssl': types.SimpleNamespace(fit=fit)})
  (method, first), (_, second) = calls
  assert method == 'fixmatch' and 'alpha' not in second
  assert first['alpha'] == 0.1 and first['seeds'] == [0, 1]
  assert first['weight_decay'] == 0 and 'report' not in first


def test_a_call_on_data_names_the_setting_that_dealt_them():
  config = {'origin': {'script': workdir.FIT, 'dealt_by': 'cifar_iid'}}
  assert command.for_shell(config, {'method': 'fixmatch', 'alpha': .3}) == (
      "fedjax_ssl.fit('fixmatch', DATA, alpha=0.3, setting='cifar_iid')")


def test_the_papers_number_is_marked_where_flags_differ(tmp_path, monkeypatch):
  run = stored_runs.read(flagged(tmp_path, monkeypatch, alpha=.1))
  text = tables.markdown(tables.main_table([run]))
  assert '| 57.73 * |' in text and 'this run has alpha=0.1' in text
  head, row = csv.reader(io.StringIO(tables.comma_separated(
      tables.main_table([run]))))
  assert 'alpha=0.1' in row[head.index('note')]
  assert not any(tables.target_table([run], [.5]).notes)


def test_it_is_not_marked_where_they_agree(tmp_path, monkeypatch):
  run = stored_runs.read(flagged(tmp_path, monkeypatch))
  assert run.changed == () and not run.notes()


def test_a_flag_that_the_flagfile_does_not_name_is_the_settings(
    tmp_path, monkeypatch):
  defaults = {'digits_dirdir': dataclasses.asdict(config.Config()) | {
      'momentum': 0.9, 'method': 'fedavg'}}
  for name, flags, changed in (
      ('as_it_is', {'client_map': 'vmap', 'local_steps': 0}, ()),
      ('other', {'local_steps': 2}, ('local_steps=2',))):
    (tmp_path / name).mkdir()
    run = stored_runs.read(flagged(
        tmp_path / name, monkeypatch, momentum=0.9, **flags),
                           defaults=lambda name: defaults[name])
    assert run.changed == changed


def test_the_cost_is_a_mean_over_rounds(tmp_path):
  rows = [fake.row(5, .5, cost_up=10.0), fake.row(20, .5, cost_up=90.0)]
  assert stored_runs.outcome(rows)['metrics']['cost_up'] == pytest.approx(70)
  # Of two models a round, 1000 bytes of 4000 go up.
  rows = [fake.row(r, .5, models_sent=2.0) for r in (5, 20)]
  found = stored_runs.outcome(rows)['metrics']
  assert (found['cost_up'], found['cost_down']) == (50, 150)
  assert 'cost_up' not in stored_runs.outcome([fake.row(5, .5)])['metrics']


def test_numbers_in_doubt_are_shown_with_a_mark(tmp_path, capsys):
  bad = fake.write(tmp_path / 'bad', [fake.row(20, .4194, loss=7.6e10)])
  good = fake.write(tmp_path / 'good', [fake.row(20, .5, macro_recall=.25)],
                    fake.config(method='uda'))
  out = tmp_path / 'out'
  assert report.main([bad, good, f'--out={out}',
                      '--columns=macro_recall']) == 0
  for name, mark in (('md', '†'), ('tex', r'$\dagger$')):
    text = (out / f'table.{name}').read_text()
    assert f'41.94 {mark}' in text and '25.00' in text
    assert f'{mark} diverged: loss 7.6e+10' in text
  assert '41.94 †' in (out / 'index.html').read_text()
  with open(out / 'table.csv', newline='') as file:
    first, second = csv.DictReader(file)
  assert float(first['final, %']) == pytest.approx(41.94)
  assert 'diverged' in first['note'] and not second['note']
  assert second['macro recall, %'] == '25.0'
  capsys.readouterr()
  assert report.main([bad, f'--out={tmp_path / "new"}', '--columns=no']) == 2
  said = capsys.readouterr().err
  assert '--columns=no' in said and len(said.splitlines()) == 1
  assert not (tmp_path / 'new').exists()


def test_a_file_is_no_folder_to_write(tmp_path, capsys):
  (tmp_path / 'file').write_text('')
  run = fake.write(tmp_path / 'run', [fake.row(20, .5)])
  assert report.main([run, f'--out={tmp_path / "file"}']) == 2
  said = capsys.readouterr().err
  assert 'must be a folder' in said and len(said.splitlines()) == 1


def test_numbers_stand_to_the_right_in_latex_too(tmp_path):
  run = stored_runs.read(fake.write(tmp_path / 'run', [fake.row(20, .5)]))
  grid = tables.main_table([run])
  right = tables.markdown(grid).splitlines()[1].count('---:')
  kinds = tables.latex(grid).split('tabular}{')[1].split('}')[0]
  assert kinds.count('r') == right == 6
