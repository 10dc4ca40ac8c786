r"""G-MixUp and G-Reg: the costs of FedSSL's three networks on one batch.

Fan et al., Private Semi-Supervised Federated Learning, IJCAI 2022, section
3.4. F is the classifier, G the generator, D the discriminator. A row x has the
label distribution p, its true one-hot label or the sharpened prediction; c is
a class drawn for it, :math:`\hat x = G((x, p), c, z, \lambda)` and
:math:`p' = \lambda p + (1 - \lambda) c`.
"""
from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl import losses
from fedjax_ssl.core.types import (
  Array,
  Batch,
  Metrics,
  PyTree,
  Ratio,
  Task,
  Variables,
)
from fedjax_ssl.data.batching import Pair
from fedjax_ssl.losses import adversarial
from fedjax_ssl.models import gan


class Nets(NamedTuple):
  """The three networks that travel."""

  model: Variables  # F.
  generator: PyTree
  discriminator: PyTree


def start(nets: Nets, optimizers: dict[str, optax.GradientTransformation]
          ) -> dict[str, PyTree]:
  """Makes the first states of the optimizers, by network."""
  return {'model': optimizers['model'].init(nets.model.params),
          'generator': optimizers['generator'].init(nets.generator),
          'discriminator': optimizers['discriminator'].init(
              nets.discriminator)}


class Rows(NamedTuple):
  """The labeled and the unlabeled rows of a step, in one batch."""

  inputs: jax.Array  # [B, ...] raw.
  labels: jax.Array  # int32[B], -1 where hidden.
  known: jax.Array  # float32[B], 1 where the label may be read.
  mask: jax.Array  # float32[B]
  progress: jax.Array  # float32[B], share of the whole run, all the same.


class Material(NamedTuple):
  """What the costs of a batch are computed from; constants for derivatives."""

  inputs: jax.Array  # [B, ...], one weak view, raw.
  real: jax.Array  # float32[B, ...], what G and D see of it.
  labels: jax.Array  # float32[B, C], p.
  target: jax.Array  # float32[B, C], one-hot c.
  noise: jax.Array  # float32[B, Z] in [0, 1).
  lam: jax.Array  # float32[B]
  known: jax.Array  # float32[B]
  mask: jax.Array  # float32[B]
  progress: jax.Array  # float32[B]
  drops: jax.Array | None = None  # uint32[B]; the first draws F's dropout.


@dataclasses.dataclass(frozen=True)
class Choices:
  """Knobs of the costs; `fedssl.fedssl` explains them."""

  num_views: int
  exponent: float
  alpha: float
  noise_size: int
  use_real: bool
  use_rec: bool
  real_data: str
  condition: str
  rec_over: str
  generator_kind: str
  ramp: float


def merge(pair: Pair, size: int | None = None) -> Rows:
  """Joins the labeled rows and, after them, the unlabeled ones in one batch.

  Args:
    pair: the two streams; one that is not used is None.
    size: how many rows to keep, real ones first; None keeps all.
  """
  parts: list[Batch] = [b for b in pair[:2] if b is not None]
  known = [b.mask if b is pair.labeled else jnp.zeros_like(b.mask)
           for b in parts]
  rows = Rows(*(jnp.concatenate(x) for x in (
      [b.inputs for b in parts], [b.labels for b in parts], known,
      [b.mask for b in parts],
      [jnp.full(b.mask.shape, 1.0 if pair.progress is None else pair.progress)
       for b in parts])))
  if size is None or rows.mask.shape[0] <= size:
    return rows
  order = jnp.argsort(-rows.mask, stable=True)[:size]
  return jax.tree.map(lambda x: x[order], rows)


class Problem(NamedTuple):
  """The static choices on which the costs depend."""

  task: Task
  networks: gan.Gan
  choices: Choices


def continuous(problem: Problem, model: Variables, inputs: Array) -> jax.Array:
  """Preprocesses images, or embeds tokens by the model: float32[B, ...]."""
  ready = problem.task.preprocess(inputs)
  embed = problem.task.model.embed
  if embed is None or not jnp.issubdtype(ready.dtype, jnp.integer):
    return ready
  return embed(model, ready)


