"""A run's static choices as plain values, and a finished run read back."""
from __future__ import annotations

from collections.abc import Callable, Iterable
import dataclasses
import functools
import os
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import config, methods, models
from fedjax_ssl.core import checks, knobs, optimizers
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
from fedjax_ssl.methods.parts import aggregators, attacks, server_optimizers

Kind = TypeVar('Kind', Examples, Shard)

_DEFAULTS: dict[str, Any] = {
    name: option.default for name, option in config.OPTIONS.items()}


@dataclasses.dataclass(frozen=True)
class TaskSpec:
  """Everything that makes a `Task`, as values that JSON can hold.

  See `core.types.Task` and `config` for the meaning of the fields. `norm` None
  is the model's own, `labeled_view` None the weak view. `max_update_norm` 0 is
  off.

  `schedule_rounds` is how many rounds schedules and ramps span, whatever number
  of rounds `train` is asked for; normally it is the same. None, the default, is
  not known: a method or schedule that spans the run is then refused.
  """

  num_classes: int
  input_shape: tuple[int, ...]
  method: str = 'fedavg'
  model: str = _DEFAULTS['model']
  norm: str | None = None
  conv_impl: str = _DEFAULTS['conv_impl']
  compute_dtype: str = _DEFAULTS['compute_dtype']
  mean: tuple[float, ...] = (0.0,)
  std: tuple[float, ...] = (1.0,)
  flip: bool = True
  weak: str = _DEFAULTS['weak']
  labeled_view: str | None = _DEFAULTS['labeled_view']
  strong: str = _DEFAULTS['strong']
  optimizer: str = _DEFAULTS['optimizer']
  learning_rate: float = _DEFAULTS['learning_rate']
  momentum: float = _DEFAULTS['momentum']
  weight_decay: float = _DEFAULTS['weight_decay']
  lr_schedule: str = _DEFAULTS['lr_schedule']
  schedule_rounds: int | None = _DEFAULTS['schedule_rounds']
  labeled_batch: int = _DEFAULTS['labeled_batch']
  unlabeled_batch: int = _DEFAULTS['unlabeled_batch']
  unlabeled_capacity: int = 0
  local_epochs: int = _DEFAULTS['local_epochs']
  local_steps: int = _DEFAULTS['local_steps']
  cohort_size: int = 10
  labels_at: str = _DEFAULTS['labels_at']
  client_map: str = _DEFAULTS['client_map']
  chunk_size: int = _DEFAULTS['chunk_size']
  aggregation_order: str = _DEFAULTS['aggregation_order']
  max_update_norm: float = _DEFAULTS['max_update_norm']
  aggregator: str = _DEFAULTS['aggregator']
  server_optimizer: str = _DEFAULTS['server_optimizer']
  server_learning_rate: float | None = _DEFAULTS['server_learning_rate']
  attack: str = _DEFAULTS['attack']


_WHOLE = 2**31 - 1
# Every batch of a round is of its nominal size, real rows or not; steps of a
# client, and the rows that they use, are counted in 32 bits.
_BOUNDS = {
    name: knobs.Bound(least, most, whole=True) for name, least, most in (
        ('num_classes', 2, 2**20), ('labeled_batch', 1, 2**16),
        ('unlabeled_batch', 0, 2**16), ('unlabeled_capacity', 0, _WHOLE),
        ('local_epochs', 1, 10_000), ('local_steps', 0, 1_000_000),
        ('cohort_size', 1, _WHOLE), ('chunk_size', 0, _WHOLE),
        ('schedule_rounds', 1, _WHOLE))}


def _check(spec: TaskSpec) -> None:
  if not isinstance(spec, TaskSpec):
    raise TypeError(f'make_task takes a TaskSpec, not {_kind(spec)}.')
  for name, bound in _BOUNDS.items():
    if name != 'schedule_rounds' or spec.schedule_rounds is not None:
      knobs.require(name, getattr(spec, name), bound)
  shape = spec.input_shape
  if not isinstance(shape, tuple) or len(shape) not in (1, 2, 3) or not all(
      isinstance(side, int) and side > 0 for side in shape):
    raise ValueError(f'input_shape must be (height, width, channels) of images '
                     'as stored, or (tokens,) or (tokens, numbers) of texts, '
                     f'not {shape!r}.')
  for name in ('method', 'model', 'weak', 'strong', 'lr_schedule',
               'aggregator', 'server_optimizer', 'attack'):
    if not isinstance(getattr(spec, name), str):
      raise TypeError(f'{name} must be a name, with knobs if any, not '
                      f'{_kind(getattr(spec, name))}.')
  for name in ('labels_at', 'client_map', 'aggregation_order'):
    checks.check(name, getattr(spec, name), config.OPTIONS[name].choices)
  if not spec.max_update_norm >= 0:
    raise ValueError('max_update_norm must be at least 0 (0 is off), not '
                     f'{spec.max_update_norm}.')


def _kind(value: Any) -> str:
  return f'{value!r}' if isinstance(value, str) else type(value).__name__


def notes(spec: TaskSpec) -> list[str]:
  """What the choices of a spec switch off, one line each; see `core.knobs`.

  Only knobs that are given are spoken of, not defaults.
  """
  return [line for text, registry in (
      (spec.method, methods.METHODS), (spec.model, models.MODELS),
      (spec.weak, augment.WEAK), (spec.labeled_view, augment.WEAK),
      (spec.strong, augment.STRONG), (spec.lr_schedule, optimizers.SCHEDULES),
      (spec.aggregator, aggregators.AGGREGATORS),
      (spec.server_optimizer, server_optimizers.SERVER_OPTIMIZERS),
      (spec.attack, attacks.ATTACKS))
          if text is not None for line in knobs.notes(text, registry)]


