"""The compiled round of every method on two devices: nothing slow in it.

No clock is read. What is looked for costs a factor of 2 to 60: convolutions in
a layout that misses the fast kernel, convolutions with batch groups,
activations that travel between devices, and compilation in the middle of a run.
"""
from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core.types import Model, Variables
from fedjax_ssl.models import conv
from fedjax_ssl.training import placement, seeds
from tests import hlo, toy

_CODE = """
import json
from tests.training import round_hlo_test
print(json.dumps(round_hlo_test.everything()))
"""
# Channels that are nothing else's size, so that shapes tell what an array is.
# 13 channels make the second layer a convolution; the first is patches.
_CHANNELS = (13, 11)
_SLOTS = 4
# One for each client, or each slot of several groups.
_NUMBERS = 24


def _model(impl: str = 'auto') -> Model:
  """Two convolutions and a dense layer."""
  shapes = {'Conv_0': (3, 3, 1, _CHANNELS[0]), 'Conv_1': (3, 3, *_CHANNELS),
            'Dense_0': (_CHANNELS[1], toy.NUM_CLASSES)}

  def init(key):
    keys = jax.random.split(key, len(shapes))
    return Variables({name: 0.3 * jax.random.normal(k, shape) for k, (
        name, shape) in zip(keys, shapes.items(), strict=True)}, {})

  def apply(variables, inputs):
    x, params = inputs, variables.params
    for name, stride in (('Conv_0', 2), ('Conv_1', 1)):
      x = jnp.tanh(conv.conv2d(x, params[name], stride=stride, impl=impl))
    return x.mean((1, 2)) @ params['Dense_0']

  def apply_train(variables, inputs, mask, key=None):
    del mask, key
    return apply(variables, inputs), variables.stats

  return Model(init, apply, apply_train)


def _mesh():
  return jax.make_mesh((2,), ('clients',), devices=jax.devices()[:2],
                       axis_types=(jax.sharding.AxisType.Auto,))


def _task(mesh, impl='auto', **changes):
  return dataclasses.replace(
      toy.task('linear', mesh=mesh, **changes), model=_model(impl))


def _known(state, federation) -> set[hlo.Shape]:
  """Shapes of one client's and of the server's arrays."""
  one = [*jax.tree.leaves(state.server),
         *jax.tree.map(lambda x: x[0], jax.tree.leaves(state.memory)),
         *jax.tree.map(lambda x: x[0], tuple(federation.clients))]
  return {tuple(x.shape) for x in one}


def _report(runs: seeds.Sequential, federation) -> dict[str, Any]:
  """What there is to say of a run's one program."""
  args = (runs.states[0], runs._totals[0], runs._federations[0], jnp.int32(0),
          jnp.int32(1), runs._roots[0][1])
  lowered = runs._run.lower(*args)
  text = lowered.compile().as_text() or ''
  assert 'num_partitions=2' in text
  return {
      'convolutions': text.count(' convolution('),
      'slow': hlo.slow_convolutions(text),
      'groups': hlo.batch_groups(lowered.as_text()),
      'exchanges': len(list(hlo.exchanges(text))),
      'strange': hlo.strange_exchanges(
          text, _known(runs.states[0], federation), _SLOTS, _NUMBERS)}


def _programs(runs: seeds.Sequential) -> int:
  """Programs that a run of uneven stretches compiles."""
  runs.advance(0, 1)
  runs.restart_totals()
  runs.advance(1, 2)
  run: Any = runs._run
  return run._cache_size()


def _of_method(text: str) -> dict[str, Any]:
  mesh = _mesh()
  federation, _ = toy.federation()
  runs = seeds.Sequential(
      methods.make(text, _task(mesh)), [federation], [0], mesh)
  runs.start(None)
  return {**_report(runs, federation), 'programs': _programs(runs)}


def _naive(**changes) -> dict[str, Any]:
  """A run with the convolutions of `jax.lax`."""
  mesh = _mesh()
  federation, _ = toy.federation()
  runs = seeds.Sequential(
      methods.make('fedavg', _task(mesh, 'lax', **changes)), [federation],
      [0], mesh)
  runs.start(None)
  return _report(runs, federation)


