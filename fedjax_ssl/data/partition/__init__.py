"""Who owns which row: partitions of a pool of examples over clients.

Every function takes a host generator, labels int[D] and the number of clients
N, and returns the owner of each row, int32[D] in [0, N), or -1 where the row
is not dealt. As each row has one owner, the parts are disjoint. `where` bool[D]
limits the pool to M rows; None is all. True labels are also read for rows that
methods will see as unlabeled: a partition describes the simulated world, which
methods do not know.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedjax_ssl.core.checks import FieldError
from fedjax_ssl.data.partition import checks
from fedjax_ssl.data.partition.dirichlet import (
    dirichlet_capped,
    dirichlet_clients,
    dirichlet_shares,
    labeled_min_size,
)
from fedjax_ssl.data.partition.file import (
    check_partition,
    load_partition,
    make_partition,
    Partition,
    partition_hash,
    save_partition,
)
from fedjax_ssl.data.partition.labeling import (
    choose_labeled,
    choose_validation,
    label_clients,
    label_mixed,
    label_within,
    shift,
    split_owner,
)
from fedjax_ssl.data.partition.pairs import dirichlet_pairs

__all__ = (
    'PARTITIONS', 'Partition', 'bimb', 'bimb_rows', 'check_partition',
    'choose_labeled', 'choose_validation', 'dirichlet_capped',
    'dirichlet_clients', 'dirichlet_pairs', 'dirichlet_shares', 'iid_count',
    'iid_random', 'label_clients', 'label_mixed', 'label_within',
    'labeled_min_size', 'load_partition', 'make_partition', 'partition_hash',
    'round_robin', 'save_partition', 'shards', 'shift', 'split_owner')

def _nobody(labels: np.ndarray) -> np.ndarray:
  return np.full(labels.shape, -1, np.int32)


def iid_count(rng: np.random.Generator, labels: np.ndarray, num_clients: int,
              *, where: np.ndarray | None = None,
              per_class: int | None = None) -> np.ndarray:
  """Gives every client the same number of rows of each class.

  The scheme of FedMatch and ProtoFSSL. What does not divide stays at -1.

  Args:
    rng: host generator.
    labels: int[D].
    num_clients: N.
    where: bool[D], the pool.
    per_class: rows of each class for each client; by default as many as there
      are, floor(n_c / N).

  Returns:
    int32[D] owners.

  Raises:
    ValueError: if no class has N rows, or some has less than per_class * N.

  References:
    Jeong et al., FedMatch, ICLR 2021, https://arxiv.org/abs/2006.12097.
  """
  checks.generator(rng)
  labels, where = checks.pool(labels, where)
  num_clients = checks.count('num_clients', num_clients)
  rows, ranks = checks.by_class(rng, labels, where)
  sizes = np.bincount(labels[rows])
  quota = sizes // num_clients
  if per_class is not None:
    wanted = checks.count('per_class', per_class)
    short = (sizes > 0) & (quota < wanted)
    if short.any():
      raise ValueError(
          f'per_class={wanted} for {num_clients} clients needs '
          f'{wanted * num_clients} examples of class {np.argmax(short)}, '
          f'there are {sizes[np.argmax(short)]}')
    quota = np.full_like(quota, wanted)
  elif rows.size and not quota.any():
    raise FieldError('num_clients', num_clients, 'more than the '
                     f'{sizes.max()} examples of the largest class')
  owner = _nobody(labels)
  client = ranks // np.maximum(quota, 1)[labels[rows]]
  dealt = ranks < (quota * num_clients)[labels[rows]]
  owner[rows[dealt]] = client[dealt]
  return owner


def iid_random(rng: np.random.Generator, labels: np.ndarray, num_clients: int,
               *, where: np.ndarray | None = None) -> np.ndarray:
  """Cuts the shuffled pool in N parts whose sizes differ by one at most.

  Class counts are only about equal; FedDure's code calls this "iid".

  Args:
    rng: host generator.
    labels: int[D]; only its length matters.
    num_clients: N; clients beyond the number of rows get none.
    where: bool[D], the pool.

  Returns:
    int32[D] owners; every row of the pool is dealt.

  References:
    Bai et al., FedDure, AAAI 2024, https://arxiv.org/abs/2307.05358, code.
  """
  checks.generator(rng)
  labels, where = checks.pool(labels, where)
  num_clients = checks.count('num_clients', num_clients)
  rows = rng.permutation(np.flatnonzero(where))
  owner = _nobody(labels)
  owner[rows] = np.arange(rows.size) * num_clients // max(rows.size, 1)
  return owner


def shards(rng: np.random.Generator, labels: np.ndarray, num_clients: int, *,
           where: np.ndarray | None = None, per_client: int = 2
           ) -> np.ndarray:
  """Cuts each class in equal shards and gives each client `per_client`.

  The scheme of SemiFL, "l-2". A client may draw the same class twice.

  Args:
    rng: host generator.
    labels: int[D].
    num_clients: N.
    where: bool[D], the pool.
    per_client: shards of a client; N * per_client must be a multiple of the
      number of classes present.

  Returns:
    int32[D] owners; every row of the pool is dealt.

  Raises:
    ValueError: if the shards do not divide among the classes, or a class has
      fewer rows than shards.

  References:
    Diao et al., SemiFL, 2022, https://arxiv.org/abs/2106.01432, code.
  """
  checks.generator(rng)
  labels, where = checks.pool(labels, where)
  num_clients = checks.count('num_clients', num_clients)
  per_client = checks.count('per_client', per_client)
  owner = _nobody(labels)
  classes, sizes = np.unique(labels[where], return_counts=True)
  if not classes.size:
    return owner
  pieces, rest = divmod(num_clients * per_client, classes.size)
  if rest:
    raise ValueError(
        f'per_client={per_client} shards of {num_clients} clients do not '
        f'divide among {classes.size} classes')
  if sizes.min() < pieces:
    raise ValueError(f'per_client={per_client} cuts each class in {pieces} '
                     f'shards, class {classes[np.argmin(sizes)]} has '
                     f'{sizes.min()} examples')
  # Slot j belongs to client j // per_client and holds a shard of class c.
  slots = rng.permutation(np.repeat(np.arange(classes.size), pieces))
  for c, label in enumerate(classes):
    rows = rng.permutation(np.flatnonzero(where & (labels == label)))
    holders = np.flatnonzero(slots == c) // per_client
    owner[rows] = holders[np.arange(rows.size) * pieces // rows.size]
  return owner


def bimb_rows(num_classes: int) -> np.ndarray:
  """Returns class mixes of client types, float64[C, C]; each row sums to 1.

  Row 0 for 10 classes is the one of FedMatch's code; row t is row 0 rolled
  right by t. For other C, our generalisation: .5 for the own class, .15 for
  its two neighbours on the circle, the rest equally (rescaled if C < 4).
  """
  if num_classes == 10:
    first = np.array([.50, .15, .03, .03, .03, .02, .03, .03, .03, .15])
  else:
    checks.count('num_classes', num_classes)
    first = np.full(num_classes, .2 / max(num_classes - 3, 1))
    first[[1 % num_classes, -1]] = .15
    first[0] = .5
  first /= first.sum()
  return np.stack([np.roll(first, t) for t in range(num_classes)])


def bimb(rng: np.random.Generator, labels: np.ndarray, num_clients: int, *,
         where: np.ndarray | None = None) -> np.ndarray:
  """Deals as FedMatch's imbalanced batch: one class dominates each client.

  Client k draws floor(M / N) class ids from row k mod C of `bimb_rows` and
  takes the next unused rows of each class. A client that finds a class
  exhausted gets fewer rows, as in the authors' code; those left over stay at
  -1.

  Args:
    rng: host generator.
    labels: int[D] in [0, C), C the largest label plus one.
    num_clients: N.
    where: bool[D], the pool.

  Returns:
    int32[D] owners.

  References:
    Jeong et al., FedMatch, ICLR 2021, https://arxiv.org/abs/2006.12097.
  """
  checks.generator(rng)
  labels, where = checks.pool(labels, where)
  num_clients = checks.count('num_clients', num_clients)
  num_classes = int(labels.max(initial=0)) + 1
  mixes = bimb_rows(num_classes)[np.arange(num_clients) % num_classes]
  wanted = rng.multinomial(int(where.sum()) // num_clients, mixes)
  rows, ranks = checks.by_class(rng, labels, where)
  owner = _nobody(labels)
  for c, ends in enumerate(np.cumsum(wanted, axis=0).T):
    mine = (labels[rows] == c) & (ranks < ends[-1])
    owner[rows[mine]] = np.searchsorted(ends, ranks[mine], 'right')
  return owner


def round_robin(rng: np.random.Generator, labels: np.ndarray,
                num_clients: int, *, where: np.ndarray | None = None
                ) -> np.ndarray:
  """Deals whole classes: class c goes to client c mod N (FedSSL's non-IID).

  Args:
    rng: not used; the partition is fixed.
    labels: int[D] in [0, C), C the largest label plus one.
    num_clients: N.
    where: bool[D], the pool.

  Returns:
    int32[D] owners; every row of the pool is dealt.

  Raises:
    ValueError: if N > C, which would leave clients without a class.

  References:
    Fan et al., FedSSL, IJCAI 2022.
  """
  del rng
  labels, where = checks.pool(labels, where)
  num_clients = checks.count('num_clients', num_clients)
  num_classes = int(labels.max()) + 1 if labels.size else 0
  if num_clients > num_classes:
    raise FieldError('num_clients', num_clients, 'more than the '
                     f'{num_classes} classes that round_robin deals')
  owner = _nobody(labels)
  owner[where] = labels[where].astype(np.int64) % num_clients
  return owner


PARTITIONS: dict[str, Callable[..., np.ndarray]] = {
    'bimb': bimb,
    'dirichlet_capped': dirichlet_capped,
    'dirichlet_clients': dirichlet_clients,
    'dirichlet_pairs': dirichlet_pairs,
    'dirichlet_shares': dirichlet_shares,
    'iid_count': iid_count,
    'iid_random': iid_random,
    'round_robin': round_robin,
    'shards': shards,
}
