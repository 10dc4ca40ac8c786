"""Passes on a method whose arithmetic can be done by hand."""
from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import aggregation
from fedjax_ssl.core import noting, rounds, sampling, tree
from fedjax_ssl.core.types import Cohort, Ratio, State, Update
from tests import toy

KEY = toy.key(0)


def fixed(ids, active=None):
  """A sampler of groups `ids` [G, S]."""
  ids = jnp.array(ids, jnp.int32)
  active = jnp.ones(ids.shape, bool) if active is None else jnp.array(active)
  return lambda state, federation, key: Cohort(ids, active)


def count(payload, client, key):
  """Sends the client's id, weighs its labels, remembers its visits."""
  del key
  value = client.id.astype(jnp.float32) + payload
  return Update({'id': value}, client.shard.num_labeled.astype(jnp.float32),
                client.memory + 1 + client.group, {'id': value})


@aggregation.linear
def add_mean(server, mean, cohort, context, key):
  del cohort, context, key
  return server + mean['id'], {}


def stacked_mean(server, updates, cohort, context, key):
  del cohort, context, key
  mean = aggregation.weighted_mean(
      jax.tree.map(lambda x: x.reshape(-1), updates.message),
      updates.weight.reshape(-1))
  return server + mean['id'], {}


def state(server=0.0):
  memory = jnp.zeros(toy.NUM_CLIENTS)
  return State(jnp.float32(server), memory, jnp.int32(0))


def run(round_fn, start):
  federation, _ = toy.federation()
  return jax.jit(round_fn)(start, federation, jnp.int32(0), KEY)


@pytest.mark.parametrize('rule', [add_mean, stacked_mean])
@pytest.mark.parametrize('changes', [
    {}, {'client_map': 'vmap'}, {'client_map': 'vmap', 'chunk_size': 2},
    {'aggregation_order': 'fast'}])
def test_the_server_gets_the_weighted_mean(rule, changes):
  task = toy.task(**changes)
  one = rounds.client_pass(task, count, rule, sample=fixed([[0, 1, 3]]))
  after, metrics = run(one, state())
  weights = np.array([toy.LABELED[i] for i in (0, 1, 3)])
  np.testing.assert_allclose(
      after.server, weights @ [0, 1, 3] / weights.sum(), rtol=1e-6)
  np.testing.assert_array_equal(after.memory, [1, 1, 0, 1, 0, 0])
  assert metrics['num_participants'] == 3
  assert metrics['bytes_up'] == 3 * 4 and metrics['bytes_down'] == 3 * 4


@pytest.mark.parametrize('dtype', ['int32', 'bool'])
def test_a_mean_of_whole_numbers_is_that_of_the_rule(dtype):
  """Rounded to the nearest, such as a count of steps that all clients did."""
  got = []
  for summed in (True, False):
    def send(payload, client, key):
      made = count(payload, client, key)
      value = jnp.where(client.id == 0, 0, 3).astype(dtype)
      return made._replace(message={'id': value})
    def finish(server, mean, cohort, context, key):
      del server, cohort, context, key
      return jnp.float32(mean['id']), {}
    def stacked(server, updates, *others):
      mean = aggregation.weighted_mean(
          jax.tree.map(lambda x: x.reshape(-1), updates.message),
          updates.weight.reshape(-1))
      return finish(server, mean, *others)
    one = rounds.client_pass(
        toy.task(), send, aggregation.linear(finish) if summed else stacked,
        sample=fixed([[0, 1, 3, 4, 5]]))
    got.append(run(one, state())[0].server)
  weights = np.array([toy.LABELED[i] for i in (0, 1, 3, 4, 5)])
  assert 0 < weights[0] / weights.sum() < .5 or dtype == 'bool'
  want = np.round(weights @ np.array([0, 3, 3, 3, 3]).astype(dtype)
                  / weights.sum())
  np.testing.assert_array_equal(got, [want, want])


def test_groups_share_the_start_and_carry_memory():
  one = rounds.client_pass(
      toy.task(), count, add_mean, sample=fixed([[0, 1], [1, 5]]))
  after, _ = run(one, state())
  weights = np.array([toy.LABELED[i] for i in (0, 1, 1, 5)])
  np.testing.assert_allclose(
      after.server, weights @ [0, 1, 1, 5] / weights.sum(), rtol=1e-6)
  # Client 1 is in both groups: 1 from the first and 2 from the second.
  np.testing.assert_array_equal(after.memory, [1, 3, 0, 0, 0, 2])


