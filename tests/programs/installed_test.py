"""A package that pip installs adds to every program by its entry points."""
from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

import fedjax_ssl
from tests.cli import launcher

ENTRIES = {
    'methods': 'doubtful', 'models': 'Tiny', 'aggregators': 'shrunk',
    'weak_views': 'darker', 'strong_views': 'darkest', 'datasets': 'stripes'}
PROJECT = """
[build-system]
requires = []
build-backend = 'backend'
backend-path = ['.']

[project]
name = 'their-ideas'
version = '0.3'

[project.entry-points.'fedjax_ssl.settings']
halves = 'their_ideas.deals:halves'
""" + ''.join(f"""
[project.entry-points.'fedjax_ssl.{group}']
{name.lower()} = 'their_ideas:{name}'
""" for group, name in ENTRIES.items())
CODE = '''
    from flax import linen as nn
    import jax
    import numpy as np

    import fedjax_ssl
    from fedjax_ssl import aggregation


    def doubtful(task, *, threshold: float = 0.3):
      """Is FixMatch with a low bar."""
      return fedjax_ssl.make_method(f'fixmatch(threshold={threshold})', task)


    class Tiny(nn.Module):
      num_classes: int
      width: int = 8

      @nn.compact
      def __call__(self, x):
        x = nn.relu(nn.Dense(self.width)(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.num_classes)(x)


    def shrunk(stacked, weights, *, scale: float = 1.0):
      """Takes the mean, made smaller."""
      return jax.tree.map(lambda x: scale * x,
                          aggregation.weighted_mean(stacked, weights))


    def darker():
      """Is half as bright."""
      return lambda key, images: images // 2


    def darkest(*, by: int = 4):
      """Is far less bright."""
      return lambda key, images: images // by


    def stripes():
      """Has rows and columns."""
      labels = np.arange(400, dtype=np.int32) % 2
      images = np.zeros((400, 8, 8, 1), np.uint8)
      images[labels == 0, ::2] = 200
      images[labels == 1, :, ::2] = 200
      return {'train': (images[:300], labels[:300]),
              'test': (images[300:], labels[300:])}
    '''
DEALS = """
    import numpy as np

    import fedjax_ssl


    @fedjax_ssl.register_setting(
        'halves', 'Every second row has a label.', num_clients=4,
        cohort_size=2)
    def halves(rng, labels, pool, options):
      rows = np.arange(labels.size)
      owner = np.where(pool, rows % options.num_clients, -1).astype(np.int32)
      return (np.where(rows % 8 < 4, owner, -1),
              np.where(rows % 8 < 4, -1, owner))
    """
# Not every environment has a backend that makes wheels.
BACKEND = """
    import pathlib
    import tomllib
    import zipfile


    def build_wheel(folder, config_settings=None, metadata_directory=None):
      project = tomllib.loads(
          pathlib.Path('pyproject.toml').read_text())['project']
      stem = f"{project['name'].replace('-', '_')}-{project['version']}"
      points = ''.join(
          f'[{group}]\\n' + ''.join(f'{k} = {v}\\n' for k, v in of.items())
          for group, of in project['entry-points'].items())
      files = {
          **{str(path): path.read_text()
             for path in pathlib.Path().glob('*/*.py')},
          f'{stem}.dist-info/METADATA':
              'Metadata-Version: 2.1\\n' f"Name: {project['name']}\\n"
              f"Version: {project['version']}\\n",
          f'{stem}.dist-info/WHEEL':
              'Wheel-Version: 1.0\\nGenerator: a test\\n'
              'Root-Is-Purelib: true\\nTag: py3-none-any\\n',
          f'{stem}.dist-info/entry_points.txt': points}
      files[f'{stem}.dist-info/RECORD'] = ''.join(
          f'{name},,\\n' for name in [*files, f'{stem}.dist-info/RECORD'])
      name = f'{stem}-py3-none-any.whl'
      with zipfile.ZipFile(pathlib.Path(folder) / name, 'w') as wheel:
        for path, text in files.items():
          wheel.writestr(path, text)
      return name
    """
