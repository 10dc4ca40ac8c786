"""Where arrays live: on one device, or on a mesh that may span processes.

Nothing is sent: every process holds the same values on the host, and puts on
its own devices the parts that belong there.
"""
from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from fedjax_ssl.core.types import Federation, PyTree, State


def replicated(mesh: Mesh | None) -> NamedSharding | None:
  """Returns the sharding of a copy on each device; None without a mesh."""
  return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
  host = np.asarray(x)
  return jax.make_array_from_callback(
      host.shape, sharding, lambda index: host[index])


def whole(x: PyTree, mesh: Mesh | None) -> PyTree:
  """Puts a tree on every device of the mesh."""
  everywhere = replicated(mesh)
  if everywhere is None:
    return jax.tree.map(jax.numpy.asarray, x)
  return jax.tree.map(lambda leaf: _put(leaf, everywhere), x)


def by_client(x: PyTree, mesh: Mesh | None, axis: int = 0) -> PyTree:
  """Splits a tree over the devices along its axis of clients.

  Args:
    x: leaves with N clients along `axis`.
    mesh: with the one axis 'clients', or None.
    axis: behind those of seeds and of a stream's tasks, if any.

  Returns:
    The tree on the devices, N / devices clients each; a whole copy on each
    where N does not divide.
  """
  if mesh is None:
    return jax.tree.map(jax.numpy.asarray, x)
  name, size = mesh.axis_names[0], mesh.size

  def one(leaf):
    divides = np.shape(leaf)[axis] % size == 0
    spec = PartitionSpec(*[None] * axis, name) if divides else PartitionSpec()
    return _put(leaf, NamedSharding(mesh, spec))
  return jax.tree.map(one, x)


def _owned(value: State, seen: set[int]) -> State:
  """Copies what is somebody else's too; see `state`.

  A method may hold an array of the record that its `init` returns, and give it
  to each seed. What clients keep may be large: of that an array is copied only
  if it occurs again.
  """
  def one(x):
    if id(x) not in seen:
      seen.add(id(x))
      return x
    return x.copy()

  server, round_ = jax.tree.map(
      lambda x: x.copy() if isinstance(x, jax.Array) else x,
      (value.server, value.round))
  return State(server, jax.tree.map(one, value.memory), round_)


def state(value: State, mesh: Mesh | None, axis: int = 0,
          seen: set[int] | None = None) -> State:
  """Puts a state on the devices: memory by client, all else on each.

  Rounds donate its buffers, each of which can be donated only once. So no two
  leaves share one, nor leaves of several seeds, nor a leaf of the server's
  record and the method. On a mesh all arrays are new; a CPU may share their
  memory with others, and then does not give it away.

  Args:
    value: the state.
    mesh: with the one axis 'clients', or None.
    axis: that of the clients in the memory.
    seen: ids of the memory's arrays of other seeds; gets those of this one.
  """
  if mesh is None:
    value = _owned(value, set() if seen is None else seen)
  return State(whole(value.server, mesh), by_client(value.memory, mesh, axis),
               whole(value.round, mesh))


def federations(values: Sequence[Federation], mesh: Mesh | None, axis: int = 0
                ) -> list[Federation]:
  """Puts federations on the devices, arrays that they share once.

  Args:
    values: arrays on the host.
    mesh: with the one axis 'clients', or None.
    axis: that of the clients in the tables of rows.

  Returns:
    The federations: tables of rows by client, all else on each device.
  """
  known: dict[int, Any] = {}

  def one(x):
    if id(x) not in known:
      known[id(x)] = whole(x, mesh)
    return known[id(x)]

  def place(f: Federation) -> Federation:
    nothing: Any = ()
    rest = dataclasses.replace(f, clients=nothing, stream=None)
    return dataclasses.replace(
        jax.tree.map(one, rest), clients=by_client(f.clients, mesh, axis),
        stream=by_client(f.stream, mesh, axis + 1))
  return [place(f) for f in values]
