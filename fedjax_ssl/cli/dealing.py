"""How the rows of a data set are dealt to clients, in the ways of the papers.

A way is a function `deal(rng, labels, pool, options) -> (labeled, unlabeled)`
or `(labeled, unlabeled, tasks)`: owners int32[D], -1 for nobody, of the rows
in `pool` bool[D]; see `fedjax_ssl.data.partition`. `options` has the flags'
values as attributes. Partitions are named as in `data.PARTITIONS`, so that a
setting is plain data.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Deal = Callable[..., tuple[np.ndarray, ...]]


def choose_labeled(rng: np.random.Generator, labels: np.ndarray,
                   pool: np.ndarray, options: Any) -> np.ndarray:
  """Returns bool[D]: the labeled rows that the flags ask for.

  Raises:
    ValueError: if not exactly one flag says how many, or there are too few.
  """
  from fedjax_ssl import data
  given = {name: getattr(options, name)
           for name in ('labels_per_class', 'labeled_fraction')
           if getattr(options, name) is not None}
  if len(given) != 1:
    raise ValueError(
        'Give one of --labels_per_class and --labeled_fraction, not '
        f'{options.labels_per_class} and {options.labeled_fraction}.')
  (name, value), = given.items()
  try:
    return data.choose_labeled(
        rng, labels, per_class=options.labels_per_class,
        fraction=options.labeled_fraction, where=pool)
  except ValueError as error:
    raise ValueError(f'--{name}={value}: {error}.') from error


def two_pools(labeled_scheme: str, unlabeled_scheme: str) -> Deal:
  """Deals labeled and unlabeled rows apart, as FedDure does.

  Args:
    labeled_scheme: name of a partition; labels at the server are not dealt.
    unlabeled_scheme: the same for all other rows.

  Returns:
    The way.
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
  """Owners by one partition; the capped one gives clients `least` rows."""
  from fedjax_ssl import data
  partition = data.PARTITIONS[scheme]
  if scheme != 'dirichlet_capped':
    return partition(rng, labels, options.num_clients, where=where)
  rows = int(where.sum())
  if options.num_clients * least > rows:
    raise ValueError(f'--num_clients={options.num_clients} is too many for '
                     f'{rows} rows to deal, at least {least} each.')
  try:
    return partition(rng, labels, options.num_clients, where=where,
                     alpha=options.alpha, min_size=least)
  except ValueError as error:
    raise ValueError(
        f'--alpha={options.alpha:g}: no draw gave each of the '
        f'--num_clients={options.num_clients} {least} of {rows} rows; raise '
        '--alpha or lower --num_clients.') from error


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
  if options.labeled_fraction is None or options.labels_per_class is not None:
    raise ValueError('Give --labeled_fraction, the labeled share of each '
                     "client's rows, and not --labels_per_class.")
  if options.labels_at == 'server':
    raise ValueError('This setting labels rows of clients; give '
                     '--labels_at=clients.')
  owner = data.PARTITIONS[f'dirichlet_{options.dirichlet}'](
      rng, labels, options.num_clients, alpha=options.alpha, where=pool)
  return data.label_within(rng, labels, owner,
                           fraction=options.labeled_fraction)


def agents(scheme: str) -> Deal:
  """Deals labels to the first agents and all other rows to the rest (FedSSL).

  Args:
    scheme: name of a partition, for either kind of rows.

  Returns:
    The way; --num_labeled_clients says how many hold labels.
  """
  def deal(rng, labels, pool, options):
    from fedjax_ssl import data
    holders, total = options.num_labeled_clients, options.num_clients
    if not 0 < holders < total:
      raise ValueError(f'--num_labeled_clients={holders} must be from 1 to '
                       f'{total - 1}, below --num_clients={total}.')
    labeled = choose_labeled(rng, labels, pool, options)
    partition = data.PARTITIONS[scheme]
    try:
      return (partition(rng, labels, holders, where=labeled),
              data.shift(partition(rng, labels, total - holders,
                                   where=pool & ~labeled), holders))
    except ValueError as error:
      reason = str(error).replace('num_clients=', 'agents=')
      raise ValueError(f'--num_labeled_clients={holders} of --num_clients='
                       f'{total}: {reason}.') from error
  return deal


def whole_clients(rng: np.random.Generator, labels: np.ndarray,
                  pool: np.ndarray, options: Any
                  ) -> tuple[np.ndarray, np.ndarray]:
  """Deals all rows; the first --num_labeled_clients know all their labels.

  With --num_labeled_clients=-1 every client knows --labeled_fraction of its
  own. The setting of FedIRM and RSCFed.
  """
  from fedjax_ssl import data
  if options.labels_at == 'server':
    raise ValueError('--labels_at=server, but here clients hold the labels; '
                     'give --labels_at=clients.')
  holders = options.num_labeled_clients
  if not holders:
    raise ValueError('--num_labeled_clients=0 leaves nobody with labels; give '
                     'at least 1, or -1 and --labeled_fraction.')
  for name in ('labels_per_class', 'labeled_fraction'):
    if getattr(options, name) is not None and (
        holders > 0 or name == 'labels_per_class'):
      raise ValueError(
          f'--{name}={getattr(options, name)}, but here '
          f'--num_labeled_clients={holders} says which rows are labeled; leave '
          'it out.')
  owner = _dealt('dirichlet_capped', rng, labels, pool, 10, options)
  if holders > 0:
    return data.label_clients(owner, holders)
  if options.labeled_fraction is None:
    raise ValueError('Give --num_labeled_clients, or -1 and the share '
                     '--labeled_fraction of labels that all clients hold.')
  return data.label_within(rng, labels, owner,
                           fraction=options.labeled_fraction)
