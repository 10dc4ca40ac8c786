r"""Milliseconds of tiled convolutions: side of the tiles, and how they are cut.

`conv.tile_form` chooses, for each layer, output tiles of 2x2 or 4x4 and whether
their transforms are kept (`winograd`) or made row by row (`rowwise`). Here a
client on every device takes steps of plain gradients (y, dx, dw) in a loop, all
devices at once as in a round, with all four. The last column is the time of
what is chosen over the fastest. On a CPU --num_devices=1 is another case: one
device with all the threads, which does the products of kept tiles side by side.

A run of other layers than all has a file of its own, named by them; until the
last layer is timed its name ends in `_unfinished`. So neither replaces a whole
one.

python experiments/benchmarks/conv_tiles.py
python experiments/benchmarks/conv_tiles.py --kernel=5 --channels=16,32,64
"""
from __future__ import annotations

from collections.abc import Callable
import functools
import itertools
import math
import pathlib
import sys
from typing import Any, NamedTuple

from absl import flags
import jax
from jax import lax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import conv_table, harness
from fedjax_ssl.ops import conv, conv_geometry, conv_rowwise, conv_winograd

FLAGS = flags.FLAGS

flags.DEFINE_enum('kernel', '3', ['3', '5'], 'Side of the kernels.')
flags.DEFINE_list('channels', ['16', '32', '64', '128'],
                  'Channels of the layers, in and out.')
flags.DEFINE_list('sides', ['4', '6', '7', '8', '14', '16'],
                  'Sides of the maps.')
flags.DEFINE_list('batches', ['20', '90'], 'Rows of a step.')
flags.DEFINE_integer('steps', 3, 'Local steps of one call.', lower_bound=1)
flags.DEFINE_integer('most_entries', 1 << 23, 'Layers with larger maps, in '
                     'entries, are left out.', lower_bound=1)

QUICK = {'channels': ['2'], 'sides': ['4'], 'batches': ['2'], 'steps': 1}
_FORMS = {
    f'{module.__name__.rpartition("conv_")[2]} {side}': (module.conv, side)
    for module in (conv_winograd, conv_rowwise) for side in (2, 4)
}
_RATE = 0.1


class Layer(NamedTuple):
  """A step's rows, the channels in and out, and the side of the map."""

  batch: int
  channels: int
  side: int

  @property
  def entries(self) -> int:
    """Of the map."""
    return self.batch * self.side**2 * self.channels


def layers() -> list[Layer]:
  """What to time.

  Raises:
    ValueError: if --most_entries leaves nothing.
  """
  every = [Layer(*sizes) for sizes in itertools.product(
      *map(harness.numbers, ('batches', 'channels', 'sides')))]
  found = [layer for layer in every if layer.entries <= FLAGS.most_entries]
  if not found:
    raise ValueError(
        f'--most_entries={FLAGS.most_entries} leaves no layer; the smallest '
        'of --batches, --channels and --sides has '
        f'{min(layer.entries for layer in every)} entries.')
  return found


def file_name() -> str:
  """The name of a run's results: a whole run's, or by what it has of one."""
  picked: list[str] = []
  for name in ('batches', 'channels', 'sides', 'most_entries'):
    flag = FLAGS[name]
    if not flag.present:  # Sizes of --quick: `harness.save` names those.
      continue
    these: list[Any]
    whole: list[Any]
    if name == 'most_entries':
      these, whole = [flag.value], [flag.default]
    else:
      these = sorted(harness.numbers(name))
      whole = sorted(map(int, flag.default or []))
    if these != whole:
      picked += [name, *map(str, these)]
  side = FLAGS.kernel
  return '_'.join([f'conv_tiles_{side}x{side}'] + [
      conv_table.brief(picked, 'sizes')] * bool(picked))


def call_of(form: str, window: conv_geometry.Window, batch: int, channels: int,
            mesh: jax.sharding.Mesh | None) -> Callable[[], Any]:
  """--steps steps of a layer in a form on every device, compiled."""
  keys = jax.random.split(jax.random.key(0))
  count = 1 if mesh is None else mesh.size
  x = jax.random.normal(keys[0], (count, batch, *window.size, channels))
  w = jax.random.normal(keys[1], (count, *window.kernel, channels, channels))
  w = w / (math.prod(window.kernel) * channels)**0.5
  function, side = _FORMS[form]
  made = functools.partial(function, tiling=conv_winograd.Tiling(side, window))

  def loss(x, w):
    return jnp.square(made(x, w)[0][0]).mean() / 2

  def step(_, both):
    grads = jax.grad(loss, (0, 1))(*both)
    return tuple(a - _RATE * g for a, g in zip(both, grads, strict=True))

  def client(x, w):
    return lax.map(lambda both: lax.fori_loop(0, FLAGS.steps, step, both),
                   (x, w))
  if mesh is not None:
    split = jax.sharding.PartitionSpec('clients')
    x, w = jax.device_put((x, w), jax.sharding.NamedSharding(mesh, split))
    client = jax.shard_map(client, mesh=mesh, in_specs=split, out_specs=split,
                           check_vma=False)
  run = jax.jit(client).lower(x, w).compile()
  return lambda: jax.block_until_ready(run(x, w))


def measure(window: conv_geometry.Window, batch: int, channels: int,
            mesh: jax.sharding.Mesh | None) -> dict[str, Any]:
  """Seconds of a step in every form, the one that is chosen, and its ratio."""
  timed = harness.interleave(
      {form: call_of(form, window, batch, channels, mesh) for form in _FORMS})
  middle = {form: seconds / FLAGS.steps
            for form, seconds in harness.medians(timed).items()}
  name, side = conv.tile_form(window, batch, channels, channels)
  taken, best = f'{name} {side}', min(middle, key=middle.__getitem__)
  tiles = batch * math.prod(conv_winograd.Tiling(4, window).tiles)
  return {'batch': batch, 'map': window.size[0], 'channels': channels,
          'maps_over_weights': 2 * tiles / channels, 'seconds': middle,
          'taken': taken, 'over_fastest': harness.paired(timed, taken, best)}


def main() -> None:
  """Times all layers and reports."""
  kernel, wanted, mesh = int(FLAGS.kernel), layers(), harness.make_mesh()
  table: list[list[Any]] = [
      ['batch', 'map', 'channels', 'maps/weights',
       *(f'{form}, ms' for form in _FORMS), 'taken', 'over fastest']]
  found: list[dict[str, Any]] = []
  name, saved = file_name(), (table, {
      'data': 'random numbers', 'backend': jax.default_backend(),
      'steps': FLAGS.steps, 'layers': found})
  for layer in wanted:
    window = conv_geometry.window((layer.side, layer.side), (kernel, kernel), 1,
                                  'SAME')
    one = measure(window, layer.batch, layer.channels, mesh)
    found.append(one)
    table.append([layer.batch, f'{layer.side}x{layer.side}', layer.channels,
                  one['maps_over_weights'],
                  *(1e3 * s for s in one['seconds'].values()),
                  one['taken'], one['over_fastest']])
    # What is cut off keeps the layers before, and leaves what was there.
    unfinished = harness.save(f'{name}_unfinished', *saved)
  harness.report(name, *saved)
  unfinished.unlink()


if __name__ == '__main__':
  harness.run(main, QUICK, as_programs=True)
