"""Laws of clipping and noise, and epsilon against dp-accounting itself."""
from __future__ import annotations

import math

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


class AccountingTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    pytest.importorskip('dp_accounting')

  @parameterized.parameters('rdp', 'pld')
  def test_epsilon_is_that_of_the_package(self, accountant):
    import dp_accounting
    from dp_accounting import pld, rdp
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(
            0.1, dp_accounting.GaussianDpEvent(1.5)), 30)
    account = (pld.PLDAccountant(value_discretization_interval=1e-3)
               if accountant == 'pld' else
               rdp.RdpAccountant(list(range(2, 65))))
    account.compose(event)
    got = privacy.epsilon(1.5, 0.1, 30, delta=DELTA, accountant=accountant)
    self.assertAlmostEqual(got, account.get_epsilon(DELTA), places=4)

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

  def test_epsilon_only_grows(self):
    table = privacy.spending(2.0, 0.2, 3, 12, delta=DELTA)
    self.assertEqual(table[0], 0)
    self.assertTrue((np.diff(table) > 0).all())
    self.assertAlmostEqual(
        table[7], privacy.epsilon(2.0, 0.2, 21, delta=DELTA), places=5)

  @parameterized.parameters((4.0, 1.0, 40), (8.0, 0.2, 100))
  def test_solved_noise_is_enough_and_hardly_more(self, budget, rate, steps):
    sigma = privacy.noise_multiplier(budget, rate, steps, delta=DELTA)
    spent = privacy.epsilon(sigma, rate, steps, delta=DELTA)
    self.assertLessEqual(spent, budget)
    self.assertGreater(spent, 0.995 * budget)

  def test_extremes(self):
    self.assertEqual(privacy.epsilon(0.0, 0.5, 1, delta=DELTA), math.inf)
    self.assertEqual(privacy.epsilon(1.0, 0.5, 0, delta=DELTA), 0)
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
