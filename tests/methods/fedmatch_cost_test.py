"""FedMatch: what is sent and counted, who helps, ablations, bad knobs."""
from __future__ import annotations

import dataclasses
import functools
import inspect
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods, sparse
from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Context, Examples
from fedjax_ssl.methods import fedmatch
from fedjax_ssl.methods.fedmatch import client, helpers, server, settings
from fedjax_ssl.methods.parts import plateau
from tests import toy
from tests.methods import fedmatch_test, updates

KEY = toy.key(6)
after, compiled = fedmatch_test.after, fedmatch_test.compiled
SIZE = 64 * 3 + 3  # The linear model's two leaves.


def moved(before, now, bar):
  """Entries that differ by more than `bar`, counted in NumPy."""
  return sum(int((np.abs(np.asarray(b) - np.asarray(a)) > bar).sum())
             for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(now),
                             strict=True))


VALUES = ("fedmatch(l1=.5, psi_threshold=0.02, threshold=0.3, "
          "num_helpers=1, lr_decay='server', patience=1)")


def test_cost_of_values_against_a_count_of_the_two_leaves():
  """One client a round: the server then holds exactly what was sent."""
  federation, _ = toy.federation()
  one, first = after(VALUES, federation, cohort_size=1)
  assert sparse.size(one.server.sigma) == SIZE
  kept = moved(tree.zeros_like(one.server.psi), one.server.psi, 0.02)
  assert 0 < kept < SIZE
  np.testing.assert_allclose(first['cost_up'], 100 * (1 + kept / SIZE),
                             rtol=1e-5)
  np.testing.assert_allclose(first['cost_down'], 100)  # psi is still 0.
  assert first['bytes_up'] == 4 * (SIZE + kept)
  np.testing.assert_allclose(first['psi_density'], kept / SIZE, rtol=1e-5)
  # The one helper is that psi once more, unless it is the client's own.
  _, run = compiled(VALUES, cohort_size=1)
  down = {round(float(toy.means(run(
      one, federation, jnp.int32(1), toy.key(k))[1])['bytes_down'] / 4))
          for k in range(8)}
  assert down == {SIZE + kept, SIZE + 2 * kept}


def lost(key, x):
  """A strong view that is broken."""
  del key
  return x * jnp.nan


def test_a_broken_psi_is_left_out_at_any_density():
  federation, _ = toy.federation('server')
  where = {'labels_at': 'server', 'strong': lost}
  text = 'fedmatch(threshold=0.0, density=0.5, num_helpers=0)'
  state, metrics = after(text, federation, **where)
  busy = sum(rows > 0 for rows in toy.UNLABELED)
  assert metrics['num_rejected'] == busy
  assert sparse.num_nonzero(state.server.psi) == 0


V3 = ("fedmatch(profile='v3code', threshold=0.3, num_helpers=2, "
      "delta_threshold=0.01, keep_local=True)")


def test_cost_of_differences_against_a_count_of_the_two_leaves():
  federation, _ = toy.federation()
  method, run = compiled(V3, cohort_size=1)
  before = method.init(toy.key(0), federation)
  one, first = run(before, federation, jnp.int32(0), KEY)
  first = toy.means(first)
  up = sum(moved(getattr(before.server, part), getattr(one.server, part), .009)
           for part in ('sigma', 'psi'))
  assert 0 < up < 2 * SIZE
  np.testing.assert_allclose(first['cost_up'], 100 * up / SIZE, rtol=1e-5)
  np.testing.assert_allclose(first['cost_down'], 200)
  # Later: what changed since the common start, or since its own last round.
  who = int(np.flatnonzero(one.server.agents.seen)[0])
  two, second = run(one, federation, jnp.int32(2), toy.key(11))
  other = [i for i in np.flatnonzero(two.server.agents.seen) if i != who]
  assert other  # Another client, so its copy is the start.
  down = sum(moved(getattr(before.server, part), getattr(one.server, part),
                   .01) for part in ('sigma', 'psi'))
  np.testing.assert_allclose(toy.means(second)['cost_down'],
                             100 * down / SIZE, rtol=1e-5)
  # It keeps what the server now holds of it.
  memory = tree.take(two.memory, int(other[0]))
  chex.assert_trees_all_close(
      memory.copy, (two.server.sigma, two.server.psi), atol=1e-6)
  chex.assert_trees_all_close(
      memory.model.params, tree.add(two.server.sigma, two.server.psi),
      atol=1e-6)


