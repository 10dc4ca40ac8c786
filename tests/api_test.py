"""Holds the habits of the public interface, by reading it."""
from __future__ import annotations

import ast
from collections.abc import Iterator
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

from absl.testing import absltest, parameterized

import fedjax_ssl
from fedjax_ssl import data

PACKAGE = pathlib.Path(fedjax_ssl.__file__).parent
LEAVES = ('aggregation', 'losses', 'privacy', 'sparse')
# Loaded by what needs them, and by nothing else.
HEAVY = ('flax', 'orbax', 'tensorflow', 'tensorflow_datasets', 'matplotlib',
         'sklearn', 'PIL', 'tqdm', 'tensorboardX', 'dp_accounting',
         'wandb', 'mlflow', 'plotly')
# Networks, strong views, attacks and laws.
SAYING_WHAT = ('models/', 'data/augment/__init__:ra_', 'methods/parts/attacks:',
               'testing/contract:')
OTHER_KEY_NAMES = {'rng', 'rngs', 'prng', 'prng_key', 'rng_key', 'random_key',
                   'prngkey', 'rngkey', 'random_state'}


class Function(NamedTuple):
  where: str
  node: ast.FunctionDef | ast.ClassDef

  @property
  def args(self) -> list[ast.arg]:
    if isinstance(self.node, ast.ClassDef):
      return []
    a = self.node.args
    return [*a.posonlyargs, *a.args, *a.kwonlyargs]


def public(path: pathlib.Path) -> Iterator[Function]:
  """Public functions and classes of a module, and their public methods.

  A method that replaces one of a class above it does what that one says.
  """
  module = path.relative_to(PACKAGE).with_suffix('').as_posix()
  methods: dict[str, set[str]] = {}
  for node in ast.parse(path.read_text(encoding='utf-8')).body:
    if (not isinstance(node, (ast.FunctionDef, ast.ClassDef))
        or node.name.startswith('_')):
      continue
    yield Function(f'{module}:{node.name}', node)
    if isinstance(node, ast.FunctionDef):
      continue
    known = set().union(*(methods.get(ast.unparse(b), set())
                          for b in node.bases))
    own = [child for child in node.body if isinstance(child, ast.FunctionDef)
           and not child.name.startswith('_')]
    methods[node.name] = known | {child.name for child in own}
    for child in own:
      if child.name not in known:
        yield Function(f'{module}:{node.name}.{child.name}', child)


def leaf(name: str) -> list[Function]:
  """What a module, or the modules of a package, have that is public."""
  paths = sorted((PACKAGE / name).glob('*.py')) or [PACKAGE / f'{name}.py']
  return [f for path in paths for f in public(path)]


def everything() -> list[Function]:
  return [f for path in sorted(PACKAGE.rglob('*.py')) for f in public(path)]


def is_property(node: ast.FunctionDef) -> bool:
  return any(ast.unparse(each).endswith('property')
             for each in node.decorator_list)


def is_numpy_generator(arg: ast.arg) -> bool:
  return arg.annotation is not None and 'random.Generator' in ast.unparse(
      arg.annotation)


def run(code: str) -> str:
  """What a fresh interpreter prints."""
  done = subprocess.run(
      [sys.executable, '-c', code], check=True, capture_output=True, text=True,
      cwd=PACKAGE.parent)
  return done.stdout.strip()


