"""FixMatch at the clients, on a FedAvg or FedProx server.

Sohn et al., FixMatch, NeurIPS 2020, https://arxiv.org/abs/2001.07685.
"""
from __future__ import annotations

from fedjax_ssl import losses
from fedjax_ssl.core import knobs
from fedjax_ssl.core.local_training import Aux
from fedjax_ssl.core.types import Method, Task
from fedjax_ssl.methods.parts import assemble, averaging, network, objective


@knobs.checked(
    labeler=knobs.word('local', 'global'),
    over=knobs.word('batch', 'confident'),
    weak_in_batch=knobs.only('labeler', 'global', knobs.word()))
def fixmatch(task: Task, *, threshold: float = 0.95,
             unlabeled_weight: float = 1.0, over: str = 'batch',
             labeler: str = 'local', weak_in_batch: bool = False,
             server: str = 'fedavg', mu: float = 0.01,
             weighting: str = 'examples', labeled_client_weight: float = 1.0,
             keep_local: bool = False, lr_decay: str = 'none') -> Method:
  """Trains strong views on confident predictions of weak views.

  The loss is L_s + unlabeled_weight L_u with L_u of equation 4. In the tables
  of SAGE and ProxyFL this is FixMatch-LPL; FixMatch-GPL, whose code they have
  not released, is taken to be labeler='global' with weak_in_batch=True, and
  their rows without a threshold are threshold=0.

  Args:
    task: the static choices.
    threshold: confidence tau from which on a row counts; 0 keeps all rows,
      1.1 none, which leaves the supervised part.
    unlabeled_weight: lambda_u; 0 leaves the supervised part.
    over: L_u is averaged over the real rows of the 'batch', as in the paper,
      or over the 'confident' ones, as in FedMatch's code.
    labeler: pseudo-labels come from the 'local' model being trained, as in
      FixMatch (LPL in SAGE's tables), or from the 'global' one that the client
      received (GPL).
    weak_in_batch: whether weak views that the 'global' model labels go through
      the model in training too, as in SAGE's code. Their logits are not used,
      but they enter the batch statistics. Without these it changes nothing.
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
  if labeler == 'global' and server == 'local':
    raise ValueError("labeler='global' needs a server that sends a model, not "
                     "server='local'.")

  def taught(model, given, batch, key):
    """Learns labels of the global model."""
    target, *views = network.views(task, batch, key)
    beside = (target,) if weak_in_batch and network.is_coupled(task) else ()
    weak = task.apply(given.anchor, target.inputs)
    (*_, labeled, strong), stats = network.forward(
        task, model, *beside, *views, key=key)
    loss, used = losses.fixmatch(
        strong, weak, batch.unlabeled.mask, threshold=threshold, over=over)
    loss, metrics = objective.total(
        batch, loss, objective.labeled(labeled, batch.labeled),
        weight=unlabeled_weight, mask_rate=used['mask_rate'],
        labelings=1 + len(beside))
    return loss, Aux(stats, metrics)

  loss_fn = taught if labeler == 'global' else objective.fixmatch(
      task, threshold, unlabeled_weight, over=over)
  return averaging.averaging(
      task, loss_fn, streams='both', server=server, mu=mu, weighting=weighting,
      labeled_client_weight=labeled_client_weight, keep_local=keep_local,
      lr_decay=lr_decay,
      pseudo_label=assemble.confident_labels(task, threshold))