def test_a_clients_rate_falls_by_the_model_that_it_trained():
  """What the server judges it by is what it sent."""
  few, all_ = (updates.update(
      f"fedmatch(profile='v3code', num_helpers=0, density={density})",
      sent=lambda server: client.Payload(
          server.sigma, server.psi, server.stats, None, None))
      for density in (.05, 1.0))
  assert few.memory.rate.best == all_.memory.rate.best
  assert few.metrics['cost_up'] < all_.metrics['cost_up']
  changes = jax.tree.map(lambda x, y: np.any(x != y), few.message.psi,
                         all_.message.psi)
  assert any(jax.tree.leaves(changes))


def settled(place='clients', **knobs):
  every = inspect.signature(fedmatch.fedmatch).parameters.values()
  return settings.settle(toy.task(labels_at=place), **{
      **{p.name: p.default for p in every if p.name != 'task'}, **knobs})


def arrived(round_=3, due=False, stale=(0., 0., 0.), **knobs):
  """What a client holds that had 1, 2, 3 and is sent 1.001, 0, 3.

  Its psi is sent as 0; the one it sent last is `stale`. Then its helper's.
  """
  s = settled(profile='v3code', delta_threshold=.01, **knobs)
  old, new = {'w': jnp.array([1., 2., 3.])}, {'w': jnp.array([1.001, 0., 3.])}
  agents = helpers.Helpers({'w': jnp.array([[0., 5., 3.], [4., 5., 6.]])},
                           jnp.array([2, -1]))
  payload = client.Payload(new, {'w': jnp.zeros(3)}, {}, agents, None)
  one: Any = SimpleNamespace(
      memory=client.Memory(None, (old, {'w': jnp.array(stale)}), None),
      round=jnp.int32(round_))
  (sigma, _), held, count = client.received(s, payload, one, jnp.bool_(due))
  assert held is not None
  return sigma['w'].tolist(), float(count), held.psi['w'][0].tolist()


def test_what_a_client_holds_and_what_it_took():
  all_, kept = pytest.approx([1.001, 0, 3]), pytest.approx([1, 0, 3])
  whole = [0, 5, 3]
  assert arrived() == (all_, 1, whole)
  assert arrived(exact_down=False) == (kept, 1, whole)
  assert arrived(round_=0) == (all_, 6, whole)  # Both parts whole.
  assert arrived(due=True) == (all_, 3, whole)  # A helper with two entries.
  assert arrived(due=True, sending='values') == (all_, 5, whole)
  # One entry is as in the psi that was sent last; what is 0 does not count.
  stale = {'due': True, 'stale': (.5, 5.009, 0)}
  assert arrived(**stale) == (all_, 4, whole)
  assert arrived(**stale, exact_down=False) == (
      kept, 5, pytest.approx([0, 5.009, 3]))


