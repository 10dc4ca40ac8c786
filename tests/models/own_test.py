"""Any Flax module is a model."""
from __future__ import annotations

from typing import Any

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import models
from fedjax_ssl.core import checks, choices
from fedjax_ssl.models import own

SHAPE = (4, 4, 1)


class Net(nn.Module):
  """Of a user: batch statistics, dropout, a mask."""

  num_classes: int
  width: int = 4
  rate: float = 0.5
  act: Any = nn.relu

  @nn.compact
  def __call__(self, x, train: bool = False, mask=None):
    x = nn.Dense(self.width)(x.reshape(x.shape[0], -1))
    x = nn.BatchNorm(use_running_average=not train)(
        x, mask=None if mask is None else mask[:, None] > 0)
    x = nn.Dropout(self.rate, deterministic=not train)(self.act(x))
    return nn.Dense(self.num_classes)(x)


class Plain(nn.Module):
  """Takes nothing but its inputs, and has its classes fixed."""

  @nn.compact
  def __call__(self, x):
    return nn.Dense(3)(x.reshape(x.shape[0], -1))


class Eager(nn.Module):
  """Says `deterministic`, as many do."""

  num_classes: int

  @nn.compact
  def __call__(self, x, deterministic: bool):
    x = nn.Dropout(0.5, deterministic=deterministic)(x)
    return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))


class Scaled(nn.Module):
  """Its logits are no dense layer's."""

  num_classes: int

  @nn.compact
  def __call__(self, x):
    return 2 * nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))


class Always(nn.Module):
  """Drops out when it predicts too."""

  num_classes: int

  @nn.compact
  def __call__(self, x):
    x = nn.Dropout(0.5, deterministic=False)(x.reshape(x.shape[0], -1))
    return nn.Dense(self.num_classes)(x)


class Still(nn.Module):
  """Has another word for training, which nobody fills in."""

  num_classes: int

  @nn.compact
  def __call__(self, x, fit: bool = False):
    x = nn.BatchNorm(use_running_average=not fit)(x.reshape(x.shape[0], -1))
    return nn.Dense(self.num_classes)(x)


class Frozen(nn.Module):
  """Keeps its statistics on purpose."""

  num_classes: int

  @nn.compact
  def __call__(self, x, train: bool = False):
    x = nn.BatchNorm(use_running_average=True)(x.reshape(x.shape[0], -1))
    return nn.Dense(self.num_classes)(x)


class Constant(nn.Module):
  """Sets a statistic to a number, and reads the mask."""

  num_classes: int

  @nn.compact
  def __call__(self, x, train: bool = False, mask=None):
    seen: Any = self.variable('batch_stats', 'seen', lambda: jnp.zeros(()))
    if train:
      x, seen.value = x * mask[0], np.float32(1)
    return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
  monkeypatch.setattr(models, 'MODELS', type(models.MODELS)(
      'model', models.MODELS, adapt=own.builder))
  for net in (Net, Plain, Eager, Scaled, Always, Still,
              Frozen, Constant):
    assert models.register(net.__name__.lower())(net) is net


def make(text, **given):
  return models.make(text, num_classes=3, input_shape=SHAPE, **given)


def test_fields_are_knobs():
  model = make('net(width=7)')
  assert model.init(jax.random.key(0)).params['Dense_0']['kernel'].shape == (
      16, 7)
  assert choices.resolved('net(width=7)', models.MODELS) == {
      'width': 7, 'rate': 0.5}
  with pytest.raises(checks.FieldError, match="no knob 'act'"):
    make("net(act='relu')")
  with pytest.raises(checks.FieldError, match='width of type'):
    make("net(width='wide')")


def test_padding_is_no_part_of_batch_statistics():
  model = make('net(rate=0.0)')
  assert model.norm == 'batch'
  variables = model.init(jax.random.key(0))
  rows = jax.random.normal(jax.random.key(1), (4, *SHAPE))
  padded = jnp.concatenate([rows, 100 * jnp.ones((2, *SHAPE))])
  want, stats = model.apply_train(variables, rows, jnp.ones(4))
  got, same = model.apply_train(
      variables, padded, jnp.array([1., 1, 1, 1, 0, 0]))
  np.testing.assert_allclose(got[:4], want, rtol=1e-5, atol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(
      a, b, rtol=1e-5, atol=1e-6), same, stats)
  moved = variables._replace(stats=stats)
  assert not np.allclose(model.apply(moved, rows),
                         model.apply(variables, rows))


@pytest.mark.parametrize('text', ['net', 'eager'])
def test_dropout_draws_from_the_key_and_not_in_evaluation(text):
  model = make(text)
  variables = model.init(jax.random.key(0))
  rows, mask = jnp.ones((8, *SHAPE)), jnp.ones(8)
  one, two = (model.apply_train(variables, rows, mask, jax.random.key(i))[0]
              for i in (1, 2))
  assert not np.allclose(one, two)
  np.testing.assert_array_equal(model.apply(variables, rows)[0],
                                model.apply(variables, rows)[1])


def test_statistics_that_nothing_moves_are_told(recwarn):
  with pytest.warns(UserWarning, match='=still: its batch_stats .* `train`'):
    make('still')
  with pytest.warns(UserWarning, match=r'=frozen: its .* in training\.$'):
    make('frozen')
  make('net')
  make('constant')
  assert not recwarn.list


