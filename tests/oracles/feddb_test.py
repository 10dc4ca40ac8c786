"""FedDB computes what its authors' code did; see `make_feddb`."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_ssl import methods
from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Client
from fedjax_ssl.methods import feddb
from fedjax_ssl.testing import keys
from tests.oracles import ours

STORED = ours.stored('feddb')


def test_a_client_trains_and_says_its_classes():
  rate, decay = float(STORED['rate']), float(STORED['decay'])
  optimizer = optax.chain(optax.add_decayed_weights(decay), optax.sgd(
      rate, float(STORED['momentum']), nesterov=True))
  with ours.in_order():
    task = ours.task(STORED, rate, optimizer=lambda round_: optimizer,
                     labeled_batch=len(STORED['inputs']), unlabeled_batch=len(
                         STORED['inputs']), local_epochs=int(STORED['epochs']))
    method = methods.make(
        f'feddb(threshold={STORED["threshold"]}, server_momentum=0.0)', task)
    data, zero = ours.one_client(STORED), jnp.int32(0)
    state = method.init(keys.key(0), data)
    assert method.client_update is not None
    update = jax.jit(method.client_update)(state.server, Client(
        zero, tree.take(data.clients, 0), tree.take(state.memory, 0),
        data.train, data.validation, zero, zero), keys.key(1))
    mine = tree.add(state.server.model, update.message).params
  # PyTorch adds 1e-6 to the norm of a gradient that it clips.
  ours.close(mine, ours.weights(STORED, 'after_'), 1e-6)
  ours.close(update.memory.shares, STORED['first'], 1e-9)
  ours.close(update.counts, STORED['last'], 1e-6)
  assert update.metrics['mask_rate'].total == STORED['num_kept']
  assert len(set(STORED['kept'].tolist())) > 1


def test_the_servers_weights():
  shares = jnp.asarray(STORED['shares'], jnp.float32)
  found = feddb.softmax_weights(shares, jnp.ones(len(shares)))
  ours.close(found, STORED['weights'])
  assert np.ptp(STORED['weights']) > .005
