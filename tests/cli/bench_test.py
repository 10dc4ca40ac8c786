"""Runs a bench whose trainings are made up, so that what is best is known."""
from __future__ import annotations

import json
import os
import pathlib
import shlex
import shutil

import pytest

from fedjax_ssl import cli
from fedjax_ssl.bench import plan
from fedjax_ssl.cli import bench
from tests.bench import made_up
from tests.bench.made_up import BED, COUNT
from tests.cli.bench_trainer import CHANGED, edit, rows, started


@pytest.mark.parametrize('flag', [
    '--num_rounds=3', '--import=mine.py', '--nobounds'])
def test_a_flag_of_the_runs_stands_after_two_dashes(tmp_path, capsys, flag):
  with pytest.raises(SystemExit) as ended:
    bench.main(['clients', f'--out={tmp_path}', flag])
  assert ended.value.code == 2
  said = capsys.readouterr().err
  assert 'of the runs: give it after `--`, as --NAME=VALUE' in said


def test_each_row_is_tuned_and_then_measured(bench, out):
  code, said, _ = bench('clients', 'fixmatch', 'fedprox', *CHANGED)
  assert code == 0
  # Both bounds and two rows, their tries and a run for each partition.
  assert len(started(out)) == 4 * (COUNT + len(BED.skews))
  best = {}
  for name in ('fixmatch', 'fedprox'):
    tries = plan.configurations(plan.entries()[name], BED, COUNT)
    best[name] = min((c.learning_rate for c in tries),
                     key=lambda rate: abs(rate - .05))
  for skew in BED.skews:
    found = rows(out, skew)
    assert {*found} == {'all_labels', 'fixmatch', 'labels_only', 'fedprox'}
    means = [row['accuracy'][0] for row in found.values()]
    assert means == sorted(means, reverse=True)
    for name, rate in best.items():
      assert found[name]['learning_rate'] == rate
    mean = .9 - abs(best['fixmatch'] - .05)
    assert found['fixmatch']['accuracy'] == pytest.approx([mean] * 3)
    few, most = (found[name]['accuracy'][0] for name in (plan.FEW, plan.ALL))
    assert found['fixmatch']['gap'] == pytest.approx(
        (mean - few) / (most - few))
    assert found['fixmatch']['rank'] == 1 and found['fedprox']['rank'] == 2
    assert found['labels_only']['rank'] is None
  assert 'Not the bench itself' in said
  for name in ('clients.md', 'clients.svg',
               *(f'clients_{skew}.svg' for skew in BED.skews)):
    assert (out / name).stat().st_size > 0


def test_goes_on_and_adds_rows(bench, out):
  """With the same flags; of others it says which."""
  assert bench('clients', 'fixmatch', *CHANGED)[0] == 0
  first = started(out)
  table = (out / 'clients.json').read_bytes()
  assert bench('clients', 'fixmatch', *CHANGED)[0] == 0
  assert started(out) == first
  assert (out / 'clients.json').read_bytes() == table
  assert bench('clients', 'fixmatch(threshold=0.9)', *CHANGED)[0] == 0
  assert all('threshold' in name for name in started(out)[len(first):])
  assert {'fixmatch', 'fixmatch_threshold=0.9'} < {*rows(out, 'mild')}
  _, said, _ = bench('clients', 'fixmatch', 'fedprox', '--status', *CHANGED)
  assert 'fixmatch                 3/3 tried, fixmatch' in said
  assert 'fedprox                  0/3 tried' in said
  # Who looks need not give what the folder knows.
  asked = 'clients', 'fixmatch', 'fedprox', '--status'
  assert bench(*asked)[:2] == (0, said)
  assert '3/8 tried' in bench(*asked, '--configurations=8')[1]
  code, _, errors = bench(*asked, '--', '--dataset=mnist')
  assert code == 2 and '--dataset=digits behind --' in errors
  before = sorted(os.listdir(out))
  code, _, errors = bench('clients', 'fixmatch')
  assert code == 2 and '--dataset=digits' in errors
  assert sorted(os.listdir(out)) == before


