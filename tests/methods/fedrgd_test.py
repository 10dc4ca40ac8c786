"""FedRGD: groups and their means, what a group receives, what it reduces to."""
from __future__ import annotations

from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import sampling, tree
from fedjax_ssl.core.types import Client, Cohort
from fedjax_ssl.methods import fedrgd
from fedjax_ssl.methods.parts import assemble
from tests import toy
from tests.methods import alternate_rounds, updates
from tests.methods.averaging_test import one_round
from tests.thorough import wider

KEY = toy.key(3)
GROUPS = ((0, 1, 2), (3, 4, 5))
# Two have no rows without labels, of which one has none at all.
COUNTED = [[i for i in group if toy.UNLABELED[i]] for group in GROUPS]


def _told(num_groups, size):
  del num_groups, size
  ids = jnp.array(GROUPS, jnp.int32)
  return lambda *unused: Cohort(ids, jnp.ones(ids.shape, bool))


def _rounds(text, count, **changes):
  """Of everyone, without anything random: the method, and all states."""
  task = alternate_rounds.task(strong=lambda key, x: 255 - x, **changes)
  federation, _ = toy.federation(task.labels_at)
  with mock.patch.object(sampling, 'split', _told):
    method = methods.make(text, task)
  states, run = [method.init(KEY, federation)], jax.jit(method.round)
  for i in range(count):
    state, metrics = run(states[-1], federation, jnp.int32(i), toy.key(i))
    states.append(state)
  return method, task, federation, states, metrics


@pytest.mark.parametrize('model', ['linear', *wider('conv')])
def test_one_group_without_the_server_is_fixmatch(model):
  ours, fixmatch = (one_round(text, model) for text in (
      'fedrgd(groups=1, threshold=.45)',
      "fixmatch(threshold=.45, weighting='uniform')"))
  chex.assert_trees_all_close(ours[1].server.model, fixmatch[1].server.model,
                              rtol=1e-5, atol=1e-6)
  chex.assert_trees_all_equal(
      tree.take(ours[1].server.groups, 0), ours[1].server.model)
  assert ours[2]['train_loss'] == pytest.approx(
      float(fixmatch[2]['train_loss']), rel=1e-5)


def test_two_rounds_by_hand():
  """Clients start from their group's model, the server from the mean."""
  text = 'fedrgd(threshold=.4)'
  method, task, federation, states, metrics = _rounds(text, 2)
  alone = methods.make('fedavg', task)
  train, update = jax.jit(alone.round), jax.jit(method.client_update)
  plain, zero = alone.init(KEY, federation), jnp.int32(0)
  for before, after in zip(states, states[1:], strict=False):
    # Where clients have no labels FedAvg's round is the server's training.
    own = train(plain._replace(server=assemble.Server(before.server.model)),
                federation, zero, KEY)[0].server.model
    ends = []
    for group, members in enumerate(COUNTED):
      start = tree.take(before.server.groups, group)
      sent = [tree.add(start, update(assemble.Server(start), Client(
          jnp.int32(i), tree.take(federation.clients, i), (), federation.train,
          federation.validation, zero, zero), KEY).message) for i in members]
      ends.append(jax.tree.map(lambda *x: sum(x) / len(x), own, *sent))
    chex.assert_trees_all_close(
        after.server.groups, tree.stack(ends), rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(
        after.server.model, jax.tree.map(lambda *x: sum(x) / 2, *ends),
        rtol=1e-4, atol=1e-6)
  gap = tree.subtract(*(tree.take(states[-1].server.groups, i) for i in (0, 1)))
  assert tree.global_norm(gap) > 1e-2
  # One model down and, of those with rows, one up, however many groups.
  counted = sum(map(len, COUNTED))
  assert metrics['num_participants'] == counted
  assert toy.means(metrics)['models_sent'] == pytest.approx(
      1 + counted / toy.NUM_CLIENTS)


def test_without_pseudo_labels_groups_go_to_the_server():
  """As far as a member of so many goes, and all to the same place."""
  *_, (first, second, third), _ = _rounds('fedrgd(threshold=1.1)', 2)
  sizes = np.array([len(members) + 1 for members in COUNTED])
  for before, after in ((first, second), (second, third)):
    start, end = before.server.groups, after.server.groups
    # Solved for what the server has sent.
    own = jax.tree.map(lambda a, b: a + (b - a) * sizes.reshape(
        -1, *[1] * (a.ndim - 1)), start, end)
    chex.assert_trees_all_close(tree.take(own, 0), tree.take(own, 1),
                                rtol=1e-3, atol=1e-5)


def test_groups_that_share_a_model_are_one_mean():
  *_, own, _ = _rounds('fedrgd(threshold=.4)', 2)
  *_, shared, _ = _rounds('fedrgd(threshold=.4, apart=False)', 2)
  # They start alike.
  chex.assert_trees_all_close(own[1].server.model, shared[1].server.model)
  for state in shared[1:]:
    chex.assert_trees_all_close(
        state.server.groups, tree.repeat(state.server.model, 2))
  assert tree.global_norm(tree.subtract(
      own[2].server.model, shared[2].server.model)) > 1e-4


def test_means_of_groups():
  rng = np.random.default_rng(1)
  groups, moves, own = ({'w': jnp.asarray(rng.normal(size=shape))}
                        for shape in ((2, 3), (2, 4, 3), (3,)))
  variables = [fedrgd.Variables(x, {}) for x in (groups, moves, own)]
  weights = np.array([[1, 1, 0, 1], [0, 0, 0, 0]], np.float32)
  def mean(weights, own_weight):
    return np.asarray(fedrgd.group_means(
        variables[0], variables[1], weights, variables[2],
        own_weight).params['w'])
  sent = groups['w'][:, None] + moves['w']
  got = mean(weights, 1.0)
  np.testing.assert_allclose(
      got, [(sent[0, [0, 1, 3]].sum(0) + own['w']) / 4, own['w']], rtol=1e-5)
  alone = mean(weights, 0.0)
  np.testing.assert_allclose(alone[0], sent[0, [0, 1, 3]].mean(0), rtol=1e-5)
  np.testing.assert_array_equal(alone[1], groups['w'][1])  # Nobody counts.
  np.testing.assert_allclose(mean(7 * weights, 7.0), got, rtol=1e-5)


def test_own_labels_of_equal_views_are_those_of_one():
  """And with labels at the server both profiles are the same."""
  paper, code = (updates.whole(
      f"fedrgd(profile='{profile}', threshold=.4)", updates.BOTH,
      strong=updates.same) for profile in ('paper', 'code'))
  chex.assert_trees_all_close(paper.message, code.message, rtol=1e-4, atol=1e-6)
  assert code.metrics['backward_passes'] > paper.metrics['backward_passes']
  differ = [updates.whole(f"fedrgd(profile='{profile}', threshold=.4)",
                          updates.BOTH).message
            for profile in ('paper', 'code')]
  assert tree.global_norm(tree.subtract(*differ)) > 1e-4
  chex.assert_trees_all_equal(*(updates.update(
      f"fedrgd(profile='{profile}', threshold=.4)", place='server').message
                                for profile in ('paper', 'code')))
