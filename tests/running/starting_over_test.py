"""A run without checkpoints begins anew; one of another machine goes on."""
from __future__ import annotations

import shutil

import chex
import numpy as np

import fedjax_ssl
from fedjax_ssl.data import datasets
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


def test_a_run_goes_on_where_sums_are_rounded_otherwise(tmp_path, monkeypatch):
  folder = tmp_path / 'run'
  whole = fit_test.fit(rounds=2)
  fit_test.fit(rounds=1, workdir=folder)
  exact = datasets.moments
  monkeypatch.setattr(datasets, 'moments', lambda inputs: tuple(
      tuple(float(np.nextafter(x, np.inf)) for x in part)
      for part in exact(inputs)))
  gone_on = fit_test.fit(rounds=2, workdir=folder)
  # Its new steps are of the same run: it can be read, and be found finished.
  for run in (gone_on, fedjax_ssl.load(folder),
              fit_test.fit(rounds=2, workdir=folder)):
    chex.assert_trees_all_equal(run.state.server, whole.state.server)
