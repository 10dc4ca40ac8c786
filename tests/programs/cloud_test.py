"""The cloud scripts say the right words to gcloud and sky.

Stand-ins on the PATH record what they are told; ssh runs its command here, in
a home of its own, so that quoting is tried for real.
"""
from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import stat
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TPU = ROOT / 'launch' / 'tpu_vm.sh'
SKY = ROOT / 'launch' / 'sky_sweep.sh'
PLACE = ['--project=p', '--zone=z']
# A first line that names the interpreter fails where its path has a space: the
# shell starts it, and Python reads the shell's line as a string.
START = f"""#!/bin/sh
'''exec' '{sys.executable}' "$0" "$@"
' '''
"""
STAND_IN = START + r"""
import os, pathlib, subprocess, sys
here = pathlib.Path(__file__).parent
with open(here / 'said', 'a') as file:
  file.write('\0'.join([pathlib.Path(__file__).name, *sys.argv[1:]]) + '\1')
if 'describe' in sys.argv:
  states = (here / 'states').read_text().split()
  if states[0] == 'NONE':
    (here / 'states').write_text(' '.join(states[1:]))
    sys.exit('NOT_FOUND')
  (here / 'states').write_text(' '.join(states[1:] or states))
  print(states[0])
for verb in ('create', 'delete', '--recurse'):
  file = here / f'refuse {verb}'
  if verb in sys.argv and file.exists() and int(file.read_text()):
    file.write_text(str(int(file.read_text()) - 1))
    sys.exit(1)
for arg in sys.argv:
  if arg.startswith('--command=') and 'ssh' in sys.argv:
    sys.exit(subprocess.run(['bash', '-c', arg.split('=', 1)[1]],
                            cwd=here / 'home').returncode)
"""


@pytest.fixture
def cloud(tmp_path, monkeypatch):
  """A folder of stand-ins, first on the PATH, and what they were told."""
  for name in ('gcloud', 'sky'):
    _program(tmp_path / name, STAND_IN)
  bin_ = tmp_path / 'home' / 'fedjax_ssl' / '.venv' / 'bin'
  bin_.mkdir(parents=True)
  _program(bin_ / 'python', START + 'import os, sys\n'
           'open("words", "w").write("\\0".join(sys.argv[1:]))\n'
           'sys.exit("fail" in sys.argv)\n')
  monkeypatch.setenv('PATH', f'{tmp_path}{os.pathsep}{os.environ["PATH"]}')
  for name in ('PROJECT', 'ZONE', 'TPU', 'TYPE', 'IMAGE', 'SPOT', 'EXTRAS'):
    monkeypatch.delenv(name, raising=False)
  return tmp_path


def _program(path, text):
  path.write_text(text)
  path.chmod(path.stat().st_mode | stat.S_IXUSR)


def said(cloud) -> list[list[str]]:
  file = cloud / 'said'
  text = file.read_text() if file.exists() else ''
  return [line.split('\0') for line in text.split('\1') if line]


def call(*words, code=0, script=TPU):
  done = subprocess.run(
      [str(script), *([*PLACE] if script == TPU else []), *words], cwd=ROOT,
      capture_output=True, text=True, timeout=300, check=False)
  assert done.returncode == code, done.stdout + done.stderr
  return done


@pytest.mark.parametrize('script', [TPU, SKY, ROOT / '.ci' / 'run'],
                         ids=lambda p: p.name)
def test_scripts_are_sound(script):
  subprocess.run(['bash', '-n', str(script)], check=True)
  assert os.access(script, os.X_OK)
  shellcheck = shutil.which('shellcheck') or shutil.which(
      'shellcheck', path=os.path.dirname(sys.executable))
  if not shellcheck:
    pytest.skip('shellcheck is not installed')
  done = subprocess.run([shellcheck, str(script)], capture_output=True,
                        text=True, check=False)
  assert not done.returncode, done.stdout


def test_create_asks_for_a_queued_resource(cloud):
  call('--tpu=mine', '--type=v6e-8', '--image=v2-alpha-tpuv6e', 'create')
  call('--spot=yes', 'create')
  first, second = said(cloud)
  assert first == [
      'gcloud', 'compute', 'tpus', 'queued-resources', 'create', 'mine',
      *PLACE, '--node-id=mine', '--accelerator-type=v6e-8',
      '--runtime-version=v2-alpha-tpuv6e']
  assert second[5] == 'fedjax-ssl' and second[-1] == '--spot'


