"""How the rows of a data set are dealt to clients, in the ways of the papers.

A `Deal` is a function `deal(rng, labels, pool, options)` that returns
`(labeled, unlabeled)` or `(labeled, unlabeled, tasks)`: owners int32[D], -1 for
no client, of the rows in `pool` bool[D]; see `fedjax_ssl.data.partition`.
`options` is a `config.Config`. Partitions are named as in `data.PARTITIONS`, so
that a setting is plain data.
"""
from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

import numpy as np

from fedjax_ssl.config import Config, FieldError

Deal = Callable[..., tuple[np.ndarray, ...]]

# Options that say how uneven the parts are. Not every deal reads them.
SKEWS = ('alpha', 'dirichlet')


def _reads(*names: str, rule: str = '') -> Callable[[Deal], Deal]:
  """Notes which of `SKEWS` a deal reads, and its rule of `check_labels`."""
  def note(deal: Deal) -> Deal:
    vars(deal).update(reads=frozenset(names), rule=rule)
    return deal
  return note


def reads(deal: Deal) -> frozenset[str]:
  """Returns those of `SKEWS` that a deal reads, or all if it does not say."""
  return getattr(deal, 'reads', frozenset(SKEWS))


def rule_of(deal: Deal) -> str:
  """Returns a deal's rule of `check_labels`, '' if it does not say."""
  return getattr(deal, 'rule', '')


def check_asked(deal: Deal, options: Config) -> None:
  """Raises FieldError for labels that no data would fit.

  Where the data have a say, as in `own`, nothing is known before they are read.
  """
  if options.partition != 'setting' or options.partition_file:
    return
  rule, holders = rule_of(deal), options.num_labeled_clients
  if rule == 'pool' and options.labels_at == 'clients' and (
      0 <= holders < options.num_clients):
    raise FieldError('num_labeled_clients', holders, 'here labels are dealt to '
                     'all clients; leave it out, or take labeled_clients.')
  if rule:
    check_labels(rule, options)


def check_labels(rule: str, options: Config) -> None:
  """Raises unless exactly one option determines the labeled rows.

  Args:
    rule: how a setting labels rows:
      'pool': labels_per_class or labeled_fraction, of all rows together.
      'share': labeled_fraction of each client's rows.
      'clients': all rows of the first num_labeled_clients clients, and
        labeled_fraction of those of the num_partly_labeled_clients after them;
        if the former is -1, as 'share'.
      'agents': as 'pool'; the first num_labeled_clients clients, not all,
        hold the labeled rows.
    options: a `Config`, or what has the same attributes.

  Raises:
    FieldError: if no option does, several do, or one does not apply.
  """
  counts = {name: getattr(options, name)
            for name in ('labels_per_class', 'labeled_fraction')}
  holders = options.num_labeled_clients
  partly = options.num_partly_labeled_clients
  if partly:
    _check_partly(rule, partly, options)
  if rule == 'agents' and not 0 < holders < options.num_clients:
    raise FieldError('num_labeled_clients', holders, 'must be from 1 to '
                     f'{options.num_clients - 1}, so that some have none.',
                     num_clients=options.num_clients)
  if rule in ('agents', 'pool'):
    if (counts['labels_per_class'] is None) == (
        counts['labeled_fraction'] is None):
      raise FieldError('labels_per_class', counts.pop('labels_per_class'),
                       'give one of them.', **counts)
    return
  if options.labels_at == 'server':
    raise FieldError('labels_at', 'server',
                     'here clients hold the labels; give clients.')
  if rule == 'clients' and not holders and not partly:
    raise FieldError('num_labeled_clients', 0, 'leaves nobody with labels; '
                     'give at least 1, or -1 and labeled_fraction.')
  if rule == 'share' and holders >= 0:
    raise FieldError('num_labeled_clients', holders, 'here every client holds '
                     'labels; leave it out.')
  shares = rule == 'share' or holders < 0 or partly > 0
  if not shares:
    for name, value in counts.items():
      if value is not None:
        raise FieldError(name, value, 'num_labeled_clients says which rows are '
                         f'labeled here; leave {name} out.',
                         num_labeled_clients=holders)
  elif counts['labels_per_class'] is not None:
    raise FieldError('labels_per_class', counts['labels_per_class'], 'here '
                     'labeled_fraction says how many rows of each client are '
                     'labeled; leave it out.')
  elif counts['labeled_fraction'] is None and partly:
    raise FieldError('num_partly_labeled_clients', partly, 'give '
                     'labeled_fraction, the labeled share of their rows.')
  elif partly and not counts['labeled_fraction']:
    raise FieldError('labeled_fraction', counts['labeled_fraction'], 'leaves '
                     'clients that are partly labeled without labels; give '
                     'more than 0.', num_partly_labeled_clients=partly)
  elif counts['labeled_fraction'] is None:
    raise FieldError('labeled_fraction', None, 'give the labeled share of each '
                     "client's rows" + (', or num_labeled_clients.'
                     if rule == 'clients' else '.'))