TINY = ('--num_clients=4', '--cohort_size=2', '--local_steps=1', '--seeds=0',
        '--unlabeled_batch=20', '--num_rounds=2', '--eval_every=2',
        '--nobounds', '--num_devices=1', '--lr_schedule=constant')
THEIRS = ('--model=tiny(width=3)', '--aggregator=shrunk(scale=0.5)',
          '--weak=darker', '--strong=darkest(by=3)')


@pytest.fixture(scope='module')
def site(tmp_path_factory) -> pathlib.Path:
  """A folder into which pip has installed the package, without a network."""
  project = tmp_path_factory.mktemp('project')
  for name, text in {'pyproject.toml': PROJECT, 'backend.py': BACKEND,
                     'their_ideas/__init__.py': CODE,
                     'their_ideas/deals.py': DEALS}.items():
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_text(textwrap.dedent(text))
  found = tmp_path_factory.mktemp('site')
  done = subprocess.run(
      [sys.executable, '-m', 'pip', 'install', '--quiet', '--no-index',
       '--no-build-isolation', '--no-deps', '--no-compile',
       '--disable-pip-version-check', f'--target={found}', str(project)],
      capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  return found


def call(site: pathlib.Path | None, *words: str, place: pathlib.Path
         ) -> subprocess.CompletedProcess[str]:
  """`fedjax-ssl` in a process that has the package, or without `site` not."""
  paths = [str(launcher.EXPERIMENTS.parent), *([str(site)] if site else [])]
  return subprocess.run(
      [sys.executable, '-P', '-m', 'fedjax_ssl', *words], cwd=place,
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(paths)},
      capture_output=True, text=True, check=False)


@pytest.fixture(scope='module')
def trained(site, tmp_path_factory) -> pathlib.Path:
  """A folder with the run `first`, of the package's method on digits."""
  folder = tmp_path_factory.mktemp('runs')
  done = call(site, 'train', 'digits_dirdir', *TINY, *THEIRS,
              '--method=doubtful(threshold=0.2)', '--workdir=first',
              place=folder)
  assert done.returncode == 0, done.stderr
  assert ('doubtful(threshold=0.2), shrunk(scale=0.5): '
          'round 2/2') in done.stderr
  return folder


def test_what_is_installed_is_trained_and_repeated(site, trained):
  stored = json.loads((trained / 'first' / 'config.json').read_text())
  assert stored['facts']['choices']['method']['knobs'] == {'threshold': 0.2}
  done = call(site, 'repeat', 'first', '--workdir=again', place=trained)
  assert done.returncode == 0, done.stderr
  first, again = ((trained / name / 'metrics.jsonl').read_bytes()
                  for name in ('first', 'again'))
  assert first == again and len(first.splitlines()) == 1


def test_a_setting_and_a_set_that_are_installed(site, trained):
  done = call(site, 'train', 'halves', *TINY, '--dataset=stripes',
              '--model=linear', '--weak=none', '--strong=none',
              '--labels_per_class=5', '--workdir=halves', place=trained)
  assert done.returncode == 0, done.stderr
  assert ('143 labeled and 142 unlabeled rows; 100 test and 15 validation '
          'rows; 2 classes') in done.stderr
  listed = call(site, 'list', '--json', place=trained)
  assert listed.returncode == 0 and 'left out' not in listed.stderr
  groups = json.loads(listed.stdout)
  for group, name in {
      'methods': 'doubtful', 'models': 'tiny', 'aggregators': 'shrunk',
      'weak': 'darker', 'strong': 'darkest', 'datasets': 'stripes',
      'settings': 'halves'}.items():
    entry, = (e for e in groups[group] if e['name'] == name)
    if group not in ('datasets', 'settings'):
      assert entry['sources'] == ['their_ideas']
    assert 'Sentinel' not in entry['summary']


def test_without_the_package_a_run_names_it(trained):
  for words in (('repeat', 'first', '--workdir=other'), ('evaluate', 'first')):
    done = call(None, *words, place=trained)
    assert done.returncode == 2, done.stderr
    line, = done.stderr.splitlines()
    assert line.startswith('error: ') and 'their-ideas 0.3' in line
  assert not (trained / 'other').exists()
  with pytest.raises(ValueError, match='the package their-ideas 0.3, which is'):
    fedjax_ssl.load(trained / 'first')
