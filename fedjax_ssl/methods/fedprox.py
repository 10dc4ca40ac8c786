"""FedProx on the labeled rows: FedAvg with a pull to the received model.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020,
https://arxiv.org/abs/1812.06127.
"""
from __future__ import annotations

from fedjax_ssl.core import knobs
from fedjax_ssl.core.types import Method, Task
from fedjax_ssl.methods.parts import averaging


@knobs.checked()
def fedprox(task: Task, *, mu: float = 0.01, weighting: str = 'examples',
            keep_local: bool = False, lr_decay: str = 'none') -> Method:
  r"""Minimises :math:`F_k(w) + \frac{\mu}{2} \|w - w^t\|^2` at each client.

  Args:
    task: the static choices.
    mu: weight of the pull, with the factor 1/2 of equation 2 (several code
      bases leave it out); 0 is FedAvg. FedMatch uses 1e-2.
    weighting: 'examples', or 'uniform' as in FedMatch's FedProx rows.
    keep_local: keep each client's last model, to report local accuracy.
    lr_decay: 'none', or 'plateau' as in FedMatch: each client divides its rate
      by 3 after 3 epochs without a lower validation loss of its model.

  Raises:
    ValueError: for an unknown choice or a number out of range.
  """
  return averaging.averaging(
      task, averaging.supervised(task), streams='labeled', server='fedprox',
      mu=mu, weighting=weighting, keep_local=keep_local, lr_decay=lr_decay)
