"""A client's weight: how much its update counts in the mean of all updates.

Most methods call `client_weight` and put the result into `Update.weight`.
Others have a rule of their own: `cbafed`, and `fedlabel` for what its unlabeled
rows teach, count the rows that a client has learnt from, in `semifl` and
`fedtrinet` all clients that take part count the same, `fl2` weighs clients by
their thresholds, and the servers of `feddb`, `fedmatch` and `rscfed` weigh the
updates once more.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_ssl.core import checks, knobs, tree
from fedjax_ssl.core.types import Number, PyTree, Shard, STREAMS, Task

WEIGHTINGS = knobs.WORDS['weighting'].words


def rows_held(shard: Shard, streams: str) -> jax.Array:
  """Counts a client's rows in the streams that its loss uses, int32[].

  Raises:
    ValueError: for another word than those of `STREAMS`.
  """
  checks.check('streams', streams, STREAMS)
  labeled = 0 if streams == 'unlabeled' else shard.num_labeled
  unlabeled = 0 if streams == 'labeled' else shard.num_unlabeled
  return jnp.asarray(labeled + unlabeled)


def client_weight(shard: Shard, streams: str, *, weighting: str,
                  labeled_client_weight: Number = 1.0) -> jax.Array:
  """Computes how much a client counts in the mean.

  Args:
    shard: its rows.
    streams: 'both', 'labeled' or 'unlabeled', the rows that its loss uses.
    weighting: 'examples' counts a client by the rows that its loss uses;
      'uniform' counts all clients that have such rows the same.
    labeled_client_weight: factor on the weight of a client that holds labels;
      1 is no difference. With N_S such clients and N_Q others, N_Q / N_S makes
      both groups count the same, FedSSL's equation 1.

  Returns:
    float32[]; 0 for a client without such rows.

  Raises:
    ValueError: for other words.
  """
  checks.check('weighting', weighting, WEIGHTINGS)
  rows = rows_held(shard, streams)
  count = rows if weighting == 'examples' else rows > 0
  factor = jnp.where(shard.num_labeled > 0, labeled_client_weight, 1.0)
  return (factor * count).astype(jnp.float32)


def unweighted(counts: PyTree, weight: jax.Array) -> PyTree:
  """Divides what a client counts by its weight; zeros for a weight of 0.

  In the weighted mean of all clients the counts then are in proportion to
  their plain sum.

  Args:
    counts: pytree of floats.
    weight: float32[], of the client's update.

  Returns:
    The pytree.
  """
  return tree.scale(
      counts, jnp.where(weight > 0, 1 / jnp.where(weight > 0, weight, 1), 0))


def check_factor(task: Task, labeled_client_weight: float) -> None:
  """Refuses a weight of clients with labels where no client has any.

  Args:
    task: says where the labels are.
    labeled_client_weight: as `client_weight` takes it; 1 is always allowed.

  Raises:
    FieldError: for another number with labels at the server.
  """
  if task.labels_at == 'server' and labeled_client_weight != 1:
    checks.refuse_idle(checks.FieldError(
        'labels_at', 'server', 'no client has labels then, and '
        f'labeled_client_weight={labeled_client_weight:g} would do nothing; '
        'leave it at 1, or give clients.'))
