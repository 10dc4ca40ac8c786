"""Names with arguments, as in `fixmatch(threshold=0.9)`, and what they name.

A name is one of a registry, which others can add to by `register`, or by entry
points of an installed package; or it is `PLACE:NAME`, see `core.imports`.
"""
from __future__ import annotations

import ast
from collections.abc import (
  Callable,
  Collection,
  Iterable,
  Iterator,
  Mapping,
)
import inspect
import math
import os
import re
from typing import Any, TypeVar

from fedjax_ssl.core import blame, checks, imports

T = TypeVar('T')
Given = TypeVar('Given')  # What a registry is given to make a builder of.

# Knobs that had another name: texts that were stored with it are still read.
RENAMED = {'labeled_say': 'labeled_client_weight',
           'max_norm': 'clip_norm',
           'labeled_weight': 'labeled_client_weight'}


def parse(text: str) -> tuple[str, dict[str, Any]]:
  """Splits `name(knob=value, ...)` into the name and its literal arguments.

  Args:
    text: a name, or a name with keyword arguments whose values are Python
      literals or `inf`. Nothing is evaluated. A name may have a place before
      it, as in `./mine.py:name` or `package.module:name`.

  Returns:
    The name and the dict of arguments.

  Raises:
    ValueError: if the text has another form, or a value is no literal; the
      message shows it.
  """
  form = (f'{text!r} is not of the form name or name(knob=value, ...), with '
          'the name of each knob')
  if text.strip().endswith('.py'):
    names = imports.names_in(text.strip())
    form = f'{text!r} lacks what follows the file: :NAME or :NAME(knob=...)' + (
        f', NAME being {" or ".join(names)}' if names else '')
  if placed := imports.split(text):
    name, knobs = parse(placed.name + placed.rest)
    return f'{placed.place}:{name}', knobs
  try:
    node = ast.parse(text.strip(), mode='eval').body
  except (SyntaxError, MemoryError, RecursionError):
    raise ValueError(form) from None
  if isinstance(node, ast.Name):
    return node.id, {}
  if (not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name)
      or node.args or any(k.arg is None for k in node.keywords)):
    raise ValueError(form)
  given = [k.arg for k in node.keywords]
  if twice := [knob for knob in given if given.count(knob) > 1]:
    raise ValueError(f'{text!r} gives {twice[0]} twice.')
  knobs = {}
  for knob, keyword in zip(given, node.keywords, strict=True):
    try:
      knobs[str(knob)] = ast.literal_eval(_Infinity().visit(keyword.value))
    except (ValueError, TypeError, MemoryError, RecursionError):
      said = ast.get_source_segment(text.strip(), keyword) or str(knob)
      raise ValueError(
          f'knob {" ".join(said.split())}: allowed are literals: numbers, inf, '
          "True, False, None, and words in quotes, as in server='fedprox'."
          ) from None
  return node.func.id, knobs


class _Infinity(ast.NodeTransformer):
  """Makes a number of the name `inf`, which is no literal of Python's."""

  def visit_Name(self, node: ast.Name) -> ast.expr:
    return ast.Constant(math.inf) if node.id == 'inf' else node


def name_of(text: str) -> str:
  """Returns what stands before the knobs, of texts that `parse` refuses too."""
  return text.partition('(')[0].strip()


def written(name: str, knobs: Mapping[str, Any]) -> str:
  """Returns the text that `parse` splits into these."""
  words = [f'{knob}={literal(value)}' for knob, value in knobs.items()]
  return f'{name}({", ".join(words)})' if words else name


def literal(value: Any) -> str:
  """Returns what Python reads as this value."""
  if type(value) in (tuple, list):
    inner = ', '.join(map(literal, value))
    if isinstance(value, list):
      return f'[{inner}]'
    return f'({inner},)' if len(value) == 1 else f'({inner})'
  text = repr(value)
  return text.replace('inf', '1e999') if isinstance(value, float) else text


def with_new_names(knobs: Mapping[str, Any], known: Iterable[str]
                   ) -> dict[str, Any]:
  """Gives knobs that were renamed the names that they have now.

  Args:
    knobs: values by name, as a text gives them.
    known: names that the function takes; those stay as they are.

  Returns:
    The values by new name.

  Raises:
    ValueError: for a knob that is given by both names.
  """
  known, out = set(known), {}
  for knob, value in knobs.items():
    new = knob if knob in known else RENAMED.get(knob, knob)
    new = new if new in known else knob
    if new != knob and new in knobs:
      raise ValueError(f'{knob} is the old name of {new}; give {new} alone.')
    out[new] = value
  return out


