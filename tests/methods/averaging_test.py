"""FedAvg, FedProx, FixMatch: laws that tie them together."""
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import checks, client_weights, rounds, tree
from fedjax_ssl.core.checks import FieldError
from fedjax_ssl.core.types import Batch, Ratio, Update
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import assemble, averaging, network
from tests import toy
from tests.methods import updates
from tests.thorough import wider

KEY = toy.key(2)


@functools.lru_cache
def one_round(text, model='linear', place='clients', labels='few', seed=0,
              **changes):
  """(state before, state after, metrics) of a round."""
  federation, _ = toy.federation(place, labels)
  task = toy.task(model, labels_at=place, **changes)
  method = methods.make(text, task)
  before = method.init(toy.key(seed), federation)
  after, metrics = jax.jit(method.round)(
      before, federation, jnp.int32(0), KEY)
  return before, after, toy.means(metrics)


def test_fedavg_against_an_independent_loop():
  """Full batches, everyone, no augmentation: the round by hand in NumPy."""
  federation, _ = toy.federation()
  same = lambda key, x: x  # noqa: E731
  task = toy.task(cohort_size=toy.NUM_CLIENTS, labeled_batch=8, weak=same,
                  optimizer=lambda round_: optax.sgd(0.5))
  method = methods.make('fedavg', task)
  before = method.init(toy.key(0), federation)
  after, _ = jax.jit(method.round)(before, federation, jnp.int32(0), KEY)
  params = before.server.model.params
  layer = next(iter(params))
  w, b = (np.asarray(params[layer][k], np.float64) for k in ('kernel', 'bias'))
  total_w, total_b = np.zeros_like(w), np.zeros_like(b)
  for i, n in enumerate(toy.LABELED):
    if not n:
      continue
    rows = np.asarray(federation.clients.labeled)[i, :n]
    x = np.asarray(federation.train.inputs)[rows].reshape(n, -1) / 255 - 0.4
    y = np.eye(toy.NUM_CLASSES)[np.asarray(federation.train.labels)[rows]]
    logits = x @ w + b
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    total_w -= n * 0.5 * x.T @ (p - y) / n
    total_b -= n * 0.5 * (p - y).mean(0)
  total = sum(toy.LABELED)
  new = after.server.model.params[layer]
  np.testing.assert_allclose(new['kernel'], w + total_w / total, atol=1e-5)
  np.testing.assert_allclose(new['bias'], b + total_b / total, atol=1e-5)


@pytest.mark.parametrize('place, client_map', [
    ('clients', 'map'), *wider(('server', 'vmap'))])
def test_fedprox_without_its_term_is_fedavg(place, client_map):
  a, b = (one_round(text, place=place, client_map=client_map)[1]
          for text in ('fedavg', 'fedprox(mu=0.0)'))
  chex.assert_trees_all_equal(a.server, b.server)


def test_a_strong_pull_keeps_clients_at_home():
  free, pulled = (np.linalg.norm(updates.change(
      f'fedprox(mu={mu})', local_epochs=3)) for mu in (0.0, 5.0))
  assert pulled < 0.6 * free


def test_fixmatch_above_one_learns_from_labels_only():
  """With labels alone, the weight of the unlabeled loss cannot matter."""
  a, b, c = map(updates.update, (
      'fixmatch(threshold=1.1)',
      'fixmatch(threshold=1.1, unlabeled_weight=50.0)',
      'fixmatch(threshold=0.0)'))
  chex.assert_trees_all_equal(a.message, b.message)
  assert toy.means(a.metrics)['mask_rate'] == 0
  np.testing.assert_allclose(toy.means(c.metrics)['mask_rate'], 1)
  assert not np.allclose(*(jax.tree.leaves(x.message)[1] for x in (a, c)))


def test_fixmatch_at_weight_zero_is_its_supervised_part():
  a, b = (updates.update(text).message for text in (
      'fixmatch(threshold=1.1)',
      'fixmatch(threshold=0.0, unlabeled_weight=0.0)'))
  chex.assert_trees_all_equal(a, b)


