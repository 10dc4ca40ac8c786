"""Checks of arguments that the pure functions share: losses, aggregation."""
from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_NUMBER = int, float, np.number
# What a number may be, in words, and whether one is it; NaN never is.
Range = tuple[str, Callable[[Any], Any]]
NOT_NEGATIVE: Range = ('0 or more', lambda x: x >= 0)
FINITE: Range = ('0 or more and finite', lambda x: (x >= 0) & (x < np.inf))
POSITIVE: Range = ('above 0', lambda x: x > 0)
POSITIVE_FINITE: Range = ('above 0 and finite',
                          lambda x: (x > 0) & (x < np.inf))
ANY: Range = ('any number', lambda x: np.ones(np.shape(x), bool))
SHARE: Range = ('0 to 1', lambda x: (x >= 0) & (x <= 1))


def check_number(name: str, value: Any, allowed: Range) -> None:
  """Raises ValueError, naming the argument, for a number out of its range.

  So it does for an array or a list of numbers if one of them is. What JAX holds
  is not read: it may be traced, or not be there yet.
  """
  words, is_in = allowed
  if not isinstance(value, (np.ndarray, *_NUMBER)) and not _are_numbers(value):
    return
  numbers = np.asarray(value)
  wrong = numbers[~np.asarray(is_in(numbers), bool)]
  if wrong.size:
    said = f'holds {wrong.flat[0]}' if numbers.ndim else f'is {value}'
    raise ValueError(f'{name} {said}; allowed is {words}.')


def _are_numbers(value: Any) -> bool:
  """Returns whether this is a list of the host's numbers."""
  return isinstance(value, (list, tuple)) and all(
      isinstance(x, _NUMBER) for x in value)


def as_float(value: Any) -> Any:
  """Makes whole numbers of the host floats; returns all else as it is.

  JAX takes Python's and NumPy's whole numbers in 32 bits, in which those from
  2**31 on would be others.
  """
  if isinstance(value, int):
    return float(value)
  if _are_numbers(value):
    value = np.asarray(value)
  if isinstance(value, (np.ndarray, np.integer)) and value.dtype.kind in 'iu':
    return np.asarray(value, np.float32)
  return value


def at_least_float32(x: jax.Array | np.ndarray) -> jax.Array:
  """Returns the array in float32, or in its own type if that is wider."""
  x = jnp.asarray(x)
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def of_host(name: str, value: Any) -> Any:
  """Turns an array of one number into that number; else returns the value.

  Raises:
    ValueError: naming the argument, if the number is traced.
  """
  if isinstance(value, jax.core.Tracer):
    raise ValueError(f'{name} is traced, as under jit, grad or vmap; allowed '
                     'is what is known before that, such as a Python number.')
  if isinstance(value, (jax.Array, np.ndarray)) and value.ndim == 0:
    return value.item()
  return value


def check_choice(name: str, value: str, allowed: Collection[str]) -> None:
  """Raises ValueError, naming the argument, for a word that is not allowed."""
  if value not in allowed:
    raise ValueError(
        f'{name} is {value!r}; allowed are {", ".join(allowed)}.')


def check_alike(**trees: Any) -> None:
  """Raises ValueError, naming the leaf, unless two trees have one form."""
  (name, tree), (other_name, other) = trees.items()
  leaves, others = map(jax.tree_util.tree_leaves_with_path, (tree, other))
  form: Any = jax.tree.structure(tree)
  if form != jax.tree.structure(other):
    lone = sorted({jax.tree_util.keystr(path) for path, _ in leaves}
                  ^ {jax.tree_util.keystr(path) for path, _ in others})
    raise ValueError(f'{name} and {other_name} differ in structure; allowed is '
                     f'the same one, but {lone[0] or "a leaf"} is in one only.'
                     if lone else f'{name} and {other_name} differ in the '
                     'types of their nodes; allowed are the same.')
  for (path, leaf), (_, mate) in zip(leaves, others, strict=True):
    if jnp.shape(leaf) != jnp.shape(mate):
      raise ValueError(
          f'{other_name}{jax.tree_util.keystr(path)} has shape '
          f'{jnp.shape(mate)}; allowed is {jnp.shape(leaf)}, as in {name}.')
