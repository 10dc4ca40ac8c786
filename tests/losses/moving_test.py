"""Laws of moving averages, and of thresholds and weights made of them."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import losses
from fedjax_ssl.losses import moving

P = np.random.default_rng(0).dirichlet(np.ones(4), 6).astype(np.float32)
MASK = np.array([1, 1, 0, 1, 0, 1], np.float32)
REAL = MASK > 0


def test_rows_that_are_none_do_not_enter_a_mean():
  dirty = np.where(REAL[:, None], P, np.nan)
  np.testing.assert_allclose(moving.row_mean(dirty, MASK), P[REAL].mean(0),
                             rtol=1e-6)
  sure = dirty.max(-1)
  np.testing.assert_allclose(moving.variance_of(sure, MASK),
                             P.max(-1)[REAL].var(ddof=1), rtol=1e-5)
  for few in (np.zeros(6), np.eye(6)[1]):
    assert moving.variance_of(sure, few) == 0
  np.testing.assert_array_equal(moving.row_mean(dirty, np.zeros(6)), 0)


@pytest.mark.parametrize('decay, want', [(0, 3), (1, 7), (.25, 4)])
def test_an_average_moves_by_its_decay(decay, want):
  old, new = jnp.float32(7), jnp.float32(3)
  assert moving.moved(old, new, MASK, decay=decay) == want
  assert moving.moved(old, new, MASK, decay=decay, min_rows=5) == 7
  assert moving.moved(old, new, 0 * MASK, decay=decay) == 7


def test_the_first_batch_is_the_mean_prediction():
  start = jnp.zeros(4)
  first = moving.moved_shares(start, P, MASK, decay=.9)
  np.testing.assert_allclose(first, P[REAL].mean(0), rtol=1e-6)
  second = moving.moved_shares(first, P[:1], np.ones(1), decay=.9)
  np.testing.assert_allclose(second, .9 * first + .1 * P[0], rtol=1e-5)
  np.testing.assert_array_equal(
      moving.moved_shares(start, P, 0 * MASK, decay=.9), 0)


def test_aligned_predictions_have_the_classes_that_are_wanted():
  for shares in (jnp.zeros(4), np.full(4, .25)):
    np.testing.assert_allclose(moving.aligned(P, shares, .25), P, rtol=1e-4)
  target = np.array([.7, .1, .1, .1])
  # A model that always says its mean says the target.
  shares = np.array([.4, .3, .2, .1])
  np.testing.assert_allclose(
      moving.aligned(shares[None], shares, target)[0], target, atol=1e-5)
  got = moving.aligned(P, shares, target)
  odds = P * target / shares
  np.testing.assert_allclose(got, odds / odds.sum(-1, keepdims=True),
                             rtol=1e-4)


def test_the_class_predicted_most_has_the_highest_bar():
  got = losses.freematch_thresholds(.8, np.array([.1, .4, .3, .2]))
  np.testing.assert_allclose(got, [.2, .8, .6, .4], rtol=1e-6)
  np.testing.assert_allclose(
      losses.freematch_thresholds(.8, np.full(4, .25)), .8, rtol=1e-6)


def test_weights_between_none_and_a_threshold():
  sure = np.array([.2, .5, .79, .8, .99], np.float32)
  def weights(num_sigmas, variance=.04):
    return losses.softmatch_weights(sure, .8, variance, num_sigmas=num_sigmas)
  np.testing.assert_array_equal(weights(0), 1)
  np.testing.assert_allclose(weights(1e6), [0, 0, 0, 1, 1], atol=1e-6)
  np.testing.assert_allclose(weights(2, 0.), [0, 0, 0, 1, 1], atol=1e-6)
  np.testing.assert_allclose(weights(1)[0], np.exp(-.36 / .08), rtol=1e-5)
  np.testing.assert_allclose(weights(2), weights(1, .01), rtol=1e-4)
  assert (np.diff(weights(2)) >= 0).all()


def test_the_fairness_term_by_hand():
  logits = jnp.log(jnp.array([[.7, .2, .1, 0.], [.2, .6, .2, 0.],
                              [.5, .3, .2, 0.], [.1, .1, .1, .7]]) + 1e-9)
  mask, shares = jnp.array([1., 1., 1., 0.]), np.array([.4, .3, .2, .1])
  histogram = np.array([.5, .5, 0, 0])
  got, _ = losses.fairness(logits, shares, mask, histogram=histogram)
  # Of three rows two are of the first class and one of the second.
  wanted = np.array([.4 / .5, .3 / .5])
  found = np.array([(1.4 / 3) / (2 / 3), (1.1 / 3) / (1 / 3)])
  want = (wanted / wanted.sum() * np.log(found / found.sum())).sum()
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_the_fairness_term_of_no_row_is_none():
  def of(logits, mask):
    return losses.fairness(logits, np.full(4, .25), mask,
                           histogram=np.full(4, .25))[0]
  dirty = jnp.where(REAL[:, None], jnp.log(P), jnp.nan)
  value, slope = jax.value_and_grad(of)(dirty, 0 * MASK)
  assert value == 0
  np.testing.assert_array_equal(slope, 0)
  value, slope = jax.value_and_grad(of)(dirty, MASK)
  assert np.isfinite(value) and np.isfinite(slope).all()
  np.testing.assert_array_equal(slope[~REAL], 0)
  np.testing.assert_allclose(
      value, of(jnp.log(P)[REAL], np.ones(4)), rtol=1e-5)
  # Every class predicted as often as it is likely: the least there is.
  one_each = 30 * jnp.eye(4)
  np.testing.assert_allclose(of(one_each, np.ones(4)), np.log(1 / 4),
                             rtol=1e-5)
