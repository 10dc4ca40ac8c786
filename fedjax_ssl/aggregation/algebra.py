"""Algebra of the clients' rows, from which the rules are built."""
from __future__ import annotations

from collections.abc import Callable
import functools
import inspect
from typing import Any, cast, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import arguments
from fedjax_ssl.arguments import at_least_float32

# A pytree of arrays: a rule gives back the structure that it gets.
Tree = TypeVar('Tree')
Function = TypeVar('Function', bound=Callable[..., Any])
Array = jax.Array | np.ndarray
Scalar = Array | float
Axis = str | tuple[str, ...] | None  # An axis of a mesh; None is one device.


def jit(*static: str, **ranges: arguments.Range
        ) -> Callable[[Function], Function]:
  """Makes `jax.jit` keep a signature for editors and type checkers.

  Args:
    *static: names of static arguments: what the host holds, or an array of
      JAX with one number, which is read.
    **ranges: of arguments that are traced. A number of the host is checked
      before that; one that JAX holds is not, as reading it would be a wait.

  Returns:
    The decorator.
  """
  def decorate(function: Function) -> Function:
    compiled: Any = jax.jit(function, static_argnames=static)
    known = inspect.signature(function).parameters
    names = list(known)
    def prepared(name: str, value: Any) -> Any:
      if value is None and name in known and known[name].default not in (
          None, inspect.Parameter.empty):
        raise ValueError(f'{name} is None; allowed is a value such as '
                         f'{known[name].default!r}.')
      if name in ranges:
        arguments.check_number(name, value, ranges[name])
        return arguments.as_float(value)
      return arguments.of_host(name, value) if name in static else value

    @functools.wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
      return compiled(
          *map(prepared, names, args), *args[len(names):],
          **{name: prepared(name, value) for name, value in named.items()})

    whole: Any = checked
    whole.lower = compiled.lower  # As of what `jax.jit` returns.
    return cast('Function', whole)

  return decorate


def weights_of(stacked: Any, weights: Any, name: str) -> jax.Array:
  """Returns weights in float32, checked: each leaf has a row for each."""
  if weights is None:
    raise ValueError(f'{name} is None; allowed is one number per client, such '
                     'as jnp.ones(K) for a plain mean.')
  given: jax.Array = jnp.asarray(weights, jnp.float32)
  if jnp.ndim(given) != 1:
    raise ValueError(f'{name} has shape {jnp.shape(given)}; '
                     'allowed is one number per client.')
  rows = given.shape[0]
  for path, leaf in jax.tree_util.tree_leaves_with_path(stacked):
    if leaf.shape[:1] != (rows,):
      raise ValueError(
          f'stacked{jax.tree_util.keystr(path)} has shape {leaf.shape}; '
          f'its leading axis must be {rows}, the length of {name}.')
  return given


def column(row: jax.Array, leaf: jax.Array) -> jax.Array:
  """Reshapes [K] so that it broadcasts to a leaf [K, ...]."""
  return row.reshape(row.shape + (1,) * (leaf.ndim - 1))


def narrowed(value: Any, dtype: Any) -> jax.Array:
  """Converts a result to the leaf's dtype, rounded if that is for integers."""
  exact = not jnp.issubdtype(dtype, jnp.inexact)
  result: jax.Array = (jnp.round(value) if exact else value).astype(dtype)
  return result


def over(collective: Callable[..., Any], x: jax.Array, axis_name: Axis
         ) -> jax.Array:
  """Applies `collective` over the devices, if there is an axis of them."""
  return x if axis_name is None else collective(x, axis_name)


def shares_of(weights: jax.Array, *, axis_name: Axis = None) -> jax.Array:
  """Divides weights by the sum of all clients'; zeros if all are zero."""
  # Dividing by the largest first keeps the sum from overflowing.
  top = jax.lax.stop_gradient(jnp.max(weights, initial=0.0))
  top = over(jax.lax.pmax, top, axis_name)
  less = shrinking(top)
  scaled = weights * less / jnp.where(top > 0, top * less, 1)
  total = over(jax.lax.psum, jnp.sum(scaled), axis_name)
  return scaled / jnp.where(total > 0, total, 1)


def shrinking(by: jax.Array) -> jax.Array:
  """Returns 2^-64 for divisors above 2^100, else 1.

  With both numbers of a division multiplied by it no digit changes. XLA
  multiplies by the reciprocal, and may take one below 2^-126 for 0.
  """
  return jnp.where(by > 2.0**100, 2.0**-64, 1.0).astype(by.dtype)


def combined(stacked: Tree, shares: jax.Array, *, axis_name: Axis = None
             ) -> Tree:
  """Sums all clients' rows, each times its share float[K]."""
  def combine(leaf: jax.Array) -> jax.Array:
    share, value = column(shares, leaf), at_least_float32(leaf)
    # Only broken entries are replaced, so that the derivative by a weight of 0
    # is that of the row's finite entries.
    value = jnp.where((share == 0) & ~jnp.isfinite(value), 0, value)
    total = over(jax.lax.psum, jnp.sum(share * value, axis=0), axis_name)
    return narrowed(total, leaf.dtype)

  result: Tree = jax.tree.map(combine, stacked)
  return result


def safe_sqrt(square: jax.Array) -> jax.Array:
  """Computes the square root, with derivative 0 at 0."""
  positive = square > 0
  return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1)), 0)


def row_norms(rows: Any, num_rows: int, distance: str) -> jax.Array:
  """Computes float[K], the length of each row; see `DISTANCES`."""
  top = jnp.zeros(num_rows, jnp.float32)
  for x in jax.tree.leaves(rows):
    top = jnp.maximum(top, jnp.max(
        jnp.abs(x), axis=tuple(range(1, x.ndim)), initial=0))
  unit = power_of_two(jax.lax.stop_gradient(top))
  squares = [jnp.sum(_square(x / column(unit, x)),
                     axis=tuple(range(1, x.ndim)))
             for x in jax.tree.leaves(rows)]
  zero = jnp.zeros(num_rows, jnp.float32)
  if distance == 'global_norm':
    return unit * safe_sqrt(sum(squares, zero))
  return unit * sum(map(safe_sqrt, squares), zero)


def _square(x: jax.Array) -> jax.Array:
  if jnp.iscomplexobj(x):
    return jnp.square(x.real) + jnp.square(x.imag)
  return jnp.square(x)


def power_of_two(top: Array) -> jax.Array:
  """Computes a unit for numbers up to `top`, whose squares overflow from 1e19.

  Args:
    top: float[...], 0 or more.

  Returns:
    A power of two of the same dtype, so that dividing by it changes no digit.
    It is in 2^-100 to 2^100 in float32: XLA multiplies by the reciprocal, and
    that of a larger number may be taken for 0.
  """
  exponent = jnp.where(jnp.isfinite(top) & (top > 0), jnp.frexp(top)[1], 0)
  most = jnp.finfo(top.dtype).maxexp - 28
  return jnp.ldexp(jnp.ones((), top.dtype), jnp.clip(exponent, -most, most))


def row_lengths(stacked: Any, num_rows: int) -> jax.Array:
  """Computes float[K], the norm of each row over all leaves."""
  return row_norms(jax.tree.map(at_least_float32, stacked), num_rows,
                   'global_norm')
