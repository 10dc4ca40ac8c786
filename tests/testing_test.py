"""`check_method` finds what a method does wrong, and names the law."""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import aggregation, losses, methods, testing
from fedjax_ssl.core import rounds, sampling, tree
from fedjax_ssl.core.local_training import Aux
from fedjax_ssl.core.types import Update
from fedjax_ssl.methods.parts import aggregators, averaging, network
from fedjax_ssl.testing import contract, keys

FEW = ('hidden_labels_are_never_read', 'predict_gives_logits_of_every_class',
       'a_broken_client_is_left_out')
RULE = ('a_slot_of_weight_0_equals_none',)


def guessing(task, *, weight: float = 1.0):
  """Learns classes that it makes up from the images."""
  def loss_fn(model, given, batch, key):
    del given
    truth = jnp.round(batch.unlabeled.inputs[:, 3:6].mean((1, 2, 3)) / 255)
    (logits,), stats = network.forward(task, model, batch.unlabeled, key=key)
    loss, _ = losses.cross_entropy(
        logits, truth.astype(jnp.int32), batch.unlabeled.mask)
    return weight * loss, Aux(stats, {})
  return averaging.averaging(task, loss_fn, streams='both')


def reading(task):
  """A method whose rounds read all labels of the federation."""
  made = guessing(task)
  def round_(state, federation, start, key):
    state, metrics = made.round(state, federation, start, key)
    labels = federation.train.labels
    seen = (labels * jnp.arange(labels.size)).sum() * 1e-5
    return state._replace(server=jax.tree.map(
        lambda x: x + seen.astype(x.dtype), state.server)), metrics
  return made._replace(round=round_)


def test_a_law_that_does_not_hold_is_named():
  with pytest.raises(AssertionError) as info:
    testing.check_method(reading, places=['clients'], laws=FEW)
  assert str(info.value).startswith(
      'hidden labels are never read at clients does not hold')


def test_a_loss_that_forgets_the_mask_is_found():
  def forgetful(task):
    def loss_fn(model, given, batch, key):
      del given
      (logits,), stats = network.forward(task, model, batch.labeled, key=key)
      return losses.cross_entropy(logits, batch.labeled.labels)[0], Aux(
          stats, {})
    return averaging.averaging(task, loss_fn, streams='labeled')
  with pytest.raises(AssertionError, match='masked rows are never learnt from'):
    testing.check_method(forgetful, places=['clients'],
                         laws=['masked_rows_are_never_learnt_from'])


@pytest.mark.parametrize('rule', [
    lambda stacked, weights: jax.tree.map(
        lambda x: x.mean(0).astype(x.dtype), stacked),
    lambda stacked, weights: jax.tree.map(lambda x: x[0], stacked),
    lambda stacked, weights: jax.tree.map(lambda x: x.max(0), stacked),
    lambda stacked, weights: jax.tree.map(
        lambda x: jnp.median(x, axis=0).astype(x.dtype), stacked)],
    ids=['mean', 'first', 'largest', 'median'])
def test_a_rule_that_does_not_read_the_weights_is_found(rule):
  with pytest.raises(AssertionError, match='(?s)a slot of weight 0 equals '
                     'none.*An update of weight 0 changes'):
    testing.check_aggregator(rule, laws=RULE)


@pytest.mark.parametrize('rule', ['median', 'krum(share=.1)'])
def test_a_rule_that_reads_the_weights_is_sound(rule):
  found = testing.check_aggregator(rule, laws=RULE)
  assert found == {f'{RULE[0]} at clients': ''}


OWN = ('equal_updates_do_not_add_up',)


@pytest.mark.parametrize('rule, said', [
    (lambda stacked, weights: jax.tree.map(
        lambda x: jnp.tensordot(weights, x, 1), stacked), 'as from a sum'),
    (lambda stacked, weights: jax.tree.map(
        lambda x: x.sum(0) / 200, stacked), 'as from a sum'),
    (lambda stacked, weights: jax.tree.map(
        lambda x: x[0] / weights[3], stacked), 'get one that is not')],
    ids=['weighted', 'by a constant', 'not finite'])
def test_a_sum_in_place_of_a_mean_is_found(rule, said):
  with pytest.raises(AssertionError, match='(?s)equal updates do not add up '
                     f'does not hold.*{said}'):
    testing.check_aggregator(rule, laws=OWN)


def _votes(stacked, weights):
  return jax.tree.map(
      lambda x: jnp.sign(jnp.tensordot(weights, jnp.sign(x), 1)), stacked)


def _quorum(stacked, weights):
  enough = (weights > 0).sum() > 5
  return jax.tree.map(lambda x: jnp.where(enough, x[0], 0), stacked)


