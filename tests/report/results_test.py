"""The table script: numbers come from the runs' files and nowhere else."""
from __future__ import annotations

import functools
import json
import os
import pathlib
from unittest import mock

import pytest

from fedjax_ssl.cli import places
from fedjax_ssl.report import stored_runs, stored_study, study
from tests.cli import launcher
from tests.report import fake

_call = functools.partial(launcher.call, 'results')


def _run_of(folder, method, accuracies, alpha=0.5, commit='abc'):
  """A finished run's files, for two seeds."""
  folder.mkdir()
  (folder / 'config.json').write_text(json.dumps({
      'flags': {'method': method, 'labels': 'few', 'seeds': [0, 1],
                'alpha': alpha, 'workdir': str(folder)},
      'facts': {}, 'environment': {'commit': commit}, 'restarts': []}))
  rows = [{'round': 5, 'seed': s, 'accuracy': a, 'loss': 1.0,
           'forward_passes': 30.0 + 2 * s}
          for s, a in enumerate(accuracies)]
  (folder / 'metrics.jsonl').write_text(
      ''.join(json.dumps(r) + '\n' for r in rows))
  (folder / 'timings.jsonl').write_text(
      json.dumps({'round': 5, 'seconds': 7.0}) + '\n')
  return str(folder)


def test_table_and_json_hold_the_runs_numbers(tmp_path):
  runs = [_run_of(tmp_path / 'a', 'fedavg', (.5, .6)),
          _run_of(tmp_path / 'b', 'uda', (.7, .7))]
  done = _call(*runs, f'--out={tmp_path}/out/table', '--note=Why.')
  assert done.returncode == 0, done.stderr
  text = (tmp_path / 'out' / 'table.md').read_text()
  assert '55.00 ± 7.07' in text and '70.00 ± 0.00' in text
  assert 'commit abc' in text and '--alpha=0.5' in text
  assert '| 7 | - | 31 | - |' in text  # Seconds, then costs.
  assert str(tmp_path) not in text
  stored = json.loads((tmp_path / 'out' / 'table.json').read_text())
  assert [r['final'] for r in stored['runs']] == [[.5, .6], [.7, .7]]
  assert [r['curves'] for r in stored['runs']] == [[[.5], [.6]], [[.7], [.7]]]
  assert stored['runs'][0]['evaluated'] == [[5], [5]]


def test_seeds_in_several_folders_are_one_row(tmp_path):
  """Only a folder that repeats a seed is a row of its own."""
  accuracies = {0: .5, 1: .6, 2: .9}
  for seed, accuracy in accuracies.items():
    made = fake.config([seed])
    made['environment']['commit'] = 'def' if seed == 2 else 'abc'
    fake.write(tmp_path / 'runs' / f'uda_seed{seed}',
               [fake.row(20, accuracy, seed)], made)
  fake.write(tmp_path / 'again', [fake.row(20, .7, 1)], fake.config([1]))
  fake.write(tmp_path / 'other', [fake.row(20, .8, 1)],
             fake.config([1], alpha=0.1))
  done = _call(*(str(tmp_path / n) for n in ('runs', 'again', 'other')),
               f'--out={tmp_path}/table')
  assert done.returncode == 0, done.stderr
  runs = {run['run']: run for run in json.loads(
      (tmp_path / 'table.json').read_text())['runs']}
  assert {name: run['final'] for name, run in runs.items()} == {
      'uda': [.5, .6, .9], 'again': [.7], 'other': [.8]}
  row = runs['uda']
  assert row['seeds'] == row['flags']['seeds'] == [0, 1, 2]
  assert row['seconds'] == 21 and row['flags']['seed'] is None
  assert row['environment']['commit'] == 'abc and def'
  assert '66.67 ± 20.82' in done.stdout