def test_relay_starts_each_group_from_the_last():
  one = rounds.client_pass(
      toy.task(), count, add_mean, sample=fixed([[1], [5], [0]]), relay=True)
  after, _ = run(one, state(10.0))
  # 10 -> 10 + (1 + 10) = 21 -> 21 + (5 + 21) = 47 -> 47 + (0 + 47) = 94.
  assert after.server == 94


def test_padding_slots_do_not_count_and_touch_no_memory():
  sample = fixed([[2, 6, 0, 6]], [[True, False, True, False]])
  one = rounds.client_pass(toy.task(), count, add_mean, sample=sample)
  after, metrics = run(one, state())
  assert after.server == 0  # Client 2 has no labels, client 0 sends 0.
  np.testing.assert_array_equal(after.memory, [1, 0, 1, 0, 0, 0])
  # Client 2 gets the number and has no weight, so it sends nothing.
  assert metrics['bytes_up'] == 4 and metrics['bytes_down'] == 2 * 4
  assert metrics['id'] == (0, 1)  # Nor is it in any mean.


def test_weights_all_zero_change_nothing():
  one = rounds.client_pass(toy.task(), count, add_mean, sample=fixed([[2, 4]]))
  after, _ = run(one, state(3.0))
  assert after.server == 3


@pytest.mark.parametrize('spoil', ['message', 'memory', 'weight'])
def test_a_broken_update_is_left_out_and_counted(spoil):
  def broken(payload, client, key):
    update = count(payload, client, key)
    bad = jnp.where(client.id == 1, jnp.nan, 0.0)
    if spoil == 'message':
      return update._replace(message={'id': update.message['id'] + bad})
    return update._replace(**{spoil: getattr(update, spoil) + bad})
  one = rounds.client_pass(
      toy.task(), broken, add_mean, sample=fixed([[1, 3, 5]]))
  after, metrics = run(one, state())
  np.testing.assert_allclose(after.server, (3 * 3 + 5 * 5) / 8, rtol=1e-6)
  np.testing.assert_array_equal(after.memory, [0, 0, 0, 1, 0, 1])
  assert metrics['num_rejected'] == 1


def test_a_large_finite_update_is_not_called_infinite():
  def large(payload, client, key):
    update = count(payload, client, key)
    return update._replace(message={'id': jnp.float32(1e30)})
  for limit, rejected in ((float('inf'), 0), (1e31, 0), (1e29, 2)):
    task = dataclasses.replace(toy.task(), max_update_norm=limit)
    one = rounds.client_pass(task, large, add_mean, sample=fixed([[0, 1]]))
    assert run(one, state())[1]['num_rejected'] == rejected


def test_counts_are_averaged_and_in_no_norm():
  def counting(payload, client, key):
    update = count(payload, client, key)
    return update._replace(counts=100 * update.message['id'])

  def spoilt(payload, client, key):
    update = counting(payload, client, key)
    return update._replace(
        counts=jnp.where(client.id == 1, jnp.nan, update.counts))

  @aggregation.linear
  def linear(server, mean, cohort, context, key):
    message, counts = mean
    server, _ = add_mean(server, message, cohort, context, key)
    return server, {'counted': counts}

  def stacked(server, updates, cohort, context, key):
    server, _ = stacked_mean(server, updates, cohort, context, key)
    return server, {'counted': aggregation.weighted_mean(
        updates.counts[0], updates.weight[0])}

  task = dataclasses.replace(toy.task(), max_update_norm=5.0)
  for rule in (linear, stacked):
    for update, ids in ((counting, (1, 3, 5)), (spoilt, (3, 5))):
      one = rounds.client_pass(task, update, rule, sample=fixed([[1, 3, 5]]))
      after, metrics = run(one, state())
      weights = np.array([toy.LABELED[i] for i in ids])
      want = weights @ ids / weights.sum()
      np.testing.assert_allclose(after.server, want, rtol=1e-6)
      np.testing.assert_allclose(metrics['counted'], 100 * want, rtol=1e-6)
      assert metrics['num_rejected'] == 3 - len(ids)
      assert metrics['bytes_up'] == 3 * 8


