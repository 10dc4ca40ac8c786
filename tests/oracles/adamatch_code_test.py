"""AdaMatch's profile computes what its authors' code did."""
from __future__ import annotations

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import methods
from tests.oracles import ours

STORED = ours.stored('adamatch_code')


def test_weights_losses_and_averages_of_eight_steps():
  """All views are one batch for the norm, the labeled ones another too."""
  assert len(set(STORED['mask'])) > 3 and 0 in STORED['mask']
  draw, size = jax.random.uniform, STORED['shares'][:, 0].shape
  views = itertools.cycle((0, 1))  # The weak one is blended first.

  def uniform(key, shape=(), *given, **more):
    if shape != size:
      return draw(key, shape, *given, **more)
    # Theirs are those of the labeled rows' own pass, ours of the other.
    return jnp.asarray(1 - STORED['shares'][:, next(views)])

  with ours.in_order(), mock.patch.object(jax.random, 'uniform', uniform):
    task = ours.of_torchssl(
        STORED, model=ours.perceptron(STORED, 'batch'),
        optimizer=ours.descent(STORED))
    method = methods.make(
        f"adamatch(profile='code', threshold={STORED['threshold']}, "
        f'unlabeled_weight={STORED["weight"]}, keep_local=True)', task)
    state, metrics = ours.one_round(method, ours.one_client(STORED))
    found = ours.means(metrics)
    seen = jax.tree.map(lambda x: np.asarray(x[0]), state.memory.kept)
    mine = ours.trained(state)
    stats = {k: v[0] for k, v in state.memory.model.stats.items()}
  assert next(views) == 0
  ours.close(found['labeled_loss'], STORED['xe'].mean())
  ours.close(found['unlabeled_loss'], STORED['xeu'].mean())
  ours.close(found['mask_rate'], STORED['mask'].mean())
  ours.close(found['bar'], STORED['confidence_ratio'].mean())
  ours.close(seen.target, STORED['target'])
  assert seen.shares.shape == (128, size[1])
  ours.close(seen.shares[-9:], STORED['seen'])
  ours.close(seen.shares[:-8], np.full((120, size[1]), 1 / size[1]), 1e-6)
  ours.close(mine, ours.weights(STORED, 'after_'))
  ours.close(stats['mean'], STORED['after_mean'])
  # Theirs is the mean square of a batch's rows, ours PyTorch's estimate.
  rows = 2 * STORED['labeled_batch'] + 2 * STORED['unlabeled_batch']
  start = 0.9**STORED['steps'] * STORED['variance']
  ours.close(stats['variance'] - start, (
      STORED['after_variance'] - start) * rows / (rows - 1))
