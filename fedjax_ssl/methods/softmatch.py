r"""SoftMatch at the clients: rows that the model is less sure of count less.

Chen et al., SoftMatch, ICLR 2023, https://arxiv.org/abs/2301.10921. The
authors' code is in TorchSSL/TorchSSL, and in USB, which is
microsoft/Semi-supervised-learning.

Let q be the predictions for the weak views of a batch. They are aligned to
:math:`\bar q = norm(q / \tilde q)` by their moving average :math:`\tilde q`.
Every step moves, by decay :math:`\lambda`,

  :math:`\mu \to mean_b \max_c \bar q_b(c)`,
  :math:`\sigma^2 \to var_b \max_c \bar q_b(c)`,

which start at 1/C and 1. Then each row's strong view learns its likeliest class
by q, not aligned, with the weight of `losses.softmatch_weights`.

Both moments are USB's. TorchSSL takes those of :math:`\max_c q_b(c)`, before
the alignment (`moments='raw'`), starts :math:`\tilde q` at 1/C, not at the
first batch, and aligns to what labeled rows are predicted as. Both evaluate a
moving average of the weights; here it is the global model.
"""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.core import knobs
from fedjax_ssl.core.local_training import Aux
from fedjax_ssl.core.types import Federation, Method, Task
from fedjax_ssl.losses import moving
from fedjax_ssl.methods.parts import averaging, network, objective


class Seen(NamedTuple):
  """Averages of what a client's models have predicted."""

  shares: jax.Array  # float32[C], the mean prediction; zeros before the first.
  mean: jax.Array  # float32[], mu.
  variance: jax.Array  # float32[], sigma^2.


def confidences(seen: Seen, probabilities: jax.Array) -> jax.Array:
  """Computes the confidences float32[B] of predictions, after alignment."""
  equal = 1 / probabilities.shape[-1]
  return moving.aligned(probabilities, seen.shares, equal).max(-1)


def updated_averages(seen: Seen, probabilities: jax.Array, mask: jax.Array, *,
                     decay: float, align: bool, moments: str) -> Seen:
  """Moves the averages by a batch of weak views.

  Args:
    seen: before.
    probabilities: float[B, C].
    mask: float32[B].
    decay: 0 is the batch, 1 stays.
    align: whether to keep the mean prediction.
    moments: of confidences after the alignment, 'aligned', or before it, 'raw'.

  Returns:
    The averages; as they were if the batch has no row. A batch of one row does
    not move the variance.
  """
  if align:
    seen = seen._replace(shares=moving.moved_shares(
        seen.shares, probabilities, mask, decay=decay))
  sure = (confidences(seen, probabilities) if moments == 'aligned'
          else probabilities.max(-1))
  return seen._replace(
      mean=moving.moved(seen.mean, moving.row_mean(sure, mask), mask,
                        decay=decay),
      variance=moving.moved(seen.variance, moving.variance_of(sure, mask),
                            mask, decay=decay, min_rows=2))


@knobs.checked(
    decay=knobs.AVERAGE,
    moments=knobs.only('align', True, knobs.word('aligned', 'raw')),
    num_sigmas=knobs.Bound(cases=(knobs.at(0, 'every row counts the same'),)))
def softmatch(task: Task, *, decay: float = 0.999, num_sigmas: float = 2.0,
              align: bool = True, moments: str = 'aligned',
              unlabeled_weight: float = 1.0, server: str = 'fedavg',
              mu: float = 0.01, weighting: str = 'examples',
              labeled_client_weight: float = 1.0,
              keep_local: bool = False) -> Method:
  """Runs FixMatch with a truncated Gaussian in place of its threshold.

  The averages describe a client's own rows and stay on it from round to round,
  as FlexMatch's memory does, also with labels at the server: with the published
  decay one round would hardly move them. Nothing more is sent. A batch without
  unlabeled rows moves nothing.

  Args:
    task: the static choices.
    decay: of the averages. With the default they take thousands of steps to
      settle, more than short runs have; 0 is the batch alone.
    num_sigmas: n, by which the code divides sigma, but not the paper's formula.
      With 0 all rows count the same, with a large n only those that are surer
      than the mean.
    align: weigh rows by predictions aligned to equal classes.
    moments: mean and deviation are of 'aligned' confidences, as in USB, or of
      'raw' ones, as in TorchSSL.
    unlabeled_weight: lambda_max; 0 leaves the supervised part.
    server: 'fedavg' or 'fedprox', or 'local' without communication.
    mu: weight of FedProx's term; ignored by the others.
    weighting: 'examples' counts labeled and unlabeled rows; or 'uniform'.
    labeled_client_weight: factor on the weight of a client that holds labels;
      1 is no difference.
    keep_local: keep each client's last model, to report local accuracy.

  Returns:
    The method. The metric `mask_rate` is the mean weight of a row, and `bar` is
    mu, the confidence from which on the weight is 1, both means over rows.

  Raises:
    ValueError: for an unknown choice or a number out of range.
  """
  def remember(federation: Federation) -> Seen:
    size = federation.num_clients
    return Seen(jnp.zeros((size, task.num_classes)),
                jnp.ones(size) / task.num_classes, jnp.ones(size))

  def weighed(seen: Seen, p: jax.Array) -> jax.Array:
    return losses.softmatch_weights(confidences(seen, p), seen.mean,
                                    seen.variance, num_sigmas=num_sigmas)

  def pseudo_label(record, memory, inputs):
    p = jax.nn.softmax(task.apply(record.model, inputs))
    return p.argmax(-1).astype(jnp.int32), weighed(memory.kept, p)

  def loss_fn(model, given, batch, key):
    rows = batch.unlabeled
    weak, (labeled, strong), stats = network.forward_views(
        task, model, batch, key)
    p = jax.nn.softmax(weak)
    seen = updated_averages(given.memory, p, rows.mask, decay=decay,
                            align=align, moments=moments)
    weight = weighed(seen, p)
    loss, _ = losses.cross_entropy(
        strong, p.argmax(-1).astype(jnp.int32), rows.mask * weight,
        total=rows.mask.sum())
    loss, metrics = objective.total(
        batch, loss, objective.labeled(labeled, batch.labeled),
        labelings=1, weight=unlabeled_weight,
        mask_rate=losses.masked_mean(weight, rows.mask))
    metrics['bar'] = network.over_rows(seen.mean, rows)
    return loss, Aux(stats, metrics, seen)

  return averaging.averaging(
      task, loss_fn, streams='both', server=server, mu=mu, weighting=weighting,
      labeled_client_weight=labeled_client_weight, keep_local=keep_local,
      remember=remember, pseudo_label=pseudo_label)
