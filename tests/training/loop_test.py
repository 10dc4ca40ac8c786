"""The loop: where it stops, what it may not change, how it is interrupted."""
from __future__ import annotations

import contextlib
import functools
import os
import signal
import types
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import optimizers
from fedjax_ssl.core.types import Ratio
from fedjax_ssl.report import summary
from fedjax_ssl.training import environment, loop, metrics, runner
from tests import toy
from tests.quick_keys import quick_keys
from tests.thorough import wider

__all__ = ['quick_keys']  # A fixture of every test here.


@functools.lru_cache
def method():
  return methods.make('fedavg(keep_local=True)', toy.task())


def train(num_rounds=7, **changes):
  """The result, the rows and the saves of a run on the toy federation."""
  rows: list[runner.Row] = []
  saves: dict[int, Any] = {}
  # The loop donates its arrays: what is kept must be copied.
  observer = loop.Observer(rows.append, lambda round_, tree: saves.update(
      {round_: jax.device_get(tree)}))
  federations = [toy.federation()[0]] * len(changes.get('seeds', (0,)))
  result = loop.train(method(), federations, num_rounds=num_rounds,
                      observer=observer, **changes)
  return result, rows, saves


def test_stops_name_evaluations_and_saves():
  stops = list(loop.stops(0, 10, eval_every=4, checkpoint_every=3))
  assert [s.round for s in stops] == [3, 4, 6, 8, 9, 10]
  assert [s.round for s in stops if s.evaluates] == [4, 8, 10]
  assert [s.round for s in stops if s.saves] == [3, 6, 9, 10]
  assert [s.round for s in loop.stops(4, 6, 0, 0)] == [6]
  assert not list(loop.stops(6, 6, 1, 1))


def test_frequencies_change_no_bit_of_the_model():
  reference, rows, _ = train(eval_every=7)
  often, more_rows, _ = train(eval_every=2, checkpoint_every=3)
  chex.assert_trees_all_equal(reference.states, often.states)
  assert [r.round for r in more_rows] == [2, 4, 6, 7]
  assert rows[-1].values['accuracy'] == more_rows[-1].values['accuracy']
  sent = sum(r.values['bytes_up'] for r in more_rows)
  assert sent == rows[-1].values['bytes_up']


@pytest.mark.parametrize('at', [3, *wider(4)])
def test_resume_gives_the_same_rows_and_states(at):
  reference, rows, saves = train(eval_every=2, checkpoint_every=1)
  resumed, new_rows, _ = train(eval_every=2, saved=(at, saves[at]))
  chex.assert_trees_all_equal(reference.states, resumed.states)
  chex.assert_trees_all_equal([r for r in rows if r.round > at], new_rows)


def test_a_slow_run_saves_between_its_checkpoints(monkeypatch):
  reference, rows, _ = train(eval_every=3, checkpoint_every=5)
  monkeypatch.setattr(loop, '_CALL_SECONDS', 1e-9)  # One round a call.
  monkeypatch.setattr(loop, '_SAVE_SECONDS', -1.0)  # Each is slow.
  result, same_rows, saves = train(eval_every=3, checkpoint_every=5)
  assert [*saves] == [0, 1, 2, 3, 4, 5, 6, 7]
  chex.assert_trees_all_equal(result.states, reference.states)
  chex.assert_trees_all_equal(same_rows, rows)
  resumed, _, _ = train(eval_every=3, saved=(4, saves[4]))
  chex.assert_trees_all_equal(resumed.states, reference.states)
  assert [*train(eval_every=3)[2]] == [7]  # Who wants the end only has it.


