"""Laws of weak and strong views; augment_ops_test.py has the operations."""
from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest

from fedjax_ssl.data import augment
from fedjax_ssl.data.augment import pools

KEY = jax.random.key(7)
VIEWS = ([(augment.make_weak, name) for name in augment.WEAK]
         + [(augment.make_strong, name) for name in augment.STRONG])
IDLE = "ra_mc(probability=0, cutout=0, weak='none')"


def _images(*shape, seed=0):
  return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def _many(view, image, count=600):
  """`count` views of one image, each drawn for itself."""
  batch = np.broadcast_to(image, (count, *image.shape))
  return np.asarray(jax.jit(view)(KEY, batch))


def _chi_square_is_small(counts, expected):
  """Beyond 5 standard deviations of the statistic something is wrong."""
  freedom = counts.size - 1
  statistic = ((counts - expected)**2 / expected).sum()
  assert statistic < freedom + 5 * np.sqrt(2 * freedom), counts


@pytest.mark.parametrize('make, name', VIEWS)
def test_every_view(make, name):
  view = jax.jit(make(name))
  x = _images(4, 16, 16, 3)
  if name == 'token_dropout':
    x = x[..., 0].reshape(4, -1).astype(np.int32)  # Texts of 256 words.
  y = x.copy()
  y[2] = 255 - y[2]
  first, again, after = view(KEY, x), view(KEY, x), view(KEY, y)
  assert first.shape == x.shape and first.dtype == x.dtype
  # It is a function of the key ...
  np.testing.assert_array_equal(first, again)
  other = view(jax.random.key(8), x)
  assert np.array_equal(first, other) == (name == 'none')
  # ... and an output one of its own row alone.
  same = (np.asarray(first) == np.asarray(after)).reshape(4, -1).all(1)
  np.testing.assert_array_equal(same, [True, True, False, True])


@pytest.mark.parametrize('make, name', [
    (augment.make_weak, 'cutout'), (augment.make_strong, 'ra_mc')])
def test_vmap_and_scan_equal_a_loop(make, name):
  view = make(name)
  x = _images(3, 2, 16, 16, 1)
  keys = jax.random.split(KEY, 3)
  single = jax.jit(view)
  loop = np.stack([single(k, rows) for k, rows in zip(keys, x, strict=True)])
  np.testing.assert_array_equal(jax.jit(jax.vmap(view))(keys, x), loop)
  np.testing.assert_array_equal(
      lax.map(lambda pair: view(*pair), (keys, jnp.asarray(x))), loop)


def _windows(padded, height, width):
  """Every crop of an image."""
  return [padded[i:i + height, j:j + width]
          for i in range(padded.shape[0] - height + 1)
          for j in range(padded.shape[1] - width + 1)]


def _count(outputs, allowed):
  """How often each allowed image came out; nothing else may have."""
  table = {image.tobytes(): i for i, image in enumerate(allowed)}
  assert len(table) == len(allowed)
  found = [table.get(image.tobytes(), -1) for image in outputs]
  assert min(found) >= 0, 'not one of the allowed images'
  return np.bincount(found, minlength=len(allowed))


@pytest.mark.parametrize('flip', [True, False])
@pytest.mark.parametrize('name, mode, shape, pad', [
    ('flip_crop', 'reflect', (8, 8, 1), None),
    ('flip_crop', 'reflect', (6, 10, 3), 2),
    ('flip_crop_zero', 'constant', (8, 8, 4), None)])
def test_flip_crop_is_uniform_over_crops(name, mode, shape, pad, flip):
  image = _images(*shape)
  knobs = '' if pad is None else f'(pad={pad})'
  outputs = _many(augment.make_weak(name + knobs, flip=flip), image)
  p = 1 if pad is None else pad
  padded = np.pad(image, ((p, p), (p, p), (0, 0)), mode=mode)
  allowed = _windows(padded, *shape[:2])
  if flip:
    allowed += [crop[:, ::-1] for crop in allowed]
  counts = _count(outputs, allowed)
  _chi_square_is_small(counts, len(outputs) / len(allowed))


