"""SCAFFOLD: what it reduces to, and two rounds by hand."""
from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import optimizers, tree
from tests import toy
from tests.by_hand import softmax

KEY = toy.key(5)
RATE, EPOCHS = 0.5, 3


def _rounds(text, count, task, forget=False):
  federation, _ = toy.federation()
  made = methods.make(text, task)
  state = made.init(KEY, federation)
  run = jax.jit(made.round)
  for i in range(count):
    state, _ = run(state, federation, jnp.int32(i), jax.random.fold_in(KEY, i))
    if forget:
      state = state._replace(
          memory=tree.zeros_like(state.memory),
          server=state.server._replace(
              control=tree.zeros_like(state.server.control)))
  return state


def test_without_controls_it_is_fedavg():
  """They start at zero, and are set back after each round."""
  plain = _rounds("fedavg(weighting='uniform')", 2, toy.task())
  ours = _rounds('scaffold', 2, toy.task(), forget=True)
  chex.assert_trees_all_close(ours.server.model, plain.server.model, rtol=1e-6,
                              atol=1e-7)
  controlled = _rounds('scaffold', 2, toy.task())
  gap = tree.subtract(controlled.server.model, plain.server.model)
  assert tree.global_norm(gap) > 1e-3


def _gradient(w, b, x, y):
  d = (softmax(x @ w + b) - np.eye(toy.NUM_CLASSES)[y]) / len(y)
  return x.T @ d, d.sum(0)


def test_two_rounds_by_hand():
  """Full batches, plain descent: (x - y_i) / (K eta) as the paper writes it."""
  federation, _ = toy.federation()
  task = toy.task(
      optimizer=optimizers.make('sgd', learning_rate=RATE),
      weak=lambda key, x: x, labeled_batch=8, local_epochs=EPOCHS,
      cohort_size=toy.NUM_CLIENTS)
  first = methods.make('scaffold', task).init(KEY, federation)
  got = _rounds('scaffold', 2, task)

  layer = first.server.model.params['Dense_0']
  x = [np.array(layer['kernel'], np.float64), np.array(layer['bias'])]
  c = [np.zeros_like(p) for p in x]
  own = [[np.zeros_like(p) for p in x] for _ in range(toy.NUM_CLIENTS)]
  images = np.asarray(toy.preprocess(
      jnp.asarray(federation.train.inputs))).reshape(
      len(federation.train.labels), -1).astype(np.float64)
  with_rows = [i for i, n in enumerate(toy.LABELED) if n]
  for _ in range(2):
    deltas, changes = [], []
    for i in with_rows:
      rows = np.asarray(federation.clients.labeled[i][:toy.LABELED[i]])
      y = [p.copy() for p in x]
      for _ in range(EPOCHS):
        grads = _gradient(y[0], y[1], images[rows],
                          np.asarray(federation.train.labels)[rows])
        y = [p - RATE * (g - ci + cs)
             for p, g, ci, cs in zip(y, grads, own[i], c)]
      new = [ci - cs + (p0 - p) / (EPOCHS * RATE)
             for ci, cs, p0, p in zip(own[i], c, x, y)]
      deltas.append([p - p0 for p, p0 in zip(y, x)])
      changes.append([n - o for n, o in zip(new, own[i])])
      own[i] = new
    x = [p + np.mean([d[j] for d in deltas], 0) for j, p in enumerate(x)]
    c = [p + np.mean([d[j] for d in changes], 0) for j, p in enumerate(c)]

  layer = got.server.model.params['Dense_0']
  np.testing.assert_allclose(layer['kernel'], x[0], rtol=1e-3, atol=1e-5)
  np.testing.assert_allclose(layer['bias'], x[1], rtol=1e-3, atol=1e-5)
  control = got.server.control['Dense_0']
  np.testing.assert_allclose(control['kernel'], c[0], rtol=1e-3, atol=1e-5)
  np.testing.assert_allclose(got.memory['Dense_0']['bias'], np.array(
      [o[1] for o in own]), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize('weighting', ['uniform', 'examples'])
def test_the_servers_control_is_the_mean_of_the_clients(weighting):
  """Of those with labels, whoever was drawn and however models are weighed."""
  state = _rounds(f"scaffold(weighting='{weighting}')", 3,
                  toy.task(cohort_size=3))
  known = np.flatnonzero(toy.LABELED)
  mean = jax.tree.map(lambda x: x[known].mean(0), state.memory)
  assert tree.global_norm(mean) > 0
  chex.assert_trees_all_close(state.server.control, mean, rtol=1e-4, atol=1e-6)
