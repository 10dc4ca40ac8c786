"""What a run prints when all is trained."""
from __future__ import annotations

import types

from fedjax_ssl import config
from fedjax_ssl.report import canvas
from fedjax_ssl.running import execution, runs, settings


def test_a_run_ends_well_where_nothing_can_be_drawn(
    monkeypatch, tmp_path, capsys):
  def write(*_):
    raise OSError('Matplotlib requires access to\na writable folder')
  monkeypatch.setattr(canvas, 'write', write)
  rows = [{'round': 1, 'accuracy': .5, 'loss': 1.}]
  runs.draw(tmp_path, {'ours': [rows]})
  line, = capsys.readouterr().err.splitlines()
  assert line.endswith('curves.png is not drawn: Matplotlib requires access to '
                       'a writable folder')


def test_an_epsilon_that_guarantees_nothing_says_so(
    monkeypatch, tmp_path, capsys):
  jobs = [types.SimpleNamespace(
      name=name, folder=tmp_path, facts={
          'federation': {'num_validation': 0},
          'choices': {'method': {'knobs': {'delta': 1e-5}}}},
      spec=types.SimpleNamespace(method=method)) for name, method in (
          ('ours', "fedssl(dp_scope='classifier')"),
          ('printed', "fedssl(dp_scope='generator')"))]
  monkeypatch.setattr(runs, 'prepared', lambda *_: jobs)
  monkeypatch.setattr(execution, 'open_folders', lambda *_: 2 * [
      types.SimpleNamespace(is_read_only=False)])
  monkeypatch.setattr(execution, 'run', lambda *_: [
      [{'round': 1, 'accuracy': .5, 'epsilon': 3.}]])
  monkeypatch.setattr(runs, 'draw', lambda *_: None)
  runs.train(settings.SETTINGS['digits_dirdir'],
             config.Config(workdir=str(tmp_path)), {}, ())
  lines = capsys.readouterr().out.splitlines()
  _, _, ours, printed, _, delta, _, note, *_ = lines
  assert ours.endswith(' 3.00 |') and printed.endswith(' 3.00, nominal |')
  assert delta == 'epsilon is at delta=1e-05.'
  assert note.startswith('A nominal epsilon is no guarantee')
