"""The matrix product whose derivatives never transpose an operand."""
from __future__ import annotations

import jax
from jax import lax

from fedjax_ssl.models import closed


def contract(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int
             ) -> jax.Array:
  """Product over one axis of each, the other axes of a first."""
  return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())))


# Transposing a weight costs a pass over it; contracting its other axis is free.
_PRODUCT = closed.trilinear(
    lambda a, b, _: contract(a, b, 1, 0),
    lambda g, b, _: contract(g, b, 1, 1),
    lambda a, g, _: contract(a, g, 0, 0))


def product(a: jax.Array, b: jax.Array) -> jax.Array:
  """float[T, I] times float[I, O] -> float[T, O]."""
  return _PRODUCT.out(a, b, None)


def gram(a: jax.Array, g: jax.Array) -> jax.Array:
  """float[T, I] and float[T, O] summed over T -> float[I, O]."""
  return _PRODUCT.right(a, g, None)
