"""How the rows of a data set are dealt to clients, in the ways of the papers.

A `Deal` is a function `deal(rng, labels, pool, options)` that returns
`(labeled, unlabeled)` or `(labeled, unlabeled, tasks)`: owners int32[D], -1 for
nobody, of the rows in `pool` bool[D]; see `fedjax_ssl.data.partition`.
`options` is a `config.Config`, or has its attributes. Partitions are named as
in `data.PARTITIONS`, so that a setting is plain data.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedjax_ssl import config

Deal = Callable[..., tuple[np.ndarray, ...]]


def choose_labeled(rng: np.random.Generator, labels: np.ndarray,
                   pool: np.ndarray, options: Any) -> np.ndarray:
  """Returns bool[D]: the labeled rows that the options ask for.

  Raises:
    FieldError: if not exactly one of them says how many, or there are too few.
  """
  from fedjax_ssl import data
  config.check_labels('pool', options)
  name = ('labeled_fraction' if options.labels_per_class is None
          else 'labels_per_class')
  try:
    return data.choose_labeled(
        rng, labels, per_class=options.labels_per_class,
        fraction=options.labeled_fraction, where=pool)
  except ValueError as error:
    raise config.FieldError(
        name, getattr(options, name), f'{error}.') from error


def two_pools(labeled_scheme: str, unlabeled_scheme: str) -> Deal:
  """Deals labeled and unlabeled rows apart, as FedDure does.

  Args:
    labeled_scheme: name of a partition; labels at the server are not dealt.
    unlabeled_scheme: the same for all other rows.

  Returns:
    The `Deal`.
  """
  def deal(rng, labels, pool, options):
    from fedjax_ssl import data
    labeled = choose_labeled(rng, labels, pool, options)
    if options.labels_at == 'server':
      owner = np.where(labeled, options.num_clients, -1).astype(np.int32)
    else:
      least = data.labeled_min_size(int(labeled.sum()), options.num_clients)
      owner = _dealt(labeled_scheme, rng, labels, labeled, least, options)
    return owner, _dealt(unlabeled_scheme, rng, labels, pool & ~labeled, 10,
                         options)
  return deal


def _dealt(scheme: str, rng: np.random.Generator, labels: np.ndarray,
           where: np.ndarray, least: int, options: Any) -> np.ndarray:
  """Owners by one partition.

  dirichlet_capped gives each client at least `least` rows.
  """
  from fedjax_ssl import data
  partition = data.PARTITIONS[scheme]
  if scheme != 'dirichlet_capped':
    return partition(rng, labels, options.num_clients, where=where)
  rows = int(where.sum())
  if options.num_clients * least > rows:
    raise config.FieldError('num_clients', options.num_clients, 'too many for '
                            f'{rows} rows to deal, at least {least} each.')
  try:
    return partition(rng, labels, options.num_clients, where=where,
                     alpha=options.alpha, min_size=least)
  except ValueError as error:
    raise config.FieldError(
        'alpha', options.alpha, 'no draw gave each of the '
        f'{options.num_clients} clients {least} of {rows} rows; raise alpha or '
        'lower num_clients.') from error


def in_tasks(deal: Deal, num_tasks: int) -> Deal:
  """Cuts each client's unlabeled rows in tasks whose classes drift."""
  def deal_tasks(rng, labels, pool, options):
    from fedjax_ssl import data
    labeled, unlabeled = deal(rng, labels, pool, options)
    return labeled, unlabeled, data.deal_tasks(
        rng, labels, unlabeled, num_tasks=num_tasks)
  return deal_tasks


def one_pool(rng: np.random.Generator, labels: np.ndarray, pool: np.ndarray,
             options: Any) -> tuple[np.ndarray, np.ndarray]:
  """Deals all rows, then labels --labeled_fraction of each client's.

  FedLabel's setting; --dirichlet names the flavour of the partition.
  """
  from fedjax_ssl import data
  config.check_labels('share', options)
  owner = data.PARTITIONS[f'dirichlet_{options.dirichlet}'](
      rng, labels, options.num_clients, alpha=options.alpha, where=pool)
  return data.label_within(rng, labels, owner,
                           fraction=options.labeled_fraction)


def agents(scheme: str) -> Deal:
  """Deals labels to the first agents and all other rows to the rest (FedSSL).

  Args:
    scheme: name of a partition, for either kind of rows.

  Returns:
    The `Deal`; --num_labeled_clients says how many hold labels.
  """
  def deal(rng, labels, pool, options):
    from fedjax_ssl import data
    config.check_labels('agents', options)
    holders, total = options.num_labeled_clients, options.num_clients
    labeled = choose_labeled(rng, labels, pool, options)
    partition = data.PARTITIONS[scheme]
    try:
      return (partition(rng, labels, holders, where=labeled),
              data.shift(partition(rng, labels, total - holders,
                                   where=pool & ~labeled), holders))
    except config.FieldError as error:
      raise config.FieldError(
          'num_labeled_clients', holders, f'{error.value} agents are '
          f'{error.reason}', num_clients=total) from None
  return deal


def whole_clients(rng: np.random.Generator, labels: np.ndarray,
                  pool: np.ndarray, options: Any
                  ) -> tuple[np.ndarray, np.ndarray]:
  """Deals all rows; the first --num_labeled_clients know all their labels.

  With --num_labeled_clients=-1 every client knows --labeled_fraction of its
  own. The setting of FedIRM and RSCFed.
  """
  from fedjax_ssl import data
  config.check_labels('clients', options)
  owner = _dealt('dirichlet_capped', rng, labels, pool, 10, options)
  if options.num_labeled_clients > 0:
    return data.label_clients(owner, options.num_labeled_clients)
  return data.label_within(rng, labels, owner,
                           fraction=options.labeled_fraction)
