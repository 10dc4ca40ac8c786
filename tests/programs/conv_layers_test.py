"""Every convolution of a network is timed in every form, or says why not."""
from __future__ import annotations

import collections
import json

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_ssl as fssl
from fedjax_ssl.models import layers

_RATE = 0.1


@pytest.fixture
def script(bench, tmp_path):
  """The script under --quick."""
  made, harness = bench('conv_layers'), bench('harness')
  flags.FLAGS(['', '--quick', f'--out={tmp_path}'])
  harness.shrink(made.QUICK)
  return made


def layer_of(script, shape, features, kernel=3, pixels=False, **options):
  return script.Layer(shape, layers.Conv(
      features, layers.Choices(), kernel=kernel, use_bias=False, **options),
      pixels)


@pytest.mark.parametrize('model', ['fedavg_cnn', 'resnet9', 'resnet8',
                                   'alexnet', 'fedtrinet_mnist'])
def test_every_convolution_of_a_network_is_there(script, bench, model):
  shape = bench('harness').image_shape(model)
  network = fssl.make_model(model, num_classes=10, input_shape=shape)
  variables = jax.eval_shape(network.init, jax.random.key(0))
  kernels = collections.Counter(
      leaf.shape for leaf in jax.tree.leaves(variables.params)
      if len(leaf.shape) == 4)
  found: collections.Counter[tuple[int, ...]] = collections.Counter()
  names = []
  for layer, text in script.layers_of(model, shape).items():
    names += text.split(', ')
    kernel = layer.module.kernel
    found[kernel, kernel, layer.shape[2], layer.module.features] += len(
        text.split(', '))
    assert layer.pixels == (layer.shape == shape)
  assert found == kernels and len(set(names)) == sum(kernels.values())


def test_a_network_without_convolutions_and_strange_names_are_refused(script):
  with pytest.raises(ValueError, match='no convolution'):
    script.layers_of('linear', (8, 8, 1))
  found = script.layers_of('resnet9', (32, 32, 3))
  flags.FLAGS['layers'].value = ['Conv_3']
  layer, = script.chosen(found)
  assert found[layer] == 'Conv_2, Conv_3'
  flags.FLAGS['layers'].value = ['Conv_3', 'Conv_8']
  with pytest.raises(ValueError, match='--layers=Conv_3,Conv_8: the layers of'):
    script.chosen(found)


@pytest.mark.parametrize('pixels', [False, True])
@pytest.mark.parametrize('impl', ['lax', 'gemm'])
def test_a_step_of_one_pixel_by_hand(script, pixels, impl):
  """The loss is (xw)^2 / 2, so that dx = x w^2 and dw = x^2 w."""
  layer = layer_of(script, (1, 1, 1), 1, 1, pixels)
  x, w = 1.5, -0.75
  def step(order):
    dx, dw = script.step_of(layer, order, impl, 'float32')(
        jnp.full((1, 1, 1, 1), x), jnp.full((1, 1, 1, 1), w))
    return [float(np.squeeze(d)) for d in (dx, dw)]
  def through(x, w):
    x_moved = x if pixels else x - _RATE * x * w**2
    return (x_moved * (w - _RATE * x**2 * w))**2 / 2
  want_x, want_w = jax.grad(through, (0, 1))(x, w)
  np.testing.assert_allclose(step('first'), [
      0 if pixels else x * w**2, x**2 * w], rtol=1e-5)
  np.testing.assert_allclose(
      step('second'), [0 if pixels else want_x, want_w], rtol=1e-5)


