"""Clients with and without labels: warm-up, FedIRM and Fed-Consist."""
from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import client_weights, local_training, sampling, tree
from fedjax_ssl.core.types import Client, State
from fedjax_ssl.methods import fedirm
from fedjax_ssl.methods.parts import labeled_clients
from tests import toy
from tests.methods.rscfed_test import same, UNLABELED_CLIENT, updater
from tests.methods.updates import KNOWN, lowered, update
from tests.thorough import wider

KEY = toy.key(5)
WITH_LABELS = {i for i, n in enumerate(toy.LABELED) if n}


def adam(round_):
  del round_
  return optax.adam(1e-2)


@pytest.mark.parametrize('size', [2, 5])
def test_a_warmup_is_of_clients_with_labels_in_one_group(size):
  federation, _ = toy.federation()
  sampler = labeled_clients.after_warmup(sampling.groups(3, size), 4)
  drawn = set()
  for seed in range(12):
    key = toy.key(seed)
    warm, done = (State((), (), jnp.int32(i)) for i in (3, 4))
    cohort = sampler(warm, federation, key)
    assert not cohort.active[1:].any()
    ids = np.asarray(cohort.ids[0])[np.asarray(cohort.active[0])].tolist()
    assert len(set(ids)) == len(ids) == min(size, len(WITH_LABELS))
    assert set(ids) <= WITH_LABELS
    drawn |= set(ids)
    chex.assert_trees_all_equal(
        sampler(done, federation, key),
        sampling.groups(3, size)(done, federation, key))
  assert drawn == WITH_LABELS


def test_rounds_of_a_warmup_are_a_share_of_the_run_rounded_up():
  for share, rounds, want in ((0.007, 1000, 7), (0.105, 200, 21), (0.1, 8, 1),
                              (0.0, 50, 0), (1.0, 9, 9)):
    assert labeled_clients.warmup_rounds(toy.task(schedule_rounds=rounds),
                                      share) == want


def test_a_warmup_leaves_the_other_clients_as_they_are():
  federation, _ = toy.federation()
  method = methods.make('fedirm', toy.task(cohort_size=toy.NUM_CLIENTS))
  before = method.init(toy.key(0), federation)
  run = jax.jit(method.round)
  warm, metrics = run(before, federation, jnp.int32(0), KEY)
  means = toy.means(metrics)
  assert means['num_participants'] == len(WITH_LABELS)
  assert means['labeled_share'] == 1
  rest = np.array(sorted({*range(toy.NUM_CLIENTS)} - WITH_LABELS))
  chex.assert_trees_all_equal(tree.take(before.memory, rest),
                              tree.take(warm.memory, rest))
  after, metrics = run(warm._replace(round=jnp.int32(1)), federation,
                       jnp.int32(1), KEY)
  assert toy.means(metrics)['num_participants'] == 5
  assert after.memory.steps[UNLABELED_CLIENT] > 0
  # Matrices have rows of sum 1, whoever told.
  np.testing.assert_allclose(after.server.relation.sum(1), 1, rtol=1e-5)


def test_gradients_are_clipped_to_a_norm():
  grads = {'a': jnp.array([3.0, 0.0]), 'b': jnp.array([[4.0]])}
  np.testing.assert_allclose(tree.global_norm(local_training.clip(grads, 2.5)),
                             2.5)
  chex.assert_trees_all_close(local_training.clip(grads, 5.0), grads, rtol=1e-6)
  chex.assert_trees_all_equal(local_training.clip(grads, float('inf')), grads)
  zero = tree.zeros_like(grads)
  chex.assert_trees_all_equal(local_training.clip(zero, 2.5), zero)


