"""Rounds and evaluations of seeds whose clients' memory is not on the devices.

See `client_rows` for where it is, and `core.partial_memory` for a round that
has some clients' rows. A call of the compiled loop is one round.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from fedjax_ssl.core import partial_memory
from fedjax_ssl.core.types import Federation, Method, Metrics, PyTree, State
from fedjax_ssl.training import client_rows, evaluate, runner, sharding


def runs(method: Method, federations: Sequence[Federation],
         seeds: Sequence[int], mesh: Mesh | None, place: client_rows.Place, *,
         kind: type[runner.Sequential] = runner.Sequential,
         reads_only: bool = False) -> runner.Sequential:
  """Returns what runs the rounds of seeds.

  Args:
    method: any.
    federations: of each seed.
    seeds: integers.
    mesh: devices, or None.
    place: where the clients' memory is.
    kind: what does it where all of it is on the devices, or there is none.
    reads_only: no round will be run.
  """
  if place.kind == 'device' or not jax.tree.leaves(
      runner.state_shape(method, federations[0]).memory):
    return kind(method, federations, seeds, mesh)
  return Offloaded(method, federations, seeds, mesh, place, reads_only)


def finished(place: client_rows.Place, shapes: State,
             saved: Mapping[int, State]) -> dict[int, State]:
  """Returns the states that a checkpoint holds, by seed, to look at.

  Args:
    place: where the clients' memory is.
    shapes: of a state.
    saved: by seed what was restored.

  Returns:
    Arrays on a device; but rows that are not kept there stay where they are.
  """
  def one(seed: int, state: State) -> State:
    if place.kind == 'device' or not jax.tree.leaves(shapes.memory):
      return jax.tree.map(jnp.asarray, state)
    memory = state.memory if place.kind == 'host' else place.opened(
        seed, shapes.memory, state.memory, reads_only=True).memory
    rest = jax.tree.map(jnp.asarray, state._replace(memory=()))
    return rest._replace(memory=memory)
  return {seed: one(seed, state) for seed, state in saved.items()}


class Offloaded(runner.Sequential):
  """Several seeds, one after another, with rows away from the devices.

  Attributes:
    stores: of each seed, what its clients keep.
  """

  def __init__(self, method: Method, federations: Sequence[Federation],
               seeds: Sequence[int], mesh: Mesh | None,
               place: client_rows.Place, reads_only: bool = False):
    """Takes the arguments of `runs`."""
    self._where, self._reads_only = place, reads_only
    self.stores: list[client_rows.Rows] = []
    self._reads = 1  # Clients whose rows are on the devices at a time.
    self._host: PyTree = None  # Room for them.
    self._last: PyTree = None  # Those of the last round, on the devices.
    super().__init__(method, federations, seeds, mesh)

  def _place(self) -> None:
    super()._place()
    made = self._evaluation = evaluate.Evaluation(self._method, self._mesh)
    self._of_all = jax.jit(
        made.of_all, static_argnums=2,
        out_shardings=sharding.replicated(self._mesh))
    self._of_probe, self._of_whole = self._jitted(made.of_probe, made.whole)

  def start(self, saved: PyTree | None) -> None:
    """Starts as `Sequential.start` does; the rows stay away."""
    self._states, self._totals, self.stores = [], [], []
    for i, seed in enumerate(self._seeds):
      state, totals = self._first(i, saved)
      memory = (state.memory if saved is None else
                runner.state_shape(self._method, self._given[i]).memory)
      rows = self._where.opened(
          seed, memory, None if saved is None else state.memory,
          reads_only=self._reads_only)
      state = sharding.state(state._replace(memory=()), self._mesh)
      if not self.stores:
        self._find_members(state._replace(memory=memory))
        self._host = client_rows.empty(memory, self._reads)
      self.stores.append(rows)
      nobody = np.zeros(0, np.int32)
      first, federation = self._brought(i, state, nobody)
      if totals is None:
        totals = self._zeros(i, federation, first)
      self._states.append(state._replace(memory=rows.memory))
      self._totals.append(sharding.whole(totals, self._mesh))
    self._compile(first, self._totals[0])

  def _find_members(self, state: State) -> None:
    """Makes what tells whose rows a round needs."""
    members, reads = partial_memory.readers(
        self._method, state, self._federations[0], self._roots[0][1])
    self._reads = max(reads, 1)
    self._members = jax.jit(
        lambda server, federation, round_, root: members(
            server, federation, round_, jax.random.fold_in(root, round_)),
        out_shardings=sharding.replicated(self._mesh))

  def advance(self, first: int, count: int) -> None:
    """Runs rounds [first, first + count) of every seed."""
    for i, (_, root) in enumerate(self._roots):
      for round_ in range(first, first + count):
        server = self._states[i].server
        reads = self._members(
            server, self._federations[i], jnp.int32(round_), root)
        ids = np.flatnonzero(np.asarray(reads)).astype(np.int32)
        state, federation = self._brought(i, self._states[i], ids)
        state, self._totals[i] = self._run(
            state, self._totals[i], federation, jnp.int32(round_),
            jnp.int32(1), root)
        self.stores[i].put(ids, _first(state.memory, len(ids)))
        self._last = state.memory
        self._states[i] = state._replace(memory=self.stores[i].memory)

  def _brought(self, i: int, state: State, ids: np.ndarray
               ) -> tuple[State, Federation]:
    """State and federation of a round that reads the rows of some clients."""
    federation = self._federations[i]
    whose = np.full(self._reads, federation.num_clients, np.int32)
    whose[:len(ids)] = ids
    memory = self._at_hand(i, ids, sharding.by_client)
    return (state._replace(memory=memory), dataclasses.replace(
        federation, held=sharding.whole(whose, self._mesh)))

  def _at_hand(self, i: int, ids: np.ndarray,
               put: Callable[[PyTree, Mesh | None], PyTree]) -> PyTree:
    """Rows of clients on the devices, filled up to as many as a round reads.

    They go to the memory that the last ones had: new memory takes longer than
    all else here.
    """
    memory, last = self.stores[i].take(ids, out=self._host), self._last
    self._last = None
    return put(memory, self._mesh) if (
        last is None or self._mesh is not None) else _instead(last, memory)

  def _scores(self, i: int) -> Metrics:
    """Evaluates a seed; its clients' rows come in chunks."""
    server, federation = self._states[i].server, self._federations[i]
    probe, made, size = self._probes[i], self._evaluation, self._reads
    total = federation.num_clients
    of_all, judged = [], []

    def scored(ids: np.ndarray, score: Callable[[PyTree], Any]) -> Any:
      memory = self._at_hand(i, ids, sharding.whole)
      found = jax.device_get(score(memory))
      self._last = memory
      return found

    if made.reads_all:
      of_all = [scored(ids, lambda memory: self._of_all(
          server, memory, size, federation.test))
                for ids in client_rows.chunks(total, size)]
    asked = len(probe.clients)
    if made.reads_probe and asked:
      parts = [probe.of_clients(some)
               for some in client_rows.chunks(asked, size)]
      judged = [scored(part.clients, functools.partial(
          self._judged, server, federation, part)) for part in parts]
    own, largest = _joined([own for own, _ in of_all], total), ()
    if made.reads_all and jax.tree.leaves(of_all[0][1]):
      largest = np.max([largest for _, largest in of_all])
    metrics: Metrics = self._of_whole(
        server, federation, probe, evaluate.OfClients(
            own or {}, _joined(judged, asked) or (), largest),
        self._states[i].round)
    return metrics

  def _judged(self, server: PyTree, federation: Federation,
              part: evaluate.Probe, memory: PyTree) -> Any:
    return self._of_probe(server, memory, jnp.arange(len(part.clients)),
                          federation.train, part)

  def snapshot(self) -> PyTree:
    """Returns what a checkpoint holds; see `runner.checkpoint_template`."""
    saved = super().snapshot()
    for seed, rows in zip(self._seeds, self.stores, strict=True):
      one = saved[str(seed)]
      one['state'] = one['state']._replace(memory=rows.snapshot())
    return saved

  def kept(self) -> None:
    """Hears that the newest snapshot is written."""
    for rows in self.stores:
      rows.kept()


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _instead(old: PyTree, new: PyTree) -> PyTree:
  """Copies `new` to the place of `old`."""
  del old
  return jax.lax.optimization_barrier(new)


def _first(memory: PyTree, count: int) -> PyTree:
  """So many rows, on the host."""
  return jax.tree.map(lambda x: np.asarray(x)[:count], memory)


def _joined(parts: Sequence[PyTree], count: int) -> PyTree:
  """Returns the first `count` rows of chunks; None without any."""
  return jax.tree.map(lambda *x: np.concatenate(x)[:count], *parts
                      ) if parts else None

