"""A finished run: read back from its folder, predicting, saved as one file."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import math
import os
import pathlib
from typing import Any, NamedTuple, NoReturn, TYPE_CHECKING, TypeVar
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import methods
from fedjax_ssl import task as task_lib
from fedjax_ssl.config import Config
from fedjax_ssl.core import checks, imports, registry, run_files
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
from fedjax_ssl.data.datasets import files, folder, names, tokens
from fedjax_ssl.training import (
  checkpoint,
  client_rows,
  columns,
  evaluate,
  metrics,
  model_file,
  offloaded,
  own_code,
  runner,
)
from fedjax_ssl.training import workdir as workdir_lib
from fedjax_ssl.training.checkpoint import sealed

Inputs = Array | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Kind = TypeVar('Kind', Examples, Shard)


def _as_batch(given: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Adds the axes that inputs may lack: the one channel, and the batch's."""
  if shape[-1] == 1 and given.shape in (shape[:-1],
                                        (*given.shape[:1], *shape[:-1])):
    given = given[..., None]
  return given[None] if given.shape == shape else given


def _warn_of_dark(brightest: int, mean: Sequence[float]) -> None:
  """Warns of images that seem to have another scale than those of training.

  The text is one for all images, so that it is said once of many calls.

  Args:
    brightest: number in the images, 0 to 255.
    mean: of each channel of the training images, 0 to 1.
  """
  if 0 < brightest < 255 * min(mean):
    warnings.warn(
        f'No number in the images reaches {math.ceil(255 * min(mean))} of 255, '
        'the mean of training; if that is their scale, multiply them.',
        stacklevel=3)


def spec_to_json(spec: task_lib.TaskSpec, federation: Federation
                 ) -> dict[str, Any]:
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


# What only a run of `fit` has, which has its data.
_OF_FIT = 'bounds', 'federations', 'options', 'per_client', 'plot', 'resume'


