"""UDA at the clients: consistency with training signal annealing.

Xie et al., Unsupervised Data Augmentation for Consistency Training, NeurIPS
2020, https://arxiv.org/abs/1904.12848.
"""
from __future__ import annotations

import jax

from fedjax_ssl import losses
from fedjax_ssl.core import checks, knobs
from fedjax_ssl.core.local_training import Aux
from fedjax_ssl.core.types import Method, Task
from fedjax_ssl.methods.parts import assemble, averaging, network, objective


# Below this temperature a sharpened target can be 0 / 0.
@knobs.checked(threshold=knobs.STRICT, temperature=knobs.Bound(1e-30))
def uda(task: Task, *, unlabeled_weight: float = 1.0, tsa: str = 'exp',
        threshold: float = 0.0, temperature: float = 1.0,
        server: str = 'fedavg', mu: float = 0.01, weighting: str = 'examples',
        keep_local: bool = False, lr_decay: str = 'none') -> Method:
  """Keeps the prediction of a clean view on a strong view.

  The labeled loss leaves out rows that are already predicted better than a
  bar, which rises from 1/C to 1 over the whole federated run, not the round.

  Args:
    task: the static choices; `task.num_rounds` is the run that the bar spans.
    unlabeled_weight: lambda; 0 leaves the labeled loss.
    tsa: how the bar rises: 'exp' (FedMatch's), 'linear', 'log', or 'none' for
      no bar.
    threshold: confidence above which a clean view counts; 0 keeps all and 1
      none. FedMatch states none; FedDure says that there is one but not its
      value; the authors' code has 0.8 for CIFAR-10.
    temperature: of the clean view, positive; 1 does not sharpen, the authors'
      is 0.4.
    server: 'fedavg' or 'fedprox', or 'local' without communication.
    mu: weight of FedProx's term; ignored by the others.
    weighting: 'examples' counts labeled and unlabeled rows; or 'uniform'.
    keep_local: keep each client's last model, to report local accuracy.
    lr_decay: 'none', or 'plateau' as in FedMatch: each client divides its rate
      by 3 after 3 epochs without a lower validation loss of its model.

  Returns:
    The method.

  Raises:
    ValueError: for an unknown choice or a number out of range.
  """
  checks.check('tsa', tsa, ('exp', 'linear', 'log', 'none'))
  if tsa != 'none':
    task.horizon(f'tsa={tsa!r}')

  def labeled_loss(logits, batch):
    rows = batch.labeled
    if rows is None or tsa == 'none':
      return objective.labeled(logits, rows), {}
    bar = losses.tsa_threshold(batch.progress, 1.0, schedule=tsa,
                               num_classes=task.num_classes)
    loss, kept = losses.tsa_cross_entropy(
        logits, rows.labels, rows.mask, threshold=bar)
    return loss, {'tsa_rate': network.over_rows(kept['tsa_rate'], rows)}

  def supervised_fn(model, given, batch, key):
    del given
    (logits,), stats = network.forward(
        task, model, network.labeled_view(task, batch.labeled, key), key=key)
    loss, metrics = labeled_loss(logits, batch)
    return loss, Aux(stats, metrics)

  def loss_fn(model, given, batch, key):
    del given
    keys = jax.random.split(key, 3)
    unlabeled = batch.unlabeled
    clean, (labeled, strong), stats = network.forward_with_targets(
        task, model, network.weakly(task, unlabeled, keys[0]),
        network.labeled_view(task, batch.labeled, keys[1]),
        network.strongly(task, unlabeled, keys[2]), key=key)
    loss, used = losses.uda(strong, clean, unlabeled.mask,
                            threshold=threshold, temperature=temperature)
    known, more = labeled_loss(labeled, batch)
    loss, metrics = objective.total(
        batch, loss, known, weight=unlabeled_weight,
        mask_rate=used['mask_rate'])
    return loss, Aux(stats, {**metrics, **more})

  return averaging.averaging(
      task, loss_fn, streams='both', server=server, mu=mu, weighting=weighting,
      keep_local=keep_local, lr_decay=lr_decay,
      server_loss=supervised_fn,
      pseudo_label=assemble.confident_labels(task, threshold, strict=True))
