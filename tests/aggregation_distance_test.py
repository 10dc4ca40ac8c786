"""Laws of RSCFed's distance-reweighted and sub-consensus means."""
from __future__ import annotations

import functools
from typing import Any

from absl.testing import absltest, parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import aggregation
from tests.stacked import five_clients, sum_of_squares, take

EVERYBODY = np.array([[0, 1, 2, 3, 4], [3, 1, 4, 0, 2]], np.int32)
distance_mean = aggregation.distance_reweighted_mean
sub_consensus = aggregation.sub_consensus_mean


def numpy_distance_mean(layers, sizes, scale, labeled, multiplier):
  """The authors' step as loops over plain numbers, in float64."""
  layers = [np.asarray(x, np.float64) for x in layers]
  boosted = [n * multiplier if is_labeled else n
             for n, is_labeled in zip(sizes, labeled, strict=True)]
  share = [n / sum(boosted) for n in boosted]
  mean = [sum(f * row for f, row in zip(share, x, strict=True)) for x in layers]
  weights = []
  for k, size in enumerate(sizes):
    far = sum(np.sqrt(((x[k] - m) ** 2).sum())
              for x, m in zip(layers, mean, strict=True))
    weight = share[k] * np.exp(-scale * far / size)
    weights.append(weight * (multiplier if labeled[k] else 1))
  return [sum(w * row for w, row in zip(weights, x, strict=True)) / sum(weights)
          for x in layers]