def test_what_the_server_holds_and_what_it_took():
  held = ({'w': jnp.array([1., 2.])}, {'w': jnp.array([.5, 0., 0., .1])})
  trained = ({'w': jnp.array([1., 3.])}, {'w': jnp.array([.5, .2, 1e-9, .4])})
  def sent(**knobs):
    (sigma, psi), count = client.sent_to_server(
        settled(**{'psi_threshold': 5e-6, **knobs}), held, trained)
    return sigma['w'].tolist(), psi['w'].tolist(), int(count)
  psi = pytest.approx([.5, .2, 0, .4])
  assert sent() == ([1, 3], psi, 5)
  assert sent(density=.5) == ([1, 3], pytest.approx([.5, 0, 0, .4]), 4)
  assert sent(learn='psi') == ([1, 3], psi, 3)
  assert sent(learn='sigma')[2] == 2
  differences = {'sending': 'differences', 'delta_threshold': .25}
  assert sent(**differences) == ([1, 3], pytest.approx([.5, 0, 0, .4]), 2)


@pytest.mark.parametrize('density', [1.0, .77, .25, 0.0])
def test_at_most_the_density_is_sent_as_differences_too(density):
  """What moved most; the server keeps its numbers for the rest."""
  keys = jax.random.split(jax.random.key(0))
  held = {'w': jax.random.normal(keys[0], (100,))}
  moves = .01 * jax.random.normal(keys[1], (100,))
  trained = {'w': held['w'] + moves}
  s = settled(profile='v3code', delta_threshold=0.0, psi_threshold=0.0,
              learn='both', density=density)
  (_, psi), count = client.sent_to_server(s, (held, held), (held, trained))
  assert int(count) == round(100 * density)
  sent = np.asarray(psi['w'] != held['w'])
  np.testing.assert_array_equal(psi['w'][sent], trained['w'][sent])
  size = np.abs(np.asarray(trained['w'] - held['w']))
  assert size[sent].min(initial=np.inf) >= size[~sent].max(initial=0)


def test_without_psi_one_model_comes_in_the_first_round():
  new = ({'w': jnp.ones(3)}, {'w': jnp.zeros(3)})
  one: Any = SimpleNamespace(memory=client.Memory(None, new, None),
                             round=jnp.int32(0))
  for sending in ('values', 'differences'):
    s = settled(learn='sigma', sending=sending)
    payload = client.Payload(*new, {}, None, None)
    assert int(client.received(s, payload, one, jnp.bool_(False))[2]) == 3


@pytest.mark.parametrize('knob', ['density=0.5', 'l1=0.1', 'psi_init=0.2',
                                  'agreement_weight=2.0'])
def test_without_psi_its_knobs_are_refused(knob):
  methods.make("fedmatch(learn='sigma', l1=0.0)", toy.task())
  with pytest.raises(ValueError, match=f'{knob} would do nothing'):
    methods.make(f"fedmatch(learn='sigma', {knob})", toy.task())


def fake(values):
  return {'w': jnp.asarray(values, jnp.float32)[:, None]}


def test_nobody_is_its_own_helper_by_reliability():
  ranking = helpers.no_ranking({'w': jnp.zeros(1)}, 2)
  ids = jnp.array([4, 1, 7, 3])
  active = jnp.array([True, True, False, True])
  ranking = helpers.rank(ranking, fake([40, 10, 70, 30]), ids,
                         jnp.array([.2, .9, 1., .5]), active)
  assert ranking.ids.tolist() == [1, 3, 4]
  want = {1: [3, 4], 3: [1, 4], 4: [1, 3], 0: [1, 3], 7: [1, 3]}
  for one, chosen in want.items():
    got = helpers.most_reliable(ranking, one)
    assert got.ids.tolist() == chosen and got.present.tolist() == [1, 1]
    assert got.psi['w'][:, 0].tolist() == [10 * i for i in chosen]
  # Nobody takes part: the old ones stay. One does: it is alone.
  kept = helpers.rank(ranking, fake([1, 2, 3, 4]), ids, jnp.ones(4),
                      jnp.zeros(4, bool))
  chex.assert_trees_all_equal(kept, ranking)
  lone = helpers.rank(ranking, fake([5]), jnp.array([8]), jnp.ones(1),
                      jnp.ones(1, bool))
  assert helpers.most_reliable(lone, 8).present.tolist() == [0, 0]
  assert helpers.most_reliable(lone, 2).ids.tolist() == [8, -1]


