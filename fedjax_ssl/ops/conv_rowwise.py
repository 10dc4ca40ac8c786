"""The 5x5 convolution, and the 3x3 one on large maps.

It is the algorithm of `conv_winograd`, one row of each tile at a time: tiles
are transformed along rows first, then a loop over the a rows transforms the
columns and multiplies. XLA fuses two transforms that follow each other, and
would compute the first again for each output of the second; it fuses nothing
into a loop. All a^2 products together are many times as large as the image. The
loop holds only a of them at a time, of a part of the batch, and nothing but x
and w is kept for the gradient. This makes 4x4 output tiles worth while for 5x5
kernels: 64 products for 16 outputs instead of 400.

Where the weights are larger than the maps, as in deep layers of 3x3 kernels,
`conv_winograd`, which keeps the transformed tiles, is faster.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import math

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl.ops import custom_vjp, matmul
from fedjax_ssl.ops.conv_winograd import (
    combine_by,
    matrices,
    Phases,
    PRECISION,
    side_by_side,
    Tiling,
)

# Bytes of transformed tiles at a time: half of a core's second-level cache. The
# loop over rows holds so few tiles that those of a part of the batch fit. 90
# images of 14x14 with 32 to 64 channels take three quarters of the time in
# parts of 18.
_HELD_BYTES = 1 << 20


def _pad(x: jax.Array, before: int, size: int, axis: int) -> jax.Array:
  """Zeros around an axis up to `size`, `before` of them in front."""
  pads = [(0, 0, 0)] * x.ndim
  pads[axis] = (before, size - before - x.shape[axis], 0)
  return lax.pad(x, jnp.zeros((), x.dtype), pads)


def _pixels(phases: Sequence[jax.Array], before: int, count: int, spare: int,
            tiling: Tiling, axis: int) -> list[jax.Array]:
  """Pixels 0, 1, ... of every tile along an axis; tiles start m apart.

  Args:
    phases: of the map along the axis.
    before: pixels of the first tile in front of the map.
    count: pixels of a tile.
    spare: zeros behind the last tile.
    tiling: the tiles.
    axis: 1 or 2.
  """
  fold, reach = len(phases), tiling.tiles[axis - 1] - 1
  step, front = tiling.m // fold, -(-before // fold)
  starts = [(j - before) // fold + front for j in range(count)]
  size = starts[-1] + step * reach + 1 + spare
  padded = [_pad(x, front, size, axis) for x in phases]
  return [lax.slice_in_dim(padded[(j - before) % fold], start,
                           start + step * reach + 1, step, axis)
          for j, start in enumerate(starts)]


def _cut_inputs(phases: Sequence[jax.Array], tiling: Tiling, axis: int
                ) -> list[jax.Array]:
  """B^T d of every tile d along an axis: a arrays, tiles in place of pixels.

  Args:
    phases: of float[B, H, W, C] along the axis.
    tiling: the tiles.
    axis: 1 or 2.
  """
  before = tiling.window.pads[axis - 1][0]
  combine = combine_by(matrices(tiling.m, tiling.window.kernel[0])[2])
  return combine(_pixels(phases, before, tiling.side, 0, tiling, axis))


def _cut_outputs(phases: Sequence[jax.Array], tiling: Tiling, axis: int
                 ) -> list[jax.Array]:
  """Adjoint of `_join_outputs`: phases -> a arrays."""
  combine = combine_by(matrices(tiling.m, tiling.window.kernel[0])[0].T)
  # One zero more than the tiles need: XLA computes a padded array once, but one
  # that is not padded again for every slice.
  return combine(_pixels(phases, 0, tiling.m, 1, tiling, axis))


def _join_outputs(parts: Sequence[jax.Array], tiling: Tiling, fold: int,
                  axis: int) -> tuple[jax.Array, ...]:
  """A^T M of every tile M along an axis, laid side by side.

  Args:
    parts: a arrays, tiles in place of pixels along the axis.
    tiling: the tiles.
    fold: f.
    axis: 1 or 2.

  Returns:
    The f phases along the axis.
  """
  combine = combine_by(matrices(tiling.m, tiling.window.kernel[0])[0])
  pixels = combine(parts)
  length = tiling.window.out[axis - 1] // fold
  return tuple(lax.slice_in_dim(side_by_side(pixels[a::fold], axis), 0, length,
                                axis=axis) for a in range(fold))


def _rows(cut: Callable[..., list[jax.Array]], phases: Phases, tiling: Tiling
          ) -> tuple[jax.Array, ...]:
  """Every phase along columns cut along rows: f of float[a, B, th, w, C]."""
  return tuple(jnp.stack(cut(column, tiling, 1))
               for column in zip(*phases, strict=True))


def _expand(w: jax.Array, tiling: Tiling) -> list[jax.Array]:
  """G w along the first axis: float[r, ...] -> a arrays float[...]."""
  return combine_by(matrices(tiling.m, w.shape[0])[1])(list(w))


def _shrink(parts: Sequence[jax.Array], tiling: Tiling) -> jax.Array:
  """Adjoint of `_expand`: a arrays float[...] -> float[r, ...]."""
  combine = combine_by(matrices(tiling.m, tiling.window.kernel[0])[1].T)
  return jnp.stack(combine(parts))


def _flat(tile: jax.Array) -> jax.Array:
  return tile.reshape(math.prod(tile.shape[:3]), tile.shape[3])


def _split(x: jax.Array, tiling: Tiling, channels: int) -> jax.Array:
  """Cuts a batch in parts, on a CPU so small that their tiles fit the cache.

  Under `vmap` each mapped batch is cut as if it were alone.

  Args:
    x: float[B, ...].
    tiling: the tiles.
    channels: of the tiles that a loop holds at a time.

  Returns:
    float[N, B', ...] with N B' >= B, filled up with zeros.
  """
  batch = x.shape[0]
  if not batch or jax.default_backend() != 'cpu':
    return x[None]
  held = math.prod(tiling.tiles) * tiling.side * channels * x.dtype.itemsize
  most = min(max(_HELD_BYTES // held, 1), batch)
  # Rows of padding cost as much as others. So this takes the size that needs
  # the fewest, among those from half the largest up.
  size = min(range((most + 1) // 2, most + 1), key=lambda n: (-batch % n, -n))
  count = -(-batch // size)
  return _pad(x, 0, count * size, 0).reshape(count, size, *x.shape[1:])


def _multiply(x: Phases, w: jax.Array, tiling: Tiling, axis: int, fold: int
              ) -> Phases:
  """Returns the convolution, with `axis` of [I, O] of w as the channels of x.

  Args:
    x: phases.
    w: float[r, r, I, O].
    tiling: the tiles.
    axis: 0 or 1.
    fold: of the result.
  """
  weight_rows = jnp.stack(_expand(w, tiling))

  def along_columns(row_and_weights):
    row, weights = row_and_weights
    products = []
    for tile, u in zip(_cut_inputs(row, tiling, 2), _expand(weights, tiling),
                       strict=True):
      y = matmul.contract(_flat(tile), u, 1, axis, PRECISION)
      products.append(y.reshape(*tile.shape[:3], y.shape[1]))
    return _join_outputs(products, tiling, fold, 2)

  def along_rows(part):
    rows = lax.map(along_columns, (_rows(_cut_inputs, part, tiling),
                                   weight_rows))
    columns = [_join_outputs(list(row), tiling, fold, 1) for row in rows]
    return tuple(zip(*columns, strict=True))

  parts = jax.tree.map(
      lambda phase: _split(phase, tiling, w.shape[2] + w.shape[3]), x)
  y = lax.map(along_rows, parts)
  batch = x[0][0].shape[0]
  return jax.tree.map(
      lambda phase: phase.reshape(math.prod(phase.shape[:2]),
                                  *phase.shape[2:])[:batch], y)


def _out(x: jax.Array, w: jax.Array, tiling: Tiling) -> Phases:
  return _multiply(((x,),), w, tiling, 0, tiling.fold)


def _left(g: Phases, w: jax.Array, tiling: Tiling) -> jax.Array:
  """Gradient of x: the same convolution of g, with the turned kernel.

  Summing over the kernel's output channels needs no transposed kernel, which
  would cost a pass over it.
  """
  return _multiply(g, w[::-1, ::-1], tiling, 1, 1)[0][0]


def _right(x: jax.Array, g: Phases, tiling: Tiling) -> jax.Array:
  """Gradient of w: one product over all tiles for each position."""
  def along_columns(rows):
    row, grads = rows
    return _shrink([
        matmul.contract(_flat(a), _flat(b), 0, 0, PRECISION)
        for a, b in zip(_cut_inputs(row, tiling, 2),
                        _cut_outputs(grads, tiling, 2), strict=True)], tiling)

  def along_rows(total, part):
    rows = lax.map(along_columns, (
        _rows(_cut_inputs, part[0], tiling),
        _rows(_cut_outputs, part[1], tiling)))
    return total + rows, None

  channels = x.shape[3] + g[0][0].shape[3]
  parts = jax.tree.map(lambda phase: _split(phase, tiling, channels),
                       (((x,),), g))
  side, r = tiling.side, tiling.window.kernel[0]
  total = jnp.zeros((side, r, x.shape[3], g[0][0].shape[3]), x.dtype)
  total, _ = lax.scan(along_rows, total, parts)
  return _shrink(list(total), tiling)


_FORM = custom_vjp.trilinear(_out, _left, _right)


@functools.partial(jax.jit, static_argnames=('tiling',))
def conv(x: jax.Array, w: jax.Array, tiling: Tiling) -> Phases:
  """Computes `conv_winograd.conv` row by row; r must be odd, best is 5.

  In float32 the relative error is a few 1e-6, and up to 2e-5 for the gradient
  of w.
  """
  return _FORM.out(x, w, tiling)
