"""A client's weight: how much its update counts in the mean."""
from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_ssl.core import checks
from fedjax_ssl.core.types import Number, Shard

WEIGHTINGS = ('examples', 'uniform')


def check(weighting: str, labeled_say: float) -> None:
  """Raises ValueError, naming the knob, for what `of` cannot weigh."""
  checks.check('weighting', weighting, WEIGHTINGS)
  checks.positive(labeled_say=labeled_say)


def rows_used(shard: Shard, streams: str) -> jax.Array:
  """int32[]: rows of a client in the streams that its loss uses."""
  labeled = jnp.where(streams == 'unlabeled', 0, shard.num_labeled)
  unlabeled = jnp.where(streams == 'labeled', 0, shard.num_unlabeled)
  return labeled + unlabeled


def of(shard: Shard, streams: str, *, weighting: str = 'uniform',
       labeled_say: Number = 1.0) -> jax.Array:
  """A client's weight.

  Args:
    shard: its rows.
    streams: 'both', 'labeled' or 'unlabeled', what its loss uses.
    weighting: clients count by their 'examples' used, or 'uniform'.
    labeled_say: a client that holds labels counts so many times what it would
      without; 1 is no difference. With N_Q clients without labels to N_S with
      some, N_Q / N_S makes both groups equal, FedSSL's equation 1.

  Returns:
    float32[]; 0 for a client without such rows.
  """
  rows = rows_used(shard, streams)
  count = rows if weighting == 'examples' else rows > 0
  factor = jnp.where(shard.num_labeled > 0, labeled_say, 1.0)
  return (factor * count).astype(jnp.float32)
