"""What a task adds to any method: rules by name, server optimizers, attacks."""
from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_ssl
from fedjax_ssl import aggregation, data, methods
from fedjax_ssl.core import knobs, tree
from fedjax_ssl.core.types import Attack, Variables
from fedjax_ssl.methods.parts import aggregators, attacks, server_optimizers
from fedjax_ssl.testing import contract
from fedjax_ssl.training import checkpoint, loop
from tests import toy
from tests.methods import program_test
from tests.thorough import wider

KEY = toy.key(3)
# With the toy's six clients nobody: 0.05 of them is rounded to none.
NOBODY = Attack(0.05, send=lambda message, key: tree.scale(message, -9))
EVERYBODY = attacks.make('sign_flip(share=1, scale=1)')
FLIP = attacks.make('label_flip(share=0.5)')


@functools.cache
def _program(text, place, **changes):
  """A method and its compiled round."""
  made = methods.make(text, toy.task(labels_at=place, **changes))
  return made, jax.jit(made.round)


def _rounds(text, place='clients', count=2, federation=None, **changes):
  """The first state and the one after some rounds."""
  made, run = _program(text, place, **changes)
  federation = federation or toy.federation(place)[0]
  first = state = made.init(KEY, federation)
  for i in range(count):
    state, _ = run(state, federation, jnp.int32(i), jax.random.fold_in(KEY, i))
  return first, state


def _own(state):
  return state._replace(server=state.server.own, memory=state.memory.own)


SGD = {'server_optimizer': optax.sgd(1.0)}


# Messages of a model alone, with counts beside it, and labels at the server.
@pytest.mark.parametrize('text, place, changes', [
    ('fedavg', 'clients', SGD), ('fixmatch', 'server', {'attack': NOBODY}),
    *wider(('fedirm', 'clients', SGD), ('fixmatch', 'server', SGD),
           ('fedirm', 'clients', {'attack': NOBODY}),
           ('fedavg', 'clients', {'attack': NOBODY}))])
def test_what_changes_nothing_changes_no_bit(text, place, changes):
  _, plain = _rounds(text, place)
  _, added = _rounds(text, place, **changes)
  chex.assert_trees_all_equal(plain, _own(added))


def halved(stacked, weights, *, by: float = 2.0):
  """Takes the mean, divided."""
  return jax.tree.map(lambda x: x / by,
                      aggregation.weighted_mean(stacked, weights))


def test_a_rule_itself_is_one_by_name_too(tmp_path):
  stacked = {'w': np.array([[1., 5.], [3., 7.]], np.float32)}
  weights = np.ones(2, np.float32)
  build = aggregators.AGGREGATORS.adapt(halved)
  assert [*knobs.names(build)] == ['by'] and build.__doc__ == halved.__doc__
  for knob, got in (({}, [1., 3.]), ({'by': 4.0}, [.5, 1.5])):
    np.testing.assert_array_equal(build(**knob)(stacked, weights)['w'], got)
  assert aggregators.AGGREGATORS.adapt(aggregators.krum) is aggregators.krum
  (tmp_path / 'rule.py').write_text(
      'def last(stacked, weights):\n  return {"w": stacked["w"][-1]}\n')
  rule: Any = aggregators.make(f'{tmp_path}/rule.py:last')
  np.testing.assert_array_equal(rule(stacked, weights)['w'], [3., 7.])
  with pytest.raises(ValueError, match='no knob'):
    aggregators.make(f'{tmp_path}/rule.py:last(by=2)')
  with pytest.raises(ValueError, match='3 is neither a rule'):
    aggregators.AGGREGATORS.adapt(3)


def test_a_rule_by_name_is_the_rule():
  federation, _ = toy.federation()
  states = [made.round(made.init(KEY, federation), federation, jnp.int32(0),
                       KEY)[0] for made in (
      methods.make('fedavg', toy.task(), aggregator='trimmed_mean(trim=.3)'),
      methods.make('fedavg', toy.task(), aggregator=lambda stacked, weights: (
          aggregation.trimmed_mean(stacked, weights, trim=0.3))))]
  chex.assert_trees_all_equal(*states)


@pytest.mark.parametrize('name', aggregators.AGGREGATORS)
def test_every_rule_is_made_by_its_name(name):
  rule = aggregators.make(name)
  assert (rule is None) == (name == 'mean')
  if rule is not None:
    chex.assert_trees_all_close(
        rule(jnp.ones((3, 2)) / 9, jnp.ones(3)), jnp.ones(2) / 9)