def check(problem: Problem, inputs: Array) -> None:
  """Raises ValueError if nothing would train the word vectors."""
  task = problem.task
  if (problem.choices.real_data == 'none' and task.model.embed is not None
      and jnp.issubdtype(task.preprocess(inputs).dtype, jnp.integer)):
    raise ValueError("real_data='none' would leave word vectors as they were "
                     "drawn, as only real rows train them; give 'labeled' "
                     "or 'all', or vectors made beforehand.")


def limits(problem: Problem, inputs: Array
           ) -> tuple[jax.Array, jax.Array] | None:
  """Returns a black and a white image, preprocessed; None for other inputs."""
  if inputs.ndim != 4:
    return None
  black = jnp.zeros((1, *inputs.shape[1:]), jnp.uint8)
  return problem.task.preprocess(black), problem.task.preprocess(black + 255)


def material(problem: Problem, model: Variables, rows: Rows, key: jax.Array
             ) -> Material:
  """Draws a view, pseudo-labels, classes, noise and ratios for a batch.

  Args:
    problem: what the costs depend on.
    model: F, for pseudo-labels and embeddings.
    rows: the batch.
    key: PRNG key.
  """
  task, choices, keys = problem.task, problem.choices, jax.random.split(key, 5)
  size, classes = rows.mask.shape[0], task.num_classes
  inputs = task.weak(keys[0], rows.inputs)
  if task.labeled_view is not None:
    known = (rows.known > 0).reshape(-1, *(1,) * (inputs.ndim - 1))
    inputs = jnp.where(
        known, task.labeled_view(keys[0], rows.inputs), inputs)
  real = jax.lax.stop_gradient(continuous(problem, model, inputs))
  truth = jax.nn.one_hot(rows.labels, classes)
  target = jax.random.randint(keys[2], (size,), 0, classes)
  return Material(
      inputs, real,
      jnp.where(rows.known[:, None] > 0, truth,
                _pseudo_labels(problem, model, rows, keys[1])),
      jax.nn.one_hot(target, classes),
      jax.random.uniform(keys[3], (size, choices.noise_size)),
      losses.mixup_ratio(keys[4], (size,), alpha=choices.alpha),
      rows.known, rows.mask, rows.progress,
      jax.random.bits(jax.random.fold_in(key, 0xd0), (size,)))


def _pseudo_labels(problem: Problem, model: Variables, rows: Rows,
                   key: jax.Array) -> jax.Array:
  """Computes the pseudo-labels float32[B, C] of equation 2, without dropout.

  If all real rows have labels, nothing is computed.
  """
  views, classes = problem.choices.num_views, problem.task.num_classes

  def predict():
    keys = jax.random.split(key, views)
    inputs = jnp.concatenate(
        [problem.task.weak(k, rows.inputs) for k in keys])
    logits, _ = problem.task.apply_train(
        model, inputs, jnp.tile(rows.mask, views))
    return jax.lax.stop_gradient(losses.sharpen(
        jax.nn.softmax(logits.reshape(views, -1, classes)).mean(0),
        exponent=problem.choices.exponent))

  return jax.lax.cond(
      jnp.any((rows.mask > 0) & (rows.known == 0)), predict,
      lambda: jnp.full((rows.mask.shape[0], classes), 1 / classes))


def generate(problem: Problem, generator: PyTree, made: Material,
             *lams: jax.Array) -> list[jax.Array]:
  """Generates a batch's blends, float32[B, ...] for each lam float32[B]."""
  return problem.networks.generate(
      generator, made.real,
      *[gan.Conditions(made.labels, made.target, made.noise, lam)
        for lam in lams], limits=limits(problem, made.inputs))


def _condition(problem: Problem, made: Material) -> jax.Array:
  return adversarial.fake_condition(
      made.lam, made.labels, made.target, label=problem.choices.condition)


