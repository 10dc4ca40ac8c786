"""RSCFed: laws of its aggregation, its teachers and its groups."""
from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import aggregation, methods
from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Client, Cohort, Context, Update
from fedjax_ssl.methods import rscfed
from fedjax_ssl.methods.parts import assemble, averaging, mean_teacher
from tests import toy
from tests.stacked import five_clients

KEY = toy.key(3)
GROUPS = np.array([[0, 3, 1], [2, 4, 3], [1, 2, 4]])  # Client 0 has labels.
LABELED = np.arange(5) == 0
UNLABELED_CLIENT = 2  # Of the toy federation: 12 rows, no labels.


def same(key, x):
  """An augmentation that changes nothing."""
  del key
  return x


def numpy_step(layers, sizes, groups, scales, multiplier):
  """The authors' aggregation in loops over plain numbers, in float64."""
  means = []
  for members in groups:
    with_labels = 0 in members
    boosted = {k: sizes[k] * (multiplier if k == 0 else 1) for k in members}
    share = {k: boosted[k] / sum(boosted.values()) for k in members}
    average = [sum(share[k] * x[k] for k in members) for x in layers]
    weight = {}
    for k in members:
      far = sum(np.sqrt(((x[k] - a)**2).sum())
                for x, a in zip(layers, average, strict=True))
      scale = scales[0] if with_labels else scales[1]
      weight[k] = share[k] * np.exp(-scale * far / sizes[k])
      if k == 0:
        weight[k] *= multiplier
    total = sum(weight.values())
    means.append([sum(weight[k] * x[k] for k in members) / total
                  for x in layers])
  return [np.mean(rows, axis=0) for rows in zip(*means, strict=True)]


@pytest.mark.parametrize('scales, multiplier', [
    ((0.0, 0.0), 1.0), ((0.5, 20.0), 6.0), ((30.0, 1.0), 200.0)])
def test_one_aggregation_equals_an_independent_version(scales, multiplier):
  stacked, sizes = five_clients()
  layers = {'kernel': stacked['dense'].kernel, 'bias': stacked['dense'].bias}
  got = rscfed.aggregate_groups(
      tree.take(layers, GROUPS), sizes[GROUPS], LABELED[GROUPS],
      labeled_beta=scales[0], beta=scales[1], labeled_multiplier=multiplier)
  kernel, bias = numpy_step(
      [np.asarray(x, np.float64) for x in (layers['kernel'], layers['bias'])],
      sizes.astype(np.float64), GROUPS.tolist(), scales, multiplier)
  np.testing.assert_allclose(got['kernel'], kernel, atol=1e-6)
  np.testing.assert_allclose(got['bias'], bias, atol=1e-6)


def weights(models, sizes, **knobs):
  """The weight of each client of one group, read off its slopes' marks."""
  mark = 1e-6 * jnp.eye(len(sizes))
  got = rscfed.aggregate_groups(
      {'model': models[None], 'mark': mark[None]}, sizes[None],
      LABELED[None, :len(sizes)], **knobs)
  return np.asarray(got['mark']) * 1e6


def test_scale_zero_is_fedavg_inside_a_group():
  stacked, sizes = five_clients()
  got = rscfed.aggregate_groups(
      tree.take(stacked, GROUPS), sizes[GROUPS], LABELED[GROUPS], beta=0.0,
      labeled_beta=0.0, labeled_multiplier=1.0)
  want = [aggregation.weighted_mean(tree.take(stacked, g), sizes[g])
          for g in GROUPS]
  chex.assert_trees_all_close(got, jax.tree.map(
      lambda *x: sum(x) / 3, *want), atol=1e-6)


def test_a_huge_scale_is_the_nearest_client_and_never_nobody():
  stacked, sizes = five_clients()
  rows, alike = stacked['dense'].kernel, np.full(5, 20.0, np.float32)
  gap = np.linalg.norm((rows - rows.mean(0)).reshape(5, -1), axis=1)
  def mean(x, n):
    return rscfed.aggregate_groups(
        x[None], n[None], np.zeros((1, 5), bool), beta=1e6)
  np.testing.assert_allclose(mean(rows, alike), rows[gap.argmin()], rtol=1e-6)
  slopes = jax.grad(lambda x, n: jnp.sum(mean(x, n)**2), (0, 1))(
      jnp.asarray(rows), jnp.asarray(sizes))
  chex.assert_tree_all_finite(slopes)