@pytest.mark.parametrize('pool', [False, True])
def test_forms_are_the_same_steps(script, pool):
  layer = layer_of(script, (4, 4, 16), 3, pool=pool)
  x, w = script.arguments(layer)
  want = jax.jit(script.round_of(layer, 'second', 'lax'))(x, w)
  flags.FLAGS['client_map'].value = 'vmap'
  got = jax.jit(script.round_of(layer, 'second', 'winograd'))(x, w)
  for a, b, start in zip(want, got, (x, w), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    assert np.abs(a - start).max() > 1e-3


def test_direct_convolutions_are_counted_for_all_clients(script):
  batch, side, channels, features = 2, 8, 3, 16
  product = 2 * batch * (3 * side - 2)**2 * channels * features
  def count(pixels):
    return script.flops(layer_of(
        script, (side, side, channels), features, pixels=pixels))
  inner, first = count(False), count(True)
  clients = flags.FLAGS.clients
  assert 3 * product < inner['first'] / clients < 3.2 * product
  assert 2 * product < first['first'] / clients < 2.2 * product
  assert inner['second'] > 2 * inner['first']


def test_one_program_is_one_form(script, bench):
  layer = layer_of(script, (4, 4, 2), 3, 1)
  groups = script.forms(layer, *script.arguments(layer))
  assert [bench('conv_table').label(names) for names in groups] == [
      'gemm=reordered=taps=winograd', 'lax']
  assert 'auto' in next(iter(groups))


def test_what_fails_is_a_row(script, monkeypatch, tmp_path, capsys):
  """One form cannot be written, another does not fit, the rest are timed."""
  plain = script.round_of
  def round_of(layer, order, impl):
    if impl == 'winograd':
      raise NotImplementedError('no tiles here')
    if (order, impl) == ('second', 'lax'):
      raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: out of memory')
    return plain(layer, order, impl)
  monkeypatch.setattr(script, 'round_of', round_of)
  script.main()
  (path,) = tmp_path.iterdir()
  assert path.name == 'conv_layers_cnn_map_float32_quick.json'
  saved = json.loads(path.read_text())
  measured = saved['measured']['layers']
  assert list(measured) == ['Conv_0', 'Conv_1']
  for name, found in measured.items():
    rows = {row[1]: row for row in saved['table'] if row[0] == name}
    assert set(rows) == {'gemm (auto)', 'lax', 'reordered', 'taps',
                         'winograd'}
    assert rows['winograd'][2:8] == ['failed', 'failed', '-', '-', '-', '-']
    assert rows['winograd'][8:] == ['-', 'no tiles here']
    assert rows['lax'][3] == 'failed' and 'out of memory' in rows['lax'][9]
    assert rows['lax'][2] != 'failed'
    for column in (2, 3):
      assert sum('*' in row[column] for row in rows.values()) == 1
    assert found['layer']['pool'] and found['rate'] > 0
    assert not rows['reordered'][9]
    for form in ('gemm', 'lax', 'reordered'):
      assert 0 <= found['forms'][form]['difference'] < 1e-5
  said = capsys.readouterr().out.splitlines()
  assert said[-3] == 'auto on cpu takes'
  assert [line.split(',')[0] for line in said[-2:]] == [
      '  Conv_0: gemm', '  Conv_1: gemm']


def test_the_verdict_names_what_was_faster(bench):
  conv_table = bench('conv_table')
  def form(first, second, auto=False):
    return {'auto': auto, 'first': {'seconds': [first]},
            'second': {'seconds': [second]}}
  found = {'forms': {'lax': form(2.0, 9.0, auto=True), 'gemm': form(4.0, 6.0)}}
  assert conv_table.verdict('Conv_0', found) == (
      'Conv_0: lax, first order the fastest, second order 1.50 times gemm')
  found['forms']['lax']['second'] = {'error': 'x'}
  assert conv_table.verdict('Conv_0', found).endswith('second order failed')


def test_clients_are_mapped_as_a_round_maps_them(script, monkeypatch):
  assert script.client_map() == 'map'
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  assert script.client_map() == 'vmap'
  flags.FLAGS['client_map'].value = 'map'
  assert script.client_map() == 'map'


@pytest.mark.parametrize('pixels, pool', [(False, True), (True, False)])
def test_a_form_that_is_coarse_is_seen(script, pixels, pool):
  """Weights that lose three digits, or an arithmetic that does."""
  layer = layer_of(script, (8, 8, 3), 5, pixels=pixels, pool=pool)
  x, w = (value[0] for value in script.arguments(layer))
  want = script.exact(layer, x, w)
  assert len(want) == 3 - pixels
  assert want[0].shape == (2, *((4, 4) if pool else (8, 8)), 5)
  def error(impl, dtype='float32', w=w):
    return script.difference(script.outputs(layer, impl, dtype, x, w), want)
  assert error('lax') < 1e-6 and error('gemm') < 1e-6
  assert 5e-4 < error('gemm', w=1.001 * w) < 5e-3
  assert 1e-3 < error('gemm', 'bfloat16') < 2e-2


def test_a_run_of_some_layers_or_forms_has_a_name_of_its_own(bench):
  conv_table = bench('conv_table')
  every = ('lax', 'gemm', 'reordered', 'taps', 'winograd')
  def name(layers=(), forms=every):
    return conv_table.file_name(['cnn', 'map'], layers, forms)
  names = [name(), name(['Conv_0']), name(['Conv_0', 'Conv_1']),
           name(forms=['lax']), name(['Conv_0'], ['lax']), name(forms=[]),
           name(['Block_0/Conv_0'])]
  assert len(set(names)) == len(names)
  assert not any('/' in name for name in names)
  assert name(forms=every[::-1]) == names[0] == 'conv_layers_cnn_map'
  many = [f'BasicBlock_{i}/Conv_0' for i in range(40)]
  assert name(many) == name(many[::-1]) != name(many[1:])
  assert len(name(many)) < 100


def test_layers_that_were_timed_are_kept(script, monkeypatch, tmp_path):
  plain = script.measure
  seen: list[object] = []
  def measure(layer, products):
    if seen:
      raise KeyboardInterrupt
    seen.append(layer)
    return plain(layer, products)
  monkeypatch.setattr(script, 'measure', measure)
  before = [tmp_path / f'conv_layers_cnn_map_float32{part}_quick.json'
            for part in ('', '_lax')]
  for path in before:
    path.write_text('of a run before')
  flags.FLAGS['forms'].value = ['lax']
  with pytest.raises(KeyboardInterrupt):
    script.main()
  (path,) = {*tmp_path.iterdir()} - {*before}
  assert {b.read_text() for b in before} == {'of a run before'}
  saved = json.loads(path.read_text())
  assert list(saved['measured']['layers']) == ['Conv_0']
  assert {row[0] for row in saved['table'][1:]} == {'Conv_0'}
