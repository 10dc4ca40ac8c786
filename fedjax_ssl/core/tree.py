"""Algebra of pytrees, and of pytrees stacked over clients."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.core.types import Array, Number, PyTree


def add(a: PyTree, b: PyTree) -> PyTree:
  """Returns a + b, leaf by leaf, in a's dtypes."""
  return jax.tree.map(lambda x, y: (x + y).astype(x.dtype), a, b)


def subtract(a: PyTree, b: PyTree) -> PyTree:
  """Returns a - b, leaf by leaf."""
  return jax.tree.map(jnp.subtract, a, b)


def scale(a: PyTree, factor: Number) -> PyTree:
  """Returns factor * a, in a's dtypes; integers are rounded."""
  return jax.tree.map(lambda x: narrowed(x * factor, x.dtype), a)


def where(condition: Array, a: PyTree, b: PyTree) -> PyTree:
  """Returns a if the scalar `condition` holds, else b; the other may be NaN."""
  return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def zeros_like(a: PyTree) -> PyTree:
  """Returns zeros of the same shapes; accepts shape structs."""
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), a)


def take(stacked: PyTree, rows: Number) -> PyTree:
  """Takes rows of a stacked tree; an index past the end reads the last row."""
  return jax.tree.map(
      lambda x: jnp.take(x, rows, axis=0, mode='clip'), stacked)


def take_bits(stacked: PyTree, rows: Array) -> PyTree:
  """Takes rows with their exact bits, even if devices share the rows.

  XLA then sums what each device holds of a row: zeros on all devices but one.
  A sum of floats would turn -0.0 into 0.0, so the bits are added as integers.
  """
  def one(x: Array) -> Any:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return take(x, rows)
    bits = jnp.dtype(f'uint{8 * x.dtype.itemsize}')
    moved = take(lax.bitcast_convert_type(x, bits), rows)
    return lax.bitcast_convert_type(moved, x.dtype)
  return jax.tree.map(one, stacked)


def put(stacked: PyTree, rows: Array, values: PyTree) -> PyTree:
  """Replaces rows of a stacked tree; an index past the end is ignored."""
  return jax.tree.map(
      lambda x, v: jnp.asarray(x).at[rows].set(v, mode='drop'),
      stacked, values)


def sum_in_order(x: jax.Array) -> jax.Array:
  """Sums the leading axis from first to last: the same bits everywhere."""
  total: jax.Array = lax.fori_loop(
      1, x.shape[0], lambda i, s: s + x[i], x[0])
  return total


def narrowed(value: jax.Array, dtype: Any) -> jax.Array:
  """Converts a number to a leaf's dtype, rounded if that is for integers."""
  whole = not jnp.issubdtype(dtype, jnp.inexact)
  result: jax.Array = (jnp.round(value) if whole else value).astype(dtype)
  return result


def stack(trees: list[PyTree]) -> PyTree:
  """Stacks trees to one with a new leading axis."""
  return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def repeat(a: PyTree, size: int) -> PyTree:
  """Repeats a tree `size` times along a new leading axis.

  Outside a traced function the copies are views on the host that take no
  memory, and a device that is given some of the rows holds only those.
  """
  def one(x: Array) -> Array:
    if isinstance(x, jax.core.Tracer):
      return jnp.broadcast_to(x[None], (size, *x.shape))
    host = np.asarray(jnp.asarray(x))
    return np.broadcast_to(host[None], (size, *host.shape))
  return jax.tree.map(one, a)


def all_finite(a: PyTree) -> jax.Array:
  """Returns bool[]: whether no floating leaf holds NaN or an infinity."""
  return _all(jnp.isfinite, a)


def within(a: PyTree, bound: Number) -> jax.Array:
  """Returns bool[]: whether all floating numbers are in [-bound, bound]."""
  return _all(lambda x: jnp.abs(x) <= bound, a)


def _all(check: Callable[[Array], jax.Array], a: PyTree) -> jax.Array:
  """Returns bool[]: whether a check holds for all floating numbers."""
  held = [jnp.all(check(x)) for x in jax.tree.leaves(a)
          if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
  return jnp.all(jnp.stack(held)) if held else jnp.bool_(True)


def lost(old: PyTree, new: PyTree) -> jax.Array:
  """Returns bool[]: whether some number is finite in `old`, not in `new`."""
  pairs = [(jnp.asarray(x), jnp.asarray(y)) for x, y in zip(
      jax.tree.leaves(old), jax.tree.leaves(new), strict=True)]
  checks = [jnp.any(jnp.isfinite(x) & ~jnp.isfinite(y)) for x, y in pairs
            if jnp.issubdtype(y.dtype, jnp.inexact)]
  return jnp.any(jnp.stack(checks)) if checks else jnp.bool_(False)


def global_norm(a: PyTree) -> jax.Array:
  """Computes the Euclidean norm over all leaves, float32[].

  Its derivative at 0 is NaN.
  Entries are divided by the largest first: squares of entries from 1e19 would
  overflow, and a merely large update would pass for an infinite one.
  """
  leaves = [jnp.asarray(x, jnp.float32) for x in jax.tree.leaves(a)]
  leaves = [x for x in leaves if x.size]
  if not leaves:
    return jnp.zeros((), jnp.float32)
  top = jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in leaves]))
  # XLA multiplies by the reciprocal, which is taken for 0 above 8.5e37.
  unit = jnp.where(top > 0, jnp.minimum(top, 2.0**100), 1)
  norm: jax.Array = unit * jnp.sqrt(
      sum(jnp.sum(jnp.square(x / unit)) for x in leaves))
  return norm


def unlike(made: PyTree, wanted: PyTree) -> str:
  """Says how a tree differs from another in structure, shapes or dtypes.

  Args:
    made: of arrays or numbers.
    wanted: of arrays, or of their shapes and dtypes.

  Returns:
    'gives X, not Y', or '' if it does not.
  """
  form: Any = jax.tree.structure(wanted)
  if jax.tree.structure(made) != form:
    found, right = _form(made), _form(wanted)
    return (f'gives {found}, not {right}' if found != right else
            f'gives {found} with other arrays than there should be')
  for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(wanted),
                          jax.tree.leaves(made), strict=True):
    found, right = _form(y), _form(x)
    if found != right:
      name = jax.tree_util.keystr(path).lstrip('.')
      return f'gives {name and f"{name} as "}{found}, not {right}'
  return ''


def _form(x: Any) -> str:
  """Returns dtype and shape of an array or number, else the type's name."""
  if not (hasattr(x, 'dtype') or isinstance(x, (bool, int, float, complex))):
    return type(x).__name__
  try:
    return f'{jnp.result_type(x)}{[*jnp.shape(x)]}'
  except TypeError:  # Of text or objects.
    return f'{x.dtype}{[*x.shape]}'


def num_scalars(a: PyTree) -> int:
  """Counts the numbers in a tree."""
  return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(a))


def num_bytes(a: PyTree) -> int:
  """Counts the bytes of a tree."""
  return sum(int(np.prod(x.shape)) * x.dtype.itemsize
             for x in jax.tree.leaves(a))
