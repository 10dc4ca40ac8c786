"""A profile's operations are counted once, and named by their layer."""
from __future__ import annotations

import json

from absl import flags
import jax
import pytest

from tests.thorough import wider

_TEXT = """HloModule jit_rounds, is_scheduled=true

%fused_computation.1 (param_0: f32[2,2]) -> f32[2,2] {
  %param_0 = f32[2,2]{1,0} parameter(0)
  %dot.3 = f32[2,2]{1,0} dot(%param_0, %param_0), metadata={op_name=\
"jit(rounds)/while/body/transpose(jvp(ResNet9))/Conv_3/dot_general"}
  ROOT %add.4 = f32[2,2]{1,0} add(%dot.3, %dot.3), metadata={op_name="add"}
}

%body (p: (s32[], f32[2,2])) -> (s32[], f32[2,2]) {
  %fusion.1 = f32[2,2]{1,0:T(8,128)} fusion(%p), kind=kOutput, \
calls=%fused_computation.1
  %sort = (f32[2]{0}, /*index=1*/s32[2]{0}) sort(%fusion.1), dimensions={0}, \
metadata={op_name="jit(rounds)/while/body/jit(_permute)/sort"}
  ROOT %copy.2 = (s32[], f32[2,2]) tuple(%p)
}

ENTRY %main.9 (x: f32[2,2]) -> f32[2,2] {
  ROOT %while.7 = (s32[], f32[2,2]{1,0}) while(%x), condition=%cond, \
body=%body, metadata={op_name="jit(rounds)/while"}
}
"""


@pytest.fixture
def events(bench):
  return bench('trace_events')


def profile(**planes):
  """A profile of planes, of lines, of (name, start, length, stats) in ps."""
  text = []
  for plane, lines in planes.items():
    names = sorted({name for line in lines.values() for name, *_ in line})
    stats = ['hlo_op', 'hlo_module']
    body = [f'name: "/{plane.replace("_", ":", 1)}"']
    body += [f'event_metadata {{ key: {i + 1} value {{ id: {i + 1} '
             f'name: "{name}" }} }}' for i, name in enumerate(names)]
    body += [f'stat_metadata {{ key: {i + 1} value {{ id: {i + 1} '
             f'name: "{name}" }} }}' for i, name in enumerate(stats)]
    for line, found in lines.items():
      made = ''.join(
          f'events {{ metadata_id: {names.index(name) + 1} offset_ps: {start} '
          f'duration_ps: {length} ' + ''.join(
              f'stats {{ metadata_id: {stats.index(k) + 1} '
              f'str_value: "{v}" }} ' for k, v in given.items()) + '} '
          for name, start, length, given in found)
      body.append(f'lines {{ name: "{line}" {made}}}')
    text.append(f'planes {{ {" ".join(body)} }}')
  return jax.profiler.ProfileData.from_text_proto(' '.join(text))


def of(op, module='jit_rounds'):
  return {'hlo_op': op, 'hlo_module': module}


def times(events, made):
  """ns by name, as the script counts them."""
  found = events.items(events.lines(made, events.module_name(_TEXT)),
                       events.instructions(_TEXT))
  return {item.name: item.ns for item in found}


def test_instructions_are_read_from_the_compiled_text(events):
  found = events.instructions(_TEXT)
  assert events.module_name(_TEXT) == 'jit_rounds'
  assert found['while.7'].opcode == 'while'
  assert found['sort'].opcode == 'sort'
  # Not the root's, which is only an addition.
  assert found['fusion.1'].op_name.endswith('Conv_3/dot_general')
  assert found['copy.2'].op_name == ''


def test_a_real_program_is_read_whole(events):
  compiled = str(jax.jit(lambda x: jax.lax.fori_loop(
      0, 3, lambda _, x: x @ x, x)).lower(
          jax.ShapeDtypeStruct((4, 4), 'float32')).compile().as_text())
  found = events.instructions(compiled)
  defined = [line for line in compiled.splitlines()
             if line.startswith('  ') and ' = ' in line]
  assert len(found) == len(defined)
  assert {'while', 'parameter'} < {i.opcode for i in found.values()}
  assert any('dot_general' in i.op_name for i in found.values())