def test_one_group_of_all_is_one_distance_reweighted_mean():
  stacked, sizes = five_clients()
  got = rscfed.aggregate_groups(
      tree.take(stacked, np.arange(5)[None]), sizes[None], LABELED[None],
      labeled_beta=7.0, labeled_multiplier=3.0)
  want = aggregation.distance_reweighted_mean(
      stacked, sizes, beta=7.0, labeled=LABELED, labeled_multiplier=3.0)
  chex.assert_trees_all_close(got, want, atol=1e-6)


def test_identical_models_weigh_by_their_examples():
  _, sizes = five_clients()
  got = weights(jnp.ones((5, 4)), sizes, labeled_beta=0.1,
                labeled_multiplier=1.0)
  np.testing.assert_allclose(got, sizes / sizes.sum(), rtol=1e-4)


def test_a_far_client_weighs_less_than_a_near_one_of_its_size():
  models = jnp.array([0.0, 0.1, -0.1, 0.2, 5.0])
  got = weights(models, np.full(5, 50.0, np.float32), labeled_beta=20.0,
                labeled_multiplier=1.0)
  assert got[4] < 0.5 * got[:4].min()
  np.testing.assert_allclose(got.sum(), 1, rtol=1e-4)


def test_a_group_of_nobody_does_not_count():
  stacked, sizes = five_clients()
  sizes = sizes[GROUPS] * np.array([[1.0], [0.0], [1.0]], np.float32)
  got = rscfed.aggregate_groups(
      tree.take(stacked, GROUPS), sizes, LABELED[GROUPS], labeled_beta=3.0)
  want = rscfed.aggregate_groups(
      tree.take(stacked, GROUPS[[0, 2]]), sizes[[0, 2]],
      LABELED[GROUPS[[0, 2]]], labeled_beta=3.0)
  chex.assert_trees_all_close(got, want, atol=1e-6)


def test_a_client_that_is_absent_chooses_no_scale():
  stacked, sizes = five_clients()
  there = np.arange(5) > 0
  def mean(labeled):
    return rscfed.aggregate_groups(
        tree.take(stacked, np.arange(5)[None]), (sizes * there)[None],
        labeled[None], beta=20.0, labeled_beta=0.0)
  chex.assert_trees_all_equal(mean(LABELED), mean(np.zeros(5, bool)))
  assert not np.allclose(mean(LABELED)['dense'].kernel,
                         mean(np.arange(5) == 1)['dense'].kernel)


@functools.lru_cache
def updater(text, model='linear', **changes):
  """(received server record, client -> Update) on the toy federation."""
  federation, _ = toy.federation()
  method = methods.make(text, toy.task(model, **changes))
  state = method.init(toy.key(0), federation)
  assert method.client_update is not None
  update = jax.jit(method.client_update)
  def run(client, **rows):
    shard = tree.take(federation.clients, client)._replace(**rows)
    return update(state.server, Client(
        jnp.int32(client), shard, tree.take(state.memory, client),
        federation.train, federation.validation, jnp.int32(5),
        jnp.int32(0)), KEY)
  return state.server, run


def slow_sgd(round_):
  del round_
  return optax.sgd(0.5)


def test_an_unlabeled_step_against_numpy():
  """A full batch without augmentation; the first teacher is the model."""
  server, run = updater(
      'rscfed(unlabeled_weight=2.0, unlabeled_rate=0.7)', weak=same,
      unlabeled_batch=16, local_steps=1, optimizer=slow_sgd)
  update = run(UNLABELED_CLIENT)
  layer, = server.model.params
  w, b = (np.asarray(server.model.params[layer][x], np.float64)
          for x in ('kernel', 'bias'))
  federation, _ = toy.federation()
  rows = np.asarray(federation.clients.unlabeled)[UNLABELED_CLIENT, :12]
  x = np.asarray(federation.train.inputs)[rows].reshape(12, -1) / 255 - 0.4
  p = np.exp(x @ w + b)
  p /= p.sum(1, keepdims=True)
  gap = p - p**2 / (p**2).sum(1, keepdims=True)
  slope = 2 * p * (gap - (p * gap).sum(1, keepdims=True)) / 16  # Nominal.
  got = update.message.params[layer]
  np.testing.assert_allclose(got['kernel'], -0.5 * 0.7 * 2 * x.T @ slope,
                             atol=1e-6)
  np.testing.assert_allclose(got['bias'], -0.5 * 0.7 * 2 * slope.sum(0),
                             atol=1e-6)
  # Its decay was 0, so the teacher is the student.
  student = tree.add(server.model, update.message)
  chex.assert_trees_all_close(update.memory.teacher, student, atol=1e-7)
  assert update.memory.steps == 1 and update.weight == 12


