"""Every client for itself: no communication (FedMatch's Local-SL).

The other local-only rows of FedMatch's Table 1 are `uda(server='local')` and
`fixmatch(server='local')`. Jeong et al., https://arxiv.org/abs/2006.12097.
"""
from __future__ import annotations

from fedjax_ssl.core import knobs
from fedjax_ssl.core.types import Method, Task
from fedjax_ssl.methods.parts import averaging


@knobs.checked()
def local(task: Task, *, lr_decay: str = 'none') -> Method:
  """Minimises cross entropy on each client's own labeled rows.

  A client goes on from its own last model. There is no global model: accuracy
  is the mean over the clients' models.

  Args:
    task: the static choices; labels must be at the clients.
    lr_decay: 'none', or 'plateau' as in FedMatch: each client divides its rate
      by 3 after 3 epochs without a lower validation loss of its model.

  Raises:
    ValueError: for an unknown `lr_decay`, or labels at the server.
  """
  return averaging.averaging(
      task, averaging.supervised(task), streams='labeled', server='local',
      lr_decay=lr_decay)
