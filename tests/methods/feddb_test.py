"""FedDB: its labels, its weights, and what it reduces to."""
from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Batch, Update
from fedjax_ssl.data import batching
from fedjax_ssl.methods import feddb
from fedjax_ssl.methods.parts import assemble
from tests import toy
from tests.methods import updates
from tests.methods.averaging_test import one_round
from tests.thorough import wider

RULES = pytest.mark.parametrize('rule', [
    feddb.balanced, feddb.softmax_weights])
ALL = jnp.ones(4)
SKEWED = jnp.array([[.7, .2, .1], [.1, .8, .1], [.2, .1, .7], [.8, .1, .1]])


def test_predictions_of_equal_classes_stay():
  p = jnp.asarray(np.random.default_rng(0).dirichlet(np.ones(3), 5))
  np.testing.assert_allclose(feddb.debiased(p, jnp.full(3, 1 / 3)), p,
                             rtol=1e-5)
  np.testing.assert_allclose(feddb.debiased(p, jnp.zeros(3)), p, rtol=1e-5)
  shares = jnp.array([.6, .3, .1])
  np.testing.assert_allclose(feddb.debiased(shares[None], shares)[0],
                             np.full(3, 1 / 3), rtol=1e-5)


@RULES
def test_clients_of_opposite_skew_count_the_same(rule):
  shares = jnp.array([[.9, .1], [.1, .9]])
  np.testing.assert_allclose(rule(shares, jnp.ones(2)), .5, atol=1e-4)


@RULES
def test_weights_sum_to_one_in_any_order_and_only_of_who_counts(rule):
  found = rule(SKEWED, ALL)
  np.testing.assert_allclose(found.sum(), 1, rtol=1e-5)
  order = jnp.array([2, 0, 3, 1])
  np.testing.assert_allclose(rule(SKEWED[order], ALL), found[order], atol=1e-5)
  some = jnp.array([1., 0, 1, 1])
  rest = rule(SKEWED.at[1].set(jnp.nan), some)
  assert rest[1] == 0
  np.testing.assert_allclose(rest[some > 0], rule(SKEWED[some > 0],
                                                  jnp.ones(3)), atol=1e-5)
  np.testing.assert_array_equal(rule(SKEWED, 0 * ALL), 0)
  np.testing.assert_allclose(rule(SKEWED, jnp.eye(4)[2]), jnp.eye(4)[2],
                             rtol=1e-6)


def test_the_mix_is_uniform_where_it_can_be():
  """Of three clients of one class each, one twice, and in the corner else."""
  shares = jnp.eye(3)[jnp.array([0, 1, 2, 2])]
  found = feddb.balanced(shares, ALL)
  np.testing.assert_allclose(found @ shares, 1 / 3, atol=1e-5)
  np.testing.assert_allclose(found, [1/3, 1/3, 1/6, 1/6], atol=1e-5)
  np.testing.assert_allclose(feddb.balanced(SKEWED, ALL) @ SKEWED, 1 / 3,
                             atol=1e-3)
  # Nobody has the last class: the one that has most of it counts alone.
  nearest = feddb.balanced(jnp.array([[.9, .1], [.8, .2], [.7, .3]]),
                           jnp.ones(3))
  np.testing.assert_allclose(nearest, [0, 0, 1], atol=1e-3)


def test_no_weights_are_nearer_to_uniform():
  rng = np.random.default_rng(3)
  shares = rng.dirichlet(np.full(6, .4), 9).astype(np.float32)
  def missing(weights):
    return np.square(weights @ shares - 1 / 6).sum(-1)
  mine = missing(np.asarray(feddb.balanced(jnp.asarray(shares), jnp.ones(9))))
  others = rng.dirichlet(np.full(9, .5), 5000)
  assert mine <= missing(others).min() + 1e-6
  code = feddb.softmax_weights(jnp.asarray(shares), jnp.ones(9))
  assert mine < missing(np.asarray(code)) < missing(np.eye(9)).min()
  assert code.max() < np.e * code.min()


@pytest.mark.parametrize('model, place', [
    ('linear', 'server'), *wider(('conv', 'clients'))])