def test_wait_looks_until_the_machine_is_there(cloud):
  (cloud / 'states').write_text('ACCEPTED WAITING_FOR_RESOURCES ACTIVE')
  call('--poll=0', 'wait')
  assert len(said(cloud)) == 3
  assert {words[4] for words in said(cloud)} == {'describe'}
  (cloud / 'states').write_text('ACCEPTED FAILED')
  assert 'is FAILED' in call('--poll=0', 'wait', code=2).stderr


def test_install_copies_the_checkout_to_all_workers(cloud):
  script = 'tar xf fedjax_ssl.tar'
  (cloud / 'home' / 'fedjax_ssl.tar').write_text('no archive')
  call('install', code=2)  # tar's own code: `set -e` holds on the worker.
  copy, shell = said(cloud)
  assert copy[3:5] == ['tpu-vm', 'scp']
  assert copy[5].endswith('/fedjax_ssl.tar')
  assert copy[6:] == ['fedjax-ssl:fedjax_ssl.tar', *PLACE, '--worker=all']
  assert not pathlib.Path(copy[5]).exists()  # Nothing is left behind here.
  assert shell[3:5] == ['tpu-vm', 'ssh'] and '--worker=all' in shell
  assert script in shell[-1] and ".[tpu]'" in shell[-1]
  assert '-c requirements.lock' in shell[-1]


def test_run_keeps_every_word_whole(cloud):
  words = ['experiments/digits_dirdir.py', '--workdir=runs/a b',
           "--method=fixmatch(threshold=0.9, labeler='global')", '$HOME', '*']
  call('run', 'python', *words)
  assert (cloud / 'home' / 'fedjax_ssl' / 'words').read_text().split(
      '\0') == words
  assert '--worker=all' in said(cloud)[0]
  call('run', 'python', 'fail', code=1)


def test_a_pod_takes_one_run_over_all_hosts(cloud):
  pod = '--type=v5litepod-16'
  call(pod, 'create')
  for words in ('experiments/digits_dirdir.py',), ('-c', 'print()'), (
      'experiments/digits_dirdir.py', '--distributed', '--bounds'), (
          'experiments/check_quickstart.py', 'runs/a'), (
              '-m', 'fedjax_ssl', 'train', 'digits_dirdir'), (
                  '-m', 'fedjax_ssl', 'report', 'runs/a', '--out=report'):
    call(pod, 'run', 'python', *words)
  create, *runs = said(cloud)
  assert '--accelerator-type=v5litepod-16' in create
  assert all('--worker=all' in words for words in runs)
  assert [words[-1].count('--distributed') for words in runs] == [
      1, 0, 1, 0, 1, 0]
  call('run', 'python', 'experiments/digits_dirdir.py')  # One host.
  assert '--distributed' not in said(cloud)[-1][-1]


def test_fetch_and_delete(cloud, tmp_path):
  call('fetch', str(tmp_path / 'results'))
  call('delete')
  copy, delete = said(cloud)
  assert copy[3:] == ['tpu-vm', 'scp', '--recurse',
                      'fedjax-ssl:fedjax_ssl/runs', str(tmp_path / 'results'),
                      *PLACE, '--worker=0']
  assert (tmp_path / 'results').is_dir()
  assert delete[3:] == ['queued-resources', 'delete', 'fedjax-ssl', *PLACE,
                        '--force', '--quiet']


def test_dry_run_prints_what_a_shell_could_run(cloud):
  printed = call('--dry_run', 'all', 'python', 'a b').stdout
  assert not said(cloud)
  lines = [subprocess.run(
      ['bash', '-c', f"printf '%s\\1' {line}"], capture_output=True, text=True,
      check=True).stdout.split('\1') for line in printed.splitlines()]
  verbs = [line[4] if line[0] == 'gcloud' else line[0] for line in lines]
  assert verbs == ['describe', 'create', 'describe', 'git', 'scp', 'ssh', 'ssh',
                   'mkdir', 'scp', 'delete']
  install, run = (line[-2] for line in lines if 'ssh' in line)
  assert install.startswith('--command=set -e\ntar xf fedjax_ssl.tar\n')
  assert 'python a\\ b' in run


def verbs(cloud) -> list[str]:
  return [words[4] for words in said(cloud)]


def everything(cloud, *words, code=0):
  """`all` with a checkout that is there and installs at once."""
  home = cloud / 'home'
  (home / 'src' / 'fedjax_ssl').mkdir(parents=True)
  subprocess.run(['tar', 'cf', str(home / 'fedjax_ssl.tar'), '-C',
                  str(home / 'src'), 'fedjax_ssl'], check=True)
  for name in ('python3.13', 'python3.12', 'python3.11'):
    _program(cloud / name, '#!/bin/sh\n')
  (cloud / 'states').write_text('NONE ACTIVE')
  return call('--poll=0', 'all', *words, code=code)


