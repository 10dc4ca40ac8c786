"""Laws of the losses and of what they train towards."""
from __future__ import annotations

import functools

from absl.testing import absltest, parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import losses
from fedjax_ssl.losses import adversarial

B, C = 6, 4
MASK = np.array([1, 1, 0, 1, 0, 1], np.float32)


def draw(*shape, seed=0, scale=2.0):
  rng = np.random.default_rng(seed)
  return (scale * rng.normal(size=shape)).astype(np.float32)


LOGITS = draw(B, C)
STRONG = draw(B, C, seed=1)
LABELS = np.array([0, 3, -1, 1, 2, 2], np.int32)
SOFT = np.random.default_rng(2).dirichlet(np.ones(C), B).astype(np.float32)
HELPERS = draw(3, B, C, seed=3)


def softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def kl(p, q):
  return (p * np.log(p / q)).sum(-1)


# Each as (logits, mask) -> loss, the rest fixed.
LOSSES = (
    ('hard', lambda x, m: losses.cross_entropy(x, LABELS, m)[0]),
    ('soft', lambda x, m: losses.cross_entropy(x, SOFT, m)[0]),
    ('smooth', lambda x, m: losses.cross_entropy(
        x, LABELS, m, label_smoothing=0.1)[0]),
    ('fixmatch', lambda x, m: losses.fixmatch(x, LOGITS, m, threshold=0.5)[0]),
    ('confident', lambda x, m: losses.fixmatch(
        x, LOGITS, m, threshold=0.5, over='confident')[0]),
    ('uda', lambda x, m: losses.uda(
        x, LOGITS, m, threshold=0.5, temperature=0.4)[0]),
    ('tsa', lambda x, m: losses.tsa_cross_entropy(
        x, LABELS, m, threshold=0.9)[0]),
    ('consistency', lambda x, m: losses.consistency(x, SOFT, m, total=8)[0]),
    ('squared_error', lambda x, m: losses.squared_error(x, SOFT, m)[0]),
    ('helpers', lambda x, m: losses.inter_client_kl(x, HELPERS, m)[0]),
    ('relation', lambda x, m: losses.relation_matching(
        losses.relation_matrix(x, LABELS, m), softmax(draw(C, C, seed=4)))[0]),
    ('discriminator', lambda x, m: adversarial.discriminator_loss(
        x[:, 0], x[:, 1], m, fake_weight=0.7)[0]),
    ('generator', lambda x, m: adversarial.generator_loss(x[:, 0], m)[0]),
    ('reconstruction',
     lambda x, m: adversarial.reconstruction(x, LOGITS, m)[0]),
)


# Each as (mask, reduction) -> loss.
REDUCED = (
    ('cross_entropy', lambda m, r: losses.cross_entropy(
        STRONG, LABELS, m, reduction=r)),
    ('fixmatch', lambda m, r: losses.fixmatch(
        STRONG, LOGITS, m, threshold=0.5, reduction=r)),
    ('uda', lambda m, r: losses.uda(STRONG, LOGITS, m, reduction=r)),
    ('consistency', lambda m, r: losses.consistency(
        STRONG, SOFT, m, reduction=r)),
    ('squared_error', lambda m, r: losses.squared_error(
        STRONG, SOFT, m, reduction=r)),
    ('helpers', lambda m, r: losses.inter_client_kl(
        STRONG, HELPERS, m, reduction=r)),
    ('discriminator', lambda m, r: adversarial.discriminator_loss(
        STRONG[:, 0], STRONG[:, 1], m, reduction=r)),
    ('generator', lambda m, r: adversarial.generator_loss(
        STRONG[:, 0], m, reduction=r)),
    ('reconstruction', lambda m, r: adversarial.reconstruction(
        STRONG, LOGITS, m, reduction=r)),
)


class ReductionTest(parameterized.TestCase):

  @parameterized.named_parameters(*REDUCED)
  def test_rows_average_to_the_mean_and_masked_ones_are_zero(self, loss):
    real = MASK * (LABELS >= 0)  # The same rows, for hidden labels.
    rows, _ = loss(real, 'none')
    self.assertEqual(rows.shape, (B,))
    np.testing.assert_array_equal(np.asarray(rows)[real == 0], 0)
    mean, _ = loss(real, 'mean')
    np.testing.assert_allclose(rows.sum() / real.sum(), mean, rtol=1e-5)

  @parameterized.named_parameters(*REDUCED)
  def test_without_a_mask_all_rows_count(self, loss):
    chex.assert_trees_all_equal(
        loss(None, 'mean')[0], loss(np.ones(B, np.float32), 'mean')[0])

  @parameterized.named_parameters(*REDUCED)
  def test_other_reductions_are_refused(self, loss):
    with self.assertRaisesRegex(ValueError, "'sum'.*mean, none"):
      loss(MASK, 'sum')


