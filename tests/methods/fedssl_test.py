"""Laws of FedSSL: what each cost reads, its ablations, and that it learns."""
from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import losses, methods, models
from fedjax_ssl.core.types import Batch
from fedjax_ssl.data.batching import Pair
from fedjax_ssl.losses import adversarial
from fedjax_ssl.methods import fedssl
from fedjax_ssl.methods.fedssl import gmixup
from fedjax_ssl.methods.fedssl import method as fedssl_method
from fedjax_ssl.models import gan
from tests import toy

KNOBS = 'gan_width=4, noise_size=3'


def _choices(**changes):
  return dataclasses.replace(gmixup.Choices(
      num_views=2, exponent=2.0, alpha=0.75, noise_size=3, use_real=True,
      use_rec=True, real_data='all', condition='mixed', rec_over='sum',
      generator_kind='non_saturating', ramp=0.0), **changes)


def _problem(**changes):
  return gmixup.Problem(toy.task(), gan.make(width=4), _choices(**changes))


def jitted(function, problem):
  """The function of a problem, compiled."""
  return jax.jit(functools.partial(function, problem))


@functools.lru_cache
def _batch(known=1.0):
  """Arguments of the costs on 6 rows of the toy federation, two masked."""
  federation, _ = toy.federation()
  rows = gmixup.Rows(
      jnp.asarray(federation.train.inputs[:6]),
      jnp.asarray(federation.train.labels[:6]),
      jnp.full(6, known), jnp.array([1., 1., 0., 1., 1., 0.]), jnp.ones(6))
  state = methods.make(f'fedssl({KNOBS})', toy.task()).init(
      toy.key(3), federation)
  nets = state.server.nets
  made = jitted(gmixup.material, _problem())(
      nets.model, rows, toy.key(4))
  return rows, nets, made


@functools.lru_cache
def _joint(**changes):
  """The compiled cost (nets, made) -> (loss, (stats, metrics))."""
  problem = _problem(**changes)
  return jax.jit(lambda nets, made: gmixup.joint_cost(
      problem, (nets.model.params, nets.generator), nets, made))


def test_word_vectors_that_nothing_trains_are_refused():
  network = models.make('text_mean(vocabulary=9, size=2)', num_classes=3,
                        input_shape=(4,))
  task = dataclasses.replace(
      toy.task(), model=network, preprocess=lambda x: x)
  first, federation = np.arange(4, dtype=np.int32), toy.federation()[0]
  count = federation.train.labels.shape[0]
  texts, vectors = (dataclasses.replace(
      federation, train=federation.train._replace(inputs=np.stack([x] * count)))
      for x in (first, np.ones((4, 2), np.float32)))
  method = methods.make(f"fedssl({KNOBS}, real_data='none')", task)
  with pytest.raises(ValueError, match="real_data='none' would leave word vec"):
    jax.eval_shape(lambda: method.init(toy.key(0), texts))
  jax.eval_shape(lambda: method.init(toy.key(0), vectors))
  jax.eval_shape(lambda: methods.make(f'fedssl({KNOBS})', task).init(
      toy.key(0), texts))


def test_material_is_what_the_paper_draws():
  rows, nets, made = _batch()
  np.testing.assert_array_equal(
      made.labels, jax.nn.one_hot(rows.labels, toy.NUM_CLASSES))
  assert ((made.noise >= 0) & (made.noise < 1)).all()
  assert ((made.lam >= 0) & (made.lam <= 1)).all()
  np.testing.assert_array_equal(made.target.sum(-1), 1.0)
  _, _, unknown = _batch(0.0)
  np.testing.assert_allclose(unknown.labels.sum(-1), 1.0, rtol=1e-5)
  assert not (unknown.labels == made.labels).all()
  # Sharpened predictions: surer than any prediction, and the same class.
  views = jnp.stack([toy.task().apply(nets.model, toy.shift(k, rows.inputs))
                     for k in jax.random.split(toy.key(0), 8)])
  assert unknown.labels.max(-1).mean() > jax.nn.softmax(views).mean(0).max(
      -1).mean()


