"""What clients keep between rounds, in the memory of the host or on its disk.

A round needs the rows of its cohort alone: they go to the devices before it and
come back after it. The bits are those of a run that has all rows there.

On disk, all rows of a seed are records of one file, `memory/<seed>.rows`. A
client that has not trained yet has no record: its row is its initial value,
which is in `memory/<seed>.first`. A record that a checkpoint needs is never
written to: the client's next row goes to another one, and a checkpoint holds
which record is whose, with its CRC-32. So a kill at any moment, also
in a save, leaves all records of the newest checkpoints as they were, and a save
copies nothing but this table. Records that none of the two newest checkpoints
needs are used again.

So the file has a record for each client that has trained, and one more for each
that has trained since the older one of the two newest checkpoints, twice if it
did so in both spans. Reads and writes are plain calls, not a memory map: there
a full disk would end the process without a word.
"""
from __future__ import annotations

from collections.abc import Iterator
import contextlib
import errno
import hashlib
import io
import math
import os
import pathlib
import time
from typing import Any, NamedTuple
import zlib

import jax
import numpy as np

from fedjax_ssl.core import disk
from fedjax_ssl.core.types import PyTree

KINDS = ('device', 'host', 'disk')
FOLDER = 'memory'  # Of a run on disk.
# Errors of a file that is gone, or something else; others may pass.
_LOST = errno.ENOENT, errno.EIO, errno.ENOTDIR, errno.EISDIR
_TICK = 50_000_000  # Nanoseconds; clocks of file systems have about 4 ms.


class RowsError(ValueError):
  """Rows cannot be written, or are not those of the checkpoint."""


class Place(NamedTuple):
  """Where rows are: one of `KINDS`, and the folder of those on disk."""

  kind: str = 'device'
  folder: pathlib.Path | None = None

  def saved(self, memory: PyTree) -> PyTree:
    """Shapes of what a checkpoint holds of a memory [N, ...] of shapes."""
    leaves = jax.tree.leaves(memory)
    if self.kind != 'disk' or not leaves:
      return memory
    count = leaves[0].shape[0]
    return Table(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (
        ((count,), np.int32), ((count,), np.uint32), ((count,), np.int32),
        ((), np.int32), ((32,), np.uint8))))

  def opened(self, seed: int, memory: PyTree, saved: PyTree | None, *,
             reads_only: bool = False) -> Rows:
    """Returns the rows of a seed.

    Args:
      seed: whose.
      memory: [N, ...], initial values; shapes are enough where all is saved.
      saved: what a checkpoint holds of them; None at the start.
      reads_only: nobody will `put` rows.

    Raises:
      RowsError: if files are missing or cannot be written.
    """
    if self.kind == 'host':
      return Rows(memory if saved is None else saved)
    assert self.folder is not None
    return RowsOnDisk(self.folder, seed, memory, saved, reads_only=reads_only)


ON_DEVICES = Place()


class Rows:
  """All rows in arrays on the host."""

  def __init__(self, memory: PyTree):
    """Copies [N, ...]."""
    self.memory = jax.tree.map(np.array, memory)

  def take(self, ids: np.ndarray, out: PyTree = None) -> PyTree:
    """Returns the rows of clients, [K, ...], in the first of `out` if given."""
    out = empty(self.memory, len(ids)) if out is None else out
    for x, into in zip(jax.tree.leaves(self.memory), jax.tree.leaves(out),
                       strict=True):
      np.take(x, ids, axis=0, out=into[:len(ids)], mode='clip')
    return out

  def put(self, ids: np.ndarray, rows: PyTree) -> None:
    """Replaces rows of clients by [K, ...]."""
    def one(x: np.ndarray, new: np.ndarray) -> None:
      x[ids] = new
    jax.tree.map(one, self.memory, rows)

  def snapshot(self) -> PyTree:
    """Returns what a checkpoint holds."""
    return self.memory

  def kept(self) -> None:
    """Hears that the checkpoint with the newest snapshot is written."""


class Table(NamedTuple):
  """What a checkpoint holds of rows on disk.

  Attributes:
    place: int32[N], the record of each client; -1: it has its first value.
    sums: uint32[N], CRC-32 of each client's record.
    before: int32[N], `place` of the checkpoint before it, which may be needed
      where this one is damaged.
    used: int32[], records of the file that may be needed.
    first: uint8[32], SHA-256 of the file of first values.
  """

  place: Any
  sums: Any
  before: Any
  used: Any
  first: Any


