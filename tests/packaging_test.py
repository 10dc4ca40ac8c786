"""The package says truly what it is, what it needs and what it contains."""
from __future__ import annotations

import ast
import importlib.util
import os
import pathlib
import re
import runpy
import subprocess
import sys
import sysconfig

from packaging import requirements, version
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXTRAS = {'test', 'tfds', 'tensorboard', 'bench', 'text', 'tpu', 'cuda', 'dev',
          'privacy', 'wandb', 'mlflow', 'report'}
# Import names that differ from the name of the distribution that brings them.
DISTRIBUTIONS = {
    'PIL': 'pillow', 'absl': 'absl-py', 'array_record': 'array-record',
    'jaxlib': 'jax', 'ml_dtypes': 'jax', 'mlflow': 'mlflow-skinny',
    'orbax': 'orbax-checkpoint',
    'sklearn': 'scikit-learn',
    'xdist': 'pytest-xdist',
    'tensorflow_datasets': 'tensorflow-datasets', 'yaml': 'pyyaml'}
# One distribution for each platform.
ALTERNATIVES = {'tensorflow': {'tensorflow', 'tensorflow-cpu'}}
OWN = {'fedjax_ssl', 'experiments', 'launch', 'tests'}


def _setup():
  spec = importlib.util.spec_from_file_location('setup', ROOT / 'setup.py')
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


SETUP = _setup()


def _names(lines):
  return {_plain(requirements.Requirement(x).name) for x in lines}


def _plain(name):
  return re.sub('[-_.]+', '-', name).lower()


CORE = _names(SETUP.REQUIRES)
DECLARED = CORE.union(*map(_names, SETUP.EXTRAS.values()))


def _tracked():
  """Files that a checkout holds, or would after the next commit."""
  done = subprocess.run(
      ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'],
      cwd=ROOT, capture_output=True, text=True, check=False)
  if done.returncode:
    pytest.skip('not a git checkout')
  paths = [ROOT / name for name in done.stdout.split('\0') if name]
  return [path for path in paths if path.is_file()]


def _sources(folder):
  return sorted((ROOT / folder).rglob('*.py'))


def _undeclared(folder, declared):
  """(file, import name) of imports from outside that nothing declares."""
  local = OWN | {path.stem for path in _sources(folder)}
  local |= {path.name for path in (ROOT / folder).rglob('*') if path.is_dir()}
  known = local | set(sys.stdlib_module_names)
  return [
      (str(path.relative_to(ROOT)), name)
      for path in _sources(folder)
      for name in sorted(_imports(path.read_text('utf-8')) - known)
      if not ALTERNATIVES.get(name, {_plain(DISTRIBUTIONS.get(name, name))})
      & declared]


