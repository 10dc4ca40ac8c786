"""Rounds whose state holds the memory of some clients, not of all.

A round gathers the memory of those that take part and scatters it back. So it
needs no other rows. `readers` tells beforehand whose they are, refuses rounds
that change those of others too, and `Federation.held` says whose rows a state's
memory has.
"""
from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval
import jax.numpy as jnp

from fedjax_ssl.core import tree
from fedjax_ssl.core.common_expressions import CALLS
from fedjax_ssl.core.types import (
  Cohort,
  Federation,
  Method,
  Metrics,
  PyTree,
  Ratio,
  State,
)

_METRIC = 'clients_read'


@jax.tree_util.register_static
class _Asked:
  """Marks a federation whose passes report which clients' memory they read.

  It stands in `Federation.held`. No two are equal, so JAX never takes a trace
  that was made with another.
  """

  def __init__(self) -> None:
    self.slots: list[int] = []  # Of each pass.


class DependsOnMemoryError(ValueError):
  """A round needs the memory of clients that nobody can name beforehand."""


def places(federation: Federation, ids: jax.Array) -> jax.Array:
  """Computes where the rows of clients are in a state's memory.

  Args:
    federation: says whose rows there are.
    ids: int32[S], N for nobody.

  Returns:
    int32[S]; a place beyond the end for a client whose row is not there.
  """
  held = _held(federation)
  if held is None:
    return ids
  found = jnp.minimum(jnp.searchsorted(held, ids), held.shape[0] - 1)
  here = (jnp.take(held, found) == ids) & (ids < federation.num_clients)
  return jnp.where(here, found, held.shape[0]).astype(jnp.int32)


def _held(federation: Federation) -> jax.Array | None:
  """Whose rows a state's memory has; None where it has all."""
  held = federation.held
  return None if isinstance(held, _Asked) else held


def told(before: PyTree, after: PyTree, cohort: Cohort, federation: Federation
         ) -> tuple[PyTree, Metrics]:
  """Returns a pass's memory, and what it tells `readers` of its cohort.

  For these the memory stays as it was, so that they see what else changes it.
  """
  asked = federation.held
  if not isinstance(asked, _Asked) or not jax.tree.leaves(before):
    return after, {}
  asked.slots.append(cohort.ids.size)
  reads = jnp.zeros(federation.num_clients, bool).at[
      cohort.ids.reshape(-1)].max(cohort.active.reshape(-1), mode='drop')
  count = reads.astype(jnp.float32)
  return before, {_METRIC: Ratio(count, count)}  # Several passes add theirs.


def readers(method: Method, state: State, federation: Federation,
            key: jax.Array) -> tuple[Callable[..., jax.Array], int]:
  """Makes the function that tells whose memory a round reads.

  The round is traced, and only what decides this is kept of it.

  Args:
    method: any.
    state: with the memory of all clients; only its shapes are used.
    federation: with all clients.
    key: of the kind that rounds get.

  Returns:
    (server, federation, round, key) -> bool[N], to be jitted, and how many
    clients a round reads at most.

  Raises:
    DependsOnMemoryError: if who takes part depends on what clients keep, or
      a round changes it outside of their training.
  """
  memory = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.memory)

  def one(memory: PyTree, server: PyTree, federation: Federation,
          round_: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
    federation = dataclasses.replace(federation, held=asked)
    state, metrics = method.round(
        State(server, memory, round_), federation.at(round_), round_, key)
    nobody = jnp.zeros(federation.num_clients)
    return (metrics.get(_METRIC, Ratio(nobody, nobody)).total > 0,
            *jax.tree.leaves(state.memory))

  asked = _Asked()
  given = (memory, state.server, federation, jnp.int32(0), key)
  closed = jax.make_jaxpr(one)(*given)
  size = len(jax.tree.leaves(memory))
  _, *after = closed.jaxpr.outvars
  if any(_origin(closed.jaxpr, new) is not old for new, old in zip(
      after, closed.jaxpr.invars[:size], strict=True)):
    raise DependsOnMemoryError(
        'a round changes what all clients keep, as learning rates that begin '
        'anew with each task, so all of it must be on the devices; give '
        'device.')
  jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [True, *[False] * size])
  if any(used[:size]):
    raise DependsOnMemoryError(
        'who takes part in a round depends on what clients keep, so all of it '
        'must be on the devices; give device.')
  small = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, closed.consts))

  def members(*given: Any) -> jax.Array:
    leaves = jax.tree.leaves((memory, *given))
    found: jax.Array = small(*(
        x for x, needed in zip(leaves, used, strict=True) if needed))[0]
    return found
  return members, min(sum(asked.slots), federation.num_clients)


def _origin(jaxpr: core.Jaxpr, atom: Any) -> Any:
  """Returns the variable that an atom is, through calls that hand it on."""
  for eqn in jaxpr.eqns:
    place = next((i for i, x in enumerate(eqn.outvars) if x is atom), None)
    if place is not None and eqn.primitive.name in CALLS:
      inner = eqn.params[CALLS[eqn.primitive.name]]
      inner = getattr(inner, 'jaxpr', inner)
      found = _origin(inner, inner.outvars[place])
      for given, own in zip(eqn.invars, inner.invars, strict=True):
        if found is own:
          return _origin(jaxpr, given)
  return atom


def take(memory: PyTree, federation: Federation, ids: jax.Array) -> PyTree:
  """Returns the rows of clients, bit by bit.

  Raises:
    ValueError: if the memory has no row for each client that it should hold.
  """
  held = _held(federation)
  size = federation.num_clients if held is None else held.shape[0]
  for path, leaf in jax.tree.leaves_with_path(memory):
    if leaf.shape[:1] != (size,):  # Clients past the end would share the last.
      raise ValueError(
          f'what clients keep, memory{jax.tree_util.keystr(path)}, is '
          f'{leaf.dtype}{[*leaf.shape]}; its first axis must be the clients, '
          f'{size}.')
  return tree.take_bits(memory, places(federation, ids))


def put(memory: PyTree, federation: Federation, ids: jax.Array,
        values: PyTree) -> PyTree:
  """Returns the memory with the rows of some clients replaced."""
  return tree.put(memory, places(federation, ids), values)
