"""The types of the library: federation, client, update, method, task.

Axis names used in every docstring: D examples, N clients of the federation,
S slots of a cohort, G groups of a round, T tasks of a stream, B rows of a
batch, C classes, L and U the widths of the labeled and unlabeled row tables.
A client axis is always the leading one.
"""
from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_ssl.core import checks, descriptions, optimizers, run_files

PyTree = Any
Array = jax.Array | np.ndarray
Number = Array | float  # A scalar from the host or the device.
Metrics = dict[str, Any]  # float32[] or Ratio each.

# Metrics that every client pass makes itself.
PASS_METRICS = (*run_files.SUMMED, 'masked_share', 'models_sent',
                'num_participants')
# Work of a client in a round, in examples: sums over its steps.
COUNTED = ('forward_passes', 'backward_passes')
# What several loops of one client add up.
WORK = (*COUNTED, 'rows_used', 'rows_processed')
# What rows of a client a loss may use.
STREAMS = ('both', 'labeled', 'unlabeled')
# A larger metric counts as not measured: sums of such could overflow.
MEASURABLE = 1e30


class Ratio(NamedTuple):
  """A mean as sum and count, so that means of several steps can be joined."""

  total: jax.Array  # float32[]
  rows: jax.Array  # float32[]


class Examples(NamedTuple):
  """A data set: one row an example."""

  # uint8[D, H, W, C] images, int32[D, T] token ids or float[D, T, E] vectors of
  # the words of texts.
  inputs: Array
  labels: Array  # int32[D] classes in [0, C); in `train` -1 for one unknown.

  def __repr__(self) -> str:
    return f'Examples({descriptions.examples(self)})'


class Batch(NamedTuple):
  """The rows of one step; nothing may depend on those that are masked."""

  inputs: jax.Array  # [B, ...] as in Examples.
  labels: jax.Array  # int32[B]; -1 where the label is hidden.
  mask: jax.Array  # float32[B], 1 for a real row and 0 for padding.
  slots: jax.Array | None = None  # int32[B], places in the client's own table.