@pytest.mark.parametrize('changes', [
    {}, {'client_map': 'vmap'}, {'client_map': 'vmap', 'chunk_size': 2}])
def test_a_rule_gets_a_part_of_every_message_beside_the_mean(changes):
  """In the order of the cohort, zeros of those who do not count; not sent."""
  def update(payload, client, key):
    made = count(payload, client, key)
    broken = jnp.where(client.id == 1, jnp.nan, 0)
    return made._replace(message={
        'id': made.message['id'] + broken, 'rest': jnp.ones(2)})

  def finish(server, found, cohort, context, key):
    del context, key
    return server + found.mean['id'], {
        'each': (found.each * (1 + cohort.ids)).sum(),
        'out': jnp.where(cohort.active, 0, jnp.abs(found.each)).sum(),
        'shape': jnp.array(found.each.shape)}

  rule = aggregation.linear(finish, each=lambda message: message['id'])
  one = rounds.client_pass(
      toy.task(**changes), update, rule, sample=fixed([[0, 1, 3], [5, 3, 0]]))
  after, metrics = run(one, state(2))
  ids = np.array([0, 3, 5, 3, 0])
  weights = np.array(toy.LABELED)[ids]
  np.testing.assert_allclose(
      after.server, 2 + weights @ (ids + 2) / weights.sum(), rtol=1e-6)
  assert metrics['each'] == (ids + 2) @ (1 + ids)
  assert metrics['out'] == 0 and metrics['num_rejected'] == 1
  np.testing.assert_array_equal(metrics['shape'], [2, 3])
  assert metrics['bytes_up'] == 6 * 3 * 4


@pytest.mark.parametrize('rule', [add_mean, stacked_mean])
@pytest.mark.parametrize('changes', [
    {}, {'client_map': 'vmap'}, {'client_map': 'vmap', 'chunk_size': 2}])
def test_an_update_that_could_overflow_the_sum_is_left_out(rule, changes):
  """Finite and within every norm; one of the two is so only if weighted."""
  odd = jnp.array([1e38, 4e37, 0, 0, 0, 0])
  assert odd[1] < np.finfo(np.float32).max / (2 * 4) < toy.LABELED[1] * odd[1]
  def huge(payload, client, key):
    update = count(payload, client, key)
    return update._replace(
        message={'id': update.message['id'] + odd[client.id]})
  one = rounds.client_pass(
      toy.task(**changes), huge, rule, sample=fixed([[0, 1, 3, 5]]))
  after, metrics = run(one, state())
  np.testing.assert_allclose(after.server, (3 * 3 + 5 * 5) / 8, rtol=1e-6)
  np.testing.assert_array_equal(after.memory, [0, 0, 0, 1, 0, 1])
  assert metrics['num_rejected'] == 2


@pytest.mark.parametrize('relay', [False, True])
def test_a_record_never_stops_being_finite(relay):
  """It stays, and counts as rejected; an infinity from the start is no news."""
  @aggregation.linear
  def grow(server, mean, cohort, context, key):
    del cohort, context, key
    return (server[0] * 1e30 + 0 * mean['id'], server[1]), {}
  one = rounds.client_pass(
      toy.task(), count, grow, sample=fixed([[1], [5]]), relay=relay,
      broadcast=lambda server, client_id, group: jnp.float32(0))
  first = (jnp.float32(1), jnp.float32(jnp.inf))
  after, metrics = run(one, state()._replace(server=first))
  assert after.server == (1e30, jnp.inf)
  assert metrics['num_rejected'] == (1 if relay else 0)
  assert metrics['num_participants'] == (1 if relay else 2)
  after, metrics = run(one, after)
  assert after.server == (1e30, jnp.inf)
  assert metrics['num_rejected'] == (2 if relay else 1)
  assert metrics['num_participants'] == 0


