"""Residual networks with the small stem for 32x32 images.

Convolutions have no bias and start from a normal distribution of variance
2 / fan-out (He et al.; SAGE's ResNet-8 too). The last layer's have variance
1 / fan-in, and its bias is 0; PyTorch's default, which SAGE has, is a third of
that, and a bias as large. ResNet-18, -34 and -50 may start as PyTorch does, as
in FedLabel's code: see `layers.initializers`. Strided convolutions have padding
'SAME', so their windows lie half a pixel off PyTorch's.
"""
from __future__ import annotations

from flax import linen as nn
import jax

from fedjax_ssl.core import knobs
from fedjax_ssl.models import layers
from fedjax_ssl.ops import pooling


class _Block(nn.Module):
  """Residual block of two 3x3 convolutions, or a 1-3-1 bottleneck.

  Attributes:
    features: channels inside; a bottleneck ends with four times as many.
    choices: see `layers.Choices`.
    stride: of the first 3x3 convolution and of the shortcut.
    bottleneck: whether the block is a bottleneck.
    kernel_init: initializer of the convolutions.
  """

  features: int
  choices: layers.Choices
  stride: int = 1
  bottleneck: bool = False
  kernel_init: layers.Initializer = layers.HE_FAN_OUT

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array | None, train: bool
               ) -> jax.Array:
    """float[B, H, W, I] -> float[B, H', W', O]."""
    def conv(x: jax.Array, features: int, kernel: int, stride: int = 1
             ) -> jax.Array:
      x = layers.Conv(features, self.choices, kernel=kernel, stride=stride,
                      use_bias=False, kernel_init=self.kernel_init)(x)
      return layers.Norm(self.choices)(x, mask, train)

    if self.bottleneck:
      out = 4 * self.features
      y = pooling.relu(conv(x, self.features, 1))
      y = pooling.relu(conv(y, self.features, 3, self.stride))
      y = conv(y, out, 1)
    else:
      out = self.features
      y = pooling.relu(conv(x, out, 3, self.stride))
      y = conv(y, out, 3)
    if self.stride > 1 or x.shape[3] != out:
      x = conv(x, out, 1, self.stride)
    return pooling.relu(x + y)


class ResNet(nn.Module):
  """conv3x3 stem, stages of blocks, mean over the map, dense head.

  Every stage but the first halves the map and doubles the channels.

  Attributes:
    num_classes: C.
    choices: see `layers.Choices`.
    blocks: number of blocks in each stage.
    bottleneck: whether blocks are bottlenecks.
    head: widths of the dense layers before the last one; a rectifier follows
      only the first.
    width: channels of the stem and of the first stage.
    stride: of the stem, whose windows grow with it.
    kernel_init: initializer of the convolutions.
    last_init: initializer of the last layer.
  """

  num_classes: int
  choices: layers.Choices
  blocks: tuple[int, ...]
  bottleneck: bool = False
  head: tuple[int, ...] = ()
  width: int = 64
  stride: int = 1
  kernel_init: layers.Initializer = layers.HE_FAN_OUT
  last_init: layers.Initializer = layers.LECUN

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array | None = None,
               train: bool = False) -> jax.Array:
    """float[B, H, W, I] -> logits [B, C]."""
    x = layers.Conv(self.width, self.choices,
                    kernel=max(3, 2 * self.stride - 1), stride=self.stride,
                    use_bias=False, kernel_init=self.kernel_init)(x)
    x = pooling.relu(layers.Norm(self.choices)(x, mask, train))
    for stage, count in enumerate(self.blocks):
      for block in range(count):
        stride = 2 if stage and not block else 1
        x = _Block(self.width * 2**stage, self.choices, stride,
                   self.bottleneck, self.kernel_init)(x, mask, train)
    x = pooling.mean_pool(x)
    for i, width in enumerate(self.head):
      x = layers.Dense(width, self.choices)(x)
      x = x if i else pooling.relu(x)
    return layers.Dense(self.num_classes, self.choices,
                        kernel_init=self.last_init)(x)