def test_every_class_is_drawn_to_blend_with():
  rows, nets, _ = _batch()
  many = jax.tree.map(lambda x: jnp.concatenate([x] * 20), rows)
  made = jitted(gmixup.material, _problem())(nets.model, many, toy.key(4))
  assert (made.target.sum(0) > 20).all()


def test_pseudo_labels_are_the_sharpened_mean_over_views():
  """Each view has draws of its own."""
  rows, nets, made = _batch(0.0)
  task, keys = toy.task(), jax.random.split(toy.key(4), 5)
  p = np.mean([jax.nn.softmax(task.apply(
      nets.model, task.weak(key, rows.inputs)))
               for key in jax.random.split(keys[1], 2)], 0)
  np.testing.assert_allclose(
      made.labels, p**2 / (p**2).sum(-1, keepdims=True), rtol=1e-4)


def test_the_weight_of_rows_without_labels_rises():
  _, nets, made = _batch(0.0)
  none, half, full = (
      toy.means(_joint(ramp=1.0)(nets, made._replace(
          progress=jnp.full(6, progress)))[1][1])
      for progress in (0.0, 0.5, 1.0))
  for name in ('mixup_loss', 'unlabeled_loss'):
    assert full[name] > 0.1 and none[name] == 0
    np.testing.assert_allclose(half[name], full[name] / 2, rtol=1e-5)


def test_joint_cost_is_the_sum_of_the_papers_terms():
  _, nets, made = _batch()
  problem = _problem()
  got, (_, metrics) = _joint()(nets, made)
  fake, again = jitted(gmixup.generate, problem)(
      nets.generator, made, made.lam, jnp.ones(6))
  blend = losses.mixup(made.lam, made.labels, made.target)
  apply, judge = map(jax.jit, (toy.task().model.apply, problem.networks.judge))
  rows = np.flatnonzero(made.mask)
  def entropy(logits, target):
    return -(target * jax.nn.log_softmax(logits))[rows].sum(-1).mean()
  judged = judge(nets.discriminator, fake, blend)[rows]
  g = np.exp(np.maximum(made.lam, 1 - made.lam) - 1)[rows]
  terms = {
      'mixup_loss': entropy(apply(nets.model, fake), blend),
      'labeled_loss': entropy(apply(nets.model, made.real), made.labels),
      'realism_loss': (-g * np.log(jax.nn.sigmoid(judged))).mean(),
      'reconstruction': ((again - made.real)[rows] ** 2).sum() / len(rows)}
  for name, want in terms.items():
    np.testing.assert_allclose(
        metrics[name].total / metrics[name].rows, want, rtol=1e-4)
  np.testing.assert_allclose(got, sum(terms.values()), rtol=1e-4)


@pytest.mark.parametrize('kind', ['saturating', 'hinge'])
def test_discriminator_cost_is_equation_6(kind):
  _, nets, made = _batch()
  problem = _problem(condition='target', generator_kind=kind)
  got = jitted(gmixup.discriminator_cost, problem)(
      nets.discriminator, nets, made)
  fake, = jitted(gmixup.generate, problem)(nets.generator, made, made.lam)
  judge = functools.partial(
      jax.jit(problem.networks.judge), nets.discriminator)
  g = losses.realism_weight(made.lam)
  real, made_up = judge(made.real, made.labels), judge(fake, made.target)
  rows = (jax.nn.relu(1 - real) + g * jax.nn.relu(1 + made_up)
          if kind == 'hinge' else
          -(np.log(jax.nn.sigmoid(real))
            + g * np.log(1 - jax.nn.sigmoid(made_up))))
  np.testing.assert_allclose(
      got, rows[np.flatnonzero(made.mask)].mean(), rtol=1e-4)


