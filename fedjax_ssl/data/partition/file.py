"""The partition of one run as a value: saved, loaded, hashed, checked."""
from __future__ import annotations

import hashlib
import io
import os
import pathlib
from typing import NamedTuple

import numpy as np

from fedjax_ssl.core import descriptions, disk
from fedjax_ssl.data import files

_FORMAT = 1
_DTYPES = {'labeled': 'int32', 'unlabeled': 'int32', 'validation': 'bool',
           'tasks': 'int32'}
# Keys that runs write besides; a file with none of them was made by hand.
_OF_RUNS = {'format', 'hash', 'num_clients', 'data'}


class Partition(NamedTuple):
  """Who owns which row of the training examples.

  A row is used once: at most one of the first three fields claims it.
  """

  labeled: np.ndarray  # int32[D] owner of a labeled row, N the server, or -1.
  unlabeled: np.ndarray  # int32[D] owner of an unlabeled row in [0, N), or -1.
  validation: np.ndarray  # bool[D] rows the server keeps to validate.
  # int32[D] task of each unlabeled row, -1 elsewhere; None without a stream.
  tasks: np.ndarray | None = None


def make_partition(labeled: np.ndarray, unlabeled: np.ndarray,
                   validation: np.ndarray | None = None,
                   tasks: np.ndarray | None = None) -> Partition:
  """Makes a Partition with the right dtypes; by default no row validates.

  Raises:
    ValueError: unless owners and tasks are integers that int32 holds.
  """
  labeled = _integers('labeled', labeled)
  if validation is None:
    validation = np.zeros(labeled.shape, bool)
  return Partition(labeled, _integers('unlabeled', unlabeled),
                   np.asarray(validation),
                   None if tasks is None else _integers('tasks', tasks))


def _integers(name: str, given: np.ndarray) -> np.ndarray:
  array = np.asarray(given)
  if array.dtype.kind not in 'iu':
    raise ValueError(f'partition field {name!r} must hold integers, not '
                     f'{array.dtype}')
  if array.size and not -2**31 <= int(array.min()) <= int(array.max()) < 2**31:
    raise ValueError(f'partition field {name!r} has numbers beyond 32 bits')
  return array.astype(np.int32)


def check_partition(partition: Partition, num_examples: int,
                    num_clients: int) -> None:
  """Raises ValueError unless the partition fits D examples and N clients."""
  for name, dtype in _DTYPES.items():
    if name == 'tasks' and partition.tasks is None:
      continue
    field = np.asarray(getattr(partition, name))
    if field.dtype != dtype or field.shape != (num_examples,):
      raise ValueError(
          f'partition field {name!r} must be {dtype}'
          f'[{num_examples}], one entry per training example, not '
          f'{field.dtype}{list(field.shape)}')
  for name, most in (('labeled', num_clients), ('unlabeled', num_clients - 1)):
    field = getattr(partition, name)
    bad = field[(field < -1) | (field > most)]
    if bad.size:
      raise ValueError(f'partition field {name!r} names client {bad[0]}; with '
                       f'{num_clients} clients ids are -1 to {most}')
  if (tasks := partition.tasks) is not None:
    if ((tasks >= 0) != (partition.unlabeled >= 0)).any():
      raise ValueError("partition field 'tasks' must give a task to each "
                       'unlabeled row and -1 to all others')
    if tasks.max(initial=-1) >= num_examples:  # Each task has a table.
      raise ValueError(f"partition field 'tasks' names task {tasks.max()}; "
                       f'with {num_examples} rows tasks are 0 to '
                       f'{num_examples - 1} at most')
  claims = ((partition.labeled >= 0).astype(int) + (partition.unlabeled >= 0)
            + partition.validation)
  if (claims > 1).any():
    used = descriptions.count(int((claims > 1).sum()), 'row')
    raise ValueError(f'partition uses {used} twice, first row '
                     f'{int(np.argmax(claims > 1))}')


def partition_hash(partition: Partition) -> str:
  """Computes a hex digest that changes with any owner, but not by machine."""
  digest = hashlib.sha256(f'partition {_FORMAT}'.encode())
  for field in partition:
    if field is None:
      continue
    field = np.ascontiguousarray(
        field, '|b1' if np.asarray(field).dtype == bool else '<i4')
    digest.update(str(field.shape).encode() + field.tobytes())
  return digest.hexdigest()


