r"""PDCFed: learns less sure rows too, if a strong view hardly changes them.

"Two-stage Sampling with Predicted Distribution Changes in Federated
Semi-supervised Learning", 2024; the paper was not at hand. The authors' code is
maxiaum/PDCFed.

A client with labels minimises cross entropy. For the others, let w and s be the
probabilities that the model in training gives the weak and the strong view of a
row. The likeliest class of w is the row's label. The first stage takes the rows
with :math:`\max w \ge \tau`. For the other rows it matters how many classes
gain from the weak view to the strong one, and how far the prediction moves:

  :math:`g = \frac1C |\{c : s_c > w_c\}|`, :math:`D = \|w - s\|_2`,
  :math:`F = 0.999\, e^{-(g - \mu)^2 d / 2 v}`, d = 4 if g is at most
  :math:`\mu`, else 9.

Here :math:`\mu` and v are the client's own moving averages of the mean and the
variance of g; they start at 1/C and 1. The second stage takes the rows with
:math:`\tau_{low} < \max w < \tau` and :math:`e^{-D / F} \ge \sigma`. The client
minimises

  :math:`\lambda_u\, mean(m_1 + m_2) CE(\hat y, s)
  + \lambda_e\, mean(m_3) H(softmax(z_s / T))`

with means over all rows of the batch. :math:`m_1` and :math:`m_2` are 1 for the
rows of the two stages, and :math:`m_3` for those with
:math:`\max w > \tau_{low}` and :math:`e^{-D / F} \ge \sigma`.

The code gives the cross entropy s in place of the logits, so that a softmax is
taken of probabilities: gradients are small, and its :math:`\lambda_u` is chosen
for them. The profile 'code' does this. In 'paper', which is our reading, the
cross entropy is that of the logits :math:`z_s`, and :math:`\lambda_u` is 1, as
in other methods.

Clients keep the optimizer's state from round to round. The server weighs them
by rows, those with labels six times. The authors draw 5 of 10 clients, so that
the only one with labels may be missing. They keep the model that was best on
validation rows; here it is the last. A client with both kinds of rows, which
they do not have, minimises the sum of both losses.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.core import checks, client_weights, knobs, local_training, tree
from fedjax_ssl.core.local_training import Aux
from fedjax_ssl.core.types import (
  Array,
  Batch,
  Client,
  Federation,
  Method,
  Metrics,
  PyTree,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.data.batching import Pair
from fedjax_ssl.losses import moving
from fedjax_ssl.methods.parts import (
  assemble,
  averaging,
  labeled_clients,
  network,
  objective,
)

LEARNT = ('logits', 'probabilities')
_PROFILES: dict[str, dict[str, Any]] = {
    'code': {'learnt': 'probabilities', 'unlabeled_weight': 0.027},
    'paper': {'learnt': 'logits', 'unlabeled_weight': 1.0}}
_MOST, _BELOW, _ABOVE = 0.999, 4.0, 9.0  # Of F.


class Seen(NamedTuple):
  """Moving averages over a client's steps of g, how many classes gain."""

  mean: jax.Array  # float32[], mu.
  variance: jax.Array  # float32[], v.


class Memory(NamedTuple):
  """What stays on a client."""

  opt_state: Any  # () if optimizers are not kept.
  seen: Seen


class Rows(NamedTuple):
  """Which rows of a batch are learnt from, bool[B] each."""

  first: jax.Array  # Sure: m_1.
  second: jax.Array  # Less sure, and hardly changed: m_2.
  settled: jax.Array  # Those whose entropy is minimised: m_3.


class _Settings(NamedTuple):
  """`pdcfed`'s knobs that its loss reads."""

  threshold: float
  low_threshold: float
  least_weight: float
  unlabeled_weight: float
  entropy_weight: float
  temperature: float
  decay: float
  learnt: str


def gains(weak: Array, strong: Array) -> jax.Array:
  """Computes g, the share of classes that gain, float32[B] of float[B, C]."""
  return jnp.mean(jnp.asarray(strong) > weak, -1, dtype=jnp.float32)


def updated_averages(seen: Seen, gained: Array, mask: Array, *, decay: float
                     ) -> Seen:
  """Moves the averages by a batch of g, with its unbiased variance.

  Args:
    seen: before.
    gained: float32[B], g.
    mask: float32[B].
    decay: 0 is the batch, 1 stays.

  Returns:
    The averages; as they were if the batch has no row. A batch of one row does
    not move the variance.
  """
  return Seen(
      moving.moved(seen.mean, moving.row_mean(gained, mask), mask,
                   decay=decay),
      moving.moved(seen.variance, moving.variance_of(gained, mask), mask,
                   decay=decay, min_rows=2))


