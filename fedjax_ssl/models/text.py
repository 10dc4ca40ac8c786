"""Classifiers of short texts: token ids, or word vectors made beforehand.

B texts, T positions, V words, E numbers of a word vector. Token 0 is padding
and 1 an unknown word; see `fedjax_ssl.data.datasets.tokens`. If inputs are ids,
the word vectors are trained, and `Model.embed` returns them. Inputs
float[B, T, E] are taken as word vectors; generated texts have this form too.
"""
from __future__ import annotations

import math

from flax import linen as nn
import jax
import jax.numpy as jnp

from fedjax_ssl.core import knobs
from fedjax_ssl.models import gan, layers
from fedjax_ssl.ops import pooling

UNKNOWN = 1
_SPREAD = 0.1  # Standard deviation of untrained word vectors.


class Text(nn.Module):
  """Word vectors, a pooling over positions, and a classifier.

  Attributes:
    num_classes: C.
    choices: see `layers.Choices`; no normalization.
    vocabulary: V, if inputs are ids; larger ids are unknown words.
    size: E, if inputs are ids.
    width: of the layer that reads windows of three words; 0 is no such layer:
      then the vectors themselves are pooled.
  """

  num_classes: int
  choices: layers.Choices
  vocabulary: int
  size: int
  width: int

  def setup(self):
    """Makes the layers."""
    self.table = self.param(
        'embedding', nn.initializers.normal(_SPREAD),
        (self.vocabulary, self.size), self.choices.param_dtype)
    if self.width:
      self.window = layers.Dense(self.width, self.choices)
    self.last = layers.Dense(self.num_classes, self.choices,
                             kernel_init=layers.LECUN)

  def embed(self, tokens: jax.Array) -> jax.Array:
    """Embeds int32[B, T] -> float[B, T, E]; padding is the zero vector."""
    known = jnp.where(tokens < self.vocabulary, tokens, UNKNOWN)
    vectors = jnp.take(self.table, known, axis=0)
    return jnp.where((tokens > 0)[..., None], vectors, 0)

  def __call__(self, x: jax.Array, mask: jax.Array | None = None,
               train: bool = False) -> jax.Array:
    """int[B, T] or float[B, T, E] -> logits [B, C]."""
    del mask, train
    if jnp.issubdtype(x.dtype, jnp.integer):
      x = self.embed(x)
    if self.width:  # A window of padding alone gives the bias.
      x = pooling.relu(self.window(gan.neighbours(x))).max(1)
    else:  # Padding adds zeros.
      x = x.sum(1) / math.sqrt(x.shape[1])
    return self.last(x)


@knobs.checked()
def text_mean(*, num_classes: int, choices: layers.Choices,
              vocabulary: int = 10_000, size: int = 50) -> nn.Module:
  """A linear classifier of the sum of the word vectors.

  See `Text`.

  Args:
    num_classes: C.
    choices: see `layers.Choices`.
    vocabulary: V, at least 2; words with larger ids are unknown.
    size: E, numbers of a trained word vector, at least 1.

  Raises:
    ValueError: if a number is too small.
  """
  return Text(num_classes, choices, vocabulary, size, 0)


@knobs.checked()
def text_cnn(*, num_classes: int, choices: layers.Choices,
             vocabulary: int = 10_000, size: int = 50, width: int = 64
             ) -> nn.Module:
  """A layer on windows of three words, and the maximum over all windows.

  See `Text`.

  Args:
    num_classes: C.
    choices: see `layers.Choices`.
    vocabulary: V, at least 2; words with larger ids are unknown.
    size: E, numbers of a trained word vector, at least 1.
    width: of the layer that reads the windows, at least 1.

  Raises:
    ValueError: if a number is too small.
  """
  return Text(num_classes, choices, vocabulary, size, width)
