"""FedRGD computes what its authors' code did; see `make_fedrgd`."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import sampling
from fedjax_ssl.core.types import Cohort
from fedjax_ssl.testing import keys
from tests.oracles import ours

STORED = ours.stored('fedrgd')
# Of each round the users of both groups; theirs are counted from 1.
GROUPS = jnp.asarray(STORED['orders'].reshape(2, 2, 5) - 1, jnp.int32)


def _told(num_groups, size):
  assert (num_groups, size) == (2, 10)
  return lambda state, *unused: Cohort(
      GROUPS[state.round], jnp.ones((2, 5), bool))


def test_two_rounds_of_two_groups_and_the_server(
    monkeypatch: pytest.MonkeyPatch):
  """Users are in other groups in the second round, which has a step less."""
  monkeypatch.setattr(sampling, 'split', _told)
  rows, steps, batch = (int(STORED[k]) for k in ('rows', 'steps', 'batch'))
  data = ours.federation(STORED['inputs'], STORED['labels'], STORED['b1'].size,
                         *[(0, rows)] * 10, server=rows)
  assert not np.array_equal(np.sort(GROUPS[0]), np.sort(GROUPS[1]))
  with ours.in_order():
    state = None
    for i in (0, 1):
      method = methods.make('fedrgd', ours.task(
          STORED, 0, labels_at='server', cohort_size=10, labeled_batch=batch,
          unlabeled_batch=batch, local_steps=steps + 1 - i,
          optimizer=ours.descent({**STORED, 'momentum': np.zeros(())})))
      if state is None:
        state = method.init(keys.key(0), data)
      state, metrics = jax.jit(method.round)(
          state._replace(round=jnp.int32(i)), data, jnp.int32(i), keys.key(i))
      after = {k: v[i] for k, v in ours.weights(STORED, 'after_').items()}
      ours.close(state.server.groups.params,
                 {k: v[:2] for k, v in after.items()})
      ours.close(state.server.model.params, {k: v[2] for k, v in after.items()})
      assert 0.1 < ours.means(metrics)['mask_rate'] < 0.9
      assert abs(after['w0'][0] - after['w0'][1]).max() > 1e-3
