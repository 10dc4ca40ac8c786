"""What each of the runs that go side by side has of a machine."""
from __future__ import annotations

from collections.abc import Mapping
import os
import pathlib

_VISIBLE = 'CUDA_VISIBLE_DEVICES'
_MEMORY = 'XLA_CLIENT_MEM_FRACTION'
# With any of these users say themselves how runs share a GPU's memory.
_MEMORY_BY_USER = (_MEMORY, 'XLA_PYTHON_CLIENT_MEM_FRACTION',
                   'XLA_PYTHON_CLIENT_PREALLOCATE',
                   'XLA_PYTHON_CLIENT_ALLOCATOR')
# Of a GPU's memory; as JAX takes for one process. The rest is for what each
# process needs besides its arrays.
_TAKEN = 0.75


def cores(slot: int, num_slots: int) -> set[int]:
  """Returns the cores of a slot; empty to leave its runs where they are.

  Runs that go side by side on all cores wait for each other: with a share each,
  two runs of a small network on two cores take three quarters of the time.
  """
  if num_slots == 1 or not hasattr(os, 'sched_getaffinity'):
    return set()
  found = sorted(os.sched_getaffinity(0))
  if len(found) < num_slots:
    return set()
  return set(_part(found, slot, num_slots))


def gpus(slot: int, num_slots: int, given: Mapping[str, str],
         devices: pathlib.Path = pathlib.Path('/dev')) -> dict[str, str]:
  """Returns the variables by which a slot's runs see their NVIDIA GPUs.

  A process takes all GPUs and most of their memory when it starts, so a second
  one would find none.

  Args:
    slot: from 0.
    num_slots: runs at a time. With as many GPUs or more a slot has some for
      itself; with fewer, slots take turns, and those of one GPU have equal
      shares of its memory.
    given: variables of the runs. What they say of memory stays, and so do GPUs
      that differ by slot.
    devices: where the system shows its GPUs, as files nvidia0, nvidia1, ...
  """
  if num_slots == 1 or given.get('JAX_PLATFORMS', '').startswith('cpu'):
    return {}
  if _VISIBLE in given:
    found = [name for name in given[_VISIBLE].split(',') if name.strip()]
  else:
    found = [*map(str, range(len([*devices.glob('nvidia[0-9]*')])))]
  if not found or found[0].strip() == '-1':
    return {}
  if len(found) >= num_slots:
    return {_VISIBLE: ','.join(_part(found, slot, num_slots))}
  turn = slot % len(found)
  sharing = len(range(turn, num_slots, len(found)))
  mine = {_VISIBLE: found[turn]}
  if sharing > 1 and not any(given.get(name) for name in _MEMORY_BY_USER):
    mine[_MEMORY] = f'{_TAKEN / sharing:.3f}'
  return mine


def _part(items: list, slot: int, num_slots: int) -> list:
  first, end = (i * len(items) // num_slots for i in (slot, slot + 1))
  return items[first:end]
