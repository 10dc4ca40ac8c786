"""FedDure's rounds: what persists, what travels, what the profiles do."""
from __future__ import annotations

import dataclasses
import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import losses, methods
from fedjax_ssl.core import optimizers, tree
from fedjax_ssl.core.types import Batch, Context
from fedjax_ssl.data.batching import Pair
from fedjax_ssl.methods.feddure import meta_labels
from tests import toy
from tests.methods import updates
from tests.methods.averaging_test import one_round

KEY = toy.key(8)
CIFAR = meta_labels.Schedule()
CINIC = meta_labels.Schedule(100, 10, 100, 0)


def test_without_regulators_it_is_fixmatch():
  a = one_round('feddure(regulators="none", threshold=0.4)')
  b = one_round('fixmatch(threshold=0.4)')
  chex.assert_trees_all_close(a[1].server.model, b[1].server.model, rtol=1e-5,
                              atol=1e-6)
  np.testing.assert_allclose(a[2]['mask_rate'], b[2]['mask_rate'])
  assert 0 < a[2]['mask_rate'] < 1


def moved(before, after):
  return float(tree.global_norm(tree.subtract(after, before)))


@functools.lru_cache
def everyone(text):
  """(start, round) of a method on the toy federation, all clients in."""
  federation, _ = toy.federation()
  method = methods.make(text, toy.task(cohort_size=toy.NUM_CLIENTS))
  run = jax.jit(lambda state, round_: method.round(
      state, federation, round_, toy.key(1)))
  return method.init(toy.key(0), federation), run


def test_f_reg_stays_on_the_clients_that_have_labels_and_images():
  before, run = everyone('feddure')
  after, metrics = run(before, jnp.int32(0))
  for i, rows in enumerate(zip(toy.LABELED, toy.UNLABELED, strict=True)):
    gone = moved(*(tree.take(s.memory.fine, i) for s in (before, after)))
    assert (gone > 0) == all(rows)
  model = tree.num_bytes(before.server.model)
  assert metrics['bytes_down'] == toy.NUM_CLIENTS * model
  # One has no rows, and sends nothing.
  assert metrics['bytes_up'] == (toy.NUM_CLIENTS - 1) * model


@pytest.mark.parametrize('knobs, places', [
    ('', ['memory.fine']), ('keep_fine=False', []), ('regulators="none"', []),
    ('averaged="last"', ['server.coarse', 'server.fine']),
    ('averaged="all", regulators="fine"', ['server.fine']),
    ('averaged="last", regulators="coarse"', ['server.coarse']),
    ('profile="official", keep_local=True', ['memory.model'])])
def test_what_is_kept_where(knobs, places):
  federation, _ = toy.federation()
  state = methods.make(f'feddure({knobs})', toy.task()).init(KEY, federation)
  found = [f'{part}.{name}' for part in ('memory', 'server')
           for name, value in getattr(state, part)._asdict().items()
           if jax.tree.leaves(value)]
  assert found == sorted([*places, 'server.model'],
                         key=lambda x: (x[:6], x != 'server.model'))


def test_the_average_over_all_rounds_moves_by_its_share():
  """The k-th round adds a k-th of its change; the local model adds all."""
  start = everyone('feddure(averaged="last")')[0].server
  change = jax.tree.map(jnp.ones_like, start)
  federation, _ = toy.federation()
  context = Context(jnp.int32(3), federation.train, federation.validation,
                    federation.server)
  def after(which):
    method = methods.make(f'feddure(averaged="{which}")', toy.task())
    assert method.aggregate is not None
    server, _ = method.aggregate(start, change, None, context, None)
    return tree.subtract(server, start)
  chex.assert_trees_all_close(after('last'), change, atol=1e-6)
  chex.assert_trees_all_close(after('all'), change._replace(
      coarse=tree.scale(change.coarse, 0.25),
      fine=tree.scale(change.fine, 0.25)), atol=1e-6)


def test_c_reg_begins_at_the_received_model_or_at_the_average():
  """A model far from the averaged C-reg makes another reward."""
  def reward(text):
    state, run = everyone(text)
    if 'averaged' in text:
      after = run(state, jnp.int32(0))[0].server
      assert moved(state.server.coarse, after.coarse) > 0
      assert moved(state.server.fine, after.fine) > 0
    far = jax.tree.map(lambda x: 3 * x, state.server.model)
    state = state._replace(server=state.server._replace(model=far))
    return toy.means(run(state, jnp.int32(0))[1])['reward']
  assert not np.isclose(reward('feddure'), reward('feddure(averaged="last")'),
                        rtol=1e-3)