def _fingerprint(labels: np.ndarray) -> str:
  labels = np.ascontiguousarray(labels, '<i4')
  return hashlib.sha256(labels.tobytes()).hexdigest()


def save_partition(path: str | os.PathLike[str], partition: Partition, *,
                   num_clients: int | None = None,
                   labels: np.ndarray | None = None) -> None:
  """Writes the partition as .npz; a crash leaves the old file or the new one.

  Args:
    path: file to write; its folder is made.
    partition: what to write.
    num_clients: N, stored so that loading checks it.
    labels: int[D], all true labels; their fingerprint is stored so that
      loading notices another data set or another order of it.
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  arrays = dict(
      {k: v for k, v in partition._asdict().items() if v is not None},
      format=np.int64(_FORMAT),
      hash=np.str_(partition_hash(partition)),
      num_clients=np.int64(-1 if num_clients is None else num_clients),
      data=np.str_('' if labels is None else _fingerprint(labels)))
  whole = io.BytesIO()
  np.savez_compressed(whole, **arrays)
  disk.replace(path, whole.getvalue())


def _by_hand(arrays: dict[str, np.ndarray], num_examples: int,
             num_clients: int) -> Partition:
  """The partition of a file that no run has written; see `load_partition`."""
  for name in ('labeled', 'unlabeled'):
    if name not in arrays:
      raise ValueError(f'no key {name!r}; it has '
                       f'{", ".join(sorted(arrays)) or "none"}')
  strange = sorted(set(arrays) - set(_DTYPES))
  if strange:
    raise ValueError(f'key {strange[0]!r} is none of {", ".join(_DTYPES)}')
  for name, array in arrays.items():
    if _DTYPES[name] == 'int32' and array.dtype.kind in 'iu':
      arrays[name] = _integers(name, array)
  made = Partition(arrays['labeled'], arrays['unlabeled'],
                   arrays.get('validation', np.zeros(num_examples, bool)),
                   arrays.get('tasks'))
  check_partition(made, num_examples, num_clients)
  return made


def load_partition(path: str | os.PathLike[str], num_examples: int,
                   num_clients: int, *, labels: np.ndarray | None = None
                   ) -> Partition:
  """Reads and checks a partition.

  A file made by hand needs two arrays: `labeled` and `unlabeled`, integers [D],
  the client 0 to N-1 of each training row or -1. `labeled` may also have N, for
  a row of the server. The file may have `validation`, bool [D], the rows that
  the server keeps to validate; and `tasks`, integers [D], the task of each
  unlabeled row and -1 elsewhere. A row is used once at most.

  Args:
    path: file made by `save_partition`, or by hand with `numpy.savez`.
    num_examples: D.
    num_clients: N.
    labels: int[D], compared with the fingerprint if the file holds one.

  Raises:
    ValueError: if the file is missing, broken or changed, or was made for
      another data set or number of clients; the message names the file.
  """
  try:
    arrays = files.read_arrays(path)
    if not _OF_RUNS & set(arrays):
      return _by_hand(arrays, num_examples, num_clients)
    absent = {'labeled', 'unlabeled', 'validation', 'format', 'hash',
              'num_clients', 'data'}
    absent -= set(arrays)
    if absent:
      raise ValueError(f'no key {sorted(absent)[0]!r}')
    if arrays['format'].item() != _FORMAT:
      raise ValueError(f'format {arrays["format"]}, expected {_FORMAT}')
    partition = Partition(arrays['labeled'], arrays['unlabeled'],
                          arrays['validation'], arrays.get('tasks'))
    made_for = arrays['num_clients'].item()
    if made_for not in (-1, num_clients):
      raise ValueError(f'made for {made_for} clients, not {num_clients}')
    check_partition(partition, num_examples, num_clients)
    if arrays['hash'].item() != partition_hash(partition):
      raise ValueError('its contents do not match its hash')
    made_of = arrays['data'].item()
    if made_of and labels is not None and made_of != _fingerprint(labels):
      raise ValueError('made for a data set with other labels')
  except (ValueError, OSError) as error:
    raise ValueError(f'partition file {os.fspath(path)}: {error}') from error
  return partition
