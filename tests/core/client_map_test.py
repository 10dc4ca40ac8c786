"""Sums over clients: the written order on any number of devices."""
from __future__ import annotations

import itertools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.core import client_map
from tests import toy

# More than the sums and no multiple of any number of devices; as many as sums;
# fewer.
_SIZES = 11, 8, 2
_LAYOUTS: dict[str, dict[str, Any]] = {
    'one by one': {'client_map': 'map'},
    'in chunks': {'client_map': 'vmap', 'chunk_size': 2},
    'together': {'client_map': 'vmap', 'chunk_size': 0}}
_CODE = """
import json, sys
from tests.core import client_map_test
print(json.dumps(client_map_test.sums_on(json.loads(sys.argv[1]))))
"""


class Slot(NamedTuple):
  message: jax.Array
  weight: jax.Array
  active: jax.Array


class Result(NamedTuple):
  weight: jax.Array
  memory: jax.Array


def _slots(size: int) -> Slot:
  rng = np.random.default_rng(0)
  messages = rng.normal(0, 1000, (size, 37))
  messages[:, 0] = -0.0  # Added to zero it is 0.0.
  return Slot(jnp.asarray(messages, jnp.float32),
              jnp.asarray(rng.uniform(0, 3, size), jnp.float32),
              jnp.ones(size, bool))


def _body(shared: Any, slot: Slot) -> tuple[jax.Array, Result]:
  del shared
  return slot.message, Result(
      jnp.where(slot.active, slot.weight, 0), jnp.zeros(()))


def _sum(slots: Slot, layout: str, mesh: Any) -> jax.Array:
  plan = client_map.plan(toy.task(mesh=mesh, **_LAYOUTS[layout]),
                         len(slots.active))
  return plan.run(_body, (), slots, summing=True)[0][0]


def sums_on(counts: list[int]) -> dict[str, list[float]]:
  """Sums of every layout on so many devices of this process."""
  found = {}
  for layout, size in itertools.product(_LAYOUTS, _SIZES):
    for count in counts:
      mesh = jax.make_mesh(
          (count,), ('clients',), devices=jax.devices()[:count],
          axis_types=(jax.sharding.AxisType.Auto,)) if count > 1 else None
      total = jax.jit(lambda slots, layout=layout, mesh=mesh: _sum(
          slots, layout, mesh))(_slots(size))
      found[f'{layout} {size} {count}'] = np.asarray(total).tolist()
  return found


def _by_hand(size: int, block: int) -> np.ndarray:
  """Blocks in slot order, block j into sum j % 8, the sums in order."""
  slots, sums = _slots(size), np.zeros((8, 37), np.float32)
  products = np.asarray(slots.message) * np.asarray(slots.weight)[:, None]
  for number, first in enumerate(range(0, size, block)):
    one = products[first].copy()
    for other in products[first + 1:first + block]:
      one += other
    sums[number % 8] += one
  total = sums[0].copy()
  for other in sums[1:]:
    total += other
  return total


def test_the_order_is_the_written_one_on_any_number_of_devices(run_python):
  counts = [1, 2, 3, 4, 8]
  found = json.loads(run_python(
      _CODE, json.dumps(counts), devices=8).splitlines()[-1])
  for layout, size in itertools.product(_LAYOUTS, _SIZES):
    block = 2 if layout == 'in chunks' else 1
    for count in counts:
      np.testing.assert_array_equal(  # As integers, where -0.0 is not 0.0.
          np.float32(found[f'{layout} {size} {count}']).view(np.int32),
          _by_hand(size, block).view(np.int32), f'{size} {layout} on {count}')
  assert (_by_hand(11, 1) != _by_hand(11, 2)).any()  # Bits tell an order.


@pytest.mark.parametrize('count, order, inside', [
    (2, 'fixed', False), (8, 'fixed', False), (3, 'fixed', True),
    (3, 'fast', False)])
def test_devices_exchange_once_and_not_for_each_client(count, order, inside):
  """But for numbers that do not divide eight."""
  mesh = jax.sharding.AbstractMesh((count,), ('clients',))
  plan = client_map.plan(toy.task(
      mesh=mesh, aggregation_order=order), 5 * count)
  slots = Slot(jnp.zeros((5 * count, 3)), jnp.ones(5 * count),
               jnp.ones(5 * count, bool))
  traced = jax.make_jaxpr(lambda slots: plan.run(
      _body, (), slots, summing=True))(slots)
  found = [*_exchanges(traced.jaxpr, False)]
  assert found
  assert any(found) == inside


def _exchanges(jaxpr: Any, in_loop: bool) -> Any:
  """Yields for each exchange whether it is inside a loop."""
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    if name.startswith(('all_gather', 'psum')):
      yield in_loop
    for value in equation.params.values():
      for one in value if isinstance(value, tuple | list) else [value]:
        inner = getattr(one, 'jaxpr', one)
        if hasattr(inner, 'eqns'):
          yield from _exchanges(inner, in_loop or name in ('scan', 'while'))
