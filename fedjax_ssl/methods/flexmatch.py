"""FlexMatch at the clients: lower thresholds for classes learnt less well.

Zhang et al., FlexMatch, NeurIPS 2021, https://arxiv.org/abs/2110.08263.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.core import knobs
from fedjax_ssl.core.local_training import Aux
from fedjax_ssl.core.types import Federation, Method, Task
from fedjax_ssl.methods.parts import (
  assemble,
  averaging,
  network,
  objective,
)


@knobs.checked(mapping=knobs.word('convex', 'linear'),
               threshold=knobs.CONFIDENCE._replace(cases=(
    knobs.at(0, 'every row counts'), knobs.over(1, 'every row counts')),
    advice='a probability; above 1 every row counts'))
def flexmatch(task: Task, *, threshold: float = 0.95, mapping: str = 'convex',
              unlabeled_weight: float = 1.0, server: str = 'fedavg',
              mu: float = 0.01, weighting: str = 'examples',
              labeled_client_weight: float = 1.0, keep_local: bool = False
              ) -> Method:
  """Runs FixMatch with the threshold tau * M(beta_c) for class c.

  For each of its unlabeled rows a client remembers, from round to round, the
  last class predicted with a confidence of `threshold` or more. beta_c is the
  number of rows of class c divided by that of the most frequent class, or by
  the number of rows that have no class yet while that is larger (equations 5 to
  11). A stream, in which a client's rows change, is refused.

  Args:
    task: the static choices.
    threshold: tau, that of the class learnt best. While no row has reached
      it, all are 0 and every row counts, as in the paper's warm-up. So
      1.1 is self-training on all rows.
    mapping: M, 'convex' b / (2 - b), or 'linear'.
    unlabeled_weight: lambda_u; 0 leaves the supervised part.
    server: 'fedavg' or 'fedprox', or 'local' without communication.
    mu: weight of FedProx's term; ignored by the others.
    weighting: 'examples' counts labeled and unlabeled rows; or 'uniform'.
    labeled_client_weight: factor on the weight of a client that holds labels;
      1 is no difference.
    keep_local: keep each client's last model, to report local accuracy.

  Raises:
    ValueError: for an unknown choice or a number out of range.
  """

  def remember(federation: Federation):
    if federation.stream is not None:
      raise ValueError('flexmatch keeps a class for each unlabeled row of a '
                       'client, so it cannot run on a stream of tasks.')
    # -1: no class yet; -2: no row of the client.
    shard = federation.clients
    place = jnp.arange(shard.unlabeled.shape[-1])
    real = place < jnp.asarray(shard.num_unlabeled)[:, None]
    return jnp.where(real, -1, -2).astype(jnp.int32)

  def thresholds(memory):
    """Computes the threshold of each class, float32[C]."""
    return losses.flexmatch_thresholds(
        jax.nn.one_hot(memory, task.num_classes).sum(0), threshold=threshold,
        mapping=mapping, num_unused=(memory == -1).sum())

  def loss_fn(model, given, batch, key):
    memory, rows = given.memory, batch.unlabeled
    weak, (labeled, strong), stats = network.forward_views(
        task, model, batch, key)
    loss, used = losses.fixmatch(strong, weak, rows.mask,
                                 threshold=thresholds(memory))
    label, sure = losses.pseudo_label(weak, threshold=threshold)
    # Masked rows and rows that are not sure get a place beyond the table, which
    # is dropped.
    place = jnp.where(sure * rows.mask > 0, rows.slots, memory.shape[0])
    memory = memory.at[place].set(label, mode='drop')
    loss, metrics = objective.total(
        batch, loss, objective.labeled(labeled, batch.labeled), labelings=1,
        weight=unlabeled_weight, mask_rate=used['mask_rate'])
    return loss, Aux(stats, metrics, memory)

  return averaging.averaging(
      task, loss_fn, streams='both', server=server, mu=mu, weighting=weighting,
      labeled_client_weight=labeled_client_weight, keep_local=keep_local,
      remember=remember, pseudo_label=assemble.confident_labels(
          task, lambda memory: thresholds(memory.kept)))
