"""Runs find the fastest convolutions, store them, and go on with them."""
import dataclasses
import json
import types

import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl import data
from fedjax_ssl.config import Config
from fedjax_ssl.ops import conv_measure
from fedjax_ssl.running import convolutions, job

_SECONDS = {'lax': 3., 'gemm': 2., 'taps': 4., 'winograd': 4., 'reordered': 5.}


@pytest.fixture
def clock(monkeypatch, tmp_path):
  """Seconds of every form by number of clients, which a test may change."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  table = {n: {form: times * s for form, s in _SECONDS.items()}
           for n, times in ((1, 1), (2, 1.5), (4, 2))}

  def timed(layer, form, load, **_):
    del layer
    return table[load.clients][form]
  monkeypatch.setattr(conv_measure, 'seconds', timed)
  monkeypatch.setattr(conv_measure, 'program', lambda *_: object())
  return table


def _decided(options, seeds=1, owners=(*range(20),) * 10):
  """Of clients with ten labeled rows each, and thirty others.

  The owners are those of the labeled ones.
  """
  dataset = data.load('digits')
  rows = len(dataset.train.labels)
  labeled, unlabeled = np.full((2, rows), -1, np.int32)
  labeled[:200] = owners
  unlabeled[200:800] = np.arange(600) % 20
  deal = data.Partition(labeled, unlabeled, np.zeros(rows, bool))
  return convolutions.decided(options, dataset, dict.fromkeys(
      range(seeds), deal))


def _options(**changes):
  return Config(**{'conv_impl': 'measure', 'cohort_size': 4, 'num_clients': 20,
                   'num_devices': 1, 'workdir': None, **changes})


def test_the_fastest_form_takes_the_place_of_the_word(clock):
  decided = _decided(_options())
  assert decided.conv_impl == (
      '3x3/1 SAME 8x8 1>16 pooled gemm; 3x3/1 SAME 4x4 16>32 pooled gemm')
  # Twice as long, for four clients; halves take three times as long.
  assert (decided.client_map, decided.chunk_size) == ('vmap', 0)


def test_one_client_after_another_where_that_is_faster(clock):
  clock[4] = {form: 9 * s for form, s in _SECONDS.items()}
  clock[1]['taps'] = 1.
  decided = _decided(_options())
  assert (decided.client_map, decided.chunk_size) == ('map', 0)
  assert 'taps' in decided.conv_impl and 'gemm' not in decided.conv_impl


def test_halves_where_these_are_faster(clock):
  """They are timed in the form that is fastest for all."""
  clock[2] = {'gemm': .9}
  decided = _decided(_options())
  assert (decided.client_map, decided.chunk_size) == ('vmap', 2)
  assert 'gemm' in decided.conv_impl


@pytest.mark.parametrize('seeds, way', [(1, 'lanes'), (2, 'vmap')])
def test_lanes_where_clients_would_wait(clock, seeds, way):
  """A pair takes 100 + 30 steps of clients with 100, 40, 30 and 30, lanes 100.

  Not of several seeds in one program: each would wait for the others.
  """
  for clients, times in ((1, 1), (2, 1.2), (4, 2.6)):
    clock[clients * seeds] = {
        form: times * s for form, s in _SECONDS.items()}
  decided = _decided(
      _options(num_clients=4, seed_map='vmap', local_steps=0, labeled_batch=1,
               unlabeled_batch=30),
      seeds, np.repeat(np.arange(4), [100, 40, 30, 30]))
  assert (decided.client_map, decided.chunk_size) == (way, 2)


@pytest.mark.parametrize('seconds,best', [
    ({16: 9., 8: 4., 4: 3., 2: 2., 1: 2.}, 8),  # 9, 8, 12 and 16 * 2.
    ({16: 9., 8: 5., 4: .1, 2: .1, 1: 9.}, 16),  # Halves did not gain.
    ({16: 9., 8: 4., 4: 1., 2: .4, 1: .1}, 1),
    ({16: float('inf'), 8: float('inf'), 4: 3., 2: 2., 1: 9.}, 4)])
def test_parts_are_halved_while_that_gains(seconds, best):
  asked = []

  def measured(size, forms, until):
    del until
    asked.append((size, forms))
    return {'3x3/1 SAME 8x8 1>4': {} if seconds[size] == float('inf') else {
        'lax': 2 * seconds[size], 'taps': seconds[size]}}
  found = convolutions.searched(measured, 16)
  assert found == ('3x3/1 SAME 8x8 1>4 taps', 'map' if best == 1 else 'vmap',
                   best % 16 if best > 1 else 0)
  known = {} if seconds[16] == float('inf') else {
      '3x3/1 SAME 8x8 1>4': ('taps',)}
  assert asked[:3] == [(16, {}), (1, {}), (8, known)]


@pytest.mark.parametrize('changes,way', [
    ({'client_map': 'map'}, 'map'), ({'client_map': 'vmap'}, 'vmap'),
    ({'chunk_size': 4}, 'vmap')])
def test_what_the_user_says_of_clients_stays(clock, changes, way):
  clock[4] = {form: 9 * s for form, s in _SECONDS.items()}
  decided = _decided(_options(**changes))
  assert decided.client_map == way


@pytest.mark.parametrize('name, value', [
    ('conv_impl', 'evil'), ('conv_impl', None), ('client_map', 'evil'),
    ('chunk_size', -1), ('chunk_size', '4'), ('schedule_rounds', 'x')])
def test_a_damaged_choice_is_blamed_on_its_file(tmp_path, name, value):
  """And not on a flag that nobody gave."""
  file = tmp_path / 'config.json'
  file.write_text(json.dumps({
      'flags': {'conv_impl': 'lax', name: value}, 'facts': {},
      'environment': {}, 'restarts': []}))
  options = _options(workdir=str(tmp_path))
  with pytest.raises(ValueError) as error:
    _decided(options)
    job.schedule_rounds(options)
  assert str(error.value).startswith(f'{file} is damaged: {name}=')


def test_where_the_time_is_over_no_way_is_preferred(monkeypatch):
  """One by one is not the winner because nothing else was timed."""
  now = [0.]
  monkeypatch.setattr(convolutions.time, 'monotonic', lambda: now[0])

  def measured(size, forms, until):
    del size, forms
    now[0] = until + 1
    return {'3x3/1 SAME 8x8 1>4': {'lax': 2., 'taps': 1.},
            '3x3/1 SAME 4x4 4>8': {}}
  assert convolutions.searched(measured, 16) == (
      '3x3/1 SAME 8x8 1>4 taps', 'auto', 0)


def test_what_a_device_works_on_at_once(monkeypatch):
  """Seeds under one vmap count, a chunk is no larger than the cohort."""
  loads = []

  def table(layers, load, path, *, machine, only, until, again):
    del path, machine, only, until
    assert again
    loads.append(load)
    return {str(layer): {'lax': 1.} for layer in layers}
  monkeypatch.setattr(conv_measure, 'table', table)
  _decided(_options(unlabeled_batch=7, labeled_batch=5))
  _decided(_options(chunk_size=64, client_map='vmap', seed_map='vmap'),
           seeds=3)
  _decided(_options(labeled_batch=5, unlabeled_batch=0, local_steps=2))
  assert loads == [(12, 4, 'float32'), (12, 1, 'float32'), (12, 2, 'float32'),
                   (60, 12, 'float32'),
                   # Two steps over the labels, thirty rows without.
                   *((5 + 15, n, 'float32') for n in (4, 1, 2))]


def test_where_no_form_runs_the_rule_decides(clock):
  clock[1] = clock[2] = clock[4] = dict.fromkeys(_SECONDS, float('inf'))
  options = _options()
  assert _decided(options) == dataclasses.replace(options, conv_impl='auto')


def test_a_network_without_convolutions(clock):
  decided = _decided(_options(model='mlp'))
  assert (decided.conv_impl, decided.client_map) == ('auto', 'auto')


def test_on_a_cpu_auto_measures_nothing(clock):
  clock.clear()
  options = _options(conv_impl='auto')
  assert _decided(options) == options


@pytest.mark.parametrize('platform', ['gpu', 'tpu'])
@pytest.mark.parametrize('changes', [
    {'local_steps': 10, 'unlabeled_batch': 0}, {'local_steps': 0}])
def test_elsewhere_auto_measures_only_for_long_runs(
    clock, monkeypatch, platform, changes):
  """Ten steps of 10 and 3 rows, or an epoch of 10 and 30, for four clients."""
  device = types.SimpleNamespace(platform=platform, device_kind='other')
  monkeypatch.setattr(convolutions.environment, 'devices', lambda: [device])
  monkeypatch.setattr(conv_measure.jax, 'default_backend', lambda: platform)
  asked = set()
  timed = conv_measure.seconds
  def noted(layer, form, load, **how):
    asked.add((load.clients, form))
    return timed(layer, form, load, **how)
  monkeypatch.setattr(conv_measure, 'seconds', noted)
  options = _options(conv_impl='auto', num_rounds=1, **changes)
  assert _decided(options) == options
  # 6 operations for each product of an entry: 64 pixels, 1 and 16 channels;
  # 16 pixels, 16 and 32 channels.
  row = 6 * 9 * (64 * 16 + 16 * 16 * 32)
  rows = 4 * (130 if changes['local_steps'] else 40)
  rounds = -(-3e15 // (row * rows))
  few = dataclasses.replace(options, num_rounds=int(rounds) - 1)
  assert _decided(few) == few
  many = dataclasses.replace(options, num_rounds=int(rounds))
  # A schedule says how long the run will be.
  first = dataclasses.replace(few, schedule_rounds=int(rounds))
  assert not asked
  assert 'pooled gemm' in _decided(many).conv_impl
  assert {form for clients, form in asked if clients == 4} == (
      {'gemm'} if platform == 'gpu' else {*_SECONDS})
  assert {form for clients, form in asked if clients == 1} == (
      {'lax', 'gemm'} if platform == 'gpu' else {*_SECONDS})
  assert _decided(first).conv_impl == _decided(many).conv_impl


def test_a_run_goes_on_with_the_forms_that_it_stored(clock, tmp_path):
  """Whatever is faster by then; and so does whoever repeats it."""
  folder = tmp_path / 'run'

  def fit(rounds):
    return fedjax_ssl.fit(
        'fedavg', 'digits', clients=4, cohort_size=4, rounds=rounds,
        schedule_rounds=2, model='cnn(width=2)', local_steps=1, num_devices=1,
        conv_impl='measure', workdir=folder)

  def stored():
    flags = json.loads((folder / 'config.json').read_text())['flags']
    return flags['conv_impl'], flags['client_map'], flags['chunk_size']
  clock[2]['gemm'] = .9
  fit(1)
  first = stored()
  assert first == (
      '3x3/1 SAME 8x8 1>2 pooled gemm; 3x3/1 SAME 4x4 2>4 pooled gemm',
      'vmap', 2)
  (tmp_path / 'cache' / 'fedjax_ssl' / 'convolutions.json').unlink()
  clock[1]['lax'] = clock[4]['lax'] = .1
  run = fit(2)
  assert stored() == first
  assert [*run.metrics['round']] == [1, 2]
  assert fedjax_ssl.load(folder).spec.conv_impl == first[0]
