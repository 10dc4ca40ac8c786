"""XLA's own convolution, with gradients in the order that XLA:CPU runs fast.

XLA:CPU has a fast kernel for NHWC inputs and HWIO kernels. It converts other
orders of axes to this one, but not inside a loop: there they run as plain
nested loops, some 20 times slower. So the gradients are written as convolutions
in the fast order, or as matrix products.
"""
from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl.ops import conv_geometry, custom_vjp, matmul

_ORDER = ('NHWC', 'HWIO', 'NHWC')


def tap(x: jax.Array, window: conv_geometry.Window, row: int,
        column: int) -> jax.Array:
  """Takes what kernel entry (row, column) sees of the padded x [B, h, w, I].

  Returns float[B, H', W', I].
  """
  rows, columns = window.out
  step = window.stride
  return lax.slice(
      x, (0, row, column, 0),
      (x.shape[0], row + (rows - 1) * step + 1,
       column + (columns - 1) * step + 1, x.shape[3]), (1, step, step, 1))


def _out(x: jax.Array, w: jax.Array, window: conv_geometry.Window) -> jax.Array:
  """float[B, H, W, I] with float[kh, kw, I, O] -> float[B, H', W', O]."""
  return lax.conv_general_dilated(
      x, w, (window.stride,) * 2, window.pads, dimension_numbers=_ORDER)


def _left(g: jax.Array, w: jax.Array,
          window: conv_geometry.Window) -> jax.Array:
  """Gradient of x: g, dilated by the stride, with the turned kernel."""
  return lax.conv_general_dilated(
      g, turned(w), (1, 1), window.back_pads,
      lhs_dilation=(window.stride,) * 2, dimension_numbers=_ORDER)


def turned(w: jax.Array) -> jax.Array:
  """Returns the kernel of the gradient of x: float[kh, kw, O, I]."""
  return jnp.transpose(w[::-1, ::-1], (0, 1, 3, 2))


def padded(x: jax.Array, window: conv_geometry.Window) -> jax.Array:
  """Pads x with its zeros, as `tap` reads it."""
  return jnp.pad(x, ((0, 0), *window.pads, (0, 0)))


def gradient(x: jax.Array, g: jax.Array,
             window: conv_geometry.Window) -> jax.Array:
  """Computes the gradient of w: one matrix product for each kernel entry."""
  rows, flat = padded(x, window), g.reshape(-1, g.shape[3])
  height, width = window.kernel
  return jnp.stack([jnp.stack([
      matmul.gram(tap(rows, window, i, j).reshape(-1, x.shape[3]), flat)
      for j in range(width)]) for i in range(height)])


_FORM = custom_vjp.trilinear(_out, _left, gradient)


def conv(x: jax.Array, w: jax.Array, window: conv_geometry.Window) -> jax.Array:
  """Convolves float[B, H, W, I] and float[kh, kw, I, O] -> [B, H', W', O]."""
  return _FORM.out(x, w, window)
