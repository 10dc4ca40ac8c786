"""Laws of DP-SGD at the clients: exactness, sensitivity, noise, budget."""
from __future__ import annotations

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import methods, privacy
from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Client
from fedjax_ssl.methods import dpsgd
from tests import toy

pytest.importorskip('dp_accounting')

RATE = 0.1  # Of plain gradient descent.
# As good as no noise, and a budget for it.
QUIET = 'private_steps=1, noise_multiplier=1e-6, epsilon=1e30, clip_norm=10.0'


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

  @property
  def terms(self):
    return self.start.server.budget.terms

  def epsilon(self, rounds):
    assert self.method.report is not None
    return float(self.method.report(
        self.start.server, jnp.int32(rounds))['epsilon'])

  def run(self, count=1, federation=None, start=None):
    state = start or self.start
    for _ in range(count):
      state, metrics = self.round(
          state, federation or self.federation, state.round,
          jax.random.fold_in(toy.key(9), state.round))
      state = state._replace(round=state.round + 1)
    return state, metrics


runner = functools.lru_cache(Runner)


def _is_labeled(federation):
  """bool[D], rows that clients hold with their labels."""
  rows = federation.clients.labeled
  real = jnp.arange(rows.shape[1]) < federation.clients.num_labeled[:, None]
  size = federation.train.labels.shape[0]
  return jnp.zeros(size, bool).at[jnp.where(real, rows, size)].set(
      True, mode='drop')


def _other_labels(federation):
  """Changes labels and pixels of labeled rows, and nothing else."""
  held, train = _is_labeled(federation), federation.train
  return dataclasses.replace(federation, train=train._replace(
      labels=jnp.where(held, (train.labels + 1) % toy.NUM_CLASSES,
                       train.labels),
      inputs=jnp.where(held[:, None, None, None], 255 - train.inputs,
                       train.inputs)))


def _moved(one, after):
  return tree.subtract(after.server.model, one.start.server.model)


def _sigma(counts, batch, steps=4, epsilon=8.0):
  """The least noise for clients of so many rows, by the accountant."""
  return privacy.noise_multiplier(
      epsilon, min(1.0, batch / min(counts)), steps, delta=1e-5)


def test_without_noise_and_clipping_it_is_fedavg():
  """With batches of all rows, and clients that count the same."""
  private = runner(f'dpsgd({QUIET})')
  plain = runner("fedavg(weighting='uniform')")
  (after, found), (want, work) = private.run(), plain.run()
  chex.assert_trees_all_close(
      after.server.model, want.server.model, rtol=1e-4, atol=1e-5)
  for metrics in (found, work):  # All labels, once.
    padding = metrics['masked_share']
    assert padding.rows - padding.total == sum(toy.LABELED)
    for kind in ('forward', 'backward'):
      assert metrics[f'{kind}_passes'].total == sum(toy.LABELED)
  assert tree.global_norm(_moved(private, after)) > 1e-2


def test_a_microbatch_changes_memory_and_no_result():
  after, _ = runner(f'dpsgd({QUIET})').run()
  pieces, _ = runner(f'dpsgd({QUIET}, microbatch=2)').run()
  chex.assert_trees_all_close(
      after.server.model, pieces.server.model, rtol=1e-4, atol=1e-6)


def test_a_step_is_the_clipped_sum_of_the_drawn_rows():
  """Over the rows that are expected, not over those that were drawn."""
  batch, norm = 2, 0.5
  one = runner(QUIET.join(['dpsgd(', ')']).replace('10.0', str(norm)),
               labeled_batch=batch)
  task, federation = _task(), one.federation
  shards = jax.tree.map(jnp.asarray, federation.clients)
  payload = dpsgd._ToClient(one.start.server.model, one.terms)
  model, sizes = one.start.server.model, []
  assert one.method.client_update is not None
  update = jax.jit(one.method.client_update)
  for client in np.flatnonzero(np.asarray(shards.num_labeled)).tolist():
    shard, key = tree.take(shards, jnp.int32(client)), toy.key(client)
    rate = min(1.0, batch / float(shard.num_labeled))
    places, mask = privacy.poisson_rows(
        jax.random.split(jax.random.fold_in(key, 0), 3)[0], shard.num_labeled,
        rate, width=shard.labeled.shape[0],
        capacity=min(shard.labeled.shape[0], privacy.poisson_capacity(batch)))
    total = tree.zeros_like(model.params)
    for row in np.asarray(shard.labeled[places])[np.asarray(mask) > 0]:
      def loss(params, row=row):
        logits = task.apply(model._replace(params=params),
                            federation.train.inputs[row][None])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, federation.train.labels[row][None]).mean()
      gradient = jax.grad(loss)(model.params)
      size = float(tree.global_norm(gradient))
      total = tree.add(total, tree.scale(gradient, min(1.0, norm / size)))
      sizes.append(size)
    found = update(payload, Client(
        jnp.int32(client), shard, (), federation.train, federation.validation,
        jnp.int32(0), jnp.int32(0)), key)
    expected = min(batch, float(shard.num_labeled))
    chex.assert_trees_all_close(
        found.message.params, tree.scale(total, -RATE / expected), rtol=1e-3,
        atol=1e-5)
    assert float(found.weight) == 1
  assert max(sizes) > norm and len(sizes) > 3


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
  # Both draw the same noise; a client divides by the rows that it expects. A
  # row that is exchanged is one that leaves and one that comes.
  expected = float(one.federation.clients.num_labeled[0])
  assert 0 < gap <= 1.001 * 2 * RATE * 0.01 / expected / holders


