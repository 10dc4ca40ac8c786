"""Sparse messages: what is sent, what arrives, and how many numbers that is.

Counts are numbers sent; where they stand in the tree is not counted, as in
FedMatch's tables. Jeong et al., https://arxiv.org/abs/2006.12097.
"""
from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
Array = jax.Array | np.ndarray
Scalar = Array | float


def size(tree: PyTree) -> int:
  """Counts the numbers in a dense tree."""
  return sum(math.prod(jnp.shape(x)) for x in jax.tree.leaves(tree))


def _total(tree: PyTree) -> jax.Array:
  """float32[]: how many entries of a tree of bool are True."""
  counts = [jnp.sum(x, dtype=jnp.int32).astype(jnp.float32)
            for x in jax.tree.leaves(tree)]
  return sum(counts, jnp.zeros((), jnp.float32))


def num_nonzero(tree: PyTree) -> jax.Array:
  """Counts the entries that are not 0, float32[]; exact up to 2**24."""
  return _total(jax.tree.map(lambda x: x != 0, tree))


def cut(tree: PyTree, threshold: Scalar) -> PyTree:
  r"""Sets entries with :math:`|x| \le` threshold to 0.

  Args:
    tree: pytree of float arrays.
    threshold: at least 0; 0 changes nothing, infinity leaves only zeros.

  Returns:
    The same pytree; an entry that is not finite stays, so that it is noticed.
  """
  return jax.tree.map(
      lambda x: jnp.where(jnp.abs(x) <= threshold, 0, x), tree)


def keep_largest(tree: PyTree, density: float) -> PyTree:
  """Keeps the share `density` of the entries that are largest in size.

  Args:
    tree: pytree of float arrays.
    density: in [0, 1]; 1 changes nothing, 0 leaves zeros. Entries as large as
      the smallest one kept are kept too.

  Returns:
    The same pytree with all other entries 0. Entries that are not finite stay,
    so that they are noticed, and count as the largest.

  Raises:
    ValueError: for a share outside [0, 1].
  """
  if not 0 <= density <= 1:
    raise ValueError(f'density is {density}; allowed is 0 to 1.')
  total = size(tree)
  kept = round(density * total)
  if kept == total:
    return tree
  if kept == 0:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
  sizes = jnp.concatenate(
      [jnp.abs(x).ravel() for x in jax.tree.leaves(tree)])
  least = jnp.sort(jnp.where(jnp.isfinite(sizes), sizes, jnp.inf))[total - kept]
  def largest(x: jax.Array) -> jax.Array:
    return jnp.where((jnp.abs(x) >= least) | ~jnp.isfinite(x), x, 0)
  return jax.tree.map(largest, tree)


def receive(held: PyTree, sent: PyTree, *, threshold: Scalar
            ) -> tuple[PyTree, jax.Array]:
  r"""Sends only the entries that moved: :math:`|new - old| >` threshold.

  Args:
    held: what the receiver holds, pytree of float arrays.
    sent: what the sender has, of the same structure.
    threshold: at least 0; 0 leaves out only equal entries, infinity all but
      NaN.

  Returns:
    What the receiver holds afterwards, with its old entries where nothing was
    sent, and how many numbers were sent, float32[]. Under a finite threshold an
    entry that is not finite is sent.
  """
  moved = jax.tree.map(
      lambda old, new: ~(jnp.abs(new - old) <= threshold), held, sent)
  return jax.tree.map(jnp.where, moved, sent, held), _total(moved)
