"""What there is to say of the program that a run on two devices compiles."""
from __future__ import annotations

import threading
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from tests import hlo

# Stacks of a model: of a cohort's slots, or the eight sums of a fixed order.
SLOTS = 8
# One for each client, or each slot of several groups.
NUMBERS = 24
# Two programs that exchange could each hold a device that the other waits for.
DEVICES = threading.Lock()


def mesh(count: int = 2) -> jax.sharding.Mesh:
  return jax.make_mesh((count,), ('clients',), devices=jax.devices()[:count],
                       axis_types=(jax.sharding.AxisType.Auto,))


def _known(state: Any, federation: Any) -> set[hlo.Shape]:
  """Shapes of one client's and of the server's arrays."""
  one = [*jax.tree.leaves(state.server),
         *jax.tree.map(lambda x: x[0], jax.tree.leaves(state.memory)),
         *jax.tree.map(lambda x: x[0], tuple(federation.clients))]
  return {tuple(x.shape) for x in one}


def programs(runs: Any) -> list[int]:
  """Programs after the first stretch of a run, and after a longer one."""
  counts = []
  with DEVICES:
    for first, count in ((0, 1), (1, 2)):
      runs.advance(first, count)
      runs.restart_totals()  # As after every evaluation.
      counts.append(runs._run._cache_size())
  return counts


def lowered_for(runs: Any, platforms: tuple[str, ...]) -> str:
  """The program of a run as other devices would get it, not compiled."""
  return jax.export.export(runs._run, platforms=platforms)(
      *_arguments(runs)).mlir_module()


def _arguments(runs: Any) -> tuple[Any, ...]:
  return (runs.states[0], runs._totals[0], runs._federations[0], jnp.int32(0),
          jnp.int32(1), runs._roots[0][1])


def report(runs: Any, compiled: bool = True) -> dict[str, Any]:
  """What there is to say of the program that a run compiles, and calls."""
  lowered = runs._run.lower(*_arguments(runs))
  given = lowered.as_text()
  found = {'given': given.count('stablehlo.convolution'),
           'products': given.count('stablehlo.dot_general'),
           'groups': hlo.batch_groups(given)}
  if not compiled:
    return found
  text = lowered.compile().as_text() or ''  # Kept: not compiled once more.
  assert 'num_partitions=2' in text
  known = _known(runs.states[0], runs._federations[0])
  return found | {
      'convolutions': text.count(' convolution('),
      'slow': hlo.slow_convolutions(text),
      'exchanges': len(list(hlo.exchanges(text))),
      'strange': hlo.strange_exchanges(text, known, SLOTS, NUMBERS),
      'programs': programs(runs)}
