"""One client's update, for laws of what clients do: half of a round."""
from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import methods
from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Client, Update
from tests import toy
from tests.methods import averaging_test

KEY = toy.key(6)
# Clients that hold labels alone, none, and both kinds of rows.
KNOWN, UNKNOWN, BOTH = 1, 2, 0


def same(key, x):
  """An augmentation that changes nothing: draws cannot differ."""
  del key
  return x


# All rows of a client in every step, and as they are.
WHOLE: dict[str, Any] = {
    'weak': same, 'labeled_batch': 8, 'unlabeled_batch': 16}


# Tests that come one after another ask for the same ones.
@functools.lru_cache(32)
def _program(text: str, model: str, place: str, **changes: Any) -> Any:
  """The first state, and the compiled update of any client."""
  method = methods.make(text, toy.task(model, labels_at=place, **changes))
  assert method.client_update is not None
  return (method.init(KEY, toy.federation(place)[0]),
          jax.jit(method.client_update))


def update(text: str, client: int = 0, round_: int = 0, model: str = 'linear',
           place: str = 'clients', kept: dict[str, Any] | None = None,
           given: dict[str, Any] | None = None, sent: Any = None,
           altered: Any = None, **changes: Any) -> Update:
  """What a client sends from the first model.

  Args:
    text: the method.
    client: by default one with rows of both kinds.
    round_: which it is.
    model: of `toy.task`.
    place: of the labels.
    kept: what a client of `parts.averaging` has kept, by name; the rest is as
      at the start.
    given: fields of the server's record that differ.
    sent: the server's record -> what clients receive; by default the record.
    altered: the client -> one with other rows or another memory.
    **changes: of the task.
  """
  state, run = _program(text, model, place, **changes)
  one = _client(state, client, round_, place)
  if kept:
    one = one._replace(memory=one.memory._replace(kept=one.memory.kept._replace(
        **{name: np.broadcast_to(np.asarray(value, np.float32),
                                 getattr(one.memory.kept, name).shape)
           for name, value in kept.items()})))
  if altered:
    one = altered(one)
  server = state.server._replace(**given) if given else state.server
  return run(sent(server) if sent else server, one, KEY)


def judged(text: str, altered: Any = lambda row: row, rows: int = 12) -> Any:
  """Labels and weights of the first rows, as evaluation asks client 0 for them.

  Args:
    text: the method.
    altered: what the client keeps -> what it keeps instead.
    rows: how many.
  """
  federation, _ = toy.federation()
  method = methods.make(text, toy.task())
  state = method.init(KEY, federation)
  assert method.pseudo_label is not None
  return method.pseudo_label(
      state.server, altered(tree.take(state.memory, 0)),
      federation.train.inputs[:rows])


def whole(text: str, client: int, **changes: Any) -> Update:
  """`update` in few steps, each of `WHOLE`."""
  return update(text, client, **{**WHOLE, **changes})


def _client(state: Any, client: int, round_: int, place: str) -> Client:
  federation, _ = toy.federation(place)
  shard, memory = jax.tree.map(lambda x: np.asarray(x)[client],
                               (federation.clients, state.memory))
  return Client(jnp.int32(client), shard, memory, federation.train,
                federation.validation, jnp.int32(round_), jnp.int32(0))


def lowered(text: str, model: str = 'linear', **changes: Any) -> str:
  """The program of a client's `update`, not compiled."""
  state, run = _program(text, model, 'clients', **changes)
  return run.lower(state.server, _client(state, 0, 0, 'clients'), KEY).as_text()


def change(*args: Any, **knobs: Any) -> np.ndarray:
  """How the client's `update` changes its model, all numbers in a row."""
  message = update(*args, **knobs).message
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(message)])


def end(text: str, model: str, place: str) -> Any:
  """Where labels lead: a client, or the server whose round it is."""
  if place == 'clients':
    return update(text, model=model).message
  return averaging_test.one_round(text, model, place)[1].server.model
