"""PRNG keys whose draws are quick to compile, for tests of laws.

Half of the time in which XLA compiles a small round goes into Threefry: each
draw is a loop of its own. A hash of the counter is a few operations that fuse
with those that use it. For a law that holds whatever is drawn, such draws are
good enough. A test of the bits of a run needs `jax.random.key`.
"""
from __future__ import annotations

import math
from typing import Any

import jax
from jax import lax
from jax.extend import random as extended
import jax.numpy as jnp
import numpy as np

# Odd numbers without a pattern, which also tell the uses of a key apart.
_STEP, _SEED, _SPLIT, _FOLD, _BITS = (np.uint32(x) for x in (
    0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1))


def _mixed(x: jax.Array) -> jax.Array:
  """A bijection of uint32 in which every bit depends on all.

  References:
    Wellons' `lowbias32`, https://github.com/skeeto/hash-prospector.
  """
  for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
    x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
  return x ^ (x >> np.uint32(15))


def _words(key: jax.Array, counts: jax.Array, kind: np.uint32) -> jax.Array:
  """uint32 for each count, from a key uint32[2] and what they are used for."""
  return _mixed(_mixed(counts * _STEP + key[0] + kind) ^ key[1])


def _seeded(seed: jax.Array) -> jax.Array:
  return _mixed(jnp.asarray(seed).astype(jnp.uint32)
                + jnp.stack([_STEP, _SEED]))


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  counts = lax.iota(np.dtype('uint32'), 2 * math.prod(shape))
  return _words(key, counts, _SPLIT).reshape(*shape, 2)


def _folded(key: jax.Array, number: Any) -> jax.Array:
  number = jnp.asarray(number).astype(jnp.uint32)
  return _words(key, 2 * number + jnp.arange(2, dtype=jnp.uint32), _FOLD)


def _bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
  if width == 64:
    high, low = _bits(key, 32, (2, *shape)).astype('uint64')
    return (high << np.uint64(32)) | low
  counts = lax.iota(np.dtype('uint32'), math.prod(shape)).reshape(shape)
  return _words(key, counts, _BITS).astype(f'uint{width}')


_QUICK = extended.define_prng_impl(
    key_shape=(2,), seed=_seeded, split=_split, fold_in=_folded,
    random_bits=_bits, name='quick', tag='quick')


def key(seed: int) -> Any:
  """Makes a key for `jax.random`, as `jax.random.key` does."""
  return jax.random.key(seed, impl=_QUICK)
