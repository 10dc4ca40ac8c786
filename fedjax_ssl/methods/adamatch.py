r"""AdaMatch at the clients: a threshold from the labeled rows, aligned labels.

Berthelot et al., AdaMatch, ICLR 2022, https://arxiv.org/abs/2106.04732. For
learning with few labels it is mostly run in the form that
microsoft/Semi-supervised-learning (USB) gave it.

Let p be the predictions for the weak views of a batch's labeled rows, q those
for its unlabeled rows, r those for strong views of these, and :math:`\tilde p`
and :math:`\tilde q` the means of p and q. Then

  :math:`\bar q_b = norm(q_b \tilde p / \tilde q)` and
  :math:`L_u = mean_b\, 1[\max_c \bar q_b(c) \ge \tau\, mean_i \max_c p_i(c)]\,
  H(\bar q_b, r_b)`.

In the paper the means are those of the batch; labels are soft; labeled rows
learn from a strong view too; and the weight of :math:`L_u` rises along a cosine
over the first half of the run. Under batch normalization, moreover, labeled
rows have logits from two passes, beside the unlabeled rows and without them;
each entry is a blend of the two with a random share of its own. USB has none of
this; its means are moving averages, and that of labeled rows starts uniform.

The authors' code (google-research/adamatch) differs from their paper: labels
are hard, the losses of the two labeled views are averaged, the mean of p is a
moving average, and that of q is over the last 128 batches; before there are as
many, the others count as uniform. Besides, and unlike 'code' here: a weight of
:math:`L_u` other than 1 is reached in the second half of the run; progress is
counted before a step; the rate falls by :math:`\cos(\arccos(.25)\,progress)`;
the loss has .001 of half the squared weights of layers, without biases and
norms; and a moving average of the model is evaluated.

With labels at the server a client sees no p. The server then sends the sums of
p and of its largest entry over its labeled rows of the round, whose mean is
taken for that of p, whatever the profile. For a batch of a
client that has no labels, the threshold is FixMatch's, tau, and the mean of p
stays.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.core import checks, knobs
from fedjax_ssl.core.local_training import Aux, Given
from fedjax_ssl.core.types import (
  Batch,
  Federation,
  Method,
  Number,
  Task,
  Variables,
)
from fedjax_ssl.data.batching import Pair
from fedjax_ssl.losses import moving
from fedjax_ssl.methods.parts import averaging, network, objective

_PROFILES: dict[str, dict[str, Any]] = {
    'paper': {'threshold': 0.9, 'decay': 0.0, 'window': 0, 'form': 'soft',
              'strong_labeled': True, 'labeled_weight': 1.0,
              'interpolate': True, 'ramp': 0.5},
    'code': {'threshold': 0.9, 'decay': 0.999, 'window': 128, 'form': 'hard',
             'strong_labeled': True, 'labeled_weight': 0.5,
             'interpolate': True, 'ramp': 0.5},
    'usb': {'threshold': 0.95, 'decay': 0.999, 'window': 0, 'form': 'hard',
            'strong_labeled': False, 'labeled_weight': 1.0,
            'interpolate': False, 'ramp': 0.0},
}


class Seen(NamedTuple):
  """Averages of what a client's models have predicted."""

  # On unlabeled rows: float32[C], zeros before the first; with a window
  # float32[W, C], a mean of each of the last W batches, uniform before.
  shares: jax.Array
  target: jax.Array  # float32[C], on labeled rows; uniform at the start.
  bar: jax.Array  # float32[], the confidence needed in the last batch.


class LabeledSums(NamedTuple):
  """Sums over the labeled rows that the server has used in a round."""

  rows: jax.Array  # float32[], their number.
  confidence: jax.Array  # float32[], of the largest probability.
  shares: jax.Array  # float32[C], of the probabilities.


class _Settings(NamedTuple):
  """`adamatch`'s knobs that its loss reads."""

  threshold: float
  decay: float
  form: str
  window: int
  strong_labeled: bool
  labeled_weight: float
  interpolate: bool
  ramp: float
  align: bool
  unlabeled_weight: float


@knobs.checked(_PROFILES, decay=knobs.AVERAGE,
               form=knobs.word('soft', 'hard'),
               window=knobs.Bound(0, 10_000, whole=True),
               threshold=knobs.CONFIDENCE._replace(
                   cases=(knobs.at(0, 'every unlabeled row counts'),),
                   advice='a share of the confidence on labeled rows'))
