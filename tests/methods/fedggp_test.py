"""FedGGp: thresholds, second chances and frequencies, and who weighs how."""
from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import tree
from fedjax_ssl.methods import fedggp
from tests import toy
from tests.methods.averaging_test import one_round
from tests.methods.updates import BOTH, KNOWN, UNKNOWN, whole

UNIFORM = jnp.full(10, .1)


def _draw(rows, size, key=0):
  return np.random.default_rng(key).dirichlet(np.full(size, .4), rows)


def test_bars_of_equal_frequencies_are_the_mean_confidence():
  p, mask = _draw(6, 10), np.array([1, 1, 0, 1, 1, 1.])
  assert not fedggp.tails(UNIFORM).any()
  np.testing.assert_allclose(fedggp.thresholds(UNIFORM, p, mask),
                             p.max(-1)[mask > 0].mean(), rtol=1e-5)


def test_bars_of_a_head_a_middle_and_a_tail():
  phi, p = jnp.array([.5, .2, .1, .06, .0]), _draw(7, 5)
  np.testing.assert_array_equal(fedggp.tails(phi), [0, 0, 1, 1, 1])
  phi = jnp.array([.3, .21, .16, .1, .0])  # A tail is below .12.
  mean, spread = p.max(-1).mean(), p.std(-1, ddof=1).mean()
  np.testing.assert_allclose(
      fedggp.thresholds(phi, p, np.ones(7)),
      [mean, .7 * mean, (mean - spread) * .16 / .3, .2, .2], rtol=1e-5)
  # One class of nearly all: a head may be a tail too; its thresholds add up.
  odd = fedggp.thresholds(jnp.array([.65, .35, .0]), p[:, :3], np.ones(7))
  head = p[:, :3].max(-1).mean()
  np.testing.assert_allclose(odd, [head, head * 7 / 13 + 1 / 3, 1 / 3],
                             rtol=1e-5)


def test_a_second_chance_is_a_tail_class_among_the_likeliest():
  p = np.array([[.5, .3, .2, 0], [.2, .5, .1, .3], [0, .1, .6, .3]])
  tail = np.array([0, 0, 1, 1], bool)
  classes, weights = fedggp.second_chances(p, tail, 2)
  np.testing.assert_allclose(weights, [0, .6, 1])
  np.testing.assert_array_equal(classes[1:], [3, 2])
  classes, weights = fedggp.second_chances(p, tail, 9)
  np.testing.assert_allclose(weights, [.4, .6, 1])
  np.testing.assert_array_equal(classes, [2, 3, 2])
  assert not fedggp.second_chances(p, ~tail & tail, 4)[1].any()


def test_frequencies_move_to_what_is_learnt_less_what_is_too_much():
  learnt = fedggp.Learnt(jnp.array([3., 1.5, .5]), jnp.array([4., 1., 0.]))
  want = .9 / 3 + .1 * np.array([.6, .3, .1]) * np.exp([-(.8 - 1 / 3), 0, 0])
  third = jnp.full(3, 1 / 3)
  for part in (1, 7.5):
    np.testing.assert_allclose(fedggp.moved(third, tree.scale(
        learnt, part), decay=.9), want, rtol=1e-5)
  np.testing.assert_array_equal(
      fedggp.moved(third, tree.zeros_like(learnt), decay=.9), third)


def _rare(text, phi):
  """The update of a client without labels, by these frequencies."""
  return whole(text, UNKNOWN, given={'frequencies': jnp.asarray(phi)})


def test_clients_without_labels_weigh_their_rows_less():
  """One step, whose length is that of the weight; labels alone are FedAvg."""
  text = "fedggp(profile='code', tail_weight=0.0, {}=0.0)"
  off = text.format('lone_weight')
  assert tree.global_norm(whole(off, UNKNOWN).message) == 0
  full = whole("fedggp(profile='code', tail_weight=0.0)", UNKNOWN)
  more = whole("fedggp(profile='code', tail_weight=0.0, lone_weight=0.2)",
               UNKNOWN)
  chex.assert_trees_all_close(tree.scale(full.message, 2), more.message,
                              rtol=1e-4, atol=1e-7)
  assert 0 < full.metrics['mask_rate'].total < toy.UNLABELED[UNKNOWN]
  none = whole(text.format('unlabeled_weight'), BOTH).message
  for who, mine in ((BOTH, none), (KNOWN, whole(off, KNOWN).message)):
    plain = whole('fedavg', who).message
    chex.assert_trees_all_close(mine.params, plain.params, rtol=1e-4,
                                atol=1e-6)


def test_whose_rows_are_counted():
  """Of all clients, or of those that hold both kinds of rows."""
  for counted, clients in (('all', (UNKNOWN, BOTH)), ('partly', (BOTH,))):
    text = f"fedggp(agree=False, counted='{counted}')"
    for who in (KNOWN, UNKNOWN, BOTH):
      sent = whole(text, who)
      found = float(sent.counts.labels.sum() * sent.weight)
      want = float(sent.metrics['mask_rate'].total) if who in clients else 0
      np.testing.assert_allclose(found, want, rtol=1e-5)
      assert (found > 0) == (who in clients)


def test_views_that_differ_teach_nothing():
  """The strong view of these rows is their negative."""
  code, paper = (whole(f"fedggp(profile='{x}', tail_weight=0.0)", UNKNOWN)
                 for x in ('code', 'paper'))
  assert paper.metrics['mask_rate'].total < code.metrics['mask_rate'].total


def test_rows_that_are_unsure_learn_rare_classes():
  phi = np.array([.5, .49, .01], np.float32)  # Only the last is rare.
  text = 'fedggp(lone_weight=0.0, tail_confidence={})'
  none, some = (_rare(text.format(x), phi) for x in (0.0, 1.0))
  assert none.metrics['tail_rate'].total == 0
  assert tree.global_norm(none.message) == 0
  assert some.metrics['tail_rate'].total > 0
  bias = some.message.params['Dense_0']['bias']
  assert bias[2] > 0 > max(bias[:2])


def test_a_warmup_is_of_labels_alone():
  before, after, metrics = one_round('fedggp(warmup=1.0)')
  np.testing.assert_array_equal(before.server.frequencies,
                                np.float32(1 / toy.NUM_CLASSES))
  chex.assert_trees_all_equal(before.server.frequencies,
                              after.server.frequencies)
  assert 'mask_rate' not in metrics or np.isnan(metrics['mask_rate'])


def test_labels_at_the_server_are_refused():
  with pytest.raises(ValueError, match='labels_at'):
    methods.make('fedggp', toy.task(labels_at='server'))