def test_the_clock_of_saves_begins_anew_with_each(monkeypatch):
  now, saved = [100.0], []
  monkeypatch.setattr(loop.time, 'monotonic', lambda: now[0])
  runs = types.SimpleNamespace(snapshot=dict, kept=lambda: None)
  observer = loop.Observer(on_save=lambda round_, tree: saved.append(round_))
  save: Any = loop._Saver(runs, observer, 5, 3)  # type: ignore[arg-type]
  late = []
  for now[0], round_ in ((399., 3), (401., 3), (402., 4), (701., 6), (703., 7)):
    late.append(save.is_late())
    if late[-1]:
      save(round_)
  # Round 3 is saved already.
  assert late == [False, True, False, False, True] and saved == [7]
  assert not loop._Saver(runs, observer, 0, 3).is_late()  # type: ignore


def test_a_run_that_ends_where_it_went_on_is_not_saved_again(monkeypatch):
  _, _, saves = train(3)
  again: list[int] = []
  class Heard:
    is_set = staticmethod(lambda: True)
  monkeypatch.setattr(loop, '_listening', lambda: contextlib.nullcontext(Heard))
  stopped = loop.train(
      method(), [toy.federation()[0]], num_rounds=6, saved=(3, saves[3]),
      observer=loop.Observer(on_save=lambda round_, tree: again.append(round_)))
  assert stopped.interrupted and stopped.round == 3 and not again


def test_seeds_together_agree_with_seeds_apart():
  apart, rows, saves = train(seeds=(3, 8), eval_every=3, seed_map='map')
  together, vrows, vsaves = train(seeds=(3, 8), eval_every=3, seed_map='vmap')
  chex.assert_trees_all_close(apart.states, together.states, rtol=1e-4,
                              atol=1e-5)
  assert [(r.round, r.seed) for r in rows] == [
      (r.round, r.seed) for r in vrows]
  chex.assert_trees_all_equal_shapes_and_dtypes(saves[7], vsaves[7])
  alone, _, _ = train(seeds=(8,))
  chex.assert_trees_all_equal(alone.states[0], apart.states[1])
  assert not np.allclose(*(s.server.model.params['Dense_0']['kernel']
                           for s in apart.states))


def test_each_federation_of_a_list_has_a_seed():
  federation = toy.federation()[0]
  several = loop.train(method(), [federation, federation], num_rounds=2)
  named, _, _ = train(2, seeds=(0, 1))
  chex.assert_trees_all_equal(several.states, named.states)


def test_a_saved_run_may_go_on_under_the_other_seed_map():
  _, _, saves = train(3, seeds=(3, 8), seed_map='map')
  saved = (3, saves[3])
  apart, _, _ = train(5, seeds=(3, 8), seed_map='map', saved=saved)
  together, _, _ = train(5, seeds=(3, 8), seed_map='vmap', saved=saved)
  chex.assert_trees_all_close(apart.states, together.states, rtol=1e-4,
                              atol=1e-5)


def test_rounds_of_which_nothing_is_told_run_in_one_call(monkeypatch):
  monkeypatch.setattr(loop, '_CALL_SECONDS', 1e9)
  done: list[int] = []
  one = methods.make('fedavg', toy.task())._replace(
      report=lambda server, round_: {'largest': server.model.params[
          'Dense_0']['bias'].max()})
  loop.train(one, [toy.federation()[0]], num_rounds=4, eval_every=4,
             observer=loop.Observer(on_progress=done.append,
                                    on_report=lambda row: pytest.fail()))
  assert done == [1, 4]  # After the first, whose time is taken.


