"""How the slots of a cohort are laid over chunks, time and devices.

Slots are sorted, the longest first, and cut into blocks of `block` consecutive
slots. Block j goes to device j % devices, so that every device gets its share
of long and short clients. In one tick a device works on `per_tick` blocks,
client by client or under one vmap.

A linear rule's sums are taken in slot order inside a block, then block by
block, so memory for them does not grow with the cohort. If the order of
aggregation is 'fixed', numbers are added in the same order whatever the number
of devices: block j goes into sum j % 8, and the eight sums are added at the
end. 1, 2, 4 or 8 devices have whole sums of their own, and exchange them once a
round. Other numbers exchange their blocks after each tick. If the order is
'fast', each device has one sum of its own blocks, and one sum over the devices
follows.

In lanes, blocks are single slots, and a device takes its clients one after
another into as many lanes as a chunk has. A linear rule's sums are then taken
as clients finish, in an order that depends on the number of devices. If all
numbers of devices must give the same bits, the messages are kept instead and
added in that order.
"""
from __future__ import annotations

from collections.abc import Callable
import functools
import math
import operator
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from fedjax_ssl.core import lanes as lanes_lib
from fedjax_ssl.core import tree
from fedjax_ssl.core.types import PyTree, Task

AXIS = 'clients'
# One vmap over a device's whole share is cut into about this many blocks, so
# that up to this many devices make the same sums.
_BLOCKS = 16
# Sums of a fixed order. More of them would let more devices have their own, and
# would take more memory: each is as large as a message.
_SUMS = 8


