"""The fastest form of a convolution is found, kept, and read again."""
import json
import os

import jax
import jax.numpy as jnp
import pytest

from fedjax_ssl import models
from fedjax_ssl.core import conv_forms
from fedjax_ssl.ops import conv, conv_measure

_LAYER = conv.Layer((4, 4), (3, 3), 1, 'SAME', 2, 3)
_LOAD = conv_measure.Load(rows=2, clients=2)


def _clock(monkeypatch, seconds):
  """Each form takes what is said, on a TPU; returns the calls."""
  calls = []
  monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')

  def timed(layer, form, load, **_):
    calls.append((str(layer), form))
    return seconds[form]
  monkeypatch.setattr(conv_measure, 'seconds', timed)
  monkeypatch.setattr(conv_measure, 'program', lambda *_: object())
  return calls


def test_layers_of_a_network():
  model = models.make('cnn(width=4)', num_classes=3, input_shape=(8, 8, 1))
  inputs = jax.ShapeDtypeStruct((2, 8, 8, 1), jnp.float32)
  found = conv_measure.layers_of(
      model.apply, jax.eval_shape(model.init, jax.random.key(0)), inputs)
  assert [*map(str, found)] == [
      '3x3/1 SAME 8x8 1>4 pooled', '3x3/1 SAME 4x4 4>8 pooled']


def test_a_pooled_layer_is_timed_with_its_pool(monkeypatch):
  calls = []
  pooled = conv.max_pooled_conv2d

  def noted(x, w, **how):
    calls.append(how)
    return pooled(x, w, **how)
  monkeypatch.setattr(conv, 'max_pooled_conv2d', noted)
  layer = _LAYER._replace(pooled=True)
  assert conv_measure.seconds(layer, 'gemm', _LOAD, at_least=0) < float('inf')
  assert calls and calls[0] == {'padding': 'SAME', 'impl': 'gemm'}


@pytest.mark.parametrize('end', [' pooled', ''])
def test_a_pooled_layer_has_the_form_that_is_stored(end):
  """Also in the texts of runs that did not tell pooled layers."""
  x, w = jnp.ones((1, 4, 4, 8)), jnp.ones((3, 3, 8, 4))
  def jaxpr(impl):
    return str(jax.make_jaxpr(
        lambda x, w: conv.max_pooled_conv2d(x, w, impl=impl))(x, w))
  text = f'3x3/1 SAME 4x4 8>4{end} lax'
  assert jaxpr(text) == jaxpr('lax') != jaxpr('gemm')
  both = '3x3/1 SAME 4x4 8>4 lax; 3x3/1 SAME 4x4 8>4 pooled gemm'
  assert jaxpr(both) == jaxpr('gemm')


@pytest.mark.parametrize('clients', [1, 2])
def test_a_form_is_run(clients):
  load = _LOAD._replace(clients=clients)
  found = conv_measure.seconds(_LAYER, 'gemm', load, at_least=0)
  assert 0 < found < float('inf')


def test_a_form_that_fails_takes_for_ever(monkeypatch):
  def fail(*_, **__):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED')
  monkeypatch.setattr(conv, 'conv2d', fail)
  assert conv_measure.seconds(_LAYER, 'lax', _LOAD) == float('inf')


def test_the_fastest_wins_and_is_kept(monkeypatch, tmp_path):
  path = tmp_path / 'cache' / 'convolutions.json'
  seconds = {'lax': 3., 'gemm': 2., 'taps': float('inf'), 'winograd': 4.,
             'reordered': 5.}
  calls = _clock(monkeypatch, seconds)
  table = conv_measure.table([_LAYER], _LOAD, path)
  assert table == {str(_LAYER): {
      form: value for form, value in seconds.items() if form != 'taps'}}
  assert conv_measure.fastest(table) == {str(_LAYER): 'gemm'}
  assert conv_measure.total(table) == 2.
  assert len(calls) == len(seconds)
  # Nothing is timed again, what failed only where that is asked for.
  assert conv_measure.table([_LAYER], _LOAD, path) == table
  assert len(calls) == len(seconds)
  assert conv_measure.table([_LAYER], _LOAD, path, again=True) == table
  assert calls[len(seconds):] == [(str(_LAYER), 'taps')]
  # Another load, or another machine, is another measurement.
  calls.clear()
  conv_measure.table([_LAYER], _LOAD._replace(clients=3), path)
  conv_measure.table([_LAYER], _LOAD, path, machine='other')
  assert len(calls) == 2 * len(seconds)


