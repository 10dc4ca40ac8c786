"""Normalization statistics of all clients' rows and the server's own (sBN).

Diao et al., SemiFL, NeurIPS 2022, https://arxiv.org/abs/2106.01432, whose
networks train with the statistics of each batch and never track them. For
prediction the rows of all clients go through the network once more, not
augmented.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl import aggregation
from fedjax_ssl.core import local_training, rounds, sampling, tree
from fedjax_ssl.core.types import (
  Client,
  Context,
  Examples,
  Metrics,
  PyTree,
  Shard,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import assemble, network

_BATCH = 250  # Rows of a batch, as in the authors' code.
_KINDS = 'labeled', 'unlabeled'


def if_static(task: Task, num_clients: int = 0) -> rounds.Pass | None:
  """Makes the pass of `everywhere` for norm='static', None for others.

  None, and not a pass that is never run: `noting.passes` counts every pass
  that is made.
  """
  if task.model.norm != 'static':
    return None
  return everywhere(task, num_clients)


def everywhere(task: Task, num_clients: int = 0) -> rounds.Pass:
  r"""Makes the pass that recomputes statistics over all clients.

  Each batch b of the rows of a client, or of the server, is normalized by
  itself and has mean :math:`m_b` and variance :math:`v_b` in each layer; the
  model keeps :math:`\frac1B \sum_b m_b` and :math:`\frac1B \sum_b v_b` over all
  B batches. So each client sends its two means and its number of batches. It
  receives the model only, and its memory stays as it is. The variances are
  biased, as everywhere under norm='static'.

  Args:
    task: the static choices.
    num_clients: how many clients are drawn for it; 0 takes all.

  Returns:
    The pass.
  """
  sample = sampling.uniform(num_clients) if num_clients else (
      sampling.everyone())
  return assemble.measuring(rounds.client_pass(
      task, functools.partial(_client_update, task),
      functools.partial(_finish, task), sample=sample,
      broadcast=lambda server, client_id, group: assemble.Server(server.model),
      work=functools.partial(_num_batches, task)))


def of_rows(task: Task, model: Variables, examples: Examples, shard: Shard,
            key: jax.Array) -> tuple[PyTree, jax.Array]:
  """Computes the statistics of each batch of rows, and their mean.

  Labeled and unlabeled rows are in batches of their own, so that each row
  counts once.

  Args:
    task: the static choices.
    model: the network.
    examples: what the shard indexes.
    shard: the rows of a client or of the server.
    key: draws their order.

  Returns:
    The mean minus the model's statistics, and float32[], the number of
    batches; zeros without rows.
  """
  step = network.adding_statistics(task, model)
  sums, count = tree.zeros_like(model.stats), jnp.int32(0)
  for kind, order in zip(_KINDS, jax.random.split(key), strict=True):
    made = batching.batches(_wide(task, shard), examples, shard, order, kind)
    sums, _ = local_training.train(step, sums, made, key)
    count += made.num_steps
  total = count.astype(jnp.float32)
  return tree.scale(sums, 1 / jnp.maximum(total, 1)), total


def _num_batches(task: Task, shard: Shard) -> jax.Array:
  wide = _wide(task, shard)
  labeled, unlabeled = (batching.num_steps(wide, shard, k) for k in _KINDS)
  return labeled + unlabeled


def _wide(task: Task, shard: Shard) -> Task:
  """Returns the task of one pass, in batches of at most `_BATCH` rows."""
  labeled, unlabeled = (min(_BATCH, rows.shape[-1]) for rows in (
      shard.labeled, shard.unlabeled))
  return dataclasses.replace(
      task.one_pass(), labeled_batch=max(labeled, 1),
      unlabeled_batch=max(unlabeled, 1))  # 0 would split them over the labels.


def _client_update(task: Task, payload: Any, client: Client, key: jax.Array
                   ) -> Update:
  change, count = of_rows(task, payload.model, client.train, client.shard, key)
  # Beside a change of no numbers, whose norm may be limited.
  return Update((), count, client.memory, {}, counts=change)


def _finish(task: Task, server: Any, updates: Update, cohort: Any,
            context: Context, key: jax.Array) -> tuple[Any, Metrics]:
  """Averages over all batches, the server's own among them."""
  del cohort
  own, count = of_rows(task, server.model, context.train, context.shard, key)
  stacked = jax.tree.map(
      lambda x, y: jnp.concatenate([x.reshape(-1, *y.shape), y[None]]),
      updates.counts, own)
  change = aggregation.weighted_mean(
      stacked, jnp.append(updates.weight.reshape(-1), count))
  stats = tree.add(server.model.stats, change)
  return server._replace(model=server.model._replace(stats=stats)), {}
