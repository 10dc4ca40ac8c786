"""A rule of the user's replaces the mean of a round, and nothing else."""
from __future__ import annotations

import inspect
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

from fedjax_ssl import aggregation, methods
from fedjax_ssl.core import tree
from tests import toy

KEY = jax.random.key(3)
TAKERS = ('fedavg', 'fedprox', 'fixmatch', 'flexmatch', 'mixmatch',
          'pseudo_label', 'uda')


def _round(made, place='clients'):
  federation, _ = toy.federation(place)
  state = made.init(KEY, federation)
  return state, *jax.jit(made.round)(state, federation, jnp.int32(0), KEY)


def nothing(stacked, weights):
  """A rule that moves nothing."""
  del weights
  return tree.zeros_like(jax.tree.map(lambda x: x[0], stacked))


def test_all_methods_that_average_take_one():
  takers = {name for name, make in methods.METHODS.items()
            if 'aggregator' in inspect.signature(make).parameters}
  assert takers == set(TAKERS)


@pytest.mark.parametrize('name, knobs, place, model', [
    *[(name, {}, 'clients', 'linear') for name in TAKERS],
    ('fixmatch', {}, 'server', 'linear'), ('fixmatch', {}, 'clients', 'static'),
    ('fedavg', {'keep_local': True}, 'clients', 'linear')])
def test_the_mean_as_a_rule_is_the_mean(name, knobs, place, model):
  make: Any = methods.METHODS[name]
  task = toy.task(model, labels_at=place)
  _, plain, metrics = _round(make(task, **knobs), place)
  _, ruled, more = _round(
      make(task, aggregator=aggregation.weighted_mean, **knobs), place)
  chex.assert_trees_all_close(plain, ruled, rtol=1e-5, atol=1e-6)
  assert set(metrics) == set(more)


def test_the_server_still_trains_on_its_labels():
  """Where clients move nothing, what moves is the server."""
  make: Any = methods.METHODS['fixmatch']
  before, after, metrics = _round(
      make(toy.task(labels_at='server'), aggregator=nothing), 'server')
  gap = tree.subtract(before.server.model, after.server.model)
  assert tree.global_norm(gap) > 0 and metrics['server_loss'].total > 0
  before, after, _ = _round(make(toy.task(), aggregator=nothing))
  chex.assert_trees_all_equal(before.server.model, after.server.model)


def test_static_statistics_are_still_recomputed():
  make: Any = methods.METHODS['fedavg']
  before, after, _ = _round(make(toy.task('static'), aggregator=nothing))
  chex.assert_trees_all_equal(
      before.server.model.params, after.server.model.params)
  gap = tree.subtract(before.server.model.stats, after.server.model.stats)
  assert tree.global_norm(gap) > 0


def test_under_a_falling_rate_too():
  make: Any = methods.METHODS['fedavg']
  before, after, _ = _round(make(
      toy.task(), aggregator=nothing, lr_decay='plateau'))
  chex.assert_trees_all_equal(before.server.model, after.server.model)
  assert (after.memory.rate.best < before.memory.rate.best).any()


def test_nothing_to_aggregate_is_refused():
  make: Any = methods.METHODS['fixmatch']
  with pytest.raises(ValueError, match="server='local' has nothing to"):
    make(toy.task(), server='local', aggregator=nothing)
  with pytest.raises(ValueError, match='aggregator of type'):
    methods.make("fixmatch(aggregator='median')", toy.task())
