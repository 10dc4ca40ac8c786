"""FedTriNet: the threshold, the vote, and labels that stay."""
from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Batch, Client
from fedjax_ssl.methods import fedtrinet
from fedjax_ssl.methods.fedtrinet import method as fedtrinet_method
from fedjax_ssl.methods.fedtrinet import shared_layers
from tests import toy
from tests.methods.averaging_test import one_round

KEY = toy.key(8)
# A round of the first phase, then a threshold that some rows reach at once,
# some later, some never.
TEXT = 'fedtrinet(pretrain=0.0, scale=4.5)'
EVERYONE = {'cohort_size': toy.NUM_CLIENTS}


@pytest.mark.parametrize('t, share', [
    (0, 1), (9, 1), (10, .8), (34, .32), (35, .5), (60, .5)])
def test_the_threshold_falls_and_is_protected(t, share):
  base = 2.8 * 0.9
  np.testing.assert_allclose(fedtrinet.threshold_at(0.9, t), base * share,
                             rtol=1e-6)


def test_without_protection_it_falls_to_zero():
  for t, share in ((35, .3), (50, 0), (80, 0)):
    np.testing.assert_allclose(
        fedtrinet.threshold_at(0.5, t, protected=False), 1.4 * share,
        rtol=1e-6)


@pytest.mark.parametrize('confidence, t', [(0.9, -1), (0.0, 3)])
def test_before_the_phase_or_unmeasured_nothing_is_accepted(confidence, t):
  bar = fedtrinet.threshold_at(confidence, t)
  sure = jnp.full((3, 1, 2), 50.0).at[..., 1].set(-50)
  assert fedtrinet.vote(sure, bar)[1][0] == 0
  assert fedtrinet.vote(sure, 3.0)[1][0] == 1


def test_the_vote_adds_probabilities_and_not_votes():
  p = np.array([[.5, .45, .05], [.5, .45, .05], [.02, .9, .08]])
  label, sure = fedtrinet.vote(jnp.log(p)[:, None], 1.79)
  assert (int(label[0]), float(sure[0])) == (1, 1)  # 1.8; two voted for 0.
  assert fedtrinet.vote(jnp.log(p)[:, None], 1.81)[1][0] == 0


def test_first_layers_are_convolutions_by_number():
  params = {f'{kind}_{i}': i for kind in ('Conv', 'Dense', 'Norm')
            for i in (10, 2, 0)}
  assert shared_layers.shared_layers(params, 2) == (
      'Conv_0', 'Conv_2', 'Norm_0', 'Norm_2')  # Their normalizations as well.
  assert shared_layers.shared_layers({'Dense_0': 1}, 1) == (
      'Dense_0', 'Norm_0')
  with pytest.raises(ValueError, match='num_shared is 4'):
    shared_layers.shared_layers(params, 4)


def test_splicing_takes_each_layer_from_its_owner():
  one, other = {'Conv_0': 1, 'Dense_0': 2}, {'Conv_0': 3, 'Dense_0': 4}
  assert shared_layers.combine(one, other, ('Conv_0',)) == {
      'Conv_0': 1,
      'Dense_0': 4
  }


def test_statistics_of_the_shared_layers_come_from_the_server():
  """From the received model, as the weights that they belong to."""
  model = methods.make('fedavg', toy.task('conv')).init(
      KEY, toy.federation()[0]).server.model
  shared = shared_layers.shared_layers(model.params, 1)
  other = tree.scale(model.stats, 2.0)
  mixed = shared_layers.combine(model.stats, other, shared)
  chex.assert_trees_all_equal(mixed['Norm_0'], model.stats['Norm_0'])


def test_frozen_layers_rest_under_momentum_and_decay():
  params: dict[str, Any] = {
      'Conv_0': {'kernel': jnp.ones(2)}, 'Dense_0': jnp.ones(3)}
  optimizer = shared_layers.freeze(
      optax.chain(optax.add_decayed_weights(.1), optax.sgd(.1, .9)), params,
      ('Conv_0',))
  state, now = optimizer.init(params), params
  for _ in range(3):
    updates, state = optimizer.update(now, state, now)
    now = optax.apply_updates(now, updates)
  chex.assert_trees_all_equal(now['Conv_0'], params['Conv_0'])
  assert np.all(now['Dense_0'] < 1)


@pytest.mark.parametrize('frozen', [True, False])
def test_statistics_of_frozen_layers_rest_too(frozen):
  federation, _ = toy.federation()
  task = toy.task('conv')
  model = methods.make('fedavg', task).init(KEY, federation).server.model
  s: Any = types.SimpleNamespace(num_shared=1, frozen=frozen)
  client = Client(
      jnp.int32(1), jax.tree.map(lambda x: x[1], federation.clients), (),
      federation.train, federation.validation, jnp.int32(0), jnp.int32(0))
  tuned, _ = jax.jit(lambda key: fedtrinet_method._tune(
      task, s, model, client, key))(KEY)
  gap = tree.subtract(tuned.stats['Norm_0'], model.stats['Norm_0'])
  assert (tree.global_norm(gap) == 0) == frozen


