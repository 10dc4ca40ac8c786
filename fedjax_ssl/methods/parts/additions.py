"""Adds a server optimizer or hostile clients to any method.

Both are options of the task, and the method does not see them. The server's
record becomes `WithAdditions`: the method's own record and the optimizer's
state. So do the clients' memories: the method's own, and whether a client is
hostile.
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


class WithAdditions(NamedTuple):
  """A method's record or memory, and what the task adds to it."""

  own: PyTree  # The method's.
  added: PyTree  # Moments of the server's optimizer; bool, who is hostile.


def wanted(task: Task) -> bool:
  """Returns whether a task adds anything."""
  return task.server_optimizer is not None or task.attack is not None


def own(record: Any) -> Any:
  """Returns the method's part of a record or memory."""
  return record.own


def start(task: Task, state: State, update: ClientUpdate,
          broadcast: rounds.Broadcast, federation: Federation,
          key: jax.Array) -> State:
  """Puts the task's additions beside a method's first state.

  Args:
    task: has the server's optimizer and the attack.
    state: the method's own.
    update: the method's `client_update`, which is only traced.
    broadcast: what a client receives; see `core.rounds.Broadcast`.
    federation: the clients.
    key: the one that drew the initial values.

  Returns:
    The state, whose record and memory are `WithAdditions`.
  """
  moments: PyTree = ()
  hostile: PyTree = ()
  if task.server_optimizer is not None:
    message = _message(state, update, broadcast, federation, key)
    moments = task.server_optimizer.init(
        server_optimizers.trained(tree.zeros_like(message)))
  if task.attack is not None:
    hostile = attacks.hostile(task.attack, key, federation.num_clients)
  return state._replace(server=WithAdditions(state.server, moments),
                        memory=WithAdditions(state.memory, hostile))


def _message(state: State, update: ClientUpdate,
             broadcast: rounds.Broadcast, federation: Federation,
             key: jax.Array) -> PyTree:
  """Returns the shapes of a client's message."""
  def one(state: State, federation: Federation) -> PyTree:
    first = jnp.int32(0)
    client = Client(
        first, tree.take(federation.at(first).clients, first),
        tree.take(state.memory, first), federation.train,
        federation.validation, first, first)
    return update(broadcast(state.server, first, first), client, key).message
  return jax.eval_shape(one, state, federation)


def on_own(one: rounds.Pass) -> rounds.Pass:
  """Wraps a pass so that it sees only the method's own parts."""
  def run(state, federation, round_, key):
    server, memory, _ = state
    after, metrics = one(state._replace(server=server.own, memory=memory.own),
                         federation, round_, key)
    return after._replace(server=server._replace(own=after.server),
                          memory=memory._replace(own=after.memory)), metrics
  return run


def client_update(task: Task, update: ClientUpdate) -> ClientUpdate:
  """Wraps a method's `client_update`, which sees its own memory only.

  Hostile clients attack.
  """
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
  """Wraps a method's `aggregate`; the optimizer turns the mean into a step.

  Args:
    task: has the optimizer, if any.
    finish: `aggregate` of `core.rounds.client_pass`, over the method's own
      record; linear if there is an optimizer.

  Returns:
    `aggregate` over records that are `WithAdditions`; linear if `finish` is.
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
    return WithAdditions(after, moments), metrics
  if not getattr(finish, 'is_linear', False):
    return run
  return aggregation.linear(run, each=getattr(finish, 'of_each', None),
                            replaceable=getattr(finish, 'is_replaceable', True))
