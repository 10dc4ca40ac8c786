"""One, two and four devices train the same bits."""
from __future__ import annotations

import json
from typing import Any

import pytest

_CODE = '''
import json, sys
from tests.experiments import devices_test
print(json.dumps(devices_test.trained(json.loads(sys.argv[1]))))
'''
_ROUNDS = 3
# Method, model, changes of the task, where labels live. Six clients: memory
# rows divide over 2 devices and not over 4, in cohorts of 3 and 4.
RUNS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    'fedavg_linear_map': ('fedavg', 'linear', {}, 'clients'),
    'fedavg_conv_vmap': (
        'fedavg', 'conv', {'client_map': 'vmap', 'chunk_size': 2}, 'clients'),
    'fedprox_conv_map': (
        'fedprox(mu=0.5, keep_local=True)', 'conv', {'cohort_size': 3},
        'clients'),
    'fedprox_linear_vmap': (
        'fedprox(mu=0.5)', 'linear',
        {'client_map': 'vmap', 'chunk_size': 2, 'cohort_size': 3}, 'clients'),
    'fixmatch_linear_vmap': (
        'fixmatch(threshold=0.4, keep_local=True)', 'linear',
        {'client_map': 'vmap', 'chunk_size': 2}, 'clients'),
    'fixmatch_conv_map': (
        'fixmatch(threshold=0.4)', 'conv', {}, 'clients'),
    'fixmatch_conv_server': (
        'fixmatch(threshold=0.4)', 'conv',
        {'client_map': 'vmap', 'chunk_size': 2}, 'server'),
    'fixmatch_linear_server': (
        'fixmatch(threshold=0.4)', 'linear', {}, 'server'),
}


def trained(names: list[str]) -> dict[str, list[dict[str, str]]]:
  """Trains each run on 1, 2 and 4 devices of this process.

  Returns:
    By name, for each number of devices the hash of every leaf of the state,
    and the last row of metrics.
  """
  import hashlib

  import jax
  import numpy as np

  from fedjax_ssl import methods
  from fedjax_ssl.training import loop, manifest, metrics
  from tests import toy

  def one(name, count):
    method, model, changes, labels_at = RUNS[name]
    mesh = None if count == 1 else jax.make_mesh(
        (count,), ('clients',), devices=jax.devices()[:count],
        axis_types=(jax.sharding.AxisType.Auto,))
    task = toy.task(model, mesh=mesh, labels_at=labels_at, **changes)
    federation, _ = toy.federation(labels_at)
    rows: list[Any] = []
    done = loop.train(
        methods.make(method, task), [federation], num_rounds=_ROUNDS,
        eval_every=_ROUNDS, mesh=mesh, observer=loop.Observer(rows.append))
    state = done.states[0]
    for leaf in jax.tree.leaves(state.memory):
      split = count > 1 and leaf.shape[0] % count == 0
      assert leaf.sharding.is_fully_replicated != split, leaf.sharding
    hashes = {
        leaf_name: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
        for leaf_name, leaf in manifest.named(state)}
    return {**hashes, 'row': metrics.to_line(metrics.to_plain(rows[0].values))}

  return {name: [one(name, count) for count in (1, 2, 4)] for name in names}


@pytest.fixture(scope='module')
def results(run_python) -> dict[str, list[dict[str, str]]]:
  output = run_python(_CODE, json.dumps([*RUNS]), devices=4)
  return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize('name', RUNS)
def test_the_number_of_devices_changes_no_bit(results, name):
  one, two, four = results[name]
  assert one == two
  assert one == four


def test_runs_differ(results):
  """Equal hashes mean something: other runs have others."""
  rows = [runs[0]['row'] for runs in results.values()]
  assert len(set(rows)) == len(rows)
