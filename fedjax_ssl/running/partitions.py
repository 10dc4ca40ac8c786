"""Deals a data set's rows to clients: the partition of each seed of a run."""
from __future__ import annotations

import numpy as np

from fedjax_ssl import data
from fedjax_ssl.config import Config
from fedjax_ssl.core import blame, descriptions, registry
from fedjax_ssl.core.checks import FieldError
from fedjax_ssl.running import dealing
from fedjax_ssl.running.settings import Setting
from fedjax_ssl.training import processes

_DARK = 64  # Images with less everywhere probably have another scale.


def deal(setting: Setting, options: Config, dataset: data.Dataset
         ) -> dict[int, data.Partition]:
  """Deals the rows of a data set, for each seed.

  Raises:
    FieldError: if the set has too few examples, or the options name no labels
      that the setting deals.
  """
  dealing.check_asked(setting.deal, options)
  num_train = len(dataset.train.labels)
  if options.num_clients > num_train:
    raise FieldError(
        'num_clients', options.num_clients, 'there are more clients than the '
        f'{num_train} training examples.', dataset=options.dataset)
  if not len(dataset.test.labels):
    raise FieldError('dataset', options.dataset, 'no test examples.')
  pixels = np.asarray(dataset.train.inputs)
  if pixels.ndim == 4 and 0 < (brightest := pixels.max()) < _DARK:
    processes.note(
        f'The images hold 0 to {brightest}, where 255 is white; if that is '
        'their scale, multiply them: views expect it.')
  return {seed: _partition(setting, options, dataset, seed)
          for seed in options.all_seeds}


def _partition(setting: Setting, options: Config, dataset: data.Dataset,
               seed: int) -> data.Partition:
  """One seed's partition: from a file, or dealt.

  Rows without a label, -1, go to clients at random and evenly, where the data
  do not name their clients; but to none that by the setting has labels only.
  """
  labels = np.asarray(dataset.train.labels)
  if options.partition_file:
    try:
      found = data.load_partition(options.partition_file, labels.size,
                                  options.num_clients, labels=labels)
      if (labels < 0)[(found.labeled >= 0) | found.validation].any():
        raise ValueError('a row that has no label (-1) is labeled in it, or '
                         'held out')
      return found
    except ValueError as error:
      reason = str(error).removeprefix(
          f'partition file {options.partition_file}: ')
      raise FieldError('partition_file', options.partition_file, f'{reason}.'
                       ) from error
  if options.partition_seed is not None:
    seed = options.partition_seed
  owner = dataset.owner if options.partition == 'natural' else None
  deal = setting.deal if owner is None else dealing.natural(owner)
  rng = np.random.default_rng([seed, 0x5353])
  validation, known = np.zeros(labels.size, bool), labels >= 0
  if dataset.validation is None:
    validation = data.choose_validation(
        rng, labels, fraction=options.validation_fraction,
        where=None if known.all() else known)
  pool = _drawn(seed, ~validation, options.max_rows)
  labeled, unlabeled, *tasks = _owners(setting, deal, rng, labels, pool & known,
                                      options)
  if not known.all():
    if tasks:
      raise FieldError('dataset', options.dataset, 'has rows without a label '
                       '(-1), which a stream of tasks cannot deal.')
    rows = rng.permutation(np.flatnonzero(pool & ~known))
    first = dealing.num_known(options)
    unlabeled[rows] = owner[rows] if owner is not None else (
        first + np.arange(rows.size) % (options.num_clients - first))
  return data.Partition(labeled, unlabeled, validation, *tasks)


def _owners(setting: Setting, deal: dealing.Deal,
            rng: np.random.Generator, labels: np.ndarray, pool: np.ndarray,
            options: Config) -> tuple[np.ndarray, ...]:
  """Deals rows; what a user's own function does wrong names the setting."""
  if registry.is_library(deal):
    return tuple(deal(rng, labels, pool, options))
  with blame.naming('setting', setting.name, own=True):
    labeled, unlabeled, *tasks = deal(rng, labels, pool, options)
    made = data.partition.make_partition(
        labeled, unlabeled, None, *tasks)
    data.partition.check_partition(made, labels.size, options.num_clients)
    outside = ((made.labeled >= 0) | (made.unlabeled >= 0)) & ~pool
    if outside.any():
      raise ValueError(
          f'it deals {descriptions.count(int(outside.sum()), "row")} for which '
          f'pool is False, first row {int(np.argmax(outside))}: these are held '
          'out, or their labels are not known. Deal numpy.where(pool, owner, '
          '-1).')
  return tuple(x for x in (made.labeled, made.unlabeled, made.tasks)
               if x is not None)


def _drawn(seed: int, pool: np.ndarray, most: int) -> np.ndarray:
  """Draws at most so many rows of a pool bool[D], by its own generator."""
  rows = np.flatnonzero(pool)
  if not most or len(rows) <= most:
    return pool
  rng = np.random.default_rng([seed, 0x4D52])
  drawn = np.zeros_like(pool)
  drawn[rng.choice(rows, most, replace=False)] = True
  return drawn
