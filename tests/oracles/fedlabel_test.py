"""FedLabel computes what its authors' code did; see `make_fedlabel`."""
from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_ssl import methods
from fedjax_ssl.methods.fedlabel import selection
from fedjax_ssl.testing import keys
from tests.oracles import ours

STORED = ours.stored('fedlabel')


def test_the_choice_of_labels():
  choice = jax.jit(selection.select)(
      *STORED['logits'], threshold=float(STORED['threshold']))
  places = np.flatnonzero(choice.accepted)
  np.testing.assert_array_equal(places, STORED['places'])
  np.testing.assert_array_equal(choice.labels[places], STORED['chosen'])
  ours.close(choice.ratio[places], STORED['ratio'])
  assert 0 < np.asarray(choice.from_local)[places].sum() < places.size
  assert choice.ratio[2] == 1  # Equal confidence, as both made the same logits.


def adding_up(rate):
  """Descends along the sum of all gradients; stays where there is none."""
  def update(gradients, total, params=None):
    del params
    total = optax.tree.add(total, gradients)
    moves = optax.tree.norm(gradients) > 0
    return optax.tree.scale(-rate * moves, total), total

  return optax.GradientTransformation(optax.tree.zeros_like, update)


def test_two_rounds_of_three_clients():
  """Their code differs in that gradients of w_U add up, and in no more."""
  clients = STORED['clients'].tolist()
  text = 'fedlabel({})'.format(', '.join(f'{knob}={STORED[knob]}' for knob in (
      'labeled_steps', 'unlabeled_steps', 'warmup', 'threshold',
      'consistency')))
  rate, batch = float(STORED['rate']), int(STORED['batch'])
  chains = itertools.cycle(['labeled', 'unlabeled'])

  def optimizer(round_):
    del round_
    unlabeled = next(chains) == 'unlabeled'
    return adding_up(rate) if unlabeled else optax.sgd(rate)

  with ours.in_order():
    data = ours.federation(STORED['inputs'], STORED['labels'], 4, *clients)
    method = methods.make(text, ours.task(
        STORED, rate, cohort_size=len(clients), labeled_batch=batch,
        unlabeled_batch=batch, optimizer=optimizer))
    state = method.init(keys.key(0), data)
    step = jax.jit(method.round)
    for i, used in enumerate(STORED['used']):
      state, metrics = step(state, data, jnp.int32(i), keys.key(i))
      after = ours.weights(STORED, 'after_')
      ours.close(state.server.model.params, {k: v[i] for k, v in after.items()})
      assert metrics['mask_rate'].total == used.sum()
