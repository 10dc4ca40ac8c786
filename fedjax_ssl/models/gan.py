r"""A conditional generator and discriminator for images and for sequences.

FedSSL (Fan et al., IJCAI 2022) only says that the generator is an encoder and a
decoder, and nothing about the discriminator, so the layers are ours. B rows, C
classes, Z noise numbers, T positions, E numbers a position.
"""
from __future__ import annotations

from collections.abc import Callable
import math
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.core.types import PyTree
from fedjax_ssl.models import layers
from fedjax_ssl.ops import conv

_CONDITION = 64  # Width of the layer that reads labels, noise and blend.
_FEATURES = 64  # Width of what the discriminator compares with a label.
_POWER_STEPS = 3
_PATCH = 4
# Input times output channels from which tiles beat one product on a CPU.
_MIN_TILED = 512


class Conditions(NamedTuple):
  """What the generator gets besides the source example."""

  source: jax.Array  # float32[B, C], label distribution of the source.
  target: jax.Array  # float32[B, C], one-hot class to blend with.
  noise: jax.Array  # float32[B, Z]
  lam: jax.Array  # float32[B], share of the source; 1 reproduces it.


class Gan(NamedTuple):
  """Both networks as pure functions over preprocessed inputs.

  Attributes:
    init: (key, inputs float[1, ...], C, Z) -> (generator, discriminator),
      pytrees of parameters.
    generate: (generator, inputs [B, ...], *Conditions, limits=None) -> a
      blend float32[B, ...] of the inputs for each of the Conditions; the inputs
      are encoded once. limits: arrays (low, high) that broadcast to them, or
      None for unbounded outputs, as embeddings need.
    judge: (discriminator, inputs [B, ...], labels float32[B, C]) -> logits
      float32[B] of being real.
  """

  init: Callable[..., tuple[PyTree, PyTree]]
  generate: Callable[..., list[jax.Array]]
  judge: Callable[..., jax.Array]


def to_patches(x: jax.Array) -> jax.Array:
  """Cuts float[B, H, W, I] into 4x4 tiles [B, H', W', 16 I], padded at the end.

  Dense layers on tiles are matrix products. These are fast on every backend,
  also to differentiate row by row, as privacy needs.
  """
  batch, height, width, channels = x.shape
  rows, columns = -(-height // _PATCH), -(-width // _PATCH)
  x = jnp.pad(x, ((0, 0), (0, rows * _PATCH - height),
                  (0, columns * _PATCH - width), (0, 0)), mode='edge')
  x = x.reshape(batch, rows, _PATCH, columns, _PATCH, channels)
  return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, rows, columns, -1)


