"""Laws of FedSSL-DP: exactness, order, budget, and labels left alone."""
from __future__ import annotations

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import methods, privacy
from fedjax_ssl.core import rounds, tree
from fedjax_ssl.core.types import Client as ToAgent
from fedjax_ssl.core.types import Cohort, PASS_METRICS
from fedjax_ssl.data import federation as federation_lib
from fedjax_ssl.data import partition
from fedjax_ssl.methods import fedssl
from fedjax_ssl.methods.fedssl import gmixup, private_agents
from fedjax_ssl.methods.fedssl import method as fedssl_method
from fedjax_ssl.methods.parts import private_labels
from fedjax_ssl.models import gan
from fedjax_ssl.training import evaluate, metrics
from fedjax_ssl.training import runner as runner_lib
from tests import toy
from tests.thorough import wider

pytest.importorskip('dp_accounting')

SIZES = 'gan_width=4, noise_size=3'
BATCH = 4


@functools.lru_cache
def _federation():
  """Two agents with 8 labeled rows each, and one with unlabeled rows."""
  rng = np.random.default_rng(1)
  owner = np.repeat([0, 1, 2], [8, 8, 12]).astype(np.int32)
  dealt = partition.Partition(np.where(owner < 2, owner, -1),
                              np.where(owner < 2, -1, owner),
                              np.zeros(owner.size, bool))
  made = federation_lib.federate(
      toy.examples(rng, owner.size), toy.examples(rng, 6),
      toy.examples(rng, 9), dealt, num_clients=3,
      num_classes=toy.NUM_CLASSES, num_labeled_clients=2)
  return jax.tree.map(jnp.asarray, made)


def _task(**changes):
  return toy.task(labeled_batch=BATCH, unlabeled_batch=6, local_steps=2,
                  schedule_rounds=4, **changes)


class Runner:
  """A method with its compiled round."""

  def __init__(self, knobs: str, **changes):
    self.method = methods.make(f'fedssl({SIZES}, {knobs})', _task(**changes))
    self.start = self.method.init(toy.key(0), _federation())
    self.round = jax.jit(self.method.round)

  def run(self, count, federation=None, start=None, first=0):
    state = start or self.start
    for i in range(first, first + count):
      state, _ = self.round(state, federation or _federation(), jnp.int32(i),
                            jax.random.fold_in(toy.key(9), i))
    return state


runner = functools.lru_cache(Runner)
ALL = "dp_scope='all', epsilon=8.0, private_steps=2"


def _relabelled(federation):
  labels = federation.train.labels
  labeled = jnp.arange(labels.size) < 16
  return dataclasses.replace(federation, train=federation.train._replace(
      labels=jnp.where(labeled, (labels + 1) % toy.NUM_CLASSES, labels),
      inputs=jnp.where(labeled[:, None, None, None],
                       255 - federation.train.inputs,
                       federation.train.inputs)))


def test_epsilon_follows_the_accountant_and_only_grows():
  one = runner(ALL)
  sigma = float(one.start.server.budget.terms.noise)
  assert sigma == pytest.approx(privacy.noise_multiplier(
      8.0, BATCH / 8, 8, delta=1e-5), rel=1e-6)
  spent = []
  state = one.start
  for i in range(3):
    state = one.run(1, start=state, first=i)
    assert one.method.report is not None
    spent.append(float(one.method.report(
        state.server, jnp.int32(i + 1))['epsilon']))
    assert spent[-1] == pytest.approx(privacy.epsilon(
        sigma, BATCH / 8, 2 * (i + 1), delta=1e-5), rel=1e-4)
  assert 0 < spent[0] < spent[1] < spent[2] <= 8.0


def test_epsilon_is_evaluated_with_the_state():
  one = runner(ALL)
  federation = _federation()
  rows = toy.evaluation(one.method)(
      one.start, federation, evaluate.probe_of(federation))
  assert metrics.to_plain({'round': 0, **rows})['epsilon'] == 0


