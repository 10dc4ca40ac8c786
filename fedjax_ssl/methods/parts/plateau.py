"""A learning rate that falls where the validation loss no longer does.

FedMatch trains its baselines so too: each client divides its own rate by 3
after 3 epochs without a lower loss. Jeong et al.,
https://arxiv.org/abs/2006.12097v1, appendix; the rule is that of Serra et al.,
https://arxiv.org/abs/1801.01423. A rate waits and falls only in rounds in which
its owner, client or server, trained and its update was not rejected.
"""
from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import optax

from fedjax_ssl.core import checks, optimizers, rounds, tree
from fedjax_ssl.core.types import (
  Client,
  Examples,
  Federation,
  Method,
  PyTree,
  State,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import averaging as averaging_lib

LR_DECAYS = ('none', 'plateau')
PATIENCE = 3  # Epochs.
_BATCH = 256  # Validation rows of one pass.


class Server(NamedTuple):
  """The server's record; its rate is that of its own labels."""

  model: Variables
  rate: optimizers.Plateau | None  # None where labels are at the clients.


class Memory(NamedTuple):
  """A client's memory."""

  rate: optimizers.Plateau
  own: PyTree  # What `base.averaging` keeps.


def judge(task: Task, model: Variables, examples: Examples
          ) -> tuple[jax.Array, jax.Array]:
  """Accuracy and cross entropy of a model on held-out rows.

  Args:
    task: has the network.
    model: its variables.
    examples: at least one row; no augmentation.

  Returns:
    float32[] each.
  """
  count = examples.labels.shape[0]
  batch = min(_BATCH, count)
  steps = -(-count // batch)
  def one(sums, step):
    rows = step * batch + jnp.arange(batch)
    real = rows < count
    rows = jnp.minimum(rows, count - 1)
    log_p = jax.nn.log_softmax(task.apply(
        model, jnp.take(examples.inputs, rows, axis=0)))
    labels = jnp.take(examples.labels, rows)
    hits = jnp.where(real, log_p.argmax(-1) == labels, False)
    chosen = jnp.take_along_axis(log_p, labels[:, None], -1)[:, 0]
    return (sums[0] + hits.sum(),
            sums[1] - jnp.where(real, chosen, 0).sum()), None
  zero = jnp.float32(0)
  (hits, loss), _ = lax.scan(one, (zero, zero), jnp.arange(steps))
  return hits / count, loss / count


def renewed(rate: optimizers.Plateau, federation: Federation,
            round_: jax.Array) -> optimizers.Plateau:
  """The start again where a stream gives its clients their next task.

  As the rule's source trains every task from the full rate.

  Args:
    rate: of one client or stacked.
    federation: has the stream, if any.
    round_: int32[].

  Returns:
    The rate for this round.
  """
  if federation.stream is None:
    return rate
  task, first = jnp.divmod(round_, federation.rounds_per_task)
  begins = (first == 0) & (task < federation.stream.num_labeled.shape[0])
  return jax.tree.map(lambda now, start: jnp.where(begins, start, now), rate,
                      optimizers.plateau())


def _slower(task: Task, rate: optimizers.Plateau) -> Task:
  """The task at a share of its learning rate."""
  return dataclasses.replace(task, optimizer=lambda round_: optax.chain(
      task.optimizer(round_), optax.scale(rate.factor)))


def _after(task: Task, rate: optimizers.Plateau, model: Variables,
           examples: Examples) -> optimizers.Plateau:
  _, loss = judge(task, model, examples)
  return optimizers.after_loss(rate, loss, patience=PATIENCE,
                               epochs=task.local_epochs)


def averaging(task: Task, loss_fn: averaging_lib.LossFn, *, lr_decay: str,
              streams: str, server: str = 'fedavg',
              server_loss: averaging_lib.LossFn | None = None,
              **knobs: Any) -> Method:
  """`base.averaging`, with learning rates that may fall.

  Args:
    task: the static choices.
    loss_fn: see `base`.
    lr_decay: 'none', or 'plateau': each client, and the server for its own
      labels, divides its rate by 3 after 3 epochs without a lower loss of its
      trained model on the validation rows; a client's starts again with each
      task of a stream.
    streams: see `base.averaging`, as for all others.
    server: see there.
    server_loss: see there.
    **knobs: see there.

  Returns:
    The method.

  Raises:
    ValueError: for an unknown choice; or in `init` without validation rows.
  """
  checks.check('lr_decay', lr_decay, LR_DECAYS)
  def made(task: Task) -> Any:
    return averaging_lib.averaging(task, loss_fn, streams=streams,
                                   server=server, server_loss=server_loss,
                                   **knobs)
  plain = made(task)
  if lr_decay == 'none':
    return plain
  alone, at_server = server == 'local', task.labels_at == 'server'

  def init(key: jax.Array, federation: Federation) -> State:
    if not federation.validation.labels.shape[0]:
      raise ValueError("lr_decay='plateau' needs validation rows; without any, "
                       "give lr_decay='none'.")
    state = plain.init(key, federation)
    rates = tree.repeat(optimizers.plateau(), federation.num_clients)
    return State(
        Server(state.server.model, optimizers.plateau() if at_server else None),
        Memory(rates, state.memory), state.round)

  def client_update(payload: Any, client: Client, key) -> Update:
    rate, own = client.memory
    update = made(_slower(task, rate)).client_update(
        payload, client._replace(memory=own), key)
    model = (update.memory.model if alone
             else tree.add(payload.model, update.message))
    rate = tree.where(update.weight > 0,
                      _after(task, rate, model, client.validation), rate)
    return update._replace(memory=Memory(rate, update.memory))

  def on_labels(state: State, federation: Federation, round_, key):
    rate = state.server.rate
    train = averaging_lib.server_training(
        _slower(task, rate), server_loss or averaging_lib.supervised(task))
    state, metrics = train(state, federation, round_, key)
    rate = tree.where(
        metrics['server_loss'].rows > 0,
        _after(task, rate, state.server.model, federation.validation), rate)
    return state._replace(server=state.server._replace(rate=rate)), metrics

  used = 'unlabeled' if at_server and streams == 'both' else streams
  passes: list[rounds.Pass] = [
      rounds.client_pass(
          task, client_update, plain.aggregate,
          broadcast=lambda record, client_id: (
              () if alone else averaging_lib.Server(record.model)),
          work=lambda shard: batching.num_steps(task, shard, used))
  ]
  if at_server:
    passes.insert(0, on_labels)
  if task.model.norm == 'static':
    passes.append(averaging_lib.statistics(task))
  all_passes = rounds.chain(*passes)

  def round_fn(state: State, federation: Federation, round_, key):
    memory = state.memory
    rates = renewed(memory.rate, federation, round_)
    return all_passes(state._replace(memory=memory._replace(rate=rates)),
                      federation, round_, key)

  local_predict, pseudo_label = plain.local_predict, plain.pseudo_label
  return plain._replace(
      init=init, round=round_fn, client_update=client_update,
      local_predict=None if local_predict is None else (
          lambda record, row, x: local_predict(record, row.own, x)),
      pseudo_label=None if pseudo_label is None else (
          lambda record, row, x: pseudo_label(record, row and row.own, x)))