def test_resume_is_exact(tmp_path):
  """Of moments and of who attacks, under a rule that needs all updates."""
  one = contract.Runner(
      functools.partial(methods.make, 'fixmatch'), 'linear', 'clients',
      aggregator=aggregation.median,
      server_optimizer=optax.adam(0.01),
      attack=attacks.make('noise(share=.3)'))
  straight = one.rounds(4)
  steps = checkpoint.Checkpoints(tmp_path)
  steps.save(2, one.rounds(2))
  round_, saved = steps.restore(one.start) or (0, None)
  saved = jax.tree.map(jnp.asarray, saved)
  chex.assert_trees_all_equal(one.rounds(2, saved, first=round_), straight)
  assert int(straight[0].memory.added.sum()) == 2
  moments = tree.subtract(straight[0].server.added, one.start[0].server.added)
  assert tree.global_norm(moments) > 0


_CODE = """
import json, sys
from tests.methods import additions_test
print(json.dumps([additions_test.on_devices(x) for x in sys.argv[1:]]))
"""


def on_devices(rule: str):
  counts = (1, 2)
  return program_test.trained(
      'fedavg', 'clients', counts, aggregator=aggregators.make(rule),
      server_optimizer=server_optimizers.make('adam'),
      attack=attacks.make('noise'))[:len(counts)]


@pytest.mark.thorough
@pytest.mark.parametrize('rules', [
    ['multi_krum'], ['trimmed_mean(trim=.3)', 'geometric_median']])
def test_the_number_of_devices_changes_no_bit(run_python, rules):
  found = json.loads(run_python(_CODE, *rules, devices=2, timeout=1200))
  for first, *rest in found:
    assert first.get('error') is None, first
    assert rest and all(other == first for other in rest)
  assert len({str(first['state']) for first, *_ in found}) == len(rules)


BETA1, BETA2, TAU, RATE = 0.9, 0.99, 1e-3, 0.1


def _numpy(name, deltas):
  """What the server adds in each round, by hand."""
  m: Any = 0.0
  v: Any = {'adagrad': TAU**2, 'yogi': 1e-6}.get(name, 0.0)
  for t, d in enumerate(deltas, 1):
    if name == 'momentum':
      m = BETA1 * m + d
      yield RATE * m
    elif name == 'adagrad':
      v = v + d**2
      yield RATE * d / np.sqrt(v)
    elif name == 'sgd':
      yield RATE * d
    else:
      m = BETA1 * m + (1 - BETA1) * d
      v = (BETA2 * v + (1 - BETA2) * d**2 if name == 'adam'
           else v - (1 - BETA2) * np.sign(v - d**2) * d**2)
      yield RATE * m / (1 - BETA1**t) / (
          np.sqrt(v / (1 - BETA2**t)) + TAU)


@pytest.mark.parametrize('name', server_optimizers.SERVER_OPTIMIZERS)
def test_optimizers_are_those_of_fedopt(name):
  optimizer = server_optimizers.make(name, RATE)
  assert optimizer is not None
  deltas = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
  stats = {'mean': jnp.full(2, 7.0)}
  moments = optimizer.init({'w': jnp.zeros(5)})
  for delta, wanted in zip(deltas, _numpy(name, deltas), strict=True):
    message = Variables({'w': jnp.asarray(delta)}, stats)
    before = moments
    step, moments = server_optimizers.step(optimizer, message, moments)
    np.testing.assert_allclose(step.params['w'], wanted, rtol=2e-4, atol=1e-5)
    chex.assert_trees_all_equal(step.stats, stats)  # Averaged as ever.
    nothing = tree.zeros_like(message)
    chex.assert_trees_all_equal(
        server_optimizers.step(optimizer, nothing, before), (nothing, before))


def test_only_sgd_with_rate_one_adds_nothing():
  assert server_optimizers.make('sgd') is None
  assert server_optimizers.make('sgd', 1.0) is None
  assert server_optimizers.make('sgd', 0.5) is not None
  assert server_optimizers.make('momentum(beta=0)') is not None
  with pytest.raises(
      ValueError, match='server_learning_rate=0.0: must be above 0'):
    server_optimizers.make('adam', 0.0)


