"""Finds the fastest form of each convolution by running it.

A form is timed as training uses it: forward and both gradients, inside a loop,
with weights of each client. What was measured is kept in a file, for device
kind, version of JAX, layer, rows, clients and dtype, and read again.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
import json
import os
import pathlib
import tempfile
import time
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl.ops import conv

# The forms that are tried; 'reordered' is made for XLA:CPU's kernels.
FORMS = ('lax', 'gemm', 'taps', 'winograd', 'reordered')
_FAILURES = (jax.errors.JaxRuntimeError, MemoryError, NotImplementedError)
# Keeps the loop's arrays from growing, and XLA from leaving work out.
_STEP = 1e-6
# A form whose first call takes this many times the fastest is not timed again.
_HOPELESS = 4.0


class Load(NamedTuple):
  """What a device works on at once.

  Attributes:
    rows: of a local step.
    clients: each with its own weights, together under vmap.
    dtype: of the arithmetic.
  """

  rows: int
  clients: int
  dtype: str = 'float32'


def layers_of(apply: Callable[..., Any], *args: Any) -> list[conv.Layer]:
  """The different convolutions of a function, in order, by tracing it."""
  with conv.noting() as found:
    # A function of its own, as traces of others may be remembered.
    jax.eval_shape(lambda *given: apply(*given), *args)
  return list(dict.fromkeys(found))


def seconds(layer: conv.Layer, form: str, load: Load, *, at_least: float = 0.02,
            hopeless: float = float('inf')) -> float:
  """Times a form of a layer: forward, and the gradients of both operands.

  Args:
    layer: the shapes.
    form: one of `conv.IMPLS`.
    load: how much at once.
    at_least: seconds that a timing lasts.
    hopeless: if one step takes longer, in seconds, it is the result.

  Returns:
    Seconds for one step of all clients; infinity if the form does not compile
    or run here.
  """
  def step(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    y, pull = jax.vjp(
        lambda x, w: conv.conv2d(x, w, stride=layer.stride,
                                 padding=layer.padding, impl=form), x, w)
    dx, dw = pull(y)
    return x - _STEP * dx, w - _STEP * dw

  together = jax.vmap(step) if load.clients > 1 else step

  @jax.jit
  def steps(count: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
    x, w = lax.fori_loop(0, count, lambda _, xw: together(*xw), (x, w))
    return jnp.sum(x[..., 0]) + jnp.sum(w[..., 0])

  lead = (load.clients,) if load.clients > 1 else ()
  x = jnp.ones((*lead, load.rows, *layer.size, layer.inputs), load.dtype)
  w = jnp.full((*lead, *layer.kernel, layer.inputs, layer.outputs), 0.01,
               load.dtype)

  def timed(count: int) -> float:
    start = time.perf_counter()
    jax.block_until_ready(steps(jnp.int32(count), x, w))
    return (time.perf_counter() - start) / count

  try:
    timed(1)  # Compiles.
    first = timed(1)
    if first > hopeless:
      return first
    count = min(max(round(at_least / max(first, 1e-6)), 1), 1000)
    return min(timed(count) for _ in range(3))
  except _FAILURES:
    return float('inf')


def table(layers: Collection[conv.Layer], load: Load, path: pathlib.Path | None,
          *, forms: Sequence[str] = FORMS) -> dict[str, dict[str, float]]:
  """The seconds of every form of every layer, measured or read back.

  Args:
    layers: the shapes.
    load: how much at once.
    path: file of what was measured before; None keeps nothing.
    forms: what is tried.

  Returns:
    By the layer's text, seconds by form. What does not run is left out.
  """
  known = _read(path)
  out: dict[str, dict[str, float]] = {}
  for layer in layers:
    key = _key(layer, load)
    found = known.get(key, {})
    missing = [form for form in forms if form not in found]
    if missing:
      for form in missing:
        best = min(found.values(), default=float('inf'))
        found[form] = seconds(layer, form, load, hopeless=_HOPELESS * best)
      known[key] = found
      _write(path, known)
    out[str(layer)] = {form: found[form] for form in forms
                       if found[form] < float('inf')}
  return out


def fastest(measured: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
  """The form of every layer that any form runs.

  Args:
    measured: what `table` returned.
  """
  return {layer: min(forms, key=lambda form: forms[form])
          for layer, forms in measured.items() if forms}


def total(measured: Mapping[str, Mapping[str, float]]) -> float:
  """Seconds of all layers, each in its fastest form."""
  return sum(min(forms.values(), default=float('inf'))
             for forms in measured.values())


def _key(layer: conv.Layer, load: Load) -> str:
  device = jax.devices()[0].device_kind
  return (f'{device}; jax {jax.__version__}; {layer}; {load.rows} rows; '
          f'{load.clients} clients; {load.dtype}')


def _read(path: pathlib.Path | None) -> dict[str, dict[str, float]]:
  """What the file holds; nothing if it is missing or damaged."""
  if path is None:
    return {}
  try:
    found = json.loads(path.read_text())
    return {str(key): {str(form): float(value)
                       for form, value in forms.items()}
            for key, forms in found.items()}
  except (OSError, ValueError, AttributeError, TypeError):
    return {}


def _write(path: pathlib.Path | None, known: Mapping[str, Any]) -> None:
  """Replaces the file, unless nothing can be written there.

  Other processes may have measured meanwhile: what they found is kept.
  """
  if path is None:
    return
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix='.partial')
    with os.fdopen(handle, 'w') as file:
      json.dump({**_read(path), **known}, file, indent=1, sort_keys=True)
    os.replace(name, path)
  except OSError:
    pass  # It is measured again next time.
