"""The form of every convolution, and whether clients go together, by timing.

On a CPU the forms follow rules that were measured once. Elsewhere, and with
`--conv_impl=measure`, they are timed at the start of a new run, unless this
kind of device has met the layers before. What is chosen takes the place of the
words `auto` and `measure` in `config.json`, so that the run goes on as it
began.
"""
from __future__ import annotations

import dataclasses
import pathlib
import sys

import jax

from fedjax_ssl import data
from fedjax_ssl import task as task_lib
from fedjax_ssl.config import Config
from fedjax_ssl.core import conv_forms
from fedjax_ssl.ops import conv_measure
from fedjax_ssl.training import environment, processes
from fedjax_ssl.training import workdir as workdir_lib


def decided(options: Config, dataset: data.Dataset) -> Config:
  """Returns the options with what is fastest here in the place of `auto`.

  Args:
    options: what is asked for. Those of a stored run come from its folder,
      where the user does not say otherwise.
    dataset: the examples.
  """
  stored = workdir_lib.stored_config(options.workdir).get('flags')
  if stored:
    open_words = ('auto', conv_forms.MEASURE)
    return dataclasses.replace(
        options,
        conv_impl=stored.get('conv_impl', options.conv_impl)
        if options.conv_impl in open_words else options.conv_impl,
        client_map=stored.get('client_map', options.client_map)
        if options.client_map in open_words else options.client_map)
  if options.conv_impl != conv_forms.MEASURE and (
      options.conv_impl != 'auto'
      or environment.devices()[0].platform == 'cpu'):
    return options
  forms, client_map = processes.once(lambda: _measured(options, dataset))
  return dataclasses.replace(options, conv_impl=forms, client_map=client_map)


def _measured(options: Config, dataset: data.Dataset) -> tuple[str, str]:
  """The fastest forms, and how clients are taken."""
  spec = task_lib.TaskSpec(
      num_classes=dataset.num_classes,
      input_shape=tuple(dataset.train.inputs.shape[1:]), model=options.model,
      norm=options.norm, compute_dtype=options.compute_dtype)
  task = task_lib.make_task(spec)
  inputs = jax.eval_shape(task.preprocess, dataset.train.inputs[:1])
  layers = conv_measure.layers_of(
      lambda key, inputs: task.model.apply(task.model.init(key), inputs),
      jax.random.key(0), inputs)
  if not layers:
    return 'auto', options.client_map
  print(f'Timing the convolutions of {options.model}: {len(layers)} layers.',
        file=sys.stderr)
  rows = options.labeled_batch + (
      options.unlabeled_batch or options.labeled_batch)
  devices = min(options.num_devices or jax.device_count(),
                options.cohort_size)
  together = options.chunk_size or -(-options.cohort_size // devices)
  def measured(clients: int) -> dict[str, dict[str, float]]:
    return conv_measure.table(
        layers, conv_measure.Load(rows, clients, options.compute_dtype),
        _path())
  tables = {}
  if options.client_map == 'map' or (
      options.client_map == 'auto' and not options.chunk_size):
    tables['map'] = measured(1)
  if options.client_map != 'map':
    tables['vmap'] = measured(together)
  times = {'vmap': 1, 'map': together}
  best = min(tables, key=lambda way: (
      times[way] * conv_measure.total(tables[way])))
  return conv_forms.joined(conv_measure.fastest(tables[best])), best


def _path() -> pathlib.Path | None:
  """Where timings are kept; None for a user without a home."""
  folder = environment.cache()
  return folder and folder / 'convolutions.json'