def test_runs_whose_folders_have_one_name_are_told_apart(tmp_path):
  """In the table, below it, and in the picture."""
  runs = [fake.write(
      tmp_path / parent / 'a|b',
      [fake.row(20, .5, epsilon=2.0, largest_weight=largest)],
      fake.config(alpha=alpha, method='dpsgd'))
          for parent, alpha, largest in (('one', 1.0, 1e9), ('two', .1, 1.0))]
  rows = study.read(runs)
  first, second = (row['run'] for row in rows)
  assert first != second
  text = study.markdown(rows, '')
  assert f'{first}: † diverged: largest weight' in text
  assert f'1.0 ({first}), 0.1 ({second})' in text
  places = {line.replace('\\|', '').count('|') for line in text.splitlines()
            if line.startswith('|')}
  assert len(places) == 1
  drawn = []
  with mock.patch.object(study.tradeoff, 'plot',
                         lambda runs, file: drawn.extend(runs)):
    study.draw_epsilon(tmp_path / 'x', study.load(runs))
  assert drawn == [first, second]


def test_a_stored_row_that_diverged_has_its_footnote(tmp_path):
  """Also in files of earlier versions, where names may be equal."""
  rows = study.read([
      fake.write(tmp_path / name, [fake.row(20, .5, largest_weight=largest)])
      for name, largest in (('a', 1e9), ('b', 1.0))])
  study.write(tmp_path / 'old', [row | {'run': 'run'} for row in rows], '', '')
  _, text = stored_study.table(tmp_path / 'old.json')
  assert '`run`: † diverged: largest weight' in text


def test_one_damaged_run_of_many_is_left_out(tmp_path):
  fake.write(tmp_path / 'runs' / 'good', [fake.row(20, .5)])
  bad = pathlib.Path(fake.write(tmp_path / 'runs' / 'bad', [fake.row(20, .5)]))
  (bad / 'timings.jsonl').unlink()
  (bad / 'timings.jsonl').mkdir()
  done = _call(str(tmp_path / 'runs'))
  assert done.returncode == 0 and '| good |' in done.stdout
  assert f'left out: {bad}/timings.jsonl cannot be read: Is a d' in done.stderr
  alone = _call(str(bad))
  assert alone.returncode == 2 and 'Errno' not in alone.stderr
  assert f'{bad}/timings.jsonl cannot be read: Is a directory' in alone.stderr


def test_what_machines_measured_does_not_part_seeds(tmp_path):
  """But two runs of one seed are told apart by it."""
  runs = [fake.write(tmp_path / f'uda_seed{seed}', [
      fake.row(20, .5, seed)], fake.config(
          [seed], conv_impl=form, client_map='vmap', chunk_size=seed))
          for seed, form in enumerate(('lax', 'patches'))]
  row, = study.read(runs)
  assert row['seeds'] == [0, 1] and row['flags']['client_map'] == 'vmap'
  assert not {'conv_impl', 'chunk_size'} & {*row['flags']}
  runs.append(fake.write(tmp_path / 'uda_tiles', [fake.row(20, .7, 1)],
                         fake.config([1], conv_impl='tiles')))
  assert [row['flags']['conv_impl'] for row in study.read(runs)] == [
      'lax', 'patches', 'tiles']
  assert len({run.name for run in stored_runs.load(runs)}) == 3


def test_an_own_method_shows_its_epsilon(tmp_path):
  rows = [fake.row(20, .5, epsilon=3.2)]
  text = study.markdown(study.read([
      fake.write(tmp_path / 'own', rows, fake.config(method='./m.py:mine')),
      fake.write(tmp_path / 'not', [fake.row(20, .5)])]), '')
  cells = {line.split('|')[1].strip(): line.split('|')[-2].strip()
           for line in text.splitlines() if line.startswith('| ')}
  assert cells == {'run': 'epsilon', 'own': '3.20', 'not': ''}


def test_an_unfinished_run_says_so(tmp_path):
  folder = fake.write(tmp_path / 'run', [
      fake.row(5, .6, 0), fake.row(10, .6, 0), fake.row(5, .5, 1)],
                      fake.config([0, 1, 2], num_rounds=100))
  row, = study.read(folder)
  assert row['seeds'] == [0, 1] and row['rounds'] == 5
  text = study.markdown([row], '')
  assert '| run | `fedavg` | few | 2 | 5 |' in text
  assert 'run: not finished, 5 of 100 rounds; not finished, 2 of 3 see' in text