class EveryLossTest(parameterized.TestCase):

  @parameterized.named_parameters(*LOSSES)
  def test_masked_rows_change_neither_value_nor_slope(self, loss):
    step = jax.jit(jax.value_and_grad(loss))
    value, slope = step(STRONG, MASK)
    self.assertTrue(np.isfinite(value))
    for wrong in (1e3, np.inf, np.nan):
      other = np.where(MASK[:, None] > 0, STRONG, np.float32(wrong))
      got, got_slope = step(other, MASK)
      chex.assert_trees_all_equal((got, got_slope), (value, slope))
    np.testing.assert_array_equal(np.asarray(slope)[MASK == 0], 0)
    self.assertGreater(float(abs(slope).max()), 0)

  @parameterized.named_parameters(*LOSSES)
  def test_batch_without_rows_is_finite_and_has_no_slope(self, loss):
    value, slope = jax.jit(jax.value_and_grad(loss))(STRONG, 0 * MASK)
    self.assertTrue(np.isfinite(value))
    np.testing.assert_array_equal(slope, 0)

  @parameterized.named_parameters(*LOSSES)
  def test_half_precision_logits_give_a_float32_loss(self, loss):
    self.assertEqual(
        jax.eval_shape(loss, jnp.asarray(STRONG, jnp.bfloat16), MASK).dtype,
        jnp.float32)


