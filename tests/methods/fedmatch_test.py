"""FedMatch: what it reduces to, and what it never does."""
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import losses, methods, sparse
from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Batch, Cohort, Context, Update
from fedjax_ssl.data.batching import Pair
from fedjax_ssl.methods.fedmatch import client, local_step, server, settings
from tests import toy
from tests.thorough import wider

KEY = toy.key(6)
PLAIN = "lr_decay='none', psi_threshold=0.0, labeled_weight=1.0"


def same(key, x):
  """A view that draws nothing, so that methods cannot draw differently."""
  del key
  return x


def inverse(key, x):
  """A strong view that draws nothing."""
  del key
  return 255 - x


def task(**changes):
  return toy.task(**{'weak': same, 'strong': inverse,
                     'cohort_size': toy.NUM_CLIENTS, **changes})


@functools.lru_cache
def compiled(text, **changes):
  method = methods.make(text, task(**changes))
  return method, jax.jit(method.round)


def after(text, federation, rounds=1, **changes) -> Any:
  """(state, metrics of the last round)."""
  method, run = compiled(text, **changes)
  state = method.init(toy.key(0), federation)
  metrics: Any = {}
  for i in range(rounds):
    state, metrics = run(state, federation, jnp.int32(i),
                         jax.random.fold_in(KEY, i))
  return state, toy.means(metrics)


def theta(state):
  return tree.add(state.server.sigma, state.server.psi)


def relabeled(federation, labels):
  return dataclasses.replace(
      federation, train=federation.train._replace(labels=labels))


def test_without_psi_and_with_equal_scores_it_is_uniform_fedavg():
  federation, _ = toy.federation()
  # No model is ever right, so all are equally reliable.
  wrong = jnp.full_like(jnp.asarray(federation.validation.labels), -1)
  blind = dataclasses.replace(federation, validation=(
      federation.validation._replace(labels=wrong)))
  ours, _ = after(f"fedmatch(learn='sigma', {PLAIN})", blind, rounds=2)
  fedavg, _ = after("fedavg(weighting='uniform')", blind, rounds=2)
  chex.assert_trees_all_close(
      ours.server.sigma, fedavg.server.model.params, rtol=1e-5, atol=1e-6)
  assert sparse.num_nonzero(ours.server.psi) == 0


def test_without_helpers_and_penalties_it_is_fixmatch_on_psi():
  """At the clients: the server's labels train sigma as they train FixMatch."""
  federation, _ = toy.federation('server')
  ours, metrics = after(
      f"fedmatch(num_helpers=0, l2=0.0, threshold=0.4, aggregation='uniform', "
      f'{PLAIN})', federation, rounds=2, labels_at='server')
  theirs, known = after("fixmatch(threshold=0.4, weighting='uniform')",
                        federation, rounds=2, labels_at='server')
  chex.assert_trees_all_close(theta(ours), theirs.server.model.params,
                              rtol=1e-5, atol=1e-6)
  assert sparse.num_nonzero(ours.server.psi) > 0
  for name in ('mask_rate', 'unlabeled_loss', 'server_loss'):
    np.testing.assert_allclose(metrics[name], known[name], rtol=1e-4)


def test_undivided_without_helpers_it_is_fixmatch():
  federation, _ = toy.federation()
  plain = "lr_decay='none', aggregation='uniform', labeled_weight=1.0"
  ours, metrics = after(
      f"fedmatch(learn='undivided', num_helpers=0, threshold=0.4, {plain})",
      federation, rounds=2)
  theirs, known = after("fixmatch(threshold=0.4, weighting='uniform')",
                        federation, rounds=2)
  chex.assert_trees_all_close(ours.server.psi, theirs.server.model.params,
                              rtol=1e-5, atol=1e-6)
  assert sparse.num_nonzero(ours.server.sigma) == 0
  for name in ('mask_rate', 'unlabeled_loss', 'labeled_loss', 'train_loss'):
    np.testing.assert_allclose(metrics[name], known[name], rtol=1e-4)
  assert metrics['mask_rate'] > 0
  np.testing.assert_allclose([metrics['cost_up'], metrics['cost_down']], 100)


def test_undivided_helpers_are_the_models_that_their_clients_sent():
  federation, _ = toy.federation()
  method, run = compiled(
      "fedmatch(learn='undivided', lr_decay='none', keep_local=True)")
  state, _ = run(method.init(toy.key(0), federation), federation,
                 jnp.int32(0), KEY)
  s = settled(num_helpers=2, learn='undivided', l2=0.0)
  sent = server.broadcast(s, state.server, jnp.int32(0), jnp.int32(0))
  inputs = jnp.asarray(federation.train.inputs[:5])
  ask = client.panel(task(), s, sent.sigma, sent.stats, sent.agents,
                     jnp.bool_(True))
  assert ask is not None and sent.agents is not None
  for place, advice in enumerate(ask(inputs)):
    model = tree.take(state.memory.model, int(sent.agents.ids[place]))
    np.testing.assert_allclose(advice, task().apply(model, inputs), rtol=1e-5,
                               atol=1e-6)
    assert sparse.num_nonzero(model.params)


