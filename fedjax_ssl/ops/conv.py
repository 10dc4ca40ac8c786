"""The convolution of every model: fast inside loops, to any order.

`jax.lax` convolutions are slow on a CPU exactly where a simulator puts them:
inside `scan` or `while` their gradients miss XLA's fast kernel, and weights of
each client under `vmap` make grouped convolutions. `conv2d` takes other forms
there: 'winograd' (`conv_winograd` or `conv_rowwise`), 'gemm' (`conv_im2col`) or
'reordered' (`conv_direct`). For accelerators there is 'taps' (`conv_taps`) as
well; `conv_measure` finds out which form is fastest.
"""
from __future__ import annotations

from collections.abc import Iterator
import contextlib
import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl.core import checks, conv_forms
from fedjax_ssl.ops import (
    conv_direct,
    conv_geometry,
    conv_im2col,
    conv_rowwise,
    conv_taps,
    conv_winograd,
    pooling,
)

IMPLS = conv_forms.FORMS

# Below this many input channels the transforms cost more than they save.
_MIN_TILE_CHANNELS = 16
# Up to this many input channels patches are small and a convolution wasteful.
_MAX_PATCH_CHANNELS = 4
# Up to this many outputs one product of patches for the four pixels of a pool
# is faster than re-ordered gradients: with 5 to 15 inputs it takes .45 to .85
# of their time for 8 to 16 outputs, and mostly 1.1 of it for 24 to 64.
_MAX_TOGETHER_OUTPUTS = 16
_TILE_KERNELS = ((3, 3), (5, 5))
# These limits were measured by `experiments/benchmarks/conv_tiles.py`. Maps
# with smaller sides take 2x2 output tiles: their products read more weights
# than pixels.
_MIN_LARGE_TILE_MAP = 7
# But 3x3 layers with maps of one 4x4 tile take that one with at least this many
# rows and channels (`experiments/results/benchmarks/conv_tiles_4x4.json`; with
# the fewest channels and below 90 rows it is .94 to 1.08 of the other's time).
_SMALL_MAP = 4, 4
_MIN_SMALL_MAP_ROWS = 40
_MIN_SMALL_MAP_CHANNELS = 64
# 3x3 layers take `conv_rowwise` where the tiled maps are more than this many
# times as large as the weights, which its loop reads for each part of a batch.
_MAPS_OVER_WEIGHTS = 5
# With fewer channels the loop's transforms cost more than they save.
_MIN_ROW_CHANNELS = 32


class Layer(NamedTuple):
  """A convolution by its shapes; the text of it names it in stored choices.

  Attributes:
    size: (H, W) of the input.
    kernel: (kh, kw).
    stride: step between windows.
    padding: 'SAME' or 'VALID'.
    inputs: channels of the input.
    outputs: channels of the output.
    pooled: whether 2x2 maxima of the output are all that is used.
  """

  size: tuple[int, int]
  kernel: tuple[int, int]
  stride: int
  padding: str
  inputs: int
  outputs: int
  pooled: bool = False

  @property
  def window(self) -> conv_geometry.Window:
    """The positions of the kernel."""
    return conv_geometry.window(self.size, self.kernel, self.stride,
                                self.padding)

  def __str__(self) -> str:
    (height, width), (kh, kw) = self.size, self.kernel
    return (f'{kh}x{kw}/{self.stride} {self.padding} {height}x{width} '
            f'{self.inputs}>{self.outputs}{" pooled" * self.pooled}')


_RECORDS: list[list[Layer]] = []


@contextlib.contextmanager
def recording_layers() -> Iterator[list[Layer]]:
  """Lists the convolutions that are traced inside the block, in order."""
  found: list[Layer] = []
  _RECORDS.append(found)
  try:
    yield found
  finally:
    _RECORDS.pop()  # Blocks end in the order of their nesting.