class SupervisedTest(parameterized.TestCase):

  def test_cross_entropy_by_hand(self):
    rows = -np.log(softmax(LOGITS))[np.arange(B), LABELS]
    want = rows[[0, 1, 3, 5]].mean()
    np.testing.assert_allclose(
        losses.cross_entropy(LOGITS, LABELS, MASK)[0], want, rtol=1e-6)
    np.testing.assert_allclose(
        losses.cross_entropy(np.log([[0.5, 0.25, 0.25]]), np.array([1]),
                             np.ones(1))[0], np.log(4), rtol=1e-6)

  def test_a_class_may_be_ruled_out_by_a_logit_of_minus_infinity(self):
    out = np.concatenate([LOGITS, np.full((B, 1), -np.inf, np.float32)], 1)
    for loss in (
        lambda x: losses.cross_entropy(x, LABELS, MASK)[0],
        lambda x: losses.fixmatch(x, x, MASK, threshold=0.0)[0],
        lambda x: losses.kl_rows(x, 2 * x).sum()):
      np.testing.assert_allclose(loss(out), loss(LOGITS), rtol=1e-6)
      slope = jax.grad(loss)(jnp.asarray(out))
      np.testing.assert_allclose(
          slope[:, :-1], jax.grad(loss)(jnp.asarray(LOGITS)), atol=1e-6)
      np.testing.assert_array_equal(slope[:, -1], 0)

  def test_one_hot_targets_are_labels(self):
    one_hot = np.eye(C, dtype=np.float32)[LABELS]
    np.testing.assert_allclose(
        losses.cross_entropy(LOGITS, one_hot, MASK)[0],
        losses.cross_entropy(LOGITS, LABELS, MASK)[0], rtol=1e-6)

  def test_hidden_labels_count_as_masked(self):
    everything = np.ones(B, np.float32)
    without = (LABELS >= 0).astype(np.float32)
    for loss in (losses.cross_entropy, losses.accuracy,
                 losses.relation_matrix):
      chex.assert_trees_all_equal(
          loss(LOGITS, LABELS, everything), loss(LOGITS, LABELS, without))

  def test_smoothing_of_one_forgets_the_label(self):
    one, other = (
        losses.cross_entropy(LOGITS, labels, np.ones(B), label_smoothing=1.0)[0]
        for labels in (np.zeros(B, np.int32), np.ones(B, np.int32)))
    np.testing.assert_allclose(one, other)

  def test_soft_targets_are_constants(self):
    slope = jax.grad(losses.cross_entropy, 1, has_aux=True)(
        LOGITS, SOFT, MASK)[0]
    np.testing.assert_array_equal(slope, 0)

  def test_total_divides(self):
    np.testing.assert_allclose(
        losses.cross_entropy(LOGITS, LABELS, MASK, total=8)[0] * 8,
        losses.cross_entropy(LOGITS, LABELS, MASK)[0] * 4, rtol=1e-6)

  def test_accuracy_by_hand(self):
    logits = np.eye(C, dtype=np.float32)[[0, 3, 1, 0, 2, 1]]
    self.assertEqual(losses.accuracy(logits, LABELS, MASK), 2 / 4)

  @parameterized.parameters(
      losses.cross_entropy, losses.accuracy, losses.relation_matrix,
      functools.partial(losses.tsa_cross_entropy, threshold=1.0))
  def test_a_class_that_the_logits_lack_is_refused(self, loss):
    for row, wrong in ((1, C), (3, -2)):
      labels = np.copy(LABELS)
      labels[row] = wrong
      with self.assertRaisesRegex(
          ValueError, f'^(labels|targets) have the class {wrong} in row {row}; '
          '.* 0 to 3, and -1 .*[.]$'):
        loss(LOGITS, labels)
      with self.assertRaisesRegex(ValueError, 'have the class'):
        loss(jnp.asarray(LOGITS), jnp.asarray(labels), jnp.asarray(MASK))
      jax.jit(loss)(LOGITS, labels, MASK)  # No value is known here.
      without = np.copy(MASK)
      without[row] = 0
      loss(LOGITS, labels, without)  # Padding may be anything.

  def test_a_class_is_checked_under_a_derivative_too(self):
    with self.assertRaisesRegex(ValueError, 'have the class 4 in row 0'):
      jax.grad(lambda x: losses.cross_entropy(x, np.full(B, C))[0])(LOGITS)

  def test_under_jit_a_class_that_the_logits_lack_costs_nothing(self):
    """As the docstring says: the row counts, or is masked if negative."""
    for wrong, count in ((C, B), (-2, B - 1)):
      labels = np.zeros(B, np.int32)
      labels[0] = wrong
      rows = -np.log(softmax(LOGITS))[1:, 0]
      np.testing.assert_allclose(
          jax.jit(losses.cross_entropy)(LOGITS, labels)[0],
          rows.sum() / count, rtol=1e-5)

  def test_labels_of_other_rows_are_blamed_and_not_the_mask(self):
    with self.assertRaisesRegex(ValueError, r'^targets have shape \(6,\)'):
      losses.cross_entropy(LOGITS[:5], LABELS, MASK)

  def test_mask_of_another_shape_is_refused(self):
    with self.assertRaisesRegex(ValueError, r'mask.*\(6, 1\).*\(6,\)'):
      losses.masked_mean(np.ones(B), np.ones((B, 1)))