class LoadedRun(NamedTuple):
  """A finished run.

  Attributes:
    spec: how it was configured.
    task: its task; `task.apply(variables, inputs)` computes logits of raw
      inputs.
    method: its method.
    states: the State of each seed. In most methods `state.server.model` holds
      the model's variables, its params and stats.
    round: rounds done.
    facts: those of its `config.json`, `task` and `choices` among them.
    class_names: of the columns of `predict`; () where classes are numbers.
    vocabulary: tokens of words; None if the data are no texts, or vectors of
      them, or the run is of a version that did not keep it.
    workdir: the folder it was read from; None for a file that `save` wrote.
  """

  spec: task_lib.TaskSpec
  task: Task
  method: Method
  states: dict[int, State]
  round: int
  facts: Mapping[str, Any]
  class_names: tuple[str, ...] = ()
  vocabulary: Mapping[str, int] | None = None
  workdir: pathlib.Path | None = None

  @property
  def metrics(self) -> dict[str, np.ndarray]:
    """Returns what was measured up to `round`, as a run of `fit` has it.

    They are read from `workdir`; a file that `save` wrote has none, {}.

    Raises:
      ValueError: if they are damaged, or the folder is gone.
    """
    return columns.scalars(self._rows())

  @property
  def class_metrics(self) -> dict[str, np.ndarray]:
    """Returns the metrics with one number for each class, [evaluations, C].

    Raises:
      ValueError: as `metrics`.
    """
    return columns.lists(self._rows())

  def _rows(self) -> list[dict[str, Any]]:
    if self.workdir is None:
      return []
    if not run_files.holds_run(self.workdir):
      raise ValueError(f'{self.workdir} is gone, with all that was measured.')
    return [row for row in metrics.read(self.workdir)
            if row['round'] <= self.round]

  @property
  def state(self) -> State:
    """Returns the state of the first seed."""
    return next(iter(self.states.values()))

  def __repr__(self) -> str:
    return (f'Loaded run of {self.spec.method} (round {self.round:,}, seeds '
            f'{", ".join(map(str, self.states))}, {self.spec.num_classes} '
            f'classes, inputs {self.spec.input_shape})')

  def check_seed(self, seed: int | None) -> None:
    """Raises FieldError if the run has no such seed; None is the first."""
    if seed is not None and seed not in self.states:
      raise checks.FieldError('seed', seed, 'allowed are those of the run, '
                              f'{", ".join(map(str, self.states))}.')

  def global_model(self, seed: int | None = None
                   ) -> Callable[..., jax.Array]:
    """Returns (state.server, inputs) -> logits of the global model.

    Raises:
      ValueError: if the method has no global model, or the run no such seed.
    """
    self.check_seed(seed)
    if self.method.predict is None:
      raise ValueError(f'{self.spec.method} has no global model; '
                       'method.local_predict(state.server, row, inputs) takes '
                       "a client's row of state.memory.")
    return self.method.predict

  def predict(self, inputs: Inputs, seed: int | None = None
              ) -> jax.Array:
    """Computes the logits of raw inputs.

    Args:
      inputs: images [B, H, W, C], or [B, H, W] if C is 1, 0 to 255, or floats
        of 0 to 1, as a data set may have (all of 1 or less: by their scale
        the whole call counts), or paths of B image files, or of one or a
        folder of them, which are brought to the model's size as
        `fedjax-ssl resize-images` does; texts, a list of B, or their tokens
        int32[B, T] or vectors float[B, T, E]. One array without the axis B is
        a batch of one.
      seed: which of the run's seeds; the first by default.

    Returns:
      float32[B, C].

    Raises:
      ValueError: if the inputs have another shape or dtype, or are texts and
        the run keeps no words, or files that are no images, or it has no such
        seed.
    """
    self.check_seed(seed)
    state = self.state if seed is None else self.states[seed]
    shape = tuple(self.spec.input_shape)
    if len(shape) == 3 and isinstance(inputs, str | os.PathLike):
      place = pathlib.Path(inputs)
      inputs = folder.below(place) if place.is_dir() else [place]
    given = self._encoded(files.as_array('inputs', inputs))
    inputs = _as_batch(given, shape)
    kinds, words = ('f', 'floats') if len(shape) == 2 else ('iu', 'integers')
    if inputs.shape[1:] != shape:
      sizes = ', '.join(map(str, ('B', *shape)))
      raise ValueError(f'inputs must be of shape [{sizes}], not '
                       f'{list(given.shape)}.')
    if len(shape) == 3 and given.size and given.dtype != np.uint8:
      inputs = files.as_stored({'given': inputs})['given']
    elif len(shape) != 3 and given.dtype.kind not in kinds:
      raise ValueError(f'inputs must be {words}, not {given.dtype}.')
    if len(shape) == 3 and inputs.size:
      _warn_of_dark(inputs.max(), self.spec.mean)
    predict = self.global_model(seed)
    if not len(inputs):
      return jnp.zeros((0, self.spec.num_classes))
    return predict(state.server, inputs)

  def classify(self, inputs: Inputs, seed: int | None = None
               ) -> list[tuple[str, float]]:
    """Returns the class of each input, and its probability; see `predict`.

    A class goes by its name, if it has one, else by its number.
    """
    return evaluate.named(self.predict(inputs, seed), self.class_names)

  def evaluate(self, inputs: Inputs,
               labels: Array | Sequence[str], seed: int | None = None
               ) -> dict[str, Any]:
    """Judges the global model on data of your own.

    Args:
      inputs: as `predict` takes them.
      labels: int[B] classes, or words[B] of `class_names`.
      seed: which of the run's seeds; the first by default.

    Returns:
      By the names that metrics of the test set have: accuracy, loss (nats),
      macro_precision, macro_recall, auc, most_predicted and largest_class,
      0 to 1 but for the loss; per_class_accuracy float64[C], NaN for a class
      without rows. And confusion int64[C, C]: how many rows of each class, by
      line, are taken for each, by column.

    Raises:
      ValueError: as `predict`; for no rows, or too few, many or odd labels.
    """
    classes = files.as_array('labels', labels)
    if (words := names.texts(classes)).dtype.kind in 'US':
      if not self.class_names:
        raise ValueError('labels are words, and the classes of the run are '
                         f'numbers, 0 to {self.spec.num_classes - 1}.')
      classes = names.number({'data': names.as_words('labels', words)},
                             self.class_names)[0]['data']
    elif self._numbers_as_words():
      raise ValueError(
          'labels are numbers, and so are the names of the classes, in another '
          f'order: {", ".join(self.class_names[:4])}, ...; give names.')
    classes = files.class_labels('data', classes)
    if classes.max() >= self.spec.num_classes:
      raise ValueError(f'labels have class {classes.max()}; allowed are 0 to '
                       f'{self.spec.num_classes - 1}.')
    logits = self.predict(inputs, seed)
    if len(logits) != len(classes):
      raise ValueError(f'there are {len(logits)} inputs and {len(classes)} '
                       'labels.')
    number = self.spec.num_classes
    pairs = number * classes + np.asarray(logits.argmax(-1))
    return {**{name: np.asarray(value, np.float64) if np.ndim(value)
               else float(value)
               for name, value in evaluate.scores(logits, classes).items()},
            'confusion': np.bincount(pairs, minlength=number**2).reshape(
                number, number)}

  def _numbers_as_words(self) -> bool:
    """Returns whether a class is called by the number of another one."""
    names_ = [*self.class_names]
    return all(name.isdecimal() for name in names_) and (
        names_ != [*map(str, range(len(names_)))])

  def _encoded(self, inputs: np.ndarray) -> np.ndarray:
    """Returns pixels of image files, tokens of texts, all else as it is."""
    shape = self.spec.input_shape
    if len(shape) == 3 and inputs.ndim == 1 and inputs.size and all(
        isinstance(x, str | os.PathLike) for x in inputs):
      return folder.read_images(list(inputs), *shape)
    if len(shape) > 1:
      return inputs
    if not inputs.ndim and inputs.dtype.kind == 'U':  # It may name a file.
      raise ValueError(f'give a list of texts, [{str(inputs)[:40]!r}]; those '
                       'of a file are read by `fedjax-ssl predict` alone.')
    texts = tokens.as_texts('inputs', inputs)
    if texts is None:
      return inputs if inputs.size else np.zeros(
          (0, *self.spec.input_shape), np.int32)
    if self.vocabulary is None:
      raise ValueError("inputs are texts, and the run keeps no words; a "
                       "Dataset's `encode` makes tokens of them.")
    return tokens.encode(texts, self.vocabulary)

  def save(self, path: str | os.PathLike[str], seed: int | None = None) -> None:
    """Writes a seed's global model as one .npz, which `load` reads.

    Args:
      path: of the file. Its arrays are those of the server's record by name,
        and `about`: JSON of what the model is made of.
      seed: which of its seeds; the first by default.

    Raises:
      ValueError: if the run has no global model, or no such seed, or the file
        cannot be written.
      TypeError: for anything but a path.
    """
    if not isinstance(path, str | os.PathLike):
      raise TypeError(f'save takes the path of a file, not {path!r}.')
    seed = next(iter(self.states)) if seed is None else seed
    self.global_model(seed)
    about = {'task': {**self.facts['task'], 'seeds': [seed]},
             'choices': self.facts.get('choices', {}), 'round': self.round,
             **({'class_names': self.class_names} if self.class_names else {}),
             **({} if self.vocabulary is None else
                {'vocabulary': tokens.listed(self.vocabulary)})}
    model_file.write(path, self.states[seed].server, about)


