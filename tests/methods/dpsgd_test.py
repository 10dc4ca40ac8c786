"""Laws of DP-SGD at the clients: exactness, sensitivity, noise, budget."""
from __future__ import annotations

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from fedjax_ssl import methods, privacy
from fedjax_ssl.core import tree
from tests import toy

pytest.importorskip('dp_accounting')

RATE = 0.1  # Of plain gradient descent.
HELD = 'private_steps=1, noise_multiplier=0.0, epsilon=1e30'


def _task(**changes):
  """Batches hold all rows of a client, so that no row is left to chance."""
  federation, _ = toy.federation()
  most = int(federation.clients.num_labeled.max())
  return toy.task(**{
      'labeled_batch': most, 'local_steps': 1, 'schedule_rounds': 4,
      'optimizer': lambda round_: optax.sgd(RATE),
      'weak': lambda key, x: x,  # Draws differ between methods.
      'cohort_size': toy.NUM_CLIENTS, **changes})


class Runner:
  """A method with its compiled round."""

  def __init__(self, text: str, **changes):
    self.method = methods.make(text, _task(**changes))
    self.federation, _ = toy.federation()
    self.start = self.method.init(toy.key(0), self.federation)
    self.round = jax.jit(self.method.round)

  def run(self, count=1, federation=None, start=None):
    state = start or self.start
    for _ in range(count):
      state, metrics = self.round(
          state, federation or self.federation, state.round,
          jax.random.fold_in(toy.key(9), state.round))
      state = state._replace(round=state.round + 1)
    return state, metrics


runner = functools.lru_cache(Runner)


def _other_labels(federation):
  """Changes the labels that clients hold, and nothing else."""
  rows = federation.clients.labeled
  real = jnp.arange(rows.shape[1]) < federation.clients.num_labeled[:, None]
  labels = jnp.asarray(federation.train.labels)
  held = jnp.zeros(labels.shape, bool).at[
      jnp.where(real, rows, labels.size)].set(True, mode='drop')
  return dataclasses.replace(federation, train=federation.train._replace(
      labels=jnp.where(held, (labels + 1) % toy.NUM_CLASSES, labels)))


def _moved(one, after):
  return tree.subtract(after.server.model, one.start.server.model)


def test_without_noise_and_clipping_it_is_fedavg():
  """With batches of all rows, and clients that count the same."""
  private = runner(f'dpsgd({HELD}, clip_norm=1e6)')
  assert int(private.start.server.budget.allowed) == 0
  # Without noise the budget holds no round, so one is granted here.
  budget = private.start.server.budget._replace(allowed=jnp.int32(4))
  start = private.start._replace(server=private.start.server._replace(
      budget=budget))
  plain = runner("fedavg(weighting='uniform')")
  after, _ = private.run(start=start)
  chex.assert_trees_all_close(
      after.server.model, plain.run()[0].server.model, rtol=1e-4, atol=1e-6)
  assert tree.global_norm(_moved(private, after)) > 0


def test_no_row_moves_a_client_further_than_its_norm():
  one = runner('dpsgd(private_steps=1, clip_norm=0.01, epsilon=8.0)')
  rows = one.federation.clients.labeled[0]
  inputs = jnp.asarray(one.federation.train.inputs)
  other = dataclasses.replace(
      one.federation, train=one.federation.train._replace(
          inputs=inputs.at[rows[0]].set(255 - inputs[rows[0]])))
  (a, _), (b, _) = one.run(), one.run(federation=other)
  gap = float(tree.global_norm(tree.subtract(a.server.model, b.server.model)))
  holders = float((one.federation.clients.num_labeled > 0).sum())
  # Both draw the same noise; a client divides by the rows that it expects.
  expected = float(one.federation.clients.num_labeled[0])
  assert 0 < gap <= 1.001 * 2 * RATE * 0.01 / expected / holders


