"""Laws of clipping and noise, and epsilon against dp-accounting itself."""
from __future__ import annotations

import math
from unittest import mock

from absl.testing import absltest, parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import privacy

DELTA = 1e-5


def _loss(params, row):
  x, y = row
  return (jnp.tanh(x @ params['w']) - y) ** 2 + (params['b'] * x).sum()


def _problem():
  rng = np.random.default_rng(0)
  params = {'w': rng.normal(size=3).astype(np.float32),
            'b': rng.normal(size=3).astype(np.float32)}
  rows = (rng.normal(size=(7, 3)).astype(np.float32) * 3,
          rng.normal(size=7).astype(np.float32))
  mask = np.array([1, 1, 0, 1, 1, 0, 1], np.float32)
  return params, rows, mask


def _by_loop(params, rows, mask, norms):
  """The sum, row by row in NumPy."""
  total = {k: np.zeros(3) for k in params}
  for i in np.flatnonzero(mask):
    grads = jax.grad(_loss)(params, (rows[0][i], rows[1][i]))
    for k, g in grads.items():
      norm = np.linalg.norm(g)
      total[k] = total[k] + np.asarray(g) * min(1.0, norms[k] / norm)
  return total


class ClippingTest(parameterized.TestCase):

  @parameterized.product(microbatch=[0, 1, 3, 100],
                         norm=[0.3, 2.0, math.inf])
  def test_sum_equals_a_loop(self, microbatch, norm):
    params, rows, mask = _problem()
    norms = {'w': norm, 'b': 2 * norm}
    got = privacy.clipped_sum(
        lambda row: jax.grad(_loss)(params, row), rows, mask,
        clip_norm=norms, microbatch=microbatch)
    chex.assert_trees_all_close(
        got, _by_loop(params, rows, mask, norms), rtol=1e-5, atol=1e-5)

  def test_rows_may_hold_keys(self):
    def gradient(row):
      x, key = row
      return {'w': x + jax.random.normal(key, x.shape)}
    rows = jnp.ones((5, 2)), jax.random.split(jax.random.key(0), 5)
    whole, cut = (privacy.clipped_sum(
        gradient, rows, np.ones(5), clip_norm={'w': 1.0}, microbatch=size)
                  for size in (0, 2))
    chex.assert_trees_all_close(whole, cut, rtol=1e-6)

  def test_a_row_changes_the_sum_by_at_most_the_norms(self):
    params, rows, mask = _problem()
    norms = {'w': 0.3, 'b': 0.4}
    def total(mask):
      return privacy.clipped_sum(
          lambda row: jax.grad(_loss)(params, row), rows, mask,
          clip_norm=norms)
    whole = total(np.ones(7, np.float32))
    for i in range(7):
      gap = jax.tree.map(jnp.subtract, whole, total(
          np.delete(np.eye(7), i, 0).sum(0).astype(np.float32)))
      size = math.sqrt(sum(float(jnp.sum(x**2)) for x in gap.values()))
      self.assertLessEqual(size, 0.5 + 1e-5)

  def test_clipping_keeps_directions_and_small_trees(self):
    tree = {'a': jnp.array([3.0, 0.0]), 'b': jnp.array([4.0])}
    chex.assert_trees_all_close(
        privacy.clip(tree, 1.0), {'a': jnp.array([.6, 0]), 'b': jnp.array(
            [.8])})
    chex.assert_trees_all_equal(privacy.clip(tree, 5.0), tree)
    broken = {'a': jnp.array([jnp.nan]), 'b': jnp.ones(2)}
    chex.assert_trees_all_equal(
        privacy.clip(broken, 1.0), jax.tree.map(jnp.zeros_like, broken))

  @parameterized.product(
      size=[1e-30, 1e-19, 1e-3, 1.0, 1e10, 1e19, 3e19, 1e30, 1e38, 3.4e38],
      norm=[1e-32, 1e-3, 1.0, 1e3, math.inf])
  def test_any_finite_tree_is_clipped_to_the_norm_and_never_above(
      self, size, norm):
    if norm == 1e-32 and size > 1e30:
      self.skipTest('Their ratio is below what float32 holds.')
    # Four times as long as `size`: more than float32 holds, at the end.
    part = np.array([[0.6, -0.8], [0, 1], [1, 0]] * 5, np.float32)
    tree = {'a': jnp.asarray(part * np.float32(size)),
            'b': jnp.full((), size, jnp.float32)}
    exact = np.append(np.float64(tree['a']), np.float64(tree['b']))
    length = np.linalg.norm(exact)
    for clip in (privacy.clip, jax.jit(privacy.clip)):
      got = clip(tree, norm)
      flat = np.append(np.float64(got['a']), np.float64(got['b']))
      if length <= norm:
        chex.assert_trees_all_equal(got, tree)
        continue
      self.assertLessEqual(np.linalg.norm(flat), norm * (1 + 1e-6))
      np.testing.assert_allclose(flat / norm, exact / length, atol=1e-6)

  @parameterized.parameters(1e-8, 1e-3, 1.0, 1e3, 1e8)
  def test_ordinary_sizes_keep_the_bits_of_the_plain_formula(self, size):
    rng = np.random.default_rng(0)
    tree = [jnp.asarray(size * rng.normal(size=shape), jnp.float32)
            for shape in ((1000,), (37, 11), ())]
    def plain(tree, bound):
      norm = jnp.sqrt(jnp.sum(jnp.stack(
          [jnp.sum(jnp.square(x)) for x in tree])))
      return [x * jnp.minimum(1, bound / norm) for x in tree]
    length = math.sqrt(sum(float(jnp.sum(x**2)) for x in tree))
    for bound in (0.3 * length, 0.3, 2 * length):
      for compiled in (lambda f: f, jax.jit):
        chex.assert_trees_all_equal(compiled(privacy.clip)(tree, bound),
                                    compiled(plain)(tree, bound))

  @parameterized.product(value=[math.nan, math.inf, -math.inf],
                         norm=[1.0, math.inf], size=[1.0, 1e38])
  def test_what_is_not_finite_becomes_zero_as_a_whole(self, value, norm, size):
    tree = {'a': jnp.array([size, value]), 'b': jnp.full(3, size)}
    chex.assert_trees_all_equal(
        privacy.clip(tree, norm), jax.tree.map(jnp.zeros_like, tree))

  def test_nothing_and_zeros_stay_as_they_are(self):
    for tree in ((), {'a': jnp.zeros(3), 'b': jnp.zeros((0, 2))}):
      chex.assert_trees_all_equal(privacy.clip(tree, 0.5), tree)

  def test_noise_has_its_spread_and_none_adds_none(self):
    tree = {'a': jnp.zeros(20_000), 'b': jnp.ones((100, 200))}
    noisy = privacy.gaussian(jax.random.key(0), tree, 3.0)
    for name, x in noisy.items():
      gap = np.asarray(x - tree[name])
      self.assertAlmostEqual(gap.std(), 3.0, delta=0.06)
      self.assertAlmostEqual(gap.mean(), 0.0, delta=0.09)
    correlation = np.corrcoef(noisy['a'], noisy['b'].ravel())[0, 1]
    self.assertLess(abs(correlation), 0.03)
    chex.assert_trees_all_equal(
        privacy.gaussian(jax.random.key(0), tree, 0.0), tree)

  @parameterized.named_parameters(
      ('parts', {'clip_norm': {'w': 1.0}}, 'clip_norm'),
      ('microbatch', {'clip_norm': {'w': 1., 'b': 1.}, 'microbatch': -1},
       'microbatch'))
  def test_refuses(self, knobs, words):
    params, rows, mask = _problem()
    with self.assertRaisesRegex(ValueError, words):
      privacy.clipped_sum(lambda row: jax.grad(_loss)(params, row), rows,
                          mask, **knobs)


