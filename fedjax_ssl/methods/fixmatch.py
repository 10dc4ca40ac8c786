"""FixMatch at the clients, on a FedAvg or FedProx server.

Sohn et al., FixMatch, NeurIPS 2020, https://arxiv.org/abs/2001.07685.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.core.types import Method, Task
from fedjax_ssl.methods import base


def fixmatch(task: Task, *, threshold: float = 0.95,
             unlabeled_weight: float = 1.0, over: str = 'batch',
             server: str = 'fedavg', mu: float = 0.01,
             weighting: str = 'examples', keep_local: bool = False) -> Method:
  """Learns confident predictions of weak views on strong views.

  The loss is L_s + unlabeled_weight L_u with L_u of equation 4. Pseudo-labels
  come from the model being trained.

  Args:
    task: the static choices.
    threshold: confidence tau from which on a row counts; 0 keeps all rows,
      above 1 none, which leaves the supervised part.
    unlabeled_weight: lambda_u; 0 leaves the supervised part.
    over: L_u is averaged over the real rows of the 'batch', as in the paper,
      or over the 'confident' ones, as in FedMatch's code.
    server: 'fedavg' or 'fedprox'.
    mu: weight of FedProx's term; ignored by 'fedavg'.
    weighting: 'examples' counts labeled and unlabeled rows; or 'uniform'.
    keep_local: keep each client's last model, to report local accuracy.

  Returns:
    The method.
  """
  def loss_fn(model, anchor, batch, key):
    del anchor
    keys = jax.random.split(key, 3)
    unlabeled = batch.unlabeled
    weak, (labeled, strong), stats = base.forward_with_targets(
        task, model, base.weakly(task, unlabeled, keys[0]),
        base.weakly(task, batch.labeled, keys[1]),
        base.strongly(task, unlabeled, keys[2]))
    loss, used = losses.fixmatch(
        weak, strong, unlabeled.mask, threshold=threshold, over=over)
    metrics = {'mask_rate': base.over_rows(used['mask_rate'], unlabeled),
               'unlabeled_loss': base.over_rows(loss, unlabeled)}
    loss *= unlabeled_weight
    if labeled is not None:
      supervised = losses.cross_entropy(
          labeled, batch.labeled.labels, batch.labeled.mask)
      metrics['labeled_loss'] = base.over_rows(supervised, batch.labeled)
      loss += supervised
    return loss, (stats, metrics)

  def pseudo_label(record, inputs):
    probabilities = jax.nn.softmax(task.apply(record.model, inputs))
    confident = probabilities.max(-1) >= threshold
    return probabilities.argmax(-1), confident.astype(jnp.float32)

  return base.averaging(
      task, loss_fn, streams='both', server=server,
      mu=mu if server == 'fedprox' else 0.0, weighting=weighting,
      keep_local=keep_local, pseudo_label=pseudo_label)
