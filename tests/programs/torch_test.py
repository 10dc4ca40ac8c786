"""PyTorch's loops take the steps that the library takes."""
from __future__ import annotations

import json

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_ssl as fssl


def spec(**changes):
  return fssl.TaskSpec(**{
      'num_classes': 10, 'input_shape': (8, 8, 1), 'method': 'fedavg',
      'mean': (0.5,), 'std': (0.25,), 'weak': 'none', 'strong': 'none',
      'labeled_batch': 4,
      'conv_impl': 'gemm', 'cohort_size': 2, **changes})


def moved(network, start, want):
  """Largest relative distance of trained weights from the wanted ones."""
  worst = 0.0
  for got, goal, old in zip(network.parameters(), want.parameters(),
                            start.parameters(), strict=True):
    way = (goal - old).norm()
    if way > 1e-6:  # Biases before a normalization do not move.
      worst = max(worst, ((got - goal).norm() / way).item())
  return worst


@pytest.mark.parametrize('model, shape, layout', [
    ('fedavg_cnn', (8, 8, 1), 'contiguous'),
    ('resnet9', (32, 32, 3), 'channels_last')])
def test_pytorchs_feddure_step_is_ours(bench, model, shape, layout):
  pytest.importorskip('torch')
  step, torch_loop = bench('feddure_step'), bench('torch_loop')
  flags.FLAGS([''])
  program = step.make_programs(fssl.TaskSpec(
      10, shape, model=model, mean=(0.5,) * shape[2], std=(0.25,) * shape[2],
      optimizer='sgd', learning_rate=0.01, method='feddure', weak='none',
      strong='none', conv_impl='lax'), 4, 6)['FedDure']
  after = jax.jit(program[0])(*program[1])[0]
  trio, one = step.pytorch_step(
      program, model, 0.01, layout, 'sgd')
  one()
  def network(params):
    return torch_loop.network_of(model, params, shape[0])
  start = network(program[1][0].model.params)
  # Early layers of deep nets differ where a rectifier flips on rounding.
  assert moved(trio.network, start, network(after.model.params)) < 5e-3
  assert moved(trio.coarse, start, network(after.coarse)) < 5e-3
  want = after.fine.kernel - program[1][0].fine.kernel
  got = trio.fine.hidden.weight.detach().numpy().T - np.asarray(
      program[1][0].fine.kernel)
  assert jnp.linalg.norm(want) > 0
  assert jnp.linalg.norm(got - want) < 1e-2 * jnp.linalg.norm(want)


def test_pytorchs_fixmatch_round_is_ours(bench):
  pytest.importorskip('torch')
  harness, torch_loop = bench('harness'), bench('torch_loop')
  fixmatch = bench('torch_fixmatch')
  data = harness.two_pools(3, 4, 6, (8, 8, 1))
  ours = harness.Simulation(spec(
      method='fixmatch(threshold=0.12)', model='fedavg_cnn', conv_impl='gemm',
      learning_rate=0.1, labeled_batch=4, unlabeled_batch=6), data, None)
  def network():
    return torch_loop.network_of('fedavg_cnn', ours.model.params, 8)
  start = network()
  loop = fixmatch.Loop(
      network(), data.train.inputs, data.train.labels, data.clients.labeled,
      data.clients.unlabeled, mean=0.5, std=0.25, batch=4, unlabeled_batch=6,
      threshold=0.12, learning_rate=0.1, layout='contiguous')
  loop.round(ours.cohort(0))
  ours.advance(1)
  assert moved(loop.network, start, network()) < 1e-3