def test_hostile_clients_are_a_fixed_share_drawn_by_the_seed():
  attack = attacks.make('label_flip(share=.25)')
  assert attack is not None
  found = [np.asarray(attacks.hostile(attack, toy.key(seed), 20))
           for seed in (0, 0, 1)]
  assert [int(x.sum()) for x in found] == [5, 5, 5]
  assert (found[0] == found[1]).all() and (found[0] != found[2]).any()
  assert attacks.make('noise(share=0)') is None is attacks.make('none')
  for share, want in ((.27, 5), (.29, 6)):  # Of 5.4 and 5.8 the nearest.
    assert attacks.hostile(Attack(share), KEY, 20).sum() == want


def test_flipped_labels_are_those_of_a_federation_with_such_labels():
  federation, _ = toy.federation()
  first, attacked = _rounds('fixmatch', attack=FLIP)
  labels = np.array(federation.train.labels)
  for client in np.flatnonzero(first.memory.added):
    shard = tree.take(federation.clients, int(client))
    rows = shard.labeled[:int(shard.num_labeled)]
    labels[rows] = toy.NUM_CLASSES - 1 - labels[rows]
  assert (labels != federation.train.labels).any()
  _, plain = _rounds('fixmatch', federation=dataclasses.replace(
      federation, train=federation.train._replace(labels=jnp.asarray(labels))))
  chex.assert_trees_all_equal(plain, _own(attacked))


def test_if_all_flip_the_sign_the_model_goes_the_other_way():
  first, plain = _rounds('fedavg', count=1)
  _, attacked = _rounds('fedavg', count=1, attack=EVERYBODY)
  chex.assert_trees_all_close(
      tree.subtract(first.server.model, attacked.server.own.model),
      tree.subtract(plain.server.model, first.server.model), atol=1e-6)


def test_noise_has_the_length_that_was_asked_for():
  attack = attacks.make('noise(share=1, scale=5)')
  assert attack is not None and attack.send is not None
  message = {'a': jnp.ones((300, 4)), 'count': jnp.arange(3)}
  sent = attack.send(message, KEY)
  chex.assert_trees_all_equal(sent['count'], message['count'])
  ratio = tree.global_norm(sent['a']) / tree.global_norm(message)
  assert 4.5 < float(ratio) < 5.5


@pytest.mark.parametrize('text, changes, word', [
    ('local', {'attack': EVERYBODY}, 'attack'),
    ('local', {'server_optimizer': optax.adam(1.0)}, 'server_optimizer'),
    ('rscfed', {'server_optimizer': optax.adam(1.0)}, 'server_optimizer'),
    ('fixmatch', {'attack': FLIP, 'labels_at': 'server'}, 'attack'),
    ("fedssl(dp_scope='all')", {
        'attack': FLIP, 'cohort_size': toy.NUM_CLIENTS}, 'attack')])
def test_where_nothing_can_be_added_it_is_refused(text, changes, word):
  with pytest.raises(ValueError, match=f'leave {word} out'):
    methods.make(text, toy.task(**changes))


@pytest.mark.parametrize('text', ['local', *wider('rscfed')])
def test_methods_of_their_own_can_be_attacked(text):
  attack = EVERYBODY if text == 'rscfed' else FLIP
  _, plain = _rounds(text, count=1)
  _, attacked = _rounds(text, count=1, attack=attack)
  with pytest.raises(AssertionError):
    chex.assert_trees_all_close(plain, _own(attacked))


def test_a_rule_withstands_what_the_mean_does_not():
  """Sign flips by four of twenty clients, on digits."""
  digits, rng = data.load('digits'), np.random.default_rng(0)
  labels = digits.train.labels
  owner = rng.integers(0, 20, labels.size).astype(np.int32)
  none = np.full(labels.size, -1, np.int32)
  federation = data.federate(
      digits.train, None, digits.test,
      data.Partition(owner, none, np.zeros(labels.size, bool)), num_clients=20)
  reached: dict[str, float] = {}
  for rule in ('mean', 'median'):
    task = fedjax_ssl.make_task(fedjax_ssl.TaskSpec(
        10, digits.train.inputs.shape[1:], model='linear', flip=False,
        weak='none', std=tuple(digits.std), mean=tuple(digits.mean),
        learning_rate=0.2, local_steps=5, cohort_size=20, aggregator=rule,
        attack='sign_flip(share=.2)'))
    rows: list[Any] = []
    fedjax_ssl.train(
        methods.make('fedavg', task), [federation], num_rounds=5, eval_every=0,
        observer=loop.Observer(on_row=rows.append))
    reached[rule] = float(rows[-1].values['accuracy'])
  assert reached['median'] > 0.8 > 0.5 > reached['mean'], reached