def _shrunk(stacked, weights):
  return jax.tree.map(
      lambda x: jnp.tensordot(weights, x, 1) / (weights.sum() + 100), stacked)


@pytest.mark.parametrize('rule', [
    *sorted(aggregators.AGGREGATORS), _votes, _quorum, _shrunk])
def test_rules_that_do_not_add_up_are_sound(rule):
  assert testing.check_aggregator(rule, laws=OWN) == {OWN[0]: ''}


def test_an_unknown_law_names_those_there_are():
  with pytest.raises(ValueError, match='equal_updates_do_not_add_up'):
    testing.check_aggregator('mean', laws=['none'])


@pytest.mark.parametrize('radius, said', [
    (.5, ''), (1e-9, 'made-up updates change nothing in its server')])
def test_a_rule_that_leaves_out_what_is_far_off(radius, said):
  """That it learns from updates of its clients is another law."""
  def near(stacked, weights):
    mean = aggregation.weighted_mean(stacked, weights)
    return jax.tree.map(
        lambda x: jnp.where(tree.global_norm(mean) < radius, x, 0), mean)
  found = testing.check_aggregator(near, laws=RULE)
  assert found == {f'{RULE[0]} at clients': said}


def test_a_rule_of_two_passes_is_looked_at_in_both():
  """One object that cannot be hashed, as a plain dataclass is."""
  @dataclasses.dataclass
  class Rule:
    def __call__(self, server, updates, cohort, context, key):
      del cohort, context, key
      return jax.tree.map(
          lambda x, y: (x + y.mean((0, 1))).astype(x.dtype), server,
          updates.message), {}

  def twice(task):
    def update(payload, client, key):
      del key
      return Update(payload, jnp.float32(1), client.memory, {})
    both = [rounds.client_pass(task, update, rule, sample=sampling.groups(1, 4))
            for rule in (Rule(),) * 2]
    return methods.make('fedavg', task)._replace(round=rounds.chain(*both))
  with pytest.raises(AssertionError, match='An update of weight 0 changes'):
    testing.check_method(twice, places=['clients'],
                         laws=['a_slot_of_weight_0_equals_none'])


def test_an_aggregation_that_is_traced_with_its_round_is_passed_over():
  """The law calls it alone, where what it closes over is not to be had."""
  def fading(task):
    def round_(state, federation, start, key):
      decay = jnp.where(start > 2, 0.5, 1.0)
      def rule(stacked, weights):
        return jax.tree.map(lambda x: decay * x, aggregation.weighted_mean(
            stacked, weights))
      return methods.make('fedavg', task, aggregator=rule).round(
          state, federation, start, key)
    return methods.make('fedavg', task)._replace(round=round_)
  law = 'a_slot_of_weight_0_equals_none'
  found = testing.check_method(fading, places=['clients'], laws=[law])
  assert found == {
      f'{law} at clients': 'its aggregation uses what is traced with the round'}


def test_what_another_process_would_draw_again_is_found():
  laws = ['made_anew_it_is_the_same']
  def weighing(weigh):
    """A method with a factor on its loss, made where `weigh` is called."""
    def build(task):
      kept = weigh()
      def loss_fn(model, given, batch, key):
        del given
        (logits,), stats = network.forward(task, model, batch.labeled, key=key)
        loss, _ = losses.cross_entropy(logits, batch.labeled.labels,
                                       batch.labeled.mask)
        return kept() * loss, Aux(stats, {})
      return averaging.averaging(task, loss_fn, streams='labeled')
    return build
  draw = np.random.default_rng(0)
  def once():
    kept = draw.random(3)
    return lambda: jnp.asarray(kept).mean()
  for drawn in (lambda: draw.random, once):
    with pytest.raises(AssertionError, match='(?s)made anew it is the same at '
                       'clients does not hold.*jax.random from the key'):
      testing.check_method(weighing(drawn), places=['clients'], laws=laws)
  odd, key = np.array([np.nan, 1.]), jax.random.key(7)
  short = odd.astype(jnp.bfloat16)
  for sound in (lambda: lambda: jnp.nanmean(jnp.asarray(odd)),
                lambda: lambda: jnp.nanmean(jnp.asarray(short)).astype(float),
                lambda: lambda: jax.random.uniform(key)):
    testing.check_method(weighing(sound), places=['clients'], laws=laws)


