"""Times convolutions, to choose their forms and whether clients run together.

On a CPU the forms follow rules that were measured once. Elsewhere, and with
`--conv_impl=measure`, they are timed at the start of a new run, unless this
machine has timed the layers before. What is chosen replaces the words `auto`
and `measure` in `config.json`, so that the run goes on as it began.
"""
from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from fedjax_ssl import data
from fedjax_ssl import task as task_lib
from fedjax_ssl.config import Config
from fedjax_ssl.core import conv_forms
from fedjax_ssl.core.types import Task
from fedjax_ssl.data import batching
from fedjax_ssl.ops import conv, conv_measure
from fedjax_ssl.training import environment, loop, processes
from fedjax_ssl.training import workdir as workdir_lib

_OPEN = ('auto', conv_forms.MEASURE)


def decided(options: Config, dataset: data.Dataset,
            deals: Mapping[int, data.Partition]) -> Config:
  """Returns the options with what is fastest here in the place of `auto`.

  All processes of a run call it together.

  Args:
    options: what is asked for. Those of a stored run come from its folder,
      where the user does not say otherwise.
    dataset: the examples.
    deals: the partition of each seed.
  """
  forms, client_map = processes.once(lambda: _found(options, dataset, deals))
  return dataclasses.replace(options, conv_impl=forms, client_map=client_map)


def _found(options: Config, dataset: data.Dataset,
           deals: Mapping[int, data.Partition]) -> tuple[str, str]:
  """conv_impl and client_map."""
  stored = workdir_lib.stored_config(options.workdir).get('flags')
  if stored:
    def kept(name: str) -> str:
      given: str = getattr(options, name)
      return stored.get(name, given) if given in _OPEN else given
    return kept('conv_impl'), kept('client_map')
  if options.conv_impl == conv_forms.MEASURE or (
      options.conv_impl == 'auto'
      and environment.devices()[0].platform != 'cpu'):
    return _measured(options, dataset, deals)
  return options.conv_impl, options.client_map


def _measured(options: Config, dataset: data.Dataset,
              deals: Mapping[int, data.Partition]) -> tuple[str, str]:
  """The fastest forms, and the fastest client_map."""
  task = task_lib.make_task(task_lib.TaskSpec(
      num_classes=dataset.num_classes,
      input_shape=tuple(dataset.train.inputs.shape[1:]), model=options.model,
      norm=options.norm, compute_dtype=options.compute_dtype))
  found = layers(task, dataset.train.inputs[:1])
  if not found:
    return 'auto', options.client_map
  print(f'Timing the convolutions of {options.model}: {len(found)} layers.',
        file=sys.stderr)
  devices = min(options.num_devices or jax.device_count(),
                options.cohort_size)
  each = -(-options.cohort_size // devices)
  together = min(options.chunk_size or each, each)
  seeds = len(deals) if loop.seeds_together(
      options.seed_map, len(deals)) else 1
  rows, machine = _rows(options, deals), _machine()
  def measured(clients: int) -> conv_measure.Table:
    return conv_measure.table(
        found, conv_measure.Load(rows, clients * seeds, options.compute_dtype),
        _path(), machine=machine)
  tables = {}
  if options.client_map == 'map' or (
      options.client_map == 'auto' and not options.chunk_size):
    tables['map'] = measured(1)
  if options.client_map != 'map':
    tables['vmap'] = measured(together)
  forms, way = fastest(tables, together)
  return forms, 'lanes' if options.client_map == 'lanes' else way


def layers(task: Task, inputs: Any) -> list[conv.Layer]:
  """Lists the different convolutions of a task's network, by tracing it.

  Args:
    task: the static choices.
    inputs: one row or more, as the data hold them; only their shape is read.
  """
  return conv_measure.layers_of(
      lambda key, inputs: task.apply(task.model.init(key), inputs),
      jax.random.key(0), inputs)


def fastest(tables: Mapping[str, conv_measure.Table], clients: int
            ) -> tuple[str, str]:
  """Returns the fastest forms, as conv_impl has them, and client_map.

  Args:
    tables: under 'map' the seconds of one client, under 'vmap' of all.
    clients: how many run under the vmap.
  """
  times = {'vmap': 1, 'map': clients}
  best = min(tables, key=lambda way: (
      times[way] * conv_measure.total(tables[way])))
  forms = conv_forms.joined(conv_measure.fastest(tables[best]))
  return forms or 'auto', best


def _rows(options: Config, deals: Mapping[int, data.Partition]) -> int:
  """Rows of a local step, with labels and without."""
  if options.unlabeled_batch:
    return options.labeled_batch + options.unlabeled_batch
  def counts(owner: np.ndarray) -> np.ndarray:
    found = owner[(owner >= 0) & (owner < options.num_clients)]
    return np.bincount(found, minlength=options.num_clients)
  return options.labeled_batch + batching.unlabeled_capacity(
      np.stack([counts(deal.labeled) for deal in deals.values()]),
      np.stack([counts(deal.unlabeled) for deal in deals.values()]),
      labeled_batch=options.labeled_batch, local_steps=options.local_steps)


def _machine() -> str:
  """What timings hold for: processor, libraries and this version."""
  now = environment.describe()
  return '; '.join(str(now.get(name)) for name in (
      'devices', 'machine', 'jax', 'jaxlib', 'fedjax_ssl', 'commit'))


def _path() -> pathlib.Path | None:
  """Where timings are kept; None for a user without a home."""
  folder = environment.cache()
  return folder and folder / 'convolutions.json'
