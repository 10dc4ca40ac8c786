"""The convolution equals lax's in every form, and so do its derivatives."""
import functools
import itertools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.ops import (
    conv,
    conv_geometry,
    conv_rowwise,
    conv_winograd,
    pooling,
)
from tests.thorough import wider

# Compiling takes longer than running anything here.
_quick_jit = functools.partial(
    jax.jit, compiler_options={'xla_backend_optimization_level': 0})
_FORMS = ['gemm', 'reordered', 'taps', 'winograd']
# side, I, O, kernel, stride, padding
_SHAPES = [
    (28, 1, 4, 5, 1, 'SAME'), (7, 16, 4, 3, 1, 'SAME'),
    (8, 5, 4, 2, 1, 'SAME'), (8, 6, 4, 3, 2, 'VALID'),
    (5, 16, 3, 5, 1, 'SAME'), *wider(*((shape,) for shape in [
        (14, 3, 5, 3, 1, 'SAME'), (9, 16, 4, 3, 1, 'VALID'),
        (7, 5, 4, 1, 2, 'SAME'), (7, 6, 4, 3, 2, 'SAME'),
        (7, 6, 4, 4, 2, 'SAME'),
        (14, 16, 4, 3, 1, 'SAME'), (8, 17, 3, 3, 1, 'SAME'),
        (2, 16, 4, 3, 1, 'SAME'), (9, 5, 4, 2, 2, 'VALID'),
        (9, 5, 4, 5, 2, 'SAME'),
        (5, 16, 3, 3, 1, 'SAME'), (4, 16, 5, 3, 1, 'SAME'),
        (1, 16, 4, 3, 1, 'SAME'), (7, 5, 4, 1, 1, 'SAME'),
        (8, 6, 4, 3, 2, 'SAME'), (8, 3, 4, 4, 1, 'SAME'),
        (14, 5, 4, 5, 1, 'VALID'), (8, 16, 3, 5, 1, 'SAME'),
        (9, 16, 3, 5, 1, 'SAME')])),
]


def _reference(x, w, stride, padding):
  return lax.conv_general_dilated(
      x, w, (stride, stride), padding,
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'))


def _case(side, channels, features, kernel, dtype=jnp.float32):
  """Inputs float[2, side, side, I] and a kernel float[k, k, I, O]."""
  rng = np.random.default_rng(0)
  x = rng.standard_normal((2, side, side, channels))
  w = rng.standard_normal((kernel, kernel, channels, features))
  return jnp.asarray(x, dtype), jnp.asarray(w / kernel, dtype)


def _derivatives(function, x, w):
  """Output, both gradients of a curved loss, and gradients of these."""
  first = jax.grad(lambda x, w: jnp.sum(jnp.sin(function(x, w))), (0, 1))

  def second(x, w):
    dx, dw = first(x, w)
    return jnp.sum(jnp.cos(dx)) + jnp.sum(jnp.square(dw))
  return function(x, w), first(x, w), jax.grad(second, (0, 1))(x, w)


def _errors(got, want):
  """Relative error in norm of each array."""
  return [float(jnp.linalg.norm((g - w).ravel()) / jnp.linalg.norm(w.ravel()))
          for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want),
                          strict=True)]


@pytest.mark.parametrize('shape', _SHAPES, ids=str)
def test_equals_lax_to_second_order(shape):
  side, channels, features, kernel, stride, padding = shape
  forms = ['gemm', 'reordered', 'taps']
  # Tiles of 4 compile slowly for 3x3 kernels; one side stands for them.
  if stride == 1 and (kernel == 3 and side <= 8
                      or kernel == 5 and padding == 'SAME' and channels > 1):
    forms.append('winograd')
  with jax.enable_x64(True):
    x, w = _case(side, channels, features, kernel, jnp.float64)

    def everything(x, w):
      return [_derivatives(f, x, w) for f in [
          lambda x, w: _reference(x, w, stride, padding)] + [
              functools.partial(conv.conv2d, stride=stride, padding=padding,
                                impl=impl) for impl in forms]]
    want, *all_got = _quick_jit(everything)(x, w)
    for impl, got in zip(forms, all_got, strict=True):
      assert max(_errors(got, want)) < 1e-9, impl


@pytest.mark.parametrize('impl,shape', [
    ('gemm', (7, 3, 4, 5, 'SAME')), ('gemm', (8, 2, 4, 4, 'SAME')),
    ('gemm', (9, 2, 4, 3, 'VALID')), ('gemm', (6, 3, 4, 1, 'SAME')),
    ('gemm', (7, 6, 4, 3, 'SAME')), ('gemm', (6, 6, 5, 1, 'SAME')),
    ('gemm', (4, 6, 17, 3, 'SAME')), ('gemm', (9, 6, 4, 3, 'VALID')),
    ('reordered', (7, 6, 4, 3, 'SAME')), ('winograd', (6, 4, 3, 3, 'SAME')),
    *wider(('winograd', (7, 4, 3, 5, 'SAME')),
           ('winograd', (9, 4, 3, 5, 'SAME')))],
    ids=str)
