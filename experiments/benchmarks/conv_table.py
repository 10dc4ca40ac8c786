"""What was measured of a convolution's forms, as a table and in words."""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any
import zlib

from experiments.benchmarks import harness
from fedjax_ssl.ops import conv

ORDERS = ('first', 'second')
HEADER = ['layer', 'form', 'ms 1st', 'ms 2nd', 'GFLOP/s 1st', 'of limit',
          'GFLOP/s 2nd', 'of limit', 'error', '']
_LONGEST = 100  # Letters of what is picked, in a file's name.


def file_name(words: Sequence[str], layers: Collection[str],
              forms: Collection[str]) -> str:
  """The name of a run's results: a whole run's, or by what it has of one.

  Args:
    words: the setting.
    layers: those picked; none: all.
    forms: those beside auto.

  Returns:
    The name, without characters that end a folder's.
  """
  parts = ['conv_layers', *words]
  beside = set(forms) - {'auto'}
  if beside != set(conv.IMPLS) - {'auto'}:
    parts += sorted(beside) or ['auto']
  picked = brief(sorted(set(layers)), 'layers')
  return '_'.join([*parts, picked] if picked else parts)


def brief(texts: Sequence[str], things: str) -> str:
  """Texts as a part of a file's name: joined, or if long their checksum."""
  joined = '-'.join(texts).replace('/', '.')
  if len(joined) <= _LONGEST:
    return joined
  return f'{len(texts)}-{things}-{zlib.crc32(joined.encode()):08x}'


def label(same: Sequence[str]) -> str:
  """A form's name in the table; 'auto' is a choice among the others."""
  return '='.join([name for name in same if name != 'auto'] or same)


def fastest(measured: Mapping[str, Any], order: str) -> dict[str, float]:
  """Seconds of the forms of a layer that ran, the fastest first."""
  middle = harness.medians({
      name: form[order]['seconds']
      for name, form in measured['forms'].items()
      if 'seconds' in form[order]})
  return dict(sorted(middle.items(), key=lambda item: item[1]))


def rows_of(name: str, measured: Mapping[str, Any]) -> list[list[Any]]:
  """A table's rows for one layer; a star is at the fastest."""
  rows = []
  order_of = {order: fastest(measured, order) for order in ORDERS}
  for form, found in measured['forms'].items():
    cells: list[Any] = [name, form + (' (auto)' if found['auto'] else '')]
    for order in ORDERS:
      seconds = order_of[order].get(form)
      if seconds is None:
        cells.append('failed')
      else:
        best = form == next(iter(order_of[order]))
        cells.append(f'{1e3 * seconds:.4g}{" *" if best else "  "}')
    for order in ORDERS:
      seconds = order_of[order].get(form)
      rate = measured['flops'][order] / seconds if seconds else None
      cells += ['-', '-'] if rate is None else [
          rate / 1e9, rate / measured['rate']]
    cells.append('-' if found['difference'] is None else
                 f'{found["difference"]:.1e}')
    rows.append([*cells, '; '.join(dict.fromkeys(
        found[order]['error'][:60] for order in ORDERS
        if 'error' in found[order]))])
  return rows


def verdict(name: str, measured: Mapping[str, Any]) -> str:
  """What `auto` takes for a layer, and how it compares with the fastest."""
  taken = next((form for form, found in measured['forms'].items()
                 if found['auto']), 'nothing')
  words = []
  for order in ORDERS:
    times = fastest(measured, order)
    if taken not in times:
      words.append(f'{order} order failed')
    elif next(iter(times)) == taken:
      words.append(f'{order} order the fastest')
    else:
      best, seconds = next(iter(times.items()))
      words.append(f'{order} order {times[taken] / seconds:.2f} times {best}')
  return f'{name}: {taken}, {", ".join(words)}'
