"""A run's static choices as plain values, and a finished run read back."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import io
import json
import os
import pathlib
from typing import Any, NamedTuple, TypeVar
import zipfile

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import config, methods, models
from fedjax_ssl.config import Config
from fedjax_ssl.core import checks, choices, knobs, optimizers, registry
from fedjax_ssl.core.types import (
  Array,
  Examples,
  Federation,
  Method,
  PyTree,
  Shard,
  State,
  Task,
)
from fedjax_ssl.data import augment, preprocess
from fedjax_ssl.data.datasets import files
from fedjax_ssl.methods.parts import aggregators, attacks, server_optimizers

Kind = TypeVar('Kind', Examples, Shard)

@dataclasses.dataclass(frozen=True)
class TaskSpec:
  """Everything that makes a `Task`, as values that JSON can hold.

  See `core.types.Task` for the meaning of the fields, and `config` for their
  defaults and ranges. `norm` 'auto', or None, is the model's own,
  `labeled_view` None the weak view. `max_update_norm` 0 is off.

  `schedule_rounds` is how many rounds schedules and ramps span, however many
  `train` runs; None is the number that `train` is asked for.
  """

  num_classes: int
  input_shape: tuple[int, ...]
  method: str = Config.method
  model: str = Config.model
  norm: str | None = Config.norm
  conv_impl: str = Config.conv_impl
  compute_dtype: str = Config.compute_dtype
  mean: tuple[float, ...] = (0.0,)
  std: tuple[float, ...] = (1.0,)
  flip: bool = True
  weak: str = Config.weak
  labeled_view: str | None = Config.labeled_view
  strong: str = Config.strong
  optimizer: str = Config.optimizer
  learning_rate: float = Config.learning_rate
  momentum: float = Config.momentum
  weight_decay: float = Config.weight_decay
  lr_schedule: str = Config.lr_schedule
  schedule_rounds: int | None = Config.schedule_rounds
  labeled_batch: int = Config.labeled_batch
  unlabeled_batch: int = Config.unlabeled_batch
  unlabeled_capacity: int = 0
  local_epochs: int = Config.local_epochs
  local_steps: int = Config.local_steps
  cohort_size: int = Config.cohort_size
  labels_at: str = Config.labels_at
  client_map: str = Config.client_map
  chunk_size: int = Config.chunk_size
  aggregation_order: str = Config.aggregation_order
  max_update_norm: float = Config.max_update_norm
  aggregator: str = Config.aggregator
  server_optimizer: str = Config.server_optimizer
  server_learning_rate: float | None = Config.server_learning_rate
  attack: str = Config.attack


# Fields whose value is a name with knobs, and what that chooses from.
REGISTRIES: dict[str, Mapping[str, Callable[..., Any]]] = {
    'method': methods.METHODS, 'model': models.MODELS, 'weak': augment.WEAK,
    'labeled_view': augment.WEAK, 'strong': augment.STRONG,
    'lr_schedule': optimizers.SCHEDULES,
    'aggregator': aggregators.AGGREGATORS,
    'server_optimizer': server_optimizers.SERVER_OPTIMIZERS,
    'attack': attacks.ATTACKS}
# Knobs whose value is such a text itself, by field.
_NESTED = {'strong': {'weak': augment.WEAK}}
# What builders get from data and other fields, never from a text.
_FILLED = {'model': models.FILLED}


def _check(spec: TaskSpec) -> None:
  if not isinstance(spec, TaskSpec):
    raise TypeError(f'make_task takes a TaskSpec, not {spec!r}.')
  for name, value in vars(spec).items():
    if name not in ('input_shape', 'mean', 'std', 'flip', 'norm'):
      config.check(name, value)
  config.check('norm', spec.norm or Config.norm)
  shape = spec.input_shape
  if not isinstance(shape, tuple) or len(shape) not in (1, 2, 3) or not all(
      isinstance(side, int) and side > 0 for side in shape):
    raise checks.FieldError(
        'input_shape', shape, 'must be (height, width, channels) of images as '
        'stored, or (tokens,) or (tokens, numbers) of texts.')


def check_texts(texts: Mapping[str, str | None]) -> None:
  """Refuses names, knobs and numbers that are wrong whatever the data are.

  Args:
    texts: by field of `TaskSpec`; others are left alone, and so are None and
      'auto', which data decide.

  Raises:
    FieldError: for the first such text.
  """
  for field, known in REGISTRIES.items():
    if (text := texts.get(field)) not in (None, 'auto'):
      knobs.check(field, text, known, _FILLED.get(field, ()))


def notes(spec: TaskSpec) -> list[str]:
  """Says what the choices of a spec switch off, one line each.

  It looks only at knobs that are given, not at defaults; see `core.knobs`.
  """
  return [line for name, known in REGISTRIES.items()
          if (text := getattr(spec, name)) is not None
          for line in knobs.notes(text, known)]


def resolved(spec: TaskSpec) -> dict[str, dict[str, Any]]:
  """Returns what a spec's texts stand for: by field, the text and all knobs."""
  return {name: {'text': text, 'knobs': choices.resolved(
      text, known, _NESTED.get(name))} for name, known in REGISTRIES.items()
          if (text := getattr(spec, name)) is not None}