def test_pooled_equals_the_pool_of_lax_to_second_order(impl, shape):
  side, channels, features, kernel, padding = shape
  with jax.enable_x64(True):
    x, w = _case(side, channels, features, kernel, jnp.float64)

    def everything(x, w):
      return [_derivatives(f, x, w) for f in (
          lambda x, w: pooling.max_pool(_reference(x, w, 1, padding)),
          lambda x, w: conv.max_pooled_conv2d(
              x, w, padding=padding, impl=impl))]
    want, got = _quick_jit(everything)(x, w)
    assert max(_errors(got, want)) < 1e-9


@pytest.mark.parametrize('tile', [(2, 2), *wider(((2,),), ((4, 2),))])
def test_row_by_row_equals_whole_tiles_in_every_phase(tile):
  window = conv_geometry.window((7, 6), (3, 3), 1, 'SAME')
  x, w = _case(7, 3, 4, 3)
  x = x[:, :, :6]
  tiling = conv_winograd.Tiling(tile[0], window, *tile[1:])
  forms = [
      functools.partial(form.conv, tiling=tiling)
      for form in (conv_rowwise, conv_winograd)
  ]
  both = [_quick_jit(lambda x, w, f=f: jax.vjp(f, x, w)[1](
      jax.tree.map(jnp.cos, f(x, w))))(x, w) for f in forms]
  assert max(_errors(*both)) < 1e-5


@pytest.mark.parametrize('batch,parts', [(0, 1), (5, 2), (6, 2), (7, 4)])
def test_parts_of_a_batch(batch, parts, monkeypatch):
  """Parts of 3 or 2 rows: the fewest zeros decide."""
  window = conv_geometry.window((4, 4), (5, 5), 1, 'SAME')
  tiling, channels = conv_winograd.Tiling(2, window), 3 + 2
  monkeypatch.setattr(conv_rowwise, '_HELD_BYTES',
                      3 * 2 * 2 * tiling.side * channels * 4)
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.standard_normal((batch, 4, 4, 3)), jnp.float32)
  w = jnp.asarray(rng.standard_normal((5, 5, 3, 2)), jnp.float32)
  grads = [
      _quick_jit(jax.grad(lambda x, w, f=f: jnp.sum(jnp.sin(f(x, w))),
                          (0, 1)))(x, w)
      for f in (lambda x, w: _reference(x, w, 1, 'SAME'),
                lambda x, w: conv_rowwise.conv(x, w, tiling)[0][0])
  ]
  for got, want in zip(grads[1], grads[0], strict=True):
    np.testing.assert_allclose(got, want, atol=1e-4 * jnp.linalg.norm(want))
  assert conv_rowwise._split(x, tiling, channels).shape[0] == parts


@pytest.mark.parametrize('impl,side,kernel,bound', [
    ('winograd', 14, 3, 2e-5), ('winograd', 6, 3, 1e-5), ('gemm', 14, 3, 5e-6),
    ('reordered', 14, 3, 5e-6), *wider(
        ('winograd', 8, 3, 2e-5), ('winograd', 14, 5, 2e-5))])
def test_single_precision(impl, side, kernel, bound):
  x, w = _case(side, 32, 16, kernel)
  both = [_quick_jit(jax.grad(
      lambda x, w, f=f: jnp.sum(jnp.square(f(x, w))), (0, 1)))(x, w) for f in (
          lambda x, w: _reference(x, w, 1, 'SAME'),
          lambda x, w: conv.conv2d(x, w, impl=impl))]
  assert max(_errors(both[1], both[0])) < bound


@pytest.mark.parametrize('impl,dtype', list(itertools.product(
    conv.IMPLS, ('float32', 'bfloat16'))))
def test_dtype_is_kept(impl, dtype):
  x, w = _case(4, 16, 4, 3, dtype)

  @_quick_jit
  def run(x, w):
    y, pull = jax.vjp(lambda x, w: conv.conv2d(x, w, impl=impl), x, w)
    return y, *pull(y)
  y, dx, dw = run(x, w)
  assert (y.dtype, dx.dtype, dw.dtype) == (x.dtype,) * 3
  error = _errors(y.astype(jnp.float32), _reference(
      x.astype(jnp.float32), w.astype(jnp.float32), 1, 'SAME'))
  assert error[0] < (1e-2 if dtype == 'bfloat16' else 1e-5)


@pytest.mark.parametrize('impl,kernel,function', [
    *((impl, 3, conv.conv2d) for impl in _FORMS), ('winograd', 5, conv.conv2d),
    ('gemm', 3, conv.max_pooled_conv2d)])