class _Leaf(NamedTuple):
  """One leaf of a row, in a record."""

  shape: tuple[int, ...]  # Of a row.
  dtype: np.dtype[Any]
  offset: int
  size: int  # Bytes.
  values: np.ndarray  # First values: [1, ...] if all have the same, or [N, ...]

  def of(self, ids: np.ndarray) -> np.ndarray:
    return self.values[ids if len(self.values) > 1 else np.zeros_like(ids)]


class RowsOnDisk(Rows):
  """Rows in a file; see the module."""

  def __init__(self, folder: pathlib.Path, seed: int, memory: PyTree,
               saved: Table | None, *, reads_only: bool = False):
    """Opens or begins the files of a seed; see `Place.opened`."""
    self._file = folder / f'{seed}.rows'
    self._count = jax.tree.leaves(memory)[0].shape[0]
    first = folder / f'{seed}.first'
    with _naming(self._file):
      if saved is None:
        folder.mkdir(parents=True, exist_ok=True)
        disk.replace(first, _packed(memory))
      data = first.read_bytes()
      # Before anything is read from it: it compares the file's hash.
      self._table = _begin(self._count, data, saved)
      self._leaves = list(_unpacked(data, memory))
      self._size = sum(leaf.size for leaf in self._leaves)  # Bytes of a record.
      self._descriptor = os.open(
          self._file, os.O_RDONLY if reads_only else
          os.O_RDWR | (os.O_CREAT if saved is None else 0), 0o666)
      length = self._size * int(self._table.used)
      if os.fstat(self._descriptor).st_size < length:
        raise OSError(errno.EIO, 'the file is too short')
      if not reads_only:
        os.ftruncate(self._descriptor, length)
    self._others_write = reads_only  # At any time: whoever trains.
    self._written = 0  # Time of their last write that is known, in ns.
    self._fresh = np.zeros(self._count, bool)  # Written since the last save.
    self._seen = np.zeros(self._count, bool)  # Its sums were looked at.
    self._free = self._unneeded()
    # From now on the newest checkpoint is the one before the next.
    self._table.before[:] = self._table.place
    self.memory = jax.tree.unflatten(jax.tree.structure(memory), [
        LeafOnDisk(self, i) for i in range(len(self._leaves))])

  def __del__(self) -> None:
    if (descriptor := getattr(self, '_descriptor', None)) is not None:
      os.close(descriptor)

  def leaf(self, i: int) -> _Leaf:
    """Returns what is known of a leaf."""
    return self._leaves[i]

  def __len__(self) -> int:
    return self._count

  def take(self, ids: np.ndarray, out: PyTree = None) -> PyTree:
    """Returns the rows of clients, [K, ...], in the first of `out` if given."""
    out = empty(self.memory, len(ids)) if out is None else out
    self._read(ids, list(zip(self._leaves, map(
        _bytes, jax.tree.leaves(out)), strict=True)))
    return out

  def read(self, i: int, ids: np.ndarray) -> np.ndarray:
    """Reads one leaf of the rows of clients, [K, ...]."""
    leaf = self._leaves[i]
    out = np.empty((len(ids), *leaf.shape), leaf.dtype)
    self._read(ids, [(leaf, _bytes(out))])
    return out

  def _read(self, ids: np.ndarray, parts: list[tuple[_Leaf, np.ndarray]]
            ) -> None:
    """Fills the first rows of parts, uint8[K, size], with leaves of clients."""
    for k, client in enumerate(ids):
      place = int(self._table.place[client])
      if place < 0:
        for leaf, rows in parts:
          rows[k] = _bytes(leaf.of(client[None]))[0]
        continue
      still = self._is_still()
      if self._seen[client]:
        with _naming(self._file):
          for leaf, rows in parts:
            _read(self._descriptor, rows[k], self._size * place + leaf.offset)
        still = self._is_still()
      if not self._seen[client]:
        record = self._read_record(client)
        for leaf, rows in parts:
          rows[k] = record[leaf.offset:leaf.offset + leaf.size]
        self._seen[client] = still

  def _is_still(self) -> bool:
    """Returns whether nobody else is writing; if they did, nothing is seen."""
    if not self._others_write:
      return True
    with _naming(self._file):
      written = os.fstat(self._descriptor).st_mtime_ns
    # Two writes in one tick of the file system's clock have one time.
    still = time.time_ns() - written > _TICK
    if not still or written != self._written:
      self._seen[:] = False
      self._written = written
    return still

  def put(self, ids: np.ndarray, rows: PyTree) -> None:
    """Replaces rows of clients by [K, ...]."""
    parts = [_bytes(np.ascontiguousarray(x)) for x in jax.tree.leaves(rows)]
    place, sums = self._table.place, self._table.sums
    for k, client in enumerate(ids):
      if not self._fresh[client]:
        place[client] = self._free_record()
        self._fresh[client] = self._seen[client] = True
      total = 0
      for leaf, part in zip(self._leaves, parts, strict=True):
        total = zlib.crc32(memoryview(part[k]), total)
        with _naming(self._file):
          _write(self._descriptor, part[k],
                 self._size * int(place[client]) + leaf.offset)
      sums[client] = total

  def _read_record(self, client: int) -> np.ndarray:
    """Returns a record, uint8; raises RowsError unless it is what was saved."""
    record: Any = np.empty(self._size, np.uint8)
    with _naming(self._file):
      _read(self._descriptor, record,
            self._size * int(self._table.place[client]))
    if zlib.crc32(memoryview(record)) != self._table.sums[client]:
      on = ('If the run has gone on since its checkpoint was read, read that '
            'again. Else ' if self._others_write else '')
      advice = (f'{on}bring back a copy of the file, or remove '
                f'{self._file.parent.parent}, the whole run, and run again.')
      raise RowsError(f'{self._file}: what client {client} keeps is not what '
                      'the checkpoint was saved with. '
                      f'{advice[0].upper()}{advice[1:]}')
    return record

  def _free_record(self) -> int:
    """Returns the number of a record that nobody needs."""
    if self._free:
      return self._free.pop()
    record = int(self._table.used)
    self._table = self._table._replace(used=np.int32(record + 1))
    return record

  def snapshot(self) -> PyTree:
    """Flushes all rows; the table, which is what a checkpoint holds."""
    with _naming(self._file):
      os.fsync(self._descriptor)
      disk.fsync(self._file.parent)
    self._fresh[:] = False
    return jax.tree.map(np.copy, self._table)

  def kept(self) -> None:
    """Frees what neither this checkpoint nor the one before it needs."""
    self._free = self._unneeded()
    self._table.before[:] = self._table.place

  def _unneeded(self) -> list[int]:
    needed = np.zeros(int(self._table.used), bool)
    for place in (self._table.place, self._table.before):
      needed[place[place >= 0]] = True
    return np.flatnonzero(~needed)[::-1].tolist()


