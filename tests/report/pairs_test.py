"""Differences between runs of the same seeds, and which runs are compared."""
from __future__ import annotations

import dataclasses
import pathlib
from typing import NamedTuple

import numpy as np
import pytest

from fedjax_ssl.core import bounds
from fedjax_ssl.report import pairs, stored_runs, tables
from tests.report import fake


@pytest.mark.parametrize('differences, low, high', [
    # t(2) = 4.302653, deviation 1, over the root of 3.
    ([1.0, 2.0, 3.0], 2 - 4.302653 / 3**.5, 2 + 4.302653 / 3**.5),
    # t(1) = 12.706205.
    ([0.0, 2.0], 1 - 12.706205, 1 + 12.706205),
    ([5.0] * 4, 5.0, 5.0)])
def test_the_interval_is_students(differences, low, high):
  found = pairs.interval(differences)
  assert found.mean == np.mean(differences)
  assert found.low == pytest.approx(low, rel=1e-6)
  assert found.high == pytest.approx(high, rel=1e-6)


@pytest.mark.parametrize('differences, said', [
    ([1.0, 1.1, 1.2], 'higher'), ([-1.0, -1.1, -1.2], 'lower'),
    ([-1.0, 1.0, 3.0], 'not told apart'), ([1.0], ''), ([], '')])
def test_an_interval_is_said_in_a_word(differences, said):
  assert pairs.interval(differences).verdict == said


def _rows(*accuracies):
  return [[{'round': 1, 'accuracy': 0.1}, {'round': 2, 'accuracy': one}]
          for one in accuracies]


FEW, ALL = bounds.NAMES.values()


@pytest.mark.parametrize('runs, said', [
    # t(2) = 4.302653, deviation 1 point, over the root of 3.
    ({'m': _rows(.62, .53, .74), FEW: _rows(.6, .5, .7),
      ALL: _rows(.7, .6, .8)},
     'm is +3.00 points from labels only (95 % interval +0.52 to +5.48, 3 '
     'seeds: higher), 30 % of the gap to all labels.'),
    ({'m': _rows(.5), FEW: _rows(.6), ALL: _rows(.7)},
     'm is -10.00 points from labels only, -100 % of the gap to all labels.'),
    ({'m': _rows(.5), FEW: _rows(.6), ALL: _rows(.609)},
     'm is -10.00 points from labels only.'),
    ({'m': _rows(.5), FEW: _rows(.6)}, 'm is -10.00 points from labels only.'),
    ({'m': _rows(.5), FEW: _rows(.5), ALL: _rows(.6)}, ''),  # It is the bound.
    ({'m': [[{'round': 2, 'accuracy': .5}]], FEW: _rows(.5)},
     'm is +0.00 points from labels only.'),
    ({'m': _rows(None), FEW: _rows(.5)}, ''), ({'m': _rows(.5)}, '')])
def test_a_gain_is_told_with_its_interval(runs, said):
  assert pairs.gain('m', runs) == said


def _tuned(folder: pathlib.Path, accuracies: dict[tuple[str, float], float],
           **more) -> list[stored_runs.ReportedRun]:
  """Runs of three seeds, by method and rate."""
  return stored_runs.load([fake.write(
      folder / f'{method[:3]}{rate}{len(method)}', [
          fake.row(20, accuracy + .01 * seed, seed, **more)
          for seed in range(3)],
      fake.config(range(3), method=method, learning_rate=rate))
      for (method, rate), accuracy in accuracies.items()])


def test_methods_are_compared_at_their_best(tmp_path):
  """Of rates and knobs, by validation; another profile is another method."""
  found = _tuned(tmp_path, {
      ('fedavg', .1): .5, ('fedavg', .01): .6, ('uda', .1): .8,
      ("uda(profile='fedmatch')", .1): .3, ('uda(threshold=.5)', .1): .9})
  best = pairs.at_their_best(found)
  assert [pair[:2] for pair in best] == [(4, 1), (3, 1)]
  assert all('on the validation rows' in pair.note for pair in best)
  table = tables.difference_table(found, pairs.compared(
      pairs.references(found, stored_runs.compared(found)), best))
  says = {(row[0], row[1]): row[-1] for row in table.rows}
  one, two, *_, last = (run.name for run in found)
  assert says[last, two] == says[last, one] == 'higher'
  assert sum(two in line and 'best of each' in line
             for line in table.lines()) == 2


def test_without_validation_rows_the_test_rows_choose(tmp_path):
  tried = {('fedavg', .1): .5, ('uda', .1): .3, ('uda', .01): .8}
  found = _tuned(tmp_path / 'a', tried, val_accuracy=None)
  best, = pairs.at_their_best(found)
  assert best[:2] == (2, 0) and 'on the test rows' in best.note
  once = [run for run in found if run.config['flags']['learning_rate'] == .1]
  assert not pairs.at_their_best(once)
  # Without FedAvg it is against the first method.
  alone = _tuned(tmp_path / 'b', {
      ('fixmatch', .1): .4, ('fixmatch', .01): .6, ('uda', .1): .5,
      ('uda', .01): .55})
  assert [pair[:2] for pair in pairs.at_their_best(alone)] == [(3, 1)]
  odd = {'flags': {**alone[0].config['flags'], 'method': '(', 'alpha': .3}}
  assert [pair[:2] for pair in pairs.at_their_best([*alone, dataclasses.replace(
      alone[0], config=alone[0].config | odd)])] == [(3, 1)]
  # Nor is one chosen of which nothing is known.
  assert not pairs.at_their_best([dataclasses.replace(run, seeds=[
      [{**row, 'accuracy': None} for row in rows] for rows in run.seeds])
                                  for run in found])


