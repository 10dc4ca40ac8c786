"""The operations of a round are those counted by hand."""
from __future__ import annotations

import jax
import numpy as np
import pytest

import fedjax_ssl as fssl

_SIDE, _BATCH, _CLASSES = 8, 4, 10


def spec(**changes):
  return fssl.TaskSpec(**{
      'num_classes': _CLASSES, 'input_shape': (_SIDE, _SIDE, 1),
      'method': 'fedavg', 'mean': (0.5,), 'std': (0.25,),
      'weak': 'none', 'strong': 'none',
      'labeled_batch': _BATCH, 'unlabeled_batch': _BATCH, 'cohort_size': 2,
      'schedule_rounds': 100,
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


def test_an_accelerator_as_default_does_not_matter(bench, monkeypatch):
  """It counts nothing before compilation; the CPU beside it does."""
  limit = bench('limit')
  small, data = spec(model='mlp(depth=1, width=64)'), federation(bench, (8, 8))
  want = limit.step_flops(small, data)
  plain = jax.stages.Lowered.cost_analysis
  def only_on_cpu(self):
    device = jax.config.values['jax_default_device']
    return plain(self) if device and device.platform == 'cpu' else None
  monkeypatch.setattr(jax.stages.Lowered, 'cost_analysis', only_on_cpu)
  assert limit.step_flops(small, data) == want


def test_compiled_programs_are_counted_where_others_are_not(
    bench, monkeypatch):
  limit = bench('limit')
  small, data = spec(model='cnn(width=16)'), federation(bench, (8, 8))
  want = limit.step_flops(small, data)
  def refuse(stage):
    raise NotImplementedError(type(stage))
  monkeypatch.setattr(jax.stages.Lowered, 'cost_analysis', refuse)
  assert limit.step_flops(small, data) == pytest.approx(want, rel=0.1)
  monkeypatch.setattr(jax.stages.Compiled, 'cost_analysis', refuse)
  with pytest.raises(ValueError, match='does not count'):
    limit.step_flops(small, data)


def test_jax_without_a_cpu_is_one_clear_line(bench, monkeypatch):
  def none(backend):
    raise RuntimeError(f'Unknown backend {backend}')
  monkeypatch.setattr(jax, 'local_devices', none)
  with pytest.raises(ValueError, match='JAX_PLATFORMS must name it too'):
    bench('limit').step_flops(spec(model='linear'), federation(bench, (8, 8)))


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
  assert found['augmentation']['share'] is None
  assert '0.750 of the limit' in capsys.readouterr().out


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_products_are_of_random_numbers_and_stay_small(
    bench, monkeypatch, dtype):
  limit = bench('limit')
  mesh = jax.make_mesh((1,), ('clients',), devices=jax.devices()[:1])
  made: list[jax.Array] = []
  monkeypatch.setattr(limit, '_wait', made.append)
  for run in limit.Products(mesh, dtype, 256).runs.values():
    run()
  for x in made:
    product = np.asarray(x, np.float32).reshape(256, 256)
    # A sum of n products of normal numbers, each of variance 1 / n.
    assert product.std() == pytest.approx(256**-0.5, rel=0.1)
    assert len(np.unique(product)) > 1000


def test_the_faster_way_is_the_limit(bench):
  limit = bench('limit')
  mesh = jax.make_mesh((1,), ('clients',), devices=jax.devices()[:1])
  products = limit.Products(mesh, 'float32', 8)
  for run in products.runs.values():
    run()
  one, each = products.runs
  assert products.rate({one: 1.0, each: 2.0}) == 2.0 * 8**3
  assert products.rate({one: 4.0, each: 2.0}) == 8.0**3
