"""Sweeps over folders with damaged files, and files that change meanwhile."""
from __future__ import annotations

import json
import pathlib
import shlex
import subprocess
import sys

import pytest

from fedjax_ssl.cli import sweep
from fedjax_ssl.cli.sweep import cells, grid
from fedjax_ssl.core import imports
from tests.cli.sweep import sweep_test

CELL = grid.Cell('one', 'one.py', ('--x=1',))
DEEP = 100_000 * '['


@pytest.fixture
def done(tmp_path):
  """The folder of a sweep whose cell is finished."""
  folder = tmp_path / 'one'
  folder.mkdir()
  (folder / 'config.json').write_text(
      json.dumps({'flags': {'num_rounds': 2, 'seeds': [0]}}))
  (folder / 'metrics.jsonl').write_text('{"round": 2, "seed": 0}\n')
  (tmp_path / '.sweep').mkdir()
  cells.write_record(tmp_path, CELL, state='done')
  assert cells.is_done(tmp_path, CELL)
  return tmp_path


@pytest.mark.parametrize('text', [
    '{"flags": [1]}', '{"flags": {"num_rounds": 2, "seeds": 5}}',
    '{"flags": {"num_rounds": "2"}}', '{"flags": null}', '[', '', DEEP,
    b'\xff{}'])
def test_a_damaged_config_is_no_finished_run(done, text):
  (done / 'one' / 'config.json').write_bytes(
      text if isinstance(text, bytes) else text.encode())
  assert not cells.is_done(done, CELL)
  assert sweep.status(done, [CELL]).startswith('to do')


@pytest.mark.parametrize('line', [
    b'\xff\xfe\n', b'{"round": 2, "seed": [1]}\n', b'{"round": "2"}\n',
    b'\0\0\0', DEEP.encode()])
def test_rows_count_up_to_the_first_damaged_one(done, line):
  rows = done / 'one' / 'metrics.jsonl'
  rows.write_bytes(rows.read_bytes() + line)
  assert cells.is_done(done, CELL)
  for lines in (line, line + b'\n{"round": 2, "seed": 0}\n'):
    rows.write_bytes(lines)
    assert not cells.is_done(done, CELL)


@pytest.mark.parametrize('text', ['5', DEEP, '{"state": "failed", "exit": "a"}',
                                  '{"state": "failed", "tail": 5}'])
def test_a_damaged_record_is_none(done, text):
  (done / '.sweep' / 'one.json').write_text(text)
  assert sweep.status(done, [CELL]).startswith('to do')


def test_what_a_run_began_with_is_what_is_done(tmp_path):
  """The flagfile changes under the run, and names a folder of its own."""
  script, flagfile = tmp_path / 'fake.py', tmp_path / 'a.flags'
  script.write_text(
      pathlib.Path(sweep_test.FAKE.split(': ')[1]).read_text().replace(
          'def main() -> None:', 'def main() -> None:\n'
          f'  pathlib.Path({str(flagfile)!r}).write_text("--num_rounds=3")\n'
          '  print("x" * 10**6)'))
  flagfile.write_text(f'--num_rounds=2\n--workdir={tmp_path / "other"}\n')
  lines = (f'script: {script}', f'flagfile: {flagfile}')
  sweep_test.run(tmp_path / 'out', *lines)
  assert not (tmp_path / 'other').exists()
  state, _ = sweep_test.run(tmp_path / 'out', *lines, options=['--status'])
  assert 'to do 1 of 1' in state


def test_a_run_of_other_code_is_done_and_named(done):
  """But for a file that is gone, as on another machine."""
  mine = done / 'mine.py'
  mine.write_text('first')
  code = {'mine.py': imports.sha256_of(mine)}
  for flags in ({'method': f'{mine}:fast(k=1)'}, {'imports': [str(mine)]}):
    mine.write_text('first')
    (done / 'one' / 'config.json').write_text(json.dumps({
        'flags': {'num_rounds': 2, 'seeds': [0], **flags},
        'facts': {'code': code}}))
    assert not cells.other_code(done, CELL)
    mine.write_text('second')
    assert cells.other_code(done, CELL) == 'mine.py'
    assert cells.is_done(done, CELL)
    assert 'done             2/2  one (with an earlier mine.py)' in (
        sweep.status(done, [CELL]))
    mine.unlink()
    assert not cells.other_code(done, CELL)


def test_the_commands_may_be_cut_off(tmp_path):
  process = subprocess.run(
      shlex.join([
          sys.executable, 'launch/sweep.py', f'--out={tmp_path}', '--dry_run',
          '--', str(sweep_test.FAKE),
          f'--x={" | ".join(map(str, range(3000)))}'])
      + ' | head -1', shell=True, cwd=sweep_test.ROOT, capture_output=True,
      text=True, check=True)
  assert '--x=0' in process.stdout and not process.stderr


def test_bounds_count_that_are_run(done):
  """Where no label is hidden nobody can train on all: that bound is no run."""
  config = {'flags': {'num_rounds': 2, 'seeds': [0], 'bounds': True}}
  (done / 'one' / 'config.json').write_text(json.dumps(config))
  assert not cells.is_done(done, CELL)
  few = done / 'one' / 'labels_few'
  few.mkdir()
  (few / 'config.json').write_text(json.dumps(config))
  (few / 'metrics.jsonl').write_text('{"round": 2, "seed": 0}')
  assert not cells.is_done(done, CELL)  # The run drops a row without its end.
  (few / 'metrics.jsonl').write_text('{"round": 2, "seed": 0}\n')
  assert cells.is_done(done, CELL)
  (done / 'one' / 'labels_all').mkdir()
  assert not cells.is_done(done, CELL)
