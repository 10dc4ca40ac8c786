"""Pseudo-labels at the clients: soft as in FedSSL, or hard ones.

Lee, Pseudo-Label, ICML workshop 2013; Fan et al., FedSSL, IJCAI 2022, eq. 2.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.core import knobs
from fedjax_ssl.core.local_training import Aux
from fedjax_ssl.core.types import Method, Task
from fedjax_ssl.methods.parts import assemble, averaging, network, objective


@knobs.checked(form=knobs.word('soft', 'hard'), **{
    **{knob: knobs.only('form', 'soft', knobs.BOUNDS[knob])
       for knob in ('num_views', 'temperature')},
    **{knob: knobs.only('form', 'hard', knobs.BOUNDS[knob])
       for knob in ('threshold', 'ramp')}})
def pseudo_label(task: Task, *, form: str = 'soft', num_views: int = 2,
                 temperature: float = 0.5, threshold: float = 0.95,
                 unlabeled_weight: float = 1.0, ramp: float = 0.4,
                 server: str = 'fedavg', mu: float = 0.01,
                 weighting: str = 'examples',
                 labeled_client_weight: float = 1.0, keep_local: bool = False
                 ) -> Method:
  """Trains on what the model itself predicts for unlabeled rows.

  Args:
    task: the static choices.
    form: 'soft', FedSSL's baseline: the sharpened mean over weak views, for
      every row; or 'hard': the likeliest class of confident rows, with a weight
      that rises over the run. Lee's has no threshold, and one view for label
      and loss; here each has a weak view of its own.
    num_views: K weak views behind a soft label, 1 to 64; hard labels
      ignore it.
    temperature: of the sharpening of soft labels; 1 does not sharpen, 0 is
      one-hot. FedSSL's exponent Z is 1 / temperature.
    threshold: confidence for hard labels; 0 keeps all, 1.1 none; soft
      labels ignore it.
    unlabeled_weight: final weight of the unlabeled loss.
    ramp: share of the run over which the weight of hard labels rises; 0 is
      the full weight at once.
    server: 'fedavg' or 'fedprox', or 'local' without communication.
    mu: weight of FedProx's term; ignored by the others.
    weighting: 'examples' counts labeled and unlabeled rows, or 'uniform'.
    labeled_client_weight: factor on the weight of a client that holds labels;
      1 is no difference. With weighting='uniform', 3 makes FedSSL's two groups
      of agents count the same, as in its equation 1.
    keep_local: keep each client's last model, to report local accuracy.

  Raises:
    ValueError: for an unknown form or a number out of range.
  """
  soft = form == 'soft'
  if ramp and not soft:
    task.horizon(f'ramp={ramp}')

  def loss_fn(model, given, batch, key):
    del given
    keys = jax.random.split(key, num_views + 2)
    rows = batch.unlabeled
    views = network.joined([
        network.weakly(task, rows, k) for k in keys[:num_views if soft else 1]
    ])
    targets, (labeled, logits), stats = network.forward_with_targets(
        task, model, views, network.labeled_view(task, batch.labeled,
                                                   keys[-2]),
        network.weakly(task, rows, keys[-1]), key=key)
    if soft:
      targets = targets.reshape(num_views, *logits.shape)
      labels = losses.soft_pseudo_label(targets, temperature=temperature)
      weight, used = jnp.float32(1), rows.mask
    else:
      labels, sure = losses.pseudo_label(targets, threshold=threshold)
      labels = jax.nn.one_hot(labels, task.num_classes)
      weight = (losses.ramp_up(batch.progress, ramp, shape='linear') if ramp
                else jnp.float32(1))
      used = rows.mask * sure
    loss = losses.cross_entropy(logits, labels, used, total=rows.mask.sum())[0]
    loss, metrics = objective.total(
        batch, loss, objective.labeled(labeled, batch.labeled),
        weight=unlabeled_weight * weight,
        mask_rate=used.sum() / jnp.maximum(rows.mask.sum(), 1),
        labelings=num_views if soft else 1)
    return loss, Aux(stats, metrics)

  return averaging.averaging(
      task, loss_fn, streams='both', server=server, mu=mu, weighting=weighting,
      labeled_client_weight=labeled_client_weight, keep_local=keep_local,
      pseudo_label=assemble.confident_labels(task, 0.0 if soft else threshold))
