"""An edited grid keeps what is done, and refuses what cannot go on."""
from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from fedjax_ssl.cli import sweep
from fedjax_ssl.cli.sweep import asked, cells, grid, study
from fedjax_ssl.running import settings
from tests.cli.sweep import sweep_test

FAKE = sweep_test.FAKE
SHORT = ('setting: digits_dirdir', 'seeds: 3', '--model=linear --nobounds',
         '--num_rounds=1 --local_steps=1 --strong=none')


def test_a_flag_that_begins_to_vary_keeps_its_finished_runs(tmp_path):
  before = (FAKE, 'seeds: 0 1', '--x=1', '--y=1')
  sweep_test.run(tmp_path, *before)
  # Lines may be in another order too.
  after = (FAKE, 'seeds: 0 1', '--y=1', '--x=1 | 2')
  state, _ = sweep_test.run(tmp_path, *after, options=['--status'])
  name = 'fake_experiment__seed=0'
  assert (f'done             2/2  {name} (in this grid '
          'fake_experiment__x=1__seed=0)\n') in state
  assert 'done 2, to do 2 of 4' in state
  printed, said = sweep_test.run(tmp_path, *after)
  assert 'done 4 (2 before), failed 0 of 4' in printed
  assert said.startswith(
      '2 cells have their runs under the name of an earlier grid, such as '
      f'fake_experiment__x=1__seed=0 in {name}.\n')
  assert sweep_test.starts(tmp_path) == {
      name: 1, 'fake_experiment__seed=1': 1, 'fake_experiment__x=2__seed=0': 1,
      'fake_experiment__x=2__seed=1': 1}
  # The other way round, and each shard alike.
  sweep_test.run(tmp_path, FAKE, 'seeds: 0 1', '--y=1', '--x=2',
                 options=['--shard=1/2'])
  assert sum(sweep_test.starts(tmp_path).values()) == 4


def test_a_run_of_other_flags_or_another_flagfile_is_not_taken(tmp_path):
  flagfile = tmp_path / 'a.flags'
  flagfile.write_text('--num_rounds=1\n')
  lines, out = (FAKE, f'flagfile: {flagfile}'), tmp_path / 'out'
  sweep_test.run(out, *lines, '--x=1')
  for more in (['--x=2 | 3'], ['--x=1 | 2', '--z=1']):
    found = grid.parse('\n'.join([*lines, *more]))
    assert study.recognised(out, found) == found
  found = grid.parse('\n'.join([*lines, '--x=1 | 2']))
  assert [c.name for c in study.recognised(out, found)] == ['a', 'a__x=2']
  flagfile.write_text('--num_rounds=2\n')
  assert study.recognised(out, found) == found


def test_folders_of_no_cell_are_named(tmp_path):
  sweep_test.run(tmp_path, FAKE, '--x=1 | 2')
  for options in (['--status'], ['--dry_run'], []):
    printed, said = sweep_test.run(tmp_path, FAKE, '--x=2 | 3',
                                   options=options)
    line = '1 folder belongs to no cell of this grid: fake_experiment__x=1.\n'
    assert (said if not options or options == ['--dry_run'] else printed
            ).count(line) == 1
  # What is another shard's belongs to the grid.
  printed, _ = sweep_test.run(tmp_path, FAKE, '--x=1 | 2 | 3',
                              options=['--status', '--shard=0/3'])
  assert 'belongs' not in printed


@pytest.fixture(scope='module')
def begun(tmp_path_factory):
  """The folder of a sweep of one real run."""
  out = tmp_path_factory.mktemp('study') / 'out'
  sweep_test.run(out, *SHORT, '--method=fixmatch(threshold=0.9)')
  return out


NAME = 'digits_dirdir__seed=3'


@pytest.mark.parametrize('more, differs', [
    (['--method=fixmatch(threshold=0.9)', '--labels_per_class=5'],
     'labels_per_class 10 -> 5'),
    (['--method=uda'], 'method fixmatch(threshold=0.9) -> uda'),
    (['--method=fixmatch(threshold=0.7)'],
     'method fixmatch(threshold=0.9) -> fixmatch(threshold=0.7)')])
def test_a_run_that_cannot_go_on_is_refused_at_the_start(begun, more, differs):
  lines = (*SHORT, *more)
  printed, _ = sweep_test.run(begun, *lines, options=['--status'])
  assert (f'conflict         1/1  {NAME} (its run has other flags: {differs})\n'
          'conflict 1 of 1\n' in printed)
  assert 'give another --out' in printed
  before = (begun / f'{NAME}.log').read_bytes()
  for options in ([], ['--dry_run']):
    printed, said = sweep_test.run(begun, *lines, options=options, code=2)
    assert said == (f'error: --out={begun}: 1 cell has a run there with other '
                    f'flags, which cannot go on with these: {NAME} ({differs})'
                    '; give another --out.\n')
    assert not printed or options
  assert (begun / f'{NAME}.log').read_bytes() == before


def test_a_run_that_a_killed_sweep_had_begun_is_refused_too(begun, tmp_path):
  shutil.copytree(begun, tmp_path / 'out')
  (tmp_path / 'out' / '.sweep' / f'{NAME}.json').unlink()
  for method, differs in (('fixmatch(threshold=0.9)', ''),
                          ('uda', 'method fixmatch(threshold=0.9) -> uda')):
    cell, = grid.parse('\n'.join([*SHORT, f'--method={method}']))
    assert study.conflict(tmp_path / 'out', cell) == differs


@pytest.mark.parametrize('more', [
    ['--method=fixmatch(threshold=.9)'],
    ['--method=fixmatch(threshold=.9, unlabeled_weight=1.0)'],
    ['--method=fixmatch(threshold=0.9)', '--optimizer=sgd'],
    ['--method=fixmatch(threshold=0.9)', '--eval_every=7']])
def test_a_run_that_can_go_on_is_no_conflict(begun, more):
  cell, = grid.parse('\n'.join([*SHORT, *more]))
  assert not study.conflict(begun, cell)
  study.check(begun, [cell])


@pytest.mark.parametrize('setting', settings.SETTINGS)
def test_a_run_is_in_no_conflict_with_its_own_flags(tmp_path, setting):
  """With none of a setting, whatever the data decided in place of `auto`."""
  cell = grid.Cell(setting, '', ('--dataset=digits',), setting)
  options, _ = asked.options(setting, cell.args)
  decided = {'model': 'cnn', 'weak': 'none', 'strong': 'ra_mc(cutout=2)',
             'partition': 'natural', 'num_clients': 7, 'cohort_size': 7,
             'labels_per_class': None} if settings.SETTINGS[setting].any_data \
      else {}
  flags = {**dataclasses.asdict(options), 'seeds': options.all_seeds,
           'schedule_rounds': options.num_rounds, 'seed': None, **decided}
  (tmp_path / setting).mkdir()
  (tmp_path / setting / 'config.json').write_text(json.dumps({'flags': flags}))
  (tmp_path / '.sweep').mkdir()
  cells.write_record(tmp_path, cell, state='failed', exit=2)
  assert not study.conflict(tmp_path, cell)
  other = dataclasses.replace(cell, args=(*cell.args, '--momentum=0.123'))
  assert study.conflict(tmp_path, other).endswith('-> 0.123')
  for broken in ('{"flags": {"seeds": 5}}', '{"flags": [1]}', '{'):
    (tmp_path / setting / 'config.json').write_text(broken)
    assert sweep.status(tmp_path, [other])
