r"""Time and arithmetic of one FedDure step over those of one FedAvg step.

Both see the same rows: FedAvg learns all of them with labels, FedDure has
labels for the first few. The default sizes are those of the paper's clients on
CIFAR-10: 10 labeled rows and a fifth of a client's 450 unlabeled ones.

A step is one client's, so that ours has one device: on a CPU its operations
share all cores that the process may run on, and PyTorch gets as many threads,
whatever --num_devices says. `taskset` gives both fewer cores.

On a CPU with PyTorch installed its step on the same batches is timed too, for a
network that it has, and the ratio printed; `feddure_round.py` has that of whole
rounds.

python experiments/benchmarks/feddure_step.py
python experiments/benchmarks/feddure_step.py --model=fedavg_cnn --side=28 \
    --channels=1
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
import pathlib
import sys
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import harness, limit
import fedjax_ssl as fssl
from fedjax_ssl.core import local_training
from fedjax_ssl.core.types import Batch
from fedjax_ssl.data.batching import Pair
from fedjax_ssl.methods import feddure
from fedjax_ssl.methods.feddure import regulation
from fedjax_ssl.methods.parts import network
from fedjax_ssl.training import environment

FLAGS = flags.FLAGS
GOAL = 6.0

flags.DEFINE_string('model', 'resnet9', 'Network.')
flags.DEFINE_integer('side', 32, 'Of the images.', lower_bound=4)
flags.DEFINE_integer('channels', 3, 'Of the images.', lower_bound=1)
flags.DEFINE_integer('labeled', 10, 'Rows with labels.', lower_bound=1)
flags.DEFINE_integer('unlabeled', 90, 'Rows without.', lower_bound=1)

QUICK = {'model': 'linear', 'side': 8, 'channels': 1, 'labeled': 4,
         'unlabeled': 4}

Program = tuple[Callable[..., Any], tuple[Any, ...]]  # With its arguments.


def make_programs(spec: fssl.TaskSpec, labeled: int, unlabeled: int
                  ) -> dict[str, Program]:
  """One step of each method, without and with making the views.

  Args:
    spec: the task.
    labeled: rows with labels.
    unlabeled: rows without.

  Returns:
    'FedAvg' and 'FedDure' on views that are there already, and both again,
    '... with views', on raw rows.
  """
  task = fssl.make_task(spec)
  train = harness.examples(labeled + unlabeled, spec.input_shape)
  rows = Batch(jnp.asarray(train.inputs), jnp.asarray(train.labels),
               jnp.ones(labeled + unlabeled))
  known, unknown = (Batch(*(x[part] for x in rows[:3])) for part in (
      slice(labeled), slice(labeled, None)))
  unknown = unknown._replace(labels=jnp.full(unlabeled, -1))
  key, progress = jax.random.key(0), jnp.float32(1)
  model = jax.jit(task.model.init)(key)
  optimizer = task.optimizer(jnp.int32(0))
  rules = feddure.Rules(optimizer, optimizer, optimizer)
  joint = task.model.norm in ('batch', 'static')

  def fedavg(learner, batch):
    def loss_fn(model, memory, batch, key):
      del key
      logits, stats = task.apply_train(model, batch.inputs, batch.mask)
      loss = optax.softmax_cross_entropy_with_integer_labels(
          logits, batch.labels).mean()
      return loss, (stats, {}, memory)

    return local_training.gradient_step(loss_fn, optimizer)(learner, batch,
                                                            key)[0]

  def fedavg_with_views(learner, batch, key):
    return fedavg(learner, network.weakly(task, batch, key))

  def ours(carry, views):
    return feddure.step(task.apply_train, carry, views, rules=rules,
                        joint=joint)

  def ours_with_views(carry, pair, key):
    return ours(carry, network.views(task, pair, key))

  learner = local_training.start(model, optimizer)
  carry = feddure.start(model, model.params, regulation.init_fine(
      key, task.num_classes), rules)
  return {
      'FedAvg': (fedavg, (learner, rows)),
      'FedDure': (ours, (carry, feddure.Views(unknown, known, unknown))),
      'FedAvg with views': (fedavg_with_views, (learner, rows, key)),
      'FedDure with views': (
          ours_with_views, (carry, Pair(known, unknown, progress), key))}


def flops(compiled: Any) -> float:
  """Floating-point operations that XLA counts in a program without loops."""
  if ' while(' in compiled.as_text():
    raise ValueError('The program has a loop, of which XLA counts one turn.')
  return float(compiled.cost_analysis()['flops'])


def compile_all(programs: Mapping[str, Program]) -> dict[str, Any]:
  """The compiled programs by name."""
  return {name: jax.jit(function).lower(*args).compile()
          for name, (function, args) in programs.items()}


def pytorch_step(program: Program, model: str, learning_rate: float,
                 layout: str, optimizer: str = 'adam') -> Any:
  """PyTorch's three networks at the state of a FedDure program.

  Args:
    program: 'FedDure' of `make_programs`.
    model: its network, one of `torch_loop.NETWORKS`.
    learning_rate: of all three networks.
    layout: a key of `torch_loop.LAYOUTS`.
    optimizer: see `torch_feddure.Trio`.

  Returns:
    The networks, and a function that makes a step on the program's batches.
  """
  import torch

  from experiments.benchmarks import torch_feddure, torch_loop
  carry, views = program[1]
  memory = torch_loop.LAYOUTS[layout]
  network = torch_loop.network_of(
      model, carry.model.params, views.labeled.inputs.shape[1])
  classes = carry.fine.kernel.shape[0]
  fine = torch_feddure.FineRegulator(classes)
  torch_feddure.load_fine(fine, carry.fine)
  trio = torch_feddure.Trio(
      network.to(memory_format=memory).train(), fine,
      learning_rate=learning_rate, optimizer=optimizer)
  def normalized(batch):
    x = torch.tensor(np.asarray(batch.inputs)).permute(0, 3, 1, 2).float()
    return ((x / 255 - 0.5) / 0.25).contiguous(memory_format=memory)
  known, unknown = normalized(views.labeled), normalized(views.weak)
  labels = torch.tensor(np.asarray(views.labeled.labels)).long()
  return trio, lambda: trio.step(known, labels, unknown, unknown)


def _pytorch(programs: Mapping[str, Program], rate: float
             ) -> dict[str, Callable[[], None]]:
  """Steps of PyTorch by layout, none where there is nothing to compare."""
  name = FLAGS.model.partition('(')[0]
  missing = harness.without_torch()
  if missing:
    print(f'PyTorch: {missing}')
    return {}
  import torch

  from experiments.benchmarks import torch_loop
  if name not in torch_loop.NETWORKS:
    print(f'PyTorch: no {name} there')
    return {}
  torch.set_num_threads(environment.cores())
  return {f'PyTorch, {layout}': pytorch_step(
      programs['FedDure'], name, rate, layout)[1]
      for layout in torch_loop.LAYOUTS}


def main() -> None:
  """Counts, measures and reports."""
  jax.config.update('jax_num_cpu_devices', 1)
  spec = fssl.TaskSpec(
      10, (FLAGS.side, FLAGS.side, FLAGS.channels), model=FLAGS.model,
      mean=(0.5,) * FLAGS.channels, std=(0.25,) * FLAGS.channels,
      optimizer='adam', learning_rate=5e-4, method='feddure')
  programs = make_programs(spec, FLAGS.labeled, FLAGS.unlabeled)
  compiled = compile_all(programs)
  with limit.on_cpu():
    counted = make_programs(limit.direct(spec), FLAGS.labeled, FLAGS.unlabeled)
    plain = compile_all({
        name: counted[name] for name in ('FedAvg', 'FedDure')})
    count = {name: flops(program) for name, program in plain.items()}

  def call(name):
    return lambda: jax.block_until_ready(compiled[name](*programs[name][1]))
  pytorch = _pytorch(programs, spec.learning_rate)
  seconds = harness.interleave(
      {**{name: call(name) for name in programs}, **pytorch})
  middle = harness.medians(seconds)
  table: list[list[Any]] = [['', 'FedAvg', 'FedDure', 'ratio']]
  ratios = {}
  for title, found, tail in (('GFLOP', {k: v / 1e9 for k, v in count.items()},
                              ''), ('s/step', middle, ''),
                             ('s/step with views', middle, ' with views')):
    a, b = found['FedAvg' + tail], found['FedDure' + tail]
    ratios[title] = b / a
    table.append([title, a, b, b / a])
  for name in pytorch:
    table.append([f's/step, {name}', '', middle[name], ''])
  print(f'goal: every ratio at most {GOAL:.0f}')
  harness.report('feddure_step_' + FLAGS.model.partition('(')[0], table, {
      'data': 'random pixels', 'labeled': FLAGS.labeled,
      'unlabeled': FLAGS.unlabeled, 'flops': count, 'seconds': seconds,
      'ratios': ratios},
      harness.over_fastest(seconds, 'FedDure', pytorch) if pytorch else None)


if __name__ == '__main__':
  harness.run(main, QUICK)