def test_files_of_one_name_are_different_ones(tmp_path):
  folders = [fake.write(tmp_path / name, [fake.row(20, .5)], fake.config(
      [0], partition_file=f'/runs/{name}/partition_0.npz')) for name in 'xy']
  text = study.markdown(study.read(folders), '')
  assert ('Flags that differ: partition_file x/partition_0.npz (x), '
          'y/partition_0.npz (y).') in text


def test_no_path_of_a_machine_is_stored(tmp_path):
  made = fake.config(
      [0], method='/mine/mine.py:mine(k=1)', imports=['/mine/more.py'],
      partition_file='/mine/p.npz', embeddings='/mine/e.npz',
      data_dir='/mine', workdir='/mine/run')
  done = _call(fake.write(tmp_path / 'run', [fake.row(20, .5)], made),
               f'--out={tmp_path}/table')
  assert done.returncode == 0, done.stderr
  stored = (tmp_path / 'table.json').read_text()
  text = (tmp_path / 'table.md').read_text()
  assert '/mine' not in stored + text
  assert 'mine.py:mine(k=1)' in stored and '--import=more.py' in text


def test_flags_with_the_settings_values_are_not_listed(tmp_path):
  """But for settings that are not known here, of which it lists all."""
  made = fake.config([0, 1, 2], method='uda', eval_only=False, imports=[],
                     model='mlp(width=9)', momentum=0.9, num_clients=20,
                     distributed=False, max_rows=0, num_rounds=3)
  texts = []
  for name, origin in (('a', {'setting': 'digits_dirdir'}),
                       ('b', {'script': '/mine.py'})):
    folder = fake.write(tmp_path / name, [fake.row(3, .5)],
                        made | {'origin': origin})
    texts.append(_call(folder).stdout)
  assert ('Flags that all runs share, where they are not defaults of '
          'digits_dirdir: `--bounds=False --method=uda --model=mlp(width=9) '
          '--num_rounds=3`\n') in texts[0]
  for flag in ('--momentum=0.9', '--max_rows=0', '--seeds=0,1,2'):
    assert flag in texts[1]
  assert 'eval_only' not in texts[1] and '--imports' not in texts[1]
  a, b = study.read([str(tmp_path / name) for name in 'ab'])
  assert a['setting'] == 'digits_dirdir' and 'not defaults' not in (
      study.markdown([a, b], '', lambda name: {'x': 1} if name else {}))


def test_what_differs_between_runs_is_said(tmp_path):
  runs = [_run_of(tmp_path / name, 'uda', (.5, .6)) for name in 'ab']
  runs.append(_run_of(tmp_path / 'c', 'uda', (.7, .7), .1, 'def'))
  text = _call(*runs).stdout
  assert 'Flags that differ: alpha 0.5 (the others), 0.1 (c).' in text
  assert 'Where it differs: commit abc (the others), def (c).' in text
  assert 'differ' not in _call(*runs[:2]).stdout


def test_costs_are_means_over_the_run_and_local_accuracy_is_the_last(tmp_path):
  folder = _run_of(tmp_path / 'a', 'fedmatch', (.5, .6))
  rows = [{'round': r, 'seed': s, 'accuracy': .5, 'loss': 1.0,
           'local_accuracy': r / 10 + s / 100, 'cost_up': 100.0 + r}
          for r in (2, 4) for s in (0, 1)]
  (tmp_path / 'a' / 'metrics.jsonl').write_text(
      ''.join(json.dumps(r) + '\n' for r in rows))
  assert _call(folder, f'--out={tmp_path}/table').returncode == 0
  head, _, row, *_ = (tmp_path / 'table.md').read_text().splitlines()
  assert head.endswith('| backward | local_accuracy | cost_up |')
  assert row.endswith('| 40.50 ± 0.71 | 103 |')


