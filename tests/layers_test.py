"""Holds who may import whom: reads the source, runs none of it."""
from __future__ import annotations

import ast
from collections.abc import Iterator
import pathlib
import sys
from typing import NamedTuple

from absl.testing import absltest, parameterized

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = 'fedjax_ssl'

# What may be imported from elsewhere when a module is loaded; all that is
# heavier is imported inside the function that needs it.
LIGHT = {'jax', 'numpy', 'optax'}
HEAVY = {'PIL', 'array_record', 'dp_accounting', 'matplotlib', 'mlflow',
         'orbax', 'plotly', 'scipy', 'sklearn', 'tensorboardX',
         'tensorflow_datasets', 'torch', 'tqdm', 'transformers', 'wandb'}
# Modules of others that are called as one of ours.
OTHERS: set[str] = set()
LEAVES = ('aggregation', 'losses', 'privacy', 'sparse')

# Longest prefix that fits a module says what it may import of the package. A
# package may import itself unless its name ends with '!'.
LAYERS = {
    'arguments': (),
    'aggregation': ('arguments',),
    'losses': ('arguments',),
    'privacy': ('aggregation.algebra', 'arguments'),
    'sparse': (),
    'core': (),
    'data': ('core',),
    'ops': ('core.checks', 'core.conv_forms', 'core.disk'),
    'models': ('core.blame', 'core.checks', 'core.conv_forms', 'core.knobs',
               'core.registry', 'core.types', 'ops'),
    'methods!': ('core', *LEAVES, 'data.batching', 'models.gan',
                 'models.last_layer', 'models.projector', 'methods.parts'),
    # A method too long for one file is a package.
    **{f'methods.{name}': ('core', *LEAVES, 'data.batching', 'models.gan',
                           'models.last_layer', 'methods.parts')
       for name in ('parts', 'feddure', 'fedlabel', 'fedmatch', 'fedssl',
                    'fedtrinet', 'proxyfl')},
    'methods.__init__': ('core', 'methods'),
    # Seeds' federations are stacked there, for one program over all of them.
    'training': ('core', 'data.batching', 'data.federation', 'data.files',
                 '__version__'),
    'task': ('config', 'core', 'data', 'methods', 'models', *LEAVES),
    'finished': ('config', 'core', 'data.datasets', 'methods', 'task',
                 'training'),
    'testing': ('core', 'data', 'methods', 'models', 'ops', 'training'),
    'papers': ('core.disk', 'core.flag_kinds', 'core.registry'),
    'report': ('core.bounds', 'core.checks', 'core.disk', 'core.flag_kinds',
               'core.flagfile_lines', 'core.imports', 'core.registry',
               'core.run_files', 'papers', 'training'),
    'bench': ('core.checks', 'core.disk', 'core.imports', 'core.registry',
              'core.run_files', 'report', 'training'),
    'config': ('core.checks', 'core.conv_forms', 'core.imports', 'core.knobs',
               'core.registry', 'methods'),
    # What the programs and `fit` share: a run, from its setting to its end.
    'running': ('config', 'core', 'data', 'finished', 'methods', 'ops',
                'report', 'task', 'training'),
    'fitting': ('config', 'core', 'data', 'finished', 'methods', 'report',
                'running', 'task', 'training'),
    'cli': ('bench', 'config', 'core', 'data', 'finished', 'methods', 'models',
            'papers', 'report', 'running', 'task', 'training'),
    '__main__': ('cli',),
    '__init__': ('bench', 'cli', 'config', 'core', 'data', 'finished',
                 'fitting', 'methods', 'models', 'ops', 'papers', 'report',
                 'running', 'task', 'testing', 'training', *LEAVES),
}


class Import(NamedTuple):
  name: str  # Dotted, relative ones made absolute.
  lazy: bool  # Inside a function.


def imports(source: str, module: str) -> Iterator[Import]:
  """Every import of a module, wherever it stands."""
  folder = module.split('.')[:-1]

  def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
      if isinstance(child, ast.Import):
        for alias in child.names:
          yield Import(alias.name, lazy)
      elif isinstance(child, ast.ImportFrom):
        base = [child.module] if child.module else []
        if child.level:
          base = [PACKAGE, *folder[:len(folder) - child.level + 1], *base]
        for alias in child.names:
          yield Import('.'.join([*base, alias.name]), lazy)
      else:
        inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef,
                                    ast.Lambda))
        yield from walk(child, lazy or inside)

  yield from walk(ast.parse(source), False)


