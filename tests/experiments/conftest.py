"""Commands that must be refused, in this process; benchmarks' scripts."""
from __future__ import annotations

import importlib
import sys
from typing import Any

from absl import flags
from absl.testing import flagsaver
import pytest

from fedjax_ssl.cli import dealing, settings, train

DEFAULTS: dict[str, Any] = {
    'dataset': 'digits', 'model': 'linear', 'method': 'fedavg',
    'num_clients': 20, 'cohort_size': 4, 'labels_per_class': 10,
    'local_steps': 1, 'num_rounds': 1, 'eval_every': 1, 'seeds': ['0']}


@pytest.fixture
def refuse(monkeypatch, capfd):
  """Runs the command; returns its one line of error. Flags come back."""
  def call(*args: str, scheme='dirichlet_capped', deal=None,
           **defaults) -> str:
    monkeypatch.setattr(sys, 'argv', ['experiment.py'])
    setting = settings.Setting(
        'mine', 'Mine.', '', deal or dealing.two_pools(scheme, scheme),
        DEFAULTS | defaults)
    with pytest.raises(SystemExit) as ended:
      train.main(setting, [*map(str, args)])
    assert ended.value.code == 2
    captured = capfd.readouterr()
    assert not captured.out
    lines = captured.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith('error: '), captured.err
    return lines[0]
  monkeypatch.delenv('FEDJAX_SSL_DATA', raising=False)
  saved = flagsaver.save_flag_values()
  yield call
  flagsaver.restore_flag_values(saved)


@pytest.fixture
def bench(monkeypatch):
  """Imports a script of the benchmarks; its flags are forgotten again.

  Those of the experiments, some with the same names, are put aside meanwhile.
  """
  monkeypatch.setattr(sys, 'path', [*sys.path])
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


@pytest.fixture
def undrawn(monkeypatch):
  """Reports without the files of their charts, which take most of the time."""
  from fedjax_ssl.report import charts, interactive
  made = {'svg': b'', 'pdf': b''}
  monkeypatch.setattr(charts, 'files', lambda *unused: made)
  monkeypatch.setattr(charts, 'inline', lambda *unused: [])
  monkeypatch.setattr(charts, 'of_heat_map', lambda *unused: ('', made))
  monkeypatch.setattr(interactive, 'library', lambda: '')
