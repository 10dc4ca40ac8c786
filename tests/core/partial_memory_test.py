"""A round needs the rows of its cohort, and says beforehand whose they are."""
from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.core import partial_memory, rounds, sampling
from fedjax_ssl.core.types import Cohort, Method, State, Update
from tests import toy

ROUND = jnp.int32(3)


def counting(sample, *, relay=False):
  """A method whose clients count in their memory how often they are drawn."""
  task = toy.task()
  def update(payload, client, key):
    del payload, key
    return Update(jnp.zeros(2), jnp.float32(1), client.memory + 1 + client.id,
                  {})
  one = rounds.client_pass(
      task, update, lambda server, updates, cohort, context, key: (server, {}),
      sample=sample, relay=relay)
  def init(key, federation):
    del key
    return State(jnp.zeros(2), jnp.zeros(federation.num_clients, jnp.int32),
                 jnp.int32(0))
  return Method(init, rounds.chain(one, one), predict=None)


@pytest.mark.parametrize('sample, relay, most', [
    (sampling.uniform(2), False, 4), (sampling.groups(2, 2), True, 6),
    (sampling.everyone(), False, 6)])
def test_a_round_of_the_rows_of_its_readers_is_the_round(sample, relay, most):
  method, (federation, _) = counting(sample, relay=relay), toy.federation()
  state = method.init(toy.key(0), federation)
  state = state._replace(memory=10 * jnp.arange(6, dtype=jnp.int32))
  after, metrics = method.round(state, federation, ROUND, toy.key(1))
  members, size = partial_memory.readers(method, state, federation, toy.key(1))
  assert size == most and 'clients_read' not in metrics
  reads = np.asarray(members(state.server, federation, ROUND, toy.key(1)))
  changed = np.asarray(after.memory != state.memory)
  np.testing.assert_array_equal(reads, changed)
  ids = np.flatnonzero(reads)
  whose = np.append(ids, [toy.NUM_CLIENTS] * (size - len(ids))).astype(np.int32)
  few, _ = method.round(
      state._replace(memory=jnp.append(
          state.memory[ids], jnp.full(size - len(ids), -5, jnp.int32))),
      dataclasses.replace(federation, held=jnp.asarray(whose)), ROUND,
      toy.key(1))
  np.testing.assert_array_equal(few.memory[:len(ids)], after.memory[ids])
  np.testing.assert_array_equal(few.memory[len(ids):], -5)
  chex.assert_trees_all_equal(few.server, after.server)


@pytest.mark.parametrize('first', [True, False])
def test_a_round_that_changes_the_memory_of_all_is_refused(first):
  """As clients that forget a little each round, drawn or not."""
  def forget(state, federation, round_, key):
    del federation, round_, key
    return state._replace(memory=state.memory // 2), {}
  method, (federation, _) = counting(sampling.uniform(2)), toy.federation()
  passes = (forget, method.round) if first else (method.round, forget)
  method = method._replace(round=rounds.chain(*passes))
  with pytest.raises(partial_memory.DependsOnMemoryError,
                     match='changes what all clients keep'):
    partial_memory.readers(
        method, method.init(toy.key(0), federation), federation, toy.key(1))


@pytest.mark.parametrize('wrap', [
    jax.jit, lambda f: jax.jit(jax.jit(f)), lambda f: jax.jit(f, inline=True)])
def test_a_jitted_round_hands_memory_on(wrap):
  method, (federation, _) = counting(sampling.uniform(2)), toy.federation()
  wrapped = method._replace(
      round=rounds.chain(wrap(method.round), method.round))
  state = method.init(toy.key(0), federation)
  _, size = partial_memory.readers(wrapped, state, federation, toy.key(1))
  assert size == 6
  def forget(state, federation, round_, key):
    del federation, round_, key
    return state._replace(memory=state.memory // 2), {}
  with pytest.raises(partial_memory.DependsOnMemoryError):
    partial_memory.readers(
        method._replace(round=rounds.chain(method.round, wrap(forget))), state,
        federation, toy.key(1))


def test_readers_train_nobody():
  """What is traced for them computes no gradient."""
  from fedjax_ssl import methods
  method = methods.make('fedavg(keep_local=True)', toy.task())
  federation, _ = toy.federation()
  state = jax.eval_shape(lambda key: method.init(key, federation), toy.key(0))
  members, _ = partial_memory.readers(method, state, federation, toy.key(1))
  server = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state.server)
  text = str(jax.make_jaxpr(members)(server, federation, ROUND, toy.key(1)))
  assert 'random_bits' in text and 'dot_general' not in text


def test_a_cohort_that_memory_decides_is_refused():
  def sample(state, federation, key):
    del federation, key
    ids = jnp.argsort(state.memory)[None, :2].astype(jnp.int32)
    return Cohort(ids, jnp.ones((1, 2), bool))
  method, (federation, _) = counting(sample), toy.federation()
  with pytest.raises(partial_memory.DependsOnMemoryError,
                     match='who takes part'):
    partial_memory.readers(
        method, method.init(toy.key(0), federation), federation, toy.key(1))