def test_without_statistics_and_key_training_is_evaluation():
  for text in ('plain', 'eager'):
    model = make(text)
    variables = model.init(jax.random.key(0))
    rows = jnp.ones((2, *SHAPE))
    logits, stats = model.apply_train(variables, rows, jnp.ones(2))
    np.testing.assert_array_equal(logits, model.apply(variables, rows))
    assert stats == variables.stats == {} and model.norm == 'none'


@pytest.mark.parametrize('text, given, words', [
    ('plain', {'num_classes': 4}, r'must give logits \[1, 4\]'),
    ('plain', {'norm': 'group'}, 'has no field choices'),
    ('plain', {'conv_impl': 'lax'}, 'has no field choices'),
    ('plain', {'dtype': 'bfloat16'}, 'has no field dtype')])
def test_what_a_module_cannot_is_refused(text, given, words):
  with pytest.raises(checks.FieldError, match=words):
    models.make(text, **{'num_classes': 3, 'input_shape': SHAPE, **given})


def test_a_module_that_gives_more_than_logits_is_refused(tmp_path):
  (tmp_path / 'two.py').write_text("""
from flax import linen as nn

class Two(nn.Module):
  num_classes: int

  @nn.compact
  def __call__(self, x):
    x = x.reshape(x.shape[0], -1)
    return nn.Dense(self.num_classes)(x), x
""")
  with pytest.raises(checks.FieldError, match='gives tuple; it must give'):
    models.make(f'{tmp_path}/two.py:Two', num_classes=3, input_shape=SHAPE)


@pytest.mark.parametrize('given, said', [
    (3, ''), (int, ''), (nnx.Linear, ' Those of nnx are not taken.')])
def test_what_is_no_module_is_refused(given, said):
  with pytest.raises(ValueError, match='no Flax linen module class .*module.'
                     + said + '$'):
    models.register('other')(given)


@pytest.mark.parametrize('text', ['net', 'plain', 'eager'])
def test_features_are_what_the_last_dense_layer_reads(text):
  model = make(text)
  assert model.features is not None and model.features_train is not None
  assert model.head is not None
  variables = model.init(jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (5, *SHAPE))
  layer = variables.params[model.head()[0]]
  assert model.head()[1:] == ('kernel',)
  features = model.features(variables, x)
  np.testing.assert_allclose(features @ layer['kernel'] + layer['bias'],
                             model.apply(variables, x), rtol=1e-5, atol=1e-6)
  rest = x, jnp.ones(5), jax.random.key(2)
  features, logits, stats = model.features_train(variables, *rest)
  same, same_stats = model.apply_train(variables, *rest)
  np.testing.assert_array_equal(logits, same)
  jax.tree.map(np.testing.assert_array_equal, stats, same_stats)
  np.testing.assert_allclose(features @ layer['kernel'] + layer['bias'],
                             logits, rtol=1e-5, atol=1e-6)


def test_logits_that_no_dense_layer_made_have_no_features():
  assert make('scaled').features is None


def test_a_network_that_cannot_predict_says_why():
  with pytest.raises(checks.FieldError, match='model=always: cannot be call'):
    make('always')


def test_without_a_key_nothing_drops_out_but_statistics_move():
  model = make('net')
  variables = model.init(jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (5, *SHAPE))
  logits, stats = model.apply_train(variables, x, jnp.ones(5))
  same, _ = model.apply_train(variables, x, jnp.ones(5))
  other, other_stats = model.apply_train(variables, x, jnp.ones(5),
                                         jax.random.key(2))
  np.testing.assert_array_equal(logits, same)
  assert not np.allclose(logits, other)
  jax.tree.map(np.testing.assert_array_equal, stats, other_stats)
  whole = own.model('net', Net(3, rate=0.0), SHAPE, 3, None)
  np.testing.assert_allclose(
      logits, whole.apply_train(variables, x, jnp.ones(5))[0], rtol=1e-6)
  features, _, _ = model.features_train(variables, x, jnp.ones(5))
  assert features.shape[0] == 5


class Anything(nn.Module):
  """Takes all words, so that nobody knows whether it reads `train`."""

  @nn.compact
  def __call__(self, x, **words):
    x = nn.Dropout(.5, deterministic=not words.get('train', False))(x)
    return nn.Dense(3)(x.reshape(x.shape[0], -1))


def test_a_module_of_any_words_is_told_whether_it_trains():
  model = own.model('any', Anything(), SHAPE, 3, None)
  variables = model.init(jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (5, *SHAPE))
  whole = model.apply(variables, x)
  dropped, _ = model.apply_train(variables, x, None, jax.random.key(2))
  assert not np.allclose(whole, dropped)


def test_a_sequence_of_layers_is_a_model():
  module = nn.Sequential([lambda x: x.reshape(x.shape[0], -1), nn.Dense(4),
                          nn.relu, nn.Dense(3)])
  model = own.model('mlp', module, SHAPE, 3, None)
  variables = model.init(jax.random.key(0))
  x = jnp.ones((2, *SHAPE))
  logits, _ = model.apply_train(variables, x, None, jax.random.key(1))
  np.testing.assert_array_equal(logits, model.apply(variables, x))
  assert model.features is not None
