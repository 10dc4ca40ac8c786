r"""Memory of a federation of 100,000 clients: index tables only.

Growth of the process beyond the examples: for 100 clients, which pays for JAX
and the compiler, for 200, which pays for one more program, and for the large
federation, which adds its clients to that.

python experiments/benchmarks/memory.py
"""
from __future__ import annotations

import ctypes
import gc
import os
import pathlib
import sys
from typing import Any

from absl import flags
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import harness
from experiments.benchmarks.counting import round_memory as round_memory
import fedjax_ssl as fssl

FLAGS = flags.FLAGS

flags.DEFINE_integer('num_clients', 100_000, 'Clients.', lower_bound=1000)
flags.DEFINE_integer('rows', 10, 'Rows of each client.', lower_bound=1)
flags.DEFINE_integer('side', 8, 'Of the gray images.', lower_bound=4)
flags.DEFINE_string('model', 'cnn', 'Network.')

QUICK = {'num_clients': 1000, 'rows': 2, 'model': 'linear', 'num_devices': 1}


def tables(federation: fssl.Federation) -> int:
  """Bytes of the tables that say who owns which rows."""
  return sum(np.asarray(leaf).nbytes for leaf in federation.clients)


def resident() -> int:
  """Bytes of memory that this process needs now."""
  gc.collect()
  try:
    # Freed memory that the allocator keeps back is not in use.
    ctypes.CDLL(None).malloc_trim(0)
  except (AttributeError, OSError):  # Not the GNU library: counted as used.
    pass
  try:
    with open('/proc/self/statm', encoding='ascii') as file:
      return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')
  except OSError:
    raise ValueError('/proc/self/statm cannot be read: this benchmark needs '
                     'Linux.') from None


def _federation(num_clients: int) -> fssl.Federation:
  owner = np.repeat(np.arange(num_clients, dtype=np.int32), FLAGS.rows)
  train = harness.examples(owner.size, (FLAGS.side, FLAGS.side, 1))
  return harness.federate(train, owner, num_clients=num_clients)


def _grow(num_clients: int, spec: fssl.TaskSpec, mesh: Any) -> tuple[Any, int]:
  """Runs a round; returns what must stay alive, and bytes of growth.

  The examples themselves are left out: one copy on the host, one a device.
  """
  before = resident()
  federation = _federation(num_clients)
  made = harness.Simulation(spec, federation, mesh)
  made.advance(1)
  data = sum(leaf.nbytes for leaf in federation.train)
  copies = 1 + FLAGS.num_devices
  return (federation, made), resident() - before - copies * data


def main() -> None:
  """Measures and reports."""
  mesh = harness.make_mesh()
  spec = fssl.TaskSpec(10, (FLAGS.side, FLAGS.side, 1), model=FLAGS.model,
                       weak='none', strong='none', method='fedavg',
                       cohort_size=10)
  alive, growth = [], {}
  for num_clients in (100, 200, FLAGS.num_clients):
    made, growth[num_clients] = _grow(num_clients, spec, mesh)
    alive.append(made)
  federation = alive[-1][0]
  found = {
      'examples': sum(leaf.nbytes for leaf in federation.train),
      'index tables': tables(federation),
      **{f'process beyond the examples, {n} clients': size
         for n, size in growth.items()},
      'the large federation beyond that of 200':
          growth[FLAGS.num_clients] - growth[200],
      **{f'one round on one device: {k}': v
         for k, v in round_memory(spec, federation).items()}}
  harness.report(
      'memory',
      [[f'{FLAGS.num_clients} clients x {FLAGS.rows} rows', 'MB',
        'bytes/client'],
       *[[name, f'{size / 1e6:.1f}', f'{size / FLAGS.num_clients:.0f}']
         for name, size in found.items()]], found)


if __name__ == '__main__':
  harness.run(main, QUICK)
