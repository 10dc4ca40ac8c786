"""The values that each knob may have: one bound for each name.

A knob is a keyword argument of a method, model or view, as in
`fixmatch(threshold=0.9)`. `checked` refuses numbers out of bounds, whether they
come from a text or from Python. A value that switches something off is either
refused, or `notes` says what it does when a run starts.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
import functools
import inspect
import math
import numbers
import re
from typing import Any, NamedTuple, ParamSpec, TypeVar

from fedjax_ssl.core import checks
from fedjax_ssl.core.registry import chosen, find, parse, with_new_names

P = ParamSpec('P')
T = TypeVar('T')
# Parameters that follow from the data or from other options.
_FILLED = ('num_classes', 'choices', 'dtype', 'flip', 'where')
# By profile: the values of knobs, and of whatever else it fixes.
Profiles = Mapping[str, Mapping[str, Any]]


class Case(NamedTuple):
  """What values from `least` to `most` switch off, in words."""

  least: float
  most: float
  words: str


class Needs(NamedTuple):
  """A value of another knob without which this knob does nothing.

  Attributes:
    knob: the other knob.
    values: its values with which this knob does something.
    advice: what to write instead. With an advice, a knob that does nothing is
      refused; without, `notes` says so.
  """

  knob: str
  values: tuple[Any, ...]
  advice: str = ''


class Bound(NamedTuple):
  """What a number may be.

  Attributes:
    least: the smallest value.
    most: the largest value; by default any that float32 holds.
    above: whether it must be above `least`.
    below: whether it must be below `most`.
    whole: whether it must be a whole number.
    infinite: whether infinity is a value too.
    cases: values that switch something off, and what is then left.
    needs: another knob without which it does nothing.
    advice: what to write instead of a refused value.
  """

  least: float = 0
  most: float = checks.MOST
  above: bool = False
  below: bool = False
  whole: bool = False
  infinite: bool = False
  cases: tuple[Case, ...] = ()
  needs: Needs | None = None
  advice: str = ''


class Word(NamedTuple):
  """A knob that is not a number.

  Attributes:
    words: those that it may be; () is not checked, as of a switch.
    needs: another knob without which it does nothing.
  """

  words: tuple[str, ...] = ()
  needs: Needs | None = None


Limit = TypeVar('Limit', Bound, Word)


def word(*words: str) -> Word:
  """Returns what a knob must be one of."""
  return Word(words)


def at(value: float, words: str) -> Case:
  """Returns the case of one value."""
  return Case(value, value, words)


def over(value: float, words: str) -> Case:
  """Returns the case of all larger values."""
  return Case(math.nextafter(value, math.inf), math.inf, words)


def weight(what: str) -> Bound:
  """Returns the bound of a weight of `what`, which 0 switches off."""
  return Bound(cases=(at(0, f'{what} is off'),))


def whole(least: int, most: int, *cases: Case) -> Bound:
  """Returns the bound of a whole number."""
  return Bound(least, most, whole=True, cases=cases)


def share(*cases: Case) -> Bound:
  """Returns the bound of a share, 0 to 1."""
  return Bound(0, 1, cases=cases)


def factor(what: str) -> Bound:
  """Returns the bound of a factor on the rate of `what`."""
  return Bound(cases=(at(0, f'{what} stay where they start'),))


def only(knob: str, value: Any, bound: Limit) -> Limit:
  """Returns a bound of what does something only with that value of a knob."""
  return bound._replace(needs=Needs(knob, (value,)))


# Loops over views are unrolled, and thousands would compile forever.
UNROLLED = 64
STEPS = 1_000_000  # More would overflow counts of rows.

# A probability is at most 1, so 1.1 says "none"; 2 or 95 is a slip.
CONFIDENCE = Bound(0, 1.1, cases=(
    at(0, 'every unlabeled row counts'), over(1, 'no unlabeled row counts')),
    advice='a probability; above 1 no row counts')
# For a method that takes a row only above its threshold, not at it.
STRICT = Bound(0, 1, cases=(at(1, 'no unlabeled row counts'),))
# Optimizers of a client, see `core.optimizers`, and their knobs.
OPTIMIZERS = ('sgd', 'nesterov', 'adam', 'adamw', 'rmsprop')
OWN_MOMENTUM = ('adam', 'adamw')  # MOMENTUM is not theirs.
RATE = Bound(above=True)
MOMENTUM = Bound(0, 1, below=True)
WEIGHT_DECAY = Bound()
# The decay of a moving average over batches.
AVERAGE = share(at(0, 'only the last batch counts'),
                at(1, 'averages stay where they start'))
PROXIMAL = Bound(cases=(at(0, 'the pull to the received model is off'),),
                 needs=Needs('server', ('fedprox',)))

# For a method in which clients with labels may be left out.
CLIENT_FACTOR = Bound(cases=(at(0, 'clients with labels do not count'),))

BOUNDS: dict[str, Bound] = {
    'alpha': Bound(0, 1e6, cases=(at(0, 'rows are not mixed'),)),
    'clip_norm': Bound(above=True, infinite=True),
    'consistency_weight': weight('consistency'),
    'cutout': whole(0, 2**31 - 1, at(0, 'nothing is cut out')),
    'decay': share(at(0, 'the teacher is its student'),
                   at(1, 'the teacher never moves')),
    'final': share(),
    'hidden': whole(1, 65536),
    'labeled_client_weight': Bound(above=True),
    'labeled_weight': Bound(cases=(at(0, 'labels do not count'),)),
    'magnitude': whole(0, 1000),
    'max_threshold': Bound(0, 1, above=True),
    'mu': PROXIMAL,
    'num_ops': whole(0, 1000, at(0, 'no operation is drawn')),
    'num_views': whole(1, UNROLLED),
    'pad': whole(0, 2**31 - 1, at(0, 'images are not moved')),
    'passes': whole(1, 1000),
    'ramp': share(),
    'server_momentum': Bound(0, 1, below=True, cases=(
        at(0, 'the server has no momentum'),)),
    'size': whole(1, 65536),
    'stats_clients': whole(0, 2**31 - 1),
    'temperature': Bound(),
    'threshold': CONFIDENCE,
    'unlabeled_rate': factor('clients without labels'),
    'unlabeled_weight': weight('what unlabeled rows teach'),
    'vocabulary': whole(2, 10_000_000),
    'warmup': share(at(1, 'only clients with labels train')),
    'warmup_passes': whole(0, 1000),
    'stride': whole(1, 64),
    'width': whole(1, 8192),
}
WORDS: dict[str, Word] = {
    'init': word('he', 'torch'),
    'lr_decay': word('none', 'plateau'),
    'server': word('fedavg', 'fedprox', 'local'),
    'weighting': word('examples', 'uniform'),
}


def checked(profiles: Profiles | None = None, /, **own: Bound | Word
            ) -> Callable[[Callable[P, T]], Callable[P, T]]:
  """Decorates a builder: it refuses numbers out of bounds and unknown words.

  Args:
    profiles: what each value of its knob `profile` stands for; a knob that is
      None takes the profile's value of that name.
    **own: bounds of the builder's keyword-only parameters that differ from
      `BOUNDS` and `WORDS`.

  Returns:
    The decorator. The builder keeps its name, signature and docstring.

  Raises:
    TypeError: when it decorates a builder without one of the knobs in `own`.
  """
  def wrap(function: Callable[P, T]) -> Callable[P, T]:
    parameters = names(function)
    if lost := sorted(set(own) - set(parameters)):
      raise TypeError(f'{function.__name__} has no knob {", ".join(lost)}.')
    bounds: dict[str, Bound | Word] = {
        name: bound for name, parameter in parameters.items()
        if (bound := own.get(name) or _usual(name, parameter))}

    @functools.wraps(function)
    def build(*args: P.args, **kwargs: P.kwargs) -> T:
      _check(function, bounds, kwargs)
      return function(*args, **kwargs)

    build.knob_bounds = bounds  # type: ignore[attr-defined]
    build.knob_profiles = profiles or {}  # type: ignore[attr-defined]
    return build
  return wrap


def bounds_of(function: Callable[..., Any]) -> Mapping[str, Bound | Word]:
  """Returns a decorated builder's bounds by knob; none for other functions."""
  return getattr(function, 'knob_bounds', {})