def test_odd_metrics_of_a_client_do_not_count():
  odd = jnp.array([0.0, jnp.nan, 0.0, 1e35, 0.0, -jnp.inf])
  def told(payload, client, key):
    value = client.id + odd[client.id]
    return count(payload, client, key)._replace(metrics={
        'plain': value, 'ratio': Ratio(value, jnp.float32(2))})
  one = rounds.client_pass(
      toy.task(), told, add_mean, sample=fixed([[0, 1, 3, 5]]))
  _, metrics = run(one, state())
  assert metrics['plain'] == (0, 1) and metrics['ratio'] == (0, 2)
  assert metrics['num_participants'] == 4


def test_chain_runs_in_order_and_adds_up_traffic():
  one = rounds.client_pass(toy.task(), count, add_mean, sample=fixed([[5]]))
  double = rounds.server_pass(lambda s, context, key: (2 * s, {'seen': s}))
  after, metrics = run(rounds.chain(one, double, one), state())
  # 0 + 5 = 5, doubled 10, then 10 + (5 + 10) = 25.
  assert after.server == 25 and metrics['seen'] == 5
  assert metrics['bytes_up'] == 8


def test_without_aggregate_only_memories_change():
  one = rounds.client_pass(toy.task(), count, None, sample=fixed([[0, 1]]))
  after, _ = run(one, state(7.0))
  assert after.server == 7
  np.testing.assert_array_equal(after.memory, [1, 1, 0, 0, 0, 0])


def test_keys_depend_on_round_key_client_and_group_only():
  def draw(payload, client, key):
    del payload
    value = jax.random.uniform(key)
    return Update({}, jnp.float32(1), client.memory + value, {})
  def memory(groups):
    one = rounds.client_pass(toy.task(), draw, None, sample=fixed(groups))
    return np.asarray(run(one, state())[0].memory)
  alone, together = memory([[3]]), memory([[5, 3, 1]])
  assert alone[3] == together[3]
  assert len(set(together[[1, 3, 5]])) == 3
  later = memory([[0], [3]])
  assert later[3] != alone[3]


def test_broadcast_is_per_client():
  bank = jnp.arange(6.0) * 10
  def keep(server, mean, cohort, context, key):
    return server + mean['id'], {}
  one = rounds.client_pass(
      toy.task(), count, aggregation.linear(keep), sample=fixed([[0, 5]]),
      broadcast=lambda server, client_id, group: server[client_id])
  after, metrics = run(one, State(bank, jnp.zeros(6), jnp.int32(0)))
  np.testing.assert_allclose(after.server - bank, (0 * 4 + 55 * 5) / 9,
                             rtol=1e-6)
  assert metrics['bytes_down'] == 2 * 4  # One row each, not the bank.


@pytest.mark.parametrize('sampler, message', [
    (sampling.uniform(7), 'cohort of 7'),
    (sampling.labeled_clients(2), 'num_labeled_clients')])
def test_impossible_cohorts_are_refused(sampler, message):
  with pytest.raises(ValueError, match=message):
    sampler(state(), toy.federation()[0], KEY)


def test_samplers_by_role_draw_from_their_role():
  federation = dataclasses.replace(toy.federation()[0], num_labeled_clients=2)
  for seed in range(10):
    key = toy.key(seed)
    labeled = sampling.labeled_clients(2)(state(), federation, key).ids
    others = sampling.unlabeled_clients(3)(state(), federation, key).ids
    assert set(labeled.ravel().tolist()) == {0, 1}
    assert set(others.ravel().tolist()) <= {2, 3, 4, 5}
    assert len(set(others.ravel().tolist())) == 3


def test_uniform_draws_everyone_equally_without_replacement():
  federation, _ = toy.federation()
  draw = jax.jit(lambda k: sampling.groups(2, 3)(state(), federation, k).ids)
  ids = np.asarray(jax.vmap(draw)(jax.random.split(KEY, 2000)))
  assert all(len(set(group)) == 3 for group in ids.reshape(-1, 3))
  chex.assert_trees_all_equal(draw(KEY), aggregation.sample_sub_consensus(
      toy.key(0), 6, groups=2, size=3))
  shares = np.bincount(ids.ravel(), minlength=6) / ids.size
  np.testing.assert_allclose(shares, 1 / 6, atol=0.01)
  chex.assert_trees_all_equal(tree.take(federation.clients, jnp.int32(2)),
                              jax.tree.map(lambda x: x[2],
                                           federation.clients))


