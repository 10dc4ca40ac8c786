"""FedCon: BYOL by hand, what travels and what stays, the server's two views."""
from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods, models
from fedjax_ssl.core import tree
from fedjax_ssl.core.local_training import Learner
from fedjax_ssl.core.types import Batch, Client, Context
from fedjax_ssl.methods import fedcon
from fedjax_ssl.methods.parts import assemble
from fedjax_ssl.models import last_layer
from tests import toy
from tests.methods import alternate_rounds, updates

KEY = toy.key(7)
SMALL = 'hidden=4'


def _views(rows, width=5, seed=0):
  return np.random.default_rng(seed).normal(size=(4, rows, width))


def test_likeness_by_hand():
  p, z, q, y = _views(6)
  mask = np.array([1, 0, 1, 1, 0, 1.])
  cosines = [np.sum(a * b, -1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(
      b, axis=-1) for a, b in ((p, y), (q, z))]
  want = -np.mean(cosines, 0)[mask > 0].mean()
  got = fedcon.likeness((p, z), (q, y), mask)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  # Neither lengths nor the order of the views matter.
  np.testing.assert_allclose(
      fedcon.likeness((3 * q, y), (p, .2 * z), mask), got, rtol=1e-5)
  np.testing.assert_allclose(
      fedcon.likeness((p, q), (q, p), mask), -1, rtol=1e-5)
  slope = jax.grad(lambda z: fedcon.likeness((p, z), (q, y), mask))(z)
  assert not slope.any()  # Targets are constants.


def test_a_rate_that_begins_anew_in_each_round():
  """Theirs comes a step late, and its first entry is 0."""
  steps, rate = 4, 0.3
  table = np.linspace(0, rate, 10 * steps)
  of = fedcon.restarted(rate, steps)
  np.testing.assert_allclose(
      [of(jnp.int32(t)) for t in range(12)], [rate, *table[:11]], rtol=1e-5)


@pytest.fixture(scope='module')
def round_():
  """Both records of a round with labels at the server, and its method."""
  task = toy.task('conv', labels_at='server')
  method = methods.make(f'fedcon({SMALL})', task)
  federation, _ = toy.federation('server')
  before = method.init(KEY, federation)
  return task, method, federation, before, *jax.jit(method.round)(
      before, federation, jnp.int32(0), KEY)


def test_the_last_layer_stays_at_the_server(round_):
  task, method, federation, before, _, metrics = round_
  place = last_layer.place(task.model)
  client = Client(
      jnp.int32(0), tree.take(federation.clients, 0),
      tree.take(before.memory, 0), federation.train, federation.validation,
      jnp.int32(0), jnp.int32(0))
  backbone = before.server.model._replace(params=last_layer.without(
      before.server.model.params, place))
  sent = jax.eval_shape(
      method.client_update, assemble.Server(backbone), client, KEY).message
  chex.assert_trees_all_equal_shapes(sent, backbone)
  share = tree.num_bytes(backbone) / tree.num_bytes(before.server.model)
  assert share < 0.9
  # Down to all that are drawn, up from those with rows.
  senders = metrics['num_participants'] / task.cohort_size
  assert 0 < senders < 1
  assert toy.means(metrics)['models_sent'] == pytest.approx(
      (1 + senders) * share)
  assert 'mask_rate' not in metrics  # No row has a pseudo-label.


def test_projector_and_target_are_a_clients_own(round_):
  _, _, federation, before, after, metrics = round_
  trained = np.asarray(after.memory.has_one)
  drawn = np.asarray(after.memory.projector.params['Dense_0']['kernel'])
  assert len({x.tobytes() for x in drawn[trained]}) == trained.sum()
  assert 0 < trained.sum() <= metrics['num_participants']
  assert not trained[np.asarray(federation.clients.num_unlabeled) == 0].any()
  for part in ('projector', 'target'):
    moved = np.zeros(toy.NUM_CLIENTS, bool)
    for a, b in zip(*(jax.tree.leaves(getattr(x.memory, part))
                      for x in (before, after)), strict=True):
      moved |= (np.asarray(a) != np.asarray(b)).reshape(len(a), -1).any(1)
    np.testing.assert_array_equal(moved, trained)


def test_who_comes_again_goes_on_with_its_own(round_):
  _, _, _, _, after, _ = round_
  sent = jax.tree.map(lambda x: x + 1, after.memory.target)
  begun = jax.vmap(fedcon._begun, (0, 0, None))(after.memory, sent, KEY)
  trained = np.asarray(after.memory.has_one)
  assert trained.any() and not trained.all()
  chex.assert_trees_all_equal(*(tree.take(memory, np.flatnonzero(trained))
                                for memory in (after.memory, begun)))
  new = np.flatnonzero(~trained)
  chex.assert_trees_all_equal(*(tree.take(target, new)
                                for target in (begun.target, sent)))
  assert all(x.any() for x in begun.projector.params['Dense_0']['kernel'])


def _settings(**changes):
  return fedcon._Settings(**{
      'contrast_rate': .1, 'contrast_momentum': .9, 'target_decay': .9,
      'teacher_decay': .5, 'restarts': False, 'consistency_weight': 1.0,
      'ramp': .5, 'hidden': 4, 'at_clients': False, **changes})


def _rounds(text, count, **changes):
  task = alternate_rounds.task('conv', **changes)
  return alternate_rounds.rounds(KEY, text, count, task)


def test_a_server_that_hears_nothing_trains_on_its_labels():
  """Equal views agree: what is left is their cross entropy, a round more."""
  still = f'contrast_rate=0.0, {SMALL}'
  text = f"fedcon(profile='code', ramp=0.0, consistency_weight=9.0, {still})"
  _, first, _ = _rounds(text, 1)
  _, after, metrics = _rounds(text, 2)
  _, alone, _ = _rounds('fedavg', 3)
  chex.assert_trees_all_close(after.server.model.params,
                              alone.server.model.params, rtol=1e-4, atol=1e-5)
  assert metrics['num_participants'] == sum(map(bool, toy.UNLABELED))
  chex.assert_trees_all_equal(first.memory.projector.params,
                              after.memory.projector.params)


def test_a_teacher_that_stays_behind_is_listened_to():
  """It follows after each step; with weight 0 nobody hears it."""
  task = alternate_rounds.task(labels_at='server', local_steps=2)
  federation, _ = toy.federation('server')
  method = methods.make('fedavg', task)
  model = method.init(KEY, federation).server.model
  other = jax.tree.map(jnp.cos, model.params)
  context = Context(jnp.int32(0), federation.train, federation.validation,
                    federation.server)

  @functools.partial(jax.jit, static_argnames='decay')
  def trained(weight, decay):
    s = _settings(teacher_decay=decay, consistency_weight=weight, ramp=0.0)
    return fedcon._on_labels(
        task, s, 0, fedcon.Server(model, other), context, KEY)[0]

  heard, deaf = trained(3.0, decay=1.0), trained(0.0, decay=1.0)
  chex.assert_trees_all_equal(heard.teacher, other)
  assert tree.global_norm(tree.subtract(
      heard.model.params, deaf.model.params)) > 1e-3
  moved = trained(0.0, decay=0.5)
  chex.assert_trees_all_close(moved.model, deaf.model)
  # Before the first step, and before the second.
  after_one = jax.tree.map(lambda x, y: (x + y) / 2, other, model.params)
  rest = jax.tree.map(lambda x, y: 2 * x - y, moved.teacher, after_one)
  assert 1e-3 < tree.global_norm(tree.subtract(rest, model.params)) < (
      tree.global_norm(tree.subtract(moved.model.params, model.params)))


def test_consistency_rises_over_rounds():
  task = toy.task('conv', labels_at='server')  # Of 8 rounds.
  s = _settings(consistency_weight=2.0, ramp=.5)
  found = [float(fedcon._weight_of(task, s, jnp.int32(t))) for t in range(6)]
  np.testing.assert_allclose(found, [2 * np.exp(-5 * (1 - min(t / 4, 1))**2)
                                     for t in range(6)], rtol=1e-5)
  at_once = fedcon._weight_of(task, s._replace(ramp=0.0), jnp.int32(0))
  assert at_once == 2


def _client(text, who, **changes):
  return updates.whole(f'fedcon({text}, {SMALL})', who, model='conv', **changes)


def test_targets_follow_the_network():
  """By a quarter of what is left to it, in a round of one step."""
  made = _client('target_decay=.75, contrast_rate=1.0', updates.UNKNOWN)
  task = toy.task('conv')
  received = methods.make('fedcon', task).init(
      updates.KEY, toy.federation()[0]).server.model
  place = last_layer.place(task.model)
  begun, moves = (last_layer.without(x, place) for x in (
      received.params, made.message.params))
  chex.assert_trees_all_close(
      made.memory.target, tree.add(begun, tree.scale(moves, .25)), rtol=1e-5,
      atol=1e-7)
  assert tree.global_norm(moves) > 1e-3
  # Rows without labels leave the last layer.
  assert not any(map(np.any, jax.tree.leaves(
      last_layer.at(made.message.params, place))))


def test_what_fills_up_a_batch_moves_nothing():
  """Neither what is sent nor projector, target and optimizer."""
  task, s = toy.task('conv', labels_at='server'), _settings()
  federation, _ = toy.federation('server')
  state = methods.make(f'fedcon({SMALL})', task).init(KEY, federation)
  backbone, lars = fedcon._backbone(task, state.server.model), fedcon._lars(
      s, s.contrast_rate)
  memory = fedcon._begun(tree.take(state.memory, 0), backbone.params, KEY)
  learner = Learner(backbone, ((), lars.init(
      (backbone.params, memory.projector.params))), memory)

  @jax.jit
  def moved(images):
    rows = Batch(images, jnp.full(6, -1), jnp.array([1., 1, 1, 1, 0, 0]))
    return fedcon._contrasted(task, s, learner, rows, lars, KEY)

  images = jnp.asarray(federation.train.inputs)[:6]
  found = moved(images)
  chex.assert_trees_all_close(
      moved(images.at[4:].set(255 - images[4:])), found, rtol=1e-5, atol=1e-7)
  assert tree.global_norm(tree.subtract(
      found[0].memory.projector.params, memory.projector.params)) > 1e-5


@pytest.mark.parametrize('side, hidden', [(8, 256), (64, 12288)])
def test_the_projector_widens_by_eight_and_not_beyond_its_bound(side, hidden):
  """Features here are the pixels of a linear network."""
  shape = (side, side // 2, 1)
  task = dataclasses.replace(toy.task(), model=models.make(
      'linear', num_classes=toy.NUM_CLASSES, input_shape=shape))
  method = methods.make('fedcon', task)
  memory = jax.eval_shape(
      lambda: method.init(KEY, toy.federation()[0])).memory
  width = side * side // 2
  assert memory.projector.params['Dense_0']['kernel'].shape == (
      toy.NUM_CLIENTS, width, hidden)


def test_labels_of_clients_teach_as_the_servers():
  """Where views are equal and the network its own teacher: cross entropy."""
  for who in (updates.KNOWN, updates.BOTH):
    ours = _client('contrast_rate=0.0', who).message
    plain = updates.whole('fedavg', who, model='conv').message
    chex.assert_trees_all_close(ours.params, plain.params, rtol=1e-4, atol=1e-6)
  one = _client('target_decay=.75, contrast_rate=1.0', updates.KNOWN)
  assert not one.memory.has_one and one.weight == 1
  both = _client('target_decay=.75, contrast_rate=1.0', updates.BOTH).message
  assert tree.global_norm(tree.subtract(both.params, ours.params)) > 1e-3


def test_a_network_of_one_layer_has_nothing_to_send():
  federation, _ = toy.federation('server')
  method = methods.make('fedcon', toy.task(labels_at='server'))
  with pytest.raises(ValueError, match='nothing to send'):
    method.init(KEY, federation)