def is_under(name: str, prefix: str) -> bool:
  return name == prefix or name.startswith(prefix + '.')


def allowed_in(module: str) -> tuple[str, ...]:
  """Prefixes within the package that `module` may import."""
  fitting = [k for k in LAYERS if is_under(module, k.rstrip('!'))]
  if not fitting:
    return ()
  key = max(fitting, key=len)
  own = () if key.endswith('!') else (key.removesuffix('.__init__'),)
  return (*LAYERS[key], *own)


def violations(source: str, module: str) -> list[str]:
  """What a module of the package imports against the rules."""
  bad = []
  allowed = allowed_in(module)
  for name, lazy in imports(source, module):
    top = name.split('.')[0]
    if top == PACKAGE:
      inner = name[len(PACKAGE) + 1:]
      fine = inner == '__version__' or any(
          is_under(inner, prefix) for prefix in allowed)
    elif is_under(module, 'aggregation'):
      fine = top in {'jax', 'numpy'} or top in sys.stdlib_module_names
    elif top == 'chex':  # It loads much, and says what differs.
      fine = is_under(module, 'testing')
    elif top in HEAVY:
      fine = lazy or module == 'report.charts' and top == 'matplotlib'
    elif top == 'flax':
      fine = is_under(module, 'models') or is_under(module, 'testing')
    elif top == 'absl':  # Flags belong to the programs.
      fine = is_under(module, 'cli') or (
          name == 'absl.logging' and is_under(module, 'training'))
    else:
      fine = top in LIGHT or top in sys.stdlib_module_names
    if not fine:
      bad.append(f'{module} imports {name}')
  return bad


def experiment_violations(source: str, module: str, public: set[str]
                          ) -> list[str]:
  """What a script imports of the package besides its public names."""
  bad = []
  for name, _ in imports(source, module):
    inner = name.split('.')[1:]
    if name.split('.')[0] == PACKAGE and inner and (
        inner[0] not in public or any(p.startswith('_') for p in inner)):
      bad.append(f'{module} imports {name}')
  for node in ast.walk(ast.parse(source)):
    if (isinstance(node, ast.Attribute) and node.attr.startswith('_')
        and ast.unparse(node.value).split('.')[0] in ('fssl', PACKAGE)):
      bad.append(f'{module} uses {ast.unparse(node)}')
  return bad


def library() -> dict[str, pathlib.Path]:
  """Module name within the package to its file."""
  base = ROOT / PACKAGE
  return {'.'.join(p.relative_to(base).with_suffix('').parts): p
          for p in sorted(base.rglob('*.py'))}