def test_no_form_is_begun_when_the_time_is_over(monkeypatch):
  calls = _clock(monkeypatch, dict.fromkeys(conv_measure.FORMS, 1.))
  now = [0.]
  monkeypatch.setattr(conv_measure.time, 'monotonic', lambda: now[0])

  def program(layer, form, load):
    del layer, load
    now[0] += form == 'taps'
    return object()
  monkeypatch.setattr(conv_measure, 'program', program)
  other = _LAYER._replace(outputs=4)
  found = conv_measure.table([_LAYER, other], _LOAD, None, until=.5)
  assert [form for _, form in calls] == ['lax', 'lax', 'gemm', 'gemm']
  assert found == {str(layer): {'lax': 1., 'gemm': 1.}
                   for layer in (_LAYER, other)}


def test_what_came_too_late_is_not_waited_for_again(monkeypatch, tmp_path):
  """Else every run would begin with as long a search as the first."""
  path = tmp_path / 'convolutions.json'
  calls = _clock(monkeypatch, dict.fromkeys(conv_measure.FORMS, 1.))
  assert conv_measure.table([_LAYER], _LOAD, path, until=0) == {
      str(_LAYER): {}}
  assert not calls  # No form of the layer is known: its turn comes next time.
  only = {str(_LAYER): ('taps',)}
  first = conv_measure.table([_LAYER], _LOAD, path, only=only)
  assert first == {str(_LAYER): {'taps': 1.}}
  conv_measure.table([_LAYER], _LOAD, path, until=0)
  assert conv_measure.table([_LAYER], _LOAD, path) == first
  assert len(calls) == 1
  conv_measure.table([_LAYER], _LOAD, path, again=True)
  assert len(calls) == len(conv_measure.FORMS)


def test_no_grouped_convolution_is_compiled_for_a_gpu(monkeypatch):
  """They take a minute there, and are slow; one client alone has none."""
  calls = _clock(monkeypatch, dict.fromkeys(conv_measure.FORMS, 1.))
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  conv_measure.table([_LAYER], _LOAD, None)
  assert [form for _, form in calls] == ['gemm']
  calls.clear()
  conv_measure.table([_LAYER], _LOAD._replace(clients=1), None)
  assert [form for _, form in calls] == ['lax', 'gemm']


def test_where_patches_do_not_run_a_gpu_takes_grouped_ones(monkeypatch):
  """Else `auto` would be patches again."""
  seconds = dict.fromkeys(conv_measure.FORMS, float('inf')) | {'lax': 3.}
  calls = _clock(monkeypatch, seconds)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  assert conv_measure.table([_LAYER], _LOAD, None) == {
      str(_LAYER): {'lax': 3.}}
  assert [form for _, form in calls] == ['gemm', 'lax']
  only = {str(_LAYER): ('gemm',)}
  assert conv_measure.table([_LAYER], _LOAD, None, only=only) == {
      str(_LAYER): {}}


def test_what_another_process_has_timed_is_not_lost(monkeypatch, tmp_path):
  path = tmp_path / 'convolutions.json'
  _clock(monkeypatch, dict.fromkeys(conv_measure.FORMS, 1.))
  everything = conv_measure.table([_LAYER], _LOAD, path)
  read = conv_measure._read
  # One that has read the file before the other wrote, and comes too late.
  monkeypatch.setattr(conv_measure, '_read', lambda path: {})
  late = conv_measure.table
  writes = conv_measure._write
  def write(path, known):
    monkeypatch.setattr(conv_measure, '_read', read)
    writes(path, known)
  monkeypatch.setattr(conv_measure, '_write', write)
  assert late([_LAYER], _LOAD, path, until=0) == {str(_LAYER): {}}
  assert late([_LAYER], _LOAD, path) == everything


