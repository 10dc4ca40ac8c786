"""Weak and strong views of images and of texts, on the device.

A view is a pure function (key, images uint8[B, H, W, C]) -> uint8[B, H, W, C],
or of texts, token ids int32[B, T] or vectors float16[B, T, E], to the same.
Each image draws for itself: no output depends on another image of the batch.
All of it runs under `jit`, `vmap` and `scan`, and no operation branches.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl.core import blame, knobs, registry, tree
from fedjax_ssl.core.types import Array
from fedjax_ssl.data.augment import ops, pools
from fedjax_ssl.data.augment.pools import Params, Pool
from fedjax_ssl.data.augment.weak import (
    check,
    none,
    square_side,
    token_dropout,
    View,
    WEAK,
)


def make_weak(text: str, *, flip: bool = True, field: str = 'weak') -> View:
  """Builds a weak view by name.

  Args:
    text: a name of `WEAK`, with knobs if any, as in 'flip_crop(pad=2)'.
    flip: False where a mirror image may be of another class, as with digits;
      the text may say otherwise, as in 'flip_crop(flip=False)'.
    field: what error messages call it.

  Returns:
    (key, images uint8[B, H, W, C]) -> the same shape and type; C up to 4.
    `none` and `token_dropout` take texts, see above.

  Raises:
    ValueError: for an unknown name, knob or value, or a user's builder that
      fails or gives no view.
  """
  return _made(field, text, WEAK, flip)


def make_strong(text: str, *, flip: bool = True) -> View:
  """Builds a view by a name of `STRONG`, as `make_weak`; C is 1 or 3.

  A strong view is a weak view, then operations, then a cutout.
  """
  return _made('strong', text, STRONG, flip)


def _made(field: str, text: str, known: Mapping[str, Callable[..., View]],
          flip: bool) -> View:
  """Makes a view whose errors name the field; see `make_weak`."""
  view: View = registry.build(field, text, known, defaults={'flip': flip})
  blame.check(field, text, view, callable(view),
              'function (key, images) -> images')

  def checked(key: jax.Array, images: Array) -> jax.Array:
    seen = view(key, images)
    if fault := tree.unlike(seen, images):
      raise ValueError(f'{fault}; a view gives the shape and type that it '
                       'takes.')
    return seen
  own = registry.is_own(text, known)
  return blame.named(field, text, checked if own else view, own,
                     outermost=True)


@knobs.checked(probability=knobs.share(knobs.at(0, 'no operation is applied')))
def ra_mc(*, num_ops: int = 2, magnitude: int = 10, probability: float = .5,
          cutout: int | None = None, weak: str = 'flip_crop',
          flip: bool = True) -> View:
  """RandAugment of FixMatch, as FedDure, CBAFed, SAGE and ProxyFL use it.

  Args:
    num_ops: operations drawn for each image, with replacement; 0 is none.
    magnitude: each operation draws its level from 1 to magnitude - 1; the top
      level is 10.
    probability: that a drawn operation is applied; 0 is never.
    cutout: side of the gray square, at most the image's shorter side; None is
      half of that (16 of 32), 0 is off. The PyTorch port's square is a pixel
      larger than the 16 that it asks for.
    weak: the weak view that comes first.
    flip: whether the weak view may mirror.

  References:
    Sohn et al., FixMatch, 2020, https://arxiv.org/abs/2001.07685, app. E.
  """
  pool = pools.fixmatch(num_ops, magnitude, probability)
  return strong(pool, cutout=cutout, weak=weak, flip=flip)


@knobs.checked()
def ra_pc(*, num_ops: int = 2, magnitude: int = 10, cutout: int | None = 0,
          square: bool = True, weak: str = 'flip_crop', flip: bool = True
          ) -> View:
  """RandAugment of SemiFL: 15 operations, all at the same level.

  At the top level a translation moves an image by 100 pixels whatever its size,
  so a small image turns black, as in the authors' code.

  Args:
    num_ops: as in `ra_mc`; each is applied with probability 1/2.
    magnitude: the level of all operations, 1 to 10.
    cutout: as in `ra_mc`, besides what `square` says.
    square: whether the pool has a square of up to 40 pixels, as in the authors'
      code for all data but Fashion-MNIST.
    weak: the weak view that comes first.
    flip: whether the weak view may mirror.

  References:
    Diao et al., SemiFL, 2022, https://arxiv.org/abs/2106.01432, code.
  """
  return strong(pools.semifl(num_ops, magnitude, square), cutout=cutout,
                weak=weak, flip=flip)


@knobs.checked()
def ra_heart(*, num_ops: int = 6, tops: Sequence[int] = (2, 3, 4, 5),
             cutout: int | None = 0, weak: str = 'none', flip: bool = True
             ) -> View:
  """RandAugment of FedMatch's code, on images without a weak view.

  Args:
    num_ops: as in `ra_mc`; all are applied.
    tops: each image draws one of these, and each of its operations a level
      below it; there are 10 levels.
    cutout: as in `ra_mc`.
    weak: the weak view that comes first.
    flip: whether the weak view may mirror.

  References:
    Jeong et al., FedMatch, ICLR 2021, https://arxiv.org/abs/2006.12097, code.
  """
  return strong(pools.heart(num_ops, tuple(tops)), cutout=cutout, weak=weak,
                flip=flip)


@knobs.checked(levels=knobs.whole(1, 1000))
def ra_cubuk(*, num_ops: int = 2, magnitude: int = 9, levels: int = 10,
             cutout: int | None = 0, weak: str = 'flip_crop',
             flip: bool = True) -> View:
  """The original RandAugment(n, m): n operations, all at level m.

  Graded effects grow with the level from the identity at 0, as in torchvision;
  in the first code those of some operations fell. The factors of brightness,
  color, contrast and sharpness are 1 plus or minus the value of the level.

  Args:
    num_ops: n; all are applied.
    magnitude: m, 0 to `levels`.
    levels: the top level, 10 or 30 in publications.
    cutout: as in `ra_mc`.
    weak: the weak view that comes first.
    flip: whether the weak view may mirror.

  References:
    Cubuk et al., RandAugment, 2019, https://arxiv.org/abs/1909.13719.
  """
  return strong(pools.cubuk(num_ops, magnitude, levels), cutout=cutout,
                weak=weak, flip=flip)


@knobs.checked()
def ra_fedlabel(*, num_ops: int = 10, magnitude: int = 1,
                cutout: int | None = 0, weak: str = 'flip_crop',
                flip: bool = True) -> View:
  """RandAugment of FedLabel: ten operations, all at level 1 of 10.

  The paper calls (1, 10) the hyperparameters and describes ten operations of
  the 14, so the pair is (magnitude, number). The authors' code reads it the
  other way round, one operation at level 10 of 30, of another pool: give
  `ra_ildoonet(num_ops=1, magnitude=10)`.

  Args:
    num_ops: as in `ra_cubuk`.
    magnitude: as in `ra_cubuk`.
    cutout: as in `ra_mc`.
    weak: the weak view that comes first.
    flip: whether the weak view may mirror.

  References:
    Cho et al., FedLabel, ICCV 2023.
  """
  return ra_cubuk(num_ops=num_ops, magnitude=magnitude, cutout=cutout,
                  weak=weak, flip=flip)


@knobs.checked()
def ra_ildoonet(*, num_ops: int = 2, magnitude: int = 10,
                cutout: int | None = 0, square: bool = True,
                weak: str = 'flip_crop', flip: bool = True) -> View:
  """RandAugment of pytorch-randaugment, which FedLabel's code has.

  16 operations, all at the same level, are strong on small images: at level 10
  one keeps a single bit, and one moves an image by 33 pixels.

  Args:
    num_ops: as in `ra_cubuk`.
    magnitude: the level, 0 to 30. At 0 color, brightness, contrast and
      sharpness have the factor .1, and solarizing inverts all.
    cutout: as in `ra_mc`, besides what `square` says.
    square: whether the pool has a square of up to 40 pixels, as in FedLabel's
      code for color images.
    weak: the weak view that comes first; in that code it comes last.
    flip: whether the weak view may mirror.

  References:
    https://github.com/ildoonet/pytorch-randaugment; microsoft/msrflute.
  """
  return strong(pools.ildoonet(num_ops, magnitude, square), cutout=cutout,
                weak=weak, flip=flip)


_Builder = TypeVar('_Builder', bound=Callable[..., View])

STRONG: registry.Registry[Callable[..., View]] = registry.Registry('view', {
    'none': none,
    'token_dropout': token_dropout,
    'ra_mc': ra_mc,
    'ra_pc': ra_pc,
    'ra_heart': ra_heart,
    'ra_cubuk': ra_cubuk,
    'ra_fedlabel': ra_fedlabel,
    'ra_ildoonet': ra_ildoonet,
}, 'fedjax_ssl.strong_views')


def register_weak(name: str) -> Callable[[_Builder], _Builder]:
  """Decorates a builder of a weak view, to register it under a name.

  ```python
  @augment.register_weak('mine')
  def mine(*, shift: int = 1, flip: bool = True) -> View:
  ```

  Knobs are its keyword-only parameters; `flip` is given if it takes it. See
  `core.registry.register` for names.
  """
  return WEAK.register(name)


def register_strong(name: str) -> Callable[[_Builder], _Builder]:
  """Decorates a builder of a strong view; no weak view comes before it."""
  return STRONG.register(name)


@knobs.checked()
def strong(pool: Pool, *, cutout: int | None = None, weak: str = 'flip_crop',
           flip: bool = True) -> View:
  """Makes a view from a pool: a weak view, a scan over slots, a cutout.

  Args:
    pool: operations and how they are drawn.
    cutout: side of the gray square at the end; None is half of the shorter
      side, 0 is off.
    weak: name of the weak view that comes first.
    flip: whether it may mirror.

  Raises:
    ValueError: for an unknown weak view or a negative side.
  """
  first = make_weak(weak, flip=flip)

  def view(key: jax.Array, images: Array) -> jax.Array:
    check(images, (1, 3))
    batch, height, width, channels = shape = images.shape
    words = ops.pack(first(jax.random.fold_in(key, 0), images))
    draws = jax.random.uniform(
        jax.random.fold_in(key, 1), (batch, 3 + 6 * pool.num_ops))
    slots = draws[:, 3:].reshape(batch, pool.num_ops, 6).swapaxes(0, 1)
    table = pools.rows(pool, height, width)

    def slot(words: jax.Array, draw: jax.Array) -> tuple[jax.Array, None]:
      index = choose(pool, draws[:, 0], draw[:, :4])
      params = Params(*(jnp.asarray(leaf)[index] for leaf in table))
      words = apply(words, params, table, shape, pool.shear)
      if table.cutout.any():
        box = _box(draw[:, 4:], params.cutout, height, width)
        words = ops.cut(words, box, ops.constant(pools.GRAY, channels), width)
      return words, None

    if pool.num_ops:
      words, _ = lax.scan(slot, words, slots)
    side = square_side('cutout', cutout, height, width)
    if side:
      box = _box(draws[:, 1:3], jnp.int32(side), height, width)
      words = ops.cut(words, box, ops.constant(pools.GRAY, channels), width)
    return ops.unpack(words, shape)

  return view


def choose(pool: Pool, top: jax.Array, draw: jax.Array) -> jax.Array:
  """Chooses the row of `pools.rows` that each image gets in a slot.

  Args:
    pool: operations and how they are drawn.
    top: float32[B] in [0, 1), the image's draw among `pool.tops`.
    draw: float32[B, 4] in [0, 1): operation, level, sign, whether at all.

  Returns:
    int32[B]; the last row is the identity.
  """
  tops = jnp.asarray(pool.tops)[_below(top, len(pool.tops))]
  op = _below(draw[:, 0], len(pool.ops))
  level = _below(draw[:, 1], tops - pool.low)
  index = (op * pool.num_levels + level) * 2 + _below(draw[:, 2], 2)
  return jnp.where(draw[:, 3] < pool.probability, index,
                   len(pool.ops) * pool.num_levels * 2)


def apply(words: jax.Array, params: Params, table: Params,
          shape: tuple[int, ...], shear: str = 'nearest') -> jax.Array:
  """Applies one slot: each of the three families of operations once.

  Args:
    words: int32[B, H * W], packed images.
    params: what each image gets; `cutout` is not read.
    table: the rows that params come from; a family that no row needs is
      skipped.
    shape: of the images, [B, H, W, C].
    shear: see `ops.warp`.

  Returns:
    int32[B, H * W].
  """
  width, channels = shape[2:]
  if (table.affine != table.affine[-1]).any():
    words = ops.warp(words, params, shape, shear)
  planes = ops.split(words, channels)
  if (table.stretch | table.equalize | (table.mask != 255)
      | (table.threshold != 256)).any():
    planes = ops.recolor(planes, params,
                         equalized=bool(table.equalize.any()),
                         added=bool(table.added.any()))
  if (table.factor != 1).any():
    planes = ops.blend(planes, params, width)
  return ops.join(planes)


def _below(draw: jax.Array, high: jax.Array | int) -> jax.Array:
  """int32[B] uniform on 0 to high - 1, of a draw in [0, 1)."""
  return (draw * high).astype(jnp.int32)


def _box(draw: jax.Array, side: Array, height: int, width: int
         ) -> tuple[jax.Array, ...]:
  """A square around a uniform point, as in the ports of FixMatch.

  At the top and left it is moved into the image, at the bottom and right it is
  cut off.
  """
  point = draw * jnp.array([height, width], jnp.float32)
  start = jnp.maximum(point - side[..., None] / 2, 0).astype(jnp.int32)
  stop = start + side[..., None]
  return start[:, 0], stop[:, 0], start[:, 1], stop[:, 1]