@pytest.mark.parametrize('seed_map', ['map', 'vmap'])
def test_a_report_comes_every_round_and_again_after_a_kill(
    seed_map, tmp_path):
  def spent(server, round_):
    return {'epsilon': round_ + server.model.params['Dense_0']['bias'][0]}
  one = methods.make('fedavg', toy.task())._replace(report=spent)
  saves: dict[int, Any] = {}
  def run(saved=None):
    done = saved[0] if saved else None
    with metrics.MetricsWriter(tmp_path, done) as writer:
      def write(row):
        writer.write({'round': row.round, 'seed': row.seed, **row.values})
      result = loop.train(
          one, [toy.federation()[0]] * 2, num_rounds=7, seeds=(3, 8),
          eval_every=3, checkpoint_every=2, seed_map=seed_map, saved=saved,
          observer=loop.Observer(
              write, lambda at, tree: saves.update({at: jax.device_get(tree)}),
              on_report=write))
    return result, (tmp_path / metrics.METRICS).read_bytes()
  result, text = run()
  assert run((4, saves[4]))[1] == text  # Rows of round 5 and on come again.
  rows = metrics.read(tmp_path)
  assert [(r['round'], r['seed']) for r in rows] == [
      (i, seed) for i in range(1, 8) for seed in (3, 8)]
  for state, seed in zip(result.states, (3, 8), strict=True):
    own = [r for r in rows if r['seed'] == seed]
    assert len({r['epsilon'] for r in own}) == 7
    assert own[-1]['epsilon'] == pytest.approx(
        float(spent(state.server, 7)['epsilon']), rel=1e-6)
  kept = summary.by_seed(rows)
  assert [[r['round'] for r in own] for own in kept] == [[3, 6, 7]] * 2
  assert all('accuracy' in r for own in kept for r in own)


@pytest.mark.parametrize('number', [
    signal.SIGTERM, signal.SIGHUP, *wider(signal.SIGINT)])
