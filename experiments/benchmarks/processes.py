r"""Rounds over several processes (gloo), and what their exchange costs.

Processes of one run train their part of a cohort and exchange what they send,
in both values of --aggregation_order. In turn with them as many others train it
and exchange nothing: what a round takes longer than theirs is the exchange, and
waiting for each other. A process has one device and one core; with more
processes than cores some share one.

python experiments/benchmarks/processes.py
python experiments/benchmarks/processes.py --processes=1,2 --cohort_sizes=16 \
    --model=resnet9 --side=32 --rows=20
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import functools
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

from absl import flags
import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import growth, harness

FLAGS = flags.FLAGS

flags.DEFINE_list('processes', ['1', '2', '4'], 'Processes of a run.')
flags.DEFINE_string('part', None, 'What a started process is: its number, of '
                    'how many, and their port or 0 where none is exchanged.')
FLAGS.set_default('cohort_sizes', ['8', '32', '128'])

_ORDERS = 'fixed', 'fast'
_ANSWER = 'seconds: '  # What a line of a process begins with.

QUICK = {**growth.QUICK, 'processes': ['1', '2'], 'cohort_sizes': ['4']}


class Part(NamedTuple):
  """One of the processes that train together, or beside each other.

  Attributes:
    process: its number, from 0.
    processes: how many there are.
    port: where they meet; 0 if they exchange nothing.
  """
  process: int
  processes: int
  port: int


def work(part: Part) -> None:
  """Answers each line of standard input with the seconds of what it asks for.

  A line is a name of `rounds`, or `mean`, of the model over all processes.
  """
  if hasattr(os, 'sched_setaffinity'):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[part.process % len(cores)]})
  jax.config.update('jax_num_cpu_devices', 1)
  mesh = None
  if part.port:
    jax.distributed.initialize(
        f'localhost:{part.port}', part.processes, part.process)
    mesh = jax.make_mesh((part.processes,), ('clients',),
                         axis_types=(jax.sharding.AxisType.Auto,))
  asked, size = rounds(part, mesh)
  asked['mean'] = exchange(size, mesh)
  for function in asked.values():
    function()  # Untimed: it compiles.
  print(f'{_ANSWER}0', flush=True)
  for line in sys.stdin:
    begin = time.perf_counter()
    asked[line.strip()]()
    print(f'{_ANSWER}{time.perf_counter() - begin}', flush=True)
  if part.port:
    jax.distributed.shutdown()


def rounds(part: Part, mesh: jax.sharding.Mesh | None
           ) -> tuple[dict[str, Callable[[], None]], int]:
  """Makes the rounds of a process, by `ORDER CLIENTS`.

  Returns:
    The rounds, and how many numbers the model has.
  """
  sizes = harness.numbers('cohort_sizes')
  federation = growth.drawn(max(sizes))
  share = 1 if part.port else part.processes
  runs = {f'{order} {size}': harness.Simulation(growth.spec_of(
      cohort_size=size // share, aggregation_order=order), federation, mesh)
          for order in _ORDERS for size in sizes}
  model = next(iter(runs.values())).model
  return ({name: functools.partial(run.advance, 1)
           for name, run in runs.items()},
          sum(x.size for x in jax.tree.leaves(model)))


def exchange(size: int, mesh: jax.sharding.Mesh | None) -> Any:
  """Returns a function that takes the mean of float32[size] over processes."""
  if mesh is None:
    return lambda: None
  spec = jax.sharding.PartitionSpec('clients')
  values = jax.make_array_from_callback(
      (mesh.size, size), jax.sharding.NamedSharding(mesh, spec),
      lambda index: jnp.ones((1, size)))
  mean = jax.jit(jax.shard_map(
      lambda x: jax.lax.pmean(x[0], 'clients'), mesh=mesh, in_specs=spec,
      out_specs=jax.sharding.PartitionSpec()))
  return lambda: mean(values).block_until_ready()


class Group:
  """Processes that get the same line at the same time."""

  def __init__(self, count: int, port: int, stack: contextlib.ExitStack):
    self._started = [stack.enter_context(subprocess.Popen(
        [sys.executable, *sys.argv, f'--part={i},{count},{port}'],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True)) for i in range(count)]
    for process in self._started:
      stack.callback(process.kill)  # Before the stack waits for it.

  def ask(self, what: str) -> float:
    """Seconds of the slowest; see `work`."""
    for process in self._started:
      assert process.stdin is not None
      with contextlib.suppress(BrokenPipeError):  # `slowest` says it.
        process.stdin.write(f'{what}\n')
        process.stdin.flush()
    return self.slowest()

  def slowest(self) -> float:
    """Seconds of the slowest; the first answer comes when all have compiled."""
    seconds = []
    for process in self._started:
      assert process.stdout is not None
      for line in process.stdout:  # Gloo prints there as well.
        if line.startswith(_ANSWER):
          seconds.append(float(line.removeprefix(_ANSWER)))
          break
      else:
        raise ValueError('A process ended; `--part=0,1,0` in place of '
                         '--processes shows why.')
    return max(seconds)


def free_ports(count: int) -> list[int]:
  """Finds ports of this machine that nobody listens on, all different."""
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for one in sockets:
      one.bind(('localhost', 0))
    return [one.getsockname()[1] for one in sockets]


def measure(counts: Sequence[int], sizes: Sequence[int]
            ) -> dict[tuple[int, str], list[float]]:
  """Seconds of every number of processes, all in turn.

  Returns:
    By number of processes and what was asked: `ORDER CLIENTS`, with `alone `
    before it of those that exchange nothing, and `mean`.
  """
  seconds: dict[tuple[int, str], list[float]] = {}
  with contextlib.ExitStack() as stack:
    ports = free_ports(len(counts))
    groups = {}
    for count, together in zip(counts, ports, strict=True):
      for port in (together, 0) if count > 1 else (0,):
        groups[count, bool(port)] = Group(count, port, stack)
        # Gloo gives up if one process compiles for much longer than another.
        groups[count, bool(port)].slowest()
    for _ in harness.turns():
      for (count, together), group in groups.items():
        for name in (f'{order} {size}' for order in _ORDERS for size in sizes):
          seconds.setdefault((count, name if together else f'alone {name}'),
                             []).append(group.ask(name))
        if together:
          seconds.setdefault((count, 'mean'), []).append(group.ask('mean'))
  return seconds


def line(seconds: Mapping[tuple[int, str], Sequence[float]], count: int,
         size: int, first: int) -> dict[str, float]:
  """What `count` processes take for a round of `size` clients.

  Args:
    seconds: of `measure`.
    count: processes.
    size: clients of a round.
    first: the number of processes that the others are compared with.
  """
  def of(processes: int, order: str) -> Sequence[float]:
    alone = seconds[processes, f'alone {order} {size}']
    return seconds.get((processes, f'{order} {size}'), alone)
  found: dict[str, float] = {'processes': count, 'clients': size}
  for order in _ORDERS:
    whole, base = of(count, order), of(first, order)
    alone = seconds[count, f'alone {order} {size}']
    found[f's alone, {order}'] = statistics.median(alone)
    found[f's, {order}'] = statistics.median(whole)
    found[f'exchange, {order}, %'] = 100 * statistics.median(
        1 - a / w for a, w in zip(alone, whole, strict=True))
    found[f'times as fast, {order}'] = statistics.median(
        b / w for b, w in zip(base, whole, strict=True))
  found['ms of a mean'] = 1e3 * statistics.median(
      seconds.get((count, 'mean'), [0.0]))
  return found


def main() -> None:
  """Measures and reports, or is one of the processes."""
  if FLAGS.part:
    work(Part(*map(int, FLAGS.part.split(','))))
    return
  counts = sorted(harness.numbers('processes'))
  sizes = sorted(harness.numbers('cohort_sizes'))
  for size in sizes:
    if bad := [count for count in counts if size % count]:
      raise ValueError(f'--cohort_sizes={size} must be a multiple of '
                       f'--processes={bad[0]}.')
  seconds = measure(counts, sizes)
  found = [line(seconds, count, size, counts[0])
           for count in counts for size in sizes]
  harness.report('processes', [
      [*found[0]], *([int(x) if name in ('processes', 'clients') else x
                      for name, x in one.items()] for one in found)],
      {'task': {flag: FLAGS[flag].value for flag in (
          'model', 'side', 'rows', 'batch', 'pool')}, 'lines': found,
       'seconds': {f'{count}: {name}': values
                   for (count, name), values in seconds.items()}})


if __name__ == '__main__':
  harness.run(main, QUICK)
