"""FedDure's local iteration: a bi-level step of three networks at once.

Equations have the numbers of Bai et al., FedDure, AAAI 2024,
https://arxiv.org/abs/2307.05358. The parts are in `regulation`.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl import losses
from fedjax_ssl.core import checks, tree
from fedjax_ssl.core.local_training import descend
from fedjax_ssl.core.types import Batch, COUNTED, Metrics, PyTree, Variables
from fedjax_ssl.methods.feddure import regulation
from fedjax_ssl.methods.parts import network

# Rows of Table 2: FedDure, F-reg, C-reg, Baseline+MAML, Baseline.
REGULATORS = ('both', 'fine', 'coarse', 'maml', 'none')
# Forward and backward passes of a step through the network, each as (passes of
# a labeled row, of an unlabeled row). The second derivative's pass counts as
# forward, for it goes from the inputs to the logits.
_PASSES = {'both': ((4, 4), (2, 3)), 'fine': ((2, 3), (2, 2)),
           'coarse': ((3, 3), (1, 2)), 'maml': ((2, 3), (1, 2)),
           'none': ((1, 2), (1, 1))}
# (model, inputs, mask[, key]) -> logits float[B, C], statistics:
# `Task.apply_train`.
Apply = Callable[..., tuple[jax.Array, PyTree]]


class Rules(NamedTuple):
  """Optimizers of the local model (10), of C-reg (2) and of F-reg (5)."""

  local: optax.GradientTransformation
  coarse: optax.GradientTransformation
  fine: optax.GradientTransformation


class Carry(NamedTuple):
  """What a client's loop carries."""

  model: Variables  # theta, and the running statistics.
  coarse: PyTree  # phi, or () without C-reg.
  fine: PyTree  # w, a `regulation.Fine`, or () without F-reg.
  opt_states: Rules  # Their states, in the places of their rules.


def start(model: Variables, coarse: PyTree, fine: PyTree, rules: Rules
          ) -> Carry:
  """Makes a carry with fresh optimizers.

  As in start(model, model.params, init_fine(key, num_classes), rules).

  Args:
    model: theta, with the running statistics.
    coarse: phi, parameters of the same network; () without C-reg.
    fine: w, see `regulation.init_fine`; () without F-reg.
    rules: the optimizers.
  """
  return Carry(model, coarse, fine, Rules(
      rules.local.init(model.params), rules.coarse.init(coarse),
      rules.fine.init(fine)))


def _together(apply: Apply, model: Variables, views: Sequence[Batch],
              dropping: Sequence[jax.Array]
              ) -> tuple[list[jax.Array], PyTree]:
  """Runs one pass over several views: logits of each, and the statistics."""
  rows = network.joined(views)
  logits, stats = apply(model, rows.inputs, rows.mask, *dropping)
  return network.parted(logits, views), stats


def step(apply: Apply, carry: Carry, views: network.Views, *, rules: Rules,
         which: str = 'both', virtual_rate: float = 5e-4,
         threshold: float = 0.95, detach: bool = False,
         form: str = 'probabilities', joint: bool = False,
         key: jax.Array | None = None) -> tuple[Carry, Metrics]:
  r"""Does one local iteration of FedDure.

  Its parts are, in order: pseudo-labels (1); the virtual step to phi^- (4);
  F-reg's step (5), whose gradient goes through the virtual one; C-reg's step
  (2); its reward d (3); the row weights m (6); and the local model's step (10),

    :math:`\theta \leftarrow \theta - \eta (g_s + g_u + g_d)`.

  g_s is the gradient of the labeled loss (9), g_u that of the pseudo-labels
  weighted by m (7), and g_d is d times that of all pseudo-labels (8).

  Args:
    apply: the network in training, as `Task.apply_train`.
    carry: theta, phi, w and their optimizers' states.
    views: A_w(u), the labeled rows and A_s(u), raw; there must be labeled ones,
      but a masked row changes nothing.
    rules: the optimizers.
    which: 'both'; 'fine', without (8) and with theta in place of phi in (4)
      and (5); 'coarse', whose weights in (2) and (7) are 1 from the threshold
      on and else 0; 'maml', FixMatch whose labeled loss is taken after one
      virtual step on its unlabeled one; 'none', FixMatch.
    virtual_rate: eta_s of (4) and of the step of 'maml'; 0 leaves F-reg as it
      is and makes 'maml' FixMatch.
    threshold: confidence for the last three choices; 0 accepts all, above 1
      none.
    detach: whether the weights H are constants for phi in (2) and (4).
    form: what F-reg sees, 'probabilities' or 'logits'.
    joint: whether the weak view goes through theta together with the other two,
      as networks with batch statistics need.
    key: draws dropout, which is the same in all passes over the same rows. A
      weak view with a pass of its own has no dropout; None drops nothing.

  Returns:
    The carry, and metrics: `reward`, the d of C-reg, if there is one;
    `mask_rate`, the mean of m; `labeled_loss`, `unlabeled_loss`, and their sum
    `train_loss`, without the reward's part; and the passes through the network.
    The first four are `Ratio`s, total over rows.

  Raises:
    ValueError: for an unknown `which` or `form`, or without labeled rows.
  """
  (weak, labeled, strong), model = views, carry.model
  checks.check('which', which, REGULATORS)
  checks.check('form', form, regulation.FORMS)
  if labeled is None:
    raise ValueError('views have no labeled rows, which both regulators need.')
  dropping = () if key is None else (key,)

  def logits_of(params, rows):
    return apply(model._replace(params=params), rows.inputs, rows.mask,
                 *dropping)[0]

  def labeled_loss(params):
    return losses.cross_entropy(
        logits_of(params, labeled), labeled.labels, labeled.mask)[0]

  def passes(params):
    seen = (weak, labeled, strong) if joint else (labeled, strong)
    logits, stats = _together(apply, model._replace(params=params), seen,
                              dropping)
    return logits[-2:], (logits[0], stats)

  (labeled_logits, strong_logits), pullback, (weak_logits, stats) = jax.vjp(
      passes, model.params, has_aux=True)
  target = weak_logits if joint else apply(
      jax.lax.stop_gradient(model), weak.inputs, weak.mask)[0]
  labels, accepted = losses.pseudo_label(
      target, threshold=0.0 if which in ('both', 'fine') else threshold)

  ahead = None
  if which in ('both', 'coarse'):
    ahead = regulation.look_ahead(
        lambda phi: logits_of(phi, strong), carry.coarse, labels, strong.mask,
        detach=detach, form=form)
  elif which == 'fine':
    ahead = regulation.Lookahead(
        model.params, strong_logits,
        lambda g: pullback([jnp.zeros_like(labeled_logits), g])[0],
        labels, strong.mask, detach=detach, form=form)
  after, reward = carry, jnp.float32(0)
  if ahead is not None:
    after, reward = _regulate(
        carry, ahead, labeled_loss, labeled.mask.sum() > 0, accepted, rules,
        which, virtual_rate)

  weights = jax.lax.stop_gradient(
      regulation.row_weights(after.fine, strong_logits, form=form)
      if which in ('both', 'fine') else accepted)

  parts = functools.partial(
      _parts, labeled=labeled, strong=strong, labels=labels, weights=weights)

  def total(logits):
    supervised, weighted, plain = parts(logits)
    return supervised + weighted + reward * plain, (supervised, weighted)

  (_, (supervised, weighted)), slopes = jax.value_and_grad(
      total, has_aux=True)([labeled_logits, strong_logits])
  if which == 'maml':
    grads = _maml_gradient(passes, model.params, labeled_loss,
                           lambda logits: parts(logits)[1], virtual_rate)
  else:
    grads, = pullback(slopes)
  params, local_state = descend(
      rules.local, grads, carry.opt_states.local, model.params)
  return after._replace(
      model=Variables(params, stats),
      opt_states=after.opt_states._replace(local=local_state)), _metrics(
          labeled, strong, which, weights, supervised, weighted, reward)


