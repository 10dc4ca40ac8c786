"""Rows on disk are those of an array, whatever ends the process."""
from __future__ import annotations

import os
import pathlib
import re
import time
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from fedjax_ssl.core import tree
from fedjax_ssl.training import client_rows
from tests.training.steps import assert_same_bits

COUNT = 12
RECORD = 24 + 10 + 4 + 1  # Bytes of what a client keeps.


def first() -> dict[str, Any]:
  """Alike for all clients but for one leaf; with all that leaves may be."""
  alike = {'kernel': np.full((3, 2), -0.0, np.float32), 'none': {},
           'half': np.full(5, 1.5, ml_dtypes.bfloat16), 'steps': np.int32(7),
           'no_numbers': np.zeros((0, 3), np.float32)}
  return {**tree.repeat(alike, COUNT), 'hostile': np.arange(COUNT) % 3 == 0}


def some(rng: np.random.Generator, count: int) -> dict[str, Any]:
  kernel = rng.normal(size=(count, 3, 2)).astype(np.float32)
  kernel[:, 0, 0] = np.nan
  return {'kernel': kernel, 'none': {},
          'half': rng.normal(size=(count, 5)).astype(ml_dtypes.bfloat16),
          'steps': rng.integers(0, 99, count).astype(np.int32),
          'no_numbers': np.zeros((count, 0, 3), np.float32),
          'hostile': rng.integers(0, 2, count).astype(bool)}


def whole(rows: client_rows.Rows) -> Any:
  return jax.tree.map(np.asarray, rows.memory)


def opened(folder: pathlib.Path, saved: Any = None) -> client_rows.Rows:
  return client_rows.Place('disk', folder).opened(0, first(), saved)


