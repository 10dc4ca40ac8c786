"""Wherever clients keep what they keep, a run has the same bits."""
from __future__ import annotations

import hashlib
import json
import pathlib
import tempfile
from typing import Any

import chex
import jax
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.training import client_rows, loop, per_client, runner
from fedjax_ssl.training.checkpoint import manifest
from tests import toy
from tests.quick_keys import quick_keys
from tests.thorough import wider

__all__ = ['quick_keys']  # A fixture of every test here.


class KilledError(Exception):
  """Stands for the end of the process."""


def train(text: str, kind: str, folder: pathlib.Path, num_rounds: int = 5,
          mesh: Any = None, ends: int = 0, **changes: Any
          ) -> tuple[loop.Result, list[runner.Row], dict[int, Any]]:
  """Two seeds; what came of them, their rows, and what was saved.

  With `ends` the process ends in the save of that round.
  """
  rows: list[runner.Row] = []
  saves: dict[int, Any] = {}
  def save(round_: int, tree: Any) -> None:
    if round_ == ends:
      raise KilledError(saves)
    saves[round_] = jax.tree.map(np.array, tree)
  federation, _ = toy.federation()
  result = loop.train(
      methods.make(text, toy.task(cohort_size=3, mesh=mesh)), [federation] * 2,
      num_rounds=num_rounds, eval_every=2, checkpoint_every=1, seeds=[3, 8],
      observer=loop.Observer(rows.append, save), mesh=mesh,
      place=client_rows.Place(kind, folder), **changes)
  result = result._replace(states=jax.tree.map(np.asarray, result.states))
  return result, rows, saves


@pytest.mark.parametrize('text', [
    'fedavg(keep_local=True)',
    *wider('rscfed(warmup=0.0)', 'local', 'fedmatch', 'scaffold', 'pdcfed')])
def test_host_and_disk_have_the_bits_of_the_devices(tmp_path, text):
  expected, rows, whole = train(text, 'device', tmp_path)
  on_host = train(text, 'host', tmp_path)
  chex.assert_trees_all_equal(expected.states, on_host[0].states)
  chex.assert_trees_all_equal(rows, on_host[1])
  chex.assert_trees_all_equal(whole, on_host[2])
  with pytest.raises(KilledError) as killed:
    train(text, 'disk', tmp_path, ends=4)
  saves, = killed.value.args
  went_on, rest, _ = train(text, 'disk', tmp_path, saved=(3, saves[3]))
  chex.assert_trees_all_equal(expected.states, went_on.states)
  chex.assert_trees_all_equal(rows[2:], rest)
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(
      saves[3]['8']['state'].memory))
  assert size == 3 * 4 * toy.NUM_CLIENTS + 4 + 32


def test_clients_models_are_read_where_they_are(tmp_path):
  text = 'fedavg(keep_local=True)'
  method, federation = methods.make(text, toy.task()), toy.federation()[0]
  states = [loop.train(
      method, federation, num_rounds=1, seeds=[3], place=client_rows.Place(
          kind, tmp_path)).states[0] for kind in ('device', 'disk')]
  assert isinstance(jax.tree.leaves(states[1].memory)[0],
                    client_rows.LeafOnDisk)
  compiled = per_client.programs(method)
  tables = [per_client.table(compiled, state, federation) for state in states]
  assert len(set(tables[0]['local_accuracy'])) > 1
  for name, column in tables[0].items():
    np.testing.assert_array_equal(column, tables[1][name])


def test_without_memory_nothing_is_written(tmp_path):
  result, *_ = train('fedavg', 'disk', tmp_path / 'rows', 1)
  assert result.round == 1 and not (tmp_path / 'rows').exists()


_CODE = """
from tests.training import offloaded_test
offloaded_test.print_hashes()
"""


def print_hashes() -> None:
  """Prints a hash of the states of each kind, on all devices together."""
  mesh = jax.make_mesh((jax.device_count(),), ('clients',), axis_types=(
      jax.sharding.AxisType.Auto,))
  for kind in client_rows.KINDS:
    with tempfile.TemporaryDirectory() as folder:
      result, *_ = train('fedavg(keep_local=True)', kind, pathlib.Path(folder),
                         3, mesh)
    print(json.dumps({name: hashlib.sha256(leaf.tobytes()).hexdigest()
                      for name, leaf in manifest.named(result.states)}))


@pytest.mark.thorough
def test_on_two_devices_too(run_python):
  lines = run_python(_CODE, devices=2).splitlines()
  assert len(lines) == 3 and lines[0] == lines[1] == lines[2]
