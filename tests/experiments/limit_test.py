"""Operations are those counted by hand; growth and start-up do as they say."""
from __future__ import annotations

import json
import os

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_ssl as fssl

_SIDE, _BATCH, _CLASSES = 8, 4, 10


def spec(**changes):
  return fssl.TaskSpec(**{
      'num_classes': _CLASSES, 'input_shape': (_SIDE, _SIDE, 1), 'mean': (0.5,),
      'std': (0.25,), 'weak': 'none', 'strong': 'none',
      'labeled_batch': _BATCH, 'unlabeled_batch': _BATCH, 'cohort_size': 2,
      **changes})


def federation(bench, sizes):
  harness = bench('harness')
  owner = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
  return harness.federate(harness.examples(owner.size, (_SIDE, _SIDE, 1)),
                          owner, num_clients=len(sizes))


def test_a_step_of_a_two_layer_net_by_hand(bench):
  limit = bench('limit')
  hidden, inputs = 2048, _SIDE**2
  got = limit.step_flops(spec(model=f'mlp(depth=1, width={hidden})'),
                         federation(bench, (8, 8)))
  # Forward; both weights' gradients; the hidden layer's.
  products = 2 * _BATCH * hidden * (2 * inputs + 3 * _CLASSES)
  # A step of plain gradient descent: a product and a sum for each number.
  update = 2 * (hidden * (inputs + 1) + _CLASSES * (hidden + 1))
  # The bias, the rectifier and its gradient.
  others = 6 * _BATCH * hidden
  assert products + update < got < products + update + others


def test_convolutions_are_counted_directly_without_padding(bench):
  limit = bench('limit')
  got = limit.step_flops(spec(model='cnn(width=16)', conv_impl='winograd'),
                         federation(bench, (8, 8)))
  def direct(side, channels, features):
    return 2 * _BATCH * (3 * side - 2)**2 * channels * features
  # The pixels need no gradient; forward, weights and inputs otherwise.
  products = 2 * direct(8, 1, 16) + 3 * direct(4, 16, 32) + (
      3 * 2 * _BATCH * 4 * 32 * _CLASSES)
  assert products < got < 1.25 * products


def test_a_round_counts_real_rows_only(bench):
  limit = bench('limit')
  data = federation(bench, (4, 10, 6))  # 1, 3 and 2 steps; 5.0 in full rows.
  small = spec(model='linear')
  one = limit.step_flops(small, data)
  got = limit.round_flops(small, data, np.array([1, 2]), 'labeled')
  assert got == pytest.approx(one * 16 / _BATCH)


def test_views_come_on_top(bench):
  harness, limit = bench('harness'), bench('limit')
  data = harness.two_pools(2, 4, 4, (_SIDE, _SIDE, 1))
  plain = spec(method='fixmatch', model='linear')
  views = spec(method='fixmatch', model='linear', weak='flip_crop',
               strong='ra_mc')
  assert limit.step_flops(views, data) > 2 * limit.step_flops(plain, data)


def test_a_loop_is_counted_once_so_what_has_two_is_refused(bench):
  limit = bench('limit')
  with pytest.raises(ValueError, match='one loop'):
    limit.step_flops(spec(method='fedtrinet', model='linear'),
                     federation(bench, (8, 8)))


def test_pools_hold_what_is_asked_for(bench):
  made = bench('harness').two_pools(3, 2, 5, (4, 4, 1))
  np.testing.assert_array_equal(made.clients.num_labeled, [2, 2, 2])
  np.testing.assert_array_equal(made.clients.num_unlabeled, [5, 5, 5])
  rows = np.concatenate([made.clients.labeled.ravel(),
                         made.clients.unlabeled.ravel()])
  np.testing.assert_array_equal(np.sort(rows), np.arange(21))


def test_the_share_is_work_over_time_over_the_rate(bench, capsys):
  limit = bench('limit')
  found = limit.shares({'network': (6e9, 2.0), 'augmentation': (1e9, 0.0)},
                       4e9)
  assert found['network']['share'] == 0.75
  assert np.isnan(found['augmentation']['share'])
  assert '0.750 of the limit' in capsys.readouterr().out


def test_the_faster_way_is_the_limit(bench):
  limit = bench('limit')
  mesh = jax.make_mesh((1,), ('clients',), devices=jax.devices()[:1])
  products = limit.Products(mesh, 'float32', 8)
  for run in products.runs.values():
    run()
  one, each = products.runs
  assert products.rate({one: 1.0, each: 2.0}) == 2.0 * 8**3
  assert products.rate({one: 4.0, each: 2.0}) == 8.0**3


@pytest.fixture
def growth(bench, tmp_path):
  made = bench('growth')
  flags.FLAGS(['', '--side=4', '--rows=6', '--pool=100', '--model=linear',
               '--batch=3', '--cohort_size=2', '--num_devices=1',
               '--repeats=1', f'--out={tmp_path}'])
  return made


