"""FedMatch: one part of the weights for labels, one for unlabeled rows.

Jeong et al., Federated Semi-Supervised Learning with Inter-Client Consistency,
https://arxiv.org/abs/2006.12097: the first version is profile 'v1'; the code,
of the third version (ICLR 2021), is 'v3code'.
"""
from __future__ import annotations

import functools

from jax import lax

from fedjax_ssl import losses
from fedjax_ssl.core import knobs
from fedjax_ssl.core.types import Method, Task
from fedjax_ssl.data import batching
from fedjax_ssl.methods.fedmatch import client, helpers, local_step, server
from fedjax_ssl.methods.fedmatch.settings import (
  AT_SERVER,
  CHOICES,
  PROFILES,
  Settings,
  settle,
)
from fedjax_ssl.methods.parts import assemble

# A knob that is None takes one of the two, by where the labels are.
_PROFILES = {name: {'clients': PROFILES[name], 'server': AT_SERVER[name]}
             for name in PROFILES}


@knobs.checked(
    _PROFILES, **{knob: knobs.word(*words)
                  for knob, words in CHOICES.items()},
    agreement_weight=knobs.weight('the vote of the helpers'),
    delta_threshold=knobs.Bound(),
    density=knobs.share(knobs.at(0, 'clients send nothing of psi')),
    helper_interval=knobs.whole(1, 2**31 - 1),
    l1=knobs.Bound(),
    l2=knobs.Bound(),
    max_gib=knobs.Bound(),
    num_helpers=knobs.whole(
        0, knobs.UNROLLED, knobs.at(0, 'clients help nobody')),
    patience=knobs.whole(1, 2**31 - 1),
    psi_init=knobs.Bound(),
    psi_threshold=knobs.Bound())
