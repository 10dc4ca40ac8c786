"""ProxyFL: its two parts against loops, and what it is without them."""
from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import methods, models
from fedjax_ssl.core import tree
from fedjax_ssl.methods import proxyfl
from fedjax_ssl.models import last_layer
from tests import toy
from tests.methods.averaging_test import one_round
from tests.methods.updates import change, same, update
from tests.thorough import wider

KEY = toy.key(3)
CLASSES, WIDTH = 4, 5
OFF = 'tuning_epochs=0, contrast_weight=0.0'


def _draw(*shape, key=0):
  return np.asarray(jax.random.normal(toy.key(key), shape), np.float64)


def _probabilities(count):
  return np.array(jax.nn.softmax(2 * _draw(count, CLASSES, key=5)))


def _unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_the_contrast_against_a_loop():
  rows = 12
  features, proxies = _draw(rows, WIDTH), _draw(CLASSES, WIDTH, key=1)
  p, prior = _probabilities(rows), np.array([.4, .3, .2, .1], np.float32)
  p[3] = prior  # No class is likelier than it is anyway.
  sure = np.array([1., 0.] * 6)
  mask = np.array([1.] * 10 + [0.] * 2)
  f, q = _unit(features), _unit(proxies)
  sets = [{int(p[i].argmax())} if sure[i] else {
      c for c in range(CLASSES) if p[i, c] > prior[c]} for i in range(rows)]
  assert not sets[3] and max(map(len, sets)) > 1
  want = []
  for i in range(rows):
    near = f[i] @ sum((q[c] * (1 if sure[i] else p[i, c]) for c in sets[i]),
                      start=np.zeros(WIDTH))
    far = [f[i] @ f[j] for j in range(rows)
           if not sets[i] & sets[j] and mask[j] and f[i] @ f[j] > 0]
    want.append(-np.log(np.exp(near) / (np.exp(near) + np.exp(far).sum())))
  got = proxyfl.contrast(features, proxies, p, sure, prior, mask)
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
  assert np.ptp(want) > .5


def test_sure_rows_of_one_class_have_no_negatives():
  features, proxies = _draw(6, WIDTH), _draw(CLASSES, WIDTH, key=1)
  p = np.tile([.97, .01, .01, .01], (6, 1))
  def loss(features):
    return proxyfl.contrast(features, proxies, p, jnp.ones(6),
                            np.full(CLASSES, .25), jnp.ones(6)).sum()
  value, slope = jax.value_and_grad(loss)(jnp.asarray(features, jnp.float32))
  assert value == 0
  chex.assert_trees_all_equal(slope, jnp.zeros_like(slope))


def test_the_contrast_of_zeros_has_a_slope():
  slope = jax.grad(lambda x: proxyfl.contrast(
      x, x[:CLASSES], _probabilities(6), jnp.zeros(6), np.full(CLASSES, .25),
      jnp.ones(6)).sum())(jnp.zeros((6, WIDTH)))
  chex.assert_tree_all_finite(slope)


def _gaps(a, b):
  return np.linalg.norm(a[:, None] - b, axis=-1)


def test_tuning_against_a_loop():
  """All proxies in one batch, so that no order is drawn."""
  clients, rate, epochs = 3, .5, 4
  sent = _draw(clients, CLASSES, WIDTH)
  mean = sent[:2].mean(0)
  gaps = _gaps(mean, mean) + 1e9 * np.eye(CLASSES)
  wide = gaps.min(1).max()
  np.testing.assert_allclose(proxyfl.margin(mean), wide, rtol=1e-5)
  np.testing.assert_allclose(proxyfl.margin(mean, .3), .3, rtol=1e-6)
  rows = sent[:2].reshape(-1, WIDTH)
  labels = np.tile(np.arange(CLASSES), 2)
  now = mean
  for _ in range(epochs):
    far = _gaps(rows, now)
    e = np.exp(-(far + wide * np.eye(CLASSES)[labels]))
    # The loss falls with the distance to the others.
    slope = np.eye(CLASSES)[labels] - e / e.sum(-1, keepdims=True)
    unit = (now - rows[:, None]) / far[..., None]
    now = now - rate * (slope[..., None] * unit).mean(0)
  got = proxyfl.tuned(mean, sent, jnp.array([2., 1., 0.]), KEY, epochs=epochs,
                      rate=rate, batch=2 * CLASSES)
  np.testing.assert_allclose(got, now, rtol=1e-3, atol=1e-4)
  assert np.abs(now - mean).max() > .05


@pytest.mark.parametrize('knobs, heard', [
    ({'rate': 0.0}, 1.0), ({'epochs': 0}, 1.0), ({}, 0.0)])
def test_tuning_that_leaves_the_mean(knobs, heard):
  mean, sent = _draw(CLASSES, WIDTH), _draw(3, CLASSES, WIDTH, key=1)
  mean = jnp.asarray(mean, jnp.float32)
  got = proxyfl.tuned(mean, sent, jnp.full(3, heard), KEY, **knobs)
  np.testing.assert_array_equal(got, mean)


