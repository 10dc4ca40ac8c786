"""MOON: what it reduces to, its contrast, and two rounds by hand."""
from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods, models
from fedjax_ssl.core import optimizers, tree
from fedjax_ssl.methods import moon
from tests import toy

KEY = toy.key(5)
RATE, EPOCHS, MU, HEAT = 0.2, 2, 2.0, 0.5


def _rounds(text, count, task):
  federation, _ = toy.federation()
  made = methods.make(text, task)
  state = made.init(KEY, federation)
  run = jax.jit(made.round)
  for i in range(count):
    state, metrics = run(state, federation, jnp.int32(i),
                         jax.random.fold_in(KEY, i))
  return state, metrics


def test_without_weight_it_is_fedavg():
  plain, _ = _rounds('fedavg(keep_local=True)', 2, toy.task('conv'))
  ours, metrics = _rounds('moon(mu=0)', 2, toy.task('conv'))
  chex.assert_trees_all_close(ours, plain, rtol=1e-5, atol=1e-6)
  assert metrics['contrastive_loss'].total > 0
  other, _ = _rounds('moon(mu=5)', 2, toy.task('conv'))
  gap = tree.subtract(other.server.model.params, plain.server.model.params)
  assert tree.global_norm(gap) > 1e-3


def test_the_contrast():
  a, b = jnp.array([[1.0, 0.0]]), jnp.array([[0.0, 2.0]])
  half = moon.contrast(a, b, b)
  np.testing.assert_allclose(half, np.log(2), rtol=1e-6)
  near, far = moon.contrast(a, a, b), moon.contrast(a, b, a)
  np.testing.assert_allclose(near, np.log1p(np.exp(-1 / HEAT)), rtol=1e-5)
  np.testing.assert_allclose(far, np.log1p(np.exp(1 / HEAT)), rtol=1e-5)
  slope = jax.grad(lambda z: moon.contrast(z, a, b).sum())(0 * a)
  chex.assert_tree_all_finite(slope)


@pytest.mark.parametrize('name, norm', [
    ('linear', None), ('mlp(width=5)', None), ('cnn(width=2)', 'batch')])
def test_features_are_what_the_head_reads(name, norm):
  """Logits follow from them by the last layer of the parameters."""
  model = models.make(name, num_classes=3, norm=norm, input_shape=(8, 8, 1))
  variables = model.init(KEY)
  inputs = jax.random.normal(KEY, (4, 8, 8, 1))
  assert model.features is not None and model.features_train is not None
  last = sorted(k for k in variables.params if k.startswith('Dense'))[-1]
  head = variables.params[last]
  assert model.head is not None and model.head() == (last, 'kernel')
  def logits(features):
    return features @ head['kernel'] + head['bias']
  features = jax.jit(model.features)(variables, inputs)
  np.testing.assert_allclose(
      logits(features), jax.jit(model.apply)(variables, inputs), rtol=2e-4,
      atol=1e-5)
  trained, given, stats = jax.jit(model.features_train)(
      variables, inputs, jnp.ones(4))
  chex.assert_trees_all_close(
      (given, stats), jax.jit(model.apply_train)(
          variables, inputs, jnp.ones(4)), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(logits(trained), given, rtol=2e-4, atol=1e-5)


def _forward(p, x):
  hidden = x @ p[0] + p[1]
  return hidden, np.maximum(hidden, 0)


def _cosine(a, b):
  return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(
      b, axis=-1)


def _gradient(p, received, last, x, y):
  """Of cross entropy and the contrast, by hand."""
  hidden, z = _forward(p, x)
  logits = z @ p[2] + p[3]
  e = np.exp(logits - logits.max(-1, keepdims=True))
  d = (e / e.sum(-1, keepdims=True) - np.eye(toy.NUM_CLASSES)[y]) / len(y)
  dz = d @ p[2].T
  others = [_forward(q, x)[1] for q in (last, received)]
  gap = _cosine(z, others[0]) - _cosine(z, others[1])
  outer = 1 / (1 + np.exp(-gap / HEAT)) / HEAT / len(y)
  size = np.linalg.norm(z, axis=-1, keepdims=True)
  def slope(other):
    unit = other / np.linalg.norm(other, axis=-1, keepdims=True)
    return (unit - _cosine(z, other)[:, None] * z / size) / size
  dz = dz + MU * outer[:, None] * (slope(others[0]) - slope(others[1]))
  dh = dz * (hidden > 0)
  return x.T @ dh, dh.sum(0), z.T @ d, d.sum(0)


def test_two_rounds_by_hand():
  """Full batches and plain descent on a network with one hidden layer."""
  federation, _ = toy.federation()
  task = dataclasses.replace(
      toy.task(),
      model=models.make('mlp(width=16, depth=1)', num_classes=toy.NUM_CLASSES,
                        input_shape=(toy.SIDE, toy.SIDE, 1)),
      optimizer=optimizers.make('sgd', learning_rate=RATE),
      weak=lambda key, x: x, labeled_batch=8, local_epochs=EPOCHS,
      cohort_size=toy.NUM_CLIENTS)
  def numbers(model):
    first, head = (model.params[k] for k in ('Dense_0', 'Dense_1'))
    return [np.asarray(x, np.float64) for x in (
        first['kernel'], first['bias'], head['kernel'], head['bias'])]
  text = f'moon(mu={MU}, temperature={HEAT})'
  made = methods.make(text, task)
  x = numbers(made.init(KEY, federation).server.model)
  last = [x] * toy.NUM_CLIENTS
  images = np.asarray(toy.preprocess(
      jnp.asarray(federation.train.inputs))).reshape(
      len(federation.train.labels), -1).astype(np.float64)
  labels = np.asarray(federation.train.labels)
  for _ in range(2):
    after = list(last)
    for i, n in enumerate(toy.LABELED):
      rows = np.asarray(federation.clients.labeled[i][:n])
      p = x
      for _ in range(EPOCHS if n else 0):
        p = [a - RATE * g for a, g in zip(p, _gradient(
            p, x, last[i], images[rows], labels[rows]))]
      after[i] = p if n else last[i]
    share = np.array(toy.LABELED) / sum(toy.LABELED)
    x = [sum(s * after[i][j] for i, s in enumerate(share) if s)
         for j in range(4)]
    last = after
  got, _ = _rounds(text, 2, task)
  for ours, theirs in zip(numbers(got.server.model), x):
    np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-5)
