"""Accuracy and loss of a state, on data that no method trains on."""
from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

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
)
from fedjax_ssl.training import classification_metrics

BATCH = 256
# What an evaluation gives besides `scores` and a method's report.
_BESIDE = ('labeled_accuracy', 'largest_weight', 'local_accuracy',
           'pseudo_label_accuracy', 'pseudo_label_rate', 'val_accuracy',
           'val_loss')
# Rows on which pseudo-labels, labels and local models are judged.
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


def named(logits: jax.Array, class_names: Sequence[str]
          ) -> list[tuple[str, float]]:
  """Returns the class of each row of logits [B, C], and its probability.

  Args:
    logits: of the rows.
    class_names: of the classes; without any a class is its number.
  """
  certain = np.asarray(jax.nn.softmax(logits).max(-1))
  return [(class_names[class_] if class_names else str(class_), float(sure))
          for class_, sure in zip(np.asarray(logits.argmax(-1)), certain,
                                  strict=True)]


def names() -> set[str]:
  """Returns the names of all that an evaluation can give but a `report`."""
  return {*_BESIDE, *jax.eval_shape(
      scores, jax.ShapeDtypeStruct((1, 2), jnp.float32),
      jax.ShapeDtypeStruct((1,), jnp.int32))}


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
  """Rows of training on which a model is judged.

  Attributes:
    clients: int32[P] ids of clients whose pseudo-labels are judged.
    rows: int32[P, K] unlabeled rows of each; some again where it has fewer, as
      a method may judge a batch by all that is in it.
    mask: float32[P, K], 1 where such a row counts.
    labeled: int32[M] rows that are learnt from with their labels, of all
      clients and the server.
    labeled_mask: float32[M], 1 where such a row counts.
  """

  clients: np.ndarray
  rows: np.ndarray
  mask: np.ndarray
  labeled: np.ndarray
  labeled_mask: np.ndarray

  def of_clients(self, some: Any) -> Probe:
    """Returns the probe with some of its clients, by their places."""
    return self._replace(clients=self.clients[some], rows=self.rows[some],
                         mask=self.mask[some])


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


