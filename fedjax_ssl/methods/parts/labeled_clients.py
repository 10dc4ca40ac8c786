"""Federations in which only some clients hold labels: who trains, how long.

In the warm-up of RSCFed, FedIRM, Fed-Consist, CBAFed and FedGGp only clients
with labels train; in CBAFed and PDCFed epochs depend on whether a client has
labels.
"""
from __future__ import annotations

import dataclasses
import math

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl.core import checks, local_training, sampling
from fedjax_ssl.core.types import (
  Cohort,
  Federation,
  Metrics,
  Shard,
  State,
  Task,
)
from fedjax_ssl.data import batching


def has_labels(shard: Shard) -> jax.Array:
  """Returns whether a client holds at least one labeled row, bool[...]."""
  return jnp.asarray(shard.num_labeled) > 0


def check_placement(task: Task) -> None:
  """Raises FieldError for labels at the server."""
  checks.labels_at_clients(task.labels_at,
                           'those with labels lead the others')


def warmup_rounds(task: Task, warmup: float, what: str = '') -> int:
  """Computes the rounds of a warm-up over a share of the run, rounded up.

  Args:
    task: says how long the run is.
    warmup: share of the run; 0 is none.
    what: its name in messages; by default that of the knob `warmup`.
  """
  if not warmup:
    return 0
  horizon = task.horizon(what or f'warmup={warmup}')
  return math.ceil(round(warmup * horizon, 6))


def after_warmup(sampler: sampling.Sampler, num_rounds: int
                 ) -> sampling.Sampler:
  """Samples clients with labels in the first rounds, then as `sampler` does.

  Args:
    sampler: draws the cohorts after the warm-up; their shape is kept.
    num_rounds: rounds of the warm-up. In these the first group holds clients
      with labels, drawn at random if there are more of them than slots; all
      other slots are empty.
  """
  if not num_rounds:
    return sampler

  def sample(state: State, federation: Federation, key: jax.Array) -> Cohort:
    cohort = sampler(state, federation, key)
    groups, size = cohort.ids.shape

    def warm() -> Cohort:
      labeled = has_labels(federation.clients)
      draw = jax.random.uniform(jax.random.fold_in(key, 1), labeled.shape)
      _, first = lax.top_k(jnp.where(labeled, -draw, -2.0), size)
      ids = jnp.broadcast_to(first.astype(jnp.int32), (groups, size))
      return Cohort(ids, labeled[ids] & (jnp.arange(groups) == 0)[:, None])

    # Later rounds do not look at every client.
    return lax.cond(state.round < num_rounds, warm, lambda: cohort)
  return sample


def cohorts(task: Task, groups: int, warmup: float) -> sampling.Sampler:
  """Samples groups of `task.cohort_size` clients, after the warm-up."""
  return after_warmup(sampling.groups(groups, task.cohort_size),
                      warmup_rounds(task, warmup))


def check_passes(task: Task, passes: int) -> None:
  """Refuses epochs of clients without labels where all take equal steps.

  Args:
    task: says whether they do.
    passes: as `num_steps` takes it; 1, the default, is always allowed.

  Raises:
    FieldError: for another number beside `local_steps`.
  """
  if task.local_steps and passes != 1:
    checks.refuse_idle(checks.FieldError(
        'local_steps', task.local_steps, 'every client takes so many steps, '
        f'and passes={passes} would do nothing; leave one of them out.'))


def num_steps(task: Task, shard: Shard, passes: int,
              kept: Shard | None = None) -> jax.Array:
  """Counts a client's local steps where its epochs depend on its labels.

  Args:
    task: `local_epochs` are those of a client with labels; `local_steps`, if
      set, are those of every client.
    shard: the client's rows.
    passes: epochs of a client without labels.
    kept: the rows that it trains on; None is all.

  Returns:
    int32[].
  """
  once = dataclasses.replace(task, local_epochs=1)
  steps = batching.num_steps(once, shard if kept is None else kept)
  if task.local_steps:
    return steps
  return steps * jnp.where(has_labels(shard), task.local_epochs, passes)


def processed(task: Task, made: local_training.Batches, shard: Shard
              ) -> Metrics:
  """Computes the metric `rows_processed` of a client's training.

  Steps skip a kind of rows that the client lacks, so its places in the batches
  do not count.

  Args:
    task: unless its clients are mapped one by one, there is no such metric.
    made: the batches that the client trained on.
    shard: the rows behind them.
  """
  if task.client_map != 'map':
    return {}
  unlabeled = task.unlabeled_width
  absent = (jnp.where(shard.num_labeled > 0, 0, task.labeled_batch)
            + jnp.where(shard.num_unlabeled > 0, 0, unlabeled))
  return {'rows_processed': made.num_steps.astype(jnp.float32) * (
      made.width - absent)}