def _parts(logits: Sequence[jax.Array], *, labeled: Batch, strong: Batch,
           labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
  """Computes the losses (9), (7) and, without d, (8), each float32[]."""
  of_labeled, of_strong = logits
  return (losses.cross_entropy(of_labeled, labeled.labels, labeled.mask)[0],
          regulation.weighted_loss(of_strong, labels, strong.mask, weights)[0],
          losses.cross_entropy(of_strong, labels, strong.mask)[0])


def _regulate(carry: Carry, ahead: regulation.Lookahead,
              labeled_loss: Callable[[PyTree], jax.Array], known: jax.Array,
              accepted: jax.Array, rules: Rules, which: str,
              virtual_rate: float) -> tuple[Carry, jax.Array]:
  """Does the steps (5) of F-reg and (2) of C-reg, if there are such.

  Returns the carry and the reward (3). `labeled_loss` takes parameters;
  `known` says whether it has rows; `accepted` are the row weights if there is
  no F-reg. F-reg moves if there are rows of both kinds and a virtual rate. For
  C-reg that choice, over a whole network, would cost a tenth of a step.
  """
  reward = jnp.float32(0)
  (local_state, coarse_state, fine_state) = carry.opt_states
  coarse, fine = carry.coarse, carry.fine
  if which != 'coarse':
    _, grads = regulation.meta_gradient(
        ahead, fine, labeled_loss, rate=virtual_rate)
    fine, fine_state = descend(rules.fine, grads, fine_state, fine,
                               moves=(
                                   known & (ahead.mask.sum() > 0)
                                   & (virtual_rate > 0)))
  if which != 'fine':
    grads = (ahead.gradient(lambda logits: accepted) if which == 'coarse'
             else ahead.fine_gradient(fine))
    before = labeled_loss(coarse)
    coarse, coarse_state = descend(rules.coarse, grads, coarse_state, coarse)
    reward = jax.lax.stop_gradient(before - labeled_loss(coarse))
  return Carry(carry.model, coarse, fine,
               Rules(local_state, coarse_state, fine_state)), reward


def _metrics(labeled: Batch, strong: Batch, which: str, weights: jax.Array,
             supervised: jax.Array, weighted: jax.Array, reward: jax.Array
             ) -> Metrics:
  """Collects what `step` reports."""
  metrics = {
      'mask_rate': network.over_rows(
          losses.masked_mean(weights, strong.mask), strong),
      'labeled_loss': network.over_rows(supervised, labeled),
      'unlabeled_loss': network.over_rows(weighted, strong),
      'train_loss': supervised + weighted}
  for name, (known_times, times) in zip(COUNTED, _PASSES[which], strict=True):
    metrics[name] = (known_times * labeled.mask.sum()
                     + times * strong.mask.sum())
  if which in ('both', 'coarse'):
    metrics['reward'] = network.over_rows(reward, labeled)
  return metrics


def _maml_gradient(passes, params, labeled_loss, unlabeled_loss, rate):
  """Computes the exact gradient of L_u(theta) + L_s(theta - rate grad L_u)."""
  def inner(params):
    return unlabeled_loss(passes(params)[0])

  def outer(params):
    loss, grads = jax.value_and_grad(inner)(params)
    moved = tree.subtract(params, tree.scale(grads, rate))
    return loss + labeled_loss(moved)
  return jax.grad(outer)(params)
