"""The tile transforms: exact algebra, and adjoint in pairs."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.ops import conv_geometry, conv_winograd
from tests.thorough import wider


@pytest.mark.parametrize('m,r', [(2, 3), (4, 3), (2, 5), (3, 5)])
def test_transforms_are_one_dimensional_convolution(m, r):
  outputs, weights, inputs = conv_winograd.matrices(m, r)
  rng = np.random.default_rng(0)
  d, w = rng.standard_normal(m + r - 1), rng.standard_normal(r)
  np.testing.assert_allclose(outputs @ ((weights @ w) * (inputs @ d)),
                             np.correlate(d, w, 'valid'), atol=1e-12)


def _normal(tree, seed):
  """Standard normal arrays of the same shapes."""
  leaves, structure = jax.tree.flatten(tree)
  rng = np.random.default_rng(seed)
  return jax.tree.unflatten(structure, [
      jnp.asarray(rng.standard_normal(x.shape)) for x in leaves])


def _inner(a, b):
  return sum(float(jnp.sum(x * y)) for x, y in zip(
      jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize('side,kernel,m', [
    (7, 3, 4), (4, 3, 4), (5, 5, 2),
    *wider((8, 3, 4), (5, 3, 2), (1, 3, 2))])
def test_gradients_are_adjoints(side, kernel, m):
  """<T x, y> = <x, T' y> for each transform T and its gradient T'."""
  tiling = conv_winograd.Tiling(
      m, conv_geometry.window((side, side), (kernel, kernel), 1, 'SAME'))
  x = jax.ShapeDtypeStruct((2, side, side, 3), jnp.float64)
  w = jax.ShapeDtypeStruct((kernel, kernel, 3, 2), jnp.float64)
  with jax.enable_x64(True):
    tiles = jax.eval_shape(lambda x: conv_winograd.cut_inputs(x, tiling), x)
    for transform, given in [(conv_winograd.cut_inputs, x),
                             (conv_winograd.expand, w),
                             (conv_winograd.join_outputs, tiles)]:
      def apply(x, transform=transform):
        return transform(x, tiling)
      x_value = _normal(given, 0)
      y_value, pull = jax.vjp(apply, x_value)
      y_value = _normal(y_value, 1)
      back, = pull(y_value)
      np.testing.assert_allclose(_inner(apply(x_value), y_value),
                                 _inner(x_value, back), rtol=1e-9)


def test_tiles_read_weights_in_their_own_order():
  """No product transposes an operand: that would cost a pass over it."""
  window = conv_geometry.window((4, 4), (3, 3), 1, 'SAME')

  def loss(x, w):
    return jnp.sum(
        jnp.sin(
            conv_winograd.conv(x, w, conv_winograd.Tiling(2, window))[0][0]))
  jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(
      jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 5)))
  assert 'dot_general' in str(jaxpr)
  assert 'transpose[' not in str(jaxpr)
