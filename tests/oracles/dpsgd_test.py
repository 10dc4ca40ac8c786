"""DP-SGD computes what its authors' code did; see `make_dpsgd`."""
from __future__ import annotations

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods, privacy
from fedjax_ssl.testing import keys
from tests.oracles import ours

pytest.importorskip('dp_accounting')

STORED = ours.stored('dpsgd')
ROWS, STEPS = len(STORED['labels']), int(STORED['steps'])


def _round(method, data):
  """A round to which normal numbers are given in place of drawn."""
  def run(state, normal, round_):
    def add(key, gradients, stddev):
      del key
      return jax.tree.map(lambda x, n: x + stddev * n, gradients, normal)

    with mock.patch.object(privacy, 'gaussian', add):
      return method.round(state, data, round_, keys.key(0))[0]
  return jax.jit(run)


@pytest.mark.parametrize('which', range(len(STORED['norms'])))
def test_four_steps_of_all_rows(which: int):
  """A step a round: clipping, noise by the norm, and the mean of the rows."""
  norm = float(STORED['norms'][which])
  with ours.in_order():
    data = ours.federation(STORED['inputs'], STORED['labels'],
                           STORED['b1'].size, (ROWS, 0))
    method = methods.make(
        f'dpsgd(clip_norm={norm}, noise_multiplier={STORED["noise"]}, '
        'private_steps=1, epsilon=1e6)', ours.task(
            STORED, float(STORED['rate']), labeled_batch=ROWS,
            schedule_rounds=STEPS))
    state = method.init(keys.key(0), data)
    run = _round(method, data)
    normal, after = (ours.weights(STORED, name)
                     for name in ('normal_', 'after_'))
    for i in range(STEPS):
      state = run(state, {k: jnp.asarray(v[which, i])
                          for k, v in normal.items()}, jnp.int32(i))
      state = state._replace(round=jnp.int32(i + 1))
      ours.close(state.server.model.params,
                 {k: v[which, i] for k, v in after.items()}, 1e-6)


def test_the_norms_clip_all_rows_some_and_none():
  clipped = [np.mean(lengths[0] > norm) for norm, lengths in zip(
      STORED['norms'], STORED['lengths'], strict=True)]
  assert clipped[0] == 1 > clipped[1] > 0 == clipped[2]
