"""Checks that what clients keep between rounds fits into the memory."""
from __future__ import annotations

from collections.abc import Sequence

import jax

from fedjax_ssl.config import Config, FieldError
from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Federation, State
from fedjax_ssl.data import files


def memory(num_devices: int = 0) -> int:
  """Returns the bytes of memory of so many devices together; 0 is all."""
  each = jax.local_devices()[0].memory_stats() or {}
  if 'bytes_limit' in each:
    return int(each['bytes_limit']) * (num_devices or jax.device_count())
  return files.memory() * jax.process_count()


def check(options: Config, state: State,
          federations: Sequence[Federation]) -> None:
  """Refuses more clients than there is memory for what they keep.

  Args:
    options: what is asked for.
    state: of one seed; only its shapes are used.
    federations: of each seed.

  Raises:
    FieldError: for num_clients.
  """
  clients = federations[0].num_clients
  total = tree.num_bytes(state.memory) * len(federations)
  most = memory(options.num_devices)
  if total > most:
    raise FieldError(
        'num_clients', clients, 'between rounds each client keeps '
        f'{total / len(federations) / clients / 2**20:.1f} MiB, which is '
        f'{total / 2**30:.1f} GiB for all clients of {len(federations)} '
        f'seed{"s" * (len(federations) > 1)}, and there are {most / 2**30:.1f} '
        'GiB of memory. Take fewer clients or seeds, or a smaller network.',
        method=options.method)
