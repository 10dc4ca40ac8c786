"""What a traced function computes, to compare two of them."""
from __future__ import annotations

from collections.abc import Callable
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Trace(NamedTuple):
  """A traced function.

  Attributes:
    program: its operations, as text.
    constants: the arrays and PRNG keys that it holds, in all its parts.
  """

  program: str
  constants: list[Any]


def of(function: Callable[..., Any], *args: Any) -> Trace:
  """Traces a function of these arguments; runs nothing."""
  found = jax.make_jaxpr(function)(*args)
  # Where a function lies in memory is of no account.
  return Trace(re.sub(r'\b0x[0-9a-f]+', '', str(found.jaxpr)),
               _constants(found))


def are_equal(one: Trace, other: Trace) -> bool:
  """Returns whether two functions compute the same of all arguments."""
  return one.program == other.program and (
      len(one.constants) == len(other.constants)) and all(
          map(_is_equal, one.constants, other.constants))


def _constants(traced: Any) -> list[Any]:
  """Returns the constants of a jaxpr, open or closed, and of those inside."""
  found = [*getattr(traced, 'consts', ())]
  for equation in traced.eqns:
    for inner in jax.tree.leaves(
        [*equation.params.values()], is_leaf=lambda x: hasattr(x, 'eqns')):
      if hasattr(inner, 'eqns'):
        found += _constants(inner)
  return found


def _is_equal(x: Any, y: Any) -> bool:
  """Returns whether two arrays or keys are equal, and NaN where NaN is."""
  if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x, y = map(jax.random.key_data, (x, y))
  x, y = map(np.asarray, (x, y))
  return x.dtype == y.dtype and np.array_equal(
      x, y, equal_nan=jnp.issubdtype(x.dtype, jnp.inexact))
