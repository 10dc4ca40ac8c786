"""MixMatch computes what its authors' code did; see `make_mixmatch`."""
from __future__ import annotations

import jax.numpy as jnp
import optax
import pytest

from fedjax_ssl import losses, methods
from fedjax_ssl.methods import mixmatch
from tests.oracles import ours

STORED = ours.stored('mixmatch')
BATCH = int(STORED['batch'])


def test_the_guessed_labels_of_the_first_batch():
  model = ours.perceptron(STORED)
  start = int(STORED['num_labeled'])
  views = STORED['inputs'][start:start + BATCH].swapaxes(0, 1)
  logits = jnp.stack([model.apply(model.init(None), v) for v in views])
  ours.close(losses.soft_pseudo_label(logits), STORED['guessed'][0], 1e-6)


def test_the_weights_after_six_steps(monkeypatch: pytest.MonkeyPatch):
  """Blends of the drawn ratios and partners, which are taken as given."""
  def ratios(key, shape, *, alpha, dominant):
    del key, alpha
    assert shape == STORED['ratio'].shape
    lam = jnp.asarray(STORED['ratio'])
    return jnp.maximum(lam, 1 - lam) if dominant else lam

  monkeypatch.setattr(losses, 'mixup_ratio', ratios)
  monkeypatch.setattr(mixmatch, 'partners', lambda key, mask: jnp.asarray(
      STORED['partners']))
  with ours.in_order():
    task = ours.task(
        STORED, 0, labeled_batch=BATCH, unlabeled_batch=BATCH,
        weak=ours.in_turns(2), labeled_view=lambda key, views: views,
        local_steps=int(STORED['steps']),
        optimizer=lambda round_: optax.adam(float(STORED['rate'])))
    method = methods.make(
        "mixmatch(profile='original', keep_local=True, "
        f'unlabeled_weight={STORED["weight"]})', task)
    state, metrics = ours.one_round(method, ours.one_client(STORED))
    ours.close(ours.trained(state), ours.weights(STORED, 'after_'))
  means = ours.means(metrics)
  ours.close(means['labeled_loss'], STORED['losses_xe'].mean())
  ours.close(means['unlabeled_loss'], STORED['losses_l2u'].mean())
