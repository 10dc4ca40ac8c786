"""Layers of every network: convolution, dense, normalization."""
from __future__ import annotations

from collections.abc import Callable
import dataclasses
import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from fedjax_ssl.core import checks
from fedjax_ssl.ops import conv, pooling

NORMS = ('batch', 'group', 'none', 'static')

# (key, shape, dtype) -> array; fan-in of a convolution is kh * kw * I.
Initializer = Callable[..., Any]
HE: Initializer = nn.initializers.he_normal()
HE_FAN_OUT: Initializer = nn.initializers.variance_scaling(
    2., 'fan_out', 'normal')
# What FedMatch calls variance scaling: variance 1 / fan-in, truncated normal.
LECUN: Initializer = nn.initializers.lecun_normal()
# PyTorch's default for both layers: uniform, variance 1 / (3 * fan-in).
TORCH: Initializer = nn.initializers.variance_scaling(
    1 / 3, 'fan_in', 'uniform')

_EPSILON = 1e-5
_MOMENTUM = .1
_GROUPS = 32


def initializers(init: str, hidden: Initializer = HE
                 ) -> tuple[Initializer, Initializer]:
  """Returns the initializers of a network's layers and of its last one.

  Args:
    init: 'he' is `hidden`, and `LECUN` in the last layer; 'torch' is `TORCH`
      everywhere. Biases are 0 with both.
    hidden: He initialization of either kind.
  """
  return (TORCH, TORCH) if init == 'torch' else (hidden, LECUN)


@dataclasses.dataclass(frozen=True)
class Choices:
  """What a run chooses for every network.

  Attributes:
    norm: 'none', 'batch', 'group' or 'static', see `Norm`.
    conv_impl: see `conv.conv2d`.
    dtype: of the arithmetic: 'float32', 'bfloat16' or 'float64'. Parameters
      and statistics are float32, or float64 with 'float64'.
  """

  norm: str = 'none'
  conv_impl: str = 'auto'
  dtype: str = 'float32'

  def __post_init__(self) -> None:
    checks.check('norm', self.norm, NORMS)

  @property
  def param_dtype(self) -> str:
    """dtype of parameters, statistics and logits."""
    return 'float64' if self.dtype == 'float64' else 'float32'


class Conv(nn.Module):
  """`conv.conv2d`, or `conv.max_pooled_conv2d`, and a bias.

  Parameters are `kernel` [k, k, I, O] and `bias` [O].

  Attributes:
    features: O.
    choices: conv_impl and dtype.
    kernel: k.
    stride: see `conv.conv2d`.
    padding: see `conv.conv2d`.
    use_bias: whether a bias is added; it starts at 0.
    kernel_init: initializer of the kernel.
    pool: whether the maximum of every 2x2 window is taken; stride is 1 then.
  """

  features: int
  choices: Choices
  kernel: int = 3
  stride: int = 1
  padding: str = 'SAME'
  use_bias: bool = True
  kernel_init: Initializer = HE
  pool: bool = False

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """float[B, H, W, I] -> float[B, H', W', O], half the sides with pool.

    Raises:
      ValueError: as the convolution, and for a pool with a stride.
    """
    if self.pool and self.stride != 1:
      raise ValueError(f'stride is {self.stride}; with pool it must be 1.')
    made, dtype = self.choices.param_dtype, self.choices.dtype
    kernel = self.param(
        'kernel', self.kernel_init,
        (self.kernel, self.kernel, x.shape[3], self.features), made)
    x, kernel = x.astype(dtype), kernel.astype(dtype)
    if self.pool:
      # The bias is added after the maximum: the same sum, of fewer pixels.
      y = conv.max_pooled_conv2d(
          x, kernel, padding=self.padding, impl=self.choices.conv_impl)
    else:
      y = conv.conv2d(x, kernel, stride=self.stride, padding=self.padding,
                      impl=self.choices.conv_impl)
    if self.use_bias:
      bias = self.param('bias', nn.initializers.zeros, (self.features,), made)
      y = y + bias.astype(dtype)
    return y


def pooled_conv(x: jax.Array, features: int, choices: Choices,
                mask: jax.Array | None, train: bool, **options: Any
                ) -> jax.Array:
  """Applies `Conv`, `Norm` and `pooling.max_pool`, inside a module.

  Without normalization, which needs the whole map, `Conv` pools.

  Args:
    x: float[B, H, W, I].
    features: O.
    choices: of the layers.
    mask: float[B] or None, see `Norm`.
    train: see `Norm`.
    **options: of `Conv`.

  Returns:
    float[B, H'//2, W'//2, O].
  """
  if choices.norm == 'none':
    return Conv(features, choices, pool=True, **options)(x)
  x = Conv(features, choices, **options)(x)
  return pooling.max_pool(Norm(choices)(x, mask, train))


class Dense(nn.Module):
  """x W + b with parameters `kernel` [I, O] and `bias` [O].

  Attributes:
    features: O.
    choices: dtype.
    use_bias: whether a bias is added; it starts at 0.
    kernel_init: initializer of the kernel.
  """

  features: int
  choices: Choices
  use_bias: bool = True
  kernel_init: Initializer = HE

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """float[B, I] -> float[B, O]."""
    made, dtype = self.choices.param_dtype, self.choices.dtype
    kernel = self.param(
        'kernel', self.kernel_init, (x.shape[-1], self.features), made)
    y = jnp.dot(x.astype(dtype), kernel.astype(dtype))
    if self.use_bias:
      bias = self.param('bias', nn.initializers.zeros, (self.features,), made)
      y = y + bias.astype(dtype)
    return y


