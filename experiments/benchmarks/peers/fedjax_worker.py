"""FedAvg in FedJAX, as its users write it."""
from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import peer_task

# Names that FedJAX and its Haiku expect, and that newer JAX has elsewhere.
for _name in ('tree_flatten', 'tree_leaves', 'tree_map', 'tree_structure',
              'tree_unflatten'):
  if not hasattr(jax, _name):
    setattr(jax, _name, getattr(jax.tree_util, _name))

import fedjax  # noqa: E402


def logits(params, x: jax.Array) -> jax.Array:
  """float32[B, H, W, C] -> [B, classes]: the FedAvg paper's CNN."""
  for i in range(2):
    layer = params[f'Conv_{i}']
    x = lax.conv_general_dilated(
        x, layer['kernel'], (1, 1), 'SAME',
        dimension_numbers=('NHWC', 'HWIO', 'NHWC')) + layer['bias']
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1),
                          'VALID')
    x = jax.nn.relu(x)
  x = x.reshape(x.shape[0], -1)
  x = jax.nn.relu(x @ params['Dense_0']['kernel'] + params['Dense_0']['bias'])
  return x @ params['Dense_1']['kernel'] + params['Dense_1']['bias']


def _loss(params, batch, rng) -> jax.Array:
  del rng
  scores = jax.nn.log_softmax(logits(params, batch['x']))
  return -jnp.take_along_axis(scores, batch['y'][:, None], 1).mean()


class Averaging:
  """FedJAX's `federated_averaging`.

  Args:
    task: the task.
  """

  def __init__(self, task: peer_task.Task):
    self._task, self._done = task, 0
    images, labels = task.floats(), task.labels.astype(np.int32)
    self._clients = [
        fedjax.ClientDataset({'x': images[rows], 'y': labels[rows]})
        for rows in task.clients]
    self._algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(_loss), fedjax.optimizers.sgd(task.learning_rate),
        fedjax.optimizers.sgd(1.0), fedjax.ShuffleRepeatBatchHParams(
            batch_size=task.batch, num_epochs=task.epochs, seed=0))
    self._state = self._algorithm.init(jax.tree.map(jnp.asarray, task.params))

  def advance(self, count: int) -> None:
    """See `peer_task.System`."""
    for _ in range(count):
      ids = self._task.cohort(self._done)
      keys = jax.random.split(jax.random.PRNGKey(self._done), len(ids))
      self._state, _ = self._algorithm.apply(
          self._state, [(k, self._clients[k], key)
                        for k, key in zip(ids, keys, strict=True)])
      self._done += 1
    jax.block_until_ready(self._state)

  def params(self):
    """See `peer_task.System`."""
    return jax.device_get(self._state.params)


if __name__ == '__main__':
  peer_task.main(Averaging, ['fedjax', 'jax', 'dm-haiku'])
