"""CBAFed: its thresholds, second classes, residual connections and counts."""
from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import rounds, tree
from fedjax_ssl.core.types import Batch, Context
from fedjax_ssl.methods import cbafed
from tests import toy
from tests.methods.updates import KNOWN, same, UNKNOWN, whole


@pytest.mark.parametrize('size', [3, 10, 100])
def test_bars_of_equal_classes_are_the_same_for_any_number(size):
  equal = jnp.full(size, 1 / size)
  np.testing.assert_allclose(cbafed.levels(equal), .1, rtol=1e-5)
  np.testing.assert_allclose(cbafed.thresholds(equal), .94, rtol=1e-5)


def test_bars_follow_the_shares_up_to_the_highest():
  shares = np.random.default_rng(0).dirichlet(np.full(10, .3))
  found = cbafed.thresholds(shares)
  want = np.minimum(shares + .84 - shares.std(ddof=1), .95)
  np.testing.assert_allclose(found, want, rtol=1e-5)
  assert (want == .95).any() and (want < .84).any()
  assert cbafed.thresholds(shares, max_threshold=.8).max() <= .8


def test_a_row_keeps_its_second_class_if_that_is_rare():
  shares = jnp.array([.5, .5, 0, 0])  # Levels .2, .2, 0, 0; t near .92, .72.
  bar = float(cbafed.thresholds(shares)[0])
  p = np.array([[.96, 0, .04, 0], [.6, .1, .3, 0], [.6, .3, .1, 0],
                [bar, 0, 0, 1 - bar], [.2, 0, .3, .5], [0, 0, 0, 1]],
               np.float32)
  labels, kept = cbafed.kept_labels(p, shares)
  np.testing.assert_array_equal(kept, [1, 1, 0, 1, 1, 1])
  np.testing.assert_array_equal(labels[kept], [0, 2, 3, 2, 3])
  labels, kept = cbafed.kept_labels(p, shares, rare=0.0)
  np.testing.assert_array_equal(kept, [1, 0, 0, 0, 0, 1])


def test_a_row_has_one_view_in_a_round():
  """Wherever it stands in whichever batch; another row has another."""
  def noisy(key, x):
    return x + jax.random.normal(key, x.shape)
  task, inputs = toy.task(weak=noisy), jnp.zeros((5, 4))
  places = jnp.array([7, 3, 0, 9, 4])
  def seen(order):
    rows = Batch(inputs, places, jnp.ones(5))
    return cbafed._own_view(task, toy.key(1), rows, places[order]).inputs
  first, order = seen(jnp.arange(5)), jnp.array([2, 0, 4, 1, 3])
  np.testing.assert_array_equal(seen(order), first[order])
  assert len(np.unique(np.asarray(first))) == first.size


PLAIN = 'base=-1.0, warmup=0.0, clip_norm=1e6'


def test_labels_alone_are_fedavg():
  text = f'cbafed({PLAIN}, local_residual=0.0, keep_momentum=False)'
  mine, theirs = (whole(x, KNOWN, local_epochs=3) for x in (text, 'fedavg'))
  chex.assert_trees_all_close(mine.message, theirs.message, rtol=1e-5,
                              atol=1e-7)
  assert mine.weight == theirs.weight == toy.LABELED[KNOWN]
  kept = whole(f'cbafed({PLAIN})', UNKNOWN)
  assert tree.global_norm(kept.message) > 1e-3
  assert kept.weight == toy.UNLABELED[UNKNOWN]
  # Of a warm-up; then a client without labels has nothing to learn.
  warm = whole('cbafed(base=-1.0, warmup=1.0)', UNKNOWN)
  assert warm.weight == tree.global_norm(warm.message) == 0


def test_a_residual_connection_goes_back_to_the_first_epoch():
  """So many epochs later; a client without labels has none."""
  def moved(residual, epochs, who=KNOWN, interval=1):
    text = (f'cbafed({PLAIN}, local_residual={residual}, passes=2, '
            f'interval={interval})')
    return whole(text, who, local_epochs=epochs).message.params
  one, two = (moved(0.0, n) for n in (1, 2))
  want = jax.tree.map(lambda x, y: .8 * x + .2 * y, one, two)
  chex.assert_trees_all_close(moved(.8, 2), want, rtol=1e-5, atol=1e-7)
  chex.assert_trees_all_close(moved(.8, 2, interval=2), two, rtol=1e-5,
                              atol=1e-7)
  chex.assert_trees_all_close(*(moved(x, 2, UNKNOWN) for x in (0.0, .8)),
                              rtol=1e-5, atol=1e-7)


