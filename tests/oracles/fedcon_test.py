"""FedCon computes what its authors' code did; see `make_fedcon`."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import methods
from fedjax_ssl.core.types import Variables
from fedjax_ssl.testing import keys
from tests.oracles import ours

STORED = ours.stored('fedcon')


def _projectors(mine: Variables) -> Variables:
  """Theirs, in the form of ours."""
  theirs = {name: jnp.asarray(STORED[f'projector_{name}'])
            for name in ('w0', 'b0', 'scale', 'bias', 'w1', 'b1')}
  params = {
      'Dense_0': {'kernel': theirs['w0'], 'bias': theirs['b0']},
      'Norm_0': {name: theirs[name] for name in ('scale', 'bias')},
      'Dense_1': {'kernel': theirs['w1'], 'bias': theirs['b1']}}
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(
      jnp.shape, dict(mine.params))
  return mine._replace(params=params)


def test_two_rounds_between_three_trainings_of_the_server():
  """LARS by a rate that begins anew, targets that stay, and two views."""
  rows, clients, batch, epochs = (
      int(STORED[k]) for k in ('rows', 'clients', 'batch', 'epochs'))
  data = ours.federation(
      STORED['inputs'], STORED['labels'], STORED['w1'].shape[1],
      *[(0, rows)] * clients, server=rows)
  with ours.in_order():
    method = methods.make(
        f"fedcon(profile='code', contrast_rate={STORED['contrast_rate']}, "
        f"hidden={STORED['hidden']})", ours.task(
            STORED, 0, labels_at='server', cohort_size=clients,
            weak=ours.in_turns(2), labeled_batch=batch, unlabeled_batch=batch,
            local_epochs=epochs, schedule_rounds=200,
            optimizer=ours.descent(STORED)))
    state = method.init(keys.key(0), data)
    state = state._replace(memory=state.memory._replace(
        projector=_projectors(state.memory.projector)))
    run = jax.jit(method.round)
    for i in (0, 1):
      state, _ = run(state, data, jnp.int32(i), keys.key(i))
      ours.close(state.server.model.params, {
          k: v[i + 1] for k, v in ours.weights(STORED, 'after_').items()})
  targets = np.asarray(state.memory.target['w0'])
  ours.close(targets, STORED['targets'])
  assert abs(targets[0] - targets[1]).max() > 1e-5
