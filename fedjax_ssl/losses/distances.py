"""Distances between models, as penalties of a loss."""
from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_ssl import arguments
from fedjax_ssl.arguments import at_least_float32
from fedjax_ssl.losses.rows import (
  PyTree,
  Scalar,
)


def squared_distance(a: PyTree, b: PyTree) -> jax.Array:
  r"""Computes the sum :math:`\|a - b\|^2` over all leaves.

  Args:
    a: pytree of arrays.
    b: pytree of the same structure and shapes.

  Returns:
    float32[].

  Raises:
    ValueError: unless both have the same structure and shapes.
  """
  arguments.check_alike(a=a, b=b)
  gaps = jax.tree.map(
      lambda x, y: jnp.sum(jnp.square(at_least_float32(x)
                                      - at_least_float32(y))), a, b)
  return sum(jax.tree.leaves(gaps), jnp.zeros((), jnp.float32))


def l1_norm(tree: PyTree) -> jax.Array:
  """Computes the sum of absolute values over all leaves, float32[].

  The derivative at 0 is 0, so that a number that is 0 stays there. That of
  `jnp.abs` is 1, which would move it at every step.
  """
  def norm(x: jax.Array) -> jax.Array:
    return jnp.sum(x * jax.lax.stop_gradient(jnp.sign(x)))

  norms = [norm(at_least_float32(x)) for x in jax.tree.leaves(tree)]
  return sum(norms, jnp.zeros((), jnp.float32))


def proximal(params: PyTree, anchor: PyTree, *, mu: Scalar) -> jax.Array:
  r"""Computes FedProx's pull to the start, :math:`\frac\mu2 \|w - w_t\|^2`.

  Args:
    params: pytree of arrays.
    anchor: pytree of the same structure and shapes, a constant for derivatives.
    mu: 0 is FedAvg. Some codes leave the half out: their mu is twice ours.

  Returns:
    float32[].

  Raises:
    ValueError: unless both have the same structure and shapes, or for a
      negative mu.

  References:
    Li et al., FedProx, https://arxiv.org/abs/1812.06127, eq. 2.
  """
  arguments.check_alike(params=params, anchor=anchor)
  arguments.check_number('mu', mu, arguments.NOT_NEGATIVE)
  return squared_distance(params, jax.lax.stop_gradient(anchor)) * (mu / 2)
