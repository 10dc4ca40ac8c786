"""Names with arguments, as in `fixmatch(threshold=0.9)`."""
from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
import inspect
import re
from typing import Any

from fedjax_ssl.core import checks

# Knobs that had another name: texts that were stored with it are still read.
RENAMED = {'labeled_say': 'labeled_client_weight',
           'labeled_weight': 'labeled_client_weight'}


def parse(text: str) -> tuple[str, dict[str, Any]]:
  """Splits `name(knob=value, ...)` into the name and its literal arguments.

  Args:
    text: a name, or a name with keyword arguments whose values are Python
      literals. Nothing is evaluated.

  Returns:
    The name and the dict of arguments.

  Raises:
    ValueError: if the text has another form; the message shows it.
  """
  form = f'{text!r} is not of the form name or name(knob=value, ...)'
  try:
    node = ast.parse(text.strip(), mode='eval').body
  except (SyntaxError, MemoryError, RecursionError):
    raise ValueError(form) from None
  if isinstance(node, ast.Name):
    return node.id, {}
  if (not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name)
      or node.args or any(k.arg is None for k in node.keywords)
      or len({k.arg for k in node.keywords}) < len(node.keywords)):
    raise ValueError(form)
  try:
    knobs = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
  except (ValueError, TypeError, MemoryError, RecursionError):
    raise ValueError(f'{form}; values must be literals') from None
  return node.func.id, knobs


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


# Type of a literal: words of an annotation under which it may stand.
_UNDER: dict[type, tuple[str, ...]] = {
    bool: ('bool',), int: ('int', 'float'), float: ('float',), str: ('str',),
    type(None): ('None',), tuple: ('tuple', 'Sequence'),
    list: ('tuple', 'Sequence', 'list')}


def _fits(value: Any, annotation: Any) -> bool:
  """Whether a literal may stand under an annotation; none says nothing."""
  if annotation is inspect.Parameter.empty:
    return True
  text = annotation if isinstance(annotation, str) else str(annotation)
  return any(re.search(rf'\b{word}\b', text)
             for word in _UNDER.get(type(value), ()))


def build(kind: str, text: str, registry: Mapping[str, Callable[..., Any]],
          *args: Any, **shared: Any) -> Any:
  """Calls the registered function that `name(knob=value)` asks for.

  Args:
    kind: the field that holds the text ('method', 'model').
    text: see `parse`.
    registry: name to function; knobs are its keyword-only parameters.
    *args: positional arguments passed on.
    **shared: keyword arguments passed on; not for the text to set.

  Returns:
    What the function returns.

  Raises:
    FieldError: for an unknown name or knob, of which the message lists the
      known ones, a value of another type than the knob's, or one that the
      function refuses with a ValueError.
  """
  try:
    return _built(kind, text, registry, args, shared)
  except ValueError as error:
    raise checks.FieldError(kind, text.strip(), str(error)) from error


def _built(kind: str, text: str, registry: Mapping[str, Callable[..., Any]],
           args: tuple[Any, ...], shared: Mapping[str, Any]) -> Any:
  name, knobs = parse(text)
  function = registry[checks.check(kind, name, registry)]
  parameters = inspect.signature(function).parameters.values()
  known = {p.name: p for p in parameters
           if p.kind is p.KEYWORD_ONLY and p.name not in shared}
  knobs = with_new_names(knobs, known)
  for knob, value in knobs.items():
    if knob not in known:
      raise ValueError(f'{kind} {name!r} has no knob {knob!r}.'
                       f'{checks.near(knob, known)} Allowed: '
                       f'{", ".join(known) or "none"}.')
    if not _fits(value, known[knob].annotation):
      raise ValueError(f'{kind} {name!r} takes {knob} of type '
                       f'{known[knob].annotation}, not {value!r}.')
  return function(*args, **shared, **knobs)