def make_task(spec: TaskSpec, mesh: jax.sharding.Mesh | None = None) -> Task:
  """The task that a spec describes.

  Args:
    spec: plain values.
    mesh: mesh with the one axis 'clients', or None for one device.

  Returns:
    The task.

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
      norm=spec.norm, conv_impl=spec.conv_impl, dtype=spec.compute_dtype)
  client_map = spec.client_map
  if client_map == 'auto':
    client_map = 'map' if jax.default_backend() == 'cpu' else 'vmap'
  if spec.chunk_size and client_map == 'map':
    raise ValueError(f'chunk_size is {spec.chunk_size}, but client_map=map '
                     'takes clients one by one; give client_map=vmap.')
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
          spec.labeled_view, flip=spec.flip),
      labeled_batch=spec.labeled_batch,
      unlabeled_batch=spec.unlabeled_batch,
      unlabeled_capacity=spec.unlabeled_capacity,
      local_epochs=spec.local_epochs,
      local_steps=spec.local_steps,
      cohort_size=spec.cohort_size,
      labels_at=spec.labels_at,
      num_rounds=spec.schedule_rounds,
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
  """What `load` needs to rebuild a run's method: the spec, and shapes."""
  return {'spec': dataclasses.asdict(spec),
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
    states: one State a seed, by seed.
    round: rounds done.
  """

  spec: TaskSpec
  task: Task
  method: Method
  states: dict[int, State]
  round: int

  @property
  def state(self) -> State:
    """The state of the first seed."""
    return next(iter(self.states.values()))

  def predict(self, inputs: Array, seed: int | None = None) -> jax.Array:
    """Logits of raw inputs.

    Args:
      inputs: uint8[B, H, W, C] as stored, or uint8[B, H, W] if C is 1; of
        texts int32[B, T] or float[B, T, E].
      seed: which of the run's seeds; the first by default.

    Returns:
      float32[B, C].

    Raises:
      ValueError: if the inputs have another shape or dtype, or the run has no
        such seed.
    """
    if seed is not None and seed not in self.states:
      raise ValueError(f'seed={seed} is not among the seeds '
                       f'{", ".join(map(str, self.states))}.')
    state = self.state if seed is None else self.states[seed]
    shape = tuple(self.spec.input_shape)
    inputs = given = np.asarray(inputs)
    if given.ndim == len(shape) and shape[-1] == 1:
      inputs = given[..., None]
    kinds = 'f' if len(shape) == 2 else 'iu'
    if inputs.shape[1:] != shape or given.dtype.kind not in kinds:
      sizes = ', '.join(map(str, ('B', *shape)))
      words = 'floats' if kinds == 'f' else 'integers'
      raise ValueError(f'inputs must be {words} of shape [{sizes}] as stored, '
                       f'0 to 255 for images, not {given.dtype}'
                       f'{list(given.shape)}.')
    if self.method.predict is None:
      raise ValueError(f'{self.spec.method} has no global model; '
                       'method.local_predict(state.server, row, inputs) takes '
                       "a client's row of state.memory.")
    if not len(inputs):
      return jnp.zeros((0, self.spec.num_classes))
    return self.method.predict(state.server, jnp.asarray(inputs))


def template(method: Method, federation: Federation) -> State:
  """The shapes of a method's state, without computing its arrays."""
  # The federation is not traced: an init may make host tables of it.
  state: State = jax.eval_shape(
      lambda key: method.init(key, federation), jax.random.key(0))
  return state


def load(workdir: str | os.PathLike[str]) -> Run:
  """Reads a run back to predict with, or to look at.

  Args:
    workdir: the folder of a run that has saved a checkpoint.

  Returns:
    The run at its newest checkpoint.

  Raises:
    ValueError: if the folder holds no run, none of its checkpoints can be
      read, or the newest is of another run.
  """
  from fedjax_ssl.training import checkpoint, evaluate, runner
  from fedjax_ssl.training import workdir as workdir_lib
  from fedjax_ssl.training.checkpoint import sealed
  facts = workdir_lib.read_config(workdir)['facts']
  try:
    saved = facts['task']
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v
                              for k, v in saved['spec'].items()}
    spec = TaskSpec(**values)
    struct, run_seeds = _federation_struct(saved['federation']), saved['seeds']
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f'{os.fspath(workdir)} holds a run of another version, '
                     f'or no task that can be read: {error}.') from None
  task = make_task(spec)
  method = methods.make(spec.method, task)
  shape = runner.checkpoint_template(method, struct, template(method, struct),
                                     run_seeds)
  found = checkpoint.Checkpoints(
      os.path.join(os.fspath(workdir), 'checkpoints'),
      run=sealed.identity(facts)).restore(shape)
  if found is None:
    raise ValueError(f'{os.fspath(workdir)} holds no checkpoint that can be '
                     'read.')
  round_, tree = found
  states = {int(k): jax.tree.map(jnp.asarray, v['state'])
            for k, v in tree.items()}

  if method.predict is not None:
    predict = functools.partial(_in_batches, evaluate, method.predict)
    method = method._replace(predict=jax.jit(predict))
  return Run(spec, task, method, states, round_)


def _in_batches(evaluate: Any, predict: Callable[..., jax.Array],
                server: PyTree, inputs: jax.Array) -> jax.Array:
  """As evaluation does it: large inputs go through in batches."""
  logits: jax.Array = evaluate.in_batches(
      predict, inputs, jnp.arange(inputs.shape[0]), given=(server,))
  return logits
