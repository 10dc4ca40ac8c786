"""`fedjax-ssl` and the scripts of the settings are one program."""
from __future__ import annotations

import errno
import importlib
import json
import os
import pathlib
import pkgutil
import re
import shlex
import signal
import subprocess
import sys

from absl.testing import flagsaver
import jax
import pytest

from fedjax_ssl import cli, config, data, methods
from fedjax_ssl.cli import exit_codes
from fedjax_ssl.data import datasets
from fedjax_ssl.data.datasets import table
from fedjax_ssl.running import settings
from fedjax_ssl.training import model_file
from tests.cli import launcher

NUMBERS = (signal.SIGTERM, signal.SIGINT)
ARGS = (*launcher.SMALL, '--method=fedavg', '--num_rounds=2', '--eval_every=1')


def test_a_script_and_the_command_make_the_same_run(tmp_path):
  script, command = tmp_path / 'script', tmp_path / 'command'
  launcher.run(script, *ARGS)
  done = launcher.call('train', 'digits_dirdir', *ARGS, f'--workdir={command}')
  assert done.returncode == 0, done.stderr
  for name in ('metrics.jsonl', 'run.flags', 'partition_0.npz'):
    assert (script / name).read_bytes() == (command / name).read_bytes(), name
  first, second = (json.loads((folder / 'config.json').read_text())
                   for folder in (script, command))
  for stored in (first, second):
    del stored['flags']['workdir']
  assert first == second
  # A run of a version in which scripts had no setting goes on, and is known.
  second['origin'] = {**second['origin'],
                      'script': 'experiments/digits_dirdir.py'}
  del second['origin']['setting']
  second['flags']['workdir'] = str(command)
  (command / 'config.json').write_text(json.dumps(second))
  launcher.run(command, *ARGS, '--num_rounds=3')
  done = launcher.call('evaluate', str(command))
  assert done.returncode == 0, done.stderr
  rows = [json.loads(line) for line in done.stdout.splitlines()]
  kept = [json.loads(line) for line in
          (command / 'metrics.jsonl').read_text().splitlines()[-2:]]
  assert [r['accuracy'] for r in rows] == [r['accuracy'] for r in kept]
  done = launcher.call('evaluate', str(tmp_path))
  assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize('closed', ['>&-', '2>&-', '<&- >&- 2>&-'])
def test_closed_streams_end_nothing(tmp_path, closed):
  out = tmp_path / 'flags'
  done = subprocess.run(
      shlex.join([sys.executable, '-m', 'fedjax_ssl', 'tables',
                  '--table=feddure1', f'--write_flagfiles={out}'])
      + f' {closed}', shell=True, check=False, cwd=launcher.EXPERIMENTS.parent)
  assert done.returncode == 0
  assert all(b'wrote' not in file.read_bytes() for file in out.rglob('*.flags'))


@pytest.mark.parametrize('words, said', [
    (['trian'], "'trian' is no command. Did you mean 'train'?"),
    (['resume'], "'resume' is no command. The command that began a run goes"),
    (['train', '--method=uda'], 'The setting comes first: '),
    (['train', 'digits_dirdri'], "Did you mean 'digits_dirdir'?"),
    (['train', 'digits_dirdir', '--alhpa=1'], 'Did you mean --alpha?'),
    (['train', 'digits_dirdir', '--lr=1'], 'Did you mean --learning_rate?'),
    (['train', 'digits_dirdir', '--method=fixmach'], "Did you mean 'fixmatch'"),
    (['train', 'cifar_iid', '--num_rounds=0'], '--num_rounds=0'),
    (['sweep', '--otu=x'],
     'required: GRID, --out; --otu=x is no flag. Did you mean --out?'),
    (['predict', 'run', 'x.png', '--otu=x'], 'Did you mean --out?'),
    (['list', 'nothing'], 'nothing')])