def renewed(field: str, text: str, was: Mapping[str, Any]) -> str:
  """Returns a text that stands today for what `text` did in a stored run.

  Args:
    field: of `TaskSpec`.
    text: its value.
    was: the knobs that `resolved` found then.

  Raises:
    ValueError: if there is none today.
  """
  return choices.renewed(text, was, REGISTRIES[field],
                         _NESTED.get(field))


def make_task(spec: TaskSpec, mesh: jax.sharding.Mesh | None = None) -> Task:
  """Makes the task that a spec describes.

  Args:
    spec: plain values.
    mesh: mesh with the one axis 'clients', or None for one device.

  Raises:
    ValueError: for an unknown name or a number out of range; the message
      names the field and what is allowed.
  """
  _check(spec)
  channels, side = models.input_needs(spec.model)
  shape = spec.input_shape
  if len(shape) == 3:
    height, width, depth = shape
    shape = (max(height, side or 0), max(width, side or 0), channels or depth)
  model = models.make(
      spec.model, num_classes=spec.num_classes, input_shape=shape,
      norm=None if spec.norm == Config.norm else spec.norm,
      conv_impl=spec.conv_impl, dtype=spec.compute_dtype)
  client_map = spec.client_map
  if client_map == 'auto':
    client_map = 'map' if jax.default_backend() == 'cpu' else 'vmap'
  if spec.chunk_size and client_map == 'map':
    raise checks.FieldError(
        'chunk_size', spec.chunk_size, 'clients are taken one by one; give '
        'vmap or lanes for client_map.', client_map='map')
  if client_map == 'lanes' and not spec.chunk_size:
    raise checks.FieldError(
        'client_map', 'lanes', 'it needs the number of lanes, at least 1.',
        chunk_size=0)
  return Task(
      model=model,
      num_classes=spec.num_classes,
      preprocess=preprocess.preprocessor(
          spec.mean, spec.std, channels=channels, side=side)
      if len(shape) == 3 else preprocess.as_floats,
      optimizer=optimizers.make(
          spec.optimizer, learning_rate=spec.learning_rate,
          momentum=spec.momentum, weight_decay=spec.weight_decay,
          schedule=spec.lr_schedule, horizon=spec.schedule_rounds),
      weak=augment.make_weak(spec.weak, flip=spec.flip),
      strong=augment.make_strong(spec.strong, flip=spec.flip),
      labeled_view=None if spec.labeled_view is None else augment.make_weak(
          spec.labeled_view, flip=spec.flip, field='labeled_view'),
      labeled_batch=spec.labeled_batch,
      unlabeled_batch=spec.unlabeled_batch,
      unlabeled_capacity=spec.unlabeled_capacity,
      local_epochs=spec.local_epochs,
      local_steps=spec.local_steps,
      cohort_size=spec.cohort_size,
      labels_at=spec.labels_at,
      schedule_rounds=spec.schedule_rounds,
      client_map=client_map,
      chunk_size=spec.chunk_size,
      aggregation_order=spec.aggregation_order,
      max_update_norm=spec.max_update_norm or float('inf'),
      aggregator=aggregators.make(spec.aggregator),
      server_optimizer=server_optimizers.make(
          spec.server_optimizer, spec.server_learning_rate),
      attack=attacks.make(spec.attack),
      mesh=mesh,
      input_shape=tuple(spec.input_shape))


