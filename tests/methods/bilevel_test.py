"""FedDure's local step: every equation against an independent way to it."""
from __future__ import annotations

import functools

import chex
import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import losses, models
from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Batch, Variables
from fedjax_ssl.methods import feddure
from fedjax_ssl.methods.feddure import bilevel, regulation
from fedjax_ssl.methods.parts import network as network_lib
from tests import toy
from tests.by_hand import softmax
from tests.thorough import wider

KEY = toy.key(5)
RATE = 0.3


def network(kind):
  """(apply, Variables) of a tiny network in float64."""
  name, norm = {'mlp': ('mlp(width=6, depth=1)', None),
                'batch': ('cnn(width=2)', 'batch')}[kind]
  model = models.make(name, num_classes=3, norm=norm, input_shape=(8, 8, 1),
                      dtype='float64')
  return model.apply_train, model.init(toy.key(0))


def plain_lookahead(apply, model, rows, fine, *, rate, detach, form):
  """The labeled loss at phi^-(w), equation (4) written down naively."""
  labeled, strong = rows
  def unlabeled(params):
    logits, _ = apply(model._replace(params=params), strong.inputs, strong.mask)
    seen = jax.lax.stop_gradient(logits) if detach else logits
    x = jax.nn.softmax(seen) if form == 'probabilities' else seen
    h = 1 / (1 + jnp.exp(-(jnp.maximum(x @ fine.kernel + fine.bias, 0)
                           @ fine.out_kernel + fine.out_bias)))
    ce = -jnp.take_along_axis(
        jax.nn.log_softmax(logits), strong.labels[:, None], 1)[:, 0]
    return (strong.mask * h * ce).sum() / strong.mask.sum()
  moved = jax.tree.map(lambda p, g: p - rate * g, model.params,
                       jax.grad(unlabeled)(model.params))
  logits, _ = apply(model._replace(params=moved), labeled.inputs, labeled.mask)
  return losses.cross_entropy(logits, labeled.labels, labeled.mask)[0]


@pytest.mark.parametrize('kind, detach, form', [
    ('mlp', True, 'logits'), ('batch', False, 'probabilities'),
    *wider(('mlp', False, 'probabilities'))])
def test_meta_gradient_against_central_differences(kind, detach, form):
  """Equation (5) in float64, every one of w's numbers."""
  with jax.enable_x64(True):
    apply, model = network(kind)
    rng = np.random.default_rng(1)
    def rows(size, mask):
      return Batch(jnp.asarray(rng.normal(size=(size, 8, 8, 1))),
                   jnp.asarray(rng.integers(0, 3, size), jnp.int32),
                   jnp.asarray(mask, jnp.float64))
    labeled, strong = rows(4, [1, 1, 1, 0]), rows(6, [1, 1, 1, 1, 0, 1])
    fine = regulation.init_fine(KEY, 3, hidden=4)
    flat, unravel = ravel_pytree(fine)
    assert flat.dtype == jnp.float64
    knobs = {'rate': 0.7, 'detach': detach, 'form': form}
    value = jax.jit(lambda w: plain_lookahead(
        apply, model, (labeled, strong), unravel(w), **knobs))

    def logits_of(params, batch):
      return apply(model._replace(params=params), batch.inputs, batch.mask)[0]

    @jax.jit
    def exact(w):
      ahead = regulation.look_ahead(
          lambda p: logits_of(p, strong), model.params, strong.labels,
          strong.mask, detach=detach, form=form)
      return regulation.meta_gradient(
          ahead, unravel(w), lambda p: losses.cross_entropy(
              logits_of(p, labeled), labeled.labels, labeled.mask)[0], rate=0.7)

    loss, grads = exact(flat)
    np.testing.assert_allclose(loss, value(flat), rtol=1e-10)
    step = 1e-5
    differences = [(value(flat + e) - value(flat - e)) / (2 * step)
                   for e in step * np.eye(flat.size)]
    got, _ = ravel_pytree(grads)
    error = np.linalg.norm(got - np.array(differences))
    assert error < 1e-4 * np.linalg.norm(differences)
    assert np.linalg.norm(differences) > 1e-6


