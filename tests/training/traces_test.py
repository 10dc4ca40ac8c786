"""A round is traced once, whoever asks for it."""
from __future__ import annotations

import dataclasses
import inspect

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core.types import State
from fedjax_ssl.training import runner
from tests import toy


class Counter:
  """A toy task that counts how often its network is traced for training."""

  def __init__(self):
    self.count = 0
    task = toy.task()
    def apply_train(*args, **kwargs):
      self.count += 1
      return task.model.apply_train(*args, **kwargs)
    self.task = dataclasses.replace(
        task, model=task.model._replace(apply_train=apply_train))


@pytest.fixture
def counter():
  return Counter()


@pytest.mark.parametrize('kind', [runner.Sequential, runner.Together])
def test_shapes_seeds_and_the_loop_share_one_trace(counter, kind):
  method = methods.make('fixmatch', counter.task)
  federation, _ = toy.federation()
  state = method.init(jax.random.key(0), federation)
  runner.totals_shape(method, federation, state)
  once = counter.count
  assert once > 0
  runs = kind(method, [federation] * 2, [0, 1], None)
  runs.start(None)
  runs.advance(0, 2)
  runs.advance(2, 1)
  assert counter.count == once


def test_sharing_the_trace_changes_no_bit(counter):
  shared = methods.make('fixmatch', counter.task)
  apart = shared._replace(round=inspect.unwrap(shared.round))
  assert apart.round is not shared.round
  federation, _ = toy.federation()
  ends = []
  for method in (shared, apart):
    runs = runner.Sequential(method, [federation], [3], None)
    runs.start(None)
    runs.advance(0, 3)
    ends.append(jax.device_get(runs.snapshot()))
  jax.tree.map(np.testing.assert_array_equal, *ends)


def test_seeds_decide_by_the_round_together():
  """Else both branches would run in every round, as of a warm-up's sampler."""
  def round_(state, federation, number, key):
    del federation, number
    def shuffled():
      return jax.random.permutation(key, state.server)
    return state._replace(server=lax.cond(
        state.round < 1, shuffled, lambda: state.server)), {}
  method = methods.make('fedavg', toy.task())._replace(round=round_)
  state = State(jnp.arange(9.).reshape(3, 3), (), jnp.zeros(3, jnp.int32))
  totals = runner.Totals({}, jnp.zeros(3))
  federation, _ = toy.federation()
  def run(state, totals, keys):
    return runner.stretch(method, state, totals, federation, jnp.int32(0),
                          jnp.int32(2), keys)
  program = str(jax.make_jaxpr(jax.vmap(run))(
      state, totals, jax.random.split(jax.random.key(0), 3)))
  assert program.count('cond[') == 1 and 'select_n' not in program
