"""A configuration alone makes the same bytes again."""
from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from fedjax_ssl.cli import repeat
from fedjax_ssl.training import command
from tests.cli import launcher

ARGS = (*launcher.SMALL, '--method=fedavg', '--seeds=3', '--num_rounds=2',
        '--eval_every=1', '--local_steps=1',
        '--labeled_view=cutout(fill=(1,))', '--labeled_fraction=0.1')


@pytest.fixture(scope='module')
def finished(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp('repeat') / 'run'
  flagfile = folder.with_name('mine.flags')
  flagfile.write_text('# Mine: a paper.\n# Paper: 12.5 % test accuracy.\n'
                      + '\n'.join(ARGS) + '\n')
  launcher.run(folder, f'--flagfile={flagfile}')
  return folder


def flags(folder):
  stored = json.loads((folder / 'config.json').read_text())['flags']
  return {k: v for k, v in stored.items() if k != 'workdir'}


def test_the_flagfile_beside_it_makes_the_same_run(finished, tmp_path):
  source, again = finished, tmp_path / 'again'
  launcher.run(again, f'--flagfile={source / "run.flags"}')
  for name in ('metrics.jsonl', 'partition_3.npz'):
    assert (again / name).read_bytes() == (source / name).read_bytes(), name
  assert flags(again) == flags(source)


def test_the_configuration_alone_is_enough(finished, tmp_path):
  shutil.copy(finished / 'config.json', tmp_path / 'config.json')
  done = launcher.call('repeat', str(tmp_path / 'config.json'), '--print')
  assert done.returncode == 0 and not done.stderr
  assert done.stdout == (finished / 'run.flags').read_text()
  subprocess.run(
      [sys.executable, '-m', 'fedjax_ssl', 'repeat',
       str(tmp_path / 'config.json'), f'--workdir={tmp_path / "again"}',
       '--num_rounds=1'],
      capture_output=True, check=True)
  rows = (tmp_path / 'again' / 'metrics.jsonl').read_text()
  assert (finished / 'metrics.jsonl').read_text().startswith(rows) and rows


@pytest.mark.parametrize('words', [('--seed=5',), ('--seed', '5'),
                                   ('--seeds=5',)])
def test_another_seed_takes_the_place_of_the_runs(finished, monkeypatch, words):
  given: list[str] = []
  monkeypatch.setattr(os, 'execv', lambda _, line: given.extend(line))
  repeat.main([str(finished), *words])
  before = given[:-len(words)]
  assert [*words] == given[-len(words):] and '--num_rounds=2' in before
  # An option given twice counts as given last; of two names it would clash.
  assert ('--seeds=3' in before) == (words == ('--seeds=5',))
  given.clear()
  repeat.main([str(finished), '--labels_per_class=2'])
  assert not [flag for flag in given if flag.startswith('--labeled_fraction')]


def test_it_says_where_it_comes_from(finished):
  stored = json.loads((finished / 'config.json').read_text())
  assert stored['origin'] == {
      'setting': 'digits_dirdir', 'flagfiles': ['mine.flags'],
      'comments': ['Mine: a paper.', 'Paper: 12.5 % test accuracy.']}
  text = (finished / 'run.flags').read_text()
  assert '#   Paper: 12.5 % test accuracy.\n' in text
  assert '--workdir' not in text


def test_an_older_folder_gains_what_it_lacks(finished, tmp_path):
  folder = tmp_path / 'old'
  shutil.copytree(finished, folder)
  stored = json.loads((folder / 'config.json').read_text())
  del stored['origin']
  (folder / 'config.json').write_text(json.dumps(stored))
  (folder / 'run.flags').unlink()
  # Also of a run that is finished: it says that there was nothing to do.
  assert 'fedavg was finished at round 2; nothing was run.' in launcher.run(
      folder, *ARGS)
  assert (folder / 'run.flags').exists()
  assert json.loads((folder / 'config.json').read_text())['origin'][
      'setting'] == 'digits_dirdir'
  assert (folder / 'metrics.jsonl').read_bytes() == (
      finished / 'metrics.jsonl').read_bytes()


@pytest.mark.parametrize('words, files', [
    (['--flagfile=a', '--x=1'], ['a']), (['-flagfile', 'b'], ['b']),
    (['--flagfiles=a', 'flagfile=b'], [])])
def test_flagfiles_of_a_command_line(words, files):
  assert command.origin(words)['flagfiles'] == files


def test_what_a_flagfile_in_the_home_folder_says_is_kept(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'cell.flags').write_text('# Table 1.\n--num_rounds=2\n')
  found = command.origin(['--flagfile=~/cell.flags'])
  assert (found['flagfiles'], found['comments']) == (
      ['cell.flags'], ['Table 1.'])


@pytest.mark.parametrize('words', [[], ['--print'], ['nowhere']])
def test_what_is_no_run_is_refused(words, capsys):
  assert repeat.main(words) == 2
  assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_configuration_may_have_any_name(finished, tmp_path, capsys):
  file = tmp_path / 'mine.json'
  shutil.copy(finished / 'config.json', file)
  for words in ([str(file), '--print'], ['--print', str(file)]):
    assert repeat.main(words) == 0
    assert capsys.readouterr().out == (finished / 'run.flags').read_text()
  assert repeat.main([str(file), '--num_rounds=7', '--print']) == 2
  assert 'leave --num_rounds=7 out' in capsys.readouterr().err
  file.write_text('{')
  assert repeat.main([str(file)]) == 2
  assert f'{file} is damaged' in capsys.readouterr().err