def _with_net(run: stored_runs.ReportedRun, digest: str
              ) -> stored_runs.ReportedRun:
  """The run with a network of a user's, whose file has this digest."""
  config = run.config
  return dataclasses.replace(run, config={
      **config,
      'flags': {**config['flags'], 'model': '/x/net.py:Net'},
      'facts': {**config['facts'], 'code': {'net.py': digest}}})


def test_methods_are_compared_on_one_network(tmp_path):
  """An edited one is another; the same one makes no other method."""
  tried = {('fedavg', .1): .5, ('fedavg', .01): .9, ('uda', .1): .6,
           ('uda', .01): .3}
  one, better, *others = _tuned(tmp_path, tried)
  runs = [_with_net(one, 'a'), _with_net(better, 'b'),
          *(_with_net(run, 'a') for run in others)]
  assert [pair[:2] for pair in pairs.at_their_best(runs)] == [(2, 0)]
  runs[1] = _with_net(better, 'a')
  assert [pair[:2] for pair in pairs.at_their_best(runs)] == [(2, 1)]


def test_code_of_what_is_tuned_parts_nothing(tmp_path):
  """A schedule of a user's is a try as the library's are."""
  found = _tuned(tmp_path, {('fedavg', .1): .5, ('fedavg', .01): .4,
                            ('uda', .1): .6, ('uda', .01): .9})
  config = found[3].config
  own = dataclasses.replace(found[3], config={
      **config, 'flags': {**config['flags'], 'lr_schedule': '/x/s.py:ramp'},
      'facts': {**config['facts'], 'code': {'s.py': 'a'}}})
  assert [pair[:2] for pair in pairs.at_their_best([*found[:3], own])] == [
      (3, 0)]


def test_a_run_that_has_stopped_is_not_the_best(tmp_path):
  found = _tuned(tmp_path, {('fedavg', .1): .5, ('uda', .1): .9,
                            ('uda', .01): .8})
  stopped = dataclasses.replace(found[1], seeds=[
      [{**row, 'round': 6} for row in rows] for rows in found[1].seeds])
  assert stopped.rounds < found[2].rounds
  best, = pairs.at_their_best([found[0], stopped, found[2]])
  assert best[:2] == (2, 0)


@pytest.mark.parametrize('change, value', [
    ('origin', {'setting': 'cifar_dirdir'}), ('data_hash', 'e'),
    ('flags', {'alpha': .1}), ('seeds', 1)])
def test_only_tries_of_one_setting_are_compared(tmp_path, change, value):
  """Nor does a run of fewer seeds win."""
  tried = {('fedavg', .1): .5, ('fedavg', .01): .9, ('uda', .1): .6,
           ('uda', .01): .3}
  found = _tuned(tmp_path, tried)
  assert [pair[:2] for pair in pairs.at_their_best(found)] == [(2, 1)]
  odd = found[1]
  assert odd.config['flags']['learning_rate'] == .01
  made = odd.config | ({'origin': value} if change == 'origin' else
                       {'flags': odd.config['flags'] | value}
                       if change == 'flags' else {})
  if change == 'data_hash':
    made |= {'facts': made['facts'] | {change: value}}
  other = dataclasses.replace(
      odd, config=made, seeds=odd.seeds[:value if change == 'seeds' else None])
  runs = [other if run is odd else run for run in found]
  assert [pair[:2] for pair in pairs.at_their_best(runs)] == [(2, 0)]


class _Run(NamedTuple):
  metrics: dict[str, np.ndarray]
  states: dict[int, None]


def _run(*seeds, rise=0.0, name='accuracy'):
  """Makes a run of two evaluations; a seed's last is seed / 10 + rise."""
  ends = np.array(seeds) / 10
  rows = {'round': np.repeat([1, 2], len(seeds)),
          name: np.concatenate([ends * 0, ends + rise * (1 + ends)])}
  if len(seeds) > 1:
    rows['seed'] = np.tile(seeds, 2)
  return _Run(rows, dict.fromkeys(seeds))


def test_runs_are_compared_seed_by_seed():
  # Of seeds 1 and 2: .1 * 1.1 and .1 * 1.2, in an order of their own.
  found = pairs.compare(_run(2, 1, 5, rise=.1), _run(1, 2, 3))
  assert found.pairs == 2
  assert found.mean == pytest.approx(.115)
  assert found.high == pytest.approx(.115 + 12.706205 * .005)
  one = pairs.compare(_run(1, rise=.1, name='loss'), _run(1, 2, name='loss'),
                      metric='loss')
  assert one.mean == pytest.approx(.11) and one[1:] == (None, None, 1)
  # A sweep has a folder a seed.
  apart = [_run(seed, rise=.1) for seed in (2, 1, 5)]
  assert pairs.compare(apart, _run(1, 2, 3)) == found


@pytest.mark.parametrize('run, metric, said', [
    (_run(0), 'accuracy', 'no seed in common: one has 0, the other 1, 2'),
    (_run(1), 'acuracy', "'acuracy' is unknown. Did you mean 'accuracy'"),
    ([_run(1), _run(2, 1)], 'accuracy', 'seed 1 is in two of the runs'),
    ('runs/x', 'accuracy', "'runs/x' is no run, as fit and load return it"),
    (['runs/x'], 'accuracy', "'runs/x' is no run"),
    ([], 'accuracy', 'one side has no run'),
    (_Run({}, {1: None}), 'accuracy', 'give the folder')])
def test_runs_that_cannot_be_compared_are_told(run, metric, said):
  with pytest.raises(ValueError, match=said):
    pairs.compare(run, _run(1, 2), metric)