@pytest.mark.parametrize('size', [1e-30, 1e-3, 1.0, 1e19, 3e19, 1e37, 1e38])
def test_gradients_of_any_size_are_never_longer_than_the_norm(size):
  grads = [jnp.full(2, 0.6 * size), jnp.full((2, 1), 0.8 * size)]
  got = np.concatenate([np.ravel(np.float64(x)) for x in local_training.clip(
      grads, 2.5)])
  want = np.repeat([0.6, 0.8], 2) * min(size, 2.5 / 2**0.5)
  np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_does_not_pass_for_a_finite_one(value):
  got = local_training.clip([jnp.array([value, 1.0]), jnp.ones(2)], 2.5)
  assert not tree.all_finite(got)


def still(round_):
  del round_
  return optax.sgd(0.0)


def test_relations_are_those_of_the_labels_and_uniform_for_unseen_classes():
  """Full batches at a rate of 0: all by hand."""
  server, run = updater('fedirm', weak=same, labeled_batch=8, optimizer=still)
  layer, = server.model.params
  w, b = (server.model.params[layer][x] for x in ('kernel', 'bias'))
  federation, _ = toy.federation()
  unseen = 0
  for i in sorted(WITH_LABELS):
    rows = np.asarray(federation.clients.labeled)[i, :toy.LABELED[i]]
    x = np.asarray(federation.train.inputs)[rows].reshape(len(rows), -1)
    logits = (x / 255 - 0.4) @ w + b
    labels = np.asarray(federation.train.labels)[rows]
    matrix = np.full((toy.NUM_CLASSES,) * 2, 1 / toy.NUM_CLASSES)
    for c in set(labels.tolist()):
      row = np.exp(logits[labels == c].mean(0) / 2)
      matrix[c] = row / row.sum()
    unseen += toy.NUM_CLASSES - len(set(labels.tolist()))
    update = run(i)
    np.testing.assert_allclose(update.counts, matrix, atol=1e-5)
    assert tree.global_norm(update.message) == 0
  assert unseen > 0
  assert not run(UNLABELED_CLIENT).counts.any()


def test_the_server_keeps_the_mean_of_those_that_told():
  aggregate = methods.make('fedirm', toy.task()).aggregate
  assert aggregate is not None
  model = toy.task().model.init(KEY)
  told = jax.nn.softmax(jax.random.normal(KEY, (2, 3, 3)))
  first = fedirm.Server(model, jnp.eye(3))
  def after(mean):
    still = tree.zeros_like(model)
    return aggregate(first, (still, mean), None, None, KEY)[0].relation
  # Two of five clients have labels: the pass averages over all five.
  np.testing.assert_allclose(after(told.sum(0) / 5), told.mean(0), rtol=1e-5)
  np.testing.assert_array_equal(after(jnp.zeros((3, 3))), jnp.eye(3))


def test_the_gate_asks_for_confidence_and_little_entropy():
  p = np.array([[.9, .05, .05], [.4, .3, .3], [.34, .33, .33]])
  logits = jnp.log(p)
  entropy = -(p * np.log(p)).sum(1)
  for confidence, most in ((0.3, 2.0), (0.35, 2.0), (0.3, 1.09), (0.5, 0.4)):
    got = fedirm.certain(logits, logits, confidence=confidence,
                         max_entropy=most)
    np.testing.assert_array_equal(
        got, (p.max(1) >= confidence) & (entropy < most))
  # The mean over the passes is judged by its own entropy.
  got = fedirm.certain(logits, logits[::-1], confidence=0.0, max_entropy=0.5)
  np.testing.assert_array_equal(got, [0, 0, 1])


def test_a_bar_above_the_largest_entropy_makes_passes_vain():
  # The bar of 2 is above log 3.
  assert lowered('fedirm(passes=1)') == lowered('fedirm(passes=11)')
  few, many = (len(lowered(f'fedirm(passes={n}, max_entropy=1.0)'))
               for n in (1, 11))
  assert few < many


def relations_in_numpy(logits, labels):
  """float64[C, C] at a temperature of 2."""
  means = np.stack([logits[labels == c].mean(0) if (labels == c).any()
                    else np.zeros(3) for c in range(3)])
  rows = np.exp(means / 2)
  return rows / rows.sum(1, keepdims=True)


