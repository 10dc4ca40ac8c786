"""FedAvg on the labeled rows.

With few labels it is the lower bound of every table, with all labels (a
federation in which every row is labeled) the upper one.

McMahan et al., Communication-Efficient Learning of Deep Networks from
Decentralized Data, AISTATS 2017, https://arxiv.org/abs/1602.05629.
"""
from __future__ import annotations

from fedjax_ssl.core import knobs
from fedjax_ssl.core.types import Method, Task
from fedjax_ssl.methods.parts import averaging


@knobs.checked()
def fedavg(task: Task, *, weighting: str = 'examples', keep_local: bool = False,
           lr_decay: str = 'none') -> Method:
  """Minimises cross entropy on labeled rows and averages the updates.

  Args:
    task: the static choices.
    weighting: a client counts by its labeled 'examples' (Algorithm 1), or
      'uniform'.
    keep_local: keep each client's last model, to report local accuracy.
    lr_decay: 'none', or 'plateau' as in FedMatch: each client divides its rate
      by 3 after 3 epochs without a lower validation loss of its model.

  Raises:
    ValueError: for an unknown choice.
  """
  return averaging.averaging(
      task, averaging.supervised(task), streams='labeled', weighting=weighting,
      keep_local=keep_local, lr_decay=lr_decay)
