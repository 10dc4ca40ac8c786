"""Rounds are lowered for accelerators, with every form of convolution.

That every method's round is: `methods/program_test.py`.
"""
import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import pytest

from fedjax_ssl import methods
from fedjax_ssl import task as task_lib
from fedjax_ssl.training import runner, sharding
from tests import hlo, toy
from tests.training import networks

_PLATFORMS = ('cuda', 'tpu')
_KERNEL = 3
_ROWS = 3 + 4  # Of a step of the toy: what a gradient convolves with.


def _convolutions(impl):
  """Those of a round of FixMatch under vmap, as accelerators get them."""
  task = dataclasses.replace(toy.task(client_map='vmap'),
                             model=networks.reordered(impl))
  method = methods.make('fixmatch', task)
  federation = toy.federation('clients')[0]
  state = task_lib.template(method, federation)
  exported = jax.export.export(
      jax.jit(functools.partial(runner.stretch, method)),
      platforms=_PLATFORMS)(
          state, runner.totals_shape(method, federation, state),
          sharding.federations([federation], None)[0], jnp.int32(0),
          jnp.int32(1), jax.random.key(0))
  assert exported.platforms == _PLATFORMS
  return hlo.convolutions(exported.mlir_module())


@pytest.mark.parametrize('impl', ['lax', 'gemm', 'taps', 'winograd',
                                  'reordered'])
def test_groups_of_a_round(impl, monkeypatch):
  """A gradient of grouped weights costs as much as without groups on GPUs.

  Its convolution has the maps of all rows as its kernel.
  """
  # What is chosen by backend is chosen as there.
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  found = _convolutions(impl)
  kernels = {kernel[0] for groups, _, kernel in found if groups > 1}
  assert kernels == {
      'lax': {_KERNEL, _ROWS}, 'reordered': {_KERNEL}}.get(impl, set())