def test_nobody_is_its_own_helper_by_similarity():
  bank = helpers.no_bank({'w': jnp.zeros(1)}, 5, 2)
  assert not helpers.most_similar(bank, jnp.int32(0), 2).present.any()
  answers = jnp.array([[.9, .1], [.8, .2], [.1, .9], [.5, .5]])
  bank = helpers.report(bank, fake([1, 2, 3, 4]), answers,
                        jnp.array([0, 1, 2, 4]),
                        jnp.array([True, True, True, False]))
  assert bank.seen.tolist() == [True, True, True, False, False]
  def chosen(one, number):
    return helpers.most_similar(bank, jnp.int32(one), number).ids.tolist()
  assert chosen(0, 1) == [1] and chosen(1, 1) == [0] and chosen(2, 1) == [1]
  assert chosen(2, 3) == [1, 0, -1]  # Two others have reported.
  assert chosen(3, 2) == [-1, -1]  # It has not reported itself.
  assert chosen(0, 7) == [1, 2, -1, -1, -1, -1, -1]


def test_validation_scores_against_one_pass():
  federation, _ = toy.federation()
  task = toy.task()
  model = task.model.init(KEY)
  many = Examples(*(jnp.concatenate([jnp.asarray(x)] * 14)
                    for x in federation.test))  # More than one batch.
  accuracy, loss = plateau.validation_scores(task, model, many)
  log_p = jax.nn.log_softmax(task.apply(model, many.inputs))
  np.testing.assert_allclose(
      accuracy, (log_p.argmax(-1) == many.labels).mean(), rtol=1e-5)
  np.testing.assert_allclose(loss, -jnp.take_along_axis(
      log_p, many.labels[:, None], 1).mean(), rtol=1e-5)


def test_noise_is_one_image_in_range():
  like = jnp.zeros((3, 32, 32, 3), jnp.uint8)
  image = helpers.noise_image(like)
  assert image.shape == (1, 32, 32, 3) and image.dtype == jnp.uint8
  chex.assert_trees_all_equal(image, helpers.noise_image(like))
  assert 110 < image.mean() < 135 and image.std() > 55


def test_noise_of_vectors_is_as_far_out_as_they_are():
  rng = np.random.default_rng(0)
  like = (3 + .5 * rng.normal(size=(400, 12, 16))).astype(np.float32)
  noise = helpers.noise_image(like)
  assert noise.shape == (1, 12, 16) and noise.dtype == np.float32
  assert 2.8 < noise.mean() < 3.2 and .4 < noise.std() < .6


def test_a_plateau_by_hand():
  state = plateau.full_rate()
  factors = []
  for loss in (2., 1., 1., 1.5, .9, 1., np.nan, 1.):
    state = plateau.after_loss(state, jnp.float32(loss), patience=2)
    factors.append(float(state.factor))
  assert factors == pytest.approx([1, 1, 1, *[1 / 3] * 3, 1 / 9, 1 / 9])
  assert float(state.best) == pytest.approx(.9)


def test_the_server_rules_the_rate_of_all():
  federation, _ = toy.federation()
  method, run = compiled(VALUES, cohort_size=1)
  state = method.init(toy.key(0), federation)
  asleep = state._replace(server=state.server._replace(
      rate=state.server.rate._replace(factor=jnp.float32(0),
                                      best=jnp.float32(0))))
  new, _ = run(asleep, federation, jnp.int32(0), KEY)
  chex.assert_trees_all_close(new.server.sigma, state.server.sigma)
  chex.assert_trees_all_close(new.server.psi, state.server.psi)
  new, _ = run(state, federation, jnp.int32(0), KEY)
  assert new.server.rate.best < 10 and new.server.rate.factor == 1


