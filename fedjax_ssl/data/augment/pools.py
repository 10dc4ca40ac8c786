"""The pools of RandAugment as data, and their rows of numbers.

A pool is a table: operation, value as a function of the level, sign. `rows`
turns it once, on the host and in double precision, into the numbers that
`ops` reads for each image.
"""
from __future__ import annotations

from collections.abc import Iterator
import functools
import math
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.core import knobs
from fedjax_ssl.core.types import Array

GRAY = 127  # What the authors of FixMatch cut out.
DEGENERATES = ('black', 'mean', 'gray', 'smooth')
_BLENDS = {'brightness': 'black', 'contrast': 'mean', 'color': 'gray',
           'sharpness': 'smooth'}
KINDS = (*_BLENDS, 'identity', 'autocontrast', 'equalize', 'invert',
         'posterize', 'solarize', 'solarize_add', 'rotate', 'shear_x',
         'shear_y', 'translate_x', 'translate_y', 'cutout')


class Op(NamedTuple):
  """One operation; its value at level v is `bias + scale * v / divisor`.

  kind: one of `KINDS`. Values: a factor (1 is the identity) for brightness,
    contrast, color, sharpness; bits kept (posterize); lowest value that is
    inverted (solarize); what is added before those from 128 on are inverted
    (solarize_add); degrees (rotate); pixels per pixel (shear); see `unit`
    (translate); side in pixels (cutout). The others have none.
  sign: 'one' is the value itself, 'either' the value or its negative, 'about'
    1 plus or minus the value.
  unit: of a translation: 'side' is a share of the side, 'whole' the same cut
    to whole pixels, 'pixel' pixels.
  fill: gray level where a warp reads outside the image.
  least: the value is not below it.
  """

  kind: str
  scale: float = 0.0
  bias: float = 0.0
  sign: str = 'one'
  unit: str = 'whole'
  fill: int = 0
  least: float = -math.inf


class Pool(NamedTuple):
  """The operations of a RandAugment, and how they are drawn.

  ops: the operations; each slot draws one, uniformly, with replacement.
  num_ops: slots.
  probability: that a slot's operation is applied.
  divisor: see `Op`.
  low: the lowest level.
  tops: an image draws one of these; its slots draw levels in [low, top).
  shear: how shears sample: 'nearest', 'bilinear' or 'bicubic'. All other
    warps take the nearest pixel.
  """

  ops: tuple[Op, ...]
  num_ops: int
  probability: float
  divisor: int
  low: int
  tops: tuple[int, ...]
  shear: str = 'nearest'

  @property
  def num_levels(self) -> int:
    """Levels that can be drawn."""
    return max(self.tops) - self.low


class Params(NamedTuple):
  """The parameters of one operation; leaves [R] of a table or [B] of images.

  All but those that the operation needs are the identity.
  """

  affine: Array  # int32[R, 6], from output to input pixel.
  smooth: Array  # bool[R], interpolate rather than nearest.
  vertical: Array  # bool[R], interpolate along the columns.
  fill: Array  # int32[R]
  stretch: Array  # bool[R], autocontrast.
  equalize: Array  # bool[R]
  mask: Array  # int32[R], bits kept.
  added: Array  # int32[R], to each number, before the threshold.
  threshold: Array  # int32[R], inverted from here on.
  degenerate: Array  # int32[R], index into DEGENERATES.
  factor: Array  # float32[R], of the blend.
  cutout: Array  # int32[R], side in pixels.


