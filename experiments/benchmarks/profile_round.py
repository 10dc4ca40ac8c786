r"""What a round spends its time on: its longest operations, by the profiler.

An operation is one instruction of the compiled round: a kernel on a GPU, an
operation on a TPU or a CPU. Its share is of the time of all operations on all
devices; where devices exchange something, waiting for the last one counts.
--by=layer adds up what belongs to one layer and direction.

On a GPU command buffers hide which instruction a kernel is from; run with
XLA_FLAGS=--xla_gpu_enable_command_buffer= in the environment, as below.

python experiments/benchmarks/profile_round.py --model=fedavg_cnn
XLA_FLAGS=--xla_gpu_enable_command_buffer= \
    python experiments/benchmarks/profile_round.py --model=resnet9 \
    --method=feddure --top=3
"""
from __future__ import annotations

from collections.abc import Callable
import pathlib
import sys
import tempfile
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import harness, trace_events
import fedjax_ssl as fssl
from fedjax_ssl.core import tree
from fedjax_ssl.training import runner, sharding

FLAGS = flags.FLAGS

flags.DEFINE_string('model', 'fedavg_cnn', 'Network.')
flags.DEFINE_string('method', 'fixmatch', 'Method, as fedavg or feddure; '
                    'fedavg learns from the rows with labels alone.')
flags.DEFINE_enum('by', 'op', ['op', 'layer'], 'Rows of the table.')
flags.DEFINE_integer('top', 10, 'Rows of the table.', lower_bound=1)
flags.DEFINE_integer('side', 0, "Of the images; 0: the network's own.",
                     lower_bound=0)
flags.DEFINE_integer('num_clients', 4, 'Clients, all in each round.',
                     lower_bound=1)
flags.DEFINE_integer('steps', 4, 'Local steps.', lower_bound=1)
flags.DEFINE_integer('labeled', 10, 'Rows with labels in a step.',
                     lower_bound=1)
flags.DEFINE_integer('unlabeled', 50, 'Rows without.', lower_bound=1)
flags.DEFINE_bool('views', True, 'Whether rows are augmented, as in a run.')
flags.DEFINE_enum('compute_dtype', 'float32', ['float32', 'bfloat16'],
                  "Of the network's arithmetic.")
flags.DEFINE_enum('client_map', 'auto', ['auto', 'map', 'vmap'],
                  'Clients one after another, or together.')

QUICK = {'model': 'cnn(width=2)', 'side': 8, 'num_clients': 2, 'steps': 2,
         'labeled': 2, 'unlabeled': 2, 'views': False}
_NS = 1e-6  # In milliseconds.


class Rounds:
  """Rounds of a method and the text of the very program that runs them.

  Args:
    spec: the task.
    federation: its data.
    mesh: devices, or None.

  Attributes:
    text: compiled HLO.
  """

  def __init__(self, spec: fssl.TaskSpec, federation: fssl.Federation,
               mesh: jax.sharding.Mesh | None):
    method = fssl.make_method(spec.method, fssl.make_task(spec, mesh))
    key, self._root = runner.root_keys(0)
    state = method.init(key, federation)
    totals = tree.zeros_like(runner.totals_shape(method, federation, state))
    self._carry: Any = (sharding.state(state,
                                       mesh), sharding.whole(totals, mesh))
    self._federation, = sharding.federations([federation], mesh)
    self._done = 0
    def rounds(*args):
      return runner.stretch(method, *args)
    where = None if mesh is None else jax.tree.map(
        lambda x: x.sharding, self._carry)
    self._program = jax.jit(
        rounds, donate_argnums=(0, 1), out_shardings=where).lower(
            *self._arguments()).compile()
    self.text = str(self._program.as_text())

  def _arguments(self) -> tuple[Any, ...]:
    return (*self._carry, self._federation, jnp.int32(self._done),
            jnp.int32(1), self._root)

  def advance(self) -> None:
    """Runs one round to its end."""
    self._carry = jax.block_until_ready(self._program(*self._arguments()))
    self._done += 1


def make(mesh: jax.sharding.Mesh | None) -> Rounds:
  """The rounds that the flags ask for."""
  shape = harness.image_shape(FLAGS.model, FLAGS.side)
  views: Any = {} if FLAGS.views else {'weak': 'none', 'strong': 'none'}
  optimizer = 'adam' if FLAGS.method.startswith('feddure') else 'sgd'
  spec = fssl.TaskSpec(
      10, shape, method=FLAGS.method, model=FLAGS.model,
      mean=(0.5,) * shape[2], std=(0.25,) * shape[2], optimizer=optimizer,
      learning_rate=5e-4, labeled_batch=FLAGS.labeled,
      unlabeled_batch=FLAGS.unlabeled, cohort_size=FLAGS.num_clients,
      schedule_rounds=100, compute_dtype=FLAGS.compute_dtype,
      client_map=FLAGS.client_map, **views)
  return Rounds(spec, harness.two_pools(
      FLAGS.num_clients, FLAGS.steps * FLAGS.labeled,
      FLAGS.steps * FLAGS.unlabeled, shape), mesh)


def record(run: Callable[[], None]) -> Any:
  """`jax.profiler.ProfileData` of a call."""
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder, profiler_options=options):
      run()
    path, = pathlib.Path(folder).rglob('*.xplane.pb')
    return jax.profiler.ProfileData.from_file(str(path))


def table(found: list[trace_events.Item], total: float, top: int
          ) -> list[list[Any]]:
  """The longest items; the last row has all others."""
  rows: list[list[Any]] = [['', 'calls', 'ms', 'share', 'where']]
  for item in found[:top]:
    rows.append([item.name, item.calls, item.ns * _NS, item.ns / total,
                 trace_events.place_of(item.op_name) if item.op_name else ''])
  others = found[top:]
  if others:
    ns = sum(item.ns for item in others)
    rows.append([f'{len(others)} others', sum(i.calls for i in others),
                 ns * _NS, ns / total, ''])
  return rows


def _listed(found: list[trace_events.Item], total: float
            ) -> list[dict[str, Any]]:
  return [{'name': item.name, 'calls': item.calls, 'ms': item.ns * _NS,
           'share': item.ns / total, 'op_name': item.op_name}
          for item in found]


def main() -> None:
  """Profiles one round and reports."""
  mesh = harness.make_mesh()
  rounds = make(mesh)
  seconds = harness.interleave({'': rounds.advance})
  profile = record(rounds.advance)
  threads = trace_events.lines(profile, trace_events.module_name(rounds.text))
  operations = trace_events.items(
      threads, trace_events.instructions(rounds.text))
  if not operations:
    raise ValueError('The profile has no operation of the round: this backend '
                     'does not report them.')
  layers = trace_events.by_layer(operations)
  total = sum(item.ns for item in operations)
  devices = 1 if mesh is None else mesh.size
  round_ms = 1e3 * harness.medians(seconds)['']
  plain, method = (x.partition('(')[0] for x in (FLAGS.model, FLAGS.method))
  print(f'{method}, {plain}: {round_ms:.4g} ms a round, without the profiler; '
        f'{total * _NS:.4g} ms of operations on {devices} device(s)')
  harness.report(
      f'profile_{plain}_{method}_{FLAGS.compute_dtype}',
      table(operations if FLAGS.by == 'op' else layers, total, FLAGS.top),
      {'data': 'random pixels', 'backend': jax.default_backend(),
       'devices': devices, 'seconds': seconds[''],
       'operations_ms': total * _NS, 'operations': _listed(operations, total),
       'layers': _listed(layers, total)})


if __name__ == '__main__':
  harness.run(main, QUICK)
