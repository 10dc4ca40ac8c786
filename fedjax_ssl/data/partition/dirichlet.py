"""Partitions by Dirichlet shares: class by class, or client by client."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedjax_ssl.core.checks import FieldError
from fedjax_ssl.data.partition import checks

# With a larger alpha shares are equal to six digits, and draws may overflow.
_NEAR_IID = 1e12

# Gamma variates that repeated draws may take, about a second of time; and the
# least and the largest number of draws.
_DRAW_BUDGET = 10_000_000
_MIN_DRAWS = 10
_MAX_DRAWS = 2_000


def labeled_min_size(num_labeled: int, num_clients: int) -> int:
  """Returns the least size to ask of labeled parts: min(10, mean / 5), or 0.

  The 10 of unlabeled parts cannot be met when labels are scarce, such as 100
  labels on 20 clients. Clients without labels are allowed.
  """
  return min(10, num_labeled // (5 * num_clients))


class _Pool(NamedTuple):
  """The arguments of a partition, checked, and the classes of its rows."""

  where: np.ndarray  # bool[D]
  classes: np.ndarray  # int[M], the class of each row of the pool, from 0.
  sizes: np.ndarray  # int[C], rows of each class.
  num_clients: int
  alpha: float


def _checked(labels: np.ndarray, num_clients: int, alpha: float,
             where: np.ndarray | None) -> _Pool:
  labels, where = checks.pool(labels, where)
  num_clients = checks.count('num_clients', num_clients)
  alpha = min(checks.positive('alpha', alpha), _NEAR_IID)
  _, classes, sizes = np.unique(
      labels[where], return_inverse=True, return_counts=True)
  return _Pool(where, classes, sizes, num_clients, alpha)


def _dirichlet(rng: np.random.Generator, concentration: np.ndarray,
               allowed: np.ndarray | None = None) -> np.ndarray:
  """float64[num] shares, 0 outside `allowed`, summing to 1.

  For tiny alpha all shares may underflow, or only parts that are not allowed
  may get any. Then one part takes all, as in the limit of alpha to 0.
  """
  with np.errstate(all='ignore'):
    shares = rng.dirichlet(concentration)
    if allowed is not None:
      shares = np.where(allowed, shares, 0.0)
      shares = shares / shares.sum()
    # Shares are not negative: the sum says whether one is no number.
    if 0 < shares.sum() < np.inf:
      return shares
  shares = np.zeros(shares.size)
  shares[rng.choice(shares.size, p=concentration / concentration.sum())
         if allowed is None else rng.choice(np.flatnonzero(allowed))] = 1.0
  return shares


def _mixes(rng: np.random.Generator, concentration: np.ndarray, num: int
           ) -> np.ndarray:
  """As many draws of `_dirichlet` one after another, float64[num, C]."""
  begin = rng.bit_generator.state
  with np.errstate(all='ignore'):
    mixes = rng.dirichlet(concentration, num)
    totals = mixes.sum(1)
  if ((totals > 0) & np.isfinite(totals)).all():
    return mixes
  rng.bit_generator.state = begin
  return np.stack([_dirichlet(rng, concentration) for _ in range(num)])


def _capped_bounds(rng: np.random.Generator, class_sizes: np.ndarray,
                   num_clients: int, alpha: float) -> np.ndarray:
  """One draw: int64[C, N], client k's part of class c ends at bounds[c, k]."""
  bounds = np.zeros((class_sizes.size, num_clients), np.int64)
  cap = class_sizes.sum() / num_clients
  sizes = np.zeros(num_clients, np.int64)
  equal = np.full(num_clients, alpha)
  for c in range(class_sizes.size):
    # While rows are left some client is below the mean, so one is allowed.
    ends = np.cumsum(_dirichlet(rng, equal, sizes < cap))
    # The last end may be rounded to less than 1. Divided by it, it deals every
    # row, and none to a last client that is full.
    bounds[c] = np.floor(ends / ends[-1] * class_sizes[c])
    sizes += np.diff(bounds[c], prepend=0)
  return bounds


def dirichlet_capped(rng: np.random.Generator, labels: np.ndarray,
                     num_clients: int, *, alpha: float = 0.5,
                     where: np.ndarray | None = None, min_size: int = 10
                     ) -> np.ndarray:
  r"""Deals each class by Dirichlet shares; full clients get no more of it.

  For each class c in turn, :math:`p \sim Dir(\alpha 1_N)`, :math:`p_k = 0` for
  clients that already hold the mean number of rows, p renormalised, and the
  shuffled rows of c are cut at :math:`\lfloor n_c \sum_{j \le k} p_j \rfloor`.
  The draw is repeated until every client has `min_size` rows. This is the
  scheme of NIID-Bench that RSCFed, FedDure and SemiFL use.

  Args:
    rng: host generator.
    labels: int[D].
    num_clients: N.
    alpha: concentration; towards 0 a class goes to one client at a time,
      large is near IID.
    where: bool[D], the pool.
    min_size: least number of rows a client gets; 0 accepts the first draw.
      For labeled pools the experiments ask a fifth of the mean, if that is
      less.

  Returns:
    int32[D] owners; every row of the pool is dealt.

  Raises:
    ValueError: if none of a bounded number of draws gives every client
      `min_size`, or an argument is out of range.

  References:
    Li et al., Federated learning on non-IID data silos, ICDE 2022,
    https://arxiv.org/abs/2102.02079.
  """
  checks.generator(rng)
  pool = _checked(labels, num_clients, alpha, where)
  num_clients, alpha = pool.num_clients, pool.alpha
  min_size = checks.count('min_size', min_size, 0)
  total = pool.classes.size
  message = (f'alpha={alpha:g} gave each of {num_clients} clients {min_size} '
             f'of {total} examples: lower min_size or num_clients, or raise '
             'alpha')
  if total < num_clients * min_size:
    raise ValueError(f'no draw could have with {message}')
  draws = int(np.clip(_DRAW_BUDGET // (num_clients * max(pool.sizes.size, 1)),
                      _MIN_DRAWS, _MAX_DRAWS))
  for _ in range(draws):
    bounds = _capped_bounds(rng, pool.sizes, num_clients, alpha)
    sizes = np.diff(bounds, axis=1, prepend=0).sum(0)
    if sizes.min() >= min_size:
      break
  else:
    raise ValueError(f'none of {draws} draws with {message}')
  return _cut(rng, pool, bounds)


