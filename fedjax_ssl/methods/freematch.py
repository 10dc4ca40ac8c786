r"""FreeMatch at the clients: thresholds that follow how sure the model is.

Wang et al., FreeMatch, ICLR 2023, https://arxiv.org/abs/2205.07246. The
authors' code is in TorchSSL/TorchSSL, and in USB, which is
microsoft/Semi-supervised-learning. Both evaluate a moving average of the
weights; here it is the global model.

Let q be the predictions for the weak views of a batch. Every step moves, by
decay :math:`\lambda`,

  :math:`\tau \to mean_b \max_c q_b(c)`, :math:`\tilde p \to mean_b\, q_b`,
  :math:`\tilde h \to hist_b(\arg\max_c q_b(c))`,

which all start at 1/C. Then, as FixMatch does, it learns the rows with
:math:`\max_c q_b(c) \ge \tau\, \tilde p_c / \max_v \tilde p_v` at their
likeliest class c. The fairness term `losses.fairness` is added.
"""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.core import checks, knobs
from fedjax_ssl.core.local_training import Aux
from fedjax_ssl.core.types import Federation, Method, Task
from fedjax_ssl.losses import moving
from fedjax_ssl.methods.parts import (
  assemble,
  averaging,
  network,
  objective,
)


class Seen(NamedTuple):
  """Averages of what a client's models have predicted."""

  confidence: jax.Array  # float32[], tau.
  shares: jax.Array  # float32[C], p.
  histogram: jax.Array  # float32[C], h.


def updated_averages(seen: Seen, logits: jax.Array, mask: jax.Array, *,
                     decay: float) -> Seen:
  """Moves the averages by a batch of weak views.

  Args:
    seen: before.
    logits: float[B, C].
    mask: float32[B].
    decay: 0 is the batch, 1 stays.

  Returns:
    The averages; as they were if the batch has no row.
  """
  p = jax.nn.softmax(logits)
  labels = jax.nn.one_hot(p.argmax(-1), p.shape[-1], dtype=p.dtype)
  news = Seen(*(moving.row_mean(x, mask) for x in (p.max(-1), p, labels)))
  return Seen(*(moving.moved(old, new, mask, decay=decay)
                for old, new in zip(seen, news, strict=True)))


@knobs.checked(
    decay=knobs.AVERAGE, min_threshold=knobs.share(),
    bounded=knobs.word('tau', 'classes'),
    fairness_weight=knobs.weight('the fairness term'))
def freematch(task: Task, *, decay: float = 0.999,
              min_threshold: float = 0.0, max_threshold: float = 1.0,
              bounded: str = 'tau', fairness_weight: float = 0.001,
              unlabeled_weight: float = 1.0, server: str = 'fedavg',
              mu: float = 0.01, weighting: str = 'examples',
              labeled_client_weight: float = 1.0,
              keep_local: bool = False) -> Method:
  """Runs FixMatch with thresholds by the confidence, and a fairness term.

  The averages describe a client's own rows and stay on it from round to round,
  as FlexMatch's memory does, also with labels at the server: with the published
  decay one round would hardly move them. Nothing more is sent. A batch without
  unlabeled rows moves nothing.

  XLA may compile the gradient of the fairness term differently on one device
  and on several: from the first round with rows that are sure enough on,
  weights there may differ in the last bits.

  Args:
    task: the static choices.
    decay: of the averages. With the default they take thousands of steps to
      settle, more than short runs have. 1 leaves every threshold at 1/C, so
      that every row counts, or at `min_threshold`; 0 is the batch alone.
    min_threshold: smallest threshold; 0 is no bound. For SVHN TorchSSL's is
      0.9, after a warm-up on labels alone that is not here; USB has none.
    max_threshold: largest threshold; 1 is no bound. For SVHN it is 0.95.
    bounded: these are bounds of 'tau', as in USB, so that a rare class may have
      less than the smallest; or of the 'classes', as in TorchSSL, where tau
      moves as it would without.
    fairness_weight: of the fairness term; 0 leaves it out. The default is that
      of USB's scripts; those of TorchSSL have 0.01.
    unlabeled_weight: lambda_u; 0 without the fairness term leaves the
      supervised part.
    server: 'fedavg' or 'fedprox', or 'local' without communication.
    mu: weight of FedProx's term; ignored by the others.
    weighting: 'examples' counts labeled and unlabeled rows; or 'uniform'.
    labeled_client_weight: factor on the weight of a client that holds labels;
      1 is no difference.
    keep_local: keep each client's last model, to report local accuracy.

  Returns:
    The method. The metric `bar` is tau, whatever is bounded, and
    `fairness_loss` the term that is meant to spread the predictions, both means
    over rows.

  Raises:
    ValueError: for an unknown choice or a number out of range.
  """
  if min_threshold > max_threshold:
    raise checks.FieldError(
        'min_threshold', min_threshold,
        f'must be at most max_threshold, {max_threshold}.')

  def clipped(values: jax.Array, what: str) -> jax.Array:
    return (jnp.clip(values, min_threshold, max_threshold)
            if bounded == what else values)

  def remember(federation: Federation) -> Seen:
    size = task.num_classes
    equal = jnp.ones((federation.num_clients, size)) / size
    return Seen(clipped(equal[:, 0], 'tau'), equal, equal)

  def thresholds(seen: Seen) -> jax.Array:
    return clipped(losses.freematch_thresholds(seen.confidence, seen.shares),
                   'classes')

  def loss_fn(model, given, batch, key):
    rows = batch.unlabeled
    weak, (labeled, strong), stats = network.forward_views(
        task, model, batch, key)
    seen = updated_averages(given.memory, weak, rows.mask, decay=decay)
    seen = seen._replace(confidence=clipped(seen.confidence, 'tau'))
    bars = thresholds(seen)
    loss, used = losses.fixmatch(strong, weak, rows.mask, threshold=bars)
    loss, metrics = objective.total(
        batch, loss, objective.labeled(labeled, batch.labeled), labelings=1,
        weight=unlabeled_weight, mask_rate=used['mask_rate'])
    metrics['bar'] = network.over_rows(seen.confidence, rows)
    if fairness_weight:
      _, sure = losses.pseudo_label(weak, threshold=bars)
      fairness, _ = losses.fairness(
          strong, seen.shares, rows.mask * sure, histogram=seen.histogram)
      loss += fairness_weight * fairness
      metrics['fairness_loss'] = network.over_rows(fairness, rows)
    return loss, Aux(stats, metrics, seen)

  return averaging.averaging(
      task, loss_fn, streams='both', server=server, mu=mu, weighting=weighting,
      labeled_client_weight=labeled_client_weight, keep_local=keep_local,
      remember=remember, pseudo_label=assemble.confident_labels(
          task, lambda memory: thresholds(memory.kept)))