def from_patches(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Undoes `to_patches`; `shape` is that of the images."""
  batch, rows, columns, _ = x.shape
  x = x.reshape(batch, rows, columns, _PATCH, _PATCH, shape[-1])
  x = x.transpose(0, 1, 3, 2, 4, 5).reshape(
      batch, rows * _PATCH, columns * _PATCH, shape[-1])
  return x[:, :shape[1], :shape[2]]


def neighbours(x: jax.Array) -> jax.Array:
  """Joins each position's features with its neighbors', zeros past the border.

  Args:
    x: float[B, T, E] or [B, H, W, E].

  Returns:
    float[B, T, 3 E] or [B, H, W, 9 E]: a dense layer on it is a convolution.
  """
  for axis in range(1, x.ndim - 1):
    wide = jnp.pad(x, [(int(i == axis),) * 2 for i in range(x.ndim)])
    size = x.shape[axis]
    x = jnp.concatenate([
        jax.lax.slice_in_dim(wide, i, i + size, axis=axis)
        for i in range(3)], -1)
  return x


class Dense(layers.Dense):
  """`layers.Dense` on `neighbours`: a convolution of side 3.

  On a CPU wide layers over images are computed in tiles: a step of both
  networks then takes two thirds of its time. Its name is that of the layer
  without neighbors, as stored runs have all layers under one count.
  """

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """float[B, T, I] or [B, H, W, I] -> [B, ..., O]."""
    made, inputs = self.choices.param_dtype, x.shape[-1]
    kernel = self.param('kernel', self.kernel_init, (
        3 ** (x.ndim - 2) * inputs, self.features), made)
    bias = self.param('bias', nn.initializers.zeros, (self.features,), made)
    if (x.ndim == 4 and inputs * self.features >= _MIN_TILED
        and jax.default_backend() == 'cpu'):
      by_column = kernel.reshape(3, 3, inputs, self.features)
      return bias + conv.conv2d(
          x, by_column.transpose(1, 0, 2, 3), impl='winograd')
    return neighbours(x) @ kernel + bias


def spectral_norm(kernel: jax.Array) -> jax.Array:
  """Estimates the largest singular value of a kernel [..., O], float[].

  It is found from below: 3 steps give a fresh kernel's to 4 to 12 %.

  The kernel is flattened to two axes. Power iteration starts from a fixed
  vector, so that no state is carried. Only the last product has a derivative,
  as in Miyato et al., https://arxiv.org/abs/1802.05957.
  """
  matrix = kernel.reshape(-1, kernel.shape[-1])
  fixed = jax.lax.stop_gradient(matrix)
  v = jnp.asarray(np.cos(1 + np.arange(matrix.shape[1])), matrix.dtype)
  for _ in range(_POWER_STEPS):
    u = _unit(fixed @ v)
    v = _unit(u @ fixed)
  return u @ matrix @ v


def _unit(x: jax.Array) -> jax.Array:
  return x / jnp.maximum(jnp.linalg.norm(x), 1e-12)


def _leaky(x: jax.Array) -> jax.Array:
  return jnp.where(x > 0, x, 0.2 * x)


class _Blend(nn.Module):
  """lam x features of the source + (1 - lam) x features of noise and labels.

  The two ends are the paper's: the source alone, or noise and the class alone.
  A generator that gets lam only as one more input learns to copy its source
  whatever lam is.
  """

  @nn.compact
  def __call__(self, encoded: jax.Array, given: Conditions) -> jax.Array:
    """float[B, ..., W] -> the same shape."""
    choices = layers.Choices()
    read = jnp.concatenate(
        [given.source * given.lam[:, None], given.target, given.noise,
         given.lam[:, None]], -1)
    hidden = _leaky(layers.Dense(_CONDITION, choices)(read))
    size = int(np.prod(encoded.shape[1:]))
    made = layers.Dense(size, choices)(hidden).reshape(encoded.shape)
    share = given.lam.reshape(-1, *(1,) * (encoded.ndim - 1))
    return share * encoded + (1 - share) * made


def _features(x: jax.Array, width: int) -> jax.Array:
  """float[B, ..., I] -> [B, ..., 2 width]: tiles or words, then windows."""
  choices = layers.Choices()
  x = _leaky(layers.Dense(width, choices)(x))
  return _leaky(Dense(2 * width, choices)(x))


class Generator(nn.Module):
  """Encoder, blend, decoder, over 4x4 tiles of an image or over words.

  Attributes:
    width: of the first layer; those after it have twice as much.
  """

  width: int

  @nn.compact
  def __call__(self, x: jax.Array, *given: Conditions) -> list[jax.Array]:
    """float[B, H, W, I] or [B, T, E] -> such blends, unbounded."""
    choices = layers.Choices()
    tiles = to_patches(x) if x.ndim == 4 else x
    encoded, blend = _features(tiles, self.width), _Blend()
    wide = Dense(2 * self.width, choices)
    last = layers.Dense(tiles.shape[-1], choices)

    def decoded(one: Conditions) -> jax.Array:
      y = last(_leaky(wide(blend(encoded, one))))
      return from_patches(y, x.shape) if x.ndim == 4 else y
    # Not in one batch: XLA then reuses a blend that another cost has made.
    return [decoded(one) for one in given]


class Discriminator(nn.Module):
  """Projection discriminator: a logit, and the label's product with features.

  `Gan.judge` divides its kernels by their largest singular values. Miyato and
  Koyama, https://arxiv.org/abs/1802.05637.

  Attributes:
    width: of the first layer; the second has twice as much.
  """

  width: int

  @nn.compact
  def __call__(self, x: jax.Array, labels: jax.Array) -> jax.Array:
    """float[B, H, W, I] or [B, T, E], labels [B, C] -> logits [B]."""
    choices = layers.Choices()
    if x.ndim == 4:  # The class depends on where in the image a feature is.
      x = _features(to_patches(x), self.width).reshape(x.shape[0], -1)
    else:
      x = _features(x, self.width).mean(1)
    features = _leaky(layers.Dense(_FEATURES, choices)(x))
    of_label = layers.Dense(_FEATURES, choices, use_bias=False)(labels)
    plain = layers.Dense(1, choices)(features)[:, 0]
    return plain + (features * of_label).sum(-1)


def _bounded(params: PyTree) -> PyTree:
  """Every kernel divided by its largest singular value; biases as they are."""
  def bound(x: jax.Array) -> jax.Array:
    if x.ndim < 2:
      return x
    norm = spectral_norm(x)
    return x / jnp.where(norm > 1e-12, norm, 1)  # Zeros stay, with a slope.
  return jax.tree.map(bound, params)


def _he_normal(key: jax.Array, shapes: PyTree) -> PyTree:
  """Kernels of variance 2 / fan-in from one draw, which compiles fast."""
  leaves, form = jax.tree.flatten(shapes)
  kernels = [x for x in leaves if x.ndim > 1]
  draw = jax.random.normal(key, (sum(x.size for x in kernels),))
  parts = iter(jnp.split(draw, np.cumsum([x.size for x in kernels])[:-1]))
  return jax.tree.unflatten(form, [
      jnp.zeros(x.shape, x.dtype) if x.ndim < 2 else
      next(parts).reshape(x.shape) * math.sqrt(2 * x.shape[-1] / x.size)
      for x in leaves])


def make(*, width: int = 32) -> Gan:
  """Makes both networks; the inputs decide if for images or for sequences.

  Args:
    width: of their first layers, at least 1.

  Returns:
    The Gan; inputs are images [B, H, W, I] or sequences [B, T, E].

  Raises:
    ValueError: if width is below 1, or for inputs of another form.
  """
  if width < 1:
    raise ValueError(f'width is {width}; it must be at least 1.')
  generator, discriminator = Generator(width), Discriminator(width)

  def init(key, inputs, num_classes, noise_size):
    if inputs.ndim not in (3, 4):
      raise ValueError(f'inputs have shape {inputs.shape}; the generator takes '
                       'images [B, H, W, I] or sequences [B, T, E].')
    keys = jax.random.split(key)
    label = jnp.zeros((1, num_classes))
    given = Conditions(label, label, jnp.zeros((1, noise_size)),
                       jnp.zeros(1))
    made = jax.eval_shape(generator.init, key, inputs, given)
    judge = jax.eval_shape(discriminator.init, key, inputs, label)
    return (_he_normal(keys[0], made['params']),
            _he_normal(keys[1], judge['params']))

  def generate(params, inputs, *given, limits=None):
    raw: Any = generator.apply({'params': params}, inputs, *given)
    if limits is None:
      return raw
    low, high = limits
    return [low + (high - low) * jax.nn.sigmoid(x) for x in raw]

  def judge(params, inputs, labels):
    return discriminator.apply({'params': _bounded(params)}, inputs, labels)

  return Gan(init, generate, judge)