def test_a_key_that_draws_twice_is_found():
  def repeated(task):
    def loss_fn(model, given, batch, key):
      del given
      rows = task.weak(key, batch.labeled.inputs)
      (logits,), stats = network.forward(
          task, model, batch.labeled._replace(inputs=rows), key=key)
      noisy = logits + jax.random.normal(key, logits.shape)
      return losses.cross_entropy(noisy, batch.labeled.labels,
                                  batch.labeled.mask)[0], Aux(stats, {})
    return averaging.averaging(task, loss_fn, streams='labeled')
  with pytest.raises(AssertionError, match='no key is used twice(.|\n)*split'):
    testing.check_method(repeated, places=['clients'],
                         laws=['no_key_is_used_twice'])


def test_a_sound_method_holds_them_with_its_knobs():
  found = testing.check_method(guessing, places=['clients'], laws=FEW,
                               weight=0.5)
  assert found == {f'{law} at clients': '' for law in FEW}


def test_the_example_keeps_the_contract(root):
  found = testing.check_method(
      f'{root}/experiments/examples/sharpened_fixmatch.py:'
      'sharpened_fixmatch(threshold=0.3)')
  assert {*found} == {f'{law} at {place}' for law in contract.LAWS
                      for place in ('clients', 'server')}
  assert {*found.values()} == {
      '', 'keeps nothing on the clients', 'reports nothing',
      "its server is handed the mean of the clients' updates alone"}
  assert 'resume is exact at clients: holds\n' in repr(found)
  assert 'at server: does not apply, reports nothing' in repr(found)


def test_the_example_with_a_memory_keeps_it(root):
  laws = ('memory_of_an_unsampled_client_is_unchanged', 'resume_is_exact',
          'masked_rows_are_never_learnt_from', 'no_key_is_used_twice',
          'a_client_without_rows_equals_an_absent_one')
  found = testing.check_method(
      f'{root}/experiments/examples/evened_fixmatch.py:'
      'evened_fixmatch(threshold=0.3)', laws=laws)
  assert {*found.values()} == {''}


def test_the_example_may_weigh_its_clients(root):
  found = testing.check_method(
      f'{root}/experiments/examples/evened_fixmatch.py:'
      'evened_fixmatch(threshold=0.3, by_guesses=True)', places=['clients'],
      laws=('a_client_without_rows_equals_an_absent_one',
            'a_broken_client_is_left_out'))
  assert {*found.values()} == {''}


def test_laws_that_cannot_be_told_are_passed_over():
  one = contract.CohortRunner(guessing, 'linear', 'clients')
  assert one.is_told and one.can_break
  one.is_told = False  # As of a method with a draw of its own.
  assert 'of its own' in testing._held(
      contract.slot_order_changes_no_bit, one, '')


@pytest.mark.parametrize('given, words', [
    ({'laws': ['non_such']}, 'law'), ({'places': ['moon']}, 'place')])
def test_unknown_laws_and_places_are_refused(given, words):
  with pytest.raises(ValueError, match=words):
    testing.check_method(guessing, **given)


def test_knobs_of_a_name_stand_in_the_text():
  with pytest.raises(ValueError, match='in the text'):
    testing.check_method('fixmatch', threshold=0.1)


def test_draws_of_quick_keys_differ_wherever_keys_do():
  """Seeds, children by number and by place, and draws of one key."""
  one = keys.key(0)
  children = [one, keys.key(1), *jax.random.split(one, 8), *(
      jax.random.fold_in(one, i) for i in range(8))]
  draws = np.array([jax.random.bits(key, (500,)) for key in children])
  assert len(np.unique(draws)) == draws.size
  assert (jax.random.bits(keys.key(0), (500,)) == draws[0]).all()


def test_draws_of_quick_keys_are_uniform_and_independent():
  size = 100_000
  children = jax.random.split(keys.key(3), 2)
  a, b = jax.vmap(lambda key: jax.random.uniform(key, (size,)))(children)
  np.testing.assert_array_equal(a, jax.random.uniform(children[0], (size,)))
  for x, y in ((a, b), (a[:-1], a[1:])):
    counts, _, _ = np.histogram2d(x, y, bins=10, range=[[0, 1]] * 2)
    # Chi squared of 99 degrees of freedom.
    assert ((counts - size / 100)**2 / (size / 100)).sum() < 160


@pytest.mark.parametrize('width', [8, 16, 32, 64])
def test_every_bit_of_a_draw_is_set_half_of_the_time(width):
  with jax.enable_x64(True):
    drawn = np.asarray(jax.random.bits(keys.key(2), (4000,), f'uint{width}'))
  assert drawn.dtype == f'uint{width}'
  shares = [(drawn >> i & 1).mean() for i in range(width)]
  assert max(abs(share - .5) for share in shares) < .04


def test_a_rule_that_gives_no_update_is_refused():
  with pytest.raises(ValueError, match='gives one update'):
    testing.check_aggregator(lambda stacked, weights: stacked, laws=RULE)