def _absent(run: LoadedRun, name: str) -> NoReturn:
  """Raises AttributeError, which says who has what a loaded run has not."""
  del run
  raise AttributeError(f'a loaded run has no {name!r}' + (
      '; what fedjax_ssl.fit returns has, and fit(workdir=FOLDER) continues '
      'the run of a folder.' if name in _OF_FIT else ''))


if not TYPE_CHECKING:  # To a type checker it would have any attribute.
  LoadedRun.__getattr__ = _absent


def load(workdir: str | os.PathLike[str]) -> LoadedRun:
  """Reads a run back to predict with, or to look at.

  Args:
    workdir: the folder of a run that has saved a checkpoint, or a file that
      `Run.save` wrote.

  Returns:
    The run at its newest checkpoint. With client_memory=disk a leaf of
    `state.memory` reads the rows it is asked for, as in `leaf[client]`. Where
    training has gone on and needs their room, that raises a ValueError: load
    the run anew.

  Raises:
    ValueError: if the folder holds no run, none of its checkpoints can be
      read, or the newest is of another run.
    TypeError: for anything but a path.
  """
  if not isinstance(workdir, str | os.PathLike):
    raise TypeError('load takes the path of a folder or file, not '
                    f'{workdir!r}.')
  if os.path.isfile(workdir):
    return _load_file(workdir)
  if not os.path.exists(workdir):
    raise ValueError(f'there is no {os.fspath(workdir) or repr("")}; give the '
                     'folder of a run, or a file that Run.save wrote.')
  began = workdir_lib.read_config(workdir)
  stored = own_code.found_again(began, workdir)
  facts = stored['facts']
  for place in stored['flags'].get('imports') or ():
    registry.import_place(place)
  spec, task, method, struct = _rebuilt(workdir, facts)
  state = runner.state_shape(method, struct)
  place = client_rows.Place(
      stored['flags'].get('client_memory', 'device'),
      pathlib.Path(workdir) / client_rows.FOLDER)
  shape = runner.checkpoint_template(method, struct, state,
                                     facts['task']['seeds'], place)
  found = checkpoint.Checkpoints(
      os.path.join(os.fspath(workdir), sealed.STEPS),
      run=sealed.identity(began['facts'])).restore(shape)
  if found is None:
    raise ValueError(f'{os.fspath(workdir)} holds no checkpoint that can be '
                     'read.')
  round_, tree = found
  states = offloaded.finished(place, state, {
      int(k): v['state'] for k, v in tree.items()})
  return make(spec, task, method, states, round_, facts,
              tokens.load(pathlib.Path(workdir)))._replace(
                  workdir=pathlib.Path(workdir).absolute())