def conv2d(x: jax.Array, w: jax.Array, *, stride: int = 1,
           padding: str = 'SAME', impl: str = 'auto') -> jax.Array:
  """Computes a convolution: cross-correlation, as deep learning libraries do.

  Args:
    x: float[B, H, W, I].
    w: float[kh, kw, I, O], of the dtype of x.
    stride: step between windows on both axes, 1 or more.
    padding: 'SAME' (H' = ceil(H / stride), zeros around) or 'VALID'.
    impl: 'lax', 'reordered', 'gemm', 'taps', 'winograd' or 'auto', which
      chooses by backend and shape, see `choose`. 'winograd' falls back to
      'reordered' for all but 3x3 and 5x5 kernels of stride 1 with padding
      'SAME'; the others take every shape. All but 'lax' make a 1x1 convolution
      one matrix product. It may also be a text with the measured form of each
      layer, see `conv_forms`; a layer that is not in it takes 'auto'.

  Returns:
    float[B, H', W', O]. Reverse-mode derivatives exist to any order;
    forward-mode ones only with 'lax'.

  Raises:
    ValueError: for an unknown impl or padding, a bad stride, channels or
      dtypes that differ between x and w, or a VALID kernel larger than the
      input.
  """
  return _computed(x, w, *_plan(x, w, stride, padding, impl))


