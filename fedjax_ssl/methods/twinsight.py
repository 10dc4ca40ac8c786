r"""Twin-sight: a supervised network, and a twin that tells rows apart.

Zhang, Yang, et al., Robust Training of Federated Models with Extremely Label
Deficiency, ICLR 2024, https://arxiv.org/abs/2402.14430. The authors' code is
visitworld123/Twin-sight.

Every client trains two networks of one kind, with

  :math:`CE(y, f_s) + \lambda_I I + \lambda_N N` on labeled rows,
  :math:`\lambda_u CE(\hat y, f_s) + \lambda_I I + \lambda_N N` on others,

so that all clients share two of three objectives. I tells rows apart by the
unsupervised network's projections of their two views (`instances`; the paper's
equation 6, here with SimCLR's loss). N makes the two networks agree on which
weak views are near each other (`neighbourhood`, equation 9). Both networks and
the projector are averaged; the supervised network predicts. If no unlabeled row
has a pseudo-label, N alone teaches the supervised network of clients without
labels, and its last layer does not move.

'paper' and 'code' differ in two things. The first is pseudo-labels: in the
paper's Figure 1 the supervised network learns them. So it does in 'paper', with
the weight 0.5 of the code's option for them. That option is off by default in
the code, and so in 'code'. If it is on, the code labels the weak view by the
strong one for clients without labels. The second is N: the code divides it by
`B ^ 2`, which in Python is B XOR 2, 66 for a batch of 64 rows, and not the
square. So its N weighs 62 times as much as the paper's mean. For a batch of two
rows XOR gives 0, and N would be infinite; here the divisor is then 1.

The code can do more. It has SimSiam and BYOL in place of SimCLR. For
pseudo-labels it has FreeMatch's thresholds, which start at 1/C in every epoch
and, with their decay of 0.999, let almost every row through, like `threshold=0`
here (for SVHN they are at least 0.9, like `threshold=0.9`). Its clients with
labels for some of their rows take the pseudo-labels of weak views, with
`unlabeled_weight=5`, and a FedProx term of 0.5 ||w - w_received||^2, which is
mu=1 here; their I and N are over all rows together, as here.

Weight decay moves all parameters here, even those that get no gradient from any
loss of a client; the authors' optimizer skips these. Momentum begins anew in
each round here; there a client keeps it over the whole run.

The cost, with three units for a row that trains: a row has two views in the
unsupervised network, and in the supervised one two (with pseudo-labels or batch
normalization) or one: 12 or 9 units. FixMatch's labeled row has 3, and its
unlabeled one 4 to 6. The projector comes on top; the paper's has 10 million
weights, ResNet-18 has 11 million.
"""
from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.core import checks, knobs
from fedjax_ssl.core.local_training import Aux
from fedjax_ssl.core.types import (
  Array,
  Batch,
  Method,
  Model,
  Number,
  PyTree,
  Ratio,
  Task,
  Variables,
)
from fedjax_ssl.data.batching import Pair
from fedjax_ssl.methods.parts import assemble, averaging, network, objective
from fedjax_ssl.models import last_layer, projector

DIVISORS = ('pairs', 'xor')
LABEL_VIEWS = ('weak', 'strong')
_PROFILES: dict[str, dict[str, Any]] = {
    'paper': {'unlabeled_weight': 0.5, 'label_view': 'weak',
              'divisor': 'pairs'},
    'code': {'unlabeled_weight': 0.0, 'label_view': 'strong',
             'divisor': 'xor'}}
_CLASSES, _INSTANCES, _PROJECTOR = 'supervised', 'unsupervised', 'projector'
# The authors' projector of 512 features, and how wide that of others may be.
_HIDDEN, _SIZE, _WIDENED = 4096, 2048, (8, 4)


class _Settings(NamedTuple):
  """`twinsight`'s knobs that its loss reads."""

  instance_weight: float
  neighbourhood_weight: float
  temperature: float
  threshold: float
  unlabeled_weight: float
  label_view: str
  divisor: str


class _Parts(NamedTuple):
  """The losses of a step's rows."""

  labeled: jax.Array  # float32[], cross entropy of the labeled rows.
  unlabeled: jax.Array  # The same of the pseudo-labels.
  mask_rate: jax.Array
  instances: jax.Array
  neighbourhood: jax.Array
  stats: PyTree


