"""`fedjax_ssl.fit`: one call from a method and data to a trained model."""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
import contextlib
import functools
import inspect
import io
import os
from typing import Any

import numpy.typing as npt

from fedjax_ssl import config, data
from fedjax_ssl import task as task_lib
from fedjax_ssl.config import FieldError
from fedjax_ssl.core import checks, flag_kinds, registry
from fedjax_ssl.core.types import Federation, Method
from fedjax_ssl.data import datasets
from fedjax_ssl.data.datasets import files
from fedjax_ssl.fitting import inputs
from fedjax_ssl.fitting.run import Run, Temporary
from fedjax_ssl.running import (
  devices,
  meant_knobs,
  other_names,
  runs,
  settings,
)
from fedjax_ssl.running import job as job_lib
from fedjax_ssl.training import command, environment
from fedjax_ssl.training import workdir as workdir_lib

# The setting of a data set, if none is given and `_SETTINGS` has none for it.
SETTING = 'own_data'
_SETTINGS = {'digits': 'digits_dirdir'}
_SHORT = {'clients': 'num_clients', 'rounds': 'num_rounds'}
# Options for one start of a program, or for several processes, and the page of
# a report, for which there is a program.
_PROGRAMS = ('eval_only', *flag_kinds.PROCESSES, 'report')
_OWN = ('workdir', 'method', 'dataset')  # Arguments with names of their own.
_METHOD = 'fixmatch'  # If neither the call nor the setting names one.
_OF_DATA = (*files.KEYS, *files.BESIDE)  # Given with the arrays.
_VIEW = 'a function with a name, (*, knobs) -> ((key, images) -> images)'
# Options that may be functions: for messages what they are, a text, and how
# they are called.
_FUNCTIONS = {
    'method': ('method', 'fixmatch',
               'a function with a name, (task, *, knobs) -> Method'),
    'aggregator': ('rule', 'median', 'a function with a name, (updates, '
                   'weights, *, knobs) -> update'),
    'model': ('network', 'cnn', 'a class of Flax linen modules '
              'or a function with a name, (*, knobs) -> module'),
    **dict.fromkeys(('weak', 'labeled_view'), ('view', 'flip_crop', _VIEW)),
    'strong': ('view', 'ra_mc', _VIEW),
    'lr_schedule': ('schedule', 'cosine', 'a function with a name, (rounds, *, '
                    'knobs) -> ((round) -> factor)')}


def fit(method: str | Callable[..., Method] | None = None,
        dataset: str | Federation | data.Dataset
        | Mapping[str, npt.ArrayLike] | Sequence[npt.ArrayLike] | None = None,
        *, workdir: str | os.PathLike[str] | None = None,
        setting: str | settings.Setting | None = None, progress: bool = True,
        **options: object) -> Run:
  """Trains a method on data that is dealt out to clients.

  It is what `fedjax-ssl train` does, but a new run has one seed, and bounds
  only if they are asked for. A method has its own defaults: knobs with which a
  setting has it, as 'fixmatch(threshold=0.8)', are given too.

  Args:
    method: a name with knobs if any, as in 'fixmatch(threshold=0.8)', or a
      function (task, *, knobs) -> Method. None is that of the run in workdir
      (a function that another process has registered is given again), or else
      the setting's, with its knobs.
    dataset: a name that `data.load` knows; the arrays x_train, y_train, x_test
      and y_test, in this order or by name, then with all else that
      `data.datasets.files.read_npz` takes (images are not mirrored; a
      data.Dataset says more); or a Federation, whose rows stay where they are.
      None is the name that the run in workdir has, or else 'digits'.
    workdir: folder for all that the programs write. A run that is in it is
      continued, and what is not given is taken from it. None leaves nothing
      behind.
    setting: how rows are dealt, and defaults: a name that `fedjax-ssl list
      settings` shows, or a `running.settings.Setting`. By default that of the
      run in workdir, or else digits_dirdir for 'digits' and own_data for all
      others, where the data decide network and views.
    progress: whether to show a bar on a terminal or in a notebook, or else
      lines on standard error.
    **options: any of `config.Config`. `clients` and `rounds` are short for
      num_clients and num_rounds. `aggregator` may be a named function, too, see
      `Task.aggregator`; `model` a class of Flax linen modules, or a function
      (*, knobs) -> module; a view a named function (*, knobs) -> ((key,
      images) -> images); and `lr_schedule` one (rounds, *, knobs) -> ((round)
      -> factor).

  Returns:
    The trained Run. Where it diverged, or left out updates that no line has
    told of, a warning says so.

  Raises:
    ValueError: for a value that is refused, or data that are broken.
    TypeError: for an option that is not known, or data of another kind.
    KeyboardInterrupt: if a signal was heard; what is done is saved.
  """
  try:
    return _fitted(method, dataset, workdir, setting, progress, options)
  except FieldError as error:
    for word, name in _SHORT.items():
      if word in options:
        error.rename(name, word)
    raise