class Plan(NamedTuple):
  """Sizes of the layout; `run` does the work."""

  size: int  # S, slots of a group.
  block: int  # Slots of a block.
  per_tick: int  # Blocks of a device in a tick.
  ticks: int  # Of a group.
  devices: int
  vmapped: bool
  fixed: bool
  mesh: Mesh | None
  lanes: int = 0  # Of a device; 0 is none.

  def arrange(self, slots: PyTree) -> PyTree:
    """Arranges [S, ...] as [devices, ticks, slots of a tick, ...].

    Repeats of the last slot pad it.
    """
    index = jnp.minimum(jnp.arange(self._padded()), self.size - 1)
    return jax.tree.map(
        lambda x: self._by_device(jnp.take(x, index, axis=0)), slots)

  def restore(self, arranged: PyTree) -> PyTree:
    """Undoes `arrange`."""
    def one(x):
      rest = x.shape[3:]
      x = x.reshape(self.devices, self.ticks, self.per_tick, self.block, *rest)
      x = jnp.moveaxis(x, 0, 2)
      return x.reshape(self._padded(), *rest)[:self.size]
    return jax.tree.map(one, arranged)

  def _padded(self) -> int:
    return self.devices * self.ticks * self.per_tick * self.block

  def processed(self, rows: jax.Array) -> jax.Array:
    """Counts the rows worked on, padding included.

    A vmap takes as long as its longest client, so the others count as much.

    Args:
      rows: float32[S] rows each client would work on alone.

    Returns:
      float32[] rows that all slots together work on.
    """
    if not self.vmapped and not self.lanes:
      return rows.sum()
    rows = jnp.pad(rows, (0, self._padded() - self.size))
    together = self._by_device(rows)
    if self.lanes:
      width = min(self.lanes, self.ticks)
      return width * jax.vmap(lambda mine: lanes_lib.longest(
          mine.reshape(-1), width))(together).sum()
    return (together.max(-1) * together.shape[-1]).sum()

  def run(self, body: Callable[..., tuple[PyTree, Any]], shared: PyTree,
          slots: Any, *, summing: bool) -> tuple[PyTree, Any]:
    """Maps `body(shared, slot) -> (message, result)` over the slots.

    Args:
      body: for one slot; `result` has the fields `weight` and `memory`.
      shared: seen by every slot.
      slots: [S, ...] with a field `active`.
      summing: whether to return the messages' weighted sum instead of them.

    Returns:
      Messages and results [S, ...] in slot order. If `summing`, instead of the
      messages a pair: their float32 sum, and empty arrays of their dtypes.
    """
    if self.lanes and self.fixed and summing:
      messages, results = self.run(body, shared, slots, summing=False)
      return self._in_order(messages, results.weight), results
    real = jnp.arange(self._padded()) < self.size
    arranged = self.arrange(slots)
    arranged = arranged._replace(
        active=arranged.active & self._by_device(real))
    mesh = self.mesh
    if mesh is None:
      sums, stacked = self._device(body, summing, shared,
                                   tree.take(arranged, 0))
      stacked = jax.tree.map(lambda x: x[None], stacked)
    else:
      def local(shared, mine):
        sums, (messages, results) = self._device(
            body, summing, shared, tree.take(mine, 0))
        everywhere = lax.all_gather(results._replace(memory=()), AXIS)
        rows = jax.tree.map(lambda x: x[None], (messages, results.memory))
        return sums, everywhere, rows
      everyone, split = PartitionSpec(), PartitionSpec(AXIS)
      sums, results, (messages, memory) = jax.shard_map(
          local, mesh=mesh, in_specs=(everyone, split),
          out_specs=(everyone, everyone, split), check_vma=False,
      )(shared, arranged)
      # Replicated, so that a rule's reductions are not split over devices.
      messages = jax.tree.map(
          lambda x: lax.with_sharding_constraint(
              x, jax.sharding.NamedSharding(mesh, everyone)), messages)
      stacked = (messages, results._replace(memory=memory))
    messages, results = self.restore(stacked)
    return (sums if summing else messages), results

  def _by_device(self, x: jax.Array) -> jax.Array:
    """Splits the first axis, padded: [devices, ticks, slots of a tick, ...]."""
    rest = x.shape[1:]
    x = x.reshape(self.ticks, self.per_tick, self.devices, self.block, *rest)
    return jnp.moveaxis(x, 2, 0).reshape(
        self.devices, self.ticks, self.per_tick * self.block, *rest)

  def _in_lanes(self, body, summing, shared, slots):
    """One device's clients in lanes: slots [ticks, 1, ...]."""
    slots = jax.tree.map(lambda x: x[:, 0], slots)
    one = lanes_lib.cut(body, shared, tree.take(slots, 0))
    message, result = jax.eval_shape(body, shared, tree.take(slots, 0))
    def empty(x):
      return jnp.zeros((self.ticks, *x.shape), x.dtype)

    def take(out, made, place):
      total, rows = out
      message, result = made
      if summing:
        alone = self._replace(per_tick=1, block=1)
        total = alone._add(total, jax.tree.map(lambda x: x[None], message),
                           result.weight[None], 0)
        message = ()
      return total, jax.tree.map(
          lambda all_, new: all_.at[place].set(new), rows, (message, result))

    total, rows = lanes_lib.run(one, slots, self.lanes, take, (
        self._zeros(message) if summing else (),
        jax.tree.map(empty, (() if summing else message, result))))
    return total, message, jax.tree.map(lambda x: x[:, None], rows)

  def _device(self, body, summing, shared, slots):
    """One device's ticks: slots [ticks, slots of a tick, ...]."""
    if self.lanes:
      total, message, out = self._in_lanes(body, summing, shared, slots)
    else:
      total, message, out = self._in_ticks(body, summing, shared, slots)
    total = jax.tree.map(self._added_up, total)
    like = jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), message)
    return (total, like) if summing else (), out

  def _in_ticks(self, body, summing, shared, slots):
    """One device's clients, with a vmap for each tick or one by one."""
    def one(slot):
      return body(shared, slot)

    def tick(total, given):
      number, slots = given
      if self.vmapped:
        messages, results = jax.vmap(one)(slots)
      else:
        messages, results = jax.tree.map(
            lambda x: x[None], one(tree.take(slots, 0)))
      if not summing:
        return total, (messages, results)
      return self._add(total, messages, results.weight, number), ((), results)

    first = jax.tree.map(lambda x: x[0, 0], slots)
    message, _ = jax.eval_shape(one, first)
    total = self._zeros(message) if summing else ()
    if self.ticks == 1:
      total, out = tick(total, (0, tree.take(slots, 0)))
      out = jax.tree.map(lambda x: x[None], out)
    else:
      total, out = lax.scan(
          tick, total, (jnp.arange(self.ticks, dtype=jnp.int32), slots))
    return total, message, out

  def _in_order(self, messages: PyTree, weights: jax.Array) -> PyTree:
    """Sums messages [S, ...] as without lanes; returns what `run` does."""
    one = self._replace(per_tick=1, block=1, ticks=self.size, devices=1,
                        mesh=None)
    def add(i, total):
      return one._add(total, jax.tree.map(lambda x: x[i][None], messages),
                      weights[i][None], i)
    like = jax.tree.map(lambda x: x[:0], messages)
    total = lax.fori_loop(0, self.size, add, one._zeros(
        jax.tree.map(lambda x: x[0], messages)))
    return jax.tree.map(one._added_up, total), like

  @property
  def _is_apart(self) -> bool:
    """Whether each device has sums of its own, of a fixed order."""
    return self.fixed and _SUMS % self.devices == 0

  @property
  def _sums(self) -> int:
    """How many sums a device has; no more than blocks go into them."""
    if not self.fixed:
      return 1
    blocks = self.ticks * self.per_tick
    if self._is_apart:
      return min(_SUMS // self.devices, blocks)
    return min(_SUMS, blocks * self.devices)

  def _zeros(self, message: PyTree) -> PyTree:
    """Sums of nothing, float32[sums, ...]."""
    return jax.tree.map(
        lambda x: jnp.zeros((self._sums, *x.shape), jnp.float32), message)

  def _added_up(self, sums: jax.Array) -> jax.Array:
    """Adds up all devices' sums: [sums, ...] to [...]."""
    if self.mesh is not None and not self.fixed:
      return lax.psum(sums[0], AXIS)
    if self.mesh is not None and self._is_apart:
      # Sum number i of device d is number i * devices + d of all.
      sums = lax.all_gather(sums, AXIS, axis=1)
      sums = sums.reshape(-1, *sums.shape[2:])
    total = functools.reduce(operator.add, sums)
    # Whether a compiler leaves out the first 0 + x decides the sign of zeros.
    return jnp.where(total == 0, 0, total) if self.fixed else total

  def _add(self, total: PyTree, messages: PyTree, weights: jax.Array,
           number: jax.Array | int) -> PyTree:
    """Adds weighted messages [per_tick * block, ...] of tick `number`."""
    one = 1 + (weights[0] < 0).astype(jnp.int32)  # No weight is negative.

    def block_sums(x):
      x = _rounded_product(x.astype(jnp.float32), weights, one)
      x = x.reshape(self.per_tick, self.block, *x.shape[1:])
      return tree.sum_in_order(jnp.moveaxis(x, 1, 0))

    def add(total, x):
      blocks = block_sums(x)  # [per_tick, ...]
      if self.mesh is not None and self.fixed and not self._is_apart:
        blocks = lax.all_gather(blocks, AXIS, axis=1)
        blocks = blocks.reshape(-1, *blocks.shape[2:])
      count = blocks.shape[0]
      def into_its_sum(i, total):
        if self._sums == 1:
          return total + blocks[i]
        place = jnp.int32(number * count + i) % self._sums
        return lax.dynamic_update_index_in_dim(
            total, total[place] + blocks[i], place, 0)
      if count == 1:
        return into_its_sum(0, total)
      return lax.fori_loop(0, count, into_its_sum, total)

    return jax.tree.map(add, total, messages)


def _rounded_product(x: jax.Array, weights: jax.Array, one: jax.Array
                     ) -> jax.Array:
  """Rows of `x` times their weights, rounded before they are added up.

  A compiler may contract a product and the sum that follows into one
  instruction, which rounds once. Whether it can depends on how many devices
  share the work, and so would the bits. A loop whose length the compiler does
  not know keeps product and sum apart.

  Args:
    x: float32[K, ...].
    weights: float32[K].
    one: int32[], always 1, but computed so that the compiler cannot know.

  Returns:
    float32[K, ...].
  """
  w = weights.reshape(-1, *[1] * (x.ndim - 1))
  return lax.fori_loop(0, one, lambda i, _: x * w, jnp.zeros_like(x))


def plan(task: Task, size: int) -> Plan:
  """Returns the layout of `size` slots under a task's client map and mesh."""
  devices = 1 if task.mesh is None else task.mesh.shape[AXIS]
  vmapped = task.client_map == 'vmap'
  block, per_tick = 1, 1
  if vmapped and task.chunk_size:
    block = min(task.chunk_size, size)
  elif vmapped:
    block = math.ceil(size / _BLOCKS)
    per_tick = math.ceil(math.ceil(size / block) / devices)
  ticks = math.ceil(size / (block * per_tick * devices))
  lanes = task.chunk_size if task.client_map == 'lanes' else 0
  return Plan(size, block, per_tick, ticks, devices, vmapped,
              task.aggregation_order == 'fixed', task.mesh, lanes)
