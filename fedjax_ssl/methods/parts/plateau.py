"""A learning rate that falls when the validation loss stops falling.

FedMatch trains its baselines this way too: each client divides its own rate by
3 after 3 epochs without a lower loss (Jeong et al.,
https://arxiv.org/abs/2006.12097v1, appendix). The rule is that of Serra et al.,
https://arxiv.org/abs/1801.01423. Only those rounds count in which the owner of
the rate, a client or the server, trained and its update was not rejected.
"""
from __future__ import annotations

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl.core import tree
from fedjax_ssl.core.types import (
  Examples,
  Federation,
  PyTree,
  State,
  Task,
  Variables,
)

PATIENCE = 3  # Epochs.
_DIVISOR = 3.0
_BATCH = 256  # Validation rows of one pass.


class Plateau(NamedTuple):
  """A learning rate that falls when a validation loss stops falling.

  Numbers of one client, or stacked over clients.
  """

  factor: jax.Array  # float32[], what the rate is multiplied with.
  best: jax.Array  # float32[], lowest loss so far.
  waited: jax.Array  # int32[], epochs since that loss or the last division.


def full_rate() -> Plateau:
  """Returns the first state: factor 1, and no loss measured."""
  # Finite, as a client's memory with an infinity would count as broken.
  return Plateau(jnp.float32(1), jnp.float32(1e30), jnp.int32(0))


def after_loss(state: Plateau, loss: jax.Array, *, patience: int,
               epochs: int = 1) -> Plateau:
  """Divides the rate by 3 after `patience` epochs without a lower loss.

  Args:
    state: before this loss.
    loss: float32[], measured after `epochs` more epochs; NaN is not lower.
    patience: epochs, at least 1.
    epochs: between two measurements.

  Returns:
    The state after this loss; its factor is at least 1e-16.

  References:
    Serra et al., HAT, https://arxiv.org/abs/1801.01423, whose rule FedMatch
    uses.
  """
  better = loss < state.best
  waited = jnp.where(better, 0, state.waited + epochs).astype(jnp.int32)
  falls = waited >= patience
  factor = jnp.where(falls, jnp.maximum(state.factor / _DIVISOR, 1e-16),
                     state.factor)
  return Plateau(factor, jnp.where(better, loss, state.best),
                 jnp.where(falls, 0, waited))


class Server(NamedTuple):
  """The server's record; the rate is for training on its own labels."""

  model: Variables
  rate: Plateau | None  # None where labels are at the clients.


class Memory(NamedTuple):
  """A client's memory, with the state of its learning rate."""

  rate: Plateau
  own: PyTree  # The rest of what the client keeps.


def start(task: Task, model: Variables, own: PyTree, federation: Federation
          ) -> tuple[Server, Memory]:
  """Makes the first record and memory, with all rates at their full value.

  Args:
    task: tells where the labels are.
    model: the first one.
    own: the rest of what clients keep, [N, ...].
    federation: has validation rows.

  Returns:
    The server's record and the clients' memory [N, ...].

  Raises:
    ValueError: without validation rows.
  """
  if not federation.validation.labels.shape[0]:
    raise ValueError("lr_decay='plateau' needs validation rows; without any, "
                     "give lr_decay='none'.")
  rates = tree.repeat(full_rate(), federation.num_clients)
  at_server = task.labels_at == 'server'
  return (Server(model, full_rate() if at_server else None),
          Memory(rates, own))


def validation_scores(task: Task, model: Variables, examples: Examples
                      ) -> tuple[jax.Array, jax.Array]:
  """Computes accuracy and cross entropy of a model on held-out rows.

  Args:
    task: has the network.
    model: its variables.
    examples: at least one row; they are not augmented.

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


def restarted(rate: Plateau, federation: Federation,
              round_: jax.Array) -> Plateau:
  """Starts again at the full rate when a stream's next task begins.

  So does the paper of Serra et al., which learns tasks one after another.
  """
  if federation.stream is None:
    return rate
  task, first = jnp.divmod(round_, federation.rounds_per_task)
  begins = (first == 0) & (task < federation.stream.num_labeled.shape[0])
  return jax.tree.map(lambda now, start: jnp.where(begins, start, now), rate,
                      full_rate())


def begin(state: State, federation: Federation, round_: jax.Array) -> State:
  """Applies `restarted` to the clients' rates as a round begins."""
  memory = state.memory
  rates = restarted(memory.rate, federation, round_)
  return state._replace(memory=memory._replace(rate=rates))


def after(task: Task, rate: Plateau, model: Variables,
          examples: Examples, trained: jax.Array, *, patience: int = PATIENCE
          ) -> Plateau:
  """Updates a learning rate by the validation loss of the trained model.

  Args:
    task: has the network and the epochs of a round.
    rate: the client's, or the server's, before the round.
    model: the model after the round.
    examples: validation rows.
    trained: bool[], whether it trained in the round; if not, the round does
      not count as one without a lower loss.
    patience: epochs without a lower loss after which the rate falls; with
      `local_steps` a round counts as one.

  Returns:
    The rate for the next round.
  """
  _, loss = validation_scores(task, model, examples)
  return tree.where(trained, after_loss(
      rate, loss, patience=patience, epochs=task.epochs_a_round), rate)