def test_an_unlabeled_step_of_fedirm_against_numpy():
  """A full batch without views: its loss in NumPy, derived by differences."""
  federation, _ = toy.federation()
  task = toy.task(weak=same, unlabeled_batch=16, local_steps=1,
                  optimizer=fast)
  method = methods.make(
      'fedirm(relation_weight=3.0, consistency_weight=2.0, scale=5.0, '
      'confidence=0.4, ramp=1.0)', task)
  state = method.init(toy.key(0), federation)
  told = jax.nn.softmax(2 * jax.random.normal(KEY, (3, 3)))
  teacher = task.model.init(toy.key(1))
  memory = tree.take(state.memory, UNLABELED_CLIENT)._replace(
      teacher=teacher, steps=jnp.int32(3))
  assert method.client_update is not None
  update = jax.jit(method.client_update)(
      state.server._replace(relation=told), Client(
          jnp.int32(UNLABELED_CLIENT),
          tree.take(federation.clients, UNLABELED_CLIENT), memory,
          federation.train, federation.validation, jnp.int32(5),
          jnp.int32(0)), KEY)
  layer, = teacher.params
  rows = np.asarray(federation.clients.unlabeled)[UNLABELED_CLIENT, :12]
  x = np.asarray(federation.train.inputs)[rows].reshape(12, -1) / 255 - 0.4
  def flat(model):
    return np.concatenate([np.ravel(np.asarray(
        model.params[layer][name], np.float64)) for name in ('kernel', 'bias')])
  def logits(numbers):
    return x @ numbers[:-3].reshape(-1, 3) + numbers[-3:]
  def p(z):
    return np.exp(z) / np.exp(z).sum(1, keepdims=True)
  start = flat(state.server.model)
  sure = p(logits(start)).max(1) >= 0.4
  labels = logits(start).argmax(1)
  assert 0 < sure.sum() < 12
  q, want = p(logits(flat(teacher))), np.asarray(told, np.float64)
  def loss(numbers):
    z = logits(numbers)
    own = relations_in_numpy(z[sure], labels[sure])
    gap = ((want - own) * np.log(want / own)).sum(1).mean() / 2
    return 5 * np.exp(-5 * (1 - 5 / 8)**2) * (
        2 * ((p(z) - q)**2).sum() / 16 + 3 * gap)  # 16 is the nominal batch.
  slope = np.array([loss(start + d) - loss(start - d)
                    for d in 1e-5 * np.eye(start.size)]) / 2e-5
  step = -0.4 * slope
  np.testing.assert_allclose(flat(update.message), step, atol=2e-6)
  np.testing.assert_allclose(
      flat(update.memory.teacher),
      0.75 * flat(teacher) + 0.25 * (start + step), atol=2e-6)
  assert update.memory.steps == 4 and not update.counts.any()


def test_fedirm_trains_two_views_of_a_labeled_row():
  found = update('fedirm', KNOWN).metrics
  for name in ('forward_passes', 'backward_passes'):
    assert found[name] == 2 * found['rows_used']


def test_by_default_fedirm_weighs_its_two_terms_at_most_once():
  """Under SGD a scale is a rate: with the authors' 15 nothing is learnt."""
  _, run = updater('fedirm', local_steps=1)
  metrics = toy.means(run(UNLABELED_CLIENT).metrics)
  terms = metrics['unlabeled_loss'] + metrics['relation_loss']
  assert 0 < metrics['train_loss'] <= 1.0001 * terms


def test_under_adam_the_scale_of_fedirm_cancels():
  def sent(scale):
    _, run = updater(f'fedirm(scale={scale})', local_steps=2, optimizer=adam)
    return run(UNLABELED_CLIENT).message.params
  chex.assert_trees_all_close(sent(0.1), sent(15.0), atol=1e-4)
  assert tree.global_norm(sent(0.1)) > 1e-2


@pytest.mark.parametrize('text', [
    'fedirm(scale=0.0, max_entropy=1.0)', *wider('fed_consist(threshold=1.1)')])
