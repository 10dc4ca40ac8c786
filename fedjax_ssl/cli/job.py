"""One method on one federation: built, checked, trained, resumed."""
from __future__ import annotations

from collections.abc import Mapping
import contextlib
import dataclasses
import hashlib
import io
import json
import math
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_ssl import data, methods
from fedjax_ssl import task as task_lib
from fedjax_ssl.cli import (
  devices,
  errors,
  flags,
  printing,
  start_line,
  stopping,
)
from fedjax_ssl.core import choices, registry, rounds, sampling
from fedjax_ssl.core.types import Task
from fedjax_ssl.data import batching
from fedjax_ssl.report import command, summary
from fedjax_ssl.training import (
  checkpoint,
  loop,
  metrics,
  pictures,
  processes,
  progress,
)
from fedjax_ssl.training import runner as seeds_lib
from fedjax_ssl.training import workdir as workdir_lib
from fedjax_ssl.training.checkpoint import sealed

FLAGS = flags.FLAGS


class Job(NamedTuple):
  """Everything that can be checked before a folder is touched."""

  name: str  # For progress and tables.
  folder: pathlib.Path
  config: dict[str, Any]  # Flags that a later start must bring again.
  facts: dict[str, Any]  # What follows from flags and data.
  spec: task_lib.TaskSpec
  method: Any
  federations: list[Any]
  seeds: list[int]
  partitions: list[data.Partition]
  labels: np.ndarray
  mesh: jax.sharding.Mesh | None
  num_parameters: int  # Of the model.
  works: list[rounds.Work]  # Of the passes of a round: a client's steps.
  cohorts: list[tuple[int, int]]  # Of them: groups, and clients of each.
  origin: Mapping[str, Any]  # What started the run.


def build(dataset: data.Dataset, dealt: Mapping[int, data.Partition], name: str,
          folder: pathlib.Path, labels: str, method: str, horizon: int,
          origin: Mapping[str, Any]) -> Job:
  """Builds the federations and the method, and traces a round.

  Args:
    dataset: the examples.
    dealt: the partition of each seed.
    name: of the run.
    folder: of the run.
    labels: 'few' or 'all'.
    method: its name and knobs.
    horizon: rounds that schedules span.
    origin: what started the run.

  Raises:
    ValueError: for whatever does not fit; the message says what.
  """
  federations = [_federation(dataset, one, labels) for one in dealt.values()]
  federations = data.federation.pad_widths(federations)
  if FLAGS.labels_at == 'server' and not federations[0].server.num_labeled:
    raise ValueError('--labels_at=server, but the server has no labeled '
                     'examples; raise --labels_per_class or '
                     '--labeled_fraction.')
  if FLAGS.labels_at == 'clients' and not all(
      np.sum(f.clients.num_labeled) for f in federations):
    raise ValueError('No client has a labeled example; raise '
                     '--labels_per_class or --labeled_fraction.')
  if labels == 'all' and FLAGS.labels_at == 'server' and (
      registry.parse(method)[0] not in ('fedavg', 'fedprox')):
    raise ValueError(
        f'--labels=all with --labels_at=server leaves --method={method} no '
        'unlabeled rows at the clients; give --method=fedavg or fedprox.')
  spec = _spec(dataset, federations, method, horizon)
  mesh = devices.mesh()
  try:
    task = task_lib.make_task(spec, mesh)
    with (errors.of_method(method), rounds.noting_work() as works,
          rounds.noting_samplers() as samplers):
      made = methods.make(method, task)
      # A round is traced without being run: impossible settings show here.
      state = task_lib.template(made, federations[0])
      seeds_lib.totals_shape(made, federations[0], state)
      cohorts = [_cohort(one, federations[0], state) for one in samplers]
  except jax.errors.JAXTypeError:
    raise
  except TypeError as error:
    raise _of_a_knob(error, method) from error
  seeds, partitions = list(dealt), list(dealt.values())
  config = {**flags.values(), 'labels': labels, 'method': method,
            'schedule_rounds': spec.schedule_rounds, 'seeds': seeds,
            'seed': None}
  facts = {
      'data_hash': _data_hash(dataset),
      'partition_hash': {str(s): data.partition_hash(p)
                         for s, p in zip(seeds, partitions, strict=True)},
      'choices': _choices(spec),
      'task': {**task_lib.spec_to_json(spec, federations[0]), 'seeds': seeds},
      'federation': data.describe(federations[0])}
  return Job(name, folder, config, facts, spec, made, federations, seeds,
             partitions, np.asarray(dataset.train.labels), mesh,
             _num_parameters(task), works, cohorts, origin)