class HabitsTest(parameterized.TestCase):

  def test_public_names_have_docstrings(self):
    bare = [f.where for f in everything() if not ast.get_docstring(f.node)]
    self.assertEmpty(bare)

  def test_docstrings_begin_with_a_sentence(self):
    odd = [f.where for f in everything()
           if not (ast.get_docstring(f.node) or 'x.').split('\n\n')[0].strip()
           .endswith(('.', ':', '`', '?'))]
    self.assertEmpty(odd)

  def test_docstrings_of_functions_begin_with_a_verb(self):
    """Those of `SAYING_WHAT` say what a thing is, or what holds."""
    odd = [f.where for f in everything()
           if isinstance(f.node, ast.FunctionDef) and not is_property(f.node)
           and not f.where.startswith(SAYING_WHAT)
           and not re.match(r'[A-Z][a-z]+s\b(?!\')',
                            ast.get_docstring(f.node) or '')]
    self.assertEmpty(odd)

  def test_jax_random_keys_are_called_key(self):
    odd = [f'{f.where}({a.arg})' for f in everything() for a in f.args
           if a.arg.lower() in OTHER_KEY_NAMES and not is_numpy_generator(a)]
    self.assertEmpty(odd, 'call it key, or annotate np.random.Generator')

  @parameterized.parameters(*LEAVES)
  def test_hyperparameters_are_keyword_only(self, name):
    loose = []
    for f in leaf(name):
      if isinstance(f.node, ast.FunctionDef):
        optional = f.node.args.args[
            len(f.node.args.args) - len(f.node.args.defaults):]
        # A shape to draw is no hyperparameter, and positional in jax.random;
        # the mask is an array.
        loose += [f'{f.where}({a.arg})' for a in optional
                  if a.arg not in ('shape', 'mask')]
    self.assertEmpty(loose)

  @parameterized.parameters(*LEAVES)
  def test_arguments_are_explained(self, name):
    silent = []
    for f in leaf(name):
      text = ast.get_docstring(f.node) or ''
      if 'Args:' in text:
        silent += [f'{f.where}({a.arg})' for a in f.args
                   if f'{a.arg}:' not in text]
        if 'Returns:' not in text:
          silent.append(f'{f.where} -> ?')
    self.assertEmpty(silent)


class PublicNamesTest(parameterized.TestCase):

  def test_all_names_resolve(self):
    for name in fedjax_ssl.__all__:
      self.assertIsNotNone(getattr(fedjax_ssl, name), name)
    self.assertContainsSubset(fedjax_ssl.__all__, dir(fedjax_ssl))
    self.assertSameElements(fedjax_ssl.METHODS, fedjax_ssl.methods.METHODS)

  def test_editors_see_the_same_names_from_the_same_places(self):
    tree = ast.parse((PACKAGE / '__init__.py').read_text(encoding='utf-8'))
    block, = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.asname or alias.name: f'{node.module}.{alias.name}'
            for node in block.body if isinstance(node, ast.ImportFrom)
            for alias in node.names}
    given = {name: f'fedjax_ssl.{name}' for name in fedjax_ssl._MODULES} | {
        name: f'fedjax_ssl.{module}.{attribute}'
        for name, (module, attribute) in fedjax_ssl._NAMES.items()}
    self.assertEqual(seen, given)
    self.assertSameElements(fedjax_ssl.__all__, given)

  def test_unknown_name_is_an_attribute_error(self):
    with self.assertRaisesRegex(AttributeError, 'fedavgg'):
      _ = fedjax_ssl.fedavgg

  def test_version_is_a_version(self):
    self.assertRegex(fedjax_ssl.__version__, r'^\d+\.\d+\.\d+')

  def test_rules_of_aggregation_are_complete(self):
    names = {f.node.name for module in ('means', 'robust')
             for f in public(PACKAGE / 'aggregation' / f'{module}.py')}
    self.assertSameElements(names, {
        'distance_reweighted_mean', 'ema', 'finite_or_zero',
        'geometric_median', 'krum', 'linear', 'median', 'multi_krum',
        'norm_clipped', 'num_hostile', 'reliability_weighted_mean',
        'sample_sub_consensus',
        'sub_consensus_mean', 'trimmed_mean', 'weighted_mean'})
    self.assertSameElements(
        names, {*fedjax_ssl.aggregation.__all__} - {'DISTANCES'})

  def test_every_partition_is_a_function_of_the_data_package(self):
    """`fedjax-ssl list` says so."""
    for name, function in data.PARTITIONS.items():
      self.assertIs(getattr(data, name), function)


class LazyImportTest(parameterized.TestCase):

  @parameterized.parameters(
      'import fedjax_ssl', 'import fedjax_ssl.aggregation',
      'from fedjax_ssl import aggregation, losses')
  def test_loads_no_heavy_library(self, statement):
    loaded = run(f'{statement}\nimport sys\nprint([m for m in {HEAVY!r} '
                 'if m in sys.modules])')
    self.assertEqual(loaded, '[]')

  def test_names_come_when_asked_for(self):
    printed = run(
        'import sys, fedjax_ssl\n'
        'print("jax" in sys.modules, "fedjax_ssl.losses" in sys.modules)\n'
        'print(fedjax_ssl.losses.__name__, fedjax_ssl.Federation.__name__)')
    self.assertEqual(
        printed.split(), ['False', 'False', 'fedjax_ssl.losses', 'Federation'])


if __name__ == '__main__':
  absltest.main()
