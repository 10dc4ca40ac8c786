"""UDA, Pseudo-Label, MixMatch, FlexMatch, local training: their laws."""
from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import losses, methods
from fedjax_ssl.core import optimizers, tree
from fedjax_ssl.methods import mixmatch
from tests import toy
from tests.methods.averaging_test import one_round
from tests.methods.updates import change, lowered, same, update
from tests.thorough import wider

KEY = toy.key(4)
# Each with a bar that no prediction reaches, and its unlabeled weight.
SILENT = ('uda(tsa="none", threshold=1.0, {})',
          'pseudo_label(form="hard", threshold=1.1, {})')


def weights(state):
  return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(
      state.server.model.params)])


@pytest.mark.thorough  # FixMatch's is in `averaging_test`.
@pytest.mark.parametrize('text', SILENT)
def test_a_bar_out_of_reach_leaves_the_supervised_part(text):
  a, b = (update(text.format(f'unlabeled_weight={x}')) for x in (1.0, 70.0))
  assert a.metrics['mask_rate'].total == 0
  chex.assert_trees_all_equal(a.message, b.message)


def test_silent_methods_share_their_supervised_part():
  reference, *rest = (change(text, weak=same) for text in (
      'fixmatch(threshold=1.1)', *(t.format('mu=0.01') for t in SILENT)))
  for got in rest:
    np.testing.assert_allclose(got, reference, rtol=1e-5, atol=1e-7)


def test_annealing_holds_back_early_and_nothing_at_the_end():
  """At the run's last step the bar is 1, so every labeled row counts."""
  def sent(tsa, round_, client=0):
    return update(f'uda(tsa="{tsa}")', client, round_, local_steps=1,
                  schedule_rounds=3)
  last = sent('exp', 2)
  chex.assert_trees_all_close(last.message, sent('none', 2).message,
                              rtol=1e-5, atol=1e-7)
  assert toy.means(last.metrics)['tsa_rate'] == 1
  first = sent('exp', 0, client=1)
  assert toy.means(first.metrics)['tsa_rate'] < 1


def test_by_default_every_labeled_row_counts_from_the_first_step():
  """A bar that rises from 1/C leaves the rows of one or two classes."""
  a, b = (change(text, weak=same, schedule_rounds=1000)
          for text in ('uda(threshold=1.0)', 'fixmatch(threshold=1.1)'))
  np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('profile, knobs', [
    ('official', "tsa='none', threshold=0.8, temperature=0.4"),
    *wider(('fedmatch', "tsa='exp', threshold=0.0, temperature=1.0"))])
def test_a_profile_of_uda_is_its_knobs(profile, knobs):
  other = {'official': 'fedmatch', 'fedmatch': 'official'}[profile]
  a, b, c = map(lowered, (f"uda(profile='{profile}')",
                          f"uda(profile='{other}', {knobs})",
                          f"uda(profile='{other}')"))
  assert a == b != c


@pytest.mark.parametrize('round_, weight', [
    (0, 75 / 4), *wider((3, 75), (1, 75 / 2))])
def test_the_original_weight_rises_over_the_whole_run(round_, weight):
  """Sooner, a network that knows no label yet is held at what it says."""
  def sent(knobs):
    return change(f"mixmatch(profile='original'{knobs})", round_=round_,
                  local_steps=1, schedule_rounds=4)
  np.testing.assert_allclose(
      sent(''), sent(f', unlabeled_weight={weight}, ramp=0.0'),
      rtol=1e-5, atol=1e-7)


def test_temperature_one_does_not_sharpen():
  a, b = (change(f'pseudo_label(num_views=1, temperature={x})')
          for x in (1.0, 0.3))
  assert not np.allclose(a, b)
  p = jnp.array([[.2, .5, .3]])
  np.testing.assert_allclose(losses.sharpen(p, temperature=1.0), p, rtol=1e-6)


def test_hard_labels_gain_weight_over_the_run():
  def moved(ramp, round_):
    return change(f'pseudo_label(form="hard", threshold=0.0, ramp={ramp})',
                  round_=round_, schedule_rounds=10)
  assert not np.allclose(moved(0.5, 0), moved(0.0, 0), atol=1e-6)
  np.testing.assert_allclose(moved(0.5, 9), moved(0.0, 9), rtol=1e-5,
                             atol=1e-7)


def test_mixing_changes_the_labeled_part():
  a, b = (change(f'mixmatch(alpha={x}, unlabeled_weight=0.0)', weak=same)
          for x in (0.0, 0.75))
  assert not np.allclose(a, b, atol=1e-4)


