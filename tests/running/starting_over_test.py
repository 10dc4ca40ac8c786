"""A run whose checkpoints are gone begins anew, also at its trackers."""
from __future__ import annotations

import shutil

from fedjax_ssl.training import metrics
from tests.fitting import fit_test


def test_trackers_begin_another_run_there(tmp_path, monkeypatch, capsys):
  restored = []

  class Writer(metrics.MetricsWriter):

    def __init__(self, folder, resume_round=None, **others):
      restored.append(resume_round)
      super().__init__(folder, resume_round, **others)

  monkeypatch.setattr(metrics, 'MetricsWriter', Writer)
  folder = tmp_path / 'run'
  fit_test.fit(rounds=1, workdir=folder)
  shutil.rmtree(folder / 'checkpoints')
  said = []
  for rounds in (1, 2):
    fit_test.fit(rounds=rounds, workdir=folder, progress=True)
    said.append(f'{folder} has no checkpoint and starts over.' in (
        capsys.readouterr().err))
  assert said == [True, False]
  assert restored == [None, None, 1]
