r"""UDA at the clients: consistency with training signal annealing.

Xie et al., Unsupervised Data Augmentation for Consistency Training, NeurIPS
2020, https://arxiv.org/abs/1904.12848. The authors' code is
google-research/uda.
"""
from __future__ import annotations

from typing import Any

from fedjax_ssl import losses
from fedjax_ssl.core import checks, knobs
from fedjax_ssl.core.local_training import Aux
from fedjax_ssl.core.types import Method, Task
from fedjax_ssl.methods.parts import assemble, averaging, network, objective

# Annealing of the labeled loss, confidence of a clean view, and its sharpening.
_PROFILES: dict[str, dict[str, Any]] = {
    'official': {'tsa': 'none', 'threshold': 0.8, 'temperature': 0.4},
    'fedmatch': {'tsa': 'exp', 'threshold': 0.0, 'temperature': 1.0},
}

# Below this temperature a sharpened target can be 0 / 0.
@knobs.checked(_PROFILES, threshold=knobs.STRICT,
               temperature=knobs.Bound(1e-30),
               tsa=knobs.word('exp', 'linear', 'log', 'none'))
def uda(task: Task, *, profile: str = 'official',
        unlabeled_weight: float = 1.0, tsa: str | None = None,
        threshold: float | None = None, temperature: float | None = None,
        server: str = 'fedavg', mu: float = 0.01, weighting: str = 'examples',
        labeled_client_weight: float = 1.0, keep_local: bool = False,
        lr_decay: str = 'none') -> Method:
  """Keeps the prediction of a clean view on a strong view.

  With annealing the labeled loss leaves out rows that are already predicted
  better than eta, which rises from 1/C to 1 over the whole federated run, not
  the round.

  The default has no eta: on the bench (`bench_v3_clients`, mild and strong) it
  closes 62 and 68 % of the gap, tuned rows with eta (`uda_annealed`) 17 and 20.
  The reason: while eta is near 1/C, only one or two of a batch's ten labeled
  rows stay in the loss, those of a class that the last steps unlearnt, and the
  loss is the mean over these. So one full step goes towards one class, and the
  next towards another. Today the authors use eta for texts, with a pretrained
  network and 10,000 steps.

  Args:
    task: the static choices; eta rises over `task.schedule_rounds`. The
      first step has count 1, so the last one has the full eta; the authors'
      first step has count 0, so none has it.
    profile: 'official', what the authors' scripts run for images: no eta,
      threshold .8, temperature .4; or 'fedmatch': eta 'exp', as FedMatch
      states, and no threshold and no sharpening, of which it says nothing.
    unlabeled_weight: lambda; 0 leaves the labeled loss.
    tsa: how eta rises: 'exp', 'linear', 'log', or 'none' for no eta; None
      is the profile's, as for the next two.
    threshold: confidence above which a clean view counts; 0 keeps all and 1
      none. FedDure says that there is one but not its value.
    temperature: of the clean view, positive; 1 does not sharpen.
    server: 'fedavg' or 'fedprox', or 'local' without communication.
    mu: weight of FedProx's term; ignored by the others.
    weighting: 'examples' counts labeled and unlabeled rows; or 'uniform'.
    labeled_client_weight: factor on the weight of a client that holds labels;
      1 is no difference.
    keep_local: keep each client's last model, to report local accuracy.
    lr_decay: 'none', or 'plateau' as in FedMatch: each client divides its rate
      by 3 after 3 epochs without a lower validation loss of its model.

  Raises:
    ValueError: for an unknown choice or a number out of range.
  """
  chosen = checks.profile(_PROFILES, profile, tsa=tsa, threshold=threshold,
                          temperature=temperature)
  tsa, threshold, temperature = (
      chosen[k] for k in ('tsa', 'threshold', 'temperature'))
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
    clean, (labeled, strong), stats = network.forward_views(
        task, model, batch, key)
    loss, used = losses.uda(strong, clean, batch.unlabeled.mask,
                            threshold=threshold, temperature=temperature)
    known, more = labeled_loss(labeled, batch)
    loss, metrics = objective.total(
        batch, loss, known, labelings=1, weight=unlabeled_weight,
        mask_rate=used['mask_rate'])
    return loss, Aux(stats, {**metrics, **more})

  return averaging.averaging(
      task, loss_fn, streams='both', server=server, mu=mu, weighting=weighting,
      labeled_client_weight=labeled_client_weight, keep_local=keep_local,
      lr_decay=lr_decay,
      server_loss=supervised_fn,
      pseudo_label=assemble.confident_labels(task, threshold, strict=True))
