"""The 3x3 convolution as products of transformed tiles (Winograd, Toom-Cook).

An m x m tile of the output depends on an a x a tile of the input, with
a = m + r - 1 for an r x r kernel. If rows are read as polynomials and evaluated
at a points, a product of polynomials becomes a product of numbers, so

  y = A^T [(G w G^T) * (B^T d B)] A

takes a^2 products instead of m^2 r^2. Every position of the tile is one matrix
product over channels. The transforms are linear and each has its adjoint, so
the gradients are products of transformed tiles too, and share the transforms.

References:
  Lavin, Gray, Fast algorithms for convolutional neural networks, 2015,
  https://arxiv.org/abs/1509.09308.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.ops import conv_geometry, custom_vjp, matmul

# Small points keep the transforms well conditioned; infinity is added.
_POINTS = (0., 1., -1., 2., -2., .5, -.5)
# The transforms lose two digits: of the ten bits that accelerators keep of a
# float32 by default, too few would be left.
PRECISION = 'highest'

Grid = tuple[tuple[jax.Array, ...], ...]  # [a][a] arrays, one a tile position.
# [f][f] arrays; pixel (i, j) of a map is (i // f, j // f) of [i % f][j % f].
Phases = tuple[tuple[jax.Array, ...], ...]
Combine = Callable[[Sequence[jax.Array]], list[jax.Array]]


class Tiling(NamedTuple):
  """A convolution of stride 1 and padding SAME in m x m tiles; hashable.

  m: side of an output tile.
  window: the convolution.
  fold: f, the number of phases of the output along each axis; divides m.
  """

  m: int
  window: conv_geometry.Window
  fold: int = 1

  @property
  def side(self) -> int:
    """a, the side of an input tile."""
    return self.m + self.window.kernel[0] - 1

  @property
  def tiles(self) -> tuple[int, int]:
    """(th, tw) tiles; the last may reach over the map's edge."""
    height, width = (-(-n // self.m) for n in self.window.out)
    return height, width

  @property
  def phase(self) -> tuple[int, int]:
    """Size of a phase; rows and columns left over are dropped."""
    height, width = (n // self.fold for n in self.window.out)
    return height, width


@functools.lru_cache(None)
def matrices(m: int, r: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the transforms of F(m, r): A^T [m, a], G [a, r], B^T [a, a]."""
  points = np.array(_POINTS[:m + r - 2])
  others = [np.delete(points, i) for i in range(points.size)]
  scales = [np.prod(p - q) for p, q in zip(points, others, strict=True)] + [1.]
  inputs = np.zeros((m + r - 1, m + r - 1))
  for i, roots in enumerate(others):
    inputs[i, :-1] = np.poly(roots)[::-1]
  inputs[-1] = np.poly(points)[::-1]
  weights = _evaluate(points, r) / np.array(scales)[:, None]
  return _evaluate(points, m).T, weights, inputs


def _evaluate(points: np.ndarray, size: int) -> np.ndarray:
  """Values of 1, x, x^2, ... at the points and at infinity: [a, size]."""
  finite = np.vander(points, size, increasing=True)
  return np.concatenate([finite, np.eye(size)[-1:]])


def combine_by(matrix: np.ndarray) -> Combine:
  """Makes a function that multiplies a list of arrays by a constant matrix.

  Zeros of the matrix are skipped.
  """
  def combine(parts: Sequence[jax.Array]) -> list[jax.Array]:
    sums = []
    for row in matrix:
      total = None
      for c, part in zip(row, parts, strict=True):
        if c:
          term = part if c == 1 else -part if c == -1 else (
              jnp.asarray(c, part.dtype) * part)
          total = term if total is None else total + term
      sums.append(jnp.zeros_like(parts[0]) if total is None else total)
    return sums
  return combine


def _cut(phases: Phases, matrix: np.ndarray, tiles: tuple[int, int], m: int
         ) -> Grid:
  """Transformed tiles of a map, stepped by m.

  Args:
    phases: of float[B, H, W, C] that holds every tile.
    matrix: [a, k]; tiles are k x k.
    tiles: (th, tw).
    m: step between tiles.

  Returns:
    [a][a] of float[B * th * tw, C].
  """
  combine, fold = combine_by(matrix), len(phases)
  size = range(matrix.shape[1])

  def pixel(x: jax.Array, at: int, axis: int) -> jax.Array:
    start, step = at // fold, m // fold
    return lax.slice_in_dim(
        x, start, start + step * (tiles[axis - 1] - 1) + 1, step, axis)
  rows = [combine([pixel(phases[i % fold][b], i, 1) for i in size])
          for b in range(fold)]
  # Meant to keep XLA from recomputing the first step inside the second. On CPU
  # jaxlib 0.10 drops barriers before it fuses; other backends may keep them.
  # `conv_rowwise` has loops instead.
  rows = lax.optimization_barrier(rows)
  grid = []
  for row in zip(*rows, strict=True):
    columns = combine([pixel(row[j % fold], j, 2) for j in size])
    grid.append(tuple(c.reshape(-1, c.shape[3]) for c in columns))
  return lax.optimization_barrier(tuple(grid))


def _join(grid: Grid, combine_rows: Combine, combine_columns: Combine,
          batch: int, tiles: tuple[int, int], fold: int) -> Phases:
  """Tiles mapped to m x m along each axis and laid side by side.

  Args:
    grid: [a][a] of float[B * th * tw, C].
    combine_rows: a arrays float[B, th, tw, C] -> m arrays.
    combine_columns: the same along columns.
    batch: B.
    tiles: (th, tw).
    fold: f.

  Returns:
    [f][f] of float[B, th * m / f, tw * m / f, C].
  """
  th, tw = tiles
  side, channels = len(grid), grid[0][0].shape[-1]
  columns = [combine_rows([grid[p][q].reshape(batch, th, tw, channels)
                           for p in range(side)]) for q in range(side)]
  columns = lax.optimization_barrier(columns)
  lines = [combine_columns([c[i] for c in columns])
           for i in range(len(columns[0]))]
  return tuple(
      tuple(side_by_side([side_by_side(line[b::fold], 2)
                          for line in lines[a::fold]], 1)
            for b in range(fold))
      for a in range(fold))


def side_by_side(pixels: Sequence[jax.Array], axis: int) -> jax.Array:
  """Joins pixels 0, 1, ... of every tile along an axis to the map."""
  x = jnp.stack(pixels, axis + 1)
  length = x.shape[axis] * len(pixels)
  return x.reshape(*x.shape[:axis], length, *x.shape[axis + 2:])


def _shift(x: jax.Array, steps: int, axis: int) -> jax.Array:
  """Moves x by `steps` along an axis; zeros enter, the far end is dropped."""
  if not steps:
    return x
  length = x.shape[axis]
  if abs(steps) >= length:
    return jnp.zeros_like(x)
  zeros = jnp.zeros_like(lax.slice_in_dim(x, 0, abs(steps), axis=axis))
  if steps > 0:
    kept = lax.slice_in_dim(x, 0, length - steps, axis=axis)
    return lax.concatenate([zeros, kept], axis)
  kept = lax.slice_in_dim(x, -steps, length, axis=axis)
  return lax.concatenate([kept, zeros], axis)


def _overlap(tiling: Tiling, axis: int) -> Combine:
  """Adjoint of the overlapping input transform along one axis.

  Position j of a tile is pixel j - pad of its output tile; beyond the ends it
  belongs to a neighbor.
  """
  m, side = tiling.m, tiling.side
  before = tiling.window.pads[axis - 1][0]
  combine = combine_by(matrices(m, tiling.window.kernel[0])[2].T)

  def overlap(parts: Sequence[jax.Array]) -> list[jax.Array]:
    positions = combine(parts)
    sums: list[jax.Array | None] = [None] * m
    for j in range(side):
      tile, pixel = divmod(j - before, m)
      part = _shift(positions[j], tile, axis)
      old = sums[pixel]
      sums[pixel] = part if old is None else old + part
    return [s for s in sums if s is not None]
  return overlap


def _cut_inputs(x: jax.Array, tiling: Tiling) -> Grid:
  """B^T d B of every tile d: float[B, H, W, I] -> [a][a] float[B*th*tw, I]."""
  m, window = tiling.m, tiling.window
  pads = []
  for n, t, (lo, _) in zip(window.size, tiling.tiles, window.pads, strict=True):
    pads.append((lo, (t - 1) * m + tiling.side - n - lo, 0))
  padded = lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *pads, (0, 0, 0)))
  return _cut(((padded,),), matrices(m, window.kernel[0])[2], tiling.tiles, m)


def _join_inputs(grid: Grid, tiling: Tiling) -> jax.Array:
  """Adjoint of `_cut_inputs`: overlapping tiles added up."""
  th, tw = tiling.tiles
  batch = grid[0][0].shape[0] // (th * tw)
  x = _join(grid, _overlap(tiling, 1), _overlap(tiling, 2), batch,
            tiling.tiles, 1)[0][0]
  return fit(x, tiling.window.size)


def _join_outputs(grid: Grid, tiling: Tiling) -> Phases:
  """A^T M A of every tile M: [a][a] float[B*th*tw, O] -> phases."""
  th, tw = tiling.tiles
  batch = grid[0][0].shape[0] // (th * tw)
  combine = combine_by(matrices(tiling.m, tiling.window.kernel[0])[0])
  y = _join(grid, combine, combine, batch, tiling.tiles, tiling.fold)
  return jax.tree.map(lambda phase: fit(phase, tiling.phase), y)


def _cut_outputs(g: Phases, tiling: Tiling) -> Grid:
  """Adjoint of `_join_outputs`."""
  height, width = (n * tiling.m // tiling.fold for n in tiling.tiles)
  g = jax.tree.map(lambda phase: fit(phase, (height, width)), g)
  matrix = matrices(tiling.m, tiling.window.kernel[0])[0].T
  return _cut(g, matrix, tiling.tiles, tiling.m)


def fit(x: jax.Array, size: tuple[int, int]) -> jax.Array:
  """Crops or zero-fills the far ends of x [B, h, w, C] to `size`."""
  pads = [(0, n - m, 0) for n, m in zip(size, x.shape[1:3], strict=True)]
  return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *pads, (0, 0, 0)))


def _expand(w: jax.Array, tiling: Tiling) -> Grid:
  """G w G^T: float[r, r, I, O] -> [a][a] of float[I, O]."""
  return _two_sided(
      [[w[i, j] for j in range(w.shape[1])] for i in range(w.shape[0])],
      matrices(tiling.m, w.shape[0])[1])


def _shrink(grid: Grid, tiling: Tiling) -> jax.Array:
  """Adjoint of `_expand`: [a][a] of float[I, O] -> float[r, r, I, O]."""
  matrix = matrices(tiling.m, tiling.window.kernel[0])[1].T
  return jnp.stack([jnp.stack(row) for row in _two_sided(grid, matrix)])


def _two_sided(grid: Sequence[Sequence[jax.Array]], matrix: np.ndarray) -> Grid:
  combine = combine_by(matrix)
  columns = [combine(column) for column in zip(*grid, strict=True)]
  return tuple(tuple(combine(row)) for row in zip(*columns, strict=True))


cut_inputs, _ = custom_vjp.adjoint_pair(_cut_inputs, _join_inputs)
join_outputs, _ = custom_vjp.adjoint_pair(_join_outputs, _cut_outputs)
expand, _ = custom_vjp.adjoint_pair(_expand, _shrink)


# Under jit layers of one shape are traced once.
@functools.partial(jax.jit, static_argnames=('tiling',))
def conv(x: jax.Array, w: jax.Array, tiling: Tiling) -> Phases:
  """Computes a convolution of stride 1 through m x m output tiles.

  The products at the tile positions are separate: one stacked, batched product
  is slower on CPU.

  Args:
    x: float[B, H, W, I].
    w: float[r, r, I, O].
    tiling: of stride 1, an r x r kernel and padding SAME. In float32 the
      relative error is about 1e-6; it grows with m + r. The transformed input,
      kept for the gradient, is (a / m)^2 times the input: 2.25 times for m = 4
      and r = 3, 4 for m = 2.

  Returns:
    The phases of float[B, H', W', O].
  """
  inputs, weights = cut_inputs(x, tiling), expand(w, tiling)
  products = tuple(
      tuple(matmul.product(v, u, PRECISION) for v, u in zip(*rows, strict=True))
      for rows in zip(inputs, weights, strict=True))
  return join_outputs(products, tiling)