def test_equal_proxies_of_all_clients_are_pushed_apart():
  """Each global one is where it should be; the margin asks for more."""
  mean = jnp.asarray(_draw(CLASSES, WIDTH), jnp.float32)
  sent = jnp.tile(mean, (3, 1, 1))
  got = proxyfl.tuned(mean, sent, jnp.ones(3), KEY, epochs=5, rate=.05)
  chex.assert_tree_all_finite(got)
  before, after = (_gaps(np.asarray(x), np.asarray(x)) for x in (mean, got))
  others = ~np.eye(CLASSES, dtype=bool)
  assert after[others].min() > before[others].min()
  assert after.sum() > before.sum()


def test_equal_proxies_far_apart_stay_without_a_margin():
  """Their loss is nearly 0, and so is its slope."""
  mean = 20 * jnp.eye(CLASSES, WIDTH)
  got = [proxyfl.tuned(mean, jnp.tile(mean, (3, 1, 1)), jnp.ones(3), KEY,
                       epochs=5, rate=.05, max_margin=most) for most in (0, 50)]
  np.testing.assert_allclose(got[0], mean, atol=1e-6)
  assert not np.allclose(got[1], mean, atol=1e-3)


def test_who_sent_nothing_changes_no_bit():
  """Wherever it stands, and whatever stands there."""
  mean, sent = _draw(CLASSES, WIDTH), _draw(4, CLASSES, WIDTH, key=1)
  other = np.stack([sent[0], np.full_like(mean, np.nan), sent[1], sent[2]])
  a = proxyfl.tuned(mean, sent, jnp.array([1., 2., 1., 0.]), KEY)
  b = proxyfl.tuned(mean, other, jnp.array([1., 0., 2., 1.]), KEY)
  np.testing.assert_array_equal(a, b)
  assert not np.allclose(a, mean, atol=1e-3)


@pytest.mark.parametrize('scale', [1e6, 1e22, 1e38])
def test_one_hostile_clients_proxies_do_not_stop_tuning(scale):
  mean, sent = _draw(CLASSES, WIDTH), _draw(4, CLASSES, WIDTH, key=1)
  sent[1] *= scale / np.abs(sent[1]).max()
  mean = jnp.asarray(mean, jnp.float32)
  got = proxyfl.tuned(mean, sent, jnp.ones(4), KEY, epochs=20)
  chex.assert_tree_all_finite(got)
  # An epoch has CLASSES steps, 4 clients' proxies in batches of 4, and a step
  # moves a proxy by the rate at most.
  assert 0 < np.abs(got - mean).max() <= 20 * CLASSES * .005


@pytest.mark.parametrize('model', ['conv', *wider('linear')])
@pytest.mark.parametrize('labeler, other', [
    ('blended', 'sage(threshold=0.45)'), *wider(
        ('local', 'fixmatch(threshold=0.45)'), (
            'global', "fixmatch(labeler='global', weak_in_batch=True, "
            'threshold=0.45)'))])
def test_without_its_parts_it_is_the_method_that_labels(model, labeler, other):
  text = f"proxyfl(labeler='{labeler}', threshold=0.45, {OFF})"
  ours, theirs = (change(x, model=model, local_steps=5)
                  for x in (text, other))
  chex.assert_trees_all_close(ours, theirs, rtol=2e-4, atol=1e-5)


def test_without_weight_and_parts_it_learns_from_labels_alone():
  ours, theirs = (change(x, local_steps=5) for x in (
      f'proxyfl(unlabeled_weight=0.0, threshold=0.45, {OFF})',
      'fixmatch(threshold=1.1)'))
  chex.assert_trees_all_equal(ours, theirs)


@pytest.mark.parametrize('model', ['linear', *wider('conv')])
def test_without_its_parts_it_learns_global_labels_of_which_either_is_sure(
    model):
  """As SAGE where no gap is so small that the local label counts.

  FixMatch with global labels leaves out the rows of which only the local model
  is sure.
  """
  ours, sage, fixmatch = (
      update(text, model=model, local_steps=5) for text in (
          f'proxyfl(threshold=0.5, {OFF})',
          'sage(threshold=0.5, half_gap=1e-9)',
          "fixmatch(threshold=0.5, labeler='global', weak_in_batch=True)"))
  chex.assert_trees_all_close(ours.message, sage.message, rtol=2e-4,
                              atol=1e-5)
  assert sage.metrics['local_rate'].total == 0
  rates = [x.metrics['mask_rate'].total for x in (ours, sage, fixmatch)]
  assert rates[0] == rates[1] > rates[2] > 0
  gap = tree.global_norm(tree.subtract(ours.message, fixmatch.message))
  assert gap > 1e-3


# The own model says 0 and the received one 1, with these confidences. Wanted is
# the probability of 0 in the target, or None for a row that does not count.
_SURE = [(.99, .96), (.99, .6), (.6, .99), (.96, .99), (.7, .6)]