def spec_to_json(spec: TaskSpec, federation: Federation) -> dict[str, Any]:
  """Returns what `load` needs to rebuild a method: the spec, and shapes."""
  # Files have always had null here, not 'auto'.
  norm = None if spec.norm == Config.norm else spec.norm
  return {'spec': {**dataclasses.asdict(spec), 'norm': norm},
          'federation': _shapes(federation)}


def _shapes(federation: Federation) -> dict[str, Any]:
  def of(part: Iterable[Any]) -> list[Any]:
    return [[list(np.shape(x)), str(np.asarray(x).dtype if not hasattr(
        x, 'dtype') else x.dtype)] for x in part]
  return {
      'train': of(federation.train), 'validation': of(federation.validation),
      'test': of(federation.test), 'clients': of(federation.clients),
      'server': of(federation.server),
      'stream': None if federation.stream is None else of(federation.stream),
      'rounds_per_task': federation.rounds_per_task,
      'num_labeled_clients': federation.num_labeled_clients,
      'num_classes': federation.num_classes}


def _federation_struct(saved: dict[str, Any]) -> Federation:
  def part(kind: type[Kind], leaves: Any) -> Kind:
    return kind(*[np.broadcast_to(np.zeros((), d), s) for s, d in leaves])
  stream = saved['stream']
  return Federation(
      train=part(Examples, saved['train']),
      validation=part(Examples, saved['validation']),
      test=part(Examples, saved['test']),
      clients=part(Shard, saved['clients']),
      server=part(Shard, saved['server']),
      stream=None if stream is None else part(Shard, stream),
      rounds_per_task=saved['rounds_per_task'],
      num_labeled_clients=saved['num_labeled_clients'],
      num_classes=saved['num_classes'])


