"""What the data decide: words `auto`, and clients that the data name."""
from __future__ import annotations

from collections.abc import Collection
import dataclasses
from typing import Any

from fedjax_ssl import config, data
from fedjax_ssl.config import Config

# Sides that images may be shrunk to.
_LEAST = 32


def decided(options: Config, given: Collection[str], dataset: data.Dataset
        ) -> Config:
  """Returns the options with what the data decide in its place.

  Args:
    options: what is asked for.
    given: names that the user gave, with which the data may not differ.
    dataset: the examples.

  Raises:
    FieldError: for clients that the data do not name, or another number.
  """
  shape = dataset.train.inputs.shape[1:]
  changed = {**_words(options, shape), **_clients(options, given, dataset)}
  return config.with_cohort(dataclasses.replace(options, **changed), given)


def _words(options: Config, shape: tuple[int, ...]) -> dict[str, Any]:
  """Network and views in place of `auto`.

  The default cutout has half of an image's side, which hides most of an object
  that fills the image; here it has a quarter. Images one pixel high are rows of
  a table, of which no view is known.
  """
  if len(shape) < 3:
    views = {'weak': 'none', 'strong': 'token_dropout'}
  elif _is_table(shape):
    views = {'weak': 'none', 'strong': 'none'}
  else:
    views = {'weak': 'flip_crop',
             'strong': f'ra_mc(cutout={min(shape[:2]) // 4})'}
  changed = {name: view for name, view in views.items()
             if getattr(options, name) == 'auto'}
  if options.model == 'auto':
    changed['model'] = _network(shape)
  return changed


def _is_table(shape: tuple[int, ...]) -> bool:
  return len(shape) == 3 and min(shape[:2]) == 1


def _network(shape: tuple[int, ...]) -> str:
  """A small network; large images are first shrunk to sides of 32 to 63.

  It has no normalization: with one, or as a residual network, it learns less in
  the same time; see experiments/results/own_data.md.
  """
  if len(shape) < 3:
    return 'text_mean'
  if _is_table(shape):
    return 'mlp'
  side = min(shape[:2])
  if side < 4:
    return 'linear'
  stride = 1
  while side // (2 * stride) >= _LEAST:
    stride *= 2
  return f'cnn(stride={stride})' if stride > 1 else 'cnn'


def _clients(options: Config, given: Collection[str], dataset: data.Dataset
             ) -> dict[str, Any]:
  """Returns the kind of partition, and how many clients there are."""
  if options.partition == 'setting':
    return {}
  if dataset.owner is None or dataset.client_names is None:
    if options.partition == 'natural':
      raise config.FieldError(
          'partition', 'natural', 'the data do not say whose row is whose: '
          'they have neither an array client_train nor a column client, nor a '
          'clients.csv in a folder of images.',
          dataset=options.dataset)
    return {'partition': 'setting'}
  number = len(dataset.client_names)
  if 'num_clients' in given and options.num_clients != number:
    raise config.FieldError(
        'num_clients', options.num_clients, f'the data name {number} clients; '
        'leave it out, or give partition=setting to have the rows dealt.',
        dataset=options.dataset)
  return {'partition': 'natural', 'num_clients': number}
