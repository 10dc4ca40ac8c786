"""Tables and the folder of their data: given, missing, and in a dry run."""
from __future__ import annotations

import shlex
import subprocess

import pytest

from fedjax_ssl import data
from fedjax_ssl.cli import table_runs, tables
from fedjax_ssl.core import checks
from tests.cli import paper_tables_test

place = paper_tables_test.place


def _without_data(place):
  """Its script refuses cells whose data set is `gone`."""
  script = place.root / 'exp.py'
  script.write_text(script.read_text().replace('signal.signal(', """if (
      flags.get('dataset') == 'gone'):
    print("error: data set 'gone' not found: there is no gone.npz")
    sys.exit(2)
  signal.signal(""", 1))


def test_other_cells_of_a_missing_data_set_are_not_tried(place):
  _without_data(place)
  place.change('ours', 'dataset = "gone"')
  place.change('base', 'dataset = "gone"')
  place.change('other', 'method = "fedavg"')
  said = place.call(code=1)
  assert said.count("    error: data set 'gone' not found") == 1
  assert [line.split(' in ')[0] + line.partition(' s; ')[2]
          for line in said.splitlines() if 'runs left' in line] == [
              'failed exp.ours_hard, seed 0,5 more skipped as gone was not '
              'found; 2 runs left', 'done exp.other, seed 0,1 runs left',
              'done exp.other, seed 1,0 runs left']
  assert said.splitlines()[-1] == (
      '2 runs done, 1 failed, 5 skipped, 0 left; the same command tries again.')
  # The log's earlier attempts do not count: this one fails by itself.
  place.change('ours', 'method = "fixmatch", dataset = "here"')
  said = place.call('--row=Ours', code=1)
  assert 'it fell over' in said and 'not found' not in said


def test_cells_without_the_name_of_a_data_set_are_tried(place):
  """A script knows its own, which is the same for all its cells alone."""
  chosen = tables._plan(tables._parser().parse_args(place.command(
      '--row=Ours', '--row=Base')))
  assert {chosen.dataset(cell) for cell in chosen.chosen} == {
      'the data set of exp'}
  real = tables._plan(tables._parser().parse_args([
      '--table=feddure1', '--variant=x', '--', '--num_rounds=2']))
  assert 'cifar10' in map(real.dataset, real.chosen)
  other = real._replace(flags=('--dataset=digits',))
  assert {*map(other.dataset, real.chosen)} == {'digits'}


@pytest.mark.parametrize('folder', [None, '', 'none'])
def test_what_the_library_says_of_missing_data_is_known(
    tmp_path, monkeypatch, folder):
  monkeypatch.delenv('FEDJAX_SSL_DATA', raising=False)
  with pytest.raises(ValueError) as error:
    data.load('cifar10x', None if folder is None else tmp_path / folder)
  with checks.marking('--'):
    assert table_runs._NO_DATA.match(f'error: {error.value}')


def test_data_dir_reaches_the_runs_and_no_result(place):
  words = '--row=Ours', '--row=Base', '--column=hard'
  place.call(*words)
  before = place.results()
  assert len(before) == 2 and all(
      not r['extra_flags'] and 'data_dir' not in r['run_flags']
      for r in before.values())
  given = f'--data_dir={place.root}'
  assert place.call(*words, given).endswith('0 runs done, 0 failed, 0 left.\n')
  assert place.results() == before
  place.change('other', 'method = "fedavg", seeds = "0"')
  script = place.root / 'exp.py'
  script.write_text(script.read_text().replace('signal.signal(', f"""if (
      flags.get('data_dir') != {str(place.root)!r}):
    sys.exit('no folder was given')
  signal.signal(""", 1))
  assert 'no folder was given' in place.call('--row=Other', code=1)
  assert '1 runs done' in place.call('--row=Other', given)
  assert not place.results()['exp.other']['extra_flags']
  said = place.call(f'{given}/none', code=2)
  assert said == f'error: {given}/none is no folder.\n'


def test_a_dry_run_prints_commands_that_can_be_run(place):
  words = '--row=Base', '--column=hard', f'--data_dir={place.root}'
  printed = place.call(*words, '--dry_run')
  assert not (place.root / 'runs').exists()
  commands = [shlex.split(line) for line in printed.splitlines()]
  assert [[word for word in command if 'seeds' in word]
          for command in commands] == [['--seeds=0'], ['--seeds=1']]
  folder = place.root / 'runs/one/exp.base_hard'
  for command in commands:
    assert f'--data_dir={place.root}' in command
    subprocess.run(command, check=True)
  assert (folder / 'seed_0/metrics.jsonl').exists()
  place.call(*words)
  assert place.call(*words, '--dry_run') == (
      f'Nothing is to be run: {place.root}/results/one has the results; '
      'another --results=DIR runs these cells anew, --status lists them.\n')


@pytest.mark.parametrize('flag, said', [
    ('--num_round=5', '--num_round=5 is no flag. Did you mean --num_rounds?'),
    ('--cohort_size=500', '--cohort_size=500 and --num_clients=100: '),
    ('--method=fixmatch(treshold=1)', "has no knob 'treshold'")])
def test_flags_of_a_variant_are_checked_before_any_run(
    tmp_path, capsys, flag, said):
  runs, stored = tmp_path / 'runs', tmp_path / 'results'
  assert tables.main([
      '--table=feddure1', '--row=FedDure', '--column=CIFAR-10 (DIR, DIR)',
      '--variant=v', f'--runs={runs}', f'--results={stored}', '--', flag]) == 2
  error = capsys.readouterr().err
  assert error.startswith('error: cifar_dirdir: ') and said in error
  assert not runs.exists() and not stored.exists()