class Run(NamedTuple):
  """A finished run.

  Attributes:
    spec: how it was configured.
    task: its task.
    method: its method.
    states: the State of each seed.
    round: rounds done.
    class_names: of the columns of `predict`; () where classes are numbers.
  """

  spec: TaskSpec
  task: Task
  method: Method
  states: dict[int, State]
  round: int
  class_names: tuple[str, ...] = ()

  @property
  def state(self) -> State:
    """The state of the first seed."""
    return next(iter(self.states.values()))

  def __repr__(self) -> str:
    return (f'Loaded run of {self.spec.method} (round {self.round:,}, seeds '
            f'{", ".join(map(str, self.states))}, {self.spec.num_classes} '
            f'classes, inputs {self.spec.input_shape})')

  def check_seed(self, seed: int | None) -> None:
    """Raises ValueError if the run has no such seed; None is the first."""
    if seed is not None and seed not in self.states:
      raise ValueError(f'seed={seed} is not among the seeds '
                       f'{", ".join(map(str, self.states))}.')

  def global_model(self, seed: int | None) -> Callable[..., jax.Array]:
    """Returns the function that predicts with the global model.

    Raises:
      ValueError: if the method has no global model, or the run no such seed.
    """
    self.check_seed(seed)
    if self.method.predict is None:
      raise ValueError(f'{self.spec.method} has no global model; '
                       'method.local_predict(state.server, row, inputs) takes '
                       "a client's row of state.memory.")
    return self.method.predict

  def predict(self, inputs: Array, seed: int | None = None) -> jax.Array:
    """Computes the logits of raw inputs.

    Args:
      inputs: images [B, H, W, C], or [B, H, W] if C is 1, 0 to 255, or floats
        of 0 to 1, as a data set may have (all of 1 or less: by
        their scale the whole call counts); of texts int32[B, T] or
        float[B, T, E].
      seed: which of the run's seeds; the first by default.

    Returns:
      float32[B, C].

    Raises:
      ValueError: if the inputs have another shape or dtype, or the run has no
        such seed.
    """
    self.check_seed(seed)
    state = self.state if seed is None else self.states[seed]
    shape = tuple(self.spec.input_shape)
    inputs = given = np.asarray(inputs)
    if given.ndim == len(shape) and shape[-1] == 1:
      inputs = given[..., None]
    kinds = 'f' if len(shape) == 2 else 'iu'
    if inputs.shape[1:] != shape:
      sizes = ', '.join(map(str, ('B', *shape)))
      how = (' Dataset.encode makes tokens of texts.'
             if given.dtype.kind in 'OU' and len(shape) == 1 else '')
      raise ValueError(f'inputs must be of shape [{sizes}], not '
                       f'{list(given.shape)}.{how}')
    if len(shape) == 3 and given.size and given.dtype != np.uint8:
      inputs = files.as_stored({'given': inputs})['given']
    elif len(shape) != 3 and given.dtype.kind not in kinds:
      words = 'floats' if kinds == 'f' else 'integers'
      raise ValueError(f'inputs must be {words}, not {given.dtype}.')
    predict = self.global_model(seed)
    if not len(inputs):
      return jnp.zeros((0, self.spec.num_classes))
    return predict(state.server, jnp.asarray(inputs))


def load(workdir: str | os.PathLike[str]) -> Run:
  """Reads a run back to predict with, or to look at.

  Args:
    workdir: the folder of a run that has saved a checkpoint, or a file of
      `save`.

  Returns:
    The run at its newest checkpoint. With client_memory=disk a leaf of
    `state.memory` reads the rows it is asked for, as in `leaf[client]`.

  Raises:
    ValueError: if the folder holds no run, none of its checkpoints can be
      read, or the newest is of another run.
  """
  from fedjax_ssl.training import (
    away,
    checkpoint,
    client_rows,
    own_code,
    runner,
  )
  from fedjax_ssl.training import workdir as workdir_lib
  from fedjax_ssl.training.checkpoint import sealed
  if os.path.isfile(workdir):
    return _load_file(workdir)
  began = workdir_lib.read_config(workdir)
  stored = own_code.found_again(began, workdir)
  facts = stored['facts']
  for place in stored['flags'].get('imports') or ():
    registry.import_place(place)
  spec, struct = _described(workdir, facts)
  run_seeds = facts['task'].get('seeds')
  task = make_task(spec)
  with checks.stored():
    method = methods.make(spec.method, task)
  state = runner.state_shape(method, struct)
  place = client_rows.Place(
      stored['flags'].get('client_memory', 'device'),
      pathlib.Path(workdir) / client_rows.FOLDER)
  shape = runner.checkpoint_template(method, struct, state, run_seeds, place)
  found = checkpoint.Checkpoints(
      os.path.join(os.fspath(workdir), 'checkpoints'),
      run=sealed.identity(began['facts'])).restore(shape)
  if found is None:
    raise ValueError(f'{os.fspath(workdir)} holds no checkpoint that can be '
                     'read.')
  round_, tree = found
  states = away.finished(place, state, {
      int(k): v['state'] for k, v in tree.items()})
  return finished(spec, task, method, states, round_, facts)


