"""Accuracy and loss of a state, on data that no method trains on."""
from __future__ import annotations

from collections.abc import Callable

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

BATCH = 256
# Rows on which pseudo-labels and local models are judged.
_PROBE = 2048

Predict = Callable[[jax.Array], PyTree]


def in_batches(predict: Predict, inputs: Array, rows: Array, *,
               mesh: Mesh | None = None, batch: int = BATCH) -> PyTree:
  """predict(inputs[rows]), a batch at a time, split over the devices.

  Batches are the same whatever the number of devices, and so are the results.

  Args:
    predict: raw inputs [B, ...] -> pytree of [B, ...].
    inputs: [D, ...].
    rows: int32[M].
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

  def run(inputs, table):
    return lax.map(
        lambda r: predict(jnp.take(inputs, r, axis=0)), table)

  if mesh is None:
    out = run(inputs, table)
  else:
    axis = mesh.axis_names[0]
    split, everyone = PartitionSpec(axis), PartitionSpec()
    def local(inputs, table):
      return lax.all_gather(run(inputs, table), axis, tiled=True)
    out = jax.shard_map(local, mesh=mesh, in_specs=(everyone, split),
                        out_specs=everyone, check_vma=False)(
                            jnp.asarray(inputs), table)
  return jax.tree.map(
      lambda x: x.reshape(batches * size, *x.shape[2:])[:count], out)


def scores(logits: jax.Array, labels: Array) -> Metrics:
  """accuracy, loss float32[] and per_class_accuracy float32[C].

  A class without examples has accuracy NaN.
  """
  hits = (logits.argmax(-1) == labels).astype(jnp.float32)
  of_class = jax.nn.one_hot(labels, logits.shape[-1])
  loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return {'accuracy': hits.mean(), 'loss': loss.mean(),
          'per_class_accuracy': (hits @ of_class) / of_class.sum(0)}


def probe_of(federation: Federation) -> np.ndarray:
  """int32[P], P <= 2048: unlabeled rows, evenly taken over all clients."""
  shard = federation.clients if federation.stream is None else (
      federation.stream)
  counts = np.asarray(shard.num_unlabeled).reshape(-1)
  table = np.asarray(shard.unlabeled).reshape(counts.size, -1)
  rows = table[np.arange(table.shape[1]) < counts[:, None]]
  step = max(1, -(-rows.size // _PROBE))
  return rows[::step].astype(np.int32)


def evaluation(method: Method, mesh: Mesh | None = None
               ) -> Callable[[State, Federation, Array], Metrics]:
  """A pure function that evaluates a state, to be jitted or mapped.

  Args:
    method: its `predict`, `pseudo_label` and `local_predict` are used.
    mesh: devices to share the work, or None.

  Returns:
    (state, federation, probe rows) -> metrics: accuracy, loss,
    per_class_accuracy on the test set; val_accuracy; pseudo_label_accuracy
    and pseudo_label_rate on the true labels of the probe rows, where the
    method labels; local_accuracy, the mean over the clients of their own
    models' accuracy on the first 2048 test rows, where the method keeps them;
    that is `accuracy` too where there is no global model.
  """
  def over(predict, examples: Examples, rows=None):
    rows = jnp.arange(examples.labels.shape[0]) if rows is None else rows
    return in_batches(predict, examples.inputs, rows, mesh=mesh)

  global_predict, own_predict = method.predict, method.local_predict

  def of_clients(own, state, federation, examples, rows):
    """Mean over the clients of their own models' scores."""
    def one(i):
      row = tree.take(state.memory, i)
      logits = over(lambda x: own(state.server, row, x),
                    examples, rows)
      return scores(logits, jnp.asarray(examples.labels)[rows])
    each = lax.map(one, jnp.arange(federation.num_clients))
    return jax.tree.map(lambda x: x.mean(0), each)

  def evaluate(state, federation, probe):
    test, validation = federation.test, federation.validation
    out = {}
    if own_predict is not None:
      rows = jnp.arange(test.labels.shape[0])[:_PROBE]
      local = of_clients(own_predict, state, federation, test, rows)
      out['local_accuracy'] = local['accuracy']
    if global_predict is None:  # No model but the clients' own.
      return {**out, **local}
    def predict(inputs):
      return global_predict(state.server, inputs)
    out.update(scores(over(predict, test), test.labels))
    if validation.labels.shape[0]:
      logits = over(predict, validation)
      out['val_accuracy'] = scores(logits, validation.labels)['accuracy']
    if method.pseudo_label is not None and probe.shape[0]:
      label, weight = over(
          lambda x: method.pseudo_label(state.server, x), federation.train,
          probe)
      truth = jnp.take(federation.train.labels, probe)
      out['pseudo_label_accuracy'] = (
          (weight * (label == truth)).sum() / weight.sum())
      out['pseudo_label_rate'] = weight.mean()
    return out

  return evaluate

