"""The two ResNet-9 networks, of FedMatch and of FedDure."""
from __future__ import annotations

from typing import Any

from flax import linen as nn
import jax

from fedjax_ssl.core import knobs
from fedjax_ssl.models import layers
from fedjax_ssl.ops import pooling


class ResNet9(nn.Module):
  """Eight 3x3 convolutions, two residual sums and one dense layer.

  64 | 128, pool | 2 x 128 + skip | 256, pool | 512, pool | 2 x 512 + skip |
  4x4 pool | dense. Every convolution is followed by normalization and
  rectifier; nothing follows the sums.

  FedMatch (ICLR 2021, https://arxiv.org/abs/2006.12097): no bias at all, no
  normalization, variance 1 / fan-in. FedDure (AAAI 2024): biases and batch
  normalization.

  Attributes:
    num_classes: C.
    choices: see `layers.Choices`.
    use_bias: whether layers have biases.
    kernel_init: initializer of the convolutions.
    last_init: initializer of the dense layer.
  """

  num_classes: int
  choices: layers.Choices
  use_bias: bool = True
  kernel_init: layers.Initializer = layers.HE
  last_init: layers.Initializer = layers.LECUN

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array | None = None,
               train: bool = False) -> jax.Array:
    """float[B, H, W, I], sides 32 or more -> logits [B, C]."""
    options: dict[str, Any] = {
        'use_bias': self.use_bias, 'kernel_init': self.kernel_init}

    def block(x: jax.Array, features: int, pool: bool = False) -> jax.Array:
      if pool:
        return pooling.relu(layers.pooled_conv(
            x, features, self.choices, mask, train, **options))
      x = layers.Conv(features, self.choices, **options)(x)
      return pooling.relu(layers.Norm(self.choices)(x, mask, train))

    x = block(block(x, 64), 128, pool=True)
    x = x + block(block(x, 128), 128)
    x = block(block(x, 256, pool=True), 512, pool=True)
    x = x + block(block(x, 512), 512)
    x = pooling.max_pool(pooling.max_pool(x))
    return layers.Dense(self.num_classes, self.choices, use_bias=self.use_bias,
                        kernel_init=self.last_init)(x.reshape(x.shape[0], -1))


@knobs.checked()
def resnet9(*, num_classes: int, choices: layers.Choices, init: str = 'he'
            ) -> nn.Module:
  """FedDure's ResNet-9: 6,575,370 parameters for 10 classes and 32x32x3.

  Bai et al., FedDure, AAAI 2024, https://arxiv.org/abs/2307.05358, code.

  Args:
    num_classes: C.
    choices: see `layers.Choices`.
    init: 'he', which suits every normalization: variance 2 / fan-in, and
      1 / fan-in in the last layer; or 'torch', as its authors' code has it:
      PyTorch's default, 1 / (3 fan-in) everywhere, but for biases, which are 0
      here. Under batch normalization the smaller weights turn faster at the
      same rate.
  """
  hidden, last = layers.initializers(init)
  return ResNet9(num_classes, choices, kernel_init=hidden, last_init=last)


def resnet9_fedmatch(*, num_classes: int, choices: layers.Choices
                     ) -> nn.Module:
  """FedMatch's ResNet-9: 6,568,640 parameters for 10 classes and 32x32x3.

  Jeong et al., FedMatch, ICLR 2021, https://arxiv.org/abs/2006.12097.
  """
  return ResNet9(num_classes, choices, use_bias=False,
                 kernel_init=layers.LECUN)
