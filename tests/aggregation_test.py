"""Laws of the aggregation rules."""
from __future__ import annotations

import functools
from typing import Any

from absl.testing import absltest, parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import aggregation
from tests.stacked import five_clients, sum_of_squares, take

EVERYBODY = np.array([[0, 1, 2, 3, 4], [3, 1, 4, 0, 2]], np.int32)
distance_mean = aggregation.distance_reweighted_mean
sub_consensus = aggregation.sub_consensus_mean

RULES = (
    ('weighted', aggregation.weighted_mean),
    ('reliability', aggregation.reliability_weighted_mean),
    ('distance', functools.partial(distance_mean, beta=3.0)),
    ('nearest', functools.partial(distance_mean, beta=np.inf)),
    ('sub_consensus', functools.partial(
        sub_consensus, members=EVERYBODY, beta=np.array([0.0, 3.0]))),
    ('median', aggregation.median),
    ('trimmed', aggregation.trimmed_mean),
    ('krum', aggregation.krum),
    ('multi_krum', aggregation.multi_krum),
    ('geometric_median', aggregation.geometric_median),
    ('norm_clipped', functools.partial(
        aggregation.norm_clipped, max_norm=100.0)),
)


def slopes_of(rule):
  return jax.jit(jax.grad(lambda s, n: sum_of_squares(rule(s, n)), (0, 1)))