def test_progress_names_row_and_stage(bench):
  _, said, errors = bench('clients', 'fixmatch', *CHANGED)
  events = errors.splitlines()
  assert events[0] == (
      'started clients__labels_only__try0 (row 1 of 3, labels_only, tries: '
      'done 0, running 1, failed 0 of 3, ETA unknown)')
  row = 'row 3 of 3, fixmatch'
  assert f'{row}, tries: done 3, running 0, failed 0 of 3, ' in errors
  assert f'{row}, final seeds: done 2, running 0, failed 0' in events[-1]
  assert f'{row}, final seeds: done 2, failed 0 of 2 in ' in said


def test_first_row_can_be_looked_at_before_it_is_finished(bench, out):
  """How many it tries stands in the table from the start."""
  (out.parent / 'trainer.py').write_text(f"""import shutil, sys
if '--only_check_args' not in sys.argv:
  shutil.copy({str(out / 'clients.json')!r}, {str(out / 'seen.json')!r})
  sys.exit(1)
""")
  assert bench('clients', 'labels_only', *CHANGED)[0] == 1
  shutil.move(out / 'seen.json', out / 'clients.json')
  assert 'labels_only              0/3 tried' in bench(
      'clients', 'labels_only', '--status')[1]
  (out / 'clients.json').write_text('5')
  assert '0/8 tried' in bench('clients', '--status')[1]


def test_a_dry_run_counts_what_it_prints(bench):
  _, said, error = bench('clients', 'fedprox', 'fixmatch', '--dry_run')
  tries = len(said.splitlines())
  # The bounds are rows, too.
  assert error == (f'Rows: 4. Tries: {tries}. Then the best of each row: 8 '
                   'runs of 3 seeds.\n')
  assert tries == said.count('--seeds=1000')


def test_stored_rows_are_not_run_again(bench, out, tmp_path):
  """Their table is the one of a bench that has run all of them."""
  assert bench('clients', 'fixmatch', 'fedprox', *CHANGED)[0] == 0
  whole = json.loads((out / 'clients.json').read_text())
  table = (out / 'clients.md').read_text().split('Command:')
  shutil.rmtree(out)
  assert bench('clients', 'fixmatch', *CHANGED)[0] == 0
  file = shutil.copy(out / 'clients.json', tmp_path)
  shutil.rmtree(out)
  stored = f'--stored={file}'
  _, said, _ = bench('clients', 'fixmatch', stored, '--status', *CHANGED)
  for row, line in zip(('fedavg', 'fedavg', 'fixmatch'), said.splitlines(),
                       strict=True):
    assert f' in {tmp_path.name}/clients.json, {row}(weighting=' in line
    assert line.split()[-2] == 'rate'
  _, said, errors = bench('clients', 'fixmatch', stored, '--dry_run', *CHANGED)
  assert len(said.splitlines()) == said.count('--seeds=0,1,2') == 6
  assert errors.startswith('Rows: 0.') and 'repeat 3 stored rows' in errors
  commands = [*map(shlex.split, said.splitlines())]
  for row in json.loads(pathlib.Path(file).read_text())['rows']['mild']:
    assert any({f'--method={row["method"]}', '--learning_rate='
                f'{row["learning_rate"]}'} <= {*words} for words in commands)
  assert bench('clients', stored, 'fedprox', *CHANGED)[0] == 0
  assert {name.split('__')[1] for name in started(out)} == {'fedprox'}
  assert without_origin(out) == whole
  again = (out / 'clients.md').read_text()
  assert again.startswith(table[0].split('Accuracy is')[0])
  assert f'Taken from {tmp_path.name}/clients.json,' in again
  assert '`fixmatch`.' in again
  assert again.splitlines()[-5:] == table[1].splitlines()[-5:]
  # Its rows stay in the folder's table.
  ran = started(out)
  os.remove(file)
  assert bench('clients', 'fedprox', *CHANGED)[0] == 0
  assert started(out) == ran
  assert without_origin(out) == whole


def without_origin(folder: pathlib.Path) -> dict:
  """The table, without where its rows were taken from."""
  stored = json.loads((folder / 'clients.json').read_text())
  for row in stored['tuned'].values():
    row.pop('stored', None)
  return stored


