"""True epochs: every row once, masks for the rest, no hidden label."""
from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Shard
from fedjax_ssl.data import batching
from tests import toy

KEY = toy.key(5)


def visits(task, shard, streams='both', key=KEY):
  """Rows visited at each step: a list of {stream: sorted rows}."""
  federation, _ = toy.federation()
  rows = jnp.arange(federation.train.labels.size, dtype=jnp.int32)
  marked = federation.train._replace(inputs=rows)
  made = batching.batches(task, marked, shard, key, streams)
  cursor, out = made.start(), []
  step = jax.jit(made.next)
  for t in range(int(made.num_steps)):
    cursor, pair, used = step(cursor, jnp.int32(t))
    seen = {}
    for name in ('labeled', 'unlabeled'):
      batch = getattr(pair, name)
      if batch is not None:
        real = np.asarray(batch.mask) > 0
        seen[name] = np.asarray(batch.inputs)[real].tolist()
        if name == 'unlabeled':
          assert (np.asarray(batch.labels) == -1).all()
        else:
          np.testing.assert_array_equal(
              batch.labels, federation.train.labels[batch.inputs])
    assert float(used) == sum(map(len, seen.values()))
    out.append(seen)
  return out


def shard_of(client):
  return tree.take(toy.federation()[0].clients, jnp.int32(client))


@pytest.mark.parametrize('n, pieces', [
    (60000, 100000), (70000, 46342), (2**31 - 1, 2**20), (1023, 2**20),
    (30000, 7), (0, 5), (2**20 - 1, 2**20)])