def blobs(wrong=False, rows=8):
  """Views of the same classes, and a teacher that knows them, or shifts them.

  Returns the linear network's Variables and the views; the weights are bright
  thirds, so that the pseudo-labels are right by construction.
  """
  federation, _ = toy.federation()
  task = toy.task()
  images, labels = map(jnp.asarray, federation.train)
  ones = jnp.ones(rows)
  labeled = Batch(images[:rows], labels[:rows], ones)
  unlabeled = Batch(images[rows:2 * rows], jnp.full(rows, -1), ones)
  views = feddure.Views(unlabeled, labeled, unlabeled)
  model = task.model.init(KEY)
  kernel = np.zeros((toy.SIDE, toy.SIDE, 1, toy.NUM_CLASSES), np.float32)
  for label in range(toy.NUM_CLASSES):
    kernel[3 * label:3 * label + 3, ..., (label + wrong) % 3] = 1
  layer = next(iter(model.params))
  params = {layer: {'kernel': jnp.asarray(kernel.reshape(-1, 3)),
                    'bias': jnp.zeros(3)}}
  chex.assert_trees_all_equal_shapes(params, model.params)
  return model._replace(params=params), views


@functools.lru_cache
def compiled(kind, rates, decay=0.0, **knobs):
  """A step with gradient descent and weight decay, and its optimizers."""
  rules = feddure.Rules(*(optax.chain(
      optax.add_decayed_weights(decay), optax.sgd(rate)) for rate in rates))
  return rules, jax.jit(functools.partial(
      feddure.step, toy.task(kind).apply_train, rules=rules, **knobs))


def run(model, views, *, kind='linear', rates=3 * (RATE,), coarse=None,
        fine=None, **knobs):
  """One step from C-reg at zero: (carry before, carry after, metrics)."""
  coarse = tree.zeros_like(model.params) if coarse is None else coarse
  fine = regulation.init_fine(KEY, 3, hidden=8) if fine is None else fine
  rules, step = compiled(kind, rates, **knobs)
  before = feddure.start(model, coarse, fine, rules)
  after, metrics = step(before, views)
  return before, after, toy.means(metrics)


def test_reward_is_positive_for_right_and_negative_for_wrong_labels():
  for wrong, sign in ((False, 1), (True, -1)):
    for which in ('both', 'coarse'):
      model, views = blobs(wrong)
      said = toy.task().apply(model, views.weak.inputs).argmax(-1)
      hits = said == toy.federation()[0].train.labels[8:16]
      assert hits.all() if not wrong else not hits.any()
      _, _, metrics = run(model, views, which=which, threshold=0.0)
      assert sign * metrics['reward'] > 0.01


@pytest.mark.parametrize('kind', ['linear', 'conv'])
def test_without_regulation_a_step_is_fixmatch_without_threshold(kind):
  """C-reg at rest makes d 0, and a large bias makes every m 1."""
  task = toy.task(kind)
  _, views = blobs()
  views = views._replace(strong=views.strong._replace(
      inputs=255 - views.strong.inputs))
  model = task.model.init(KEY)
  fine = regulation.init_fine(KEY, 3, hidden=8)._replace(
      out_bias=jnp.float32(90))
  _, after, metrics = run(
      model, views, kind=kind, rates=(RATE, 0.0, 0.0), fine=fine,
      coarse=model.params, joint=kind == 'conv')
  assert metrics['reward'] == 0 and metrics['mask_rate'] == 1

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def fixmatch(params):
    weak, (known, strong), stats = network_lib.forward_with_targets(
        task, model._replace(params=params), views.weak, views.labeled,
        views.strong)
    loss, _ = losses.fixmatch(strong, weak, views.strong.mask, threshold=0.0)
    return loss + losses.cross_entropy(
        known, views.labeled.labels, views.labeled.mask)[0], stats
  grads, stats = fixmatch(model.params)
  want = jax.tree.map(lambda p, g: p - RATE * g, model.params, grads)
  chex.assert_trees_all_close(after.model, Variables(want, stats), rtol=1e-5,
                              atol=1e-6)


