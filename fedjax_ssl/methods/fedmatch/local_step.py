"""FedMatch's two losses and its local step, on theta = sigma + psi.

sigma learns from labels and psi from unlabeled rows; each loss treats the
other's part as a constant, unless the learner is undivided. Jeong et al.,
https://arxiv.org/abs/2006.12097.
"""
from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import optax

from fedjax_ssl import losses, sparse
from fedjax_ssl.core import tree
from fedjax_ssl.core.local_training import descend
from fedjax_ssl.core.types import Batch, Metrics, PyTree, Task, Variables
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import network

# Predicts with every helper: raw inputs [B, ...] -> logits float32[H, B, C].
Panel = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Weights:
  """Settings of the losses; `fedmatch.fedmatch` explains the fields."""

  num_helpers: int = 2
  threshold: float = 0.75
  tie: str = 'lowest'
  over: str = 'batch'
  over_helpers: str = 'sum'
  labeled: float = 10.0
  agreement: float = 1.0
  consistency: float = 1.0
  l2: float = 0.01
  l1: float = 0.0
  l2_reduction: str = 'mean'


class Learner(NamedTuple):
  """What the local loop carries."""

  sigma: PyTree
  psi: PyTree
  stats: PyTree
  sigma_opt: PyTree
  psi_opt: PyTree


def whole(sigma: PyTree, psi: PyTree, stats: PyTree) -> Variables:
  """Returns the model theta = sigma + psi."""
  return Variables(tree.add(sigma, psi), stats)


def labeled_loss(task: Task, sigma: PyTree, psi: PyTree, stats: PyTree,
                 batch: Batch, key: jax.Array, *, weight: float = 10.0
                 ) -> tuple[jax.Array, tuple[PyTree, Metrics]]:
  r"""Computes equation 5, :math:`\lambda_s CE(y, p_{\sigma + \psi^*}(x))`.

  Args:
    task: has the network and the labeled view.
    sigma: what learns.
    psi: a constant for derivatives.
    stats: normalization statistics.
    batch: labeled rows.
    key: draws the view and dropout.
    weight: lambda_s.

  Returns:
    float32[], the statistics after the batch and metrics.
  """
  model = whole(sigma, lax.stop_gradient(psi), stats)
  loss, stats = network.on_labels(task, model, batch, key)
  return weight * loss, (stats, {
      'labeled_loss': network.over_rows(loss, batch)
  })


def penalty(sigma: PyTree, psi: PyTree, weights: Weights) -> jax.Array:
  r"""Computes the terms that make psi small and sparse, float32[].

  :math:`\lambda_{L2} \|\sigma^* - \psi\|^2 + \lambda_{L1} \|\psi\|_1`. Both are
  sums over all numbers of psi; the first is their mean if
  `weights.l2_reduction` is 'mean'.
  """
  terms = jnp.float32(0)
  if weights.l2:
    distance = losses.squared_distance(lax.stop_gradient(sigma), psi)
    if weights.l2_reduction == 'mean':
      distance /= sparse.size(psi)
    terms += weights.l2 * distance
  if weights.l1:
    terms += weights.l1 * losses.l1_norm(psi)
  return terms


def unlabeled_loss(task: Task, sigma: PyTree, psi: PyTree, stats: PyTree,
                   batch: Batch, key: jax.Array, *, weights: Weights,
                   panel: Panel | None = None,
                   present: jax.Array | None = None
                   ) -> tuple[jax.Array, tuple[PyTree, Metrics]]:
  r"""Computes equation 6: agreement, inter-client consistency, L2 and L1.

  :math:`\lambda_a CE(\hat y, p(A_s(u))) + \lambda_i \sum_j KL[p_{h_j}(u) \|
  p(u)]` over rows of which the client's own model is confident, plus `penalty`
  if the batch has any row. The own model and the helpers vote on the weak view
  u for the label.

  Args:
    task: has the network and the views.
    sigma: a constant for derivatives.
    psi: what learns.
    stats: normalization statistics.
    batch: unlabeled rows.
    key: draws the views and dropout.
    weights: of the terms.
    panel: predicts with the helpers; None has no helpers.
    present: float32[H], 0 for an empty place, which neither votes nor teaches.

  Returns:
    float32[], the statistics after the batch and metrics: `mask_rate`, and
    `outvoted`, the share of confident rows whose label is not the own model's.
  """
  weak_key, strong_key = jax.random.split(key)
  model = whole(lax.stop_gradient(sigma), psi, stats)
  weak = network.weakly(task, batch, weak_key)
  strong = network.strongly(task, batch, strong_key)
  if panel is None or not weights.consistency:
    own, (logits,), stats = network.forward_with_targets(
        task, model, weak, strong, key=key)
  else:  # The weak view learns from the helpers too.
    (own, logits), stats = network.forward(task, model, weak, strong, key=key)
  advice = (jnp.zeros((0, *own.shape)) if panel is None
            else lax.stop_gradient(panel(weak.inputs)))
  labels, accepted = losses.agreement_vote(
      own, advice, threshold=weights.threshold, tie=weights.tie,
      present=present)
  chosen = batch.mask * accepted
  total = batch.mask.sum() if weights.over == 'batch' else None
  loss = weights.agreement * losses.cross_entropy(
      logits, labels, chosen, total=total)[0]
  if panel is not None and weights.consistency:
    if present is not None:  # An empty place agrees, so that it adds no loss.
      advice = jnp.where(present[:, None, None] > 0, advice,
                         lax.stop_gradient(own))
    gap = losses.inter_client_kl(own, advice, chosen, total=total)[0]
    if weights.over_helpers == 'mean':
      count = len(advice) if present is None else present.sum()
      gap /= jnp.maximum(count, 1)
    loss += weights.consistency * gap
  metrics = {
      'mask_rate':
          network.over_rows(losses.masked_mean(accepted, batch.mask), batch),
      'unlabeled_loss':
          network.over_rows(loss, batch),
      'outvoted':
          network.over_rows(
              losses.masked_mean((labels != own.argmax(-1)).astype(jnp.float32),
                                 chosen), batch._replace(mask=chosen))
  }
  any_row = (batch.mask.sum() > 0).astype(jnp.float32)
  return loss + any_row * penalty(sigma, psi, weights), (stats, metrics)


