"""Text classifiers, and FedSSL on texts."""
from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods, models
from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Client, Examples
from fedjax_ssl.data import augment, preprocess
from fedjax_ssl.methods.fedssl import gmixup
from fedjax_ssl.methods.parts import assemble, averaging
from fedjax_ssl.models import gan
from tests import toy
from tests.thorough import wider

NAMES = ('text_mean(vocabulary=12, size=4)',
         'text_cnn(vocabulary=12, size=4, width=5)')
names = pytest.mark.parametrize('name', NAMES)


def _model(name, shape=(6,)):
  model = models.make(name, num_classes=3, input_shape=shape)
  return model, model.init(toy.key(0))


@names
def test_tokens_and_their_vectors_give_the_same_logits(name):
  model, variables = _model(name)
  tokens = jnp.array([[2, 5, 11, 1, 0, 0], [3, 3, 0, 0, 0, 0]])
  vectors = model.embed(variables, tokens)
  chex.assert_shape(vectors, (2, 6, 4))
  assert not vectors[0, 4:].any() and vectors[0, :4].all()
  np.testing.assert_allclose(model.apply(variables, tokens),
                             model.apply(variables, vectors), rtol=1e-6)


@names
def test_padding_and_large_ids(name):
  model, variables = _model(name)
  tokens = jnp.array([[2, 5, 0, 0, 0, 0], [2, 99, 0, 0, 0, 0],
                      [2, 1, 0, 0, 0, 0]])
  logits = model.apply(variables, tokens)
  np.testing.assert_array_equal(logits[1], logits[2])
  assert not np.allclose(logits[0], logits[1])


def test_mean_does_not_see_the_order_and_windows_do():
  tokens = jnp.array([[2, 3, 4, 5, 6, 0], [6, 4, 3, 5, 2, 0]])
  for name, same in zip(NAMES, (True, False), strict=True):
    model, variables = _model(name)
    logits = model.apply(variables, tokens)
    assert np.allclose(logits[0], logits[1], atol=1e-6) == same


@names
def test_vectors_made_beforehand_need_no_table(name):
  model, variables = _model(name, (6, 7))
  assert model.embed is None
  chex.assert_shape(model.apply(variables, jnp.ones((2, 6, 7))), (2, 3))


@names
def test_refuses_images(name):
  with pytest.raises(ValueError, match='tokens'):
    models.make(name, num_classes=3, input_shape=(8, 8, 1))


def _texts(kind):
  """The toy federation with texts: words of a class, among others."""
  federation, _ = toy.federation()
  rng = np.random.default_rng(0)
  def make(part):
    labels = np.asarray(part.labels)
    inputs: np.ndarray = rng.integers(5, 12, (labels.size, 6))
    inputs[:, :3] = 2 + labels[:, None]
    if kind == 'vectors':
      inputs = np.eye(12, dtype=np.float16)[inputs]
    return Examples(jnp.asarray(inputs), part.labels)
  return dataclasses.replace(federation, **{
      name: make(getattr(federation, name))
      for name in ('train', 'validation', 'test')})


def _task(kind):
  shape = (6,) if kind == 'tokens' else (6, 12)
  return dataclasses.replace(
      toy.task(), preprocess=preprocess.as_floats,
      weak=augment.make_weak('none'),
      strong=augment.make_strong('token_dropout'),
      model=models.make(NAMES[0], num_classes=3, input_shape=shape))


@pytest.mark.parametrize('kind, count', [('tokens', 40),
                                         *wider(('vectors', 100))])
def test_fedssl_learns_texts(kind, count):
  federation = _texts(kind)
  method = methods.make('fedssl(gan_width=4, noise_size=3)', _task(kind))
  state = method.init(toy.key(0), federation)
  one = jax.jit(method.round)
  first = state
  for i in range(count):
    state, metrics = one(state, federation, jnp.int32(i), toy.key(i))
  chex.assert_tree_all_finite((state, toy.means(metrics)))
  assert tree.global_norm(tree.subtract(
      first.server.generator, state.server.generator)) > 0
  assert method.predict is not None
  logits = method.predict(state.server, federation.test.inputs)
  assert (logits.argmax(-1) == federation.test.labels).mean() > 0.8


def test_only_the_classifier_trains_the_word_vectors():
  """G and D see them as constants; else reconstruction would shrink them."""
  federation, task = _texts('tokens'), _task('tokens')
  state = methods.make('fedssl(gan_width=4, noise_size=3)', task).init(
      toy.key(0), federation)
  nets = state.server.nets
  rows = gmixup.Rows(federation.train.inputs[:5], federation.train.labels[:5],
                     *[jnp.ones(5)] * 3)
  choices = gmixup.Choices(2, 2.0, .75, 3, True, True, 'none', 'mixed', 'sum',
                           'non_saturating', 0.0)
  def table_gradient(real_data):
    problem = gmixup.Problem(task, gan.make(width=4), dataclasses.replace(
        choices, real_data=real_data))
    def cost(params):
      model = nets.model._replace(params=params)
      made = gmixup.material(problem, model, rows, toy.key(1))
      return gmixup.joint_cost(
          problem, (params, nets.generator), nets._replace(model=model),
          made)[0]
    return tree.global_norm(
        jax.jit(jax.grad(cost))(nets.model.params)['embedding'])
  assert table_gradient('none') == 0
  assert table_gradient('labeled') > 0


def test_mixmatch_blends_texts_as_their_vectors():
  """A step on tokens moves the last layer as one on their vectors does."""
  federation = _texts('tokens')
  tokens, vectors = (dataclasses.replace(
      _task(kind), local_steps=1, strong=augment.make_strong('none'))
      for kind in ('tokens', 'vectors'))
  vectors = dataclasses.replace(vectors, model=models.make(
      NAMES[0], num_classes=3, input_shape=(6, 4)))
  model = tokens.model.init(toy.key(0))
  embedded = dataclasses.replace(federation, train=federation.train._replace(
      inputs=tokens.model.embed(model, federation.train.inputs)))
  def moved(task, model, federation):
    update = methods.make('mixmatch', task).client_update
    assert update is not None
    return jax.jit(update)(assemble.Server(model),
                           Client(jnp.int32(0),
                                  tree.take(federation.clients, 0),
                                  averaging._Memory(None, None),
                                  federation.train, federation.validation,
                                  jnp.int32(0), jnp.int32(0)),
                           toy.key(1)).message.params
  one = moved(tokens, model, federation)
  other = moved(vectors, model, embedded)
  table, fixed = (params.pop('embedding') for params in (one, other))
  chex.assert_trees_all_close(one, other, rtol=1e-4, atol=1e-6)
  assert tree.global_norm(table) > 0 == tree.global_norm(fixed)
  assert tree.global_norm(one) > 0


def test_mixmatch_refuses_ids_without_vectors_in_one_line():
  task, federation = _task('tokens'), _texts('tokens')
  method = methods.make('mixmatch', dataclasses.replace(
      task, model=task.model._replace(embed=None)))
  state = method.init(toy.key(0), federation)
  with pytest.raises(ValueError, match='cannot be blended') as error:
    jax.eval_shape(lambda state: method.round(
        state, federation, jnp.int32(0), toy.key(0)), state)
  assert '\n' not in str(error.value)