def test_memory_is_carried_from_group_to_group():
  federation, _ = toy.federation()
  task = toy.task(cohort_size=toy.NUM_CLIENTS, local_steps=2)
  method = methods.make('rscfed(groups=2, warmup=0.0)', task)
  state = method.init(toy.key(0), federation)
  after, metrics = jax.jit(method.round)(state, federation, jnp.int32(0), KEY)
  # Two groups of two steps for those with unlabeled rows.
  np.testing.assert_array_equal(
      after.memory.steps, [4 * (n > 0) for n in toy.UNLABELED])
  assert toy.means(metrics)['num_participants'] == 10  # One has no rows.
  trace = jax.tree.leaves(after.memory.opt_state)[0]
  assert (np.abs(trace).reshape(toy.NUM_CLIENTS, -1).max(1) > 0).sum() == 5


def test_statistics_are_sent_and_the_first_teacher_keeps_those_received():
  server, run = updater('rscfed', 'conv', local_steps=1)
  update = run(UNLABELED_CLIENT)
  assert tree.global_norm(update.message.stats) > 0
  chex.assert_trees_all_equal(update.memory.teacher.stats, server.model.stats)
  chex.assert_trees_all_close(
      update.memory.teacher.params,
      tree.add(server.model, update.message).params, atol=1e-6)


def test_the_profiles_differ_as_said():
  federation, _ = toy.federation()
  task = toy.task()
  stacked, sizes = five_clients()
  def mean(**knobs):
    text = ', '.join(f'{k}={v!r}' for k, v in knobs.items())
    aggregate = methods.make(f'rscfed({text})', task).aggregate
    model = averaging.Variables(tree.take(stacked, 0), {})
    zero = assemble.Server(tree.zeros_like(model))
    messages = averaging.Variables(tree.take(stacked, GROUPS), {})
    updates = Update(messages, jnp.asarray(sizes[GROUPS]), (), {
        'labeled_share': jnp.asarray(LABELED[GROUPS], jnp.float32)})
    context = Context(
        jnp.int32(5), federation.train, federation.validation,
        federation.server)
    assert aggregate is not None
    return aggregate(zero, updates, None, context, KEY)[0].model.params
  official = {'labeled_beta': 100.0, 'beta': 1e4, 'labeled_multiplier': 6.0,
              'distance': 'sum_of_norms'}
  chex.assert_trees_all_equal(mean(), mean(profile='paper', **official))
  paper = mean(profile='paper')
  assert not np.allclose(paper['dense'].kernel, mean()['dense'].kernel)


def shares(models, sizes, labeled, ids, *, beta, multiplier, literal):
  """Of one group, by the authors' code in loops over plain numbers.

  There the first multiplication asks whether client 0 is in the group.
  """
  counts = 0 in ids or not literal
  first = [multiplier if k in labeled and counts else 1 for k in ids]
  share = np.array([sizes[k] * x for k, x in zip(ids, first, strict=True)])
  share = share / share.sum()
  average = [sum(s * x[k] for s, k in zip(share, ids, strict=True))
             for x in models]
  for i, k in enumerate(ids):
    far = sum(np.linalg.norm(x[k] - a)
              for x, a in zip(models, average, strict=True))
    share[i] *= np.exp(-beta * far / sizes[k])
    share[i] *= multiplier if k in labeled else 1
  return share / share.sum()


@pytest.mark.parametrize('literal', [False, True])
@pytest.mark.parametrize('ids, absent', [
    ((1, 3, 4), None), ((3, 0, 1), None), ((3, 1, 0), 0)])