def test_a_run_of_the_first_phase_alone_is_fedavg_with_equal_weights():
  alone = one_round('fedtrinet(pretrain=1.0)')[1].server
  fedavg = one_round("fedavg(weighting='uniform')")[1].server
  chex.assert_trees_all_close(alone.model, fedavg.model, rtol=1e-6)


@functools.lru_cache
def history(text, rounds=6, model='linear', **changes):
  """The states of a run, the initial one first."""
  federation, hidden = toy.federation()
  corrupted = changes.pop('corrupted', False)
  if corrupted:
    labels = jnp.where(hidden, 0, federation.train.labels)
    federation = dataclasses.replace(
        federation, train=federation.train._replace(labels=labels))
  method = methods.make(text, toy.task(model, **EVERYONE, **changes))
  states = [method.init(KEY, federation)]
  step = jax.jit(method.round)
  for i in range(rounds):
    new, _ = step(states[-1], federation, jnp.int32(i),
                  jax.random.fold_in(KEY, i))
    states.append(new)
  return states


@functools.lru_cache
def program():
  method = methods.make(TEXT, toy.task(**EVERYONE))
  return method, jax.jit(method.round)


def one_round_on(federation, state=None):
  """(state, metrics) one round later, or after the first one."""
  method, step = program()
  state = method.init(KEY, federation) if state is None else state
  return step(state, federation, state.round, KEY)


def accepted(state):
  return np.asarray(state.memory.labels)


def sureness(server, federation):
  """The mean largest probability on the clients' unlabeled rows."""
  tops = []
  for rows, count in zip(federation.clients.unlabeled,
                         federation.clients.num_unlabeled, strict=True):
    logits = toy.task().apply(server.model, federation.train.inputs[rows])
    tops += jax.nn.softmax(logits).max(-1)[:count].tolist()
  return np.mean(tops)


def test_an_accepted_label_is_never_revised():
  states = history(TEXT)
  counts = []
  for before, after in zip(states[:-1], states[1:], strict=True):
    kept = accepted(before) >= 0
    np.testing.assert_array_equal(accepted(after)[kept],
                                  accepted(before)[kept])
    counts.append(int((accepted(after) >= 0).sum()))
  assert counts[0] == 0  # The first round is the first phase.
  some = [count for count in counts if count]
  assert some[0] < some[-1] < sum(toy.UNLABELED)
  rows = np.arange(accepted(states[0]).shape[1])
  padding = rows >= np.array(toy.UNLABELED)[:, None]
  assert (accepted(states[-1])[padding] == -1).all()


def test_the_confidence_is_measured_on_unlabeled_rows_of_training():
  """After phase 1: mean largest probability, clients without labels too."""
  before, after = history(TEXT)[:2]
  want = sureness(before.server, toy.federation()[0])
  np.testing.assert_allclose(after.server.confidence, want, rtol=1e-5)
  np.testing.assert_allclose(after.server.threshold, 4.5 * want, rtol=1e-5)


def test_hidden_labels_are_not_read_in_the_second_phase():
  assert (accepted(history(TEXT)[-1]) >= 0).any()
  chex.assert_trees_all_equal(history(TEXT)[-1],
                              history(TEXT, corrupted=True)[-1])


def test_nothing_accepted_leaves_tuning_and_training_on_labels():
  """A client without labels then has nothing to train on and sits out."""
  states = history('fedtrinet(pretrain=0.0, scale=6.0)', rounds=3)
  assert (accepted(states[-1]) == -1).all()
  unlabeled = toy.LABELED.index(0)
  assert int(states[-1].memory.seen[unlabeled]) == 0
  assert int(states[-1].memory.seen[0]) == 3
  gap = tree.subtract(states[3].server.model, states[2].server.model)
  assert tree.global_norm(gap) > 0


def test_with_labels_accepted_an_unlabeled_client_takes_part():
  states = history('fedtrinet(pretrain=0.0, scale=0.0)', rounds=2)
  unlabeled = toy.LABELED.index(0)
  assert int(states[-1].memory.seen[unlabeled]) == 1
  assert (accepted(states[-1]) >= 0).sum() == sum(toy.UNLABELED)
  # 12 rows at once make a harvest, 9 do not.
  np.testing.assert_array_equal(
      states[-1].memory.harvests, np.array(toy.UNLABELED) >= 10)


OFFICIAL = "fedtrinet(profile='official', pretrain=0.0, scale=4.5)"


def only_labels_or_none():
  """The toy federation; who has labels has no unlabeled rows."""
  federation, _ = toy.federation()
  clients = federation.clients
  return dataclasses.replace(federation, clients=clients._replace(
      num_unlabeled=jnp.where(clients.num_labeled > 0, 0,
                              clients.num_unlabeled)))


