"""Fed-Consist: labeled clients learn labels, others their own predictions.

Yang et al., Federated semi-supervised learning for COVID region segmentation
in chest CT, Medical Image Analysis 2021, https://arxiv.org/abs/2011.11750. Here
it classifies whole inputs instead of voxels, as in the tables of RSCFed
(https://arxiv.org/abs/2203.13993) and later papers; their code for it is not
published.
"""
from __future__ import annotations

from fedjax_ssl import losses
from fedjax_ssl.core import client_weights, knobs, tree
from fedjax_ssl.core.local_training import Aux
from fedjax_ssl.core.types import (
  Client,
  Method,
  Task,
  Update,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import (
  assemble,
  labeled_clients,
  mean_teacher,
  network,
)


@knobs.checked(labeled_client_weight=knobs.CLIENT_FACTOR)
def fed_consist(task: Task, *, threshold: float = 0.9,
                unlabeled_weight: float = 1.0, unlabeled_rate: float = 0.05,
                labeled_client_weight: float = 1.0,
                warmup: float = 0.0) -> Method:
  """Trains strong views on confident predictions of the plain images.

  Clients with labels minimise cross entropy on weak views. The others label
  strong views by what the model itself predicts for the images without
  augmentation, if it is confident. All models count the same.

  Args:
    task: the static choices; its learning rate is that of labeled clients.
    threshold: confidence from which on a prediction counts; 0 keeps all,
      1.1 none.
    unlabeled_weight: of the unlabeled loss; 0 leaves the labeled part.
    unlabeled_rate: learning rate of clients without labels over that of the
      others; the paper's are 5e-6 and 1e-4.
    labeled_client_weight: factor on the weight of a client with labels. Above 1
      are the adjusted weights of RSCFed's Figure 2, whose value is not stated.
    warmup: share of the run, rounded up to whole rounds, in which only clients
      with labels train. In the paper one such client trains alone for half of
      the schedule.

  Raises:
    ValueError: for labels at the server, or a number out of range.
  """
  labeled_clients.check_placement(task)

  def unlabeled_loss(model, teacher, batch, key):
    del teacher
    plain, (strong,), stats = network.forward_with_targets(
        task, model, batch, network.strongly(task, batch, key), key=key)
    loss, used = losses.fixmatch(strong, plain, batch.mask,
                                 threshold=threshold)
    return unlabeled_weight * loss, Aux(stats, {
        'unlabeled_loss': network.over_rows(loss, batch),
        'mask_rate': network.over_rows(used['mask_rate'], batch)
    })

  def client_update(payload: assemble.Server, client: Client, key) -> Update:
    one = mean_teacher.step(task, mean_teacher.supervised(task), unlabeled_loss,
                            task.optimizer(client.round),
                            unlabeled_rate=unlabeled_rate)
    model, memory, metrics = mean_teacher.train(task, one, payload.model,
                                                client, key)
    return Update(
        tree.subtract(model, payload.model),
        client_weights.client_weight(
            client.shard, 'both', weighting='uniform',
            labeled_client_weight=labeled_client_weight),
        memory, metrics)

  return assemble.assemble(
      task, client_update=client_update,
      sample=labeled_clients.cohorts(task, 1, warmup),
      work=lambda shard: batching.num_steps(task, shard), splits_key=False,
      pseudo_label=assemble.confident_labels(task, threshold))