def test_a_step_by_hand():
  """Equations (2), (3), (6) to (10) in NumPy on the linear network."""
  model, views = blobs()
  strong = views.strong._replace(inputs=255 - views.strong.inputs)
  views = views._replace(strong=strong._replace(
      mask=jnp.array([1., 1, 1, 0, 1, 1, 0, 1])))
  before, after, metrics = run(model, views, detach=True)
  layer = next(iter(model.params))

  def flat(batch):
    return np.asarray(batch.inputs, np.float64).reshape(8, -1) / 255 - 0.4
  def numbers(params):
    return [np.asarray(params[layer][k], np.float64)
            for k in ('kernel', 'bias')]
  def said(params, x):
    return softmax(x @ params[0] + params[1])
  def slopes(x, g):
    return [x.T @ g, g.sum(0)]
  def cross_entropy(params):
    return -np.log(said(params, x)[np.arange(8), y]).mean()
  def weigh(p):
    w = [np.asarray(v, np.float64) for v in after.fine]
    return 1 / (1 + np.exp(-(np.maximum(p @ w[0] + w[1], 0) @ w[2] + w[3])))

  x, u, s = map(flat, (views.labeled, views.weak, views.strong))
  y, mask = np.asarray(views.labeled.labels), np.asarray(views.strong.mask)
  theta, phi = numbers(model.params), numbers(before.coarse)
  target = np.eye(3)[said(theta, u).argmax(-1)]
  share = (mask / mask.sum())[:, None]
  p = said(phi, s)
  grads = slopes(s, share * weigh(p)[:, None] * (p - target))
  new = [a - RATE * g for a, g in zip(phi, grads, strict=True)]
  np.testing.assert_allclose(numbers(after.coarse)[0], new[0], atol=1e-6)
  d = cross_entropy(phi) - cross_entropy(new)
  np.testing.assert_allclose(metrics['reward'], d, atol=1e-6)
  q = said(theta, s)
  m = weigh(q)
  np.testing.assert_allclose(metrics['mask_rate'], (share[:, 0] * m).sum(),
                             rtol=1e-5)
  grads = [a + b for a, b in zip(
      slopes(x, (said(theta, x) - np.eye(3)[y]) / 8),
      slopes(s, share * (m[:, None] + d) * (q - target)), strict=True)]
  for got, old, g in zip(numbers(after.model.params), theta, grads,
                         strict=True):
    np.testing.assert_allclose(got, old - RATE * g, atol=1e-5)


def test_batch_statistics_move_once_a_step_and_with_the_local_model_alone():
  task = toy.task('conv')
  _, views = blobs()
  model = task.model.init(KEY)
  rows = network_lib.joined([views.weak, views.labeled, views.strong])
  _, once = task.apply_train(model, rows.inputs, rows.mask)
  # The program of the test above, in which C-reg makes its passes as well.
  _, after, _ = run(model, views, kind='conv', rates=(RATE, 0.0, 0.0),
                    coarse=model.params, joint=True)
  chex.assert_trees_all_close(after.model.stats, once, rtol=1e-5, atol=1e-7)
  gap = tree.global_norm(tree.subtract(once, model.stats))
  twice = task.apply_train(model._replace(stats=once), rows.inputs, rows.mask)
  assert tree.global_norm(tree.subtract(twice[1], once)) > 0.1 * gap


def test_rows_beyond_the_mask_change_nothing():
  model, views = blobs()
  mask = jnp.array([1., 1, 0, 1, 0, 1, 1, 0])
  cut = feddure.Views(*(v._replace(mask=mask) for v in views))
  noise = jax.random.randint(KEY, views.weak.inputs.shape, 0, 256)
  def spoilt(batch):
    real = mask[:, None, None, None] > 0
    return batch._replace(inputs=jnp.where(
        real, batch.inputs, noise.astype(jnp.uint8)))
  a = run(model, cut)[1]
  b = run(model, feddure.Views(*map(spoilt, cut)))[1]
  chex.assert_trees_all_close(a, b, rtol=1e-6)


