"""From stored rows to what a network reads."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np


def as_floats(inputs: jax.Array) -> jax.Array:
  """Converts texts for the network: vectors to float32; token ids stay."""
  if jnp.issubdtype(inputs.dtype, jnp.floating):
    return inputs.astype(jnp.float32)
  return inputs


def preprocessor(mean: Sequence[float], std: Sequence[float], *,
                 channels: int | None = None, side: int | None = None
                 ) -> Callable[[jax.Array], jax.Array]:
  """Scales, pads with black, normalizes and repeats gray channels.

  Args:
    mean: of each channel, in units of the full range 0..1.
    std: the same.
    channels: how many the network needs; gray images are repeated. None keeps
      those of the images.
    side: smallest height and width the network takes; smaller images get a
      black border. None keeps the size.

  Returns:
    uint8[B, H, W, C] -> float32[B, H', W', C'].

  Raises:
    ValueError: if images have neither one channel nor as many as the network
      takes, or other channels than `mean` and `std`; at trace time.
  """
  shift = np.asarray(mean, np.float32)
  deviation = np.asarray(std, np.float32)

  def preprocess(inputs: jax.Array) -> jax.Array:
    have = inputs.shape[-1]
    if not {shift.size, deviation.size} <= {1, have}:
      raise ValueError(f'mean and std have {shift.size} and {deviation.size} '
                       f'numbers; allowed is 1 or {have}, one a channel.')
    x = inputs.astype(jnp.float32) / 255
    if side is not None:
      gaps = [max(side - s, 0) for s in inputs.shape[1:3]]
      if any(gaps):
        x = jnp.pad(x, ((0, 0), *[(g // 2, g - g // 2) for g in gaps], (0, 0)))
    x = (x - shift) / deviation
    if channels is not None and have != channels:
      if have != 1:
        raise ValueError(f'The model takes {channels} channels, the images '
                         f'have {have}.')
      x = jnp.repeat(x, channels, axis=-1)
    return x

  return preprocess
