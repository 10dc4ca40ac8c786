"""Reads compiled programs as text: convolutions, and what devices exchange."""
from __future__ import annotations

from collections.abc import Collection, Iterator
import math
import re

_FAST = 'b01f_01io->b01f'
_EXCHANGES = ('all-gather', 'all-reduce', 'all-to-all', 'collective-permute',
              'reduce-scatter')
Shape = tuple[int, ...]


def slow_convolutions(text: str) -> list[str]:
  """Convolutions of compiled HLO that miss XLA:CPU's fast kernel.

  That kernel takes batch-first inputs and kernels with features last, in
  row-major layout and without batch groups; grouped ones come from per-client
  weights.
  """
  slow = []
  for line in text.splitlines():
    if ' convolution(' not in line:
      continue
    labels = re.search(r'dim_labels=(\S+?)[,\s]', line + ' ')
    layout = re.search(r'\[[\d,]*\]\{([\d,]+)\}', line)
    groups = re.findall(r'(?:batch|feature)_group_count=(\d+)', line)
    if (labels is None or labels.group(1) != _FAST or layout is None
        or layout.group(1) != '3,2,1,0' or any(g != '1' for g in groups)):
      slow.append(line.strip())
  return slow


def batch_groups(lowered: str) -> list[int]:
  """Batch groups above 1 of a program's convolutions, before it is compiled.

  Compilers write such convolutions as others.
  """
  return [int(n) for n in re.findall(r'batch_group_count = (\d+)', lowered)
          if n != '1']


def convolutions(lowered: str) -> list[tuple[int, Shape, Shape]]:
  """A program's convolutions, before it is compiled.

  Returns:
    For each the groups of its channels, and the shapes of input and kernel.
  """
  def shape(dims: str) -> Shape:
    return tuple(int(d) for d in dims.split('x')[:-1])
  return [(int(groups), shape(rows), shape(kernel))
          for groups, rows, kernel in re.findall(
              r'stablehlo\.convolution.*?feature_group_count = (\d+).*?'
              r': \(tensor<(\S+?)>, tensor<(\S+?)>\)', lowered)]


def exchanges(text: str) -> Iterator[tuple[str, Shape]]:
  """What devices exchange in compiled HLO: (operation, shape) an array."""
  words = '|'.join(_EXCHANGES)
  for result, word in re.findall(
      rf'= \(?([^=]*?)\)? ({words})(?:-start)?\(', text):
    for dims in re.findall(r'\w+\[([\d,]*)\]', result):
      yield word, tuple(int(d) for d in dims.split(',') if d)


def strange_exchanges(text: str, known: Collection[Shape], slots: int,
                      numbers: int) -> list[str]:
  """What devices exchange beyond one known array a slot, and a few numbers.

  Args:
    text: compiled HLO.
    known: shapes of the arrays of one client or of the server.
    slots: clients of a group, padding included.
    numbers: most numbers that are an array of any shape.

  Returns:
    The operations and shapes that are neither a stack of at most `slots` of
    these nor so few numbers, and all that do more than gather or sum.
  """
  plain = {_plain(shape) for shape in known} - {()}
  strange = []
  for word, shape in exchanges(text):
    dims = _plain(shape)
    fits = math.prod(dims) <= numbers or any(
        dims[len(dims) - len(tail):] == tail
        and math.prod(dims[:len(dims) - len(tail)]) <= slots
        for tail in plain)
    if not fits or word not in ('all-gather', 'all-reduce'):
      strange.append(f'{word}{list(shape)}')
  return strange


def _plain(shape: Shape) -> Shape:
  return tuple(d for d in shape if d != 1)