class LeafOnDisk:
  """One leaf [N, ...] of rows on disk, of which `x[i]` reads some."""

  def __init__(self, rows: RowsOnDisk, i: int):
    """Takes the rows, and which leaf."""
    self._rows, self._i = rows, i
    leaf = rows.leaf(i)
    self.shape, self.dtype = (len(rows), *leaf.shape), leaf.dtype
    self.ndim, self.size = len(self.shape), math.prod(self.shape)

  def __len__(self) -> int:
    return self.shape[0]

  def __getitem__(self, ids: Any) -> np.ndarray:
    chosen = np.arange(len(self), dtype=np.int32)[ids]
    found: np.ndarray = self._rows.read(self._i, np.atleast_1d(chosen))
    return found.reshape(*np.shape(chosen), *self.shape[1:])

  def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
    return self[:] if dtype is None else self[:].astype(dtype)


def empty(memory: PyTree, count: int) -> PyTree:
  """Makes room on the host for the rows of so many clients, zeros.

  A processor computes with these very bytes where they begin at a multiple of
  64, and copies them to new memory where not.
  """
  def one(x: Any) -> np.ndarray:
    shape, kind = (count, *x.shape[1:]), np.dtype(x.dtype)
    size = math.prod(shape) * kind.itemsize
    room = np.zeros(size + 64, np.uint8)
    begin = -room.ctypes.data % 64
    return room[begin:begin + size].view(kind).reshape(shape)
  return jax.tree.map(one, memory)


