"""Milliseconds of tiled convolutions: side of the tiles, and how they are cut.

`conv.tile_form` chooses, for each layer, output tiles of 2x2 or 4x4 and whether
their transforms are kept (`winograd`) or made row by row (`rowwise`). Here one
client takes steps of plain gradients (y, dx, dw) in a loop, on one device, with
all four. The last column is the time of what is chosen over the fastest.

Until the last layer is timed the file's name ends in `_unfinished`, and a run
of other layers than the default ones is named by them: neither replaces a
whole one.

python experiments/benchmarks/conv_tiles.py
python experiments/benchmarks/conv_tiles.py --kernel=5 --channels=16,32,64
"""
from __future__ import annotations

from collections.abc import Callable
import functools
import math
from typing import Any

from absl import flags
import harness
import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl.models import conv, rowwise, windows, winograd

FLAGS = flags.FLAGS

flags.DEFINE_enum('kernel', '3', ['3', '5'], 'Side of the kernels.')
flags.DEFINE_list('channels', ['16', '32', '64', '128', '256'],
                  'Channels of the layers, in and out.')
flags.DEFINE_list('sides', ['4', '6', '7', '8', '14', '16', '28', '32'],
                  'Sides of the maps.')
flags.DEFINE_list('batches', ['20', '90'], 'Rows of a step.')
flags.DEFINE_integer('steps', 3, 'Local steps of one call.', lower_bound=1)
flags.DEFINE_integer('most_entries', 1 << 23, 'Layers with larger maps, in '
                     'entries, are left out.', lower_bound=1)

QUICK = {'channels': ['2'], 'sides': ['4'], 'batches': ['2'], 'steps': 1}
_FORMS = {f'{module.__name__.rpartition(".")[2]} {side}': (module.conv, side)
          for module in (winograd, rowwise) for side in (2, 4)}
_RATE = 0.1


def numbers(name: str) -> list[int]:
  """The positive integers of a list flag.

  Raises:
    ValueError: if there is none, or something else among them.
  """
  texts: list[str] = FLAGS[name].value or []
  if not texts or not all(t.isdecimal() and int(t) for t in texts):
    raise ValueError(f'--{name}={",".join(texts)} must be positive integers, '
                     'with commas between them.')
  return [int(t) for t in texts]


def file_name(kernel: int) -> str:
  """The name of a run's results: by what it has, if not by default."""
  parts = [f'conv_tiles_{kernel}x{kernel}']
  for name in ('channels', 'sides', 'batches'):
    if sorted(numbers(name)) != sorted(map(int, FLAGS[name].default or [])):
      parts.append(name + '-' + '-'.join(map(str, numbers(name))))
  return '_'.join(parts)


def call_of(form: str, window: windows.Window, batch: int, channels: int
            ) -> Callable[[], Any]:
  """--steps steps of a layer in a form, compiled."""
  keys = jax.random.split(jax.random.key(0))
  x = jax.random.normal(keys[0], (batch, *window.size, channels))
  w = jax.random.normal(keys[1], (*window.kernel, channels, channels))
  w = w / (math.prod(window.kernel) * channels)**0.5
  function, side = _FORMS[form]
  made = functools.partial(function, tiling=winograd.Tiling(side, window))

  def loss(x, w):
    return jnp.square(made(x, w)[0][0]).mean() / 2

  def step(_, both):
    grads = jax.grad(loss, (0, 1))(*both)
    return tuple(a - _RATE * g for a, g in zip(both, grads, strict=True))
  run = jax.jit(lambda x, w: lax.fori_loop(
      0, FLAGS.steps, step, (x, w))).lower(x, w).compile()
  return lambda: jax.block_until_ready(run(x, w))


def measure(window: windows.Window, batch: int, channels: int
            ) -> dict[str, Any]:
  """Seconds of a step in every form, the one that is chosen, and its ratio."""
  timed = harness.interleave(
      {form: call_of(form, window, batch, channels) for form in _FORMS},
      FLAGS.repeats)
  middle = {form: seconds / FLAGS.steps
            for form, seconds in harness.medians(timed).items()}
  name, side = conv.tile_form(window, batch, channels, channels)
  taken, best = f'{name} {side}', min(middle, key=middle.__getitem__)
  tiles = batch * math.prod(winograd.Tiling(4, window).tiles)
  return {'batch': batch, 'map': window.size[0], 'channels': channels,
          'maps_over_weights': 2 * tiles / channels, 'seconds': middle,
          'taken': taken, 'over_fastest': harness.paired(timed, taken, best)}


def main() -> None:
  """Times all layers and reports."""
  kernel = int(FLAGS.kernel)
  table: list[list[Any]] = [
      ['batch', 'map', 'channels', 'maps/weights',
       *(f'{form}, ms' for form in _FORMS), 'taken', 'over fastest']]
  found: list[dict[str, Any]] = []
  name, unfinished = file_name(kernel), None
  saved = (table, {
      'data': 'random numbers', 'backend': jax.default_backend(),
      'steps': FLAGS.steps, 'layers': found})
  for batch in numbers('batches'):
    for channels in numbers('channels'):
      for side in numbers('sides'):
        if batch * side**2 * channels > FLAGS.most_entries:
          continue
        window = windows.window((side, side), (kernel, kernel), 1, 'SAME')
        one = measure(window, batch, channels)
        found.append(one)
        table.append([batch, f'{side}x{side}', channels,
                      one['maps_over_weights'],
                      *(1e3 * s for s in one['seconds'].values()),
                      one['taken'], one['over_fastest']])
        # What is cut off keeps the layers before.
        unfinished = harness.save(f'{name}_unfinished', *saved)
  if unfinished is None:
    raise ValueError(f'--most_entries={FLAGS.most_entries} leaves no layer.')
  harness.report(name, *saved)
  unfinished.unlink()


if __name__ == '__main__':
  harness.run(main, QUICK)
