"""How far a round is from what the machine can do.

The limit is the rate of one large matrix product, measured among the rounds.
The work is what a direct convolution would need, on real rows only: a form
that needs fewer operations, as tiles do, can be above the limit.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import counting
import fedjax_ssl as fssl
from fedjax_ssl.core.types import Client

_PRODUCTS = ('dot_general', 'conv_general_dilated')
_LOOPS = ('while', 'scan')


def step_flops(spec: fssl.TaskSpec, federation: fssl.Federation) -> float:
  """Operations of one local step, as XLA counts them.

  XLA counts the body of a loop once, so the body of the client's loop over
  its batches is taken out and counted as a program of its own.

  Args:
    spec: the task; its convolutions are counted as direct ones.
    federation: its data.

  Returns:
    Operations of a full batch, with making its views and the optimizer.

  Raises:
    ValueError: if the training is not one loop whose body has none with
      products of its own.
  """
  task = fssl.make_task(direct(spec))
  method = fssl.make_method(spec.method, task)
  if method.client_update is None:
    raise ValueError(f'method={spec.method} has no training of one client.')
  return count(_body(method, federation))


def direct(spec: fssl.TaskSpec) -> fssl.TaskSpec:
  """The task with direct convolutions, whose operations are counted."""
  return dataclasses.replace(spec, conv_impl='lax')


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
  """What is compiled inside is for a CPU, for which JAX counts operations.

  It does not for a GPU or a TPU before compilation, and of what is compiled
  there the calls of vendors' libraries may count as nothing.

  Raises:
    ValueError: if JAX has no CPU device.
  """
  try:
    device = jax.local_devices(backend='cpu')[0]
  except RuntimeError:
    raise ValueError('Operations are counted for a CPU device, and JAX has '
                     'none: JAX_PLATFORMS must name it too, as cuda,cpu does.'
                     ) from None
  with jax.default_device(device):
    yield


def count(program: core.ClosedJaxpr) -> float:
  """Operations of a program without loops, as XLA counts them.

  Raises:
    ValueError: if JAX does not count them here, or has no CPU device.
  """
  arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in
               program.in_avals]
  with on_cpu():
    traced = jax.jit(core.jaxpr_as_fun(program)).trace(*arguments)
    # Random bits are a loop in the CPU's form of a program, and none in the
    # TPU's, which can be counted without one.
    counted = _cost(traced.lower(lowering_platforms=('tpu',)))
    if counted is None:
      counted = _cost(traced.lower().compile())
  if counted is None:
    raise ValueError('This JAX does not count the operations of a program.')
  return float(counted['flops'])


def _cost(stage: jax.stages.Lowered | jax.stages.Compiled) -> Any:
  try:
    return stage.cost_analysis()
  except NotImplementedError:
    return None


def _body(method: fssl.Method, federation: fssl.Federation
          ) -> core.ClosedJaxpr:
  key = jax.random.key(0)
  state = jax.eval_shape(lambda key: method.init(key, federation), key)
  def row(x):
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
  def whole(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
  number: Any = jax.ShapeDtypeStruct((), jnp.int32)
  client = Client(
      id=number, shard=jax.tree.map(row, federation.clients),
      memory=jax.tree.map(row, state.memory),
      train=jax.tree.map(whole, federation.train),
      validation=jax.tree.map(whole, federation.validation),
      round=number, group=number)
  assert method.client_update is not None
  made = jax.make_jaxpr(method.client_update)(state.server, client, key)
  bodies = list(_bodies(made.jaxpr))
  if len(bodies) != 1 or list(_bodies(bodies[0].jaxpr)):
    raise ValueError('A client does not train in one loop: its operations '
                     'cannot be counted.')
  return bodies[0]


def _bodies(program: core.Jaxpr) -> Iterator[core.ClosedJaxpr]:
  """Bodies of the outermost loops that have products."""
  for equation in program.eqns:
    if equation.primitive.name in _LOOPS:
      body = equation.params.get('body_jaxpr') or equation.params['jaxpr']
      if _has_products(body.jaxpr):
        yield body
    else:
      for inner in core.jaxprs_in_params(equation.params):
        yield from _bodies(inner)


def _has_products(program: core.Jaxpr) -> bool:
  return any(
      equation.primitive.name in _PRODUCTS
      or any(map(_has_products, core.jaxprs_in_params(equation.params)))
      for equation in program.eqns)


def round_flops(spec: fssl.TaskSpec, federation: fssl.Federation,
                cohort: np.ndarray, streams: str = 'both') -> float:
  """Operations of a round on real rows: those of a step, times the steps.

  Args:
    spec: the task.
    federation: its data.
    cohort: int[S], who takes part.
    streams: rows that the method learns from, see `counting.count`.

  Returns:
    Operations, padding rows left out.
  """
  work = counting.count(fssl.make_task(spec), federation, streams)
  steps = work.used[cohort].sum() / work.width
  return float(step_flops(spec, federation) * steps)


class Products:
  """Matrix products to time beside the rounds.

  Of random numbers: a GPU draws less power on constant ones, and is faster.

  Args:
    mesh: the devices, each with a product of its own, or None for one.
    dtype: 'float32' or 'bfloat16'.
    size: rows and columns.
  """

  def __init__(self, mesh: jax.sharding.Mesh | None, dtype: str, size: int):
    def matrices(*stack):
      x = jax.random.normal(jax.random.key(len(stack)), (*stack, size, size))
      return (x / size**0.5).astype(dtype)  # The product is as large.
    x = matrices()
    one = jax.jit(jnp.dot)
    self._flops = {'products, one': 2.0 * size**3}
    self.runs: dict[str, Callable[[], None]] = {
        'products, one': lambda: _wait(one(x, x))}
    if mesh is not None:
      stacked = jax.device_put(
          matrices(mesh.size),
          jax.sharding.NamedSharding(mesh, jax.P(mesh.axis_names[0])))
      each = jax.jit(jax.shard_map(
          lambda x: x @ x, mesh=mesh, in_specs=jax.P(mesh.axis_names[0]),
          out_specs=jax.P(mesh.axis_names[0])))
      self._flops['products, one a device'] = mesh.size * 2.0 * size**3
      self.runs['products, one a device'] = lambda: _wait(each(stacked))

  def rate(self, seconds: Mapping[str, float]) -> float:
    """Operations a second of the faster way, by the seconds of `runs`."""
    return max(flops / seconds[name] for name, flops in self._flops.items())


def _wait(x: jax.Array) -> None:
  jax.block_until_ready(x)


def shares(parts: Mapping[str, tuple[float, float]], rate: float
           ) -> dict[str, dict[str, float | None]]:
  """What each part of a round reaches of the limit; printed as well.

  Args:
    parts: (operations, seconds) by name.
    rate: operations a second of the products.

  Returns:
    By name: operations, seconds, and the share of the rate, 1 at the limit, or
    None where noise leaves no time for a part.
  """
  print(f'limit: {rate / 1e9:.1f} GFLOP/s in a matrix product')
  found: dict[str, dict[str, float | None]] = {}
  for name, (flops, seconds) in parts.items():
    share = flops / seconds / rate if seconds > 0 else None
    found[name] = {'flops': flops, 'seconds': seconds, 'share': share}
    print(f'{name}: {flops / 1e9:.1f} GFLOP in {seconds:.3f} s, '
          f'{"-" if share is None else f"{share:.3f}"} of the limit')
  found['products'] = {'flops_per_second': rate}
  return found