def test_all_goes_from_request_to_deletion(cloud):
  everything(cloud, 'python', 'x')
  assert verbs(cloud) == ['describe', 'create', 'describe', 'scp', 'ssh', 'ssh',
                          'scp', 'delete']
  assert (cloud / 'home' / 'fedjax_ssl' / 'runs').is_dir()


def test_the_machine_is_deleted_whatever_happens(cloud):
  (cloud / 'states').write_text('NONE FAILED')
  call('--poll=0', 'all', 'python', 'x', code=2)
  assert verbs(cloud) == ['describe', 'create', 'describe', 'delete']


def test_all_leaves_a_machine_alone_that_it_did_not_make(cloud):
  (cloud / 'states').write_text('ACTIVE')
  done = call('all', 'python', 'x', code=2)
  assert 'fedjax-ssl is there already' in done.stderr
  assert verbs(cloud) == ['describe']


def test_a_request_that_fails_deletes_nothing(cloud):
  (cloud / 'states').write_text('NONE')
  (cloud / 'refuse create').write_text('1')
  done = call('all', 'python', 'x', code=1)
  assert verbs(cloud) == ['describe', 'create']
  # It may have been taken nevertheless: how to look is said.
  assert 'queued-resources describe fedjax-ssl' in done.stderr


@pytest.mark.parametrize('word, code', [('x', 0), ('fail', 1)])
def test_results_are_fetched_again_and_the_code_is_that_of_the_run(
    cloud, word, code):
  (cloud / 'refuse --recurse').write_text('2')
  everything(cloud, 'python', word, code=code)
  assert verbs(cloud)[-4:] == ['scp', 'scp', 'scp', 'delete']


def test_a_machine_with_results_that_cannot_be_fetched_is_kept(cloud):
  (cloud / 'refuse --recurse').write_text('3')
  done = everything(cloud, 'python', 'x', code=1)
  assert verbs(cloud)[-4:] == ['ssh', 'scp', 'scp', 'scp']
  assert 'the machine is kept' in done.stderr
  helps = [shlex.split(x) for x in done.stderr.splitlines()
           if x.startswith('gcloud')]
  assert [words[4] for words in helps] == ['scp', 'delete']


def test_a_deletion_that_fails_is_not_passed_over(cloud):
  (cloud / 'refuse delete').write_text('1')
  done = everything(cloud, 'python', 'x', code=1)
  assert 'could not be deleted and costs' in done.stderr


@pytest.mark.parametrize('words, text', [
    (['--zones=a', 'create'], '--zones=a is no setting'),
    (['destroy'], 'destroy is no command'),
    (['run'], 'run needs a command'), (['create', 'x'], 'takes no words'),
    (['--spot=maybe', 'create'], '--spot=maybe'),
    (['--poll=x', 'wait'], '--poll=x'), (['--tpu=', 'create'], '--tpu='),
    (['--extras=a b;', 'install'], '--extras='),
    (['--tpu=my tpu', 'create'], '--tpu=my tpu must be'),
    (['--tpu=--quiet', 'delete'], '--tpu=--quiet must be'),
    (['--type=a;b', 'create'], '--type=a;b must be'),
    (['run', ''], 'run needs a command'), (['fetch', ''], 'name is empty'),
    (['--type=v4-16', 'run', 'fedjax-ssl', 'tables'], 'several hosts'),
    (['--type=v4-16', 'run', 'python', '-m', 'fedjax_ssl', 'bench', 'clients'],
     'several hosts'),
    (['--type=v4-16', 'run', 'python', 'experiments/bench.py', 'clients'],
     'several hosts'),
    (['--type=v4-16', 'run', 'bash', '-c', 'fedjax-ssl train x; sync'],
     'several hosts'),
    (['--type=v4-16', 'run', 'bash', '-c', 'python launch/sweep.py g.txt'],
     'run the grid'),
    (['--type=v4-16', 'run', 'bash', '-c', 'cd x; fedjax-ssl bench clients'],
     'run the grid'),
    (['--type=v4-16', 'run', 'make', 'quickstart'], 'run a copy'),
    (['--type=v4-16', 'run', 'bash', '-c', 'make quickstart'], 'run a copy'),
    (['--type=v4-16', 'run', 'python', 'experiments/benchmarks/growth.py'],
     'growth.py measures one'),
    (['run', '--dry_run', 'python'], '--dry_run: settings go before'),
    (['all', '--spot=yes', 'python'], '--spot=yes: settings go before'),
    (['fetch', '--dry_run'], '--dry_run: settings go before'),
    (['--type=v5litepod-16', 'run', 'python', 'launch/sweep.py', 'grid.txt'],
     'several hosts'),
    (['--type=v4-16', 'all', 'bash', '-c', 'python experiments/a.py; sync'],
     '--distributed')])
