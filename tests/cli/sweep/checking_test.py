"""What a run would refuse before its data is refused before anything runs."""
from __future__ import annotations

import errno
import io
import json
import sys

from absl.testing import flagsaver
import pytest

from fedjax_ssl.cli import exit_codes, sweep
from fedjax_ssl.cli.sweep import grid

SETTING = 'setting: digits_dirdir'
# By flags of a grid: words of the error.
BAD = {
    ('--lr_schedule=cosine | linaer',): (
        "--lr_schedule=linaer: lr_schedule 'linaer' is unknown. Did you mean "
        "'linear'? Allowed: "),
    ('--model=cnnn',): "--model=cnnn: model 'cnnn' is unknown. Did you mean",
    ('--aggregator=medan',): "aggregator 'medan' is unknown. Did you mean",
    ('--method=uda | fixmatch(treshold=.3)',): (
        "--method=fixmatch(treshold=.3): method 'fixmatch' has no knob "
        "'treshold'. Did you mean 'threshold'?"),
    ('--method=fixmatch(threshold=7)',): 'threshold must be',
    ('--method=fixmatch | feddure', '--labels_at=clients | server'): (
        '--method=feddure: --labels_at=server: give clients'),
    ('--method=fixmatch | fedlabel', '--aggregator=median | trimmed_mean'): (
        '--method=fedlabel: this has an aggregation of its own'),
    ('--method=fixmatch', '--attack=label_flip', '--labels_at=server'): (
        '--labels_at=server: no client has labels to flip'),
    ('--num_labeled_clients=2',): (
        '--num_labeled_clients=2: here labels are dealt to all clients'),
    ('--labeled_fraction=.1', '--labels_per_class=3'): 'give one of them',
    ('--cohort_size=10 | 30',): '--cohort_size=30 and --num_clients=20: ',
    ('--dirichlet=shares',): '--dirichlet=shares: only cross_device',
    ('--method=./nowhere.py:mine',): 'there is no file ',
    ('--method={mine}:fast(k=1) | {mine}:slow',): "mine.py has no 'slow'. It",
    ('--import={mine}', '--method=named | nmaed'): "method 'nmaed' is unknown",
}
MINE = """import fedjax_ssl
print('error: this is printed when it is imported')

@fedjax_ssl.METHODS.register('{name}')
def fast(task, *, k: int = 1):
  raise RuntimeError('only a run builds it')
"""


@pytest.fixture
def mine(tmp_path):
  file = tmp_path / 'mine.py'
  file.write_text(MINE.format(name='named'))
  return file


def refused(capfd, out, *lines, options=('--dry_run',)):
  """Returns the error of a sweep that starts nothing."""
  assert sweep.main([f'--out={out}', *options, '--', *lines]) == 2
  printed, said = capfd.readouterr()
  assert not printed and not out.exists()
  assert said.startswith('error: ') and len(said.splitlines()) == 1
  return said


@pytest.mark.parametrize('flags', BAD)
def test_each_name_and_knob_is_checked(tmp_path, mine, capfd, flags):
  lines = [flag.replace('{mine}', str(mine)) for flag in flags]
  said = refused(capfd, tmp_path / 'out', SETTING, 'seeds: 0 1', *lines)
  assert said.startswith('error: digits_dirdir: ') and BAD[flags] in said


def test_so_it_is_before_runs_start(tmp_path, capfd):
  said = refused(capfd, tmp_path / 'out', SETTING, '--weak=none | nnoe',
                 options=[])
  assert "weak 'nnoe' is unknown" in said


def test_a_flagfile_with_a_wrong_name_is_named(tmp_path, capfd):
  file = tmp_path / 'digits_dirdir.a.flags'
  file.write_text('--strong=ra_cm\n')
  said = refused(capfd, tmp_path / 'out', f'flagfile: {file}')
  assert said.startswith(f'error: {file}: --strong=ra_cm: ')


@pytest.mark.parametrize('lines', [
    ['--import={mine} | {other}', '--method=named(k=2) | feddure'],
    ['--method={mine}:fast | {other}:fast(k=2) | feddure']])
def test_what_runs_would_take_is_taken(tmp_path, mine, capfd, lines):
  """Own code too, where two files register one name for two runs."""
  other = tmp_path / 'other.py'
  other.write_text(MINE.format(name='named'))
  lines = [line.format(mine=mine, other=other) for line in lines]
  out = f'--out={tmp_path / "out"}'
  more = ['--model=cnn(width=4)', '--strong=ra_mc(cutout=2)']
  assert sweep.main([out, '--dry_run', '--', SETTING, *lines, *more]) == 0
  printed, said = capfd.readouterr()
  assert printed.count('fedjax_ssl train') > 2 and not said


