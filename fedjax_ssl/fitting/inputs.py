"""What `fit` takes for data: a name, arrays, a data set or a federation."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl import data
from fedjax_ssl.config import Config, FieldError, OPTIONS
from fedjax_ssl.core.types import Federation, Shard
from fedjax_ssl.data import datasets
from fedjax_ssl.data.datasets import files
from fedjax_ssl.training import command

_TAKES = ('a name, a tuple, list or dict of x_train, y_train, x_test and '
          'y_test, a data.Dataset or a Federation')


class Source(NamedTuple):
  """Where examples come from.

  Attributes:
    name: what `config.json` calls it.
    dataset: the examples; None if the data set is loaded by its name.
    partition: who owns which row, if that is given; else rows are dealt.
    options: those of the run that a given federation fixes.
    unread: names of options that say where examples come from, or how they are
      dealt, where that is given.
  """

  name: str
  dataset: data.Dataset | None = None
  partition: data.Partition | None = None
  options: Mapping[str, Any] = {}
  unread: frozenset[str] = frozenset()

  def load(self, options: Config) -> data.Dataset:
    """Returns the examples."""
    if self.dataset is not None:
      return self.dataset
    return data.load(options.dataset, options.data_dir, split=options.split,
                     embeddings=options.embeddings)


def source(given: Any) -> Source:
  """Makes a Source of what `fit` was given.

  Raises:
    TypeError: for anything but data; the message says what is taken.
    ValueError: for arrays that make no data set, or a federation that lends a
      row to two clients.
  """
  if isinstance(given, str):
    return Source(given)
  if isinstance(given, data.Dataset):
    return Source(given.name, given, unread=command.READING)
  if isinstance(given, Federation):
    return _of_federation(given)
  if isinstance(given, tuple | list):
    if len(given) != len(files.KEYS):
      raise TypeError(f'dataset must be {_TAKES}, not a '
                      f'{type(given).__name__} of {len(given)}.')
    given = dict(zip(files.KEYS, given, strict=True))
  if not isinstance(given, Mapping):
    raise TypeError(f'dataset must be {_TAKES}, not {type(given).__name__}.')
  if why := files.unfit(given):
    raise TypeError(f'dataset must be {_TAKES}; {why}.')
  return Source(datasets.ARRAYS, _of_arrays(given), unread=command.READING)


def _of_arrays(given: Mapping[str, Any]) -> data.Dataset:
  """A data set of arrays; images are not mirrored, as letters must not be."""
  as_array, names = files.as_array, {'train': 'train', 'test': 'test'}
  if 'x_val' in given:
    names['validation'] = 'val'
  made = files.of_arrays(
      {part: (as_array(f'x_{key}', given[f'x_{key}']),
              as_array(f'y_{key}', given[f'y_{key}']))
       for part, key in names.items()},
      {key: as_array(key, given[key]) for key in files.BESIDE if key in given})
  owner, clients = made.owners()
  return _dataset(datasets.ARRAYS, made.parts)._replace(
      owner=owner, client_names=clients, class_names=made.class_names,
      vocabulary=made.vocabulary)


def _dataset(name: str, parts: Mapping[str, Any], num_classes: int = 0
             ) -> data.Dataset:
  train = parts['train']
  mean, std = ((0.0,), (1.0,)) if train.inputs.ndim < 4 else (
      datasets.moments(np.asarray(train.inputs)))
  return data.Dataset(
      name, train, parts['test'], num_classes or int(train.labels.max()) + 1,
      mean, std, False, parts.get('validation'))


def _of_federation(given: Federation) -> Source:
  """A Source whose clients own the same rows as in a federation."""
  data.federation.check(given)
  parts = {name: type(given.train)(*map(np.asarray, getattr(given, name)))
           for name in ('train', 'validation', 'test')}
  count, clients = given.num_clients, given.clients
  size = len(parts['train'].labels)
  labeled, unlabeled = np.full((2, size), -1, np.int32)
  tasks = None if given.stream is None else np.full(size, -1, np.int32)
  _own(labeled, clients.labeled, clients.num_labeled, np.arange(count))
  _own(unlabeled, clients.unlabeled, clients.num_unlabeled, np.arange(count))
  at_server = int(given.server.num_labeled) > 0
  if at_server or int(given.server.num_unlabeled):
    server = Shard(*(np.asarray(leaf)[None] for leaf in given.server))
    _own(labeled, server.labeled, server.num_labeled, np.array([count]))
  if int(given.server.num_unlabeled) or (
      at_server and np.any(clients.num_labeled)):
    raise ValueError('fit takes no federation whose server holds unlabeled '
                     'rows, or labels beside the clients; use train.')
  if tasks is not None and given.stream is not None:
    for task, (rows, sizes) in enumerate(zip(
        given.stream.unlabeled, given.stream.num_unlabeled, strict=True)):
      _own(tasks, rows, sizes, np.full(count, task))
    _check_labels_stay(given.stream, clients, size)
  if ((labeled >= 0) & (unlabeled >= 0)).any():
    raise ValueError('a row of the federation is both labeled and unlabeled.')
  return Source(
      datasets.FEDERATION,
      _dataset(datasets.FEDERATION, parts, given.num_classes),
      data.partition.make_partition(labeled, unlabeled, tasks=tasks), {
          'num_clients': count, 'labels_per_class': None,
          'labeled_fraction': None,
          'labels_at': 'server' if at_server else 'clients',
          'max_rows': 0, 'rounds_per_task': given.rounds_per_task,
          'num_labeled_clients': given.num_labeled_clients,
          'num_partly_labeled_clients': 0},
      command.READING | command.DEALING)


def _check_labels_stay(stream: Shard, clients: Shard, size: int) -> None:
  """Raises ValueError if clients have other labeled rows in some task."""
  def owners(rows: Any, sizes: Any) -> np.ndarray:
    owner = np.full(size, -1, np.int32)
    _own(owner, rows, sizes, np.arange(len(sizes)))
    return owner
  held = owners(clients.labeled, clients.num_labeled)
  for task, (rows, sizes) in enumerate(zip(
      np.asarray(stream.labeled), np.asarray(stream.num_labeled),
      strict=True)):
    if (owners(rows, sizes) != held).any():
      raise ValueError(f'the labeled rows of task {task} of the stream are not '
                       'those of clients; fit takes none that change; use '
                       'train.')


def _own(owner: np.ndarray, table: Any, sizes: Any, who: np.ndarray) -> None:
  """Writes the owners of a table's rows into `owner`."""
  table, sizes = np.asarray(table), np.asarray(sizes)
  real = np.arange(table.shape[-1]) < sizes[:, None]
  rows = table[real]
  if len(np.unique(rows)) < rows.size or (owner[rows] >= 0).any():
    raise ValueError('the federation lends a row to two clients; fit takes '
                     'one whose rows have one owner each; use train.')
  owner[rows] = np.broadcast_to(who[:, None], table.shape)[real]


def check_free(given: Mapping[str, Any], source_: Source, *,
               begins: bool = True) -> None:
  """Refuses options that contradict the given data, or that nothing reads.

  Args:
    given: options by name.
    source_: the data.
    begins: whether the run is new. A stored one may have been given what
      nothing reads.

  Raises:
    FieldError: naming the first one.
  """
  for name, value in source_.options.items():
    if name in given and given[name] != value:
      raise FieldError(name, given[name], 'the given federation has '
                       f'{"its own" if value is None else value}; leave it out.'
                       )
  for name in sorted(source_.unread & set(given)) if begins else ():
    if given[name] == OPTIONS[name].default:
      continue
    what = ('rows have their owners already' if name in command.DEALING else
            'the examples are given')
    raise FieldError(name, given[name], f'{what}; leave it out.')
