"""Losses on unlabeled rows; see `supervised` for what all losses share.

B rows, C classes, H helper models. Module `targets` makes their targets.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_ssl import arguments
from fedjax_ssl.arguments import check_choice
from fedjax_ssl.losses.moving import row_mean
from fedjax_ssl.losses.rows import (
  all_rows,
  Array,
  check_rows,
  check_shape,
  check_views,
  kl_rows,
  Loss,
  masked_mean,
  reduced,
  Scalar,
  visible,
)
from fedjax_ssl.losses.supervised import cross_entropy
from fedjax_ssl.losses.targets import pseudo_label

_FAR = 1e30  # Beyond every logit but infinity.


def fixmatch(strong_logits: Array, weak_logits: Array,
             mask: Array | None = None, *, threshold: Scalar = 0.95,
             over: str = 'batch', reduction: str = 'mean') -> Loss:
  r"""Teaches the strong view the confident labels of the weak view.

  :math:`1[\max_c q_c \ge \tau]\, CE(\arg\max_c q_c, p(A_s(u)))`, with q of the
  weak view held constant.

  Args:
    strong_logits: float[B, C].
    weak_logits: float[B, C], constants for derivatives.
    mask: float32[B]; None is all rows.
    threshold: tau, float32[] or float32[C] by class; 0 is self-training, above
      1 the loss is 0.
    over: 'batch' divides by all real rows (FixMatch, FedDure), 'confident' by
      the accepted ones (FedMatch's code).
    reduction: 'mean', or 'none' for the rows, see `reduced`.

  Returns:
    float32[] and the metric `mask_rate`, the share of rows accepted.

  Raises:
    ValueError: for another `over`, views of different shapes, or a number out
      of range.

  References:
    Sohn et al., FixMatch, https://arxiv.org/abs/2001.07685, eq. 4.
  """
  check_choice('over', over, ('batch', 'confident'))
  check_views(strong_logits=strong_logits, weak_logits=weak_logits)
  mask = all_rows(mask, weak_logits)
  check_rows(weak_logits, mask,
             distributions={'strong_logits': strong_logits})
  labels, accepted = pseudo_label(weak_logits, threshold=threshold)
  total = jnp.sum(mask) if over == 'batch' else None
  loss, _ = cross_entropy(strong_logits, labels, mask * accepted, total=total,
                          reduction=reduction)
  return loss, {'mask_rate': masked_mean(accepted, mask)}


def uda(strong_logits: Array, clean_logits: Array, mask: Array | None = None,
        *, threshold: Scalar = 0.0, temperature: Scalar = 1.0,
        reduction: str = 'mean') -> Loss:
  r"""Computes UDA's :math:`1[\max_c p_c > \tau]\, KL[p_T \| p(A_s(u))]`.

  Args:
    strong_logits: float[B, C].
    clean_logits: float[B, C] of the clean view, constants for derivatives.
    mask: float32[B]; None is all rows.
    threshold: tau; 0 keeps all, 1 none. The authors' .8 for CIFAR-10.
    temperature: T, of the clean view; below 1 sharpens. The authors' .4.
    reduction: 'mean', or 'none' for the rows, see `reduced`.

  Returns:
    float32[], a mean over all real rows, and the metric `mask_rate`.

  Raises:
    ValueError: for views of different shapes, or a temperature that is not
      above 0.

  References:
    Xie et al., UDA, https://arxiv.org/abs/1904.12848.
  """
  check_views(strong_logits=strong_logits, clean_logits=clean_logits)
  mask = all_rows(mask, clean_logits)
  check_rows(clean_logits, mask,
             distributions={'strong_logits': strong_logits})
  arguments.check_number('temperature', temperature, arguments.POSITIVE)
  clean = jax.lax.stop_gradient(visible(clean_logits, mask))
  kept = (jax.nn.softmax(clean).max(-1) > threshold).astype(clean.dtype)
  rows = kl_rows(clean / temperature, visible(strong_logits, mask))
  return (reduced(kept * rows, mask, reduction=reduction),
          {'mask_rate': masked_mean(kept, mask)})


def target_kl(logits: Array, targets: Array, mask: Array | None = None, *,
              total: Scalar | None = None, reduction: str = 'mean') -> Loss:
  r"""Computes the divergence from given distributions, :math:`KL[t \| p]`.

  Its derivatives are those of the cross entropy; so is its value for one-hot
  targets.

  Args:
    logits: float[B, C].
    targets: float[B, C] distributions, constants for derivatives.
    mask: float32[B]; None is all rows.
    total: rows to divide by, see `masked_mean`.
    reduction: 'mean', or 'none' for the rows, see `reduced`.

  Returns:
    float32[], and no metrics.

  Raises:
    ValueError: for targets that are no distributions, as for classes.
  """
  mask = all_rows(mask, logits)
  check_rows(logits, mask, distributions={'targets': targets})
  rows, _ = cross_entropy(logits, targets, mask, reduction='none')
  targets = jnp.where(mask[:, None] > 0, jax.lax.stop_gradient(targets), 0)
  rows += mask * jax.scipy.special.xlogy(targets, targets).sum(-1)
  # The rows carry the mask already, which must not enter twice.
  total = jnp.sum(mask) if total is None else total
  real = (jnp.asarray(mask) > 0).astype(rows.dtype)
  return reduced(rows, real, reduction=reduction, total=total), {}


def consistency(logits: Array, targets: Array, mask: Array | None = None, *,
                total: Scalar | None = None, reduction: str = 'mean') -> Loss:
  r"""Computes the squared distance to a teacher, :math:`\sum_c (p_c - q_c)^2`.

  Args:
    logits: float[B, C] of the student.
    targets: float[B, C] probabilities of the teacher, sharpened or not;
      constants for derivatives.
    mask: float32[B]; None is all rows.
    total: rows to divide by; RSCFed's is the nominal size of the batch, also
      for a shorter last one. None is the number of real rows.
    reduction: 'mean', or 'none' for the rows, see `reduced`.

  Returns:
    float32[], and no metrics.

  Raises:
    ValueError: for targets that are no distributions, as for classes.

  References:
    Tarvainen and Valpola, Mean teachers, https://arxiv.org/abs/1703.01780;
    Liang et al., RSCFed, https://arxiv.org/abs/2203.13993.
  """
  mask = all_rows(mask, logits)
  check_rows(logits, mask, distributions={'targets': targets})
  gap = jax.nn.softmax(visible(logits, mask)) - jax.lax.stop_gradient(targets)
  gap = jnp.where(mask[:, None] > 0, gap, 0)
  rows = jnp.sum(jnp.square(gap), -1)
  return reduced(rows, mask, reduction=reduction, total=total), {}


def fairness(logits: Array, shares: Array, mask: Array | None = None, *,
             histogram: Array) -> Loss:
  r"""Computes FreeMatch's :math:`\sum_c a_c \log b_c`, to spread classes.

  :math:`a = norm(\tilde p / \tilde h)` and :math:`b = norm(\bar p / \bar h)`,
  with the mean prediction :math:`\bar p` of the batch and the shares
  :math:`\bar h` of its likeliest classes. A class of share 0 counts 0.

  Args:
    logits: float[B, C] of strong views.
    shares: float[C], mean prediction of weak views, a constant.
    mask: float32[B], real rows that are sure enough; None is all rows.
    histogram: float[C], shares of the likeliest classes of weak views.

  Returns:
    float32[], 0 without rows, and no metrics.

  Raises:
    ValueError: for shares or a histogram without one number per class.

  References:
    Wang et al., FreeMatch, https://arxiv.org/abs/2205.07246; the 1e-12 that is
    added to b is the authors' code's.
  """
  mask = all_rows(mask, logits)
  check_rows(logits, mask)
  check_shape('shares', shares, logits.shape[-1:])
  check_shape('histogram', histogram, logits.shape[-1:])
  p = jax.nn.softmax(visible(logits, mask))
  size = p.shape[-1]
  chosen = jax.nn.one_hot(jax.lax.stop_gradient(p).argmax(-1), size)
  found = _over(row_mean(p, mask), row_mean(chosen, mask))
  wanted = _over(shares, histogram)
  loss = jnp.sum(jax.lax.stop_gradient(wanted) * jnp.log(found + 1e-12))
  return jnp.where(jnp.sum(mask) > 0, loss, 0), {}


def _over(values: Array, shares: Array) -> jax.Array:
  """float32[C]: values / shares, of sum 1; 0 where the share is 0."""
  real = shares > 0
  scaled = jnp.where(real, values / jnp.where(real, shares, 1), 0)
  return scaled / jnp.maximum(scaled.sum(), jnp.finfo(scaled.dtype).tiny)


def squared_error(logits: Array, targets: Array, mask: Array | None = None, *,
                  reduction: str = 'mean') -> Loss:
  r"""Computes MixMatch's :math:`\frac1C \sum_c (p_c - q_c)^2` on blends.

  Args:
    logits: float[B, C].
    targets: float[B, C] probabilities, constants for derivatives.
    mask: float32[B]; None is all rows.
    reduction: 'mean', or 'none' for the rows, see `reduced`.

  Returns:
    float32[], and no metrics.

  Raises:
    ValueError: for targets that are no distributions, as for classes.

  References:
    Berthelot et al., MixMatch, https://arxiv.org/abs/1905.02249, eq. 4.
  """
  loss, _ = consistency(logits, targets, mask, reduction=reduction)
  return loss / logits.shape[-1], {}


def inter_client_kl(logits: Array, helper_logits: Array,
                    mask: Array | None = None, *, over_helpers: str = 'sum',
                    total: Scalar | None = None, reduction: str = 'mean'
                    ) -> Loss:
  r"""Computes the divergence from helpers, :math:`\sum_j KL[p_{h_j} \| p]`.

  Args:
    logits: float[B, C] of the own model.
    helper_logits: float[H, B, C], constants for derivatives; H of 0 costs 0.
    mask: float32[B]; FedMatch's holds its confident rows only. None is all
      rows.
    over_helpers: 'sum' (v1 of the paper) or 'mean' (v3 and code).
    total: rows to divide by, see `masked_mean`.
    reduction: 'mean', or 'none' for the rows, see `reduced`.

  Returns:
    float32[], and no metrics.

  Raises:
    ValueError: for another `over_helpers`.

  References:
    Jeong et al., FedMatch, https://arxiv.org/abs/2006.12097v1, eq. 1.
  """
  check_choice('over_helpers', over_helpers, ('sum', 'mean'))
  mask = all_rows(mask, logits)
  check_rows(logits, mask)
  check_shape('helper_logits', helper_logits, ('H', *logits.shape))
  helpers = visible(jax.lax.stop_gradient(helper_logits), mask[None])
  rows = kl_rows(helpers, visible(logits, mask)[None]).sum(0)
  if over_helpers == 'mean':
    rows /= max(len(helper_logits), 1)
  return reduced(rows, mask, reduction=reduction, total=total), {}


def relation_matrix(logits: Array, labels: Array, mask: Array | None = None, *,
                    temperature: Scalar = 2.0) -> jax.Array:
  r"""Computes FedIRM's relations: row c is softmax(mean logits of class c / T).

  Args:
    logits: float[B, C].
    labels: int32[B]; -1 counts as masked.
    mask: float32[B]; None is all rows.
    temperature: T.

  Returns:
    float32[C, C]; the row of a class without examples is uniform.

  Raises:
    ValueError: for labels that are no classes, as for one-hot rows, or not of
      the C; under `jax.jit` such a row is left out. For a temperature that is
      not above 0.

  References:
    Liu et al., FedIRM, https://arxiv.org/abs/2106.08600.
  """
  mask = all_rows(mask, logits)
  check_rows(logits, mask, classes={'labels': labels})
  arguments.check_number('temperature', temperature, arguments.POSITIVE)
  # A class may be ruled out by minus infinity, which no 0 is multiplied with.
  logits = jnp.maximum(visible(logits, mask), -_FAR)
  member = jax.nn.one_hot(labels, logits.shape[-1]) * mask[:, None]
  sums = jnp.matmul(member.T, logits, precision=jax.lax.Precision.HIGHEST)
  means = sums / jnp.maximum(member.sum(0), 1)[:, None]
  return jax.nn.softmax(means / temperature)


def relation_matching(matrix: Array, target: Array,
                      mask: Array | None = None, *, reduction: str = 'mean'
                      ) -> Loss:
  r"""Computes FedIRM's distance :math:`(KL[T\|M] + KL[M\|T]) / 2`.

  Args:
    matrix: float[C, C], rows of sum 1.
    target: float[C, C], a constant for derivatives.
    mask: float32[C], classes that count; None is all.
    reduction: 'mean' over the classes, or 'none', see `reduced`.

  Returns:
    float32[], 0 if the two agree, and no metrics.

  Raises:
    ValueError: if the shapes differ.

  References:
    Liu et al., FedIRM, https://arxiv.org/abs/2106.08600.
  """
  check_shape('matrix', matrix, ('C', 'C'))
  check_shape('target', target, matrix.shape)
  target = jax.lax.stop_gradient(target)
  # Derivatives stay finite at a probability of 0.
  log_target, log_matrix = (
      jnp.log(jnp.maximum(x, 1e-8)) for x in (target, matrix))
  rows = jnp.sum((target - matrix) * (log_target - log_matrix), -1)
  if mask is None and reduction == 'mean':
    return jnp.mean(rows) / 2, {}
  mask = all_rows(mask, rows)
  return reduced(rows, mask, reduction=reduction) / 2, {}