@pytest.mark.parametrize('labeler, want', [
    ('local', [1, 1, None, 1, None]), ('global', [0, None, 0, 0, None]),
    ('either', [0, 0, 0, 0, None]), ('surer', [1, 1, 0, 0, None]),
    ('blended', [2**-.6, 2**-7.8, 0, 2**-.6, None])])
def test_who_labels(labeler, want):
  own, received = (jnp.log(jnp.array([p if first else p[::-1] for p in (
      (c, 1 - c) for c in confidences)])) for first, confidences in zip(
          (True, False), zip(*_SURE, strict=True), strict=True))
  targets, accepted = proxyfl.labels(own, received, labeler=labeler)
  np.testing.assert_array_equal(accepted, [x is not None for x in want])
  np.testing.assert_allclose(targets.sum(-1), 1, rtol=1e-6)
  for target, share in zip(targets[:, 0], want, strict=True):
    if share is not None:
      np.testing.assert_allclose(target, share, atol=1e-4)


def test_every_row_counts_alike_with_the_global_label():
  a, b = (change(f"proxyfl(labeler='{x}', threshold=0.0, {OFF})",
                 local_steps=6) for x in ('either', 'global'))
  np.testing.assert_array_equal(a, b)


def test_tuning_moves_the_last_weights_alone():
  plain, tuned = (one_round(
      f'proxyfl(contrast_weight=0.0, tuning_epochs={epochs})',
      'conv')[1].server.model for epochs in (0, 5))
  heads = [x.params['Dense_0'].pop('kernel') for x in (plain, tuned)]
  chex.assert_trees_all_equal(plain, tuned)
  assert np.abs(heads[0] - heads[1]).max() > 1e-4


def test_the_contrast_trains_its_projections():
  before, after, metrics = one_round('proxyfl(tuning_epochs=0)', 'conv',
                                     seed=1)
  for name in ('features', 'proxies', 'network'):
    moved = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), *(
        x.server.model.params[name] for x in (before, after)))
    assert min(jax.tree.leaves(moved)) > 0
  assert metrics['contrastive_loss'] > 0
  plain = toy.task('conv').model
  inputs = jnp.ones((2, toy.SIDE, toy.SIDE, 1))
  model = after.server.model
  chex.assert_trees_all_equal(
      proxyfl.projected(plain).apply(model, inputs),
      plain.apply(model._replace(params=model.params['network']), inputs))


def test_true_labels_enter_the_contrast():
  """And the received model is not asked about the rows that have them."""
  texts = [f'proxyfl(tuning_epochs=0, true_labels={x})' for x in (False, True)]
  a, b = map(change, texts)
  assert not np.allclose(a, b, atol=1e-6)
  asked, told = map(update, texts)
  forward, backward, fewer = (float(x) for x in (
      asked.metrics['forward_passes'], asked.metrics['backward_passes'],
      told.metrics['forward_passes']))
  # L + 2 U rows train. Of the L + U that the received model sees, U are left.
  unlabeled = fewer - backward
  labeled = backward - 2 * unlabeled
  assert labeled > 0
  np.testing.assert_allclose(forward, 2 * labeled + 3 * unlabeled)


@pytest.mark.parametrize('threshold', [0.0, *wider(1.1)])
def test_the_prior_counts_the_last_epoch(threshold):
  """Batches of all rows, so an epoch has one step; nothing is learnt."""
  federation, _ = toy.federation()
  task = toy.task(
      weak=same, labeled_batch=8, unlabeled_batch=12, local_epochs=2,
      cohort_size=toy.NUM_CLIENTS, optimizer=lambda round_: optax.sgd(1e-20))
  method = methods.make(f'proxyfl(threshold={threshold})', task)
  state = method.init(KEY, federation)
  np.testing.assert_allclose(state.server.prior, 1 / toy.NUM_CLASSES)
  after, _ = jax.jit(method.round)(state, federation, jnp.int32(0), KEY)
  clients, train = federation.clients, federation.train
  found = []
  assert method.predict is not None
  for i, (n, m) in enumerate(zip(toy.LABELED, toy.UNLABELED, strict=True)):
    found += [*np.asarray(train.labels)[np.asarray(clients.labeled)[i, :n]]]
    if m and threshold < 1:
      rows = np.asarray(clients.unlabeled)[i, :m]
      found += [*np.asarray(method.predict(
          state.server, train.inputs[rows])).argmax(-1)]
  share = np.bincount(found, minlength=toy.NUM_CLASSES) / len(found)
  np.testing.assert_allclose(
      after.server.prior, .99 / toy.NUM_CLASSES + .01 * share, rtol=1e-6)


def test_it_needs_a_network_that_names_its_last_layer():
  task = toy.task()
  nameless = dataclasses.replace(
      task, model=task.model._replace(head=None))
  with pytest.raises(ValueError, match='head'):
    methods.make('proxyfl', nameless)
  methods.make(f'proxyfl({OFF})', nameless)


def test_a_path_deep_in_a_network():
  model = models.make('resnet8(width=4)', num_classes=3, input_shape=(8, 8, 3))
  assert model.head is not None
  params = jax.eval_shape(model.init, KEY).params
  assert last_layer.at(params, model.head()).shape == (16, 3)
