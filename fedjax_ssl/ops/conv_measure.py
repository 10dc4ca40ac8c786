"""Finds the fastest form of each convolution by running it.

A form is timed much as training uses it: forward and both gradients, inside a
loop, with weights of each client, and with the pooling that follows it. The
times are kept in a file, by machine, layer, rows, clients and dtype, and read
back from there.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
import concurrent.futures
import contextlib
import functools
import itertools
import json
import math
import os
import pathlib
import time
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl.core import disk
from fedjax_ssl.ops import conv

# The forms that are tried, the plainest first; 'reordered' is made for XLA:CPU.
FORMS = ('lax', 'gemm', 'taps', 'winograd', 'reordered')
# What is not tried, by JAX's name of the backend. XLA:CPU takes minutes for the
# gradients of a large layer in a loop. A GPU compiles slowly what has groups or
# many products: on an H200 the six layers of a ResNet-9 for 20 clients took
# 55 s as XLA's own grouped convolutions and above 36 s as 'taps', and then 3.9
# and 2.1 times the time of 'gemm' (`experiments/results/benchmarks/`,
# round_speed_h200_grouped.json and round_speed_h200.json). 'winograd' has two
# to four times the products of 'taps', in float32 without TF32.
_LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    'cpu': ('lax',), 'gpu': ('taps', 'winograd', 'reordered')}
# What is tried on a GPU where nothing else runs.
_LEAST_MEMORY = 'lax'
# Another form must take at most this share of the first one's time: noise
# should not choose.
CLEARLY = 0.95
Table = dict[str, dict[str, float]]
Program = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
_FAILURES = (jax.errors.JaxRuntimeError, MemoryError, NotImplementedError)
# A form whose first call takes this many times the fastest is not timed again.
_HOPELESS = 4.0
# Seconds of a first call from which on it is mostly the step itself.
_CERTAIN = 1.0
# Seconds of a step from which on noise is small, and one timing enough.
_LONG = 0.2


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
  """Lists the convolutions of a function in order, by tracing it."""
  with conv.recording_layers() as found:
    # A new function: JAX may know the trace of `apply` and not run it again.
    jax.eval_shape(lambda *given: apply(*given), *args)
  return found


def operations(layer: conv.Layer) -> int:
  """Counts what a direct convolution of one row and its gradients take."""
  return 3 * 2 * math.prod((*layer.window.out, *layer.kernel, layer.inputs,
                            layer.outputs))


def program(layer: conv.Layer, form: str, load: Load) -> Program | None:
  """Compiles a step of a form of a layer, repeated: (count, x, w) -> sum.

  Args:
    layer: the shapes.
    form: one of `conv.IMPLS`.
    load: how much at once.

  Returns:
    The program, or None if the form does not compile here.
  """
  # Each step changes both operands a little, so that XLA cannot leave out a
  # gradient, and so little that nothing grows, however large the layer.
  rate = 1e-3 / math.prod((load.rows, *layer.size, *layer.kernel,
                           layer.inputs, layer.outputs))

  function = functools.partial(
      conv.max_pooled_conv2d, padding=layer.padding, impl=form
  ) if layer.pooled else functools.partial(
      conv.conv2d, stride=layer.stride, padding=layer.padding, impl=form)

  def step(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    y, pull = jax.vjp(function, x, w)
    dx, dw = pull(y)
    return x - rate * dx, w - rate * dw

  together = jax.vmap(step) if load.clients > 1 else step

  @jax.jit
  def steps(count: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
    x, w = lax.fori_loop(0, count, lambda _, xw: together(*xw), (x, w))
    return jnp.sum(x[..., 0]) + jnp.sum(w[..., 0])

  shapes = jax.eval_shape(lambda: _operands(layer, load))
  try:
    return steps.lower(jax.ShapeDtypeStruct((), jnp.int32), *shapes).compile()
  except _FAILURES:
    return None


def seconds(layer: conv.Layer, form: str, load: Load, *, at_least: float = 0.02,
            hopeless: float = float('inf'), steps: Program | None = None
            ) -> float:
  """Times a form of a layer: forward, and the gradients of both operands.

  Args:
    layer: the shapes.
    form: one of `conv.IMPLS`.
    load: how much at once.
    at_least: seconds that a timing lasts.
    hopeless: seconds; if the first step takes longer, its time is returned.
    steps: what `program` returned, if it was called before.

  Returns:
    Seconds for one step of all clients; infinity if the form does not compile
    or run here.
  """
  run = steps or program(layer, form, load)
  if run is None:
    return float('inf')

  def timed(count: int, given: tuple[jax.Array, jax.Array]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(jnp.int32(count), *given))
    return (time.perf_counter() - start) / count

  try:
    given = _operands(layer, load)
    first = timed(1, given)  # With all that is done only once.
    if first > max(hopeless, _CERTAIN):
      return first
    first = timed(1, given)
    if first > min(hopeless, _LONG):
      return first
    count = min(max(round(at_least / max(first, 1e-6)), 1), 1000)
    return min(timed(count, given) for _ in range(3))
  except _FAILURES:
    return float('inf')


def _operands(layer: conv.Layer, load: Load) -> tuple[jax.Array, jax.Array]:
  """Random inputs and weights: a GPU draws less power on constant ones."""
  lead = (load.clients,) if load.clients > 1 else ()
  keys = jax.random.split(jax.random.key(0))
  return (
      jax.random.normal(keys[0], (
          *lead, load.rows, *layer.size, layer.inputs), load.dtype),
      jax.random.normal(keys[1], (
          *lead, *layer.kernel, layer.inputs, layer.outputs), load.dtype))


def table(layers: Collection[conv.Layer], load: Load, path: pathlib.Path | None,
          *, machine: str = '',
          only: Mapping[str, Collection[str]] | None = None,
          until: float = float('inf'), again: bool = False) -> Table:
  """Returns the seconds of every form of every layer, measured or read back.

  Args:
    layers: the shapes.
    load: how much at once.
    path: file of what was measured before; None keeps nothing.
    machine: names the machine that the times hold for.
    only: forms that are tried, by the layer's text; all of a layer that is not
      in it.
    until: time of the monotonic clock from which on no other form is begun. One
      form of all layers comes first, see `_different`, then another of all;
      these are compiled together.
    again: whether to try again what did not run, or came too late, when it was
      asked for before: memory may have been short, or the machine busy. A layer
      without any form that ran is always tried again.

  Returns:
    By the layer's text, seconds by form. A form that does not run, or whose
    turn did not come, is left out. On a GPU a layer of which none ran is tried
    as XLA's own convolution, which takes the least memory.
  """
  def tried(layer: conv.Layer) -> list[str]:
    chosen = (only or {}).get(str(layer), FORMS)
    return [form for form in _different(layer, load.clients) if form in chosen]

  def key(layer: conv.Layer) -> str:
    return (f'{machine}; {layer}; {load.rows} rows; {load.clients} clients; '
            f'{load.dtype}')

  known = _read(path)
  found = {layer: _worth(known.get(key(layer), {}), again) for layer in layers}
  wanted = {layer: tried(layer) for layer in layers}

  def measure(turn: Mapping[conv.Layer, str]) -> None:
    missing = {layer: form for layer, form in turn.items()
               if form not in found[layer]}
    programs = _programs(missing, load, until)
    for layer, steps in programs.items():
      if time.monotonic() > until:
        break
      form = missing[layer]
      best = min(found[layer].values(), default=float('inf'))
      found[layer][form] = float('inf') if steps is None else seconds(
          layer, form, load, hopeless=_HOPELESS * best, steps=steps)
    for layer, form in missing.items():
      found[layer].setdefault(form, float('inf'))  # Its turn did not come.
    if missing:
      _write(path, {key(layer): found[layer] for layer in layers})

  for turn in itertools.zip_longest(*wanted.values()):
    measure({layer: form for layer, form in zip(wanted, turn, strict=True)
             if form})
  if jax.default_backend() == 'gpu':
    left = [layer for layer, forms in wanted.items()
            if str(layer) not in (only or {}) and not _ran(found[layer])
            and _LEAST_MEMORY not in forms]
    for layer in left:
      wanted[layer].append(_LEAST_MEMORY)
    measure(dict.fromkeys(left, _LEAST_MEMORY))
  return {str(layer): {form: found[layer][form] for form in forms
                       if found[layer][form] < float('inf')}
          for layer, forms in wanted.items()}


def _worth(known: Mapping[str, float], again: bool) -> dict[str, float]:
  """Returns the times, and what failed unless that is to be tried again."""
  ran = _ran(known)
  return ran if again or not ran else {**known}


def _ran(times: Mapping[str, float]) -> dict[str, float]:
  """Returns the times of the forms that ran."""
  return {form: taken for form, taken in times.items() if taken < math.inf}


def _programs(forms: Mapping[conv.Layer, str], load: Load, until: float
              ) -> dict[conv.Layer, Program | None]:
  """Compiles on all cores a form of those layers whose turn comes in time."""
  def one(layer: conv.Layer) -> tuple[bool, Program | None]:
    if time.monotonic() > until:
      return False, None
    return True, program(layer, forms[layer], load)

  # Nothing is timed meanwhile, which would take its time.
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    made = dict(zip(forms, pool.map(one, forms), strict=True))
  return {layer: steps for layer, (came, steps) in made.items() if came}


def _different(layer: conv.Layer, clients: int) -> tuple[str, ...]:
  """The forms that give different programs for a layer, hopeless ones apart.

  They are in the order in which they are tried: the plainest first, but on a
  CPU what the rules by shape choose. There large layers may leave no time for
  more, and elsewhere all but hopeless ones get theirs.
  """
  out = _LEFT_OUT.get(jax.default_backend(), ())
  if jax.default_backend() == 'gpu' and clients > 1:
    out = (*out, 'lax')  # Grouped: see `_LEFT_OUT`.
  forms = tuple(form for form in FORMS if form not in out)
  if layer.kernel == (1, 1) and not layer.pooled:
    # All forms but 'lax' make the same product.
    return tuple(form for form in forms if form in ('lax', 'gemm'))
  forms = tuple(form for form in forms
                if form != 'winograd' or conv.is_tileable(layer))
  if jax.default_backend() != 'cpu':
    return forms
  first = conv.choose(layer.window, layer.inputs, 'cpu',
                      layer.outputs if layer.pooled else None)
  return tuple(sorted(forms, key=lambda form: form != first))


def fastest(measured: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
  """Returns the fastest form of every layer that any form runs.

  Args:
    measured: what `table` returned.
  """
  def chosen(forms: Mapping[str, float]) -> str:
    best = min(forms, key=lambda form: forms[form])
    plain = next(iter(forms))
    return best if forms[best] < CLEARLY * forms[plain] else plain
  return {layer: chosen(forms) for layer, forms in measured.items() if forms}


def total(measured: Mapping[str, Mapping[str, float]]) -> float:
  """Adds up the seconds of all layers, each in its fastest form."""
  return sum(min(forms.values(), default=float('inf'))
             for forms in measured.values())


def _read(path: pathlib.Path | None) -> dict[str, dict[str, float]]:
  """Returns what the file holds; nothing if it is missing or damaged.

  Infinity, `null` in the file, is a form that did not run. Left out is what no
  clock has said: it would decide, and never be measured.
  """
  try:
    if path is None or not path.is_file():  # To read a pipe would never end.
      return {}
    found = json.loads(path.read_text('utf-8'))
    return {str(key): {
        str(form): math.inf if value is None else float(value)
        for form, value in forms.items()
        if value is None or 0 < float(value) < math.inf}
            for key, forms in found.items()}
  except (OSError, ValueError, AttributeError, TypeError, OverflowError,
          RecursionError):
    return {}


def _write(path: pathlib.Path | None,
           known: Mapping[str, Mapping[str, float]]) -> None:
  """Replaces the file, unless nothing can be written there.

  Other processes may have measured meanwhile: what they found is kept, and a
  form that ran for any of them has run.
  """
  if path is None:
    return
  try:
    with contextlib.ExitStack() as stack:
      with contextlib.suppress(OSError):  # Some file systems lock nothing.
        stack.enter_context(disk.exclusive(path.with_suffix('.lock')))
      merged: dict[str, Mapping[str, float]] = {**_read(path)}
      for key, forms in known.items():
        old = merged.get(key, {})
        merged[key] = {**old, **{
            form: taken if taken < math.inf else old.get(form, taken)
            for form, taken in forms.items()}}
      text = json.dumps({
          key: {form: taken if taken < math.inf else None
                for form, taken in forms.items()}
          for key, forms in merged.items()}, indent=1, sort_keys=True)
      disk.replace(path, text.encode())
  except OSError:
    pass  # It is measured again next time.