class SelfTrainingTest(parameterized.TestCase):

  def test_threshold_zero_is_self_training(self):
    loss, metrics = losses.fixmatch(STRONG, LOGITS, MASK, threshold=0.0)
    want = losses.cross_entropy(
        STRONG, LOGITS.argmax(-1).astype(np.int32), MASK)[0]
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    self.assertEqual(metrics['mask_rate'], 1)

  @parameterized.parameters('batch', 'confident')
  def test_threshold_above_one_is_no_loss(self, over):
    loss, metrics = losses.fixmatch(
        STRONG, 100 * LOGITS, MASK, threshold=1.01, over=over)
    self.assertEqual(loss, 0)
    self.assertEqual(metrics['mask_rate'], 0)

  def test_fixmatch_by_hand(self):
    p = softmax(LOGITS)
    kept = (p.max(-1) >= 0.7) * MASK
    self.assertBetween(kept.sum(), 1, 3)
    rows = -np.log(softmax(STRONG))[np.arange(B), p.argmax(-1)]
    for over, total in (('batch', MASK.sum()), ('confident', kept.sum())):
      loss, metrics = losses.fixmatch(
          STRONG, LOGITS, MASK, threshold=0.7, over=over)
      np.testing.assert_allclose(loss, (kept * rows).sum() / total, rtol=1e-5)
      np.testing.assert_allclose(
          metrics['mask_rate'], kept.sum() / MASK.sum(), rtol=1e-6)

  def test_threshold_by_class(self):
    labels, kept = losses.pseudo_label(
        np.log([[0.6, 0.4], [0.4, 0.6]]), threshold=np.array([0.5, 0.7]))
    np.testing.assert_array_equal(labels, [0, 1])
    np.testing.assert_array_equal(kept, [1, 0])

  @parameterized.named_parameters(
      ('fixmatch', lambda w: losses.fixmatch(STRONG, w, MASK, threshold=0)[0]),
      ('uda', lambda w: losses.uda(STRONG, w, MASK)[0]),
      ('consistency', lambda w: losses.consistency(STRONG, w, MASK)[0]),
      ('helpers', lambda w: losses.inter_client_kl(STRONG, w[None], MASK)[0]),
      ('fairness', lambda w: losses.fairness(
          STRONG, jax.nn.softmax(w[0]), MASK, histogram=SOFT[0])[0]),
      ('soft', lambda w: losses.soft_pseudo_label(w[None]).max()),
      ('relation', lambda w: losses.relation_matching(
          softmax(STRONG[:C]), jax.nn.softmax(w[:C]))[0]),
      ('proximal', lambda w: losses.proximal(STRONG, w, mu=1.0)),
      ('reconstruction', lambda w: adversarial.reconstruction(
          STRONG, w, MASK)[0]))
  def test_targets_are_constants(self, loss):
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(LOGITS), 0)

  @parameterized.parameters((losses.fixmatch, 'weak'), (losses.uda, 'clean'))
  def test_views_of_other_rows_are_blamed_and_not_the_mask(self, loss, other):
    with self.assertRaisesRegex(
        ValueError, r'^strong_logits have shape \(6, 4\); allowed is \(5, 4\), '
        f'that of {other}_logits'):
      loss(STRONG, LOGITS[:5], MASK)
    with self.assertRaisesRegex(ValueError, r'^mask has shape \(6,\)'):
      loss(STRONG[:5], LOGITS[:5], MASK)

  def test_unknown_reduction_is_refused(self):
    with self.assertRaisesRegex(ValueError, "over is 'all'.*batch"):
      losses.fixmatch(STRONG, LOGITS, MASK, over='all')


class UdaTest(parameterized.TestCase):

  def test_equal_views_cost_nothing(self):
    self.assertAlmostEqual(
        float(losses.uda(LOGITS, LOGITS, MASK)[0]), 0, places=6)

  def test_uda_by_hand(self):
    kept = (softmax(LOGITS).max(-1) > 0.7) * MASK
    rows = kl(softmax(LOGITS / 0.4), softmax(STRONG))
    loss, metrics = losses.uda(
        STRONG, LOGITS, MASK, threshold=0.7, temperature=0.4)
    np.testing.assert_allclose(loss, (kept * rows).sum() / 4, rtol=1e-4)
    np.testing.assert_allclose(metrics['mask_rate'], kept.sum() / 4)

  def test_a_row_that_is_just_as_sure_as_the_threshold_is_left_out(self):
    """FixMatch keeps it, as the formulas of the two say."""
    even = np.zeros((1, 2), np.float32)
    for loss, rate in ((losses.uda, 0), (losses.fixmatch, 1)):
      self.assertEqual(loss(even, even, threshold=0.5)[1]['mask_rate'], rate)

  @parameterized.parameters(2, 3, 7, 10, 100)
  def test_annealing_ends_by_keeping_all(self, num_classes):
    eta = losses.tsa_threshold(50, 50, num_classes=num_classes)
    self.assertEqual(eta, 1)
    sure = 100 * np.eye(num_classes, dtype=np.float32)
    _, metrics = losses.tsa_cross_entropy(
        sure, np.arange(num_classes), np.ones(num_classes), threshold=eta)
    self.assertEqual(metrics['tsa_rate'], 1)

  def test_annealing_of_one_is_cross_entropy(self):
    loss, _ = losses.tsa_cross_entropy(LOGITS, LABELS, MASK, threshold=1.0)
    np.testing.assert_allclose(
        loss, losses.cross_entropy(LOGITS, LABELS, MASK)[0], rtol=1e-6)

  def test_learnt_labels_are_left_out_of_sum_and_count(self):
    logits = np.log(np.array([[0.9, 0.1], [0.6, 0.4]], np.float32))
    loss, metrics = losses.tsa_cross_entropy(
        logits, np.array([0, 0]), np.ones(2), threshold=0.8)
    np.testing.assert_allclose(loss, -np.log(0.6), rtol=1e-5)
    self.assertEqual(metrics['tsa_rate'], 0.5)


