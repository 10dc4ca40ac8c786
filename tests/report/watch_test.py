"""A report that is written anew while runs go on."""
from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from fedjax_ssl.cli import report
from fedjax_ssl.report import page
from tests.report import fake

pytestmark = pytest.mark.usefixtures('undrawn')


@pytest.mark.parametrize('text', ['0', '-1', 'a', '1.5', '86401', '9' * 20])
def test_seconds_are_a_whole_number(tmp_path, capsys, text):
  with pytest.raises(SystemExit) as ended:
    report.main([str(tmp_path), f'--out={tmp_path / "out"}', f'--watch={text}'])
  said = capsys.readouterr().err
  assert ended.value.code == 2 and f"--watch: '{text}' must be" in said
  assert len(said.splitlines()) == 1


def test_the_page_follows_the_runs(tmp_path, monkeypatch, capsys):
  folder, out = tmp_path / 'runs' / 'a', tmp_path / 'out'
  fake.write(folder, [])
  written: list[str] = []
  real = page.write

  def write(texts, where):
    written.append(str(texts['index.html']))
    real(texts, where)
  monkeypatch.setattr(page, 'write', write)
  turns = iter(range(5))

  def sleep(seconds):
    assert seconds == 7
    turn = next(turns)
    if turn in (1, 3):
      with open(folder / 'metrics.jsonl', 'a') as file:
        file.write(json.dumps(fake.row(5 * turn, turn / 4)) + '\n')
    elif turn == 4:
      raise KeyboardInterrupt
  monkeypatch.setattr(time, 'sleep', sleep)
  assert report.main([str(tmp_path / 'runs'), f'--out={out}',
                      '--watch=7']) == 0
  # Nothing without rows nor without news; at the end once more.
  assert [t.count('http-equiv="refresh" content="7"') for t in written] == [
      1, 1, 0]
  assert ['25.00' in written[0], '75.00' in written[1]] == [True] * 2
  assert (out / 'index.html').read_text() == written[-1]
  lines = capsys.readouterr().err.splitlines()
  assert [line.split(':')[0] for line in lines] == ['waiting', 'Report']


def test_what_fails_at_the_end_is_said(tmp_path, monkeypatch, capsys):
  """The page would go on renewing itself."""
  folder, out = tmp_path / 'runs' / 'a', tmp_path / 'out'
  fake.write(folder, [fake.row(5, .5)])

  def sleep(seconds):
    del seconds
    (folder / 'metrics.jsonl').unlink()
    raise KeyboardInterrupt
  monkeypatch.setattr(time, 'sleep', sleep)
  assert report.main([str(tmp_path / 'runs'), f'--out={out}',
                      '--watch=7']) == 1
  *_, said = capsys.readouterr().err.splitlines()
  assert said.startswith(f'{out}/index.html goes on renewing itself: ')


def test_a_signal_ends_it(tmp_path, root: pathlib.Path):
  out = tmp_path / 'out'
  fake.write(tmp_path / 'runs' / 'a', [])
  process = subprocess.Popen(
      [sys.executable, '-m', 'fedjax_ssl', 'report', str(tmp_path / 'runs'),
       f'--out={out}', '--watch=1'], cwd=root, stderr=subprocess.PIPE,
      text=True, env={**os.environ, 'PYTHONPATH': str(root)},
      # A job in the background may have been told to ignore it.
      preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
  try:
    assert process.stderr is not None
    assert process.stderr.readline().startswith('waiting: ')
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
  finally:
    process.kill()
  assert process.returncode == 0 and 'Traceback' not in said
  assert not out.exists()