def _choices(spec: task_lib.TaskSpec) -> dict[str, dict[str, Any]]:
  """What the flags that hold texts stand for, and which they were."""
  found = task_lib.resolved(spec)
  found['method']['profile'] = FLAGS.profile
  return found


def _num_parameters(task: Task) -> int:
  shapes = jax.eval_shape(task.model.init, jax.random.key(0)).params
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def _cohort(sampler: sampling.Sampler, federation: Any, state: Any
            ) -> tuple[int, int]:
  """How many groups a round draws, and of how many clients."""
  def ids(state, federation, key):
    return sampler(state, federation.at(0), key).ids
  groups, size = jax.eval_shape(ids, state, federation, jax.random.key(0)).shape
  return groups, size


def _data_hash(dataset: data.Dataset) -> str:
  """Hex digest of all examples: the same labels may come with other images."""
  digest = hashlib.sha256()
  for part in (dataset.train, dataset.validation, dataset.test):
    for array in part or ():
      digest.update(np.ascontiguousarray(array).data)
  return digest.hexdigest()


def _of_a_knob(error: TypeError, method: str) -> Exception:
  """Names the knobs given, one of which is of a wrong type; else the bug."""
  given = [f'--{name}={text}' for name, text in {
      'method': method, 'model': FLAGS.model, 'weak': FLAGS.weak,
      'strong': FLAGS.strong, 'lr_schedule': FLAGS.lr_schedule}.items()
           if '(' in text]
  if not given:
    return error
  reason = str(error).splitlines()[0]
  return ValueError(f'A knob of {", ".join(given)} has a wrong type: {reason}')


def _federation(dataset: data.Dataset, dealt: data.Partition, labels: str):
  holders = FLAGS.num_labeled_clients
  if dealt.tasks is None and FLAGS.rounds_per_task:
    raise ValueError(f'--rounds_per_task={FLAGS.rounds_per_task}, but this '
                     'setting is no stream of tasks; leave it at 0.')
  if dealt.tasks is not None and not FLAGS.rounds_per_task:
    raise ValueError('--rounds_per_task=0, but this setting is a stream of '
                     'tasks; give at least 1.')
  last = int(dealt.labeled.max(initial=-1))
  if FLAGS.labels_at == 'clients' and 0 <= holders <= last:
    raise ValueError(
        f'--num_labeled_clients={holders}, but the partition gives labels to '
        f'client {last} (the first is 0).')
  return data.federate(
      dataset.train, dataset.validation, dataset.test, dealt,
      num_clients=FLAGS.num_clients, labels=labels, labels_at=FLAGS.labels_at,
      num_classes=dataset.num_classes,
      rounds_per_task=FLAGS.rounds_per_task, num_labeled_clients=holders)


def _spec(dataset: data.Dataset, federations: list[Any], method: str,
          horizon: int) -> task_lib.TaskSpec:
  capacity = 0
  if not FLAGS.unlabeled_batch:
    parts = [f.clients if f.stream is None else f.stream for f in federations]
    capacity = batching.unlabeled_capacity(
        np.stack([part.num_labeled for part in parts]),
        np.stack([part.num_unlabeled for part in parts]),
        labeled_batch=FLAGS.labeled_batch, local_steps=FLAGS.local_steps)
  known = {field.name for field in dataclasses.fields(task_lib.TaskSpec)}
  values = {k: v for k, v in flags.values().items() if k in known}
  values.update(
      method=method, num_classes=dataset.num_classes,
      input_shape=tuple(dataset.train.inputs.shape[1:]),
      norm=None if FLAGS.norm == 'auto' else FLAGS.norm,
      mean=tuple(dataset.mean), std=tuple(dataset.std), flip=dataset.flip,
      schedule_rounds=horizon, unlabeled_capacity=capacity)
  return task_lib.TaskSpec(**values)


def schedule_rounds() -> int:
  """The flag; else what the first start of the workdir stored; else rounds."""
  if FLAGS.schedule_rounds is not None:
    return FLAGS.schedule_rounds
  stored = None
  if FLAGS.workdir and (pathlib.Path(FLAGS.workdir) / 'config.json').exists():
    stored = workdir_lib.read_config(FLAGS.workdir).get('flags', {}).get(
        'schedule_rounds')
  return stored or FLAGS.num_rounds


def begun(job: Job) -> Job:
  """The job in the words with which its folder's run began.

  A text may be another than the run's first one, if it stands for the same.

  Raises:
    ValueError: if a text is the run's, but stands for something else today.
  """
  stored = processes.once(lambda: _stored(job.folder))
  known = stored.get('facts', {}).get('choices')
  if not known:
    return job
  try:
    return job._replace(facts=_begun_facts(job, stored['flags'], known))
  except (AttributeError, KeyError, TypeError) as error:
    raise ValueError(f'{job.folder / workdir_lib.CONFIG} is damaged: its '
                     f'choices are none ({error!r}).') from error


