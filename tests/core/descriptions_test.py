"""Records are shown in one short line, whatever they hold."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_ssl
from fedjax_ssl.core import descriptions
from fedjax_ssl.data import federation as federation_lib
from tests import toy


def test_numbers_have_the_word_that_fits():
  assert descriptions.count(1, 'class', 'classes') == '1 class'
  assert descriptions.count(2000, 'client') == '2,000 clients'
  assert descriptions.count(0, 'device') == '0 devices'
  assert descriptions.count(2, 'class', 'classes') == '2 classes'


def test_records_say_what_they_hold():
  federation, _ = toy.federation()
  assert repr(federation) == (
      'Federation(6 clients, 19 labeled and 33 unlabeled rows; train 53 of '
      'uint8[8, 8, 1]; validation 6 of uint8[8, 8, 1]; test 20 of '
      'uint8[8, 8, 1]; 3 classes)')
  assert repr(federation.clients) == (
      'Shard(6 clients, 19 labeled and 33 unlabeled rows)')
  at_server, _ = toy.federation('server')
  assert 'server 19 labeled and 0 unlabeled rows' in repr(at_server)
  method = fedjax_ssl.methods.fedavg.fedavg(toy.task(), keep_local=True)
  assert repr(method).startswith('Method(init, round, predict')
  state = method.init(jax.random.key(0), federation)
  assert repr(state) == ('State(round 0; server: 195 numbers in 2 arrays; '
                         'memory: 1,170 numbers in 2 arrays)')
  assert repr(toy.task()).startswith('Task(3 classes; ')


def test_what_is_not_there_is_shown_too():
  """Inside a trace, as shapes, as axes, and when a program has taken it."""
  federation, _ = toy.federation()
  seen: list[str] = []
  def look(federation):
    seen.append(repr(federation))
    return federation
  jax.make_jaxpr(look)(federation)
  shapes = repr(jax.eval_shape(lambda f: f, federation))
  axes = repr(federation_lib.seed_axes(federation_lib.stack([federation])))
  for text in (*seen, shapes, axes):
    assert text.startswith('Federation(') and len(text) < 300
    assert '\n' not in text
  state = fedjax_ssl.State({'w': jnp.ones(3)}, (), jnp.int32(1))
  jax.tree.map(lambda x: x.delete(), state)
  assert repr(state) == ('State(round int32[]; server: 3 numbers in 1 array; '
                         'memory: nothing)')


def test_train_measures():
  federation, _ = toy.federation()
  result = fedjax_ssl.train(
      fedjax_ssl.methods.fedavg.fedavg(toy.task()), federation, num_rounds=2)
  assert result.metrics['round'].tolist() == [1, 2]
  assert result.metrics['accuracy'].dtype == np.float64
  assert repr(result).startswith('Result(round 2, 1 seed, accuracy ')
