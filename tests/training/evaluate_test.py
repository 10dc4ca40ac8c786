"""Evaluation: batches, devices and probes change no number."""
from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.training import evaluate, runner, sharding
from tests import toy


@functools.lru_cache
def trained(text):
  federation, _ = toy.federation()
  method = methods.make(text, toy.task())
  state = method.init(toy.key(0), federation)
  one = jax.jit(method.round)
  for round_ in range(2):
    state, _ = one(state, federation, jnp.int32(round_),
                   toy.key(round_))
  return method, state, federation


def evaluated(method, state, federation, probe=None):
  """In one program."""
  return jax.jit(toy.evaluation(method))(
      state, federation, evaluate.probe_of(federation) if probe is None
      else probe)


@pytest.mark.parametrize('text', ['fedavg(keep_local=True)', 'local'])
def test_in_turn_is_the_same(text):
  method, state, federation = trained(text)
  own, rest = map(jax.jit, evaluate.in_turn(method, None))
  got = rest(state, federation, evaluate.probe_of(federation),
             own(state, federation))
  chex.assert_trees_all_close(got, evaluated(method, state, federation),
                              rtol=1e-6)
  assert 'local_accuracy' in got
  assert {*got} <= evaluate.names()


@pytest.mark.parametrize('batch', [1, 3, 7, 100])
def test_batches_do_not_change_the_predictions(batch):
  method, state, federation = trained('fedavg')
  rows = jnp.array([5, 0, 3, 3, 19, 7, 2])
  got = evaluate.in_batches(method.predict, federation.test.inputs, rows,
                            given=(state.server,), batch=batch)
  want = method.predict(state.server, federation.test.inputs[rows])
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_predictions_on_a_mesh_may_ask_where_their_arrays_live():
  """As `zeros_like` does, which takes over an array's placement."""
  mesh = jax.make_mesh((1,), ('clients',), devices=jax.devices()[:1],
                       axis_types=(jax.sharding.AxisType.Auto,))
  kernel = sharding.whole({'kernel': jnp.array([2., -3.])}, mesh)
  def predict(given, x):
    kernel = given['kernel']
    return x * jnp.where(kernel > 0, kernel, jnp.zeros_like(kernel))
  def run(kernel):
    return evaluate.in_batches(predict, jnp.ones((3, 2)), jnp.arange(3),
                               given=(kernel,), mesh=mesh, batch=2)
  np.testing.assert_array_equal(jax.jit(run)(kernel), [[2, 0]] * 3)


def test_scores_against_counting_by_hand():
  logits = jnp.log(jnp.array([[.7, .2, .1], [.5, .3, .2], [.1, .8, .1],
                              [.6, .3, .1]]))
  got = evaluate.scores(logits, jnp.array([0, 1, 1, 0]))
  np.testing.assert_allclose(got['accuracy'], 3 / 4)
  np.testing.assert_allclose(got['per_class_accuracy'], [1, .5, np.nan])
  np.testing.assert_allclose(
      got['loss'], -np.log([.7, .3, .8, .6]).mean(), rtol=1e-6)


def test_pseudo_labels_are_judged_on_hidden_labels():
  method, state, federation = trained('fixmatch(threshold=0.4)')
  probe = evaluate.probe_of(federation)
  rows = probe.rows[probe.mask > 0]
  assert sorted(rows.tolist()) == sorted(np.concatenate([
      federation.clients.unlabeled[i, :n]
      for i, n in enumerate(toy.UNLABELED)]).tolist())
  got = evaluated(method, state, federation, probe)
  p = np.asarray(jax.nn.softmax(method.predict(
      state.server, federation.train.inputs[rows])))
  sure = p.max(-1) >= 0.4
  right = p.argmax(-1) == np.asarray(federation.train.labels)[rows]
  np.testing.assert_allclose(got['pseudo_label_rate'], sure.mean(), rtol=1e-6)
  np.testing.assert_allclose(got['pseudo_label_accuracy'],
                             right[sure].mean(), rtol=1e-6)


