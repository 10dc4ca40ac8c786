"""The image operations in three families, each computed once for a batch.

An image is a row of words: the channels of a pixel are packed into one int32,
so that a warp gathers once per pixel. Every image of a batch gets an affine
warp, a table of 256 entries for each channel, and a blend with a degenerate
image; all but one of these are the identity. So a drawn operation takes three
passes, however many operations a pool has. Arithmetic follows Pillow.
"""
from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.core.types import Array
from fedjax_ssl.data.augment.pools import DEGENERATES, Params

_TAPS = {'nearest': (0,), 'bilinear': (0, 1), 'bicubic': (-1, 0, 1, 2)}


def pack(images: Array) -> jax.Array:
  """Packs uint8[B, H, W, C], C at most 4, into words int32[B, H * W]."""
  batch, height, width, channels = images.shape
  wide = jnp.asarray(images).astype(jnp.int32) << _shifts(channels)
  return wide.sum(-1, dtype=jnp.int32).reshape(batch, height * width)


def unpack(words: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Undoes `pack`: uint8 of `shape`."""
  # Takes half the time of stacking channels and moving their axis.
  pixels = words[..., None] >> _shifts(shape[-1])
  return pixels.astype(jnp.uint8).reshape(shape)


def _shifts(channels: int) -> np.ndarray:
  return np.arange(0, 8 * channels, 8, dtype=np.int32)


def split(words: jax.Array, channels: int) -> jax.Array:
  """Splits words int32[B, P] into channels int32[B, C, P]."""
  return jnp.stack([words >> 8 * c & 255 for c in range(channels)], axis=1)


def join(planes: jax.Array) -> jax.Array:
  """Joins channels int32[B, C, P] to words int32[B, P]."""
  word = planes[:, 0]
  for c in range(1, planes.shape[1]):
    word = word | (planes[:, c] << 8 * c)
  return word


def constant(fill: Array | int, channels: int) -> jax.Array:
  """Returns the word of a gray level, int32 of the same shape."""
  return jnp.asarray(fill, jnp.int32) * (0x01010101 & (1 << 8 * channels) - 1)


def lookup(rows: jax.Array, index: jax.Array) -> jax.Array:
  """Takes `rows[..., index]` row by row; index int32[..., P] must be in range.

  One flat gather is three times as fast on a CPU as a batched one. The barriers
  keep XLA from computing rows, index or result again for each use.
  """
  lead, size = rows.shape[:-1], rows.shape[-1]
  starts = np.arange(np.prod(lead), dtype=np.int32).reshape(*lead, 1) * size
  rows, index = lax.optimization_barrier((rows, index))
  found: jax.Array = lax.optimization_barrier(
      rows.reshape(-1).at[index + starts].get(mode='promise_in_bounds'))
  return found


def cut(words: jax.Array, box: tuple[jax.Array, ...], fill: Array | int,
        width: int) -> jax.Array:
  """Overwrites rows [y0, y1) and columns [x0, x1), int32[B] each, by `fill`."""
  y, x = np.divmod(np.arange(words.shape[-1], dtype=np.int32), width)
  y0, y1, x0, x1 = (side[:, None] for side in box)
  inside = (y >= y0) & (y < y1) & (x >= x0) & (x < x1)
  return jnp.where(inside, fill, words)


def warp(words: jax.Array, params: Params, shape: tuple[int, ...],
         shear: str = 'nearest') -> jax.Array:
  """Samples each image at the positions of its affine map.

  Args:
    words: int32[B, H * W].
    params: affine, smooth, vertical and fill are read.
    shape: of the images, [B, H, W, C].
    shear: how images with `smooth` are interpolated, 'bilinear' or 'bicubic',
      along one axis, which is all that a shear needs; 'nearest' interpolates
      none.

  Returns:
    int32[B, H * W]; `fill` where the position is outside.
  """
  height, width, channels = shape[1:]
  y, x = np.divmod(np.arange(words.shape[-1], dtype=np.int32), width)
  a = params.affine[:, :, None]
  xs = a[:, 0] * x + a[:, 1] * y + a[:, 2]
  ys = a[:, 3] * x + a[:, 4] * y + a[:, 5]
  inside = ((xs >= 0) & (xs >> 16 < width) & (ys >= 0) & (ys >> 16 < height))
  fill = constant(params.fill, channels)[:, None]
  if shear == 'nearest':
    index = jnp.where(inside, (ys >> 16) * width + (xs >> 16), 0)
    return jnp.where(inside, lookup(words, index), fill)
  smooth, vertical = params.smooth[:, None], params.vertical[:, None]
  # An interpolated position is between the centers of two pixels.
  xs -= jnp.where(smooth & ~vertical, 32768, 0)
  ys -= jnp.where(smooth & vertical, 32768, 0)
  rest = jnp.where(smooth, jnp.where(vertical, ys, xs) & 65535, 0)
  weights = _weights(rest.astype(jnp.float32) / 65536, shear)
  total = jnp.zeros((), jnp.float32)
  for tap, weight in zip(_TAPS[shear], weights, strict=True):
    column = jnp.clip((xs >> 16) + jnp.where(vertical, 0, tap), 0, width - 1)
    row = jnp.clip((ys >> 16) + jnp.where(vertical, tap, 0), 0, height - 1)
    pixel = split(lookup(words, row * width + column), channels)
    total += weight[:, None] * pixel
  sampled = join(jnp.clip(total, 0, 255).astype(jnp.int32))
  return jnp.where(inside, sampled, fill)


def _weights(d: jax.Array, shear: str) -> tuple[jax.Array, ...]:
  """Weights of the taps at offset d in [0, 1); (0, 1, 0, 0) or (1, 0) at 0."""
  if shear == 'bilinear':
    return 1 - d, d
  # Keys' cubic with slope -1, as Pillow's transform has it.
  return (-d + 2 * d**2 - d**3, 1 - 2 * d**2 + d**3,
          d + d**2 - d**3, -d**2 + d**3)


def recolor(planes: jax.Array, params: Params, *, equalized: bool = True,
            added: bool = True) -> jax.Array:
  """Sends each channel through its table of 256 entries.

  Args:
    planes: int32[B, C, P].
    params: stretch, equalize, mask, added and threshold are read.
    equalized: whether any image may ask for `equalize`; it costs the most.
    added: whether anything may be added.

  Returns:
    int32[B, C, P].
  """
  level = np.arange(256, dtype=np.int32)
  stretch, equalize, mask, threshold = (
      leaf[:, None, None] for leaf in (params.stretch, params.equalize,
                                       params.mask, params.threshold))
  table = jnp.asarray(level & mask)
  if added:
    table = jnp.clip(table + params.added[:, None, None], 0, 255)
  table = jnp.where(table < threshold, table, 255 - table)
  low = planes.min(-1, keepdims=True)
  high = planes.max(-1, keepdims=True)
  wide = _floor_divide((level - low) * 255, high - low)
  table = jnp.where(stretch & (high > low), wide, table)
  # With fewer pixels the step is 0, and equalizing changes nothing.
  if equalized and planes.shape[-1] > 255:
    table = jnp.where(equalize, _equalizer(planes, high), table)
  else:
    table = jnp.broadcast_to(table, planes.shape[:2] + (256,))
  return lookup(jnp.clip(table, 0, 255), planes)


def _equalizer(planes: jax.Array, high: jax.Array) -> jax.Array:
  """Returns the table of histogram equalization, int32[B, C, 256]."""
  batch, channels, size = planes.shape
  starts = np.arange(batch * channels, dtype=np.int32) * 256
  bins = planes + starts.reshape(batch, channels, 1)
  counts = jnp.zeros(batch * channels * 256, jnp.int32).at[
      bins.reshape(-1)].add(1, mode='promise_in_bounds')
  counts = counts.reshape(batch, channels, 256)
  below = jnp.cumsum(counts, -1) - counts
  step = (size - lookup(counts, high)) // 255
  table = _floor_divide(below + step // 2, step)
  return jnp.where(step > 0, table, np.arange(256, dtype=np.int32))


def _floor_divide(n: Array, d: jax.Array) -> jax.Array:
  """n // d for n in [0, 2**22), in floats: CPUs have no integer SIMD division.

  Half a unit is added so that an exact quotient is not rounded down to the next
  smaller number. For d = 0 the result has no meaning.
  """
  quotient = (n.astype(jnp.float32) + .5) / jnp.maximum(d, 1)
  return jnp.floor(quotient).astype(jnp.int32)


def blend(planes: jax.Array, params: Params, width: int) -> jax.Array:
  """Moves each image away from, or towards, a degenerate one.

    degenerate + factor * (image - degenerate), cut to [0, 255]

  where the degenerate image is black (brightness), the mean of the gray image
  (contrast), the gray image (color) or the image smoothed (sharpness).

  Args:
    planes: int32[B, C, P], C = 1 or 3.
    params: degenerate and factor are read.
    width: of the images.

  Returns:
    int32[B, C, P].
  """
  kind = params.degenerate[:, None, None]
  mean, gray, smooth = map(DEGENERATES.index, ('mean', 'gray', 'smooth'))
  luma = planes
  if planes.shape[1] == 3:  # ITU-R 601, 16 bits of fraction.
    weights = np.array([19595, 38470, 7471], np.int32).reshape(1, 3, 1)
    luma = (planes * weights).sum(1, keepdims=True) + 32768 >> 16
  size = planes.shape[-1]
  average = (2 * luma.sum(-1, keepdims=True) + size) // (2 * size)
  anchor = jnp.where(kind == mean, average, 0)
  anchor = jnp.where(kind == gray, luma, anchor)
  anchor = jnp.where(kind == smooth, _smoothed(planes, width), anchor)
  moved = anchor + params.factor[:, None, None] * (planes - anchor)
  return jnp.clip(moved, 0, 255).astype(jnp.int32)


def _smoothed(planes: jax.Array, width: int) -> jax.Array:
  """3x3 means with weight 5 in the center; the border stays as it is."""
  size = planes.shape[-1]
  padded = jnp.pad(planes, ((0, 0), (0, 0), (width + 1, width + 1)))
  total = 4 * planes
  for row in range(3):
    for column in range(3):
      start = row * width + column
      total += padded[..., start:start + size]
  y, x = np.divmod(np.arange(size), width)
  border = ((y == 0) | (y == size // width - 1) | (x == 0) | (x == width - 1))
  # Thirteenths never end in a half, so this rounds as integers would.
  mean = jnp.floor(total * np.float32(1 / 13) + np.float32(.5))
  return jnp.where(border, planes, mean.astype(jnp.int32))
