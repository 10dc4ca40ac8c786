from __future__ import annotations

import os

import numpy as np
import pytest

from fedjax_ssl.data import partition
from fedjax_ssl.data.partition import Partition

C = 10
LABELS = np.repeat(np.arange(C), 100)[np.random.default_rng(7).permutation(
    1000)]


def _rng(seed=0):
  return np.random.default_rng(seed)


def _partition():
  where = partition.choose_labeled(_rng(), LABELS, per_class=5)
  held = partition.choose_validation(
      _rng(), LABELS, fraction=.05, where=~where)
  return partition.make_partition(
      partition.iid_count(_rng(), LABELS, 5, where=where),
      partition.iid_random(_rng(), LABELS, 5, where=~where & ~held), held)


def _save(path, arrays):
  """Writes a file of the same layout without any check."""
  with open(path, 'wb') as file:
    np.savez(file, **arrays)


def test_partition_file_roundtrip(tmp_path):
  path = tmp_path / 'new' / 'p.npz'
  saved = _partition()
  partition.save_partition(path, saved, num_clients=5, labels=LABELS)
  loaded = partition.load_partition(path, 1000, 5, labels=LABELS)
  assert loaded.tasks is None
  for a, b in zip(saved[:3], loaded[:3], strict=True):
    np.testing.assert_array_equal(a, b)
    assert np.asarray(a).dtype == np.asarray(b).dtype
  assert os.listdir(path.parent) == ['p.npz']  # No temporary file is left.
  partition.save_partition(path, saved)
  assert partition.partition_hash(
      partition.load_partition(path, 1000, 5)) == (
          partition.partition_hash(saved))


def test_hash_sees_every_field_and_nothing_else():
  base = _partition()
  base = base._replace(tasks=np.where(base.unlabeled >= 0, 0, -1).astype(
      np.int32))
  same = Partition(*(np.array(field) for field in base))
  assert partition.partition_hash(base) == partition.partition_hash(same)
  hashes = {partition.partition_hash(base)}
  for name in Partition._fields:
    field = getattr(base, name).copy()
    field[3] = not field[3] if field.dtype == bool else field[3] + 1
    hashes.add(partition.partition_hash(base._replace(**{name: field})))
  hashes.add(partition.partition_hash(
      Partition(base.unlabeled, base.labeled, base.validation)))
  hashes.add(partition.partition_hash(base._replace(tasks=None)))
  assert len(hashes) == 7


def test_tasks_of_a_stream_come_back_and_must_fit(tmp_path):
  plain = _partition()
  tasks = np.where(plain.unlabeled >= 0, plain.unlabeled % 2, -1)
  streamed = plain._replace(tasks=tasks.astype(np.int32))
  partition.save_partition(tmp_path / 'p.npz', streamed)
  loaded = partition.load_partition(tmp_path / 'p.npz', 1000, 5)
  np.testing.assert_array_equal(loaded.tasks, streamed.tasks)
  broken = streamed._replace(tasks=np.zeros_like(streamed.tasks))
  partition.save_partition(tmp_path / 'q.npz', broken)
  with pytest.raises(ValueError, match="'tasks' must give a task"):
    partition.load_partition(tmp_path / 'q.npz', 1000, 5)


def _saved_arrays(path):
  partition.save_partition(path, _partition(), num_clients=5, labels=LABELS)
  with np.load(path) as archive:
    return dict(archive)


@pytest.mark.parametrize('examples,clients,labels,match', [
    (999, 5, None, r'int32\[999\]'), (1000, 6, None, 'made for 5 clients'),
    (1000, 5, LABELS[::-1], 'other labels')])
def test_partition_of_something_else_is_refused(
    tmp_path, examples, clients, labels, match):
  path = tmp_path / 'p.npz'
  _saved_arrays(path)
  with pytest.raises(ValueError, match=match) as caught:
    partition.load_partition(path, examples, clients, labels=labels)
  assert str(path) in str(caught.value)


@pytest.mark.parametrize('field,row,value,match', [
    ('labeled', 0, 6, 'names client 6'), ('labeled', 0, -2, 'names client -2'),
    ('unlabeled', 0, 5, 'names client 5')])