def test_small_alpha_tends_to_unmixed():
  inputs = jax.random.uniform(KEY, (6, 2))
  targets = jax.nn.one_hot(jnp.arange(6) % 3, 3)
  mixed, labels = mixmatch.mix(KEY, inputs, targets, jnp.ones(6), alpha=1e-4,
                               dominant=True)
  np.testing.assert_allclose(mixed, inputs, atol=1e-3)
  np.testing.assert_allclose(labels, targets, atol=1e-3)


@pytest.mark.thorough
def test_rounds_of_small_alpha_tend_to_those_of_unmixed_examples():
  """With the unlabeled part: guesses and views enter their loss as they are.

  Under vmap, which the contract holds for the other profile.
  """
  text = 'mixmatch(profile="original", alpha={}, unlabeled_weight=2.0)'
  unmixed, nearly, mixed = (
      weights(one_round(text.format(alpha), client_map='vmap')[1])
      for alpha in (0.0, 1e-4, 0.75))
  np.testing.assert_allclose(nearly, unmixed, atol=1e-5)
  assert not np.allclose(mixed, unmixed, atol=1e-4)


def test_without_dominance_small_alpha_gives_one_of_the_two_rows():
  inputs = jax.random.uniform(KEY, (32, 2))
  targets = jax.nn.one_hot(jnp.arange(32), 32)
  mixed, labels = mixmatch.mix(KEY, inputs, targets, jnp.ones(32), alpha=1e-4,
                               dominant=False)
  chosen = labels.argmax(-1)
  np.testing.assert_allclose(mixed, inputs[chosen], atol=1e-3)
  moved = (chosen != jnp.arange(32)).mean()
  assert 0.1 < moved < 0.9


def test_partners_permute_the_real_rows():
  mask = jnp.array([1., 0., 1., 1., 0., 1.])
  for seed in range(5):
    other = mixmatch.partners(toy.key(seed), mask)
    real = np.asarray(other)[np.asarray(mask) > 0]
    assert sorted(real.tolist()) == [0, 2, 3, 5]


def test_padding_never_enters_a_blend():
  inputs = jnp.where(jnp.arange(5)[:, None] < 3, 1.0, jnp.nan)
  mask = (jnp.arange(5) < 3).astype(jnp.float32)
  mixed, _ = mixmatch.mix(KEY, inputs, jnp.ones((5, 2)), mask, alpha=0.75,
                          dominant=False)
  np.testing.assert_allclose(mixed[:3], 1)


def test_dominant_blends_stay_nearer_to_their_first_row():
  inputs = jnp.arange(64.0)[:, None]
  mask = jnp.ones(64)
  mixed, _ = mixmatch.mix(KEY, inputs, inputs, mask, alpha=0.75, dominant=True)
  other = inputs[mixmatch.partners(jax.random.split(KEY)[0], mask)]
  assert (jnp.abs(mixed - inputs) <= jnp.abs(mixed - other) + 1e-4).all()


def test_flexmatch_remembers_confident_rows_of_sampled_clients():
  _, after, _ = one_round('flexmatch(threshold=0.34)',
                          cohort_size=toy.NUM_CLIENTS)
  memory = np.asarray(after.memory.kept)
  for client, n in enumerate(toy.UNLABELED):
    assert set(memory[client, :n]) <= set(range(-1, toy.NUM_CLASSES))
    assert (memory[client, n:] == -2).all()
  assert (memory >= 0).any()


def test_flexmatch_starts_without_a_bar_and_ends_below_threshold():
  """With nothing learnt beta is 0, as in the paper; it never exceeds tau."""
  federation, _ = toy.federation()
  method = methods.make('flexmatch(threshold=0.99)', toy.task())
  state = method.init(KEY, federation)
  _, metrics = jax.jit(method.round)(state, federation, jnp.int32(0), KEY)
  np.testing.assert_allclose(toy.means(metrics)['mask_rate'], 1)
  # All rows known and classes equal: the bar is the threshold itself.
  place = jnp.arange(state.memory.kept.shape[1])
  full = jnp.where(state.memory.kept == -2, -2, place % toy.NUM_CLASSES)
  known = state._replace(memory=state.memory._replace(kept=full))
  equal = dataclasses.replace(federation)
  _, metrics = jax.jit(method.round)(known, equal, jnp.int32(0), KEY)
  assert toy.means(metrics)['mask_rate'] < 0.5


def test_received_and_own_labels_agree_while_the_model_has_not_moved():
  """One local step: the received model is still the local one."""
  text = 'fixmatch(threshold=0.3, labeler="{}")'
  a, b = (change(text.format(x), local_steps=1) for x in ('local', 'global'))
  np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
  a, b = (change(text.format(x), local_steps=6) for x in ('local', 'global'))
  assert not np.allclose(a, b, atol=1e-5)