def fedmatch(
    task: Task, *, profile: str = 'v1', num_helpers: int = 2,
    helper_choice: str | None = None, helper_interval: int | None = None,
    aggregation: str | None = None, labeled_client_weight: float = 1.0,
    threshold: float = 0.75, tie: str = 'lowest', over: str | None = None,
    labeled_weight: float = 10.0, agreement_weight: float | None = None,
    consistency_weight: float | None = None, l2: float | None = None,
    l1: float | None = None, l2_reduction: str | None = None,
    learn: str = 'both', psi_init: float | None = None, density: float = 1.0,
    sending: str | None = None, psi_threshold: float | None = None,
    delta_threshold: float | None = None, exact_down: bool = True,
    lr_decay: str = 'clients', patience: int | None = None,
    max_gib: float = 16.0, keep_local: bool = False) -> Method:
  """Trains theta = sigma + psi with helpers from other clients.

  With labels at the server, the server trains sigma and the clients train psi
  only; the authors' clients then drop the last rows of an epoch if these fill
  less than half a batch, which here are one more step. Their batches are the
  same in every epoch; here each has an order of its own. A knob that is None
  takes the profile's value; below, 'a / b' are those of v1 and of v3code.

  Args:
    task: the static choices.
    profile: 'v1' or 'v3code'.
    num_helpers: H, from how many other clients a client receives psi; 0 is
      none, and pseudo-labels are then FixMatch's.
    helper_choice: 'reliability', the best of the last round on the server's
      validation rows, or 'similarity', the clients with the nearest predictions
      for a noise image.
    helper_interval: every how many rounds clients have helpers, 1 / 10; in
      other rounds they have none.
    aggregation: 'reliability', weights of equation 4 (equal if nobody gets a
      validation row right), or 'uniform'.
    labeled_client_weight: factor on the weight of a client that holds labels;
      1 is no difference.
    threshold: confidence tau of the client's own model from which on a row
      counts; 0 keeps all, 1.1 none. The third version's text has 0.85.
    tie: of classes with equally many votes the 'lowest' one wins, or that of
      the client's own model, 'local'.
    over: losses are means over the 'batch' (v1, not stated) or the 'confident'
      rows.
    labeled_weight: lambda_s, of the labeled loss.
    agreement_weight: of the vote's cross entropy, 1 / .01.
    consistency_weight: of the divergence from the helpers, 1 / .01; 0 leaves
      inter-client consistency out, but helpers still vote.
    l2: of ||sigma - psi||^2, .01 / 10.
    l2_reduction: l2 weighs the 'mean' over the weights (v1, not stated) or
      the 'sum'.
    l1: of ||psi||_1, a sum always, as a mean would move no weight: 0 (v1,
      'dense'; the paper's sparse runs have 0 to .01) / 1e-4, with labels at
      the server 1e-5.
    learn: 'both' parts, 'sigma' only (psi is 0, helpers and thresholds do
      nothing, and psi's other knobs are refused), or 'psi' only (sigma keeps
      its initial values); or 'undivided', FedMatch without decomposition: both
      losses move one set of weights, psi, which starts as the whole model,
      and sigma is 0. Helpers are then whole models, and what makes psi small
      or sparse is refused: `l2`, `l1`, `psi_init`, `psi_threshold`, `density`.
    psi_init: psi starts at this share of sigma, 0 (not stated) / .2.
    density: largest share of psi that a client sends, 1 is all: its largest
      numbers, or those that have moved most.
    sending: 'values': all of sigma, and the numbers of psi above
      `psi_threshold`. Or 'differences' from what the receiver holds, if they
      are above `delta_threshold`.
    psi_threshold: numbers of psi up to this size are 0 in what a client sends
      and in the model that predicts. The server keeps them, but they do not
      count as sent by it. 0 (v1, not stated: all of a dense psi is sent) /
      5e-6, with labels at the server 1e-5. The authors' code sets them to 0
      only to decide what is sent, and then sends them as they are; here they
      are sent as 0. Their server trains sigma without them; here it trains on
      all of psi, as clients do in both (theirs in the first local epoch): by
      1e-5 a number at most.
    delta_threshold: with sending='differences', those up to this size are not
      sent; 5e-5, with labels at the server 1e-5.
    exact_down: whether a client receives all numbers, even those that do not
      count as sent, as in the authors' code. With False it holds only what was
      sent, also of its helpers.
    lr_decay: divides the learning rate by 3 after `patience` epochs without a
      lower validation loss. 'clients': each client its own rate, by the loss of
      its model, with sending='differences' before small ones are left out;
      'server': one rate for all, by the loss of the global model;
      or 'none'. These rates start again with each task of a stream; in the
      authors' code they go on, and all clients of a process share one rate,
      which a client's fall lowers and a new client sets back.
    patience: epochs, 3 / 5, with labels at the server 3 / 20.
    max_gib: GiB of weights that may be kept for all clients and for helpers;
      a run that needs more is refused.
    keep_local: keep each client's last model, as it was sent, to report local
      accuracy.

  Returns:
    The method. Its metrics: `cost_up` and `cost_down`, what a client sends and
    receives in a round, in percent of one dense model; `psi_density`, the share
    of psi that is not 0; `outvoted`.

  Raises:
    ValueError: for an unknown choice or a number out of range; or later, in
      `init`, where validation rows or memory do not suffice.
  """
  s = settle(
      task, profile=profile, num_helpers=num_helpers,
      helper_choice=helper_choice, helper_interval=helper_interval,
      aggregation=aggregation, labeled_client_weight=labeled_client_weight,
      threshold=threshold,
      tie=tie, over=over, labeled_weight=labeled_weight,
      agreement_weight=agreement_weight, consistency_weight=consistency_weight,
      l2=l2, l1=l1, l2_reduction=l2_reduction, learn=learn, psi_init=psi_init,
      density=density, sending=sending, psi_threshold=psi_threshold,
      delta_threshold=delta_threshold, exact_down=exact_down,
      lr_decay=lr_decay, patience=patience, max_gib=max_gib,
      keep_local=keep_local)
  return assemble.assemble(
      task, init=functools.partial(server.init, task, s),
      client_update=functools.partial(client.update, task, s),
      aggregate=functools.partial(server.aggregate, task, s),
      broadcast=functools.partial(server.broadcast, s),
      work=lambda shard: batching.num_steps(task, shard, s.streams),
      on_labels=None if s.learn == 'psi' else functools.partial(
          server.learn, task, s),
      begin=functools.partial(server.on_tasks, s),
      model=functools.partial(server.predicted, s),
      local_model=(lambda row: row.model) if keep_local else None,
      pseudo_label=functools.partial(_labels, task, s) if s.sends_psi else None)


def _labels(task: Task, s: Settings, record, memory, inputs):
  """Labels rows by the vote of the global model and the best clients."""
  del memory
  own = task.apply(server.predicted(s, record), inputs)
  if not isinstance(record.agents, helpers.Ranking):
    return losses.pseudo_label(own, threshold=s.weights.threshold)
  best = helpers.most_reliable(record.agents, -1)
  advice = lax.map(lambda psi: task.apply(local_step.whole(
      record.sigma, psi, record.stats), inputs), best.psi)
  return losses.agreement_vote(own, advice, threshold=s.weights.threshold,
                               tie=s.weights.tie, present=best.present)
