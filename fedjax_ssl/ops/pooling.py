"""Rectifier and pooling with hand-written gradients.

Put `relu` after `max_pool`, not before: the result is the same and the
rectifier has a quarter of the work. Derivatives are those of reverse mode
alone: `jax.jvp` and `jax.hessian` of these, and of networks made of them, raise
TypeError.
"""
from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl.ops import custom_vjp


@jax.custom_vjp
def relu(x: jax.Array) -> jax.Array:
  """Computes max(x, 0) of any shape; keeps only its output for the gradient."""
  return jnp.maximum(x, 0)


def _relu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  y = relu(x)
  return y, y


relu.defvjp(_relu_forward, lambda y, g: (jnp.where(y > 0, g, 0),))


Size = tuple[int, int]
Four = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _quarters(x: jax.Array, size: Size) -> Four:
  """Returns the four pixels of every 2x2 window, apart.

  Args:
    x: float[B, H, W, C].
    size: (H, W).

  Returns:
    4 of float[B, H//2, W//2, C], row-major in the window.
  """
  height, width = (n // 2 * 2 for n in size)
  a, b, c, d = (
      lax.slice(x, (0, i, j, 0), (x.shape[0], height, width, x.shape[3]),
                (1, 2, 2, 1)) for i in (0, 1) for j in (0, 1))
  return a, b, c, d


def _interleave(parts: Four, size: Size) -> jax.Array:
  """Adjoint of `_quarters`."""
  batch, height, width, channels = parts[0].shape
  rows = [jnp.stack(parts[:2], 3), jnp.stack(parts[2:], 3)]
  x = jnp.stack(rows, 2).reshape(batch, 2 * height, 2 * width, channels)
  pads = [(0, n - m, 0) for n, m in zip(size, x.shape[1:3], strict=True)]
  return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *pads, (0, 0, 0)))


quarters, _ = custom_vjp.adjoint_pair(_quarters, _interleave)


@jax.custom_vjp
def _take(parts: Four, choice: jax.Array) -> jax.Array:
  """Returns one of four, entry by entry; choice is int8 in [0, 4)."""
  taken, *others = parts
  for i, other in enumerate(others, start=1):
    taken = jnp.where(choice == i, other, taken)
  return taken


@jax.custom_vjp
def _give(y: jax.Array, choice: jax.Array) -> Four:
  """Adjoint of `_take`: y where chosen, else zeros."""
  a, b, c, d = (jnp.where(choice == i, y, 0) for i in range(4))
  return a, b, c, d


_take.defvjp(lambda parts, choice: (_take(parts, choice), choice),
             lambda choice, g: (_give(g, choice), None))
_give.defvjp(lambda y, choice: (_give(y, choice), choice),
             lambda choice, g: (_take(g, choice), None))


@jax.custom_vjp
def max_of(parts: Four) -> jax.Array:
  """Takes the maximum of four arrays; the first of equals takes the gradient.

  Where one is NaN, the maximum is NaN too, and the last array takes the
  gradient. PyTorch gives it to the one that is NaN; finding that one would cost
  three more comparisons for every entry.
  """
  a, b, c, d = parts
  return jnp.maximum(jnp.maximum(a, b), jnp.maximum(c, d))


def _max_of_forward(parts: Four) -> tuple[jax.Array, jax.Array]:
  # One byte an entry is all that the gradient needs.
  y = max_of(parts)
  choice = jnp.full(y.shape, 3, jnp.int8)
  for i, part in reversed(list(enumerate(parts[:3]))):
    choice = jnp.where(part == y, jnp.int8(i), choice)
  return y, choice


max_of.defvjp(_max_of_forward, lambda choice, g: (_give(g, choice),))


@jax.custom_vjp
def _choose(parts: jax.Array, chosen: jax.Array) -> jax.Array:
  """float[N, 4, C] where bool[N, 4, C], summed over the four: float[N, C]."""
  return jnp.where(chosen, parts, 0).sum(1)


@jax.custom_vjp
def _place(y: jax.Array, chosen: jax.Array) -> jax.Array:
  """Adjoint of `_choose`."""
  return jnp.where(chosen, y[:, None], 0)


_choose.defvjp(lambda parts, chosen: (_choose(parts, chosen), chosen),
               lambda chosen, g: (_place(g, chosen), None))
_place.defvjp(lambda y, chosen: (_place(y, chosen), chosen),
              lambda chosen, g: (_choose(g, chosen), None))


@jax.custom_vjp
def max_of_four(parts: jax.Array) -> jax.Array:
  """Takes the maximum over an axis of four: float[N, 4, C] -> float[N, C].

  The first of equals takes the gradient, and none where all are -inf. Where one
  is NaN, the maximum is NaN too, and none takes it.
  """
  return parts.max(1)


def _max_of_four_backward(kept: tuple[jax.Array, jax.Array], g: jax.Array
                          ) -> tuple[jax.Array]:
  parts, y = kept
  a, b, c, _ = (parts[:, i] for i in range(4))
  ab = jnp.maximum(a, b)
  before = jnp.stack([jnp.full_like(a, -jnp.inf), a, ab, jnp.maximum(ab, c)], 1)
  chosen = (parts == y[:, None]) & (parts > before)
  # Otherwise XLA computes what comes before g four times, once for each part.
  return _place(lax.optimization_barrier(g), chosen),


def _max_of_four_forward(parts: jax.Array
                         ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  y = max_of_four(parts)
  return y, (parts, y)


max_of_four.defvjp(_max_of_four_forward, _max_of_four_backward)


def max_pool(x: jax.Array) -> jax.Array:
  """Takes the maximum of every 2x2 window: [B, H, W, C] -> [B, H//2, W//2, C].

  An odd last row or column is dropped. Of equal maxima the first, in row-major
  order, takes the gradient; for NaN see `max_of`.

  Raises:
    ValueError: if H or W is below 2.
  """
  check_size(x.shape[1:3])
  return max_of(quarters(x, x.shape[1:3]))


def check_size(size: Sequence[int]) -> None:
  """Raises ValueError for a map without a 2x2 window."""
  if min(size) < 2:
    raise ValueError(f'a map of {size[0]}x{size[1]} is too small to pool; it '
                     'needs 2x2.')


def mean_pool(x: jax.Array) -> jax.Array:
  """Averages over the map: float[B, H, W, C] -> float[B, C]."""
  return jnp.mean(x, (1, 2))


def mean_pool_2x2(x: jax.Array) -> jax.Array:
  """Averages every 2x2 window; an odd last row or column is dropped."""
  return mean_windows(x, 2)


def mean_windows(x: jax.Array, side: int) -> jax.Array:
  """Averages every window [side, side]; rows and columns left over are dropped.

  float[B, H, W, C] -> float[B, H//side, W//side, C].
  """
  batch, height, width, channels = x.shape
  height, width = height // side, width // side
  x = lax.slice(x, (0, 0, 0, 0),
                (batch, side * height, side * width, channels))
  return jnp.mean(x.reshape(batch, height, side, width, side, channels), (2, 4))