def test_f_regs_opinion_is_the_weight_of_pseudo_labels():
  _, weights = updates.judged('feddure')
  assert ((weights > 0) & (weights < 1)).all() and np.ptp(weights) > 0
  _, weights = updates.judged('feddure', lambda row: row._replace(
      fine=row.fine._replace(out_bias=jnp.float32(90))))
  np.testing.assert_array_equal(weights, 1)


@pytest.mark.parametrize('knobs, bar', [
    ('profile="official"', 0.6), ('regulators="none"', 0.95),
    ('regulators="coarse", threshold=0.7', 0.7)])
def test_without_f_reg_a_label_counts_from_the_threshold_on(knobs, bar):
  """By default from that of the profile on."""
  federation, _ = toy.federation()
  method = methods.make(f'feddure({knobs})', toy.task())
  server = method.init(KEY, federation).server
  zeros = tree.zeros_like(server.model.params['Dense_0'])
  assert method.pseudo_label is not None
  for top, weight in ((bar - .01, 0), (bar + .01, 1)):
    bias = jnp.log(jnp.array([(1 - top) / 2, top, (1 - top) / 2]))
    labels, weights = method.pseudo_label(
        server._replace(model=server.model._replace(
            params={'Dense_0': {**zeros, 'bias': bias}})),
        (), federation.train.inputs[:2])
    np.testing.assert_array_equal(labels, 1)
    np.testing.assert_array_equal(weights, weight)


def test_the_virtual_step_has_the_papers_rate():
  knob = inspect.signature(methods.METHODS['feddure']).parameters
  assert knob['virtual_rate'].default == 0.0005


def test_a_client_without_rows_keeps_its_last_model():
  """Not the one that it has received."""
  before, run = everyone('feddure(regulators="none", keep_local=True)')
  before = before._replace(memory=tree.scale(before.memory, 2.0))
  after, _ = run(before, jnp.int32(0))
  for i in range(toy.NUM_CLIENTS):
    gap = moved(*(tree.take(s.memory.model, i) for s in (before, after)))
    assert (gap == 0) == (i == toy.NOBODY)


@pytest.mark.parametrize('profile, without', [
    ('paper', 1 / 6), ('official', 2 / 7)])
def test_networks_with_dropout_drop_in_training(profile, without):
  """Every pass has a key, but for the weak view that gives the labels."""
  keys = []
  task = toy.task()
  def apply_train(model, inputs, mask, key=None):
    keys.append(key)
    return task.model.apply_train(model, inputs, mask, key)
  method = methods.make(
      f'feddure(profile="{profile}")', dataclasses.replace(
          task, model=task.model._replace(apply_train=apply_train)))
  federation, _ = toy.federation()
  jax.eval_shape(lambda state: method.round(
      state, federation, jnp.int32(0), KEY), method.init(KEY, federation))
  assert sum(key is None for key in keys) == without * len(keys)


def test_labels_must_be_at_the_clients():
  with pytest.raises(ValueError, match='labels_at=server: give clients'):
    methods.make('feddure', toy.task(labels_at='server'))


def factors(schedule, steps, **knobs):
  return np.array([meta_labels.factor(jnp.int32(i), schedule, **knobs)
                   for i in steps])


def test_warm_up_of_the_official_code():
  np.testing.assert_allclose(factors(CIFAR, range(10)), np.arange(10) / 10)
  np.testing.assert_allclose(factors(CIFAR, range(5), wait=2),
                             [0, 0, 2 / 12, 3 / 12, 4 / 12], rtol=1e-6)
  np.testing.assert_allclose(factors(CINIC, [0, 50, 99]), [0, .5, .99])
  np.testing.assert_allclose(factors(CINIC, range(100, 110)), 5 * [1, 0],
                             atol=1e-6)


def test_a_client_with_rows_takes_the_steps_of_both_phases():
  clients = toy.federation()[0].clients
  steps = [int(meta_labels.num_steps(meta_labels.Schedule(5, 4), tree.take(
      clients, i))) for i in range(toy.NUM_CLIENTS)]
  assert steps == [0 if i == toy.NOBODY else 9
                   for i in range(toy.NUM_CLIENTS)]


