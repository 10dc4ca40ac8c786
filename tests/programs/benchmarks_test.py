"""The benchmarks compare like with like, and count what the library does."""
from __future__ import annotations

import json
import os
import types

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_ssl as fssl
from fedjax_ssl.core import local_training, rounds
from fedjax_ssl.core.types import Cohort, State, Update
from fedjax_ssl.data import batching
from tests import toy


def owners(sizes):
  return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)


def test_pytorch_and_the_library_do_the_same_rounds(bench):
  """With full batches the orders do not matter and the weights agree."""
  pytest.importorskip('torch')
  harness, torch_loop = bench('harness'), bench('torch_loop')
  sizes = (3, 8, 5, 2)
  train = harness.examples(sum(sizes), (8, 8, 1))
  spec = fssl.TaskSpec(
      10, (8, 8, 1), model='fedavg_cnn', mean=(0.4,), std=(0.3,), weak='none',
      strong='none', learning_rate=0.1, labeled_batch=8, cohort_size=2,
      conv_impl='gemm', method='fedavg')
  ours = harness.Simulation(
      spec, harness.federate(train, owners(sizes), num_clients=4), None)
  network = torch_loop.FedAvgCNN(side=8)
  torch_loop.load_flax(network, ours.model.params)
  before = jax.device_get(ours.model.params)
  rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
  loop = torch_loop.Loop(
      network, train.inputs, train.labels, rows, mean=0.4, std=0.3, batch=8,
      learning_rate=0.1, layout='channels_last')
  for round_ in range(3):
    loop.round(ours.cohort(round_))
  ours.advance(2)
  ours.advance(1)
  want = torch_loop.FedAvgCNN(side=8)
  torch_loop.load_flax(want, ours.model.params)
  start = torch_loop.FedAvgCNN(side=8)
  torch_loop.load_flax(start, before)
  moved = 0.0
  for got, expected, old in zip(
      network.parameters(), want.parameters(), start.parameters(),
      strict=True):
    np.testing.assert_allclose(
        got.detach(), expected.detach(), rtol=1e-3, atol=1e-5)
    moved = max(moved, (expected - old).abs().max().item())
  assert moved > 1e-3


def test_the_networks_are_the_same_resnet9(bench):
  torch = pytest.importorskip('torch')
  torch_loop = bench('torch_loop')
  model = fssl.make_model('resnet9_fedmatch', num_classes=10,
                          input_shape=(32, 32, 3), conv_impl='lax')
  variables = jax.jit(model.init)(jax.random.key(0))
  network = torch_loop.ResNet9()
  torch_loop.load_flax(network, variables.params)
  x = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)
  with torch.no_grad():
    got = network(torch.tensor(x).permute(0, 3, 1, 2)).numpy()
  want = jax.jit(model.apply)(variables, x)
  np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


COHORTS = np.array([[0, 1, 2, 3], [5, 4, 1, 2], [3, 5, 0, 4]])


def counted_by_a_round(task, streams):
  """(ids) -> the masked share that the library reports for one cohort."""
  def update(payload, client, key):
    made = batching.batches(task, client.train, client.shard, key, streams)
    _, metrics = local_training.train(lambda learner, batch, key: (learner, {}),
                                      payload, made, key)
    return Update(payload, jnp.float32(1), client.memory, metrics)
  one = jax.jit(rounds.client_pass(
      task, update, None,
      sample=lambda state, federation, key: Cohort(
          state.server[None], jnp.ones((1, *state.server.shape), bool)),
      work=lambda shard: batching.num_steps(task, shard, streams)))
  federation, _ = toy.federation()
  def count(ids):
    state = State(jnp.asarray(ids, jnp.int32), jnp.zeros(toy.NUM_CLIENTS),
                  jnp.int32(0))
    _, metrics = one(state, federation, jnp.int32(0), jax.random.key(0))
    share = metrics['masked_share']
    return float(share.total / share.rows)
  return count


@pytest.mark.parametrize('changes, streams', [
    ({'client_map': 'vmap', 'chunk_size': 2}, 'both'),
    ({'client_map': 'vmap', 'chunk_size': 3}, 'labeled'),
    ({'client_map': 'vmap'}, 'unlabeled'),
    ({'client_map': 'map', 'local_epochs': 2}, 'both'),
    ({'client_map': 'lanes', 'chunk_size': 2}, 'both'),
    ({'client_map': 'vmap', 'chunk_size': 2, 'unlabeled_batch': 0,
      'unlabeled_capacity': 2}, 'both')])
def test_padding_is_counted_as_the_rounds_count_it(bench, changes, streams):
  padding = bench('padding')
  task = toy.task(**changes)
  work = padding.count(task, toy.federation()[0], streams)
  counted = counted_by_a_round(task, streams)
  for ids in COHORTS[:2]:
    np.testing.assert_allclose(
        padding.masked_share(task, work, ids[None]),
        counted(ids), rtol=1e-5, atol=1e-6)