def rows_of(memory: PyTree, ids: np.ndarray) -> PyTree:
  """Rows [K, ...] of a memory; all of it where it is on a device."""
  return jax.tree.map(lambda x: x[ids] if isinstance(
      x, LeafOnDisk | np.ndarray) else x, memory)


def chunks(count: int, size: int) -> Iterator[np.ndarray]:
  """Ids of all clients, so many at a time; the last one fills up a chunk."""
  for start in range(0, count, size):
    yield np.minimum(np.arange(start, start + size), count - 1)


def records(num_clients: int, reads: int, num_rounds: int, every: int) -> int:
  """Records that a file has at most.

  Args:
    num_clients: N.
    reads: clients of a round.
    num_rounds: of the run.
    every: rounds between checkpoints; 0 is the end alone.
  """
  trained = min(num_clients, reads * num_rounds)
  between = min(trained, reads * (every or num_rounds))
  return min(reads * num_rounds, trained + 2 * between)


def _begin(count: int, first: bytes, saved: Table | None) -> Table:
  """Returns the table of the start, or the saved one, with its files."""
  digest = np.frombuffer(hashlib.sha256(first).digest(), np.uint8)
  if saved is None:
    return Table(np.full(count, -1, np.int32), np.zeros(count, np.uint32),
                 np.full(count, -1, np.int32), np.int32(0), digest)
  if not np.array_equal(saved.first, digest):
    raise OSError(errno.EIO, 'the first values are not those of the checkpoint')
  return Table(np.array(saved.place), np.array(saved.sums),
               np.array(saved.before), np.int32(saved.used), digest)


def _packed(memory: PyTree) -> bytes:
  """First values as a file; once where all clients have the same."""
  def one(x: Any) -> np.ndarray:
    x = np.asarray(x)
    same = x.shape[0] > 1 and x.strides[0] == 0
    return _bytes(np.ascontiguousarray(x[:1] if same else x))
  file = io.BytesIO()
  arrays: dict[str, Any] = {
      str(i): one(x) for i, x in enumerate(jax.tree.leaves(memory))}
  np.savez(file, **arrays)
  return file.getvalue()


def _unpacked(data: bytes, memory: PyTree) -> Iterator[_Leaf]:
  """Returns the leaves of a row, of which `memory` has the shapes."""
  offset = 0
  with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
    for i, x in enumerate(jax.tree.leaves(memory)):
      values = arrays[str(i)]
      shape, kind = x.shape[1:], np.dtype(x.dtype)
      size = math.prod(shape) * kind.itemsize
      yield _Leaf(shape, kind, offset, size,
                  values.reshape(-1).view(kind).reshape(-1, *shape)
                  if size else np.zeros((len(values), *shape), kind))
      offset += size


def _bytes(rows: np.ndarray) -> np.ndarray:
  """uint8[K, bytes of a row], the same memory."""
  count = len(rows)
  size = math.prod(rows.shape[1:]) * rows.dtype.itemsize
  if not count * size:
    return np.zeros((count, size), np.uint8)
  return rows.reshape(count, -1).view(np.uint8)


def _read(descriptor: int, into: Any, offset: int) -> None:
  """Fills an array of bytes."""
  view = memoryview(into)
  while view:
    count = os.preadv(descriptor, [view], offset)
    if not count:
      raise OSError(errno.EIO, 'the file ends too early')
    view, offset = view[count:], offset + count


def _write(descriptor: int, data: Any, offset: int) -> None:
  view = memoryview(data)
  while view:
    count = os.pwrite(descriptor, view, offset)
    view, offset = view[count:], offset + count


@contextlib.contextmanager
def _naming(file: pathlib.Path) -> Iterator[None]:
  """Turns faults of the system into one line that names the file."""
  try:
    yield
  except OSError as error:
    lost = error.errno in _LOST
    raise RowsError(
        f'{file}: what clients keep cannot be read or written: '
        f'{error.strerror or error}. ' + (
            f'Bring back a copy of {file.parent}, or remove '
            f'{file.parent.parent}, the whole run, and run again.'
            if lost else 'Earlier checkpoints are kept; with room and the '
            'rights to write, training goes on from the newest one.')
    ) from error

