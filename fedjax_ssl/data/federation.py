"""From owners to a federation: tables of row indices, client by client."""
from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from fedjax_ssl.core import checks
from fedjax_ssl.core.types import Array, Examples, Federation, Shard
from fedjax_ssl.data.partition.file import (
  check_partition,
  make_partition,
  Partition,
)

# Larger class-count tables stay out of `describe`.
_MAX_CELLS = 20_000


def rows_by_owner(owner: np.ndarray, num_owners: int
                  ) -> tuple[np.ndarray, np.ndarray]:
  """Turns owners into a table of rows.

  Args:
    owner: int[D] in [0, N), or -1.
    num_owners: N.

  Returns:
    rows int32[N, W], ascending in each row and padded with 0, and how many
    count, int32[N]. W is the largest count, but at least 1.
  """
  order = np.argsort(owner, kind='stable')
  order = order[np.searchsorted(owner[order], 0):]
  sizes = np.bincount(owner[order], minlength=num_owners)
  starts = np.cumsum(sizes) - sizes
  rows = np.zeros((num_owners, sizes.max(initial=1)), np.int32)
  rows[owner[order], np.arange(order.size) - starts[owner[order]]] = order
  return rows, sizes.astype(np.int32)


def _shards(labeled: np.ndarray, unlabeled: np.ndarray, num: int) -> Shard:
  """Shard with leading axis `num` from two owner vectors."""
  return Shard(*rows_by_owner(labeled, num), *rows_by_owner(unlabeled, num))


def _stream(labeled: np.ndarray, unlabeled: np.ndarray, tasks: np.ndarray,
            num_clients: int, revealed: np.ndarray | None) -> Shard:
  """Shard [T, N, ...]: a task's unlabeled rows, and all labeled rows.

  With `revealed`, bool[D], those of the unlabeled rows that it marks are
  labeled ones, and there are no others.
  """
  num_tasks = int(tasks.max()) + 1
  now = [np.where(tasks == t, unlabeled, -1) for t in range(num_tasks)]
  if revealed is not None:
    parts = [_shards(np.where((rows >= 0) & revealed, rows, labeled),
                     np.full_like(rows, -1), num_clients) for rows in now]
  else:
    parts = [_shards(labeled, rows, num_clients) for rows in now]
  return _stacked(_common_widths(parts))


def federate(train: Examples, validation: Examples | None, test: Examples,
             partition: Partition, *, num_clients: int, labels: str = 'few',
             labels_at: str = 'clients', num_classes: int | None = None,
             rounds_per_task: int = 0, num_labeled_clients: int = -1
             ) -> Federation:
  """Builds the federation that a partition describes.

  Args:
    train: all D training examples, those of `partition.validation` included.
    validation: held-out examples; None takes the rows of `train` that
      `partition.validation` marks.
    test: examples for evaluation only.
    partition: who owns which row of `train`.
    num_clients: N.
    labels: 'few' as dealt, or 'all': each client's unlabeled rows become
      labeled ones (the upper bound of every table).
    labels_at: 'clients', or 'server': all labeled rows go to the server,
      whatever their owners, and the clients keep their unlabeled rows.
    num_classes: C; by default the largest label plus one.
    rounds_per_task: rounds before the next of `partition.tasks`, each of which
      has all labeled rows of a client; 0 without tasks.
    num_labeled_clients: how many clients hold labels, the first ones; -1 if
      the setting has no such rule.

  Returns:
    Federation of numpy arrays. `clients` holds a client's rows of all tasks.

  Raises:
    ValueError: if the parts do not fit each other.
    TypeError: for parts that are no `Examples`.
  """
  checks.check('labels', labels, ('few', 'all'))
  checks.check('labels_at', labels_at, ('clients', 'server'))
  for name, part in (('train', train), ('validation', validation),
                     ('test', test)):
    if not isinstance(part, Examples) and not (
        part is None and name == 'validation'):
      raise TypeError(f'{name} must be Examples(inputs, labels), not a '
                      f'{type(part).__name__}.')
  partition = make_partition(*partition)
  check_partition(partition, len(train.labels), num_clients)
  validation = _validation(train, validation, partition)
  num_classes = _num_classes((train, validation, test), num_classes)
  _check_labeled_clients(partition, labels_at, num_clients,
                         num_labeled_clients)
  stream = partition.tasks
  if (stream is None) != (rounds_per_task == 0) or rounds_per_task < 0:
    raise ValueError(f'rounds_per_task={rounds_per_task} must be positive '
                     'with a stream and 0 without one')
  labeled, unlabeled = partition.labeled, partition.unlabeled
  nobody = np.full_like(labeled, -1)
  at_server = nobody
  if labels_at == 'server':
    at_server = np.where(labeled >= 0, 0, -1)
    labeled = nobody
  tasks = None
  # Rows that have no label keep none.
  revealed = np.asarray(train.labels) >= 0 if labels == 'all' else None
  if stream is not None:
    if (stream < 0).all():
      raise ValueError('stream has no task, as no row is unlabeled')
    tasks = _stream(labeled, unlabeled, stream, num_clients, revealed)
  if revealed is not None:
    labeled = np.where((unlabeled >= 0) & revealed, unlabeled, labeled)
    unlabeled = nobody
  server = _shards(at_server, nobody, 1)
  return Federation(
      train=train, validation=validation, test=test,
      clients=_shards(labeled, unlabeled, num_clients),
      server=Shard(*(leaf[0] for leaf in server)),
      stream=tasks, rounds_per_task=rounds_per_task,
      num_labeled_clients=num_labeled_clients, num_classes=num_classes)


