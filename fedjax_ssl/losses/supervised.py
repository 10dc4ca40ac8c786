r"""Losses on labels.

Every loss here is `(student, target, mask, *, ...) -> (loss, metrics)`: logits
of the model in training first, then what it is trained towards. It is
:math:`\sum_i m_i l_i / \max(\sum_i m_i, 1)`: a masked row changes
neither value nor derivative whatever it holds, and a batch without rows costs
0. `reduction='none'` gives the rows instead of their mean.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_ssl import arguments
from fedjax_ssl.losses.rows import (
  all_rows,
  Array,
  check_rows,
  Loss,
  masked_mean,
  reduced,
  Scalar,
  visible,
)


def cross_entropy(logits: Array, targets: Array, mask: Array | None = None, *,
                  label_smoothing: float = 0.0, total: Scalar | None = None,
                  reduction: str = 'mean') -> Loss:
  r"""Computes the cross entropy :math:`-\sum_c t_c \log p_c`.

  Args:
    logits: float[B, C].
    targets: int32[B] classes, of which -1 counts as masked; or float[B, C]
      distributions, constants for derivatives.
    mask: float32[B]; None is all rows.
    label_smoothing: share of the target spread evenly over the classes.
    total: rows to divide by, see `masked_mean`.
    reduction: 'mean', or 'none' for the rows, see `reduced`.

  Returns:
    float32[], and no metrics.

  Raises:
    ValueError: for another reduction, smoothing out of [0, 1], or if the
      shapes do not go together, as for one-hot rows of whole numbers: make them
      floats, or give the classes. For a class that counts and is not one of the
      C. Under `jax.jit`, where values are not known, a row of class C or more
      counts with a target of zeros, and a negative class counts as masked.
  """
  mask = all_rows(mask, logits)
  check_rows(logits, mask, targets=targets)
  arguments.check_number('label_smoothing', label_smoothing, arguments.SHARE)
  targets = jnp.asarray(targets)
  if jnp.issubdtype(targets.dtype, jnp.integer):
    mask = jnp.where(targets >= 0, mask, 0)
    targets = jax.nn.one_hot(targets, logits.shape[-1])
  targets = jax.lax.stop_gradient(targets)
  targets = jnp.where(mask[:, None] > 0, targets, 0)
  targets = ((1 - label_smoothing) * targets
             + label_smoothing / logits.shape[-1])
  log_p = jax.nn.log_softmax(visible(logits, mask))
  # A class may be ruled out by a logit of -inf.
  rows = -jnp.sum(jnp.where(targets != 0, targets * log_p, 0), -1)
  return reduced(rows, mask, reduction=reduction, total=total), {}


def accuracy(logits: Array, labels: Array, mask: Array | None = None
             ) -> jax.Array:
  """Computes the share of rows whose largest logit is at the label.

  Args:
    logits: float[B, C].
    labels: int32[B]; -1 counts as masked.
    mask: float32[B]; None is all rows.

  Returns:
    float32[] in [0, 1].

  Raises:
    ValueError: for labels that are no classes, as for one-hot rows, or not of
      the C; under `jax.jit` one of C or more counts as wrong, and a negative
      one as masked.
  """
  mask = all_rows(mask, logits)
  check_rows(logits, mask, classes={'labels': labels})
  return masked_mean((logits.argmax(-1) == labels).astype(jnp.float32),
                     jnp.where(labels >= 0, mask, 0))


def tsa_cross_entropy(logits: Array, labels: Array, mask: Array | None = None,
                      *, threshold: Scalar, reduction: str = 'mean') -> Loss:
  r"""Computes the cross entropy of labels not learnt yet: :math:`p \le \eta`.

  Args:
    logits: float[B, C].
    labels: int32[B]; -1 counts as masked.
    mask: float32[B]; None is all rows.
    threshold: eta, see `tsa_threshold`; 1 keeps every row.
    reduction: 'mean', or 'none' for the rows, see `reduced`.

  Returns:
    float32[], a mean over the rows kept, and the metric `tsa_rate`, their
    share.

  Raises:
    ValueError: for labels that are no classes, as for one-hot rows, or not of
      the C; under `jax.jit` a row of class C or more is left out, and a
      negative class counts as masked.

  References:
    Xie et al., UDA, https://arxiv.org/abs/1904.12848.
  """
  mask = all_rows(mask, logits)
  check_rows(logits, mask, classes={'labels': labels})
  mask = jnp.where(labels >= 0, mask, 0)
  p = jax.nn.softmax(jax.lax.stop_gradient(visible(logits, mask)))
  chosen = jnp.take_along_axis(p, jnp.maximum(labels, 0)[:, None], -1)[:, 0]
  # A probability may be rounded to just above 1.
  kept = (jnp.minimum(chosen, 1) <= threshold).astype(jnp.float32)
  loss, _ = cross_entropy(logits, labels, mask * kept, reduction=reduction)
  return loss, {'tsa_rate': masked_mean(kept, mask)}
