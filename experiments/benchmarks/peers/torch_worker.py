"""The plain PyTorch loop over clients, see `torch_loop`."""
from __future__ import annotations

import torch

from experiments.benchmarks import peer_task, torch_loop


class Loop:
  """`torch_loop.Loop` as a system.

  Args:
    task: the task.
    layout: a key of `torch_loop.LAYOUTS`.
  """

  def __init__(self, task: peer_task.Task, layout: str):
    torch.set_num_threads(task.threads)
    self._task, self._done = task, 0
    self._loop = torch_loop.make(task, layout)

  def advance(self, count: int) -> None:
    """See `peer_task.System`."""
    for _ in range(count):
      self._loop.round(self._task.cohort(self._done))
      self._done += 1

  def params(self):
    """See `peer_task.System`."""
    return torch_loop.to_flax(self._loop.network)


if __name__ == '__main__':
  peer_task.main(Loop, ['torch'])
