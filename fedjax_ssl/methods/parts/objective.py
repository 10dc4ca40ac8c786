"""The sum of a labeled and an unlabeled loss, with the metrics of both.

FixMatch's, on which several methods build, is `fixmatch`.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.core.local_training import Aux, LossFn
from fedjax_ssl.core.types import Batch, Metrics, Number, Task
from fedjax_ssl.data import batching
from fedjax_ssl.data.batching import Pair
from fedjax_ssl.methods.parts import network


def labeled(logits: jax.Array | None, rows: Batch | None
            ) -> jax.Array | None:
  """Computes the usual L_s, cross entropy float32[]; None without labels."""
  if logits is None or rows is None:
    return None
  return losses.cross_entropy(logits, rows.labels, rows.mask)[0]


def total(batch: Pair, unlabeled_loss: jax.Array | None,
          labeled_loss: jax.Array | None, *, labelings: int = 0,
          weight: Number = 1.0, mask_rate: Number = 1.0, views: int = 1,
          labeled_views: int = 1) -> tuple[jax.Array, Metrics]:
  """Computes L_s + weight L_u, or the one for which the batch has rows.

  Args:
    batch: the rows behind the losses.
    unlabeled_loss: float32[], L_u, a mean over unlabeled rows; None if the
      batch has none, as in a server's training.
    labeled_loss: float32[], L_s; None if the batch has no labeled rows, as at
      clients whose labels are at the server.
    labelings: forward passes of an unlabeled row that only label it: 1 where
      guesses for weak views are constants. They are counted in the metrics, as
      are `views` and `labeled_views`.
    weight: of L_u; 0 leaves L_s.
    mask_rate: share of the unlabeled rows that count in L_u.
    views: passes of an unlabeled row that train.
    labeled_views: passes of a labeled row that train.

  Returns:
    float32[], and the metrics 'labeled_loss', 'unlabeled_loss', 'mask_rate'
    as far as there are such rows, and the passes through the network.
  """
  loss, metrics = jnp.float32(0), batching.passes(
      batch, labelings, views, labeled_views)
  rows = batch.unlabeled
  if rows is not None and unlabeled_loss is not None:
    metrics['mask_rate'] = network.over_rows(jnp.float32(mask_rate), rows)
    metrics['unlabeled_loss'] = network.over_rows(unlabeled_loss, rows)
    loss += weight * unlabeled_loss
  rows = batch.labeled
  if rows is not None and labeled_loss is not None:
    metrics['labeled_loss'] = network.over_rows(labeled_loss, rows)
    loss += labeled_loss
  return loss, metrics


def fixmatch(task: Task, threshold: float, weight: float, *,
             over: str = 'batch') -> LossFn:
  """Makes FixMatch's loss, with pseudo-labels of the model in training.

  Args:
    task: the static choices.
    threshold: see `losses.fixmatch`.
    weight: of L_u.
    over: see `losses.fixmatch`.
  """
  def loss_fn(model, given, batch, key):
    del given
    weak, (known, strong), stats = network.forward_views(
        task, model, batch, key)
    loss, used = losses.fixmatch(strong, weak, batch.unlabeled.mask,
                                 threshold=threshold, over=over)
    loss, metrics = total(batch, loss, labeled(known, batch.labeled),
                          labelings=1, weight=weight,
                          mask_rate=used['mask_rate'])
    return loss, Aux(stats, metrics)
  return loss_fn
