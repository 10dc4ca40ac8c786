"""Convolution as a sum of matrix products, one for each kernel entry.

Each product reads the input in place, at a shift, so no patches are stored.
Under `vmap` over clients every product is a batched one: neither the output nor
a gradient is a grouped convolution.
"""
from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl.ops import conv_direct, conv_geometry, custom_vjp, matmul


def _out(x: jax.Array, w: jax.Array, window: conv_geometry.Window) -> jax.Array:
  """float[B, H, W, I] with float[kh, kw, I, O] -> float[B, H', W', O]."""
  return _sum(conv_direct.padded(x, window), w, window)


def _sum(padded: jax.Array, w: jax.Array, window: conv_geometry.Window
         ) -> jax.Array:
  """Returns the products of `_out`, of an input that has its zeros already."""
  height, width, inputs, outputs = w.shape
  parts = (
      matmul.contract(conv_direct.tap(padded, window, i, j).reshape(-1, inputs),
                      w[i, j], 1, 0)
      for i in range(height) for j in range(width))
  return functools.reduce(jnp.add, parts).reshape(
      padded.shape[0], *window.out, outputs)


def _left(g: jax.Array, w: jax.Array,
          window: conv_geometry.Window) -> jax.Array:
  """Gradient of x: g, spread by the stride, with the turned kernel."""
  pads = [(lo, hi, window.stride - 1) for lo, hi in window.back_pads]
  spread = lax.pad(g, jnp.zeros((), g.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
  back = conv_geometry.Window((spread.shape[1], spread.shape[2]), window.kernel,
                              1, ((0, 0), (0, 0)))
  return _sum(spread, conv_direct.turned(w), back)


_FORM = custom_vjp.trilinear(_out, _left, conv_direct.gradient)


def conv(x: jax.Array, w: jax.Array, window: conv_geometry.Window) -> jax.Array:
  """Convolves float[B, H, W, I] and float[kh, kw, I, O] -> [B, H', W', O]."""
  return _FORM.out(x, w, window)
