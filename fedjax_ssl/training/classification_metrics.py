"""Scores that weigh all classes the same: precision, recall, area under ROC.

D rows, C classes. All are exact counts or means of a fixed order, so the same
logits give the same bits.
"""
from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl.core.types import Array


def precision_recall(predicted: Array, labels: Array, num_classes: int
                     ) -> tuple[jax.Array, jax.Array]:
  r"""Computes macro precision and recall: means of TP/(TP+FP), of TP/(TP+FN).

  Args:
    predicted: int32[D].
    labels: int32[D].
    num_classes: C.

  Returns:
    Two float32[] in [0, 1], means over the classes that occur among labels or
    predictions; one that is never predicted has precision 0, one without
    examples recall 0. NaN without rows.
  """
  guess, truth = (jax.nn.one_hot(x, num_classes) for x in (predicted, labels))
  hits = (guess * truth).sum(0)
  said, real = guess.sum(0), truth.sum(0)
  occurs = ((said + real) > 0).sum()
  precision, recall = ((hits / jnp.maximum(total, 1)).sum() / occurs
                       for total in (said, real))
  return precision, recall


def largest_shares(predicted: Array, labels: Array, num_classes: int
                   ) -> tuple[jax.Array, jax.Array]:
  """Computes the shares of the most predicted class and of the largest class.

  Args:
    predicted: int32[D].
    labels: int32[D].
    num_classes: C.

  Returns:
    Two float32[] in [1 / C, 1]. The first is 1 for a model that predicts one
    class for everything; the second is the accuracy of the best such model. NaN
    without rows.
  """
  said, real = (jax.nn.one_hot(x, num_classes).sum(0).max() / x.shape[0]
                for x in (predicted, jnp.asarray(labels)))
  return said, real


def _area(score: jax.Array, positive: jax.Array) -> jax.Array:
  """float32[]: chance that a positive outranks a negative, ties a half."""
  score, positive = lax.sort((score, positive), num_keys=1)
  place = jnp.arange(score.shape[0])
  changes = score[1:] != score[:-1]
  edge = jnp.ones(1, bool)
  first = lax.cummax(jnp.where(jnp.concatenate([edge, changes]), place, 0))
  last = lax.cummin(jnp.where(jnp.concatenate([changes, edge]), place,
                              score.shape[0]), reverse=True)
  # Means of ranks and not sums, which would not fit into a float32.
  rank = (first + last).astype(jnp.float32) / 2 + 1
  count = positive.sum(dtype=jnp.float32)
  mean = (rank * (positive / jnp.maximum(count, 1))).sum()
  return (mean - (count + 1) / 2) / (score.shape[0] - count)


def one_vs_rest_auc(scores: Array, labels: Array) -> jax.Array:
  """Computes the mean area under the ROC curves of each class against the rest.

  Args:
    scores: float[D, C], larger for likelier; probabilities, since logits of
      different rows do not compare.
    labels: int32[D].

  Returns:
    float32[] in [0, 1], the mean over classes that have both examples and
    others; .5 is chance. NaN if there is no such class.
  """
  truth = jax.nn.one_hot(labels, scores.shape[-1], dtype=jnp.int32)
  # Class by class: all sorts at once would hold C copies of everything.
  areas = lax.map(lambda pair: _area(*pair), (jnp.asarray(scores).T, truth.T))
  real = truth.sum(0)
  valid = (real > 0) & (real < labels.shape[0])
  return jnp.where(valid, areas, 0).sum() / valid.sum()
