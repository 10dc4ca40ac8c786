r"""Rounds and images a second, with the forms that are fastest here.

For each number of clients a round: the forms of every convolution are timed as
`--conv_impl=measure` does, for all clients at once, for halves of them and one
after another, and how long that took, unless they were timed before; then
rounds with what is chosen, and with XLA's own convolutions under vmap beside
them, which a GPU compiles for a minute or more and a CPU runs for minutes.

python experiments/benchmarks/round_speed.py --model=resnet9 --clients=5,20,100
"""
from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import pathlib
import sys
import time
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import harness, limit
import fedjax_ssl as fssl
from fedjax_ssl.core import conv_forms
from fedjax_ssl.ops import conv_measure
from fedjax_ssl.running import convolutions

FLAGS = flags.FLAGS

flags.DEFINE_string('model', 'resnet9', 'Network.')
flags.DEFINE_string('method', 'fixmatch', 'Method.')
flags.DEFINE_list('clients', ['5', '20', '100'], 'Clients of a round, each; on '
                  'a CPU 5 alone, if not given.')
flags.DEFINE_integer('side', 0, "Of the images; 0: the network's own.",
                     lower_bound=0)
flags.DEFINE_integer('steps', 10, 'Local steps.', lower_bound=1)
flags.DEFINE_integer('labeled', 10, 'Rows with labels in a step.',
                     lower_bound=1)
flags.DEFINE_integer('unlabeled', 50, 'Rows without.', lower_bound=1)
flags.DEFINE_enum('compute_dtype', 'float32', ['float32', 'bfloat16'],
                  'Of the arithmetic, and of the limit.')
flags.DEFINE_bool('lax', True, "Whether XLA's own convolutions are timed too; "
                  'on a CPU they are not, if not given.')

QUICK = {'model': 'cnn(width=2)', 'side': 8, 'clients': ['2'], 'steps': 1,
         'labeled': 2, 'unlabeled': 2}
# What a CPU does within minutes.
_ON_CPU = {'clients': ['5'], 'lax': False}
HEADER = ['clients', 'rounds', 's/round', 'images/s', 'of limit', 'forms']


def spec_of(clients: int, **changes: Any) -> fssl.TaskSpec:
  """The task: every client has its rows once a round."""
  return fssl.TaskSpec(**{
      'num_classes': 10, 'method': FLAGS.method, 'model': FLAGS.model,
      'input_shape': harness.image_shape(FLAGS.model, FLAGS.side),
      'mean': (0.5,), 'std': (0.25,), 'labeled_batch': FLAGS.labeled,
      'unlabeled_batch': FLAGS.unlabeled, 'cohort_size': clients,
      'local_steps': FLAGS.steps, 'compute_dtype': FLAGS.compute_dtype,
      **changes})


def chosen(clients: int, cache: pathlib.Path
           ) -> tuple[convolutions.Choice, dict[str, conv_measure.Table]]:
  """Finds what a run would choose, and the seconds behind it.

  Args:
    clients: of a round, all on one device.
    cache: file of what was timed before.

  Returns:
    The choice, and seconds of each form of each layer by clients at once.
  """
  spec = spec_of(clients)
  layers = convolutions.layers(
      fssl.make_task(spec), jnp.zeros((1, *spec.input_shape), jnp.uint8))
  rows = FLAGS.labeled + FLAGS.unlabeled
  tables: dict[str, conv_measure.Table] = {}
  def measured(count: int, forms: convolutions.Forms, until: float
               ) -> conv_measure.Table:
    tables[str(count)] = conv_measure.table(layers, conv_measure.Load(
        rows, count, FLAGS.compute_dtype), cache, only=forms, until=until)
    return tables[str(count)]
  return convolutions.searched(measured, clients), tables


def measured(clients: int, choice: convolutions.Choice) -> dict[str, Any]:
  """Rounds with the chosen forms beside XLA's own under vmap."""
  federation = harness.two_pools(
      clients, FLAGS.labeled * FLAGS.steps, FLAGS.unlabeled * FLAGS.steps,
      harness.image_shape(FLAGS.model, FLAGS.side))
  fields: dict[str, dict[str, Any]] = {'chosen': choice._asdict()}
  if FLAGS.lax:
    fields['lax, vmap'] = {'conv_impl': 'lax', 'client_map': 'vmap'}
  runs, failed = {}, {}
  for name, changes in fields.items():
    try:
      run = harness.Simulation(spec_of(clients, **changes), federation, None)
      run.advance(1)
      runs[name] = functools.partial(run.advance, 1)
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
      failed[name] = str(error).splitlines()[0]
  products = limit.Products(None, FLAGS.compute_dtype, FLAGS.product_size)
  seconds = harness.interleave({**runs, **products.runs})
  return {'fields': fields, 'failed': failed, 'seconds': seconds,
          'rate': products.rate(harness.medians(seconds)),
          'images': clients * FLAGS.steps * (FLAGS.labeled + FLAGS.unlabeled)}


def rows_of(clients: int, found: Mapping[str, Any], flops: float
            ) -> list[list[Any]]:
  """A table's rows for one number of clients."""
  middle = harness.medians(found['seconds'])
  rows = []
  for name, fields in found['fields'].items():
    forms = fields['conv_impl'] if ' ' not in fields['conv_impl'] else (
        ', '.join(dict.fromkeys(
            conv_forms.by_layer(fields['conv_impl']).values())))
    label = f'{name}: {fields["client_map"]}'
    if fields.get('chunk_size'):
      label += f' of {fields["chunk_size"]}'
    if name in found['failed']:
      rows.append([clients, label, '-', '-', '-', found['failed'][name]])
      continue
    second = middle[name]
    rows.append([clients, label, second, found['images'] / second,
                 clients * FLAGS.steps * flops / second / found['rate'], forms])
  return rows


def main() -> None:
  """Measures every number of clients and writes after each."""
  if jax.default_backend() == 'cpu' and not FLAGS.quick:
    harness.default(_ON_CPU)
  cache = pathlib.Path(FLAGS.out) / 'convolutions.json'
  table: list[list[Any]] = [HEADER]
  found: dict[str, Any] = {}
  counts = harness.numbers('clients')
  name = '_'.join(['round_speed', FLAGS.model.partition('(')[0], FLAGS.method,
                   FLAGS.compute_dtype])
  for clients in counts:
    start = time.monotonic()
    choice, tables = chosen(clients, cache)
    taken = time.monotonic() - start
    one = measured(clients, choice)
    spec = dataclasses.replace(spec_of(clients), conv_impl='lax')
    with limit.on_cpu():
      flops = limit.step_flops(spec, harness.two_pools(
          clients, FLAGS.labeled, FLAGS.unlabeled, spec.input_shape))
    found[str(clients)] = {**one, 'layers': tables, 'step_flops': flops,
                           'timing_seconds': taken}
    table += rows_of(clients, one, flops)
    harness.save(name, table, found)
  harness.report(name, table, found)


if __name__ == '__main__':
  harness.run(main, QUICK)