def _validation(train: Examples, validation: Examples | None,
                partition: Partition) -> Examples:
  if validation is None:
    rows = np.flatnonzero(partition.validation)
    return Examples(train.inputs[rows], train.labels[rows])
  if partition.validation.any():
    raise ValueError('validation is given twice: as examples, and as rows of '
                     'the partition')
  return validation


def _num_classes(parts: Sequence[Examples], num_classes: int | None) -> int:
  """Checks that the examples fit each other; returns C."""
  shape = parts[0].inputs.shape[1:]
  largest = -1
  for name, part in zip(('train', 'validation', 'test'), parts,
                        strict=True):
    if len(part.inputs) != len(part.labels):
      raise ValueError(f'{name} has {len(part.inputs)} inputs and '
                       f'{len(part.labels)} labels')
    if part.inputs.shape[1:] != shape:
      raise ValueError(f'{name} has inputs of shape {part.inputs.shape[1:]}, '
                       f'train of {shape}')
    largest = max(largest, int(np.max(part.labels, initial=-1)))
  if num_classes is None:
    return largest + 1
  if largest >= num_classes:
    raise ValueError(f'label {largest} is not below num_classes={num_classes}')
  return num_classes


def _check_labeled_clients(partition: Partition, labels_at: str,
                           num_clients: int, num_labeled: int) -> None:
  labeled = partition.labeled
  if labels_at == 'clients' and (labeled == num_clients).any():
    raise checks.FieldError(
        'labels_at', labels_at, 'the partition gives '
        f'{int((labeled == num_clients).sum())} labeled rows to the server')
  if not -1 <= num_labeled <= num_clients:
    raise checks.FieldError('num_labeled_clients', num_labeled,
                            f'must be -1 or in [0, {num_clients}]')
  if labels_at == 'clients' and num_labeled >= 0 and (
      labeled >= num_labeled).any():
    raise ValueError(f'client {labeled.max()} holds labels, but only the '
                     f'first {num_labeled} should')


def check(federation: Federation) -> None:
  """Raises ValueError unless the parts of a federation fit each other.

  An example may have the label -1, for unknown, if neither a client nor the
  server holds it among its labeled rows.
  """
  classes, train = federation.num_classes, federation.train
  _check_tables(federation)
  for name in ('train', 'validation', 'test'):
    labels = np.asarray(getattr(federation, name).labels)
    if labels.ndim != 1 or labels.dtype.kind not in 'iu':
      raise ValueError(f'{name} has labels {labels.dtype}{list(labels.shape)}; '
                       f'they must be integers, 0 to {classes - 1}, one for '
                       'each example')
  _num_classes((train, federation.validation, federation.test), classes)
  if not len(federation.test.labels):
    raise ValueError('test has no examples; a training is evaluated on them')
  known = np.zeros(len(train.labels), bool)
  for name in ('clients', 'server', 'stream'):
    shard = getattr(federation, name)
    for kind in ('labeled', 'unlabeled') if shard is not None else ():
      rows = _real_rows(f'{name}.{kind}', getattr(shard, kind),
                        getattr(shard, f'num_{kind}'))
      wrong = rows[(rows < 0) | (rows >= known.size)]
      if wrong.size:
        raise ValueError(f'{name}.{kind} names row {wrong[0]}, but train has '
                         f'rows 0 to {known.size - 1}')
      known[rows] |= kind == 'labeled'
  for name, least in (('train', np.where(known, 0, -1)), ('validation', 0),
                      ('test', 0)):
    labels = np.asarray(getattr(federation, name).labels)
    if (labels < least).any():
      raise ValueError(f'{name} has label {labels[labels < least][0]}; labels '
                       f'must be 0 to {classes - 1}')