class ConsistencyTest(parameterized.TestCase):

  def test_by_hand_with_the_nominal_batch(self):
    rows = ((softmax(LOGITS) - SOFT) ** 2).sum(-1)
    np.testing.assert_allclose(
        losses.consistency(LOGITS, SOFT, MASK, total=64)[0],
        (MASK * rows).sum() / 64, rtol=1e-5)
    np.testing.assert_allclose(
        losses.squared_error(LOGITS, SOFT, MASK)[0],
        (MASK * rows).sum() / 4 / C, rtol=1e-5)

  def test_half_a_row_diverges_half_as_much(self):
    whole, half = (losses.target_kl(
        LOGITS, SOFT, np.full(B, mask, np.float32), reduction='none')[0]
                   for mask in (1, .5))
    np.testing.assert_allclose(whole, kl(SOFT, softmax(LOGITS)), rtol=1e-4)
    np.testing.assert_allclose(half, whole / 2, rtol=1e-5)

  def test_helpers_by_hand(self):
    rows = kl(softmax(HELPERS), softmax(LOGITS)).sum(0)
    want = (MASK * rows).sum() / 4
    np.testing.assert_allclose(
        losses.inter_client_kl(LOGITS, HELPERS, MASK)[0], want, rtol=1e-5)
    np.testing.assert_allclose(
        losses.inter_client_kl(LOGITS, HELPERS, MASK, over_helpers='mean')[0],
        want / 3, rtol=1e-5)

  def test_helpers_that_agree_or_are_absent_cost_nothing(self):
    same = np.stack([LOGITS, LOGITS + 1])
    for helpers in (same, same[:0]):
      got = losses.inter_client_kl(
          LOGITS, helpers, MASK, over_helpers='mean')[0]
      np.testing.assert_allclose(got, 0, atol=1e-6)

  def test_relation_matrix_by_hand(self):
    labels = np.array([0, 3, -1, 0, 2, 2], np.int32)
    got = losses.relation_matrix(LOGITS, labels, MASK, temperature=2.0)
    np.testing.assert_allclose(
        got[0], softmax(LOGITS[[0, 3]].mean(0) / 2), rtol=1e-5)
    np.testing.assert_allclose(got[1], 1 / C, rtol=1e-6)  # Nobody is in it.
    np.testing.assert_allclose(got[2], softmax(LOGITS[5] / 2), rtol=1e-5)

  def test_relation_matching(self):
    a, b = softmax(LOGITS[:C]), softmax(STRONG[:C])
    want = (kl(a, b) + kl(b, a)).mean() / 2
    np.testing.assert_allclose(
        losses.relation_matching(a, b)[0], want, rtol=1e-4)
    self.assertEqual(losses.relation_matching(a, a)[0], 0)
    hard = np.eye(C, dtype=np.float32)
    chex.assert_tree_all_finite(
        jax.value_and_grad(losses.relation_matching, has_aux=True)(
            hard, hard[::-1]))


class PenaltyTest(absltest.TestCase):

  def test_proximal_pulls_to_the_anchor_by_mu(self):
    params = {'w': np.array([1.0, 3.0]), 'none': {}}
    anchor = {'w': np.array([0.0, 1.0]), 'none': {}}
    value, slope = jax.value_and_grad(
        lambda p: losses.proximal(p, anchor, mu=0.1))(params)
    np.testing.assert_allclose(value, 0.05 * 5, rtol=1e-6)
    np.testing.assert_allclose(slope['w'], [0.1, 0.2], rtol=1e-6)

  def test_l1_norm(self):
    self.assertEqual(losses.l1_norm({'a': np.array([-1.0, 2.0]), 'b': ()}), 3)

  def test_l1_norm_leaves_what_is_zero_where_it_is(self):
    slope = jax.grad(losses.l1_norm)(np.array([-3.0, -0.0, 0.0, 0.5]))
    np.testing.assert_array_equal(slope, [-1, 0, 0, 1])


if __name__ == '__main__':
  absltest.main()