def test_wrong_words_are_refused(cloud, words, text):
  done = call(*words, code=2)
  assert text in done.stderr and len(done.stderr.splitlines()) == 1
  assert not said(cloud)


def test_project_and_zone_are_needed(cloud):
  done = subprocess.run([str(TPU), 'create'], capture_output=True, text=True,
                        check=False)
  assert done.returncode == 2 and '--project=' in done.stderr


@pytest.fixture
def grid_file():
  # The script takes files of the repository: any one that is there will do.
  return 'pyproject.toml'


def test_a_sweep_becomes_managed_jobs(cloud, grid_file):
  call(grid_file, '3', 'my-results', '--infra=gcp/us-west4', script=SKY)
  assert [words[:7] for words in said(cloud)] == [
      ['sky', 'jobs', 'launch', '--yes', '--detach-run', '--use-spot',
       f'--name=fedjax-ssl-{i}'] for i in range(3)]
  for i, words in enumerate(said(cloud)):
    assert words[7:] == [
        f'--env=GRID={grid_file}', f'--env=SHARD={i}/3',
        '--env=BUCKET=my-results', '--infra=gcp/us-west4',
        'launch/skypilot.yaml']
  printed = call('--dry_run', grid_file, '3', 'my-results',
                 '--infra=gcp/us-west4', script=SKY).stdout
  assert [shlex.split(x) for x in printed.splitlines()] == said(cloud)


@pytest.mark.parametrize('word', ['--help', '-h'])
def test_help_of_a_sweep_is_no_error(cloud, word):
  done = call(word, script=SKY)
  assert 'launch/sky_sweep.sh [--dry_run] GRID JOBS BUCKET' in done.stdout
  assert 'error' not in done.stdout + done.stderr and not done.stderr
  assert not said(cloud)


@pytest.mark.parametrize('words', [
    [], ['nowhere', '1', 'name'], ['pyproject.toml', '0', 'name'],
    ['pyproject.toml', '99999999999999999999', 'name'],
    ['launch/../../pyproject.toml', '1', 'name'],
    ['pyproject.toml', '1', 'name', '--dry_run'],
    ['pyproject.toml', '1', 'A B'], [str(ROOT / 'setup.py'), '1', 'name']])
def test_wrong_sweeps_are_refused(cloud, words):
  done = call(*words, code=2, script=SKY)
  assert done.stderr.startswith('error: ') and done.stderr.count('\n') == 1
  assert not said(cloud)


def test_a_part_that_is_not_started_is_named(cloud):
  _program(cloud / 'sky', '#!/bin/sh\ncase "$*" in *SHARD=1/3*) exit 7; esac\n')
  done = call('pyproject.toml', '3', 'name', code=2, script=SKY)
  assert 'job 1 was not started, the 1 before it were' in done.stderr


@pytest.mark.parametrize('script, words', [
    (TPU, [*PLACE, 'all', 'python']), (SKY, ['pyproject.toml', '1', 'name'])])
def test_a_missing_program_is_named(tmp_path, script, words):
  for name in ('bash', 'dirname', 'sed', 'rm'):
    (tmp_path / name).symlink_to(shutil.which(name))
  done = subprocess.run([str(script), *words], cwd=ROOT, check=False, text=True,
                        capture_output=True, env={'PATH': str(tmp_path)})
  assert 'there is no program' in done.stderr and done.returncode == 2


def test_the_job_runs_its_part_of_the_sweep(cloud):
  yaml = pytest.importorskip('yaml')
  job = yaml.safe_load((ROOT / 'launch' / 'skypilot.yaml').read_text())
  assert job['resources']['use_spot'] is True
  # What must be given is null, so that a launch without it is refused.
  assert {k for k, v in job['envs'].items() if v is None} == {'GRID', 'BUCKET'}
  mount, = job['file_mounts']
  for part in ('setup', 'run'):
    subprocess.run(['bash', '-n', '-c', job[part]], check=True)
  subprocess.run(
      ['bash', '-c', job['run']], cwd=cloud / 'home' / 'fedjax_ssl', check=True,
      env={**os.environ, 'GRID': 'my grid.txt', 'SHARD': '1/4'})
  assert (cloud / 'home' / 'fedjax_ssl' / 'words').read_text().split('\0') == [
      'launch/sweep.py', 'my grid.txt', f'--out={mount}/runs', '--shard=1/4']
