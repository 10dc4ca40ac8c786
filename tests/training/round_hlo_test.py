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
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core.types import Model, Variables
from fedjax_ssl.models import conv
from fedjax_ssl.task import template
from fedjax_ssl.training import placement, seeds
from tests import hlo, toy

_CODE = """
import json
from tests.training import round_hlo_test
print(json.dumps(round_hlo_test.everything()))
"""
# Channels that are nothing else's size, so that shapes tell what an array is.
# More than 4, or the layer would be patches.
_CHANNELS = (13, 11)
_SLOTS = 4
# One for each client, or each slot of several groups.
_NUMBERS = 24


def _model(impl: str = 'auto') -> Model:
  """A convolution between a layer that scales and a dense one."""
  shapes = {'Scale_0': _CHANNELS[:1], 'Conv_0': (3, 3, *_CHANNELS),
            'Dense_0': (_CHANNELS[1], toy.NUM_CLASSES)}

  def init(key):
    keys = jax.random.split(key, len(shapes))
    return Variables({name: 0.3 * jax.random.normal(k, shape) for k, (
        name, shape) in zip(keys, shapes.items(), strict=True)}, {})

  def apply(variables, inputs):
    params = variables.params
    x = conv.conv2d(inputs * params['Scale_0'], params['Conv_0'], impl=impl)
    return jnp.tanh(x).mean((1, 2)) @ params['Dense_0']

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


def _report(method, federation, mesh) -> dict[str, Any]:
  """What there is to say of a method's rounds.

  Python sees a round once, with its number traced, in a loop whose state keeps
  shapes and types; and the state returns to where it was. So whatever the
  stretches of a run, one program serves.
  """
  def rounds(state, federation, first, count, root):
    def body(i, state):
      return method.round(state, federation.at(i), i,
                          jax.random.fold_in(root, i))[0]
    return jax.lax.fori_loop(first, first + count, body, state)
  state = placement.state(jax.tree.map(
      lambda x: np.zeros(x.shape, x.dtype), template(method, federation)), mesh)
  placed, = placement.federations([federation], mesh)
  lowered = jax.jit(
      rounds, out_shardings=jax.tree.map(lambda x: x.sharding, state)).lower(
          state, placed, jnp.int32(0), jnp.int32(1), jax.random.key(0))
  text = lowered.compile().as_text() or ''
  assert 'num_partitions=2' in text
  return {
      'convolutions': text.count(' convolution('),
      'slow': hlo.slow_convolutions(text),
      'groups': hlo.batch_groups(lowered.as_text()),
      'exchanges': len(list(hlo.exchanges(text))),
      'strange': hlo.strange_exchanges(
          text, _known(state, federation), _SLOTS, _NUMBERS)}


def _of_method(text: str) -> dict[str, Any]:
  mesh = _mesh()
  federation, _ = toy.federation()
  return _report(methods.make(text, _task(mesh)), federation, mesh)


def _naive(**changes) -> dict[str, Any]:
  """A run with the convolutions of `jax.lax`."""
  mesh = _mesh()
  federation, _ = toy.federation()
  return _report(methods.make('fedavg', _task(mesh, 'lax', **changes)),
                 federation, mesh)


def _chatty() -> dict[str, Any]:
  """A layer whose activations are gathered."""
  mesh, split = _mesh(), jax.sharding.PartitionSpec('clients')

  def layer(x, w):
    return jax.lax.all_gather(jnp.tanh(conv.conv2d(x, w)), 'clients')
  run = jax.jit(jax.shard_map(
      layer, mesh=mesh, in_specs=(split, jax.sharding.PartitionSpec()),
      out_specs=jax.sharding.PartitionSpec(), check_vma=False))
  model = _model().init(jax.random.key(0))
  text = run.lower(jnp.ones((8, toy.SIDE, toy.SIDE, _CHANNELS[0])),
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


def _programs() -> list[int]:
  """Programs after one stretch, a longer one, and one of an unplaced state."""
  mesh = _mesh()
  federation, _ = toy.federation()
  method = methods.make('fedprox(mu=0.1, keep_local=True)',
                        toy.task('linear', mesh=mesh))
  runs = seeds.Sequential(method, [federation], [0], mesh)
  runs.start(None)
  run: Any = runs._run
  runs.advance(0, 1)
  counts = [run._cache_size()]
  runs.restart_totals()
  runs.advance(1, 2)
  counts.append(run._cache_size())
  runs.states[0] = jax.tree.map(
      jnp.asarray, method.init(jax.random.key(0), federation))
  runs.advance(3, 1)
  return [*counts, run._cache_size()]


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
           'chatty': _chatty, 'grouped': _grouped, 'programs': _programs,
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


def test_a_run_is_one_program(reports):
  """The third, of a state that is elsewhere, says that it could be seen."""
  assert reports['programs'] == [1, 1, 2]


def test_naive_convolutions_are_found(reports):
  assert reports['lax']['slow']
  assert reports['lax_vmap']['slow']
  assert reports['grouped']['groups']


def test_gathered_activations_are_found(reports):
  assert reports['chatty']['strange']


def test_rows_on_several_devices_keep_every_bit(reports):
  """The second says that it is not so by itself."""
  assert reports['negative_zeros'] == [True, False]