def test_pytorchs_feddure_rounds_are_ours(bench):
  """Whole-client batches; F-reg stays on its client for the second round."""
  pytest.importorskip('torch')
  harness, torch_loop = bench('harness'), bench('torch_loop')
  torch_feddure = bench('torch_feddure')
  data = harness.two_pools(2, 4, 6, (8, 8, 1))
  ours = harness.Simulation(spec(
      method='feddure', model='fedavg_cnn', learning_rate=0.1,
      unlabeled_batch=6), data, None)
  def network():
    return torch_loop.network_of('fedavg_cnn', ours.model.params, 8)
  start = network()
  loop = torch_feddure.Loop(
      network(), data.train.inputs, data.train.labels, data.clients.labeled,
      data.clients.unlabeled, mean=0.5, std=0.25, batch=4, unlabeled_batch=6,
      learning_rate=0.1, layout='contiguous', optimizer='sgd')
  loop.load_fine(ours.memory.fine)
  fines = np.array(ours.memory.fine.kernel)
  for round_ in range(2):
    loop.round(ours.cohort(round_))
    ours.advance(1)
  assert moved(loop.network, start, network()) < 1e-3
  for client, fine in enumerate(loop.fine):
    got, old = fine.hidden.weight.detach().numpy().T, fines[client]
    want = np.asarray(ours.memory.fine.kernel[client])
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want - old)


@pytest.mark.parametrize('script, names', [
    ('fedavg_cnn', {'network', 'products'}), ('feddure_round', set())])
def test_a_script_beside_pytorch_runs_and_reports(
    bench, monkeypatch, tmp_path, capsys, script, names):
  torch = pytest.importorskip('torch')
  made, harness = bench(script), bench('harness')
  flags.FLAGS(['', '--quick', f'--out={tmp_path}',
               f'--num_devices={torch.get_num_threads()}'])
  harness.shrink(made.QUICK)
  monkeypatch.setattr(harness, 'make_mesh', lambda: None)
  made.main()
  assert 'ratio ours/pytorch: ' in capsys.readouterr().out
  (path,) = tmp_path.glob('*.json')
  saved = json.loads(path.read_text())
  assert saved['ratio'] > 0
  assert saved['environment']['torch'] == torch.__version__
  seconds = saved['measured']['seconds']
  assert {'ours', 'PyTorch, contiguous', 'PyTorch, channels_last'} <= set(
      seconds)
  assert all(len(v) == 1 and v[0] > 0 for v in seconds.values())
  assert set(saved['measured'].get('limit', ())) == names


@pytest.mark.parametrize('fixmatch', [False, True])
def test_resnet9_is_measured_alone_without_pytorch(
    bench, monkeypatch, tmp_path, capsys, fixmatch):
  made, harness = bench('resnet9'), bench('harness')
  flags.FLAGS(['', '--quick', f'--fixmatch={fixmatch}', f'--out={tmp_path}',
               '--num_clients=3', '--steps=2'])
  harness.shrink(made.QUICK)
  monkeypatch.setattr(harness, 'make_mesh', lambda: None)
  monkeypatch.setattr(harness, 'has_torch', lambda: False)
  plain, small = made._spec, {
      'model': 'cnn(width=2)', 'weak': 'none', 'strong': 'none'}
  monkeypatch.setattr(made, '_spec', lambda **changes: plain(**changes | small))
  made.main()
  assert 'ratio' not in capsys.readouterr().out
  (path,) = tmp_path.glob('*.json')
  saved = json.loads(path.read_text())
  assert saved['ratio'] is None and saved['environment']['usable_cpus'] >= 1
  assert saved['table'][-1][0] == 'PyTorch'
  assert saved['table'][-1][2].startswith('missing: pip install')
  assert saved['measured']['limit']['network']['share'] > 0
  rows = 3 * 2 * (2 + 2 if fixmatch else 2)
  assert saved['table'][1][2] == pytest.approx(rows / saved['table'][1][1])


def test_pytorch_on_a_cpu_is_not_compared_with_an_accelerator(
    bench, monkeypatch):
  harness = bench('harness')
  monkeypatch.setattr(harness, 'has_torch', lambda: True)
  assert harness.without_torch() == ''
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  assert harness.without_torch().startswith('not timed')
