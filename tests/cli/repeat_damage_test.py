"""A configuration that is damaged, or of an older version."""
from __future__ import annotations

import json

import pytest

from fedjax_ssl.cli import repeat
from fedjax_ssl.training import command


@pytest.mark.parametrize('changes, words', [
    ({'origin': None}, 'origin=None'),
    ({'origin': {'script': 5}}, "'script': 5"),
    ({'origin': {'script': 'setup.py', 'flagfiles': 3}}, "'flagfiles': 3"),
    ({'flags': {'a': '\0'}, 'origin': {'script': 'setup.py'}}, 'zero byte')])
def test_a_damaged_configuration_is_one_line(tmp_path, capsys, monkeypatch,
                                             changes, words):
  monkeypatch.delattr(repeat.os, 'execv')
  file = tmp_path / 'mine.json'
  file.write_text(json.dumps({'flags': {}, 'facts': {}, 'environment': {},
                              'restarts': []} | changes))
  assert repeat.main([str(file)]) == 2
  said = capsys.readouterr().err
  assert words in said and len(said.splitlines()) == 1


def test_a_table_of_runs_is_no_run(tmp_path, capsys):
  file = tmp_path / 'bench.json'
  file.write_text(json.dumps({'rows': {}, 'tuned': {}}))
  assert repeat.main([str(file), '--print']) == 2
  assert capsys.readouterr().err == (
      f'error: {file} holds a table of runs, and not the flags of one, as its '
      'config.json does.\n')


def test_every_flag_is_a_line(tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps({
      'flags': {'method': 'fedprox(\n mu=1)'}, 'facts': {}, 'environment': {},
      'restarts': [], 'origin': {'script': 'a\nb'}}))
  file = tmp_path / 'run.flags'
  file.write_bytes(b'\xff')  # Damaged: it is written anew.
  command.write(tmp_path)
  assert file.read_text() == ('# All flags of a run of a b.\n'
                              '--method=fedprox(  mu=1)\n')