def profiles_of(function: Callable[..., Any]) -> Profiles:
  """Returns what each profile of a decorated builder stands for."""
  return getattr(function, 'knob_profiles', {})


def check(field: str, text: str, registry: Mapping[str, Callable[..., Any]],
          filled: Collection[str] = ()) -> None:
  """Refuses a `name(knob=value)` that is wrong whatever the data are.

  What depends on data or on other options is checked when it is built.

  Args:
    field: name of the field that holds the text.
    text: see `registry.parse`.
    registry: name to builder.
    filled: parameters that the text must not set.

  Raises:
    FieldError: for an unknown name, knob, word or profile, a value of another
      type, or a number out of bounds.
  """
  try:
    function, given = chosen(field, text, registry, filled)
    _check(function, bounds_of(function), given)
    if 'profile' in given and (known := profiles_of(function)):
      checks.check('profile', given['profile'], known)
  except ValueError as error:
    raise checks.FieldError(field, text.strip(), str(error)) from error


def notes(text: str, registry: Mapping[str, Callable[..., Any]]) -> list[str]:
  """Says what a `name(knob=value)` switches off, in a line for each knob.

  It looks only at knobs that the text gives, not at defaults.

  Args:
    text: one that `registry.build` accepts.
    registry: name to builder.

  Returns:
    Lines such as 'fixmatch(threshold=0): every unlabeled row counts'.
  """
  name, given = parse(text)
  function = find(registry, name)
  given = with_new_names(given, names(function))
  lines = []
  for knob, bound in bounds_of(function).items():
    if knob not in given or given[knob] is None:
      continue
    value, words = given[knob], []
    if idle := _idle(function, bound, given):
      words.append(f'does nothing with {idle}')
    elif isinstance(bound, Bound):
      words += [c.words for c in bound.cases if c.least <= value <= c.most]
    lines += [f'{name}({knob}={value!r}): {word}' for word in words]
  return lines


