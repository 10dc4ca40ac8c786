"""How long a device's clients keep it busy, for each way to run them together.

Under a vmap a chunk of clients lasts as long as its longest; in lanes clients
follow each other. What waits is counted as if it worked.
"""
from __future__ import annotations

from collections.abc import Callable, Collection
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import data
from fedjax_ssl.core import client_map
from fedjax_ssl.core.types import Shard, Task
from fedjax_ssl.data import batching

# (a value of `client_map`, clients at once) -> local steps that a device does
# in a round for all its clients, those of clients that wait included.
Steps = Callable[[str, int], float]
# Rounds that are drawn.
_DRAWS = 32


def equal(clients: int) -> Steps:
  """Counts the steps of clients that take one each, in whichever way."""
  return lambda way, size: -(-clients // size) * size


def drawn(task: Task, deals: Collection[data.Partition], num_clients: int,
          clients: int) -> Steps:
  """Counts the mean steps of some rounds, by the rows that clients hold.

  A step is counted as for losses that use rows of both kinds.

  Args:
    task: batch sizes, and epochs or steps.
    deals: partitions; an equal number of rounds is drawn from each.
    num_clients: of the federation.
    clients: that a device has in a round.
  """
  rng, rounds = np.random.default_rng(0), []
  for deal in deals:
    steps = np.asarray(batching.num_steps(task, sizes(deal, num_clients)))
    for _ in range(-(-_DRAWS // len(deals))):
      rounds.append(rng.choice(steps, clients, replace=False))
  # Slots are sorted, the longest first.
  cohorts = jnp.asarray(-np.sort(-np.stack(rounds)), jnp.float32)

  @functools.cache
  def counted(way: str, size: int) -> float:
    whole = way == 'vmap' and size >= clients
    plan = client_map.plan(dataclasses.replace(
        task, client_map=way, mesh=None,
        chunk_size=0 if whole or way == 'map' else size), clients)
    return float(jax.vmap(plan.processed)(cohorts).mean())

  return counted


def sizes(deal: data.Partition, num_clients: int) -> Shard:
  """Returns the numbers of rows of each client, int[N], and no rows."""
  def held(owner: np.ndarray) -> np.ndarray:
    owner = owner[(owner >= 0) & (owner < num_clients)]
    return np.bincount(owner, minlength=num_clients)
  nobody = np.zeros((num_clients, 0), np.int32)
  return Shard(nobody, held(deal.labeled), nobody, held(deal.unlabeled))
