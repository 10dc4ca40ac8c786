"""Laws of pseudo-labels, blends, thresholds and ramps."""
from __future__ import annotations

from typing import Any

from absl.testing import absltest, parameterized
import chex
import jax
import numpy as np
from scipy import stats

from fedjax_ssl import losses

B, C = 6, 4
LOGITS = np.random.default_rng(0).normal(size=(B, C)).astype(np.float32)
SOFT = np.random.default_rng(2).dirichlet(np.ones(C), B).astype(np.float32)


class TargetsTest(parameterized.TestCase):

  def test_both_spellings_of_sharpening_agree(self):
    by_exponent = losses.sharpen(SOFT, exponent=2.0)
    np.testing.assert_allclose(
        losses.sharpen(SOFT, temperature=0.5), by_exponent, rtol=1e-5)
    square = SOFT ** 2
    np.testing.assert_allclose(
        by_exponent, square / square.sum(-1, keepdims=True), rtol=1e-5)

  @parameterized.parameters({'temperature': 0.0}, {'exponent': np.inf})
  def test_the_sharpest_is_one_hot(self, **by):
    rows = np.random.default_rng(3).dirichlet(np.ones(10), 2000).astype('f4')
    hot = np.eye(10)[rows.argmax(-1)]
    np.testing.assert_array_equal(losses.sharpen(rows, **by), hot)
    even = np.array([[.4, .2, .4]], np.float32)
    np.testing.assert_array_equal(losses.sharpen(even, **by), [[.5, 0, .5]])
    np.testing.assert_array_equal(
        jax.grad(lambda p: losses.sharpen(p, **by)[0, 1])(even), [[0, 0, 0]])

  @parameterized.parameters(0.5, 1.0, 2.0)
  def test_a_class_of_no_probability_breaks_no_slope(self, exponent):
    def first(p):
      return losses.sharpen(p, exponent=exponent)[0, 1]
    rows = np.array([[0, .4, .6]], np.float32)
    slope = np.asarray(jax.grad(first)(rows))
    assert np.isfinite(slope).all()
    even = np.array([[.5, .5, 1e-9]], np.float32)  # d/dp2 of p2^Z / (2 p2^Z).
    np.testing.assert_allclose(
        jax.grad(first)(even)[0, :2], exponent * np.array([-.5, .5]), rtol=1e-3)
    if exponent == 1:
      np.testing.assert_allclose(slope[0], [-.4, .6, -.4], rtol=1e-5)
    near = np.array([[1e-30, .4, .6]], np.float32)
    np.testing.assert_allclose(
        slope[0, 1:], jax.grad(first)(near)[0, 1:], rtol=1e-3)

  @parameterized.parameters({'temperature': 1.0}, {'exponent': 1.0})
  def test_sharpening_by_one_is_the_identity(self, **by):
    for make in (jax.jit, jax.vmap):
      got = make(lambda p: losses.sharpen(p, **by))(SOFT)
      np.testing.assert_allclose(got, SOFT, rtol=1e-6)

  @parameterized.parameters({'temperature': 0.0}, {'exponent': np.inf})
  def test_sharpest_is_one_hot(self, **how):
    np.testing.assert_array_equal(
        losses.sharpen(SOFT, **how), np.eye(C)[SOFT.argmax(-1)])

  @parameterized.parameters({}, {'temperature': 1.0, 'exponent': 1.0})
  def test_one_spelling_at_a_time(self, **how):
    with self.assertRaisesRegex(ValueError, 'exactly one'):
      losses.sharpen(SOFT, **how)

  def test_soft_label_averages_views_before_sharpening(self):
    views = np.log(np.array([[[0.8, 0.2]], [[0.4, 0.6]]], np.float32))
    np.testing.assert_allclose(
        losses.soft_pseudo_label(views, temperature=0.5),
        [[0.36 / 0.52, 0.16 / 0.52]], rtol=1e-5)

  def test_vote_without_helpers_is_the_own_label(self):
    got = losses.agreement_vote(
        LOGITS, np.zeros((0, B, C), np.float32), threshold=0.6)
    chex.assert_trees_all_equal(
        got, losses.pseudo_label(LOGITS, threshold=0.6))

  @parameterized.parameters(
      ('lowest', 2, (1, 0), 0), ('local', 2, (1, 0), 2),
      ('lowest', 2, (1, 1), 1), ('local', 2, (1, 1), 1),
      ('local', 3, (1, 1, 0, 0), 0))
  def test_vote_and_its_ties(self, tie, own, helpers, want):
    ballot = 9 * np.eye(C, dtype=np.float32)
    label, accepted = losses.agreement_vote(
        ballot[[own]], ballot[list(helpers)][:, None], tie=tie)
    self.assertEqual(label[0], want)
    self.assertEqual(accepted[0], 1)

  @parameterized.parameters(((1, 1), 1), ((1, 0), 0), ((0, 0), 0))
  def test_an_empty_place_has_no_vote(self, present, want):
    ballot = 9 * np.eye(C, dtype=np.float32)
    label, _ = losses.agreement_vote(
        ballot[[0]], ballot[[1, 1]][:, None],
        present=np.array(present, np.float32))
    self.assertEqual(label[0], want)

  def test_vote_asks_for_the_own_models_confidence(self):
    sure, unsure = 9 * np.eye(C, dtype=np.float32)[[0]], np.zeros((1, C))
    self.assertEqual(losses.agreement_vote(unsure, sure[None])[1][0], 0)

  def test_flexmatch_thresholds(self):
    got = losses.flexmatch_thresholds(np.array([10, 5, 0]), threshold=0.9)
    np.testing.assert_allclose(got, [0.9, 0.9 / 3, 0], rtol=1e-6)
    equal = losses.flexmatch_thresholds(np.full(3, 7.0), threshold=0.9)
    np.testing.assert_allclose(equal, 0.9, rtol=1e-6)
    warm = losses.flexmatch_thresholds(
        np.array([10, 5, 0]), threshold=0.9, num_unused=20, mapping='linear')
    np.testing.assert_allclose(warm, [0.45, 0.225, 0], rtol=1e-6)
    np.testing.assert_array_equal(losses.flexmatch_thresholds(np.zeros(3)), 0)

  def test_mixup(self):
    a: dict[str, Any] = {'x': np.full((2, 3, 1), 200, np.uint8), 'p': np.eye(2)}
    b: dict[str, Any] = {'x': a['x'] - np.uint8(100), 'p': np.eye(2)[::-1]}
    got = losses.mixup(np.array([1.0, 0.25]), a, b)
    np.testing.assert_array_equal(got['x'][:, 0, 0], [200, 125])
    np.testing.assert_array_equal(got['p'], [[1, 0], [0.75, 0.25]])
    chex.assert_trees_all_equal(
        losses.mixup(0.0, a, b)['x'], b['x'].astype(np.float32))

  def test_mixup_ratio(self):
    key = jax.random.key(0)
    free = np.asarray(losses.mixup_ratio(key, (500,)))
    kept = np.asarray(losses.mixup_ratio(key, (500,), dominant=True))
    np.testing.assert_array_equal(kept, np.maximum(free, 1 - free))
    self.assertGreater(
        stats.kstest(free, stats.beta(0.75, 0.75).cdf).pvalue, 0.01)

  def test_ramps_end_at_one(self):
    for shape in ('gaussian', 'linear', 'cosine'):
      self.assertEqual(losses.ramp_up(40, 30, shape=shape), 1)
      self.assertEqual(losses.ramp_up(0, 0, shape=shape), 1)
    np.testing.assert_allclose(
        losses.ramp_up(21, 30), np.exp(-5 * 0.09), rtol=1e-5)
    np.testing.assert_allclose(losses.ramp_up(0, 30), np.exp(-5), rtol=1e-5)
    np.testing.assert_allclose(
        [losses.ramp_up(t, 30, shape='cosine') for t in (0, 10, 15)],
        [0, .25, .5], atol=1e-6)

  @parameterized.parameters('exp', 'linear', 'log')
  def test_annealing_rises_from_chance(self, schedule):
    eta = [float(losses.tsa_threshold(
        t, 10, num_classes=7, schedule=schedule)) for t in range(11)]
    self.assertEqual(eta, sorted(eta))
    start = 1 / 7 if schedule != 'exp' else np.exp(-5) * 6 / 7 + 1 / 7
    np.testing.assert_allclose(eta[0], start, rtol=1e-6)
    self.assertGreater(eta[-1], 0.99)


if __name__ == '__main__':
  absltest.main()