class DistanceReweightedMeanTest(parameterized.TestCase):

  @parameterized.parameters('sum_of_norms', 'global_norm')
  def test_beta_zero_is_fedavg(self, distance):
    stacked, n = five_clients()
    chex.assert_trees_all_close(
        distance_mean(stacked, n, beta=0.0, distance=distance),
        aggregation.weighted_mean(stacked, n), rtol=1e-5)

  @parameterized.parameters(1e6, 1e30, np.inf)
  def test_large_beta_is_the_nearest_row_by_distance_per_example(self, beta):
    stacked, n = five_clients()
    mean = np.average(stacked['scale'], weights=n)
    nearest = np.argmin(abs(stacked['scale'] - mean) / n)
    got = distance_mean({'x': stacked['scale']}, n, beta=beta)
    np.testing.assert_allclose(got['x'], stacked['scale'][nearest], rtol=1e-6)
    slopes = jax.jit(jax.grad(lambda s, n, b: sum_of_squares(
        distance_mean(s, n, beta=b)), (0, 1, 2)))(stacked, n, float(beta))
    chex.assert_tree_all_finite(slopes)

  def test_infinite_beta_has_the_slope_of_the_row_it_takes(self):
    rows = np.array([0.0, 1.0, 4.0], np.float32)
    slope = jax.grad(lambda x: distance_mean(x, np.ones(3), beta=np.inf))(rows)
    np.testing.assert_array_equal(slope, [0, 1, 0])

  @parameterized.parameters(0.0, 1e4, np.inf)
  def test_beta_may_be_traced(self, beta):
    stacked, n = five_clients()
    got = jax.jit(lambda b: distance_mean(stacked, n, beta=b))(beta)
    chex.assert_trees_all_close(
        got, distance_mean(stacked, n, beta=beta), rtol=1e-5)

  def test_does_not_freeze_at_the_papers_scale(self):
    rows = np.array([[-500.0], [300.0], [900.0]], np.float32)
    n = np.array([5000.0, 5000.0, 5000.0])
    got = distance_mean(rows, n, beta=1e4)
    gap = abs(rows - rows.mean())
    plain = np.exp(np.float32(-1e4) * gap / 5000)
    self.assertEqual(plain.sum(), 0)  # So the formula as printed is 0 / 0.
    np.testing.assert_allclose(got, [300.0])

  def test_a_client_far_away_loses_weight(self):
    rows = np.array([0.0, 0.1, -0.1, 10.0], np.float32)
    got = [abs(float(distance_mean(rows, np.ones(4), beta=b)))
           for b in (0.0, 0.5, 5.0)]
    self.assertEqual(got, sorted(got, reverse=True))
    self.assertLess(got[-1], 0.1)

  @parameterized.product(scale=(0.0, 2.0, 40.0), multiplier=(1.0, 6.0))
  def test_equals_an_independent_version(self, scale, multiplier):
    stacked, n = five_clients()
    labeled = [True, False, False, False, False]
    layers = list(stacked['dense'])
    got = distance_mean(layers, n, beta=scale, labeled=np.array(labeled),
                        labeled_multiplier=multiplier)
    want = numpy_distance_mean(layers, n, scale, labeled, multiplier)
    chex.assert_trees_all_close(got, [x.astype(np.float32) for x in want],
                                atol=1e-6)

  def test_multiplier_enters_twice(self):
    rows = np.array([1.0, 0.0], np.float32)  # The mean is the first's weight.
    got = distance_mean(rows, np.ones(2), beta=0.0,
                        labeled=np.array([True, False]), labeled_multiplier=3.0)
    self.assertAlmostEqual(float(got), 9 / 10, places=6)

  def test_multiplier_zero_leaves_labeled_clients_out(self):
    stacked, n = five_clients()
    labeled = np.array([True, False, False, False, True])
    got = distance_mean(stacked, n, beta=2.0, labeled=labeled,
                        labeled_multiplier=0.0)
    want = distance_mean(take(stacked, ~labeled), n[~labeled], beta=2.0)
    chex.assert_trees_all_close(got, want, rtol=1e-5)

  def test_the_two_distances_differ_by_leaves_only(self):
    stacked, n = five_clients()
    one_leaf = {'x': stacked['dense'].kernel}
    means = [distance_mean(one_leaf, n, beta=5.0, distance=d)
             for d in aggregation.DISTANCES]
    chex.assert_trees_all_close(*means, rtol=1e-6)
    one, other = (distance_mean(stacked, n, beta=5.0, distance=d)['scale']
                  for d in aggregation.DISTANCES)
    self.assertGreater(abs(float(one - other)), 1e-4)

  def test_slope_agrees_with_finite_differences(self):
    stacked, n = five_clients()

    @jax.jit
    def loss(x, n, b):
      return jnp.sum(distance_mean(x, n, beta=b) ** 3)

    kernel = jnp.asarray(stacked['dense'].kernel)
    slopes = jax.grad(loss, (0, 1, 2))(kernel, n, 8.0)
    rng = np.random.default_rng(1)
    ways = (rng.normal(size=kernel.shape), rng.normal(size=5), 0.7)
    h = 3e-3
    ends = [loss(kernel + s * h * ways[0], n + s * h * ways[1],
                 8.0 + s * h * ways[2]) for s in (1, -1)]
    slope = sum(jnp.sum(s * w) for s, w in zip(slopes, ways, strict=True))
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * h), rtol=2e-2)

  def test_bad_input_is_refused(self):
    stacked, n = five_clients()
    with self.assertRaisesRegex(ValueError, 'distance.*cosine.*sum_of_norms'):
      distance_mean(stacked, n, beta=1.0, distance='cosine')
    with self.assertRaisesRegex(ValueError, r'labeled.*\(4,\).*\(5,\)'):
      distance_mean(stacked, n, beta=1.0, labeled=np.zeros(4, bool))
    with self.assertRaisesRegex(ValueError, 'labeled.*float32.*allowed.*bool'):
      distance_mean(stacked, n, beta=1.0, labeled=np.full(5, np.float32(0.5)))
    lists: Any = [True, False, False, False, False]
    chex.assert_trees_all_equal(
        *(distance_mean(stacked, n, beta=1.0, labeled=x, labeled_multiplier=3.0)
          for x in (lists, np.array(lists))))


  @parameterized.product(
      size=(1e18, 1e20, 1e38), distance=aggregation.DISTANCES,
      beta=(1e4, np.inf))
  def test_a_row_however_far_is_left_out(self, size, distance, beta):
    rows = jnp.array([[1., 2.], [size, 1.], [1.1, 2.], [1., 2.]])
    got = distance_mean(rows, jnp.ones(4), beta=beta, distance=distance)
    chex.assert_trees_all_close(got, rows[jnp.array([0, 2, 3])].mean(0),
                                rtol=1e-6)


