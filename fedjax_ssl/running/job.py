"""One method on one federation: built, checked, trained, resumed."""
from __future__ import annotations

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import hashlib
import io
import json
import pathlib
import sys
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import config, data, methods
from fedjax_ssl import task as task_lib
from fedjax_ssl.config import Config, FieldError
from fedjax_ssl.core import checks, rounds, sampling, tree
from fedjax_ssl.core.types import Federation, State, Task
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import attacks
from fedjax_ssl.report import command, printing, summary
from fedjax_ssl.running import (
  blame,
  client_memory,
  dealing,
  devices,
  spellings,
  start_line,
  stopping,
  stored_options,
)
from fedjax_ssl.training import (
  away,
  checkpoint,
  loop,
  metrics,
  own_code,
  pictures,
  processes,
  progress,
  runner,
)
from fedjax_ssl.training import workdir as workdir_lib
from fedjax_ssl.training.checkpoint import sealed


class Stopped(processes.AgreedExit):
  """A signal ended the run; `round` is saved."""

  def __init__(self, round_: int):
    """Takes the round reached."""
    super().__init__(0)
    self.round = round_


class Job(NamedTuple):
  """Everything that can be checked before a folder is touched."""

  name: str  # For progress and tables.
  folder: pathlib.Path
  options: Config  # Every option.
  facts: dict[str, Any]  # What follows from flags and data.
  spec: task_lib.TaskSpec
  method: Any
  federations: list[Any]
  seeds: list[int]
  partitions: list[data.Partition]
  labels: np.ndarray
  mesh: jax.sharding.Mesh | None
  num_parameters: int  # Of the model.
  # For each pass of a round, a function from a shard to a client's number of
  # steps.
  works: list[rounds.Work]
  # For each pass, (number of groups, clients per group).
  cohorts: list[tuple[int, int]]
  origin: Mapping[str, Any]  # What started the run.
  # Options that the version which began the run did not have, at defaults.
  new: frozenset[str] = frozenset()

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
  at_server = options.labels_at == 'server'
  if not all(np.sum((f.server if at_server else f.clients).num_labeled)
             for f in federations):
    who = 'The server' if at_server else 'No client'
    has = 'has no' if at_server else 'has a'
    what = f'{who} {has} labeled example'
    if options.labeled_fraction is not None and not options.partition_file:
      raise FieldError('labeled_fraction', options.labeled_fraction,
                       f'{what}; give more.', labels_at=options.labels_at)
    raise FieldError('labels_at', options.labels_at,
                     f'{what}; raise labels_per_class or labeled_fraction.')
  spec = _spec(dataset, federations, options)
  mesh = devices.mesh(options.num_devices)
  try:
    task = task_lib.make_task(spec, mesh)
    with (blame.naming_method(options.method), rounds.noting() as noted,
          checks.stored() if has_begun else contextlib.nullcontext()):
      made = methods.make(options.method, task)
      # A round is traced without being run: impossible settings show here.
      state = runner.state_shape(made, federations[0])
      methods.check_report(made, state.server)
      runner.totals_shape(made, federations[0], state)
      client_memory.check(options, made, state, federations, folder)
      cohorts = [_cohort(one, federations[0], state)
                 for one in noted.samplers]
  except jax.errors.JAXTypeError:
    raise
  except TypeError as error:
    raise blame.knob_error(error, spec) from error
  seeds, partitions = list(dealt), list(dealt.values())
  facts = {
      'data_hash': data_hash(dataset),
      'partition_hash': {str(s): data.partition_hash(p)
                         for s, p in zip(seeds, partitions, strict=True)},
      'choices': spellings.of(spec, options.profile),
      **own_code.of(vars(options), origin.get('setting', '')),
      'task': {**task_lib.spec_to_json(spec, federations[0]), 'seeds': seeds},
      'federation': data.describe(federations[0])}
  if task.attack is not None:
    facts['hostile_clients'] = {
        str(s): _hostile(task, s, options.num_clients) for s in seeds}
  if dataset.class_names is not None:  # Absent in runs that know none.
    facts['class_names'] = list(dataset.class_names)
  if options.partition == 'natural' and dataset.client_names is not None:
    facts['client_names'] = list(dataset.client_names)
  params = jax.eval_shape(task.model.init, jax.random.key(0)).params
  job = Job(name, folder, options, facts, spec, made, federations, seeds,
            partitions, np.asarray(dataset.train.labels), mesh,
            tree.num_scalars(params), noted.works, cohorts, origin)
  if options.labels == 'all' and options.labels_at == 'server' and (
      start_line.is_idle(job)):
    raise FieldError(
        'labels', 'all', 'no unlabeled rows are left at the clients, and the '
        'method learns from no others there; give another, such as fedavg.',
        labels_at='server', method=options.method)
  return job


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
    parts = [f.clients if f.stream is None else f.stream for f in federations]
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


