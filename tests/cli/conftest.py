"""Commands that must be refused, in this process."""
from __future__ import annotations

import sys
from typing import Any

from absl.testing import flagsaver
import pytest

from fedjax_ssl.cli import train
from fedjax_ssl.running import dealing, settings

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