def _labeled(federation: Federation) -> np.ndarray:
  """Takes at most 2048 labeled rows, evenly over clients and server.

  Returns:
    int32[M], of every owner's rows in the order of its table.
  """
  shards = federation.clients, federation.server
  counts = [np.asarray(shard.num_labeled).reshape(-1) for shard in shards]
  ends = np.cumsum(np.concatenate(counts), dtype=np.int64)
  picked = np.arange(0, ends[-1], max(1, -(-ends[-1] // _PROBE)))
  holder = np.searchsorted(ends, picked, side='right')
  place = picked - np.where(holder, ends[holder - 1], 0)
  clients = counts[0].size
  at_server = holder >= clients
  return np.concatenate([
      np.asarray(shards[0].labeled)[holder[~at_server], place[~at_server]],
      np.asarray(shards[1].labeled)[place[at_server]]])


def probe_of(federation: Federation) -> Probe:
  """Takes about 2048 unlabeled rows, and at most 2048 labeled ones.

  Both are spread evenly over those that hold them and over their rows. In a
  stream the unlabeled rows are those of all tasks.
  """
  unlabeled, counts = _unlabeled(federation)
  holders = np.flatnonzero(counts)
  clients = holders[::max(1, -(-holders.size // _PROBE))]
  most = max(1, _PROBE // max(clients.size, 1))
  width = int(min(most, counts.max(initial=1)))
  place = np.arange(width)
  taken = np.minimum(counts[clients], width)[:, None]
  # Evenly over a client's rows, which are in the order of the data set.
  index = place % taken * counts[clients][:, None] // taken
  mask, rows = place < taken, unlabeled[clients[:, None], index]
  labeled = _labeled(federation)
  known = np.ones(labeled.size, np.float32)
  if not labeled.size:  # One place that does not count: the metric is NaN.
    labeled, known = np.zeros(1, np.int32), np.zeros(1, np.float32)
  return Probe(clients.astype(np.int32), rows.astype(np.int32),
               mask.astype(np.float32), labeled.astype(np.int32), known)


def _judge(pseudo_label: Any, server: PyTree, memory: PyTree,
           places: jax.Array, train: Examples, probe: Probe
           ) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Counts pseudo-labels, float32[P] each: right, of known class, in all.

  Args:
    pseudo_label: see `Method`.
    server: the record.
    memory: rows of clients, and of each of the probe's its place there.
    places: int32[P].
    train: has the probe's rows.
    probe: of some clients.
  """
  def one(part):
    place, rows, mask = part
    label, weight = pseudo_label(
        server, tree.take(memory, place),
        jnp.take(train.inputs, rows, axis=0))
    truth = jnp.take(train.labels, rows)
    known = truth >= 0  # The others cannot be judged.
    return ((weight * (label == truth) * known * mask).sum(),
            (weight * known * mask).sum(), (weight * mask).sum())
  return lax.map(one, jax.tree.map(jnp.asarray,
                                   (places, probe.rows, probe.mask)))


class OfClients(NamedTuple):
  """What an evaluation has from the clients' memory.

  Attributes:
    own: scores of clients' own models, float32[N, ...] each; {} without any.
    judged: float32[P] each, see `_judge`; () without pseudo-labels.
    largest: `largest_weight` of the memory, where there is no global model.
  """

  own: Metrics
  judged: tuple[jax.Array, ...]
  largest: Any


class Evaluation:
  """Evaluates a method's states, also where clients' rows come in parts."""

  def __init__(self, method: Method, mesh: Mesh | None = None):
    """Takes the method, and the devices that share the work, or None."""
    self._method, self._mesh = method, mesh

  def _over(self, predict: Predict, given: tuple[PyTree, ...],
            examples: Examples, rows: Any = None) -> Any:
    rows = jnp.arange(examples.labels.shape[0]) if rows is None else rows
    return in_batches(predict, examples.inputs, rows, given=given,
                      mesh=self._mesh)

  @property
  def reads_all(self) -> bool:
    """Whether the memory of all clients is read."""
    return self._method.local_predict is not None

  @property
  def reads_probe(self) -> bool:
    """Whether the memory of the probe's clients is read."""
    method = self._method
    return method.predict is not None and method.pseudo_label is not None

  def of_all(self, server: PyTree, memory: PyTree, clients: int,
             test: Examples) -> tuple[Metrics, Any]:
    """Computes `OfClients.own` and `largest`, of so many clients' rows."""
    own = self._method.local_predict
    if own is None:
      return {}, ()
    count = test.labels.shape[0]
    rows = jnp.arange(0, count, -(-count // _PROBE))

    def one(i):
      row = tree.take(memory, i)
      logits = self._over(own, (server, row), test, rows)
      return scores(logits, jnp.asarray(test.labels)[rows])
    return lax.map(one, jnp.arange(clients)), (
        largest_weight(memory, least_rank=3)
        if self._method.predict is None else ())

  def of_probe(self, server: PyTree, memory: PyTree, places: jax.Array,
               train: Examples, probe: Probe) -> tuple[jax.Array, ...]:
    """Computes `OfClients.judged`, of some of the probe's clients or all."""
    if not self.reads_probe or not probe.clients.shape[0]:
      return ()
    return _judge(self._method.pseudo_label, server, memory, places, train,
                  probe)

  def whole(self, server: PyTree, federation: Federation, probe: Probe,
            clients: OfClients, round_: jax.Array) -> Metrics:
    """Computes all metrics.

    Those of a global model are its `scores` on the test set; largest_weight of
    the server's record; val_accuracy and val_loss, if there are validation
    examples; labeled_accuracy on at most 2048 rows that are learnt from with
    their labels, not augmented; pseudo_label_accuracy and pseudo_label_rate by
    the true labels of the probe rows, if the method labels; and the method's
    `report`. If clients keep models of their own, local_accuracy is the mean of
    these models' accuracies on at most 2048 test rows. Without a global model
    there are only such means of all `scores`, local_accuracy, and the
    largest_weight of the clients' models.
    """
    test, validation = federation.test, federation.validation
    predict, out = self._method.predict, {}
    local = jax.tree.map(lambda x: x.mean(0), clients.own)
    if local:
      out['local_accuracy'] = local['accuracy']
    if predict is None:  # No model but the clients' own.
      return {**out, **local, 'largest_weight': clients.largest}
    over_all = functools.partial(self._over, predict, (server,))
    out.update(scores(over_all(test), test.labels))
    out['largest_weight'] = largest_weight(server)
    if validation.labels.shape[0]:
      logits = over_all(validation)
      held = scores(logits, validation.labels)
      out['val_accuracy'], out['val_loss'] = held['accuracy'], held['loss']
    hits = over_all(federation.train, probe.labeled).argmax(-1) == jnp.take(
        jnp.asarray(federation.train.labels), probe.labeled)
    real = jnp.asarray(probe.labeled_mask)
    out['labeled_accuracy'] = (hits * real).sum() / real.sum()
    if clients.judged:
      right, known, used = clients.judged
      out['pseudo_label_accuracy'] = right.sum() / known.sum()
      out['pseudo_label_rate'] = used.sum() / jnp.asarray(probe.mask).sum()
    if self._method.report is not None:
      out.update(self._method.report(server, round_))
    return out


def in_turn(method: Method, mesh: Mesh | None
            ) -> tuple[Callable[..., Any], Callable[..., Metrics]]:
  """Makes the two parts of an evaluation, to be compiled apart.

  Both gather predictions from the devices, and in one program nothing orders
  these exchanges. XLA's CPU client was seen to start them in another order on
  each device, where all wait for ever, in programs that came from the
  compilation cache.

  Args:
    method: its `predict`, `pseudo_label` and `local_predict` are used.
    mesh: devices to share the work, or None.

  Returns:
    (state, federation) -> `Evaluation.of_all`, and
    (state, federation, probe, what that returned) -> `Evaluation.whole`.
  """
  made = Evaluation(method, mesh)

  def own(state, federation):
    return made.of_all(state.server, state.memory, federation.num_clients,
                       federation.test)

  def rest(state, federation, probe, of_all):
    judged = made.of_probe(
        state.server, state.memory, jnp.asarray(probe.clients),
        federation.train, probe)
    local, largest = of_all
    return made.whole(state.server, federation, probe,
                      OfClients(local, judged, largest), state.round)
  return own, rest
