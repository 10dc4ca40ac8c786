"""A matrix product whose derivatives do not transpose its operands."""
from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl.ops import custom_vjp

# XLA:CPU leaves a sum of up to _PART multiplications to one thread. It splits a
# longer one if the result has at most _ENTRIES entries.
_PART = 1 << 19
_ENTRIES = 1 << 11


def contract(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int,
             precision: str | None = None) -> jax.Array:
  """Sums over one axis of each operand; the other axis of a comes first.

  Args:
    a: float[., .].
    b: float[., .].
    a_axis: summed over.
    b_axis: summed over.
    precision: of `lax.dot_general`; None may round float32 to fewer bits on an
      accelerator.

  Returns:
    float[., .], the other axes of a and b.
  """
  return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())),
                         precision=precision)


# Transposing a weight costs a pass over it; contracting its other axis is free.
_PRODUCT = custom_vjp.trilinear(
    lambda a, b, precision: contract(a, b, 1, 0, precision),
    lambda g, b, precision: contract(g, b, 1, 1, precision),
    lambda a, g, precision: contract(a, g, 0, 0, precision))


def product(a: jax.Array, b: jax.Array, precision: str | None = None
            ) -> jax.Array:
  """Multiplies float[T, I] by float[I, O] -> float[T, O]; see `contract`."""
  return _PRODUCT.out(a, b, precision)


def _transposed(a: jax.Array, g: jax.Array, precision: str | None
                ) -> jax.Array:
  """float[T, I] and float[T, O] summed over T -> float[I, O].

  XLA:CPU splits the long sum of a product with a transposed left operand into
  one part for each thread, so its bits depend on the number of cores and
  devices. A barrier makes XLA transpose the operand first; it then calls
  another routine, which does not split.
  """
  if jax.default_backend() != 'cpu':
    return contract(a, g, 0, 0, precision)
  return contract(lax.optimization_barrier(a.T), g, 1, 0, precision)


def _in_parts(a: jax.Array, g: jax.Array, precision: str | None) -> jax.Array:
  """As `_transposed`, by cutting the sum into parts that XLA does not split.

  The parts depend on the shapes alone. Results of many entries need no parts:
  XLA gives different entries to different threads and splits no sum.
  """
  rows, entries = a.shape[0], a.shape[1] * g.shape[1]
  step = max(_PART // max(entries, 1), 1)
  if jax.default_backend() != 'cpu' or entries > _ENTRIES or rows <= step:
    return contract(a, g, 0, 0, precision)
  return functools.reduce(jnp.add, (
      contract(a[at:at + step], g[at:at + step], 0, 0, precision)
      for at in range(0, rows, step)))


_TALL, _GRAM = (custom_vjp.trilinear(
    lambda a, b, precision: contract(a, b, 1, 0, precision),
    lambda g, b, precision: contract(g, b, 1, 1, precision), right)
                for right in (_transposed, _in_parts))


def tall(a: jax.Array, b: jax.Array) -> jax.Array:
  """Computes `product` for T far above I and O.

  The bits of its gradients do not depend on the number of devices or cores.
  """
  return _TALL.out(a, b, None)


def gram(a: jax.Array, g: jax.Array) -> jax.Array:
  """Multiplies float[T, I] and float[T, O], summing over T -> float[I, O].

  Its bits do not depend on the number of devices or cores.
  """
  return _GRAM.right(a, g, None)
