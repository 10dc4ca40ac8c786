r"""FedGGp: thresholds, and second labels if unsure, by class frequencies.

FedGGp, "globally guided pseudo-labeling", 2025; its paper was not at hand. The
authors' code is whatement/FedGGp. Clients may hold labels of all their rows, of
some, or of none.

The server keeps :math:`\Phi`, how often each class is predicted; it starts at
1/C. Let p be the probabilities that the model in training gives the weak views
of a batch, m the mean of their largest entries, and s the mean over rows of
their standard deviation over the classes. A row with the likeliest class c is
accepted if its confidence reaches the threshold of c,

  :math:`m\, \Phi_c / \max \Phi`, if :math:`\Phi_c \ge 1/C` (head),
  :math:`1/C`, if :math:`\Phi_c / \max \Phi < 2/C` (tail),
  :math:`(m - s)\, \Phi_c / \max \Phi`, if neither,

or the sum of the first two if c is both. A row that is not accepted, and whose
confidence is below 0.5, has a second chance: it learns the likeliest tail class
among its k likeliest classes, with the weight :math:`p_{tail} / \max p`. Strong
views of accepted rows have the loss :math:`L_u`, those with a second chance
:math:`L_t`, both means over the batch. A client minimises

  :math:`L_s + \lambda L_u + 3 L_t`, :math:`\lambda` = 3, or 0.1 without labels.

After a round, let P be the sum of p over all rows that were learnt by
:math:`L_u`, n their number, and :math:`w_c` by how much the share of class c in
their labels exceeds 1/C, or 0 if it does not:

  :math:`\Phi \to 0.9\, \Phi + 0.1\, e^{-w} P / n`.

'paper' and 'code' differ in two things, as far as is known. In 'paper' an
accepted row is learnt only if its strong view gets the same label (else it has
no second chance either), and the rows of all clients enter P. In 'code' there
is no such filter, and only rows of clients that hold both kinds of rows enter
P. Without any such client the code divides by zero; here the thresholds stay as
they are. The code's sums start at 1/C at each client and at the server, ours at
0: a difference of at most a few rows of thousands. The code drops a client's
last, short batch, which counts here.
"""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl import aggregation, losses
from fedjax_ssl.core import checks, client_weights, knobs, tree
from fedjax_ssl.core.local_training import Aux, LossFn
from fedjax_ssl.core.types import (
  Array,
  Client,
  Federation,
  Method,
  Metrics,
  PyTree,
  Ratio,
  Shard,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import (
  assemble,
  averaging,
  labeled_clients,
  network,
  objective,
)

COUNTED = ('all', 'partly')
_PROFILES: dict[str, dict[str, Any]] = {
    'paper': {'agree': True, 'counted': 'all'},
    'code': {'agree': False, 'counted': 'partly'}}


class Server(NamedTuple):
  """The server's record, which is also what clients receive."""

  model: Variables
  frequencies: jax.Array  # float32[C], Phi.


class Learnt(NamedTuple):
  """Sums over the accepted rows that a client has learnt in a round."""

  probabilities: jax.Array  # float32[C]
  labels: jax.Array  # float32[C], how many rows have each class.


class _Settings(NamedTuple):
  """`fedggp`'s knobs, settled."""

  unlabeled_weight: float
  lone_weight: float
  tail_weight: float
  tail_confidence: float
  top: int
  decay: float
  warm: int  # Rounds.
  agree: bool
  counted: str


def tails(frequencies: Array) -> jax.Array:
  """Returns the classes that are hardly ever predicted, bool[C]; see above."""
  phi = jnp.asarray(frequencies)
  return phi / phi.max() < 2 / phi.shape[0]


def thresholds(frequencies: Array, probabilities: Array, mask: Array
               ) -> jax.Array:
  """Computes the confidence from which on a row of each class is accepted.

  Args:
    frequencies: float32[C], Phi.
    probabilities: float[B, C], of weak views.
    mask: float32[B].

  Returns:
    float32[C].
  """
  phi, p = jnp.asarray(frequencies), jnp.asarray(probabilities)
  size = phi.shape[0]
  share, tail, head = phi / phi.max(), tails(phi), phi >= 1 / size
  mean = losses.masked_mean(p.max(-1), mask)
  spread = losses.masked_mean(jnp.std(p, axis=-1, ddof=1), mask)
  return (jnp.where(head, mean * share, 0)
          + jnp.where(~head & ~tail, (mean - spread) * share, 0)
          + jnp.where(tail, 1 / size, 0))


def second_chances(probabilities: Array, tail: Array, choices: int
                   ) -> tuple[jax.Array, jax.Array]:
  """Finds the likeliest tail class among the likeliest ones of each row.

  Args:
    probabilities: float[B, C].
    tail: bool[C].
    choices: k, how many are looked at.

  Returns:
    int32[B], the class, and float32[B], its weight; 0 where there is none.
  """
  found, classes = lax.top_k(jnp.asarray(probabilities),
                             min(choices, tail.shape[0]))
  is_tail = jnp.asarray(tail)[classes]
  place = is_tail.argmax(-1)[:, None]
  weight = jnp.take_along_axis(found, place, -1)[:, 0] / found[:, 0]
  return (jnp.take_along_axis(classes, place, -1)[:, 0],
          jnp.where(is_tail.any(-1), weight, 0))


def moved(frequencies: Array, learnt: Learnt, *, decay: float) -> jax.Array:
  """Computes Phi after a round.

  Args:
    frequencies: float32[C], before.
    learnt: of all clients; a multiple of it gives the same.
    decay: share of Phi that stays.

  Returns:
    float32[C]; as before if there is no row.
  """
  total = learnt.labels.sum()
  unit = jnp.where(total > 0, total, 1)
  phi = jnp.asarray(frequencies)
  excess = jnp.maximum(learnt.labels / unit - 1 / len(learnt.labels), 1e-8)
  # One quotient: XLA rewrites x / y / exp(z) in one way for one device and in
  # another for several.
  new = decay * phi + (1 - decay) * (
      learnt.probabilities / (unit * jnp.exp(excess)))
  return jnp.where(total > 0, new, phi)


@knobs.checked(
    _PROFILES, lone_weight=knobs.Bound(cases=(
        knobs.at(0, 'clients without labels learn tail classes alone'),)),
    tail_weight=knobs.Bound(cases=(knobs.at(0, 'no row has a second chance'),)),
    tail_confidence=knobs.Bound(0, 1, cases=(
        knobs.at(0, 'no row has a second chance'),)),
    top=knobs.Bound(1, 1000, whole=True, cases=(
        knobs.at(1, 'a row has no second choice'),)),
    decay=knobs.Bound(0, 1, cases=(
        knobs.at(1, 'thresholds stay at the mean confidence'),)),
    counted=knobs.word(*COUNTED))
def fedggp(task: Task, *, profile: str = 'paper', agree: bool | None = None,
           counted: str | None = None, unlabeled_weight: float = 3.0,
           lone_weight: float = 0.1, tail_weight: float = 3.0,
           tail_confidence: float = 0.5, top: int = 2, decay: float = 0.9,
           warmup: float = 0.0, weighting: str = 'examples') -> Method:
  """Runs FixMatch with thresholds and second labels by class frequencies.

  Args:
    task: the static choices; labels must be at the clients.
    profile: 'paper' or 'code', see the module's docstring. It sets the next two
      knobs; those that are given replace its values.
    agree: whether a row must get the same label from both its views.
    counted: the clients whose rows enter the frequencies: 'all', or 'partly',
      those that hold labels for a part of their rows.
    unlabeled_weight: of L_u at clients with labels.
    lone_weight: of L_u at clients without labels.
    tail_weight: of L_t; 0 leaves it out.
    tail_confidence: only rows below it have a second chance.
    top: how many of its likeliest classes a row may choose from; the
      authors' 5 for 100 classes.
    decay: share of the classes' frequencies that stays in a round.
    warmup: share of the run, rounded up to whole rounds, in which only clients
      with labels train, on their labels; the authors' 20 of 520 rounds for
      CIFAR-100 where they have few labels.
    weighting: 'examples' counts labeled and unlabeled rows; or 'uniform'.

  Returns:
    The method. `tail_rate` is the share of unlabeled rows that learn a tail
    class.

  Raises:
    ValueError: for an unknown choice, or labels at the server.
  """
  chosen = checks.profile(_PROFILES, profile, agree=agree, counted=counted)
  checks.labels_at_clients(task.labels_at,
                           'those with labels train first, and count for more')
  s = _Settings(unlabeled_weight, lone_weight, tail_weight, tail_confidence,
                top, decay, labeled_clients.warmup_rounds(task, warmup),
                **chosen)

  def init(key: jax.Array, federation: Federation) -> tuple[Server, PyTree]:
    del federation
    return Server(assemble.new_model(task, key), jnp.full(
        task.num_classes, 1 / task.num_classes, jnp.float32)), ()

  def pseudo_label(record: Server, memory: Any, inputs: Array):
    """Labels the inputs as one batch, as the thresholds depend on it."""
    del memory
    p = jax.nn.softmax(task.apply(record.model, inputs))
    return losses.hard_label(p, threshold=thresholds(
        record.frequencies, p, jnp.ones(len(p))))

  @aggregation.linear
  def finish(server: Server, update: Any, cohort: Any, context: Any, key: Any
             ) -> tuple[Server, Metrics]:
    del cohort, context, key
    return Server(assemble.added(server.model, update.mean), moved(
        server.frequencies, update.counts, decay=s.decay)), {}

  return assemble.assemble(
      task, init=init, aggregate=finish, pseudo_label=pseudo_label,
      client_update=functools.partial(_client_update, task, s, weighting),
      sample=labeled_clients.cohorts(task, 1, warmup) if warmup else None,
      work=lambda shard: batching.num_steps(task, shard))


def _client_update(task: Task, s: _Settings, weighting: str, payload: Server,
                   client: Client, key: jax.Array) -> Update:
  shard = client.shard._replace(num_unlabeled=jnp.where(
      client.round < s.warm, 0, client.shard.num_unlabeled))
  zeros = jnp.zeros(task.num_classes)
  loss_fn = averaging.keeping_stats(
      task, _loss_fn(task, s, payload.frequencies, shard))
  model, learnt, metrics = averaging.train_locally(
      task, loss_fn, payload.model, client.train, shard, client.round, key,
      'both', Learnt(zeros, zeros))
  weight = client_weights.client_weight(shard, 'both', weighting=weighting)
  if s.counted == 'partly':
    learnt = tree.scale(learnt, (shard.num_labeled > 0).astype(jnp.float32))
  return Update(tree.subtract(model, payload.model), weight, client.memory,
                metrics, counts=client_weights.unweighted(learnt, weight))


def _loss_fn(task: Task, s: _Settings, frequencies: jax.Array, shard: Shard
             ) -> LossFn:
  """Makes the loss of a client that holds these rows; it keeps `Learnt`."""
  tail = tails(frequencies)
  weight = jnp.where(labeled_clients.has_labels(shard), s.unlabeled_weight,
                     s.lone_weight)

  def loss_fn(model, given, batch, key):
    weak, (labeled, strong), stats = network.forward_views(
        task, model, batch, key)
    p, mask = jax.nn.softmax(weak), batch.unlabeled.mask
    rows, labels = mask.sum(), p.argmax(-1)
    sure = p.max(-1) >= thresholds(frequencies, p, mask)[labels]
    used = sure & (strong.argmax(-1) == labels) if s.agree else sure
    accepted = mask * used
    loss, _ = losses.cross_entropy(strong, labels, accepted, total=rows)
    loss, metrics = objective.total(
        batch, loss, objective.labeled(labeled, batch.labeled), labelings=1,
        weight=weight, mask_rate=losses.masked_mean(used, mask))
    if s.tail_weight:
      other, share = second_chances(p, tail, s.top)
      share *= mask * (~sure & (p.max(-1) < s.tail_confidence))
      loss += s.tail_weight * losses.cross_entropy(
          strong, other, share, total=rows)[0]
      metrics['tail_rate'] = Ratio((share > 0).sum().astype(jnp.float32), rows)
    hot = jax.nn.one_hot(labels, task.num_classes)
    found = Learnt(*((accepted[:, None] * x).sum(0) for x in (p, hot)))
    return loss, Aux(stats, metrics, tree.add(given.memory, found))
  return loss_fn
