"""FedMatch computes what its authors' code did; see `make_fedmatch`."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import losses, methods
from fedjax_ssl.core import optimizers
from fedjax_ssl.methods.fedmatch import helpers
from fedjax_ssl.testing import keys
from tests.oracles import ours

STORED = ours.stored('fedmatch')
# Our names for what make_fedmatch's KNOBS are called there.
NAMES = {'num_helpers': 'num_helpers', 'threshold': 'confidence',
         'psi_init': 'psi_factor', 'helper_interval': 'h_interval',
         'labeled_weight': 'lambda_s', 'consistency_weight': 'lambda_i',
         'agreement_weight': 'lambda_a', 'l2': 'lambda_l2', 'l1': 'lambda_l1',
         'delta_threshold': 'delta_thres'}


def test_the_vote_of_own_model_and_helpers():
  own, *others = STORED['vote_logits']
  votes, _ = losses.agreement_vote(own, np.stack(others), threshold=0.0)
  np.testing.assert_array_equal(votes, STORED['votes'])
  assert np.any(votes != own.argmax(-1))


def test_the_learning_rate_falls_as_theirs_does():
  state, rates = optimizers.plateau(), []
  for loss in STORED['val_losses']:
    state = optimizers.after_loss(state, jnp.float32(loss), patience=3)
    rates.append(state.factor * STORED['lr'])
  ours.close(rates, STORED['rates'], 1e-7)


@pytest.mark.parametrize('run', ['released', 'cut'])
def test_four_rounds_with_helpers_and_sparse_messages(
    run: str, monkeypatch: pytest.MonkeyPatch):
  noise = np.stack([STORED['noise']] * 2, 1)  # Both of its views.
  monkeypatch.setattr(helpers, 'noise_image', lambda like: jnp.asarray(noise))
  clients, batch = STORED['clients'].tolist(), int(STORED['batch'])
  knobs = {**{mine: STORED[theirs] for mine, theirs in NAMES.items()},
           'psi_threshold': STORED[f'{run}_l1_thres']}
  text = "fedmatch(profile='v3code', lr_decay='none', {})".format(', '.join(
      f'{name}={value}' for name, value in knobs.items()))
  with ours.in_order():
    data = ours.federation(STORED['inputs'], STORED['labels'], 4, *clients)
    task = ours.task(
        STORED, float(STORED['lr']), cohort_size=len(clients),
        labeled_batch=batch, unlabeled_batch=2 * batch)
    method = methods.make(text, task)
    state = method.init(keys.key(0), data)
    step = jax.jit(method.round)
    for i, confident in enumerate(STORED[f'{run}_confident']):
      state, metrics = step(state, data, jnp.int32(i), keys.key(i))
      for part in ('sigma', 'psi'):
        mine = getattr(state.server, part)
        ours.close(mine['w0'], STORED[f'{run}_{part}0'][i])
        ours.close(mine['w1'], STORED[f'{run}_{part}1'][i])
      means = ours.means(metrics)
      ours.close(means['cost_up'], 100 * STORED[f'{run}_up'][i], 1e-3)
      ours.close(means['cost_down'], 100 * STORED[f'{run}_down'][i], 1e-3)
      ours.close(means['mask_rate'], confident.mean() / clients[0][1])