def test_even_batches_are_as_in_whole_numbers_of_any_size(n, pieces):
  places = np.unique(np.concatenate([
      np.arange(min(pieces, 3000)), np.linspace(0, pieces, 3000).astype(int)]))
  got = batching._share(jnp.int32(n), jnp.asarray(places, jnp.int32),
                        jnp.int32(pieces))
  assert got.tolist() == [n * int(place) // pieces for place in places]


@pytest.mark.parametrize('client', range(toy.NUM_CLIENTS))
def test_an_epoch_visits_every_row_of_the_longer_stream_once(client):
  shard = shard_of(client)
  seen = visits(toy.task(), shard)
  n_s, n_u = toy.LABELED[client], toy.UNLABELED[client]
  assert len(seen) == max(-(-n_s // 3), -(-n_u // 4))
  unlabeled = [row for step in seen for row in step['unlabeled']]
  if -(-n_u // 4) >= -(-n_s // 3):
    assert sorted(unlabeled) == sorted(shard.unlabeled[:n_u].tolist())
  labeled = [row for step in seen for row in step['labeled']]
  own = shard.labeled[:n_s].tolist()
  assert set(labeled) == (set(own) if seen else set())
  # The shorter stream starts over: no row is ahead by more than one visit.
  if own:
    counts = [labeled.count(row) for row in own]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize('kept', [(), (1,), (0, 3, 4, 8)])
def test_some_unlabeled_rows_with_labels_of_their_own(kept):
  """Those chosen are visited once an epoch, each with the label given it."""
  federation, _ = toy.federation()
  shard = shard_of(0)
  width = shard.unlabeled.shape[0]
  chosen = jnp.zeros(width, bool).at[jnp.array(kept, jnp.int32)].set(True)
  given = 10 + jnp.arange(width, dtype=jnp.int32)
  # Padding is not taken, wanted or not.
  part, order = batching.select_unlabeled(
      shard, chosen | (jnp.arange(width) >= toy.UNLABELED[0]))
  made = batching.batches(toy.task(), federation.train, part, KEY,
                          'unlabeled', pseudo_labels=given[order])
  cursor, seen = made.start(), {}
  for t in range(int(made.num_steps)):
    cursor, pair, _ = made.next(cursor, jnp.int32(t))
    real = np.asarray(pair.unlabeled.mask) > 0
    places = np.asarray(order)[np.asarray(pair.unlabeled.slots)[real]]
    labels = np.asarray(pair.unlabeled.labels)[real]
    images = np.asarray(pair.unlabeled.inputs)[real]
    for place, label, image in zip(places, labels, images, strict=True):
      assert int(place) not in seen
      seen[int(place)] = int(label)
      np.testing.assert_array_equal(
          image, federation.train.inputs[shard.unlabeled[int(place)]])
  assert seen == {place: 10 + place for place in kept}


def test_epochs_differ_in_order_and_keys_decide():
  task = toy.task(local_epochs=2)
  seen = [s['unlabeled'] for s in visits(task, shard_of(2), 'unlabeled')]
  first, second = seen[:3], seen[3:]
  assert sorted(sum(first, [])) == sorted(sum(second, []))
  assert first != second
  other = visits(task, shard_of(2), 'unlabeled', toy.key(6))
  assert seen != [s['unlabeled'] for s in other]
  again = visits(task, shard_of(2), 'unlabeled')
  assert seen == [s['unlabeled'] for s in again]


@pytest.mark.parametrize('streams, n', [('labeled', 7), ('unlabeled', 0)])
def test_a_stream_not_used_costs_no_step(streams, n):
  seen = visits(toy.task(), shard_of(1), streams)
  assert len(seen) == -(-n // 3)
  assert all(set(step) == {streams} for step in seen)


def test_splitting_deals_all_unlabeled_rows_over_the_labeled_steps():
  capacity = batching.unlabeled_capacity(
      toy.LABELED, toy.UNLABELED, labeled_batch=3)
  assert capacity == 3  # 1.5 times a mean of 5.5 rows over 4 steps.
  for changes, steps in (({'unlabeled_capacity': 4}, 4),
                         ({'unlabeled_capacity': 2}, None)):
    task = toy.task(unlabeled_batch=0, **changes)
    for client, n_u in enumerate(toy.UNLABELED):
      shard = shard_of(client)
      seen = visits(task, shard)
      empty = client == toy.NOBODY
      assert len(seen) == (0 if empty else steps or max(4, -(-n_u // 2)))
      rows = [row for step in seen for row in step['unlabeled']]
      assert sorted(rows) == sorted(shard.unlabeled[:n_u].tolist())


def test_many_rows_are_split_over_many_steps():
  """Their product is beyond int32."""
  n, pieces = 100_000, 30_000
  stream = batching._Stream(jnp.arange(n), jnp.int32(n), 5, jnp.int32(pieces),
                            True, KEY)
  order = jnp.arange(n, dtype=jnp.int32)
  places, mask = jax.jit(lambda steps: lax.map(
      lambda step: stream.next(order, step)[1:], steps))(jnp.arange(1, pieces))
  np.testing.assert_array_equal(
      places[mask > 0], np.arange(n // pieces, n))  # Each row once, in order.


def test_local_steps_rule_where_there_are_rows():
  task = toy.task(local_steps=5)
  for client in range(toy.NUM_CLIENTS):
    steps = batching.num_steps(task, shard_of(client))
    assert int(steps) == (0 if client == toy.NOBODY else 5)


def test_an_empty_shard_makes_masked_batches():
  empty = Shard(*(jnp.zeros_like(x) for x in shard_of(0)))
  federation, _ = toy.federation()
  made = batching.batches(toy.task(), federation.train, empty, KEY)
  _, pair, used = made.next(made.start(), jnp.int32(0))
  assert int(made.num_steps) == 0 and float(used) == 0
  assert not pair.labeled.mask.any() and not pair.unlabeled.mask.any()


def test_labels_for_a_table_without_columns():
  federation, _ = toy.federation()
  shard = shard_of(1)
  shard = shard._replace(unlabeled=shard.unlabeled[:0])
  made = batching.batches(toy.task(), federation.train, shard, KEY,
                          pseudo_labels=jnp.zeros(0, jnp.int32))
  _, pair, used = made.next(made.start(), jnp.int32(0))
  assert float(used) == 3 and not pair.unlabeled.mask.any()


def test_capacity_is_half_again_the_mean_width_or_the_widest():
  def width(labeled, unlabeled, **changes):
    return batching.unlabeled_capacity(labeled, unlabeled, labeled_batch=10,
                                       **changes)
  # Means of 10 rows over 4 steps: 2.5 wide, 3.75 with the half.
  assert width([4, 4], [0, 20], local_steps=4) == 4
  assert width([4, 4], [8, 12], local_steps=4) == 3
  # round(25 / 10) = 2 counts as 4 steps, round(35 / 10) = 4 as itself.
  assert width([25], [40]) == width([35], [40]) == 10
  assert width([60, 60], [60, 60]) == 10 and width([60], [0]) == 1


def test_each_row_is_first_equally_often():
  federation, _ = toy.federation()
  def first(key):
    made = batching.batches(toy.task(labeled_batch=1), federation.train,
                            shard_of(1), key, 'labeled')
    _, pair, _ = made.next(made.start(), jnp.int32(0))
    return pair.labeled.inputs.sum()
  sums = jax.jit(jax.vmap(first))(jax.random.split(KEY, 3500))
  _, counts = np.unique(np.asarray(sums), return_counts=True)
  assert counts.size == 7
  np.testing.assert_allclose(counts / 3500, 1 / 7, atol=0.03)


def test_progress_runs_from_the_first_step_to_the_last_of_the_run():
  federation, _ = toy.federation()
  task = toy.task(schedule_rounds=4)
  seen = []
  for round_ in range(4):
    made = batching.batches(task, federation.train, shard_of(2), KEY,
                            round_=round_)
    for step in range(int(made.num_steps)):
      _, pair, _ = made.next(made.start(), jnp.int32(step))
      seen.append(float(pair.progress))
  np.testing.assert_allclose(seen, np.arange(1, 13) / 12, rtol=1e-6)
