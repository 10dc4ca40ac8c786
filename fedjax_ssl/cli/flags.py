"""The flags that every setting shares; JAX is not needed to read them."""
from __future__ import annotations

import os
import pathlib
import types
from typing import Any

from absl import flags

from fedjax_ssl import config
from fedjax_ssl.cli import errors
from fedjax_ssl.core import registry
from fedjax_ssl.training import trackers

FLAGS = flags.FLAGS

OPTIONS = config.OPTIONS
# May differ when a run is continued.
FREE = tuple(name for name, option in OPTIONS.items() if option.may_change)
# May differ between the processes of a run.
OWN = tuple(name for name, option in OPTIONS.items() if option.per_process)


def define() -> None:
  """Defines every shared flag."""
  for option in OPTIONS.values():
    _define(option)


def _define(option: config.Option) -> None:
  """Defines one flag; values out of range are refused when it is read."""
  name, default, text = option.name, option.default, option.help
  if option.choices:
    flags.DEFINE_enum(name, default, option.choices, text)
  elif option.kind is str:
    flags.DEFINE_string(name, default, text)
  elif option.kind is bool:
    flags.DEFINE_bool(name, default, text)
  elif option.kind is list:
    flags.DEFINE_list(name, default, text)
  elif option.kind is int:
    flags.DEFINE_integer(
        name, default, text,
        lower_bound=None if option.least is None else int(option.least),
        upper_bound=2**31 - 1 if option.most is None else int(option.most))
  else:
    flags.DEFINE_float(name, default, text, lower_bound=option.least,
                       upper_bound=option.most)
    flags.register_validator(name, lambda value: _sound(option, value))


def _sound(option: config.Option, value: Any) -> bool:
  """True.

  Raises:
    flags.ValidationError: for a number that the option does not take.
  """
  if fault := option.fault(value):
    raise flags.ValidationError(fault)
  return True


def all_names() -> list[str]:
  """The names of the shared flags."""
  return [*OPTIONS]


def values() -> dict[str, Any]:
  """The shared flags' values, as JSON can hold them."""
  return {name: FLAGS[name].value for name in all_names()}


def options() -> Any:
  """Returns the shared flags' values as attributes, for ways to deal rows."""
  return types.SimpleNamespace(**values())


def defaults() -> dict[str, Any]:
  """Returns the shared flags' own defaults."""
  return {name: option.default for name, option in OPTIONS.items()}


def check(setting: str = '', script: str = '') -> None:
  """Settles flags that exclude each other.

  A flag on the command line or in a flagfile beats a setting's default.

  Args:
    setting: its name, with which --eval_only is compared.
    script: path of the program, if the setting is a user's own.

  Raises:
    ValueError: if they cannot be settled.
  """
  for name in ('workdir', 'data_dir', 'partition_file', 'embeddings'):
    if FLAGS[name].value:  # A shell leaves the ~ of --workdir=~/x alone.
      FLAGS[name].value = os.path.expanduser(str(FLAGS[name].value))
  if FLAGS.eval_only:
    if FLAGS.workdir is None:
      raise ValueError('--eval_only needs --workdir.')
    _take_stored(FLAGS.workdir, setting, script)
  if FLAGS.profile is not None:
    errors.check_profile(FLAGS.method, FLAGS.profile)
  _check_conflicts()
  _check_texts()
  seeds()


def _check_conflicts() -> None:
  """Settles flags of which one is to be given."""
  if FLAGS['seed'].present:
    if FLAGS['seeds'].present and FLAGS.seeds:
      raise ValueError(f'Give one of --seed and --seeds, not {FLAGS.seed} and '
                       f'{",".join(FLAGS.seeds)}.')
    FLAGS['seeds'].value = None
  if FLAGS['labeled_fraction'].present and not (
      FLAGS['labels_per_class'].present):
    FLAGS['labels_per_class'].value = None


def _check_texts() -> None:
  """Refuses texts that no run can take."""
  for name, option in OPTIONS.items():  # run.flags has a line for each.
    if option.kind is str and name != 'workdir' and len(
        (FLAGS[name].value or '').splitlines()) > 1:
      raise ValueError(f'--{name}={FLAGS[name].value!r} must be one line.')
  if FLAGS.workdir == '':
    raise ValueError('--workdir= is empty; name a folder or leave it out.')
  if FLAGS.workdir and '://' in FLAGS.workdir:
    raise ValueError(f'--workdir={FLAGS.workdir} is no local folder; mount it '
                     'first.')
  if lacking := trackers.lacking(tracked()):
    given = ('--tensorboard' if not FLAGS.track
             else f'--track={",".join(FLAGS.track)}')
    raise ValueError(f'{given}: {lacking}')


def _take_stored(workdir: str, setting: str, script: str) -> None:
  """Flags that are not given become those of the run in the folder.

  Those that are given stay, and are compared with the run's like at a restart.
  """
  from fedjax_ssl.report import command
  from fedjax_ssl.training import workdir as workdir_lib
  found = workdir_lib.read_config(workdir)
  stored = found['flags']
  was = command.program_of(found)
  if was and pathlib.Path(was).name != pathlib.Path(script or setting).name:
    raise ValueError(f'--workdir={workdir} is a run of {was}, not of '
                     f'{script or setting}; `fedjax-ssl evaluate {workdir}` '
                     'evaluates it.')
  for name in all_names():
    if name in stored and not OPTIONS[name].this_start and not (
        FLAGS[name].present):
      value = stored[name]
      FLAGS[name].value = [*map(str, value)] if name == 'seeds' else value


def seeds() -> list[int]:
  """The seeds of the run, from --seeds or --seed."""
  if not FLAGS.seeds:
    return [FLAGS.seed]
  try:
    found = [int(text) for text in FLAGS.seeds]
  except ValueError:
    found = [-1]
  if min(found) < 0 or max(found) > config.LARGEST_SEED or (
      len(set(found)) < len(found)):
    raise ValueError(f'--seeds={",".join(FLAGS.seeds)} must be different '
                     f'whole numbers from 0 to {config.LARGEST_SEED}, '
                     'separated by commas.')
  return found


def tracked() -> list[str]:
  """The trackers of the run, from --track and --tensorboard."""
  found = ['tensorboard'] * FLAGS.tensorboard + [*(FLAGS.track or ())]
  return [*dict.fromkeys(found)]


def method() -> str:
  """--method with --profile as one of its knobs."""
  if FLAGS.profile is None:
    return FLAGS.method
  name, knobs = registry.parse(FLAGS.method)
  knobs = {**knobs, 'profile': FLAGS.profile}
  return f'{name}({", ".join(f"{k}={v!r}" for k, v in knobs.items())})'
