"""Every network by name: size, purity, precision, clear errors."""
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import models
from fedjax_ssl.core import checks, knobs
from tests import toy
from tests.thorough import wider

# Trainable parameters with 10 classes.
_COUNTS = {
    ('fedavg_cnn', 28, 1): 1_663_370,
    ('alexnet', 32, 3): 12_815_818,
    ('alexnet(convs=2)', 32, 3): 21_073_098,
    ('resnet9_fedmatch', 32, 3): 6_568_640,
    ('resnet9', 32, 3): 6_575_370,
    ('simple_cnn', 32, 3): 92_626,
    ('resnet18_rscfed', 32, 3): 11_565_386,
    ('resnet18', 32, 3): 11_173_962,
    ('resnet34', 32, 3): 21_282_122,
    ('resnet50', 32, 3): 23_520_842,
    ('wrn28_2', 32, 3): 1_467_610,
    ('resnet8', 32, 3): 1_227_594,
    # Stem 5x5, then blocks of 2, 4 and 8 channels, batch normalization.
    ('resnet8(width=2, stride=3)', 32, 3): (
        25 * 6 + 4 + 2 * 36 + 8 + 72 + 144 + 8 + 24 + 288 + 576 + 32 + 48
        + 90),
    # 5x5 convolutions to 10 and 20 channels, dense 500, 50, 10.
    ('fedtrinet_mnist', 32, 1): 260 + 5_020 + 25_050 + 510,
    ('fedtrinet_cifar', 32, 3): (
        896 + 18_496 + 73_856 + 147_584 + 295_168 + 590_080  # Convolutions.
        + 2 * (32 + 128 + 256) + 4_195_328 + 524_800 + 5_130),
    ('linear', 8, 1): 650,
    ('mlp(width=5, depth=1)', 8, 1): 65 * 5 + 60,
    ('cnn(width=4)', 8, 1): 40 + 296 + 330,
}


def _make(name, side=8, channels=1, **choices):
  return models.make(name, num_classes=10,
                     input_shape=(side, side, channels), **choices)


def _count(tree):
  return sum(x.size for x in jax.tree.leaves(tree))


def _images(rows, side=8, channels=1):
  rng = np.random.default_rng(0)
  return jnp.asarray(rng.standard_normal((rows, side, side, channels)))


@pytest.mark.parametrize('case', _COUNTS, ids=str)
def test_number_of_parameters(case):
  made = jax.eval_shape(_make(*case, conv_impl='lax').init, toy.key(0))
  assert _count(made.params) == _COUNTS[case]


def test_resnet8_with_100_classes():
  model = models.make('resnet8', num_classes=100, input_shape=(32, 32, 3),
                      conv_impl='lax')
  made = jax.eval_shape(model.init, toy.key(0))
  assert _count(made.params) == 1_250_724


@pytest.mark.parametrize('name', models.MODELS)
@pytest.mark.parametrize('norm', [None, 'batch'])
def test_record_is_pure_and_typed(name, norm):
  channels, side = models.input_needs(name)
  channels, side = channels or 1, side or 8
  # Texts are tokens by the numbers of their word vectors.
  shape = (7, 5) if name.startswith('text_') else (side, side, channels)
  try:
    model = models.make(name, num_classes=10, input_shape=shape, norm=norm,
                        dtype='bfloat16',
                        conv_impl='lax')  # The quickest to trace.
  except ValueError as error:
    assert norm and 'no normalization' in str(error)
    return
  x = jax.ShapeDtypeStruct((3, *shape), jnp.float32)
  mask = jax.ShapeDtypeStruct((3,), jnp.float32)
  made = jax.eval_shape(model.init, toy.key(0))
  assert {leaf.dtype for leaf in jax.tree.leaves(made)} == {
      jnp.dtype('float32')}
  assert bool(made.stats) == (model.norm == 'batch')
  logits = jax.eval_shape(model.apply, made, x)
  assert (logits.shape, logits.dtype) == ((3, 10), jnp.float32)
  logits, stats = jax.eval_shape(model.apply_train, made, x, mask)
  assert (logits.shape, logits.dtype) == ((3, 10), jnp.float32)
  assert stats == made.stats


@pytest.mark.parametrize('side,channels', [(4, 1), (7, 3), (28, 1), (64, 3)])
def test_cnn_takes_every_image(side, channels):
  model = _make('cnn', side, channels)
  x = jax.ShapeDtypeStruct((2, side, side, channels), jnp.float32)
  made = jax.eval_shape(model.init, toy.key(0))
  assert jax.eval_shape(model.apply, made, x).shape == (2, 10)
  assert _count(made.params) < 30_000


def test_cnn_of_means_over_windows():
  """It is the plain one on the smaller images, whatever is left at borders."""
  large, small = _make('cnn(width=4, stride=3)', 26), _make('cnn(width=4)', 8)
  made = large.init(toy.key(0))
  images = _images(2, 8)
  wide = jnp.pad(jnp.repeat(jnp.repeat(images, 3, 1), 3, 2),
                 ((0, 0), (0, 2), (0, 2), (0, 0)), constant_values=99)
  checker = jnp.asarray([1., 0., -1.])  # Means of 0 over every window.
  wide = wide.at[:, :24, :24].add(jnp.tile(checker, 8)[:, None])
  np.testing.assert_allclose(
      jax.jit(large.apply)(made, wide), jax.jit(small.apply)(made, images),
      atol=1e-5)
  with pytest.raises(ValueError, match='stride is 7; it must leave 4x4'):
    _make('cnn(stride=7)', 26).init(toy.key(0))


