"""Steps, rows and memory of a round, without training."""
from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_ssl as fssl
from fedjax_ssl.core import client_map
from fedjax_ssl.data import batching
from fedjax_ssl.training import runner


class Work(NamedTuple):
  """What every client does in a round.

  steps: int64[N].
  used: float64[N], real rows.
  width: rows of one step.
  """

  steps: np.ndarray
  used: np.ndarray
  width: int


def count(task: fssl.Task, federation: fssl.Federation,
          streams: str = 'both') -> Work:
  """Steps and rows of every client, by dealing its batches of one round."""
  width = 0
  def one(shard):
    nonlocal width
    made = batching.batches(
        task, federation.train, shard, jax.random.key(0), streams)
    width = made.width
    def step(i, carry):
      cursor, used = carry
      cursor, _, rows = made.next(cursor, i)
      return cursor, used + rows
    _, used = jax.lax.fori_loop(
        0, made.num_steps, step, (made.start(), jnp.float32(0)))
    return made.num_steps, used
  clients = jax.tree.map(jnp.asarray, federation.clients)
  steps, used = jax.jit(lambda x: jax.lax.map(one, x))(clients)
  return Work(np.asarray(steps, np.int64), np.asarray(used, float), width)


def masked_share(task: fssl.Task, work: Work, cohorts: np.ndarray, *,
                 ordered: bool = True) -> float:
  """Mean masked share of cohorts int[R, S], the longest clients first or not.

  A cohort without any rows is left out.
  """
  plan = client_map.plan(task, cohorts.shape[1])
  processed_by = jax.jit(plan.processed)
  shares = []
  for ids in cohorts:
    if ordered:
      ids = ids[np.lexsort((ids, -work.steps[ids]))]
    rows = (work.steps[ids] * work.width).astype(np.float32)
    processed = float(processed_by(rows))
    if processed:
      shares.append(1 - work.used[ids].sum() / processed)
  return float(np.mean(shares))


def bound(work: Work, cohorts: np.ndarray, lanes: int) -> float:
  """Mean masked share that no schedule of `lanes` lanes can undercut."""
  shares = []
  for ids in cohorts:
    steps = work.steps[ids]
    busy = max(steps.max(), steps.sum() / min(lanes, ids.size))
    if busy:
      shares.append(1 - work.used[ids].sum() / (
          min(lanes, ids.size) * busy * work.width))
  return float(np.mean(shares))


def round_memory(spec: fssl.TaskSpec, federation: fssl.Federation
                 ) -> dict[str, int]:
  """Bytes of one compiled round: arguments, results, temporaries."""
  method = fssl.make_method(spec.method, fssl.make_task(spec))
  state = jax.eval_shape(method.init, jax.random.key(0), federation)
  totals = runner.totals_shape(method, federation, state)
  def rounds(*args):
    return runner.stretch(method, *args)
  compiled = jax.jit(rounds, donate_argnums=(0, 1)).lower(
      state, totals, federation, jnp.int32(0), jnp.int32(1),
      jax.random.key(0)).compile()
  sizes: Any = compiled.memory_analysis()
  return {'arguments': sizes.argument_size_in_bytes,
          'results': sizes.output_size_in_bytes,
          'temporaries': sizes.temp_size_in_bytes}
