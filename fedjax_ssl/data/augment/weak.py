"""Weak views: flips, shifts and crops of whole pixels, and boxes cut out.

Every builder returns (key, images uint8[B, H, W, C]) -> the same shape. A flip
followed by a crop only permutes rows and columns, so a view is one gather with
two index vectors for each image.
"""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.core import knobs, registry
from fedjax_ssl.core.types import Array
from fedjax_ssl.data.augment import ops
from fedjax_ssl.data.augment.pools import GRAY

View = Callable[[jax.Array, Array], jax.Array]
_LARGEST = 4  # Images are enlarged at most this many times before a crop.


def check(images: Array, channels: tuple[int, ...]) -> None:
  """Raises ValueError unless images are uint8[B, H, W, C], C allowed."""
  form = f'uint8[B, H, W, C] with C in {channels}'
  if not hasattr(images, 'ndim'):
    raise ValueError(f'takes images, {form}; inputs here are no array but '
                     f'{type(images).__name__}.')
  if (images.ndim != 4 or images.dtype != np.uint8
      or images.shape[-1] not in channels):
    raise ValueError(f'takes images, {form}; inputs here are '
                     f'{images.dtype}{list(images.shape)}.')


def none(*, flip: bool = True) -> View:
  """Leaves images as they are, of any shape and type."""
  del flip

  def view(key: jax.Array, images: Array) -> jax.Array:
    del key
    return jnp.asarray(images)

  return view


@knobs.checked()
def flip_crop(*, pad: int | None = None, flip: bool = True) -> View:
  """Mirrors with probability 1/2, reflects the border, crops to the old size.

  Args:
    pad: pixels reflected on each side, below the side; 0 never moves. None is
      an eighth of the side: 4 of 32, as in FixMatch.
    flip: whether to mirror at all.

  References:
    Sohn et al., FixMatch, 2020, https://arxiv.org/abs/2001.07685, sec. 2.4.
  """
  return _flip_crop(pad, 'reflect', flip)


@knobs.checked()
def flip_crop_zero(*, pad: int | None = None, flip: bool = True) -> View:
  """Crops and mirrors as `flip_crop`, with a black border.

  Args:
    pad: as in `flip_crop`.
    flip: whether to mirror.
  """
  return _flip_crop(pad, 'zero', flip)


@knobs.checked(
    side=knobs.whole(0, 2**31 - 1, knobs.at(0, 'nothing is cut out')))
def cutout(*, pad: int | None = None, padding: str = 'zero',
           side: int | None = None, fill: int | tuple[int, ...] = GRAY,
           flip: bool = True) -> View:
  """Crops and mirrors, then cuts a square out: FedDure's labeled view.

  The square's center is uniform over the pixels and the part outside the image
  is lost. The authors write zeros after normalization, which is the data set's
  mean color before it: give that as `fill`.

  Args:
    pad: as in `flip_crop`.
    padding: 'zero' or 'reflect'.
    side: of the square, at most the image's shorter side; None is half of it
      (16 of 32), 0 is off.
    fill: level, or one for each channel.
    flip: whether to mirror at all.

  Raises:
    ValueError: for a negative side, another padding, or levels beyond 0..255.

  References:
    Bai et al., FedDure, AAAI 2024; DeVries and Taylor, Cutout, 2017,
    https://arxiv.org/abs/1708.04552.
  """
  first = _flip_crop(pad, padding, flip)
  levels = fill if isinstance(fill, tuple) else (fill,)
  for level in levels:
    knobs.require('fill', level, knobs.Bound(0, 255, whole=True))

  def view(key: jax.Array, images: Array) -> jax.Array:
    moved = first(jax.random.fold_in(key, 0), images)
    batch, height, width, channels = moved.shape
    if len(levels) not in (1, channels):
      raise ValueError(f'fill={fill!r} must be one level or {channels}.')
    color = np.broadcast_to(np.array(levels), (channels,))
    word = sum(int(level) << 8 * c for c, level in enumerate(color))
    length = square_side('side', side, height, width)
    draws = jax.random.uniform(jax.random.fold_in(key, 1), (batch, 2))
    y = (draws[:, 0] * height).astype(jnp.int32) - length // 2
    x = (draws[:, 1] * width).astype(jnp.int32) - length // 2
    words = ops.cut(ops.pack(moved), (y, y + length, x, x + length),
                    jnp.uint32(word).astype(jnp.int32), width)
    return ops.unpack(words, moved.shape)

  return view


