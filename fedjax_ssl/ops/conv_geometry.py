"""Where the windows of a convolution lie."""
from __future__ import annotations

from typing import NamedTuple


class Window(NamedTuple):
  """The geometry of one convolution; hashable.

  size: (H, W) of the input.
  kernel: (kh, kw).
  stride: step between windows, the same on both axes.
  pads: ((top, bottom), (left, right)) rows and columns of zeros.
  """

  size: tuple[int, int]
  kernel: tuple[int, int]
  stride: int
  pads: tuple[tuple[int, int], tuple[int, int]]

  @property
  def out(self) -> tuple[int, int]:
    """(H', W') of the output."""
    height, width = (
        (n + lo + hi - k) // self.stride + 1
        for n, k, (lo, hi) in zip(
            self.size, self.kernel, self.pads, strict=True))
    return height, width

  @property
  def back_pads(self) -> list[tuple[int, int]]:
    """Zeros around a gradient that is spread by the stride: its `pads`."""
    return [(k - 1 - lo, n + lo - 1 - (m - 1) * self.stride)
            for n, m, k, (lo, _) in zip(
                self.size, self.out, self.kernel, self.pads, strict=True)]

  @property
  def paired(self) -> Window:
    """The window of 2x2 neighboring outputs together; needs stride 1.

    An odd last row or column of the outputs is dropped.
    """
    height, width = self.kernel
    return Window(self.size, (height + 1, width + 1), 2, self.pads)


def window(size: tuple[int, int], kernel: tuple[int, int], stride: int,
           padding: str) -> Window:
  """Returns the window for padding 'SAME' (H' = ceil(H / stride)) or 'VALID'.

  Raises:
    ValueError: if a VALID kernel is larger than the input.
  """
  if padding == 'VALID':
    if size[0] < kernel[0] or size[1] < kernel[1]:
      raise ValueError(f'input is {size[0]}x{size[1]}, smaller than the kernel '
                       f'{kernel[0]}x{kernel[1]}; padding VALID needs at least '
                       'the kernel size.')
    return Window(size, kernel, stride, ((0, 0), (0, 0)))
  rows, columns = (
      _same(n, k, stride) for n, k in zip(size, kernel, strict=True))
  return Window(size, kernel, stride, (rows, columns))


def _same(length: int, kernel: int, stride: int) -> tuple[int, int]:
  out = -(-length // stride)
  total = max((out - 1) * stride + kernel - length, 0)
  return total // 2, total - total // 2
