"""Rounds over processes: their numbers fit, and what ends is said."""
from __future__ import annotations

import json
import subprocess
import sys

from absl import flags
import pytest


@pytest.fixture
def processes(bench, monkeypatch, tmp_path, root):
  """The script under --quick; its processes run its file."""
  made, harness = bench('processes'), bench('harness')
  words = ['--quick', '--repeats=2', f'--out={tmp_path}']
  monkeypatch.setattr(sys, 'argv', [
      str(root / 'experiments' / 'benchmarks' / 'processes.py'), *words])
  flags.FLAGS(sys.argv)
  harness.shrink(made.QUICK)
  return made


def test_two_processes_beside_two_alone(processes, tmp_path):
  processes.main()
  saved = json.loads((tmp_path / 'processes_quick.json').read_text())
  one, two = saved['measured']['lines']
  assert (one['processes'], two['processes']) == (1, 2)
  assert two['ms of a mean'] > 0 == one['ms of a mean']
  for order in ('fixed', 'fast'):
    assert one[f'exchange, {order}, %'] == 0
    assert one[f'times as fast, {order}'] == 1
    assert two[f'exchange, {order}, %'] < 100
    assert two[f'times as fast, {order}'] > 0


def test_clients_are_dealt_evenly(processes):
  flags.FLAGS['cohort_sizes'].value = ['3']
  with pytest.raises(ValueError, match='--cohort_sizes=3 must be a multiple'):
    processes.main()


def test_one_that_ends_is_said(processes, monkeypatch):
  """And nobody waits for it for ever."""
  started = subprocess.Popen
  monkeypatch.setattr(subprocess, 'Popen', lambda words, **more: started(
      [sys.executable, '-c', ''], **more))
  with pytest.raises(ValueError, match='A process ended'):
    processes.measure([1], [2])