def adamatch(task: Task, *, profile: str = 'paper',
             threshold: float | None = None, decay: float | None = None,
             window: int | None = None, form: str | None = None,
             strong_labeled: bool | None = None,
             labeled_weight: float | None = None,
             interpolate: bool | None = None, ramp: float | None = None,
             align: bool = True, unlabeled_weight: float = 1.0,
             server: str = 'fedavg', mu: float = 0.01,
             weighting: str = 'examples', labeled_client_weight: float = 1.0,
             keep_local: bool = False) -> Method:
  """Runs FixMatch with a relative threshold, labels aligned to labeled rows.

  The means are a client's own, and stay on it from round to round as
  FlexMatch's memory does. A batch without unlabeled rows leaves their mean.

  Args:
    task: the static choices.
    profile: 'paper', 'code' or 'usb', see the module's docstring. It sets the
      knobs down to `ramp`; those that are given replace its values.
    threshold: tau, a factor on the mean confidence of labeled rows; the paper's
      0.9, USB's 0.95.
    decay: of the means; 0 is the batch alone, USB's 0.999 takes thousands of
      steps to settle.
    window: batches over which the mean of unlabeled rows is taken; 0 is by
      `decay`, as that of labeled rows always is.
    form: of labels, 'soft' or 'hard'.
    strong_labeled: whether labeled rows learn from a strong view too.
    labeled_weight: of the loss of each view of labeled rows.
    interpolate: whether logits of labeled rows are blends of two passes. It
      does nothing without batch statistics, nor at the server.
    ramp: share of the run over which the weight of L_u rises; 0 is none.
    align: whether predictions are aligned to those for labeled rows.
    unlabeled_weight: of the unlabeled rows' loss; 0 leaves the supervised part.
    server: 'fedavg' or 'fedprox', or 'local' without communication.
    mu: weight of FedProx's term; ignored by the others.
    weighting: 'examples' counts labeled and unlabeled rows; or 'uniform'.
    labeled_client_weight: factor on the weight of a client that holds labels;
      1 is no difference.
    keep_local: keep each client's last model, to report local accuracy.

  Returns:
    The method. The metric `bar` is the confidence that a row must reach, a mean
    over rows.

  Raises:
    ValueError: for an unknown choice or a number out of range.
  """
  chosen = checks.profile(
      _PROFILES, profile, threshold=threshold, decay=decay, window=window,
      form=form, strong_labeled=strong_labeled, labeled_weight=labeled_weight,
      interpolate=interpolate, ramp=ramp)
  s = _Settings(**chosen, align=align, unlabeled_weight=unlabeled_weight)
  if s.ramp:
    task.horizon(f'ramp={s.ramp}')

  def remember(federation: Federation) -> Seen:
    equal = jnp.ones((federation.num_clients, task.num_classes))
    even = equal / task.num_classes
    shares = (jnp.repeat(even[:, None], int(s.window), axis=1) if s.window
              else 0 * equal)
    return Seen(shares, even, s.threshold * equal[:, 0])

  def pseudo_label(record, memory, inputs):
    seen = memory.kept
    p = _labels(s, seen, jax.nn.softmax(task.apply(record.model, inputs)))
    return losses.hard_label(p, threshold=seen.bar)

  def loss_fn(model, given, batch, key):
    return _loss(task, s, model, given, batch, key)

  def server_loss(model, given, batch, key):
    return _server_loss(task, s, model, given, batch, key)

  zero = jnp.zeros(())
  return averaging.averaging(
      task, loss_fn, streams='both', server=server, mu=mu, weighting=weighting,
      labeled_client_weight=labeled_client_weight, keep_local=keep_local,
      remember=remember, server_loss=server_loss,
      server_memory=LabeledSums(zero, zero, jnp.zeros(task.num_classes)),
      pseudo_label=pseudo_label)


def updated_averages(seen: Seen, unlabeled: tuple[jax.Array, jax.Array],
                     labeled: tuple[jax.Array, jax.Array] | None,
                     received: LabeledSums | None, *, threshold: float,
                     decay: float) -> Seen:
  """Moves the means by a batch, and sets the batch's threshold.

  Args:
    seen: before.
    unlabeled: probabilities float[B, C] and mask float32[B].
    labeled: the same of labeled rows; None if they are at the server.
    received: what the server has sent in that case.
    threshold: tau.
    decay: of the means; with a window of that of labeled rows alone.

  Returns:
    The means with the batch, and the confidence that its rows must reach.
  """
  q, real = unlabeled
  if seen.shares.ndim == 1:
    shares = moving.moved_shares(seen.shares, q, real, decay=decay)
  else:
    shares = moving.moved(
        seen.shares, jnp.concatenate(
            [seen.shares[1:], moving.row_mean(q, real)[None]]), real, decay=0)
  if labeled is not None:
    p, mask = labeled
    rows, confidence = mask.sum(), moving.row_mean(p.max(-1), mask)
    target = moving.moved(seen.target, moving.row_mean(p, mask), mask,
                          decay=decay)
  else:
    assert received is not None
    rows, most = received.rows, jnp.maximum(received.rows, 1)
    confidence = received.confidence / most
    target = jnp.where(rows > 0, received.shares / most, seen.target)
  bar = threshold * jnp.where(rows > 0, confidence, 1)
  return Seen(shares, target, bar.astype(seen.bar.dtype))


