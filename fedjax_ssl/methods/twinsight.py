r"""Twin-sight: a model that learns classes beside one that tells rows apart.

Zhang, Yang, et al., Robust Training of Federated Models with Extremely Label
Deficiency, ICLR 2024, https://arxiv.org/abs/2402.14430. The authors' code is
visitworld123/Twin-sight.

Every client trains two networks of one kind, with

  :math:`CE(y, f_s) + \lambda_I I + \lambda_N N` on labeled rows,
  :math:`\lambda_u CE(\hat y, f_s) + \lambda_I I + \lambda_N N` on others,

so that all clients share two of three objectives. I tells rows apart by the
unsupervised network's projections of their two views (`instances`; the paper's
equation 6, here with SimCLR's loss), and N keeps both networks' neighbourhoods
of the weak views alike (`neighbourhood`, equation 9). Both networks and the
projector are averaged; the supervised one predicts. Where no row without labels
has a pseudo-label, N alone teaches the supervised network of clients without
labels, and its last layer does not move.

'paper' and 'code' differ in two things. The paper's Figure 1 has the supervised
network learn pseudo-labels of rows without labels, as it does in 'paper', with
the weight 0.5 of the code's option for that. This option is off by default, as
in 'code'; turned on, there the strong view labels the weak one for clients
without labels. And the code divides N by `B ^ 2`, which in Python is B XOR 2,
66 for the 64 rows of a batch, and not their square: its N weighs 62 times what
the paper's mean does. For a batch of two that is 0, and N infinite; here it is
1 then.

What the code has beside: SimSiam and BYOL in place of SimCLR; and, for the
option above, FreeMatch's bars, which start at 1/C in every epoch, and with
their decay of 0.999 let almost every row through, so that `threshold=0` is as
they are (for SVHN they are cut to 0.9 and above, `threshold=0.9`). Its clients
with labels for some of their rows take the pseudo-labels of weak views, with
`unlabeled_weight=5`, and a FedProx term of 0.5 ||w - w_received||^2, which is
mu=1 here; their I and N are over all rows together, as here.

Weight decay moves all parameters, also those that no loss of a client does,
which the authors' optimizer passes over.

A row has two views in the unsupervised network and, with pseudo-labels or under
a norm of batches, in the supervised one, else one there: 12 or 9 units, by
three units for a row that trains, where FixMatch's labeled row has 3 and its
unlabeled one 4 to 6. The projector comes on top; the paper's has 10 million
weights beside the 11 of ResNet-18.
"""
from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.core import checks, knobs, tree
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
  """What a step's rows say."""

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
    mask: float32[B]; a masked row is nobody's negative.
    temperature: T.

  Returns:
    float32[], nats; 0 for a single row.

  References:
    Chen et al., SimCLR, https://arxiv.org/abs/2002.05709, eq. 1.
  """
  z = losses.unit_rows(jnp.concatenate([first, second]))
  both = jnp.concatenate([mask, mask])
  similarity = z @ z.T / temperature
  place = jnp.arange(len(z))
  other = (place + len(z) // 2) % len(z)
  gap = similarity - similarity[place, other][:, None]
  # A masked row has its own other view at least, so that no sum is empty.
  counts = (both[None] > 0) | (place == other[:, None])
  counts &= place != place[:, None]
  values = jax.nn.logsumexp(jnp.where(counts, gap, -jnp.inf), -1)
  return losses.masked_mean(values, both)


def neighbourhood(supervised: Array, unsupervised: Array, mask: Array, *,
                  divisor: str = 'pairs') -> jax.Array:
  r"""How differently two networks see which rows are near each other.

  :math:`N = \frac1d \sum_{ij} (G^u_{ij} - G^s_{ij})^2`, with G the cosines of
  a network's features of the rows i and j.

  Args:
    supervised: float[B, F], features of one network.
    unsupervised: float[B, F'], of the other.
    mask: float32[B].
    divisor: d: 'pairs', the square of the number n of rows; or 'xor', n XOR 2,
      the authors' code, at least 1.

  Returns:
    float32[]; 0 for features that differ in direction by a rotation of all.
  """
  a, b = (losses.unit_rows(x) for x in (supervised, unsupervised))
  real = jnp.asarray(mask) > 0
  gaps = jnp.where(real[:, None] & real, b @ b.T - a @ a.T, 0)
  rows = real.sum()
  by = rows * rows if divisor == 'pairs' else jnp.bitwise_xor(rows, 2)
  return jnp.sum(gaps * gaps) / jnp.maximum(by, 1)


def twins(model: Model, *, hidden: int | None = None, size: int | None = None
          ) -> Model:
  """Two networks of one kind, of which the supervised one predicts.

  The unsupervised one has a projector in place of its last layer.

  Args:
    model: the kind.
    hidden: of the projector; None is 8 times the features, at most 4096.
    size: of its projections; None is 4 times the features, at most 2048.

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
  """The variables of one of the three networks of `twins`."""
  return Variables(variables.params[name], variables.stats[name])


@knobs.checked(_PROFILES, temperature=knobs.Bound(above=True),
               unlabeled_weight=knobs.Bound(cases=(
                   knobs.at(0, 'rows without labels have no pseudo-labels'),)))
def twinsight(task: Task, *, profile: str = 'paper',
              unlabeled_weight: float | None = None,
              label_view: str | None = None, divisor: str | None = None,
              instance_weight: float = 0.5,
              neighbourhood_weight: float = 1.0, temperature: float = 0.07,
              threshold: float = 0.95, hidden: int | None = None,
              size: int | None = None, server: str = 'fedavg',
              mu: float = 0.01, weighting: str = 'examples') -> Method:
  """Trains a supervised and an unsupervised network that see alike.

  One learns classes and predicts; the other tells rows apart by their two
  views. Meant for clients with all labels beside clients with none; one with
  both kinds of rows tells all of them apart. With labels at the server, that
  trains as a client with labels does.

  Args:
    task: the static choices. The network must say what its last layer reads
      and where it is.
    profile: 'paper' or 'code', see the module's docstring. It stands for the
      next three knobs, of which those that are given replace its own.
    unlabeled_weight: of the pseudo-labels' loss; 0 leaves it out.
    label_view: which view labels the other, 'weak' or 'strong'.
    divisor: of the neighbourhood term: 'pairs', the square of the rows, as a
      mean has it; or 'xor', the rows XOR 2.
    instance_weight: of telling rows apart; 0 leaves it out.
    neighbourhood_weight: of the term that keeps alike what the networks see as
      near; 0 makes them strangers.
    temperature: of telling rows apart.
    threshold: confidence from which on a row has a pseudo-label.
    hidden: numbers between the projector's two layers; None is 8 times the
      features, at most 4096, which is the authors' for ResNet-18.
    size: of a projection; None is 4 times the features, at most 2048.
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
  checks.check('label_view', chosen['label_view'], LABEL_VIEWS)
  checks.check('divisor', chosen['divisor'], DIVISORS)
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
  """The loss of the rows that a step has; `task` is that of one network."""
  def views(rows: Batch | None, view: Callable[..., Batch]
            ) -> tuple[Batch, Batch]:
    assert rows is not None  # Only a stream that there is is asked for.
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
    # Most clients hold rows of one kind, which have the step for themselves.
    found = lax.cond(
        jnp.minimum(*has) > 0, lambda: together(labeled(), unlabeled()),
        lambda: alone(has[0] > 0, max(widths)))
    processed = jnp.where(jnp.minimum(*has) > 0, processed, max(widths))
  else:
    found = together(labeled(), unlabeled())
  trained = 4 if _needs_both(task, s) else 3
  loss, metrics = objective.total(
      batch, found.unlabeled if s.unlabeled_weight else None, found.labeled,
      weight=s.unlabeled_weight, mask_rate=found.mask_rate, labelings=0,
      views=trained, labeled_views=trained)
  rows = sum(has, jnp.float32(0))
  metrics.update({
      'contrastive_loss': Ratio(found.instances * rows, rows),
      'neighbourhood_loss': Ratio(found.neighbourhood * rows, rows),
      'rows_processed': processed})
  loss += s.instance_weight * found.instances
  loss += s.neighbourhood_weight * found.neighbourhood
  return loss, Aux(found.stats, metrics)


def _padded(views: tuple[Batch, Batch], width: int) -> tuple[Batch, Batch]:
  """The views with so many rows, those at the end masked."""
  def pad(x: jax.Array) -> jax.Array:
    missing = width - x.shape[0]
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
  first, second = (
      jax.tree.map(pad, view._replace(slots=None)) for view in views)
  return first, second


def _needs_both(task: Task, s: _Settings) -> bool:
  """Whether the supervised network sees strong views too."""
  return network.is_coupled(task) or s.unlabeled_weight > 0


def _parts(task: Task, s: _Settings, model: Variables, weak: Batch,
           strong: Batch, key: jax.Array) -> _Parts:
  """Passes rows through both networks; labels are -1 where there are none."""
  rows = len(weak.mask)
  known = weak.mask * (weak.labels >= 0)
  unknown = weak.mask - known
  both = network.joined([weak, strong])
  other = part(model, _INSTANCES)
  shapes = jax.eval_shape(task.model.init, key).params
  place = last_layer.place(task.model)
  other = other._replace(params=last_layer.put(
      other.params, place, tree.zeros_like(last_layer.at(shapes, place))))
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
