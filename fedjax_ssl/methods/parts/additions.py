"""What a task adds to any method: an optimizer of the server, and attackers.

The server's record and the clients' memory are then the method's own and,
beside it, the state of the optimizer and who is hostile. A method knows
nothing of it.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl import aggregation
from fedjax_ssl.core import rounds, tree
from fedjax_ssl.core.types import (
  Client,
  Federation,
  Metrics,
  PyTree,
  State,
  Task,
  Update,
)
from fedjax_ssl.methods.parts import attacks, server_optimizers

ClientUpdate = Callable[..., Update]


class Beside(NamedTuple):
  """A server's record or a client's memory, and what is added to it."""

  own: PyTree  # The method's.
  added: PyTree  # Moments of the server's optimizer; bool, who is hostile.


def wanted(task: Task) -> bool:
  """Whether a task adds anything."""
  return task.server_optimizer is not None or task.attack is not None


def own(record: Any) -> Any:
  """The method's part of a record or memory."""
  return record.own


def start(task: Task, state: State, update: ClientUpdate,
          broadcast: rounds.Broadcast, federation: Federation,
          key: jax.Array) -> State:
  """The first state, with what is added.

  Args:
    task: says what.
    state: the method's own.
    update: the method's `client_update`, which is only traced.
    broadcast: what the client receives.
    federation: the clients.
    key: of the initial values.

  Returns:
    The state, whose record and memory are `Beside`.
  """
  moments: PyTree = ()
  hostile: PyTree = ()
  if task.server_optimizer is not None:
    message = _message(state, update, broadcast, federation, key)
    moments = task.server_optimizer.init(
        server_optimizers.trained(tree.zeros_like(message)))
  if task.attack is not None:
    hostile = attacks.hostile(task.attack, key, federation.num_clients)
  return state._replace(server=Beside(state.server, moments),
                        memory=Beside(state.memory, hostile))


def _message(state: State, update: ClientUpdate,
             broadcast: rounds.Broadcast, federation: Federation,
             key: jax.Array) -> PyTree:
  """Shapes of what a client sends."""
  def one(state: State, federation: Federation) -> PyTree:
    first = jnp.int32(0)
    client = Client(
        first, tree.take(federation.at(first).clients, first),
        tree.take(state.memory, first), federation.train,
        federation.validation, first, first)
    return update(broadcast(state.server, first, first), client, key).message
  return jax.eval_shape(one, state, federation)


def within(one: rounds.Pass) -> rounds.Pass:
  """A pass that sees the method's own parts alone."""
  def run(state, federation, round_, key):
    server, memory, _ = state
    after, metrics = one(state._replace(server=server.own, memory=memory.own),
                         federation, round_, key)
    return after._replace(server=server._replace(own=after.server),
                          memory=memory._replace(own=after.memory)), metrics
  return run


def client_update(task: Task, update: ClientUpdate) -> ClientUpdate:
  """What a client does, by its own part; it may be hostile."""
  attack = task.attack
  attacked = None if attack is None else attacks.attacked(
      attack, update, task.num_classes)

  def run(payload: PyTree, client: Client, key: jax.Array) -> Update:
    memory = client.memory
    client = client._replace(memory=memory.own)
    made = (update(payload, client, key) if attacked is None
            else attacked(payload, client, memory.added, key))
    return made._replace(memory=memory._replace(own=made.memory))
  return run


def aggregate(task: Task, finish: Callable[..., tuple[Any, Metrics]]
              ) -> Callable[..., tuple[Any, Metrics]]:
  """What the server does, by its own part, and with its optimizer.

  Args:
    task: says which.
    finish: see `core.rounds.client_pass`; linear if there is an optimizer.

  Returns:
    The same, of records that are `Beside`; linear if `finish` is.
  """
  optimizer = task.server_optimizer

  def run(server, updates, cohort, context, key):
    moments = server.added
    if optimizer is not None:
      counted = isinstance(updates, rounds.Counted | rounds.Detailed)
      mean, moments = server_optimizers.step(
          optimizer, updates.mean if counted else updates, moments)
      updates = updates._replace(mean=mean) if counted else mean
    elif isinstance(updates, Update):
      updates = updates._replace(memory=updates.memory.own)
    after, metrics = finish(server.own, updates, cohort, context, key)
    return Beside(after, moments), metrics
  if not getattr(finish, 'is_linear', False):
    return run
  return aggregation.linear(run, each=getattr(finish, 'of_each', None))