def test_a_stream_shows_each_task_for_its_rounds():
  federation, _ = toy.federation()
  clients = federation.clients
  later = clients._replace(num_labeled=clients.num_labeled[::-1])
  stream = jax.tree.map(lambda *x: jnp.stack(x), clients, later)
  federation = dataclasses.replace(federation, stream=stream,
                                   rounds_per_task=2)
  for round_, task in ((0, clients), (1, clients), (2, later), (3, later),
                       (99, later)):
    seen = federation.at(jnp.int32(round_))
    chex.assert_trees_all_equal(seen.clients, task)
  one = rounds.client_pass(toy.task(), count, add_mean, sample=fixed([[0, 1]]))
  run_at = jax.jit(lambda r: one(state(), federation.at(r), r, KEY)[0].server)
  weights = np.array([toy.LABELED, toy.LABELED[::-1]])[:, :2]
  for round_, (first, second) in zip((0, 2), weights, strict=True):
    np.testing.assert_allclose(run_at(jnp.int32(round_)),
                               second / max(first + second, 1), rtol=1e-6)


def test_a_relay_of_labeled_clients_visits_them_one_by_one():
  federation = dataclasses.replace(toy.federation()[0], num_labeled_clients=2)
  sample = sampling.one_by_one(sampling.labeled_clients(2))
  one = rounds.client_pass(toy.task(), count, add_mean, sample=sample,
                           relay=True)
  after, _ = jax.jit(one)(state(1.0), federation, jnp.int32(0), KEY)
  # Whichever comes first, 1 -> 2 + id -> twice that + the other id.
  assert float(after.server) in ((1 + 1 + 0) * 2 + 1, (1 + 1 + 1) * 2 + 0)


def test_sparse_traffic_is_what_clients_count():
  def sparse(payload, client, key):
    update = count(payload, client, key)
    return update._replace(scalars=jnp.float32(3), scalars_down=jnp.float32(
        5) + client.id)
  one = rounds.client_pass(toy.task(), sparse, add_mean,
                           sample=fixed([[0, 5]]))
  _, metrics = run(one, state())
  assert metrics['bytes_up'] == 4 * 3 * 2
  assert metrics['bytes_down'] == 4 * (5 + 0 + 5 + 5)


@pytest.mark.parametrize('odd', [np.nan, np.inf, -np.inf, 3e38])
def test_traffic_of_no_finite_size_counts_as_none(odd):
  def sparse(payload, client, key):
    update = count(payload, client, key)
    return update._replace(
        scalars=jnp.where(client.id == 5, odd, 3).astype(jnp.float32))
  one = rounds.client_pass(toy.task(), sparse, add_mean,
                           sample=fixed([[0, 5]]))
  _, metrics = run(one, state())
  assert metrics['bytes_up'] == 4 * 3
  assert metrics['num_rejected'] == (0 if np.isfinite(odd) else 1)


def test_reserved_metric_names_are_refused():
  def clash(payload, client, key):
    return count(payload, client, key)._replace(
        metrics={'bytes_up': jnp.float32(0)})
  def rule(server, mean, cohort, context, key):
    return server, {'models_sent': jnp.float32(0)}
  for update, finish, name in (
      (clash, add_mean, 'bytes_up'),
      (count, aggregation.linear(rule), 'models_sent')):
    one = rounds.client_pass(toy.task(), update, finish, sample=fixed([[0]]))
    with pytest.raises(ValueError, match=name):
      run(one, state())


def test_means_of_two_passes_pool_their_clients():
  first = rounds.client_pass(toy.task(), count, None, sample=fixed([[0, 1]]))
  second = rounds.client_pass(toy.task(), count, None, sample=fixed([[5]]))
  _, metrics = run(rounds.chain(first, second), state())
  assert metrics['id'] == (0 + 1 + 5, 3)
  assert metrics['num_participants'] == 3


def test_a_block_within_a_block_does_not_end_it():
  """Both lists are equal when the inner block ends."""
  task = toy.task(cohort_size=2)
  with noting.passes() as outer:
    with noting.passes() as inner:
      pass
    rounds.client_pass(task, count, add_mean,
                       work=lambda shard: jnp.asarray(shard.num_labeled))
  assert (len(outer.works), len(outer.samplers)) == (1, 1)
  assert (inner.works, inner.samplers) == ([], [])