def test_ids_out_of_range(tmp_path, field, row, value, match):
  path = tmp_path / 'p.npz'
  arrays = _saved_arrays(path)
  arrays[field][row] = value
  _save(path, arrays)
  with pytest.raises(ValueError, match=match):
    partition.load_partition(path, 1000, 5)


def test_tampered_files(tmp_path):
  path = tmp_path / 'p.npz'
  arrays = _saved_arrays(path)
  def refuses(match, **change):
    kept = {k: v for k, v in {**arrays, **change}.items() if v is not None}
    _save(path, kept)
    with pytest.raises(ValueError, match=match) as caught:
      partition.load_partition(path, 1000, 5)
    assert str(path) in str(caught.value) and '\n' not in str(caught.value)
  row = np.flatnonzero(arrays['labeled'] == 2)[0]
  moved = arrays['labeled'].copy()
  moved[row] = 3
  refuses('hash', labeled=moved)
  twice = arrays['unlabeled'].copy()
  twice[row] = 0
  refuses('1 row twice', unlabeled=twice)
  held = arrays['validation'].copy()
  held[row] = True
  refuses('twice', validation=held)
  refuses("no key 'validation'", validation=None)
  refuses("no key 'hash'", hash=None)
  refuses('format 9', format=np.int64(9))
  refuses('int32', labeled=arrays['labeled'].astype(float))
  refuses('Python objects', labeled=np.array([None] * 1000))
  refuses('size 1', hash=np.array(['a', 'b']))


def test_files_made_by_hand(tmp_path):
  path = tmp_path / 'p.npz'
  labeled = [0, -1, -1, 1, 2]
  unlabeled = [-1, 0, 1, -1, -1]
  np.savez(path, labeled=labeled, unlabeled=unlabeled)
  loaded = partition.load_partition(path, 5, 2, labels=LABELS[:5])
  assert loaded.labeled.tolist() == labeled  # 2 is the server.
  assert loaded.unlabeled.tolist() == unlabeled
  assert not loaded.validation.any() and loaded.tasks is None
  np.savez(path, labeled=labeled, unlabeled=unlabeled,
           validation=np.zeros(5, bool), tasks=[-1, 0, 1, -1, -1])
  loaded = partition.load_partition(path, 5, 2)
  assert np.asarray(loaded.tasks).tolist() == [-1, 0, 1, -1, -1]
  def refuses(match, **arrays):
    _save(path, {'labeled': labeled, 'unlabeled': unlabeled, **arrays})
    with pytest.raises(ValueError, match=match):
      partition.load_partition(path, 5, 2)
  refuses('int32', labeled=np.array(labeled, float))
  refuses('names task 100000000; with 5 rows tasks are 0 to 4 at most',
          tasks=[-1, 0, 10**8, -1, -1])
  refuses('names client 3', labeled=np.array([3, -1, -1, 1, 2]))
  refuses(r'int32\[5\]', unlabeled=unlabeled[:4])
  refuses('1 row twice', unlabeled=[0, *unlabeled[1:]])
  refuses('bool', validation=[0] * 5)
  refuses("'lables' is none of", lables=labeled)
  refuses('32 bits', labeled=np.array(labeled) + 2**40)
  _save(path, {'labeled': labeled})
  with pytest.raises(ValueError, match="no key 'unlabeled'"):
    partition.load_partition(path, 5, 2)


def test_broken_files(tmp_path):
  path = tmp_path / 'p.npz'
  with pytest.raises(ValueError, match='No such file|truncated'):
    partition.load_partition(path, 1000, 5)
  _saved_arrays(path)
  whole = path.read_bytes()
  path.write_bytes(whole[:-100])
  with pytest.raises(ValueError, match='truncated'):
    partition.load_partition(path, 1000, 5)
  path.write_bytes(whole[:200] + b'\xff' * 9 + whole[209:])
  with pytest.raises(ValueError, match='partition file'):
    partition.load_partition(path, 1000, 5)


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
  path = tmp_path / 'p.npz'
  partition.save_partition(path, _partition())
  before = path.read_bytes()
  def fail(*args):
    raise OSError('disk full')
  monkeypatch.setattr(os, 'fsync', fail)
  with pytest.raises(OSError, match='disk full'):
    partition.save_partition(path, _partition())
  assert path.read_bytes() == before and os.listdir(tmp_path) == ['p.npz']