def test_a_residual_connection_to_an_equal_model_is_the_identity():
  """Halves give the same bits; 4/5 and 1/5 are rounded."""
  def stays(round_):
    del round_
    return optax.sgd(0.0)
  sent = whole(f'cbafed({PLAIN}, interval=1, keep_momentum=False)', KNOWN,
               local_epochs=3, optimizer=stays).message
  most = max(float(abs(x).max()) for x in jax.tree.leaves(sent))
  assert most < 1e-7
  federation, _ = toy.federation()
  method = methods.make('cbafed(interval=3, warmup=0.0)', toy.task())
  server = method.init(toy.key(0), federation).server
  chex.assert_trees_all_equal(server.record, server.model)
  after = _closed(method, server, tree.zeros_like(server.model), 3)
  chex.assert_trees_all_equal(after.model, server.model)
  chex.assert_trees_all_equal(after.record, server.model)


@functools.lru_cache
def _rounds(text, count, **changes):
  """The states before and after each round of everybody, and the metrics."""
  federation, _ = toy.federation()
  task = toy.task(cohort_size=toy.NUM_CLIENTS, weak=same, **changes)
  method = methods.make(text, task)
  states, run = [method.init(toy.key(0), federation)], jax.jit(method.round)
  metrics = {}
  for i in range(count):
    state, metrics = run(states[-1], federation, jnp.int32(i), toy.key(i))
    states.append(state._replace(round=jnp.int32(i + 1)))
  return states, toy.means(metrics)


def test_the_server_goes_back_to_its_model_of_five_rounds_ago():
  """With 3 rounds in place of 5; and not to the random one that it had."""
  text = 'cbafed(interval=3, warmup={}, server_residual=0.5)'
  states, _ = _rounds(text.format(0.0), 4)
  servers = [state.server for state in states]
  chex.assert_trees_all_equal(servers[1].record, servers[1].model)
  chex.assert_trees_all_equal(servers[3].record, servers[1].record)
  chex.assert_trees_all_equal(servers[4].record, servers[4].model)
  method = methods.make(text.format(0.0), toy.task())
  sent = jax.tree.map(jnp.ones_like, servers[3].model)
  assert method.aggregate is not None
  after = _closed(method, servers[3], sent, 3)
  want = jax.tree.map(lambda x, y: .5 * x + .5 * (y + 1), servers[3].record,
                      servers[3].model)
  chex.assert_trees_all_close(after.model, want, rtol=1e-5)
  later = _closed(method, servers[3], sent, 4)
  chex.assert_trees_all_close(later.model, tree.add(servers[3].model, sent))


def test_the_first_record_is_the_model_at_the_end_of_the_warm_up():
  method = methods.make('cbafed(interval=3, warmup=0.5)',
                        toy.task(schedule_rounds=4))  # Two rounds of it.
  server = method.init(toy.key(0), toy.federation()[0]).server
  sent = jax.tree.map(jnp.ones_like, server.model)
  warm = _closed(method, _closed(method, server, sent, 0), sent, 1)
  chex.assert_trees_all_equal(warm.record, warm.model)
  later = _closed(method, warm, sent, 2)
  chex.assert_trees_all_equal(later.record, warm.model)


def _closed(method, server, mean, round_):
  """The server after a round in which clients sent this mean."""
  federation, _ = toy.federation()
  after, _ = method.aggregate(
      server, rounds.Counted(mean, jnp.ones(toy.NUM_CLASSES)), None, Context(
          jnp.int32(round_), federation.train, federation.validation,
          federation.server), toy.key(0))
  return after


def test_shares_are_of_all_rows_that_were_learnt_from():
  """Labeled or kept, of all clients, however much these count."""
  federation, _ = toy.federation()
  text = 'cbafed(base=0.45, rare=0.06, warmup=0.0, labeled_client_weight=10.0)'
  states, metrics = _rounds(text, 1)
  server = states[0].server
  held = np.zeros(toy.NUM_CLASSES)
  for i, n in enumerate(toy.LABELED):
    rows = np.asarray(federation.clients.labeled)[i, :n]
    np.add.at(held, np.asarray(federation.train.labels)[rows], 1)
  np.testing.assert_allclose(server.shares, held / held.sum(), rtol=1e-5)
  rows = np.concatenate([np.asarray(federation.clients.unlabeled)[i, :n]
                         for i, n in enumerate(toy.UNLABELED)])
  method = methods.make(text, toy.task())
  assert method.pseudo_label is not None
  labels, kept = method.pseudo_label(server, (), federation.train.inputs[rows])
  np.add.at(held, np.asarray(labels), np.asarray(kept))
  np.testing.assert_allclose(states[1].server.shares, held / held.sum(),
                             rtol=1e-5)
  np.testing.assert_allclose(metrics['mask_rate'], kept.mean())
  assert 0 < kept.mean() < 1


def test_labels_at_the_server_are_refused():
  with pytest.raises(ValueError, match='labels_at'):
    methods.make('cbafed', toy.task(labels_at='server'))
