"""Convolution as one matrix product of patches; also the 1x1 convolution."""
from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl.ops import (
    conv_direct,
    conv_geometry,
    custom_vjp,
    matmul,
    pooling,
)


def _unfold(x: jax.Array, window: conv_geometry.Window) -> jax.Array:
  """float[B, H, W, I] -> patches float[B * H' * W', kh * kw * I]."""
  pads = [(lo, hi, 0) for lo, hi in window.pads]
  padded = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
  height, width = window.kernel
  taps = [
      conv_direct.tap(padded, window, i, j)
      for i in range(height)
      for j in range(width)
  ]
  patches = lax.concatenate(taps, 3)
  return patches.reshape(-1, height * width * x.shape[3])


def _fold(patches: jax.Array, window: conv_geometry.Window) -> jax.Array:
  """Adjoint of `_unfold`: every patch entry added to its pixel."""
  height, width = window.kernel
  channels = patches.shape[1] // (height * width)
  grid = patches.reshape(-1, *window.out, patches.shape[1])
  zero = jnp.zeros((), patches.dtype)
  parts = []
  for i in range(height):
    for j in range(width):
      start = (i * width + j) * channels
      part = lax.slice_in_dim(grid, start, start + channels, axis=3)
      pads = []
      for n, m, at, (lo, _) in zip(window.size, window.out, (i, j),
                                   window.pads, strict=True):
        reach = at - lo + (m - 1) * window.stride
        pads.append((at - lo, n - 1 - reach, window.stride - 1))
      parts.append(lax.pad(part, zero, ((0, 0, 0), *pads, (0, 0, 0))))
  return functools.reduce(jnp.add, parts)


unfold, fold = custom_vjp.adjoint_pair(_unfold, _fold)


def conv(x: jax.Array, w: jax.Array, window: conv_geometry.Window) -> jax.Array:
  """Convolves float[B, H, W, I] and float[kh, kw, I, O] -> [B, H', W', O]."""
  y = matmul.tall(unfold(x, window), w.reshape(-1, w.shape[3]))
  return y.reshape(x.shape[0], *window.out, w.shape[3])


def quarters(x: jax.Array, w: jax.Array,
             window: conv_geometry.Window) -> pooling.Four:
  """Computes the pixels of every 2x2 window of `conv` as four arrays.

  All four read one patch, which is a pixel wider and higher than the kernel;
  the kernel takes four places in it. A 5x5 kernel then copies a third as many
  entries, for 1.4 times as many multiplications.

  Args:
    x: float[B, H, W, I].
    w: float[kh, kw, I, O].
    window: of stride 1.

  Returns:
    4 of float[B, H'//2, W'//2, O], row-major in the window.
  """
  wider = window.paired
  patches = unfold(x, wider)
  a, b, c, d = (
      matmul.tall(patches, kernel.reshape(-1, w.shape[3])).reshape(
          x.shape[0], *wider.out, w.shape[3]) for kernel in _placed(w))
  return a, b, c, d


def max_pooled(x: jax.Array, w: jax.Array,
               window: conv_geometry.Window) -> jax.Array:
  """Computes the maximum of `quarters` with one product for all four.

  With few outputs a product costs what reading the patches costs, so one of
  four times the width is cheaper than four.

  Args:
    x: float[B, H, W, I].
    w: float[kh, kw, I, O].
    window: of stride 1.

  Returns:
    float[B, H'//2, W'//2, O].
  """
  wider = window.paired
  kernel = jnp.stack(_placed(w), 3).reshape(-1, 4 * w.shape[3])
  y = matmul.tall(unfold(x, wider), kernel).reshape(-1, 4, w.shape[3])
  return pooling.max_of_four(y).reshape(x.shape[0], *wider.out, w.shape[3])


def _placed(w: jax.Array) -> list[jax.Array]:
  """The kernel at its four places in a patch: float[kh + 1, kw + 1, I, O]."""
  return [jnp.pad(w, ((i, 1 - i), (j, 1 - j), (0, 0), (0, 0)))
          for i in (0, 1) for j in (0, 1)]


def pointwise(x: jax.Array, w: jax.Array,
              window: conv_geometry.Window) -> jax.Array:
  """Computes a 1x1 convolution: one matrix product over the pixels it keeps.

  Args:
    x: float[B, H, W, I].
    w: float[1, 1, I, O].
    window: 1x1, without padding.

  Returns:
    float[B, H', W', O].
  """
  kept = x if window.stride == 1 else subsample(x, window)
  y = matmul.product(kept.reshape(-1, x.shape[3]), w[0, 0])
  return y.reshape(x.shape[0], *window.out, w.shape[3])


def _subsample(x: jax.Array, window: conv_geometry.Window) -> jax.Array:
  """Every `stride`-th pixel: float[B, H, W, I] -> float[B, H', W', I]."""
  return conv_direct.tap(x, window, 0, 0)


def _spread(y: jax.Array, window: conv_geometry.Window) -> jax.Array:
  """Adjoint of `_subsample`: zeros between the pixels."""
  pads = [(0, n - 1 - (m - 1) * window.stride, window.stride - 1)
          for n, m in zip(window.size, window.out, strict=True)]
  return lax.pad(y, jnp.zeros((), y.dtype), ((0, 0, 0), *pads, (0, 0, 0)))


subsample, _ = custom_vjp.adjoint_pair(_subsample, _spread)
