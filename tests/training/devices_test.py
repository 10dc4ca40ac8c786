"""One, two and four devices train the same bits."""
from __future__ import annotations

from collections.abc import Callable
import functools
import json
from typing import Any
from unittest import mock

import pytest

from tests.thorough import wider

_CODE = """
import json, sys
from tests.training import devices_test
print(json.dumps(devices_test.trained(json.loads(sys.argv[1]))))
"""
_ROUNDS = 3
_VMAP = {'client_map': 'vmap', 'chunk_size': 2}
# Others are samples of methods; `methods/program_test.py` takes each of them on
# one and two devices, without optimizations.
REGULAR = ('fedprox_linear_vmap',)
# Method, model, changes of the task, where labels live, numbers of devices.
# The rows of the six clients' memories divide over 2 devices and not over 4,
# cohorts of 3 over neither.
RUNS: dict[str, tuple[str, str, dict[str, Any], str, tuple[int, ...]]] = {
    'fedavg_layers_map': ('fedavg', 'layers', {}, 'clients', (1, 4)),
    'fedprox_linear_vmap': (
        'fedprox(mu=0.5, keep_local=True)', 'linear',
        {**_VMAP, 'cohort_size': 3}, 'clients', (1, 2)),
    'fedprox_linear_vmap_four': (
        'fedprox(mu=0.5, keep_local=True)', 'linear',
        {**_VMAP, 'cohort_size': 3}, 'clients', (1, 4)),
    'feddure_linear_map': ('feddure', 'linear', {}, 'clients', (1, 4)),
    'fedirm_linear_map': ('fedirm', 'linear', {}, 'clients', (1, 4)),
    'rscfed_linear_map': ('rscfed(warmup=0.0)', 'linear', {}, 'clients',
                          (1, 2)),
    'fixmatch_conv_vmap_server': (
        'fixmatch(threshold=0.4)', 'conv', _VMAP, 'server', (1, 4)),
}


def trained(names: list[str]) -> dict[str, list[dict[str, str]]]:
  """Trains each run on 1, 2 or 4 devices of this process, as a run does it.

  Returns:
    By name, for each number of devices the hash of every leaf of the state.
  """
  import concurrent.futures
  import contextlib
  import dataclasses
  import hashlib

  import jax
  import numpy as np

  from fedjax_ssl import methods
  from fedjax_ssl.training import runner
  from fedjax_ssl.training.checkpoint import manifest
  from tests import toy
  from tests.training import compiled, networks

  def one(name, count):
    method_name, model, changes, labels_at, _ = RUNS[name]
    mesh = None if count == 1 else jax.make_mesh(
        (count,), ('clients',), devices=jax.devices()[:count],
        axis_types=(jax.sharding.AxisType.Auto,))
    task = toy.task('linear' if model == 'layers' else model, mesh=mesh,
                    labels_at=labels_at, **changes)
    if model == 'layers':
      task = dataclasses.replace(task, model=networks.layers_of_most_forms())
    method = methods.make(method_name, task)
    runs = runner.Sequential(method, [toy.federation(labels_at)[0]], [0], mesh)
    with compiled.DEVICES if count > 1 else contextlib.nullcontext():
      runs.start(None)
      for leaf in jax.tree.leaves(runs.states[0].memory):
        split = count > 1 and leaf.shape[0] % count == 0
        assert leaf.sharding.is_fully_replicated != split, leaf.sharding
      runs.advance(0, _ROUNDS)
    # Sums of losses may be rounded otherwise; the model may not.
    assert int(runs.states[0].round) == _ROUNDS
    return {
        leaf_name: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
        for leaf_name, leaf in manifest.named({'state': runs.states[0]})}

  for name in names:  # The examples are made once.
    toy.federation(RUNS[name][3])
  # Draws of real keys take a third of the time, and are not what is optimized.
  with (mock.patch.object(runner, 'root_keys', lambda seed: tuple(
      jax.random.split(toy.key(seed)))),
        concurrent.futures.ThreadPoolExecutor(2) as pool):
    running = {name: [pool.submit(one, name, count) for count in RUNS[name][4]]
               for name in names}
    return {name: [job.result() for job in jobs]
            for name, jobs in running.items()}


@pytest.fixture(scope='module')
def results(run_python) -> Callable[[bool], dict[str, list[dict[str, str]]]]:
  """What the regular runs came to, or the others: a process for each."""
  @functools.cache
  def of(regular: bool) -> dict[str, list[dict[str, str]]]:
    names = [name for name in RUNS if (name in REGULAR) == regular]
    # Optimized as users run it: there a compiler may contract products and sums
    # differently on one device and on several.
    output = run_python(_CODE, json.dumps(names), devices=4,
                        env={'XLA_FLAGS': ''})
    return json.loads(output.splitlines()[-1])
  return of