def test_wrong_words_are_refused_without_waiting_for_jax(words, said):
  code = ('import sys\nfrom fedjax_ssl import cli\ncode = None\n'
          'try: code = cli.main(sys.argv[1:])\n'
          'except SystemExit as error: code = error.code\n'
          'assert code == 2, code\n'
          'assert sys.argv[1] == "list" or "jax" not in sys.modules\n')
  done = subprocess.run([sys.executable, '-c', code, *words], text=True,
                        capture_output=True, check=False)
  assert done.returncode == 0, done.stderr
  assert said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize('words, said', [
    (['report', '', '--out=y'], "'' names no run"),
    (['results', ''], "'' names no run"),
    (['evaluate', ''], "'' names no run"),
    (['repeat', '', '--print'], "'' names no run"),
    (['predict', '', 'x'], "there is no ''")])
def test_an_empty_word_is_no_folder(capsys, monkeypatch, tmp_path, words, said):
  """Not even the current one, where that holds a run."""
  (tmp_path / 'config.json').write_text('{}')
  monkeypatch.chdir(tmp_path)
  assert cli.main(words) == 2 and said in capsys.readouterr().err


def test_a_method_is_a_module_of_its_name():
  folder = pathlib.Path(methods.__file__).parent
  assert {module.name for module in pkgutil.iter_modules([str(folder)])} == {
      'parts', *(name for name, build in methods.METHODS.items()
                 if build.__module__.startswith('fedjax_ssl.'))}


@pytest.mark.parametrize('words', [
    [], ['--help'], ['train', '--help'], ['evaluate', '--help'],
    ['repeat', '--help']])
def test_help_is_printed(words, capsys):
  before = [signal.getsignal(number) for number in NUMBERS]
  assert cli.main(words) == 0
  # A process that gave the words keeps its signals.
  assert [signal.getsignal(number) for number in NUMBERS] == before
  text = capsys.readouterr().out
  assert 'fedjax-ssl' in text
  assert words != ['train', '--help'] or all(
      f'  {name} ' in text for name in settings.SETTINGS)


def test_an_output_that_is_full_is_named(monkeypatch, capsys):
  monkeypatch.setattr(sys, 'stdout', launcher.Full())
  for words in (['--version'], ['train'], ['list', 'streams'],
                ['evaluate', '--help']):
    assert cli.main(words) == exit_codes.MAY_PASS
    assert capsys.readouterr().err == (
        'error: <full> cannot be used: No space left on device.\n')


# By command what it is given, and a function of its work.
WORK = {
    'train': (['digits_dirdir'], 'fedjax_ssl.cli.train.options'),
    'evaluate': (['run'], 'fedjax_ssl.training.workdir.read_config'),
    'predict': (['run', 'x.png'], 'fedjax_ssl.finished.load'),
    'repeat': (['run'], 'fedjax_ssl.training.workdir.read_config'),
    'sweep': (['--out=runs', '--status', '--', 'setting: digits_dirdir'],
              'fedjax_ssl.cli.sweep.study.recognised'),
    'bench': (['clients', '--out=runs', '--status'],
              'fedjax_ssl.bench.plan.beds'),
    'report': (['run', '--out=page'], 'fedjax_ssl.cli.places.runs_in'),
    'results': (['run'], 'fedjax_ssl.cli.places.runs_in'),
    'tables': (['--list'], 'fedjax_ssl.papers.cells.tables'),
    'list': ([], 'fedjax_ssl.cli.catalog.catalog'),
    'resize-images': (['--images=images', '--size=8', '--out=new'],
                      'fedjax_ssl.cli.resize_images.resize'),
    'embed-texts': (['--texts=t.csv', '--bert=bert', '--out=new.npz'],
                    'fedjax_ssl.data.datasets.text.read_rows')}


def fails(monkeypatch, place: str, error: Exception) -> None:
  def fail(*unused, **unnamed):
    raise error
  monkeypatch.setattr(place, fail)