def weights(weak: Array, strong: Array, seen: Seen) -> jax.Array:
  """Computes exp(-D / F), how little the strong views change predictions.

  Args:
    weak: float[B, C], probabilities.
    strong: the same of the strong views.
    seen: the averages after this batch.

  Returns:
    float32[B], 1 where both views are the same.
  """
  apart = gains(weak, strong) - seen.mean
  tiny = jnp.finfo(jnp.float32).tiny
  divisor = jnp.where(apart <= 0, _BELOW, _ABOVE)
  usual = _MOST * jnp.exp(
      -jnp.square(apart) * divisor / jnp.maximum(2 * seen.variance, tiny))
  far = jnp.linalg.norm(jnp.asarray(weak) - strong, axis=-1)
  return jnp.exp(-far / jnp.maximum(usual, tiny))


def chosen_rows(weak: Array, strong: Array, seen: Seen, *,
                threshold: float = 0.85, low_threshold: float = 0.6,
                least_weight: float = 0.6) -> Rows:
  """Samples rows in two stages; see the module's docstring.

  Args:
    weak: float[B, C], probabilities.
    strong: the same of the strong views.
    seen: the averages after this batch.
    threshold: tau.
    low_threshold: tau_low.
    least_weight: sigma.
  """
  confidence = jnp.asarray(weak).max(-1)
  first = confidence >= threshold
  settled = (confidence > low_threshold) & (
      weights(weak, strong, seen) >= least_weight)
  return Rows(first, settled & ~first, settled)


@knobs.checked(
    _PROFILES, learnt=knobs.word(*LEARNT), decay=knobs.AVERAGE,
    temperature=knobs.Bound(above=True),
    low_threshold=knobs.Bound(0, 1, cases=(
        knobs.at(1, 'the second stage is off'),)),
    least_weight=knobs.Bound(0, 1.1, cases=(
        knobs.at(0, 'every row beyond the low threshold counts'),
        knobs.over(1, 'the second stage is off'))),
    entropy_weight=knobs.Bound(cases=(
        knobs.at(0, 'the entropy is left as it is'),)))
def pdcfed(task: Task, *, profile: str = 'code', learnt: str | None = None,
           threshold: float = 0.85, low_threshold: float = 0.6,
           least_weight: float = 0.6, unlabeled_weight: float | None = None,
           entropy_weight: float = 1e-3, temperature: float = 0.9,
           decay: float = 0.999, passes: int = 1, unlabeled_rate: float = 0.7,
           labeled_client_weight: float = 6.0, clip_norm: float = 5.0,
           keep_momentum: bool = True) -> Method:
  """Learns from sure rows, and from others that a strong view hardly changes.

  Meant for clients with all labels beside clients with none. Those with labels
  train for the task's local epochs, the authors' for 2, or 3 on SVHN. Defaults
  are theirs for CIFAR-10; those for other data sets are named below.

  Args:
    task: the static choices; its learning rate is that of labeled clients.
    profile: 'code' or 'paper', see the module's docstring. It sets `learnt` and
      `unlabeled_weight`, if these are not given.
    learnt: what the cross entropy of pseudo-labels takes as its logits: the
      'logits', or the 'probabilities'.
    threshold: tau, from which on a row is sure; 0.8 for SVHN.
    low_threshold: tau_low, above which a row may be taken in the second stage.
    least_weight: sigma in [0, 1.1]; the higher it is, the less such a row may
      change; 0.4 for SVHN.
    unlabeled_weight: lambda_u; None is the profile's, 0.027 or 1. The code has
      0.05 for SVHN.
    entropy_weight: lambda_e; 1e-4 for CIFAR-100.
    temperature: T, of the entropy.
    decay: of the averages.
    passes: epochs of a client without labels; not beside --local_steps.
    unlabeled_rate: learning rate of clients without labels over that of the
      others; a third for CIFAR-100.
    labeled_client_weight: factor on the weight of a client with labels.
    clip_norm: gradients are scaled down to this norm; inf is off.
    keep_momentum: whether clients keep their optimizer's state between rounds,
      which takes as much memory as a model each; else it starts anew.

  Returns:
    The method. `entropy_loss` is the entropy that is minimised, a mean over the
    batch, and `second_rate` the share of unlabeled rows in the second stage.
    Evaluation judges the labels of the first stage.

  Raises:
    ValueError: for an unknown choice, labels at the server, or a number out of
      range.
  """
  labeled_clients.check_placement(task)
  labeled_clients.check_passes(task, passes)
  chosen = checks.profile(_PROFILES, profile, learnt=learnt,
                          unlabeled_weight=unlabeled_weight)
  s = _Settings(threshold, low_threshold, least_weight,
                entropy_weight=entropy_weight, temperature=temperature,
                decay=decay, **chosen)
  task = local_training.clipped(task, clip_norm)

  def init(key: jax.Array, federation: Federation
           ) -> tuple[assemble.Server, PyTree]:
    model = assemble.new_model(task, key)
    start = Seen(jnp.float32(1 / task.num_classes), jnp.float32(1))
    opt_state = (task.optimizer(jnp.int32(0)).init(model.params)
                 if keep_momentum else ())
    return assemble.Server(model), tree.repeat(
        Memory(opt_state, start), federation.num_clients)

  def client_update(payload: assemble.Server, client: Client, key: jax.Array
                    ) -> Update:
    known = labeled_clients.has_labels(client.shard)
    order_key, step_key = jax.random.split(key)
    made = batching.batches(
        dataclasses.replace(task, local_epochs=1), client.train, client.shard,
        order_key, 'both', client.round)._replace(
            num_steps=labeled_clients.num_steps(task, client.shard, passes))
    loss_fn = averaging.keeping_stats(
        task, functools.partial(_loss, task, s))
    learner, metrics = local_training.resumed(
        task, lambda optimizer: local_training.gradient_step(
            loss_fn, optimizer, jnp.where(known, 1, unlabeled_rate)),
        payload.model, client.memory.opt_state, made, client.round, step_key,
        memory=client.memory.seen)
    metrics.update(labeled_clients.processed(task, made, client.shard))
    return Update(
        tree.subtract(learner.model, payload.model),
        client_weights.client_weight(
            client.shard, 'both', weighting='examples',
            labeled_client_weight=labeled_client_weight),
        Memory(learner.opt_state if keep_momentum else (), learner.memory),
        metrics)

  return assemble.assemble(
      task, init=init, client_update=client_update,
      work=lambda shard: labeled_clients.num_steps(task, shard, passes),
      pseudo_label=assemble.confident_labels(task, threshold))