def test_the_server_rules_the_rate_of_its_own_labels():
  federation, _ = toy.federation('server')
  task = toy.task(labels_at='server')
  s = settled('server', num_helpers=0)
  start, memory = server.init(task, s, KEY, federation)
  assert start.rate is not None and memory.rate is not None
  assert (memory.rate.factor == 1).all()  # Of the clients.
  context = Context(jnp.int32(0), federation.train, federation.validation,
                    federation.server)
  run = jax.jit(functools.partial(server.learn, task, s))
  rates = [start.rate._replace(factor=jnp.float32(x)) for x in (0, 1)]
  still, moved = (run(start._replace(rate=rate), context, KEY)[0].sigma
                  for rate in rates)
  chex.assert_trees_all_equal(still, start.sigma)
  assert tree.global_norm(tree.subtract(moved, start.sigma)) > 1e-3


def with_statistics():
  """The update of two epochs of a network with batch normalization.

  No loss is below the lowest that the client knows, and psi comes as 0.
  """
  def stuck(one):
    return one._replace(memory=one.memory._replace(
        rate=one.memory.rate._replace(best=np.float32(0))))
  return updates.update(
      'fedmatch(num_helpers=0, patience=3)', model='conv', local_epochs=2,
      altered=stuck, sent=lambda record: client.Payload(
          record.sigma, record.psi, record.stats, None, None))


def test_each_epoch_of_a_round_counts_for_the_rate():
  rate = with_statistics().memory.rate
  assert rate.waited == 2 and rate.factor == 1 and rate.best == 0


def test_statistics_are_sent_and_counted_both_ways():
  found = with_statistics()
  message = found.message
  assert sparse.size(message.stats) > 0
  whole = sparse.size((message.sigma, message.stats))
  assert found.scalars_down == whole
  assert found.scalars == whole + sparse.num_nonzero(message.psi)


def test_undivided_there_is_one_part():
  with pytest.raises(ValueError, match="learn='undivided'.*labels_at"):
    methods.make("fedmatch(learn='undivided')", toy.task(labels_at='server'))
  for knob in ('l2=1.0', 'l1=0.1', 'psi_init=0.5', 'psi_threshold=1e-4'):
    with pytest.raises(ValueError, match=f'{knob.split("=")[0]}.*one part'):
      methods.make(f"fedmatch(learn='undivided', {knob})", toy.task())
  with pytest.raises(ValueError, match='density.*out'):
    methods.make("fedmatch(learn='undivided', density=0.5)", toy.task())
  # The first round is one dense model, not two, and sigma is never sent.
  one = {'learn': 'undivided', 'psi_threshold': None}
  assert arrived(round_=0, **one)[1] == 3
  assert arrived(sending='values', **one)[1] == 0


def test_what_cannot_be_is_refused():
  with pytest.raises(ValueError, match="learn='sigma'"):
    methods.make("fedmatch(learn='sigma')", toy.task(labels_at='server'))
  with pytest.raises(ValueError, match='static'):
    methods.make('fedmatch', toy.task('static'))
  federation, _ = toy.federation()
  for profile in ('v3code', 'v1'):  # A bank of all, the ranking of 3 alone.
    with pytest.raises(ValueError, match='max_gib'):
      methods.make(f'fedmatch(profile={profile!r}, max_gib=2e-6)',
                   toy.task()).init(KEY, federation)
  methods.make('fedmatch(max_gib=2e-6, num_helpers=1)', toy.task()).init(
      KEY, federation)
  for knob in ('num_helpers', 'helper_interval', 'patience'):
    for value in (float('nan'), 2.5):
      knobs: Any = {knob: value}
      with pytest.raises(ValueError, match=f'{knob} must be a whole number'):
        fedmatch.fedmatch(toy.task(), **knobs)
  none = dataclasses.replace(federation, validation=jax.tree.map(
      lambda x: x[:0], federation.validation))
  with pytest.raises(ValueError, match='validation'):
    methods.make('fedmatch', toy.task()).init(KEY, none)
