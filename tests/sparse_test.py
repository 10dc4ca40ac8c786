"""Sparse messages against counting by hand, on a tree of two leaves."""
from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import sparse

HELD = {'bias': jnp.array([0., 1.]), 'kernel': jnp.array([[1., 2.], [3., 4.]])}
NEW = {'bias': jnp.array([.2, 1.]), 'kernel': jnp.array([[1.3, 2.], [3., -4.]])}


def test_size_and_nonzero_entries():
  assert sparse.size(HELD) == 6
  assert sparse.num_nonzero(HELD) == 5
  assert sparse.num_nonzero({}) == 0


def test_cut_keeps_what_is_above_the_bar():
  got = sparse.cut(HELD, 2.0)
  chex.assert_trees_all_equal(got, {
      'bias': jnp.zeros(2), 'kernel': jnp.array([[0., 0.], [3., 4.]])})
  chex.assert_trees_all_equal(sparse.cut(HELD, 0.0), HELD)


def test_only_entries_that_moved_arrive():
  held, count = sparse.receive(HELD, NEW, threshold=0.25)
  assert count == 2  # .3 and 8 are sent, .2 is not.
  chex.assert_trees_all_equal(held, {
      'bias': HELD['bias'], 'kernel': NEW['kernel']})
  held, count = sparse.receive(HELD, NEW, threshold=0.0)
  assert count == 3
  chex.assert_trees_all_equal(held, NEW)
  held, count = sparse.receive(HELD, NEW, threshold=np.inf)
  assert count == 0
  chex.assert_trees_all_equal(held, HELD)


def test_a_broken_entry_is_sent_and_seen():
  broken = {**NEW, 'bias': jnp.array([jnp.nan, jnp.inf])}
  held, count = sparse.receive(HELD, broken, threshold=1e9)
  assert count == 2
  assert not np.isfinite(held['bias']).any()
  assert not np.isfinite(sparse.cut(broken, 1e9)['bias']).any()


@pytest.mark.parametrize('density, kept', [(1.0, 5), (0.5, 3), (0.34, 2),
                                           (0.0, 0)])
def test_the_largest_stay(density, kept):
  got = sparse.keep_largest(HELD, density)
  assert sparse.num_nonzero(got) == kept
  sizes = np.concatenate([np.ravel(x) for x in got.values()])
  assert sorted(sizes[sizes != 0]) == sorted([1, 1, 2, 3, 4])[5 - kept:]


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_a_broken_entry_is_kept_and_hides_no_other(bad):
  tree = {'a': jnp.array([1., bad, 3., 2.]), 'b': jnp.array([.5, 0.])}
  got = sparse.keep_largest(tree, 0.5)
  np.testing.assert_array_equal(got['a'], [0, bad, 3, 2])
  np.testing.assert_array_equal(got['b'], [0, 0])
  all_ = {'a': jnp.full(4, bad)}
  np.testing.assert_array_equal(
      sparse.keep_largest(all_, 0.25)['a'], all_['a'])


def test_equals_are_kept_together():
  tree = {'a': jnp.array([1., -1., 1., 0.])}
  assert sparse.num_nonzero(sparse.keep_largest(tree, 0.5)) == 3


def test_a_share_outside_its_range_is_refused():
  with pytest.raises(ValueError, match='density is 1.5'):
    sparse.keep_largest(HELD, 1.5)


@pytest.mark.parametrize('rule', [
    lambda x: sparse.cut(x, 1.0), lambda x: sparse.keep_largest(x, 0.5),
    lambda x: sparse.keep_largest(x, 0.0)])
def test_a_map_over_devices_may_close_over_the_tree(rule):
  """What is whole on every device of a mesh stays whole inside the map."""
  mesh = jax.make_mesh((1,), ('devices',), devices=jax.devices()[:1],
                       axis_types=(jax.sharding.AxisType.Auto,))
  everyone = jax.sharding.PartitionSpec()
  tree = {'a': jnp.array([0.5, 2.0]), 'b': jnp.array([-3.0, 1.0])}
  def run(tree):
    return jax.shard_map(lambda _: rule(tree), mesh=mesh, in_specs=everyone,
                         out_specs=everyone, check_vma=False)(0.0)
  placed = jax.device_put(tree, jax.sharding.NamedSharding(mesh, everyone))
  chex.assert_trees_all_equal(jax.jit(run)(placed), rule(tree))
