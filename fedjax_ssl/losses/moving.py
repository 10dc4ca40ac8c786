"""Moving averages of predictions, and thresholds and weights made of them.

B rows of a batch, C classes. An average that a batch cannot renew stays as it
is.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_ssl import arguments
from fedjax_ssl.arguments import at_least_float32
from fedjax_ssl.losses.rows import Array, Scalar


def row_mean(values: Array, mask: Array) -> jax.Array:
  """Computes the mean over the real rows of a batch.

  Args:
    values: float[B, ...]; a masked value may be NaN.
    mask: float32[B].

  Returns:
    float32[...]; zeros without rows.
  """
  wide = jnp.reshape(mask, jnp.shape(mask) + (1,) * (jnp.ndim(values) - 1))
  values = at_least_float32(jnp.where(wide > 0, values, 0))
  return (values * wide).sum(0) / jnp.maximum(jnp.sum(mask), 1)


def moved(old: Array, new: Array, mask: Array, *, decay: Scalar,
          min_rows: int = 1) -> jax.Array:
  """Moves an average towards a batch: decay * old + (1 - decay) * new.

  Args:
    old: float[...].
    new: float[...], of the batch.
    mask: float32[B], the rows behind `new`.
    decay: 0 is `new`, 1 is `old`.
    min_rows: rows that `new` needs; with fewer the average stays.

  Returns:
    As `old`.
  """
  after = decay * old + (1 - decay) * new
  counts = jnp.sum(mask) >= min_rows
  return jnp.where(counts, after, old).astype(jnp.result_type(old))


def moved_shares(shares: Array, probabilities: Array, mask: Array, *,
                 decay: Scalar) -> jax.Array:
  """Moves the mean prediction by a batch; the first batch is taken as it is.

  Args:
    shares: float32[C]; zeros before the first batch.
    probabilities: float[B, C] of the batch.
    mask: float32[B].
    decay: 0 is the batch, 1 stays.

  Returns:
    float32[C].
  """
  found = row_mean(probabilities, mask).astype(jnp.result_type(shares))
  before = jnp.where(jnp.sum(shares) > 0, shares, found)
  return moved(before, found, mask, decay=decay)


def aligned(probabilities: Array, shares: Array, target: Scalar, *,
            epsilon: float = 1e-6) -> jax.Array:
  r"""Aligns predictions with a distribution: :math:`norm(p \cdot t / s)`.

  Args:
    probabilities: float[B, C].
    shares: float[C], s, the mean prediction; zeros change nothing.
    target: float[C], t; one number for equal classes.
    epsilon: what is added to both, as in the codes of AdaMatch and USB, so that
      a class that is not predicted stays finite.

  Returns:
    float32[B, C], of sum 1.

  References:
    Berthelot et al., ReMixMatch, https://arxiv.org/abs/1911.09785.
  """
  ratio = jnp.where(jnp.sum(shares) > 0,
                    (target + epsilon) / (shares + epsilon), 1)
  scaled = at_least_float32(probabilities) * ratio
  return scaled / jnp.maximum(scaled.sum(-1, keepdims=True),
                              jnp.finfo(scaled.dtype).tiny)


def freematch_thresholds(confidence: Scalar, shares: Array) -> jax.Array:
  r"""Sets a threshold by class: :math:`\tau \tilde p_c / \max_v \tilde p_v`.

  Args:
    confidence: float32[], tau, how sure the model is overall.
    shares: float32[C], its mean prediction.

  Returns:
    float32[C]; the class predicted most has tau.

  Raises:
    ValueError: for a confidence beyond [0, 1], or a negative share.

  References:
    Wang et al., FreeMatch, https://arxiv.org/abs/2205.07246.
  """
  arguments.check_number('confidence', confidence, arguments.SHARE)
  arguments.check_number('shares', shares, arguments.NOT_NEGATIVE)
  shares = at_least_float32(shares)
  most = jnp.maximum(shares.max(), jnp.finfo(shares.dtype).tiny)
  return shares / most * confidence


def softmatch_weights(confidences: Array, mean: Scalar, variance: Scalar, *,
                      num_sigmas: Scalar = 2.0) -> jax.Array:
  r"""Weighs rows by :math:`\exp(-(n \min(c - \mu, 0))^2 / 2 \sigma^2)`.

  Args:
    confidences: float[B], c.
    mean: float32[], mu.
    variance: float32[], sigma^2.
    num_sigmas: n; 0 is a weight of 1 for all, a large one a threshold at mu.

  Returns:
    float32[B]; 1 from the mean on.

  Raises:
    ValueError: for a negative variance or number of deviations.

  References:
    Chen et al., SoftMatch, https://arxiv.org/abs/2301.10921.
  """
  arguments.check_number('variance', variance, arguments.NOT_NEGATIVE)
  arguments.check_number('num_sigmas', num_sigmas, arguments.NOT_NEGATIVE)
  below = num_sigmas * jnp.minimum(at_least_float32(confidences) - mean, 0)
  least = jnp.finfo(below.dtype).tiny
  return jnp.exp(-jnp.square(below) / jnp.maximum(2 * variance, least))


def variance_of(confidences: Array, mask: Array) -> jax.Array:
  """Computes the unbiased variance over the real rows of a batch.

  Args:
    confidences: float[B].
    mask: float32[B].

  Returns:
    float32[]; 0 of fewer than two rows.
  """
  apart = at_least_float32(confidences) - row_mean(confidences, mask)
  total = jnp.where(mask > 0, mask * jnp.square(apart), 0).sum()
  return total / jnp.maximum(jnp.sum(mask) - 1, 1)
