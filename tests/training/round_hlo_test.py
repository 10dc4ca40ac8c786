"""What is slow in a compiled round on two devices is found.

That no method has any of it is in `methods/program_test.py`; here the methods
whose layers are tiles and patches.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core.types import Method, State
from fedjax_ssl.ops import (
    conv,
    conv_im2col,
    conv_rowwise,
    conv_winograd,
    pooling,
)
from fedjax_ssl.training import runner, sharding
from tests import hlo, toy
from tests.training import compiled, networks

# That the checks find what they look for; the rounds of all methods are looked
# through beside them.
pytestmark = pytest.mark.thorough

_CODE = """
import json
import sys
from tests.training import round_hlo_test
print(json.dumps(round_hlo_test.everything(*sys.argv[1:])))
"""
PRIVATE = ("fedssl(gan_width=4, noise_size=3, dp_scope='all', "
           'noise_multiplier=1.0, epsilon=1e6, use_real=False)')
# Several views, gradients through a gradient, gradients of every row. XLA makes
# no convolution where it is given none: these need not be compiled.
LOWERED = ('fixmatch', 'feddure', PRIVATE)
REGULAR = ('fedavg', 'feddure')
WIDER = ('fixmatch', PRIVATE)
_HAS_ACCOUNTS = importlib.util.find_spec('dp_accounting') is not None


def _task(mesh, model=None, **changes):
  return dataclasses.replace(toy.task('linear', mesh=mesh, **changes),
                             model=model or networks.reordered())


class _Unpinned(runner.Sequential):
  """A run that leaves to the compiler where its results lie."""

  def _compile(self, state, totals):
    self._run = jax.jit(self._program, donate_argnums=(0, 1))


def _start(method, federation, mesh, kind=runner.Sequential, count=1) -> Any:
  runs = kind(method, [federation] * count, list(range(count)), mesh)
  runs.start(None)
  return runs


def _of_method(text: str, **changes) -> dict[str, Any]:
  mesh = compiled.mesh()
  method = methods.make(text, _task(mesh, **changes))
  return compiled.report(_start(method, toy.federation()[0], mesh))


def _tiled(text: str) -> dict[str, Any]:
  mesh = compiled.mesh()
  federation, _ = toy.federation()
  changes = {}
  if text == PRIVATE:  # Takes everybody, first those who hold labels.
    changes['cohort_size'] = toy.NUM_CLIENTS
    clients = federation.clients
    holds = jnp.arange(toy.NUM_CLIENTS) < 2
    federation = dataclasses.replace(
        federation, num_labeled_clients=2, clients=clients._replace(
            num_labeled=jnp.where(holds, clients.num_labeled, 0)))
  task = _task(mesh, networks.tiles_and_patches(), **changes)
  return compiled.report(_start(methods.make(text, task), federation, mesh),
                         text not in LOWERED)


def _naive(**changes) -> dict[str, Any]:
  """A run with the convolutions of `jax.lax`."""
  return _of_method('fedavg', model=networks.reordered('lax'), **changes)


def _chatty() -> dict[str, Any]:
  """A layer whose activations are gathered."""
  mesh, split = compiled.mesh(), jax.sharding.PartitionSpec('clients')

  def layer(x, w):
    return jax.lax.all_gather(jnp.tanh(conv.conv2d(x, w)), 'clients')
  run = jax.jit(jax.shard_map(
      layer, mesh=mesh, in_specs=(split, jax.sharding.PartitionSpec()),
      out_specs=jax.sharding.PartitionSpec(), check_vma=False))
  model = networks.reordered().init(jax.random.key(0))
  text = run.lower(jnp.ones((8, toy.SIDE, toy.SIDE, networks.CHANNELS[0])),
                   model.params['Conv_0']).compile().as_text() or ''
  known = {x.shape for x in jax.tree.leaves(model)}
  return {'strange': hlo.strange_exchanges(
      text, known, compiled.SLOTS, compiled.NUMBERS)}


def _grouped() -> dict[str, Any]:
  """The gradient of a sum over clients, by plain vmap."""
  def loss(weights, inputs):
    return jax.vmap(lambda w, x: conv.conv2d(x, w, impl='lax'))(
        weights, inputs).sum()
  return {'groups': hlo.batch_groups(jax.jit(jax.grad(loss)).lower(
      jnp.ones((4, 3, 3, 2, 5)), jnp.ones((4, 3, 6, 6, 2))).as_text())}


def _together() -> list[int]:
  """`compiled.programs` of two seeds under one vmap."""
  mesh = compiled.mesh()
  method = methods.make('fedprox(mu=0.1, keep_local=True)',
                        toy.task('linear', mesh=mesh))
  return compiled.programs(_start(
      method, toy.federation()[0], mesh, runner.Together, count=2))


def _toy_run(record, round_, mesh, kind=runner.Sequential) -> Any:
  """A run of a method whose record is one array that no client sees."""
  def one(state, federation, i, key):
    del federation, i, key
    return state._replace(server=round_(state.server)), {}
  return _start(Method(lambda *unused: State(record, (), jnp.int32(0)), one,
                       None), toy.federation()[0], mesh, kind)


def _splitting(kind) -> list[int]:
  """Programs of a method that leaves its record split over devices."""
  mesh = compiled.mesh()
  split = jax.sharding.NamedSharding(
      mesh, jax.sharding.PartitionSpec('clients'))
  return compiled.programs(_toy_run(
      jnp.zeros((4, 3)), lambda x: jax.lax.with_sharding_constraint(
          x + 1, split), mesh, kind))


def _weak() -> list[int]:
  """`compiled.programs` of a method whose record begins as a Python number."""
  return compiled.programs(_toy_run(
      jnp.asarray(1.0), lambda x: x * jnp.float32(2), None))


def _traces() -> list[int]:
  """How often a run has traced its network once it is begun, and trained."""
  mesh, count = compiled.mesh(), 0
  task = _task(mesh, toy.task().model)
  def apply_train(*args, **kwargs):
    nonlocal count
    count += 1
    return toy.task().model.apply_train(*args, **kwargs)
  task = dataclasses.replace(
      task, model=task.model._replace(apply_train=apply_train))
  runs = _start(methods.make('fedavg', task), toy.federation()[0], mesh)
  begun = count
  with compiled.DEVICES:
    runs.advance(0, 2)
  return [begun, count]


def _negative_zeros() -> list[bool]:
  """Whether rows of -0.0 keep their sign: split over devices, by `take`s."""
  from fedjax_ssl.core import tree
  rows = sharding.by_client(-jnp.zeros((4, 3)), compiled.mesh())
  ids = jnp.array([0, 3])
  with compiled.DEVICES:
    return [bool(jnp.signbit(jax.jit(take)(rows, ids)).all())
            for take in (tree.take_bits, tree.take)]


COUNTER = {
    'lax': _naive,
    'lax_vmap': functools.partial(_naive, client_map='vmap', chunk_size=2),
    'chatty': _chatty,
    'grouped': _grouped,
    'together': _together,
    'weak': _weak,
    'split': functools.partial(_splitting, runner.Sequential),
    'split, unpinned': functools.partial(_splitting, _Unpinned),
    'traces': _traces,
    'negative_zeros': _negative_zeros
}


def everything(*texts: str) -> dict[str, Any]:
  """Reports of methods, and of all that must be found out without them.

  Args:
    *texts: the methods; without any those of `REGULAR`, and `COUNTER`.
  """
  import concurrent.futures
  jobs: dict[str, Any] = {f'tiles {text}': functools.partial(_tiled, text)
           for text in texts or REGULAR}
  toy.federation()  # Made once.
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    running = {name: pool.submit(job)
               for name, job in {**jobs, **({} if texts else COUNTER)}.items()}
    return {name: one.result() for name, one in running.items()}


@pytest.fixture(scope='module')
def reports(run_python) -> dict[str, Any]:
  return json.loads(run_python(_CODE, devices=2).splitlines()[-1])


@pytest.fixture(scope='module')
def more_reports(run_python) -> dict[str, Any]:
  texts = [text for text in WIDER if text != PRIVATE or _HAS_ACCOUNTS]
  return json.loads(run_python(_CODE, *texts, devices=2).splitlines()[-1])


@pytest.mark.parametrize('text', REGULAR)
def test_tiles_and_patches_stay_products(reports, text):
  _are_products(text, reports)


@pytest.mark.parametrize('text', WIDER)
def test_so_do_those_of_other_methods(more_reports, text):
  if text == PRIVATE:
    pytest.importorskip('dp_accounting')
  _are_products(text, more_reports)


def _are_products(text: str, reports: dict[str, Any]) -> None:
  report = reports[f'tiles {text}']
  assert not report['given'] and report['products'] > 20
  if text not in LOWERED:
    assert not report['convolutions'] and not report['strange']
    assert report['exchanges'] and report['programs'] == [1, 1]


@pytest.mark.parametrize('rows', [3, 11])
def test_the_network_of_tiles_takes_every_form(rows):
  """For as few and as many rows as those methods' steps have."""
  model = networks.tiles_and_patches()
  with contextlib.ExitStack() as stack:
    forms = [
        stack.enter_context(
            mock.patch.object(form, name, wraps=getattr(form, name)))
        for form, name in ((conv_im2col, 'quarters'), (conv_winograd, 'conv'),
                           (conv_rowwise, 'conv'))
    ]
    pool = stack.enter_context(mock.patch.object(
        pooling, 'max_of', wraps=pooling.max_of))
    jax.eval_shape(lambda key: model.apply(
        model.init(key), jnp.ones((rows, toy.SIDE, toy.SIDE, 1))),
                   jax.random.key(0))
  assert [form.call_count for form in forms] == [1, 1, 1]
  assert pool.call_count == 2


def test_seeds_together_are_one_program(reports):
  assert reports['together'] == [1, 1]


def test_a_round_is_traced_once(reports):
  """For the shapes of its metrics and for the loop, as on one device."""
  begun, trained = reports['traces']
  assert 0 < begun == trained


def test_a_second_program_is_found(reports):
  """Where the state moves, or changes its type."""
  assert reports['split, unpinned'] == [1, 2]
  assert reports['split'] == [1, 1]  # Runs pin their results.
  assert reports['weak'] == [1, 2]


def test_a_state_of_another_dtype_has_no_program():
  runs = _toy_run(jnp.int32(1), lambda x: x * jnp.float32(2), None)
  with pytest.raises(TypeError, match='carry'):
    compiled.programs(runs)


def test_naive_convolutions_are_found(reports):
  assert reports['lax']['slow'] and reports['lax']['given']
  assert reports['lax_vmap']['slow']
  assert reports['grouped']['groups']


def test_gathered_activations_are_found(reports):
  assert reports['chatty']['strange']


def test_rows_on_several_devices_keep_every_bit(reports):
  """The second says that it is not so by itself."""
  assert reports['negative_zeros'] == [True, False]
