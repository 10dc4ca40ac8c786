r"""ProxyFL: the last layer's weights as class proxies, at clients and server.

Chen and Wang, ProxyFL: A Proxy-Guided Framework for Federated Semi-Supervised
Learning, CVPR 2026, https://arxiv.org/abs/2602.21078; its code is
DuowenC/FSSLlib. The proxy of a class is its column of the last layer's weights.

Global proxy tuning (GPT, `tuned`): the server moves the mean of the clients'
proxies until each is nearest to what the clients sent for its class. Indecisive
categories proxy learning (ICPL, `contrast`): rows that no model is sure of keep
all their likely classes. Their features are pulled to the mix of these proxies
and pushed away from rows that share none of the classes.

Where the paper and the code differ this follows the code:

- Tuning measures the distances from one sent proxy to all global ones, and adds
  a margin to the one of its own class.
- The prior is of all clients' counts added up (the mean of their distributions
  in the paper), and moves by a hundredth a round, where eq. 5 replaces it.
- A row is sure if either model is, from tau on; in 5.2.1 if the received one
  is, above tau. The loss is KL(label || prediction) over all rows of a batch,
  in eq. 9 the other direction over the sure rows.
- An unsure row's proxies are mixed by the received model's probabilities, in
  eq. 6 by those of the model in training.
- ICPL compares two projections of unit length, of both views, without
  similarities below 1e-6, in one mean over all rows; eqs. 3, 6 and 8 have the
  weak view's features, and a mean over sure and one over unsure rows.
- Labeled rows enter ICPL by the received model's predictions (by their labels
  in the paper, `true_labels`).

What differs from the code in `sage` differs here too: it is built on SAGE's.

The cost of a step with L labeled and U unlabeled rows, with three units for a
row that trains and one for any other: ICPL trains both views of unlabeled rows,
and the received model sees L + U rows, 4 L + 7 U in all. FixMatch's is
3 L + 4 U, or 3 L + 6 U under batch normalization, where the weak view has a
gradient too. With L = U that is 11/7 or 11/9 times FixMatch. Besides, ICPL
projects features of width F to the same width, F^2 products a row. That is
little for a network that ends in a mean over pixels, as the authors' does, and
most of the cost of a small one that ends in a whole feature map.
"""
from __future__ import annotations

import dataclasses
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
  Cohort,
  Federation,
  Method,
  Metrics,
  Model,
  Number,
  PyTree,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import assemble, averaging, network, objective
from fedjax_ssl.methods.proxyfl import proxies
from fedjax_ssl.models import last_layer

LABELERS = ('either', 'global', 'local', 'blended', 'surer')
_NETWORK, _FEATURES, _PROXIES = 'network', 'features', 'proxies'


class Server(NamedTuple):
  """The server's record."""

  model: Variables  # With the projections of ICPL, where it is on.
  prior: jax.Array  # float32[C], how often clients count each class.


class _Settings(NamedTuple):
  """The knobs of `proxyfl`, resolved."""

  labeler: str
  threshold: float
  unlabeled_weight: float
  contrast_weight: float
  true_labels: bool
  tuning_epochs: int
  tuning_rate: float
  tuning_batch: int
  max_margin: float
  prior_decay: float
  weighting: str


class _ClassCounts(NamedTuple):
  """What a client keeps from step to step of a round."""

  step: jax.Array  # int32[]
  # float32[C], rows of each class in the last epoch; of all steps where their
  # number is fixed, as nothing says then how many are an epoch.
  counts: jax.Array


def labels(own: Array, received: Array, *, labeler: str = 'either',
           threshold: Number = 0.95) -> tuple[jax.Array, jax.Array]:
  """Labels rows, see the knob `labeler`.

  Args:
    own: float[B, C], logits of the model in training.
    received: float[B, C] of the model that the client received.
    labeler: one of `LABELERS`.
    threshold: confidence from which on a model is sure of a row.

  Returns:
    Targets float32[B, C], and float32[B], 1 for a row that counts.
  """
  if labeler == 'blended':
    return losses.blended_label(own, received, threshold=threshold)[:2]
  (local, local_sure), (other, other_sure) = (
      losses.pseudo_label(x, threshold=threshold) for x in (own, received))
  spread = [jnp.var(jax.nn.softmax(x), -1) for x in (own, received)]
  from_local = {'local': jnp.ones(len(local), bool),
                'surer': spread[0] > spread[1]
                }.get(labeler, jnp.zeros(len(local), bool))
  targets = jax.nn.one_hot(
      jnp.where(from_local, local, other), own.shape[-1])
  if labeler == 'either':
    return targets, jnp.maximum(local_sure, other_sure)
  return targets, jnp.where(from_local, local_sure, other_sure)