def _check_tables(federation: Federation) -> None:
  """Raises ValueError unless tables hold integers, for the same clients."""
  shards = {name: getattr(federation, name)
            for name in ('clients', 'server', 'stream')}
  for name, shard in shards.items():
    if shard is None and name != 'stream':
      raise ValueError(f'{name} is None; it must be a Shard, whose tables may '
                       'be empty')
    for field, table in shard._asdict().items() if shard else ():
      table = np.asarray(table)
      if table.dtype.kind not in 'iu':
        raise ValueError(f'{name}.{field} is {table.dtype}; it must hold '
                         'integers')
      if field.startswith('num_') and (table < 0).any():
        raise ValueError(f'{name}.{field} has {table.min()}; numbers of rows '
                         'are 0 or more')
  stream, clients = federation.stream, (federation.num_clients,)
  if (stream is None) != (federation.rounds_per_task == 0):
    raise ValueError(f'rounds_per_task={federation.rounds_per_task} must be '
                     'positive with a stream and 0 without one')
  for field, table in stream._asdict().items() if stream else ():
    if np.shape(table)[1:2] != clients:
      raise ValueError(f'stream.{field} has shape {np.shape(table)}; it must '
                       f'be of tasks and of {clients[0]} clients')
  counts = sorted({np.shape(table)[:1] for table in federation.clients})
  if len(counts) > 1:
    raise ValueError('the tables of clients are of different numbers of '
                     f'clients, {" and ".join(str(*n) for n in counts)}')


def _real_rows(name: str, table: Array, sizes: Array) -> np.ndarray:
  """Returns the entries of a table of rows that count, flat."""
  table, sizes = np.asarray(table), np.asarray(sizes)
  if table.ndim < 1 or table.shape[:-1] != sizes.shape or (
      sizes > table.shape[-1]).any():
    raise ValueError(f'{name} has shape {table.shape}, which does not hold the '
                     f'numbers of rows, {sizes.shape} of at most '
                     f'{sizes.max(initial=0)}')
  return table[np.arange(table.shape[-1]) < sizes[..., None]]


def _widen(shard: Shard, labeled: int, unlabeled: int) -> Shard:
  """Pads the tables with 0 to the given widths."""
  def pad(rows: Array, width: int) -> Array:
    extra = width - rows.shape[-1]
    if not extra:
      return rows
    return np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, extra)])
  return shard._replace(labeled=pad(shard.labeled, labeled),
                        unlabeled=pad(shard.unlabeled, unlabeled))


def _common_widths(shards: Sequence[Shard]) -> list[Shard]:
  labeled = max(1, *(s.labeled.shape[-1] for s in shards))
  unlabeled = max(1, *(s.unlabeled.shape[-1] for s in shards))
  return [_widen(s, labeled, unlabeled) for s in shards]


def _stacked(shards: Sequence[Shard]) -> Shard:
  return Shard(*map(np.stack, zip(*shards, strict=True)))


def pad_widths(federations: Sequence[Federation]) -> list[Federation]:
  """Pads the tables of federations to one common width, of 1 or more."""
  parts: dict[str, list[Any]] = {}
  for name in ('clients', 'server', 'stream'):
    parts[name] = [getattr(f, name) for f in federations]
    if parts[name][0] is not None:
      parts[name] = _common_widths(parts[name])
  return [dataclasses.replace(f, **{k: v[i] for k, v in parts.items()})
          for i, f in enumerate(federations)]