def _fitted(method: str | Callable[..., Method] | None, dataset: Any,
            workdir: str | os.PathLike[str] | None,
            setting: str | settings.Setting | None, progress: bool,
            options: Mapping[str, object]) -> Run:
  """Trains as `fit` does; errors name options by their long names."""
  if not isinstance(progress, bool):
    raise FieldError('progress', repr(progress), 'must be True or False.')
  if workdir is not None:
    if not isinstance(workdir, str | os.PathLike):
      raise FieldError('workdir', workdir, 'must be the path of a folder.')
    workdir = os.path.expanduser(os.fspath(workdir))
  stored = workdir_lib.stored_config(workdir)
  if workdir is not None and method is dataset is None and not stored:
    raise FieldError('workdir', workdir, 'holds no run; to begin one there, '
                     'give method or dataset.')
  if method is None and stored:
    method = stored['flags']['method']
  given = _given(method or (_METHOD if setting is None else ''), options)
  if workdir is not None:
    given['workdir'] = workdir
  source = inputs.source(_dataset(stored) if dataset is None else dataset)
  named = given.get('imports', stored['flags'].get('imports') if stored else ())
  several = named if isinstance(named, list | tuple) else [named or '']
  if not all(isinstance(one, str | os.PathLike) for one in several):
    raise FieldError('imports', named, 'must be names of files or modules.')
  for place in checks.words(named):
    registry.import_place(place)
  found = _setting(setting, command.dealt_by(stored) if stored else '', source)
  inputs.check_free(given, source, begins=not stored)
  if method is None:
    method = found.defaults.get('method', _METHOD)
  given |= {'method': _text('method', method), 'dataset': source.name}
  given |= {field: _text(field, given[field]) for field in _FUNCTIONS
            if callable(given.get(field))}
  temporary = None
  with contextlib.ExitStack() as refused:
    if workdir is None:
      temporary = Temporary()
      refused.callback(temporary.cleanup)
      given['workdir'] = temporary.name
    told = _resolved(given, stored, found, source, saves=workdir is not None)
    jobs = _jobs(told, given, found, source)
    refused.pop_all()
  run = Run(jobs, temporary, stream=None if progress else io.StringIO())
  return run.resume(told.num_rounds)


def _dataset(stored: Mapping[str, Any]) -> str:
  """Returns the name of the data of a stored run; the default without one.

  Raises:
    FieldError: if the run was given its data.
  """
  name: str = stored['flags']['dataset'] if stored else 'digits'
  if name in (datasets.ARRAYS, datasets.FEDERATION) or (
      stored and stored.get('origin', {}).get('given')):
    raise FieldError('dataset', None, 'the run in workdir was given its '
                     f'data ({name}); give them again.')
  return name


def _unknown(word: str, value: Any, known: Sequence[str],
             chosen: Mapping[str, Any]) -> str:
  """Returns the message for an option that is not known.

  Args:
    word: the option.
    value: what it was given.
    known: names of options.
    chosen: values of options that are given, whose knobs are proposed.
  """
  names = [*known, *_SHORT, *_OWN, 'setting', 'progress']
  found = meant_knobs.find(word, chosen)
  why = ''
  if word in _PROGRAMS:
    why = ' It is of the programs.'
  elif word in _OF_DATA:
    why = f" It is one of the data's: {{'x_train': x, ..., {word!r}: ...}}."
  elif not (found and found.is_chosen) and (
      near := other_names.ours(word) or checks.nearest(
          word, names, other_names.NEAR)):
    why = f' Did you mean {" or ".join(map(repr, near))}?'
  elif found:
    if found.off:
      value = not value if isinstance(value, bool) else ...
    return f'{word!r} is no option of fit' + found.told(
        '...' if value is ... else registry.literal(value), chosen['method'],
        lambda field, text: f'{field}={text!r}')
  else:
    why = checks.near(word, names)
  return (f'fit has no option {word!r}.{why} All options are the fields of '
          'fedjax_ssl.config.Config.')


