"""Checks of names and numbers, with messages that say what is allowed."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import contextvars
import difflib
import operator
import os
import re
from typing import Any

# Knobs are used in float32: its largest number, and the smallest one that is
# normal, which has all digits.
MOST, LEAST = 3.4028234663852886e38, 1.1754943508222875e-38

# JAX cuts larger seeds to 32 bits, and two runs would be one.
LARGEST_SEED = 2**32 - 1
_WIDTH = 80  # Of a value in a message, in characters.
_VOWELS, _SIGNS = re.compile('[aeiou]'), re.compile('[-_ ]')

# Fields whose flag has a name that Python keeps for itself.
_FLAGS = {'imports': 'import'}


def flag(field: str) -> str:
  """Returns the name of a field's flag."""
  return _FLAGS.get(field, field)


class FieldError(ValueError):
  """A field has a value that is refused.

  A field has the same name in Python, in `config.json` and as a flag, except
  for those that `flag` renames.

  Attributes:
    field: its name.
    value: what was given.
    reason: why it is refused, and what is allowed.
  """

  def __init__(self, field: str, value: Any, reason: str, **beside: Any):
    """Also takes the values of other fields that it conflicts with."""
    super().__init__(field, value, reason)
    self.field, self.value, self.reason = field, value, reason
    self._fields = {field: value, **beside}

  def rename(self, field: str, name: str) -> None:
    """Calls a field by another name, which the user has given it."""
    self._fields = {name if key == field else key: value
                    for key, value in self._fields.items()}
    if self.field == field:
      self.field = name
      self.args = name, self.value, self.reason

  def because(self, reason: str) -> FieldError:
    """Returns a refusal of the same values for another reason."""
    return FieldError(self.field, self.value, reason, **{
        name: value for name, value in self._fields.items()
        if name != self.field})

  def __str__(self) -> str:
    """Returns one sentence, with the fields as its reader gives them."""
    cause = self.__cause__
    reason = cause if isinstance(cause, FieldError) else self.reason
    return f'{given(self._fields)}: {reason}'


def given(fields: Mapping[str, Any]) -> str:
  """Returns how the reader of a message gives fields these values."""
  return ' and '.join(
      option(name, None if value is True and mark() else _shown(value))
      for name, value in fields.items())


_MARK = contextvars.ContextVar('mark', default='')


@contextlib.contextmanager
def marking(mark: str) -> Iterator[None]:
  """Makes messages put a mark such as `--` before each option.

  That is how the reader of a command's messages gives one.
  """
  token = _MARK.set(mark)
  try:
    yield
  finally:
    _MARK.reset(token)


def mark() -> str:
  """Returns the mark before options, which Python has not: ''."""
  return _MARK.get()


def option(field: str, value: Any = None) -> str:
  """Returns how the reader of a message gives an option: [--]NAME[=VALUE]."""
  name = flag(field) if mark() else field
  return f'{mark()}{name}' + ('' if value is None else f'={value}')


def _shown(value: Any) -> str:
  """Returns a value's text, of many values the beginning."""
  text = str(value)
  is_long = isinstance(value, list | tuple | dict) and len(text) > _WIDTH
  return f'{text[:_WIDTH - 3]}...' if is_long else text


def one_line(error: BaseException, text: str = '') -> str:
  """Returns an error's text on one line, or its type's name if it has none.

  Args:
    error: what was raised.
    text: what is said in place of the error's own text, unless empty.
  """
  return ' '.join((text or str(error)).split()) or type(error).__name__


def lines(error: BaseException) -> list[str]:
  """Returns the lines of an error's text, at least one, which may be empty."""
  return str(error).strip().splitlines() or ['']


class LengthError(ValueError):
  """Something spans the run, but the task does not say how long a run is."""

  def __init__(self, what: str):
    """Takes the name of what spans the run."""
    super().__init__(f'{what} spans the run, and the task does not say how '
                     'long the run is; give TaskSpec(schedule_rounds=R), or '
                     'call train(num_rounds=R), which sets it.')


