"""Means over the real rows of a batch, and what every loss checks.

B rows, C classes. A mask holds 1 for a real row and 0 for padding; None means
that all rows are real.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.arguments import at_least_float32, check_choice

PyTree = Any
Array = jax.Array | np.ndarray
Scalar = Array | float
_LEAST = 1e-12  # Added to squared lengths, so that rows of zeros have a slope.
Loss = tuple[jax.Array, dict[str, jax.Array]]


def masked_mean(values: Array, mask: Array, *,
                total: Scalar | None = None) -> jax.Array:
  r"""Computes :math:`\sum_i m_i v_i / \max(\text{total}, 1)` over real rows.

  Args:
    values: float[B]; a masked value may be NaN.
    mask: float32[B].
    total: rows to divide by, such as the nominal size of the batch; None is
      the sum of the mask.

  Returns:
    float32[].

  Raises:
    ValueError: if the shapes differ, which would broadcast to a wrong mean.
  """
  values, mask = _of_real(values, mask)
  total = jnp.sum(mask) if total is None else total
  return jnp.sum(mask * values) / jnp.maximum(total, 1)


def reduced(values: Array, mask: Array, *, reduction: str = 'mean',
            total: Scalar | None = None) -> jax.Array:
  """Reduces the losses of rows as a loss's `reduction` says.

  Args:
    values: float[B]; a masked value may be NaN.
    mask: float32[B].
    reduction: 'mean', see `masked_mean`; or 'none', the value of every row
      times its mask.
    total: rows to divide by under 'mean'.

  Returns:
    float32[], or float32[B] under 'none', 0 for a masked row.

  Raises:
    ValueError: for another reduction, or if the shapes differ.
  """
  if reduction == 'mean':
    return masked_mean(values, mask, total=total)
  check_choice('reduction', reduction, ('mean', 'none'))
  values, mask = _of_real(values, mask)
  return values * mask


def _of_real(values: Array, mask: Array) -> tuple[jax.Array, jax.Array]:
  """Values with masked ones zeroed, and the mask; both in one dtype."""
  check_array('mask', mask)
  if jnp.shape(values) != jnp.shape(mask):
    raise ValueError(f'mask has shape {jnp.shape(mask)}; allowed is '
                     f'{jnp.shape(values)}, one entry per row.')
  kept = at_least_float32(jnp.where(mask > 0, values, 0))
  return kept, jnp.asarray(mask, kept.dtype)


def all_rows(mask: Array | None, like: Array) -> Array:
  """Returns the mask, or float32[B] of ones for None; `like` has B rows."""
  if mask is not None:
    check_array('mask', mask)
    return mask
  return jnp.ones(np.shape(like)[:1], jnp.float32)


def visible(logits: Array, mask: Array) -> jax.Array:
  """Zeroes the logits of masked rows, so that no derivative is NaN.

  A row has several logits, on an axis that the mask lacks, or one.
  """
  real = mask if jnp.ndim(mask) == jnp.ndim(logits) else mask[..., None]
  return at_least_float32(jnp.where(real > 0, logits, 0))


def unit_rows(x: Array) -> jax.Array:
  """Scales rows float[B, F] to length 1; zeros stay, rows near 1e-6 shrink.

  A length from 1e19 on, whose square float32 cannot hold, becomes 0.
  """
  # The square of a number above 255 is infinite in float16.
  wide = at_least_float32(x)
  unit = wide * jax.lax.rsqrt(jnp.sum(wide * wide, -1, keepdims=True) + _LEAST)
  return unit.astype(jnp.result_type(x))


def check_array(name: str, value: Any) -> None:
  """Raises ValueError, naming the argument, for a list and all else."""
  if not (hasattr(value, 'shape') and hasattr(value, 'dtype')):
    raise ValueError(f'{name} has type {type(value).__name__}; allowed are '
                     'arrays, such as jnp.asarray makes of a list.')


def check_rows(logits: Array, mask: Array, *,
               classes: Mapping[str, Array] | None = None,
               distributions: Mapping[str, Array] | None = None,
               **others: Array) -> None:
  """Raises ValueError for what would give a wrong loss.

  `logits` must be [B, C] and `mask` [B]. `classes` are whole numbers [B], and
  `distributions` are not whole and [B, C], arguments by name both; each of
  `others` may be either. Where the mask counts, a class must be one of the C,
  or -1, which the losses take for masked. Values are known only outside of
  `jax.jit`, so inside it they are not checked.
  """
  for name, value in {'logits': logits, 'mask': mask, **(classes or {}),
                      **(distributions or {}), **others}.items():
    check_array(name, value)
  shape = jnp.shape(logits)
  if len(shape) != 2:
    raise ValueError(f'logits have shape {shape}; allowed is [B, C].')
  whole = {**(classes or {})}
  # At B = C the shape of one kind broadcasts with that of the other.
  for name, value in (classes or {}).items():
    if jnp.shape(value) != shape[:1] or not _is_whole(value):
      raise ValueError(f'{name} have shape {jnp.shape(value)} and type '
                       f'{value.dtype}; allowed are classes, whole numbers of '
                       f'shape {shape[:1]}.')
  for name, value in (distributions or {}).items():
    if jnp.shape(value) != shape or _is_whole(value):
      raise ValueError(f'{name} have shape {jnp.shape(value)} and type '
                       f'{value.dtype}; allowed are floats of shape {shape}, '
                       'that of the logits.')
  for name, value in others.items():
    is_class = _is_whole(value)
    wanted = shape[:1] if is_class else shape
    if jnp.shape(value) != wanted:
      raise ValueError(
          f'{name} have shape {jnp.shape(value)} and type '
          f'{jnp.result_type(value)}; beside logits of shape {shape} whole '
          f'numbers are classes of shape {shape[:1]}, and all else has the '
          'shape of the logits.')
    if is_class:
      whole[name] = value
  # After the others: where they fit the logits, it is the mask that does not.
  if jnp.shape(mask) != shape[:1]:
    raise ValueError(f'mask has shape {jnp.shape(mask)}; allowed is '
                     f'{shape[:1]}, one entry per row.')
  for name, value in whole.items():
    _check_classes(name, value, mask, shape[1])


def _check_classes(name: str, classes: Array, mask: Array, size: int) -> None:
  """Raises ValueError for a row that counts and has no class of `size`."""
  if isinstance(classes, jax.core.Tracer) or isinstance(mask, jax.core.Tracer):
    return
  given = np.asarray(classes)
  wrong = (np.asarray(mask) > 0) & ((given < -1) | (given >= size))
  if wrong.any():
    row = int(wrong.argmax())
    raise ValueError(f'{name} have the class {given[row]} in row {row}; beside '
                     f'logits of {size} classes allowed are 0 to {size - 1}, '
                     'and -1 for a row that does not count.')


def check_views(**views: Array) -> None:
  """Raises ValueError, naming both, if two views have different shapes."""
  (name, value), (other, wanted) = views.items()
  check_array(name, value)
  check_array(other, wanted)
  if jnp.shape(value) != jnp.shape(wanted):
    raise ValueError(f'{name} have shape {jnp.shape(value)}; allowed is '
                     f'{jnp.shape(wanted)}, that of {other}, the other view of '
                     'the same rows.')


def check_shape(name: str, value: Any, allowed: tuple[int | str, ...]) -> None:
  """Raises ValueError, naming the argument, for another shape.

  A letter in `allowed` stands for any length.
  """
  check_array(name, value)
  shape = value.shape
  if len(shape) != len(allowed) or not all(
      isinstance(want, str) or size == want
      for size, want in zip(shape, allowed, strict=True)):
    words = ', '.join(map(str, allowed)) + ',' * (len(allowed) == 1)
    raise ValueError(f'{name} has shape {shape}; allowed is ({words}).')


def _is_whole(value: Array) -> bool:
  """Returns whether the array holds whole numbers."""
  return bool(jnp.issubdtype(value.dtype, jnp.integer))


def kl_rows(logits: Array, other_logits: Array) -> jax.Array:
  r"""Computes :math:`KL[p \| q] = \sum_c p_c (\log p_c - \log q_c)` by row.

  Args:
    logits: float[..., C] of p; wrap in `stop_gradient` if it is a target.
    other_logits: float[..., C] of q.

  Returns:
    float32[...]; 0 where the two agree.

  Raises:
    ValueError: if the numbers of classes differ.
  """
  if jnp.shape(logits)[-1] != jnp.shape(other_logits)[-1]:
    raise ValueError(f'logits have shapes {jnp.shape(logits)} and '
                     f'{jnp.shape(other_logits)}; both need the same classes.')
  log_p = jax.nn.log_softmax(at_least_float32(logits))
  log_q = jax.nn.log_softmax(at_least_float32(other_logits))
  p = jnp.exp(log_p)
  # Where p is 0, as of a logit of -inf, so is the term; log p is not a number.
  apart = jnp.where(p > 0, log_p, 0) - jnp.where(p > 0, log_q, 0)
  return jnp.sum(p * apart, -1)