def names(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
  """Returns a builder's knobs: keyword-only, and not in `_FILLED`."""
  return {p.name: p for p in inspect.signature(function).parameters.values()
          if p.kind is p.KEYWORD_ONLY and p.name not in _FILLED}


def _usual(name: str, parameter: inspect.Parameter) -> Bound | Word | None:
  """Returns what numbers, or words, of a name are; None for other kinds."""
  kinds = {*re.findall(r'\w+', str(parameter.annotation))}
  if kinds & {'int', 'float'}:
    return BOUNDS.get(name)
  return WORDS.get(name) if kinds == {'str'} else None


def _check(function: Callable[..., Any], bounds: Mapping[str, Bound | Word],
           given: Mapping[str, Any]) -> None:
  parameters = names(function)
  for knob, bound in bounds.items():
    if knob not in given or given[knob] is None and (
        'None' in str(parameters[knob].annotation)):
      continue
    if isinstance(bound, Bound):
      require(knob, given[knob], bound)
    elif bound.words:
      checks.check(knob, given[knob], bound.words)
    idle = _idle(function, bound, given)
    if idle and bound.needs is not None and bound.needs.advice:
      raise ValueError(f'{knob}={given[knob]!r} does nothing with {idle}; '
                       f'{bound.needs.advice}, or leave {knob} out.')


def _idle(function: Callable[..., Any], bound: Bound | Word,
          given: Mapping[str, Any]) -> str:
  """Returns the setting with which a knob does nothing; '' if it acts."""
  needs = bound.needs
  other = None if needs is None else names(function).get(needs.knob)
  if needs is None or other is None:
    return ''
  value = given.get(needs.knob, other.default)
  return '' if value in needs.values else f'{needs.knob}={value!r}'


def require(knob: str, value: Any, bound: Bound) -> None:
  """Raises ValueError, naming the knob, for a number out of bounds."""
  if allowed := fault(value, bound):
    shown = repr(value) if isinstance(value, str) else value
    advice = f' ({bound.advice})' if bound.advice else ''
    raise ValueError(f'{knob} must be {allowed}, not {shown}{advice}.')


def check_mixing(alpha: float) -> None:
  """Raises ValueError for a Beta(alpha, alpha) that cannot be drawn from."""
  # Draws of a Beta not far below this are NaN. Without a draw 0 mixes nothing.
  require('alpha', alpha, Bound(1e-30 if alpha else 0))


def fault(value: Any, bound: Bound) -> str:
  """Returns what a value should be and is not; '' if nothing is wrong."""
  if isinstance(value, bool) or not (isinstance(value, numbers.Real)
                                     or hasattr(value, 'dtype')):
    return 'a number'
  if hasattr(value, 'aval'):  # A number that JAX holds, perhaps a traced one.
    return ''
  inside = (bound.least < value if bound.above else bound.least <= value) and (
      value < bound.most if bound.below else value <= bound.most)
  inside = inside or bound.infinite and value == math.inf
  # Smaller numbers lose digits in float32.
  inside = inside and not (bound.above and bound.least == 0
                           and value < checks.LEAST)
  inside = inside and not (bound.whole and value != int(value))
  return '' if inside else _words(bound)


def _words(bound: Bound) -> str:
  """Returns what a bound allows, in words."""
  least, most = bound.least, bound.most
  if bound.whole and most in (2**31 - 1, 2**32 - 1):
    return (f'a whole number of at least {least:g} and below '
            f'2**{31 if most < 2**31 else 32}')
  if bound.whole and most > 2**32:
    return f'a whole number of at least {least:g}'
  if bound.whole:
    return f'a whole number of at least {least:g} and at most {most:.0f}'
  if most < checks.MOST:
    return (f'in {"(" if bound.above else "["}{least:g}, {most:g}'
            f'{")" if bound.below else "]"}')
  return (f'{"above" if bound.above else "at least"} {least:g}'
          + ('' if bound.infinite else ' and finite in float32'))
