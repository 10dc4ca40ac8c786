"""Clients with and without labels: warm-up, FedIRM and Fed-Consist."""
from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import sampling, tree
from fedjax_ssl.core.types import State
from fedjax_ssl.methods import fedirm, roles
from tests import toy
from tests.methods.rscfed_test import same, UNLABELED_CLIENT, update_of

KEY = jax.random.key(5)
WITH_LABELS = {i for i, n in enumerate(toy.LABELED) if n}


@functools.lru_cache
def runs(text, **changes):
  """(state before, jitted round) with everyone in the cohort."""
  federation, _ = toy.federation()
  method = methods.make(text, toy.task(cohort_size=toy.NUM_CLIENTS, **changes))
  return method.init(jax.random.key(0), federation), jax.jit(method.round)


def one_round(text, round_=0, **changes):
  state, run = runs(text, **changes)
  federation, _ = toy.federation()
  state = state._replace(round=jnp.int32(round_))
  after, metrics = run(state, federation, jnp.int32(round_), KEY)
  return state, after, toy.means(metrics)


@pytest.mark.parametrize('size', [2, 5])
def test_a_warmup_is_of_clients_with_labels_in_one_group(size):
  federation, _ = toy.federation()
  sampler = roles.after_warmup(sampling.groups(3, size), 4)
  drawn = set()
  for seed in range(12):
    key = jax.random.key(seed)
    cohort = sampler(State((), (), jnp.int32(3)), federation, key)
    assert not cohort.active[1:].any()
    ids = np.asarray(cohort.ids[0])[np.asarray(cohort.active[0])].tolist()
    assert len(set(ids)) == len(ids) == min(size, len(WITH_LABELS))
    assert set(ids) <= WITH_LABELS
    drawn |= set(ids)
    after = sampler(State((), (), jnp.int32(4)), federation, key)
    chex.assert_trees_all_equal(
        after, sampling.groups(3, size)(None, federation, key))
  assert drawn == WITH_LABELS


def test_rounds_of_a_warmup_are_a_share_of_the_run_rounded_up():
  for share, rounds, want in ((0.007, 1000, 7), (0.1, 200, 20), (0.1, 8, 1),
                              (0.0, 50, 0), (1.0, 9, 9)):
    assert roles.warmup_rounds(toy.task(num_rounds=rounds), share) == want


def test_a_warmup_leaves_the_other_clients_as_they_are():
  before, after, metrics = one_round('fedirm')
  assert metrics['num_participants'] == len(WITH_LABELS)
  assert metrics['labeled_share'] == 1
  rest = np.array(sorted({*range(toy.NUM_CLIENTS)} - WITH_LABELS))
  chex.assert_trees_all_equal(tree.take(before.memory, rest),
                              tree.take(after.memory, rest))
  _, after, metrics = one_round('fedirm', round_=1)
  assert metrics['num_participants'] == 5
  assert after.memory.steps[UNLABELED_CLIENT] > 0


def test_gradients_are_clipped_to_a_norm():
  grads = {'a': jnp.array([3.0, 0.0]), 'b': jnp.array([[4.0]])}
  np.testing.assert_allclose(tree.global_norm(roles.clip(grads, 2.5)), 2.5)
  chex.assert_trees_all_close(roles.clip(grads, 5.0), grads, rtol=1e-6)
  chex.assert_trees_all_equal(roles.clip(grads, float('inf')), grads)
  zero = tree.zeros_like(grads)
  chex.assert_trees_all_equal(roles.clip(zero, 2.5), zero)


def test_relations_are_the_mean_of_the_labeled_clients_matrices():
  """At a rate of 0, full batches: all by hand, unseen classes uniform."""
  state, after, _ = one_round(
      'fedirm', weak=same, labeled_batch=8,
      optimizer=lambda round_: optax.sgd(0.0))
  params = state.server.model.params
  layer, = params
  federation, _ = toy.federation()
  matrices, unseen = [], 0
  for i in sorted(WITH_LABELS):
    rows = np.asarray(federation.clients.labeled)[i, :toy.LABELED[i]]
    x = np.asarray(federation.train.inputs)[rows].reshape(len(rows), -1)
    logits = (x / 255 - 0.4) @ params[layer]['kernel'] + params[layer]['bias']
    labels = np.asarray(federation.train.labels)[rows]
    matrix = np.full((toy.NUM_CLASSES,) * 2, 1 / toy.NUM_CLASSES)
    for c in set(labels.tolist()):
      row = np.exp(logits[labels == c].mean(0) / 2)
      matrix[c] = row / row.sum()
    unseen += toy.NUM_CLASSES - len(set(labels.tolist()))
    matrices.append(matrix)
  assert unseen > 0
  np.testing.assert_allclose(after.server.relation, np.mean(matrices, 0),
                             atol=1e-5)
  chex.assert_trees_all_close(after.server.model, state.server.model)


