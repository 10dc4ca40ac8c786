"""FedGGp computes what its authors' code did; see `make_fedggp`."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import methods
from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Client
from fedjax_ssl.methods import fedggp
from fedjax_ssl.testing import keys
from tests.oracles import ours

STORED = ours.stored('fedggp')
PHI = jnp.asarray(STORED['phi'])


def test_a_client_with_labels_of_some_rows_and_one_without():
  """Over two epochs, with rows of all three kinds of classes."""
  known, unknown = int(STORED['labeled']), int(STORED['unlabeled'])
  with ours.in_order():
    task = ours.task(
        STORED, 0, model=ours.perceptron(STORED, 'batch'),
        optimizer=ours.descent(STORED), labeled_batch=int(STORED['batch']),
        unlabeled_batch=int(STORED['batch']),
        local_epochs=int(STORED['epochs']))
    method = methods.make("fedggp(profile='code')", task)
    data, zero = ours.federation(
        STORED['inputs'], STORED['labels'], PHI.size, (known, unknown),
        (0, unknown)), jnp.int32(0)
    server = method.init(keys.key(0), data).server._replace(frequencies=PHI)
    assert method.client_update is not None
    for who in (0, 1):
      update = jax.jit(method.client_update)(server, Client(
          jnp.int32(who), tree.take(data.clients, who), (), data.train,
          data.validation, zero, zero), keys.key(1))
      after = tree.add(server.model, update.message)
      ours.close(after.params, ours.weights(STORED, f'after{who}_'))
      ours.close(after.stats, {k: STORED[f'after{who}_{k}']
                               for k in ('mean', 'variance')})
      assert update.metrics['tail_rate'].total > 0
      if who == 0:
        sums = tree.scale(update.counts, update.weight)
        ours.close(sums.probabilities, STORED['total'])
        ours.close(sums.labels, STORED['labels_used'])
  assert not any(map(np.any, update.counts))  # It has no labels.
  used = STORED['labels_used'] > 0
  tail, head = fedggp.tails(PHI), PHI >= 1 / PHI.size
  for kind in (tail, head, ~tail & ~head):
    assert used[np.asarray(kind)].any()


def test_the_frequencies_after_a_round():
  found = fedggp.moved(PHI, fedggp.Learnt(
      jnp.asarray(STORED['total']), jnp.asarray(STORED['labels_used'])),
                       decay=0.9)
  ours.close(found, STORED['moved'], 1e-6)
