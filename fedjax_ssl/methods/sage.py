"""SAGE: the local and the global label of a row, blended by confidence gap.

Liu et al., Mind the Gap: Confidence Discrepancy Can Guide Federated
Semi-Supervised Learning Across Pseudo-Mismatch, CVPR 2025,
https://arxiv.org/abs/2503.13227. The server is FedAvg's; a client sends its
model and nothing else.
"""
from __future__ import annotations

import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.core import knobs
from fedjax_ssl.core.local_training import Aux
from fedjax_ssl.core.types import Method, Ratio, Task
from fedjax_ssl.methods.parts import assemble, averaging, network, objective


@knobs.checked(half_gap=knobs.Bound(above=True),
               server=knobs.word('fedavg', 'fedprox'))
def sage(task: Task, *, threshold: float = 0.95, half_gap: float = 0.05,
         unlabeled_weight: float = 1.0, server: str = 'fedavg',
         mu: float = 0.01, weighting: str = 'examples',
         labeled_client_weight: float = 1.0, keep_local: bool = False
         ) -> Method:
  r"""Trains strong views on labels that two models give the weak views.

  The loss is :math:`L_s + \lambda_u L_u`, where L_u is the mean over the batch
  of :math:`1[c_l \ge \tau \vee c_g \ge \tau] KL[t \| p(A_s(u))]` with t of
  `losses.blended_label`: l is the model in training, g the one that the client
  received, with its running statistics. Under batch normalization all three
  views go through the model in training as one batch, as in the authors' code.

  Five things differ from that code. It has a client's labeled images among its
  unlabeled rows as well, and leaves out batches that are not full. It adds
  1e-10 to both sides of KL before the logarithm, which matters only for
  probabilities below 1e-9; here nothing is added. Its epochs
  have n_u / 128 steps of 256 unlabeled rows, two passes; here an epoch is one
  pass, so give it local steps. It hands one optimizer, momentum included, from
  client to client; here each client starts anew, as clients train side by
  side. It weighs clients by 2000 n_s + n_u, as its loader repeats the labeled
  rows so often; here they count by the rows they have, as the paper has it.

  Args:
    task: the static choices.
    threshold: confidence tau from which on a model is sure of a row; 0 keeps
      all rows, 1.1 none, which leaves the supervised part.
    half_gap: gap of the confidences at which both labels count the same. If it
      is large, the local label is used wherever the local model is sure.
    unlabeled_weight: lambda_u; 0 leaves the supervised part.
    server: 'fedavg' or 'fedprox'.
    mu: weight of FedProx's term; ignored by 'fedavg'.
    weighting: 'examples' counts labeled and unlabeled rows; or 'uniform'.
    labeled_client_weight: factor on the weight of a client that holds labels;
      1 is no difference.
    keep_local: keep each client's last model, to report local accuracy.

  Returns:
    The method. `local_rate` is the mean share of the local label in the labels
    of accepted rows; evaluation judges the labels of the global model.

  Raises:
    ValueError: for an unknown choice or a number out of range.
  """

  def loss_fn(model, given, batch, key):
    target, *views = network.views(task, batch, key)
    received = task.apply(given.anchor, target.inputs)
    own, (labeled, strong), stats = network.forward_with_targets(
        task, model, target, *views, key=key)
    targets, accepted, share = losses.blended_label(
        own, received, threshold=threshold, half_gap=half_gap)
    rows = batch.unlabeled.mask
    used = rows * accepted
    loss, _ = losses.target_kl(strong, targets, used, total=rows.sum())
    loss, metrics = objective.total(
        batch, loss, objective.labeled(labeled, batch.labeled),
        weight=unlabeled_weight, mask_rate=losses.masked_mean(accepted, rows),
        labelings=2)
    metrics['local_rate'] = Ratio(jnp.sum(used * share), used.sum())
    return loss, Aux(stats, metrics)

  return averaging.averaging(
      task, loss_fn, streams='both', server=server, mu=mu, weighting=weighting,
      labeled_client_weight=labeled_client_weight, keep_local=keep_local,
      pseudo_label=assemble.confident_labels(task, threshold))
