"""SemiFL computes what its authors' code did; see `make_semifl`.

One thing differs by intent: running variances are unbiased there, as PyTorch's
are, and biased here. They only label rows; for that each round is given theirs.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fedjax_ssl import losses, methods
from fedjax_ssl.methods import semifl
from fedjax_ssl.testing import keys
from tests.oracles import ours

STORED = ours.stored('semifl')


def _view(place):
  return lambda key, views: jnp.roll(views, -place, axis=1)


def _with_variances(state, factor):
  """The state with so many times the running variances."""
  own = state.server.own
  stats = {**own.model.stats, 'variance': own.model.stats['variance'] * factor}
  return state._replace(server=state.server._replace(own=own._replace(
      model=own.model._replace(stats=stats))))


def test_rounds_in_which_clients_sit_out(monkeypatch: pytest.MonkeyPatch):
  """FIX, blends, both momenta, fine-tuning, and statistics of all rows."""
  monkeypatch.setattr(losses, 'mixup_ratio', lambda key, alpha: jnp.asarray(
      STORED['ratio']))
  monkeypatch.setattr(semifl, 'drawn', lambda key, shard: jnp.asarray(
      STORED['places']))
  size, batch = int(STORED['rows']), int(STORED['batch'])
  num_clients, masks = int(STORED['clients']), STORED['masks']
  data = ours.federation(
      STORED['inputs'], STORED['labels'], STORED['b1'].size,
      *[(0, size)] * num_clients, server=size)
  number = {name: float(STORED[name]) for name in (
      'threshold', 'server_momentum')}
  with ours.in_order():
    method = methods.make(
        'semifl(threshold={threshold}, server_momentum={server_momentum})'
        .format(**number), ours.task(
            STORED, 0, model=ours.perceptron(STORED, 'static'),
            labels_at='server', cohort_size=num_clients, weak=_view(1),
            strong=_view(2), labeled_batch=batch, unlabeled_batch=batch,
            local_epochs=int(STORED['epochs']), schedule_rounds=len(masks),
            optimizer=ours.descent(STORED, 'nesterov', schedule='cosine',
                                   horizon=len(masks))))
    state = jax.jit(method.init)(keys.key(0), data)
    run = jax.jit(method.round)
    for i, mask in enumerate(masks):
      state, metrics = run(_with_variances(state, size / (size - 1)), data,
                           jnp.int32(i), keys.key(i))
      assert metrics['mask_rate'].total == mask.sum()
      assert metrics['num_participants'] == mask.any(-1).sum()
      model = state.server.own.model
      ours.close(model.params, {
          k: v[i] for k, v in ours.weights(STORED, 'after_').items()})
      ours.close(model.stats['mean'], STORED['after_mean'][i])
      ours.close(model.stats['variance'] * size / (size - 1),
                 STORED['after_variance'][i])
  assert not masks[0, 1].any() and masks[1, 1].any()  # Sits out, then trains.