@knobs.checked()
def resize_crop(*, size: int | None = None, flip: bool = True) -> View:
  """Enlarges bilinearly, crops to the old size, mirrors with probability 1/2.

  Args:
    size: of the enlarged shorter side, 1 to 4 times the old one; None is 5/4
      of it: 40 of 32, as in RSCFed.
    flip: whether to mirror at all.

  Returns:
    The view; at trace time it raises ValueError for too small a size.

  References:
    Liang et al., RSCFed, CVPR 2022, https://arxiv.org/abs/2203.13993, code.
  """

  def view(key: jax.Array, images: Array) -> jax.Array:
    check(images, (1, 2, 3, 4))
    height, width = images.shape[1:3]
    short = min(height, width)
    goal = short * 5 // 4 if size is None else size
    if not short <= goal <= _LARGEST * short:
      raise ValueError(f'size={goal} must be at least the side, {short}, and '
                       f'at most {_LARGEST} times as much.')
    tall, wide = height * goal // short, width * goal // short
    large = _enlarge(_enlarge(jnp.asarray(images), 2, wide), 1, tall)
    draws = jax.random.uniform(key, (images.shape[0], 3))
    rows = _whole(draws[:, 1], tall - height) + np.arange(height)
    columns = _whole(draws[:, 2], wide - width) + _columns(
        draws[:, 0], width, flip)
    return _take(large, rows, columns)

  return view


@knobs.checked(
    shift=knobs.whole(0, 2**31 - 1, knobs.at(0, 'images are not moved')),
    vertical=knobs.share())
def flip_shift(*, shift: int = 2, vertical: float = .25, flip: bool = True
               ) -> View:
  """Mirrors, sometimes upside down as well, and shifts: FedMatch v1.

  Rows and columns move by whole pixels, uniform in [-shift, shift]; what comes
  in is black. The authors' code means this, but flips the wrong axes of a
  batch.

  Args:
    shift: largest move, below the side; 0 never moves.
    vertical: share of the mirrored images that are turned upside down too.
    flip: whether to mirror at all, either way.

  Raises:
    ValueError: for a share outside [0, 1].

  References:
    Jeong et al., FedMatch, https://arxiv.org/abs/2006.12097v1.
  """

  def view(key: jax.Array, images: Array) -> jax.Array:
    check(images, (1, 2, 3, 4))
    batch, height, width, _ = images.shape
    _check_pad('shift', shift, min(height, width))
    draws = jax.random.uniform(key, (batch, 4))
    upside_down = (draws[:, 0] < .5) & (draws[:, 1] < vertical) & flip
    rows = _mirrored(upside_down, _border(
        _whole(draws[:, 2], 2 * shift) - shift + np.arange(height), height,
        'zero'), height)
    columns = _mirrored((draws[:, 0] < .5) & flip, _border(
        _whole(draws[:, 3], 2 * shift) - shift + np.arange(width), width,
        'zero'), width)
    return _take(jnp.asarray(images), rows, columns)

  return view


@knobs.checked(rate=knobs.Bound(0, 1, below=True))
def token_dropout(*, rate: float = 0.15, flip: bool = True) -> View:
  """Turns words into padding, each with its own chance.

  Args:
    rate: the chance, in [0, 1); 0 leaves texts as they are.
    flip: not used; texts are not mirrored.

  Returns:
    The view, of token ids int32[B, T] or word vectors float[B, T, E].

  Raises:
    ValueError: if the rate is not in [0, 1).
  """
  del flip

  def view(key: jax.Array, texts: Array) -> jax.Array:
    texts = jnp.asarray(texts)
    kind = jnp.integer if texts.ndim == 2 else jnp.floating
    if texts.ndim not in (2, 3) or not jnp.issubdtype(texts.dtype, kind):
      raise ValueError('takes texts, int32[B, T] or float[B, T, E]; inputs '
                       f'here are {texts.dtype}{list(texts.shape)}.')
    kept = jax.random.uniform(key, texts.shape[:2]) >= rate
    kept = kept.reshape(kept.shape + (1,) * (texts.ndim - 2))
    return jnp.where(kept, texts, jnp.zeros((), texts.dtype))

  return view


WEAK: registry.Registry[Callable[..., View]] = registry.Registry('view', {
    'none': none,
    'token_dropout': token_dropout,
    'flip_crop': flip_crop,
    'flip_crop_zero': flip_crop_zero,
    'cutout': cutout,
    'resize_crop': resize_crop,
    'flip_shift': flip_shift,
}, 'fedjax_ssl.weak_views')