def test_only_the_forms_that_are_asked_for(monkeypatch):
  calls = _clock(monkeypatch, dict.fromkeys(conv_measure.FORMS, 1.))
  other = _LAYER._replace(outputs=4)
  found = conv_measure.table([_LAYER, other], _LOAD, None,
                             only={str(_LAYER): ('taps',)})
  assert found[str(_LAYER)] == {'taps': 1.}
  assert len(found[str(other)]) == len(calls) - 1 == len(conv_measure.FORMS)


def test_a_form_that_is_no_program_takes_for_ever(monkeypatch):
  def fail(*_, **__):
    raise NotImplementedError
  monkeypatch.setattr(conv, 'conv2d', fail)
  assert conv_measure.program(_LAYER, 'lax', _LOAD) is None


def test_noise_does_not_choose():
  forms = {'lax': 1., 'gemm': .96, 'taps': 2.}
  assert conv_measure.fastest({'layer': forms}) == {'layer': 'lax'}
  assert conv_measure.fastest({'layer': {**forms, 'taps': .9}}) == {
      'layer': 'taps'}
  assert conv_measure.fastest({'layer': {}}) == {}


def test_equal_programs_are_timed_once(monkeypatch):
  calls = _clock(monkeypatch, dict.fromkeys(conv_measure.FORMS, 1.))
  pointwise = _LAYER._replace(kernel=(1, 1))
  strided = _LAYER._replace(stride=2)
  conv_measure.table([pointwise, strided], _LOAD, None)
  assert [form for layer, form in calls if layer == str(pointwise)] == [
      'lax', 'gemm']
  assert 'winograd' not in [
      form for layer, form in calls if layer == str(strided)]


def test_on_a_cpu_xlas_own_gradients_are_not_waited_for(monkeypatch):
  calls = _clock(monkeypatch, dict.fromkeys(conv_measure.FORMS, 1.))
  monkeypatch.setattr(jax, 'default_backend', lambda: 'cpu')
  conv_measure.table([_LAYER], _LOAD, None)
  assert sorted(form for _, form in calls) == sorted(conv_measure.FORMS[1:])


def test_on_a_cpu_what_its_rules_choose_is_timed_first(monkeypatch):
  """Where time is over after it, the choice is as if nothing were timed."""
  calls = _clock(monkeypatch, dict.fromkeys(conv_measure.FORMS, 1.))
  monkeypatch.setattr(jax, 'default_backend', lambda: 'cpu')
  tiled = _LAYER._replace(size=(8, 8), inputs=16)
  layers = [_LAYER, tiled, tiled._replace(stride=2)]
  found = conv_measure.table(layers, _LOAD, None)
  rules = [conv.choose(layer.window, layer.inputs, 'cpu') for layer in layers]
  assert rules == ['gemm', 'winograd', 'reordered']
  assert calls[:3] == [(str(layer), form) for layer, form in zip(
      layers, rules, strict=True)]
  assert [*conv_measure.fastest(found).values()] == rules
  now = [0.]
  monkeypatch.setattr(conv_measure.time, 'monotonic', lambda: now[0])
  def seconds(layer, form, load, **_):
    del layer, form, load
    now[0] += 1
    return 1.
  monkeypatch.setattr(conv_measure, 'seconds', seconds)
  late = conv_measure.table(layers, _LOAD, None, until=2.5)
  assert [[*forms] for forms in late.values()] == [[form] for form in rules]


def test_what_is_done_once_is_not_counted(monkeypatch):
  """The first call of a program loads it."""
  calls, now = [], [0.]
  monkeypatch.setattr(conv_measure.time, 'perf_counter', lambda: now[0])

  def steps(count, x, w):
    del x, w
    calls.append(int(count))
    now[0] += .05 if len(calls) == 1 else .001
    return jnp.zeros(())
  found = conv_measure.seconds(_LAYER, 'taps', _LOAD, at_least=0, hopeless=.02,
                               steps=steps)
  assert len(calls) > 2 and found == pytest.approx(.001)


