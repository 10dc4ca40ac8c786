"""FedMatch computes what its authors' code did; see `make_fedmatch`."""
from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import losses
from fedjax_ssl.methods.parts import plateau
from tests.oracles import fedmatch, ours

STORED = ours.stored('fedmatch')
# Labels at the clients, and at the server.
BOTH = 'fedmatch', 'fedmatch_server'


def test_the_vote_of_own_model_and_helpers():
  own, *others = STORED['vote_logits']
  votes, _ = losses.agreement_vote(own, np.stack(others), threshold=0.0)
  np.testing.assert_array_equal(votes, STORED['votes'])
  assert np.any(votes != own.argmax(-1))


def test_the_learning_rate_falls_as_theirs_does():
  state, rates = plateau.full_rate(), []
  for loss in STORED['val_losses']:
    state = plateau.after_loss(state, jnp.float32(loss), patience=3)
    rates.append(state.factor * STORED['lr'])
  ours.close(rates, STORED['rates'], 1e-7)


@pytest.mark.parametrize('run', ['released', 'cut'])
@pytest.mark.parametrize('stored', BOTH)
def test_four_rounds_with_helpers_and_sparse_messages(stored: str, run: str):
  with ours.in_order():
    fedmatch.Run(ours.stored(stored), run).hold()


@pytest.mark.parametrize('run', ['released', 'cut'])
@pytest.mark.parametrize('stored', BOTH)
def test_who_helps_whom(stored: str, run: str):
  with ours.in_order():
    fedmatch.Run(ours.stored(stored), run).hold_helpers()


@pytest.mark.parametrize('stored', BOTH)
def test_the_terms_of_both_losses(stored: str):
  with ours.in_order():
    fedmatch.Run(ours.stored(stored), 'released').hold_terms()
