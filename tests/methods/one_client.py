"""What one client of the toy federation sends, in few steps of all its rows."""
from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl import methods
from fedjax_ssl.core import optimizers, tree
from fedjax_ssl.core.types import Client, State, Update
from tests import toy
from tests.methods.baselines_test import same

# Clients that hold labels alone, none, and both kinds of rows.
KNOWN, UNKNOWN, BOTH = 1, 2, 0


@functools.lru_cache
def made(text: str, **changes: Any) -> tuple[State, Callable[..., Update]]:
  """The first state, and a client's round, without augmentation."""
  method = methods.make(text, toy.task(**{
      'optimizer': optimizers.make('sgd', learning_rate=.1, momentum=.5),
      'weak': same, 'labeled_batch': 8, 'unlabeled_batch': 16, **changes}))
  assert method.client_update is not None
  return (method.init(toy.key(0), toy.federation()[0]),
          jax.jit(method.client_update))


def update(text: str, who: int, *, given: Any = None, memory: Any = None,
           round_: int = 0, **changes: Any) -> Update:
  """The update of a client.

  Args:
    text: the method.
    who: the client.
    given: what it receives, where that is not the first record.
    memory: what it has kept, where that is not what it starts with.
    round_: the round.
    **changes: of the task.
  """
  federation, _ = toy.federation()
  state, client_update = made(text, **changes)
  kept = tree.take(state.memory, who) if memory is None else memory
  return client_update(state.server if given is None else given, Client(
      jnp.int32(who), tree.take(federation.clients, who), kept,
      federation.train, federation.validation, jnp.int32(round_),
      jnp.int32(0)), toy.key(3))