def _computed(x: jax.Array, w: jax.Array, window: conv_geometry.Window,
              impl: str) -> jax.Array:
  """Computes a convolution in a form that `_plan` chose."""
  if impl == 'lax':
    return lax.conv_general_dilated(
        x, w, (window.stride, window.stride), window.pads,
        dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
  if window.kernel == (1, 1):
    return conv_im2col.pointwise(x, w, window)
  if impl == 'winograd':
    return _tile_conv(x, w, window, 1)[0][0]
  if impl == 'gemm':
    return conv_im2col.conv(x, w, window)
  if impl == 'taps':
    return conv_taps.conv(x, w, window)
  return conv_direct.conv(x, w, window)


def max_pooled_conv2d(x: jax.Array, w: jax.Array, *, padding: str = 'SAME',
                      impl: str = 'auto') -> jax.Array:
  """Computes `pooling.max_pool` of `conv2d`, cheaper where the form allows.

  Tiles, and patches where channels are few, give the four pixels of every 2x2
  window apart, so the convolution's own map is never laid out. Where these are
  one array a NaN takes no gradient, see `pooling.max_of_four`.

  Args:
    x: float[B, H, W, I].
    w: float[kh, kw, I, O], of the dtype of x.
    padding: see `conv2d`.
    impl: see `conv2d`.

  Returns:
    float[B, H'//2, W'//2, O].

  Raises:
    ValueError: as `conv2d` and `pooling.max_pool`.
  """
  window, impl = _plan(x, w, 1, padding, impl, pooled=True)
  pooling.check_size(window.out)
  if impl == 'winograd':
    (a, b), (c, d) = _tile_conv(x, w, window, 2)
  elif impl == 'gemm' and w.shape[2] <= _MAX_PATCH_CHANNELS:
    a, b, c, d = conv_im2col.quarters(x, w, window)
  elif impl == 'gemm' and _together(window, w.shape[3]):
    return conv_im2col.max_pooled(x, w, window)
  else:
    return pooling.max_pool(_computed(x, w, window, impl))
  return pooling.max_of((a, b, c, d))


def _plan(x: jax.Array, w: jax.Array, stride: int, padding: str, impl: str,
          pooled: bool = False) -> tuple[conv_geometry.Window, str]:
  """Checks the arguments of `conv2d`; returns its window and its form."""
  forms = conv_forms.by_layer(impl)
  checks.check('padding', padding, ('SAME', 'VALID'))
  if checks.whole_numbers([stride]) is None or stride < 1:
    raise ValueError(
        f'stride is {stride}; it must be one whole number, 1 or more.')
  if x.ndim != 4 or w.ndim != 4 or x.shape[3] != w.shape[2]:
    raise ValueError(f'x {x.shape} and w {w.shape} must be [B, H, W, I] and '
                     '[kh, kw, I, O] with the same I.')
  if x.dtype != w.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
    raise ValueError(f'x is {x.dtype} and w is {w.dtype}; they must be floats, '
                     'and alike.')
  window = conv_geometry.window((x.shape[1], x.shape[2]),
                                (w.shape[0], w.shape[1]), stride, padding)
  layer = Layer(window.size, window.kernel, stride, padding, w.shape[2],
                w.shape[3], pooled)
  for found in _RECORDS:
    found.append(layer)
  if forms:
    # Texts of earlier runs do not tell whether a layer is pooled.
    impl = forms.get(str(layer)) or forms.get(
        str(layer._replace(pooled=False)), 'auto')
  if impl == 'auto':
    impl = choose(window, w.shape[2], jax.default_backend(),
                  pooled=w.shape[3] if pooled else None)
  if impl == 'winograd' and not _tileable(window):
    impl = 'reordered'
  return window, impl


def choose(window: conv_geometry.Window, channels: int, backend: str,
           pooled: int | None = None) -> str:
  """Returns the form that `auto` takes for I input channels.

  On CPU: patches for up to 4 channels, tiles for 3x3 and 5x5 kernels of stride
  1 and padding SAME with 16 channels or more, else patches where the map is
  smaller than the kernel or few outputs are pooled, and re-ordered gradients
  where not. On a GPU patches, which won wherever `conv_measure` was asked on
  one, for 3 to 20 clients together; no form of a single one's was timed there,
  and patches of large images take much memory. Elsewhere 'lax'.

  Args:
    window: its kernel and map decide.
    channels: I.
    backend: of JAX: 'cpu', 'gpu' or 'tpu'.
    pooled: channels O of an output that is pooled; None for one that is not.
  """
  if backend != 'cpu':
    return 'gemm' if backend == 'gpu' else 'lax'
  if channels <= _MAX_PATCH_CHANNELS:
    return 'gemm'
  if channels >= _MIN_TILE_CHANNELS and _tileable(window):
    return 'winograd'
  if min(window.out) < max(window.kernel):
    return 'gemm'  # XLA would swap map and kernel, to an order that is slow.
  if (pooled is not None and channels < _MIN_TILE_CHANNELS
      and _together(window, pooled)):
    return 'gemm'
  return 'reordered'


def _together(window: conv_geometry.Window, outputs: int) -> bool:
  """Returns whether one product for a pool's four pixels is fastest."""
  return min(window.kernel) > 2 and outputs <= _MAX_TOGETHER_OUTPUTS


def is_tileable(layer: Layer) -> bool:
  """Returns whether 'winograd' takes a layer and does not fall back."""
  return _tileable(layer.window)


def _tileable(window: conv_geometry.Window) -> bool:
  # Padding SAME: the tiles of the output cover the input.
  return (window.stride == 1 and window.kernel in _TILE_KERNELS
          and window.size == window.out)


def tile_form(window: conv_geometry.Window, rows: int, inputs: int,
              outputs: int) -> tuple[str, int]:
  """Chooses how a convolution is tiled, by what is fastest on CPU.

  Args:
    window: of stride 1, 3x3 or 5x5.
    rows: of the batch.
    inputs: channels of x.
    outputs: channels of y.

  Returns:
    'rowwise' or 'winograd', which names the module, and m, the side of an
    output tile.
  """
  large = min(window.out) >= _MIN_LARGE_TILE_MAP
  if window.kernel == (5, 5):
    return 'rowwise', 4 if large else 2
  tiles = rows * math.prod(conv_winograd.Tiling(4, window).tiles)
  if (large and min(inputs, outputs) >= _MIN_ROW_CHANNELS
      and tiles * (inputs + outputs) > _MAPS_OVER_WEIGHTS * inputs * outputs):
    return 'rowwise', 4
  if window.out == _SMALL_MAP and (
      rows >= _MIN_SMALL_MAP_ROWS
      and min(inputs, outputs) >= _MIN_SMALL_MAP_CHANNELS):
    return 'winograd', 4
  # Ragged tiles waste work, and filling them up costs passes over the map.
  whole = large and not any(n % 4 for n in window.out)
  return 'winograd', 4 if whole else 2


_FORMS = {'rowwise': conv_rowwise, 'winograd': conv_winograd}


def _tile_conv(x: jax.Array, w: jax.Array, window: conv_geometry.Window,
               fold: int) -> conv_winograd.Phases:
  """Tiles of a fitting form and side, in float32 at least.

  The transforms lose two digits, too many for 16-bit floats.
  """
  form, side = tile_form(window, x.shape[0], w.shape[2], w.shape[3])
  tiling = conv_winograd.Tiling(side, window, fold)
  if x.dtype.itemsize >= 4:
    return _FORMS[form].conv(x, w, tiling)
  y = _FORMS[form].conv(x.astype(jnp.float32), w.astype(jnp.float32), tiling)
  return jax.tree.map(lambda phase: phase.astype(x.dtype), y)
