"""Merges equal expressions of a function, for equal bits on all devices.

XLA does this too (common subexpression elimination), but not always at the
same stage: in a program for several devices before it simplifies, in a program
for one device after. How it simplifies depends on how often a value is used:
x / y becomes x * (1 / y) if y is broadcast for this division alone, and stays
if two divisions share the broadcast. So one function could be rounded in two
ways. With equal expressions merged here, XLA simplifies both in the same way.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
import contextlib
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives
import jax.numpy as jnp
import numpy as np

# Calls whose expressions are merged with those of the caller, and the parameter
# that holds them. A custom derivative is lost: derivatives were taken before.
CALLS = {'jit': 'jaxpr', 'pjit': 'jaxpr', 'closed_call': 'call_jaxpr',
         'custom_jvp_call': 'call_jaxpr', 'custom_vjp_call': 'call_jaxpr'}
# Loops and branches, inside of which expressions are merged, each by itself.
_CONTROL = {'while': ('cond_jaxpr', 'body_jaxpr'), 'scan': ('jaxpr',),
            'cond': ('branches',)}
# Operations whose operands may be broadcast to the shape of the result.
_ELEMENTWISE = frozenset((
    'add', 'add_any', 'and', 'atan2', 'clamp', 'div', 'eq', 'ge', 'gt', 'le',
    'lt', 'max', 'min', 'mul', 'ne', 'nextafter', 'or', 'pow', 'rem',
    'select_n', 'shift_left', 'shift_right_arithmetic', 'shift_right_logical',
    'sub', 'xor'))


def merge_equal(function: Callable[..., Any]) -> Callable[..., Any]:
  """Makes a function compute equal expressions once.

  Args:
    function: pytrees of arrays -> pytree of arrays. It is traced. The result
      must not be differentiated: rules of `jax.custom_vjp` are lost.

  Returns:
    The function, to be called inside a traced one.
  """
  def merged(*args: Any) -> Any:
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    out = _run(closed, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), out)
  return jax.jit(merged, inline=True)  # Traced once for all callers.


def _run(closed: Any, args: list[Any], known: dict[Hashable, Any] | None = None
         ) -> list[Any]:
  """Evaluates a jaxpr; `known` has the results of all expressions so far."""
  known = {} if known is None else known
  values = dict(zip(
      [*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *args],
      strict=True))
  for eqn in closed.jaxpr.eqns:
    inputs = [_read(atom, values) for atom in eqn.invars]
    with _scope(eqn):
      out = _of_equation(eqn, inputs, known)
    values.update(zip(eqn.outvars, out, strict=True))
  return [_read(atom, values) for atom in closed.jaxpr.outvars]


def _read(atom: Any, values: Mapping[Any, Any]) -> Any:
  """Returns the value of a variable, or of a literal."""
  return atom.val if isinstance(atom, core.Literal) else values[atom]


def _scope(eqn: Any) -> contextlib.AbstractContextManager[None]:
  """Keeps the scope of an operation, by which profilers name it."""
  scope = str(eqn.source_info.name_stack)
  return jax.named_scope(scope) if scope else contextlib.nullcontext()


def evaluate(eqns: Iterable[Any], values: dict[Any, Any]) -> None:
  """Adds the results of equations to the values of their variables.

  Args:
    eqns: as `merge_equal` leaves them, without calls.
    values: by variable; it holds all that the equations read but do not make.
  """
  for eqn in eqns:
    inputs = [_read(atom, values) for atom in eqn.invars]
    with _scope(eqn):
      out = eqn.primitive.bind(*inputs, **eqn.params)
    values.update(zip(
        eqn.outvars, out if eqn.primitive.multiple_results else [out],
        strict=True))


def _of_equation(eqn: Any, inputs: list[Any], known: dict[Hashable, Any]
                 ) -> Any:
  """Returns the results of an equation, computed now or known from an equal."""
  name, params = eqn.primitive.name, eqn.params
  if name in CALLS:
    return _run(_closed(params[CALLS[name]]), inputs, known)
  if name in _CONTROL:
    params = {**params, **{key: jax.tree.map(
        _merged, params[key], is_leaf=_is_jaxpr) for key in _CONTROL[name]}}
    return eqn.primitive.bind(*inputs, **params)
  if name in _ELEMENTWISE:
    inputs = [_spread(x, eqn.outvars[0].aval.shape, known) for x in inputs]
  return _bound(eqn.primitive, inputs, params, known, bool(eqn.effects))


def _bound(primitive: Any, inputs: list[Any], params: dict[str, Any],
           known: dict[Hashable, Any], acts: bool = False) -> Any:
  """A primitive's results; computed if not known, or if it has effects."""
  key = primitive, tuple(map(_name, inputs)), tuple(sorted(params.items()))
  try:
    if not acts and key in known:
      return known[key][0]
  except TypeError:  # A parameter that cannot be compared.
    acts = True
  out = primitive.bind(*inputs, **params)
  out = out if primitive.multiple_results else [out]
  if not acts:
    known[key] = out, inputs  # Kept alive, so that no other gets their ids.
  return out


def _spread(x: Any, shape: tuple[int, ...], known: dict[Hashable, Any]) -> Any:
  """Broadcasts an operand to the result's shape, once for all that need it."""
  if np.shape(x) in (shape, ()):
    return x
  out, = _bound(primitives.broadcast_in_dim_p, [x], {
      'shape': shape, 'broadcast_dimensions': tuple(range(len(shape))),
      'sharding': None}, known)
  return out


def _name(x: Any) -> Hashable:
  """A number by its bits, else an array by its identity."""
  if isinstance(x, jax.Array) or np.ndim(x):
    return id(x)
  return type(x).__name__, str(jnp.result_type(x)), np.asarray(x).tobytes()


def _is_jaxpr(x: Any) -> bool:
  return isinstance(x, (core.ClosedJaxpr, core.Jaxpr))


def _closed(x: Any) -> Any:
  """Some calls keep a jaxpr without constants."""
  return x if isinstance(x, core.ClosedJaxpr) else core.ClosedJaxpr(x, ())


def _merged(closed: Any) -> Any:
  """A jaxpr of the same types, with equal expressions computed once."""
  return jax.make_jaxpr(lambda *args: _run(closed, list(args)))(
      *closed.in_avals)