def _given(method: str | Callable[..., Method], options: Mapping[str, Any]
           ) -> dict[str, Any]:
  """Returns the options by their long names, as plain values."""
  given: dict[str, Any] = {}
  known = [name for name in config.OPTIONS if name not in _OWN + _PROGRAMS]
  for word, value in options.items():
    name = _SHORT.get(word, word)
    if name not in known:
      raise TypeError(_unknown(word, value, known, {
          **options, 'method': method if isinstance(method, str) else ''}))
    if name in given:
      short = next(word for word, long in _SHORT.items() if long == name)
      raise TypeError(f'{name} is given twice; {short} is short for it.')
    # Numbers of NumPy's or JAX's, or a few of them, as Python's.
    given[name] = value.tolist() if hasattr(value, 'dtype') and hasattr(
        value, 'tolist') else value
    if name == 'num_clients' and isinstance(given[name], list | tuple):
      raise TypeError(f"{word} is a number; who owns which row goes with the "
                      "data: {'x_train': x, ..., 'client_train': clients}.")
  if isinstance(given.get('seeds'), int):
    raise FieldError('seeds', given['seeds'],
                     'must be several, as in [0, 1, 2]; or give seed.')
  return {k: os.fspath(v) if isinstance(v, os.PathLike) else v
          for k, v in given.items()}


def _setting(given: str | settings.Setting | None, stored: str,
             source: inputs.Source) -> settings.Setting:
  """Returns how rows are dealt."""
  if given is None:
    given = stored if stored in settings.SETTINGS else _default(source)
  if isinstance(given, settings.Setting):
    return given
  if not isinstance(given, str) or given not in settings.SETTINGS:
    raise FieldError('setting', given,
                     checks.unknown(str(given), settings.SETTINGS))
  return settings.SETTINGS[given]


def _default(source: inputs.Source) -> str:
  return _SETTINGS.get(source.name, SETTING)


def _text(field: str, given: Any) -> str:
  """Returns the text of an option; registers one that is a function."""
  if isinstance(given, str):
    return given
  kind, example, form = _FUNCTIONS[field]
  known = task_lib.REGISTRIES[field]
  knobs: dict[str, Any] = {}
  function = given
  while isinstance(function, functools.partial) and not function.args:
    knobs, function = {**function.keywords, **knobs}, function.func
  name = getattr(function, '__name__', '')
  if isinstance(given, Method) or not callable(given) or (
      not name.isidentifier()):
    what = ('a lambda' if name == '<lambda>' else
            f'an instance of {type(given).__name__}')
    raise TypeError(f'{field} must be a text, such as {example!r}, or {form}, '
                    f'not {what}.')
  held = known.get(name)
  # A notebook cell that is run again replaces its own function.
  if held is not None and held is not function and registry.is_library(held):
    if field == 'aggregator' and registry.is_library(function):
      return registry.written(name, knobs)  # The one that the name stands for.
    raise FieldError(field, name, f'a {kind} of the library has this name; '
                     'rename the function.')
  try:
    inspect.signature(function)
  except ValueError:
    raise TypeError(f'{field} must be a text, such as {example!r}, or {form}; '
                    f'{name} has no signature.') from None
  known[name] = known.adapt(function)
  return registry.written(name, knobs)


def _resolved(given: dict[str, Any], stored: Mapping[str, Any],
              setting: settings.Setting, source: inputs.Source, *, saves: bool
              ) -> config.Config:
  """Returns the options: given, else stored, else the setting's defaults."""
  values: dict[str, Any] = {'bounds': False, 'seeds': None, 'seed': 0}
  if not saves:
    values['checkpoint_every'] = 0
  values = {**{name: value for name, value in setting.defaults.items()
               if name not in _PROGRAMS}, **values, **source.options}
  if stored:
    values |= {name: value for name, value in stored['flags'].items()
               if name in config.OPTIONS
               and not config.OPTIONS[name].this_start}
  values |= given
  return config.resolve(values, given)


def _jobs(told: config.Config, given: Collection[str],
          setting: settings.Setting, source: inputs.Source
          ) -> list[job_lib.Job]:
  """Builds the jobs of the run and its bounds; no folder is touched."""
  devices.join(told)
  environment.keep_programs()

  known = settings.SETTINGS.get(setting.name) is setting
  ours = known and source.dataset is None
  # A later `fedjax-ssl` command on the folder reads what made the run.
  origin = {'setting': setting.name if ours else '', 'flagfiles': [],
            'script': '' if ours else workdir_lib.FIT, 'comments': [],
            'given': '' if source.dataset is None else 'dataset',
            'dealt_by': setting.name if known and not ours and (
                setting.name != _default(source)) else ''}
  return runs.prepared(
      setting, told, {k: v for k, v in origin.items() if v != ''},
      lambda options: runs.deal(setting, options, given, source.load(options),
                                source.partition))
