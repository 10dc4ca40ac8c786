"""UDA computes what its authors' code did; see `make_uda`."""
from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import losses, methods
from tests.oracles import ours

STORED = ours.stored('uda')
STEPS = int(STORED['steps'])


@pytest.mark.parametrize('schedule', ['linear', 'exp', 'log'])
def test_the_bars_of_annealing(schedule):
  bars = losses.tsa_threshold(np.arange(9), 8, num_classes=4,
                              schedule=schedule)
  ours.close(bars, STORED[f'bars_{schedule}'], 1e-6)


@pytest.mark.parametrize('run, text', [
    ('official', 'uda(keep_local=True)'),
    ('annealed', "uda(profile='fedmatch', keep_local=True)")])
def test_the_weights_after_eight_steps(run, text):
  def rate(step):  # Of the authors; theirs and ours end at the same step.
    return STORED['rate'] * jnp.cos(7 / 16 * np.pi * (step + 1) / STEPS)

  with ours.in_order():
    np.testing.assert_allclose(
        [rate(t) for t in range(STEPS)], STORED[f'{run}_training_lr'],
        rtol=1e-6)
    task = ours.task(
        STORED, 0, labeled_batch=int(STORED['labeled_batch']),
        unlabeled_batch=int(STORED['unlabeled_batch']), local_steps=STEPS,
        optimizer=lambda round_: optax.sgd(rate, 0.9, nesterov=True))
    state, metrics = ours.one_round(methods.make(text, task),
                                    ours.one_client(STORED))
    ours.close(ours.trained(state), ours.weights(STORED, f'{run}_after_'))
  means = ours.means(metrics)
  ours.close(means['labeled_loss'], STORED[f'{run}_sup_sup_loss'].mean())
  ours.close(means['unlabeled_loss'], STORED[f'{run}_unsup_loss'].mean())
  rates = {name: means[name] for name in ('mask_rate', 'tsa_rate')
           if name in means}
  least = rates['mask_rate' if run == 'official' else 'tsa_rate']
  assert 0 < least < 1  # The bar has left some rows out.
