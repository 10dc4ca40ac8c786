r"""Seconds of a FedAvg round on 28x28 images, beside a PyTorch loop.

And how far the round is from the rate of a matrix product, see `limit`.

100 clients of 200 images, 10 a round, one local epoch at batch 20, the CNN of
FedAvg (1,663,370 parameters). Pixels are random: they cost what real ones do.

python experiments/benchmarks/fedavg_cnn.py
"""
from __future__ import annotations

import pathlib
import sys

from absl import flags
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import harness, limit, torch_apart
import fedjax_ssl as fssl

FLAGS = flags.FLAGS

flags.DEFINE_integer('num_clients', 100, 'Clients.', lower_bound=10)
flags.DEFINE_integer('rows', 200, 'Images of each client.', lower_bound=1)
flags.DEFINE_integer('batch', 20, 'Rows of a local step.', lower_bound=1)

QUICK = {'num_clients': 10, 'rows': 4, 'batch': 2}


def main() -> None:
  """Times both and reports."""
  harness.need_torch()
  mesh = harness.make_mesh()
  train = harness.examples(FLAGS.num_clients * FLAGS.rows, (28, 28, 1))
  owner = np.repeat(np.arange(FLAGS.num_clients, dtype=np.int32), FLAGS.rows)
  spec = fssl.TaskSpec(
      10, (28, 28, 1), model='fedavg_cnn', mean=(0.5,), std=(0.25,),
      weak='none', strong='none', learning_rate=0.05,
      labeled_batch=FLAGS.batch, method='fedavg', cohort_size=10)
  ours = harness.Simulation(
      spec, harness.federate(train, owner, num_clients=FLAGS.num_clients),
      mesh)
  flops = limit.round_flops(spec, ours.federation, ours.cohort(0), 'labeled')
  rows = np.split(np.arange(owner.size), FLAGS.num_clients)

  pytorch = torch_apart.Loops(
      'torch_loop', ours, (train.inputs, train.labels, rows),
      threads=FLAGS.num_devices, mean=0.5, std=0.25, batch=FLAGS.batch,
      learning_rate=0.05)
  runs = pytorch.runs
  products = limit.Products(mesh, 'float32', FLAGS.product_size)
  seconds = harness.interleave(
      {'ours': lambda: ours.advance(1), **runs, **products.runs})
  middle = harness.medians(seconds)
  ratio = harness.over_fastest(seconds, 'ours', runs)
  images = spec.cohort_size * FLAGS.rows
  reached = limit.shares({'network': (flops, middle['ours'])},
                         products.rate(middle))
  harness.report(
      'fedavg_cnn',
      [['', 's/round', 'images/s'],
       *[[name, middle[name], images / middle[name]]
         for name in ('ours', *runs)]],
      {'data': 'random pixels', 'seconds': seconds, 'limit': reached,
       'quartiles': harness.quartiles(seconds, 'ours', runs),
       **pytorch.about()},
      ratio)


if __name__ == '__main__':
  harness.run(main, QUICK, as_programs=True)
