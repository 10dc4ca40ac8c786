r"""Losses of a generator and its discriminator, on the latter's logits.

FedSSL's G-Reg is :math:`\log D(x, p) + g(\lambda) \log(1 - D(\hat x, p'))`,
which D maximises and G minimises, plus a reconstruction, with p' of
`fake_condition`; D here is the sigmoid of a logit. All are masked means as in
`losses`.
"""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_ssl.arguments import at_least_float32, check_choice
from fedjax_ssl.losses.rows import (
  all_rows,
  Array,
  check_shape,
  Loss,
  reduced,
  Scalar,
  visible,
)
from fedjax_ssl.losses.targets import mixup


def discriminator_loss(real_logits: Array, fake_logits: Array,
                       mask: Array | None = None, *, fake_weight: Scalar = 1.0,
                       kind: str = 'logistic', reduction: str = 'mean'
                       ) -> Loss:
  r"""Computes what the discriminator minimises.

  'logistic': :math:`-\log D(x) - g \log(1 - D(\hat x))`, FedSSL's objective.
  'hinge': :math:`\max(0, 1 - d(x)) + g \max(0, 1 + d(\hat x))`, on logits d.

  Args:
    real_logits: float[B].
    fake_logits: float[B], of generated examples; stop their derivative at the
      generator.
    mask: float32[B]; None is all rows.
    fake_weight: g, float32[] or float32[B], see `losses.realism_weight`.
    kind: 'logistic' or 'hinge'.
    reduction: 'mean', or 'none' for the rows.

  Returns:
    float32[], and no metrics.

  Raises:
    ValueError: for another kind, or if the shapes differ.

  References:
    Fan et al., FedSSL, IJCAI 2022, eq. 6; Goodfellow et al.,
    https://arxiv.org/abs/1406.2661; Lim and Ye,
    https://arxiv.org/abs/1705.02894.
  """
  check_choice('kind', kind, ('logistic', 'hinge'))
  mask = all_rows(mask, real_logits)
  check_shape('real_logits', real_logits, mask.shape)
  check_shape('fake_logits', fake_logits, mask.shape)
  _check_weight('fake_weight', fake_weight, mask)
  cost = jax.nn.softplus if kind == 'logistic' else lambda d: jax.nn.relu(1 + d)
  real, fake = visible(real_logits, mask), visible(fake_logits, mask)
  return reduced(cost(-real) + fake_weight * cost(fake), mask,
                 reduction=reduction), {}


def generator_loss(fake_logits: Array, mask: Array | None = None, *,
                   weight: Scalar = 1.0, kind: str = 'non_saturating',
                   reduction: str = 'mean') -> Loss:
  r"""Computes what the generator minimises.

  'non_saturating': :math:`-g \log D(\hat x)`; 'saturating', FedSSL as printed:
  :math:`g \log(1 - D(\hat x))`, whose derivative fades where the generator is
  worst; 'hinge': :math:`-g\, d(\hat x)`.

  Args:
    fake_logits: float[B].
    mask: float32[B]; None is all rows.
    weight: g, float32[] or float32[B], see `losses.realism_weight`.
    kind: one of the three.
    reduction: 'mean', or 'none' for the rows.

  Returns:
    float32[], and no metrics.

  Raises:
    ValueError: for another kind, or if the shapes differ.

  References:
    Fan et al., FedSSL, IJCAI 2022, eq. 6; Goodfellow et al.,
    https://arxiv.org/abs/1406.2661.
  """
  check_choice('kind', kind, ('non_saturating', 'saturating', 'hinge'))
  mask = all_rows(mask, fake_logits)
  check_shape('fake_logits', fake_logits, mask.shape)
  _check_weight('weight', weight, mask)
  fake = visible(fake_logits, mask)
  costs: dict[str, Callable[[jax.Array], jax.Array]] = {
      'non_saturating': lambda d: jax.nn.softplus(-d),
      'saturating': lambda d: -jax.nn.softplus(d),
      'hinge': lambda d: -d}
  return reduced(weight * costs[kind](fake), mask, reduction=reduction), {}


def reconstruction(generated: Array, images: Array, mask: Array | None = None,
                   *, over_pixels: str = 'sum', reduction: str = 'mean'
                   ) -> Loss:
  r"""Computes :math:`\|\hat x - x\|^2`, an unmixed example from its source.

  Args:
    generated: float[B, ...], made with a blend of 1.
    images: float[B, ...], constants for derivatives.
    mask: float32[B]; None is all rows.
    over_pixels: 'sum', the norm as printed; or 'mean', which does not outgrow
      the other terms on large images.
    reduction: 'mean', or 'none' for the rows.

  Returns:
    float32[], and no metrics.

  Raises:
    ValueError: for another `over_pixels`, or if the shapes differ.

  References:
    Fan et al., FedSSL, IJCAI 2022, eq. 7.
  """
  check_choice('over_pixels', over_pixels, ('sum', 'mean'))
  mask = all_rows(mask, generated)
  check_shape('images', images, generated.shape)
  check_shape('mask', mask, generated.shape[:1])
  rows = mask.reshape(mask.shape + (1,) * (generated.ndim - 1)) > 0
  gap = at_least_float32(generated) - jax.lax.stop_gradient(
      at_least_float32(images))
  reduce = jnp.sum if over_pixels == 'sum' else jnp.mean
  distance = reduce(
      jnp.square(jnp.where(rows, gap, 0)).reshape(len(mask), -1), -1)
  return reduced(distance, mask, reduction=reduction), {}


def fake_condition(lam: Scalar, source: Array, target: Array, *,
                   label: str = 'mixed') -> jax.Array:
  """Returns the label distribution that D gets with a generated example.

  Args:
    lam: float32[] or float32[B], the blend it was generated with.
    source: float[B, C], label distribution of the source image.
    target: float[B, C], one-hot target class.
    label: 'mixed', lam * source + (1 - lam) * target; or 'target' as printed,
      which asks an unmixed image to pass for another class. Both are the same
      at lam = 0.

  Returns:
    float32[B, C], a constant for derivatives.

  Raises:
    ValueError: for another `label`, or if the shapes differ.

  References:
    Fan et al., FedSSL, IJCAI 2022, eq. 6.
  """
  check_choice('label', label, ('mixed', 'target'))
  check_shape('source', source, ('B', 'C'))
  check_shape('target', target, source.shape)
  share = lam if label == 'mixed' else jnp.zeros_like(lam)
  mixed: jax.Array = jax.lax.stop_gradient(mixup(share, source, target))
  return mixed


def _check_weight(name: str, value: Scalar, mask: Array) -> None:
  if jnp.ndim(value):
    check_shape(name, value, mask.shape)