def test_rows_are_those_of_an_array_after_any_ends(tmp_path):
  """Saves, ends before and after a save is written, and damaged saves."""
  rng = np.random.default_rng(0)
  expected = client_rows.Rows(first())
  rows: client_rows.Rows = opened(tmp_path)
  kept: list[tuple[Any, Any]] = []  # The two newest checkpoints.
  most = 0
  for _ in range(400):
    what = rng.choice(['put', 'save', 'end', 'damage'], p=[.6, .2, .15, .05])
    if what == 'put':
      ids = rng.choice(COUNT, 3, replace=False)
      new = some(rng, 3)
      rows.put(ids, new)
      expected.put(ids, new)
    elif what == 'save':
      saved = rows.snapshot()
      if rng.random() < 0.8:  # Else the process ends before it is written.
        kept = [*kept, (saved, jax.tree.map(np.copy, expected.memory))][-2:]
        rows.kept()
        continue
      what = 'end'
    if what in ('end', 'damage'):
      kept = kept[:1] if what == 'damage' else kept
      saved, memory = kept[-1] if kept else (None, first())
      rows, expected = opened(tmp_path, saved), client_rows.Rows(memory)
    assert_same_bits(whole(rows), expected.memory)
    most = max(most, os.path.getsize(tmp_path / '0.rows') // RECORD)
  assert COUNT < most <= 3 * COUNT


def test_a_file_has_no_more_records_than_are_said(tmp_path):
  rng = np.random.default_rng(1)
  for every, rounds in ((1, 30), (3, 30), (0, 5)):
    rows = opened(tmp_path / str(every))
    for i in range(1, rounds + 1):
      rows.put(rng.choice(COUNT, 2, replace=False), some(rng, 2))
      if every and i % every == 0:
        rows.snapshot()
        rows.kept()
    size = os.path.getsize(tmp_path / str(every) / '0.rows')
    assert 0 < size <= RECORD * client_rows.records(COUNT, 2, rounds, every)


def test_a_client_that_never_trained_takes_no_room(tmp_path):
  rows = opened(tmp_path)
  assert_same_bits(rows.take(np.arange(COUNT)),
                   jax.tree.map(np.array, first()))
  assert os.path.getsize(tmp_path / '0.rows') == 0


def test_leaves_read_what_is_asked_for(tmp_path):
  rows = opened(tmp_path)
  new = some(np.random.default_rng(2), 2)
  rows.put(np.array([4, 9]), new)
  leaf = rows.memory['kernel']
  assert (leaf.shape, leaf.dtype, len(leaf)) == ((COUNT, 3, 2), np.float32,
                                                 COUNT)
  np.testing.assert_array_equal(leaf[4], new['kernel'][0])
  np.testing.assert_array_equal(leaf[[9, 4]], new['kernel'][::-1])
  np.testing.assert_array_equal(leaf[-1], first()['kernel'][-1])


@pytest.mark.parametrize('looked', [True, False])
def test_a_reader_sees_its_own_checkpoint_or_nothing(tmp_path, looked):
  """Records that two later checkpoints do not need are used again."""
  rng, ids = np.random.default_rng(4), np.array([3, 7])
  rows = opened(tmp_path)
  rows.put(ids, some(rng, 2))
  saved, expected = rows.snapshot(), whole(rows)
  rows.kept()
  reader = client_rows.Place('disk', tmp_path).opened(
      0, first(), saved, reads_only=True)
  for later in range(4):
    if looked or later == 3:
      try:
        assert_same_bits(whole(reader), expected)
        assert later < 3
      except client_rows.RowsError as error:
        assert later >= 2 and 'has gone on since its checkpoint' in str(error)
    rows.put(ids, some(rng, 2))
    rows.snapshot()
    rows.kept()


def test_a_reader_does_not_trust_a_file_that_was_just_written(tmp_path):
  """Two writes may have one time: a tick of the file system's clock."""
  rng, ids = np.random.default_rng(4), np.array([3])
  rows = opened(tmp_path)
  rows.put(ids, some(rng, 1))
  reader = client_rows.Place('disk', tmp_path).opened(
      0, first(), rows.snapshot(), reads_only=True)
  rows.kept()
  whole(reader)
  written = (tmp_path / '0.rows').stat().st_mtime_ns
  for _ in range(3):
    rows.put(ids, some(rng, 1))
    rows.snapshot()
    rows.kept()
  os.utime(tmp_path / '0.rows', ns=(written, written))
  time.sleep(2 * client_rows._TICK / 1e9)
  with pytest.raises(client_rows.RowsError, match='has gone on since'):
    whole(reader)


def test_a_file_that_is_gone_is_not_made_anew(tmp_path):
  rows = opened(tmp_path)
  rows.put(np.array([5]), some(np.random.default_rng(3), 1))
  saved = rows.snapshot()
  (tmp_path / '0.rows').unlink()
  with pytest.raises(client_rows.RowsError, match='No such file.*Bring back'):
    opened(tmp_path, saved)
  assert not (tmp_path / '0.rows').exists()
  (tmp_path / '0.rows').write_bytes(b'short')
  with pytest.raises(client_rows.RowsError, match='too short.*Bring back'):
    opened(tmp_path, saved)
  assert (tmp_path / '0.rows').read_bytes() == b'short'
  with pytest.raises(client_rows.RowsError, match='Not a dir.*Bring back'):
    opened(tmp_path / '0.rows', saved)


@pytest.mark.parametrize('fault', ['flipped', 'short', 'first', 'missing'])
def test_damage_is_said(tmp_path, fault):
  rows = opened(tmp_path)
  rows.put(np.array([5]), some(np.random.default_rng(3), 1))
  saved = rows.snapshot()
  file = tmp_path / ('0.first' if fault == 'first' else '0.rows')
  data = bytearray(file.read_bytes())
  data[-1] ^= 1
  file.write_bytes(data[:-20] if fault == 'short' else data)
  if fault == 'missing':
    (tmp_path / '0.first').unlink()
  with pytest.raises(client_rows.RowsError, match=str(tmp_path)):
    opened(tmp_path, saved).take(np.array([5]))


@pytest.mark.parametrize('damage', [
    lambda folder: os.truncate(folder / '0.first', 100),
    lambda folder: (folder / '0.first').unlink()])
def test_lost_first_values_name_the_run(tmp_path, damage):
  rows = opened(tmp_path)
  saved = rows.snapshot()
  damage(tmp_path)
  with pytest.raises(client_rows.RowsError,
                     match=f'remove {re.escape(str(tmp_path.parent))}, the'):
    opened(tmp_path, saved)


def test_a_full_disk_is_said(tmp_path, monkeypatch):
  def full(*args: Any) -> int:
    raise OSError(28, os.strerror(28))
  rows = opened(tmp_path)
  monkeypatch.setattr(os, 'pwrite', full)
  with pytest.raises(client_rows.RowsError, match='No space left.*goes on'):
    rows.put(np.array([5]), some(np.random.default_rng(3), 1))