def _described(where: str | os.PathLike[str], facts: Mapping[str, Any]
               ) -> tuple[TaskSpec, Federation]:
  """Returns the spec of a stored run, and a federation of its shapes."""
  try:
    saved = facts['task']
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v
                              for k, v in saved['spec'].items()}
    for field, chosen in facts.get('choices', {}).items():
      values[field] = renewed(field, values[field], chosen['knobs'])
    if 'seeds' not in saved:
      raise KeyError('seeds')
    return TaskSpec(**values), _federation_struct(saved['federation'])
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f'{os.fspath(where)} holds a run of another version, '
                     f'or no task that can be read: {error}.') from None


def finished(spec: TaskSpec, task: Task, method: Method,
             states: dict[int, State], round_: int, facts: Mapping[str, Any]
             ) -> Run:
  """Makes a run of these parts; its method predicts in batches."""
  from fedjax_ssl.training import evaluate
  if (model := method.predict) is not None:
    # As evaluation does, so that large inputs fit.
    method = method._replace(predict=jax.jit(
        lambda server, inputs: evaluate.in_batches(
            model, inputs, jnp.arange(inputs.shape[0]), given=(server,))))
  return Run(spec, task, method, states, round_,
             tuple(facts.get('class_names', ())))


def save(path: str | os.PathLike[str], run: Run, facts: Mapping[str, Any],
         seed: int | None = None) -> None:
  """Writes a run's global model as one .npz, which `load` reads.

  Args:
    path: of the file. Its arrays are those of the server's record by name, and
      `about`: JSON of what the model is made of.
    run: the finished run.
    facts: those of its `config.json`: `task` and `choices`.
    seed: which of its seeds; the first by default.

  Raises:
    ValueError: if the run has no global model, or no such seed.
  """
  from fedjax_ssl.core import disk
  seed = next(iter(run.states)) if seed is None else seed
  run.global_model(seed)
  about = {'task': {**facts['task'], 'seeds': [seed]},
           'choices': facts['choices'], 'round': run.round,
           **({'class_names': names} if (names := run.class_names) else {})}
  arrays: dict[str, Any] = {name: np.asarray(leaf) for name, leaf in _named(
      run.states[seed].server)}
  whole = io.BytesIO()
  np.savez(whole, about=np.array(json.dumps(about)), **arrays)
  disk.replace(pathlib.Path(path), whole.getvalue())


def _named(record: PyTree) -> list[tuple[str, Any]]:
  """Returns the leaves of a server's record, with names."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(record)
  return [(jax.tree_util.keystr(path, simple=True, separator='.')
           or 'server', leaf) for path, leaf in leaves]


def _load_file(path: str | os.PathLike[str]) -> Run:
  """Reads what `save` wrote."""
  from fedjax_ssl.training import runner
  try:
    with np.load(path, allow_pickle=False) as file:
      arrays = dict(file)
    facts = json.loads(str(arrays.pop('about')))
    round_ = int(facts['round'])
  except OSError as error:
    raise ValueError(f'{os.fspath(path)}: {error.strerror or error}.') from None
  except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile):
    raise ValueError(f'{os.fspath(path)} holds no model that Run.save wrote.'
                     ) from None
  spec, struct = _described(path, facts)
  task = make_task(spec)
  with checks.stored():
    method = methods.make(spec.method, task)
  shapes = runner.state_shape(method, struct).server
  wanted = _named(shapes)
  if {name: (leaf.shape, leaf.dtype) for name, leaf in wanted} != {
      name: (array.shape, array.dtype) for name, array in arrays.items()}:
    raise ValueError(f'{os.fspath(path)} holds other arrays than '
                     f'{spec.method} with the model {spec.model} has.')
  server = jax.tree.unflatten(jax.tree.structure(shapes), [
      jnp.asarray(arrays[name]) for name, _ in wanted])
  state = State(server, (), jnp.int32(round_))
  return finished(spec, task, method, {facts['task']['seeds'][0]: state},
                  round_, facts)
