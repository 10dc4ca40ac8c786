r"""Rounds over several processes (gloo), and what their exchange costs.

Processes of one run train their part of a cohort and exchange its mean. Beside
them as many processes train the same part each, at the same time, and exchange
nothing: what a round takes longer than theirs is the exchange, with the time in
which one waits for another. A process has one device and one core; with more
processes than cores some share one.

python experiments/benchmarks/processes.py
python experiments/benchmarks/processes.py --processes=1,2 --cohort_sizes=16 \
    --model=resnet9 --side=32 --rows=20
"""
from __future__ import annotations

from collections.abc import Sequence
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

  A line is a number of clients, for one round of so many, or 0, for one mean of
  the model over all processes.
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
  sizes = harness.numbers('cohort_sizes')
  federation = growth.drawn(max(sizes))
  share = 1 if part.port else part.processes
  runs = {size: harness.Simulation(
      growth.spec_of(cohort_size=size // share), federation, mesh)
          for size in sizes}
  asked = {size: functools.partial(run.advance, 1)
           for size, run in runs.items()}
  model = runs[sizes[0]].model
  asked[0] = exchange(sum(x.size for x in jax.tree.leaves(model)), mesh)
  for function in asked.values():
    function()  # Untimed: it compiles.
  print(f'{_ANSWER}0', flush=True)
  for line in sys.stdin:
    begin = time.perf_counter()
    asked[int(line)]()
    print(f'{_ANSWER}{time.perf_counter() - begin}', flush=True)
  if part.port:
    jax.distributed.shutdown()


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

  def __init__(self, count: int, together: bool, stack: contextlib.ExitStack):
    with socket.socket() as free:
      free.bind(('localhost', 0))
      port = free.getsockname()[1] if together else 0
    self._started = [stack.enter_context(subprocess.Popen(
        [sys.executable, *sys.argv, f'--part={i},{count},{port}'],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True)) for i in range(count)]
    for process in self._started:
      stack.callback(process.kill)  # Before the stack waits for it.

  def wait(self) -> None:
    """Waits until all have compiled."""
    self._slowest()

  def ask(self, what: int) -> float:
    """Seconds of the slowest; see `work`."""
    for process in self._started:
      assert process.stdin is not None
      process.stdin.write(f'{what}\n')
      process.stdin.flush()
    return self._slowest()

  def _slowest(self) -> float:
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


def measure(counts: Sequence[int], sizes: Sequence[int]
            ) -> list[dict[str, float]]:
  """Rounds of every number of processes, in turn.

  Args:
    counts: processes, the smallest first.
    sizes: clients of a round; each count divides them.

  Returns:
    For each count and size the numbers of its line.
  """
  seconds: dict[tuple[int, int, bool], list[float]] = {}
  means: dict[int, list[float]] = {count: [] for count in counts}
  with contextlib.ExitStack() as stack:
    groups = {(count, together): Group(count, together, stack)
              for count in counts for together in (True, False)
              if count > 1 or not together}
    for group in groups.values():
      group.wait()
    for _ in range(FLAGS.repeats):
      for (count, together), group in groups.items():
        for size in sizes:
          seconds.setdefault((count, size, together), []).append(
              group.ask(size))
        if together:
          means[count].append(group.ask(0))
  found = []
  first = counts[0]
  for count in counts:
    for size in sizes:
      alone = seconds[count, size, False]
      whole = seconds.get((count, size, True), alone)
      base = seconds.get((first, size, True), seconds[first, size, False])
      median = statistics.median
      found.append({
          'processes': count, 'clients': size, 's/round': median(whole),
          's/round, nothing exchanged': median(alone),
          'exchange, %': 100 * median(
              1 - a / w for a, w in zip(alone, whole, strict=True)),
          'times as fast': median(
              b / w for b, w in zip(base, whole, strict=True)),
          'ms of a mean': 1e3 * median(means[count] or [0.0])})
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
  found = measure(counts, sizes)
  harness.report('processes', [
      [*found[0]], *([int(x) if name in ('processes', 'clients') else x
                      for name, x in line.items()] for line in found)],
      {'task': {flag: FLAGS[flag].value for flag in (
          'model', 'side', 'rows', 'batch', 'pool')}, 'lines': found})


if __name__ == '__main__':
  harness.run(main, QUICK)
