"""Short descriptions of records by the sizes of their parts, for a console."""
from __future__ import annotations

from typing import Any

import jax
import numpy as np


def is_known(value: Any) -> bool:
  """Returns whether this host can read the numbers of a value now."""
  if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array):
    return isinstance(value, np.ndarray | np.generic)
  # An array that was donated to a compiled function can no longer be read.
  return value.is_fully_addressable and not value.is_deleted()


def count(number: int, one: str, many: str = '') -> str:
  """Returns `1 row`, or `1,200 rows`."""
  return f'{number:,} {one if number == 1 else many or one + "s"}'


def array(value: Any) -> str:
  """Returns `uint8[8, 8, 1]`; for anything but an array, its type."""
  if not hasattr(value, 'shape') or not hasattr(value, 'dtype'):
    return type(value).__name__
  return f'{value.dtype}[{", ".join(map(str, value.shape))}]'


def examples(value: Any) -> str:
  """Returns `360 of uint8[8, 8, 1]`."""
  shape = getattr(value.inputs, 'shape', ())
  if not shape:
    return f'{array(value.inputs)}, {array(value.labels)}'
  sides = ', '.join(map(str, shape[1:]))
  return f'{shape[0]:,} of {value.inputs.dtype}[{sides}]'


def shard(value: Any) -> str:
  """Returns `20 clients, 100 labeled and 1,265 unlabeled rows`."""
  sizes = value.num_labeled, value.num_unlabeled
  if not all(map(is_known, sizes)):
    return ', '.join(f'{name}: {array(leaf)}' for name, leaf in zip(
        value._fields, value, strict=True))
  labeled, unlabeled = (int(np.sum(size)) for size in sizes)
  lead = [count(number, word) for number, word in zip(
      reversed(np.shape(sizes[0])), ('client', 'task'), strict=False)]
  return ', '.join([*lead, f'{labeled:,} labeled and '
                    f'{count(unlabeled, "unlabeled row")}'])


def tree(value: Any) -> str:
  """Returns `650 numbers in 2 arrays`, or `nothing`."""
  leaves = [x for x in jax.tree.leaves(value) if hasattr(x, 'size')]
  if not leaves:
    return 'nothing'
  numbers = sum(int(leaf.size) for leaf in leaves)
  return f'{count(numbers, "number")} in {count(len(leaves), "array")}'
