"""SoftMatch: what it reduces to, and what it remembers."""
from __future__ import annotations

import chex
import numpy as np
import pytest

from fedjax_ssl.losses import moving
from tests import toy
from tests.methods import kept
from tests.methods.updates import change, end, update
from tests.thorough import wider


@pytest.mark.parametrize('model, place', [
    ('linear', 'server'), *wider(('conv', 'clients'))])
def test_a_wide_gaussian_lets_every_row_count_the_same(model, place):
  a, b, c = (change(text, model=model, place=place, local_steps=4)
             for text in ('softmatch(num_sigmas=0.0)',
                          'fixmatch(threshold=0.0)',
                          'softmatch(decay=0.0)'))
  np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
  assert not np.allclose(a, c, atol=1e-4)


def test_a_narrow_gaussian_is_a_threshold_at_the_mean():
  mine, fixmatch = (update(text, kept=kept_, local_steps=2) for text, kept_ in (
      ('softmatch(num_sigmas=1e9, decay=1.0, align=False)', {'mean': .45}),
      ('fixmatch(threshold=0.45)', {})))
  chex.assert_trees_all_close(mine.message, fixmatch.message, rtol=1e-4,
                              atol=1e-6)
  metrics, found = (toy.means(x.metrics) for x in (mine, fixmatch))
  assert 0 < found['mask_rate'] < 1
  np.testing.assert_allclose(metrics['mask_rate'], found['mask_rate'],
                             rtol=1e-5)
  np.testing.assert_allclose(metrics['bar'], .45, rtol=1e-6)


def test_alignment_with_equal_classes_changes_nothing():
  """And labels are never the aligned ones."""
  text = 'softmatch(decay=1.0, align={})'
  off, even, skewed = (
      change(text.format(align), local_steps=2, kept={
          'mean': .5, 'variance': .01, 'shares': shares})
      for align, shares in ((False, (0, 0, 0)), (True, (1/3, 1/3, 1/3)),
                            (True, (.8, .1, .1))))
  np.testing.assert_allclose(off, even, rtol=1e-3, atol=1e-5)
  assert not np.allclose(off, skewed, atol=1e-4)
  # With all weights 1 the skew has nothing left to act on.
  a, b = (change('softmatch(decay=1.0, num_sigmas=0.0)', local_steps=2,
                 kept={'shares': shares})
          for shares in ((1/3, 1/3, 1/3), (.8, .1, .1)))
  np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('place', ['clients', *wider('server')])
def test_without_unlabeled_rows_it_is_the_supervised_part(place):
  a, b = (end(text, 'conv', place) for text in (
      'softmatch(unlabeled_weight=0.0)', 'fixmatch(threshold=1.1)'))
  chex.assert_trees_all_equal(a, b)


@pytest.mark.parametrize('moments', ['aligned', 'raw'])
def test_memory_is_what_the_model_says_of_the_clients_rows(moments):
  for now, then, p in kept.of_one_batch(
      f"softmatch(decay=0.0, moments='{moments}')"):
    if not p.size:
      chex.assert_trees_all_equal(now, then)
      continue
    np.testing.assert_allclose(now.shares, p.mean(0), rtol=1e-5)
    sure = np.asarray(p if moments == 'raw' else moving.aligned(
        p, p.mean(0), 1 / 3)).max(-1)
    np.testing.assert_allclose(now.mean, sure.mean(), rtol=1e-5)
    np.testing.assert_allclose(now.variance, sure.var(ddof=1), rtol=1e-4)