def settled(**knobs):
  return settings.settle(task(), **{
      **settings.PROFILES['v1'], 'profile': 'v1', 'num_helpers': 1,
      'threshold': .75, 'tie': 'lowest', 'labeled_weight': 1.0,
      'learn': 'both', 'density': 1.0, 'exact_down': True,
      'lr_decay': 'none', 'max_gib': 1.0, 'keep_local': False,
      'labeled_client_weight': 1.0, **knobs})


def gamma(scores, sizes=None, **knobs):
  """The server's psi after clients with these scores sent 1, 2, 3, ..."""
  count = len(scores)
  federation, _ = toy.federation()
  s = settled(**knobs)
  first, _ = server.init(task(), s, KEY, federation)
  psi = jax.tree.map(lambda x: jnp.ones((1, count, *x.shape)) * (
      1 + jnp.arange(count).reshape(1, count, *[1] * x.ndim)),
                     first.psi)
  message = client.Message(tree.zeros_like(psi), psi, {})
  weights = jnp.ones((1, count)) if sizes is None else jnp.array([sizes])
  updates = Update(message, weights, (), {client.SCORE: jnp.array([scores])})
  cohort = Cohort(jnp.arange(count)[None], jnp.ones((1, count), bool))
  context = Context(jnp.int32(0), federation.train, federation.validation,
                    federation.server)
  new, _ = server.aggregate(task(), s, first, updates, cohort, context, KEY)
  return jax.tree.leaves(new.psi)[0].ravel()[0], new, s


def test_gamma_weighs_by_accuracy_and_equals_are_the_plain_mean():
  np.testing.assert_allclose(gamma([.4, .4, .4])[0], 2, rtol=1e-6)
  np.testing.assert_allclose(gamma([.6, .2, .0])[0], .75 * 1 + .25 * 2,
                             rtol=1e-6)
  np.testing.assert_allclose(gamma([.0, .0, .0])[0], 2, rtol=1e-6)


@pytest.mark.parametrize('aggregation', ['reliability', 'uniform'])
def test_say_multiplies_reliability_but_not_the_ranking(aggregation):
  scores = np.array([.2, .6, .4])
  value, new, _ = gamma(scores, sizes=[3., 1., 1.], aggregation=aggregation)
  weights = np.array([3, 1, 1]) * (
      scores if aggregation == 'reliability' else 1)
  np.testing.assert_allclose(value, weights @ [1, 2, 3] / weights.sum(),
                             rtol=1e-6)
  np.testing.assert_array_equal(new.agents.ids, [1, 2])


def test_who_sent_nothing_neither_counts_nor_helps():
  value, new, _ = gamma([.9, .2, .2], sizes=[0., 1., 1.])
  np.testing.assert_allclose(value, 2.5, rtol=1e-6)
  assert set(np.asarray(new.agents.ids)) == {1, 2}
  value, new, _ = gamma([.9, .2, .2], sizes=[0., 0., 0.])
  assert value == 0 and (np.asarray(new.agents.ids) == -1).all()


def parts():
  federation, _ = toy.federation()
  sigma = task().model.init(KEY).params
  psi = jax.tree.map(lambda x: .1 * jnp.cos(jnp.arange(x.size)).reshape(
      x.shape), sigma)
  batch = Batch(jnp.asarray(federation.train.inputs)[:5],
                jnp.asarray(federation.train.labels)[:5],
                jnp.array([1., 1., 1., 1., 0.]))
  return sigma, psi, batch


def test_no_derivative_crosses():
  sigma, psi, batch = parts()
  weights = local_step.Weights(num_helpers=0, threshold=0.0, l1=.1)
  def labeled(sigma, psi):
    return local_step.labeled_loss(task(), sigma, psi, {}, batch, KEY)[0]
  def unlabeled(sigma, psi):
    return local_step.unlabeled_loss(task(), sigma, psi, {}, batch, KEY,
                                     weights=weights)[0]
  by_sigma, by_psi = jax.grad(labeled, (0, 1))(sigma, psi)
  assert tree.global_norm(by_sigma) > 0 and tree.global_norm(by_psi) == 0
  by_sigma, by_psi = jax.grad(unlabeled, (0, 1))(sigma, psi)
  assert tree.global_norm(by_sigma) == 0 and tree.global_norm(by_psi) > 0