def test_own_weights_for_each_client(impl, kernel, function):
  x, w = _case(4, 16, 4, kernel)
  xs, ws = jnp.stack([x, 2 * x]), jnp.stack([w, w[::-1]])
  grad = jax.grad(lambda w, x: jnp.sum(jnp.sin(function(x, w, impl=impl))))
  mapped = _quick_jit(jax.vmap(grad))(ws, xs)
  grad = _quick_jit(grad)
  for i in range(2):
    np.testing.assert_allclose(mapped[i], grad(ws[i], xs[i]), rtol=1e-3,
                               atol=2e-3)


def test_choice_on_cpu():
  def choice(side, kernel, stride, channels, pooled=None):
    window = conv_geometry.window((side, side), (kernel, kernel), stride,
                                  'SAME')
    return conv.choose(window, channels, 'cpu', pooled)
  assert choice(32, 3, 1, 3) == 'gemm'
  assert choice(32, 3, 1, 64) == 'winograd'
  assert choice(14, 5, 1, 32) == 'winograd'
  assert choice(32, 3, 2, 64) == 'reordered'
  assert choice(32, 3, 1, 8) == choice(32, 3, 1, 8, 17) == 'reordered'
  assert choice(32, 3, 1, 8, 16) == choice(32, 5, 1, 8, 16) == 'gemm'
  assert choice(32, 1, 1, 8, 16) == choice(32, 7, 1, 16, 16) == 'reordered'
  assert choice(32, 3, 1, 64, 16) == 'winograd'


def test_choice_elsewhere():
  window = conv_geometry.window((8, 8), (3, 3), 1, 'SAME')
  assert conv.choose(window, 64, 'gpu') == 'gemm'
  assert conv.choose(window, 64, 'tpu') == 'lax'


def test_tiles_by_size():
  def form(side, rows, inputs, outputs=None, kernel=3):
    window = conv_geometry.window((side, side), (kernel, kernel), 1, 'SAME')
    return conv.tile_form(window, rows, inputs, outputs or inputs)
  assert form(14, 1, 32, kernel=5) == form(7, 1, 16, kernel=5) == ('rowwise', 4)
  assert form(6, 99, 64, kernel=5) == ('rowwise', 2)
  # Maps over weights: 16 tiles a row, 2 / 32 of the weights each.
  assert form(16, 5, 32) == ('winograd', 4)  # 5 times.
  assert form(16, 6, 32) == form(14, 6, 32) == ('rowwise', 4)
  assert form(14, 5, 32) == ('winograd', 2)  # Ragged.
  assert form(16, 99, 31, 64) == form(16, 99, 64, 31) == ('winograd', 4)
  assert form(6, 999, 64) == ('winograd', 2)
  assert form(4, 40, 64) == ('winograd', 4)  # One tile.
  assert form(4, 39, 64) == form(4, 40, 63, 64) == ('winograd', 2)
  narrow = conv_geometry.window((16, 6), (3, 3), 1, 'SAME')
  assert conv.tile_form(narrow, 99, 64, 64) == ('winograd', 2)


@pytest.mark.parametrize('change,word', [
    ({'impl': 'fft'}, 'fft'), ({'padding': 'FULL'}, 'FULL'),
    ({'stride': 0}, 'stride')])
def test_bad_arguments_are_named(change, word):
  x, w = _case(4, 3, 2, 3)
  with pytest.raises(ValueError, match=word):
    conv.conv2d(x, w, **change)


def test_bad_shapes_are_named():
  x, w = _case(4, 3, 2, 3)
  with pytest.raises(ValueError, match='same I'):
    conv.conv2d(x, w[:, :, :2])
  with pytest.raises(ValueError, match='x is bfloat16 and w is float32'):
    conv.max_pooled_conv2d(x.astype('bfloat16'), w)
  with pytest.raises(ValueError, match='4x4'):
    conv.conv2d(x, jnp.ones((5, 5, 3, 2)), padding='VALID')


@pytest.mark.parametrize('dtype', ['int32', 'int8', 'bool'])
def test_whole_numbers_are_refused(dtype):
  x, w = jnp.ones((1, 4, 4, 16), dtype), jnp.ones((3, 3, 16, 1), dtype)
  with pytest.raises(ValueError, match=f'x is {dtype} .* must be floats'):
    conv.conv2d(x, w)


@pytest.mark.parametrize('stride', [(2, 2), 1.5, 0])
def test_a_stride_is_one_whole_number(stride):
  with pytest.raises(ValueError, match='stride is .*one whole number'):
    conv.conv2d(jnp.ones((1, 4, 4, 3)), jnp.ones((3, 3, 3, 1)), stride=stride)
