"""Plain convolutional networks of the papers: no skips, dense heads."""
from __future__ import annotations

from flax import linen as nn
import jax

from fedjax_ssl.core import knobs
from fedjax_ssl.models import layers
from fedjax_ssl.ops import pooling


class Classic(nn.Module):
  """Convolutions, each pooled and rectified, then dense layers.

  Attributes:
    num_classes: C.
    choices: see `layers.Choices`; no normalization.
    convs: (kernel, features) of every convolution.
    dense: widths of the hidden dense layers; a negative width has no rectifier
      after it.
    padding: of the convolutions.
    kernel_init: initializer of all kernels.
    dropout: share of the last convolution's channels, and of the entries before
      the last dense layer, dropped in training.
  """

  num_classes: int
  choices: layers.Choices
  convs: tuple[tuple[int, int], ...]
  dense: tuple[int, ...]
  padding: str = 'SAME'
  kernel_init: layers.Initializer = layers.TORCH
  dropout: float = 0.0

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array | None = None,
               train: bool = False) -> jax.Array:
    """float[B, H, W, I] -> logits [B, C]."""
    del mask
    for i, (kernel, features) in enumerate(self.convs):
      x = layers.Conv(features, self.choices, kernel=kernel,
                      padding=self.padding, kernel_init=self.kernel_init,
                      pool=True)(x)
      if i == len(self.convs) - 1:
        x = layers.Dropout(self.dropout, channels=True)(x, train)
      x = pooling.relu(x)
    x = x.reshape(x.shape[0], -1)
    for width in self.dense:
      x = layers.Dense(abs(width), self.choices,
                       kernel_init=self.kernel_init)(x)
      x = pooling.relu(x) if width > 0 else x
    x = layers.Dropout(self.dropout)(x, train)
    return layers.Dense(self.num_classes, self.choices,
                        kernel_init=self.kernel_init)(x)


class FedTriNetCNN(nn.Module):
  """FedTriNet's network for color images, six 3x3 convolutions.

  Pairs of 32 and 64, 128 and 128, 256 and 256 channels, each pair pooled, then
  dense 1024 and 512. The first convolution of each pair is normalized. In
  training 5 % of the channels drop out after the second pair, and 10 % of the
  entries before the first and the last dense layer.

  Che et al., FedTriNet, IEEE Big Data 2021, code.

  Attributes:
    num_classes: C.
    choices: see `layers.Choices`.
  """

  num_classes: int
  choices: layers.Choices

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array | None = None,
               train: bool = False) -> jax.Array:
    """float[B, H, W, I], sides 8 or more -> logits [B, C]."""
    for i, (first, second) in enumerate(((32, 64), (128, 128), (256, 256))):
      x = layers.Conv(first, self.choices)(x)
      x = pooling.relu(layers.Norm(self.choices)(x, mask, train))
      x = pooling.relu(layers.Conv(second, self.choices, pool=True)(x))
      x = layers.Dropout(.05, channels=True)(x, train) if i == 1 else x
    x = layers.Dropout(.1)(x.reshape(x.shape[0], -1), train)
    for width in (1024, 512):
      x = pooling.relu(layers.Dense(width, self.choices)(x))
    x = layers.Dropout(.1)(x, train)
    return layers.Dense(self.num_classes, self.choices,
                        kernel_init=layers.LECUN)(x)


def fedavg_cnn(*, num_classes: int, choices: layers.Choices) -> nn.Module:
  """The CNN of FedAvg (https://arxiv.org/abs/1602.05629), SAME padding.

  conv5x5-32, pool, conv5x5-64, pool, dense 512: 1,663,370 parameters for 10
  classes and 28x28x1. PyTorch's default initialization, biases 0.
  """
  return Classic(num_classes, choices, ((5, 32), (5, 64)), (512,))


@knobs.checked(convs=knobs.whole(2, 3))
def alexnet(*, num_classes: int, choices: layers.Choices, convs: int = 3
            ) -> nn.Module:
  """FedMatch's network (https://arxiv.org/abs/2006.12097), after HAT.

  conv4x4-64, conv3x3-128, conv2x2-256, each pooled, dense 2048 twice:
  12,815,818 parameters for 10 classes and 32x32x3. Variance 1 / fan-in.

  Args:
    num_classes: C.
    choices: see `layers.Choices`.
    convs: 3, or 2 to leave out the last convolution as the paper's table is
      printed (21,073,098 parameters); that table's flat size of 4096 only
      comes out with three.

  Raises:
    ValueError: if convs is neither 2 nor 3.
  """
  return Classic(num_classes, choices, ((4, 64), (3, 128), (2, 256))[:convs],
                 (2048, 2048), kernel_init=layers.LECUN)


def simple_cnn(*, num_classes: int, choices: layers.Choices) -> nn.Module:
  """RSCFed's small network (https://arxiv.org/abs/2203.13993).

  conv5x5-6 and conv5x5-16, VALID and pooled, dense 120, 84, 84 and a dense 256
  without rectifier: 92,626 parameters for 10 classes and 32x32x3. PyTorch's
  default initialization, biases 0.
  """
  return Classic(num_classes, choices, ((5, 6), (5, 16)), (120, 84, 84, -256),
                 'VALID')


def fedtrinet_mnist(*, num_classes: int, choices: layers.Choices) -> nn.Module:
  """FedTriNet's network for digits of 32x32.

  Che et al., FedTriNet, IEEE Big Data 2021, code.

  conv5x5-10 and conv5x5-20, VALID and pooled, dense 50. In training half of the
  channels of the second convolution drop out, and half of the 50. PyTorch's
  default initialization, biases 0.
  """
  return Classic(num_classes, choices, ((5, 10), (5, 20)), (50,), 'VALID',
                 dropout=.5)


def fedtrinet_cifar(*, num_classes: int, choices: layers.Choices) -> nn.Module:
  """See `FedTriNetCNN`."""
  return FedTriNetCNN(num_classes, choices)