class Registry(dict[str, T]):
  """Builders by name, which others can add to.

  Attributes:
    kind: what it holds, as messages call it.
    group: of entry points that add to it; '' if none do.
  """

  def __init__(self, kind: str, builders: Mapping[str, T], group: str = '',
               adapt: Callable[[Any], Any] | None = None):
    """Takes the builders of this library.

    Args:
      kind: see above.
      builders: by name.
      group: see above.
      adapt: makes a builder of what others give, or raises a ValueError.
    """
    super().__init__(builders)
    self.kind, self.group, self._adapt = kind, group, adapt

  def adapt(self, given: Any) -> Any:
    """Makes a builder of what is registered.

    Raises:
      ValueError: if none can be made.
    """
    if self._adapt is not None:
      return self._adapt(given)
    if not callable(given):
      raise ValueError(f'{given!r} is no function to make the {self.kind}.')
    return given

  def register(self, name: str) -> Callable[[Given], Given]:
    """Decorates a builder of this registry; see the function `register`."""
    return register(self, name)

  def entry_points(self) -> dict[str, Any]:
    """Returns installed packages' entry points by name; imports none."""
    if not self.group:
      return {}
    from importlib import metadata  # Reads every installed package's files.
    return {point.name: point
            for point in metadata.entry_points(group=self.group)}

  def load_entry_points(self) -> Iterator[str]:
    """Adds what installed packages have; yields messages on what fails."""
    for name in self.entry_points():
      try:
        find(self, name)
      except ValueError as error:
        yield str(error)


def register(known: dict[str, Any], name: str) -> Callable[[Given], Given]:
  """Decorates a builder to add it to a registry under a name.

  Args:
    known: any registry.
    name: a Python identifier that is not taken. A notebook cell that is run
      again may register its own name again.

  Returns:
    The decorator, which returns what it is given.

  Raises:
    ValueError: if the name is no identifier, or is taken; the message says by
      what.
    TypeError: if the name is no text, as where the brackets are forgotten.
  """
  kind = getattr(known, 'kind', '') or 'name'
  if not isinstance(name, str):
    raise TypeError(f"register takes the name of a {kind}, as in "
                    f"@register('mine'), not {name!r}.")
  if not name.isidentifier():
    raise ValueError(f'{kind} {name!r} is no name; give letters, digits and _.')

  def add(given: Given) -> Given:
    made: Any = known.adapt(given) if isinstance(known, Registry) else given
    path = imports.path_of(_module(made))
    if path:
      _OF_FILES.setdefault(path, []).append((known, name, made))
      if name in known and _is_version(known[name], path):
        return given
    if name in known and not _is_again(known[name], made):
      if location(known[name]) == location(made):
        return given  # A file that was imported by its path and by its name.
      raise ValueError(f'{kind} {name!r} is registered already, by '
                       f'{location(known[name])}; choose another name.')
    known[name] = made
    return given
  return add


# What the user's files registered, by path: the registry, name and builder.
_OF_FILES: dict[str, list[tuple[Any, str, Any]]] = {}


def import_place(place: str) -> None:
  """Imports what --import names, and lets it take the names it registers.

  These may be taken by another version of the file, which the process imported
  for an older run.

  Raises:
    FieldError: if it cannot be imported.
  """
  try:
    imports.load(place)
  except ValueError as error:
    raise checks.FieldError('imports', place, str(error)) from error
  for known, name, made in _OF_FILES.get(imports.absolute(place), ()):
    known[name] = made


def _module(builder: Any) -> str:
  return getattr(_function(builder), '__module__', '')


def _function(builder: Any) -> Any:
  """Returns the function behind a builder; of a setting its `deal`."""
  return getattr(builder, 'deal', builder)


def _is_version(old: Any, path: str) -> bool:
  """Returns whether a builder is from another file with the same file name."""
  other = imports.path_of(_module(old))
  return other != path and bool(other) and (
      os.path.basename(other) == os.path.basename(path))


def _is_again(old: Any, new: Any) -> bool:
  """Returns if `new` may replace `old`, of a notebook or a failed file."""
  old, new = _function(old), _function(new)
  return imports.has_failed(_module(old)) or (
      _module(old) == _module(new) == '__main__') and (
      getattr(old, '__qualname__', 0) == getattr(new, '__qualname__', 1))


