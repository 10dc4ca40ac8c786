"""FreeMatch: what it reduces to, and what it remembers."""
from __future__ import annotations

import chex
import numpy as np
import pytest

from tests.methods import kept
from tests.methods.updates import change, end, update
from tests.thorough import wider

FROZEN = 'freematch(decay=1.0, fairness_weight=0.0)'


@pytest.mark.parametrize('model, place', [
    ('conv', 'server'), *wider(('linear', 'clients'))])
def test_bars_that_stay_where_they_start_let_every_row_count(model, place):
  a, b = (update(text, model=model, place=place, local_steps=4).message
          for text in (FROZEN, 'fixmatch(threshold=0.0)'))
  chex.assert_trees_all_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('shares, agrees', [
    ((1 / 3, 1 / 3, 1 / 3), True), ((.6, .2, .2), False)])
def test_with_frozen_bars_it_is_fixmatch(shares, agrees):
  mine, fixmatch, every = (change(text, kept=kept_, local_steps=2)
                           for text, kept_ in (
      (FROZEN, {'confidence': .45, 'shares': shares}),
      ('fixmatch(threshold=0.45)', {}), ('fixmatch(threshold=0.0)', {})))
  assert np.allclose(mine, fixmatch, rtol=1e-4, atol=1e-6) == agrees
  assert not np.allclose(fixmatch, every, atol=1e-3)


@pytest.mark.parametrize('place', ['clients', *wider('server')])
def test_without_both_terms_it_is_the_supervised_part(place):
  a, b = (end(text, 'conv', place) for text in (
      'freematch(unlabeled_weight=0.0, fairness_weight=0.0)',
      'fixmatch(threshold=1.1)'))
  chex.assert_trees_all_equal(a, b)


def test_the_fairness_term_moves_the_model_where_it_is_asked_for():
  """A term of weight 0 costs nothing, and a small one little."""
  none, small, large = (change(f'freematch(fairness_weight={w})')
                        for w in (0.0, 1e-6, 1.0))
  np.testing.assert_allclose(none, small, atol=1e-5)
  assert not np.allclose(none, large, atol=1e-3)


@pytest.mark.parametrize('least, most', [(0., .38), (.6, 1.)])
def test_memory_is_what_the_model_says_of_the_clients_rows(least, most):
  for now, then, p in kept.of_one_batch(
      f'freematch(decay=0.0, min_threshold={least}, max_threshold={most})'):
    if not p.size:
      chex.assert_trees_all_equal(now, then)
      continue
    np.testing.assert_allclose(now.confidence, np.clip(
        p.max(-1).mean(), least, most), rtol=1e-5)
    np.testing.assert_allclose(now.shares, p.mean(0), rtol=1e-5)
    np.testing.assert_allclose(
        now.histogram, np.bincount(p.argmax(-1), minlength=3) / len(p),
        rtol=1e-5)


@pytest.mark.parametrize('bounded, agrees, tau', [
    ('classes', True, .3), ('tau', False, .45)])
def test_a_bound_of_the_classes_holds_for_rare_ones_and_leaves_tau(
    bounded, agrees, tau):
  text = FROZEN.replace(')', f", min_threshold=.45, bounded='{bounded}')")
  first = {'confidence': .3, 'shares': (.6, .2, .2)}
  mine = change(text, kept=first, local_steps=2)
  fixmatch = change('fixmatch(threshold=0.45)', local_steps=2)
  assert np.allclose(mine, fixmatch, rtol=1e-4, atol=1e-6) == agrees
  after = update(text, kept=first, local_steps=2).memory.kept
  np.testing.assert_allclose(after.confidence, tau, rtol=1e-6)
