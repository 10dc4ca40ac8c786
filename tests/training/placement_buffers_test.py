"""Placement: no two leaves of a state share a buffer that rounds give away."""
from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl import methods
from fedjax_ssl.core.types import State
from fedjax_ssl.training import sharding
from tests import toy


def buffers(state):
  return [shard.data.unsafe_buffer_pointer()
          for x in jax.tree.leaves(state) for shard in x.addressable_shards]


@pytest.mark.parametrize('text', [
    'fedtrinet', "feddure(averaged='all')", "feddure(averaged='last')"])
def test_methods_that_begin_with_an_array_twice_can_be_placed(text):
  state = methods.make(text, toy.task()).init(
      jax.random.key(0), toy.federation()[0])
  placed = sharding.state(state, None)
  found = buffers(placed)
  assert len(set(found)) == len(found)
  chex.assert_trees_all_equal(placed, state)


@pytest.mark.parametrize('num_devices', [0, 1])
def test_rounds_may_give_away_a_state_that_repeats_an_array(num_devices):
  mesh = jax.make_mesh((1,), ('clients',)) if num_devices else None
  x = jnp.arange(4.0)
  placed = sharding.state(State((x, x), x, jnp.int32(0)), mesh)
  after = jax.jit(lambda s: jax.tree.map(lambda y: y + 1, s),
                  donate_argnums=0)(placed)
  for leaf in jax.tree.leaves((after.server, after.memory)):
    np.testing.assert_array_equal(leaf, np.arange(4.0) + 1)


@pytest.mark.parametrize('num_devices', [0, 1])
def test_seeds_may_give_away_what_a_method_gives_to_each(num_devices):
  mesh = jax.make_mesh((1,), ('clients',)) if num_devices else None
  held, kept = jnp.arange(4.0), jnp.arange(2.0)
  seen: set[int] = set()
  give = jax.jit(lambda s: jax.tree.map(lambda y: y + 1, s), donate_argnums=0)
  states = [sharding.state(State(held, kept, jnp.int32(0)), mesh, seen=seen)
            for _ in range(2)]
  for placed in states:
    after = give(placed)
    np.testing.assert_array_equal(after.server, np.arange(4.0) + 1)
    np.testing.assert_array_equal(after.memory, np.arange(2.0) + 1)
  np.testing.assert_array_equal(held, np.arange(4.0))


def test_a_method_trains_several_seeds_with_what_it_holds():
  both, second = (fedjax_ssl.fit(
      'adamatch(decay=0.9)', 'digits', labels_at='server', model='linear',
      clients=2, rounds=1, seeds=seeds, num_devices=1, progress=False)
                  for seeds in ([0, 1], [1]))
  np.testing.assert_allclose(both.metrics['loss'][1:], second.metrics['loss'],
                             rtol=1e-5)
