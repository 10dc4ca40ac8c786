"""How a stored result of the authors' code is run on ours.

A row of a federation holds all its views, float64[V, d]; `weak` leaves the
first in front and `strong` brings the last there, which is what the network
reads. So both sides see the same views without any draw.
"""
from __future__ import annotations

from collections.abc import Iterator
import contextlib
import itertools
import pathlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_ssl import losses, methods
from fedjax_ssl.core import optimizers
from fedjax_ssl.core.types import (
    Cohort,
    Examples,
    Federation,
    Model,
    Ratio,
    Shard,
    State,
    Task,
    Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.models import layers
from fedjax_ssl.testing import keys

FOLDER = pathlib.Path(__file__).parent


def stored(name: str) -> dict[str, np.ndarray]:
  """What `make_<name>.py` wrote; real numbers in float64."""
  with np.load(FOLDER / f'{name}.npz') as file:
    found = {key: file[key] for key in file.files}
  return {key: x.astype(np.float64) if x.dtype.kind == 'f' else x
          for key, x in found.items()}


def perceptron(weights: dict[str, np.ndarray], norm: str = 'none') -> Model:
  """Two dense layers with a tanh between them, as `authors.perceptron`.

  Without b0 and b1 among the weights they have no biases. With a norm it is
  `authors.normalized`.
  """
  names = ('w0', 'b0', 'w1', 'b1', 'scale', 'bias')
  params = {name: jnp.asarray(weights[name])
            for name in names if name in weights}
  stats = {name: jnp.asarray(weights[name]) for name in ('mean', 'variance')
           if norm != 'none'}
  layer = layers.Norm(layers.Choices(norm, dtype='float64'))

  def run(variables: Variables, inputs: jax.Array, mask: Any, train: bool
          ) -> tuple[jax.Array, jax.Array, Any]:
    p, stats = variables
    wide = inputs @ p['w0'] + p.get('b0', 0)
    if norm != 'none':
      mine = {'params': {k: p[k] for k in ('scale', 'bias')}, 'stats': stats}
      made, changed = layer.apply(mine, wide[:, None, None], mask, train,
                                  mutable=['stats'])
      wide, stats = made[:, 0, 0], changed['stats']
    hidden = jnp.tanh(wide)
    return hidden, hidden @ p['w1'] + p.get('b1', 0), stats

  def features_train(variables: Variables, inputs: jax.Array, mask: jax.Array,
                     key: Any = None) -> tuple[jax.Array, jax.Array, Any]:
    del key
    return run(variables, inputs, mask, True)

  return Model(
      lambda key: Variables(params, stats),
      lambda variables, inputs: run(variables, inputs, None, False)[1],
      lambda *given: features_train(*given)[1:], norm,
      features=lambda variables, inputs: run(variables, inputs, None, False)[0],
      features_train=features_train, head=lambda: ('w1',))


def task(weights: dict[str, np.ndarray], rate: float, **changes: Any) -> Task:
  """One client a round, plain gradient steps unless told otherwise."""
  given: dict[str, Any] = {
      'model': perceptron(weights), 'num_classes': weights['w1'].shape[1],
      'preprocess': lambda views: views[:, 0],
      'optimizer': lambda round_: optax.sgd(rate),
      'weak': lambda key, views: views,
      'strong': lambda key, views: views[:, ::-1],
      'cohort_size': 1, 'schedule_rounds': 1}
  return Task(**{**given, **changes})


def federation(inputs: np.ndarray, labels: np.ndarray, num_classes: int,
               *clients: tuple[int, int], server: int = 0) -> Federation:
  """Clients that hold the rows one after the other.

  Args:
    inputs: [D, V, d].
    labels: int[D]; of unlabeled rows any class, as nobody reads it.
    num_classes: C.
    *clients: how many labeled and how many unlabeled rows each holds; its
      labeled ones come first.
    server: how many labeled rows the server holds, before all others.
  """
  sizes = np.array(clients)
  wide = np.maximum(sizes.max(0), 1)
  starts = server + np.cumsum(sizes).reshape(sizes.shape) - sizes
  tables = [starts[:, k, None] + np.minimum(
      np.arange(wide[k]), np.maximum(sizes[:, k, None] - 1, 0))
            for k in (0, 1)]
  shard = Shard(*(x.astype(np.int32) for x in (
      tables[0], sizes[:, 0], tables[1], sizes[:, 1])))
  own = Shard(*(np.asarray(x, np.int32) for x in (
      np.arange(max(server, 1)), server, np.zeros(1), 0)))
  train = Examples(jnp.asarray(inputs), jnp.asarray(labels, jnp.int32))
  few = Examples(train.inputs[:1], train.labels[:1])
  made = Federation(train, few, few, shard, own, num_classes=num_classes)
  return jax.tree.map(jnp.asarray, made)


@contextlib.contextmanager
def in_order() -> Iterator[None]:
  """Batches are slices of a client's table, in its order; all in float64."""
  def shuffled(stream: Any, epoch: Any) -> jax.Array:
    del epoch
    return jnp.arange(stream.rows.shape[0], dtype=jnp.int32)

  with jax.enable_x64(True), mock.patch.object(
      batching._Stream, 'shuffled', shuffled):
    yield


def drawn(groups: np.ndarray) -> Any:
  """Takes the place of `sampling.groups`: draws those of the state's round.

  Args:
    groups: int[T, G, S], or int[T, S] for one group.
  """
  told = groups.reshape(len(groups), -1, groups.shape[-1])

  def made(num_groups: int, size: int) -> Any:
    assert told.shape[1:] == (num_groups, size)

    def sample(state: State, data: Federation, key: jax.Array) -> Cohort:
      del data, key
      ids = jnp.asarray(told, jnp.int32)[state.round]
      return Cohort(ids, jnp.ones(ids.shape, bool))

    return sample

  return made


def one_round(method: Any, data: Federation, round_: int = 0,
              state: State | None = None) -> tuple[State, dict[str, Any]]:
  """A round from the task's weights, or from a state."""
  key = keys.key(0)
  if state is None:
    state = method.init(key, data)
  return jax.jit(method.round)(state, data, jnp.int32(round_), key)


def close(mine: Any, theirs: Any, most: float = 1e-5) -> None:
  """Holds that two arrays, or weights by name, differ by less than `most`."""
  if isinstance(theirs, dict):
    for name, value in theirs.items():
      close(mine[name], value, most)
    return
  np.testing.assert_allclose(np.asarray(mine), theirs, rtol=0, atol=most)


def weights(stored_: dict[str, np.ndarray], prefix: str = ''
            ) -> dict[str, np.ndarray]:
  """The weights of a perceptron, normalized or not, among what was stored."""
  names = ('w0', 'b0', 'w1', 'b1', 'scale', 'bias')
  return {name: stored_[prefix + name] for name in names
          if prefix + name in stored_}


def in_turns(num_views: int) -> Any:
  """A weak view: the first of a row, then the second, and so on.

  Every loss must ask for them as often, or for a multiple.
  """
  calls = itertools.count()

  def weak(key: Any, views: jax.Array) -> jax.Array:
    del key
    return jnp.roll(views, -(next(calls) % num_views), axis=1)

  return weak


def one_client(stored_: dict[str, np.ndarray]) -> Federation:
  """The client that holds the rows of `torchssl.problem`."""
  inputs, known = stored_['inputs'], int(stored_['num_labeled'])
  return federation(inputs, stored_['labels'], stored_['b1'].size,
                    (known, len(inputs) - known))


def of_torchssl(stored_: dict[str, np.ndarray], **changes: Any) -> Task:
  """The task of `torchssl.train`."""
  given: dict[str, Any] = {
      'labeled_batch': int(stored_['labeled_batch']),
      'unlabeled_batch': int(stored_['unlabeled_batch']),
      'local_steps': int(stored_['steps']),
      'optimizer': lambda round_: optax.sgd(
          float(stored_['rate']), float(stored_['momentum']), nesterov=True)}
  return task(stored_, float(stored_['rate']), **{**given, **changes})


def descent(stored_: dict[str, np.ndarray], name: str = 'sgd', **knobs: Any
            ) -> optimizers.Scheduled:
  """The optimizer of the stored rate, momentum and decay."""
  rate, momentum, decay = (
      float(stored_[k]) for k in ('rate', 'momentum', 'decay'))
  return optimizers.make(name, learning_rate=rate, momentum=momentum,
                         weight_decay=decay, **knobs)


def means(metrics: dict[str, Any]) -> dict[str, np.ndarray]:
  """Metrics of one round as numbers."""
  return {name: np.asarray(value.total / value.rows) if isinstance(
      value, Ratio) else np.asarray(value) for name, value in metrics.items()}


def trained(state: State) -> dict[str, np.ndarray]:
  """The only client's own weights; the mean of updates is made in float32."""
  mine = {k: v[0] for k, v in state.memory.model.params.items()}
  close(state.server.model.params, mine, 1e-6)
  return mine


def hold_fixmatch(stored_: dict[str, np.ndarray], accepted: str,
                  threshold: Any) -> None:
  """Asserts that FixMatch's loss is the stored one, in all its parts.

  Args:
    stored_: logits, and what the authors' code made of them.
    accepted: name of the rows above the stored threshold.
    threshold: of the loss; a bar of each class, or the same for all.
  """
  weak, strong = (stored_[f'{k}_logits'] for k in ('weak', 'strong'))
  labels, sure = jax.jit(losses.pseudo_label)(
      weak, threshold=float(stored_['threshold']))
  (loss, metrics), slope = jax.jit(jax.value_and_grad(
      losses.fixmatch, has_aux=True))(strong, weak, threshold=threshold)
  np.testing.assert_array_equal(labels, stored_['chosen'])
  np.testing.assert_array_equal(sure, stored_[accepted])
  close(metrics['mask_rate'], stored_['mask_rate'])
  close(loss, stored_['loss'], 1e-9)
  close(slope, stored_['gradient'], 1e-9)


def hold_usb(stored_: dict[str, np.ndarray], method: str, *kept: str) -> None:
  """Asserts that a method trains as USB's did.

  Args:
    stored_: what its script wrote.
    method: with the stored knobs, and keep_local=True.
    *kept: what of the client's memory is compared, stored by the same name.
  """
  with in_order():
    state, metrics = one_round(
        methods.make(method, of_torchssl(stored_)), one_client(stored_))
    found = means(metrics)
    memory = jax.tree.map(lambda x: np.asarray(x[0]), state.memory.kept)
    mine = trained(state)
  for name, theirs in (('labeled_loss', 'sup_loss'),
                       ('unlabeled_loss', 'unsup_loss'),
                       ('train_loss', 'total_loss'),
                       ('mask_rate', 'util_ratio')):
    close(found[name], stored_[theirs].mean())
  for name in kept:
    close(getattr(memory, name), stored_[name], 1e-9)
  close(mine, weights(stored_, 'after_'), 1e-9)