def test_the_unlabeled_loss_in_numpy():
  """Two helpers, one place empty, a masked row: every term of equation 6."""
  sigma, psi, batch = parts()
  weights = local_step.Weights(
      num_helpers=3, threshold=0.4, agreement=2.0, consistency=3.0, l2=.5,
      l1=.25, l2_reduction='sum', over='confident')
  other = jax.random.normal(KEY, (3, 5, toy.NUM_CLASSES)) * 2
  present = jnp.array([1., 0., 1.])
  got, (_, metrics) = local_step.unlabeled_loss(
      task(), sigma, psi, {}, batch, KEY, weights=weights,
      panel=lambda inputs: other, present=present)
  def p(images):
    x = np.asarray(toy.preprocess(images)).reshape(5, -1)
    (bias, kernel) = jax.tree.leaves(tree.add(sigma, psi))
    z = np.exp(x @ np.asarray(kernel) + np.asarray(bias))
    return z / z.sum(-1, keepdims=True)
  weak, strong = p(batch.inputs), p(255 - batch.inputs)
  advice = np.asarray(jax.nn.softmax(other))[[0, 2]]
  votes = np.stack([np.eye(3)[q.argmax(-1)] for q in (weak, *advice)]).sum(0)
  label = votes.argmax(-1)
  sure = (weak.max(-1) >= .4) & (np.arange(5) < 4)
  assert 0 < sure.sum()
  entropy = -np.log(strong[np.arange(5), label])
  gap = (advice * (np.log(advice) - np.log(weak))).sum((0, -1))
  flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(part)])
          for part in (sigma, psi)]
  want = ((2 * entropy + 3 * gap)[sure].mean()
          + .5 * ((flat[0] - flat[1])**2).sum() + .25 * np.abs(flat[1]).sum())
  np.testing.assert_allclose(got, want, rtol=1e-4)
  total, rows = metrics['outvoted']
  assert rows == sure.sum()
  np.testing.assert_allclose(total, (label != weak.argmax(-1))[sure].sum())


@pytest.mark.parametrize('over_helpers', ['mean', 'sum'])
def test_an_empty_place_of_a_helper_changes_no_loss(over_helpers):
  sigma, psi, batch = parts()
  other = jax.random.normal(KEY, (3, 5, toy.NUM_CLASSES)) * 2
  def loss(advice, present):
    return local_step.unlabeled_loss(
        task(), sigma, psi, {}, batch, KEY, weights=local_step.Weights(
            num_helpers=len(advice), threshold=0.4, over_helpers=over_helpers),
        panel=lambda inputs: advice, present=jnp.array(present))[0]
  np.testing.assert_allclose(loss(other, [1., 0., 1.]),
                             loss(other[::2], [1., 1.]), rtol=1e-6)


def test_sparse_differs_from_dense_by_l1_alone():
  sigma, psi, _ = parts()
  flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(part)])
          for part in (sigma, psi)]
  distance, norm = ((flat[0] - flat[1])**2), np.abs(flat[1]).sum()
  for reduction, l2 in (('mean', distance.mean()), ('sum', distance.sum())):
    dense, sparse_ = (local_step.penalty(sigma, psi, local_step.Weights(
        l2=.5, l1=l1, l2_reduction=reduction)) for l1 in (0.0, .25))
    np.testing.assert_allclose(dense, .5 * l2, rtol=1e-5)
    np.testing.assert_allclose(sparse_ - dense, .25 * norm, rtol=1e-4)


@pytest.mark.parametrize('kind', ['labeled', 'unlabeled'])
def test_a_part_without_rows_stays_under_weight_decay(kind):
  sigma, psi, batch = parts()
  optimizer = optax.chain(optax.add_decayed_weights(.1), optax.sgd(.1, .5))
  # With momentum, so that an optimizer that did not rest would be seen.
  pair = Pair(batch, batch, None)._replace(**{
      kind: batch._replace(mask=jnp.zeros_like(batch.mask))})
  now = local_step.start(sigma, psi, {}, optimizer)
  for _ in range(2):
    now, _ = local_step.step(task(), now, pair, KEY, optimizer=optimizer,
                             weights=local_step.Weights(
                                 num_helpers=0, threshold=0.0))
  rests, moves = (((now.sigma, now.sigma_opt), (sigma, optimizer.init(sigma))),
                  ((now.psi, now.psi_opt), (psi, optimizer.init(psi))))
  if kind == 'unlabeled':
    rests, moves = moves, rests
  chex.assert_trees_all_equal(*rests)
  assert tree.global_norm(tree.subtract(*moves)) > 0


@pytest.mark.parametrize('consistency, forward, backward', [
    (1.0, 2 + 2, 2), (0.0, 2 + 2, 1)])
