"""SAGE: its labels, what it reduces to, and steps by hand."""
from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import losses, methods
from fedjax_ssl.core import tree
from tests import toy
from tests.by_hand import softmax
from tests.methods.updates import change, same, update
from tests.thorough import wider


def _logits(*confidences, first=0):
  """Rows whose class `first` has these probabilities, the others the rest."""
  p = np.array([[(1 - c) / 2] * 3 for c in confidences])
  p[:, first] = confidences
  return jnp.log(jnp.asarray(p, jnp.float32))


@pytest.mark.parametrize('own, other, share', [
    (.97, .97, 1), (.99, .94, .5), (.96, .86, .25), (.96, .91, .5),
    (.97, .57, 2**-8), (.94, .97, 0), (.94, .99, 0)])
def test_the_local_label_counts_half_for_each_gap(own, other, share):
  """And not at all where the local model is not sure."""
  targets, accepted, local = losses.blended_label(
      _logits(own, first=1), _logits(other, first=2))
  np.testing.assert_allclose(local, [share], atol=3e-5)
  np.testing.assert_allclose(targets, [[0, share, 1 - share]], atol=3e-5)
  np.testing.assert_array_equal(accepted, [1])
  with_gap, _, _ = losses.blended_label(
      _logits(own, first=1), _logits(other, first=2), half_gap=1e9)
  np.testing.assert_allclose(with_gap, [[0, share > 0, share == 0]], atol=1e-5)


def test_rows_of_which_nobody_is_sure_do_not_count():
  own, other = _logits(.94, .5, .96), _logits(.3, .949, .2)
  _, accepted, _ = losses.blended_label(own, other)
  np.testing.assert_array_equal(accepted, [0, 0, 1])


def test_the_divergence_from_targets():
  """Zero at the target; of one-hot targets the cross entropy."""
  p = jnp.array([[.2, .5, .3], [.9, .1, 0.]])
  logits = jnp.log(jnp.maximum(p, 1e-30))
  np.testing.assert_allclose(losses.target_kl(logits, p)[0], 0, atol=1e-6)
  hard = jax.nn.one_hot(jnp.array([1, 1]), 3)
  mask = jnp.array([1., 0.])
  a, b = (loss(logits, hard, mask, total=4.0)[0] for loss in (
      losses.target_kl, losses.cross_entropy))
  np.testing.assert_allclose(a, b, rtol=1e-6)
  np.testing.assert_allclose(a, np.log(2) / 4, rtol=1e-5)
  soft = jnp.array([[.5, .5, 0.], [.5, .5, 0.]])
  rows, _ = losses.target_kl(logits, soft, mask, reduction='none')
  want = .5 * np.log(.5 / .2) + .5 * np.log(.5 / .5)
  np.testing.assert_allclose(rows, [want, 0], rtol=1e-5)
  slope = jax.grad(lambda x: losses.target_kl(x, soft)[0])(logits)
  chex.assert_tree_all_finite(slope)


def test_all_labelers_agree_while_the_model_has_not_moved():
  """One local step: the received model is still the local one."""
  a, *rest = (change(text, local_steps=1) for text in (
      'sage(threshold=0.4)', 'fixmatch(threshold=0.4)',
      "fixmatch(threshold=0.4, labeler='global')"))
  for b in rest:
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_labelers_differ_in_a_first_step_by_the_normalization_alone():
  """One predicts by the statistics of the batch, one by those it received."""
  local, received = (
      change(f"fixmatch(threshold=0.5, labeler='{labeler}'{more})",
             model='conv', local_steps=1)
      for labeler, more in (('local', ''), ('global', ', weak_in_batch=True')))
  assert not np.allclose(local, received, atol=1e-4)


@pytest.mark.parametrize('model', ['conv', *wider('linear')])
@pytest.mark.parametrize('half_gap, other', [
    (1e30, 'fixmatch(threshold=0.0)'),
    (1e-9, "fixmatch(threshold=0.0, labeler='global', weak_in_batch=True)")])
def test_it_reduces_to_one_labeler(model, half_gap, other):
  """Where every row counts, a gap of any size changes nothing, or all."""
  a, b, c = (change(text, model=model, local_steps=6) for text in (
      f'sage(threshold=0.0, half_gap={half_gap})', other,
      'sage(threshold=0.0)'))
  np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
  assert not np.allclose(a, c, atol=1e-4)