def test_masked_rows_change_nothing():
  _, nets, made = _batch()
  problem = _problem()
  other = made._replace(
      real=made.real.at[2].set(7.0), labels=made.labels.at[5].set(9.0),
      inputs=made.inputs.at[2].set(200))
  @jax.jit
  def both(made):
    return (jax.grad(gmixup.discriminator_cost, 1)(
                problem, nets.discriminator, nets, made),
            jax.grad(lambda p: gmixup.joint_cost(problem, p, nets, made)[0])(
                (nets.model.params, nets.generator)))
  chex.assert_trees_all_close(both(made), both(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('knob, value, absent', [
    ('use_rec', False, 'reconstruction'), ('use_real', False, 'realism_loss'),
    ('real_data', 'labeled', 'unlabeled_loss'),
    ('real_data', 'none', 'labeled_loss')])
def test_ablations_drop_their_term_alone(knob, value, absent):
  _, nets, made = _batch()
  _, (_, whole) = _joint()(nets, made)
  loss, (_, left) = _joint(**{knob: value})(nets, made)
  assert set(whole) - set(left) >= {absent}
  means = toy.means(left)
  np.testing.assert_allclose(
      loss, sum(v for v in means.values() if not np.isnan(v)), rtol=1e-5)
  for name, value in means.items():
    np.testing.assert_allclose(value, toy.means(whole)[name], rtol=1e-4)


def test_each_network_learns_only_from_its_own_terms():
  _, nets, made = _batch()
  def gradient(**changes):
    return jax.jit(jax.grad(
        lambda p: gmixup.joint_cost(_problem(**changes), p, nets, made)[0]))(
            (nets.model.params, nets.generator))
  full = gradient()
  # F sees neither realism nor reconstruction.
  bare = gradient(use_real=False, use_rec=False)
  chex.assert_trees_all_close(full[0], bare[0], rtol=1e-4, atol=1e-5)
  # G does not see the real rows' cross entropy.
  chex.assert_trees_all_close(
      full[1], gradient(real_data='none')[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('real_data, trained', [
    ('none', 1), ('labeled', 2), ('all', 2)])
def test_passes_of_the_classifier_are_counted(real_data, trained):
  """4 real rows: their blends, themselves, and 3 views of those to label."""
  for known, labelings in ((1.0, 0), (0.0, 3)):
    rows, _, _ = _batch(known)
    found = gmixup.passes(_problem(real_data=real_data, num_views=3), rows)
    assert found['backward_passes'] == 4 * trained
    assert found['forward_passes'] == 4 * (trained + labelings)


def test_packing_keeps_real_rows_and_their_labels():
  def stream(label, mask):
    size = len(mask)
    return Batch(jnp.arange(size) + 10 * (label + 1), jnp.full(size, label),
                 jnp.array(mask))
  pair = Pair(stream(1, [1., 1., 0.]), stream(-1, [1., 0., 1., 1.]),
              jnp.float32(0))
  rows = gmixup.merge(pair, 4)
  np.testing.assert_array_equal(rows.inputs, [20, 21, 0, 2])
  np.testing.assert_array_equal(rows.known, [1, 1, 0, 0])
  np.testing.assert_array_equal(rows.mask, 1.0)
  only = gmixup.merge(pair._replace(labeled=None))
  np.testing.assert_array_equal(only.mask, [1, 0, 1, 1])


@pytest.mark.parametrize('knobs, words', [
    ('alpha=0.0', 'alpha'), ('num_views=0', 'num_views'),
    ('condition="none"', 'condition'), ('gan_rate=-1.0', 'gan_rate'),
    ('dp_scope="model"', 'dp_scope'), ('dp_scope="all", epsilon=0.0',
                                       'epsilon'),
    ('dp_scope="all", clip_norm=-1.0', 'clip_norm')])
def test_refuses(knobs, words):
  with pytest.raises(ValueError, match=words):
    methods.make(f'fedssl({knobs})', toy.task())


@functools.lru_cache
def _trained():
  """Networks before and after 150 steps on the toy rows, all labeled."""
  rows, _, _ = _batch()
  federation, _ = toy.federation()
  size = federation.train.labels.shape[0]
  rows = gmixup.Rows(jnp.asarray(federation.train.inputs),
                     jnp.asarray(federation.train.labels),
                     *[jnp.ones(size)] * 3)
  problem = _problem()
  optimizers = {'model': optax.adam(1e-2), 'generator': optax.adam(3e-3),
                'discriminator': optax.adam(1e-3)}
  method = methods.make(f'fedssl({KNOBS})', toy.task())
  nets = method.init(toy.key(0), federation).server.nets
  params = {'model': nets.model.params, 'generator': nets.generator,
            'discriminator': nets.discriminator}
  learner = fedssl_method._Learner(nets, {
      name: optimizers[name].init(p) for name, p in params.items()})
  one = fedssl.step(problem, optimizers)
  def body(i, learner):
    return one(learner, rows, jax.random.fold_in(toy.key(1), i))[0]
  after = jax.jit(lambda x: jax.lax.fori_loop(0, 150, body, x))(learner).nets
  made = jitted(gmixup.material, problem)(nets.model, rows, toy.key(2))
  return problem, nets, after, made


def test_unmixed_examples_are_reconstructed_better_after_training():
  problem, before, after, made = _trained()
  generate = jitted(gmixup.generate, problem)
  def error(nets):
    again, = generate(nets.generator, made, jnp.ones_like(made.lam))
    return adversarial.reconstruction(
        again, made.real, made.mask, over_pixels='mean')[0]
  assert error(after) < 0.5 * error(before)


def test_the_classifier_learns_the_blends():
  _, before, after, made = _trained()
  def mixup_loss(nets):
    return float(toy.means(_joint()(nets, made)[1][1])['mixup_loss'])
  assert mixup_loss(after) < mixup_loss(before)
  logits = toy.task().model.apply(after.model, made.real)
  assert (logits.argmax(-1) == made.labels.argmax(-1)).mean() > 0.9


def test_pictures_show_a_row_a_class_and_a_column_a_blend():
  federation, _ = toy.federation()
  method = methods.make(f'fedssl({KNOBS})', toy.task())
  state = method.init(toy.key(0), federation)
  assert method.pictures is not None
  shown = method.pictures(state.server, federation.test, toy.key(1))
  assert shown is not None
  chex.assert_shape(shown, (toy.NUM_CLASSES, 6, toy.SIDE, toy.SIDE, 1))
  assert shown.dtype == jnp.uint8
  # The first column is the stored image itself, of the next class.
  labels = np.asarray(federation.test.labels)
  for row in range(toy.NUM_CLASSES):
    first = np.flatnonzero(labels == (row + 1) % toy.NUM_CLASSES)[0]
    np.testing.assert_allclose(
        shown[row, 0].astype(int),
        np.asarray(federation.test.inputs)[first].astype(int), atol=1)
  assert not (shown[:, 1] == shown[:, 5]).all()
  texts = federation.test._replace(inputs=jnp.zeros((3, 4), jnp.int32))
  assert method.pictures(state.server, texts, toy.key(1)) is None


def test_discriminator_rests_without_realism():
  """Traced only: its parameters come out as the variables that went in."""
  rows, nets, _ = _batch()
  optimizers = dict.fromkeys(nets._fields, optax.sgd(0.1))
  learner = fedssl_method._Learner(nets, {
      'model': optimizers['model'].init(nets.model.params),
      'generator': optimizers['generator'].init(nets.generator),
      'discriminator': optimizers['discriminator'].init(nets.discriminator)})
  def moved(part, **changes):
    one = fedssl.step(_problem(**changes), optimizers)
    traced = jax.make_jaxpr(lambda p: getattr(one(
        learner._replace(nets=nets._replace(**{part: p})), rows,
        toy.key(0))[0].nets, part))(getattr(nets, part)).jaxpr
    return traced.outvars != traced.invars
  assert not moved('discriminator', use_real=False)
  assert moved('discriminator') and moved('generator', use_real=False)
