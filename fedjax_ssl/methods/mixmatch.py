"""MixMatch at the clients, as FedSSL's baseline L-MixUp or as the original.

Berthelot et al., MixMatch, NeurIPS 2019, https://arxiv.org/abs/1905.02249;
Fan et al., FedSSL, IJCAI 2022, whose agents mix the rows they hold (L-MixUp).
For texts the word vectors are mixed, as by Guo et al.,
https://arxiv.org/abs/1905.08941; both rows of a blend train them.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.core import checks, knobs
from fedjax_ssl.core.local_training import Aux, LossFn
from fedjax_ssl.core.types import Batch, Method, Task, Variables
from fedjax_ssl.methods.parts import assemble, averaging, network, objective

# What the profiles fix; see `_Settings`.
_PROFILES: dict[str, dict[str, Any]] = {
    'fedssl': {'all_views': False, 'across': False, 'dominant': False,
               'squared': False, 'unlabeled_weight': 1.0, 'ramp': 0.0},
    'original': {'all_views': True, 'across': True, 'dominant': True,
                 'squared': True, 'unlabeled_weight': 75.0, 'ramp': 1.0},
}


_Targeted = tuple[Batch, jax.Array]  # Rows and float32[B, C], their targets.


class _Settings(NamedTuple):
  """The knobs of `mixmatch`, resolved."""

  num_views: int
  temperature: float
  alpha: float
  unlabeled_weight: float
  ramp: float  # Share of the run over which that weight rises.
  all_views: bool  # Mix all views behind a pseudo-label, or one fresh view.
  across: bool  # Mix labeled rows with unlabeled ones.
  dominant: bool  # Keep a blend nearer to its first row.
  squared: bool  # Squared error on unlabeled blends, not cross entropy.


def partners(key: jax.Array, mask: jax.Array) -> jax.Array:
  """Draws a random permutation of the real rows; masked rows map anywhere.

  Args:
    key: PRNG key.
    mask: float32[B], 1 for a real row.

  Returns:
    int32[B], the partner of each row.
  """
  order = jnp.argsort(jax.random.uniform(key, mask.shape) + 2 * (1 - mask))
  rank = jnp.cumsum(mask).astype(jnp.int32) - 1
  return order[jnp.maximum(rank, 0)]


def mix(key: jax.Array, inputs: jax.Array, targets: jax.Array,
        mask: jax.Array, *, alpha: float, dominant: bool
        ) -> tuple[jax.Array, jax.Array]:
  """Blends every real row with another real one: inputs and targets alike.

  Args:
    key: PRNG key.
    inputs: [B, ...], raw pixels or word vectors.
    targets: float32[B, C].
    mask: float32[B].
    alpha: of Beta(alpha, alpha); 0 leaves the rows unmixed. Towards 0 a blend
      is its first row if `dominant`, else one of the two.
    dominant: max(lam, 1 - lam), MixMatch's equation 9.

  Returns:
    Blended inputs and targets, float32.
  """
  pair_key, ratio_key = jax.random.split(key)
  other = partners(pair_key, mask)
  first = (inputs.astype(jnp.float32), targets)
  if alpha == 0:
    return first
  lam = losses.mixup_ratio(ratio_key, mask.shape, alpha=alpha,
                           dominant=dominant)
  return losses.mixup(lam, first, jax.tree.map(lambda x: x[other], first))


@knobs.checked(_PROFILES)
def mixmatch(task: Task, *, profile: str = 'fedssl', num_views: int = 2,
             temperature: float = 0.5, alpha: float = 0.75,
             unlabeled_weight: float | None = None, ramp: float | None = None,
             server: str = 'fedavg', mu: float = 0.01,
             weighting: str = 'examples', labeled_client_weight: float = 1.0,
             keep_local: bool = False) -> Method:
  """Trains on blends of rows and of their labels or pseudo-labels.

  With labels at the server it trains on blends of its labeled rows, and each
  client on blends of its unlabeled ones.

  'original' spreads its ramp over the run. The authors' ramp ends after 16,384
  of 1,048,576 steps. The same share here, ramp=0.015625, would end within the
  first round; the weight of 75 then keeps the network predicting what it
  predicts untrained, one class for everything. The 16,384 steps themselves are
  more than many whole runs.

  Args:
    task: the static choices.
    profile: 'fedssl': labeled rows are mixed with labeled ones, and fresh views
      of unlabeled rows with each other; the ratio is used as drawn; cross
      entropy on both; weight 1. Or 'original' (Algorithm 1): rows of both
      kinds and all K views are mixed; the ratio is at least a half; squared
      error on unlabeled blends; weight 75 at the end of a ramp over the run.
    num_views: K weak views behind a pseudo-label, 1 to 64.
    temperature: of the sharpening; 1 does not sharpen. FedSSL's exponent Z is
      1 / temperature.
    alpha: of Beta(alpha, alpha); 0 turns mixing off. Towards 0 every blend is
      one of its two rows: always the first in 'original', either in 'fedssl'.
    unlabeled_weight: of the unlabeled loss; None is the profile's.
    ramp: share of the run over which that weight rises linearly, 0 none; None
      is the profile's.
    server: 'fedavg' or 'fedprox', or 'local' without communication.
    mu: weight of FedProx's term; ignored by the others.
    weighting: 'examples' counts labeled and unlabeled rows, or 'uniform'.
    labeled_client_weight: factor on the weight of a client that holds labels;
      1 is no difference. With weighting='uniform', 3 makes FedSSL's two groups
      of agents count the same, as in its equation 1.
    keep_local: keep each client's last model, to report local accuracy.

  Raises:
    ValueError: for an unknown profile or a number out of range.
  """
  chosen = checks.profile(_PROFILES, profile, ramp=ramp,
                          unlabeled_weight=unlabeled_weight)
  knobs.check_mixing(alpha)
  if chosen['ramp']:
    task.horizon(f'ramp={chosen["ramp"]}')
  s = _Settings(num_views, temperature, alpha, **chosen)
  loss_fn = _loss_fn(task, s)
  return averaging.averaging(
      task, loss_fn, streams='both', server=server, mu=mu, weighting=weighting,
      labeled_client_weight=labeled_client_weight, keep_local=keep_local,
      server_loss=loss_fn, pseudo_label=assemble.confident_labels(task, 0.0))


def _pseudo_labeled(task: Task, s: _Settings, model: Variables, rows: Batch,
                    keys: jax.Array) -> _Targeted:
  """Returns the unlabeled rows that will be mixed, and their pseudo-labels."""
  views = network.joined([network.weakly(task, rows, k) for k in keys[1:]])
  (logits,), _ = network.forward(task, jax.lax.stop_gradient(model), views)
  logits = logits.reshape(s.num_views, -1, task.num_classes)
  labels = jax.lax.stop_gradient(
      losses.soft_pseudo_label(logits, temperature=s.temperature))
  if s.all_views:
    return views, jnp.tile(labels, (s.num_views, 1))
  return network.weakly(task, rows, keys[0]), labels


def _blended(s: _Settings, parts: list[_Targeted], key: jax.Array
             ) -> list[tuple[jax.Array, jax.Array]]:
  """Mixes inputs and targets within each part, or across all parts."""
  groups = [parts] if s.across else [[part] for part in parts]
  out: list[tuple[jax.Array, jax.Array]] = []
  for group, k in zip(groups, jax.random.split(key, len(groups)), strict=True):
    batches = [batch for batch, _ in group]
    whole = network.joined(batches)
    targets = jnp.concatenate([target for _, target in group])
    inputs, targets = mix(k, whole.inputs, targets, whole.mask, alpha=s.alpha,
                          dominant=s.dominant)
    out += zip(*(network.parted(rows, batches) for rows in (inputs, targets)),
               strict=True)
  return out


def _loss_fn(task: Task, s: _Settings) -> LossFn:
  """Makes the loss on blends of whatever rows a batch has."""
  reader = network.of_blends(task)

  def loss_fn(model, given, batch, key):
    del given
    label_key, known_key, mix_key = jax.random.split(key, 3)
    parts: list[_Targeted] = []
    if batch.labeled is not None:
      known = network.labeled_view(task, batch.labeled, known_key)
      parts.append((known, jax.nn.one_hot(known.labels, task.num_classes)))
    if batch.unlabeled is not None:
      parts.append(_pseudo_labeled(
          task, s, model, batch.unlabeled,
          jax.random.split(label_key, s.num_views + 1)))
    parts = [(network.blendable(task, model, part), target)
             for part, target in parts]
    mixed = _blended(s, parts, mix_key)
    views = [part._replace(inputs=inputs) for (part, _), (inputs, _)
             in zip(parts, mixed, strict=True)]
    logits, stats = network.forward(reader, model, *views, key=key)
    on_labeled = on_unlabeled = None
    if batch.labeled is not None:
      on_labeled, _ = losses.cross_entropy(
          logits[0], mixed[0][1], views[0].mask)
    if batch.unlabeled is not None:
      error = losses.squared_error if s.squared else losses.cross_entropy
      on_unlabeled, _ = error(logits[-1], mixed[-1][1], views[-1].mask)
    rising = (losses.ramp_up(batch.progress, s.ramp, shape='linear')
              if s.ramp else 1.0)
    loss, metrics = objective.total(
        batch, on_unlabeled, on_labeled, weight=s.unlabeled_weight * rising,
        labelings=s.num_views, views=s.num_views if s.all_views else 1)
    return loss, Aux(stats, metrics)
  return loss_fn