def test_stored_rows_of_other_choices_do_not_count(
    bench, out, tmp_path):
  """They are run, as are those of another method of the same name."""
  file = tmp_path / 'clients.json'
  changed = made_up.table()
  changed['tuned']['fixmatch']['space']['flags'] = {'cohort_size': 3}
  file.write_text(json.dumps(changed))
  code, _, errors = bench('clients', 'fixmatch', f'--stored={file}', *CHANGED)
  assert code == 0 and (f'The row fixmatch of {file} does not count: other '
                        'flags than here.') in errors
  assert any('fixmatch' in name for name in started(out))
  assert rows(out, 'mild')['fixmatch']['accuracy'] != [1., 1., 1.]


def test_own_rows_stay_though_their_file_is_gone(bench, out, tmp_path):
  """And other code under the same name is another row."""
  own = tmp_path / 'own.py'
  own.write_text('from fedjax_ssl.methods.fixmatch import fixmatch as mine\n')
  assert bench('clients', f'{own}:mine', *CHANGED)[0] == 0
  ran = started(out)
  table = rows(out, 'mild')
  file = shutil.copy(out / 'clients.json', tmp_path)
  text = own.read_text()
  own.unlink()
  assert bench('clients', 'labels_only', *CHANGED)[0] == 0
  assert started(out) == ran and rows(out, 'mild') == table
  said = bench('clients', '--status')[1].splitlines()
  assert said[-1].startswith(
      'mine                     in clients.json, mine rate ')
  (out / 'clients.json').unlink()
  said = bench('clients', '--status')[1].splitlines()
  assert said[-1].split() == 'mine has runs here; name it to see more'.split()
  own.write_text(text + '# Edited.\n')
  code, _, errors = bench('clients', f'{own}:mine', *CHANGED)
  assert code == 2 and f'was run with an earlier version of {own}' in errors
  shutil.copy(own, tmp_path / 'moved.py')
  code, _, errors = bench('clients', f'{tmp_path}/moved.py:mine', *CHANGED)
  assert code == 2 and (
      f'holds runs of mine from {own}, not {tmp_path}/moved.py;') in errors
  shutil.rmtree(out)
  code, _, errors = bench(
      'clients', f'{own}:mine', f'--stored={file}', *CHANGED)
  assert code == 0
  assert f'The row mine of {file} does not count: other code than' in errors
  assert {name.split('__')[1] for name in started(out)} == {'mine'}


def test_own_rows_are_known_by_their_code_wherever_it_is(
    bench, out, tmp_path):
  own = tmp_path / 'own.py'
  own.write_text('from fedjax_ssl.methods.fixmatch import fixmatch as mine\n')
  assert bench('clients', f'{own}:mine', *CHANGED)[0] == 0
  table = (out / 'clients.json').read_text()
  assert str(tmp_path) not in table
  file = shutil.copy(out / 'clients.json', tmp_path)
  shutil.rmtree(out)
  (tmp_path / 'there').mkdir()
  moved = shutil.move(own, tmp_path / 'there')
  assert bench('clients', f'{moved}:mine', f'--stored={file}', *CHANGED)[0] == 0
  assert not (out / 'started').exists()
  assert 'mine' in rows(out, 'mild')


def test_a_row_of_a_module_is_read_again(bench, out, tmp_path, monkeypatch):
  """And other code of it is another row."""
  package = tmp_path / 'bench_rows'
  package.mkdir()
  (package / '__init__.py').touch()
  own = package / 'own.py'
  own.write_text('from fedjax_ssl.methods.fixmatch import fixmatch as mine\n')
  monkeypatch.syspath_prepend(str(tmp_path))
  row = 'bench_rows.own:mine(threshold=0.9)'
  assert bench('clients', row, *CHANGED)[0] == 0
  table = rows(out, 'mild')
  assert table['mine_threshold=0.9']['method'] == row
  file = shutil.copy(out / 'clients.json', tmp_path)
  shutil.rmtree(out)
  stored = f'--stored={file}'
  code, _, errors = bench('clients', row, stored, *CHANGED)
  assert code == 0 and not errors
  assert not (out / 'started').exists() and rows(out, 'mild') == table
  shutil.rmtree(out)
  own.write_text(own.read_text() + '# Edited.\n')
  code, _, errors = bench('clients', row, stored, '--status', *CHANGED)
  assert code == 0 and (f'The row mine_threshold=0.9 of {file} does not count: '
                        'other code than here.') in errors


