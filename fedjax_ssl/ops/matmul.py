"""The matrix product whose derivatives never transpose an operand."""
from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl.ops import custom_vjp

# Multiplications of a sum that XLA:CPU leaves to one thread, and entries of a
# result of which it splits longer ones.
_PART = 1 << 19
_ENTRIES = 1 << 11


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
_PRODUCT = custom_vjp.trilinear(
    lambda a, b, precision: contract(a, b, 1, 0, precision),
    lambda g, b, precision: contract(g, b, 1, 1, precision),
    lambda a, g, precision: contract(a, g, 0, 0, precision))


def product(a: jax.Array, b: jax.Array, precision: str | None = None
            ) -> jax.Array:
  """float[T, I] times float[I, O] -> float[T, O]; see `contract`."""
  return _PRODUCT.out(a, b, precision)


def _transposed(a: jax.Array, g: jax.Array, precision: str | None
                ) -> jax.Array:
  """float[T, I] and float[T, O] summed over T -> float[I, O].

  On CPU XLA splits a long sum of a product whose left operand is transposed
  into one part a thread, so that its bits depend on cores and devices. Behind
  a barrier the operand lies as the other library wants it, which does not.
  """
  if jax.default_backend() != 'cpu':
    return contract(a, g, 0, 0, precision)
  return contract(lax.optimization_barrier(a.T), g, 1, 0, precision)


def _in_parts(a: jax.Array, g: jax.Array, precision: str | None) -> jax.Array:
  """The same with parts of its own, too small for XLA to split again.

  It splits no sums of many entries: those go to the threads entry by entry.
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
  """`product` where T is far above I and O.

  More devices than cores change no bit of its gradients.
  """
  return _TALL.out(a, b, None)


def gram(a: jax.Array, g: jax.Array) -> jax.Array:
  """float[T, I] and float[T, O] summed over T -> float[I, O].

  More devices than cores change no bit.
  """
  return _GRAM.right(a, g, None)