def projected(model: Model) -> Model:
  """Adds ICPL's two projections to a network; they are sent with it.

  One projects features, with a bias, the other one proxies. Both keep the
  width.
  """
  def inner(variables: Variables) -> Variables:
    return variables._replace(params=variables.params[_NETWORK])

  def init(key: jax.Array) -> Variables:
    made = model.init(key)
    width = last_layer.at(made.params, last_layer.head(model)).shape[0]
    keys = jax.random.split(jax.random.fold_in(key, 1), 3)
    bound = width ** -0.5  # PyTorch's, as for the last layer there.
    def draw(key: jax.Array, *shape: int) -> jax.Array:
      return jax.random.uniform(key, shape, minval=-bound, maxval=bound)
    return made._replace(params={
        _NETWORK: made.params,
        _FEATURES: {'kernel': draw(keys[0], width, width),
                    'bias': draw(keys[1], width)},
        _PROXIES: {'kernel': draw(keys[2], width, width)}})

  def call(function: Any) -> Any:
    return None if function is None else (
        lambda variables, *rest: function(inner(variables), *rest))

  return model._replace(
      init=init, apply=call(model.apply), apply_train=call(model.apply_train),
      embed=call(model.embed), features=call(model.features),
      features_train=call(model.features_train),
      head=lambda: (_NETWORK, *last_layer.head(model)))


@knobs.checked(
    contrast_weight=knobs.Bound(cases=(knobs.at(0, 'ICPL is off'),)),
    tuning_epochs=knobs.Bound(0, 1_000_000, whole=True, cases=(
        knobs.at(0, 'GPT is off'),)),
    tuning_rate=knobs.RATE, tuning_batch=knobs.Bound(1, 65536, whole=True),
    max_margin=knobs.Bound(infinite=True),
    prior_decay=knobs.Bound(0, 1, cases=(
        knobs.at(1, 'the prior stays uniform'),)),
    labeler=knobs.word(*LABELERS))
def proxyfl(task: Task, *, labeler: str = 'either', threshold: float = 0.95,
            unlabeled_weight: float = 1.0, contrast_weight: float = 1.0,
            true_labels: bool = False, tuning_epochs: int = 100,
            tuning_rate: float = 0.005, tuning_batch: int = 4,
            max_margin: float = 100.0, prior_decay: float = 0.99,
            weighting: str = 'examples') -> Method:
  """Adds ICPL at the clients and GPT at the server to a way of pseudo-labeling.

  The loss is L_s + unlabeled_weight L_u + contrast_weight L_c: cross entropy,
  KL of accepted rows over the batch, and the mean of `contrast` over both views
  of unlabeled rows. `contrastive_loss` is L_c.

  Args:
    task: the static choices; labels must be at the clients. The network must
      say what its last layer reads and where it is.
    labeler: which model labels rows, and which rows count. 'either', as in the
      code: the received model labels every row that it or the local model is
      sure of. Or the labels of another method: 'local' or 'global' of
      FixMatch, 'blended' of SAGE, or 'surer' of FedLabel, by the model whose
      probabilities have the larger variance. The last has one chain of steps
      here, not FedLabel's two, as ICPL needs both kinds of rows in a batch.
    threshold: confidence from which on a model is sure of a row.
    unlabeled_weight: of L_u; 0 leaves the other parts.
    contrast_weight: of L_c; 0 is off, and nothing is projected or sent for it.
    true_labels: whether labeled rows enter ICPL by their label, as in the
      paper, in place of what the received model says of them.
    tuning_epochs: of GPT, over the proxies that clients sent; 0 is off. The
      code's is 10 for CIFAR-100.
    tuning_rate: learning rate of GPT. Its default is that of the code's script,
      which differs from the default of the code, as for the next one.
    tuning_batch: proxies of a step of GPT.
    max_margin: largest margin of GPT.
    prior_decay: share of the prior that stays in a round.
    weighting: 'examples' counts labeled and unlabeled rows; or 'uniform'.

  Returns:
    The method; its server record is `Server`. Evaluation judges the labels of
    the global model.

  Raises:
    ValueError: for an unknown choice, labels at the server, or a network that
      does not say what it must.
  """
  checks.labels_at_clients(task.labels_at,
                           'the classes of their labels are counted')
  s = _Settings(labeler, threshold, unlabeled_weight, contrast_weight,
                true_labels, tuning_epochs, tuning_rate, tuning_batch,
                max_margin, prior_decay, weighting)
  if tuning_epochs or contrast_weight:
    last_layer.head(task.model)  # Refused where there is none.
  if contrast_weight:
    task = dataclasses.replace(task, model=projected(task.model))
  # The server needs every client's proxies, and only the mean of all else.
  aggregate = aggregation.linear(
      functools.partial(_aggregate, task, s),
      each=(lambda message: last_layer.at(
          message.params, last_layer.head(task.model)))
      if tuning_epochs else None)
  return assemble.assemble(
      task, init=functools.partial(_init, task),
      client_update=functools.partial(_client_update, task, s),
      aggregate=aggregate,
      work=functools.partial(batching.num_steps, task),
      pseudo_label=assemble.confident_labels(task, threshold))


