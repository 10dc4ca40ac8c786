"""The partition of SAGE: Dirichlet shares inside pairs of clients."""
from __future__ import annotations

import numpy as np

from fedjax_ssl.data.partition import checks
from fedjax_ssl.data.partition.dirichlet import dirichlet_capped

_GROUP = 2


def dirichlet_pairs(rng: np.random.Generator, labels: np.ndarray,
                    num_clients: int, *, alpha: float = 0.5,
                    where: np.ndarray | None = None) -> np.ndarray:
  """Deals equal parts, whose classes are skewed inside pairs of clients only.

  The shuffled pool is cut into a chunk for each pair; there `dirichlet_capped`
  deals it to the two, each at least a quarter of the chunk. All parts, each
  sorted by class, are then put in a row and cut anew into N parts of equal
  size. So any two pairs hold nearly the same classes, which is milder than one
  Dirichlet draw over all clients with the same alpha.

  Args:
    rng: host generator.
    labels: int[D].
    num_clients: N; if odd, the last client is alone.
    alpha: concentration; towards 0 a class of a chunk goes to one of the two,
      large is near IID.
    where: bool[D], the pool.

  Returns:
    int32[D] owners; every row of the pool is dealt, and sizes differ by one at
    most.

  Raises:
    ValueError: if an argument is out of range, or no draw gives both clients of
      a pair enough.

  References:
    Liu et al., SAGE, CVPR 2025, arXiv 2503.13227; the partition of its code.
  """
  checks.generator(rng)
  labels, where = checks.pool(labels, where)
  num_clients = checks.count('num_clients', num_clients)
  checks.positive('alpha', alpha)
  rows = rng.permutation(np.flatnonzero(where))
  groups = [min(_GROUP, num_clients - first)
            for first in range(0, num_clients, _GROUP)]
  ends = np.cumsum(groups)[:-1] * len(rows) // num_clients
  order = []
  for chunk, members in zip(np.split(rows, ends), groups, strict=True):
    places = np.argsort(chunk)  # Dealt in the order of the data set.
    owner = np.empty(len(chunk), np.int32)
    owner[places] = dirichlet_capped(
        rng, labels[chunk[places]], members, alpha=alpha,
        min_size=len(chunk) // (2 * members))
    order.append(chunk[np.lexsort((labels[chunk], owner))])
  out = np.full(labels.shape, -1, np.int32)
  for client, part in enumerate(np.array_split(
      np.concatenate(order), num_clients)):
    out[part] = client
  return out
