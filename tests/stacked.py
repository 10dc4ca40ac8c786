"""Five clients' updates, shared by the tests of aggregation."""
from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Layer(NamedTuple):
  kernel: Any
  bias: Any


def five_clients(dtype=np.float32) -> tuple[Any, np.ndarray]:
  """Two layers, a scalar and an empty subtree for five clients of any size."""
  rng = np.random.default_rng(0)

  def draw(*shape):
    return rng.normal(size=(5, *shape)).astype(dtype)

  stacked = {'dense': Layer(draw(3, 2), draw(2)), 'scale': draw(), 'none': {}}
  return stacked, np.array([10, 20, 30, 5, 7], np.float32)


def take(stacked, rows):
  return jax.tree.map(lambda x: x[rows], stacked)


def sum_of_squares(tree):
  return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(tree))
