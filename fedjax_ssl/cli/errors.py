"""What a user can mend, in one line: the flag, the value, what is allowed."""
from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
import contextlib
import difflib
import errno
import inspect
import re
from typing import Any

from absl import flags

from fedjax_ssl.core import registry

FLAGS = flags.FLAGS

# Flags whose value is a name with knobs, and what the library calls that.
_CHOICES = {
    'method': 'method', 'model': 'model', 'strong': 'strong view',
    'weak': 'weak view', 'labeled_view': 'weak view',
    'lr_schedule': 'lr_schedule', 'aggregator': 'aggregator',
    'server_optimizer': 'server_optimizer', 'attack': 'attack'}
# Fields of the library that are flags, and no knob of anything.
_FIELDS = '|'.join((
    'labels_at', 'norm', 'client_map', 'chunk_size', 'cohort_size',
    'num_clients', 'num_labeled_clients', 'learning_rate', 'momentum',
    'weight_decay', 'labeled_batch', 'unlabeled_batch', 'local_epochs',
    'local_steps', 'schedule_rounds', 'max_update_norm',
    'server_learning_rate'))


# What another try may find mended.
_PASSING = frozenset((
    errno.EAGAIN, errno.EBUSY, errno.EDQUOT, errno.EFBIG, errno.EIO,
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.ESTALE,
    errno.ETIMEDOUT))


def may_pass(error: BaseException) -> bool:
  """Whether a fault of the system is behind an error, and may pass by itself.

  A full disk, too little memory, a folder that another process holds.
  """
  behind: BaseException | None = error
  while behind is not None:
    if getattr(behind, 'may_pass', False) or (
        isinstance(behind, MemoryError)) or (
        isinstance(behind, OSError) and behind.errno in _PASSING):
      return True
    behind = behind.__cause__ or behind.__context__
  return False


def line(error: BaseException) -> str:
  """An error as one line that speaks of flags."""
  text = str(error)
  if isinstance(error, flags.UnrecognizedFlagError):
    text = _unknown(error)
  elif isinstance(error, flags.CantOpenFlagFileError):
    text = _flagfile(error)
  elif isinstance(error, registry.ChoiceError):
    text = f'{_flag_of(error)}: {error.reason}'
  return ' '.join(_in_flags(text).split()) or type(error).__name__


def _in_flags(text: str) -> str:
  """The text with the library's fields written as flags."""
  text = re.sub(rf"(?<![\w-])({_FIELDS})=(['\"]?)([\w.+-]*\w)\2", r'--\1=\3',
                text)
  return re.sub(rf'^({_FIELDS})\b', r'--\1', text)


def _known() -> dict[str, Mapping[str, Callable[..., Any]]]:
  """What each of these flags chooses from; loads JAX."""
  from fedjax_ssl import methods, models
  from fedjax_ssl.core import optimizers
  from fedjax_ssl.data import augment
  from fedjax_ssl.methods.parts import (
    aggregators,
    attacks,
    server_optimizers,
  )
  return {'method': methods.METHODS, 'model': models.MODELS,
          'strong': augment.STRONG, 'weak': augment.WEAK,
          'labeled_view': augment.WEAK, 'lr_schedule': optimizers.SCHEDULES,
          'aggregator': aggregators.AGGREGATORS,
          'server_optimizer': server_optimizers.SERVER_OPTIMIZERS,
          'attack': attacks.ATTACKS}


def _flag_of(error: registry.ChoiceError) -> str:
  """The flag that asks for what cannot be made."""
  if error.kind == 'method' and FLAGS.profile is not None:
    return f'--method={FLAGS.method} --profile={FLAGS.profile}'
  near = [flag for flag, kind in _CHOICES.items() if kind == error.kind]
  flag = next((f for f in near if FLAGS[f].value == error.text), near[0])
  return f'--{flag}={error.text}'


def _flagfile(error: flags.CantOpenFlagFileError) -> str:
  cause = error.__context__
  if not isinstance(cause, OSError):
    return str(error)
  return (f'--flagfile={cause.filename} cannot be read: '
          f'{cause.strerror or cause}.')


def _knobs(function: Callable[..., Any]) -> list[str]:
  return [p.name for p in inspect.signature(function).parameters.values()
          if p.kind is p.KEYWORD_ONLY and p.name not in (
              'num_classes', 'choices', 'flip')]


def _unknown(error: flags.UnrecognizedFlagError) -> str:
  """Also says where the flag is a knob of what was chosen."""
  given = str(error.flagvalue or f'--{error.flagname}')
  knob, value = error.flagname, given.partition('=')[2] or '...'
  with contextlib.suppress(ValueError, SyntaxError):
    value = repr(ast.literal_eval(value)) if '=' in given else value
  if re.fullmatch(r'[A-Za-z]\w*', value):
    value = repr(value)
  near = re.findall(r'Did you mean: (.*) \?', str(error))
  if near and _is_typo(error.flagname):  # Said at once, without loading JAX.
    return (f'{given} is no flag. Did you mean '
            f'--{near[0].replace(", ", ", --")}?')
  every = _known()
  for flag, known in every.items():
    with contextlib.suppress(ValueError):
      name, old = registry.parse(FLAGS[flag].value or '')
      if name in known and knob in _knobs(known[name]):
        words = [f'{k}={v!r}' for k, v in old.items() if k != knob]
        call = f'{name}({", ".join([*words, f"{knob}={value}"])})'
        return f'{given} is no flag but a knob: give --{flag}="{call}".'
  owners = [name for name, function in every['method'].items()
            if knob in _knobs(function)]
  if owners:
    return (f'{given} is no flag but a knob of {", ".join(owners)}, and '
            f'--method={FLAGS["method"].value} has none; it is given as in '
            f'--method="{owners[0]}({knob}={value})".')
  return f'{given} is no flag' + (
      f'. Did you mean --{near[0].replace(", ", ", --")}?' if near else
      '; --help lists all.')


def _is_typo(name: str) -> bool:
  """Whether it is so near to a flag that it is no knob's name."""
  return any(sorted(name) == sorted(flag) or difflib.SequenceMatcher(
      None, name, flag).ratio() > 0.84 for flag in FLAGS)


@contextlib.contextmanager
def of_method(text: str) -> Any:
  """Names the method in what its first trace refuses."""
  try:
    yield
  except registry.ChoiceError:
    raise
  except ValueError as error:
    raise registry.ChoiceError('method', text, str(error)) from error


def check_profile(method: str, profile: str) -> None:
  """Checks --profile beside --method.

  Raises:
    ValueError: if the method has no profiles, or has another as a knob.
  """
  from fedjax_ssl import methods
  with of_method(method):
    name, knobs = registry.parse(method)
  known = [n for n, f in methods.METHODS.items() if 'profile' in _knobs(f)]
  if name in methods.METHODS and name not in known:
    raise ValueError(f'--profile={profile}, but --method={name} has no '
                     f'profiles; leave it out, or give one of '
                     f'{", ".join(known)}.')
  if knobs.get('profile', profile) != profile:
    raise ValueError(f'--profile={profile}, but --method={method} has another; '
                     'give one of them.')