@pytest.mark.parametrize('norm', ['batch', *wider('none')])
def test_forms_agree_on_a_whole_net(norm):
  with jax.enable_x64(True):
    x, labels = _images(3), jnp.arange(3)
    mask = jnp.asarray([1., 1., 0.])

    def gradient(impl, variables):
      model = _make('cnn(width=16)', norm=norm, conv_impl=impl,
                    dtype='float64')
      def loss(params):
        logits, _ = model.apply_train(
            variables._replace(params=params), x, mask)
        rows = jax.nn.log_softmax(logits)[jnp.arange(3), labels]
        return jnp.sum(rows * mask)
      return jax.jit(jax.grad(loss))(variables.params)
    variables = _make('cnn(width=16)', norm=norm, dtype='float64').init(
        toy.key(0))
    want = gradient('lax', variables)
    for impl in ('auto', 'gemm'):
      got = gradient(impl, variables)
      jax.tree.map(
          lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10),
          got, want)


def test_masked_rows_do_not_reach_the_others():
  model = _make('cnn(width=4)', norm='batch')
  variables = model.init(toy.key(0))
  x = _images(4)
  mask = jnp.asarray([1., 1., 1., 0.])
  train = jax.jit(model.apply_train)
  logits, stats = train(variables, x, mask)
  others, same = train(variables, x.at[3].set(1e6), mask)
  np.testing.assert_array_equal(logits[:3], others[:3])
  jax.tree.map(np.testing.assert_array_equal, stats, same)


def test_only_networks_with_dropout_use_the_key():
  for name, side, drops in (('fedtrinet_mnist', 32, True), ('cnn', 8, False)):
    model = _make(name, side, conv_impl='lax')
    variables = model.init(toy.key(0))
    x = _images(2, side)
    train = jax.jit(model.apply_train)
    plain, _ = train(variables, x, None)
    np.testing.assert_allclose(plain, jax.jit(model.apply)(variables, x),
                               rtol=1e-5, atol=1e-5)
    dropped, _ = train(variables, x, None, toy.key(1))
    assert bool(np.allclose(dropped, plain)) != drops


def test_half_precision_is_near():
  variables = _make('cnn(width=4)').init(toy.key(0))
  x = _images(4)
  exact = jax.jit(_make('cnn(width=4)').apply)(variables, x)
  half = jax.jit(_make('cnn(width=4)', dtype='bfloat16').apply)(variables, x)
  gap = np.abs(half - exact).max()
  assert 0 < gap < .1 * np.abs(exact).max()


def test_fedmatch_resnet_has_no_bias():
  made = jax.eval_shape(_make('resnet9_fedmatch', 32, 3).init,
                        toy.key(0))
  assert all(leaf.ndim > 1 for leaf in jax.tree.leaves(made.params))


def test_input_needs():
  assert models.input_needs('resnet9') == (3, 32)
  assert models.input_needs('cnn(width=8)') == (None, None)
  with pytest.raises(ValueError, match='resnet9'):
    models.input_needs('resnet99')


@pytest.mark.parametrize('name,choices,word', [
    ('cnnn', {}, 'cnn'),
    ('cnn(depth=3)', {}, 'width'),
    ('cnn', {'norm': 'layer'}, 'norm'),
    ('linear', {'norm': 'batch'}, 'linear'),
    ('cnn', {'conv_impl': 'fft'}, 'conv_impl'),
    ('cnn', {'dtype': 'int8'}, 'dtype'),
    ('cnn', {'dtype': 'float64'}, 'jax_enable_x64'),
    ('cnn', {'side': 3}, '4x4'),
    ('cnn(width=0)', {}, 'width'),
    ('mlp(depth=-1)', {}, 'depth'),
    ('resnet9', {'side': 16}, '32x32'),
    ('alexnet(convs=4)', {'side': 32}, 'convs'),
])
def test_bad_requests_are_named(name, choices, word):
  with pytest.raises(ValueError, match=word):
    _make(name, **choices)


def test_every_model_has_facts():
  assert set(models.FACTS) == set(models.MODELS)


@pytest.mark.parametrize('model', ['resnet9', 'resnet18', 'resnet34',
                                   'resnet50'])
def test_an_unknown_init_is_refused_before_there_are_data(model):
  with pytest.raises(checks.FieldError, match="init 'torhc' .* mean 'torch'"):
    knobs.check('model', f"{model}(init='torhc')", models.MODELS,
                models.FILLED)


@pytest.mark.parametrize('model, hidden, last, number', [
    ('resnet9', 2, 1, 9), ("resnet9(init='torch')", 1 / 3, 1 / 3, 9),
    ("resnet18(init='torch')", 1 / 3, 1 / 3, 21)])
def test_first_weights_have_the_variance_of_their_policy(
    model, hidden, last, number):
  params = _make(model, 32, 3).init(toy.key(0)).params
  kernels = [x for x in jax.tree.leaves(params) if x.ndim > 1]
  assert len(kernels) == number
  for kernel in kernels:
    wanted = last if kernel.ndim == 2 else hidden
    assert math.prod(kernel.shape[:-1]) * kernel.var() == pytest.approx(
        wanted, rel=.1)