def _labels(s: _Settings, seen: Seen, p: jax.Array) -> jax.Array:
  """Returns the predictions float32[B, C], aligned if `s.align`."""
  if not s.align:
    return p
  shares = seen.shares if seen.shares.ndim == 1 else seen.shares.mean(0)
  return moving.aligned(p, shares, seen.target)


def _loss(task: Task, s: _Settings, model: Variables, given: Given,
          batch: Pair, key: jax.Array) -> tuple[jax.Array, Aux]:
  """Computes what a client minimises."""
  rows = batch.unlabeled
  assert rows is not None
  target, labeled, strong = network.views(task, batch, key)
  known = _known(task, s, labeled, batch.labeled, key)
  weak, (*logits, ours), stats = network.forward_with_targets(
      task, model, target, *known, strong, key=key)
  blends = bool(known) and s.interpolate and network.is_coupled(task)
  if blends:
    logits = _blended(task, model, known, logits, key)
  p = jax.nn.softmax(weak)
  seen = updated_averages(
      given.memory, (p, rows.mask), (_softmax(logits[0]), known[0].mask)
      if known else None, given.received, threshold=s.threshold, decay=s.decay)
  labels = _labels(s, seen, p)
  sure = (labels.max(-1) >= seen.bar).astype(jnp.float32)
  loss, _ = losses.cross_entropy(
      ours, labels if s.form == 'soft' else labels.argmax(-1).astype(jnp.int32),
      rows.mask * sure, total=rows.mask.sum())
  rising: Number = 1.0
  if s.ramp:
    assert batch.progress is not None
    rising = losses.ramp_up(batch.progress, s.ramp, shape='cosine')
  loss, metrics = objective.total(
      batch, loss, _labeled_loss(s, logits, batch.labeled), labelings=1,
      weight=s.unlabeled_weight * rising,
      mask_rate=losses.masked_mean(sure, rows.mask),
      labeled_views=len(known) * (2 if blends else 1))
  metrics['bar'] = network.over_rows(seen.bar, rows)
  return loss, Aux(stats, metrics, seen)


def _server_loss(task: Task, s: _Settings, model: Variables, given: Given,
                 batch: Pair, key: jax.Array) -> tuple[jax.Array, Aux]:
  """Computes what the server minimises on its labels; keeps `LabeledSums`."""
  rows = batch.labeled
  assert rows is not None
  known = _known(task, s, network.labeled_view(task, rows, key), rows, key)
  logits, stats = network.forward(task, model, *known, key=key)
  p = _softmax(logits[0])
  sums = LabeledSums(rows.mask.sum(), (rows.mask * p.max(-1)).sum(),
                     (rows.mask[:, None] * p).sum(0))
  loss, metrics = objective.total(
      batch, None, _labeled_loss(s, logits, rows), labelings=0,
      labeled_views=len(known))
  return loss, Aux(stats, metrics, jax.tree.map(
      lambda old, new: (old + new).astype(old.dtype), given.memory, sums))


def _softmax(logits: jax.Array) -> jax.Array:
  """Computes probabilities, constants for derivatives."""
  return jax.nn.softmax(jax.lax.stop_gradient(logits))


def _known(task: Task, s: _Settings, weak: Batch | None, rows: Batch | None,
           key: jax.Array) -> list[Batch]:
  """Returns the views of labeled rows that are learnt, the weak one first."""
  if weak is None or rows is None:
    return []
  if not s.strong_labeled:
    return [weak]
  return [weak, network.strongly(task, rows, jax.random.fold_in(key, 0x57))]


def _blended(task: Task, model: Variables, known: list[Batch],
             logits: list[jax.Array], key: jax.Array) -> list[jax.Array]:
  """Blends `logits` with those of a pass over the labeled rows alone.

  The statistics of that pass are not kept.
  """
  alone, _ = network.forward(task, model, *known, key=key)
  keys = jax.random.split(jax.random.fold_in(key, 0xb1), len(alone))
  shares = [jax.random.uniform(k, x.shape, x.dtype)
            for k, x in zip(keys, logits, strict=True)]
  return [share * beside + (1 - share) * by_itself
          for share, beside, by_itself in zip(
              shares, logits, alone, strict=True)]


def _labeled_loss(s: _Settings, logits: list[jax.Array], rows: Batch | None
                  ) -> jax.Array | None:
  """Computes L_s, the sum over views; None without labeled rows."""
  if rows is None:
    return None
  parts = [losses.cross_entropy(x, rows.labels, rows.mask)[0] for x in logits]
  return s.labeled_weight * jnp.stack(parts).sum()