def _check_partly(rule: str, partly: int, options: Config) -> None:
  """Raises FieldError unless so many clients can be partly labeled."""
  holders = options.num_labeled_clients
  if rule != 'clients':
    raise FieldError('num_partly_labeled_clients', partly, 'this setting has '
                     'no such clients; leave it out, or take labeled_clients.')
  if holders < 0:
    raise FieldError('num_partly_labeled_clients', partly, 'with '
                     'num_labeled_clients at -1 all are partly labeled; leave '
                     'it out, or give num_labeled_clients from 0 on.',
                     num_labeled_clients=holders)
  if holders + partly > options.num_clients:
    raise FieldError('num_partly_labeled_clients', partly, 'together more '
                     f'than the {options.num_clients} clients; at most '
                     f'{max(options.num_clients - holders, 0)} are left.',
                     num_labeled_clients=holders,
                     num_clients=options.num_clients)


def num_holders(options: Config) -> int:
  """Counts the clients, the first ones, with labels; -1 without a rule."""
  holders = options.num_labeled_clients
  return (holders if holders < 0 else
          holders + options.num_partly_labeled_clients)


def choose_labeled(rng: np.random.Generator, labels: np.ndarray,
                   pool: np.ndarray, options: Config) -> np.ndarray:
  """Returns bool[D]: the labeled rows that the options ask for.

  Raises:
    FieldError: if not exactly one of them says how many, or there are too few.
  """
  from fedjax_ssl import data
  check_labels('pool', options)
  name, value = _how_many(options)
  try:
    return data.choose_labeled(
        rng, labels, per_class=options.labels_per_class,
        fraction=options.labeled_fraction, where=pool)
  except ValueError as error:
    raise FieldError(
        name, value, f'{error} that are not held out; give less, or '
        'labeled_fraction instead, or a smaller validation_fraction.'
        if name == 'labels_per_class' else
        f'{error}.', **({'max_rows': options.max_rows} if options.max_rows
                        else {})) from error


def _how_many(options: Config) -> tuple[str, Any]:
  """Returns the option that says how many labels there are, and its value."""
  name = ('labeled_fraction' if options.labels_per_class is None
          else 'labels_per_class')
  return name, getattr(options, name)


def two_pools(labeled_scheme: str, unlabeled_scheme: str) -> Deal:
  """Deals labeled and unlabeled rows apart, as FedDure does.

  Args:
    labeled_scheme: name of a partition; labels at the server are not dealt.
    unlabeled_scheme: the same for all other rows.
  """
  schemes = (labeled_scheme, unlabeled_scheme)

  @_reads(*(['alpha'] if any(map(_is_skewed, schemes)) else []), rule='pool')
  def deal(rng, labels, pool, options):
    from fedjax_ssl import data
    labeled = choose_labeled(rng, labels, pool, options)
    if options.labels_at == 'server':
      owner = np.where(labeled, options.num_clients, -1).astype(np.int32)
    else:
      least = min(_least(options), data.labeled_min_size(
          int(labeled.sum()), options.num_clients))
      owner = _dealt(labeled_scheme, rng, labels, labeled, least, options)
    others = pool & ~labeled
    least = _least(options, labels, others)
    if least and unlabeled_scheme == 'dirichlet_capped' and not others.any():
      raise FieldError(*_how_many(options), 'leaves no row without a label to '
                       'deal; give less, or labels=all in its place, or '
                       'min_size=0.')
    return owner, _dealt(unlabeled_scheme, rng, labels, others, least, options)
  return deal


