"""Pooling and rectifier equal their definitions, to second order."""
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.ops import pooling


def _maps(height, width):
  rng = np.random.default_rng(0)
  return jnp.asarray(rng.standard_normal((2, height, width, 3)), jnp.float32)


def _four(x):
  """`max_of_four` of the windows that `max_pool` reads."""
  parts = jnp.stack(pooling.quarters(x, x.shape[1:3]), 3)
  return pooling.max_of_four(parts.reshape(-1, 4, x.shape[3])).reshape(
      *parts.shape[:3], x.shape[3])


def _reduced(x):
  return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1),
                           'VALID')


@pytest.mark.parametrize('pool,height,width', [
    (pooling.max_pool, 2, 2), (pooling.max_pool, 6, 4), (_four, 6, 4),
    (pooling.max_pool, 7, 5), (_four, 7, 5), (pooling.max_pool, 3, 2)])
def test_max_pool_equals_reduce_window(pool, height, width):
  x = _maps(height, width)

  def derivatives(pool):
    first = jax.grad(lambda x: jnp.sum(jnp.sin(pool(x) * 3)))
    return pool(x), first(x), jax.grad(lambda x: jnp.sum(first(x)**3))(x)
  for got, want in zip(derivatives(pool), derivatives(_reduced),
                       strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('pool', [pooling.max_pool, _four])
def test_the_first_of_equal_maxima_takes_the_gradient(pool):
  x = jnp.zeros((1, 4, 4, 2)).at[:, 2:, 2].set(-1.)
  grad = jax.grad(lambda x: pool(x).sum())(x)
  assert grad[0, 2, 3].all() and grad.sum() == 2 * 4
  x = jnp.zeros((1, 4, 4, 2))
  grad = jax.grad(lambda x: pool(x).sum())(x)
  np.testing.assert_array_equal(grad[:, ::2, ::2], 1)
  assert grad.sum() == 2 * 4


@pytest.mark.parametrize('place', range(4))
def test_nan_is_the_maximum_and_the_last_takes_its_gradient(place):
  x = _maps(2, 2).at[0, place // 2, place % 2, 0].set(jnp.nan)
  y, vjp = jax.vjp(pooling.max_pool, x)
  assert jnp.isnan(y[0, 0, 0, 0]) and jnp.isnan(y).sum() == 1
  grad, = vjp(jnp.ones_like(y))
  np.testing.assert_array_equal(grad[0, :, :, 0], [[0, 0], [0, 1]])
  # Other windows do not notice.
  np.testing.assert_array_equal(
      grad[1], jax.grad(lambda x: _reduced(x).sum())(x)[1])


def test_nan_of_four_is_the_maximum_and_takes_no_gradient():
  x = _maps(2, 2).at[0, 1, 0, 0].set(jnp.nan)
  y, vjp = jax.vjp(_four, x)
  assert jnp.isnan(y[0, 0, 0, 0]) and jnp.isnan(y).sum() == 1
  grad, = vjp(jnp.ones_like(y))
  assert not grad[0, :, :, 0].any() and grad.sum() == 5


def test_max_pool_needs_a_window():
  with pytest.raises(ValueError, match='1x4'):
    pooling.max_pool(jnp.zeros((1, 1, 4, 2)))


def test_relu_and_its_derivatives():
  x = jnp.asarray([-2., -0., 0., 3.])
  np.testing.assert_array_equal(pooling.relu(x), [0, 0, 0, 3])
  first = jax.grad(lambda x: jnp.sum(pooling.relu(x)**3))
  np.testing.assert_array_equal(first(x), [0, 0, 0, 27])
  np.testing.assert_array_equal(
      jax.grad(lambda x: first(x).sum())(x), [0, 0, 0, 18])


def test_relu_and_max_pool_commute():
  x = _maps(6, 6)
  grads = [jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x))))(x) for f in (
      lambda x: pooling.relu(pooling.max_pool(x)),
      lambda x: pooling.max_pool(pooling.relu(x)))]
  np.testing.assert_array_equal(*grads)


def test_mean_pools():
  x = _maps(5, 4)
  np.testing.assert_allclose(pooling.mean_pool_2x2(x)[1, 1, 0],
                             np.mean(x[1, 2:4, 0:2], (0, 1)), rtol=1e-6)
  assert pooling.mean_pool_2x2(x).shape == (2, 2, 2, 3)
  np.testing.assert_allclose(pooling.mean_pool(x), np.mean(x, (1, 2)),
                             rtol=1e-5, atol=1e-6)
