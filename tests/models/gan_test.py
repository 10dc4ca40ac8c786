"""Generator and discriminator: forms, limits, and what they depend on."""
from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.models import gan, layers

SHAPES = {'odd': (5, 7, 9, 3), 'mnist': (2, 28, 28, 1), 'words': (3, 6, 5)}
shapes = pytest.mark.parametrize('shape', SHAPES.values(), ids=SHAPES)


@functools.lru_cache
def _made(shape):
  networks = gan.make(width=4)
  networks = networks._replace(generate=jax.jit(networks.generate),
                               judge=jax.jit(networks.judge))
  x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
  init = jax.jit(networks.init, static_argnums=(2, 3))
  return networks, x, init(jax.random.key(0), x[:1], 3, 2)


def _given(size, lam=0.5):
  return gan.Conditions(
      jnp.tile(jnp.eye(3)[:1], (size, 1)), jnp.tile(jnp.eye(3)[1:2], (size, 1)),
      jnp.zeros((size, 2)), jnp.full(size, lam))


def _blend(networks, generator, x, given, limits=None):
  made, = networks.generate(generator, x, given, limits=limits)
  return made


def test_patches_come_back():
  x = jnp.arange(2 * 7 * 9 * 3.0).reshape(2, 7, 9, 3)
  tiles = gan.to_patches(x)
  chex.assert_shape(tiles, (2, 2, 3, 48))
  np.testing.assert_array_equal(gan.from_patches(tiles, x.shape), x)
  # The first tile is the first 4x4 pixels.
  np.testing.assert_array_equal(
      tiles[0, 0, 0].reshape(4, 4, 3), x[0, :4, :4])


def test_a_dense_layer_on_neighbours_is_a_convolution():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 5, 4, 3)).astype(np.float32)
  kernel = rng.normal(size=(3, 3, 3, 6)).astype(np.float32)
  wide = gan.neighbours(jnp.asarray(x))  # [.., dx, dy, channel]
  got = jnp.einsum('bhwk,ko->bhwo', wide, jnp.asarray(
      kernel.transpose(1, 0, 2, 3).reshape(27, 6)))
  want = jax.lax.conv_general_dilated(
      jnp.asarray(x), jnp.asarray(kernel), (1, 1), 'SAME',
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('shape', [(2, 7, 6, 16), (2, 5, 4, 3), (2, 5, 16)])
def test_a_layer_over_neighbours_is_the_product_in_either_form(shape):
  # 16 inputs and 32 outputs are wide enough for tiles, if there are two sides.
  layer = gan.Dense(32, layers.Choices())
  x = jax.random.normal(jax.random.key(1), shape)
  params = layer.init(jax.random.key(2), x)['params']
  params['bias'] += jnp.arange(32.)

  def product(params, x):
    return gan.neighbours(x) @ params['kernel'] + params['bias']

  def applied(params, x):
    return layer.apply({'params': params}, x)
  def gradients(f):
    return jax.grad(lambda *args: (f(*args) ** 2).sum(), (0, 1))(params, x)
  chex.assert_trees_all_close(
      applied(params, x), product(params, x), rtol=1e-4, atol=1e-4)
  chex.assert_trees_all_close(
      gradients(applied), gradients(product), rtol=1e-3, atol=1e-2)


def test_spectral_norm_is_the_largest_singular_value():
  rng = np.random.default_rng(0)
  left, right = (np.linalg.qr(rng.normal(size=(n, 3)))[0] for n in (12, 5))
  kernel = (left * [9., 2., 1.]) @ right.T
  got = gan.spectral_norm(jnp.asarray(kernel, jnp.float32).reshape(3, 4, 5))
  np.testing.assert_allclose(got, 9.0, rtol=1e-3)


@shapes
def test_generated_examples_have_the_form_of_their_source(shape):
  networks, x, (generator, discriminator) = _made(shape)
  made = _blend(networks, generator, x, _given(len(x)))
  assert made.shape == x.shape
  assert networks.judge(discriminator, x, _given(len(x)).source).shape == (
      len(x),)


def test_limits_hold_for_every_pixel():
  networks, x, (generator, _) = _made(SHAPES['odd'])
  low = jnp.array([-1.0, 0.0, 2.0])
  made = _blend(networks, generator, 100 * x, _given(len(x)),
                           (low, low + jnp.array([1.0, 3.0, 0.0])))
  assert (made >= low).all() and (made <= low + 3).all()
  np.testing.assert_array_equal(made[..., 2], 2.0)


@shapes
def test_every_condition_matters(shape):
  networks, x, (generator, discriminator) = _made(shape)
  given = _given(len(x))
  before = _blend(networks, generator, x, given)
  for field in given._fields:
    other = given._replace(**{field: 0.3 + getattr(given, field)})
    assert not np.allclose(_blend(networks, generator, x, other), before)
  assert not np.allclose(
      networks.judge(discriminator, x, given.source),
      networks.judge(discriminator, x, given.target))


def test_each_end_of_the_blend_has_one_source():
  networks, x, (generator, _) = _made(SHAPES['mnist'])
  given = _given(len(x), 0.0)
  np.testing.assert_array_equal(
      _blend(networks, generator, x, given),
      _blend(networks, generator, 5 - x, given._replace(
          source=given.target)))
  given = _given(len(x), 1.0)
  np.testing.assert_array_equal(
      _blend(networks, generator, x, given),
      _blend(networks, generator, x, given._replace(
          noise=given.noise + 1, target=given.source)))


@shapes
def test_blends_made_together_are_those_made_alone(shape):
  networks, x, (generator, _) = _made(shape)
  given = [_given(len(x), lam) for lam in (0.3, 1.0)]
  for made, one in zip(networks.generate(generator, x, *given), given,
                       strict=True):
    np.testing.assert_allclose(
        made, _blend(networks, generator, x, one), rtol=1e-5, atol=1e-6)


def test_rows_do_not_touch():
  networks, x, (generator, discriminator) = _made(SHAPES['mnist'])
  given = _given(2)
  whole = _blend(networks, generator, x, given)
  alone = _blend(networks, generator, x[:1], jax.tree.map(
      lambda v: v[:1], given))
  np.testing.assert_allclose(whole[:1], alone, rtol=1e-4, atol=1e-5)
  # A discriminator of bounded kernels cannot be steep.
  scaled = jax.tree.map(lambda p: 50 * p if p.ndim > 1 else p, discriminator)
  np.testing.assert_allclose(
      networks.judge(scaled, x, given.source),
      networks.judge(discriminator, x, given.source), rtol=1e-3, atol=1e-4)


def test_refuses():
  with pytest.raises(ValueError, match='width'):
    gan.make(width=0)
  with pytest.raises(ValueError, match='sequences'):
    gan.make().init(jax.random.key(0), jnp.zeros((1, 3)), 2, 2)


def test_a_kernel_of_zeros_has_a_slope_of_one():
  zeros = jnp.zeros((3, 2))
  slope = jax.grad(lambda k: gan._bounded({'k': k})['k'].sum())(zeros)
  np.testing.assert_array_equal(slope, jnp.ones((3, 2)))