@pytest.mark.parametrize('name', [
    *REGULAR, *wider(*(name for name in RUNS if name not in REGULAR))])
def test_the_number_of_devices_changes_no_bit(results, name):
  first, *others = results(name in REGULAR)[name]
  assert first and len(others) + 1 == len(RUNS[name][-1])
  for other in others:
    assert other == first


@pytest.mark.thorough
def test_runs_differ(results):
  """Equal hashes mean something: other runs have others."""
  states = [str(runs[0]) for runs in results(False).values()]
  assert len(set(states)) == len(states) > 1


_FREQUENCIES = """
import tempfile
import fedjax_ssl
import numpy as np

def frequencies(count):
  run = fedjax_ssl.fit(
      "fedggp(profile='code')", 'digits', setting='labeled_clients', rounds=4,
      eval_every=4, clients=6, cohort_size=5, num_labeled_clients=1,
      num_partly_labeled_clients=2, labeled_fraction=.2, alpha=.05,
      local_steps=2, model='linear', weak='none', strong='none',
      num_devices=count, progress=False)
  with tempfile.TemporaryDirectory() as folder:
    run.save(f'{folder}/model.npz')
    return np.load(f'{folder}/model.npz')['frequencies']

four, one = frequencies(4), frequencies(1)
assert one.std() > 0
print(one.tobytes() == four.tobytes())
"""


@pytest.mark.thorough
def test_what_a_server_computes_of_counts_has_the_same_bits(run_python):
  """Quotients and exponentials, which fused are rounded otherwise."""
  output = run_python(_FREQUENCIES, devices=4, env={'XLA_FLAGS': ''})
  assert output.splitlines()[-1] == 'True'


_WIDE = """
import hashlib
import sys
import jax
import jax.numpy as jnp
import numpy as np
from fedjax_ssl.models import layers
from fedjax_ssl.ops import conv

def normal(*shape):
  return jnp.asarray(np.random.default_rng(0).standard_normal(shape), 'float32')

def dense(kernel, x):
  layer = layers.Dense(kernel.shape[1], layers.Choices(), use_bias=False)
  return layer.apply({'params': {'kernel': kernel}}, x)

def form(impl):
  return lambda kernel, x: conv.max_pooled_conv2d(x, kernel, impl=impl)

LAYERS = {
    'dense': (dense, (3136, 512), (5, 3136)),
    'first': (form('auto'), (5, 5, 1, 32), (20, 28, 28, 1)),
    'gemm': (form('gemm'), (3, 3, 6, 16), (20, 14, 14, 6)),
    'reordered': (form('reordered'), (3, 3, 8, 32), (20, 14, 14, 8)),
    'second': (form('auto'), (5, 5, 32, 64), (20, 14, 14, 32))}
for name in sys.argv[1:]:
  function, kernel, x = LAYERS[name]
  def both(kernel, x):
    y, pull = jax.vjp(function, kernel, x)
    return y, pull(jnp.sin(y))
  for leaf in jax.tree.leaves(jax.jit(both)(normal(*kernel), normal(*x))):
    print(kernel, hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest())
"""


@pytest.mark.parametrize('layers', [
    ('dense',), *wider((('first', 'second', 'gemm', 'reordered'),))])
def test_layers_of_real_size_do_not_see_the_threads(
    run_python, same_bits, layers):
  """Which are as many as devices, where these are more than processors."""
  one, many = (run_python(_WIDE, *layers, devices=n, env={'XLA_FLAGS': ''}
                          ).splitlines() for n in (1, 8))
  assert len(one) == 3 * len(layers)
  if layers == ('dense',):  # The others make no such product.
    same_bits(one, many)
  assert one == many


_JOINED = """
import sys
import jax
from fedjax_ssl import config
from fedjax_ssl.running import devices
devices.join(config.Config(cohort_size=2, num_devices=int(sys.argv[1])))
print(len(jax.devices()))
"""


@pytest.mark.parametrize('asked, made', [(0, 3), (2, 3), (4, 4)])
def test_a_number_of_devices_that_xla_is_told_stays(run_python, asked, made):
  """Unless the run needs more."""
  assert run_python(_JOINED, str(asked), env={
      'JAX_NUM_CPU_DEVICES': '-1',
      'XLA_FLAGS': '--xla_force_host_platform_device_count=3'}) == f'{made}\n'