def _chatty() -> dict[str, Any]:
  """A layer whose activations are gathered."""
  mesh, split = _mesh(), jax.sharding.PartitionSpec('clients')

  def layer(x, w):
    return jax.lax.all_gather(jnp.tanh(conv.conv2d(x, w)), 'clients')
  run = jax.jit(jax.shard_map(
      layer, mesh=mesh, in_specs=(split, jax.sharding.PartitionSpec()),
      out_specs=jax.sharding.PartitionSpec(), check_vma=False))
  model = _model().init(jax.random.key(0))
  text = run.lower(jnp.ones((8, toy.SIDE, toy.SIDE, 1)),
                   model.params['Conv_0']).compile().as_text() or ''
  known = {x.shape for x in jax.tree.leaves(model)}
  return {'strange': hlo.strange_exchanges(text, known, _SLOTS, _NUMBERS)}


def _grouped() -> dict[str, Any]:
  """The gradient of a sum over clients, by plain vmap."""
  def loss(weights, inputs):
    return jax.vmap(lambda w, x: conv.conv2d(x, w, impl='lax'))(
        weights, inputs).sum()
  return {'groups': hlo.batch_groups(jax.jit(jax.grad(loss)).lower(
      jnp.ones((4, 3, 3, 2, 5)), jnp.ones((4, 3, 6, 6, 2))).as_text())}


def _unplaced() -> dict[str, Any]:
  """A run whose first state is not where later ones are."""
  mesh = _mesh()
  federation, _ = toy.federation()
  method = methods.make('fedavg', toy.task('linear', mesh=mesh))
  runs = seeds.Sequential(method, [federation], [0], mesh)
  runs.start(None)
  runs.states[0] = jax.tree.map(
      jnp.asarray, method.init(jax.random.key(0), federation))
  return {'programs': _programs(runs)}


def _negative_zeros() -> list[bool]:
  """Whether rows of -0.0 keep their sign: split over devices, by `take`s."""
  from fedjax_ssl.core import tree
  rows = placement.by_client(-jnp.zeros((4, 3)), _mesh())
  ids = jnp.array([0, 3])
  return [bool(jnp.signbit(jax.jit(take)(rows, ids)).all())
          for take in (tree.take_bits, tree.take)]


COUNTER = {'lax': _naive,
           'lax_vmap': functools.partial(_naive, client_map='vmap',
                                         chunk_size=2),
           'chatty': _chatty, 'grouped': _grouped, 'unplaced': _unplaced,
           'negative_zeros': _negative_zeros}


def everything() -> dict[str, Any]:
  """Reports of all methods and of all that must be found out."""
  import concurrent.futures
  jobs: dict[str, Any] = {
      name: functools.partial(_of_method, name) for name in methods.METHODS}
  toy.federation()  # Made once.
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    running = {name: pool.submit(job)
               for name, job in {**jobs, **COUNTER}.items()}
    return {name: one.result() for name, one in running.items()}


@pytest.fixture(scope='module')
def reports(run_python) -> dict[str, Any]:
  return json.loads(run_python(_CODE, devices=2).splitlines()[-1])


@pytest.mark.parametrize('name', methods.METHODS)
def test_nothing_slow_in_a_round(reports, name):
  report = reports[name]
  assert report['convolutions'] and not report['slow'], report
  assert not report['groups']


@pytest.mark.parametrize('name', methods.METHODS)
def test_devices_exchange_models_and_numbers_only(reports, name):
  assert reports[name]['exchanges']
  assert not reports[name]['strange']


@pytest.mark.parametrize('name', methods.METHODS)
def test_a_run_is_one_program(reports, name):
  assert reports[name]['programs'] == 1


def test_naive_convolutions_are_found(reports):
  assert reports['lax']['slow']
  assert reports['lax_vmap']['slow']
  assert reports['grouped']['groups']


def test_gathered_activations_are_found(reports):
  assert reports['chatty']['strange']


def test_a_second_program_is_found(reports):
  assert reports['unplaced']['programs'] == 2


def test_rows_on_several_devices_keep_every_bit(reports):
  """The second says that it is not so by itself."""
  assert reports['negative_zeros'] == [True, False]