class LayersTest(parameterized.TestCase):

  def test_every_module_has_a_layer_and_keeps_to_it(self):
    bad = []
    self.assertGreater(len(library()), 5)
    for module, path in library().items():
      if not any(is_under(module, key.rstrip('!')) for key in LAYERS):
        bad.append(f'{module} is in no layer')
      bad += violations(path.read_text(encoding='utf-8'), module)
    self.assertEmpty(bad, '\n'.join(bad))

  def test_experiments_use_public_names(self):
    tree = ast.parse((ROOT / PACKAGE / '__init__.py').read_text())
    public = {node.value for node in ast.walk(tree)
              if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    bad = []
    for path in sorted((ROOT / 'experiments').rglob('*.py')):
      bad += experiment_violations(
          path.read_text(encoding='utf-8'), path.stem, public)
    self.assertEmpty(bad, '\n'.join(bad))

  def test_nothing_is_imported_by_bare_name(self):
    files = [p for folder in ('fedjax_ssl', 'experiments', 'launch', 'tests')
             for p in (ROOT / folder).rglob('*.py')]
    ours = {p.stem for p in files} - sys.stdlib_module_names - {
        'fedjax_ssl', 'experiments', 'launch', 'tests'}
    bad = [f'{path.relative_to(ROOT)} imports {name}' for path in files
           for name, _ in imports(path.read_text(encoding='utf-8'), 'a.b.c')
           if name.split('.')[0] in ours - OTHERS]
    self.assertEmpty(bad, '\n'.join(bad))


class TheCheckItselfTest(parameterized.TestCase):
  """A rule that cannot fail holds nothing."""

  @parameterized.parameters(
      ('training.loop', 'from fedjax_ssl import methods'),
      ('training.loop', 'from fedjax_ssl.methods import parts'),
      ('training.loop', 'import fedjax_ssl.methods.fedavg as f'),
      ('training.loop', 'def f():\n  from fedjax_ssl import methods'),
      ('training.loop', 'from ..methods import parts'),
      ('training.loop', 'from fedjax_ssl.data import partition'),
      ('methods.fedavg', 'from fedjax_ssl.methods import fedprox'),
      ('methods.fedavg', 'from . import fedprox'),
      ('methods.fedavg', 'from fedjax_ssl.training import loop'),
      ('methods.fedavg', 'from fedjax_ssl.data import partition'),
      ('core.rounds', 'from fedjax_ssl import aggregation'),
      ('core.rounds', 'from fedjax_ssl.data import batching'),
      ('data.federation', 'from fedjax_ssl import models'),
      ('models.cnn', 'from fedjax_ssl.core import rounds'),
      ('losses', 'from fedjax_ssl.core import types'),
      ('losses.targets', 'from fedjax_ssl import aggregation'),
      ('aggregation', 'import optax'),
      ('aggregation', 'from fedjax_ssl import losses'),
      ('core.local_training', 'import flax'),
      ('task', 'import flax'),
      ('training.loop', 'from absl import flags'),
      ('training.loop', 'import fedjax_ssl'),
      ('training.progress', 'import matplotlib.pyplot as plt'),
      ('training.loop', 'from fedjax_ssl.report import summary'),
      ('report.summary', 'from fedjax_ssl.running import settings'),
      ('running.job', 'from fedjax_ssl import fitting'),
      ('running.job', 'from fedjax_ssl.cli import train'),
      ('running.job', 'from absl import flags'),
      ('fitting.start', 'from fedjax_ssl.cli import train'),
      ('cli.train', 'from fedjax_ssl import fitting'),
      ('papers.cells', 'from fedjax_ssl.report import summary'),
      ('data.datasets', 'if True:\n  import tensorflow_datasets'),
      ('data.datasets', 'import torch'),
      ('unknown', 'from fedjax_ssl import losses'))
  def test_refuses(self, module, source):
    self.assertLen(violations(source, module), 1)

  @parameterized.parameters(
      ('training.loop', 'from fedjax_ssl.data import batching'),
      ('training.loop', 'from fedjax_ssl.training import metrics'),
      ('methods.fedavg', 'from fedjax_ssl.methods import parts'),
      ('methods.fedavg', 'from fedjax_ssl import aggregation, losses'),
      ('methods.fedavg', 'from . import parts'),
      ('methods.__init__', 'from fedjax_ssl.methods import fedavg'),
      ('core.rounds', 'from fedjax_ssl.core.types import Task'),
      ('models.cnn', 'from flax import linen as nn'),
      ('models.cnn', 'from fedjax_ssl.ops import conv'),
      ('losses', 'import functools\nimport optax'),
      ('training.progress', 'from absl import logging'),
      ('training.environment', 'from fedjax_ssl import __version__'),
      ('report.summary', 'def f():\n  import matplotlib.pyplot as plt'),
      ('report.summary', 'from fedjax_ssl.training import metrics'),
      ('running.job', 'from fedjax_ssl.report import summary'),
      ('fitting.start', 'from fedjax_ssl.running import job'),
      ('cli.train', 'from fedjax_ssl.running import job'))
  def test_allows(self, module, source):
    self.assertEmpty(violations(source, module))

  @parameterized.parameters(
      'from fedjax_ssl.core import rounds', 'import fedjax_ssl.core._hidden',
      'import fedjax_ssl as fssl\nfssl.data._bounds(1)')
  def test_refuses_private_names_in_experiments(self, source):
    self.assertLen(experiment_violations(source, 'x', {'data'}), 1)


if __name__ == '__main__':
  absltest.main()