def test_noise_has_the_size_that_is_accounted_for():
  text = 'dpsgd(private_steps=1, clip_norm=50.0, epsilon={})'
  small = runner(text.format('0.05'))
  after, _ = small.run()
  held = small.federation.clients.num_labeled
  sigma = float(small.start.server.budget.noise)
  most = float(_task().labeled_batch)
  fewest = float(held[held > 0].min())
  assert sigma == pytest.approx(privacy.noise_multiplier(
      0.05, min(1.0, most / fewest), 4, delta=1e-5), rel=1e-6)
  moved = tree.global_norm(_moved(small, after))
  size = tree.num_scalars(small.start.server.model)
  each = jnp.where(held > 0, 1 / jnp.maximum(held, 1), 0)
  stddev = RATE * sigma * 50 * float(
      jnp.sqrt(jnp.sum(each ** 2)) / jnp.sum(held > 0))
  assert float(moved) == pytest.approx(stddev * math.sqrt(size), rel=0.25)


@pytest.mark.parametrize('unlabeled', ['unused', 'fixmatch'])
def test_labels_rest_once_the_budget_is_spent(unlabeled):
  one = runner(f"dpsgd(private_steps=1, unlabeled='{unlabeled}', "
               'threshold=0.0)')
  other = _other_labels(one.federation)
  spent, _ = one.run(4)
  budget = spent.server.budget
  assert float(budget.spent) <= 8.0 and int(budget.steps_now) == 0
  assert one.method.report is not None
  assert float(one.method.report(spent.server)['epsilon']) == pytest.approx(
      privacy.epsilon(float(budget.noise), 1.0, 4, delta=1e-5), rel=1e-4)
  (a, _), (b, _) = (one.run(start=spent, federation=f)
                    for f in (one.federation, other))
  chex.assert_trees_all_equal(a, b)
  moved = tree.global_norm(tree.subtract(a.server.model, spent.server.model))
  assert (float(moved) > 0) == (unlabeled == 'fixmatch')
  early = [one.run(federation=f)[0].server.model
           for f in (one.federation, other)]
  assert tree.global_norm(tree.subtract(*early)) > 0


def test_rows_without_labels_are_learnt_as_by_fixmatch():
  """Once no label may be used, all that a round does is FixMatch."""
  knobs = 'threshold=0.3, unlabeled_weight=2.0'
  one = runner(f"dpsgd({HELD}, unlabeled='fixmatch', {knobs})")
  assert int(one.start.server.budget.steps_now) == 0
  plain = methods.make(f"fixmatch(weighting='uniform', {knobs})",
                       _task(labels_at='server'))
  start = plain.init(toy.key(0), one.federation)
  start = start._replace(server=start.server._replace(
      model=one.start.server.model))
  after, metrics = jax.jit(plain.round)(
      start, one.federation, jnp.int32(0), jax.random.fold_in(toy.key(9), 0))
  found, own = one.run()
  chex.assert_trees_all_close(found.server.model, after.server.model,
                              rtol=1e-5, atol=1e-7)
  assert tree.global_norm(_moved(one, found)) > 0
  assert float(own['unlabeled_loss'].total) == pytest.approx(
      float(metrics['unlabeled_loss'].total), rel=1e-5)


def test_private_rows_leave_no_metrics():
  _, metrics = runner('dpsgd(private_steps=1)').run()
  assert not {'train_loss', 'labeled_loss'} & {
      k for k, v in metrics.items() if float(getattr(v, 'rows', 1))}


@pytest.mark.parametrize('kind, changes, word', [
    ('linear', {'labels_at': 'server'}, 'labels_at=server: dpsgd protects'),
    ('conv', {}, 'norm=.*dpsgd cannot bound')])
def test_refuses_what_cannot_be_private(kind, changes, word):
  with pytest.raises(ValueError, match=word):
    methods.make('dpsgd', toy.task(kind, **changes))


@pytest.mark.parametrize('text, word', [
    ("dpsgd(unlabeled='uda')", "unlabeled 'uda' is unknown"),
    ('dpsgd(epsilon=0.0)', 'epsilon must be above 0'),
    ("dpsgd(accountant='x')", 'accountant'),
    ('dpsgd(clip_norm=1e39)', 'clip_norm must be')])
def test_a_knob_out_of_range_is_named(text, word):
  with pytest.raises(ValueError, match=word):
    methods.make(text, _task())