def instances(first: Array, second: Array, mask: Array, *,
              temperature: Number = 0.07) -> jax.Array:
  r"""Tells rows apart by their two views, as SimCLR does.

  With all 2B projections z of length 1, the mean over them of

    :math:`-\log \frac{e^{z_i \cdot z_{i'} / T}}
    {\sum_{j \ne i} e^{z_i \cdot z_j / T}}`, i' the other view of the row.

  Args:
    first: float[B, P], projections of a view, of any length.
    second: float[B, P], of the other view.
    mask: float32[B]; a masked row is no negative of others.
    temperature: T.

  Returns:
    float32[], nats; 0 for a single row.

  References:
    Chen et al., SimCLR, https://arxiv.org/abs/2002.05709, eq. 1.
  """
  z = losses.unit_rows(jnp.concatenate([first, second]))
  both = jnp.concatenate([mask, mask])
  similarity = _products(z) / temperature
  place = jnp.arange(len(z))
  other = (place + len(z) // 2) % len(z)
  gap = similarity - similarity[place, other][:, None]
  # Even a masked row keeps its own other view, so that no sum is empty.
  counts = (both[None] > 0) | (place == other[:, None])
  counts &= place != place[:, None]
  values = jax.nn.logsumexp(jnp.where(counts, gap, -jnp.inf), -1)
  return losses.masked_mean(values, both)


def neighbourhood(supervised: Array, unsupervised: Array, mask: Array, *,
                  divisor: str = 'pairs') -> jax.Array:
  r"""Measures how differently two networks see which rows are near each other.

  :math:`N = \frac1d \sum_{ij} (G^u_{ij} - G^s_{ij})^2`, with G the cosines of
  a network's features of the rows i and j.

  Args:
    supervised: float[B, F], features of one network.
    unsupervised: float[B, F'], of the other.
    mask: float32[B].
    divisor: d: 'pairs', the square of the number n of rows; or 'xor', n XOR 2
      as in the authors' code, but at least 1.

  Returns:
    float32[]; 0 if one rotation turns the directions of one network's features
    into those of the other's.
  """
  a, b = (losses.unit_rows(x) for x in (supervised, unsupervised))
  real = jnp.asarray(mask) > 0
  gaps = jnp.where(real[:, None] & real, _products(b) - _products(a), 0)
  rows = real.sum()
  by = rows * rows if divisor == 'pairs' else jnp.bitwise_xor(rows, 2)
  return jnp.sum(gaps * gaps) / jnp.maximum(by, 1)


def _products(rows: jax.Array) -> jax.Array:
  """Multiplies each row with each, float[B, B], in full precision."""
  return jnp.matmul(rows, rows.T, precision=jax.lax.Precision.HIGHEST)


def twins(model: Model, *, hidden: int | None = None, size: int | None = None
          ) -> Model:
  """Makes two networks of one kind; the supervised one predicts.

  The unsupervised one has a projector in place of its last layer.

  Args:
    model: a network of this kind.
    hidden: hidden units of the projector; None is 8 times the features, at most
      4096.
    size: numbers of a projection; None is 4 times the features, at most 2048.

  Raises:
    ValueError: for a network that does not say which layer is its last.
  """
  last_layer.head(model)  # Refused where there is none.

  def init(key: jax.Array) -> Variables:
    first = model.init(key)  # As without a twin.
    other = model.init(jax.random.fold_in(key, 1))
    kernel = last_layer.at(first.params, last_layer.head(model))
    width = kernel.shape[0]
    top = projector.init(
        jax.random.fold_in(key, 2), jax.ShapeDtypeStruct(
            (1, width), kernel.dtype), norm=model.norm,
        hidden=hidden or min(_WIDENED[0] * width, _HIDDEN),
        size=size or min(_WIDENED[1] * width, _SIZE))
    other = other._replace(params=last_layer.without(
        other.params, last_layer.place(model)))
    made = {_CLASSES: first, _INSTANCES: other, _PROJECTOR: top}
    return Variables({k: v.params for k, v in made.items()},
                     {k: v.stats for k, v in made.items()})

  def call(function: Any) -> Any:
    return None if function is None else (
        lambda variables, *rest: function(part(variables, _CLASSES), *rest))

  def apply_train(variables: Variables, *rest: Any) -> tuple[jax.Array, PyTree]:
    logits, stats = model.apply_train(part(variables, _CLASSES), *rest)
    return logits, {**variables.stats, _CLASSES: stats}

  return Model(init, call(model.apply), apply_train, model.norm,
               call(model.embed), call(model.features),
               head=lambda: (_CLASSES, *last_layer.head(model)))


def part(variables: Variables, name: str) -> Variables:
  """Returns the variables of one of the three networks of `twins`."""
  return Variables(variables.params[name], variables.stats[name])


@knobs.checked(
    _PROFILES, label_view=knobs.word(*LABEL_VIEWS),
    divisor=knobs.word(*DIVISORS), temperature=knobs.Bound(above=True),
    unlabeled_weight=knobs.Bound(cases=(
        knobs.at(0, 'rows without labels have no pseudo-labels'),)),
    instance_weight=knobs.weight('telling rows apart'),
    neighbourhood_weight=knobs.weight('the neighbourhood term'))
def twinsight(task: Task, *, profile: str = 'paper',
              unlabeled_weight: float | None = None,
              label_view: str | None = None, divisor: str | None = None,
              instance_weight: float = 0.5,
              neighbourhood_weight: float = 1.0, temperature: float = 0.07,
              threshold: float = 0.95, hidden: int | None = None,
              size: int | None = None, server: str = 'fedavg',
              mu: float = 0.01, weighting: str = 'examples') -> Method:
  """Trains two networks that agree on which rows are near each other.

  One learns classes and predicts; the other tells rows apart by their two
  views. Meant for clients with all labels beside clients with none; a client
  with both kinds of rows tells all of them apart. With labels at the server,
  the server trains as a client with labels does.

  Args:
    task: the static choices. The network must say what its last layer reads
      and where it is.
    profile: 'paper' or 'code', see the module's docstring. It sets the next
      three knobs; those that are given replace its values. With 'code' and no
      `unlabeled_weight` of one's own there are no pseudo-labels, so that
      `label_view` and `threshold` do nothing.
    unlabeled_weight: of the pseudo-labels' loss; 0 leaves it out.
    label_view: which view labels the other, 'weak' or 'strong'.
    divisor: of the neighbourhood term: 'pairs', the square of the number of
      rows, which gives a mean; or 'xor', the number of rows XOR 2.
    instance_weight: of I, the loss that tells rows apart; 0 leaves it out.
    neighbourhood_weight: of N, which makes the networks agree on which rows are
      near each other; with 0 they do not affect each other.
    temperature: of I.
    threshold: confidence from which on a row has a pseudo-label.
    hidden: hidden units of the projector; None is 8 times the features, at most
      4096, which is the authors' for ResNet-18.
    size: numbers of a projection; None is 4 times the features, at most 2048.
    server: 'fedavg' or 'fedprox', or 'local' without communication.
    mu: weight of FedProx's term; ignored by the others.
    weighting: 'examples' counts labeled and unlabeled rows; or 'uniform'.

  Returns:
    The method. `contrastive_loss` is I, and `neighbourhood_loss` N.

  Raises:
    ValueError: for an unknown choice, or a network that does not say what it
      must.
  """
  chosen = checks.profile(
      _PROFILES, profile, unlabeled_weight=unlabeled_weight,
      label_view=label_view, divisor=divisor)
  s = _Settings(instance_weight, neighbourhood_weight, temperature, threshold,
                **chosen)
  whole = dataclasses.replace(
      task, model=twins(task.model, hidden=hidden, size=size))

  def loss_fn(model, given, batch, key):
    del given
    return _loss(task, s, model, batch, key)

  return averaging.averaging(
      whole, loss_fn, streams='both', server=server, mu=mu,
      weighting=weighting, server_loss=loss_fn, pseudo_label=(
          assemble.confident_labels(whole, threshold)
          if s.unlabeled_weight else None))


def _loss(task: Task, s: _Settings, model: Variables, batch: Pair,
          key: jax.Array) -> tuple[jax.Array, Aux]:
  """Computes the loss of a step's rows; `task` is that of a single network."""
  def views(rows: Batch | None, view: Callable[..., Batch]
            ) -> tuple[Batch, Batch]:
    assert rows is not None  # Only called for a stream that is used.
    weak_key, strong_key = jax.random.split(
        jax.random.fold_in(key, int(view is network.weakly)))
    return view(task, rows, weak_key), network.strongly(task, rows, strong_key)

  def labeled() -> tuple[Batch, Batch]:
    return views(batch.labeled, network.labeled_view)

  def unlabeled() -> tuple[Batch, Batch]:
    return views(batch.unlabeled, network.weakly)

  def together(*made: tuple[Batch, Batch]) -> _Parts:
    weak, strong = map(network.joined, zip(*made, strict=True))
    return _parts(task, s, model, weak, strong, key)

  def alone(known: jax.Array, width: int) -> _Parts:
    return together(lax.cond(
        known, lambda: _padded(labeled(), width),
        lambda: _padded(unlabeled(), width)))

  has = [rows.mask.sum() for rows in batch[:2] if rows is not None]
  widths = [len(rows.mask) for rows in batch[:2] if rows is not None]
  processed = jnp.float32(sum(widths))
  if len(has) < 2:
    found = together(labeled() if batch.labeled is not None else unlabeled())
  elif task.client_map == 'map':
    # Most clients hold rows of one kind; their steps skip the other's places.
    found = lax.cond(
        jnp.minimum(*has) > 0, lambda: together(labeled(), unlabeled()),
        lambda: alone(has[0] > 0, max(widths)))
    processed = jnp.where(jnp.minimum(*has) > 0, processed, max(widths))
  else:
    found = together(labeled(), unlabeled())
  seen = _needs_both(task, s)
  learnt = s.unlabeled_weight > 0 and s.label_view == 'weak'
  loss, metrics = objective.total(
      batch, found.unlabeled if s.unlabeled_weight else None, found.labeled,
      weight=s.unlabeled_weight, mask_rate=found.mask_rate,
      labelings=seen - learnt, views=3 + learnt, labeled_views=3)
  if seen and batch.labeled is not None:  # For the statistics, or for nothing.
    metrics['forward_passes'] += batch.labeled.mask.sum()
  rows = sum(has, jnp.float32(0))
  metrics.update({
      'contrastive_loss': Ratio(found.instances * rows, rows),
      'neighbourhood_loss': Ratio(found.neighbourhood * rows, rows),
      'rows_processed': processed})
  loss += s.instance_weight * found.instances
  loss += s.neighbourhood_weight * found.neighbourhood
  return loss, Aux(found.stats, metrics)


def _padded(views: tuple[Batch, Batch], width: int) -> tuple[Batch, Batch]:
  """Pads the views to `width` rows; those at the end are masked."""
  def pad(x: jax.Array) -> jax.Array:
    missing = width - x.shape[0]
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
  first, second = (
      jax.tree.map(pad, view._replace(slots=None)) for view in views)
  return first, second


def _needs_both(task: Task, s: _Settings) -> bool:
  """Returns whether the supervised network sees strong views too."""
  return network.is_coupled(task) or s.unlabeled_weight > 0


def _parts(task: Task, s: _Settings, model: Variables, weak: Batch,
           strong: Batch, key: jax.Array) -> _Parts:
  """Passes rows through both networks; labels of unlabeled rows are -1."""
  rows = len(weak.mask)
  known = weak.mask * (weak.labels >= 0)
  unknown = weak.mask - known
  both = network.joined([weak, strong])
  other = part(model, _INSTANCES)
  other = other._replace(params=last_layer.filled(task.model, other.params))
  plain, _, other_stats = network.forward_with_features(
      task, other, both, key=jax.random.fold_in(key, 2))
  projections, top_stats = projector.project(
      part(model, _PROJECTOR), plain, both.mask, norm=task.model.norm)
  features, logits, stats = network.forward_with_features(
      task, part(model, _CLASSES), both if _needs_both(task, s) else weak,
      key=key)
  taught, accepted = jnp.float32(0), jnp.float32(0)
  if s.unlabeled_weight:
    views = logits[:rows], logits[rows:]
    label, learns = views if s.label_view == 'weak' else views[::-1]
    taught, used = losses.fixmatch(learns, label, unknown,
                                   threshold=s.threshold)
    accepted = used['mask_rate']
  return _Parts(
      losses.cross_entropy(logits[:rows], jnp.maximum(weak.labels, 0),
                           known)[0],
      taught, accepted,
      instances(projections[:rows], projections[rows:], weak.mask,
                temperature=s.temperature),
      neighbourhood(features[:rows], plain[:rows], weak.mask,
                    divisor=s.divisor),
      {_CLASSES: stats, _INSTANCES: other_stats, _PROJECTOR: top_stats})