def test_numbers_stay_though_only_final_runs_are_gone(bench, out):
  assert bench('clients', 'fixmatch', *CHANGED)[0] == 0
  table = json.loads((out / 'clients.json').read_text())
  for skew in ('strong', 'mild'):
    for config in out.glob(f'clients__fixmatch__{skew}__*/config.json'):
      shutil.rmtree(config.parent)
    assert bench('clients', 'labels_only', *CHANGED)[0] == 0
    assert json.loads((out / 'clients.json').read_text()) == table


def test_a_finished_row_stays_until_a_new_one_is_finished(bench, out):
  """Its runs were begun anew, with other results, and have not ended."""
  assert bench('clients', 'fixmatch', *CHANGED)[0] == 0
  stored = json.loads((out / 'clients.json').read_text())
  stored['tuned']['fixmatch']['tried']['0'] = .123
  (out / 'clients.json').write_text(json.dumps(stored))
  for config in out.glob('clients__fixmatch__*final*/config.json'):
    shutil.rmtree(config.parent)
  assert bench('clients', 'labels_only', *CHANGED)[0] == 0
  assert json.loads((out / 'clients.json').read_text()) == stored


def test_own_finished_rows_are_not_replaced_by_stored_ones(
    bench, out, tmp_path):
  """A row that is not finished comes from the stored table."""
  assert bench('clients', 'fixmatch', *CHANGED)[0] == 0
  ran, table = started(out), rows(out, 'mild')
  file = pathlib.Path(shutil.copy(out / 'clients.json', tmp_path))
  edit(file, 'fixmatch', accuracy=[.1, .1, .1])
  call = ('clients', 'fixmatch', f'--stored={file}', *CHANGED)
  assert bench(*call)[0] == 0
  assert started(out) == ran and rows(out, 'mild') == table
  # So is one whose runs are gone, and it is not run again.
  for config in out.glob('clients__fixmatch__*/config.json'):
    shutil.rmtree(config.parent)
  assert bench(*call)[0] == 0
  assert started(out) == ran and rows(out, 'mild') == table
  os.remove(out / 'clients.json')
  assert bench(*call)[0] == 0
  assert started(out) == ran
  assert rows(out, 'mild')['fixmatch']['accuracy'] == [.1, .1, .1]


def test_rows_that_do_not_count_are_named(bench, out, tmp_path):
  """A stored one of another space, and one's own that stops counting."""
  name = 'fixmatch_threshold=0.9'
  assert bench('clients', 'fixmatch(threshold=0.9)', *CHANGED)[0] == 0
  table = rows(out, 'mild')
  file = pathlib.Path(shutil.copy(out / 'clients.json', tmp_path))
  edit(file, name, {'cohort_size': 3}, accuracy=[.1, .1, .1])
  code, _, errors = bench(
      'clients', 'labels_only', f'--stored={file}', *CHANGED)
  assert code == 0 and rows(out, 'mild') == table
  assert errors == (f'The row {name} of {file} does not count: other flags '
                    f'than in {out}/clients.json.\n')
  edit(out / 'clients.json', 'labels_only', {'labels': 'all'})
  before = (out / 'clients.json').read_bytes()
  code, _, errors = bench('clients', 'all_labels', *CHANGED)
  assert code == 0 and errors == (
      f'The row labels_only of {out}/clients.json does not count: other flags '
      f'than here.\n{out}/clients.json has rows that do not count here. A copy '
      f'is kept as {out}/clients.json.old.\n')
  assert (out / 'clients.json.old').read_bytes() == before