class SamplingTest(parameterized.TestCase):

  def test_each_real_row_comes_with_its_rate(self):
    counts = np.zeros(10)
    draw = jax.jit(jax.vmap(lambda k: privacy.poisson_rows(
        k, jnp.int32(8), 0.3, width=10, capacity=8)))
    places, mask = draw(jax.random.split(jax.random.key(0), 4000))
    for place, real in zip(np.asarray(places), np.asarray(mask) > 0,
                           strict=True):
      self.assertLen(set(place[real]), real.sum())
      counts[place[real]] += 1
    np.testing.assert_allclose(counts[:8] / 4000, 0.3, atol=0.03)
    self.assertEqual(counts[8:].sum(), 0)
    sizes = np.asarray(mask.sum(1))  # Binomial: rows are independent.
    self.assertAlmostEqual(sizes.var(), 8 * .3 * .7, delta=0.12)

  def test_of_too_many_rows_each_is_kept_as_often(self):
    draw = jax.jit(jax.vmap(lambda k: privacy.poisson_rows(
        k, jnp.int32(6), 1.0, width=6, capacity=2)))
    places, mask = draw(jax.random.split(jax.random.key(0), 3000))
    np.testing.assert_array_equal(mask, 1)
    np.testing.assert_allclose(
        np.bincount(np.ravel(places), minlength=6) / 3000, 1 / 3, atol=0.04)

  @parameterized.parameters(1e-6, 1e-3, .3)
  def test_a_row_is_never_drawn_more_often_than_is_accounted_for(self, rate):
    """Of the multiples of 2^-23, which are all that can be drawn."""
    most = math.ceil(rate * 2**23)
    draws = jnp.arange(most - 2, most + 2) / 2**23
    with mock.patch.object(jax.random, 'uniform', lambda key, shape: draws):
      _, mask = privacy.poisson_rows(
          jax.random.key(0), jnp.int32(4), rate, width=4, capacity=4)
    self.assertLessEqual((most - 2 + mask.sum()) / 2**23, rate)
    self.assertEqual(mask.sum(), 1)

  def test_rate_one_takes_all_and_room_may_exceed_the_table(self):
    places, mask = privacy.poisson_rows(
        jax.random.key(0), jnp.int32(3), 1.0, width=4, capacity=6)
    self.assertSetEqual(set(np.asarray(places)[np.asarray(mask) > 0]),
                        {0, 1, 2})
    self.assertEqual(places.shape, (6,))

  @parameterized.parameters(1, 10, 64)
  def test_capacity_overflows_less_often_than_any_delta(self, expected):
    def tail(c):
      return math.fsum(math.exp(
          k * math.log(expected) - expected - math.lgamma(k + 1))
                       for k in range(c + 1, c + 400))
    capacity = privacy.poisson_capacity(expected)
    self.assertLess(tail(capacity), 1e-15)
    self.assertGreaterEqual(tail(capacity - 1), 1e-15)


