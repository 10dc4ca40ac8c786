r"""FixMatch on evened guesses: memories, weights and a server of one's own.

fedjax-ssl train digits_dirdir --num_rounds=2 \
    --method='experiments/examples/evened_fixmatch.py:evened_fixmatch'

What `remember` makes is the clients' memory, one row for each of them. In a
step a loss reads its client's row as `given.memory` and returns the next one in
`Aux`. A client that does not take part in a round keeps its row, and a killed
run finds all rows again. `weighting` says how much a client counts in the mean,
and the task's `server_optimizer` what the server does with it.
"""
import dataclasses

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl import Aux, losses, methods
from fedjax_ssl.methods.parts import averaging, network, objective


def evened(p, mean):
  """Divides probabilities [B, C] by their mean [C], and makes them sum to 1."""
  p = p / (mean + 1e-6)
  return p / p.sum(-1, keepdims=True)


@methods.register('evened_fixmatch')
def evened_fixmatch(task, *, threshold: float = 0.8, decay: float = 0.99,
                    by_guesses: bool = False, server_momentum: float = 0.5):
  """Learns guesses in which each client's classes are about as frequent.

  Args:
    task: the static choices.
    threshold: confidence from which on a row counts.
    decay: of each client's mean guess; 0 is that of the batch alone.
    by_guesses: whether clients count by the guesses that they learnt from, and
      not by their rows. One that took none then counts as much as one guess.
    server_momentum: of the server's steps along the mean update; 0 is FedAvg.
  """
  def remember(federation):
    return jnp.full((federation.num_clients, task.num_classes),
                    1 / task.num_classes)

  def loss_fn(model, given, batch, key):
    weak, (labeled, strong), stats = network.forward_views(
        task, model, batch, key)
    mask, p = batch.unlabeled.mask, jax.nn.softmax(weak)
    # Rows of mask 0 fill up the batch; without any other the mean stays.
    of_batch = (mask[:, None] * p).sum(0) / jnp.maximum(mask.sum(), 1)
    mean = jnp.where(mask.sum() > 0,
                     decay * given.memory + (1 - decay) * of_batch,
                     given.memory)
    labels, sure = losses.hard_label(evened(p, mean), threshold=threshold)
    loss, _ = losses.cross_entropy(strong, labels, mask * sure,
                                   total=mask.sum())
    loss, metrics = objective.total(
        batch, loss, objective.labeled(labeled, batch.labeled), labelings=1,
        mask_rate=losses.masked_mean(sure, mask))
    return loss, Aux(stats, metrics, mean)

  def pseudo_label(record, memory, inputs):
    p = jax.nn.softmax(task.apply(record.model, inputs))
    return losses.hard_label(evened(p, memory.kept), threshold=threshold)

  def guesses(shard, mean, metrics):
    del shard, mean
    return 1 + metrics['mask_rate'].total

  if server_momentum:  # A flag, --server_optimizer, would replace it.
    task = dataclasses.replace(task, server_optimizer=task.server_optimizer
                               or optax.sgd(1.0, momentum=server_momentum))
  return averaging.averaging(task, loss_fn, streams='both', remember=remember,
                             weighting=guesses if by_guesses else 'examples',
                             pseudo_label=pseudo_label)