def _check_folder(job: Job) -> None:
  """Raises ValueError unless the job continues the run of its folder."""
  workdir_lib.check_workdir(
      job.folder, job.config, allow=spellings.may_differ(job), facts=job.facts)
  def look() -> None:
    for seed, partition in zip(job.seeds, job.partitions, strict=True):
      file = _partition_file(job.folder, seed)
      if file.exists() and data.partition_hash(
          partition) != data.partition_hash(data.load_partition(
              file, len(job.labels), job.options.num_clients,
              labels=job.labels)):
        raise ValueError(f'{file} is not the partition that this run began '
                         'with. Bring the old file back, or remove it to have '
                         'it written anew.')

  processes.once(look)


def _partition_file(folder: pathlib.Path, seed: int) -> pathlib.Path:
  return folder / f'partition_{seed}.npz'


def open_folder(job: Job) -> workdir_lib.Workdir:
  """Locks a job's folder and stores there what a later reader needs."""
  # Together, as the others may not see the folder, and what is checked is told.
  if processes.once(lambda: workdir_lib.holds_run(job.folder)):
    _check_folder(job)
  place = workdir_lib.open_workdir(
      job.folder, job.config, facts=job.facts, origin=job.origin,
      allow=spellings.may_differ(job))
  def describe() -> None:
    command.write(place.path)
    own_code.keep(place.path, vars(job.options))
    for seed, partition in zip(job.seeds, job.partitions, strict=True):
      file = _partition_file(place.path, seed)
      if not file.exists():
        data.save_partition(
            file, partition, num_clients=job.options.num_clients,
            labels=job.labels)

  try:
    processes.once(describe)
  except BaseException:
    place.close()
    raise
  return place


def run(job: Job, place: workdir_lib.Workdir, *, stream: TextIO | None = None
        ) -> list[list[summary.Row]]:
  """Trains a job to the end, from the newest checkpoint in its folder.

  Args:
    job: what `build` made.
    place: what `open_folder` opened.
    stream: where progress is shown; default: standard error.

  Returns:
    The rows, one list for each seed.

  Raises:
    Stopped: if a signal was heard; what is done is saved.
  """
  stream = (stream or sys.stderr) if processes.is_first() else io.StringIO()
  checkpoints = _checkpoints(job)
  saved = _restore(job, checkpoints)
  done = saved[0] if saved else 0
  if saved is None and (kept := processes.once(lambda: metrics.keep_beyond(
      place.path, job.options.checkpoint_every))):
    print(f'{job.folder} has no checkpoint and starts over; its rows are kept '
          f'in {kept}.', file=stream)
  seals = processes.once(
      lambda: checkpoints.metadata(done).get(sealed.FILES)) if saved else None
  if done < job.options.num_rounds:
    if processes.is_first():
      for line in (start_line.text(job, done), start_line.in_vain(job)):
        if line:
          print(line, file=stream)
    with contextlib.ExitStack() as stack:
      recorder = _Recorder(job, checkpoints, stream)
      processes.once(lambda: recorder.open(stack, place.path, done, seals))
      _train(job, recorder, saved)
  else:
    if seals:
      processes.once(lambda: metrics.cut_back(place.path, done, seals))
    print(f'{job.name} was finished at round {done}; nothing was run.',
          file=stream)
  rows = processes.once(lambda: summary.by_seed(metrics.read(place.path)))
  if not rows:
    raise ValueError(f'{place.path / metrics.METRICS} holds no rows, at round '
                     f'{done}; remove {job.folder} and run again.')
  return rows


def _checkpoints(job: Job) -> checkpoint.Checkpoints:
  """Returns the checkpoints of a job, which refuse steps of other runs."""
  return checkpoint.Checkpoints(
      job.folder / 'checkpoints', run=sealed.identity(
          job.facts, {**job.config, **spellings.first(job.facts)},
          config.MAY_CHANGE))


def _restore(job: Job, checkpoints: checkpoint.Checkpoints) -> Any:
  first = job.federations[0]
  return checkpoints.restore(runner.checkpoint_template(
      job.method, first, runner.state_shape(job.method, first), job.seeds,
      client_memory.place(job.options, job.folder)))