def dirichlet_clients(rng: np.random.Generator, labels: np.ndarray,
                      num_clients: int, *, alpha: float = 0.5,
                      where: np.ndarray | None = None) -> np.ndarray:
  r"""Deals equal parts whose class mixes are drawn client by client.

  Client k draws a mix :math:`q_k \sim Dir(\alpha p)`, p the class shares of
  the pool, and takes floor(M / N) rows, each of a class drawn from q_k. When a
  class has run out, draws that fell on it are repeated from the rest of q_k, or
  from all rows left if nothing of q_k is. So the last clients get the mixes
  that the earlier ones leave over. What does not divide stays at -1.

  Args:
    rng: host generator.
    labels: int[D].
    num_clients: N.
    alpha: concentration in total, alpha / C for each of C equal classes (codes
      that draw Dir(alpha 1) have C times as much); towards 0 a client has one
      class, large is near IID.
    where: bool[D], the pool.

  Returns:
    int32[D] owners.

  Raises:
    ValueError: if the pool has fewer than N rows, or alpha is out of range.

  References:
    Hsu et al., 2019, https://arxiv.org/abs/1909.06335.
  """
  checks.generator(rng)
  pool = _checked(labels, num_clients, alpha, where)
  size, left = pool.classes.size // pool.num_clients, pool.sizes
  if not size:
    raise FieldError('num_clients', num_clients, 'more than the '
                     f'{pool.classes.size} examples to deal')
  concentration = pool.alpha * left / left.sum()
  taken = np.zeros((pool.num_clients, left.size), np.int64)
  for mine in taken:
    mix, missing = _dirichlet(rng, concentration), size
    while missing:
      shares = np.where(left > 0, mix, 0.0)
      if (total := shares.sum()) <= 0:
        shares = left.astype(float)
        total = shares.sum()
      got = np.minimum(rng.multinomial(missing, shares / total), left)
      mine += got
      left = left - got
      missing -= int(got.sum())
  return _cut(rng, pool, np.cumsum(taken, axis=0).T)


def dirichlet_shares(rng: np.random.Generator, labels: np.ndarray,
                     num_clients: int, *, alpha: float = 0.5,
                     where: np.ndarray | None = None) -> np.ndarray:
  r"""Cuts each class by the shares that clients' class mixes have in it.

  Client k draws a mix :math:`q_k \sim Dir(\alpha 1_C)`, and the rows of class c
  are cut in proportion to :math:`q_{kc} / \sum_j q_{jc}`: every row is dealt,
  and clients differ in size. The scheme of FedLabel's code.

  Args:
    rng: host generator.
    labels: int[D].
    num_clients: N.
    alpha: concentration for each class; towards 0 a client has one class, or
      none where more clients want a class than there are; large is near IID.
    where: bool[D], the pool.

  Returns:
    int32[D] owners; a client may get no rows.

  Raises:
    ValueError: if an argument is out of range.

  References:
    microsoft/msrflute, experiments/semisupervision.
  """
  checks.generator(rng)
  pool = _checked(labels, num_clients, alpha, where)
  number = pool.sizes.size
  bounds = np.zeros((number, pool.num_clients), np.int64)
  if number:
    mixes = _mixes(rng, np.full(number, pool.alpha), pool.num_clients)
    # A class that no client drew is shared equally.
    mixes[:, mixes.sum(0) <= 0] = 1
    ends = np.cumsum(mixes, axis=0)
    bounds = np.floor(ends / ends[-1] * pool.sizes).astype(np.int64).T
  return _cut(rng, pool, bounds)


def _cut(rng: np.random.Generator, pool: _Pool, bounds: np.ndarray
         ) -> np.ndarray:
  """int32[D] owners: client k's part of class c ends at bounds[c, k].

  Args:
    rng: shuffles the rows of a class.
    pool: whose rows.
    bounds: int[C, N]; rows from bounds[c, -1] on stay at -1.
  """
  local = np.zeros(pool.where.shape, np.int64)
  local[pool.where] = pool.classes
  rows, ranks = checks.by_class(rng, local, pool.where)
  owner = np.full(pool.where.shape, -1, np.int32)
  for c, ends in enumerate(bounds):
    mine = (local[rows] == c) & (ranks < ends[-1])
    owner[rows[mine]] = np.searchsorted(ends, ranks[mine], 'right')
  return owner
