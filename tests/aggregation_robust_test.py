"""Laws of the rules that bound what a minority of clients can do."""
from __future__ import annotations

import functools
import math
from typing import Any

import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import aggregation
from tests.stacked import five_clients, take

SIZE = 11
HOSTILE = 2
ROBUST: dict[str, Any] = {
    'median': aggregation.median,
    'trimmed_mean': aggregation.trimmed_mean,
    'krum': aggregation.krum,
    'multi_krum': aggregation.multi_krum,
    'geometric_median': functools.partial(
        aggregation.geometric_median, steps=16),
    'norm_clipped': functools.partial(aggregation.norm_clipped, max_norm=2.0)}


def as_array(tree) -> np.ndarray:
  """The leaves of rows side by side."""
  return np.concatenate([np.asarray(x, np.float64).reshape(len(x), -1)
                         for x in jax.tree.leaves(tree)], 1)


def attacked(seed: int, scale: float, together: bool):
  """Rows of which the first `HOSTILE` are garbage, and weights of one."""
  rng = np.random.default_rng(seed)
  rows = {'a': rng.normal(size=(SIZE, 3)), 'b': rng.normal(size=(SIZE, 2, 2))}
  far = rng.normal(size=(HOSTILE, 7)) * scale
  far[:] = far[0] if together else far
  rows['a'][:HOSTILE], rows['b'][:HOSTILE] = (
      far[:, :3], far[:, 3:].reshape(HOSTILE, 2, 2))
  return jax.tree.map(lambda x: x.astype(np.float32), rows), np.ones(SIZE)


attacks = hypothesis.given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.0, 0.5, 3.0, 30.0, 1e6, 1e18, 1e30]),
    together=st.booleans())
few = hypothesis.settings(max_examples=60)


@few
@attacks
def test_median_and_trimmed_mean_stay_within_the_honest_rows(
    seed, scale, together):
  rows, weights = attacked(seed, scale, together)
  honest = as_array(take(rows, slice(HOSTILE, None)))
  for rule in (aggregation.median, functools.partial(
      aggregation.trimmed_mean, trim=HOSTILE / SIZE)):
    got = as_array(jax.tree.map(lambda x: x[None], rule(rows, weights)))[0]
    slack = 1e-6
    assert (got >= honest.min(0) - slack).all()
    assert (got <= honest.max(0) + slack).all()


@few
@attacks
def test_krum_stays_near_an_honest_row(seed, scale, together):
  rows, weights = attacked(seed, scale, together)
  honest = as_array(take(rows, slice(HOSTILE, None)))
  gaps = np.linalg.norm(honest[:, None] - honest[None], axis=-1)
  f = math.ceil(0.18 * SIZE - 1e-3)
  assert f == HOSTILE and SIZE >= 2 * f + 3
  bound = gaps.max() * math.sqrt((SIZE - f - 2) / (SIZE - 2 * f - 1))
  got = as_array(jax.tree.map(
      lambda x: x[None], aggregation.krum(rows, weights, share=0.18)))[0]
  away = np.linalg.norm(honest - got, axis=-1).min()
  assert away <= bound * (1 + 1e-5)
  if scale > 100:  # Then it is one of them.
    assert away < 1e-6
  mean = as_array(jax.tree.map(
      lambda x: x[None], aggregation.multi_krum(rows, weights, share=0.18)))[0]
  hull = np.linalg.norm(mean - honest.mean(0))
  assert hull <= bound + gaps.max()


@few
@attacks
def test_the_geometric_median_stays_near_the_honest_rows(
    seed, scale, together):
  rows, weights = attacked(seed, scale, together)
  honest = as_array(take(rows, slice(HOSTILE, None)))
  radius = np.linalg.norm(honest - honest.mean(0), axis=-1).max()
  share = HOSTILE / SIZE
  got = as_array(jax.tree.map(lambda x: x[None], ROBUST['geometric_median'](
      rows, weights)))[0]
  assert np.linalg.norm(got - honest.mean(0)) <= (
      2 * radius * (1 - share) / (1 - 2 * share))


@few
@attacks
def test_clipped_rows_move_the_mean_by_a_bounded_step(seed, scale, together):
  rows, weights = attacked(seed, scale, together)
  got, alone = (as_array(jax.tree.map(lambda x: x[None], ROBUST['norm_clipped'](
      rows, w)))[0] for w in (
          weights, np.where(np.arange(SIZE) < HOSTILE, 0, weights)))
  assert np.linalg.norm(got - alone) <= 2 * HOSTILE / SIZE * 2.0 + 1e-5


def test_the_mean_has_no_such_bound():
  """Else the garbage of these tests would show nothing."""
  rows, weights = attacked(0, 1e6, True)
  mean = as_array(jax.tree.map(
      lambda x: x[None], aggregation.weighted_mean(rows, weights)))
  assert np.abs(mean).max() > 1e4


