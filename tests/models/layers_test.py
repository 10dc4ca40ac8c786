"""Laws of normalization with masks."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.models import layers

_CHANNELS = 6


def _apply(norm, x, mask, stats=None, dtype='float32', train=True):
  """Output and statistics (mean, variance) of one Norm layer."""
  module = layers.Norm(layers.Choices(norm, dtype=dtype))
  made = module.init(jax.random.key(0), x, mask, False)
  if stats is not None:
    made = {**made, 'stats': stats}
  y, changed = module.apply(made, x, mask, train, mutable=['stats'])
  return y, changed.get('stats', {})


def _data(rows=5):
  rng = np.random.default_rng(0)
  return (3 * rng.standard_normal((rows, 3, 2, _CHANNELS)) + 2).astype(
      np.float32)


def _old_stats():
  return {'mean': jnp.arange(6.), 'variance': jnp.arange(1., 7.)}


@pytest.mark.parametrize('norm', ['batch', 'static'])
def test_equals_numpy(norm):
  x = _data()
  y, stats = _apply(norm, x, jnp.ones(5), _old_stats())
  mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
  np.testing.assert_allclose(y, (x - mean) / np.sqrt(variance + 1e-5),
                             rtol=1e-4, atol=1e-5)
  if norm == 'batch':
    old = _old_stats()
    mean = .9 * old['mean'] + .1 * mean
    variance = .9 * old['variance'] + .1 * x.var((0, 1, 2), ddof=1)
  np.testing.assert_allclose(stats['mean'], mean, rtol=1e-5)
  np.testing.assert_allclose(stats['variance'], variance, rtol=1e-5)


@pytest.mark.parametrize('norm', layers.NORMS)
@pytest.mark.parametrize('filler', [0., 1e4, np.inf, np.nan])
def test_padding_rows_change_nothing(norm, filler):
  x = _data(3)
  padded = np.concatenate([x, np.full_like(x[:2], filler)])
  mask = jnp.asarray([1., 1., 1., 0., 0.])
  want, want_stats = _apply(norm, x, None, _old_stats())
  got, got_stats = _apply(norm, padded, mask, _old_stats())
  np.testing.assert_allclose(got[:3], want, rtol=1e-5, atol=1e-5)
  if want_stats:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
                 got_stats, want_stats)


def test_padding_rows_send_no_gradient():
  x = np.concatenate([_data(3), np.full((2, 3, 2, _CHANNELS), 50.)])
  mask = jnp.asarray([1., 1., 1., 0., 0.])
  grad = jax.grad(lambda x: jnp.sum(
      jnp.sin(_apply('batch', x, mask)[0]) * mask[:, None, None, None]))(
          jnp.asarray(x, jnp.float32))
  assert np.abs(grad[:3]).max() > 0
  np.testing.assert_array_equal(grad[3:], 0)


@pytest.mark.parametrize('norm', ['batch', 'static'])
def test_empty_batch_keeps_statistics(norm):
  def loss(x):
    y, stats = _apply(norm, x, jnp.zeros(5), _old_stats())
    return jnp.sum(jnp.sin(y)), (y, stats)
  (_, (y, stats)), grad = jax.value_and_grad(loss, has_aux=True)(
      jnp.asarray(_data()))
  assert np.isfinite(y).all() and np.isfinite(grad).all()
  jax.tree.map(np.testing.assert_array_equal, stats, _old_stats())


@pytest.mark.parametrize('norm', ['batch', 'static'])
def test_evaluation_uses_stored_statistics(norm):
  x, old = _data(), _old_stats()
  y, stats = _apply(norm, x, None, old, train=False)
  np.testing.assert_allclose(
      y, (x - old['mean']) / np.sqrt(old['variance'] + 1e-5), rtol=1e-4,
      atol=1e-5)
  jax.tree.map(np.testing.assert_array_equal, stats, old)


def test_own_statistics_repeat_the_static_output():
  x = _data()
  y, stats = _apply('static', x, None)
  again, _ = _apply('static', x, None, stats, train=False)
  np.testing.assert_allclose(y, again, rtol=1e-5, atol=1e-5)


def test_group_normalizes_each_row_alone():
  x = _data()  # gcd(32, 6) = 2 groups of 3 channels.
  y, stats = _apply('group', x, None)
  assert not stats
  part = x[1, :, :, 3:]
  np.testing.assert_allclose(
      y[1, :, :, 3:], (part - part.mean()) / np.sqrt(part.var() + 1e-5),
      rtol=1e-4, atol=1e-5)


def test_none_is_the_identity():
  x = _data()
  y, stats = _apply('none', x, None)
  assert not stats
  np.testing.assert_array_equal(x, y)


def test_half_precision_keeps_wide_statistics():
  x = jnp.asarray(_data(), jnp.bfloat16)
  y, stats = _apply('batch', x, None, dtype='bfloat16')
  assert y.dtype == jnp.bfloat16
  assert stats['mean'].dtype == jnp.float32


@pytest.mark.parametrize('channels', [False, True])
def test_dropout_drops_its_share_and_keeps_the_mean(channels):
  module = layers.Dropout(.25, channels)
  x = jnp.ones((200, 3, 4, _CHANNELS))
  def train(key):
    return module.apply({}, x, True, rngs={'dropout': key})
  y = train(jax.random.key(0))
  np.testing.assert_allclose(jnp.unique(y), [0, 4 / 3], rtol=1e-6)
  np.testing.assert_allclose(y.mean(), 1, atol=.06)
  whole = (y == y[:, :1, :1]).all((1, 2))
  assert bool(whole.all()) == channels
  assert not np.array_equal(y, train(jax.random.key(1)))


def test_dropout_needs_training_and_a_key():
  module = layers.Dropout(.5)
  x = jnp.ones((5, 4))
  np.testing.assert_array_equal(module.apply({}, x, True), x)
  np.testing.assert_array_equal(
      module.apply({}, x, False, rngs={'dropout': jax.random.key(0)}), x)


def test_a_pool_has_no_stride():
  layer = layers.Conv(4, layers.Choices(), stride=2, pool=True)
  with pytest.raises(ValueError, match='stride is 2; with pool it must be 1'):
    layer.init(jax.random.key(0), jnp.ones((1, 4, 4, 3)))


@pytest.mark.parametrize('shape', [(4, 1), (1,), (3,)])
def test_a_mask_of_another_shape_is_refused(shape):
  with pytest.raises(ValueError, match=r'mask has shape .* allowed is \(4,\)'):
    _apply('batch', _data(4), jnp.ones(shape))


def test_an_unknown_norm_is_refused():
  with pytest.raises(ValueError, match='layer'):
    layers.Choices('layer')
