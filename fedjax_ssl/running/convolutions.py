"""Times convolutions, to choose their forms and how many clients run together.

On a CPU the forms follow rules that were measured once, and so they do where a
run is done sooner than the timing. Elsewhere, and with `--conv_impl=measure`,
they are timed at the start of a new run, unless this machine has timed the
layers before. What is chosen replaces the words `auto` and `measure`, and a
chunk size of 0, in `config.json`, so that the run goes on as it began.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
import dataclasses
import functools
import pathlib
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_ssl import data
from fedjax_ssl import task as task_lib
from fedjax_ssl.config import Config
from fedjax_ssl.core import conv_forms, tree
from fedjax_ssl.core.types import Task
from fedjax_ssl.data import batching
from fedjax_ssl.ops import conv, conv_measure
from fedjax_ssl.running import client_steps, stored_options
from fedjax_ssl.training import environment, loop, processes
from fedjax_ssl.training import workdir as workdir_lib

# What leaves a choice to the clock, or to the stored run.
_OPEN = ('auto', conv_forms.MEASURE, 0)
# Seconds that timing may take; what is under way then comes to its end.
_PATIENCE = 50.0
# Operations of a run's steps, as `_work` counts them for a device, that take
# about so long: an H200 did 7e13 a second.
_SHORT = 3e15
# Bytes of messages that lanes may keep until a round's end: they are added in
# a fixed order then.
_KEPT = 4e9
Forms = Mapping[str, Collection[str]]


class Choice(NamedTuple):
  """Options that timing decides on; see `Config`."""

  conv_impl: str
  client_map: str
  chunk_size: int


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
  # From another process it comes as a list.
  found = Choice(*processes.once(lambda: _found(options, dataset, deals)))
  return dataclasses.replace(
      options, conv_impl=found.conv_impl, client_map=found.client_map,
      chunk_size=found.chunk_size)


def _found(options: Config, dataset: data.Dataset,
           deals: Mapping[int, data.Partition]) -> Choice:
  given = Choice(options.conv_impl, options.client_map, options.chunk_size)
  if workdir_lib.stored_config(options.workdir):
    return given._replace(**stored_options.read(options.workdir, [
        name for name, value in given._asdict().items() if value in _OPEN]))
  if options.conv_impl == conv_forms.MEASURE or (
      options.conv_impl == 'auto'
      and environment.devices()[0].platform != 'cpu'):
    return _measured(options, given, dataset, deals)
  return given


def _measured(options: Config, given: Choice, dataset: data.Dataset,
              deals: Mapping[int, data.Partition]) -> Choice:
  """Asks the clock about all that is open."""
  rows = _rows(options, deals)
  task = task_lib.make_task(task_lib.TaskSpec(
      num_classes=dataset.num_classes,
      input_shape=tuple(dataset.train.inputs.shape[1:]), model=options.model,
      norm=options.norm, compute_dtype=options.compute_dtype,
      labeled_batch=options.labeled_batch,
      unlabeled_batch=options.unlabeled_batch,
      unlabeled_capacity=rows - options.labeled_batch,
      local_epochs=options.local_epochs, local_steps=options.local_steps))
  found = layers(task, dataset.train.inputs[:1])
  again = options.conv_impl == conv_forms.MEASURE
  devices = min(options.num_devices or jax.device_count(),
                options.cohort_size)
  if not found or not again and _work(
      options, found, deals) / devices < _SHORT:
    return given._replace(conv_impl='auto')
  print(f'Timing the convolutions of {options.model}: {len({*found})} layers, '
        'about a minute at most.', file=sys.stderr)
  each = -(-options.cohort_size // devices)
  seeds = len(deals) if loop.seeds_together(
      options.seed_map, len(deals)) else 1
  machine = _machine()
  def measured(clients: int, forms: Forms, until: float) -> conv_measure.Table:
    return conv_measure.table(
        found, conv_measure.Load(rows, clients * seeds, options.compute_dtype),
        _path(), machine=machine, only=forms, until=until, again=again)
  if given.client_map == 'auto' and not given.chunk_size:
    model = task.model.shapes()
    alike = seeds > 1 or options.aggregation_order == 'fixed' and (
        each * tree.num_bytes(model) > _KEPT)
    return searched(measured, each, client_steps.equal(each) if alike else
                    client_steps.drawn(task, deals.values(),
                                       options.num_clients, each))
  together = 1 if given.client_map == 'map' else min(
      given.chunk_size or each, each)
  forms = conv_measure.fastest(
      measured(together, {}, time.monotonic() + _PATIENCE))
  return given._replace(
      conv_impl=conv_forms.joined(forms) or 'auto',
      client_map='vmap' if given.client_map == 'auto' else given.client_map)


def searched(measured: Callable[[int, Forms, float], conv_measure.Table],
             clients: int, steps: client_steps.Steps | None = None) -> Choice:
  """Finds the fastest forms, and how many clients should run together.

  All of them are tried, one after another, and, each layer in the form that is
  fastest for all, halves of them for as long as that gains. As many as run
  together are in lanes, if enough of them would wait under a vmap.

  Args:
    measured: (clients at once, forms to try by layer, time of the monotonic
      clock at which to stop) -> seconds of the forms by layer.
    clients: of a device in a round.
    steps: what they take; by default all take as many.
  """
  steps = steps or client_steps.equal(clients)

  def way(size: int) -> str:
    if size == 1:
      return 'map'
    waiting = steps('vmap', size)
    return 'lanes' if size < clients and steps(
        'lanes', size) < conv_measure.CLEARLY * waiting else 'vmap'

  @functools.cache
  def seconds(size: int) -> float:
    return steps(way(size), size) / size * conv_measure.total(tables[size])

  end = time.monotonic() + _PATIENCE
  half = end - _PATIENCE / 2
  tables = {clients: measured(clients, {}, half)}
  best = size = clients
  if seconds(best) == float('inf') and time.monotonic() > half:
    return _chosen(tables[best])  # Some layer's turn did not come.
  if clients > 1:
    tables[1] = measured(1, {}, end - _PATIENCE / 6)
  # Where all at once are too many for the memory, no form is known.
  forms = {layer: (form,) for layer, form in conv_measure.fastest(
      tables[clients]).items() if len(tables[clients][layer]) > 1}
  while size > 3:
    size = -(-size // 2)
    tables[size] = measured(size, forms, end)
    if seconds(size) > conv_measure.CLEARLY * seconds(best):
      break
    best = size
  best = min(best, 1, key=seconds) if clients > 1 else best
  if seconds(best) == float('inf'):
    return _chosen(tables[best])
  return _chosen(tables[best], way(best), 0 if best in (1, clients) else best)


def _chosen(table: conv_measure.Table, client_map: str = 'auto',
            chunk_size: int = 0) -> Choice:
  """Returns the fastest forms of those that are known."""
  return Choice(conv_forms.joined(conv_measure.fastest(table)) or 'auto',
                client_map, chunk_size)


def layers(task: Task, inputs: Any) -> list[conv.Layer]:
  """Lists the convolutions of a task's network in order, by tracing it.

  Args:
    task: the static choices.
    inputs: one row or more, as the data hold them; only their shape is read.
  """
  model = task.model.shapes()
  return conv_measure.layers_of(task.apply, model, inputs)


def _rows(options: Config, deals: Mapping[int, data.Partition]) -> int:
  """Rows of a local step, with labels and without."""
  if options.unlabeled_batch:
    return options.labeled_batch + options.unlabeled_batch
  held = [client_steps.sizes(deal, options.num_clients)
          for deal in deals.values()]
  return options.labeled_batch + batching.unlabeled_capacity(
      np.stack([np.asarray(shard.num_labeled) for shard in held]),
      np.stack([np.asarray(shard.num_unlabeled) for shard in held]),
      labeled_batch=options.labeled_batch, local_steps=options.local_steps)


def _work(options: Config, found: Collection[conv.Layer],
          deals: Mapping[int, data.Partition]) -> float:
  """Estimates the operations of the convolutions in the steps of a run.

  Passes that only label rows, and evaluation, are left out.
  """
  if options.local_steps:
    rows: float = options.local_steps * _rows(options, deals)
  else:
    dealt = np.mean([np.sum(deal.labeled >= 0) + np.sum(deal.unlabeled >= 0)
                     for deal in deals.values()])
    rows = options.local_epochs * float(dealt) / options.num_clients
  rounds = max(options.num_rounds, options.schedule_rounds or 0)
  return (rounds * len(deals) * options.cohort_size * rows
          * sum(map(conv_measure.operations, found)))


def _machine() -> str:
  """Returns what timings hold for: processor, libraries and this version."""
  now = environment.describe()
  return '; '.join(str(now.get(name)) for name in (
      'devices', 'machine', 'jax', 'jaxlib', 'fedjax_ssl', 'commit'))


def _path() -> pathlib.Path | None:
  """Returns where timings are kept; None for a user without a home."""
  folder = environment.cache()
  return folder and folder / 'convolutions.json'