def _is_skewed(scheme: str) -> bool:
  """Returns whether a partition takes an alpha."""
  return scheme.startswith('dirichlet')


def _least(options: Config, labels: np.ndarray | None = None,
           where: np.ndarray | None = None) -> int:
  """Rows that a client gets at least.

  Of a pool beside which there are rows without a label, which clients get as
  well, it may get fewer.
  """
  if options.min_size is not None:
    return options.min_size
  if labels is not None and where is not None and (labels < 0).any():
    from fedjax_ssl import data
    return data.labeled_min_size(int(where.sum()), options.num_clients)
  return 10


def _dealt(scheme: str, rng: np.random.Generator, labels: np.ndarray,
           where: np.ndarray, least: int, options: Config) -> np.ndarray:
  """Owners by one partition.

  dirichlet_capped gives each client at least `least` rows.
  """
  from fedjax_ssl import data
  partition = data.PARTITIONS[scheme]
  if scheme != 'dirichlet_capped':
    _refuse_min_size(scheme, options)
    skew = {'alpha': options.alpha} if _is_skewed(scheme) else {}
    try:
      return partition(rng, labels, options.num_clients, where=where, **skew)
    except FieldError:
      raise
    except ValueError as error:
      name = 'alpha' if skew else 'num_clients'
      raise FieldError(name, getattr(options, name), f'{error}.') from error
  rows = int(where.sum())
  if least > rows:  # Fewer clients do not help.
    most = rows // options.num_clients
    there = 'there is 1 row' if rows == 1 else f'there are {rows} rows'
    raise FieldError('min_size', least, f'{there} to deal; give '
                     f'{f"{most} or less" if most else 0}.')
  if options.num_clients * least > rows:
    raise FieldError(
        'num_clients', options.num_clients, f'too many for {rows} rows to '
        f'deal, at least {least} each: give {rows // least} or less, or a '
        'lower min_size.')
  try:
    return partition(rng, labels, options.num_clients, where=where,
                     alpha=options.alpha, min_size=least)
  except ValueError as error:
    raise FieldError(
        'alpha', options.alpha, 'no draw gave each of the '
        f'{options.num_clients} clients {least} of {rows} rows; raise alpha, '
        'or lower num_clients or min_size.') from error


def _capped(rng: np.random.Generator, labels: np.ndarray, pool: np.ndarray,
            options: Config) -> np.ndarray:
  """Owners of all rows of a pool, by the capped Dirichlet partition."""
  return _dealt('dirichlet_capped', rng, labels, pool,
                _least(options, labels, pool), options)


def _refuse_min_size(scheme: str, options: Config) -> None:
  """Refuses --min_size, which only the capped partition takes."""
  if options.min_size is not None:
    raise FieldError('min_size', options.min_size, 'rows are dealt by '
                     f'{scheme} here, which has none; leave it out.')


def in_tasks(deal: Deal, num_tasks: int) -> Deal:
  """Cuts each client's unlabeled rows in tasks whose classes drift."""
  @functools.wraps(deal)
  def deal_tasks(rng, labels, pool, options):
    from fedjax_ssl import data
    labeled, unlabeled = deal(rng, labels, pool, options)
    return labeled, unlabeled, data.deal_tasks(
        rng, labels, unlabeled, num_tasks=num_tasks)
  return deal_tasks


@_reads('alpha', 'dirichlet', rule='share')
def one_pool(rng: np.random.Generator, labels: np.ndarray, pool: np.ndarray,
             options: Config) -> tuple[np.ndarray, np.ndarray]:
  """Deals all rows, then labels --labeled_fraction of each client's.

  FedLabel's setting; --dirichlet names the flavour of the partition.
  """
  check_labels('share', options)
  owner = _dealt(f'dirichlet_{options.dirichlet}', rng, labels, pool,
                 _least(options, labels, pool), options)
  return _label(rng, labels, owner, options)


