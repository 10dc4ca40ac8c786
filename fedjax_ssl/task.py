"""A run's static choices as plain values, and the task that they make."""
from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import numpy as np

from fedjax_ssl import config, methods, models
from fedjax_ssl.config import Config
from fedjax_ssl.core import checks, choices, knobs, optimizers, registry
from fedjax_ssl.core.types import (
  Task,
)
from fedjax_ssl.data import augment, preprocess
from fedjax_ssl.methods.parts import aggregators, attacks, server_optimizers


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
REGISTRIES: dict[str, registry.Registry[Any]] = {
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
        'input_shape', shape, 'must be the tuple (height, width, channels) of '
        'images as stored, or (tokens,) or (tokens, numbers) of texts.')
  for name, above in (('mean', -np.inf), ('std', checks.LEAST)):
    try:
      numbers = np.asarray(getattr(spec, name))
      fits = numbers.ndim < 2 and numbers.dtype.kind in 'iuf' and (
          np.abs(numbers) <= checks.MOST).all() and (
          numbers > above).all()
    except ValueError:  # Rows of unequal lengths.
      fits = False
    if not fits:
      raise checks.FieldError(
          name, getattr(spec, name), 'must be numbers '
          f'{"above 0 and " if above > 0 else ""}finite in float32, one for '
          'all channels or one each.')


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
      try:
        knobs.check(field, text, known, _FILLED.get(field, ()))
      except checks.FieldError:
        if meant := _of_another(field, text):
          raise checks.FieldError(field, text.strip(), meant) from None
        raise


def _of_another(field: str, text: str) -> str:
  """Says which other option takes a name or knob that this one does not."""
  try:
    name, given = registry.parse(text)
  except ValueError:  # Of another form, which the refusal tells.
    return ''
  name = name.lower()
  if name in REGISTRIES[field]:
    known = knobs.names(REGISTRIES[field][name])
    return next((f'{knob!r} is an option and no knob of {name}: give '
                 f'{_given(knob, value)} beside it.'
                 for knob, value in given.items()
                 if knob not in known and knob in config.OPTIONS), '')
  rule = 'momentum' if name == 'fedavgm' else name.removeprefix('fed')
  if field == 'method' and rule in server_optimizers.SERVER_OPTIMIZERS:
    beside = (('local_steps', 1) if rule == 'sgd'  # FedSGD is one step a round.
              else ('server_optimizer', rule))
    return (f'give a method as {checks.option("method", "fedavg")} with '
            f'{checks.option(*beside)}.')
  # A name of several, such as none, tells nothing; views share theirs, and an
  # attack has words that others may mean otherwise, such as noise.
  others = [other for other, known in REGISTRIES.items()
            if name in known and other not in ('labeled_view', 'attack')]
  return (f'it is given as {checks.option(others[0], name)}.'
          if len(others) == 1 else '')


def _given(knob: str, value: Any) -> str:
  """Returns how an option is given; lists are written by each in its way."""
  return checks.option(knob, None if isinstance(value, list | tuple) else value)


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


def restated(field: str, text: str, was: Mapping[str, Any]) -> str:
  """Returns a text that stands today for what `text` did in a stored run.

  Args:
    field: of `TaskSpec`.
    text: its value.
    was: the knobs that `resolved` found then.

  Raises:
    ValueError: if there is none today.
  """
  return choices.restated(text, was, REGISTRIES[field],
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