def test_order_and_small_chunks_save_padding(bench):
  padding = bench('padding')
  steps = np.array([8, 1, 1, 8])
  work = padding.Work(steps, 10.0 * steps, 10)
  cohort = np.array([[0, 1, 2, 3]])
  def share(size, **kwargs):
    task = toy.task(client_map='vmap', chunk_size=size)
    return padding.masked_share(task, work, cohort, **kwargs)
  assert share(2) == 0 and share(1) == 0
  assert share(2, ordered=False) == share(4) == pytest.approx(1 - 18 / 32)
  assert padding.bound(work, cohort, 1) == 0
  assert padding.bound(work, cohort, 3) == pytest.approx(1 - 18 / 24)


def test_tables_do_not_grow_with_the_images(bench):
  harness, memory = bench('harness'), bench('memory')
  sizes = (4,) * 50
  made = [harness.federate(
      harness.examples(200, (side, side, 1)), owners(sizes), num_clients=50)
          for side in (4, 16)]
  # Rows, an empty unlabeled table one wide, and two counts, 4 bytes each.
  assert [memory.tables(f) for f in made] == 2 * [50 * 4 * (4 + 1 + 2)]


def test_the_report_ends_with_the_ratio(bench, tmp_path, capsys):
  harness = bench('harness')
  flags.FLAGS([''])
  flags.FLAGS['out'].value = str(tmp_path / 'new')
  path = harness.report('x', [['', 's'], ['ours', 1.5]], {'seconds': [1.5]},
                        0.75)
  assert capsys.readouterr().out.splitlines()[-1] == (
      'ratio ours/pytorch: 0.750')
  saved = json.loads(path.read_text())
  assert saved['ratio'] == 0.75 and saved['measured'] == {'seconds': [1.5]}
  assert {'command', 'load_average'} <= set(saved)
  assert {'machine', 'jax', 'torch'} <= set(saved['environment'])


def test_what_is_measured_quickly_replaces_nothing(bench, tmp_path):
  harness = bench('harness')
  flags.FLAGS(['', f'--out={tmp_path}'])
  whole = harness.save('x', [['s']], {'seconds': [1.5]})
  before = whole.read_text()
  flags.FLAGS['quick'].value = True
  assert harness.save('x', [['s']], {'seconds': [0.1]}) != whole
  assert whole.read_text() == before


def test_repetitions_take_turns(bench):
  harness = bench('harness')
  flags.FLAGS(['', '--repeats=3'])
  calls = []
  seconds = harness.interleave(
      {'a': lambda: calls.append('a'), 'b': lambda: calls.append('b')})
  assert ''.join(calls) == 'aabb' * 3  # The second of each turn is timed.
  assert [len(v) for v in seconds.values()] == [3, 3]
  assert harness.medians({'a': [3.0, 1.0, 2.0]}) == {'a': 2.0}


@pytest.mark.parametrize('given, minutes, want', [
    ([], 1, 7), ([], 2, 3), ([], 3, 2), ([], 20, 1), (['--repeats=7'], 20, 7)])
def test_a_default_benchmark_ends_within_eight_minutes(
    bench, monkeypatch, capsys, given, minutes, want):
  """Only the first turn may last longer, or turns that were asked for."""
  harness = bench('harness')
  flags.FLAGS(['', *given])
  clock = [harness._BEGUN]
  monkeypatch.setattr(harness, 'time', types.SimpleNamespace(
      monotonic=lambda: clock[0]))
  for _ in harness.turns():
    clock[0] += 60 * minutes
  assert clock[0] == harness._BEGUN + 60 * minutes * want
  assert ('--repeats=7' in capsys.readouterr().out) == (want < 7)


def test_compilation_does_not_count_as_a_turn(bench, monkeypatch, tmp_path):
  """A minute a call, and five for the first; the file has the turns."""
  harness = bench('harness')
  flags.FLAGS(['', f'--out={tmp_path}'])
  clock, calls = [harness._BEGUN], [False]
  monkeypatch.setattr(harness, 'time', types.SimpleNamespace(
      monotonic=lambda: clock[0], perf_counter=lambda: clock[0]))
  def call():
    clock[0] += 60 if calls[-1] else 300
    calls.append(True)
  seconds = harness.interleave({'': call})
  assert seconds == {'': [60, 60]}
  saved = harness.save('x', [['s']], {'seconds': seconds})
  assert json.loads(saved.read_text())['turns'] == [2]
  saved = harness.save('y', [['s']], {})
  assert json.loads(saved.read_text())['turns'] == []


def test_a_feddure_step_is_at_most_six_fedavg_steps_of_arithmetic(bench):
  """And more than that of the local model alone."""
  feddure_step = bench('feddure_step')
  spec = fssl.TaskSpec(10, (8, 8, 1), model='cnn', mean=(0.5,), std=(0.25,),
                       conv_impl='gemm')  # The quickest to compile.
  programs = feddure_step.make_programs(spec, 4, 8)
  # What compiles fast in tests may write a gather as a loop.
  options: dict[str, bool | str] | None = (
      {'xla_cpu_use_fusion_emitters': True}
      if 'fusion_emitters' in os.environ.get('XLA_FLAGS', '') else None)
  ours, fedavg = (
      feddure_step.flops(jax.jit(function).lower(*args).compile(options))
      for function, args in (programs[name] for name in ('FedDure', 'FedAvg')))
  assert 2 < ours / fedavg < feddure_step.GOAL