@pytest.mark.parametrize('flip', [True, False])
def test_flip_shift_moves_by_two_at_most(flip):
  image = _images(8, 8, 1)
  outputs = _many(augment.make_weak('flip_shift', flip=flip), image, 2000)
  turned = [(image, 1.)]
  if flip:
    turned = [(image, .5), (image[:, ::-1], .375),
              (image[::-1, ::-1], .125)]
  allowed, share = [], []
  for picture, probability in turned:
    crops = _windows(np.pad(picture, ((2, 2), (2, 2), (0, 0))), 8, 8)
    allowed += crops
    share += [probability / len(crops)] * len(crops)
  _chi_square_is_small(_count(outputs, allowed),
                       np.array(share) * len(outputs))


@pytest.mark.parametrize('shape', [(32, 32, 3), (8, 8, 1), (8, 12, 3)])
def test_resize_crop_is_a_crop_of_pillows_resize(shape):
  image = _images(*shape)
  height, width = shape[0] * 5 // 4, shape[1] * 5 // 4
  large = np.asarray(Image.fromarray(image.squeeze()).resize(
      (width, height), Image.Resampling.BILINEAR)).reshape(
          height, width, shape[2])
  outputs = _many(augment.make_weak('resize_crop', flip=False), image, 40)
  crops = np.stack(_windows(large, *shape[:2])).astype(int)
  gaps = np.abs(outputs[:, None] - crops).max((2, 3, 4))
  assert gaps.min(1).max() <= 1
  assert np.unique(gaps.argmin(1)).size > 5


@pytest.mark.parametrize('flip', [True, False])
def test_resize_crop_takes_every_crop(flip):
  image = _images(8, 8, 1)
  large = np.asarray(Image.fromarray(image.squeeze()).resize(
      (10, 10), Image.Resampling.BILINEAR))[..., None]
  crops = _windows(large, 8, 8)
  if flip:
    crops += [crop[:, ::-1] for crop in crops]
  outputs = _many(augment.make_weak('resize_crop', flip=flip), image, 400)
  gaps = np.abs(outputs[:, None] - np.stack(crops).astype(int)).max((2, 3, 4))
  assert gaps.min(1).max() <= 1
  assert np.unique(gaps.argmin(1)).size == len(crops) == (18 if flip else 9)


def test_without_flip_strong_views_do_not_mirror():
  view = functools.partial(
      augment.make_strong, 'ra_mc(num_ops=0, cutout=0)')
  image = _images(8, 8, 1)
  crops = _windows(np.pad(image, ((1, 1), (1, 1), (0, 0)), 'reflect'), 8, 8)
  _count(_many(view(flip=False), image), crops)
  with pytest.raises(AssertionError, match='not one of the allowed'):
    _count(_many(view(flip=True), image), crops)


@pytest.mark.parametrize('make, name', [
    (augment.make_weak, 'flip_crop(pad=0, flip={})'), (augment.make_strong,
     "ra_mc(num_ops=0, cutout=0, weak='flip_crop(pad=0, flip={})')"), (
         augment.make_strong, "ra_mc(num_ops=0, cutout=0, "
         "weak='flip_crop(pad=0)', flip={})")])
def test_a_text_says_whether_images_are_mirrored(make, name):
  image = _images(6, 5, 3)
  for flip in (True, False):
    views = _many(make(name.format(flip), flip=not flip), image, 20)
    mirrored = (views == image[:, ::-1]).all((1, 2, 3))
    assert mirrored.any() == flip
    assert (mirrored | (views == image).all((1, 2, 3))).all()


@pytest.mark.parametrize('name', [
    IDLE, "ra_mc(num_ops=0, cutout=0, weak='none')", 'none'])