def test_loops_are_their_contents_on_any_thread(events):
  """A host's loop may begin on one thread and go on on another."""
  ms = 10**9
  made = profile(host_CPU={
      'one': [('while.7', 0, 100 * ms, of('while.7')),
              ('fusion.1', 1 * ms, 9 * ms, of('fusion.1')),
              ('end: fusion.1', 10 * ms, 1 * ms, {}),
              ('fusion.1', 11 * ms, 4 * ms, of('fusion.1', 'jit_other'))],
      'two': [('sort', 20 * ms, 30 * ms, of('sort')),
              ('copy.2', 25 * ms, 5 * ms, of('copy.2')),
              ('fusion.1', 60 * ms, 1 * ms, of('fusion.1'))]})
  assert times(events, made) == {'sort': 25e6, 'fusion.1': 10e6, 'copy.2': 5e6}


def test_kernels_of_a_gpu_are_counted_on_its_streams(events):
  made = profile(
      device_GPU={
          'Stream #13': [('cutlass_80', 0, 7000, of('fusion.1')),
                         ('cutlass_80', 9000, 3000, of('fusion.1')),
                         ('other', 0, 9000, of('fusion.1', 'jit_score')),
                         ('MemcpyD2D', 20000, 1000, {})],
          'XLA Ops': [('fusion.1', 0, 12000, of('fusion.1'))]},
      host_CPU={'python': [('fusion.1', 0, 99000, of('fusion.1'))]})
  assert times(events, made) == {'fusion.1': 10, 'MemcpyD2D': 1}


def test_operations_of_a_tpu_are_counted_without_their_loops(events):
  module = {'hlo_module': 'jit_rounds(17)'}
  made = profile(device_TPU={
      'Steps': [('0', 0, 50000, {})],
      'XLA Modules': [('jit_rounds(17)', 0, 50000, {})],
      'XLA Ops': [('%while.7 = (s32[]) while(%x)', 0, 40000, module),
                  ('%fusion.1 = f32[2,2] fusion(%p)', 1000, 8000, module),
                  ('%while.99 = (s32[]) while(%x)', 10000, 5000, module),
                  ('%sort = f32[2] sort(%p)', 11000, 2000, module)]})
  assert times(events, made) == {'fusion.1': 8, 'sort': 2}


@pytest.mark.parametrize('path, layer, place', [
    ('jit(f)/while/body/closed_call/jvp(Classic)/Conv_1/jit(conv)/mul',
     'Classic/Conv_1 forward', 'Classic/Conv_1 forward: jit(conv)/mul'),
    ('jit(f)/transpose(jvp(Net))/_Block_1/Conv_0/dot_general;jit(f)/add',
     'Net/_Block_1/Conv_0 backward',
     'Net/_Block_1/Conv_0 backward: dot_general'),
    ('jit(f)/while/body/jit(_uniform)/sub', 'outside: jit(_uniform)/sub',
     'outside: jit(_uniform)/sub'),
    ('', 'unknown', 'unknown')])
def test_places_are_layers_with_their_direction(events, path, layer, place):
  assert events.layer_of(path) == layer
  assert events.place_of(path) == place


def test_layers_add_up_their_operations(events):
  found = [events.Item('a', 1, 5.0, 'jit(f)/jvp(Net)/Conv_0/add'),
           events.Item('b', 2, 7.0, 'jit(f)/jvp(Net)/Conv_0/mul'),
           events.Item('c', 1, 20.0, '')]
  assert events.by_layer(found) == [
      events.Item('unknown', 1, 20.0, ''),
      events.Item('Net/Conv_0 forward', 3, 12.0, '')]


@pytest.mark.parametrize('by', ['layer', *wider('op')])
def test_the_shares_of_a_round_are_one_together(bench, monkeypatch, tmp_path,
                                                by):
  script, harness = bench('profile_round'), bench('harness')
  flags.FLAGS(['', '--quick', '--top=3', '--method=fedavg', f'--by={by}',
               f'--out={tmp_path}'])
  harness.shrink(script.QUICK)
  monkeypatch.setattr(harness, 'make_mesh', lambda: None)
  script.main()
  saved = json.loads(
      (tmp_path / 'profile_cnn_fedavg_float32_quick.json').read_text())
  header, *rows, others = saved['table']
  assert len(rows) == 3 and others[0].endswith(' others')
  for found in (saved['measured']['operations'], saved['measured']['layers']):
    shares = [item['share'] for item in found]
    assert shares == sorted(shares, reverse=True) and min(shares) >= 0
    assert sum(shares) == pytest.approx(1)
    ms = sum(item['ms'] for item in found)
    assert ms == pytest.approx(saved['measured']['operations_ms'])
  assert sum(row[header.index('share')] for row in (*rows, others)) == (
      pytest.approx(1))
  names = {item['name'] for item in saved['measured']['layers']}
  assert {'CNN/Conv_1 backward', 'CNN/Dense_0 forward'} <= names
