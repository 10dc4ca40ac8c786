"""The product of dense layers."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.models import matmul

_WIDE = (512, 513)  # A little more than 2 MiB in float64.


def _case(rows, shape=_WIDE):
  rng = np.random.default_rng(0)
  return (jnp.asarray(rng.standard_normal((rows, shape[0]))),
          jnp.asarray(rng.standard_normal(shape)))


def _everything(product, x, w):
  """Value, gradients, gradients of these, and a forward-mode derivative."""
  def loss(x, w):
    return jnp.sum(jnp.sin(product(x, w)))

  def slope(x, w):
    return sum(jnp.sum(jnp.cos(g)) for g in jax.grad(loss, (0, 1))(x, w))
  return (product(x, w), *jax.grad(loss, (0, 1))(x, w),
          *jax.grad(slope, (0, 1))(x, w),
          jax.jvp(product, (x, w), (jnp.cos(x), jnp.cos(w)))[1])


@pytest.mark.parametrize('rows', [0, 1, 2, 40, 41])
def test_dense_is_the_product_to_second_order(rows):
  with jax.enable_x64(True):
    x, w = _case(rows)
    for got, want in zip(_everything(matmul.dense, x, w),
                         _everything(jnp.dot, x, w), strict=True):
      np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


def test_dense_of_many_clients():
  with jax.enable_x64(True):
    x, w = _case(3)
    xs, ws = jnp.stack([x, x[::-1]]), jnp.stack([w, -w])
    np.testing.assert_allclose(
        jax.vmap(matmul.dense)(xs, ws), jnp.stack([x @ w, -(x[::-1] @ w)]),
        rtol=1e-10, atol=1e-10)


def test_dense_takes_more_axes():
  x, w = jnp.ones((2, 3, 512), jnp.float32), jnp.ones(_WIDE, jnp.float32)
  np.testing.assert_array_equal(matmul.dense(x, w), jnp.dot(x, w))


@pytest.mark.skipif(jax.default_backend() != 'cpu', reason='a form for CPU')
def test_wide_weights_meet_a_transposed_operand():
  """What the form is for; XLA would fold a plain transposition away."""
  def folded(x, w):
    return matmul.contract(x.T, w, 0, 0)
  texts = [jax.jit(f).lower(
      jnp.ones((20, 512)), jnp.ones(_WIDE)).compile().as_text() or ''
           for f in (matmul.dense, folded)]
  assert ['lhs_contracting_dims={0}' in text for text in texts] == [True, False]
