"""Small networks: linear, dense and a convolutional one for every image."""
from __future__ import annotations

from flax import linen as nn
import jax

from fedjax_ssl.core import knobs
from fedjax_ssl.models import layers
from fedjax_ssl.ops import pooling


class Linear(nn.Module):
  """One dense layer on the flat input.

  Attributes:
    num_classes: C.
    choices: see `layers.Choices`; no normalization.
  """

  num_classes: int
  choices: layers.Choices

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array | None = None,
               train: bool = False) -> jax.Array:
    """float[B, ...] -> logits [B, C]."""
    del mask, train
    x = x.reshape(x.shape[0], -1)
    return layers.Dense(self.num_classes, self.choices,
                        kernel_init=layers.LECUN)(x)


class MLP(nn.Module):
  """Dense layers with rectifiers between; He initialization.

  Attributes:
    num_classes: C.
    choices: see `layers.Choices`; no normalization.
    width: of every hidden layer.
    depth: hidden layers.
  """

  num_classes: int
  choices: layers.Choices
  width: int = 200
  depth: int = 2

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array | None = None,
               train: bool = False) -> jax.Array:
    """float[B, ...] -> logits [B, C]."""
    del mask, train
    x = x.reshape(x.shape[0], -1)
    for _ in range(self.depth):
      x = pooling.relu(layers.Dense(self.width, self.choices)(x))
    return layers.Dense(self.num_classes, self.choices,
                        kernel_init=layers.LECUN)(x)


class CNN(nn.Module):
  """conv3x3 - pool - conv3x3 - pool - dense, for images of 4x4 and more.

  Maps of 8x8 and more, from images of 32x32, are then averaged 2x2 until they
  are smaller, which keeps the dense layer small. He initialization.

  Attributes:
    num_classes: C.
    choices: see `layers.Choices`; normalization after each convolution.
    width: channels of the first convolution; the second has twice as many.
    stride: side of the windows that images are first averaged over.
  """

  num_classes: int
  choices: layers.Choices
  width: int = 16
  stride: int = 1

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array | None = None,
               train: bool = False) -> jax.Array:
    """float[B, H, W, I] -> logits [B, C]."""
    if min(x.shape[1:3]) // self.stride < 4:
      raise ValueError(f'stride is {self.stride}; it must leave 4x4 of images '
                       f'of {x.shape[1]}x{x.shape[2]}.')
    if self.stride > 1:
      x = pooling.mean_windows(x, self.stride)
    for features in (self.width, 2 * self.width):
      x = pooling.relu(layers.pooled_conv(
          x, features, self.choices, mask, train))
    while min(x.shape[1:3]) >= 8:
      x = pooling.mean_pool_2x2(x)
    x = x.reshape(x.shape[0], -1)
    return layers.Dense(self.num_classes, self.choices,
                        kernel_init=layers.LECUN)(x)


def linear(*, num_classes: int, choices: layers.Choices) -> nn.Module:
  """See `Linear`."""
  return Linear(num_classes, choices)


@knobs.checked(depth=knobs.whole(0, 32))
def mlp(*, num_classes: int, choices: layers.Choices, width: int = 200,
        depth: int = 2) -> nn.Module:
  """See `MLP`. Raises ValueError for a width or depth out of bounds."""
  return MLP(num_classes, choices, width, depth)


@knobs.checked()
def cnn(*, num_classes: int, choices: layers.Choices, width: int = 16,
        stride: int = 1) -> nn.Module:
  """See `CNN`. Raises ValueError for a width or stride out of bounds."""
  return CNN(num_classes, choices, width, stride)