def _begun_facts(job: Job, stored: Mapping[str, Any],
                 known: Mapping[str, Any]) -> dict[str, Any]:
  """The facts of a job, with the texts that are known of its first start."""
  facts = {**job.facts, 'choices': dict(job.facts['choices'])}
  for field, now in job.facts['choices'].items():
    was = known.get(field, now)
    if not choices.changed(was['knobs'], now['knobs']):
      facts['choices'][field] = was
    elif now['text'] in (was['text'], stored.get(field)):
      raise ValueError(_other_default(job.folder, field, now, was))
  task = facts['task']
  texts = {field: chosen['text'] for field, chosen in facts['choices'].items()}
  facts['task'] = {**task, 'spec': {**task['spec'], **texts}}
  return facts


def _stored(folder: pathlib.Path) -> dict[str, Any]:
  """The configuration of a folder; {} if it holds no run yet."""
  if not (folder / workdir_lib.CONFIG).exists():
    return {}
  return workdir_lib.read_config(folder)


def _other_default(folder: pathlib.Path, field: str, now: Mapping[str, Any],
                   was: Mapping[str, Any]) -> str:
  """One line: what a text stood for, stands for, and how to go on."""
  differs = choices.changed(was['knobs'], now['knobs'])
  text = task_lib.renewed(field, now['text'], was['knobs'])
  return (f'{folder} began when --{field}={now["text"]} stood for '
          f'{choices.listed(differs, 0)}; today it stands for '
          f'{choices.listed(differs, 1)}. Go on with --{field}="{text}".')


def _texts(facts: Mapping[str, Any]) -> dict[str, Any]:
  """The flags that hold texts, as they were at the first start."""
  chosen = facts['choices']
  return {**{field: chosen[field]['text'] for field in chosen},
          'profile': chosen['method']['profile']}


def _may_differ(job: Job) -> tuple[str, ...]:
  """Flags that need not be as in the folder."""
  known = _stored(job.folder).get('facts', {}).get('choices', {})
  same = [field for field, chosen in job.facts['choices'].items()
          if known.get(field) == chosen]
  return (*flags.FREE, *same, *(['profile'] if 'method' in same else []))


def _check_folder(job: Job) -> None:
  """Raises ValueError unless the job continues the run of its folder."""
  workdir_lib.check_workdir(
      job.folder, job.config, allow=_may_differ(job), facts=job.facts)
  for seed, partition in zip(job.seeds, job.partitions, strict=True):
    file = _partition_file(job.folder, seed)
    if file.exists() and data.partition_hash(partition) != data.partition_hash(
        data.load_partition(file, len(job.labels), FLAGS.num_clients,
                            labels=job.labels)):
      raise ValueError(f'{file} is not the partition that this run began '
                       'with. Bring the old file back, or remove it to have '
                       'it written anew.')


def _partition_file(folder: pathlib.Path, seed: int) -> pathlib.Path:
  return folder / f'partition_{seed}.npz'


def open_folder(job: Job) -> workdir_lib.Workdir:
  """Locks a job's folder and stores there what a later reader needs."""
  if (job.folder / workdir_lib.CONFIG).exists():
    _check_folder(job)
  place = workdir_lib.open_workdir(
      job.folder, job.config, allow=_may_differ(job), facts=job.facts,
      origin=job.origin)
  def describe() -> None:
    command.write(place.path)
    for seed, partition in zip(job.seeds, job.partitions, strict=True):
      file = _partition_file(place.path, seed)
      if not file.exists():
        data.save_partition(file, partition, num_clients=FLAGS.num_clients,
                            labels=job.labels)

  try:
    processes.once(describe)
  except BaseException:
    place.close()
    raise
  return place


def run(job: Job, place: workdir_lib.Workdir) -> list[list[summary.Row]]:
  """Trains a job to the end, from wherever its folder stands.

  Args:
    job: what `build` made.
    place: what `open_folder` opened.

  Returns:
    The rows, one list a seed.
  """
  steps = _steps(job)
  saved = _restore(job, steps)
  done = saved[0] if saved else 0
  seals = processes.once(
      lambda: steps.metadata(done).get(sealed.FILES)) if saved else None
  if done < FLAGS.num_rounds:
    if processes.is_first():
      print(start_line.text(job, done), file=sys.stderr)
    with contextlib.ExitStack() as stack:
      files: list[metrics.MetricsWriter] = []  # Of the first process.
      processes.once(lambda: files.append(stack.enter_context(
          metrics.MetricsWriter(place.path, done, seals=seals,
                                track=flags.tracked(),
                                config=job.config))))
      _train(job, steps, files, saved)
  else:
    if processes.is_first():
      print(f'{job.name} was finished at round {done}; nothing was run.',
            file=sys.stderr)
    if seals:
      processes.once(lambda: metrics.settle(place.path, done, seals))
  rows = processes.once(lambda: summary.by_seed(metrics.read(place.path)))
  if not rows:
    raise ValueError(f'{job.folder} is at round {done}, but its '
                     f'{metrics.METRICS} holds no rows; remove the folder and '
                     'run again.')
  return rows