def stack(federations: Sequence[Federation]) -> Federation:
  """Stacks federations to one, for `vmap` over seeds.

  Args:
    federations: of one data set and setting; only owners differ.

  Returns:
    Federation whose `train` and `test` are shared, and whose `clients`,
    `server`, `stream` and `validation` gain a leading axis of seeds. Its
    axes for `vmap` are `seed_axes(stacked)`.

  Raises:
    ValueError: if they differ in more than owners, or in the number of
      validation examples.
  """
  if not federations:
    raise ValueError('stack needs at least one federation')
  first = federations[0]
  def kind(f: Federation) -> tuple[Any, ...]:
    return (id(f.train.inputs), id(f.test.inputs), len(f.validation.labels),
            f.num_clients, None if f.stream is None else
            f.stream.num_labeled.shape, f.rounds_per_task,
            f.num_labeled_clients, f.num_classes)
  for i, f in enumerate(federations):
    if kind(f) != kind(first):
      raise ValueError(f'federation {i} differs from federation 0 in its '
                       'arrays of examples, sizes or setting: cannot stack')
  padded = pad_widths(federations)
  return dataclasses.replace(
      first,
      validation=Examples(np.stack([f.validation.inputs for f in padded]),
                          np.stack([f.validation.labels for f in padded])),
      clients=_stacked([f.clients for f in padded]),
      server=_stacked([f.server for f in padded]),
      stream=None if first.stream is None else _stacked(
          [f.stream for f in padded if f.stream is not None]))


def seed_axes(stacked: Federation) -> Federation:
  """Returns the `in_axes` of a stacked federation: 0 for an axis of seeds."""
  axes: dict[str, Any] = {
      'train': None, 'validation': 0, 'test': None, 'clients': 0, 'server': 0,
      'stream': None if stacked.stream is None else 0}
  return dataclasses.replace(stacked, **axes)


def class_counts(federation: Federation) -> tuple[np.ndarray, np.ndarray]:
  """Counts rows by client and class: int64[N, C] labeled and unlabeled.

  Rows of unknown class, label -1, are left out.
  """
  def counts(rows: Array, sizes: Array) -> np.ndarray:
    client, column = np.nonzero(np.arange(rows.shape[1]) < sizes[:, None])
    found = truth[rows[client, column]]
    cells = (client * num_classes + found)[found >= 0]
    flat = np.bincount(cells, minlength=sizes.size * num_classes)
    return flat.reshape(sizes.size, num_classes)
  truth = np.asarray(federation.train.labels)
  num_classes = federation.num_classes
  clients = federation.clients
  return (counts(clients.labeled, clients.num_labeled),
          counts(clients.unlabeled, clients.num_unlabeled))


def describe(federation: Federation) -> dict[str, Any]:
  """Describes how the data were dealt, in plain numbers ready for JSON.

  `labeled_classes` and `unlabeled_classes`, lists [N][C], are left out where
  N * C is above 20000; `class_counts` has them as arrays.
  """
  clients = federation.clients
  result: dict[str, Any] = {
      'num_clients': federation.num_clients,
      'num_classes': federation.num_classes,
      'num_train': len(federation.train.labels),
      'num_validation': len(federation.validation.labels),
      'num_test': len(federation.test.labels),
      'server_labeled': int(federation.server.num_labeled),
      'num_tasks': (1 if federation.stream is None
                    else federation.stream.num_labeled.shape[0]),
      'clients_with_labels': int((clients.num_labeled > 0).sum()),
      'clients_without_rows': int(
          (clients.num_labeled + clients.num_unlabeled == 0).sum()),
  }
  # What the scheme left over, and validation rows taken from `train`.
  dealt = int((clients.num_labeled + clients.num_unlabeled).sum())
  result['undealt'] = (
      result['num_train'] - dealt - result['server_labeled'])
  for kind, sizes, counts in zip(
      ('labeled', 'unlabeled'), (clients.num_labeled, clients.num_unlabeled),
      class_counts(federation), strict=True):
    result[kind] = {'total': int(sizes.sum()), 'min': int(sizes.min()),
                    'mean': float(sizes.mean()), 'max': int(sizes.max())}
    if counts.size <= _MAX_CELLS:
      result[f'{kind}_classes'] = counts.tolist()
  return result
