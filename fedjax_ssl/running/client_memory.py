"""Checks that what clients keep between rounds fits where it is kept."""
from __future__ import annotations

from collections.abc import Sequence
import pathlib
import shutil

import jax

from fedjax_ssl.config import Config, FieldError
from fedjax_ssl.core import partial_memory, tree
from fedjax_ssl.core.types import Federation, Method, State
from fedjax_ssl.data import files
from fedjax_ssl.training import client_rows


def memory(num_devices: int = 0) -> int:
  """Returns the bytes of memory of so many devices together; 0 is all.

  Devices of a CPU share it: there it is that of all hosts.
  """
  each = jax.local_devices()[0].memory_stats() or {}
  if 'bytes_limit' in each:
    return int(each['bytes_limit']) * (num_devices or jax.device_count())
  return files.memory() * jax.process_count()


def place(options: Config, folder: pathlib.Path) -> client_rows.Place:
  """Returns where a run in a folder has what its clients keep."""
  return client_rows.Place(options.client_memory, folder / client_rows.FOLDER)


def check(options: Config, method: Method, state: State,
          federations: Sequence[Federation], folder: pathlib.Path, *,
          has_begun: bool) -> None:
  """Refuses more clients than there is room for what they keep.

  A run that has begun finds out by itself whether its disk is full. It may need
  no more room, as when it is evaluated, and can wait for some.

  Args:
    options: what is asked for.
    method: of the run.
    state: of one seed; only its shapes are used.
    federations: of each seed.
    folder: of the run.
    has_begun: whether the folder holds the run.

  Raises:
    FieldError: for num_clients, or for client_memory where the method does not
      go with it.
  """
  total = tree.num_bytes(state.memory) * len(federations)
  if not total:
    return
  kind = options.client_memory
  if kind == 'device':
    # Where they cannot be split evenly, each device has all of them.
    size = options.num_devices or jax.device_count()
    copies = 1 if options.num_clients % size == 0 else size
    if copies * total > (most := memory(options.num_devices)):
      each = '' if copies == 1 else (
          f' for a copy on each of {size} devices, as num_clients is no '
          'multiple of them')
      raise _too_many(options, total, len(federations),
                      f'there are {_gib(most)} of memory{each}',
                      _ways_on(options, method, state, federations, folder))
    return
  if options.distributed:
    raise FieldError('client_memory', kind, 'is for runs of one process; give '
                     'device.', distributed=True)
  if options.seed_map == 'vmap' and len(federations) > 1:
    raise FieldError('client_memory', kind, 'seeds go one after another; give '
                     'seed_map=map.', seed_map='vmap')
  reads = _check_goes(options, method, state, federations[0])
  if kind == 'host' and total > (most := files.memory()):
    raise _too_many(options, total, len(federations),
                    f'the host has {_gib(most)} of memory',
                    _ways_on(options, method, state, federations, folder))
  if kind == 'disk' and not has_begun:
    need, free = _on_disk(options, state, federations, folder, reads)
    if need > free:
      raise _too_many(options, total, len(federations), f'the files may need '
                      f'{_gib(need)} and {folder} has {_gib(free)} of disk', '')


def _too_many(options: Config, total: int, seeds: int, room: str, ways: str
              ) -> FieldError:
  clients = options.num_clients
  beside = {} if options.client_memory == 'device' else {
      'client_memory': options.client_memory}
  return FieldError(
      'num_clients', clients, 'between rounds each client keeps '
      f'{_gib(total / seeds / clients)}, which is {_gib(total)} for '
      f'all clients of {seeds} seed{"s" * (seeds > 1)}, and {room}. Take '
      f'{ways}fewer clients or seeds, or a smaller network.',
      method=options.method, **beside)


def _gib(size: float) -> str:
  """A size in GiB, or in MiB or KiB if it is small."""
  for power, unit in ((30, 'GiB'), (20, 'MiB')):
    if size >= 2**power / 10:
      return f'{size / 2**power:.1f} {unit}'
  return f'{size / 2**10:.1f} KiB'


def _ways_on(options: Config, method: Method, state: State,
             federations: Sequence[Federation], folder: pathlib.Path) -> str:
  """Says which other places there is room at."""
  if options.distributed:
    return ''
  total = tree.num_bytes(state.memory) * len(federations)
  ways = ['host'] if total <= files.memory() else []
  try:
    reads = _check_goes(options, method, state, federations[0])
  except FieldError:
    return ''
  need, free = _on_disk(options, state, federations, folder, reads)
  ways += ['disk'] if need <= free else []
  return ''.join(f'client_memory={way}, ' for way in ways)


def _check_goes(options: Config, method: Method, state: State,
                federation: Federation) -> int:
  """Returns how many clients' rows a round needs, where it needs no others.

  Raises:
    FieldError: where it changes or reads all of them.
  """
  try:
    return partial_memory.readers(method, state, federation,
                                  jax.random.key(0))[1]
  except partial_memory.DependsOnMemoryError as error:
    raise FieldError('client_memory', options.client_memory, str(error),
                     method=options.method) from error


def _on_disk(options: Config, state: State, federations: Sequence[Federation],
             folder: pathlib.Path, reads: int) -> tuple[int, int]:
  """Bytes that files of rows may need, and that they may have."""
  clients = federations[0].num_clients
  row = tree.num_bytes(state.memory) // clients
  count = client_rows.records(clients, reads, options.num_rounds,
                              options.checkpoint_every)
  there = folder.absolute()
  while not there.exists():
    there = there.parent
  old = sum(file.stat().st_blocks * 512
            for file in (folder / client_rows.FOLDER).glob('*.rows'))
  return count * row * len(federations), shutil.disk_usage(there).free + old
