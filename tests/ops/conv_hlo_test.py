"""What XLA:CPU makes of the convolutions: no slow layout in any loop."""
import functools
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

from fedjax_ssl.ops import conv
from tests import hlo
from tests.thorough import wider


def _net(conv_impl):
  """Loss of a net with each kind of layer.

  Pooled patches, re-ordered, pooled tiles, re-ordered with a stride, tiles,
  1x1.
  """
  shapes = [(3, 3, 3, 8, 0), (5, 5, 8, 16, 1), (5, 5, 16, 16, 0),
            (3, 3, 16, 16, 2), (3, 3, 16, 16, 1), (1, 1, 16, 4, 2)]

  def loss(weights, x):
    for w, (*_, stride) in zip(weights, shapes, strict=True):
      x = jnp.tanh(
          conv.conv2d(x, w, stride=stride, impl=conv_impl) if stride
          else conv.max_pooled_conv2d(x, w, impl=conv_impl))
    return jnp.mean(jnp.square(x))
  return loss, [jnp.ones(s[:4]) for s in shapes]


def _steps(gradient):
  """Three steps of `gradient(weights, x)` in a scan, as compiled text."""
  def run(weights, xs):
    def step(weights, x):
      grads = gradient(weights, x)
      return [w - .1 * g for w, g in zip(weights, grads, strict=True)], None
    return jax.lax.scan(step, weights, xs)[0]
  return lambda weights: jax.jit(run).lower(
      weights, jnp.ones((3, 4, 12, 12, 3))).compile().as_text()


def _first(loss):
  return jax.grad(loss)


def _meta(loss):
  def after_step(weights, x):
    grads = jax.grad(loss)(weights, x)
    return loss([w - .1 * g for w, g in zip(weights, grads, strict=True)],
                x + 1)
  return jax.grad(after_step)


def _per_example(loss):
  def clipped(weights, x):
    rows = jax.vmap(jax.grad(loss), (None, 0))(weights, x[:, None])
    return [jnp.mean(jnp.clip(r, -1, 1), 0) for r in rows]
  return clipped


@pytest.mark.parametrize('gradient', [
    _meta, *wider(_first, _per_example)])
def test_no_slow_convolution_in_a_training_loop(gradient):
  loss, weights = _net('auto')
  text = _steps(gradient(loss))(weights)
  assert ' while(' in text
  assert ' convolution(' in text  # The re-ordered layers.
  assert not hlo.slow_convolutions(text)


def test_the_check_can_fail():
  loss, weights = _net('lax')
  assert hlo.slow_convolutions(_steps(_first(loss))(weights))


def test_no_slow_convolution_on_maps_below_the_kernel():
  weights = [jnp.ones((3, 3, 3, 8)), jnp.ones((5, 5, 8, 8)),
             jnp.ones((3, 3, 8, 8)), jnp.ones((3, 3, 8, 4))]

  def loss(impl, weights, x):
    for stride, w in zip((3, 1, 2, 2), weights, strict=True):
      x = jnp.tanh(conv.conv2d(x, w, stride=stride, impl=impl))
    return jnp.mean(jnp.square(x))  # Maps of 4, 4, 2 and 1.

  def slow(impl):
    return hlo.slow_convolutions(
        _steps(_first(functools.partial(loss, impl)))(weights))
  assert not slow('auto')
  assert slow('reordered')


def test_tiles_and_patches_have_no_convolution():
  def loss(weights, x):
    for w in weights:
      x = conv.conv2d(x, w)
    return jnp.mean(jnp.square(x))
  text = _steps(_first(loss))([
      jnp.ones((3, 3, 3, 16)), jnp.ones((3, 3, 16, 16)),
      jnp.ones((5, 5, 16, 4))])
  assert ' convolution(' not in text
  assert ' dot(' in text


@pytest.mark.parametrize('gradient', [_meta, *wider(_first, _per_example)])
def test_few_pooled_outputs_are_products(gradient):
  def loss(weights, x):
    for w in weights:
      x = jnp.tanh(conv.max_pooled_conv2d(x, w))
    return jnp.mean(jnp.square(x))
  text = _steps(gradient(loss))([
      jnp.ones((3, 3, 3, 8)), jnp.ones((3, 3, 8, 16)), jnp.ones((5, 5, 16, 8))])
  assert ' while(' in text
  assert ' convolution(' not in text
  assert ' dot(' in text


def test_sharded_clients_do_not_communicate():
  code = textwrap.dedent("""
      import jax
      jax.config.update('jax_num_cpu_devices', 2)
      import jax.numpy as jnp
      from jax.sharding import PartitionSpec as P
      from fedjax_ssl.ops import conv

      def loss(ws, x):
        for w in ws:
          x = jnp.tanh(conv.conv2d(x, w))
        return jnp.mean(x)

      mesh = jax.make_mesh((2,), ('clients',),
                           axis_types=(jax.sharding.AxisType.Auto,))
      ws = [jnp.ones((4, 3, 3, 3, 16)), jnp.ones((4, 3, 3, 16, 8)),
            jnp.ones((4, 5, 5, 8, 4))]
      x = jnp.ones((4, 2, 6, 6, 3))
      for mapper in (jax.vmap(jax.grad(loss)),
                     lambda ws, x: jax.lax.map(
                         lambda a: jax.grad(loss)(*a), (ws, x))):
        spec = P('clients')
        run = jax.jit(jax.shard_map(mapper, mesh=mesh, in_specs=spec,
                                    out_specs=spec, check_vma=False),
                      compiler_options={'xla_backend_optimization_level': 0})
        text = run.lower(ws, x).compile().as_text()
        assert 'num_partitions=2' in text, text[:200]
        for word in ('all-gather', 'all-reduce', 'all-to-all',
                     'collective-permute'):
          assert word not in text, word
      print('silent')
      """)
  done = subprocess.run(
      [sys.executable, '-c', code], capture_output=True, text=True, check=False,
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path),
           'JAX_PLATFORMS': 'cpu'})
  assert done.stdout.strip() == 'silent', done.stderr[-2000:]