@pytest.mark.parametrize('knobs', [
    ALL, *wider(ALL.replace("'all'", "'classifier'"))])
def test_labels_rest_once_the_budget_is_spent(knobs):
  """The plan is 4 rounds; a fifth would exceed it."""
  one = runner(knobs)
  spent = one.run(4)
  budget = spent.server.budget
  assert float(budget.spent(4)) <= 8.0 and int(budget.terms.steps_in(4)) == 0
  after = one.run(2, start=spent, first=4)
  chex.assert_trees_all_equal(after, one.run(
      2, _relabelled(_federation()), start=spent, first=4))
  assert float(budget.spent(6)) == float(budget.spent(4))
  assert tree.global_norm(tree.subtract(
      after.server.nets, spent.server.nets)) > 0  # Others train on.
  early, other = (one.run(1, f) for f in (
      _federation(), _relabelled(_federation())))
  assert tree.global_norm(tree.subtract(
      early.server.nets, other.server.nets)) > 0


def test_a_round_is_taken_only_if_the_budget_holds_it():
  one = Runner("dp_scope='all', epsilon=8.0, noise_multiplier=1.0, "
               'private_steps=2')
  budget = one.start.server.budget
  allowed = int(budget.terms.allowed)
  assert 0 < allowed < 4
  assert budget.epsilons[allowed] <= 8.0 < budget.epsilons[allowed + 1]
  none = methods.make("fedssl(dp_scope='all', epsilon=0.1, "
                      'noise_multiplier=1.0)', _task())
  with pytest.raises(ValueError, match='epsilon=0.1 does not hold the first'):
    none.init(toy.key(0), _federation())


CLIP = 1e3  # Beyond any gradient here.
USUAL = 3  # Steps of a round without privacy.


class Agent:
  """One private step of agent 0 on all its rows, and the same plainly."""

  def __init__(self, scope: str, clip: float = CLIP, use_real: bool = True):
    task = toy.task(labeled_batch=8, local_steps=USUAL)
    federation = _federation()
    problem = gmixup.Problem(task, gan.make(width=4), gmixup.Choices(
        2, 2.0, .75, 3, use_real, True, 'all', 'mixed', 'mean',
        'non_saturating', 0.0))
    plan = private_labels.Plan('dp_scope', 8.0, 1e-5, clip, None, 3, 'rdp', 0)
    optimizers = {name: optax.sgd(0.1) for name in private_agents.PARTS}
    shard = tree.take(federation.clients, 0)
    root = toy.key(5)
    self.norms = private_agents.norms(scope, clip)
    self.nets = runner(ALL).start.server.nets
    self.inputs, self.rows = federation.train.inputs, shard.labeled

    def private(noise, inputs):
      client = ToAgent(jnp.int32(0), shard, (), federation.train._replace(
          inputs=inputs), federation.validation, jnp.int32(0), jnp.int32(0))
      return private_agents.train(
          problem, scope, plan, self.nets, optimizers, client,
          jnp.int32(1), noise, root)
    self._private = jax.jit(private)

    def one(t, nets):
      keys = jax.random.split(jax.random.fold_in(root, t), 4)
      places, mask = privacy.poisson_rows(
          keys[0], shard.num_labeled, 1.0, width=8, capacity=8)
      rows = shard.labeled[places]
      batch = gmixup.Rows(federation.train.inputs[rows],
                          federation.train.labels[rows], *[mask] * 3)
      learner = fedssl_method._Learner(nets, {
          name: optimizers[name].init(p) for name, p in (
              ('model', nets.model.params), ('generator', nets.generator),
              ('discriminator', nets.discriminator))})
      after = fedssl.step(problem, optimizers)(learner, batch, keys[1])[0].nets
      return after._replace(generator=tree.where(
          t == 0, after.generator, nets.generator))
    # G moves in the first step only.
    self.plain = jax.jit(lambda steps: jax.lax.fori_loop(
        0, steps, one, self.nets))

  def private(self, noise, inputs=None):
    return self._private(jnp.float32(noise),
                         self.inputs if inputs is None else inputs)