@pytest.mark.parametrize('name', ['config', 'config.json'])
def test_the_files_of_a_run_are_not_replaced(tmp_path, name):
  folder = pathlib.Path(_run_of(tmp_path / 'a', 'fixmatch', (.5,)))
  before = (folder / 'config.json').read_bytes()
  done = _call(str(folder), f'--out={folder}/{name}')
  assert done.returncode == 2 and 'belongs to the run in its' in done.stderr
  assert (folder / 'config.json').read_bytes() == before


def test_only_noise_on_the_generator_alone_is_called_nominal(tmp_path):
  cells = {}
  for scope, epsilon in (('all', 7.5), ('generator', 7.5), ('open', None)):
    name = 'all' if scope == 'open' else scope
    folder = _run_of(tmp_path / scope, f'fedssl(dp_scope="{name}")', (.5, .6))
    whole = [{'round': 4, 'seed': s, 'accuracy': .5, 'epsilon': epsilon}
             for s in (0, 1)]
    short = [{'round': 3, 'seed': s, 'epsilon': 1.0} for s in (0, 1)]
    (tmp_path / scope / 'metrics.jsonl').write_text(
        ''.join(json.dumps(r) + '\n' for r in short + whole))
    head, _, row, *rest = _call(folder).stdout.splitlines()
    assert head.endswith('| epsilon |')
    cells[scope] = row.split(' | ')[-1], 'no guarantee' in ' '.join(rest)
    assert ('the delta of epsilon is not stored.' in rest) == (scope != 'open')
  assert cells == {'all': ('7.50 |', False),
                   'generator': ('7.50, nominal |', True),
                   'open': ('unbounded |', False)}


def test_numbers_in_doubt_are_shown_with_a_mark(tmp_path):
  """And other metrics of the last row get a column where they are asked for."""
  runs = [_run_of(tmp_path / 'lost', 'uda', (.4, .5)),
          _run_of(tmp_path / 'good', 'fedavg', (.5, .6))]
  file = tmp_path / 'lost' / 'metrics.jsonl'
  row, other = map(json.loads, file.read_text().splitlines())
  file.write_text(json.dumps(row | {'loss': 7.6e10, 'auc': .5}) + '\n'
                  + json.dumps(other | {'auc': .6}) + '\n')
  done = _call(*runs, '--columns=auc', f'--out={tmp_path}/table')
  assert done.returncode == 0, done.stderr
  text = (tmp_path / 'table.md').read_text()
  head, _, lost, good, *_ = text.splitlines()
  assert head.endswith('| backward | auc, % |')
  assert lost.endswith('| 55.00 ± 7.07 |') and good.endswith('| - |')
  assert '| 45.00 ± 7.07 † |' in lost and '†' not in good
  assert 'lost: † diverged in 1 of 2 seeds: loss 7.6e+10.' in text
  first, second = json.loads((tmp_path / 'table.json').read_text())['runs']
  assert first['verdict'] == [['diverged', 'loss 7.6e+10'], None]
  assert second['verdict'] == [None, None]
  done = _call(*runs, '--columns=acuracy')
  assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
  assert "'accuracy'?" in done.stderr and '--columns=acuracy' in done.stderr


def test_a_run_alone_has_its_bounds_beside_it(tmp_path):
  runs = [_run_of(tmp_path / name, 'fixmatch', (.5, .6)) for name in 'ab']
  bound = _run_of(tmp_path / 'a' / 'labels_few', 'fedavg', (.1, .2))
  assert places.with_bounds(runs[:1]) == ([runs[0], bound], '')
  assert places.with_bounds([*runs, bound]) == ([*runs, bound], '')
  assert places.with_bounds(runs[1:]) == (runs[1:], '')
  assert places.with_bounds([f'{runs[0]}/', f'{bound}/'])[1] == ''
  (tmp_path / 'b' / 'labels_all').mkdir()  # Not trained yet.
  (tmp_path / 'b' / 'labels_all' / 'config.json').write_text('{}')
  assert places.with_bounds(runs[1:]) == (runs[1:], '')
  found, said = places.with_bounds(runs)
  assert found == runs and said.startswith(
      f'1 bounds of these runs, such as {bound}; ')
  done = _call(*runs)
  assert f'left out: {said}' in done.stderr and 'fedavg' not in done.stdout
  assert '15.00 ± 7.07' in _call(runs[0]).stdout
  (pathlib.Path(bound) / 'metrics.jsonl').write_text('{"round": 1, "acc')
  done = _call(runs[0])
  assert '55.00' in done.stdout and f'left out: {bound}' in done.stderr