@pytest.mark.parametrize('command', cli._COMMANDS)
def test_a_fault_that_may_pass_has_its_code_in_each_command(
    monkeypatch, capsys, tmp_path, command):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'images').mkdir()
  words, place = WORK[command]
  for error, code in (
      (OSError(errno.EIO, os.strerror(errno.EIO), '/file'),
       exit_codes.MAY_PASS),
      (MemoryError(), exit_codes.MAY_PASS),
      (OSError(errno.EACCES, os.strerror(errno.EACCES), '/file'),
       exit_codes.REFUSED)):
    with monkeypatch.context() as patch, flagsaver.flagsaver():
      importlib.import_module(place.rpartition('.')[0])
      fails(patch, place, error)
      with pytest.raises(SystemExit) as ended:  # Some end their process.
        sys.exit(cli.main([command, *words]))
    assert ended.value.code == code
    assert len(capsys.readouterr().err.splitlines()) == 1


FULL = 'RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.'


@pytest.mark.parametrize('error, said', [
    (MemoryError(), 'The memory is full.'),
    (MemoryError('no 9 bytes'), 'The memory is full (no 9 bytes).'),
    (jax.errors.JaxRuntimeError(f'{FULL}\nMore.'),
     f'The memory of a device is full ({FULL}).')])
def test_a_memory_that_is_full_is_one_line(monkeypatch, capsys, error, said):
  fails(monkeypatch, 'fedjax_ssl.cli.places.runs_in', error)
  assert cli.main(['results', 'run']) == exit_codes.MAY_PASS
  assert capsys.readouterr().err == f'error: {said}\n'


def test_a_fault_of_the_program_shows_where_it_is(monkeypatch):
  fails(monkeypatch, 'fedjax_ssl.cli.places.runs_in', RuntimeError('ours'))
  with pytest.raises(RuntimeError, match='ours'):
    cli.main(['results', 'run'])


def _raised(behind: Exception, hidden: bool) -> ValueError:
  try:
    try:
      raise behind
    except OSError:
      if hidden:
        raise ValueError('refused') from None
      raise ValueError('refused')  # noqa: B904
  except ValueError as error:
    return error


def test_a_fault_behind_an_error_decides_unless_it_is_hidden():
  fault = OSError(errno.EIO, 'a fault')
  assert exit_codes.of(_raised(fault, hidden=False)) == exit_codes.MAY_PASS
  assert exit_codes.of(_raised(fault, hidden=True)) == exit_codes.REFUSED


def _lines(path: pathlib.Path) -> None:
  with table.named(path):
    table.lines(path)


@pytest.mark.parametrize('read', [
    datasets.files.read_npz, _lines, model_file.read,
    lambda path: data.load_partition(path, 9, 2)])
def test_a_file_that_cannot_be_read_now_may_be_read_later(
    monkeypatch, tmp_path, read):
  path = tmp_path / 'x.npz'
  path.touch()
  for number, code in ((errno.EIO, exit_codes.MAY_PASS),
                       (errno.EACCES, exit_codes.REFUSED)):
    with monkeypatch.context() as patch:
      fails(patch, 'builtins.open', OSError(number, os.strerror(number)))
      with pytest.raises(ValueError) as refused:
        read(path)
    assert exit_codes.of(refused.value) == code


@pytest.mark.parametrize('name', settings.SETTINGS)
def test_a_setting_has_a_script_that_cites_and_shows_it(name):
  found = settings.SETTINGS[name]
  assert {*found.defaults} <= {*config.OPTIONS}
  text = (launcher.EXPERIMENTS / f'{name}.py').read_text()
  assert f"cli.run_setting('{name}')" in text
  assert f'python experiments/{name}.py' in text
  first = re.sub(r'\s+', ' ', text.split('"""')[1]).strip()
  assert first.startswith(found.about[:60])


def test_an_interrupt_of_a_command_is_one_line(monkeypatch, capsys):
  def interrupted(words):
    raise KeyboardInterrupt
  monkeypatch.setattr('fedjax_ssl.cli.results.main', interrupted)
  monkeypatch.setattr(sys, 'argv', ['fedjax-ssl', 'results', 'runs/a'])
  assert cli.main() == 130
  assert capsys.readouterr().err == 'Ended by SIGINT.\n'
  with pytest.raises(KeyboardInterrupt):  # A program that calls it may go on.
    cli.main(['results', 'runs/a'])
