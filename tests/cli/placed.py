"""A script: one process of a run says which clients it holds.

Its last line gives, by name of an array, the rows in this process's memory.
"""
from __future__ import annotations

import json
from typing import Any

from absl import app
import jax
import numpy as np

from fedjax_ssl import methods
from fedjax_ssl.cli import train
from fedjax_ssl.running import devices
from fedjax_ssl.training import runner, sharding
from tests import toy

FLAGS = train.FLAGS


def rows(array: Any) -> list[int]:
  """The rows of an array that are here, once for every copy."""
  numbers = np.arange(array.shape[0])
  return sorted(int(i) for shard in array.addressable_shards
                for i in numbers[shard.index[0]])


def main(argv: list[str]) -> None:
  """Joins, places a federation and a method's state, and looks."""
  del argv
  devices.join(train.options())
  mesh = jax.make_mesh((len(devices.devices(0)),), ('clients',),
                       axis_types=(jax.sharding.AxisType.Auto,))
  given, _ = toy.federation()
  method = methods.make('fedprox(mu=0.5, keep_local=True)',
                        toy.task('linear', mesh=mesh))
  state = sharding.state(method.init(runner.root_keys(0)[0], given), mesh)
  federation, = sharding.federations([given], mesh)
  print(json.dumps({
      'memory': rows(jax.tree.leaves(state.memory)[0]),
      'labeled': rows(federation.clients.labeled),
      'unlabeled': rows(federation.clients.unlabeled),
      'inputs': len(rows(federation.train.inputs))
      / federation.train.inputs.shape[0]}))
  jax.distributed.shutdown()


if __name__ == '__main__':
  app.run(main, flags_parser=FLAGS)
