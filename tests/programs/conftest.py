"""The benchmarks' scripts, in this process."""
from __future__ import annotations

import importlib
import sys

from absl import flags
import pytest


@pytest.fixture
def bench(monkeypatch):
  """Imports a script of the benchmarks; its flags are forgotten again.

  Those of the experiments, some with the same names, are put aside meanwhile.
  """
  monkeypatch.setattr(sys, 'path', [*sys.path])
  importlib.import_module('absl.app')  # It defines flags, which stay.
  aside = {name: flags.FLAGS[name] for name in flags.FLAGS
           if not str(flags.FLAGS.find_module_defining_flag(name)).startswith(
               'absl')}
  for name in aside:
    delattr(flags.FLAGS, name)
  before = set(flags.FLAGS)
  yield lambda name: importlib.import_module(f'experiments.benchmarks.{name}')
  for name in [*sys.modules]:
    if name.startswith('experiments.benchmarks'):
      del sys.modules[name]
  for name in set(flags.FLAGS) - before:
    delattr(flags.FLAGS, name)
  for name, flag in aside.items():
    flags.FLAGS[name] = flag
