"""Every method's round is lowered for accelerators, in each convolution's form.

With the forms that are chosen by shape it is so too: `methods/program_test.py`.
"""
import dataclasses
import functools
import itertools

import jax
import jax.export
import jax.numpy as jnp
import pytest

from fedjax_ssl import methods
from fedjax_ssl.ops import conv
from fedjax_ssl.training import runner, sharding
from tests import hlo, toy
from tests.training import networks

_PLATFORMS = ('cuda', 'tpu')
_KERNEL = 3
_ROWS = 3 + 4  # Of a step of the toy: what a gradient convolves with.


# The forms of layers one behind another, all in one program; the channels in
# front of each, and behind the last. Those are nothing else's size.
_FORMS = 'gemm', 'taps', 'winograd', 'reordered', 'lax'
_CHANNELS = 13, 11, 17, 19, 23, 29


def _layers_of_each_form():
  """A network with one convolution of each form."""
  pairs = [*itertools.pairwise(_CHANNELS)]
  def body(params, x):
    x = x * params['Scale_0']
    for i, form in enumerate(_FORMS):
      x = jnp.tanh(conv.conv2d(x, params[f'Conv_{i}'], impl=form))
    return x.mean((1, 2))
  return networks.made({
      'Scale_0': _CHANNELS[:1],
      **{f'Conv_{i}': (_KERNEL, _KERNEL, *pair)
         for i, pair in enumerate(pairs)},
      'Dense_0': (_CHANNELS[-1], toy.NUM_CLASSES)}, body)


def _convolutions(text, model):
  """Those of a round under vmap, as accelerators get them."""
  task = dataclasses.replace(toy.task(client_map='vmap'), model=model)
  method = methods.make(text, task)
  federation = toy.federation('clients')[0]
  state = runner.state_shape(method, federation)
  exported = jax.export.export(
      jax.jit(functools.partial(runner.stretch, method)),
      platforms=_PLATFORMS)(
          state, runner.totals_shape(method, federation, state),
          sharding.federations([federation], None)[0], jnp.int32(0),
          jnp.int32(1), jax.random.key(0))
  assert exported.platforms == _PLATFORMS
  return hlo.convolutions(exported.mlir_module())


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
  """What is chosen by backend is chosen as there."""
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')


@pytest.mark.parametrize('impl', ['lax', 'gemm', 'taps', 'winograd',
                                  'reordered'])
def test_groups_of_a_round(impl):
  """A gradient of grouped weights costs as much as without groups on GPUs.

  Its convolution has the maps of all rows as its kernel.
  """
  found = _convolutions('fixmatch', networks.reordered(impl))
  kernels = {kernel[0] for groups, _, kernel in found if groups > 1}
  assert kernels == {
      'lax': {_KERNEL, _ROWS}, 'reordered': {_KERNEL}}.get(impl, set())


@pytest.mark.parametrize('text', [
    pytest.param(text, marks=[pytest.mark.thorough] * (text != 'fedavg'))
    for text in methods.METHODS])
def test_no_form_but_lax_groups_gradients_of_weights(text):
  """Nor does any method's round, of all its passes through the network."""
  found = _convolutions(text, _layers_of_each_form())
  grouped = [kernel for groups, _, kernel in found if groups > 1]
  gradients = [kernel for kernel in grouped
               if kernel[:2] != (_KERNEL, _KERNEL)]
  assert gradients  # Those of lax.
  assert all(kernel[-1] % _CHANNELS[-1] == 0 for kernel in gradients)