def _imports(text):
  """First parts of the modules that a source imports by absolute name."""
  found = set()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Import):
      found |= {alias.name.partition('.')[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and not node.level:
      found.add((node.module or '').partition('.')[0])
  return found


def test_version_is_the_same_everywhere():
  import fedjax_ssl
  assert fedjax_ssl.__version__ == SETUP.version()
  cited = re.search(r'^version: (\S+)$',
                    (ROOT / 'CITATION.cff').read_text('utf-8'), re.MULTILINE)
  assert cited and cited.group(1) == SETUP.version()
  assert not version.Version(SETUP.version()).is_devrelease


def test_extras_have_their_documented_names():
  assert set(SETUP.EXTRAS) == EXTRAS


def test_files_beside_the_sources_are_installed(monkeypatch):
  given: dict = {}
  monkeypatch.setattr('setuptools.setup', given.update)
  monkeypatch.chdir(ROOT)
  runpy.run_path(str(ROOT / 'setup.py'), run_name='__main__')
  monkeypatch.undo()
  installed = {path for package, patterns in given['package_data'].items()
               for pattern in patterns
               for path in (ROOT / package.replace('.', '/')).glob(pattern)}
  others = {path for path in _tracked() if path.is_relative_to(
      ROOT / 'fedjax_ssl') and path.suffix != '.py'}
  assert ROOT / 'fedjax_ssl' / 'py.typed' in installed
  assert not others - installed


def test_every_requirement_has_a_range():
  lines = [*SETUP.REQUIRES, *(x for e in SETUP.EXTRAS.values() for x in e)]
  for line in lines:
    operators = {x.operator for x in requirements.Requirement(line).specifier}
    assert operators == {'=='} or '>=' in operators, line


def test_the_lock_is_exact_and_within_the_ranges():
  locked = {}
  for line in (ROOT / 'requirements.lock').read_text('utf-8').splitlines():
    if line and not line.startswith('#'):
      match = re.fullmatch(r'([A-Za-z0-9_.-]+)==([A-Za-z0-9_.]+)', line)
      assert match, line
      locked[_plain(match.group(1))] = match.group(2)
  extras = [SETUP.EXTRAS[name] for name in ('dev', 'tfds')]
  for line in [*SETUP.REQUIRES, *sum(extras, [])]:
    wanted = requirements.Requirement(line)
    if _plain(wanted.name) == 'tensorflow':
      continue  # For platforms that the lock was not made on.
    assert locked[_plain(wanted.name)] in wanted.specifier, line


def test_the_library_imports_only_what_an_extra_or_the_core_declares():
  assert not _undeclared('fedjax_ssl', DECLARED)


def test_experiments_import_only_what_is_declared():
  # Except the rival systems of the benchmarks, which have their own setup.
  assert not [x for x in _undeclared('experiments', DECLARED)
              if not x[0].startswith('experiments/benchmarks/')]


def test_tests_import_only_what_is_declared():
  assert not _undeclared('tests', DECLARED)


def test_what_the_library_imports_at_the_top_is_in_the_core():
  missing = []
  for path in _sources('fedjax_ssl'):
    tree = ast.parse(path.read_text('utf-8'))
    top = ast.Module([x for x in tree.body if isinstance(
        x, ast.Import | ast.ImportFrom)], [])
    for name in _imports(ast.unparse(top)) - OWN - set(
        sys.stdlib_module_names):
      if _plain(DISTRIBUTIONS.get(name, name)) not in CORE:
        missing.append((str(path.relative_to(ROOT)), name))
  assert not missing


def test_an_undeclared_import_is_found():
  assert _imports('import a.b\nfrom c import d\nfrom . import e') == {'a', 'c'}
  assert ('setup.py', 'setuptools') not in _undeclared('fedjax_ssl', DECLARED)
  assert _undeclared('fedjax_ssl', DECLARED - {'jax'})


def test_every_folder_of_the_library_is_a_package():
  # Else the wheel would leave it out.
  folders = {path.parent for path in _sources('fedjax_ssl')}
  assert not [str(x) for x in folders if not (x / '__init__.py').exists()]


def test_an_editable_install_is_a_path():
  """Type checkers and editors do not see what an import hook finds."""
  places = list(pathlib.Path(sysconfig.get_path('purelib')).glob(
      '__editable__.fedjax_ssl-*.pth'))
  if not places:
    pytest.skip('the library is not installed as editable')
  line, = places[0].read_text().split('\n')[:1]
  assert (pathlib.Path(line) / 'fedjax_ssl' / 'py.typed').exists()


def test_no_file_names_a_machine_or_a_registry():
  # Put together from parts, so that this file does not contain them.
  hosts = ['pypi' + '.org', 'pythonhosted' + '.org', 'npmjs' + '.org',
           'deb.debian' + '.org', 'registry.' + 'npm']
  paths = ['/' + folder + '/' for folder in ('work', 'root', 'tmp', 'opt')]
  at_start = re.compile(
      r'(?<![\w.$}~>-])(' + '|'.join(paths) + r')|/home/\w|/Users/\w')
  found = []
  for path in _tracked():
    try:
      text = path.read_text('utf-8')
    except UnicodeDecodeError:
      continue  # Pictures and the like.
    for number, line in enumerate(text.splitlines(), 1):
      if any(host in line for host in hosts) or at_start.search(line):
        found.append(f'{path.relative_to(ROOT)}:{number}: {line.strip()[:60]}')
  assert not found


def test_no_large_file():
  large = [str(x.relative_to(ROOT)) for x in _tracked()
           if x.stat().st_size > 2**20]
  assert not large


def test_scripts_can_be_executed():
  assert os.access(ROOT / '.ci' / 'run', os.X_OK)


@pytest.mark.parametrize('code, devices', [
    ('import sys; print(sys.argv[1])', 1),
    ('import jax; print(len(jax.devices()))', 2),
])
def test_a_subprocess_gets_its_arguments_and_devices(run_python, code, devices):
  assert run_python(code, str(devices), devices=devices) == f'{devices}\n'


def test_a_failing_subprocess_fails_the_test(run_python):
  with pytest.raises(AssertionError, match='exit 3'):
    run_python('raise SystemExit(3)')
