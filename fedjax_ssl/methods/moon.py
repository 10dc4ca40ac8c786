"""MOON on the labeled rows: FedAvg with features near the global model's.

Li et al., Model-Contrastive Federated Learning, CVPR 2021,
https://arxiv.org/abs/2103.16257. The paper's networks end in a projection head
of two layers; here features are what the last layer of any network reads.
"""
from __future__ import annotations

import jax

from fedjax_ssl import losses
from fedjax_ssl.core import knobs
from fedjax_ssl.core.local_training import Aux
from fedjax_ssl.core.types import Method, Task
from fedjax_ssl.methods.parts import averaging, network


def _cosine(a: jax.Array, b: jax.Array) -> jax.Array:
  """Computes the cosines of rows, float32[B]; 0 for a row of zeros."""
  return (losses.unit_rows(a) * losses.unit_rows(b)).sum(-1)


def contrast(own: jax.Array, received: jax.Array, last: jax.Array, *,
             temperature: float = 0.5) -> jax.Array:
  r"""Computes equation 3: features near the received ones, not the last ones.

  :math:`-\log \frac{e^{\cos(z, z_g) / T}}
  {e^{\cos(z, z_g) / T} + e^{\cos(z, z_l) / T}}`.

  Args:
    own: float32[B, F], z of the model in training.
    received: float32[B, F], z_g.
    last: float32[B, F], z_l of the client's last model.
    temperature: T.

  Returns:
    float32[B], nats.
  """
  gap = _cosine(own, last) - _cosine(own, received)
  return jax.nn.softplus(gap / temperature)


@knobs.checked(mu=knobs.Bound(cases=(
    knobs.at(0, 'the contrast of features is off'),)),
               temperature=knobs.Bound(above=True))
def moon(task: Task, *, mu: float = 1.0, temperature: float = 0.5,
         weighting: str = 'examples') -> Method:
  """Adds mu times a contrast of the models' features to cross entropy.

  Before a client's first round its last model is the first global one, so that
  the first round's contrast pulls nowhere. In the authors' code it is a random
  network of the client's own, which the first round leaves out. That code also
  drops batches that are not full, so that a client with few labels would learn
  nothing. Clients keep their last model, so local accuracy is reported.
  `contrastive_loss` is the mean of the contrast over steps and rows.

  Args:
    task: the static choices.
    mu: weight of the contrast; 0 is FedAvg. The paper's are 5 for CIFAR-10 and
      1 for CIFAR-100 and Tiny ImageNet.
    temperature: of the cosines; the paper's 0.5.
    weighting: a client counts by its labeled 'examples', or 'uniform'.

  Raises:
    ValueError: for an unknown choice or a number out of range.
  """
  def loss_fn(model, given, batch, key):
    view = network.labeled_view(task, batch.labeled, key)
    own, logits, stats = network.forward_with_features(
        task, model, view, key=key)
    received, last = (network.features(task, other, view)
                      for other in (given.anchor, given.memory))
    apart = losses.masked_mean(
        contrast(own, received, last, temperature=temperature), view.mask)
    loss = losses.cross_entropy(logits, view.labels, view.mask)[0]
    rows = view.mask.sum()
    return loss + mu * apart, Aux(stats, {
        'contrastive_loss': network.over_rows(apart, view),
        'forward_passes': 3 * rows, 'backward_passes': rows}, given.memory)

  return averaging.averaging(
      task, loss_fn, streams='labeled', weighting=weighting, sees_last=True)