def _init(task: Task, key: jax.Array, federation: Federation
          ) -> tuple[Server, PyTree]:
  del federation
  size = task.num_classes
  prior = jnp.full(size, 1 / size, jnp.float32)
  return Server(assemble.new_model(task, key), prior), ()


class _Outputs(NamedTuple):
  """Outputs of the model in training and of the received one for a batch."""

  labeled: jax.Array  # float32[B, C], logits.
  own: jax.Array  # The same for the weak view; constants for derivatives.
  strong: jax.Array  # The same for the strong view.
  received: jax.Array  # Of the received model, for the weak view.
  received_labeled: jax.Array | None  # None where ICPL does not need them.
  features: jax.Array | None  # Of all three views, one after another.
  stats: PyTree


def _passes(task: Task, s: _Settings, model: Variables, anchor: Variables,
            views: network.Views, key: jax.Array) -> _Outputs:
  weak, labeled, strong = views
  if not s.contrast_weight:
    received = task.apply(anchor, weak.inputs)
    own, (labeled_logits, strong_logits), stats = network.forward_with_targets(
        task, model, weak, labeled, strong, key=key)
    return _Outputs(labeled_logits, own, strong_logits, received, None, None,
                    stats)
  assert labeled is not None
  first, second = len(labeled.mask), len(labeled.mask) + len(weak.mask)
  if s.true_labels:
    received, of_labeled = task.apply(anchor, weak.inputs), None
  else:
    both = task.apply(anchor, network.joined([labeled, weak]).inputs)
    received, of_labeled = both[first:], both[:first]
  features, logits, stats = network.forward_with_features(
      task, model, network.joined([labeled, weak, strong]), key=key)
  return _Outputs(logits[:first], lax.stop_gradient(logits[first:second]),
                logits[second:], received, of_labeled, features, stats)


def _contrast(s: _Settings, outputs: _Outputs, params: PyTree,
              path: tuple[str, ...], batch: Any, sure: jax.Array,
              prior: jax.Array) -> jax.Array:
  """Computes the mean of ICPL, float32[], over the views of unlabeled rows."""
  assert outputs.features is not None
  known, rows = batch.labeled, batch.unlabeled
  if s.true_labels:
    of_known = jax.nn.one_hot(known.labels, outputs.own.shape[-1])
    known_sure = jnp.ones_like(known.mask)
  else:
    assert outputs.received_labeled is not None
    of_known = jax.nn.softmax(outputs.received_labeled)
    known_sure = losses.pseudo_label(
        outputs.received_labeled, threshold=s.threshold)[1]
  of_rows = jax.nn.softmax(outputs.received)
  a, v = params[_FEATURES], params[_PROXIES]
  values = proxies.contrast(
      outputs.features @ a['kernel'] + a['bias'],
      last_layer.at(params, path).T @ v['kernel'],
      jnp.concatenate([of_known, of_rows, of_rows]),
      jnp.concatenate([known_sure, sure, sure]), prior,
      jnp.concatenate([known.mask, rows.mask, rows.mask]))
  anchors = jnp.concatenate([0 * known.mask, rows.mask, rows.mask])
  return losses.masked_mean(values, anchors)