def test_pseudo_labels_see_the_memory_of_the_rows_owner():
  method, state, federation = trained('fedavg(keep_local=True)')
  def own_id(server, memory, inputs):
    del server
    return jnp.zeros(inputs.shape[0], jnp.int32), jnp.full(
        inputs.shape[0], memory)
  ids = state._replace(memory=jnp.arange(toy.NUM_CLIENTS, dtype=jnp.float32))
  judged = method._replace(pseudo_label=own_id, local_predict=None)
  got = evaluated(judged, ids, federation)
  want = np.average(np.arange(toy.NUM_CLIENTS), weights=toy.UNLABELED)
  np.testing.assert_allclose(got['pseudo_label_rate'], want, rtol=1e-6)


def test_a_probe_of_a_stream_has_rows_of_every_task():
  federation, _ = toy.federation()
  plain = federation.clients
  halves = [plain._replace(
      unlabeled=jnp.roll(plain.unlabeled, -start, axis=1),
      num_unlabeled=count) for start, count in (
          (0, jnp.minimum(plain.num_unlabeled, 3)),
          (3, jnp.maximum(plain.num_unlabeled - 3, 0)))]
  stream = jax.tree.map(lambda *x: jnp.stack(x), *halves)
  got = evaluate.probe_of(dataclasses.replace(
      federation, stream=stream, rounds_per_task=1, clients=halves[0]))
  for mine, whole in zip(got, evaluate.probe_of(federation), strict=True):
    np.testing.assert_array_equal(mine, whole)


def test_a_probe_is_filled_up_with_the_clients_own_rows():
  """A method may judge a batch by all that is in it, with its own mask."""
  federation, _ = toy.federation()
  probe = evaluate.probe_of(federation)
  assert (probe.mask == 0).any()
  for rows, mask in zip(probe.rows, probe.mask, strict=True):
    times = np.unique(rows, return_counts=True)[1]
    assert {*rows} == {*rows[mask > 0]} and np.ptp(times) <= 1


def test_probes_of_seeds_together_are_filled_up_with_own_rows_too():
  federation, _ = toy.federation()
  whole = evaluate.probe_of(federation)
  narrow = whole._replace(rows=whole.rows[:, :2], mask=whole.mask[:, :2])
  few = whole.of_clients([1])
  for probe, got in zip([whole, narrow, few], runner._alike(
      [whole, narrow, few], *whole._fields), strict=True):
    assert got.rows.shape == got.mask.shape == whole.rows.shape
    assert got.mask.sum() == probe.mask.sum()
    for mine, padded in zip(probe.rows, got.rows, strict=False):
      assert {*padded} == {*mine}


def probe_of(clients: int, rows: int) -> evaluate.Probe:
  """The probe of so many clients with so many unlabeled rows each."""
  federation, _ = toy.federation()
  return evaluate.probe_of(dataclasses.replace(
      federation, clients=federation.clients._replace(
          unlabeled=np.arange(clients * rows, dtype=np.int32).reshape(
              clients, rows),
          num_unlabeled=np.full(clients, rows, np.int32))))


def test_a_probe_of_a_large_federation_is_small_and_even():
  probe = probe_of(3000, 3)
  assert probe.rows.size <= 2048 and probe.mask.all()
  assert probe.clients.max() > 2900