class _Recorder:
  """Writes and shows what a job measures, and makes its checkpoints.

  Every process has one and calls the same methods; the first one has files.
  """

  def __init__(self, job: Job, checkpoints: checkpoint.Checkpoints,
               stream: TextIO):
    """Is ready to `open` its files.

    Args:
      job: what is trained.
      checkpoints: where it is saved.
      stream: where progress is shown.
    """
    self.stream = stream
    self._job, self._checkpoints = job, checkpoints
    self._writer: metrics.MetricsWriter | None = None
    self._seconds = 0.0  # Since the start.
    self._since = 0  # The round at which this start went on.
    self._left_out = 0  # Updates since then.
    self._warned = False  # Whether a line has told of them.
    self._accuracies: list[float] = []  # By seed, at the last evaluated round.

  def open(self, stack: contextlib.ExitStack, folder: pathlib.Path, done: int,
           seals: Mapping[str, sealed.Seal] | None) -> None:
    """Opens the files of rows; the stack closes them."""
    options, self._since = self._job.options, done
    self._writer = stack.enter_context(metrics.MetricsWriter(
        folder, done, seals=seals, track=options.trackers,
        config=self._job.config))

  def observer(self, bar: progress.Progress, trained: Callable[[], None]
               ) -> loop.Observer:
    """Returns the functions that the training calls.

    Args:
      bar: shows how far it is.
      trained: called when there are rounds to save.
    """
    def on_row(row: loop.Row) -> None:
      processes.once(lambda: self._record(row, bar))

    def on_report(row: loop.Row) -> None:
      processes.once(lambda: self._write(row))

    def on_progress(round_: int, now: float) -> None:
      trained()
      self._seconds = now
      if round_ < self._job.options.num_rounds:
        bar.update(round_)  # The last one comes with its accuracy.

    return loop.Observer(on_row, self._save, on_progress, on_report)

  def say_left_out(self) -> None:
    """Says how many updates this start left out, if any were."""
    if self._warned:
      print(f'{self._job.name}: {self._left_out} updates were left out ' + (
          f'since round {self._since}.' if self._since else 'in all.'),
            file=self.stream)

  def _write(self, row: loop.Row, times: Mapping[str, Any] | None = None
             ) -> metrics.Row:
    assert self._writer is not None
    seed = {'seed': row.seed} if len(self._job.seeds) > 1 else {}
    return self._writer.write({'round': row.round, **seed, **row.values}, times)

  def _record(self, row: loop.Row, bar: progress.Progress) -> None:
    """Writes and shows an evaluated round of one seed."""
    written = self._write(row, {'seconds': self._seconds,
                                'since': self._since})
    self._left_out += written.get('num_rejected', 0)
    if self._left_out and not self._warned:
      self._warned = True
      print(f'{self._job.name}: {self._left_out} updates left out from round '
            f'{self._since + 1} to {row.round}: NaN, infinite, or beyond '
            '--max_update_norm.', file=self.stream)
    self._accuracies.append(float(row.values['accuracy']))
    if row.seed == self._job.seeds[-1]:
      bar.update(row.round, float(np.mean(self._accuracies)))
      self._accuracies.clear()

  def _save(self, round_: int, saved: Any) -> None:
    """Makes a checkpoint; `training.checkpoint` tells the order of writes."""
    if self._job.options.pictures:
      processes.once(lambda: _draw(self._job, round_, saved))
    seals = processes.once(self._seals)
    self._checkpoints.save(
        round_, saved, {'seeds': self._job.seeds, sealed.FILES: seals})

  def _seals(self) -> dict[str, dict[str, Any]]:
    assert self._writer is not None
    return self._writer.seals()


def _train(job: Job, recorder: _Recorder, saved: Any) -> None:
  options = job.options
  compilation = progress.Compilation()
  bar = progress.Progress(
      job.name, options.num_rounds, start=saved[0] if saved else 0,
      stream=recorder.stream, compiled=compilation.seconds)
  with stopping.saving() as trained, compilation.listening(), bar:
    # Processes stop together, so SIGTERM saves from the very first round.
    if processes.count() > 1:
      trained()
    result = loop.train(
        job.method, job.federations, num_rounds=options.num_rounds,
        seeds=job.seeds, eval_every=options.eval_every,
        checkpoint_every=options.checkpoint_every, seed_map=options.seed_map,
        mesh=job.mesh, saved=saved, observer=recorder.observer(bar, trained),
        place=client_memory.place(options, job.folder))
    bar.close()
    recorder.say_left_out()
    if result.interrupted:
      raise Stopped(result.round)


def _draw(job: Job, round_: int, saved: Any) -> None:
  """Writes what the method generates from the first seed's state."""
  state, federation = saved[str(job.seeds[0])]['state'], job.federations[0]
  known = federation.validation
  examples = known if len(known.labels) else federation.test
  # From the host: this process alone computes.
  server = jax.tree.map(jax.device_get, state.server)
  made = job.method.pictures and job.method.pictures(
      server, examples, jax.random.key(0))
  if made is not None:
    pictures.write(job.folder / 'pictures' / f'round_{round_:05d}.png', made)


def newest(job: Job) -> tuple[int, Any]:
  """Returns the round of the newest checkpoint, and what it holds.

  Raises:
    FieldError: if there is none.
  """
  found = _restore(job, _checkpoints(job))
  if found is None:
    raise FieldError('workdir', job.folder, 'holds no checkpoint to evaluate.')
  return found


def evaluate(job: Job) -> None:
  """Evaluates the newest checkpoint, prints it, and writes nothing."""
  _check_folder(job)
  round_, saved = newest(job)
  runs = away.runs(
      job.method, job.federations, job.seeds, job.mesh,
      client_memory.place(job.options, job.folder), reads_only=True)
  runs.start(saved)
  for row in runs.scores(round_):
    plain = metrics.to_plain(
        {'round': row.round, 'seed': row.seed, **row.values})
    if processes.is_first():
      printing.say(json.dumps({'run': job.name, **plain}))
