r"""Memory of a federation of 100,000 clients: index tables only.

A federation of 100 clients of the same rows runs a round first and pays for
JAX and the compiler; what the large one adds is then clients alone.

python experiments/benchmarks/memory.py
"""
from __future__ import annotations

import gc
import os

from absl import flags
import harness
import jax
import jax.numpy as jnp
import numpy as np

import fedjax_ssl as fssl
from fedjax_ssl.training import seeds

FLAGS = flags.FLAGS

flags.DEFINE_integer('num_clients', 100_000, 'Clients.', lower_bound=100)
flags.DEFINE_integer('rows', 10, 'Rows of each client.', lower_bound=1)
flags.DEFINE_integer('side', 8, 'Of the gray images.', lower_bound=4)


def tables(federation: fssl.Federation) -> int:
  """Bytes of the tables that say who owns which rows."""
  return sum(np.asarray(leaf).nbytes for leaf in federation.clients)


def resident() -> int:
  """Bytes of memory that this process holds now."""
  try:
    with open('/proc/self/statm', encoding='ascii') as file:
      return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')
  except OSError:
    raise ValueError('/proc/self/statm cannot be read: this benchmark needs '
                     'Linux.') from None


def round_memory(spec: fssl.TaskSpec, federation: fssl.Federation
                 ) -> dict[str, int]:
  """Bytes of one compiled round: arguments, results, temporaries."""
  method = fssl.make_method(spec.method, fssl.make_task(spec))
  state = jax.eval_shape(method.init, jax.random.key(0), federation)
  totals = seeds.totals_shape(method, federation, state)
  def rounds(*args):
    return seeds.stretch(method, *args)
  compiled = jax.jit(rounds, donate_argnums=(0, 1)).lower(
      state, totals, federation, jnp.int32(0), jnp.int32(1),
      jax.random.key(0)).compile()
  sizes = compiled.memory_analysis()
  return {'arguments': sizes.argument_size_in_bytes,
          'results': sizes.output_size_in_bytes,
          'temporaries': sizes.temp_size_in_bytes}


def _federation(num_clients: int) -> fssl.Federation:
  owner = np.repeat(np.arange(num_clients, dtype=np.int32), FLAGS.rows)
  train = harness.examples(owner.size, (FLAGS.side, FLAGS.side, 1))
  return harness.federate(train, owner, num_clients=num_clients)


def main() -> None:
  """Measures and reports."""
  mesh = harness.make_mesh()
  spec = fssl.TaskSpec(10, (FLAGS.side, FLAGS.side, 1), weak='none',
                       strong='none')
  small = harness.Simulation(spec, _federation(100), mesh)
  small.advance(1)
  gc.collect()
  before = resident()
  federation = _federation(FLAGS.num_clients)
  data = sum(leaf.nbytes for leaf in federation.train)
  gc.collect()
  dealt = resident()
  large = harness.Simulation(spec, federation, mesh)
  large.advance(1)
  gc.collect()
  after = resident()
  compiled = round_memory(spec, federation)
  # Each device has its own copy of the data and the tables.
  copies = 1 + FLAGS.num_devices
  found = {
      'examples': data,
      'index tables': tables(federation),
      'process: dealing, beyond the examples': dealt - before - data,
      f'process: a round, beyond {copies} copies of the examples':
          after - before - copies * data,
      **{f'one round, one device: {k}': v for k, v in compiled.items()}}
  harness.report(
      'memory',
      [[f'{FLAGS.num_clients} clients x {FLAGS.rows} rows', 'MB',
        'bytes/client'],
       *[[name, f'{size / 1e6:.1f}', f'{size / FLAGS.num_clients:.0f}']
         for name, size in found.items()]], found)


if __name__ == '__main__':
  harness.run(main)