class WideResNet(nn.Module):
  """Pre-activation residual network of three stages (WRN-28-2).

  Zagoruyko, Komodakis, https://arxiv.org/abs/1605.07146. Normalization and
  rectifier come before each convolution; where a block changes the number of
  channels its shortcut reads the rectified input.

  Attributes:
    num_classes: C.
    choices: see `layers.Choices`.
    width: factor on the 16, 32 and 64 channels of the stages.
    blocks: of each stage.
  """

  num_classes: int
  choices: layers.Choices
  width: int = 2
  blocks: int = 4

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array | None = None,
               train: bool = False) -> jax.Array:
    """float[B, H, W, I] -> logits [B, C]."""
    def conv(x: jax.Array, features: int, kernel: int = 3, stride: int = 1
             ) -> jax.Array:
      return layers.Conv(features, self.choices, kernel=kernel, stride=stride,
                         use_bias=False, kernel_init=layers.HE_FAN_OUT)(x)

    def activate(x: jax.Array) -> jax.Array:
      return pooling.relu(layers.Norm(self.choices)(x, mask, train))

    x = conv(x, 16)
    for stage in range(3):
      features = 16 * self.width * 2**stage
      for block in range(self.blocks):
        stride = 2 if stage and not block else 1
        active = activate(x)
        y = conv(activate(conv(active, features, stride=stride)), features)
        if x.shape[3] != features or stride > 1:
          x = conv(active, features, kernel=1, stride=stride)
        x = x + y
    x = pooling.mean_pool(activate(x))
    return layers.Dense(self.num_classes, self.choices,
                        kernel_init=layers.LECUN)(x)


@knobs.checked()
def resnet8(*, num_classes: int, choices: layers.Choices, width: int = 64,
            stride: int = 1) -> nn.Module:
  """SAGE's ResNet-8, three stages of one block: 1,227,594 parameters.

  He et al., ResNet, CVPR 2016, https://arxiv.org/abs/1512.03385, widths of
  SAGE's code.

  Args:
    num_classes: C.
    choices: see `layers.Choices`.
    width: channels of the first stage, 64 in SAGE; the last has four times as
      many.
    stride: of the first convolution, for images larger than 32x32.
  """
  return ResNet(num_classes, choices, (1, 1, 1), width=width, stride=stride)


def _resnet(num_classes: int, choices: layers.Choices, init: str,
            blocks: tuple[int, ...], bottleneck: bool = False) -> nn.Module:
  hidden, last = layers.initializers(init, layers.HE_FAN_OUT)
  return ResNet(num_classes, choices, blocks, bottleneck, kernel_init=hidden,
                last_init=last)


@knobs.checked()
def resnet18(*, num_classes: int, choices: layers.Choices, init: str = 'he'
             ) -> nn.Module:
  """ResNet-18: 11,173,962 parameters for 10 classes.

  He et al., ResNet, CVPR 2016, https://arxiv.org/abs/1512.03385.

  Args:
    num_classes: C.
    choices: see `layers.Choices`.
    init: 'he', or 'torch' as PyTorch's default, with smaller weights.
  """
  return _resnet(num_classes, choices, init, (2, 2, 2, 2))


def resnet18_rscfed(*, num_classes: int, choices: layers.Choices) -> nn.Module:
  """RSCFed's ResNet-18, with two more dense layers: 11,565,386 parameters.

  They have widths 512 and 256 and precede the last layer.

  Liang et al., https://arxiv.org/abs/2203.13993.
  """
  return ResNet(num_classes, choices, (2, 2, 2, 2), head=(512, 256))


@knobs.checked()
def resnet34(*, num_classes: int, choices: layers.Choices, init: str = 'he'
             ) -> nn.Module:
  """ResNet-34: 21,282,122 parameters for 10 classes.

  He et al., ResNet, CVPR 2016, https://arxiv.org/abs/1512.03385.

  Args:
    num_classes: C.
    choices: see `layers.Choices`.
    init: 'he', or 'torch' as PyTorch's default, with smaller weights.
  """
  return _resnet(num_classes, choices, init, (3, 4, 6, 3))


@knobs.checked()
def resnet50(*, num_classes: int, choices: layers.Choices, init: str = 'he'
             ) -> nn.Module:
  """ResNet-50, of bottleneck blocks: 23,520,842 parameters for 10 classes.

  He et al., ResNet, CVPR 2016, https://arxiv.org/abs/1512.03385.

  Args:
    num_classes: C.
    choices: see `layers.Choices`.
    init: 'he', or 'torch' as PyTorch's default, with smaller weights.
  """
  return _resnet(num_classes, choices, init, (3, 4, 6, 3), bottleneck=True)


def wrn28_2(*, num_classes: int, choices: layers.Choices) -> nn.Module:
  """WRN-28-2: 1,467,610 parameters for 10 classes.

  Zagoruyko and Komodakis, BMVC 2016, https://arxiv.org/abs/1605.07146.
  """
  return WideResNet(num_classes, choices)