def discriminator_cost(problem: Problem, discriminator: PyTree, nets: Nets,
                       made: Material) -> jax.Array:
  """Computes what D minimises, float32[], equation 6.

  Args:
    problem: what the costs depend on.
    discriminator: D's parameters, by which to differentiate.
    nets: the other networks.
    made: the batch.
  """
  fake = jax.lax.stop_gradient(
      generate(problem, nets.generator, made, made.lam)[0])
  real, judged = jnp.split(problem.networks.judge(
      discriminator, jnp.concatenate([made.real, fake]),
      jnp.concatenate([made.labels, _condition(problem, made)])), 2)
  return adversarial.discriminator_loss(
      real, judged, made.mask, fake_weight=losses.realism_weight(made.lam),
      kind='hinge' if problem.choices.generator_kind == 'hinge'
      else 'logistic')[0]


def joint_cost(problem: Problem, trained: tuple[PyTree, PyTree], nets: Nets,
               made: Material) -> tuple[jax.Array, tuple[PyTree, Metrics]]:
  """Computes what F and G minimise: equations 4 to 7, and F on the real rows.

  Args:
    problem: what the costs depend on.
    trained: F's and G's parameters, by which to differentiate.
    nets: D, and F's statistics.
    made: the batch.

  Returns:
    float32[], and (F's statistics, metrics).
  """
  params, generator = trained
  model, options = nets.model._replace(params=params), problem.choices
  lams = [made.lam, jnp.ones_like(made.lam)]
  fake, *again = generate(
      problem, generator, made, *lams[:1 + options.use_rec])
  blend = jax.lax.stop_gradient(
      losses.mixup(made.lam, made.labels, made.target))
  logits, stats = _logits(problem, model, fake, made)
  loss, metrics = jnp.float32(0), {}

  def add(name, value, rows):
    count = rows.sum()
    metrics[name] = Ratio(value * count, count)
    return loss + value
  known, unknown = made.known * made.mask, (1 - made.known) * made.mask
  # An untrained F would learn its own first, wrong predictions.
  rising = losses.ramp_up(made.progress.max(), options.ramp, shape='linear')
  value = losses.cross_entropy(logits[0], blend, known)[0] + (
      rising * losses.cross_entropy(logits[0], blend, unknown)[0])
  loss = add('mixup_loss', value, made.mask)
  terms = {'none': {}, 'labeled': {'labeled_loss': known}, 'all': {
      'labeled_loss': known, 'unlabeled_loss': unknown}}
  for name, rows in terms[options.real_data].items():
    value = losses.cross_entropy(logits[1], made.labels, rows)[0]
    loss = add(name, value if name == 'labeled_loss' else rising * value,
               rows)
  if options.use_real:
    judged = problem.networks.judge(
        nets.discriminator, fake, _condition(problem, made))
    loss = add('realism_loss', adversarial.generator_loss(
        judged, made.mask, weight=losses.realism_weight(made.lam),
        kind=options.generator_kind)[0], made.mask)
  if options.use_rec:
    loss = add('reconstruction', adversarial.reconstruction(
        again[0], made.real, made.mask, over_pixels=options.rec_over)[0],
               made.mask)
  return loss, (stats, metrics)


def passes(problem: Problem, rows: Rows) -> Metrics:
  """Counts F's passes over a batch's blends, real rows and views to label."""
  used, unknown = rows.mask.sum(), (rows.mask * (1 - rows.known)).sum()
  trained = (1 + (problem.choices.real_data != 'none')) * used
  return {'forward_passes': trained + problem.choices.num_views * unknown,
          'backward_passes': trained}


def _logits(problem: Problem, model: Variables, fake: jax.Array, made: Material
            ) -> tuple[list[Any], PyTree]:
  """Runs F on the blends and, if it learns from them, on the real rows."""
  views = [fake]
  if problem.choices.real_data != 'none':
    # Not `made.real`: an embedding is trained by what F reads.
    views.append(continuous(problem, model, made.inputs))
  key = None if made.drops is None else jax.random.key(made.drops[0])
  logits, stats = problem.task.model.apply_train(
      model, jnp.concatenate(views), jnp.tile(made.mask, len(views)), key)
  return jnp.split(logits, len(views)), stats