def test_labels_at_the_server_train_the_server_first():
  before, after, metrics = one_round('fixmatch(threshold=1.1)',
                                     place='server')
  # Clients find nothing confident, so only the server's epoch moves the model.
  alone = one_round('fedavg', place='server')[1]
  chex.assert_trees_all_close(after.server, alone.server, rtol=1e-6)
  assert metrics['server_loss'] > 0
  assert tree.global_norm(tree.subtract(after.server, before.server)) > 0


def test_all_labels_use_every_row():
  _, _, metrics = one_round('fedavg', labels='all',
                            cohort_size=toy.NUM_CLIENTS)
  assert metrics['num_participants'] == sum(
      a + b > 0 for a, b in zip(toy.LABELED, toy.UNLABELED, strict=True))
  _, _, few = one_round('fedavg', cohort_size=toy.NUM_CLIENTS)
  assert few['num_participants'] == sum(n > 0 for n in toy.LABELED)


def test_uniform_weights_differ_from_sizes():
  a = one_round('fedavg', cohort_size=toy.NUM_CLIENTS)[1]
  b = one_round("fedavg(weighting='uniform')",
                cohort_size=toy.NUM_CLIENTS)[1]
  assert not np.allclose(*(jax.tree.leaves(x.server)[1] for x in (a, b)))


@pytest.mark.parametrize('norm', ['conv', *wider('static')])
def test_statistics_of_normalization_move_and_stay_finite(norm):
  before, after, _ = one_round('fixmatch', norm)
  chex.assert_tree_all_finite(after.server)
  gap = tree.subtract(after.server.model.stats, before.server.model.stats)
  assert tree.global_norm(gap) > 0


def test_static_statistics_are_those_of_the_averaged_model():
  """One client, one batch: its batch statistics, whatever was before."""
  federation, _ = toy.federation()
  task = toy.task('static', cohort_size=1)
  method = methods.make('fedavg', task)
  state = method.init(toy.key(0), federation)
  model = state.server.model
  far = jax.tree.map(lambda x: x + 3, model.stats)
  def recomputed(stats):
    start = state._replace(server=assemble.Server(model._replace(stats=stats)))
    after, _ = jax.jit(assemble.statistics(task))(start, federation,
                                                   jnp.int32(0), KEY)
    return after.server.model.stats
  chex.assert_trees_all_close(recomputed(model.stats), recomputed(far),
                              rtol=1e-4, atol=1e-4)


def test_views_go_through_together_exactly_where_norm_couples_them():
  federation, _ = toy.federation()
  images, labels = map(jnp.asarray, federation.train)
  batch = Batch(images[:4], labels[:4], jnp.ones(4))
  for model, coupled in (('linear', False), ('conv', True)):
    task = toy.task(model)
    variables = task.model.init(KEY)
    other = batch._replace(inputs=255 - batch.inputs)
    forward = jax.jit(functools.partial(network.forward_with_targets, task))
    alone, _, _ = forward(variables, batch, batch)
    mixed, _, _ = forward(variables, batch, other)
    assert np.allclose(alone, mixed, atol=1e-5) != coupled


def test_views_have_names_in_the_order_in_which_they_are_unpacked():
  """The labeled rows look like the labeled view, and None stays None."""
  task = dataclasses.replace(
      toy.task(), weak=lambda key, x: x + 1, strong=lambda key, x: x + 2,
      labeled_view=lambda key, x: x + 3)
  rows = Batch(jnp.zeros((2, 1)), jnp.zeros(2, int), jnp.ones(2))
  seen = network.views(task, batching.Pair(rows, rows, None), KEY)
  assert seen.labeled is not None
  assert [view.inputs[0, 0] for view in (
      seen.weak, seen.labeled, seen.strong)] == [1, 3, 2]
  weak, labeled, strong = seen
  assert weak is seen.weak and labeled is seen.labeled
  assert strong is seen.strong
  assert network.views(task, batching.Pair(None, rows, None), KEY
                       ).labeled is None