def _flip_crop(pad: int | None, padding: str, flip: bool) -> View:
  if padding not in ('zero', 'reflect'):
    raise ValueError(f"padding={padding!r} must be 'zero' or 'reflect'.")

  def view(key: jax.Array, images: Array) -> jax.Array:
    check(images, (1, 2, 3, 4))
    batch, height, width, _ = images.shape
    draws = jax.random.uniform(key, (batch, 3))
    across, down = (side // 8 if pad is None else pad
                    for side in (width, height))
    _check_pad('pad', across, width)
    _check_pad('pad', down, height)
    rows = _border(_whole(draws[:, 1], 2 * down) - down + np.arange(height),
                   height, padding)
    columns = _border(
        _whole(draws[:, 2], 2 * across) - across + np.arange(width), width,
        padding)
    columns = _mirrored((draws[:, 0] < .5) & flip, columns, width)
    return _take(jnp.asarray(images), rows, columns)

  return view


def _check_pad(name: str, pad: int, side: int) -> None:
  if not 0 <= pad < side:
    raise ValueError(f'{name}={pad} must lie in [0, {side}), below the side.')


def square_side(name: str, side: int | None, height: int, width: int) -> int:
  """Returns the side of a square that is cut out of an image.

  Args:
    name: of the knob, for messages.
    side: pixels, or None for half of the shorter side.
    height: of the image.
    width: of the image.

  Returns:
    Pixels.

  Raises:
    ValueError: if the square is larger than the image.
  """
  short = min(height, width)
  if side is not None and side > short:
    raise ValueError(f'{name}={side} must be at most {short}, the shorter side '
                     'of the images; a larger square hides all of them.')
  return short // 2 if side is None else side


def _whole(draw: jax.Array, high: int) -> jax.Array:
  """int32[B, 1] uniform on 0 to `high`, both included."""
  return (draw * (high + 1)).astype(jnp.int32)[:, None]


def _columns(draw: jax.Array, width: int, flip: bool) -> jax.Array:
  """Column indices, in reverse with probability 1/2 if `flip`."""
  forward = np.arange(width, dtype=np.int32)
  return jnp.where((draw < .5)[:, None] & flip, forward[::-1], forward)


def _mirrored(mirror: jax.Array, index: jax.Array, side: int) -> jax.Array:
  """Indices of the mirrored image; outside stays outside."""
  turned = jnp.where(index < 0, index, side - 1 - index)
  return jnp.where(mirror[:, None], turned, index)


def _border(index: jax.Array, side: int, padding: str) -> jax.Array:
  """Indices within [0, side), or -1 for black."""
  if padding == 'zero':
    return jnp.where((index < 0) | (index >= side), -1, index)
  index = jnp.abs(index)
  return jnp.where(index < side, index, 2 * side - 2 - index)


def _take(images: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
  """The pixels at rows int32[B, h] and columns int32[B, w]; -1 is black."""
  batch, _, width, channels = images.shape
  shape = (batch, rows.shape[1], columns.shape[1], channels)
  rows, columns = rows[:, :, None], columns[:, None, :]
  flat = (batch, shape[1] * shape[2])
  inside = ((rows >= 0) & (columns >= 0)).reshape(flat)
  index = (rows * width + columns).reshape(flat)
  pixels = ops.lookup(ops.pack(images), jnp.where(inside, index, 0))
  return ops.unpack(jnp.where(inside, pixels, 0), shape)


def _enlarge(images: jax.Array, axis: int, size: int) -> jax.Array:
  """Resizes one axis as Pillow does: bilinear, in 22 bits, to uint8."""
  old = images.shape[axis]
  center = (np.arange(size) + .5) * old / size - .5
  first = np.floor(center)
  shape = [1] * images.ndim
  shape[axis] = size
  # At the ends both neighbors are the same pixel.
  second = np.floor((center - first) * 2**22 + .5).astype(np.int32)
  total: jax.Array = jnp.int32(2**21)
  for step, weight in ((0, 2**22 - second), (1, second)):
    index = np.clip(first + step, 0, old - 1).astype(np.int32)
    pixels = jnp.take(images, index, axis=axis).astype(jnp.int32)
    total = total + pixels * weight.reshape(shape)
  return (total >> 22).astype(jnp.uint8)
