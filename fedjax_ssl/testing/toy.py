"""A federation of 6 clients and two small models, for tests in seconds."""
from __future__ import annotations

import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import models
from fedjax_ssl.core import optimizers
from fedjax_ssl.core.types import (
  Examples,
  Federation,
  Model,
  Ratio,
  Shard,
  Task,
)
from fedjax_ssl.data import federation as federation_lib
from fedjax_ssl.data import partition
from fedjax_ssl.models import layers
from fedjax_ssl.ops import pooling

NUM_CLASSES = 3
NUM_CLIENTS = 6
SIDE = 8
# Rows of each client; one has no labels, one no unlabeled rows, one nothing.
LABELED = (4, 7, 0, 3, 0, 5)
UNLABELED = (9, 0, 12, 5, 0, 7)
NOBODY = 4


def examples(rng: np.random.Generator, size: int) -> Examples:
  """Makes blobs: the class is the bright third of the image."""
  labels = rng.integers(0, NUM_CLASSES, size).astype(np.int32)
  images = rng.integers(0, 90, (size, SIDE, SIDE, 1))
  for row, label in enumerate(labels):
    images[row, 3 * label:3 * label + 3] += 120
  return Examples(images.astype(np.uint8), labels)


@functools.lru_cache
def federation(labels_at: str = 'clients', labels: str = 'few'
               ) -> tuple[Federation, np.ndarray]:
  """Makes the federation, and bool[D]: rows whose labels the setting hides.

  The last row has no owner and fills up the tables of rows.
  """
  rng = np.random.default_rng(7)
  owner_l = np.repeat(np.arange(NUM_CLIENTS), LABELED)
  owner_u = np.repeat(np.arange(NUM_CLIENTS), UNLABELED)
  none_l, none_u = np.full(owner_l.size, -1), np.full(owner_u.size, -1)
  order = rng.permutation(owner_l.size + owner_u.size)
  labeled, unlabeled = (
      np.append(np.concatenate(owners)[order], -1)
      for owners in ((owner_l, none_u), (none_l, owner_u)))
  dealt = partition.make_partition(labeled, unlabeled)
  nobodys = order.size
  if labels_at == 'server':
    dealt = dealt._replace(labeled=np.where(
        dealt.labeled >= 0, NUM_CLIENTS, -1).astype(np.int32))
  train, validation, test = (
      examples(rng, size) for size in (order.size, 6, 20))
  train = Examples(*(np.append(x, x[:1], 0) for x in map(np.asarray, train)))
  made = federation_lib.federate(
      train, validation, test, dealt, num_clients=NUM_CLIENTS,
      labels_at=labels_at, labels=labels, num_classes=NUM_CLASSES)
  made = dataclasses.replace(made, clients=_filled_up(made.clients, nobodys),
                             server=_filled_up(made.server, nobodys))
  hidden = dealt.labeled < 0
  if labels == 'all':
    hidden &= dealt.unlabeled < 0
  return jax.tree.map(jnp.asarray, made), hidden


def _filled_up(shard: Shard, row: int) -> Shard:
  """Returns the same rows, with `row` in the places of padding."""
  def one(table, size):
    real = np.arange(table.shape[-1]) < np.asarray(size)[..., None]
    return np.where(real, table, row).astype(np.int32)
  return shard._replace(
      labeled=one(shard.labeled, shard.num_labeled),
      unlabeled=one(shard.unlabeled, shard.num_unlabeled))


def means(metrics):
  """Turns the metrics of one round into numbers; NaN without rows."""
  return {name: value.total / value.rows if isinstance(value, Ratio)
          else value for name, value in metrics.items()}


def shift(key: jax.Array, images: jax.Array) -> jax.Array:
  """Shifts images; the draws of this augmentation show in its result."""
  steps = jax.random.randint(key, (images.shape[0],), -1, 2)
  return jax.vmap(lambda x, s: jnp.roll(x, s, axis=1))(images, steps)


def preprocess(images: jax.Array) -> jax.Array:
  """Scales pixels to [-0.4, 0.6]."""
  return images.astype(jnp.float32) / 255 - 0.4


class _Network(nn.Module):
  """One layer of each kind, so that there is little to compile.

  Attributes:
    norm: of its normalization.
    counts: whether its statistics count the steps of training, as whole numbers
      do in networks of one's own.
  """

  norm: str
  counts: bool = False

  @nn.compact
  def __call__(self, x, mask=None, train=False):
    choices = layers.Choices(self.norm)
    if self.counts:
      steps = self.variable('stats', 'steps', lambda: jnp.int32(0))
      if train and not self.is_initializing():
        steps.value += 1
    x = layers.Conv(4, choices, stride=2)(x)
    x = pooling.relu(layers.Norm(choices)(x, mask, train))
    return layers.Dense(NUM_CLASSES, choices)(x.reshape(x.shape[0], -1))


def _model(name: str) -> Model:
  shape = (SIDE, SIDE, 1)
  if name == 'linear':
    return models.make(name, num_classes=NUM_CLASSES, input_shape=shape)
  norm = {'conv': 'batch', 'counting': 'batch', 'static': 'static'}[name]
  return models._pure(_Network(norm, name == 'counting'), shape, norm, False)


@functools.lru_cache
def task(model: str = 'linear', **changes) -> Task:
  """Makes a task with a linear model, or 'conv', a small one with batch norm.

  'counting' is the same network with a counter among its statistics, 'static'
  with static normalization.
  """
  base = Task(
      model=_model(model), num_classes=NUM_CLASSES, preprocess=preprocess,
      optimizer=optimizers.make('sgd', learning_rate=0.1, momentum=0.5),
      weak=shift, strong=lambda key, x: shift(key, 255 - x),
      labeled_batch=3, unlabeled_batch=4, cohort_size=4, schedule_rounds=8)
  return dataclasses.replace(base, **changes)
