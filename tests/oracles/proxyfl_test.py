"""ProxyFL computes what its authors' code did; see `make_proxyfl`."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core.types import State, Variables
from fedjax_ssl.methods import proxyfl
from tests.oracles import ours

STORED = ours.stored('proxyfl')


def test_the_contrast_and_its_gradients():
  def mean(features, head):
    values = proxyfl.contrast(
        features, head.T @ STORED['proxies_kernel'], STORED['probabilities'],
        STORED['sure'], STORED['prior'], jnp.ones(len(features)))
    return values.mean()

  with ours.in_order():
    value, slopes = jax.jit(jax.value_and_grad(mean, (0, 1)))(
        jnp.asarray(STORED['features']), jnp.asarray(STORED['w1']))
  ours.close(value, STORED['contrast'], 1e-9)
  for slope, name in zip(slopes, ('features', 'proxies'), strict=True):
    ours.close(slope, STORED[f'{name}_slope'], 1e-9)


def _parameters(prefix: str = '') -> dict[str, dict[str, np.ndarray]]:
  def of(name: str, *parts: str) -> dict[str, np.ndarray]:
    return {part: STORED[f'{prefix}{name}_{part}'] for part in parts}
  return {'network': ours.weights(STORED, prefix),
          'features': of('features', 'kernel', 'bias'),
          'proxies': of('proxies', 'kernel')}


def _of_clients(name: str) -> np.ndarray:
  """Over the steps of both."""
  return np.concatenate([STORED[f'client{i}_{name}'] for i in (0, 1)])


def test_a_round_of_two_clients(monkeypatch: pytest.MonkeyPatch):
  """Also the tuned proxies and the prior; equal draws leave the order."""
  monkeypatch.setattr(
      jax.random, 'uniform', lambda key, shape, **knobs: jnp.zeros(shape))
  number = {name: float(STORED[name]) for name in (
      'threshold', 'weight', 'tuning_rate')}
  text = ('proxyfl(threshold={threshold}, unlabeled_weight={weight}, '
          'contrast_weight={weight}, tuning_rate={tuning_rate}, '
          'tuning_epochs={epochs}, tuning_batch={batch})').format(
              **number, epochs=STORED['tuning_epochs'],
              batch=STORED['tuning_batch'])
  batch = int(STORED['batch'])
  data = ours.federation(STORED['inputs'], STORED['labels'],
                         STORED['prior'].size, *STORED['clients'].tolist())
  with ours.in_order():
    method = methods.make(text, ours.task(
        STORED, 0, model=ours.perceptron(STORED, 'batch'), cohort_size=2,
        labeled_batch=batch, unlabeled_batch=batch,
        local_epochs=int(STORED['epochs']),
        optimizer=ours.descent(STORED)))
    stats = {k: jnp.asarray(STORED[k]) for k in ('mean', 'variance')}
    state = State(proxyfl.Server(
        Variables(jax.tree.map(jnp.asarray, _parameters()), stats),
        jnp.asarray(STORED['prior'])), (), jnp.int32(0))
    state, metrics = ours.one_round(method, data, state=state)
    model, prior = state.server
  means = ours.means(metrics)
  for mine, name in (('labeled_loss', 'Lx'), ('unlabeled_loss', 'Lu'),
                     ('contrastive_loss', 'Lc'), ('mask_rate', 'mask_valid')):
    ours.close(means[mine], _of_clients(name).mean())
  jax.tree.map(ours.close, model.params, _parameters('after_'))
  ours.close(model.stats, {k: STORED[f'after_{k}'] for k in stats})
  ours.close(prior, STORED['after_prior'])
