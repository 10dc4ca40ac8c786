"""FedAvg in Flower: its simulation on Ray.

With the word `documented` as its PyTorch guide trains, at the default of two
threads for a client; else in the fastest way found, an actor for each thread
that keeps network and images.
"""
from __future__ import annotations

import pathlib
import sys
import time

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from experiments.benchmarks import peer_task, torch_loop
from experiments.benchmarks.peers import flower_client

_DOCUMENTED = 'documented' in sys.argv[2:]


class _Cohorts(FedAvg):
  """Flower's FedAvg with the cohorts of the task."""

  def __init__(self, task, folder, nodes):
    super().__init__(fraction_evaluate=0.0)
    self._task, self._folder, self._nodes = task, str(folder), nodes
    self.done = 0

  def configure_train(self, server_round, arrays, config, grid):
    """Messages to the round's clients."""
    del server_round, config, grid
    ids = self._task.cohort(self.done)
    self.done += 1
    return [Message(
        RecordDict({'arrays': arrays, 'config': ConfigRecord(
            {'client': k, 'folder': self._folder,
             'documented': _DOCUMENTED})}),
        message_type='train', dst_node_id=self._nodes[k]) for k in ids]


class Simulation:
  """A strategy as a system, inside Flower's server.

  Args:
    task: the task.
    folder: where the clients find it.
    grid: Flower's connection to them.
  """

  def __init__(self, task: peer_task.Task, folder: pathlib.Path, grid):
    while len(nodes := sorted(grid.get_node_ids())) < len(task.clients):
      time.sleep(0.1)  # They register one by one.
    self._network = torch_loop.FedAvgCNN(side=task.images.shape[1])
    torch_loop.load_flax(self._network, task.params)
    self._arrays = ArrayRecord(self._network.state_dict())
    self._strategy = _Cohorts(task, folder, nodes)
    self._grid = grid

  def advance(self, count: int) -> None:
    """See `peer_task.System`."""
    self._arrays = self._strategy.start(
        grid=self._grid, initial_arrays=self._arrays, num_rounds=count).arrays

  def params(self):
    """See `peer_task.System`."""
    self._network.load_state_dict(self._arrays.to_torch_state_dict())
    return torch_loop.to_flax(self._network)


def main() -> None:
  """Runs the simulation until the orders end."""
  orders = peer_task.Orders(['flwr', 'ray', 'torch'])
  folder = pathlib.Path(sys.argv[1])
  task = peer_task.load(folder)
  server = ServerApp()

  @server.main()
  def serve(grid, context) -> None:
    del context
    orders.serve(Simulation(task, folder, grid))

  threads = min(2, task.threads) if _DOCUMENTED else 1
  run_simulation(
      server, flower_client.app, num_supernodes=len(task.clients),
      backend_config={
          'init_args': {'num_cpus': task.threads},
          'client_resources': {'num_cpus': threads, 'num_gpus': 0.0}})


if __name__ == '__main__':
  main()