def test_without_its_two_parts_it_is_semifl_without_blends(model, place):
  """In its costs too: shares that no server reads are not made."""
  rounds = [one_round(text, model, place, local_steps=4)[1:]
            for text in ("feddb(threshold=0.4, debias=False, "
                         "weights='uniform')",
                         'semifl(threshold=0.4, mix_weight=0.0)',
                         'feddb(threshold=0.4)')]
  mine, semifl, full = (metrics for _, metrics in rounds)
  chex.assert_trees_all_close(mine, semifl, rtol=1e-5)
  assert full['bytes_up'] > mine['bytes_up']
  a, b, c = (state.server for state, _ in rounds)
  chex.assert_trees_all_equal(a, b)
  gap = tree.global_norm(tree.subtract(a.own.model.params, c.own.model.params))
  assert gap > 1e-3


def test_without_unlabeled_rows_it_is_the_supervised_part():
  """A bar out of reach leaves what it leaves of SemiFL."""
  mine = one_round("feddb(weights='uniform', threshold=1.1)")[1].server
  semifl = one_round('semifl(threshold=1.1, mix_weight=0.0)')[1].server
  chex.assert_trees_all_equal(mine, semifl)


def test_without_a_weight_unlabeled_rows_change_no_bit():
  """Clients that learn nothing are as good as none."""
  one, other = (one_round(f'feddb({knob})', place='server')[1].server
                for knob in ('threshold=0.4, unlabeled_weight=0.0',
                             'threshold=1.1'))
  chex.assert_trees_all_equal(one, other)


@pytest.mark.parametrize('profile, rule', [
    ('paper', feddb.balanced), ('code', feddb.softmax_weights)])
def test_the_server_weighs_by_what_clients_say(profile, rule):
  """And not by their own weights; one of weight 0 does not count."""
  federation, _ = toy.federation()
  method = methods.make(
      f"feddb(profile='{profile}', server_momentum=0.0)", toy.task())
  server = method.init(toy.key(0), federation).server
  deltas = jax.tree.map(lambda x: jax.random.normal(
      toy.key(x.size), (1, 4, *x.shape)), server.model)
  counts = jnp.array([1., 1, 1, 0])
  assert method.aggregate is not None
  after, _ = method.aggregate(
      server, Update(deltas, 7 * counts[None], (), {}, counts=SKEWED[None]),
      None, None, toy.key(1))
  shares = rule(SKEWED, counts)
  want = jax.tree.map(
      lambda x, move: x + jnp.tensordot(shares, move[0], 1), server.model,
      deltas)
  chex.assert_trees_all_close(after.model, want, rtol=1e-4, atol=1e-5)


def test_labels_are_judged_as_a_client_makes_them():
  """By the shares that it keeps."""
  federation, _ = toy.federation()
  method = methods.make('feddb(threshold=0.0)', toy.task())
  state = method.init(toy.key(6), federation)
  row, shares = tree.take(state.memory, 0), jnp.array([.8, .1, .1])
  inputs = federation.train.inputs[:12]
  assert method.pseudo_label is not None
  labels, _ = method.pseudo_label(
      state.server, row._replace(own=row.own._replace(shares=shares)), inputs)
  p = jax.nn.softmax(toy.task().apply(state.server.own.model, inputs))
  assert (p.argmax(-1) != (p / shares).argmax(-1)).any()
  np.testing.assert_array_equal(labels, (p / shares).argmax(-1))


def test_a_client_with_labels_alone_has_nothing_to_balance():
  sent = updates.whole('feddb', updates.KNOWN,
                       sent=lambda record: assemble.Server(record.own.model))
  np.testing.assert_allclose(sent.counts, 1 / toy.NUM_CLASSES, rtol=1e-6)


@pytest.mark.parametrize('size', [1, 3, 6])
def test_a_pass_moves_the_shares_by_half_in_any_batches(size):
  """Half of the way from what they were to what the model says."""
  task = toy.task(weak=updates.same)
  model = methods.make('fedavg', task).init(
      toy.key(0), toy.federation()[0]).server.model
  start = jnp.array([.7, .2, .1])
  loss = feddb._loss_fn(task, feddb._Settings(0.0, True, True, 1.0), 6)
  inputs = jnp.zeros((size, toy.SIDE, toy.SIDE, 1), jnp.uint8)
  rows = Batch(inputs, jnp.zeros(size, jnp.int32), jnp.ones(size))
  shares = start
  for _ in range(6 // size):
    shares = loss(model, shares, batching.Pair(rows, rows, jnp.float32(0)),
                  toy.key(1))[1].memory
  said = jax.nn.softmax(task.apply(model, inputs))[0]
  np.testing.assert_allclose(shares, (start + said) / 2, rtol=1e-5)