def start(sigma: PyTree, psi: PyTree, stats: PyTree,
          optimizer: optax.GradientTransformation) -> Learner:
  """Makes a learner with fresh optimizers, one for each part."""
  return Learner(sigma, psi, stats, optimizer.init(sigma), optimizer.init(psi))


def _move(loss_fn: Callable[..., Any], part: PyTree, opt_state: PyTree,
          optimizer: optax.GradientTransformation, factor: jax.Array,
          *rows: Batch) -> Any:
  """Does a step of one part: (part, opt_state, loss, stats, metrics).

  Without `rows` to learn from the part rests, and its optimizer too.
  """
  (loss, (stats, metrics)), grads = jax.value_and_grad(
      loss_fn, has_aux=True)(part)
  count = sum((batch.mask.sum() for batch in rows), jnp.float32(0))
  return (*descend(optimizer, grads, opt_state, part, factor, moves=count > 0),
          loss, stats, metrics)


def step(task: Task, learner: Learner, batch: Any, key: jax.Array, *,
         optimizer: optax.GradientTransformation, weights: Weights,
         factor: jax.Array | float = 1.0, panel: Panel | None = None,
         present: jax.Array | None = None, undivided: bool = False
         ) -> tuple[Learner, Metrics]:
  """Does a step on sigma with labeled rows, then one on psi with the others.

  A part that has no rows of its kind in the batch rests, and its optimizer
  too. An undivided learner takes one step on psi with both losses.

  Args:
    task: see `labeled_loss`.
    learner: before.
    batch: `data.batching.Pair`; a part whose stream is None stays as it is.
    key: draws the views.
    optimizer: of both parts.
    weights: of the losses.
    factor: on both steps, beside the optimizer's own rate.
    panel: see `unlabeled_loss`.
    present: see `unlabeled_loss`.
    undivided: whether psi learns from the labels too; needs both parts of the
      batch.

  Returns:
    The learner and metrics; `train_loss` is the sum of both losses.
  """
  labeled_key, unlabeled_key = jax.random.split(key)
  helpers = 0 if present is None else present.sum()
  # The weak view, which is labeled, learns from helpers too.
  views = 2 if panel is not None and weights.consistency else 1
  metrics: Metrics = {'train_loss': jnp.float32(0),
                      **batching.passes(batch, 2 - views + helpers, views)}

  def known(part, other, stats):
    return labeled_loss(task, part, other, stats, batch.labeled, labeled_key,
                        weight=weights.labeled)

  def unknown(psi, stats):
    return unlabeled_loss(task, learner.sigma, psi, stats, batch.unlabeled,
                          unlabeled_key, weights=weights, panel=panel,
                          present=present)

  if undivided:
    def on_both(psi):
      loss, (stats, more) = known(psi, learner.sigma, learner.stats)
      other, (stats, others) = unknown(psi, stats)
      return loss + other, (stats, more | others)
    psi, opt, loss, stats, more = _move(
        on_both, learner.psi, learner.psi_opt, optimizer, jnp.asarray(factor),
        batch.labeled, batch.unlabeled)
    return (learner._replace(psi=psi, psi_opt=opt, stats=stats),
            metrics | more | {'train_loss': loss})
  if batch.labeled is not None:
    def on_sigma(sigma):
      return known(sigma, learner.psi, learner.stats)
    sigma, opt, loss, stats, more = _move(
        on_sigma, learner.sigma, learner.sigma_opt, optimizer,
        jnp.asarray(factor), batch.labeled)
    learner = learner._replace(sigma=sigma, sigma_opt=opt, stats=stats)
    metrics |= {**more, 'train_loss': metrics['train_loss'] + loss}
  if batch.unlabeled is not None:
    def on_psi(psi):
      return unknown(psi, learner.stats)
    psi, opt, loss, stats, more = _move(
        on_psi, learner.psi, learner.psi_opt, optimizer, jnp.asarray(factor),
        batch.unlabeled)
    learner = learner._replace(psi=psi, psi_opt=opt, stats=stats)
    metrics |= {**more, 'train_loss': metrics['train_loss'] + loss}
  return learner, metrics