def test_no_step_leaves_the_numbers(monkeypatch):
  """A large layer, many times: what is timed is no NaN."""
  results: list[jax.Array] = []
  monkeypatch.setattr(jax, 'block_until_ready', results.append)
  layer = conv.Layer((8, 8), (3, 3), 1, 'SAME', 16, 16)
  conv_measure.seconds(layer, 'gemm', conv_measure.Load(8, 1), at_least=1e-3)
  assert results and all(jnp.isfinite(x) for x in results)


@pytest.mark.parametrize('text', [
    '', '{', '[]', '{"a": 1}', '{"a": {"b": []}}', 100_000 * '[',
    f'{{"a": {{"b": 1{400 * "0"}}}}}'])
def test_a_damaged_file_is_measured_anew(monkeypatch, tmp_path, text):
  path = tmp_path / 'convolutions.json'
  path.write_text(text)
  _clock(monkeypatch, dict.fromkeys(conv_measure.FORMS, 1.))
  assert conv_measure.table([_LAYER], _LOAD, path)
  assert len(json.loads(path.read_text())) == 1


@pytest.mark.parametrize('bad', ['NaN', 'Infinity', '-Infinity', '0', '-1'])
def test_a_time_that_no_clock_says_is_measured_anew(monkeypatch, tmp_path, bad):
  path = tmp_path / 'convolutions.json'
  seconds = dict.fromkeys(conv_measure.FORMS, 2.) | {'gemm': 1.}
  calls = _clock(monkeypatch, seconds)
  conv_measure.table([_LAYER], _LOAD, path)
  for form in ('lax', 'taps'):
    (key, forms), = json.loads(path.read_text()).items()
    text = json.dumps({key: {**forms, form: 'bad'}})
    path.write_text(text.replace('"bad"', bad))
    calls.clear()
    assert conv_measure.table([_LAYER], _LOAD, path) == {str(_LAYER): seconds}
    assert calls == [(str(_LAYER), form)]
    assert json.loads(path.read_text()) == {key: seconds}


def test_a_pipe_is_not_waited_for(monkeypatch, tmp_path):
  path = tmp_path / 'convolutions.json'
  os.mkfifo(path)
  _clock(monkeypatch, dict.fromkeys(conv_measure.FORMS, 1.))
  assert conv_measure.table([_LAYER], _LOAD, path)
  assert path.is_file()  # It is replaced.


def test_a_folder_that_takes_no_file_costs_nothing_else(monkeypatch, tmp_path):
  path = tmp_path / 'file' / 'convolutions.json'
  path.parent.write_text('')
  _clock(monkeypatch, dict.fromkeys(conv_measure.FORMS, 1.))
  assert conv_measure.table([_LAYER], _LOAD, path)


def test_forms_by_layer_are_taken():
  x, w = jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 3))

  def text(impl):
    return str(jax.make_jaxpr(lambda: conv.conv2d(x, w, impl=impl))())
  chosen = conv_forms.joined({str(_LAYER): 'lax', '1x1/1 SAME 2x2 1>1': 'taps'})
  assert text(chosen) == text('lax') != text('gemm')
  # A layer that is not among them follows the rule.
  other = conv_forms.joined({'1x1/1 SAME 2x2 1>1': 'taps'})
  assert text(other) == text('auto')


@pytest.mark.parametrize('bad', [
    'fft', 'measure', '3x3/1 SAME 4x4 2>3 fft', '3x3 SAME 4x4 2>3 gemm',
    '3x3/1 SAME 4x4 2>3 gemm;', '3x3/1 SAME 4x4 2>3 gemm;  '])
def test_a_bad_text_of_forms_is_refused(bad):
  with pytest.raises(ValueError, match='conv_impl'):
    conv.conv2d(jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 3)), impl=bad)