def test_without_labels_f_reg_rests_and_without_images_both_do():
  model, views = blobs()
  none = jnp.zeros(8)
  rests = functools.partial(run, decay=0.1, coarse=model.params)
  before, after, metrics = rests(model, views._replace(
      labeled=views.labeled._replace(mask=none)))
  chex.assert_trees_all_equal(before.fine, after.fine)
  assert not np.isfinite(metrics['reward'])  # Of nothing: no mean.
  chex.assert_tree_all_finite(after)
  before, after, metrics = run(model, views._replace(
      weak=views.weak._replace(mask=none),
      strong=views.strong._replace(mask=none)))
  chex.assert_trees_all_equal(before.coarse, after.coarse)
  chex.assert_trees_all_equal(before.fine, after.fine)
  assert metrics['reward'] == 0
  assert tree.global_norm(tree.subtract(
      before.model.params, after.model.params)) > 0


def test_unknown_words_and_missing_labels_are_told():
  model, views = blobs()
  for changes, said in (({'which': 'fin'}, "Did you mean 'fine'"),
                        ({'form': 'logit'}, "Did you mean 'logits'")):
    with pytest.raises(ValueError, match=said):
      run(model, views, **changes)
  with pytest.raises(ValueError, match='no labeled rows'):
    run(model, views._replace(labeled=None))


def test_look_ahead_of_rate_zero_is_no_look_ahead():
  _, views = blobs()
  model = toy.task().model.init(KEY)
  a, b, c = (run(model, views, which=which, threshold=0.0,
                 virtual_rate=rate)[1].model
             for which, rate in (('none', 0.0), ('maml', 0.0), ('maml', 0.5)))
  chex.assert_trees_all_close(a, b, rtol=1e-6, atol=1e-7)
  assert tree.global_norm(tree.subtract(b.params, c.params)) > 1e-3


def test_c_reg_alone_with_all_labels_is_both_under_weights_of_one():
  """At threshold 0 its weights are 1, as those of an F-reg that is sure."""
  model, views = blobs()
  sure = regulation.init_fine(KEY, 3, hidden=8)._replace(
      out_bias=jnp.float32(90))
  _, both, said = run(model, views, fine=sure)
  _, alone, heard = run(model, views, fine=(), which='coarse', threshold=0.0)
  chex.assert_trees_all_close((both.model, both.coarse),
                              (alone.model, alone.coarse), rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(said['reward'], heard['reward'], rtol=1e-5)
  assert said['reward'] != 0


def test_f_reg_learns_through_the_local_model_when_it_is_alone():
  """With theta in place of phi the two look-aheads are one."""
  model, views = blobs()
  both = run(model, views, coarse=model.params)[1]
  alone = run(model, views, coarse=(), which='fine')[1]
  chex.assert_trees_all_close(both.fine, alone.fine, rtol=1e-5, atol=1e-7)
  assert alone.coarse == ()


def test_every_row_of_the_ablation_is_another_step_of_its_own_cost():
  model, views = blobs()
  views = views._replace(strong=views.strong._replace(
      inputs=255 - views.strong.inputs))
  rows = {'both': 13 * 8, 'fine': 9 * 8, 'coarse': 9 * 8, 'maml': 8 * 8,
          'none': 5 * 8}
  made = []
  for which in bilevel.REGULATORS:
    _, after, metrics = run(model, views, which=which, threshold=0.6,
                            virtual_rate=0.5)
    made.append(jax.tree.leaves(after.model.params)[1])
    assert (metrics['forward_passes'] + metrics['backward_passes']
            == rows[which])
  for i, one in enumerate(made):
    for other in made[:i]:
      assert not np.allclose(one, other, atol=1e-5)