def _rebuilt(where: str | os.PathLike[str], facts: Mapping[str, Any]
             ) -> tuple[task_lib.TaskSpec, Task, Method, Federation]:
  """Returns what a stored run was made of, and a federation of its shapes."""
  spec, struct = _read(where, facts)
  task = task_lib.make_task(spec)
  with checks.stored():
    return spec, task, methods.make(spec.method, task), struct


def _read(where: str | os.PathLike[str], facts: Mapping[str, Any]
          ) -> tuple[task_lib.TaskSpec, Federation]:
  """Returns the spec of a stored run, and a federation of its shapes."""
  try:
    saved = facts['task']
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v
                              for k, v in saved['spec'].items()}
    for field, chosen in facts.get('choices', {}).items():
      name, _ = registry.parse(values[field])
      try:
        registry.find(task_lib.REGISTRIES[field], name, field)
      except ValueError as error:
        if imports.split(name):
          raise
        raise ValueError(
            f'{str(error).rstrip(".")}. If it is your own, register it first, '
            f'as in fedjax_ssl.task.REGISTRIES[{field!r}].register({name!r}); '
            f'a run with {field}="./FILE.py:{name}" finds it by itself'
        ) from None
      values[field] = task_lib.restated(field, values[field], chosen['knobs'])
    if 'seeds' not in saved:
      raise KeyError('seeds')
    return task_lib.TaskSpec(**values), _federation_struct(saved['federation'])
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(f'{os.fspath(where)} holds a run of another version, or '
                     f'no task that can be read: {str(error).rstrip(".")}.'
                     ) from None


def make(spec: task_lib.TaskSpec, task: Task, method: Method,
         states: dict[int, State], round_: int, facts: Mapping[str, Any],
         vocabulary: Mapping[str, int] | None) -> LoadedRun:
  """Makes a run of these parts; its method predicts in batches."""
  if (model := method.predict) is not None:
    # As evaluation does, so that large inputs fit.
    method = method._replace(predict=_of_few_sizes(jax.jit(
        lambda server, inputs: evaluate.in_batches(
            model, inputs, jnp.arange(inputs.shape[0]), given=(server,)))))
  return LoadedRun(spec, task, method, states, round_, facts,
                   tuple(facts.get('class_names', ())), vocabulary)


def _of_few_sizes(predict: Callable[..., jax.Array]
                  ) -> Callable[..., jax.Array]:
  """Repeats the last input up to a size that is compiled for many.

  That is a power of 2 up to a batch, and then whole batches.
  """
  @functools.wraps(predict)
  def wide(server: PyTree, inputs: Array) -> jax.Array:
    count = inputs.shape[0]
    size = (-(-count // evaluate.BATCH) * evaluate.BATCH
            if count > evaluate.BATCH else 1 << max(count - 1, 0).bit_length())
    if not count or size == count:
      return predict(server, inputs)
    return predict(server, inputs[np.minimum(np.arange(size), count - 1)]
                   )[:count]
  return wide


def _load_file(path: str | os.PathLike[str]) -> LoadedRun:
  """Reads what `save` wrote."""
  facts, arrays = model_file.read(path)
  spec, task, method, struct = _rebuilt(path, facts)
  server = model_file.record(
      arrays, runner.state_shape(method, struct).server)
  if server is None:
    raise ValueError(f'{os.fspath(path)} holds other arrays than '
                     f'{spec.method} with the model {spec.model} has.')
  state = State(server, (), jnp.int32(facts['round']))
  return make(spec, task, method, {facts['task']['seeds'][0]: state},
              facts['round'], facts, tokens.numbered(facts['vocabulary'])
              if 'vocabulary' in facts else None)
