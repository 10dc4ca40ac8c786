"""The law that every aggregation rule holds by itself, outside of a round."""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_ssl.core import tree
from fedjax_ssl.core.types import PyTree

# Rows of four clients, whose sum is far from 1, and of one that is left out.
_WEIGHTS = (3.0, 40.0, 5.0, 0.0, 7.0)


def equal_updates_are_not_magnified(
    rule: Callable[[PyTree, jax.Array], PyTree]) -> None:
  """Checks that of clients which all send one update no longer one is made.

  A rule may make it shorter, as one that clips does.

  Raises:
    AssertionError: if it does, as a sum in place of a mean.
  """
  each = {'kernel': jnp.array([[.3, -.4], [0., .1]]), 'bias': jnp.array([-.2])}
  stacked = jax.tree.map(lambda x: jnp.stack([x] * len(_WEIGHTS)), each)
  made = jax.jit(rule)(stacked, jnp.array(_WEIGHTS))
  times = float(tree.global_norm(made) / tree.global_norm(each))
  assert times < 1.01, (
      f'Clients that all send one update get {times:.4g} times as much of it, '
      'as from a sum. Divide by the sum of the weights; a longer step of the '
      'server is --server_learning_rate.')
