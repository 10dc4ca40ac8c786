"""Fixtures of the experiments' tests."""
from __future__ import annotations

import importlib
import sys

from absl import flags
import pytest


@pytest.fixture
def bench(root, monkeypatch):
  """Imports a script of the benchmarks; its flags are forgotten again.

  Those of the experiments, some with the same names, are put aside meanwhile.
  """
  folder = root / 'experiments' / 'benchmarks'
  names = [path.stem for path in folder.glob('*.py')]
  monkeypatch.syspath_prepend(str(folder))
  aside = {name: flags.FLAGS[name] for name in flags.FLAGS
           if not str(flags.FLAGS.find_module_defining_flag(name)).startswith(
               'absl')}
  for name in aside:
    delattr(flags.FLAGS, name)
  before = set(flags.FLAGS)
  yield importlib.import_module
  for name in names:
    sys.modules.pop(name, None)
  for name in set(flags.FLAGS) - before:
    delattr(flags.FLAGS, name)
  for name, flag in aside.items():
    flags.FLAGS[name] = flag
