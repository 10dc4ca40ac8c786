r"""FixMatch with soft targets, sharpened as in MixMatch: a method of one's own.

fedjax-ssl train digits_dirdir --num_rounds=2 \
    --method='experiments/examples/sharpened_fixmatch.py:sharpened_fixmatch'

The file may lie anywhere. Its SHA-256 and a copy are stored with each run.
`fedjax_ssl.testing.check_method(sharpened_fixmatch)` holds it to the laws that
all methods hold.
"""
import jax
import jax.numpy as jnp

from fedjax_ssl import Aux, losses, methods
from fedjax_ssl.methods.parts import assemble, averaging, network, objective


@methods.register('sharpened_fixmatch')
def sharpened_fixmatch(task, *, threshold: float = 0.8,
                       sharpening: float = 0.5):
  """Learns sharpened guesses of weak views on strong views.

  Args:
    task: the static choices.
    threshold: confidence from which on a row counts.
    sharpening: temperature of the targets; towards 0 they are FixMatch's.
  """
  def loss_fn(model, given, batch, key):
    del given  # The received model, as `given.anchor`.
    target, *views = network.views(task, batch, key)
    weak, (labeled, strong), stats = network.forward_with_targets(
        task, model, target, *views, key=key)
    sure = jax.nn.softmax(weak).max(-1) >= threshold
    guess = jax.nn.softmax(weak / sharpening)
    each = -(guess * jax.nn.log_softmax(strong)).sum(-1)
    loss = losses.masked_mean(jnp.where(sure, each, 0), batch.unlabeled.mask)
    loss, metrics = objective.total(
        batch, loss, objective.labeled(labeled, batch.labeled), labelings=1,
        mask_rate=losses.masked_mean(sure * 1.0, batch.unlabeled.mask))
    return loss, Aux(stats, metrics)

  return averaging.averaging(
      task, loss_fn, streams='both',
      pseudo_label=assemble.confident_labels(task, threshold))