def test_a_probe_of_many_rows_is_spread_over_them():
  probe = probe_of(6, 3000)
  assert probe.rows.shape == (6, 2048 // 6) and probe.mask.all()
  assert {*np.diff(probe.rows, axis=1).ravel().tolist()} == {8, 9}


def test_validation_rows_have_scores_of_their_own():
  method, state, federation = trained('fedavg')
  got, held = evaluated(method, state, federation), federation.validation
  want = evaluate.scores(method.predict(state.server, held.inputs),
                         held.labels)
  np.testing.assert_allclose(got['val_loss'], want['loss'], rtol=1e-5)
  np.testing.assert_allclose(got['val_accuracy'], want['accuracy'], rtol=1e-6)
  assert abs(got['val_loss'] - got['loss']) > 1e-4


def test_local_accuracy_is_the_mean_over_the_clients_models():
  method, state, federation = trained('fedavg(keep_local=True)')
  got = evaluated(method, state, federation)
  each = []
  for i in range(toy.NUM_CLIENTS):
    row = jax.tree.map(lambda x, i=i: x[i], state.memory)
    logits = method.local_predict(state.server, row, federation.test.inputs)
    hits = np.asarray(logits.argmax(-1) == federation.test.labels)
    each.append(float(hits.mean()))
  np.testing.assert_allclose(got['local_accuracy'], np.mean(each), rtol=1e-6)
  assert len(set(each)) > 1


def test_test_labels_are_read_by_evaluation_only():
  method, state, federation = trained('fixmatch')
  other = dataclasses.replace(federation, test=federation.test._replace(
      labels=(federation.test.labels + 1) % toy.NUM_CLASSES))
  run = jax.jit(functools.partial(runner.stretch, method))
  totals = jax.tree.map(lambda x: jnp.zeros(x.shape),
                        runner.totals_shape(method, federation, state))
  args = jnp.int32(0), jnp.int32(1), toy.key(1)
  chex.assert_trees_all_equal(run(state, totals, federation, *args),
                              run(state, totals, other, *args))
  score = jax.jit(toy.evaluation(method))
  probe = evaluate.probe_of(federation)
  a, b = (score(state, f, probe)['accuracy'] for f in (federation, other))
  assert a != b


@pytest.mark.parametrize('place', ['clients', 'server'])
def test_labeled_accuracy_is_over_the_labels_learnt_from(place):
  federation, hidden = toy.federation(place)
  probe = evaluate.probe_of(federation)
  rows = probe.labeled
  assert probe.labeled_mask.all()
  assert sorted(rows) == np.flatnonzero(~hidden).tolist()
  method = methods.make('fedavg', toy.task(labels_at=place))
  state = method.init(toy.key(0), federation)
  got = evaluated(method, state, federation)['labeled_accuracy']
  assert method.predict is not None
  right = method.predict(
      state.server, federation.train.inputs[rows]).argmax(-1) == (
          federation.train.labels[rows])
  np.testing.assert_allclose(got, right.mean(), rtol=1e-6)


def test_a_table_may_have_no_place_for_a_row():
  federation, _ = toy.federation()
  none, zero = np.zeros((0,), np.int32), np.zeros((), np.int32)
  server = type(federation.server)(none, zero, none, zero)
  got = evaluate.probe_of(dataclasses.replace(federation, server=server))
  np.testing.assert_array_equal(got.labeled,
                                evaluate.probe_of(federation).labeled)


def test_without_labels_there_is_no_accuracy_on_them():
  federation, _ = toy.federation()
  clients = federation.clients._replace(
      num_labeled=jnp.zeros_like(federation.clients.num_labeled))
  bare = dataclasses.replace(federation, clients=clients)
  assert not evaluate.probe_of(bare).labeled_mask.any()
  method = methods.make('fedavg', toy.task())
  got = evaluated(method, method.init(toy.key(0), federation), bare)
  assert jnp.isnan(got['labeled_accuracy'])


def test_many_labeled_rows_are_thinned_out():
  federation, _ = toy.federation()
  rows = np.arange(12000, dtype=np.int32).reshape(6, 2000)
  many = federation.clients._replace(
      labeled=rows, num_labeled=np.full(6, 2000, np.int32))
  kept = evaluate.probe_of(
      dataclasses.replace(federation, clients=many)).labeled
  assert 1900 < kept.size <= 2048 and kept.max() > 11900
  np.testing.assert_array_equal(np.diff(kept), 6)


def test_few_labels_in_wide_tables_are_all_judged():
  federation, _ = toy.federation()
  count = np.zeros(3000, np.int32)
  count[[0, 700, 2999]] = 2, 900, 1
  rows = np.arange(2700000, dtype=np.int32).reshape(3000, 900)
  sparse = federation.clients._replace(labeled=rows, num_labeled=count)
  kept = evaluate.probe_of(
      dataclasses.replace(federation, clients=sparse)).labeled
  np.testing.assert_array_equal(
      kept, [0, 1, *range(700 * 900, 701 * 900), 2999 * 900])


def test_seeds_with_different_numbers_of_labels_share_a_program():
  first, _ = toy.federation()
  fewer = dataclasses.replace(first, clients=first.clients._replace(
      num_labeled=jnp.minimum(first.clients.num_labeled, 1)))
  method = methods.make('fedavg', toy.task())
  both = runner.Sequential(method, [first, fewer], [0, 1], None)
  both.start(None)
  alone = runner.Sequential(method, [fewer], [1], None)
  alone.start(None)
  want, = alone.scores(0)
  chex.assert_trees_all_equal(both.scores(0)[1].values, want.values)
  assert both._rest._cache_size() == 1