def test_what_fits_some_data_is_taken(tmp_path, capfd):
  lines = ['--labels_at=server', '--num_labeled_clients=2',
           '--method=fixmatch | fedavg', '--aggregator=median',
           '---', SETTING, '--num_labeled_clients=20', '--attack=label_flip',
           '--method=uda | softmatch', '--server_optimizer=adam',
           '---', SETTING, '--labels_at=server',
           "--method=fedmatch(learn='psi')"]
  out = f'--out={tmp_path / "out"}'
  assert sweep.main([out, '--dry_run', '--', SETTING, *lines]) == 0
  assert capfd.readouterr().out.count('fedjax_ssl train') == 5


def test_what_one_cell_imports_is_unknown_in_another(tmp_path, mine, capfd):
  mine.write_text('import fedjax_ssl\n\n@fedjax_ssl.MODELS.register("named")\n'
                  'def named(**unused):\n  pass\n')
  lines = [SETTING, f'--import={mine}', '--model=named']
  out = tmp_path / 'out'
  assert sweep.main([f'--out={out}', '--dry_run', '--', *lines]) == 0
  capfd.readouterr()
  said = refused(capfd, out, *lines, '---', SETTING, '--model=named | cnn')
  assert "model 'named' is unknown" in said


def test_a_script_may_register_names_but_knobs_are_known(tmp_path, capfd):
  script = tmp_path / 'mine.py'
  script.write_text('from fedjax_ssl import cli\n'
                    'cli.run_setting("digits_dirdir")\n')
  out = tmp_path / 'out'
  said = refused(capfd, out, f'script: {script}', '--method=uda(x=1)')
  assert "method 'uda' has no knob 'x'" in said
  # The script's own default may be larger than this cohort.
  assert sweep.main([f'--out={out}', '--dry_run', '--', f'script: {script}',
                     '--method=of_the_script', '--cohort_size=90']) == 0


def test_cells_that_differ_in_seeds_are_checked_once(tmp_path, monkeypatch):
  from fedjax_ssl.cli.sweep import checking
  asked = []

  def run(*args, **kwargs):
    asked.append(kwargs['input'])
    raise OSError('no such interpreter')
  monkeypatch.setattr(checking.subprocess, 'run', run)
  lines = [SETTING, 'seeds: ' + ' '.join(map(str, range(100))),
           '--learning_rate=0.1 | 0.2']
  checking.check('python', tmp_path, grid.parse('\n'.join(lines)), {})
  assert len(asked) == 1
  assert asked[0].count('--learning_rate=0.1') == 1
  assert 'seeds' not in asked[0]


@pytest.mark.parametrize('fault', [
    OSError(errno.EIO, 'a fault'), MemoryError()])
@pytest.mark.parametrize('part', ['_own_code', '_check'])
def test_a_fault_that_may_pass_refuses_no_cell_and_the_others_are_checked(
    monkeypatch, capsys, fault, part):
  from fedjax_ssl.cli.sweep import checking
  real = getattr(checking, part)
  monkeypatch.setattr(checking.child, 'end_with_parent', lambda: None)
  def fails_first(*args):
    monkeypatch.setattr(checking, part, real)
    raise fault
  def check(*cells):
    monkeypatch.setattr(checking, part, fails_first)
    monkeypatch.setattr(sys, 'stdin', io.StringIO(json.dumps(
        [[words[0], SETTING.partition(': ')[2], words] for words in cells])))
    with flagsaver.flagsaver():
      return checking.main()
  assert check(['--alpha=1'], ['--alpha=2']) == 0
  with pytest.raises(SystemExit) as ended:
    check(['--alpha=1'], ['--method=uda(x=1)'])
  assert ended.value.code == exit_codes.REFUSED
  assert "method 'uda' has no knob 'x'" in capsys.readouterr().err


def test_a_fault_that_stays_refuses_the_cell(capsys):
  from fedjax_ssl.cli.sweep import checking
  with pytest.raises(SystemExit) as ended, checking._refusing('mine'):
    raise OSError(errno.EACCES, 'a fault')
  assert ended.value.code == exit_codes.REFUSED
  assert 'error: mine: ' in capsys.readouterr().err