def location(builder: Any) -> str:
  """Returns FILE:LINE of a builder, or whatever is known of it."""
  builder = _function(builder)
  inner = inspect.unwrap(builder) if callable(builder) else builder
  code = getattr(inner, '__code__', None)
  if code is not None:
    return f'{code.co_filename}:{code.co_firstlineno}'
  return f'{getattr(inner, "__module__", "")}.{inner!r}'.lstrip('.')


def find(known: Mapping[str, T], name: str, kind: str = '') -> T:
  """Finds the builder of a name: registered, from a place, or of a package.

  Args:
    known: any registry. A `Registry` also has what entry points offer.
    name: as `parse` returns it.
    kind: for messages; a `Registry` has its own.

  Raises:
    ValueError: if there is none, or it cannot be imported.
  """
  if name in known:
    return known[name]
  if imports.split(name) is not None:
    return _of_place(name, known)
  kind = kind or getattr(known, 'kind', 'name')
  points = known.entry_points() if isinstance(known, Registry) else {}
  if name not in points:
    names = {*known, *points}
    # A slip, or what is registered elsewhere.
    own = ('' if checks.near(name, names) else
           ' One of your own is FILE.py:NAME.')
    raise ValueError(f'{kind} {name!r} is {checks.unknown(name, names)}{own}')
  assert isinstance(known, Registry)
  point = points[name]
  package = point.dist.name if point.dist else 'an installed package'
  version = getattr(point.dist, 'version', '')
  try:
    given = point.load()  # What is loaded may register itself.
    made: Any = known[name] if name in known else known.adapt(given)
  except Exception as error:
    raise ValueError(
        f'{kind} {name!r} of the package {package} cannot be loaded from '
        f'{point.value}: {type(error).__name__}: '
        f'{checks.lines(error)[-1]}') from error
  if point.dist:
    _OF_PACKAGES[known.kind, name] = (package, version)
  found: T = known.setdefault(name, made)
  return found


# By kind and name, the package and version of a builder from an entry point.
_OF_PACKAGES: dict[tuple[str, str], tuple[str, str]] = {}


def packages(names: Iterable[str]) -> dict[str, str]:
  """Returns the installed packages that names are from, with versions."""
  names = {*names}
  return dict(sorted(package for (_, name), package in _OF_PACKAGES.items()
                     if name in names))


def _of_place(text: str, known: Mapping[str, T]) -> T:
  """What a place registers under a name, or else its attribute of that name."""
  placed = imports.find(text)
  assert placed is not None
  module = imports.load(placed.place)
  own = {name: made for registry, name, made in _OF_FILES.get(
      placed.place, ()) if registry is known}
  if placed.name in own:
    made: T = own[placed.name]
    return made
  if not hasattr(module, placed.name):
    names = [*own] + [n for n, value in vars(module).items()
              if not n.startswith('_') and n not in own
              and _module(value) == module.__name__]
    raise ValueError(f'{placed.place} has no {placed.name!r}.'
                     f'{checks.near(placed.name, names)} It has: '
                     f'{", ".join(names) or "nothing"}.')
  given = getattr(module, placed.name)
  if isinstance(known, Registry):
    # One builder for one class, also when a run asks for it again.
    kept = module.__dict__.setdefault('__fedjax_ssl__', {})
    key = (known.kind, placed.name)
    if key not in kept:
      kept[key] = known.adapt(given)
    given = kept[key]
  made = given
  return made


# By type of a literal: words of the annotations that it fits.
_UNDER: dict[type, tuple[str, ...]] = {
    bool: ('bool',), int: ('int', 'float'), float: ('float',), str: ('str',),
    type(None): ('None',), tuple: ('tuple', 'Sequence'),
    list: ('tuple', 'Sequence', 'list')}


def _fits(value: Any, annotation: Any) -> bool:
  """Returns whether a literal fits an annotation; without one all do."""
  if annotation is inspect.Parameter.empty:
    return True
  text = annotation if isinstance(annotation, str) else str(annotation)
  if re.search(r'\b(Any|object)\b', text):
    return True
  return any(re.search(rf'\b{word}\b', text)
             for word in _UNDER.get(type(value), ()))