def _by_the_package(sigma, rate, steps, accountant):
  """Epsilon of an accountant that composes all steps anew."""
  import dp_accounting
  from dp_accounting import pld, rdp
  account = (pld.PLDAccountant(value_discretization_interval=1e-3)
             if accountant == 'pld' else
             rdp.RdpAccountant(list(range(2, 65))))
  gaussian = dp_accounting.GaussianDpEvent
  event = dp_accounting.SelfComposedDpEvent(
      dp_accounting.PoissonSampledDpEvent(rate, gaussian(sigma)), steps)
  if rate == 1:
    event = gaussian(sigma / math.sqrt(steps))
  account.compose(event)
  return account.get_epsilon(DELTA)


class AccountingTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    pytest.importorskip('dp_accounting')

  @parameterized.parameters('rdp', 'pld')
  def test_epsilon_is_that_of_the_package(self, accountant):
    got = privacy.epsilon(1.5, 0.1, 30, delta=DELTA, accountant=accountant)
    self.assertAlmostEqual(
        got, _by_the_package(1.5, 0.1, 30, accountant), places=4)

  def test_full_batches_against_the_exact_formula(self):
    """One Gaussian: delta(eps), Balle and Wang, arXiv 1805.06530."""
    def normal(x):
      return 0.5 * math.erfc(-x / math.sqrt(2))
    sigma, steps = 6.4, 100
    ratio = math.sqrt(steps) / sigma
    eps = privacy.epsilon(sigma, 1.0, steps, delta=DELTA, accountant='pld')
    delta = normal(ratio / 2 - eps / ratio) - math.exp(eps) * normal(
        -ratio / 2 - eps / ratio)
    self.assertAlmostEqual(delta / DELTA, 1.0, delta=0.02)

  def test_accountants_agree_and_one_is_tighter(self):
    loose, tight = (privacy.epsilon(2.0, 0.2, 50, delta=DELTA, accountant=a)
                    for a in privacy.ACCOUNTANTS)
    self.assertLess(tight, loose)
    self.assertLess(loose, 1.25 * tight)

  @parameterized.product(accountant=privacy.ACCOUNTANTS, rate=[0.2, 1.0])
  def test_the_table_rises_to_what_the_whole_run_spends(self, accountant, rate):
    table = privacy.spending(2.0, rate, 3, 6, delta=DELTA,
                             accountant=accountant)
    self.assertEqual(table.dtype, np.float32)
    self.assertEqual(table[0], 0)
    self.assertTrue((np.diff(table) > 0).all())
    whole = [_by_the_package(2.0, rate, 3 * i, accountant)
             for i in range(1, 7)]
    np.testing.assert_allclose(table[1:], whole, rtol=1e-6)

  def test_a_process_accounts_for_a_round_once(self):
    def table(rounds):
      return privacy.spending(1.9, 0.15, 2, rounds, delta=DELTA)
    first = table(150)  # More than a cache holds by default.
    missed = privacy._spent.cache_info().misses
    np.testing.assert_array_equal(table(150), first)
    self.assertEqual(privacy._spent.cache_info().misses, missed)
    np.testing.assert_array_equal(table(153)[:151], first)
    self.assertEqual(privacy._spent.cache_info().misses, missed + 3)

  @parameterized.parameters((4.0, 1.0, 40), (8.0, 0.2, 100))
  def test_solved_noise_is_enough_and_hardly_more(self, budget, rate, steps):
    sigma = privacy.noise_multiplier(budget, rate, steps, delta=DELTA)
    spent = privacy.epsilon(sigma, rate, steps, delta=DELTA)
    self.assertLessEqual(spent, budget)
    self.assertGreater(spent, 0.995 * budget)

  def test_extremes(self):
    self.assertEqual(privacy.epsilon(0.0, 0.5, 1, delta=DELTA), math.inf)
    self.assertEqual(privacy.epsilon(1.0, 0.5, 0, delta=DELTA), 0)
    self.assertEqual(privacy.epsilon(1e-300, 0.5, 1, delta=DELTA), math.inf)
    self.assertEqual(privacy.epsilon(1e300, 0.5, 1, delta=DELTA),
                     privacy.epsilon(1e6, 0.5, 1, delta=DELTA))
    self.assertEqual(privacy.epsilon(jnp.float32(2), 0.5, 3, delta=DELTA),
                     privacy.epsilon(2.0, 0.5, 3, delta=DELTA))

  @parameterized.parameters(2.9, -1, math.nan, math.inf)
  def test_steps_are_whole(self, steps):
    with self.assertRaisesRegex(ValueError, 'a whole number'):
      privacy.epsilon(1.0, 0.5, steps, delta=DELTA)

  @parameterized.parameters(-1.0, math.nan)
  def test_a_norm_that_turns_rows_round_is_refused(self, norm):
    with self.assertRaisesRegex(ValueError, 'max_norm'):
      privacy.clip({'w': jnp.ones(3)}, norm)
    self.assertEqual(
        privacy.noise_multiplier(math.inf, 1.0, 5, delta=DELTA), 0)

  @parameterized.parameters(
      ({'target': 0.0}, 'target'), ({'rate': 1.5}, 'rate'),
      ({'delta': 0.0}, 'delta'), ({'accountant': 'sum'}, 'accountant'))
  def test_refuses(self, changes, words):
    knobs = {'target': 4.0, 'rate': 0.5, 'steps': 3, 'delta': DELTA, **changes}
    with self.assertRaisesRegex(ValueError, words):
      privacy.noise_multiplier(**knobs)


if __name__ == '__main__':
  absltest.main()