def test_without_out_the_table_is_printed_only(tmp_path):
  folder = _run_of(tmp_path / 'a', 'fedavg', (.5, .6))
  done = _call(folder)
  assert done.returncode == 0 and '55.00 ± 7.07' in done.stdout
  assert [*tmp_path.iterdir()] == [tmp_path / 'a']
  for args, word in ((['--epsilon', folder], '--out'), (['--otu=x'], 'otu'),
                     ([], 'run')):
    done = _call(*args)
    assert done.returncode == 2 and word in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_nothing_is_written_where_no_run_has_an_epsilon(tmp_path):
  folder = _run_of(tmp_path / 'a', 'fedavg', (.5, .6))
  done = _call(folder, '--epsilon', f'--out={tmp_path}/table')
  assert done.returncode == 2 and 'has an epsilon' in done.stderr
  assert [*tmp_path.iterdir()] == [tmp_path / 'a']


def test_a_folder_without_a_run_is_refused(tmp_path):
  done = _call(str(tmp_path), f'--out={tmp_path}/table')
  assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
  assert not (tmp_path / 'table.md').exists()


def test_a_folder_of_runs_stands_for_them(tmp_path):
  sweep = tmp_path / 'sweep'
  sweep.mkdir()
  runs = [_run_of(sweep / name, 'uda', (.5, .6)) for name in 'ab']
  (sweep / 'a.log').write_text('what a run printed')
  (sweep / '.sweep').mkdir()
  one, other, each = (_call(*words).stdout for words in (
      [str(sweep)], [*runs, str(sweep / 'a.log')], runs))
  assert one == other == each and '| a |' in one and '| b |' in one
  done = _call(str(tmp_path / 'nowhere'))
  assert done.returncode == 2 and 'holds no run' in done.stderr


def test_a_run_that_has_just_begun_does_not_block_the_others(tmp_path):
  (tmp_path / 'sweep').mkdir()
  runs = [pathlib.Path(_run_of(tmp_path / 'sweep' / name, 'uda', (.5, .6)))
          for name in 'ab']
  (runs[1] / 'metrics.jsonl').write_text('')
  done = _call(str(tmp_path / 'sweep'))
  assert done.returncode == 0 and '| a |' in done.stdout
  line, = done.stderr.splitlines()
  assert line.startswith('left out: ') and 'b has no evaluated round' in line
  assert _call(str(runs[1])).returncode == 2
  (runs[0] / 'metrics.jsonl').write_text('')
  done = _call(str(tmp_path / 'sweep'))
  assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
  assert done.stderr.count('has no evaluated round') == 2


def test_an_epsilon_plot_is_whole_or_the_old_one(tmp_path, monkeypatch):
  folder = _run_of(tmp_path / 'a', 'fedssl', (.5, .6))
  rows = [{'round': 5, 'seed': s, 'accuracy': .5, 'epsilon': 2.0}
          for s in (0, 1)]
  (tmp_path / 'a' / 'metrics.jsonl').write_text(
      ''.join(json.dumps(r) + '\n' for r in rows))
  plot = tmp_path / 'table_epsilon.png'
  plot.write_bytes(b'old')
  def fail(*paths):
    raise OSError(28, 'no space')
  with monkeypatch.context() as patch:
    patch.setattr(os, 'replace', fail)
    with pytest.raises(ValueError, match='table_epsilon.png .* no space'):
      study.draw_epsilon(tmp_path / 'table', study.load([folder]))
  assert plot.read_bytes() == b'old'
  assert not list(tmp_path.glob('*.partial'))
  study.draw_epsilon(tmp_path / 'table', study.load([folder]))
  assert plot.read_bytes().startswith(b'\x89PNG')