def test_noise_has_the_size_that_is_accounted_for():
  one = runner('dpsgd(private_steps=1, clip_norm=50.0, epsilon=0.05)')
  after, _ = one.run()
  held = one.federation.clients.num_labeled
  sigma = float(one.terms.noise)
  assert sigma == pytest.approx(_sigma(
      [n for n in held.tolist() if n], float(_task().labeled_batch),
      epsilon=0.05), rel=1e-6)
  size = tree.num_scalars(one.start.server.model)
  each = jnp.where(held > 0, 1 / jnp.maximum(held, 1), 0)
  stddev = RATE * sigma * 50 * float(
      jnp.sqrt(jnp.sum(each ** 2)) / jnp.sum(held > 0))
  assert float(tree.global_norm(_moved(one, after))) == pytest.approx(
      stddev * math.sqrt(size), rel=0.25)


def test_the_client_with_fewest_labels_sets_the_noise():
  one = runner('dpsgd(private_steps=3)', labeled_batch=2)
  held = [n for n in one.federation.clients.num_labeled.tolist() if n]
  assert len(set(held)) > 1
  assert float(one.terms.noise) == pytest.approx(_sigma(held, 2, 12), rel=1e-6)


def test_all_clients_take_the_steps_of_the_largest():
  one = runner('dpsgd', labeled_batch=2, local_steps=0)
  most = max(one.federation.clients.num_labeled.tolist())
  assert int(one.terms.steps) == -(-most // 2)


def test_a_stream_is_accounted_for_by_the_rows_of_a_task():
  federation, _ = toy.federation()
  clients = federation.clients
  first = (clients.num_labeled + 1) // 2
  tasks = [clients._replace(num_labeled=first),
           clients._replace(labeled=jax.vmap(jnp.roll)(clients.labeled, -first),
                            num_labeled=clients.num_labeled - first)]
  stream = jax.tree.map(lambda *x: jnp.stack(x), *tasks)
  one = methods.make('dpsgd(private_steps=1)', _task(labeled_batch=1)).init(
      toy.key(0), dataclasses.replace(federation, stream=stream,
                                      rounds_per_task=2))
  held = [n for t in tasks for n in t.num_labeled.tolist() if n]
  assert float(one.server.budget.terms.noise) == pytest.approx(
      _sigma(held, 1), rel=1e-6)


@pytest.mark.parametrize('unlabeled', ['unused', 'fixmatch'])
def test_labels_rest_once_the_budget_is_spent(unlabeled):
  more = '' if unlabeled == 'unused' else ', threshold=0.0'
  one = runner(f"dpsgd(private_steps=1, unlabeled='{unlabeled}'{more})")
  other = _other_labels(one.federation)
  assert one.epsilon(0) == 0 and one.epsilon(4) <= 8.0
  for rounds in (1, 4):
    assert one.epsilon(rounds) == pytest.approx(privacy.epsilon(
        float(one.terms.noise), 1.0, rounds, delta=1e-5), rel=1e-4)
  assert one.epsilon(9) == one.epsilon(4)
  assert [int(one.terms.steps_in(i)) for i in (0, 3, 4)] == [1, 1, 0]
  spent, _ = one.run(4)
  (a, _), (b, _) = (one.run(start=spent, federation=f)
                    for f in (one.federation, other))
  chex.assert_trees_all_equal(a, b)
  moved = tree.global_norm(tree.subtract(a.server.model, spent.server.model))
  assert (float(moved) > 0) == (unlabeled == 'fixmatch')
  early = [one.run(federation=f)[0].server.model
           for f in (one.federation, other)]
  assert tree.global_norm(tree.subtract(*early)) > 0


def test_rows_without_labels_are_learnt_as_by_fixmatch():
  """Once no label may be used, all that a round does is FixMatch.

  The factor on its steps is one on the learning rate.
  """
  knobs = 'threshold=0.3, unlabeled_weight=2.0'
  one = runner("dpsgd(private_steps=1, unlabeled='fixmatch', "
               f'unlabeled_rate=0.5, {knobs})')
  start = one.start._replace(round=jnp.int32(4))  # The budget is spent.
  plain = methods.make(
      f"fixmatch(weighting='uniform', {knobs})",
      _task(labels_at='server', optimizer=lambda round_: optax.sgd(RATE / 2)))
  same = plain.init(toy.key(0), one.federation)
  same = same._replace(server=same.server._replace(
      model=start.server.model))
  after, metrics = jax.jit(plain.round)(
      same, one.federation, jnp.int32(4), jax.random.fold_in(toy.key(9), 4))
  found, own = one.run(start=start)
  chex.assert_trees_all_close(found.server.model, after.server.model,
                              rtol=1e-5, atol=1e-7)
  assert tree.global_norm(_moved(one, found)) > 0
  assert float(own['unlabeled_loss'].total) == pytest.approx(
      float(metrics['unlabeled_loss'].total), rel=1e-5)


def test_metrics_say_nothing_of_private_rows():
  one = runner('dpsgd(private_steps=2)', labeled_batch=2)
  found = [one.run(federation=f)[1]
           for f in (one.federation, _other_labels(one.federation))]
  chex.assert_trees_all_equal(*found)
  passes = toy.means(found[0])['forward_passes']
  assert passes == 2 * 2  # In two steps, of two rows that are expected.
  again = one.run(start=one.start._replace(round=jnp.int32(1)))[1]
  chex.assert_trees_all_equal(found[0], again)  # Nor of how many were drawn.


@pytest.mark.parametrize('kind, changes, word', [
    ('linear', {'labels_at': 'server'}, 'labels_at=server: dpsgd protects'),
    ('conv', {}, 'norm=.*dpsgd cannot bound')])
def test_refuses_what_cannot_be_private(kind, changes, word):
  with pytest.raises(ValueError, match=word):
    methods.make('dpsgd', toy.task(kind, **changes))


def test_rows_that_are_elsewhere_too_are_refused():
  federation, _ = toy.federation()
  clients = federation.clients
  method = methods.make("dpsgd(unlabeled='fixmatch')", _task())
  first, second = np.flatnonzero(np.asarray(clients.num_labeled))[:2]
  holder = int(jnp.argmax(clients.num_unlabeled))
  row = clients.labeled[first, 0]
  several = clients._replace(
      labeled=jnp.asarray(clients.labeled).at[second, 0].set(row))
  hidden = clients._replace(
      unlabeled=jnp.asarray(clients.unlabeled).at[holder, 0].set(row))
  twice = clients._replace(
      labeled=jnp.asarray(clients.labeled).at[first, 1].set(row))
  for shards, word in ((several, 'there several times'),
                       (twice, 'there several times'),
                       (hidden, 'among the unlabeled ones')):
    with pytest.raises(ValueError, match=word):
      method.init(toy.key(0), dataclasses.replace(federation, clients=shards))
  # What is never learnt tells nothing.
  methods.make('dpsgd', _task()).init(
      toy.key(0), dataclasses.replace(federation, clients=hidden))


def test_a_budget_that_holds_no_round_is_refused():
  method = methods.make('dpsgd(epsilon=0.1, noise_multiplier=1.0)', _task())
  with pytest.raises(ValueError, match='epsilon=0.1 does not hold the first'):
    method.init(toy.key(0), toy.federation()[0])


def test_a_rule_of_the_users_is_not_half_applied():
  for text in ('dpsgd', "dpsgd(unlabeled='fixmatch')"):
    task = _task(aggregator=lambda stacked, weights: tree.zeros_like(
        jax.tree.map(lambda x: x[0], stacked)))
    if 'fixmatch' in text:
      with pytest.raises(ValueError, match='leave aggregator out'):
        methods.make(text, task)
    else:
      methods.make(text, task)


@pytest.mark.parametrize('text, word', [
    ("dpsgd(unlabeled='uda')", "unlabeled 'uda' is unknown"),
    ('dpsgd(epsilon=0.0)', 'epsilon must be above 0'),
    ("dpsgd(accountant='x')", "accountant 'x' is unknown"),
    ('dpsgd(noise_multiplier=0.0)', 'noise_multiplier must be above 0'),
    ('dpsgd(clip_norm=1e39)', 'clip_norm must be')])
def test_a_knob_out_of_range_is_named(text, word):
  with pytest.raises(ValueError, match=word):
    methods.make(text, _task())