class SubConsensusTest(parameterized.TestCase):

  def test_one_group_of_all_is_one_distance_reweighted_mean(self):
    stacked, n = five_clients()
    labeled = np.array([False, True, False, False, False])
    knobs: dict[str, Any] = {
        'beta': 3.0, 'labeled': labeled, 'labeled_multiplier': 2.0}
    chex.assert_trees_all_close(
        sub_consensus(stacked, n, np.arange(5)[None], **knobs),
        distance_mean(stacked, n, **knobs), rtol=1e-5)

  def test_is_the_plain_mean_of_the_groups(self):
    stacked, n = five_clients()
    members = np.array([[0, 3, 4], [2, 1, 3]])
    betas = np.array([100.0, 1.0], np.float32)
    groups = [distance_mean(take(stacked, rows), n[rows], beta=b)
              for rows, b in zip(members, betas, strict=True)]
    want = jax.tree.map(lambda x, y: (x + y) / 2, *groups)
    got = sub_consensus(stacked, n, members, beta=betas)
    chex.assert_trees_all_close(got, want, atol=1e-6)

  def test_places_outside_are_empty(self):
    stacked, n = five_clients()
    got = sub_consensus(stacked, n, np.array([[1, 5, 2, -1]]), beta=3.0)
    want = sub_consensus(stacked, n, np.array([[1, 2]]), beta=3.0)
    chex.assert_trees_all_close(got, want, rtol=1e-6)

  def test_beta_of_another_length_is_refused(self):
    stacked, n = five_clients()
    with self.assertRaisesRegex(ValueError, r'beta.*\(3,\).*2 groups'):
      sub_consensus(stacked, n, EVERYBODY, beta=np.ones(3))
    with self.assertRaisesRegex(ValueError, 'members'):
      sub_consensus(stacked, n, EVERYBODY[0], beta=1.0)

  def test_draws_have_no_repetition_and_are_fair(self):
    members = np.asarray(aggregation.sample_sub_consensus(
        jax.random.key(0), 6, groups=600, size=4))
    self.assertEqual(members.shape, (600, 4))
    self.assertEqual(members.dtype, np.int32)
    for group in members:
      self.assertLen(set(group.tolist()), 4)
    shares = np.bincount(members.ravel(), minlength=6) / 600
    np.testing.assert_allclose(shares, 4 / 6, atol=0.08)
    self.assertGreater(len({tuple(sorted(g)) for g in members.tolist()}), 10)

  def test_size_of_all_is_everybody(self):
    members = aggregation.sample_sub_consensus(
        jax.random.key(1), 5, groups=3, size=5)
    np.testing.assert_array_equal(np.sort(members), [np.arange(5)] * 3)

  @parameterized.parameters((0, 2), (1, 0), (1, 6))
  def test_impossible_draws_are_refused(self, groups, size):
    with self.assertRaisesRegex(ValueError, '(groups|size) is'):
      aggregation.sample_sub_consensus(
          jax.random.key(0), 5, groups=groups, size=size)


if __name__ == '__main__':
  absltest.main()


def test_no_groups_are_refused():
  with pytest.raises(ValueError, match='no group'):
    sub_consensus({'w': jnp.ones((3, 2))}, jnp.ones(3),
                  np.zeros((0, 2), int), beta=1.0)


WIDE = np.array([3_000_000_000, 1_000_000_000])


@pytest.mark.parametrize('weights', [WIDE, [*map(int, WIDE)], [*WIDE],
                                     WIDE.astype(np.uint32)])
def test_weights_may_be_numbers_of_64_bits(weights):
  rows = np.array([[1, 2], [3, 4]], np.float32)
  for rule in (aggregation.weighted_mean,
               functools.partial(aggregation.distance_reweighted_mean, beta=0)):
    np.testing.assert_allclose(rule(rows, weights), [1.5, 2.5], rtol=1e-6)
  np.testing.assert_allclose(aggregation.median(
      np.array([[1], [2], [3]], np.float32),
      np.array([3_000_000_000, 1, 1])), [1])
  _, kept, rejected = aggregation.finite_or_zero(rows, weights,
                                                 max_norm=10**10)
  assert rejected == 0
  np.testing.assert_allclose(kept, WIDE)


@pytest.mark.parametrize('number', [int, float, np.float32])
def test_at_its_ends_an_average_reads_one_tree(number):
  whole, broken = (np.full(1, x, np.float32) for x in (2, np.nan))
  np.testing.assert_array_equal(
      aggregation.ema(broken, whole, number(0)), whole)
  np.testing.assert_array_equal(
      aggregation.ema(whole, broken, number(1)), whole)
  slope = jax.grad(lambda d: aggregation.ema(whole, 2 * whole, d)[0])
  assert slope(np.float32(number(0))) == slope(np.float32(number(1))) == -2


def test_complex_rows_have_a_length():
  rows = np.array([[1 + 2j], [.1j]], np.complex64)
  kept, _, rejected = aggregation.finite_or_zero(rows, np.ones(2), max_norm=.5)
  assert rejected == 1
  np.testing.assert_array_equal(kept, [[0], rows[1]])


@pytest.mark.parametrize('call, said', [
    (lambda x, none: aggregation.weighted_mean(x, none),
     'weights is None; allowed is one number per client'),
    (lambda x, none: aggregation.trimmed_mean(x, np.ones(2), trim=none),
     'trim is None; allowed is a value such as 0.2'),
    (lambda x, none: aggregation.norm_clipped(x, np.ones(2), max_norm=none),
     'max_norm is None')])
def test_none_is_refused_by_name(call, said):
  with pytest.raises(ValueError, match=said):
    call(np.ones((2, 1), np.float32), None)