def test_nothing_applied_is_the_identity(name):
  x = _images(3, 32, 32, 3)
  np.testing.assert_array_equal(
      jax.jit(augment.make_strong(name))(KEY, x), x)


def test_operations_are_drawn_uniformly():
  pool = pools.fixmatch(1, 10, .5)
  draws = jax.random.uniform(KEY, (20000, 5))
  rows = np.asarray(augment.choose(pool, draws[:, 0], draws[:, 1:]))
  identity = len(pool.ops) * 9 * 2
  _chi_square_is_small(np.bincount(rows == identity), 10000)
  drawn = np.bincount(rows[rows < identity], minlength=identity)
  for axes in ((1, 2), (0, 2), (0, 1)):  # Operations, levels, signs.
    counts = drawn.reshape(len(pool.ops), 9, 2).sum(axes)
    _chi_square_is_small(counts, counts.sum() / counts.size)


def test_operations_of_an_image_are_drawn_apart():
  """Black is white after one inversion of two, not after none or both."""
  pool = pools.Pool((pools.Op('invert'), pools.Op('identity')), 2, 1.0, 10, 1,
                    (2,))
  outputs = _many(augment.strong(pool, cutout=0, weak='none'),
                  np.zeros((4, 4, 1), np.uint8), 400)
  assert set(np.unique(outputs)) == {0, 255}
  assert .4 < outputs.mean() / 255 < .6


def test_levels_lie_below_a_top_drawn_for_the_image():
  pool = pools.heart(6, (2, 3, 4, 5))
  draws = jax.random.uniform(KEY, (20000, 5))
  rows = np.asarray(augment.choose(pool, draws[:, 0], draws[:, 1:]))
  level = rows // 2 % pool.num_levels
  share = [sum(1 / top for top in pool.tops if v < top) / 4 for v in range(5)]
  _chi_square_is_small(np.bincount(level, minlength=5),
                       20000 * np.array(share))
  smallest = np.asarray(draws[:, 0]) < .25
  assert level[smallest].max() == 1


def _boxes(outputs, background):
  """Height and width of what was cut out of each, which must be a box."""
  for image in outputs:
    changed = (image != background).any(-1)
    rows, columns = changed.any(1), changed.any(0)
    np.testing.assert_array_equal(changed, np.outer(rows, columns))
    assert (np.diff(np.flatnonzero(rows)) == 1).all()
    assert (np.diff(np.flatnonzero(columns)) == 1).all()
    yield rows.sum(), columns.sum()


@pytest.mark.parametrize('side, cutout, expected', [
    (32, 'None', 16), (28, '6', 6)])
def test_cutout_of_strong_views(side, cutout, expected):
  name = f"ra_mc(num_ops=0, weak='none', cutout={cutout})"
  image = np.full((side, side, 3), 9, np.uint8)
  outputs = _many(augment.make_strong(name), image, 200)
  assert set(np.unique(outputs)) == {9, 127}
  heights, widths = np.array(list(_boxes(outputs, 9))).T
  for lengths in (heights, widths):
    assert lengths.max() == expected
    # Cut off at the bottom and right alone, where half of it may be missing.
    assert lengths.min() >= expected // 2
    assert .5 < (lengths == expected).mean() < 1


def test_the_square_may_lie_anywhere_in_an_image_that_is_wide():
  outputs = _many(augment.make_strong(
      "ra_mc(num_ops=0, weak='none', cutout=4)"),
                  np.full((12, 30, 1), 9, np.uint8), 400)
  cut = (outputs != 9).any((0, 3))
  assert cut.any(0).all() and cut.any(1).all()


def test_half_of_an_odd_side_is_rounded_down():
  outputs = _many(augment.make_strong("ra_mc(num_ops=0, weak='none')"),
                  np.full((15, 15, 1), 9, np.uint8), 100)
  assert np.array(list(_boxes(outputs, 9))).max() == 7


