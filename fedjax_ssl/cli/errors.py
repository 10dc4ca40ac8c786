"""Errors that users can mend, in one line: flag, value, and what is allowed."""
from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
import contextlib
import errno
import re
from typing import Any

from absl import flags

from fedjax_ssl import config
from fedjax_ssl.core import (
  blame,
  checks,
  flagfile_lines,
  imports,
  registry,
)
from fedjax_ssl.running import other_names

# Faults of a name that no file can have.
_OF_A_NAME = (errno.ELOOP, errno.ENAMETOOLONG)

# absl's flags that one gives.
_MORE = ('flagfile', 'verbosity', 'logtostderr', 'alsologtostderr', 'log_dir')

# What we say of a value that does not fit its flag, by what absl says.
_PLAIN = {
    'invalid literal for int': 'is no whole number',
    'could not convert string to float': 'is no number',
    'Non-boolean argument': 'is neither true nor false'}


def line(error: BaseException, given: Mapping[str, Any]) -> str:
  """Returns an error as one line that names flags.

  Args:
    error: what was raised.
    given: values of the flags, as far as they were read.
  """
  with checks.marking('--'):
    text = str(error)
  if isinstance(error, flags.UnrecognizedFlagError):
    text = _unknown(error, given)
  elif isinstance(error, flags.IllegalFlagValueError):
    value, reason = wrong_value(error)
    text = f'--{value}{reason}{_beside(value)}.'
    if getattr(error, '__notes__', ()):
      if re.search(r'=.*\s--\w', value):
        text += ' A line of a flagfile has one flag.'
      elif re.search(r'=.*\s#', value):
        text += ' A comment has a line of its own.'
  elif isinstance(error, flags.CantOpenFlagFileError):
    cause = error.__context__
    if isinstance(cause, OSError):
      text = (f'--flagfile={cause.filename} cannot be read: '
              f'{cause.strerror or cause}.')
  elif isinstance(error, config.FieldError):
    if error.field == 'method' and given.get('profile') is not None:
      text = text.replace(
          f'--method={error.value}',
          f'--method={given["method"]} --profile={given["profile"]}', 1)
  elif isinstance(error, OSError) and error.errno in _OF_A_NAME:
    name = str(error.filename)
    near = [(len(value), f'--{checks.flag(flag)}={value}')
            for flag, value in given.items()
            if value and isinstance(value, str)
            and f'{name}/'.startswith(f'{value.rstrip("/")}/')]
    text = f'{max(near, default=(0, name))[1]} cannot be used: ' + (
        f'{error.strerror}.')
  elif full := blame.full_memory(error):
    text = full
    if blame.is_full(error):
      text += (' --seed_map=map takes less, and, in a new --workdir, fewer '
               'clients at once (--client_map=map, or --client_map=vmap with '
               'a --chunk_size), smaller batches or --compute_dtype=bfloat16.')
  if isinstance(error, flags.Error):  # JAX has notes of its own.
    text += ''.join(getattr(error, '__notes__', ()))
  place = imports.where(error)
  if place and place not in text:
    text += f' (at {place}; --verbosity=1 shows all)'
  return checks.one_line(error, text)