class Dropout(nn.Module):
  """Drops entries in training, where a key for it is given.

  Attributes:
    rate: share dropped, in [0, 1); the rest is scaled by 1 / (1 - rate).
    channels: whether whole channels of a map go, instead of single entries.
  """

  rate: float
  channels: bool = False

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    """float[B, ...] -> float[B, ...]."""
    if not (train and self.rate and self.has_rng('dropout')):
      return x
    shape = ((x.shape[0], 1, 1, x.shape[-1]) if self.channels else x.shape)
    kept = jax.random.bernoulli(
        self.make_rng('dropout'), 1 - self.rate, shape)
    return jnp.where(kept, x / (1 - self.rate), 0).astype(x.dtype)


class Norm(nn.Module):
  """Normalization of channels, by the run's policy, with scale and bias.

  'none': the identity, without parameters.
  'group': per row, over 32 groups of channels, or gcd(32, C).
  'batch': training normalizes by the mean and the biased variance of the rows
    with mask 1, and moves the running statistics a tenth of the way to that
    mean and the unbiased variance, as PyTorch does; otherwise the running
    statistics normalize.
  'static': as 'batch', but the statistics after a training batch are that
    batch's own, with the biased variance: local training ignores them and a
    separate pass averages them (SemiFL, https://arxiv.org/abs/2106.01432).

  Statistics are computed in float32 or better. A batch whose mask is all 0
  leaves them unchanged.
  """

  choices: Choices

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array | None, train: bool
               ) -> jax.Array:
    """float[B, H, W, C], mask float[B] or None -> float[B, H, W, C]."""
    policy = self.choices.norm
    if policy == 'none':
      return x
    if mask is not None and mask.shape != x.shape[:1]:
      raise ValueError(f'mask has shape {mask.shape}; allowed is '
                       f'{x.shape[:1]}, one entry per row.')
    made = self.choices.param_dtype
    shape = (x.shape[-1],)
    scale = self.param('scale', nn.initializers.ones, shape, made)
    bias = self.param('bias', nn.initializers.zeros, shape, made)
    wide = x.astype(made)
    if policy == 'group':
      mean, variance = _group_moments(wide)
    else:
      old = (self.variable('stats', 'mean', jnp.zeros, shape, made),
             self.variable('stats', 'variance', jnp.ones, shape, made))
      if train:
        moments, count = _masked_moments(wide, mask)
        mean, variance = moments
        if not self.is_initializing():
          _renew(old, moments, count, policy)
      else:
        mean, variance = old[0].value, old[1].value
    factor = scale * jax.lax.rsqrt(variance + _EPSILON)
    return (wide * factor + (bias - mean * factor)).astype(x.dtype)


def _renew(old: tuple[Any, Any], moments: tuple[jax.Array, jax.Array],
           count: jax.Array, policy: str) -> None:
  """Sets the stored (mean, variance) after a batch of `count` values."""
  mean, variance = moments
  if policy == 'batch':
    variance = variance * (count / jnp.maximum(count - 1, 1))
    mean, variance = (o.value + _MOMENTUM * (n - o.value)
                      for o, n in zip(old, (mean, variance), strict=True))
  for variable, new in zip(old, (mean, variance), strict=True):
    variable.value = jnp.where(count > 0, new, variable.value)


def _masked_moments(x: jax.Array, mask: jax.Array | None
                    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
  """Mean and biased variance over the rows with mask 1.

  Args:
    x: float[B, H, W, C].
    mask: float[B], or None for all rows.

  Returns:
    ((float[C], float[C]), values per channel float[]); 0, 0 without any rows.
  """
  area = x.shape[1] * x.shape[2]
  if mask is None:
    mean = jnp.mean(x, (0, 1, 2))
    variance = jnp.mean(jnp.square(x - mean), (0, 1, 2))
    return (mean, variance), jnp.asarray(x.shape[0] * area, x.dtype)
  real = mask[:, None, None, None] > 0
  count = area * jnp.sum(mask > 0).astype(x.dtype)
  share = 1 / jnp.maximum(count, 1)
  # Not multiplied by the mask: a masked row may be broken.
  mean = share * jnp.sum(jnp.where(real, x, 0), (0, 1, 2))
  gap = jnp.where(real, x - mean, 0)
  return (mean, share * jnp.sum(jnp.square(gap), (0, 1, 2))), count


def _group_moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Mean and variance of each row and group: float[B, 1, 1, C] each."""
  batch, height, width, channels = x.shape
  groups = math.gcd(_GROUPS, channels)
  grouped = x.reshape(batch, height * width, groups, channels // groups)
  mean = jnp.mean(grouped, (1, 3), keepdims=True)
  variance = jnp.mean(jnp.square(grouped - mean), (1, 3), keepdims=True)
  mean, variance = (
      jnp.repeat(m.reshape(batch, 1, 1, groups), channels // groups, 3)
      for m in (mean, variance))
  return mean, variance