def check(kind: str, name: str, allowed: Iterable[str]) -> str:
  """Returns `name`, or raises ValueError that lists what is allowed."""
  if name in (allowed := sorted(allowed)):
    return name
  raise ValueError(f'{kind} {name!r} is {unknown(name, allowed)}')


def unknown(name: str, allowed: Iterable[str]) -> str:
  """Returns the end of a message: 'unknown.', the nearest name, all names."""
  allowed = sorted(allowed)
  return (f'unknown.{near(name, allowed)} Allowed: '
          f'{", ".join(allowed)}.')


_STORED = contextvars.ContextVar('stored', default=False)


@contextlib.contextmanager
def stored() -> Iterator[None]:
  """Makes `refuse_idle` refuse nothing.

  A run may be stored by a version that did not, and nobody can change what it
  was given.
  """
  token = _STORED.set(True)
  try:
    yield
  finally:
    _STORED.reset(token)


def refuse_idle(error: ValueError) -> None:
  """Raises an error on a number that does nothing, but not for a stored run."""
  if not _STORED.get():
    raise error


def profile(profiles: Mapping[str, Mapping[str, Any]], name: str,
            **given: Any) -> dict[str, Any]:
  """Returns a profile's values, replaced by those given that are not None.

  Raises:
    ValueError: for an unknown profile.
  """
  chosen = profiles[check('profile', name, profiles)]
  return {**chosen, **{k: v for k, v in given.items() if v is not None}}


def near(name: str, allowed: Iterable[str]) -> str:
  """Returns ' Did you mean ...?' for the nearest allowed name, or nothing."""
  return ''.join(f' Did you mean {full!r}?' for full in nearest(name, allowed))


def nearest(name: str, allowed: Iterable[str], cutoff: float = 0.6
            ) -> list[str]:
  """Returns a list of the nearest allowed name, or else of nothing.

  First are those that differ by capitals and signs between words alone. If none
  is near, those written by their initials, without vowels or in another order.

  Args:
    name: what was given.
    allowed: the names.
    cutoff: how alike the two are at least, 0 to 1, by `difflib`. A `fed` at
      the beginning does not count, if `name` has one.
  """
  allowed = [*allowed]
  if same := [full for full in allowed if folded(full) == folded(name)]:
    return same
  shared = 'fed' if name.startswith('fed') else ''
  # Of two that differ by it alone, the one that has it.
  tails = {full.removeprefix(shared): full
           for full in sorted(allowed, key=lambda full: full.startswith('fed'))}
  return [tails[tail] for tail in difflib.get_close_matches(
      name.removeprefix(shared), tails, 1, cutoff)] or [
      full for full in allowed if len(name) > 1 and (
          name in (initials(full), _VOWELS.sub('', full))
          or sorted(name) == sorted(full))]


def folded(name: str) -> str:
  """Returns a name in small letters, without signs between its words."""
  return _SIGNS.sub('', name.lower())


def whole_numbers(values: Iterable[Any]) -> tuple[int, ...] | None:
  """Returns whole numbers as int; None if one of the values is no such."""
  values = [*values]
  if any(isinstance(value, bool) for value in values):
    return None
  try:
    return tuple(map(operator.index, values))
  except TypeError:
    return None


def seeds(values: Iterable[Any]) -> tuple[int, ...] | None:
  """Returns seeds as int; None unless all are whole, 0 to `LARGEST_SEED`."""
  found = whole_numbers(values)
  return found if found is not None and all(
      0 <= seed <= LARGEST_SEED for seed in found) else None


def labels_at_clients(labels_at: str, why: str) -> None:
  """Refuses labels at the server, and says why clients need them."""
  if labels_at == 'server':
    raise FieldError('labels_at', labels_at, f'give clients: {why}.')


def words(value: str | os.PathLike[str] | Sequence[str] | None
          ) -> tuple[str, ...]:
  """Returns the words of a field that takes several, separated by commas."""
  several = [value] if isinstance(value, str | os.PathLike) else value or ()
  return tuple(word.strip() for text in several
               for word in os.fspath(text).split(',') if word.strip())


def initials(name: str) -> str:
  """Returns what people write for a name: learning_rate, lr."""
  return ''.join(part[:1] for part in name.split('_'))