def build(kind: str, text: str, registry: Mapping[str, Callable[..., Any]],
          *args: Any, defaults: Mapping[str, Any] | None = None,
          **shared: Any) -> Any:
  """Calls the registered function that `name(knob=value)` asks for.

  Args:
    kind: the field that holds the text ('method', 'model').
    text: see `parse`.
    registry: name to function; knobs are its keyword-only parameters.
    *args: positional arguments passed on.
    defaults: keyword arguments passed on unless the text sets them.
    **shared: keyword arguments passed on; not for the text to set.

  Returns:
    What the function returns.

  Raises:
    FieldError: for an unknown name or knob (the message lists the known ones),
      a value of another type than the knob's, or one that the function refuses
      with a ValueError.
  """
  try:
    function, given = chosen(kind, text, registry, shared, defaults or ())
    return _called(function, args, {**(defaults or {}), **shared}, given)
  except ValueError as error:
    raise checks.FieldError(kind, text.strip(), str(error)) from error


def is_own(text: str, known: Mapping[str, Any]) -> bool:
  """Returns whether a text names code of a user's, not of this library."""
  if imports.split(text):
    return True
  try:
    builder = known.get(parse(text)[0])
  except ValueError:
    return False
  return builder is not None and not is_library(inspect.unwrap(builder))


def is_library(function: Any) -> bool:
  """Returns whether a function or class is defined in this library."""
  return (getattr(function, '__module__', None) or '').startswith('fedjax_ssl.')


def _called(function: Callable[..., Any], args: tuple[Any, ...],
            ours: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
  """Calls it with a text's knobs, and with those of `ours` that it takes."""
  parameters = inspect.signature(function).parameters.values()
  if not any(p.kind is p.VAR_KEYWORD for p in parameters):
    takes = {p.name for p in parameters}
    ours = {k: v for k, v in ours.items() if k in takes}
  try:
    # What a user's decorator fills in is no part of the call.
    inspect.signature(function, follow_wrapped=False).bind(
        *args, **{**ours, **given})
  except TypeError as error:
    # Of a user's function; what comes from inside it is not caught here.
    raise ValueError(f'is called with {len(args) or "no"} argument'
                     f'{"" if len(args) == 1 else "s"} besides its knobs, but '
                     f'its function has another signature: {error}.'
                     ) from error
  with blame.one_line(not is_library(inspect.unwrap(function))):
    return function(*args, **{**ours, **given})


def _has_place(parameter: inspect.Parameter) -> bool:
  """Returns whether it would be a knob if it were keyword-only."""
  return (parameter.kind is parameter.POSITIONAL_OR_KEYWORD
          and parameter.default is not parameter.empty)


def chosen(kind: str, text: str, registry: Mapping[str, Callable[..., T]],
           filled: Collection[str] = (), spared: Collection[str] = ()
           ) -> tuple[Callable[..., T], dict[str, Any]]:
  """Finds the function that a text names, and its knobs, without calling it.

  Args:
    kind: see `build`.
    text: see `parse`.
    registry: name to function.
    filled: keyword-only parameters that the text must not set.
    spared: those that it may leave out though they have no default.

  Returns:
    The function, and the knobs that the text gives, under their new names.

  Raises:
    ValueError: for an unknown name or knob, a knob that is missing, or a value
      of another type than the knob's.
  """
  name, knobs = parse(text)
  function = find(registry, name, kind)
  parameters = inspect.signature(function).parameters
  known = {p.name: p for p in parameters.values()
           if p.kind is p.KEYWORD_ONLY and p.name not in filled}
  knobs = with_new_names(knobs, known)
  for knob, value in knobs.items():
    if knob not in known:
      if knob in parameters and _has_place(parameters[knob]):
        raise ValueError(f'{kind} {name!r} takes {knob} by its place; a knob '
                         f'is keyword-only: write "*" before it.')
      raise ValueError(f'{kind} {name!r} has no knob {knob!r}.'
                       f'{checks.near(knob, known)} Allowed: '
                       f'{", ".join(known) or "none"}.')
    if not _fits(value, known[knob].annotation):
      raise ValueError(f'{kind} {name!r} takes {knob} of type '
                       f'{known[knob].annotation}, not {value!r}.')
  if lost := [k for k, p in known.items()
              if p.default is p.empty and k not in {*knobs, *spared}]:
    raise ValueError(f'{kind} {name!r} needs {", ".join(lost)}.')
  return function, knobs