class EveryRuleTest(parameterized.TestCase):

  @parameterized.named_parameters(*RULES)
  def test_client_order_is_irrelevant(self, rule):
    stacked, n = five_clients()
    order = np.array([3, 0, 4, 2, 1])
    chex.assert_trees_all_close(
        rule(take(stacked, order), n[order]), rule(stacked, n), rtol=1e-5)

  @parameterized.named_parameters(*RULES)
  def test_weights_sum_to_one(self, rule):
    stacked, n = five_clients()
    same = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), stacked)
    chex.assert_trees_all_close(rule(same, n), take(same, 0), rtol=1e-5)

  @parameterized.named_parameters(*RULES)
  def test_shift_of_all_rows_shifts_the_mean(self, rule):
    stacked, n = five_clients()
    shifted = jax.tree.map(lambda x: x + 2, stacked)
    moved = jax.tree.map(lambda x: x - 2, rule(shifted, n))
    chex.assert_trees_all_close(moved, rule(stacked, n), atol=2e-6)

  @parameterized.named_parameters(*RULES)
  def test_all_zero_weights_give_zeros(self, rule):
    stacked, n = five_clients()
    zeros = jax.tree.map(lambda x: np.zeros_like(x[0]), stacked)
    chex.assert_trees_all_equal(rule(stacked, 0 * n), zeros)

  @parameterized.named_parameters(*RULES)
  def test_broken_row_of_weight_zero_is_an_absent_row(self, rule):
    stacked, n = five_clients()
    n[[1, 3]] = 0
    broken = jax.tree.map(np.copy, stacked)
    for leaf in jax.tree.leaves(broken):
      leaf[1], leaf[3] = np.nan, np.inf
    chex.assert_trees_all_equal(rule(broken, n), rule(stacked, n))
    chex.assert_tree_all_finite(slopes_of(rule)(broken, n))

  @parameterized.named_parameters(*RULES)
  def test_works_under_jit_vmap_and_grad(self, rule):
    stacked, n = five_clients()
    both = jax.tree.map(lambda x: np.stack([x, x[::-1]]), stacked)
    sizes = np.stack([n, n[::-1]])
    got = jax.jit(jax.vmap(rule))(both, sizes)
    chex.assert_trees_all_close(take(got, 0), rule(stacked, n), rtol=1e-5)
    chex.assert_trees_all_close(
        take(got, 1), rule(take(stacked, slice(None, None, -1)), n[::-1]),
        rtol=1e-5)
    slopes = jax.vmap(slopes_of(rule))(both, sizes)
    chex.assert_tree_all_finite(slopes)
    self.assertGreater(float(sum_of_squares(slopes[0])), 0)

  @parameterized.named_parameters(*RULES)
  def test_derivative_is_finite_where_all_rows_agree(self, rule):
    stacked, n = five_clients()
    ones = jax.tree.map(np.ones_like, stacked)
    slopes = slopes_of(rule)
    chex.assert_tree_all_finite((slopes(ones, n), slopes(ones, 0 * n)))

  @parameterized.named_parameters(*RULES)
  def test_dtypes_are_kept_and_sums_run_in_float32(self, rule):
    stacked, n = five_clients(jnp.bfloat16)
    got = rule(stacked, n)
    chex.assert_trees_all_equal_dtypes(got, take(stacked, 0))
    wide = jax.tree.map(lambda x: x.astype(np.float32), stacked)
    rounded = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16), rule(wide, n))
    chex.assert_trees_all_equal(got, rounded)

  @parameterized.named_parameters(*RULES)
  def test_integer_leaves_are_rounded(self, rule):
    _, n = five_clients()
    counts = {'steps': np.array([10, 12, 11, 10, 12], np.int32)}
    got = rule(counts, n)['steps']
    self.assertEqual(got.dtype, jnp.int32)
    exact = rule({'steps': counts['steps'].astype(np.float32)}, n)['steps']
    self.assertEqual(int(got), round(float(exact)))

  @parameterized.named_parameters(*RULES)
  def test_error_names_the_leaf(self, rule):
    stacked, n = five_clients()
    stacked['dense'] = stacked['dense']._replace(bias=np.zeros((4, 2)))
    with self.assertRaisesRegex(ValueError, r"\['dense'\]\.bias.*\(4, 2\).*5"):
      rule(stacked, n)
    stacked['dense'] = stacked['dense']._replace(bias=np.float32(1))
    with self.assertRaisesRegex(ValueError, r"\['dense'\]\.bias"):
      rule(stacked, n)

  @parameterized.named_parameters(*RULES)
  def test_weights_must_be_one_number_a_client(self, rule):
    stacked, n = five_clients()
    with self.assertRaisesRegex(ValueError, r'\(5, 1\)'):
      rule(stacked, n[:, None])

  @parameterized.named_parameters(*RULES)
  def test_broken_weights_are_as_absent_after_finite_or_zero(self, rule):
    stacked, n = five_clients()
    for weight in (np.nan, np.inf, -np.inf, -1.0):
      broken = np.where(np.arange(5) == 2, np.float32(weight), n)
      kept, weights, _ = aggregation.finite_or_zero(stacked, broken)
      chex.assert_trees_all_equal(
          rule(kept, weights), rule(stacked, n * (np.arange(5) != 2)))

  @parameterized.named_parameters(*RULES)
  def test_weights_up_to_1e37_sum_to_one(self, rule):
    stacked, _ = five_clients()
    same = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), stacked)
    most = np.full(5, 1.99e36, np.float32)
    chex.assert_trees_all_close(rule(same, most), take(same, 0), rtol=1e-5)

  @parameterized.named_parameters(*RULES)
  def test_empty_trees_pass_through(self, rule):
    _, n = five_clients()
    self.assertEqual(rule({}, n), {})
    self.assertEqual(rule({'a': np.zeros((5, 0))}, n)['a'].shape, (0,))


class WeightedMeanTest(absltest.TestCase):

  def test_is_numpy_average(self):
    stacked, n = five_clients()
    want = np.average(stacked['dense'].kernel, axis=0, weights=n)
    for rule in (aggregation.weighted_mean,
                 aggregation.reliability_weighted_mean):
      np.testing.assert_allclose(
          rule(stacked, n)['dense'].kernel, want, rtol=1e-5)

  def test_equal_scores_are_the_plain_mean(self):
    stacked, n = five_clients()
    got = aggregation.reliability_weighted_mean(stacked, np.full(5, 0.3))
    np.testing.assert_allclose(
        got['scale'], stacked['scale'].mean(), rtol=1e-5)
    del n

  def test_a_broken_row_that_counts_is_not_hidden(self):
    stacked, n = five_clients()
    stacked['scale'][2] = np.nan
    got = aggregation.weighted_mean(stacked, n)
    self.assertTrue(np.isnan(got['scale']))
    self.assertTrue(np.isfinite(got['dense'].bias).all())

  def test_scale_of_the_weights_is_irrelevant(self):
    stacked, n = five_clients()
    want = aggregation.weighted_mean(stacked, n)
    for scale in (1e-30, 1e36):  # The second sum would overflow.
      got = aggregation.weighted_mean(stacked, n * np.float32(scale))
      chex.assert_trees_all_close(got, want, rtol=1e-5)

  def test_derivative_by_a_zero_weight(self):
    rows = np.array([1.0, 5.0], np.float32)
    slope = jax.grad(lambda w: aggregation.weighted_mean(rows, w))(
        np.array([2.0, 0.0], np.float32))
    np.testing.assert_allclose(slope, [0, (5 - 1) / 2], atol=1e-6)