class Shard(NamedTuple):
  """The rows of one client or of the server: indices into `Examples`.

  Only the first `num_labeled` and `num_unlabeled` entries count; the rest is
  padding, 0. Stacked over clients every field gains a leading axis N.
  """

  labeled: Array  # int32[L]
  num_labeled: Array  # int32[]
  unlabeled: Array  # int32[U]
  num_unlabeled: Array  # int32[]

  def __repr__(self) -> str:
    return f'Shard({descriptions.shard(self)})'


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Federation:
  """Everything a round may read: the data, and how it is dealt out.

  Attributes:
    train: the examples that shards index.
    validation: examples held by the server, never trained on.
    test: examples for evaluation only.
    clients: Shard with leading axis N.
    server: the server's own Shard; empty unless labels are at the server.
    stream: Shard with leading axes [T, N] in streaming settings, else None.
    rounds_per_task: rounds before the next task of the stream; 0 without one.
    num_labeled_clients: how many clients hold labels, the first ones; -1 if
      the setting has no such rule.
    num_classes: C.
    held: whose rows the memory of a state has, ascending and filled up with N;
      None is all clients. See `core.partial_memory`, which marks it to be told.
  """

  train: Examples
  validation: Examples
  test: Examples
  clients: Shard
  server: Shard
  stream: Shard | None = None
  rounds_per_task: int = dataclasses.field(
      default=0, metadata={'static': True})
  num_labeled_clients: int = dataclasses.field(
      default=-1, metadata={'static': True})
  num_classes: int = dataclasses.field(default=10, metadata={'static': True})
  held: Any = None  # int32[K]

  @property
  def num_clients(self) -> int:
    """N."""
    return self.clients.num_labeled.shape[-1]

  @property
  def tables(self) -> Shard:
    """Returns the clients' rows of all tasks: `stream`, else `clients`."""
    return self.clients if self.stream is None else self.stream

  def __repr__(self) -> str:
    train: Any = self.train
    if not isinstance(train, Examples):  # Axes, as `vmap` takes them.
      return f'Federation({vars(self)})'
    parts = {name: descriptions.examples(getattr(self, name))
             for name in ('train', 'validation', 'test')}
    told = [descriptions.shard(self.clients),
            *(f'{name} {text}' for name, text in parts.items()),
            descriptions.count(self.num_classes, 'class', 'classes')]
    if descriptions.is_known(self.server.num_labeled) and np.any(
        self.server.num_labeled):
      told.insert(1, f'server {descriptions.shard(self.server)}')
    if self.stream is not None:
      told.append(f'a stream of {descriptions.shard(self.stream)}')
    return f'Federation({"; ".join(told)})'

  def at(self, round_: jax.Array) -> Federation:
    """Returns the federation of a round, with the stream's current task."""
    if self.stream is None:
      return self
    num_tasks = self.stream.num_labeled.shape[0]
    task = jax.numpy.minimum(round_ // self.rounds_per_task, num_tasks - 1)
    clients = jax.tree.map(lambda x: jax.numpy.asarray(x)[task], self.stream)
    return dataclasses.replace(self, clients=clients)


class State(NamedTuple):
  """All that outlives a round; a checkpoint holds one for each seed."""

  server: PyTree  # The method's own record.
  memory: PyTree  # What stays on the clients, leaves [N, ...]; () if nothing.
  round: jax.Array  # int32[], rounds done so far.

  def __repr__(self) -> str:
    known = descriptions.is_known(self.round)
    done = f'round {np.asarray(self.round)}' if known else (
        f'round {descriptions.array(self.round)}')
    return (f'State({done}; server: {descriptions.tree(self.server)}; memory: '
            f'{descriptions.tree(self.memory)})')


class Cohort(NamedTuple):
  """Who takes part: G groups (1 by default) of S slots.

  A client appears at most once in a group. A padding slot has id N.
  """

  ids: jax.Array  # int32[G, S]
  active: jax.Array  # bool[G, S]


class Client(NamedTuple):
  """What one client's update function sees."""

  id: jax.Array  # int32[]
  shard: Shard
  memory: PyTree  # Its row of State.memory.
  train: Examples
  validation: Examples
  round: jax.Array  # int32[]
  group: jax.Array  # int32[]


class Update(NamedTuple):
  """What one client returns."""

  message: PyTree  # Sent to the server.
  weight: jax.Array  # float32[], how much the client counts; 0 sits out.
  memory: PyTree  # Its next row of State.memory.
  metrics: Metrics  # float32[] or Ratio each.
  scalars: jax.Array | None = None  # float32[], numbers sent up if sparse.
  scalars_down: jax.Array | None = None  # float32[], received if sparse.
  # Numbers that are sent beside the model's change. They are averaged by
  # weight, also where `Task.aggregator` replaces the mean of the messages, and
  # do not enter the norm that `Task.max_update_norm` limits.
  counts: PyTree = ()


class Context(NamedTuple):
  """What the server holds besides its state."""

  round: jax.Array  # int32[]
  train: Examples
  validation: Examples
  shard: Shard  # The server's own labeled and unlabeled rows.


class Method(NamedTuple):
  """A federated method as a record of pure functions.

  init: (key, federation) -> State, on the host.
  round: (state, federation, round, key) -> (State, metrics), each float32[] or
    a Ratio; `round` is `state.round`, and the same in the State returned:
    whoever runs rounds counts them.
  predict: (server, inputs [B, ...]) -> logits float32[B, C]; None if clients
    never share a model, which asks for `local_predict`.
  local_predict: (server, memory_row, inputs) -> logits, a client's own model.
  pseudo_label: (server, memory_row, inputs) -> (label int32[B], weight
    float32[B]) of a client's rows, for evaluation only.
  client_update: (payload, client, key) -> Update, ONE client.
  aggregate: see `core.rounds.client_pass`.
  report: (server, round) -> metrics float32[] of the record itself after so
    many rounds, by name, for evaluated rounds; those in
    `training.metrics.BETWEEN` also for the rounds between.
  pictures: (server, examples, key) -> uint8[rows, columns, H, W, C] to look
    at; None where the examples are no images.
  spanning: (num_rounds) -> the same method for a run of so many rounds, which
    `train` asks for; None if its task says how many schedules span.
  """

  init: Callable[..., State]
  round: Callable[..., tuple[State, Metrics]]
  predict: Callable[..., jax.Array] | None
  local_predict: Callable[..., jax.Array] | None = None
  pseudo_label: Callable[..., tuple[jax.Array, jax.Array]] | None = None
  client_update: Callable[..., Update] | None = None
  aggregate: Callable[..., Any] | None = None
  report: Callable[..., Metrics] | None = None
  pictures: Callable[..., jax.Array | None] | None = None
  spanning: Callable[[int], Method] | None = None

  def __repr__(self) -> str:
    has = [name for name, part in zip(self._fields, self, strict=True)
           if part is not None]
    return f'Method({", ".join(has)})'


class Variables(NamedTuple):
  """A model's numbers: both parts are sent and averaged."""

  params: PyTree  # Trained by gradients.
  stats: PyTree  # Running normalization statistics; {} without any.


class Model(NamedTuple):
  """A network as pure functions over preprocessed float inputs.

  init: (key) -> Variables.
  apply: (variables, inputs) -> logits float32[B, C], running statistics.
  apply_train: (variables, inputs, mask float32[B], key=None) -> (logits,
    stats): batch statistics over the rows with mask 1, and the statistics
    after the batch. Without a key nothing drops out.
  norm: 'none', 'batch', 'group' or 'static'.
  embed: (variables, tokens int32[B, T]) -> float32[B, T, E], which `apply`
    takes in their place; None where inputs are continuous already.
  features: (variables, inputs) -> float32[B, F], what the last dense layer
    reads, with running statistics; None if the network does not say.
  features_train: as apply_train, with the features before the logits.
  head: () -> the keys, from the outside in, under which `params` has the
    weights float32[F, C] of that layer; None if the network does not say.
  """

  init: Callable[..., Variables]
  apply: Callable[..., jax.Array]
  apply_train: Callable[..., tuple[jax.Array, PyTree]]
  norm: str = 'none'
  embed: Callable[..., jax.Array] | None = None
  features: Callable[..., jax.Array] | None = None
  features_train: Callable[..., tuple[jax.Array, jax.Array, PyTree]] | None = (
      None)
  head: Callable[[], tuple[str, ...]] | None = None

  def shapes(self) -> Variables:
    """Returns shapes and types of the model's numbers, without making any."""
    shapes: Variables = jax.eval_shape(self.init, jax.random.key(0))
    return shapes

  def __repr__(self) -> str:
    has = [name for name, part in zip(self._fields, self, strict=True)
           if callable(part)]
    return f'Model({", ".join(has)}; norm {self.norm!r})'


class Attack(NamedTuple):
  """What some clients do to the others.

  Attributes:
    share: of all clients, those that attack.
    flips_labels: whether they learn class C - 1 - c in place of c.
    send: (message, key) -> what they send in its place; None is the message.
  """

  share: float
  flips_labels: bool = False
  send: Callable[..., PyTree] | None = None


@dataclasses.dataclass(frozen=True)
class Task:
  """The static choices of a run, shared by every method.

  Attributes:
    model: the network.
    num_classes: C.
    preprocess: (inputs [B, ...] as in Examples) -> [B, ...] for the model.
    optimizer: (round int32[]) -> optax.GradientTransformation for a client.
    weak: (key, inputs [B, ...]) -> inputs, same shape and dtype.
    strong: the same, stronger; applied to the raw inputs.
    labeled_view: view of the labeled rows; None is `weak`.
    labeled_batch: rows of a labeled batch.
    unlabeled_batch: rows of an unlabeled batch; 0 divides a client's unlabeled
      rows over its labeled steps; see `data.batching.num_steps`.
    unlabeled_capacity: widest unlabeled batch when `unlabeled_batch` is 0.
    local_epochs: passes over a client's own rows in a round.
    local_steps: if positive, this many steps in a round instead of epochs.
    cohort_size: clients of a group; a round has one group, unless the method
      draws several.
    labels_at: 'clients' or 'server'.
    schedule_rounds: rounds that schedules and ramps span, however many are
      run; None is the number that `train` is asked for, see `spanning`.
    client_map: 'map', 'vmap' or 'lanes'.
    chunk_size: clients of one vmap, where 0 is all that a device gets; or the
      number of lanes of a device.
    aggregation_order: 'fixed' (same bits on any number of devices) or 'fast'.
    max_update_norm: updates with a larger global norm are left out; inf is
      off.
    aggregator: replaces the mean of the clients' updates: (updates stacked
      [S, ...], float32[S] weights) -> one update. A client that is left out
      has weight 0 and an update of zeros. None is the mean. Methods with an
      aggregation of their own refuse one.
    server_optimizer: takes the mean of the updates as a gradient of the server
      (an optax.GradientTransformation, which gets no parameters, so weight
      decay is none); None adds it.
    attack: what a share of the clients does; None: all are honest.
    mesh: mesh with the one axis 'clients', or None for one device.
    input_shape: of one stored input, which federations must have; None takes
      any.
  """

  model: Model
  num_classes: int
  preprocess: Callable[..., jax.Array]
  optimizer: Callable[..., Any]
  weak: Callable[..., jax.Array]
  strong: Callable[..., jax.Array]
  labeled_view: Callable[..., jax.Array] | None = None
  labeled_batch: int = 10
  unlabeled_batch: int = 50
  unlabeled_capacity: int = 0
  local_epochs: int = 1
  local_steps: int = 0
  cohort_size: int = 10
  labels_at: str = 'clients'
  schedule_rounds: int | None = None
  client_map: str = 'map'
  chunk_size: int = 0
  aggregation_order: str = 'fixed'
  max_update_norm: float = float('inf')
  aggregator: Callable[[PyTree, jax.Array], PyTree] | None = None
  server_optimizer: Any = None
  attack: Attack | None = None
  mesh: jax.sharding.Mesh | None = None
  input_shape: tuple[int, ...] | None = None

  def __repr__(self) -> str:
    steps = (descriptions.count(self.local_steps, 'step') if self.local_steps
             else descriptions.count(self.local_epochs, 'epoch'))
    told = [descriptions.count(self.num_classes, 'class', 'classes'),
            f'inputs {self.input_shape or "of any shape"}',
            f'{self.cohort_size:,} clients a round, {steps} each',
            f'batches of {self.labeled_batch:,} labeled and '
            f'{self.unlabeled_batch or "all"} unlabeled rows',
            f'labels at {self.labels_at}']
    return f'Task({"; ".join(told)})'

  def horizon(self, what: str) -> int:
    """Returns the rounds that `what` spans.

    Raises:
      LengthError: if the task does not say how long the run is.
    """
    if self.schedule_rounds is None:
      raise checks.LengthError(what)
    return self.schedule_rounds

  def spanning(self, num_rounds: int) -> Task:
    """Returns the task for `num_rounds`, or the same if it has a number."""
    if self.schedule_rounds is not None:
      return self
    optimizer = self.optimizer
    if isinstance(optimizer, optimizers.Scheduled):
      optimizer = optimizer.spanning(num_rounds)
    return dataclasses.replace(
        self, schedule_rounds=num_rounds, optimizer=optimizer)

  def apply(self, variables: Variables, inputs: Array) -> jax.Array:
    """Computes logits float32[B, C] of raw inputs, with running statistics."""
    return self.model.apply(variables, self.preprocess(inputs))

  @property
  def epochs_a_round(self) -> int:
    """Returns the epochs of a round, which is one with `local_steps`."""
    return 1 if self.local_steps else self.local_epochs

  @property
  def unlabeled_width(self) -> int:
    """Returns how many unlabeled rows a batch has room for."""
    return self.unlabeled_batch or max(self.unlabeled_capacity, 1)

  @property
  def client_streams(self) -> str:
    """Returns which of `STREAMS` a client trains on if it can use both."""
    return 'unlabeled' if self.labels_at == 'server' else 'both'

  def one_pass(self) -> Task:
    """Returns the task in which a client sees each row once a round."""
    return dataclasses.replace(self, local_epochs=1, local_steps=0)

  def apply_train(self, variables: Variables, inputs: Array, mask: Array,
                  key: jax.Array | None = None
                  ) -> tuple[jax.Array, PyTree]:
    """Computes logits and new statistics of raw inputs, by batch statistics."""
    inputs = self.preprocess(inputs)
    return self.model.apply_train(variables, inputs, mask, key)