def _loss(task: Task, s: _Settings, model: Variables, seen: Seen, batch: Pair,
          key: jax.Array) -> tuple[jax.Array, Aux]:
  """Computes the sum of both losses; absent kinds of rows cost no time."""
  known, rows = batch.labeled, batch.unlabeled
  assert known is not None and rows is not None  # Both are asked for.
  keys = jax.random.split(key)

  labeled, stats = lax.cond(
      known.mask.sum() > 0,
      lambda: network.on_labels(task, model, known, keys[0]),
      lambda: (jnp.zeros((), jnp.result_type(float)), model.stats))
  between = model._replace(stats=stats)
  part = functools.partial(_of_unlabeled, task, s, between, seen, rows, keys[1])
  shapes = jax.eval_shape(part)
  unlabeled, entropy, rates, seen, stats = lax.cond(
      rows.mask.sum() > 0, part, lambda: (
          *tree.zeros_like(shapes[:3]), seen, stats))
  loss, metrics = objective.total(batch, unlabeled, labeled, labelings=1,
                                  weight=s.unlabeled_weight,
                                  mask_rate=rates['mask_rate'])
  metrics['second_rate'] = network.over_rows(rates['second_rate'], rows)
  metrics['entropy_loss'] = network.over_rows(entropy, rows)
  return loss + s.entropy_weight * entropy, Aux(stats, metrics, seen)


def _of_unlabeled(task: Task, s: _Settings, model: Variables, seen: Seen,
                  rows: Batch, key: jax.Array
                  ) -> tuple[jax.Array, jax.Array, Metrics, Seen, PyTree]:
  """Computes both unlabeled losses, rates of rows, averages and statistics."""
  keys = jax.random.split(key)
  weak, (strong,), stats = network.forward_with_targets(
      task, model, network.weakly(task, rows, keys[0]),
      network.strongly(task, rows, keys[1]), key=key)
  before, after = jax.nn.softmax(weak), jax.nn.softmax(strong)
  fixed = lax.stop_gradient(after)
  seen = updated_averages(seen, gains(before, fixed), rows.mask, decay=s.decay)
  found = chosen_rows(
      before, fixed, seen, threshold=s.threshold,
      low_threshold=s.low_threshold, least_weight=s.least_weight)
  total = rows.mask.sum()
  taken = found.first | found.second
  loss, _ = losses.cross_entropy(
      after if s.learnt == 'probabilities' else strong, before.argmax(-1),
      rows.mask * taken, total=total)
  flat = jax.nn.log_softmax(strong / s.temperature)
  entropy = losses.masked_mean(
      -jnp.sum(jnp.exp(flat) * flat, -1), rows.mask * found.settled,
      total=total)
  rates = {'mask_rate': losses.masked_mean(taken, rows.mask),
           'second_rate': losses.masked_mean(found.second, rows.mask)}
  return loss, entropy, rates, seen, stats