def test_rows_stay_in_the_folders_table(bench, out):
  """Though runs are gone, or only one skew has a result."""
  assert bench('clients', 'fixmatch', 'uda(threshold=0.5)', *CHANGED)[0] == 1
  for skew in BED.skews:
    assert 'fixmatch' in rows(out, skew)
  for config in out.glob('clients__fixmatch__*/config.json'):
    shutil.rmtree(config.parent)
  assert bench('clients', 'labels_only', *CHANGED)[0] == 0
  for skew in BED.skews:
    assert 'fixmatch' in rows(out, skew)
  # A table that is not this bench's is kept beside it.
  code, _, errors = bench('clients', 'labels_only', '--configurations=2',
                          *CHANGED[1:])
  assert code == 0 and 'is kept as' in errors
  assert '--configurations 3, this bench with 2' in errors
  assert 'fixmatch' in (out / 'clients.json.old').read_text()
  # A table that was kept before stays what it is.
  code, _, errors = bench('clients', 'labels_only', *CHANGED)
  assert code == 0 and f'is kept as {out}/clients.json.old.1.' in errors
  assert 'fixmatch' in (out / 'clients.json.old').read_text()
  # One without rows is not kept.
  stored = json.loads((out / 'clients.json').read_text())
  (out / 'clients.json').write_text(json.dumps(stored | {
      'configurations': 2, 'tuned': {}, 'rows': dict.fromkeys(BED.skews, [])}))
  code, _, errors = bench('clients', 'labels_only', *CHANGED)
  assert code == 0 and not errors
  assert not (out / 'clients.json.old.2').exists()
  for text in ('5', '{"a": 1}', '[1]', '[' * 100_000):
    (out / 'changed.json').write_text(text)
    code, _, errors = bench('clients', 'labels_only', *CHANGED)
    assert code == 2 and 'changed.json is damaged' in errors


def test_refuses_two_rows_of_one_name(bench, out, tmp_path):
  own = tmp_path / 'own.py'
  own.write_text('from fedjax_ssl.methods.uda import uda as fixmatch\n')
  code, _, errors = bench('clients', f'{own}:fixmatch', *CHANGED)
  assert code == 2 and 'the name of the row fixmatch' in errors
  assert not out.exists()


@pytest.mark.thorough
def test_row_that_fails_is_left_out(bench, out):
  code, said, _ = bench('clients', 'uda', 'moon', 'fixmatch', *CHANGED)
  assert code == 1
  assert 'FAILED clients__uda__mild__final' in said
  assert 'it fell over' in said
  assert [*rows(out, 'mild')] == ['all_labels', 'fixmatch', 'labels_only']
  assert 'Without a result, as a run failed or has not ended: `uda`' in said
  assert 'not all their configurations have a result: `moon` (0 of 3).' in said
  assert '--configurations=3' in said