def test_clients_grow_and_their_data_do_not(growth):
  few, many = growth.drawn(3), growth.drawn(500)
  assert few.train.inputs.shape == many.train.inputs.shape
  assert many.num_clients == 500
  assert (np.sort(many.clients.labeled, 1)[:, 1:]
          > np.sort(many.clients.labeled, 1)[:, :-1]).all()
  assert len(np.unique(many.clients.labeled)) > 90


def test_sizes_must_be_numbers_in_range(growth):
  flags.FLAGS['num_clients'].value = ['30', '4', '30']
  assert growth.numbers('num_clients') == [4, 30]
  for bad in (['x'], ['1.5'], ['0'], []):
    flags.FLAGS['num_clients'].value = bad
    with pytest.raises(ValueError, match='--num_clients='):
      growth.numbers('num_clients')


def test_every_study_has_a_value_for_each_size_and_a_plot(growth, tmp_path):
  sizes = {'cohort_sizes': ['2'], 'num_clients': ['4', '9'],
           'alphas': ['100'], 'chunk_sizes': ['0'], 'seed_counts': ['2']}
  for flag, value in sizes.items():
    flags.FLAGS[flag].value = value
  growth.main()
  for name, num in ('cohort', 1), ('clients', 2), ('alpha', 1), ('seeds', 1):
    saved = json.loads((tmp_path / f'growth_{name}.json').read_text())
    measured = saved['measured']
    assert len(measured['sizes']) == num
    assert {len(v) for v in measured['lines'].values()} == {num}
    picture = (tmp_path / f'growth_{name}.png').read_bytes()
    assert picture.startswith(b'\x89PNG')


def test_unequal_clients_mask_more(growth):
  flags.FLAGS['alphas'].value = ['0.05', '100']
  flags.FLAGS['chunk_sizes'].value = ['0']
  flags.FLAGS['cohort_size'].value = 20
  lines = growth.alpha(None).lines
  skewed, even = lines['masked, chunk all']
  assert skewed > even
  assert all(a <= b for a, b in zip(lines['masked, one by one'],
                                    lines['masked, chunk all'], strict=True))


def test_a_cold_start_knows_no_other_cache(bench, monkeypatch, tmp_path):
  startup = bench('startup')
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', 'somewhere')
  monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '9')
  made = startup.variables(tmp_path)
  assert made['XDG_CACHE_HOME'] == str(tmp_path)
  assert made['PATH'] == os.environ['PATH']
  assert not [name for name in made if 'CACHE_DIR' in name
              or 'PERSISTENT' in name]
  assert startup.cached(tmp_path) == (0, 0)


def test_a_start_without_a_cache_is_refused(bench, monkeypatch, tmp_path):
  startup = bench('startup')
  flags.FLAGS(['', '--repeats=1'])
  monkeypatch.setattr(startup, 'first_round', lambda cache, workdir: 1.0)
  with pytest.raises(ValueError, match='no compiled program'):
    startup.measure(tmp_path)
  folder = tmp_path / 'cache' / 'fedjax_ssl' / 'xla'
  folder.mkdir(parents=True)
  (folder / 'program').write_bytes(b'1234')
  assert startup.measure(tmp_path) == {
      'cold': 1.0, 'warm': [1.0], 'cache_files': 1, 'cache_bytes': 4}


def moved(network, start, want):
  """Largest relative distance of trained weights from the wanted ones."""
  worst = 0.0
  for got, goal, old in zip(network.parameters(), want.parameters(),
                            start.parameters(), strict=True):
    way = (goal - old).norm()
    if way > 1e-6:  # Biases before a normalization do not move.
      worst = max(worst, ((got - goal).norm() / way).item())
  return worst


@pytest.mark.parametrize('model', ['resnet9', 'resnet9_fedmatch'])
def test_pytorchs_feddure_step_is_ours(bench, model):
  pytest.importorskip('torch')
  step, torch_loop = bench('feddure_step'), bench('torch_loop')
  flags.FLAGS([''])
  program = step.make_programs(fssl.TaskSpec(
      10, (32, 32, 3), model=model, mean=(0.5,) * 3, std=(0.25,) * 3,
      optimizer='sgd', learning_rate=0.01, method='feddure', weak='none',
      strong='none', conv_impl='lax'), 4, 6)['FedDure']
  after = jax.jit(program[0])(*program[1])[0]
  trio, one = step.pytorch_step(program, 0.01, 'channels_last', 'sgd')
  one()
  def network(params):
    made = torch_loop.ResNet9(whole=model == 'resnet9')
    torch_loop.load_flax(made, params)
    return made
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
    made = torch_loop.FedAvgCNN(side=8)
    torch_loop.load_flax(made, ours.model.params)
    return made
  start = network()
  loop = fixmatch.Loop(
      network(), data.train.inputs, data.train.labels, data.clients.labeled,
      data.clients.unlabeled, mean=0.5, std=0.25, batch=4, unlabeled_batch=6,
      threshold=0.12, learning_rate=0.1, layout='contiguous')
  loop.round(ours.cohort(0))
  ours.advance(1)
  assert moved(loop.network, start, network()) < 1e-3