agent = functools.lru_cache(Agent)


@pytest.mark.parametrize('scope, steps', [
    ('all', 1), *wider(('generator', USUAL))])
def test_no_noise_and_no_clipping_is_the_plain_update(scope, steps):
  """And with noise on G alone, F and D take all the steps of a round."""
  one = agent(scope)
  plain = agent('all').plain(jnp.int32(steps))
  assert tree.global_norm(tree.subtract(plain, one.nets)) > 0
  chex.assert_trees_all_close(one.private(0), plain, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize('scope', ['all', 'classifier', *wider('generator')])
def test_noise_moves_the_networks_in_scope(scope):
  one = agent(scope)
  quiet, noisy = (one.private(x) for x in (0, 2.0))
  # Rate 0.1, noise times clipping norm, over 8 rows. What learns from noisy
  # networks moves too, but little beside it.
  for name, of in (('generator', lambda nets: nets.generator),
                   ('discriminator', lambda nets: nets.discriminator),
                   ('model', lambda nets: nets.model)):
    moved = float(tree.global_norm(tree.subtract(of(noisy), of(quiet))))
    expected = 0.1 * 2.0 * CLIP / 8 * math.sqrt(tree.num_scalars(of(quiet)))
    if scope == 'all' or name == {'classifier': 'model'}.get(scope, scope):
      assert moved == pytest.approx(expected, rel=0.15), name
    else:
      assert moved < 0.02 * expected, name


def test_no_row_moves_a_network_further_than_its_norm():
  """Without D the step is one mechanism: other rows draw as they did."""
  one = agent('all', 0.06, False)
  plain = one.private(0)
  other = one.private(0, one.inputs.at[one.rows[2]].set(
      255 - one.inputs[one.rows[2]]))
  for name, of in (('generator', lambda nets: nets.generator),
                   ('model', lambda nets: nets.model.params)):
    norm = one.norms[name]
    gap, moved = (float(tree.global_norm(tree.subtract(of(plain), of(x))))
                  for x in (other, one.nets))
    assert 0 < gap <= 1.001 * 0.1 * 2 * norm / 8
    assert 0 < moved <= 1.001 * 0.1 * norm


def test_norms_of_all_parts_make_the_sensitivity():
  for scope in private_agents.SCOPES:
    norms = private_agents.norms(scope, 0.7)
    finite = [c for c in norms.values() if math.isfinite(c)]
    assert math.hypot(*finite) == pytest.approx(0.7)
    assert (len(finite), len(norms)) == {
        'generator': (1, 3), 'classifier': (1, 1), 'all': (3, 3)}[scope]


def test_the_classifier_alone_learns_from_labels():
  """Without noise and clipping as it does where G moves beside it."""
  one = agent('classifier', use_real=False)
  alone, both = one.private(0), agent('all', use_real=False).private(0)
  chex.assert_trees_all_equal(alone.generator, one.nets.generator)
  chex.assert_trees_all_equal(alone.discriminator, one.nets.discriminator)
  chex.assert_trees_all_close(alone.model, both.model, rtol=1e-5, atol=1e-6)
  moved = tree.global_norm(tree.subtract(alone.model, one.nets.model))
  assert float(moved) > 1e-3


def test_agents_in_turn_go_in_a_drawn_order():
  orders = set()
  for i in range(20):
    ids = private_agents.in_turn(None, _federation(), toy.key(i)).ids
    chex.assert_shape(ids, (2, 1))
    orders.add(tuple(np.asarray(ids).ravel().tolist()))
  assert orders == {(0, 1), (1, 0)}


def test_a_turn_depends_on_the_order():
  """That agents at once do not is in `contract_test`, for every method."""
  def told(state, federation, key):
    del state, key
    return Cohort(federation.test.labels[:2, None], jnp.ones((2, 1), bool))
  plain = methods.make(f'fedssl({SIZES})', _task())
  assert plain.client_update is not None
  one = jax.jit(rounds.client_pass(
      _task(), plain.client_update,
      runner(ALL).method.aggregate, relay=True, sample=told,
      broadcast=lambda server, client_id, group: server.nets))
  ends = []
  for order in ([0, 1], [1, 0]):
    federation = _federation()
    labels = federation.test.labels.at[:2].set(jnp.array(order))
    ends.append(one(runner(ALL).start, dataclasses.replace(
        federation, test=federation.test._replace(labels=labels)),
                    jnp.int32(0), toy.key(2))[0].server.generator)
  assert tree.global_norm(tree.subtract(*ends)) > 1e-6


def test_private_rows_leave_no_metrics():
  one = runner(ALL)
  _, found = one.round(one.start, _federation(), jnp.int32(0),
                       toy.key(0))
  told = {name: value.rows for name, value in found.items()
          if name not in PASS_METRICS}
  # Of the one agent without labels, and of its 12 rows.
  assert told == {
      **dict.fromkeys(('backward_passes', 'forward_passes', 'train_loss',
                       'discriminator_loss'), 1), 'labeled_loss': 0,
      **dict.fromkeys(('mixup_loss', 'realism_loss', 'reconstruction'), 12)}


def test_refuses_what_cannot_be_private():
  with pytest.raises(ValueError, match='labels_at=server'):
    methods.make(f'fedssl({ALL})', toy.task(labels_at='server'))
  with pytest.raises(ValueError, match='norm'):
    methods.make(f'fedssl({ALL})', toy.task('conv'))
  method = methods.make(f'fedssl({SIZES}, {ALL})', toy.task())
  federation, _ = toy.federation()
  for holders in (-1, 0, toy.NUM_CLIENTS):
    with pytest.raises(ValueError, match='num_labeled_clients=.*give 1 to 5'):
      method.init(toy.key(0), dataclasses.replace(
          federation, num_labeled_clients=holders))


@pytest.mark.parametrize('knobs', [
    'clip_norm=1e999', 'clip_norm=1e39', 'clip_norm=0.0', 'epsilon=1e999',
    'epsilon=-1.0', 'noise_multiplier=1e39', 'noise_multiplier=0.0',
    'microbatch=-1', 'private_steps=-1', 'delta=0.0', 'delta=1.0'])
def test_a_knob_out_of_range_is_named(knobs):
  """A norm that is not finite would be a promise without any noise."""
  with pytest.raises(ValueError, match=f'{knobs.split("=")[0]} must be'):
    methods.make(f"fedssl(dp_scope='all', {knobs})", _task())


def test_labels_and_clients_that_would_be_passed_over_are_refused():
  federation = _federation()
  counts = federation.clients.num_labeled.at[2].set(3)
  method = methods.make(f'fedssl({SIZES}, {ALL})', _task())
  with pytest.raises(ValueError, match='first 2 clients, and client 2 holds'):
    method.init(toy.key(0), dataclasses.replace(
        federation, clients=federation.clients._replace(num_labeled=counts)))
  method = methods.make(f'fedssl({SIZES}, {ALL})', _task(cohort_size=2))
  with pytest.raises(ValueError, match='takes all 3 clients in every round'):
    method.init(toy.key(0), federation)


def test_the_budget_is_solved_where_shapes_are_traced():
  """Steps follow from epochs here: 8 rows in batches of 4."""
  method = methods.make(
      f"fedssl({SIZES}, dp_scope='all', noise_multiplier=1.0)",
      dataclasses.replace(_task(), local_steps=0))
  federation = _federation()
  state = runner_lib.state_shape(method, federation)
  made = method.init(toy.key(0), federation)
  chex.assert_trees_all_equal_shapes_and_dtypes(state, made)
  assert int(made.server.budget.terms.steps) == 2
