"""Convolution between transformed tiles, one row of the tiles at a time.

The algorithm of `winograd`, for larger kernels: rows are transformed first, and
a loop over their a positions does the columns. XLA fuses transforms that follow
each other, and would compute the first again for each output of the second; it
fuses nothing into a loop. The a^2 products are many times the image, of which
the loop holds a at a time, and nothing is kept for the gradient but x and w.
So tiles of 4 pay for 5x5 kernels: 64 products for 16 outputs instead of 400.

Where the weights outweigh the maps, as in deep layers of 3x3 kernels, keeping
the transformed ones is faster.
"""
from __future__ import annotations

from collections.abc import Sequence
import functools

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl.models import closed, matmul, windows
from fedjax_ssl.models.winograd import combine_by, matrices, Tiling


def _pad(x: jax.Array, before: int, size: int, axis: int) -> jax.Array:
  """Zeros around an axis up to `size`, `before` of them in front."""
  pads = [(0, 0, 0)] * x.ndim
  pads[axis] = (before, size - before - x.shape[axis], 0)
  return lax.pad(x, jnp.zeros((), x.dtype), pads)


def _steps(x: jax.Array, count: int, tiling: Tiling, axis: int
           ) -> list[jax.Array]:
  """Pixels 0, 1, ... of every tile along an axis; tiles start m apart."""
  m, tiles = tiling.m, tiling.tiles[axis - 1]
  return [lax.slice_in_dim(x, j, j + m * (tiles - 1) + 1, m, axis)
          for j in range(count)]


def _cut_inputs(x: jax.Array, tiling: Tiling, axis: int) -> list[jax.Array]:
  """B^T d of every tile d along an axis: a arrays, tiles in place of pixels.

  Args:
    x: float[B, H, W, C].
    tiling: the tiles.
    axis: 1 or 2.
  """
  m, window = tiling.m, tiling.window
  size = m * (tiling.tiles[axis - 1] - 1) + tiling.side
  padded = _pad(x, window.pads[axis - 1][0], size, axis)
  combine = combine_by(matrices(m, window.kernel[0])[2])
  return combine(_steps(padded, tiling.side, tiling, axis))


def _cut_outputs(g: jax.Array, tiling: Tiling, axis: int) -> list[jax.Array]:
  """Adjoint of `_join_outputs`: one array -> a arrays."""
  # One zero more than the tiles need: in a loop XLA computes what is padded
  # once, and what is not again for every slice.
  padded = _pad(g, 0, tiling.m * tiling.tiles[axis - 1] + 1, axis)
  combine = combine_by(matrices(tiling.m, tiling.window.kernel[0])[0].T)
  return combine(_steps(padded, tiling.m, tiling, axis))


def _join_outputs(parts: Sequence[jax.Array], tiling: Tiling, axis: int
                 ) -> jax.Array:
  """A^T M of every tile M along an axis, laid side by side: a arrays -> one."""
  combine = combine_by(matrices(tiling.m, tiling.window.kernel[0])[0])
  y = jnp.stack(combine(parts), axis + 1)
  y = y.reshape(*y.shape[:axis], -1, *y.shape[axis + 2:])
  return lax.slice_in_dim(y, 0, tiling.window.out[axis - 1], axis=axis)


def _expand(w: jax.Array, tiling: Tiling) -> list[jax.Array]:
  """G w along the first axis: float[r, ...] -> a arrays float[...]."""
  return combine_by(matrices(tiling.m, w.shape[0])[1])(list(w))


def _shrink(parts: Sequence[jax.Array], tiling: Tiling) -> jax.Array:
  """Adjoint of `_expand`: a arrays float[...] -> float[r, ...]."""
  combine = combine_by(matrices(tiling.m, tiling.window.kernel[0])[1].T)
  return jnp.stack(combine(parts))


def _flat(tile: jax.Array) -> jax.Array:
  return tile.reshape(-1, tile.shape[3])


def _multiply(x: jax.Array, w: jax.Array, tiling: Tiling, axis: int
              ) -> jax.Array:
  """The convolution, with `axis` of [I, O] of w as the channels of x."""
  def along_columns(row_and_weights):
    row, weights = row_and_weights
    products = []
    for tile, u in zip(_cut_inputs(row, tiling, 2), _expand(weights, tiling),
                       strict=True):
      y = matmul.contract(_flat(tile), u, 1, axis)
      products.append(y.reshape(*tile.shape[:3], y.shape[1]))
    return _join_outputs(products, tiling, 2)
  rows = lax.map(along_columns, (
      jnp.stack(_cut_inputs(x, tiling, 1)),
      jnp.stack(_expand(w, tiling))))
  return _join_outputs(list(rows), tiling, 1)


def _out(x: jax.Array, w: jax.Array, tiling: Tiling) -> jax.Array:
  return _multiply(x, w, tiling, 0)


def _left(g: jax.Array, w: jax.Array, tiling: Tiling) -> jax.Array:
  """Gradient of x: the same convolution of g, with the turned kernel.

  Contracting its outputs leaves the kernel as it lies in memory: transposing
  it would cost a pass over it.
  """
  return _multiply(g, w[::-1, ::-1], tiling, 1)


def _right(x: jax.Array, g: jax.Array, tiling: Tiling) -> jax.Array:
  """Gradient of w: one product over all tiles for each position."""
  def along_columns(rows):
    row, grads = rows
    return _shrink([
        matmul.contract(_flat(a), _flat(b), 0, 0)
        for a, b in zip(_cut_inputs(row, tiling, 2),
                        _cut_outputs(grads, tiling, 2), strict=True)], tiling)
  rows = lax.map(along_columns, (
      jnp.stack(_cut_inputs(x, tiling, 1)),
      jnp.stack(_cut_outputs(g, tiling, 1))))
  return _shrink(list(rows), tiling)


_FORM = closed.trilinear(_out, _left, _right)


@functools.partial(jax.jit, static_argnames=('window', 'm'))
def conv(x: jax.Array, w: jax.Array, window: windows.Window, *, m: int
         ) -> jax.Array:
  """`winograd.conv`, one row of the tiles at a time, for kernels of odd r.

  In float32 the relative error is a few 1e-6, of the gradient of w up to 2e-5.
  """
  return _FORM.out(x, w, Tiling(m, window))
