"""PDCFed: its two stages, its averages, and what it reduces to."""
from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import tree
from fedjax_ssl.methods import pdcfed
from fedjax_ssl.methods.parts import labeled_clients
from tests import toy
from tests.methods.updates import BOTH, KNOWN, UNKNOWN, whole
from tests.thorough import wider

SEEN = pdcfed.Seen(jnp.float32(.4), jnp.float32(.02))


def _draw(rows, size, key=0):
  return np.random.default_rng(key).dirichlet(np.full(size, .4), rows).astype(
      np.float32)


@pytest.mark.parametrize('variance', [1., 0.])
def test_views_that_are_the_same_have_changed_nothing(variance):
  p, seen = _draw(6, 5), pdcfed.Seen(jnp.float32(.2), jnp.float32(variance))
  np.testing.assert_array_equal(pdcfed.gains(p, p), 0)
  np.testing.assert_array_equal(pdcfed.weights(p, p, seen), 1)


def test_weights_against_a_loop():
  weak, strong = _draw(9, 5), _draw(9, 5, key=1)
  gained = np.array([sum(s > w for w, s in zip(a, b, strict=True)) / 5
                     for a, b in zip(weak, strong, strict=True)])
  assert set(gained > .4) == {True, False}
  want = []
  for w, s, g in zip(weak, strong, gained, strict=True):
    d = 4 if g <= .4 else 9
    usual = .999 * np.exp(-(g - .4) ** 2 / (2 * .02 / d))
    want.append(np.exp(-np.sqrt(((w - s) ** 2).sum()) / usual))
  np.testing.assert_allclose(pdcfed.gains(weak, strong), gained, rtol=1e-6)
  np.testing.assert_allclose(pdcfed.weights(weak, strong, SEEN), want,
                             rtol=1e-4, atol=1e-30)


def test_rows_of_both_stages():
  weak, strong = _draw(200, 4), _draw(200, 4, key=1)
  strong, seen = (strong + weak) / 2, SEEN._replace(variance=jnp.float32(.5))
  sure, little = weak.max(-1), np.asarray(pdcfed.weights(weak, strong, seen))
  found = pdcfed.chosen_rows(weak, strong, seen, threshold=.8,
                             low_threshold=.5, least_weight=.7)
  np.testing.assert_array_equal(found.first, sure >= .8)
  np.testing.assert_array_equal(
      found.second, (sure > .5) & (sure < .8) & (little >= .7))
  np.testing.assert_array_equal(found.settled, (sure > .5) & (little >= .7))
  assert found.second.sum() > 5
  assert found.first.sum() > (found.first & found.settled).sum() > 0


def test_averages_of_a_batch_of_one_row_and_of_none():
  gained, mask = np.array([.2, .6, .9, .4], np.float32), np.array([1, 1, 0, 1.])
  real = gained[mask > 0]
  found = pdcfed.updated_averages(SEEN, gained, mask, decay=.9)
  np.testing.assert_allclose(found.mean, .9 * .4 + .1 * real.mean(), rtol=1e-5)
  np.testing.assert_allclose(
      found.variance, .9 * .02 + .1 * real.var(ddof=1), rtol=1e-5)
  one = pdcfed.updated_averages(SEEN, gained, np.array([0, 1., 0, 0]),
                                decay=.9)
  np.testing.assert_allclose(one, [.9 * .4 + .1 * .6, .02], rtol=1e-5)
  chex.assert_trees_all_equal(pdcfed.updated_averages(
      SEEN, gained, 0 * mask, decay=.9), SEEN)


def negative(key, images):
  del key
  return 255 - images


OFF = 'unlabeled_weight=0.0, entropy_weight=0.0, clip_norm=1e6'


@pytest.mark.parametrize('who', [KNOWN, *wider(BOTH)])
def test_without_its_losses_it_is_fedavg(who):
  mine, theirs = (whole(text, who, local_epochs=2)
                  for text in (f'pdcfed({OFF})', 'fedavg'))
  chex.assert_trees_all_close(mine.message, theirs.message, rtol=1e-4,
                              atol=1e-6)
  assert mine.weight == 6 * (toy.LABELED[who] + toy.UNLABELED[who])


def test_without_weights_unlabeled_rows_change_no_bit():
  """As if no row were in either stage."""
  one, other = (whole(f'pdcfed({knobs})', BOTH) for knobs in (
      'threshold=0.3, unlabeled_weight=0.0, entropy_weight=0.0',
      'threshold=1.1, low_threshold=1.0'))
  chex.assert_trees_all_equal(one.message, other.message)
  assert one.metrics['mask_rate'].total > 0
  assert other.metrics['mask_rate'].total == 0


def test_its_first_stage_alone_is_fixmatch():
  """Of probabilities, as in the code, it is another one that learns less."""
  text = ("pdcfed(profile='{}', threshold=0.3, least_weight=1.1, passes=3, "
          'unlabeled_weight=0.8, unlabeled_rate=1.0, clip_norm=1e6)')
  mine, small = (whole(text.format(x), UNKNOWN, local_epochs=3,
                       strong=negative) for x in ('paper', 'code'))
  theirs = whole('fixmatch(threshold=0.3, unlabeled_weight=0.8)', UNKNOWN,
                 local_epochs=3, strong=negative)
  chex.assert_trees_all_close(mine.message, theirs.message, rtol=1e-4,
                              atol=1e-6)
  assert mine.metrics['second_rate'].total == 0
  np.testing.assert_allclose(mine.metrics['mask_rate'].total,
                             theirs.metrics['mask_rate'].total)
  assert 0 < tree.global_norm(small.message) < .7 * tree.global_norm(
      mine.message)


def test_the_averages_stay_on_the_client():
  sent = whole('pdcfed(decay=0.5)', UNKNOWN, strong=negative)
  seen = sent.memory.seen
  start = pdcfed.Seen(jnp.float32(1 / toy.NUM_CLASSES), jnp.float32(1))
  assert abs(seen.mean - start.mean) > .01 and .4 < seen.variance < .9
  kept = whole('pdcfed(decay=0.5)', KNOWN).memory.seen
  chex.assert_trees_all_equal(kept, start)


def test_steps_of_clients_with_labels_and_without():
  shards = toy.federation()[0].clients
  def steps(who, **changes):
    task = toy.task(labeled_batch=3, unlabeled_batch=4, **changes)
    return labeled_clients.num_steps(task, tree.take(shards, who), 2)
  assert steps(KNOWN, local_epochs=5) == 5 * 3  # Of 7 rows by 3.
  assert steps(UNKNOWN, local_epochs=5) == 2 * 3  # Of 12 rows by 4.
  assert steps(BOTH, local_epochs=5) == 5 * 3  # Of 4 by 3 and of 9 by 4.
  assert steps(KNOWN, local_steps=7) == steps(UNKNOWN, local_steps=7) == 7
  assert steps(toy.NOBODY, local_steps=7) == 0


def test_labels_at_the_server_are_refused():
  with pytest.raises(ValueError, match='labels_at'):
    methods.make('pdcfed', toy.task(labels_at='server'))


@pytest.mark.parametrize('name', ['pdcfed', 'cbafed'])
def test_epochs_are_refused_beside_a_number_of_steps(name):
  steps = toy.task(local_steps=5)
  methods.make(f'{name}(passes=1)', steps)
  methods.make(f'{name}(passes=7)', toy.task(local_steps=0))
  with pytest.raises(ValueError, match='local_steps=5: .* passes=7 would do'):
    methods.make(f'{name}(passes=7)', steps)
