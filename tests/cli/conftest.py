"""Commands that must be refused, and a made-up bench, in this process."""
from __future__ import annotations

import shlex
import sys
from typing import Any

from absl.testing import flagsaver
import pytest

from fedjax_ssl import cli
from fedjax_ssl.cli import train
from fedjax_ssl.running import dealing, settings
from tests.cli.bench_trainer import TRAINER

DEFAULTS: dict[str, Any] = {
    'dataset': 'digits', 'model': 'linear', 'method': 'fedavg',
    'num_clients': 20, 'cohort_size': 4, 'labels_per_class': 10,
    'local_steps': 1, 'num_rounds': 1, 'eval_every': 1, 'seeds': ['0']}


@pytest.fixture
def refuse(monkeypatch, capfd):
  """Runs the command; returns its one line of error. Flags come back."""
  def call(*args: str, scheme='dirichlet_capped', deal=None,
           setting=None, **defaults) -> str:
    monkeypatch.setattr(sys, 'argv', ['experiment.py'])
    setting = setting or settings.Setting(
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
def bench(tmp_path, capsys):
  """Runs `fedjax-ssl bench`; returns its exit code, output and errors."""
  (tmp_path / 'trainer.py').write_text(TRAINER)
  trainer = tmp_path / 'trainer'
  trainer.write_text('#!/bin/sh\nexec ' + shlex.join(
      [sys.executable, '-S', str(tmp_path / 'trainer.py')]) + ' "$@"\n')
  trainer.chmod(0o755)

  def run(*given):
    words = list(given)
    cut = words.index('--') if '--' in words else len(words)
    words[cut:cut] = [f'--python={trainer}', *(
        [] if any(word.startswith('--out=') for word in words) else
        [f'--out={tmp_path / "out"}'])]
    code = cli.main(['bench', *words])
    return (code, *capsys.readouterr())
  return run


@pytest.fixture
def out(tmp_path):
  """Where the bench of `bench` writes."""
  return tmp_path / 'out'