def test_a_weak_view_that_learns_from_helpers_is_derived(consistency, forward,
                                                         backward):
  sigma, psi, batch = parts()
  other, optimizer = jnp.zeros((2, 5, toy.NUM_CLASSES)), optax.sgd(.1)
  _, metrics = local_step.step(
      task(), local_step.start(sigma, psi, {}, optimizer),
      Pair(None, batch, None), KEY, optimizer=optimizer,
      weights=local_step.Weights(
          num_helpers=2, consistency=consistency),
      panel=lambda inputs: other, present=jnp.ones(2))
  rows = batch.mask.sum()
  assert metrics['forward_passes'] == forward * rows
  assert metrics['backward_passes'] == backward * rows


def test_a_batch_of_no_rows_does_not_move_psi():
  sigma, psi, batch = parts()
  def by_psi(mask):
    return jax.grad(lambda psi: local_step.unlabeled_loss(
        task(), sigma, psi, {}, batch._replace(mask=mask), KEY,
        weights=local_step.Weights(
            num_helpers=0, threshold=1.1, l1=.1))[0])(psi)
  assert tree.global_norm(by_psi(jnp.zeros(5))) == 0
  assert tree.global_norm(by_psi(batch.mask)) > 0  # Nobody is confident.


def test_the_server_keeps_what_is_too_small_to_count():
  """Else a psi that starts at 0 and learns slowly never leaves it."""
  _, new, s = gamma([.5, .5, .5], psi_threshold=10.0)
  np.testing.assert_allclose(jax.tree.leaves(new.psi)[0], 2, rtol=1e-6)
  sent = server.broadcast(s, new, jnp.int32(0), jnp.int32(0))
  chex.assert_trees_all_equal(sent.psi, new.psi)
  chex.assert_trees_all_equal(server.predicted(s, new).params, new.sigma)
  assert settings.PROFILES['v1']['psi_threshold'] == 0  # Dense is dense.


def test_a_vote_by_hand():
  """Own vote 2 on each row; helpers say (0, 1), (0, 0), (2, 1), (1, -)."""
  own = jnp.log(jnp.array([[.2, .2, .6]] * 4))
  says = jnp.array([[0, 0, 2, 1], [1, 0, 1, 0]])
  advice = jax.nn.one_hot(says, 3)
  def vote(**more):
    return losses.agreement_vote(own, advice, threshold=.5, **more)[0].tolist()
  assert vote() == [0, 0, 2, 0]  # Three different votes: the lowest class.
  assert vote(tie='local') == [2, 0, 2, 2]
  assert vote(present=jnp.array([1., 0.])) == [0, 0, 2, 1]
  assert vote(present=jnp.array([1., 0.]), tie='local') == [2, 2, 2, 2]
  assert vote(present=jnp.zeros(2)) == [2, 2, 2, 2]


DISJOINT = "fedmatch(threshold=0.3, keep_local=True, profile='v1')"


@pytest.mark.parametrize('text', [
    DISJOINT, *wider(
        "fedmatch(threshold=0.3, profile='v3code', helper_interval=2)")])
def test_disjoint_clients_never_touch_a_label(text):
  federation, _ = toy.federation('server')
  mine = federation.server.labeled[:federation.server.num_labeled]
  labels = jnp.asarray(federation.train.labels)
  wrong = ((labels + 1) % toy.NUM_CLASSES).at[mine].set(labels[mine])
  assert (wrong != labels).any()
  straight, metrics = after(text, federation, rounds=2, labels_at='server')
  corrupted, _ = after(text, relabeled(federation, wrong), rounds=2,
                       labels_at='server')
  chex.assert_trees_all_equal(straight, corrupted)
  assert metrics['mask_rate'] > 0


def test_without_sigma_no_label_is_read_at_all():
  federation, _ = toy.federation('server')
  text = "fedmatch(threshold=0.3, learn='psi')"
  labels = jnp.asarray(federation.train.labels)
  a, b = (after(text, relabeled(federation, some), labels_at='server')[0]
          for some in (labels, 2 - labels))
  chex.assert_trees_all_equal(a, b)
  first = compiled(text, labels_at='server')[0].init(
      toy.key(0), federation)
  chex.assert_trees_all_equal(a.server.sigma, first.server.sigma)
  assert sparse.num_nonzero(a.server.psi) > 0


def test_disjoint_clients_leave_sigma_to_the_server():
  federation, _ = toy.federation('server')
  empty = dataclasses.replace(federation, server=federation.server._replace(
      num_labeled=jnp.int32(0)))
  method, _ = compiled(DISJOINT, labels_at='server')
  first = method.init(toy.key(0), federation)
  state, metrics = after(DISJOINT, empty, labels_at='server')
  chex.assert_trees_all_equal(state.server.sigma, first.server.sigma)
  chex.assert_trees_all_equal(state.server.rate, first.server.rate)
  assert np.isnan(metrics['server_loss'])  # Of no training.
  assert tree.global_norm(state.server.psi) > 0
  assert 0 < metrics['cost_up'] < 100.01  # Only psi goes up.
