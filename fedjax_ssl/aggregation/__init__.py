"""Rules that turn the updates of K clients into one: pure and differentiable.

Every rule takes a pytree whose leaves have a leading axis of K rows, one per
client, and raises a ValueError that names the leaf if one has not. Sums run in
float32 and each leaf keeps its dtype; integer leaves (some normalization layers
count) are averaged and rounded to the nearest integer, exact up to 2**24. Empty
subtrees and leaves without elements pass through.

Weights are finite, not negative, and of a sum below 1e37. If all are zero the
mean is zero, so average updates rather than models: a round without
participants then changes nothing. A row of weight zero may hold NaN or
infinity. What a rule makes of a weight that is NaN, infinite or negative is its
own affair: use `finite_or_zero` first, and the row is as absent by every rule.
Of no rows at all, K = 0, a mean is zero; the robust rules raise ValueError.
A client's weight comes from `core.client_weights`.

A number of the host that is out of its range raises ValueError. One that JAX
holds, as under `jax.jit`, is not read.

Inside `jax.shard_map` or `jax.pmap`, where each device holds the rows of some
clients, give the means `axis_name`, the mesh axis over which the clients are
spread: the devices then exchange sums, and each gets the mean over all clients.
`sub_consensus_mean`, whose groups are indices of rows, has none.
"""
from __future__ import annotations

from fedjax_ssl.aggregation.means import (
  distance_reweighted_mean,
  DISTANCES,
  ema,
  finite_or_zero,
  linear,
  reliability_weighted_mean,
  sample_sub_consensus,
  sub_consensus_mean,
  weighted_mean,
)
from fedjax_ssl.aggregation.robust import (
  geometric_median,
  krum,
  median,
  multi_krum,
  norm_clipped,
  num_hostile,
  trimmed_mean,
)

__all__ = [
    'DISTANCES', 'distance_reweighted_mean', 'ema', 'finite_or_zero',
    'geometric_median', 'krum', 'linear', 'median', 'multi_krum',
    'norm_clipped', 'num_hostile', 'reliability_weighted_mean',
    'sample_sub_consensus', 'sub_consensus_mean', 'trimmed_mean',
    'weighted_mean']
