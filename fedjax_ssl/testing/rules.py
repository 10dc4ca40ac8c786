"""The law that every aggregation rule holds by itself, outside of a round."""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.core import tree
from fedjax_ssl.core.types import PyTree

# Rows of 64 clients, and of 16 that are left out: enough for a rule that wants
# a quorum, or shrinks what comes from few rows.
_WEIGHTS = (3.0, 40.0, 5.0, 0.0, 7.0) * 16


def equal_updates_do_not_add_up(
    rule: Callable[[PyTree, jax.Array], PyTree]) -> None:
  """Checks that twice as many clients with one update make no longer one.

  Raises:
    AssertionError: if they do, as with a sum in place of a mean.
  """
  each = {'kernel': jnp.array([[.3, -.4], [0., .1]]), 'bias': jnp.array([-.2])}
  def length(weights: tuple[float, ...]) -> float:
    stacked = jax.tree.map(lambda x: jnp.stack([x] * len(weights)), each)
    return float(tree.global_norm(
        jax.jit(rule)(stacked, jnp.array(weights))))
  once, twice = length(_WEIGHTS), length(_WEIGHTS * 2)
  assert np.isfinite([once, twice]).all(), (
      'Clients that all send one finite update get one that is not.')
  assert twice <= 1.2 * once, (
      f'Twice as many clients that all send one update get {twice:.3g} of it '
      f'in place of {once:.3g}, as from a sum. Divide by the sum of the '
      'weights.')