class EmaTest(absltest.TestCase):

  def test_extremes_and_middle(self):
    old: dict[str, Any] = {
        'a': np.array([1.0, 2.0], np.float32), 'n': np.int32(4)}
    new = {'a': np.array([3.0, 8.0], np.float32), 'n': np.int32(9)}
    chex.assert_trees_all_equal(aggregation.ema(old, new, 1.0), old)
    chex.assert_trees_all_equal(aggregation.ema(old, new, 0.0), new)
    got = aggregation.ema(old, new, 0.75)
    np.testing.assert_allclose(got['a'], [1.5, 3.5])
    self.assertEqual(int(got['n']), 5)  # 5.25, rounded.

  def test_bfloat16_does_not_stall(self):
    old = jnp.ones((), jnp.bfloat16)
    got = aggregation.ema(old, 2 * old, 0.99)
    self.assertEqual(got.dtype, jnp.bfloat16)
    self.assertEqual(got, jnp.bfloat16(1.01))


  def test_trees_of_two_forms_are_refused_by_leaf(self):
    old = {'w': np.ones((2, 3)), 'b': np.ones(3)}
    with self.assertRaisesRegex(
        ValueError, r"new\['w'\] has shape \(3,\); allowed is \(2, 3\)"):
      aggregation.ema(old, old | {'w': np.ones(3)}, 0.5)
    with self.assertRaisesRegex(ValueError, r"structure.*\['b'\] is in one"):
      aggregation.ema(old, {'w': old['w']}, 0.5)
    with self.assertRaisesRegex(ValueError, 'types of their nodes'):
      aggregation.ema([old], (old,), 0.5)


class RangeTest(parameterized.TestCase):

  @parameterized.parameters(
      (aggregation.norm_clipped, 'max_norm', -1.0, 'above 0'),
      (aggregation.norm_clipped, 'max_norm', 0.0, 'above 0'),
      (aggregation.geometric_median, 'smoothing', 0.0, 'above 0'),
      (distance_mean, 'beta', -1e9, '0 or more'),
      (distance_mean, 'beta', float('nan'), '0 or more'),
      (sub_consensus, 'beta', np.array([1.0, -1.0]), '0 or more'),
      (distance_mean, 'labeled_multiplier', -2.0, '0 or more'),
      (aggregation.finite_or_zero, 'max_norm', -1.0, '0 or more'),
      (aggregation.ema, 'decay', 2.0, '0 to 1'),
      (aggregation.ema, 'decay', np.float32(-0.1), '0 to 1'))
  def test_numbers_that_turn_a_rule_around_are_refused(
      self, rule, name, value, allowed):
    stacked, n = five_clients()
    args = {aggregation.ema: (stacked, stacked),
            sub_consensus: (stacked, n, EVERYBODY)}.get(rule, (stacked, n))
    knobs = {'beta': 1.0} if rule is distance_mean else {}
    message = f'{name} (is|holds) .*; allowed is {allowed}'
    with self.assertRaisesRegex(ValueError, message):
      rule(*args, **knobs | {name: value})

  @parameterized.parameters(
      aggregation.weighted_mean, aggregation.reliability_weighted_mean,
      aggregation.median, aggregation.trimmed_mean, aggregation.krum,
      aggregation.multi_krum, aggregation.geometric_median,
      aggregation.norm_clipped, functools.partial(distance_mean, beta=1.0))
  def test_negative_weights_are_refused(self, rule):
    stacked, n = five_clients()
    good = np.asarray(n)
    rule(stacked, good)
    for bad in (good - 2 * good.max(), [*(good - 2 * good.max()).tolist()],
                np.where(np.arange(5) == 3, np.nan, good)):
      with self.assertRaisesRegex(ValueError, 'holds .*; allowed is 0 or more'):
        rule(stacked, bad)

  def test_checked_rules_are_lowered_like_others(self):
    stacked, n = five_clients()
    rule: Any = aggregation.norm_clipped
    text = rule.lower(stacked, n, max_norm=1.0).as_text()
    self.assertIn('stablehlo', text)

  def test_the_place_of_a_number_does_not_matter(self):
    with self.assertRaisesRegex(ValueError, 'decay is 2.0'):
      aggregation.ema(np.ones(3), np.ones(3), 2.0)

  def test_numbers_that_jax_holds_are_not_read(self):
    got = jax.jit(aggregation.ema)(np.ones(3), np.zeros(3), 2.0)
    np.testing.assert_array_equal(got, 2)


