"""Equal expressions are computed once, and no value changes."""
from __future__ import annotations

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.core.common_expressions import merge_equal

X = jnp.linspace(0.5, 2, 12).reshape(4, 3)


def shares(x):
  """Two divisions by one column, each of which spreads it for itself."""
  total = x.sum(1, keepdims=True)
  return x / total, jnp.sin(x) / total


def repeated(x, n):
  """The same again, inside a loop, a scan and a branch."""
  def body(i, x):
    a, b = shares(x)
    return a + b * shares(x)[0]
  def step(x, _):
    return body(0, x), shares(x)[1].sum()
  x = lax.fori_loop(0, n, body, x)
  x, seen = lax.scan(step, x, None, length=2)
  return lax.cond(n > 2, lambda x: body(0, x), jnp.cos, x), seen


def drawn(x, n):
  """Keys, integers, booleans and numbers that are equal but no same bits."""
  key = jax.random.key(n)
  noise = jax.random.normal(key, x.shape) + jax.random.normal(key, x.shape)
  signs = jnp.stack([lax.div(x[0], 0.0 * x[0]), lax.div(x[0], -0.0 * x[0])])
  kinds = n + 1, n + 1.0, n + True, n.astype(jnp.float32) + 1
  return noise, signs, kinds, jnp.where(x > 1, x, 0), jnp.clip(x, 0.7, 1)


def curved(x, n):
  """Derivatives, of first and second order, through a rule of its own."""
  def loss(x):
    return jnp.sum(jax.nn.softmax(x) * jax.nn.relu(x - 1)) * n
  return jax.grad(lambda x: jnp.sum(jnp.square(jax.grad(loss)(x))))(x)


@pytest.mark.parametrize('function', [repeated, drawn, curved])
def test_values_and_types_stay(function):
  want = jax.jit(function)(X, jnp.int32(3))
  got = jax.jit(merge_equal(function))(X, jnp.int32(3))
  chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
  chex.assert_trees_all_close(got, want, rtol=1e-6)
  assert [leaf.weak_type for leaf in jax.tree.leaves(got)] == [
      leaf.weak_type for leaf in jax.tree.leaves(want)]


def count(function, *args):
  """Equations by primitive, those of loops and branches too."""
  found: dict[str, int] = {}
  def visit(jaxpr):
    for eqn in jaxpr.eqns:
      name = eqn.primitive.name
      found[name] = found.get(name, 0) + 1
      for inner in jax.tree.leaves(
          [*eqn.params.values()], is_leaf=lambda x: hasattr(x, 'jaxpr')):
        if hasattr(inner, 'jaxpr'):
          visit(inner.jaxpr)
  visit(jax.make_jaxpr(function)(*args).jaxpr)
  return found


def test_nothing_is_computed_twice():
  assert count(shares, X)['div'] == 2
  got = count(lambda x: merge_equal(lambda x: (*shares(x), *shares(x)))(x), X)
  # The column is spread by one expression that both divisions share.
  assert got['div'] == 2 and got['broadcast_in_dim'] == 2
  assert got['reduce_sum'] == got['sin'] == 1


def test_nothing_is_computed_twice_in_loops_and_branches():
  before = count(repeated, X, jnp.int32(3))
  after = count(lambda *args: merge_equal(repeated)(*args), X, jnp.int32(3))
  assert after['while'] == before['while'] == 1
  assert after['scan'] == after['cond'] == 1
  # Two divisions of each of the three bodies.
  assert after['div'] == 2 * 3 < before['div']


def test_it_is_traced_once_for_all_who_ask():
  calls = []
  def function(x):
    calls.append(1)
    return x + 1
  one = merge_equal(function)
  def both(x):
    jax.eval_shape(one, x)
    return one(x)
  np.testing.assert_array_equal(jax.jit(both)(X), X + 1)
  assert len(calls) == 1