def test_relations_are_kept_while_nobody_tells():
  server, update = update_of(UNLABELED_CLIENT, 'fedirm')
  assert not update.message.relation.any()
  known = server._replace(relation=jnp.full((3, 3), 1 / 3))
  aggregate = methods.make('fedirm', toy.task()).aggregate
  after, _ = aggregate(known, update.message, None, None, KEY)
  chex.assert_trees_all_equal(after.relation, known.relation)
  assert tree.global_norm(tree.subtract(after.model, known.model)) > 0


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
  a, b = (update_of(UNLABELED_CLIENT, f'fedirm(passes={n})')[1]
          for n in (1, 11))
  chex.assert_trees_all_equal(a, b)  # The bar of 2 is above log 3.
  c = update_of(UNLABELED_CLIENT, 'fedirm(passes=3, max_entropy=1.0)')[1]
  assert c.metrics['mask_rate'].total < a.metrics['mask_rate'].total


@pytest.mark.parametrize('text', [
    'fedirm(scale=0.0)', 'fed_consist(threshold=1.1)',
    'fed_consist(unlabeled_weight=0.0)'])
def test_without_its_loss_an_unlabeled_client_stays(text):
  _, update = update_of(UNLABELED_CLIENT, text)
  assert tree.global_norm(update.message.model if text.startswith('fedirm')
                          else update.message) == 0


@pytest.mark.parametrize('name', ['fedirm', 'fed_consist'])
def test_models_count_alike_but_for_the_weight_of_labels(name):
  federation, _ = toy.federation()
  for weight in (1.0, 4.0):
    say = jax.vmap(lambda s, w=weight: roles.say(s, w))(federation.clients)
    want = [(weight if a else 1.0) if a + b else 0.0
            for a, b in zip(toy.LABELED, toy.UNLABELED, strict=True)]
    np.testing.assert_array_equal(say, want)
    _, update = update_of(1, f'{name}(labeled_weight={weight})')
    assert update.weight == weight


def test_fed_consist_learns_its_own_guesses_on_strong_views():
  """A step of one full batch is that of FixMatch at the scaled rate."""
  knobs = {'weak': same, 'unlabeled_batch': 12, 'local_steps': 1}
  _, update = update_of(
      UNLABELED_CLIENT, 'fed_consist(threshold=0.4, unlabeled_rate=0.25)',
      optimizer=lambda round_: optax.sgd(0.4), **knobs,
      strong=lambda key, x: 255 - x)
  _, other = update_of(
      UNLABELED_CLIENT, 'fixmatch(threshold=0.4)',
      optimizer=lambda round_: optax.sgd(0.1), **knobs,
      strong=lambda key, x: 255 - x)
  assert tree.global_norm(update.message) > 0
  chex.assert_trees_all_close(update.message, other.message, rtol=1e-4,
                              atol=1e-7)


def test_a_client_with_both_kinds_adds_the_gradients():
  """Client 0 has 4 labels and 9 other rows; no weight leaves the labels."""
  knobs = {'weak': same, 'labeled_batch': 4, 'unlabeled_batch': 9,
           'local_steps': 1, 'strong': lambda key, x: 255 - x,
           'optimizer': lambda round_: optax.sgd(0.1)}
  both, labels, double = (
      update_of(0, f'fed_consist(threshold=0.0, unlabeled_weight={w})',
                **knobs)[1].message for w in (1.0, 0.0, 2.0))
  once, twice = tree.subtract(both, labels), tree.subtract(double, labels)
  assert tree.global_norm(once) > 0
  chex.assert_trees_all_close(twice, tree.scale(once, 2.0), rtol=1e-3,
                              atol=1e-6)


@pytest.mark.parametrize('text, message', [
    ('fedirm(passes=0)', 'passes'), ('fedirm(temperature=0.0)', 'temperature'),
    ('fedirm(ramp=2.0)', 'ramp'), ('fedirm(scale=-1.0)', 'scale'),
    ('fed_consist(threshold=-0.1)', 'threshold'),
    ('fed_consist(labeled_weight=-1.0)', 'labeled_weight')])
def test_bad_knobs_are_refused_in_one_line(text, message):
  with pytest.raises(ValueError, match=message) as error:
    methods.make(text, toy.task())
  assert '\n' not in str(error.value)
