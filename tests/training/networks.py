"""Networks small enough to compile with every method: each form of layer."""
from __future__ import annotations

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from fedjax_ssl import models
from fedjax_ssl.core.types import Model, Variables
from fedjax_ssl.models import layers
from fedjax_ssl.ops import conv, pooling
from tests import toy

# Channels that are nothing else's size, so that shapes tell what an array is.
# More than 4, or the layer would be patches.
CHANNELS = (13, 11)
# Enough for tiles.
TILE_CHANNELS = (17, 19, 13)
# Patches of one channel, too few for tiles, enough.
LAYER_CHANNELS = (13, 17, 19)


def made(shapes: dict[str, tuple[int, ...]], body: Any) -> Model:
  """A model of the arrays by name, and of (arrays, inputs) -> features.

  The array `Dense_0` makes logits of them.
  """
  def init(key):
    keys = jax.random.split(key, len(shapes))
    return Variables({name: 0.3 * jax.random.normal(k, shape) for k, (
        name, shape) in zip(keys, shapes.items(), strict=True)}, {})

  def features(variables, inputs):
    return body(variables.params, inputs)

  def apply(variables, inputs):
    return features(variables, inputs) @ variables.params['Dense_0']

  def apply_train(variables, inputs, mask, key=None):
    del mask, key
    return apply(variables, inputs), variables.stats

  def features_train(variables, inputs, mask, key=None):
    del mask, key
    found = features(variables, inputs)
    return found, found @ variables.params['Dense_0'], variables.stats

  return Model(init, apply, apply_train, features=features,
               features_train=features_train, head=lambda: ('Dense_0',))


def reordered(impl: str = 'auto') -> Model:
  """A convolution between a layer that scales and a dense one."""
  def body(params, x):
    x = conv.conv2d(x * params['Scale_0'], params['Conv_0'], impl=impl)
    return jnp.tanh(x).mean((1, 2))
  return made({
      'Scale_0': CHANNELS[:1], 'Conv_0': (3, 3, *CHANNELS),
      'Dense_0': (CHANNELS[1], toy.NUM_CLASSES)}, body)


def tiles_and_patches(impl: str = 'auto') -> Model:
  """Pooled patches, tiles cut at once, and pooled tiles cut row by row."""
  def body(params, x):
    x = jnp.tanh(conv.max_pooled_conv2d(x, params['Conv_0'], impl=impl))
    x = jnp.tanh(conv.conv2d(x, params['Conv_1'], impl=impl))
    x = jnp.tanh(conv.max_pooled_conv2d(x, params['Conv_2'], impl=impl))
    return x.mean((1, 2))
  first, second, third = TILE_CHANNELS
  return made({
      'Conv_0': (3, 3, 1, first), 'Conv_1': (3, 3, first, second),
      'Conv_2': (5, 5, second, third),
      'Dense_0': (third, toy.NUM_CLASSES)}, body)


class _Layers(nn.Module):
  """Pooled patches and their norm, re-ordered gradients, tiles."""

  norm: str

  @nn.compact
  def __call__(self, x, mask=None, train=False):
    choices = layers.Choices(self.norm)
    first, second, third = LAYER_CHANNELS
    x = layers.Conv(first, choices, pool=True)(x)
    x = pooling.relu(layers.Norm(choices)(x, mask, train))
    x = jnp.tanh(layers.Conv(second, choices)(x))
    x = jnp.tanh(layers.Conv(third, choices)(x))
    return layers.Dense(toy.NUM_CLASSES, choices)(x.mean((1, 2)))


def layers_of_most_forms() -> Model:
  """A network of the library's own layers, with batch norm.

  Of the forms, tiles cut row by row are not among them.
  """
  return models._pure(_Layers('batch'), (toy.SIDE, toy.SIDE, 1), 'batch', False)
