"""Which rows carry a label, and which rows the server keeps to validate."""
from __future__ import annotations

import numpy as np

from fedjax_ssl.data.partition import checks


def _spread(num_rows: int, num_chosen: int) -> np.ndarray:
  """bool[num_rows] with `num_chosen` evenly spaced True, by exact integers."""
  steps = np.arange(num_rows + 1, dtype=np.int64) * num_chosen
  return np.diff(steps // max(num_rows, 1)) > 0


def _one_of(function: str, per_class: int | None, fraction: float | None
            ) -> None:
  if (per_class is None) == (fraction is None):
    raise ValueError(f'{function} needs either per_class or fraction, got '
                     f'per_class={per_class} and fraction={fraction}')


def choose_labeled(rng: np.random.Generator, labels: np.ndarray, *,
                   per_class: int | None = None, fraction: float | None = None,
                   where: np.ndarray | None = None, first: bool = False,
                   num_classes: int | None = None) -> np.ndarray:
  """Chooses the labeled pool, counted over the whole federation.

  Args:
    rng: host generator.
    labels: int[D], true classes.
    per_class: labeled rows of every class; 0 is none. 5 labels a class on
      each of 100 clients are 500.
    fraction: instead, share of the pool in [0, 1]; round(fraction * M) rows,
      each class within one row of its share. 1 labels everything.
    where: bool[D], the rows to choose from; None is all.
    first: take the first rows in the order of the data set instead of random
      ones, as the code of FedDure does.
    num_classes: C; by default the largest label plus one.

  Returns:
    bool[D], never True outside `where`.

  Raises:
    ValueError: if both or none of `per_class` and `fraction` are given, a
      class has no row in `where`, or has fewer than `per_class`.
  """
  checks.generator(rng)
  labels, where = checks.pool(labels, where)
  _one_of('choose_labeled', per_class, fraction)
  rows, ranks = checks.by_class(None if first else rng, labels, where)
  chosen = np.zeros(labels.shape, bool)
  if fraction is not None:
    share = checks.fraction('fraction', fraction)
    wanted = _spread(rows.size, round(share * rows.size))
    if first:  # Same class counts, but from the front of each class.
      quota = np.bincount(labels[rows], weights=wanted).astype(int)
      wanted = ranks < quota[labels[rows]]
    chosen[rows[wanted]] = True
    return chosen
  wanted_count = checks.count('per_class', per_class, 0)
  if num_classes is None:
    num_classes = int(labels.max(initial=-1)) + 1
  sizes = np.bincount(labels[rows], minlength=num_classes)
  if sizes.size and sizes.min() < wanted_count:
    scarce = int(np.argmin(sizes))
    raise ValueError(f'{wanted_count} labels a class are more than the '
                     f'{sizes[scarce]} examples of class {scarce}')
  chosen[rows[ranks < wanted_count]] = True
  return chosen


def choose_validation(rng: np.random.Generator, labels: np.ndarray, *,
                      fraction: float, where: np.ndarray | None = None
                      ) -> np.ndarray:
  """Chooses round(fraction * M) rows, each class within one of its share.

  The number does not depend on `rng`, so the sets of several seeds stack.

  Args:
    rng: host generator.
    labels: int[D].
    fraction: in [0, 1]; 0 is an empty set.
    where: bool[D], rows to choose from; None is all.

  Returns:
    bool[D].
  """
  return choose_labeled(rng, labels, fraction=fraction, where=where)


def label_within(rng: np.random.Generator, labels: np.ndarray,
                 owner: np.ndarray, *, fraction: float | None = None,
                 per_class: int | None = None, first: bool = False
                 ) -> tuple[np.ndarray, np.ndarray]:
  """Labels some rows inside each client, after the rows were dealt.

  Args:
    rng: host generator.
    labels: int[D].
    owner: int32[D], -1 where not dealt.
    fraction: each client's share of labeled rows, uniform over its rows and
      rounded (FedLabel, ICCV 2023: .05, .2, .5).
    per_class: instead, at most so many rows of each class of each client.
    first: take the first rows in the order of the data set (FedDure's code
      for CINIC-10: the first 5 of each class) instead of random ones.

  Returns:
    labeled, unlabeled: int32[D] owners, together `owner`.

  Raises:
    ValueError: if both or none of `fraction` and `per_class` are given, or
      owners are not as many as labels.
  """
  checks.generator(rng)
  if np.shape(owner) != np.shape(labels):
    raise ValueError(f'owner must have the shape of labels, {np.shape(labels)},'
                     f' not {np.shape(owner)}')
  labels, dealt = checks.pool(labels, np.asarray(owner) >= 0)
  _one_of('label_within', per_class, fraction)
  group = np.where(dealt, owner, 0).astype(np.int64)
  if per_class is not None:
    group = group * (int(labels.max(initial=0)) + 1) + labels
  # Consecutive numbers: `by_class` counts every group up to the largest.
  group = np.unique(group, return_inverse=True)[1]
  rows, ranks = checks.by_class(None if first else rng, group, dealt)
  if fraction is not None:
    share = checks.fraction('fraction', fraction)
    sizes = np.bincount(group[rows])
    wanted = ranks < np.round(share * sizes)[group[rows]]
  else:
    wanted = ranks < checks.count('per_class', per_class, 0)
  chosen = np.zeros(labels.shape, bool)
  chosen[rows[wanted]] = True
  return split_owner(owner, chosen)


def label_clients(owner: np.ndarray, num_labeled_clients: int
                  ) -> tuple[np.ndarray, np.ndarray]:
  """Labels all rows of the first clients, none of the others (RSCFed, FedIRM).

  Args:
    owner: int32[D], -1 where not dealt.
    num_labeled_clients: how many; 0 labels no client.

  Returns:
    labeled, unlabeled: int32[D] owners, together `owner`.

  Raises:
    ValueError: for a negative number of clients.
  """
  number = checks.count('num_labeled_clients', num_labeled_clients, 0)
  return split_owner(owner, np.asarray(owner) < number)


def label_mixed(rng: np.random.Generator, labels: np.ndarray,
                owner: np.ndarray, num_labeled_clients: int, *,
                num_partly: int, fraction: float
                ) -> tuple[np.ndarray, np.ndarray]:
  """Gives the first clients all their labels, the next some, others none.

  FedGGp's mix. Without `num_partly` these are the rows of `label_clients`, and
  with all clients partly labeled those of `label_within`.

  Args:
    rng: host generator.
    labels: int[D].
    owner: int32[D], -1 where not dealt.
    num_labeled_clients: clients that hold labels only.
    num_partly: clients after them that hold both kinds of rows.
    fraction: their share of labeled rows, as in `label_within`.

  Returns:
    labeled, unlabeled: int32[D] owners, together `owner`.

  Raises:
    ValueError: for a negative number of clients, or a fraction beyond [0, 1].
  """
  first = checks.count('num_labeled_clients', num_labeled_clients, 0)
  last = first + checks.count('num_partly', num_partly, 0)
  owner = np.asarray(owner, np.int32)
  partly = (owner >= first) & (owner < last)
  few, _ = label_within(rng, labels, np.where(partly, owner, -1),
                        fraction=fraction)
  return split_owner(owner, (owner < first) | (few >= 0))


def split_owner(owner: np.ndarray, labeled: np.ndarray
                ) -> tuple[np.ndarray, np.ndarray]:
  """Splits owners int32[D] into those of labeled and of other rows, else -1."""
  owner = np.asarray(owner, np.int32)
  return (np.where(labeled, owner, np.int32(-1)),
          np.where(labeled, np.int32(-1), owner))


def shift(owner: np.ndarray, first: int) -> np.ndarray:
  """Renames client 0 to `first`, 1 to `first + 1`, ...; -1 stays.

  FedSSL's unlabeled agents follow `first` labeled ones: rows are dealt to them
  as if they were alone, and then their numbers are shifted.

  Args:
    owner: int[D], the client of each row, -1 for none.
    first: number of client 0, 0 or more.

  Returns:
    int32[D].
  """
  owner = np.asarray(owner, np.int32)
  return np.where(owner >= 0, owner + np.int32(first), np.int32(-1))