class FiniteOrZeroTest(absltest.TestCase):

  def test_finite_rows_are_untouched(self):
    stacked, n = five_clients()
    got, weights, rejected = aggregation.finite_or_zero(stacked, n)
    chex.assert_trees_all_equal((got, weights), (stacked, n))
    self.assertEqual(int(rejected), 0)

  def test_broken_rows_are_as_absent(self):
    stacked, n = five_clients()
    stacked['dense'].kernel[0, 1, 1] = np.nan
    stacked['scale'][2] = -np.inf
    kept, weights, rejected = aggregation.finite_or_zero(stacked, n)
    self.assertEqual(int(rejected), 2)
    others = np.array([1, 3, 4])
    chex.assert_trees_all_equal(take(kept, others), take(stacked, others))
    chex.assert_trees_all_close(
        aggregation.weighted_mean(kept, weights),
        aggregation.weighted_mean(take(stacked, others), n[others]), rtol=1e-5)
    chex.assert_tree_all_finite(kept)

  def test_broken_weights_are_rejected(self):
    stacked, n = five_clients()
    n[[0, 1, 2]] = np.nan, np.inf, -1
    _, weights, rejected = aggregation.finite_or_zero(stacked, n)
    np.testing.assert_array_equal(weights, [0, 0, 0, 5, 7])
    self.assertEqual(int(rejected), 3)

  def test_rows_of_weight_zero_do_not_count_as_rejected(self):
    stacked, n = five_clients()
    stacked['scale'][2], n[2] = np.nan, 0
    kept, _, rejected = aggregation.finite_or_zero(stacked, n)
    self.assertEqual(int(rejected), 0)
    chex.assert_tree_all_finite(kept)

  def test_long_rows_are_left_out_only_when_asked(self):
    rows = {'a': np.array([3.0, 1e30, 3.1], np.float32)[:, None],
            'b': np.array([4.0, 0.0, 4.0], np.float32)}

    def keep(limit):
      return aggregation.finite_or_zero(rows, np.ones(3), max_norm=limit)[1]

    np.testing.assert_array_equal(keep(np.inf), [1, 1, 1])
    np.testing.assert_array_equal(keep(5.0), [1, 0, 0])
    np.testing.assert_array_equal(keep(6.0), [1, 0, 1])

  def test_dtypes_are_kept(self):
    stacked = {'f': np.array([1, np.nan], jnp.bfloat16), 'i': np.arange(2),
               'b': np.array([True, True])}
    kept, _, rejected = aggregation.finite_or_zero(stacked, np.ones(2))
    self.assertEqual(kept['f'].dtype, jnp.bfloat16)
    self.assertEqual(kept['b'].dtype, bool)
    np.testing.assert_array_equal(kept['b'], [True, False])
    self.assertEqual(int(rejected), 1)


class LinearTest(absltest.TestCase):

  def test_marks_and_returns_the_rule_itself(self):
    def finish(server, mean, cohort, context, key):
      del cohort, context, key
      return server + mean, {}

    self.assertFalse(hasattr(finish, 'is_linear'))
    self.assertIs(aggregation.linear(finish), finish)
    self.assertTrue(getattr(finish, 'is_linear', False))
    self.assertTrue(getattr(finish, 'is_replaceable', False))
    aggregation.linear(finish, replaceable=False)
    self.assertFalse(getattr(finish, 'is_replaceable', True))

  def test_marks_what_calls_a_bound_method(self):
    class Rule:

      def finish(self, server, mean):
        return server + mean

    marked = aggregation.linear(Rule().finish)
    self.assertTrue(getattr(marked, 'is_linear', False))
    self.assertEqual(marked(1, 2), 3)


if __name__ == '__main__':
  absltest.main()