def test_clients_that_only_measure_are_no_participants():
  """Their traffic is that of the clients that train."""
  size = tree.num_bytes(toy.task('static').model.init(KEY))
  for text in ('fixmatch', 'semifl(threshold=0.0)'):
    _, _, plain = one_round(text, 'conv')
    _, _, found = one_round(text, 'static')
    assert found['num_participants'] == plain['num_participants'], text
    sent = (found['bytes_up'] + found['bytes_down']) / size
    np.testing.assert_allclose(found['models_sent'],
                               sent / toy.task().cohort_size, rtol=1e-6)
    assert found['models_sent'] > plain['models_sent']


@pytest.mark.parametrize('text', [
    'fedavg', 'semifl(threshold=1.0)',
    "fl2(thresholds='fixed', threshold=1.0, warmup_passes=0)"])
def test_clients_that_sit_out_send_nothing(text):
  _, _, found = one_round(text, place='server')
  assert found['num_participants'] == found['bytes_up'] == 0
  assert found['bytes_down'] > 0 and found['models_sent'] == 1


def test_a_function_of_what_a_client_did_weighs_it():
  """By the rows that it holds it is 'examples', by nothing 'uniform'."""
  federation, _ = toy.federation()
  task = toy.task(labels_at='clients')

  def after(weighting):
    method = averaging.averaging(task, averaging.supervised(task),
                                 streams='labeled', weighting=weighting)
    state, _ = jax.jit(method.round)(
        method.init(toy.key(0), federation), federation, jnp.int32(0), KEY)
    return state.server.model

  def held(shard, kept, metrics):
    assert kept is None and 'labeled_loss' not in metrics
    return shard.num_labeled

  def broken_without_rows(shard, kept, metrics):
    del kept
    return metrics['rows_used'] / (metrics['rows_used'] * shard.num_labeled)

  examples, uniform = map(after, client_weights.WEIGHTINGS)
  chex.assert_trees_all_equal(after(held), examples)
  chex.assert_trees_all_equal(after(lambda *_: 1.0), uniform)
  # 0 / 0 at a client without rows, which counts nothing in any case.
  assert tree.all_finite(after(broken_without_rows))
  for wrong, said in ((jnp.ones(1), 'float32.1.'), (None, 'None'),
                      ('many', "'many'"), (Ratio(*jnp.ones(2)), 'float32.2.')):
    with pytest.raises(ValueError, match=f'weighting returns {said}; one'):
      after(lambda *_, wrong=wrong: wrong)
  with pytest.raises(ValueError, match="weighting '3' is unknown"):
    after(3)
  with pytest.raises(ValueError, match="server='local', which averages no"):
    averaging.averaging(task, averaging.supervised(task), streams='labeled',
                        weighting=held, server='local')
  assert np.abs(jax.tree.leaves(tree.subtract(examples, uniform))[0]).max() > 0


def test_a_client_that_weighs_nothing_keeps_its_own_model():
  federation, _ = toy.federation()
  task = toy.task(labels_at='clients')
  kept = []
  words: tuple[Any, ...] = ('uniform', lambda *_: 0.0)
  for weighting in words:
    method = averaging.averaging(task, averaging.supervised(task),
                                 streams='labeled', weighting=weighting,
                                 keep_local=True)
    before = method.init(toy.key(0), federation)
    after, _ = jax.jit(method.round)(before, federation, jnp.int32(0), KEY)
    kept.append(after.memory.model)
  chex.assert_trees_all_equal(*kept)
  chex.assert_trees_all_equal(after.server, before.server)


def test_labels_at_a_server_that_would_not_learn_are_refused():
  task = toy.task(labels_at='server')

  def client_update(payload, client, key):
    model, _, metrics = averaging.train_locally(
        task, averaging.supervised(task), payload.model, client.train,
        client.shard, client.round, key, 'unlabeled')
    return Update(tree.subtract(model, payload.model), jnp.float32(1), (),
                  metrics)

  with pytest.raises(FieldError, match='labels_at=server: .*hand assemble '
                     'on_labels, such as averaging.on_labels'):
    assemble.assemble(task, client_update=client_update)
  with checks.stored():  # It goes on as it began.
    assemble.assemble(task, client_update=client_update)
  on_labels = functools.partial(averaging.on_labels, task)
  assemble.assemble(task, client_update=client_update, on_labels=on_labels)
  assemble.assemble(task, client_update=client_update,
                    opening=rounds.server_pass(on_labels))