@pytest.mark.parametrize('model', ['linear', 'conv'])
def test_a_literal_aggregation_is_the_released_one(literal, ids, absent, model):
  """Clients 0 and 1 have labels; counters are those of batch norm alone.

  Who is absent has weight 0, and the code does not have it in the group.
  """
  federation, _ = toy.federation()
  task = toy.task(model)
  method = methods.make(
      f'rscfed(literal={literal}, groups=1, labeled_beta=0.5, warmup=0.0)',
      task)
  server = method.init(toy.key(0), federation).server
  zero = assemble.Server(tree.zeros_like(server.model))
  _, sizes = five_clients()
  steps = np.array([2.0, 5.0, 1.0, 3.0, 9.0], np.float32)
  keys = jax.random.split(toy.key(1), 5)
  stacked = jax.vmap(lambda key: jax.tree.map(
      lambda x: 0.1 * jax.random.normal(key, x.shape), server.model))(keys)
  order = np.array(ids)
  assert method.aggregate is not None
  got = method.aggregate(
      zero, Update(
          tree.take(stacked, order[None]),
          (sizes[order] * (order != absent))[None], (), {
              'labeled_share': jnp.asarray(order < 2, jnp.float32)[None],
              'counted_steps': steps[order][None]}),
      Cohort(jnp.asarray(order)[None], jnp.ones((1, 3), bool)),
      Context(jnp.int32(5), federation.train, federation.validation,
              federation.server), KEY)[0].model
  layers = [np.asarray(x, np.float64) for x in jax.tree.leaves(stacked)]
  counters = [steps] * (len(jax.tree.leaves(server.model.stats)) // 2)
  assert bool(counters) == (task.model.norm == 'batch')
  there = [k for k in ids if k != absent]
  share = shares(layers + counters if literal else layers,
                 sizes.astype(np.float64), {0, 1}, there, beta=0.5,
                 multiplier=6.0, literal=literal)
  chex.assert_trees_all_close(got, jax.tree.map(
      lambda x: np.einsum('k,k...->...', share, np.asarray(x)[there]),
      stacked), atol=1e-6)


def test_a_warmup_averages_its_one_group_by_examples():
  """Round 3 is the last of 4; the empty groups do not count."""
  federation, _ = toy.federation()
  aggregate = methods.make('rscfed(warmup=0.5)', toy.task()).aggregate
  assert aggregate is not None
  stacked, sizes = five_clients()
  model = averaging.Variables(tree.take(stacked, 0), {})
  present = np.array([[1], [0], [0]], np.float32)
  updates = Update(averaging.Variables(tree.take(stacked, GROUPS), {}),
                   jnp.asarray(sizes[GROUPS] * present), (),
                   {'labeled_share': jnp.ones(GROUPS.shape)})
  def mean(round_):
    context = Context(jnp.int32(round_), federation.train,
                      federation.validation, federation.server)
    zero = assemble.Server(tree.zeros_like(model))
    return aggregate(zero, updates, None, context, KEY)[0].model.params
  want = aggregation.weighted_mean(
      tree.take(stacked, GROUPS[0]), sizes[GROUPS[0]])
  chex.assert_trees_all_close(mean(3), want, atol=1e-6)
  assert not np.allclose(mean(4)['dense'].kernel, want['dense'].kernel)


def test_labels_at_the_server_are_refused():
  for name in ('rscfed', 'fedirm', 'fed_consist'):
    with pytest.raises(ValueError, match='labels_at'):
      methods.make(name, toy.task(labels_at='server'))


def test_teacher_decay_follows_its_rule():
  got = mean_teacher.teacher_decay(np.array([0, 1, 3, 998, 999, 5000]))
  np.testing.assert_allclose(
      got, [0, 1 / 2, 3 / 4, 1 - 1 / 999, 0.999, 0.999], rtol=1e-6)


def test_steps_are_reported_where_they_count():
  def reported(model):
    federation, _ = toy.federation()
    method = methods.make('rscfed(literal=True)', toy.task(model))
    state = method.init(toy.key(0), federation)
    return jax.eval_shape(
        method.round, state, federation, jnp.int32(0), KEY)[1]
  assert 'counted_steps' in reported('conv')
  assert 'counted_steps' not in reported('linear')