def test_a_client_without_labels_measures_and_moves_nothing():
  federation = only_labels_or_none()
  servers = []
  for alone in (False, True):
    if alone:
      federation = dataclasses.replace(
          federation, clients=federation.clients._replace(
              num_unlabeled=jnp.zeros(toy.NUM_CLIENTS, jnp.int32)))
    state, metrics = one_round_on(federation)
    servers.append(state.server)
  chex.assert_trees_all_close(servers[0].model, servers[1].model, rtol=1e-6)
  start = program()[0].init(KEY, federation).server
  np.testing.assert_allclose(servers[0].confidence, sureness(
      start, only_labels_or_none()), rtol=1e-5)
  assert servers[1].confidence == 0
  assert metrics['train_loss'].rows == 4


def test_what_nobody_could_measure_is_measured_later():
  federation = only_labels_or_none()
  few, _ = one_round_on(dataclasses.replace(
      federation, clients=federation.clients._replace(
          num_unlabeled=jnp.zeros(toy.NUM_CLIENTS, jnp.int32))))
  after, _ = one_round_on(federation, few)
  assert few.server.confidence == 0
  np.testing.assert_allclose(after.server.confidence, sureness(
      few.server, federation), rtol=1e-5)
  again, _ = one_round_on(federation, after)
  assert again.server.confidence == after.server.confidence


def test_what_is_measured_does_not_drown_the_change_in_the_norm():
  for states in (history(TEXT), history(TEXT, rounds=1, max_update_norm=3.0)):
    np.testing.assert_allclose(states[1].server.confidence, sureness(
        states[0].server, toy.federation()[0]), rtol=1e-5)


def test_the_official_profile_tunes_what_the_paper_freezes():
  """In a linear model the one layer is shared, so nothing else is tuned."""
  paper = history(TEXT)
  official = history(OFFICIAL, rounds=2)
  chex.assert_trees_all_close(paper[1], official[1], rtol=1e-5, atol=1e-7)
  gap = tree.subtract(paper[2].server.model, official[2].server.model)
  assert tree.global_norm(gap) > 1e-4


@pytest.mark.parametrize('profile, networks', [('paper', 3), ('official', 2)])
def test_so_many_networks_vote(profile, networks):
  """Networks that are sure of all rows reach their number, and no more."""
  federation, _ = toy.federation()
  method = methods.make(f"fedtrinet(profile='{profile}', pretrain=0.0)",
                        toy.task(**EVERYONE))
  state, step = method.init(KEY, federation), jax.jit(method.round)
  model = state.server.model
  sure = model._replace(params=tree.scale(model.params, 1e6))
  for bar, some in ((networks - 0.01, True), (networks + 0.01, False)):
    server = state.server._replace(
        model=sure, confidence=jnp.float32(1), threshold=jnp.float32(bar))
    after, _ = step(state._replace(server=server), federation, jnp.int32(1),
                    KEY)
    assert (accepted(after) >= 0).any() == some


def test_the_official_profile_labels_image_by_image_in_training_mode():
  after = history(OFFICIAL.replace('4.5', '2.0'), rounds=2, model='conv')[-1]
  chex.assert_tree_all_finite(after)
  assert (accepted(after) >= 0).any()


def test_batches_are_joined_until_a_harvest():
  """Then statistics move for the labeled rows, and again for the others."""
  task = toy.task('conv')
  model = task.model.init(KEY)
  inputs = toy.federation()[0].train.inputs
  known, given = (Batch(jnp.asarray(inputs[part]), jnp.zeros(4, jnp.int32),
                        jnp.ones(4)) for part in (slice(4), slice(4, 8)))
  run = jax.jit(functools.partial(fedtrinet.method._pass, task))
  def passed(model, *batches):
    rows = jnp.concatenate([one.inputs for one in batches])
    logits, stats = task.apply_train(model, rows, jnp.ones(len(rows)))
    return logits, model._replace(stats=stats)
  both, joined = passed(model, known, given)
  first, between = passed(model, known)
  second, after = passed(between, given)
  for harvests, logits, end in ((0, both, joined), (
      1, jnp.concatenate([first, second]), after)):
    parts, stats = run(model, known, given, jnp.int32(harvests), KEY)
    chex.assert_trees_all_close(jnp.concatenate(parts), logits, rtol=1e-5,
                                atol=1e-6)
    chex.assert_trees_all_close(stats, end.stats, rtol=1e-5, atol=1e-6)
  assert abs(both - jnp.concatenate([first, second])).max() > 1e-2


def test_more_shared_layers_than_there_are_is_refused():
  method = methods.make('fedtrinet(num_shared=3)', toy.task())
  with pytest.raises(ValueError, match='num_shared is 3'):
    method.init(KEY, toy.federation()[0])