def test_while_c_reg_waits_there_is_no_reward():
  """In the first 2 of its steps its rate is 0; the teacher moves on."""
  before, after, metrics = one_round(
      'feddure(profile="official", fine_tune_steps=1, main_steps=2)',
      cohort_size=toy.NUM_CLIENTS)
  assert metrics['reward'] == 0
  assert moved(before.server, after.server) > 0
  assert metrics['num_participants'] == 5
  def rows(of, size, steps):  # In batches; the stream begins anew.
    return sum(min(size, n - size * (t % max(-(-n // size), 1)))
               for n in of for t in range(steps))
  first, known = rows(toy.LABELED, 3, 1), rows(toy.LABELED, 3, 2)
  unknown = rows(toy.UNLABELED, 4, 2)
  for name, passes in (('forward', first + 3 * known + 3 * unknown),
                       ('backward', first + known + 2 * unknown)):
    np.testing.assert_allclose(metrics[name + '_passes'], passes / 5,
                               rtol=1e-6)


def test_an_official_step_by_hand():
  """The teacher's gradient from its parts, on the linear network."""
  federation, _ = toy.federation()
  same = lambda key, x: x  # noqa: E731
  task = toy.task(weak=same, strong=lambda key, x: 255 - x, optimizer=(
      optimizers.make('sgd', learning_rate=1.0)))
  images, labels = map(jnp.asarray, federation.train)
  known = Batch(images[:8], labels[:8], jnp.ones(8))
  rows = Batch(images[8:16], jnp.full(8, -1), jnp.array([1., 1, 0, 1, 1, 1, 1,
                                                         1]))
  schedule = meta_labels.Schedule(fine_tune=3, main=5, warmup=10, wait=1)
  optimizer = task.optimizer(jnp.int32(0))
  student = task.model.init(KEY).params
  learner = meta_labels.start(task.model.init(toy.key(0)), optimizer)
  learner = learner._replace(student=student, done=jnp.int32(5))
  step = jax.jit(meta_labels.main_step(task, schedule, optimizer,
                                       threshold=0.5))
  after, metrics = step(learner, Pair(known, rows, jnp.float32(1)), KEY)

  def logits(params, batch):
    return task.apply(learner.teacher._replace(params=params), batch.inputs)
  def mean(values, weights=rows.mask):
    return (weights * values).sum() / rows.mask.sum()
  def nll(z, target):
    return -jnp.take_along_axis(jax.nn.log_softmax(z), target[:, None], 1)[:, 0]
  def supervised(params):
    return nll(logits(params, known), known.labels).mean()

  weak = logits(learner.teacher.params, rows)
  p = jax.nn.softmax(weak)
  g = jax.grad(lambda s: mean(nll(logits(s, rows), p.argmax(-1))))(student)
  moved = jax.tree.map(lambda s, g: s - 2 / 11 * g, student, g)
  chex.assert_trees_all_close(after.student, moved, rtol=1e-5, atol=1e-6)
  dot = supervised(moved) - supervised(student)
  np.testing.assert_allclose(metrics['reward'].total / 8, -dot, rtol=1e-3)
  bold = rows._replace(inputs=255 - rows.inputs)

  def teacher_loss(params):
    z = logits(params, bold)
    soft = -(p * jax.nn.log_softmax(z)).sum(-1)
    return (supervised(params)
            + 8 * 3 / 20 * mean(soft, rows.mask * (p.max(-1) >= 0.5))
            + dot * mean(nll(z, z.argmax(-1))))
  params = learner.teacher.params
  want = jax.tree.map(lambda t, g: t - 0.5 * g, params,
                      jax.grad(teacher_loss)(params))
  chex.assert_trees_all_close(after.teacher.params, want, rtol=1e-4,
                              atol=1e-5)
  np.testing.assert_allclose(
      metrics['labeled_loss'].total / 8,
      losses.cross_entropy(logits(params, known), known.labels, known.mask)[0],
      rtol=1e-5)


@pytest.mark.parametrize('kind', ['labeled', 'unlabeled'])
def test_under_weight_decay_official_networks_rest_without_their_rows(kind):
  """The teacher in its supervised steps, and the student, which labels none."""
  federation, _ = toy.federation()
  task = toy.task(optimizer=optimizers.make(
      'sgd', learning_rate=1.0, weight_decay=0.1))
  images, labels = map(jnp.asarray, federation.train)
  masks = {'labeled': jnp.ones(8), 'unlabeled': jnp.ones(8), kind: jnp.zeros(8)}
  pair = Pair(Batch(images[:8], labels[:8], masks['labeled']),
              Batch(images[8:16], labels[8:16], masks['unlabeled']),
              jnp.float32(1))
  schedule = meta_labels.Schedule(fine_tune=1, main=2, warmup=0, wait=0)
  optimizer = task.optimizer(jnp.int32(0))
  learner = meta_labels.start(task.model.init(KEY), optimizer)
  if kind == 'labeled':
    after, _ = jax.jit(meta_labels.fine_tune_step(task, schedule, optimizer))(
        learner, pair, KEY)
    chex.assert_trees_all_equal(after.teacher.params, learner.teacher.params)
  else:
    after, _ = jax.jit(meta_labels.main_step(task, schedule, optimizer))(
        learner._replace(done=jnp.int32(1)), pair, KEY)
    chex.assert_trees_all_equal(after.student, learner.student)
  chex.assert_tree_all_finite(after)