def test_names_all_that_is_missing(capsys):
  for words, said in (((), 'BED, --out;'), (('clients',), 'required: --out;'),
                      (('--out=here',), 'required: BED;')):
    with pytest.raises(SystemExit) as ended:
      cli.main(['bench', *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_refuses_a_method_that_makes_none(bench, out, tmp_path):
  """Before the bounds are tuned."""
  (tmp_path / 'mine.py').write_text('def mine(task):\n  return None\n')
  code, _, errors = bench('clients', f'{tmp_path}/mine.py:mine')
  assert code == 2 and 'mine.py:mine: gives no Method' in errors
  for body, said in (('return {}[task.seed]', "AttributeError: 'Task' object"),
                     ("raise KeyError('x')", "KeyError: 'x'"),
                     ('raise SystemExit(0)', 'SystemExit: 0')):
    (tmp_path / 'mine.py').write_text(f'def mine(task):\n  {body}\n')
    code, _, errors = bench('clients', f'{tmp_path}/mine.py:mine')
    assert code == 2 and f'ROW={tmp_path}/mine.py:mine: {said}' in errors
    assert 'mine.py:2)' in errors and len(errors.splitlines()) == 1
  assert not out.exists()


def test_a_method_is_made_for_what_all_runs_are_given(bench, out, tmp_path):
  file = tmp_path / 'mine.py'
  file.write_text('def mine(task):\n  raise ValueError(task.labels_at)\n')
  for flags, place in (((), 'clients'),
                       (('--', '--labels_at=server'), 'server')):
    code, _, errors = bench('clients', f'{file}:mine', *flags)
    assert code == 2 and f'mine.py:mine: {place} (at' in errors
  assert not out.exists()
  file.write_text('from fedjax_ssl import methods\ndef mine(task):\n'
                  '  return methods.make("fixmatch", task)\n')
  code, said, errors = bench('clients', f'{file}:mine', '--dry_run', '--',
                             '--model=auto')  # The data decide.
  assert code == 0 and '--model=auto' in said, errors


def test_lists_of_knobs_are_tuned(bench, out, tmp_path):
  """Of library and own methods; values that cannot be are refused before."""
  own = tmp_path / 'own.py'
  own.write_text('from fedjax_ssl.methods.fixmatch import fixmatch as mine\n')
  row = f'{own}:mine(threshold=[0.5, {{}}], unlabeled_weight=2.0)'
  code, _, errors = bench('clients', row.format(7), *CHANGED)
  assert code == 2 and 'threshold=7' in errors and not out.exists()
  assert bench('clients', row.format(0.9), *CHANGED)[0] == 0
  name = 'mine_threshold=0.5_0.9_unlabeled_weight=2.0'
  assert name in rows(out, 'mild')
  table = json.loads((out / 'clients.json').read_text())
  assert table['tuned'][name]['space']['knobs'] == {'threshold': [0.5, 0.9]}
  tried = {json.loads(file.read_text())['flags']['method'] for file in out.glob(
      f'clients__{name}__try*/config.json')}
  assert {text.split('threshold=')[1][:3] for text in tried} == {'0.5', '0.9'}


def test_status_of_a_folder_that_is_not_there_is_refused(
    bench, out, tmp_path):
  """Misspelt, it would look as if all work were lost."""
  assert bench('clients', 'labels_only', *CHANGED)[0] == 0
  wrong = tmp_path / 'uot'
  asked = 'clients', 'fixmatch', '--status'
  code, said, errors = bench(*asked, f'--out={wrong}')
  assert code == 2 and not said and errors == (
      f'error: --out={wrong} is no folder: no bench has been run there. '
      "Did you mean 'out'?\n")
  # Stored rows can be looked at without a folder, and a folder may be empty.
  stored = f'--stored={out / "clients.json"}'
  note = f'Note: --out={wrong} holds nothing of the bed clients yet.\n'
  code, said, errors = bench(
      'clients', 'labels_only', '--status', stored, f'--out={wrong}', *CHANGED)
  assert code == 0 and 'labels_only' in said and errors == note
  assert not wrong.exists()
  wrong.mkdir()
  code, said, errors = bench(*asked, f'--out={wrong}')
  assert code == 0 and '0/8 tried' in said and errors == note
  assert bench(*asked)[2] == ''


def test_a_misspelt_flag_is_answered_with_the_nearest(capsys):
  with pytest.raises(SystemExit) as ended:
    cli.main(['bench', 'clients', '--out=here', '--statsu'])
  assert ended.value.code == 2
  assert '--statsu. Did you mean --status? `' in capsys.readouterr().err


@pytest.mark.parametrize('words, said', [
    (('cliens',), 'BED=cliens must be one of clients'),
    (('clients', 'fixmach'), "Did you mean 'fixmatch'"),
    (('clients', '--slots=0'), '--slots=0 must be at least 1'),
    (('clients', 'fixmatch(thresh=0.9)'), "has no knob 'thresh'"),
    (('clients', 'fixmatch(threshold=7)'), 'threshold'),
    (('clients', 'fixmatch(threshold=[0.9, 7])'), 'threshold=7'),
    (('clients', 'fixmatch(threshold=[])'), 'threshold=[] must list different'),
    (('clients', '--data_dir=/nowhere'), '/nowhere'),
    (('clients', '--', 'num_rounds=3'), 'num_rounds=3 behind --'),
    (('clients', '--', '--seed=3'), '--seed=3 cannot be given behind --'),
    (('clients', '--', '--flagfile=x'), '--flagfile=x cannot be given behind'),
    (('clients', '--data_dir='), '--data_dir= is empty'),
    (('clients', './no.py:foo'), 'ROW=./no.py:foo: there is no file'),
    (('clients', '--', '--workdir=x'), 'the bench sets method,'),
])
def test_refuses(bench, out, words, said):
  code, _, errors = bench(*words)
  assert code == 2 and said in errors and len(errors.splitlines()) == 1
  assert not out.exists()