def _steps(job: Job) -> checkpoint.Checkpoints:
  """The checkpoints of a job, which know whose they are."""
  return checkpoint.Checkpoints(
      job.folder / 'checkpoints', run=sealed.identity(
          job.facts, {**job.config, **_texts(job.facts)}, flags.FREE))


def _restore(job: Job, steps: checkpoint.Checkpoints) -> Any:
  state = task_lib.template(job.method, job.federations[0])
  return steps.restore(seeds_lib.checkpoint_template(
      job.method, job.federations[0], state, job.seeds))


def _train(job: Job, steps: checkpoint.Checkpoints,
           files: list[metrics.MetricsWriter], saved: Any) -> None:
  several = len(job.seeds) > 1
  compilation = progress.Compilation()
  bar = progress.Progress(
      job.name, FLAGS.num_rounds, start=saved[0] if saved else 0,
      stream=None if processes.is_first() else io.StringIO(),
      compiled=compilation.seconds)
  seconds = {'now': 0.0}
  left_out = {'now': 0, 'said': 0}
  accuracies: list[float] = []  # Of the seeds, at the round just evaluated.

  def write(row: loop.Row, times: Any = None) -> metrics.Row:
    seed = {'seed': row.seed} if several else {}
    return files[0].write({'round': row.round, **seed, **row.values}, times)

  def record(row: loop.Row) -> None:
    written = write(row, {'seconds': seconds['now']})
    left_out['now'] += written.get('num_rejected', 0)
    if left_out['now'] and not left_out['said']:
      left_out['said'] = 1
      print(f'{job.name}: {left_out["now"]} updates left out up to round '
            f'{row.round}: NaN, infinite, or beyond --max_update_norm.',
            file=sys.stderr)
    accuracies.append(float(row.values['accuracy']))
    if row.seed == job.seeds[-1]:
      bar.update(row.round, float(np.mean(accuracies)))
      accuracies.clear()

  def on_row(row: loop.Row) -> None:
    processes.once(lambda: record(row))

  def on_progress(round_: int, now: float) -> None:
    trained()
    seconds['now'] = now
    if round_ < FLAGS.num_rounds:  # The last one comes with its accuracy.
      bar.update(round_)

  def on_save(round_: int, saved: Any) -> None:
    if FLAGS.pictures:
      processes.once(lambda: _draw(job, round_, saved))
    seals = processes.once(lambda: files[0].seals())
    steps.save(round_, saved, {'seeds': job.seeds, sealed.FILES: seals})

  def on_report(row: loop.Row) -> None:
    processes.once(lambda: write(row))

  observer = loop.Observer(on_row, on_save, on_progress, on_report)
  with stopping.saving() as trained, compilation.listening(), bar:
    if processes.count() > 1:  # They end together, so from the first round on.
      trained()
    result = loop.train(
        job.method, job.federations, num_rounds=FLAGS.num_rounds,
        seeds=job.seeds, eval_every=FLAGS.eval_every,
        checkpoint_every=FLAGS.checkpoint_every, seed_map=FLAGS.seed_map,
        mesh=job.mesh, saved=saved, observer=observer)
    bar.close()
    if left_out['said']:
      print(f'{job.name}: {left_out["now"]} updates were left out in all.',
            file=sys.stderr)
    if result.interrupted:
      if processes.is_first():
        printing.say(f'Stopped at round {result.round}; the same command with '
                     f'--workdir={FLAGS.workdir} continues.')
      raise processes.AgreedExit(0)


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


def evaluate(job: Job) -> None:
  """Evaluates the newest checkpoint, prints it, and writes nothing."""
  _check_folder(job)
  found = _restore(job, _steps(job))
  if found is None:
    raise ValueError(f'--workdir={job.folder} holds no checkpoint to '
                     'evaluate.')
  runs = seeds_lib.Sequential(job.method, job.federations, job.seeds, job.mesh)
  runs.start(found[1])
  for row in runs.scores(found[0]):
    plain = metrics.to_plain(
        {'round': row.round, 'seed': row.seed, **row.values})
    if processes.is_first():
      printing.say(json.dumps({'run': job.name, **plain}))