def test_without_its_loss_an_unlabeled_client_stays(text):
  update = updater(text)[1](UNLABELED_CLIENT)
  assert tree.global_norm(update.message) == 0


def test_models_count_alike_but_for_the_weight_of_labels():
  federation, _ = toy.federation()
  for weight in (1.0, 4.0):
    weights = jax.vmap(
        lambda s, w=weight: client_weights.client_weight(
            s, 'both', weighting='uniform', labeled_client_weight=w))(
            federation.clients)
    want = [(weight if a else 1.0) if a + b else 0.0
            for a, b in zip(toy.LABELED, toy.UNLABELED, strict=True)]
    np.testing.assert_array_equal(weights, want)


def negative(key, x):
  """A strong view that draws nothing."""
  del key
  return 255 - x


def slow(round_):
  del round_
  return optax.sgd(0.1)


def fast(round_):
  del round_
  return optax.sgd(0.4)


def test_fed_consist_learns_its_own_guesses_on_strong_views():
  """A step of one full batch is that of FixMatch at the scaled rate."""
  knobs = {'weak': same, 'unlabeled_batch': 12, 'local_steps': 1,
           'strong': negative}
  update = updater('fed_consist(threshold=0.4, unlabeled_rate=0.25)',
                   optimizer=fast, **knobs)[1](UNLABELED_CLIENT)
  other = updater('fixmatch(threshold=0.4)', optimizer=slow,
                  **knobs)[1](UNLABELED_CLIENT)
  assert tree.global_norm(update.message) > 0
  chex.assert_trees_all_close(update.message, other.message, rtol=1e-4,
                              atol=1e-7)


def test_a_client_with_both_kinds_adds_the_gradients():
  """Client 0 has 4 labels and 9 other rows: together, or one kind alone."""
  _, run = updater(
      'fed_consist(threshold=0.0, unlabeled_rate=1.0, labeled_weight=4.0)',
      weak=same, strong=negative, labeled_batch=4, unlabeled_batch=9,
      local_steps=1, optimizer=slow)
  both = run(0)
  labels = run(0, num_unlabeled=jnp.int32(0))
  others = run(0, num_labeled=jnp.int32(0))
  assert [float(u.weight) for u in (both, labels, others)] == [4, 4, 1]
  assert min(map(tree.global_norm, (labels.message, others.message))) > 0
  chex.assert_trees_all_close(
      both.message, tree.add(labels.message, others.message), atol=1e-6)


@pytest.mark.parametrize('text, message', [
    ('fedirm(passes=0)', 'passes'), ('fedirm(temperature=0.0)', 'temperature'),
    ('fedirm(ramp=2.0)', 'ramp'), ('fedirm(scale=-1.0)', 'scale'),
    ('fed_consist(threshold=-0.1)', 'threshold'),
    ('fed_consist(labeled_weight=-1.0)', 'labeled_weight')])
def test_bad_knobs_are_refused_in_one_line(text, message):
  with pytest.raises(ValueError, match=message) as error:
    methods.make(text, toy.task())
  assert '\n' not in str(error.value)


def test_the_official_profile_of_fedirm_has_the_released_scale():
  official, usual = "fedirm(profile='official')", 'fedirm'
  assert lowered(official) == lowered('fedirm(scale=15.0)')
  assert lowered(usual) == lowered('fedirm(scale=0.1)') != lowered(official)


def test_without_a_sure_row_there_is_nothing_to_match():
  federation, _ = toy.federation()
  method = methods.make(
      'fedirm(confidence=0.999999, scale=1, warmup=0, ramp=0)',
      toy.task(cohort_size=toy.NUM_CLIENTS))
  state, run = method.init(toy.key(0), federation), jax.jit(method.round)
  state, _ = run(state, federation, jnp.int32(0), KEY)
  means = toy.means(run(state, federation, jnp.int32(1), KEY)[1])
  assert means['mask_rate'] == 0 and means['relation_loss'] == 0
