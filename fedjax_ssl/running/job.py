"""One method on one federation, built and checked before it is trained."""
from __future__ import annotations

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import hashlib
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import data, finished, methods
from fedjax_ssl import task as task_lib
from fedjax_ssl.config import Config, FieldError
from fedjax_ssl.core import (
  blame,
  checks,
  imports,
  noting,
  registry,
  sampling,
  tree,
)
from fedjax_ssl.core.types import Federation, Method, State, Task
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import attacks
from fedjax_ssl.running import (
  client_memory,
  dealing,
  devices,
  start_line,
  stored_options,
  stored_texts,
)
from fedjax_ssl.training import (
  own_code,
  runner,
)


class Job(NamedTuple):
  """Everything that can be checked before a folder is touched."""

  name: str  # For progress and tables.
  folder: pathlib.Path
  options: Config  # Every option.
  facts: dict[str, Any]  # What follows from flags and data.
  spec: task_lib.TaskSpec
  method: Method
  federations: list[Federation]
  seeds: list[int]
  partitions: list[data.Partition]
  labels: np.ndarray
  mesh: jax.sharding.Mesh | None
  num_parameters: int  # Of the model.
  # For each pass of a round, a function from a shard to a client's number of
  # steps.
  works: list[noting.Work]
  # For each pass, (number of groups, clients per group).
  cohorts: list[tuple[int, int]]
  origin: Mapping[str, Any]  # What started the run.
  # Options that the version which began the run did not have, at defaults.
  new: frozenset[str] = frozenset()
  views: frozenset[str] = frozenset()  # Views of `task` that a round makes.
  vocabulary: Mapping[str, int] | None = None  # Of a data set of texts.

  @property
  def config(self) -> dict[str, Any]:
    """Returns the options as `config.json` holds them."""
    return {k: v for k, v in {**vars(self.options), 'seeds': self.seeds}.items()
            if k not in self.new}


def build(dataset: data.Dataset, dealt: Mapping[int, data.Partition], name: str,
          folder: pathlib.Path, options: Config, origin: Mapping[str, Any], *,
          has_begun: bool) -> Job:
  """Builds the federations and the method, and traces a round.

  Args:
    dataset: the examples.
    dealt: the partition of each seed.
    name: of the run.
    folder: of the run.
    options: what else is asked for, in the words that are stored.
    origin: what started the run.
    has_begun: whether the folder holds a run, which may have knobs that do
      nothing.

  Raises:
    ValueError: for whatever does not fit; the message says what.
  """
  federations = [_federation(dataset, one, options) for one in dealt.values()]
  federations = data.federation.pad_widths(federations)
  _need_labels(federations, options)
  spec = _spec(dataset, federations, options)
  mesh = devices.mesh(options.num_devices)
  try:
    views: set[str] = set()
    task = _telling_views(task_lib.make_task(spec, mesh), views)
    with (blame.naming('method', options.method,
                      own=methods.is_own(options.method)),
          noting.passes() as noted,
          checks.stored() if has_begun else contextlib.nullcontext()):
      made = methods.make(options.method, task)
      # A round is traced without being run: impossible settings show here.
      state = runner.state_shape(made, federations[0])
      methods.check_report(made, state.server)
      runner.check_names(made, state, runner.totals_shape(
          made, federations[0], state))
      client_memory.check(options, made, state, federations, folder,
                          has_begun=has_begun)
      cohorts = [_cohort(one, federations[0], state)
                 for one in noted.samplers]
  except jax.errors.JAXTypeError:
    raise
  except TypeError as error:
    raise _knob_error(error, spec) from error
  facts = _facts(dataset, dealt, options, spec, task, federations[0], origin)
  params = task.model.shapes().params
  job = Job(
      name=name, folder=folder, options=options, facts=facts, spec=spec,
      method=made, federations=federations, seeds=list(dealt),
      partitions=list(dealt.values()), labels=np.asarray(dataset.train.labels),
      mesh=mesh, num_parameters=tree.num_scalars(params), works=noted.works,
      cohorts=cohorts, origin=origin, views=frozenset(views),
      vocabulary=dataset.vocabulary)
  if options.labels == 'all' and options.labels_at == 'server' and (
      start_line.is_idle(job)):
    raise FieldError(
        'labels', 'all', 'no unlabeled rows are left at the clients, and the '
        'method learns from no others there; give another, such as fedavg.',
        labels_at='server', method=options.method)
  return job


def _need_labels(federations: list[Federation], options: Config) -> None:
  """Raises FieldError if there is no labeled row where labels are."""
  at_server = options.labels_at == 'server'
  if all(np.sum((f.server if at_server else f.clients).num_labeled)
         for f in federations):
    return
  who = 'The server has no' if at_server else 'No client has a'
  what = f'{who} labeled example'
  if options.partition_file:
    raise FieldError('partition_file', options.partition_file,
                     f'{what} in it.', labels_at=options.labels_at)
  if options.labeled_fraction is not None:
    raise FieldError('labeled_fraction', options.labeled_fraction,
                     f'{what}; give more.', labels_at=options.labels_at)
  raise FieldError('labels_at', options.labels_at,
                   f'{what}; raise labels_per_class or labeled_fraction.')


