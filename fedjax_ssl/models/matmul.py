"""The matrix product whose derivatives never transpose an operand."""
from __future__ import annotations

import jax
from jax import lax

from fedjax_ssl.models import closed


def contract(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int,
             precision: str | None = None) -> jax.Array:
  """Product over one axis of each, the other axes of a first.

  Args:
    a: float[., .].
    b: float[., .].
    a_axis: summed over.
    b_axis: summed over.
    precision: of `lax.dot_general`; None may round float32 to fewer bits on an
      accelerator.
  """
  return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())),
                         precision=precision)


# Transposing a weight costs a pass over it; contracting its other axis is free.
_PRODUCT = closed.trilinear(
    lambda a, b, precision: contract(a, b, 1, 0, precision),
    lambda g, b, precision: contract(g, b, 1, 1, precision),
    lambda a, g, precision: contract(a, g, 0, 0, precision))


def product(a: jax.Array, b: jax.Array, precision: str | None = None
            ) -> jax.Array:
  """float[T, I] times float[I, O] -> float[T, O]; see `contract`."""
  return _PRODUCT.out(a, b, precision)


def gram(a: jax.Array, g: jax.Array) -> jax.Array:
  """float[T, I] and float[T, O] summed over T -> float[I, O]."""
  return _PRODUCT.right(a, g, None)