_FIXMATCH = (
    Op('autocontrast'),
    Op('brightness', .9, .05),
    Op('color', .9, .05),
    Op('contrast', .9, .05),
    Op('equalize'),
    Op('identity'),
    Op('posterize', 4, 4),
    Op('rotate', 30, sign='either'),
    Op('sharpness', .9, .05),
    Op('shear_x', .3, sign='either'),
    Op('shear_y', .3, sign='either'),
    Op('solarize', -256, 256),
    Op('translate_x', .3, sign='either'),
    Op('translate_y', .3, sign='either'),
)
_SEMIFL = (
    Op('autocontrast'),
    Op('brightness', 1.8, .1),
    Op('color', 1.8, .1),
    Op('contrast', 1.8, .1),
    Op('cutout', 40),
    Op('equalize'),
    Op('invert'),
    Op('posterize', 4),
    Op('rotate', 30, sign='either'),
    Op('sharpness', 1.8, .1),
    Op('shear_x', .3, sign='either'),
    Op('shear_y', .3, sign='either'),
    Op('solarize', -256, 256),
    Op('translate_x', 100, sign='either', unit='pixel'),
    Op('translate_y', 100, sign='either', unit='pixel'),
)
_HEART = (
    Op('autocontrast'),
    Op('identity'),  # Listed as equalize, which that code leaves out.
    Op('rotate', 360, fill=128),
    Op('solarize', -25, 256),
    Op('color', .9, sign='about'),
    # Half a bit more, because that code rounds where the others cut.
    Op('posterize', -4, 8.5),
    Op('contrast', .5, sign='about'),
    Op('brightness', .3, sign='about'),
    Op('sharpness', .9, sign='about'),
    Op('shear_x', .3, sign='either'),
    Op('shear_y', .3, sign='either'),
    Op('translate_x', .2, sign='either', unit='side'),
    Op('translate_y', .2, sign='either', unit='side'),
)
_CUBUK = (
    Op('identity'),
    Op('autocontrast'),
    Op('equalize'),
    Op('rotate', 30, sign='either'),
    Op('solarize', -256, 256),
    Op('color', .9, sign='about'),
    Op('posterize', -4, 8.5),
    Op('contrast', .9, sign='about'),
    Op('brightness', .9, sign='about'),
    Op('sharpness', .9, sign='about'),
    Op('shear_x', .3, sign='either'),
    Op('shear_y', .3, sign='either'),
    Op('translate_x', 150 / 331, sign='either'),
    Op('translate_y', 150 / 331, sign='either'),
)
_ILDOONET = (
    Op('autocontrast'),
    Op('equalize'),
    Op('invert'),
    Op('rotate', 30, sign='either'),
    Op('posterize', 4, least=1),
    Op('solarize', 256),
    Op('solarize_add', 110),
    Op('color', 1.8, .1),
    Op('contrast', 1.8, .1),
    Op('brightness', 1.8, .1),
    Op('sharpness', 1.8, .1),
    Op('shear_x', .3, sign='either'),
    Op('shear_y', .3, sign='either'),
    Op('cutout', 40),
    Op('translate_x', 100, sign='either', unit='pixel'),
    Op('translate_y', 100, sign='either', unit='pixel'),
)


def fixmatch(num_ops: int, magnitude: int, probability: float) -> Pool:
  """Makes 14 operations, each at a level drawn from 1 to magnitude - 1."""
  knobs.require('magnitude', magnitude, knobs.whole(2, 10))
  return _checked(Pool(_FIXMATCH, num_ops, probability, 10, 1, (magnitude,)))


def semifl(num_ops: int, magnitude: int, square: bool = True) -> Pool:
  """Makes 15 operations at one level, each applied half of the time.

  SemiFL's code draws the probability of each operation from U(.2, .8), which
  comes to one half. Without `square` there are 14, as that code has them for
  Fashion-MNIST: cutout is left out.
  """
  knobs.require('magnitude', magnitude, knobs.whole(1, 10))
  ops = tuple(op for op in _SEMIFL if square or op.kind != 'cutout')
  return _checked(Pool(ops, num_ops, .5, 10, magnitude, (magnitude + 1,),
                       'bilinear'))


def heart(num_ops: int, tops: tuple[int, ...]) -> Pool:
  """Makes 13 operations, each at a level from 0 to below a drawn top, of 10."""
  if not tops:
    raise ValueError(f'tops={tops!r} is empty; levels are drawn below a top.')
  for top in tops:
    knobs.require('tops', top, knobs.whole(1, 10))
  return _checked(Pool(_HEART, num_ops, 1.0, 9, 0, tuple(tops), 'bicubic'))


def cubuk(num_ops: int, magnitude: int, levels: int) -> Pool:
  """Makes 14 operations at one level; at level 0 graded ones do nothing."""
  knobs.require('levels', levels, knobs.whole(1, 1000))
  knobs.require('magnitude', magnitude, knobs.whole(0, levels))
  return _checked(
      Pool(_CUBUK, num_ops, 1.0, levels, magnitude, (magnitude + 1,)))


def ildoonet(num_ops: int, magnitude: int, square: bool = True) -> Pool:
  """Makes 16 operations at one level of 30; without `square` there are 15."""
  knobs.require('magnitude', magnitude, knobs.whole(0, 30))
  ops = tuple(op for op in _ILDOONET if square or op.kind != 'cutout')
  return _checked(Pool(ops, num_ops, 1.0, 30, magnitude, (magnitude + 1,)))


@functools.lru_cache(maxsize=64)
def rows(pool: Pool, height: int, width: int) -> Params:
  """Makes a row for each operation, level and sign; the identity is last.

  Operation i at the j-th level, positive (k = 0) or negative (k = 1), is row
  `(i * pool.num_levels + j) * 2 + k`.

  Args:
    pool: the table.
    height: of the images.
    width: of the images.

  Returns:
    Params of numpy arrays with leading axis R.

  Raises:
    ValueError: for an unknown kind, sign, unit or way to sample; without a
      level to draw; for bits to keep that are not 0 to 8.
  """
  _check_words(pool)
  if not pool.tops or pool.num_levels < 1:
    raise ValueError(f'tops {pool.tops!r} must hold a number above '
                     f'low={pool.low!r}: levels are drawn between.')
  listed = [_row(op, value, pool.shear, height, width)
            for op in pool.ops for value in _values(op, pool)]
  listed.append(_IDENTITY)
  return Params(*(np.stack(leaves) for leaves in zip(*listed, strict=True)))