def wrong_value(error: flags.IllegalFlagValueError) -> tuple[str, str]:
  """Returns NAME=VALUE and what is wrong, without names of Python's types."""
  text = str(error).removeprefix('flag --')
  for theirs, ours in _PLAIN.items():
    # The value, which may be anything, stands on both sides of their words.
    parts = text.split(theirs)
    if len(parts) > 1:
      said = theirs.join(parts[:len(parts) // 2])
      return re.sub(r": (\(')?$", '', said), f' {ours}'
  value, _, names = text.rpartition(': value should be one of ')
  if value:
    return value, f' must be one of {names.strip("<>").replace("|", ", ")}'
  value, colon, reason = text.rpartition(': ')
  return (value, f'{colon}{reason.rstrip(".")}') if value else (text, '')


def _beside(value: str) -> str:
  """Says where a value that a flag refuses belongs, if that is known."""
  if re.match(r'optimizer=\w+\(', value):
    return ('; its settings are --learning_rate, --weight_decay and, of some, '
            '--momentum')
  return ('; how many there are says --labels_per_class or --labeled_fraction'
          if re.fullmatch(r'labels=[\d.]+', value) else '')


def _unknown(error: flags.UnrecognizedFlagError, given: Mapping[str, Any]
             ) -> str:
  """Returns the message for an unknown flag.

  If a chosen method or model has a knob of that name, shows how to set it.
  """
  word = str(error.flagvalue or f'--{error.flagname}')
  knob = (error.flagname.split() or [''])[0]
  # A line of a flagfile; a shell would have made two words of it.
  blank = re.fullmatch(r'-*(\w+)\s+=?\s*(\S.*)', word)
  if blank and knob in {checks.flag(name) for name in config.OPTIONS}:
    return (f'{word} is no flag; a comment has a line of its own'
            if blank[2].startswith('#') else
            f'{word} is no flag; write --{knob}={blank[2]}')
  if ours := other_names.ours(knob):
    return f'{word} is no flag. {_did_you_mean(ours)}'
  # Said at once, without loading JAX.
  kinds = {checks.flag(name): option.kind
           for name, option in config.OPTIONS.items()}
  known = [*kinds, *_MORE]
  negated = re.sub('^no[-_]?', '', knob)
  # A knob of a method of the user's own, which may be called anything.
  if ':' in str(given.get('method')) or given.get('imports'):
    with contextlib.suppress(ValueError):
      for place in checks.words(given.get('imports')):
        registry.import_place(place)
    if said := _as_knob(word, knob, given, chosen=True):
      return said
  if near := checks.nearest(knob, known, other_names.NEAR) or [
      f'no{name}' if kinds.get(name) is bool else name
      for name in checks.nearest(negated, known, other_names.NEAR)]:
    return f'{word} is no flag. {_did_you_mean(near)}'
  if said := _as_knob(word, knob, given):
    return said
  meant = [name for name in config.OPTIONS
           if checks.nearest(knob, name.split('_'), other_names.NEAR)]
  return f'{word} is no flag' + (
      f'. {_did_you_mean(meant)}' if meant else '; --help lists all.')


def _as_knob(word: str, knob: str, given: Mapping[str, Any], *,
             chosen: bool = False) -> str:
  """Returns the message for a flag that is a knob, or nearly one; else ''.

  With `chosen` only one of what is chosen counts, and by its whole name.
  """
  from fedjax_ssl.running import meant_knobs
  found = meant_knobs.find(knob, given)
  if found is None or chosen and not found.is_chosen:
    return ''
  return f'{word} is no flag' + found.told(
      _value(word, found.default, found.off), given['method'],
      lambda field, text: f'--{field}="{text}"' if '(' in text else
      f'--{field}={text}')


def _value(word: str, default: Any, off: bool) -> str:
  """Returns the value that a word gives a knob, as Python writes it.

  Without one it is what turns a switch on, or off; of other knobs '...', and
  of a switch that is turned off and has a value, too.
  """
  value = word.partition('=')[2]
  if value and off:
    return '...'
  if not value:
    return str(not off) if isinstance(default, bool) else '...'
  with contextlib.suppress(ValueError, SyntaxError):
    return repr(ast.literal_eval(value))
  return repr(value) if re.fullmatch(r'[A-Za-z]\w*', value) else value


def place(error: flags.UnrecognizedFlagError | flags.IllegalFlagValueError,
          words: Sequence[str]) -> str:
  """Returns ' (at FILE:LINE)' of a wrong flag; '' if no flagfile has it.

  Args:
    error: what absl says of it.
    words: of the command.
  """
  flag = (wrong_value(error)[0] if isinstance(
      error, flags.IllegalFlagValueError) else error.flagname)
  name = flag.partition('=')[0]
  # A value may have a line of its own.
  others = [] if any(map(_is(name).match, words)) else [name]
  files = [*flagfile_lines.read(words)]
  return next((f' (at {file}:{number})'
               for one in map(_is, (flag, *others))
               for file, lines in files
               for number, line in enumerate(lines, start=1)
               if one.match(line)), '')


def _is(flag: str) -> re.Pattern[str]:
  """Matches a word or line that gives a flag: with this value, or with any."""
  end = r'\s*$' if '=' in flag else r'\s*(=|$)'
  return re.compile(rf'\s*--?(no)?{re.escape(flag)}{end}')


def _did_you_mean(names: Sequence[str]) -> str:
  return f'Did you mean --{" or --".join(map(checks.flag, names))}?'