def _loss_fn(task: Task, s: _Settings, prior: jax.Array, begin: jax.Array
             ) -> LossFn:
  """Makes the loss; it counts classes from step `begin` on."""
  def loss_fn(model, given, batch, key):
    known, rows = batch.labeled, batch.unlabeled
    outputs = _passes(task, s, model, given.anchor,
                   network.views(task, batch, key), key)
    targets, accepted = labels(outputs.own, outputs.received, labeler=s.labeler,
                               threshold=s.threshold)
    loss, _ = losses.target_kl(outputs.strong, targets, rows.mask * accepted,
                               total=rows.mask.sum())
    loss, metrics = objective.total(
        batch, loss, objective.labeled(outputs.labeled, known),
        weight=s.unlabeled_weight,
        mask_rate=losses.masked_mean(accepted, rows.mask),
        labelings=1 if s.contrast_weight else 2,
        views=2 if s.contrast_weight else 1)
    guess, sure = losses.pseudo_label(outputs.received, threshold=s.threshold)
    sure = jnp.maximum(sure, losses.pseudo_label(
        outputs.own, threshold=s.threshold)[1])
    if s.contrast_weight:
      path = last_layer.head(task.model)
      apart = _contrast(s, outputs, model.params, path, batch, sure, prior)
      loss += s.contrast_weight * apart
      metrics['contrastive_loss'] = network.over_rows(apart, rows)
      if not s.true_labels:
        metrics['forward_passes'] += known.mask.sum()
    found = sum(jax.nn.one_hot(label, task.num_classes).T @ mask
                for label, mask in ((known.labels, known.mask),
                                    (guess, rows.mask * sure)))
    memory = given.memory
    counts = memory.counts + jnp.where(memory.step >= begin, found, 0)
    return loss, Aux(outputs.stats, metrics,
                     _ClassCounts(memory.step + 1, counts))
  return loss_fn


def _client_update(task: Task, s: _Settings, payload: Server, client: Client,
                   key: jax.Array) -> Update:
  steps = batching.num_steps(task, client.shard)
  last = steps // task.epochs_a_round
  loss_fn = averaging.keeping_stats(
      task, _loss_fn(task, s, payload.prior, steps - last))
  model, counted, metrics = averaging.train_locally(
      task, loss_fn, payload.model, client.train, client.shard, client.round,
      key, 'both', _ClassCounts(jnp.int32(0), jnp.zeros(task.num_classes)))
  weight = client_weights.client_weight(
      client.shard, 'both', weighting=s.weighting)
  return Update(tree.subtract(model, payload.model), weight, client.memory,
                metrics, counts=client_weights.unweighted(
                    counted.counts, weight))


def _aggregate(task: Task, s: _Settings, server: Server, updates: Any,
               cohort: Cohort, context: Any, key: jax.Array
               ) -> tuple[Server, Metrics]:
  """Adds the mean update, tunes the model's proxies, and moves the prior."""
  del context
  model = assemble.added(server.model, updates.mean)
  if s.tuning_epochs:
    path = last_layer.head(task.model)
    moves = updates.each.reshape(-1, *updates.each.shape[2:])
    sent = last_layer.at(server.model.params, path) + moves
    head = proxies.tuned(
        last_layer.at(model.params, path).T, jnp.swapaxes(sent, 1, 2),
        cohort.active.reshape(-1), key, epochs=s.tuning_epochs,
        rate=s.tuning_rate, batch=s.tuning_batch, max_margin=s.max_margin)
    model = model._replace(params=last_layer.put(model.params, path, head.T))
  total = updates.counts.sum()
  share = updates.counts / jnp.where(total > 0, total, 1)
  prior = jnp.where(total > 0, s.prior_decay * server.prior + (
      1 - s.prior_decay) * share, server.prior)
  return Server(model, prior), {}