def _facts(dataset: data.Dataset, dealt: Mapping[int, data.Partition],
           options: Config, spec: task_lib.TaskSpec, task: Task,
           federation: Federation, origin: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what follows from options and data; `config.json` holds it."""
  facts = {
      'data_hash': data_hash(dataset),
      'partition_hash': {str(seed): data.partition_hash(partition)
                         for seed, partition in dealt.items()},
      'choices': stored_texts.of(spec, options.profile),
      **own_code.of(vars(options), origin.get('setting', '')),
      'task': {**finished.spec_to_json(spec, federation),
               'seeds': list(dealt)},
      'federation': data.describe(federation)}
  if task.attack is not None:
    facts['hostile_clients'] = {
        str(seed): _hostile(task, seed, options.num_clients) for seed in dealt}
  if dataset.class_names is not None:  # Absent in runs that know none.
    facts['class_names'] = list(dataset.class_names)
  if options.partition == 'natural' and dataset.client_names is not None:
    facts['client_names'] = list(dataset.client_names)
  return facts


def _telling_views(task: Task, made: set[str]) -> Task:
  """Returns a task that tells, when it is traced, which views are made."""
  def watch(name: str, view: Callable[..., jax.Array]
            ) -> Callable[..., jax.Array]:
    def told(key: jax.Array, inputs: jax.Array) -> jax.Array:
      made.add(name)
      return view(key, inputs)
    return told
  views: dict[str, Any] = {
      name: watch(name, view) for name in ('weak', 'labeled_view', 'strong')
      if (view := getattr(task, name)) is not None}
  return dataclasses.replace(task, **views)


def _knob_error(error: TypeError, spec: task_lib.TaskSpec) -> Exception:
  """Turns a TypeError into a FieldError that names the given knobs.

  Returns the error itself if none was given, or if a user's code may be behind
  it, whose author needs the whole traceback.
  """
  if imports.where(error) or any(
      registry.is_own(getattr(spec, name) or '', known)
      for name, known in task_lib.REGISTRIES.items()):
    return error
  given = {name: text for name in task_lib.REGISTRIES
           if '(' in (text := getattr(spec, name) or '')}
  if not given:
    return error
  field = next(iter(given))
  return FieldError(field, given.pop(field), 'a knob has a wrong type: '
                    f'{str(error).splitlines()[0]}', **given)


def _hostile(task: Task, seed: int, num_clients: int) -> list[int]:
  """Clients that attack in the run of a seed."""
  assert task.attack is not None
  found = attacks.hostile(task.attack, runner.root_keys(seed)[0],
                          num_clients)
  return [int(client) for client in np.flatnonzero(found)]


def _cohort(sampler: sampling.Sampler, federation: Federation, state: State
            ) -> tuple[int, int]:
  """Returns how many groups a round draws, and of how many clients."""
  def ids(state: State, federation: Federation, key: jax.Array) -> jax.Array:
    return sampler(state, federation.at(jnp.int32(0)), key).ids
  groups, size = jax.eval_shape(ids, state, federation, jax.random.key(0)).shape
  return groups, size


def data_hash(dataset: data.Dataset) -> str:
  """Digests all examples, as hex: the same labels may have other images."""
  digest = hashlib.sha256()
  for part in (dataset.train, dataset.validation, dataset.test):
    for array in part or ():
      digest.update(np.ascontiguousarray(array).data)
  return digest.hexdigest()


def _federation(dataset: data.Dataset, dealt: data.Partition, options: Config
                ) -> Federation:
  holders, rounds_ = dealing.num_holders(options), options.rounds_per_task
  if (dealt.tasks is None) != (not rounds_):
    raise FieldError('rounds_per_task', rounds_, 'this setting is ' + (
        'no stream of tasks; leave it at 0.' if rounds_ else
        'a stream of tasks; give at least 1.'))
  last = int(dealt.labeled.max(initial=-1))
  if options.labels_at == 'clients' and 0 <= holders <= last:
    raise FieldError('num_labeled_clients', holders, 'the partition gives '
                     f'labels to client {last} (the first is 0).')
  return data.federate(
      dataset.train, dataset.validation, dataset.test, dealt,
      num_clients=options.num_clients, labels=options.labels,
      labels_at=options.labels_at, num_classes=dataset.num_classes,
      rounds_per_task=rounds_, num_labeled_clients=holders)


def _spec(dataset: data.Dataset, federations: list[Any], options: Config
          ) -> task_lib.TaskSpec:
  capacity = 0
  if not options.unlabeled_batch:
    parts = [f.tables for f in federations]
    capacity = batching.unlabeled_capacity(
        np.stack([part.num_labeled for part in parts]),
        np.stack([part.num_unlabeled for part in parts]),
        labeled_batch=options.labeled_batch, local_steps=options.local_steps)
  fields = {field.name for field in dataclasses.fields(task_lib.TaskSpec)}
  return task_lib.TaskSpec(
      **{name: value for name, value in vars(options).items()
         if name in fields},
      num_classes=dataset.num_classes,
      input_shape=tuple(dataset.train.inputs.shape[1:]),
      mean=tuple(dataset.mean), std=tuple(dataset.std), flip=dataset.flip,
      unlabeled_capacity=capacity)


def schedule_rounds(options: Config) -> int:
  """Returns what is given, else what the first start stored or `num_rounds`."""
  if options.schedule_rounds is not None:
    return options.schedule_rounds
  stored = stored_options.read(options.workdir, ['schedule_rounds'])
  return stored.get('schedule_rounds') or options.num_rounds
