"""FedAvg in pfl-research, on its PyTorch backend."""
from __future__ import annotations

import itertools

from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
import torch
import torch.nn.functional as F

from experiments.benchmarks import peer_task, torch_loop


class _Network(torch_loop.FedAvgCNN):
  """The network with the two methods that pfl asks for."""

  def loss(self, images, labels):
    return F.cross_entropy(self(images), labels)

  def metrics(self, images, labels):
    loss = F.cross_entropy(self(images), labels, reduction='sum')
    return {'loss': Weighted(loss.item(), len(labels))}


class Averaging:
  """pfl's `FederatedAveraging`.

  Args:
    task: the task.
  """

  def __init__(self, task: peer_task.Task):
    torch.set_num_threads(task.threads)
    self._done, self._cohort_size = 0, task.cohorts.shape[1]
    self._network = _Network(side=task.images.shape[1])
    torch_loop.load_flax(self._network, task.params)
    self._model = PyTorchModel(
        self._network, torch.optim.SGD,
        torch.optim.SGD(self._network.parameters(), lr=1.0))
    images = torch.tensor(task.floats()).permute(0, 3, 1, 2).contiguous()
    labels = torch.tensor(task.labels).long()
    users = [Dataset((images[rows], labels[rows]), user_id=str(k))
             for k, rows in enumerate(task.clients)]
    # It asks for one user after another, cohort by cohort.
    order = itertools.chain.from_iterable(task.cohorts)
    data = FederatedDataset(lambda k: users[int(k)], lambda: next(order))
    self._backend = SimulatedBackend(data, data)
    self._algorithm = FederatedAveraging()
    self._local = NNTrainHyperParams(
        local_num_epochs=task.epochs, local_learning_rate=task.learning_rate,
        local_batch_size=task.batch)

  def advance(self, count: int) -> None:
    """See `peer_task.System`; a second run goes on where the first ended."""
    self._done += count
    self._algorithm.run(
        NNAlgorithmParams(
            central_num_iterations=self._done,
            evaluation_frequency=1_000_000,  # The first round, and no other.
            train_cohort_size=self._cohort_size, val_cohort_size=0),
        self._backend, self._model, self._local,
        send_metrics_to_platform=False)

  def params(self):
    """See `peer_task.System`."""
    return torch_loop.to_flax(self._network)


if __name__ == '__main__':
  peer_task.main(Averaging, ['pfl', 'torch'])
