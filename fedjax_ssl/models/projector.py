"""The head that projects features so that instances can be told apart."""
from __future__ import annotations

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from fedjax_ssl.core.types import PyTree, Variables
from fedjax_ssl.models import layers
from fedjax_ssl.ops import pooling


class _Projector(nn.Module):
  """Dense, normalization, rectifier, dense."""

  hidden: int
  size: int
  choices: layers.Choices

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """float[B, F] -> float[B, size]."""
    x = layers.Dense(self.hidden, self.choices, kernel_init=layers.TORCH)(x)
    x = layers.Norm(self.choices)(x[:, None, None], mask, True)[:, 0, 0]
    return layers.Dense(self.size, self.choices, kernel_init=layers.TORCH)(
        pooling.relu(x))


def _module(hidden: int, size: int, norm: str, dtype: Any) -> _Projector:
  return _Projector(hidden, size, layers.Choices(
      norm, dtype='float64' if dtype == jnp.float64 else 'float32'))


def init(key: jax.Array, features: Any, *, hidden: int, size: int, norm: str
         ) -> Variables:
  """Draws a projector.

  Args:
    key: a PRNG key.
    features: float[B, F], or its shape and type.
    hidden: width of the hidden layer.
    size: width of a projection.
    norm: normalization of the hidden layer, see `layers.Norm`.
  """
  made = _module(hidden, size, norm, features.dtype).init(
      key, jnp.zeros(features.shape, features.dtype), None)
  return Variables(made['params'], made.get('stats', {}))


def project(variables: Variables, features: jax.Array, mask: jax.Array, *,
            norm: str) -> tuple[jax.Array, PyTree]:
  """Projects features in training.

  Args:
    variables: of `init`.
    features: float[B, F].
    mask: float32[B]; statistics are over the rows with mask 1.
    norm: as in `init`.

  Returns:
    float[B, size], and the statistics after the batch.
  """
  hidden, size = variables.params['Dense_1']['kernel'].shape
  out: Any
  out, changed = _module(hidden, size, norm, features.dtype).apply(
      {'params': variables.params, 'stats': variables.stats}, features, mask,
      mutable=['stats'])
  return out, changed.get('stats', {})
