"""What a run prints when all is trained."""
from __future__ import annotations

import types

from fedjax_ssl import config
from fedjax_ssl.running import execution, runs, settings


def test_an_epsilon_that_guarantees_nothing_says_so(
    monkeypatch, tmp_path, capsys):
  jobs = [types.SimpleNamespace(
      name=name, folder=tmp_path, facts={'federation': {'num_validation': 0}},
      spec=types.SimpleNamespace(method=method)) for name, method in (
          ('ours', "fedssl(dp_scope='classifier')"),
          ('printed', "fedssl(dp_scope='generator')"))]
  monkeypatch.setattr(runs, 'prepared', lambda *_: jobs)
  monkeypatch.setattr(execution, 'open_folders', lambda *_: [None, None])
  monkeypatch.setattr(execution, 'run', lambda *_: [
      [{'round': 1, 'accuracy': .5, 'epsilon': 3.}]])
  monkeypatch.setattr(runs, 'draw', lambda *_: None)
  runs.train(settings.SETTINGS['digits_dirdir'],
             config.Config(workdir=str(tmp_path)), {}, ())
  _, _, ours, printed, _, note, *_ = capsys.readouterr().out.splitlines()
  assert ours.endswith(' 3.00 |') and printed.endswith(' 3.00, nominal |')
  assert note.startswith('A nominal epsilon is no guarantee')