_IDENTITY = Params(
    affine=np.array([65536, 0, 32768, 0, 65536, 32768], np.int32),
    smooth=np.array(False), vertical=np.array(False),
    fill=np.array(0, np.int32), stretch=np.array(False),
    equalize=np.array(False), mask=np.array(255, np.int32),
    added=np.array(0, np.int32), threshold=np.array(256, np.int32),
    degenerate=np.array(0, np.int32), factor=np.array(1, np.float32),
    cutout=np.array(0, np.int32))


def _but(**changes: Any) -> Params:
  """Returns the identity with other values in the named leaves."""
  return _IDENTITY._replace(**{
      name: np.asarray(value, getattr(_IDENTITY, name).dtype)
      for name, value in changes.items()})


def _values(op: Op, pool: Pool) -> Iterator[float]:
  """Values by level, the positive and the negative one of each."""
  for level in range(pool.low, max(pool.tops)):
    value = max(op.scale * level / pool.divisor + op.bias, op.least)
    yield 1 + value if op.sign == 'about' else value
    yield {'one': value, 'either': -value, 'about': 1 - value}[op.sign]


def _row(op: Op, value: float, shear: str, height: int, width: int) -> Params:
  """Returns the numbers of one operation at one value."""
  if op.kind in _BLENDS:
    return _but(degenerate=DEGENERATES.index(_BLENDS[op.kind]), factor=value)
  match op.kind:
    case 'identity':
      return _IDENTITY
    case 'autocontrast':
      return _but(stretch=True)
    case 'equalize':
      return _but(equalize=True)
    case 'invert':
      return _but(threshold=0)
    case 'posterize':
      knobs.require('bits of posterize', value, knobs.Bound(0, 8.5))
      return _but(mask=256 - (1 << 8 - int(value)))
    case 'solarize':
      return _but(threshold=math.ceil(value))
    case 'solarize_add':
      return _but(added=int(value), threshold=128)
    case 'cutout':
      return _but(cutout=int(value))
  smooth = op.kind.startswith('shear') and shear != 'nearest'
  return _but(
      affine=_fixed_point(_matrix(op, value, height, width), smooth),
      smooth=smooth, vertical=op.kind == 'shear_y', fill=op.fill)


def _matrix(op: Op, value: float, height: int, width: int) -> list[float]:
  """The map from an output position (x, y) to the input's, as in Pillow."""
  match op.kind:
    case 'shear_x':
      return [1, value, 0, 0, 1, 0]
    case 'shear_y':
      return [1, 0, 0, value, 1, 0]
    case 'translate_x':
      return [1, 0, _pixels(op.unit, value, width), 0, 1, 0]
    case 'translate_y':
      return [1, 0, 0, 0, 1, _pixels(op.unit, value, height)]
  angle = -math.radians(value % 360)
  # Rounded as in Pillow: a quarter turn then moves pixels exactly onto pixels.
  cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
  x, y = width / 2, height / 2
  return [cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y]


def _pixels(unit: str, value: float, side: int) -> float:
  if unit == 'pixel':
    return value
  return int(value * side) if unit == 'whole' else value * side


def _fixed_point(matrix: list[float], smooth: bool) -> np.ndarray:
  """int32[6] in units of 2**-16 pixel: the arithmetic of Pillow's own loop.

  Pillow interpolates in double precision. Rounding up here puts a position that
  is exactly on the edge on the same side as there.
  """
  a, b, c, d, e, f = matrix
  centered = np.array([a, b, c + a / 2 + b / 2, d, e, f + d / 2 + e / 2])
  scaled = centered * 65536
  return (np.ceil(scaled) if smooth else np.floor(scaled + .5)).astype(np.int32)


def _checked(pool: Pool) -> Pool:
  knobs.require('num_ops', pool.num_ops, knobs.BOUNDS['num_ops'])
  knobs.require('probability', pool.probability, knobs.share())
  return pool


def _check_words(pool: Pool) -> None:
  words: list[tuple[str, str, tuple[str, ...]]] = [
      ('shear', pool.shear, ('nearest', 'bilinear', 'bicubic'))]
  for op in pool.ops:
    words += [('kind', op.kind, KINDS),
              ('unit', op.unit, ('whole', 'side', 'pixel')),
              ('sign', op.sign, ('one', 'either', 'about'))]
  for name, value, allowed in words:
    if value not in allowed:
      raise ValueError(f'{name} {value!r} must be one of {allowed}.')