def agents(scheme: str) -> Deal:
  """Deals labels to the first agents and all other rows to the rest (FedSSL).

  Args:
    scheme: name of a partition, for either kind of rows.

  Returns:
    The `Deal`; --num_labeled_clients says how many hold labels.
  """
  @_reads(rule='agents')
  def deal(rng, labels, pool, options):
    from fedjax_ssl import data
    check_labels('agents', options)
    _refuse_min_size(scheme, options)
    holders, total = options.num_labeled_clients, options.num_clients
    labeled = choose_labeled(rng, labels, pool, options)
    partition = data.PARTITIONS[scheme]
    try:
      return (partition(rng, labels, holders, where=labeled),
              data.shift(partition(rng, labels, total - holders,
                                   where=pool & ~labeled), holders))
    except FieldError as error:
      raise FieldError(
          'num_labeled_clients', holders, f'{error.value} agents are '
          f'{error.reason}', num_clients=total) from None
  return deal


@_reads('alpha', rule='clients')
def whole_clients(rng: np.random.Generator, labels: np.ndarray,
                  pool: np.ndarray, options: Config
                  ) -> tuple[np.ndarray, np.ndarray]:
  """Deals all rows; the first --num_labeled_clients know all their labels.

  With --num_labeled_clients=-1 every client knows --labeled_fraction of its
  own; with --num_partly_labeled_clients so many after the first ones do. The
  setting of FedIRM and RSCFed, and of FedGGp.
  """
  check_labels('clients', options)
  return _label(rng, labels, _capped(rng, labels, pool, options), options)


def _label(rng: np.random.Generator, labels: np.ndarray, owner: np.ndarray,
           options: Config) -> tuple[np.ndarray, np.ndarray]:
  """Owners of the labeled and the other rows; see `whole_clients`."""
  from fedjax_ssl import data
  partly, fraction = (options.num_partly_labeled_clients,
                      options.labeled_fraction)
  if not partly and options.num_labeled_clients > 0:
    return data.label_clients(owner, options.num_labeled_clients)
  assert fraction is not None  # By `check_labels`.
  if partly:
    return data.label_mixed(rng, labels, owner, options.num_labeled_clients,
                            num_partly=partly, fraction=fraction)
  return data.label_within(rng, labels, owner, fraction=fraction)


@_reads('alpha')
def own(rng: np.random.Generator, labels: np.ndarray, pool: np.ndarray,
        options: Config) -> tuple[np.ndarray, np.ndarray]:
  """Deals all rows by a capped Dirichlet partition, then labels some.

  See `natural` for which rows are labeled.
  """
  owner = _capped(rng, labels, pool, options)
  return _labeled(rng, labels, owner, options)


def holders_alone(options: Config) -> bool:
  """Returns whether the first clients hold all labels, if a deal allows it."""
  return bool(options.num_labeled_clients >= 0
              and options.labels_at == 'clients')


def num_known(options: Config) -> int:
  """Counts the clients, the first ones, with labels only; 0 if none or all."""
  first = options.num_labeled_clients if holders_alone(options) else 0
  return int(first) if first < options.num_clients else 0


def natural(owner: np.ndarray) -> Deal:
  """Leaves the rows with the clients that the data name.

  Which rows are labeled: all of the first --num_labeled_clients clients, and
  of the --num_partly_labeled_clients after them --labeled_fraction each;
  or --labels_per_class over all clients together; or else
  --labeled_fraction of each client's own, or of all rows where the server
  holds the labels.

  Args:
    owner: int32[D], the client of each row.
  """
  @_reads()
  def deal(rng, labels, pool, options):
    if options.rounds_per_task:
      raise FieldError(
          'partition', 'natural', 'the data have no tasks; leave '
          'rounds_per_task at 0.', rounds_per_task=options.rounds_per_task)
    _refuse_min_size('the data', options)
    return _labeled(rng, labels, np.where(pool, owner, -1), options)
  return deal


def _labeled(rng: np.random.Generator, labels: np.ndarray, owner: np.ndarray,
             options: Config) -> tuple[np.ndarray, np.ndarray]:
  """Owners of the labeled and of the other rows; see `natural`."""
  from fedjax_ssl import data
  if options.labels_at == 'server':
    chosen = choose_labeled(rng, labels, owner >= 0, options)
    labeled, unlabeled = data.partition.split_owner(owner, chosen)
    return np.where(chosen, np.int32(options.num_clients), labeled), unlabeled
  whole = holders_alone(options)
  if not whole and options.labels_per_class is not None:
    return data.partition.split_owner(
        owner, choose_labeled(rng, labels, owner >= 0, options))
  check_labels('clients' if whole else 'share', options)
  return _label(rng, labels, owner, options)