@pytest.mark.parametrize('name', ROBUST)
def test_the_order_of_the_clients_changes_nothing(name):
  for seed in range(8):
    rows, weights = attacked(seed, 3.0, bool(seed % 2))
    order = np.random.default_rng(seed).permutation(SIZE)
    chex.assert_trees_all_close(
        ROBUST[name](take(rows, order), weights[order]),
        ROBUST[name](rows, weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('rule', [
    functools.partial(aggregation.trimmed_mean, trim=0),
    functools.partial(aggregation.multi_krum, share=0),
    functools.partial(aggregation.norm_clipped, max_norm=np.inf),
    functools.partial(aggregation.geometric_median, smoothing=1e6)])
def test_where_nothing_is_left_out_a_rule_is_the_mean(rule):
  stacked, n = five_clients()
  chex.assert_trees_all_close(
      rule(stacked, n), aggregation.weighted_mean(stacked, n), rtol=1e-5,
      atol=1e-6)


@pytest.mark.parametrize('name', [
    'median', 'trimmed_mean', 'geometric_median', 'norm_clipped'])
def test_a_weight_is_as_many_rows(name):
  """What Krum is not meant to do: it counts heads."""
  stacked, _ = five_clients()
  times = np.array([1, 3, 0, 2, 1])
  copies = take(stacked, np.repeat(np.arange(5), times))
  chex.assert_trees_all_close(
      ROBUST[name](stacked, times.astype(np.float32)),
      ROBUST[name](copies, np.ones(7, np.float32)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('size', [1, 2, 3, 4, 9, 10])
def test_known_medians_and_trimmed_means(size):
  rng = np.random.default_rng(size)
  rows = rng.normal(size=(size, 4)).astype(np.float32)
  ones = np.ones(size, np.float32)
  np.testing.assert_allclose(
      aggregation.median(rows, ones), np.median(rows, 0), rtol=1e-6)
  for cut in range((size - 1) // 2 + 1):
    wanted = np.sort(rows, 0)[cut:size - cut].mean(0)
    np.testing.assert_allclose(aggregation.trimmed_mean(
        rows, ones, trim=cut / size), wanted, rtol=1e-4, atol=1e-6)


def test_krum_is_blanchards():
  """Scores added up one by one."""
  rows, weights = attacked(3, 3.0, False)
  flat = as_array(rows)
  weights[4] = 0
  there = np.flatnonzero(weights)
  f = math.ceil(0.2 * len(there))
  scores = {i: sum(sorted(((flat[i] - flat[j])**2).sum() for j in there
                          if j != i)[:len(there) - f - 2]) for i in there}
  best = min(scores, key=scores.__getitem__)
  chex.assert_trees_all_close(
      aggregation.krum(rows, weights), take(rows, best), rtol=1e-6)
  chosen = sorted(scores, key=scores.__getitem__)[:len(there) - f]
  chex.assert_trees_all_close(
      aggregation.multi_krum(rows, weights),
      jax.tree.map(lambda x: x[np.array(chosen)].mean(0), rows), rtol=1e-5)


def test_a_pair_far_away_is_not_the_nearest_to_all_of_krum():
  """Of five rows with one hostile each counts its two nearest ones."""
  rows = jnp.array([[0.], [.1], [.2], [5.], [5.05]])
  np.testing.assert_allclose(
      aggregation.krum(rows, jnp.ones(5), share=.2), [.1], rtol=1e-6)


def test_the_geometric_median_has_the_least_distances():
  rows, weights = attacked(1, 3.0, False)
  weights[:] = np.arange(1, SIZE + 1)
  flat = as_array(rows)
  def total(point):
    return (weights * np.linalg.norm(flat - point, axis=-1)).sum()
  got = as_array(jax.tree.map(lambda x: x[None], aggregation.geometric_median(
      rows, weights, steps=200)))[0]
  rng = np.random.default_rng(0)
  for _ in range(50):
    assert total(got) <= total(got + rng.normal(size=7) * 0.01) + 1e-4


@pytest.mark.parametrize('name', ROBUST)
@pytest.mark.parametrize('broken', [np.nan, np.inf, -np.inf])
def test_a_broken_row_breaks_no_result(name, broken):
  """One number of a row that is not finite leaves the result near the others.

  If all rows are broken, so is the result.
  """
  rows, weights = attacked(3, 0.0, False)
  rows['a'][0, 1] = broken
  rows['b'][0] = -50
  got = as_array(jax.tree.map(lambda x: x[None], ROBUST[name](rows, weights)))
  honest = as_array(take(rows, slice(1, None)))
  assert np.isfinite(got).all()
  assert (np.abs(got) <= np.abs(honest).max() + 1e-6).all()
  all_broken = jax.tree.map(lambda x: np.full_like(x, np.nan), rows)
  assert not np.isfinite(as_array(jax.tree.map(
      lambda x: x[None], ROBUST[name](all_broken, weights)))).any()


@pytest.mark.parametrize('name', ROBUST)
def test_an_infinite_weight_is_refused(name):
  with pytest.raises(ValueError, match='weights holds inf; allowed is 0 or'):
    ROBUST[name](jnp.ones((3, 2)), np.array([1, np.inf, 1]))


@pytest.mark.parametrize('rule, knobs', [
    (aggregation.trimmed_mean, {'trim': 0.5}),
    (aggregation.trimmed_mean, {'trim': -0.1}),
    (aggregation.krum, {'share': 0.5}),
    (aggregation.multi_krum, {'share': 1.0}),
    (aggregation.geometric_median, {'steps': 0})])
def test_what_makes_no_rule_is_refused(rule, knobs):
  with pytest.raises(ValueError, match=f'{next(iter(knobs))} .*(must|allowed)'):
    rule(jnp.ones((3, 2)), jnp.ones(3), **knobs)


def test_a_knob_may_be_an_array_of_one_number():
  rows = jnp.arange(10.).reshape(5, 2)
  trims: list[Any] = [jnp.float32(.25), np.array(.25)]
  for trim in trims:
    np.testing.assert_array_equal(
        aggregation.trimmed_mean(rows, jnp.ones(5), trim=trim),
        aggregation.trimmed_mean(rows, jnp.ones(5), trim=.25))
  with pytest.raises(ValueError, match='trim is traced, .* a Python number'):
    jax.jit(lambda trim: aggregation.trimmed_mean(
        rows, jnp.ones(5), trim=trim))(.25)


@pytest.mark.parametrize('rule', [
    aggregation.median, aggregation.trimmed_mean, aggregation.krum,
    aggregation.multi_krum, aggregation.geometric_median,
    aggregation.norm_clipped])
def test_no_clients_are_refused(rule):
  with pytest.raises(ValueError, match=r'weights .*\(0,\); allowed is 1'):
    rule({'w': jnp.ones((0, 2))}, jnp.ones(0))


@pytest.mark.parametrize('weight', [1e30, 8e37, 9e37, 3e38])
@pytest.mark.parametrize('rule', [aggregation.weighted_mean, *ROBUST.values()])
def test_no_finite_weight_is_too_large_to_be_shared(rule, weight):
  rows = jnp.array([[1.], [1.5], [1.25]])
  got = rule(rows, jnp.full(3, weight, jnp.float32))
  np.testing.assert_allclose(got, rule(rows, jnp.ones(3)), rtol=1e-6)


@pytest.mark.parametrize('size', [1e18, 1e20, 8e37, 1e38, 3e38])
def test_no_finite_row_is_too_long_to_be_measured(size):
  rows = {'w': jnp.array([[1., 2.], [size, 1.], [1.1, 2.], [1., 2.]])}
  weights = jnp.ones(4)
  got = aggregation.norm_clipped(rows, weights, max_norm=1.0)
  wide = np.asarray(rows['w'], np.float64)
  wide /= np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1)
  np.testing.assert_allclose(got['w'], wide.mean(0), rtol=1e-5)
  kept, given, rejected = aggregation.finite_or_zero(
      rows, weights, max_norm=10.0)
  np.testing.assert_array_equal(given, [1, 0, 1, 1])
  np.testing.assert_array_equal(kept['w'][1], [0, 0])
  assert int(rejected) == 1


# Krum's number of hostile rows follows that of all rows.
@pytest.mark.parametrize('name', [n for n in ROBUST if 'krum' not in n])
@pytest.mark.parametrize('broken', [np.nan, np.inf, -np.inf])
def test_one_broken_row_is_as_absent(name, broken):
  rows = np.array([[broken, 3], [1, 4], [2, 5], [4, 9]], np.float32)
  np.testing.assert_allclose(
      ROBUST[name](rows, np.ones(4)), ROBUST[name](rows[1:], np.ones(3)),
      rtol=1e-6)
  slope = jax.grad(lambda x: ROBUST[name](x, np.ones(4)).sum())(rows)
  assert np.isfinite(slope[1:]).all()


def test_many_equal_votes_have_their_mean():
  rows = jnp.ones((1_100_000, 1))
  np.testing.assert_allclose(
      aggregation.trimmed_mean(rows, jnp.ones(len(rows))), [1], rtol=1e-3)


@pytest.mark.parametrize('steps', [0, 2.5])
def test_steps_are_whole(steps):
  with pytest.raises(ValueError, match='steps is'):
    aggregation.geometric_median(np.ones((3, 1)), np.ones(3), steps=steps)
