"""Accuracy and loss of a state, on data that no method trains on."""
from __future__ import annotations

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np
import optax

from fedjax_ssl.core import tree
from fedjax_ssl.core.types import (
  Array,
  Examples,
  Federation,
  Method,
  Metrics,
  PyTree,
  State,
)
from fedjax_ssl.training import classification_metrics

BATCH = 256
# Rows on which pseudo-labels and local models are judged.
_PROBE = 2048

# (*given, raw inputs [B, ...]) -> pytree of [B, ...].
Predict = Callable[..., PyTree]


def in_batches(predict: Predict, inputs: Array, rows: Array, *,
               given: tuple[PyTree, ...] = (), mesh: Mesh | None = None,
               batch: int = BATCH) -> PyTree:
  """Computes predict(*given, inputs[rows]) batch by batch, over the devices.

  Batches are the same whatever the number of devices, and so are the results.

  Args:
    predict: (*given, raw inputs [B, ...]) -> pytree of [B, ...].
    inputs: [D, ...].
    rows: int32[M].
    given: all that predict reads. With a mesh predict must not close over an
      array: that would be on all devices at once, which `shard_map` refuses as
      soon as its sharding is read.
    mesh: mesh with the axis 'clients', or None.
    batch: B.

  Returns:
    The pytree with leading axis M.
  """
  count = rows.shape[0]
  devices = 1 if mesh is None else mesh.size
  size = min(batch, max(count, 1))
  batches = -(-count // (size * devices)) * devices
  padded = jnp.minimum(jnp.arange(batches * size), max(count - 1, 0))
  table = jnp.take(jnp.asarray(rows), padded).reshape(batches, size)

  def run(given, inputs, table):
    return lax.map(
        lambda r: predict(*given, jnp.take(inputs, r, axis=0)), table)

  if mesh is None:
    out = run(given, inputs, table)
  else:
    axis = mesh.axis_names[0]
    split, everyone = PartitionSpec(axis), PartitionSpec()
    def local(given, inputs, table):
      return lax.all_gather(run(given, inputs, table), axis, tiled=True)
    out = jax.shard_map(local, mesh=mesh,
                        in_specs=(everyone, everyone, split),
                        out_specs=everyone, check_vma=False)(
                            given, jnp.asarray(inputs), table)
  return jax.tree.map(
      lambda x: x.reshape(batches * size, *x.shape[2:])[:count], out)


def scores(logits: jax.Array, labels: Array) -> Metrics:
  """Computes scores of logits float32[D, C], by name.

  accuracy, loss, macro_precision, macro_recall, auc, most_predicted,
  largest_class float32[] and per_class_accuracy float32[C], which is NaN for a
  class without examples. See `classification_metrics` for scores and shares.
  """
  hits = (logits.argmax(-1) == labels).astype(jnp.float32)
  of_class = jax.nn.one_hot(labels, logits.shape[-1])
  loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  precision, recall = classification_metrics.precision_recall(
      logits.argmax(-1), labels, logits.shape[-1])
  said, real = classification_metrics.largest_shares(logits.argmax(-1), labels,
                                                     logits.shape[-1])
  return {
      'accuracy': hits.mean(), 'loss': loss.mean(),
      'per_class_accuracy': (hits@of_class) / of_class.sum(0),
      'macro_precision': precision, 'macro_recall': recall,
      'auc': classification_metrics.one_vs_rest_auc(
          jax.nn.softmax(logits), labels),
      'most_predicted': said, 'largest_class': real}


def largest_weight(record: PyTree, least_rank: int = 2) -> jax.Array:
  """Finds the largest absolute number in the weights of a record, float32[].

  Weights are the arrays of floats with at least `least_rank` axes: kernels of
  every network in it. Vectors and scalars, such as statistics, budgets and
  rates, are left out, as they have other scales. NaN if a weight is; 0 if there
  are no weights.
  """
  sizes = [jnp.abs(x).max().astype(jnp.float32)
           for x in jax.tree.leaves(record)
           if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim >= least_rank
           and x.size]
  return jnp.stack(sizes).max() if sizes else jnp.float32(0)


class Probe(NamedTuple):
  """Unlabeled rows of some clients, to judge pseudo-labels on.

  Attributes:
    clients: int32[P] ids.
    rows: int32[P, K] rows of each.
    mask: float32[P, K], 1 where a row counts.
  """

  clients: np.ndarray
  rows: np.ndarray
  mask: np.ndarray


def _unlabeled(federation: Federation) -> tuple[np.ndarray, np.ndarray]:
  """int32[N, most] rows of each client, and int32[N] how many count."""
  if federation.stream is None:
    shard = federation.clients
    return np.asarray(shard.unlabeled), np.asarray(shard.num_unlabeled)
  rows = np.moveaxis(np.asarray(federation.stream.unlabeled), 0, 1)
  counts = np.asarray(federation.stream.num_unlabeled).T
  absent = np.arange(rows.shape[-1]) >= counts[..., None]
  flat = (rows.shape[0], -1)
  order = np.argsort(absent.reshape(flat), axis=1, kind='stable')
  return (np.take_along_axis(rows.reshape(flat), order, axis=1),
          counts.sum(axis=1))


def probe_of(federation: Federation) -> Probe:
  """Takes about 2048 unlabeled rows, evenly over clients and their rows.

  In a stream these are the rows of all tasks.
  """
  unlabeled, counts = _unlabeled(federation)
  holders = np.flatnonzero(counts)
  clients = holders[::max(1, -(-holders.size // _PROBE))]
  most = max(1, _PROBE // max(clients.size, 1))
  width = int(min(most, counts.max(initial=1)))
  place = np.arange(width)
  taken = np.minimum(counts[clients], width)[:, None]
  # Evenly over a client's rows, which are in the order of the data set.
  index = place * counts[clients][:, None] // np.maximum(taken, 1)
  mask = place < taken
  rows = unlabeled[clients[:, None], np.where(mask, index, 0)]
  return Probe(clients.astype(np.int32), rows.astype(np.int32),
               mask.astype(np.float32))


def _judge(pseudo_label, state: State, federation: Federation, probe: Probe
           ) -> Metrics:
  """Share of the probe's rows that get a pseudo-label, and of right ones."""
  def one(part):
    client, rows, mask = part
    label, weight = pseudo_label(
        state.server, tree.take(state.memory, client),
        jnp.take(federation.train.inputs, rows, axis=0))
    right = label == jnp.take(federation.train.labels, rows)
    return (weight * right * mask).sum(), (weight * mask).sum()
  right, used = lax.map(one, jax.tree.map(jnp.asarray, tuple(probe)))
  return {'pseudo_label_accuracy': right.sum() / used.sum(),
          'pseudo_label_rate': used.sum() / probe.mask.sum()}


def labeled_rows(federation: Federation) -> tuple[jax.Array, jax.Array]:
  """Takes at most about 2048 rows of clients and server that carry labels.

  Args:
    federation: any.

  Returns:
    int32[M] rows and float32[M], 0 where a place of the tables is empty. M
    depends on shapes only.
  """
  rows, real = [], []
  for shard in (federation.clients, federation.server):
    table = jnp.asarray(shard.labeled)
    width = jnp.arange(table.shape[-1])
    real.append((width < jnp.asarray(
        shard.num_labeled)[..., None]).reshape(-1))
    rows.append(table.reshape(-1))
  step = max(1, -(-sum(x.shape[0] for x in rows) // _PROBE))
  return (jnp.concatenate(rows)[::step],
          jnp.concatenate(real)[::step].astype(jnp.float32))


def evaluation(method: Method, mesh: Mesh | None = None
               ) -> Callable[[State, Federation, Probe], Metrics]:
  """Makes a pure function that evaluates a state, to be jitted or mapped.

  Args:
    method: its `predict`, `pseudo_label` and `local_predict` are used.
    mesh: devices to share the work, or None.

  Returns:
    (state, federation, probe) -> metrics. Those of a global model are its
    `scores` on the test set; largest_weight of the server's record;
    val_accuracy and val_loss, if there are validation examples;
    labeled_accuracy on at most about 2048 rows that are learnt from with their
    labels, not augmented; pseudo_label_accuracy and pseudo_label_rate by the
    true labels of the probe rows, if the method labels; and the method's
    `report`. If clients keep models of their own, local_accuracy is the mean of
    these models' accuracies on at most 2048 test rows. Without a global model
    there are only such means of all `scores`, local_accuracy, and the
    largest_weight of the clients' models.
  """
  def over(predict, given, examples: Examples, rows=None):
    rows = jnp.arange(examples.labels.shape[0]) if rows is None else rows
    return in_batches(predict, examples.inputs, rows, given=given, mesh=mesh)

  global_predict, own_predict = method.predict, method.local_predict

  def of_clients(own, state, federation, examples, rows):
    """Mean over the clients of their own models' scores."""
    def one(i):
      row = tree.take(state.memory, i)
      logits = over(own, (state.server, row), examples, rows)
      return scores(logits, jnp.asarray(examples.labels)[rows])
    each = lax.map(one, jnp.arange(federation.num_clients))
    return jax.tree.map(lambda x: x.mean(0), each)

  def evaluate(state, federation, probe):
    test, validation = federation.test, federation.validation
    out = {}
    if own_predict is not None:
      count = test.labels.shape[0]
      rows = jnp.arange(0, count, -(-count // _PROBE))
      local = of_clients(own_predict, state, federation, test, rows)
      out['local_accuracy'] = local['accuracy']
    if global_predict is None:  # No model but the clients' own.
      return {**out, **local,
              'largest_weight': largest_weight(state.memory, least_rank=3)}
    over_all = functools.partial(over, global_predict, (state.server,))
    out.update(scores(over_all(test), test.labels))
    out['largest_weight'] = largest_weight(state.server)
    if validation.labels.shape[0]:
      logits = over_all(validation)
      held = scores(logits, validation.labels)
      out['val_accuracy'], out['val_loss'] = held['accuracy'], held['loss']
    rows, real = labeled_rows(federation)
    hits = over_all(federation.train, rows).argmax(-1) == jnp.take(
        jnp.asarray(federation.train.labels), rows)
    out['labeled_accuracy'] = (hits * real).sum() / real.sum()
    if method.pseudo_label is not None and probe.clients.shape[0]:
      out.update(_judge(method.pseudo_label, state, federation, probe))
    if method.report is not None:
      out.update(method.report(state.server))
    return out

  return evaluate