def test_a_signal_saves_and_the_rest_is_equal(number, monkeypatch):
  def handlers():
    return [signal.getsignal(s) for s in (
        signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
  before = handlers()
  monkeypatch.setattr(loop, '_CALL_SECONDS', 1e-9)  # One round a call.
  reference, rows, _ = train(6, eval_every=4)
  saves: dict[int, Any] = {}
  seen: list[runner.Row] = []
  def on_progress(round_):
    if round_ == 3:
      os.kill(os.getpid(), number)
  observer = loop.Observer(seen.append, lambda round_, tree: saves.update(
      {round_: jax.device_get(tree)}), on_progress)
  stopped = loop.train(method(), [toy.federation()[0]], num_rounds=6,
                       eval_every=4, observer=observer)
  assert stopped.interrupted and stopped.round == 3 and list(saves) == [3]
  rest, more, _ = train(6, eval_every=4, saved=(3, saves[3]))
  chex.assert_trees_all_equal(rest.states, reference.states)
  chex.assert_trees_all_equal(seen + more, rows)
  assert handlers() == before


@pytest.mark.parametrize('number', [signal.SIGTERM, *wider(signal.SIGINT)])
def test_a_signal_that_comes_with_the_last_round_is_told(number):
  def on_row(row):
    if row.round == 2:
      os.kill(os.getpid(), number)
  ended = loop.train(method(), [toy.federation()[0]], num_rounds=2,
                     observer=loop.Observer(on_row))
  assert ended.interrupted and ended.round == 2
  assert not train(2)[0].interrupted


@pytest.mark.parametrize('platform', ['cpu', 'gpu'])
def test_several_seeds_are_together_where_there_is_an_accelerator(
    monkeypatch, platform):
  monkeypatch.setattr(environment, 'devices', lambda: [
      types.SimpleNamespace(platform=platform)])
  assert loop.seeds_together('auto', 2) == (platform != 'cpu')
  assert loop.seeds_together('vmap', 2)
  assert not loop.seeds_together('map', 2)
  assert not loop.seeds_together('vmap', 1)


def test_unknown_seed_map_is_refused():
  with pytest.raises(ValueError, match='seed_map'):
    train(seed_map='pmap')


def test_rows_average_rates_and_add_up_counts():
  nothing = Ratio(jnp.float32(0), jnp.float32(0))
  totals = runner.Totals(
      {'server_loss': jnp.float32(1.5), 'bytes_up': jnp.float32(30),
       'mask_rate': Ratio(jnp.float32(2), jnp.float32(8)), 'none': nothing},
      jnp.float32(3))
  row = runner._to_row(6, 1, totals, {'accuracy': jnp.float32(0.25)})
  assert np.isnan(row.values.pop('none'))
  assert row.values == {'server_loss': 0.5, 'bytes_up': 30, 'mask_rate': .25,
                        'accuracy': 0.25}


@pytest.mark.parametrize('schedule, half, end', [
    ('constant', 1, 1), ('linear', .5, 0), ('cosine', .5, 0),
    ('cosine(final=0.2)', .6, .2), ('linear(final=0.2)', .6, .2),
    ('exponential(decay=0.5)', .5**5, .5**10),
    ('fixmatch_cosine', np.cos(7 / 32 * np.pi), np.cos(7 / 16 * np.pi))])
def test_schedules_at_half_and_end(schedule, half, end):
  make = optimizers.make('sgd', learning_rate=2.0, schedule=schedule,
                         horizon=10)
  for round_, factor in ((0, 1), (5, half), (10, end)):
    if round_ and schedule.startswith('exp'):
      factor = .5**round_
    step, _ = make(jnp.int32(round_)).update(
        jnp.ones(2), make(jnp.int32(0)).init(jnp.ones(2)))
    np.testing.assert_allclose(step, -2 * factor, atol=1e-6)


def test_a_schedule_that_warms_up_has_the_rest_of_the_run_to_fall():
  factor = optimizers.make_schedule('warmup_cosine(rounds=2)', 10)
  found = [float(factor(jnp.int32(r))) for r in (0, 1, 2, 6, 10)]
  np.testing.assert_allclose(found, [.5, 1, 1, .5, 0], atol=1e-6)


def test_weight_decay_enters_the_gradient():
  make = optimizers.make('sgd', learning_rate=0.5, weight_decay=0.1)
  weights = jnp.array([2.0, -4.0])
  one = make(jnp.int32(0))
  step, _ = one.update(jnp.zeros(2), one.init(weights), weights)
  np.testing.assert_allclose(step, -0.5 * 0.1 * weights)


@pytest.mark.parametrize('name, knobs, grads, want', [
    ('nesterov', {'momentum': .9}, [1], [-1.9]),
    # Unbiased means: 0.39 / 0.19 by the root of 0.009999 / 0.001999.
    ('adam', {}, [1, 3], [-1, -.9178]),
    ('adamw', {'weight_decay': .1}, [0], [-.1]),
    # A mean of squares that starts at 0 and moves by a hundredth.
    ('rmsprop', {}, [1], [-10]),
    ('rmsprop', {'momentum': .5}, [1, 0], [-10, -5])])
def test_steps_of_an_optimizer_by_hand(name, knobs, grads, want):
  rule = optimizers.make(name, learning_rate=1.0, **knobs)(jnp.int32(0))
  state, found = rule.init(jnp.float32(1)), []
  for grad in grads:
    step, state = rule.update(jnp.float32(grad), state, jnp.float32(1))
    found.append(step)
  np.testing.assert_allclose(found, want, rtol=2e-4)


@pytest.mark.parametrize('change', [
    {'learning_rate': 0.0}, {'learning_rate': float('nan')},
    {'momentum': 1.0}, {'weight_decay': -1.0}, {'schedule': 'steps'}])
def test_impossible_optimizers_are_refused(change):
  with pytest.raises(ValueError, match=next(iter(change)).split('_')[-1]):
    optimizers.make('sgd', **{'learning_rate': 0.1, **change})


@pytest.mark.parametrize('change, words', [
    ({'seeds': [5, 2**32 + 5]}, 'from 0 to 4294967295'),
    ({'seeds': [0.5, 1]}, 'whole numbers'), ({'seeds': [True, 0]}, 'whole'),
    ({'eval_every': 1.5}, 'eval_every=1.5'),
    ({'checkpoint_every': -1}, 'checkpoint_every=-1')])
def test_numbers_that_are_not_whole_are_refused(change, words):
  federation = toy.federation()[0]
  given = {'seeds': [0, 1], **change}
  with pytest.raises(ValueError, match=words):
    loop.train(method(), [federation] * 2, num_rounds=1, **given)