def test_cutout_as_one_of_the_operations():
  pool = pools.Pool((pools.Op('cutout', 10),), 1, .5, 10, 4, (5,))
  view = augment.strong(pool, cutout=0, weak='none')
  outputs = _many(view, np.zeros((16, 16, 1), np.uint8))
  heights, _ = np.array(list(_boxes(outputs, 0))).T
  assert set(heights) == {0, 3, 4}
  assert set(np.unique(outputs)) == {0, 127}
  assert abs((heights > 0).mean() - .5) < .1


def test_cutout_of_weak_views():
  view = augment.make_weak('cutout(pad=0, fill=(1, 2, 255))')
  outputs = _many(view, np.full((32, 32, 3), 9, np.uint8))
  cut = outputs[(outputs != 9).any(-1)]
  np.testing.assert_array_equal(np.unique(cut, axis=0), [[1, 2, 255]])
  sizes = np.array(list(_boxes(outputs, 9)))
  # Its center is in the image: at the border half of it is.
  assert sizes.max() == 16 and 8 <= sizes.min() <= 9
  kept = augment.make_weak('cutout(pad=0, side=0)', flip=False)
  x = _images(2, 8, 8, 3)
  np.testing.assert_array_equal(jax.jit(kept)(KEY, x), x)


def test_strong_is_weak_first():
  x = _images(4, 16, 16, 3)
  strong = augment.make_strong(
      "ra_mc(num_ops=0, cutout=0, weak='flip_crop_zero(pad=3)')")
  weak = augment.make_weak('flip_crop_zero(pad=3)')
  np.testing.assert_array_equal(
      jax.jit(strong)(KEY, x), jax.jit(weak)(jax.random.fold_in(KEY, 0), x))


@pytest.mark.parametrize('make, name, message', [
    (augment.make_weak, 'flip_corp', 'flip_crop'),
    (augment.make_weak, 'flip_crop(size=3)', 'pad'),
    (augment.make_weak, 'flip_crop(flop=False)', 'pad'),
    (augment.make_weak, "cutout(padding='wrap')", 'padding'),
    (augment.make_weak, 'cutout(fill=256)', 'fill'),
    (augment.make_weak, 'cutout(side=-1)', 'side'),
    (augment.make_weak, 'flip_shift(vertical=2)', 'vertical'),
    (augment.make_strong, 'ra_mc(magnitude=1)', 'magnitude'),
    (augment.make_strong, 'ra_mc(probability=1.5)', 'probability'),
    (augment.make_strong, 'ra_mc(num_ops=-1)', 'num_ops'),
    (augment.make_strong, 'ra_mc(cutout=-1)', 'cutout'),
    (augment.make_strong, "ra_mc(weak='wobble')", 'wobble'),
    (augment.make_strong, 'ra_heart(tops=())', 'tops'),
    (augment.make_strong, 'ra_heart(tops=(11,))', 'tops'),
    (augment.make_strong, 'ra_cubuk(magnitude=11)', 'magnitude'),
])
def test_bad_names_and_knobs_are_refused_when_built(make, name, message):
  with pytest.raises(ValueError, match=message):
    make(name)


@pytest.mark.parametrize('make, name, images, message', [
    (augment.make_weak, 'flip_crop(pad=8)', _images(1, 8, 8, 1), 'pad=8'),
    (augment.make_weak, 'flip_shift(shift=8)', _images(1, 8, 8, 1), 'shift'),
    (augment.make_weak, 'resize_crop(size=7)', _images(1, 8, 8, 1), 'size=7'),
    (augment.make_weak, 'cutout(fill=(1, 2))', _images(1, 8, 8, 3), 'fill'),
    (augment.make_weak, 'flip_crop', np.zeros((1, 8, 8, 1)), 'float'),
    (augment.make_weak, 'flip_crop', _images(8, 8, 1), 'uint8'),
    (augment.make_strong, 'ra_mc', _images(1, 8, 8, 2), 'C in'),
])
def test_bad_images_are_refused_when_traced(make, name, images, message):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(make(name), KEY, images)