@pytest.mark.parametrize('knob', ['threshold=1.1', 'unlabeled_weight=0.0'])
def test_without_unlabeled_rows_it_is_the_supervised_part(knob):
  """Keys are split the same way, so to the last bit."""
  a, b = (change(text, model='conv')
          for text in (f'sage({knob})', 'fixmatch(threshold=1.1)'))
  np.testing.assert_array_equal(a, b)


def test_weak_views_enter_the_batch_statistics_only():
  text = "fixmatch(threshold=1.1, labeler='global'{})"
  apart, beside, local = (update(x, model='conv').message for x in (
      text.format(''), text.format(', weak_in_batch=True'),
      'fixmatch(threshold=1.1)'))
  chex.assert_trees_all_close(beside, local, rtol=1e-5, atol=1e-7)
  gap = tree.global_norm(tree.subtract(beside.stats, apart.stats))
  assert gap > 1e-3
  without = [update(text.format(knob)).message
             for knob in ('', ', weak_in_batch=True')]
  chex.assert_trees_all_equal(*without)


def _step(w, received, known, y, unknown, *, bar, half):
  """The gradient for a linear model, by hand, and its local rate."""
  size = toy.NUM_CLASSES
  d = (softmax(known @ w) - np.eye(size)[y]) / max(len(y), 1)
  out = known.T @ d
  own, other = softmax(unknown @ w), softmax(unknown @ received)
  gap = abs(own.max(-1) - other.max(-1)) + 1e-6
  sure = own.max(-1) >= bar
  share = np.where(sure, .5 ** (gap / half), 0)[:, None]
  used = sure | (other.max(-1) >= bar)
  target = share * np.eye(size)[own.argmax(-1)] + (
      1 - share) * np.eye(size)[other.argmax(-1)]
  strong = np.concatenate([1 - .8 - unknown[:, :-1], unknown[:, -1:]], 1)
  d = used[:, None] * (softmax(strong @ w) - target) / max(len(unknown), 1)
  return out + strong.T @ d


def test_a_round_by_hand():
  """Full batches, three steps of plain descent, everyone takes part."""
  rate, bar, half = 1.5, .5, .2
  federation, _ = toy.federation()
  changes = {
      'weak': same, 'strong': lambda key, x: 255 - x, 'labeled_batch': 8,
      'unlabeled_batch': 12, 'local_steps': 3, 'cohort_size': toy.NUM_CLIENTS,
      'optimizer': lambda round_: optax.sgd(rate)}
  method = methods.make(
      f'sage(threshold={bar}, half_gap={half})', toy.task(**changes))
  before = method.init(toy.key(0), federation)
  after, metrics = jax.jit(method.round)(
      before, federation, jnp.int32(0), toy.key(1))

  def numbers(state):
    layer = state.server.model.params['Dense_0']
    return np.concatenate([np.asarray(layer['kernel'], np.float64),
                           np.asarray(layer['bias'], np.float64)[None]])
  images = np.asarray(federation.train.inputs, np.float64).reshape(
      len(federation.train.labels), -1) / 255 - .4
  images = np.concatenate([images, np.ones((len(images), 1))], 1)
  labels = np.asarray(federation.train.labels)
  first, total = numbers(before), 0
  for i, (n, m) in enumerate(zip(toy.LABELED, toy.UNLABELED, strict=True)):
    known = np.asarray(federation.clients.labeled)[i, :n]
    unknown = np.asarray(federation.clients.unlabeled)[i, :m]
    w = first
    for _ in range(3 if n + m else 0):
      w = w - rate * _step(w, first, images[known], labels[known],
                           images[unknown], bar=bar, half=half)
    total = total + (n + m) * (w - first)
  want = first + total / (sum(toy.LABELED) + sum(toy.UNLABELED))
  np.testing.assert_allclose(numbers(after), want, rtol=2e-3, atol=1e-4)
  rates = toy.means(metrics)
  assert 0 < rates['mask_rate'] < 1 and 0 < rates['local_rate'] < 1