def test_local_clients_send_nothing_and_go_on_from_their_own():
  before, after, metrics = one_round('local', cohort_size=toy.NUM_CLIENTS)
  chex.assert_trees_all_equal(before.server, after.server)
  assert metrics['bytes_up'] == metrics['bytes_down'] == 0
  moved = [float(tree.global_norm(tree.subtract(
      tree.take(after.memory.model, i), tree.take(before.memory.model, i))))
           for i in range(toy.NUM_CLIENTS)]
  assert [m > 0 for m in moved] == [n > 0 for n in toy.LABELED]


def test_a_lone_client_of_a_federation_of_one_is_local_training():
  """FedAvg over a single participant moves it as local training does."""
  _, joint, _ = one_round('fedavg(keep_local=True)', cohort_size=1)
  _, alone, _ = one_round('local', cohort_size=1)
  chex.assert_trees_all_equal(joint.memory.model, alone.memory.model)


@pytest.mark.parametrize('text', [
    "fixmatch(server='local', threshold=0.0)",
    *wider("uda(server='local', threshold=0.0)")])
def test_semi_supervised_methods_without_communication(text):
  before, after, metrics = one_round(text, cohort_size=toy.NUM_CLIENTS)
  chex.assert_trees_all_equal(before.server, after.server)
  assert metrics['bytes_up'] == 0
  moved = [float(tree.global_norm(tree.subtract(
      tree.take(after.memory.model, i), tree.take(before.memory.model, i))))
           for i in range(toy.NUM_CLIENTS)]
  assert [m > 0 for m in moved] == [
      a + b > 0 for a, b in zip(toy.LABELED, toy.UNLABELED, strict=True)]


@pytest.mark.parametrize('text', [
    'local', "softmatch(server='local')", *wider(*(
        f"{name}(server='local')" for name in (
            'fixmatch', 'flexmatch', 'uda', 'pseudo_label', 'mixmatch',
            'freematch', 'adamatch')))])
def test_a_local_client_starts_from_its_own_last_model(text):
  """Moving the server's record between rounds changes nothing."""
  federation, _ = toy.federation()
  method = methods.make(text, toy.task())
  state = method.init(KEY, federation)
  run = jax.jit(method.round)
  state, _ = run(state, federation, jnp.int32(0), KEY)
  far = state._replace(server=jax.tree.map(lambda x: x + 9, state.server))
  a, b = (run(s, federation, jnp.int32(1), KEY)[0] for s in (state, far))
  chex.assert_trees_all_equal(a.memory, b.memory)


@pytest.mark.parametrize('name', [
    'fixmatch', *wider('flexmatch', 'uda', 'pseudo_label', 'mixmatch',
                       'freematch', 'softmatch', 'adamatch')])
def test_every_method_runs_on_the_fedprox_server(name):
  """Without its term it is the plain one."""
  plain, zero, pulled = (change(text) for text in (
      name, f"{name}(server='fedprox', mu=0.0)",
      f"{name}(server='fedprox', mu=2.0)"))
  np.testing.assert_array_equal(plain, zero)
  assert not np.allclose(plain, pulled, atol=1e-5)


def test_flexmatch_writes_the_class_of_each_confident_row():
  """Without learning or augmentation, memory is what the model says."""
  federation, _ = toy.federation()
  task = toy.task(weak=same, cohort_size=toy.NUM_CLIENTS,
                  optimizer=optimizers.make('sgd', learning_rate=1e-20))
  method = methods.make('flexmatch(threshold=0.4)', task)
  state = method.init(KEY, federation)
  after, _ = jax.jit(method.round)(state, federation, jnp.int32(0), KEY)
  for client, n in enumerate(toy.UNLABELED):
    rows = np.asarray(federation.clients.unlabeled)[client, :n]
    if not n:
      continue
    assert method.predict is not None
    p = np.asarray(jax.nn.softmax(method.predict(
        state.server, federation.train.inputs[rows])))
    want = np.where(p.max(-1) >= 0.4, p.argmax(-1), -1)
    np.testing.assert_array_equal(after.memory.kept[client, :n], want)


def test_flexmatch_refuses_a_stream():
  federation, _ = toy.federation()
  stream = jax.tree.map(lambda x: x[None], federation.clients)
  streamed = dataclasses.replace(federation, stream=stream, rounds_per_task=1)
  with pytest.raises(ValueError, match='stream'):
    methods.make('flexmatch', toy.task()).init(KEY, streamed)


def test_static_statistics_need_a_server():
  with pytest.raises(ValueError, match='static'):
    methods.make('local', toy.task('static'))
