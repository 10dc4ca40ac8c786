"""Targets of unlabeled examples: pseudo-labels, blends and thresholds.

B rows of a batch, C classes, K views of a row, H helper models. Everything that
a prediction in logits is turned into here is a constant for derivatives.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_ssl import arguments
from fedjax_ssl.arguments import at_least_float32, check_choice
from fedjax_ssl.losses.rows import (
  Array,
  check_array,
  check_shape,
  PyTree,
  Scalar,
)


def sharpen(probabilities: Array, *, temperature: Scalar | None = None,
            exponent: Scalar | None = None) -> jax.Array:
  r"""Sharpens a distribution: :math:`p_c^Z / \sum_v p_v^Z`, with Z = 1 / T.

  Args:
    probabilities: float[..., C].
    temperature: T, MixMatch's spelling; 1 changes nothing, 0 is one-hot.
    exponent: Z, FedSSL's spelling; 1 changes nothing, infinity is one-hot,
      0 uniform. Give one of the two.

  Returns:
    float32[..., C], of sum 1.

  Raises:
    ValueError: unless exactly one of the two is given, 0 or more.

  References:
    Berthelot et al., MixMatch, https://arxiv.org/abs/1905.02249, eq. 7;
    Fan et al., FedSSL, IJCAI 2022, eq. 2.
  """
  if (temperature is None) == (exponent is None):
    raise ValueError(f'temperature is {temperature} and exponent {exponent}; '
                     'allowed is exactly one of the two.')
  arguments.check_number('temperature', temperature, arguments.NOT_NEGATIVE)
  arguments.check_number('exponent', exponent, arguments.NOT_NEGATIVE)
  p = at_least_float32(probabilities)
  if exponent is None:
    exponent = 1 / jnp.asarray(temperature, p.dtype)
  tiny = jnp.finfo(p.dtype).tiny
  # The largest entry becomes 1, so that not all powers of a row underflow.
  top = p.max(-1, keepdims=True)
  largest = (p == top) & (top > 0)
  ratio = p / jnp.maximum(top, tiny)
  # That of the largest may be a digit below 1; its derivative is as it was.
  ratio += jax.lax.stop_gradient(jnp.where(largest, 1 - ratio, 0))
  # A power whose slope is infinite, or of an infinite exponent, is not taken.
  hard, zero = jnp.isinf(exponent), (ratio <= 0) & (exponent < 1)
  power = jnp.where(zero, 1, ratio) ** jnp.where(hard, 1, exponent)
  power = jnp.where(zero, jnp.where(exponent == 0, 1, 0), power)
  power = jnp.where(
      hard, jnp.where(jnp.isnan(top), top, largest), power).astype(p.dtype)
  return power / jnp.maximum(power.sum(-1, keepdims=True), tiny)


def pseudo_label(logits: Array, *, threshold: Scalar = 0.95
                 ) -> tuple[jax.Array, jax.Array]:
  r"""Picks hard labels; confident are those with :math:`\max_c p_c \ge \tau`.

  Args:
    logits: float[B, C].
    threshold: float32[], or float32[C] by predicted class; 0 accepts all,
      anything above 1 none.

  Returns:
    int32[B] classes and float32[B], 1 for an accepted row.

  Raises:
    ValueError: for thresholds of another shape, or below 0.

  References:
    Sohn et al., FixMatch, https://arxiv.org/abs/2001.07685, eq. 4.
  """
  check_array('logits', logits)
  arguments.check_number('threshold', threshold, arguments.NOT_NEGATIVE)
  return hard_label(jax.nn.softmax(at_least_float32(logits)),
                    threshold=threshold)


def hard_label(scores: Array, *, threshold: Scalar = 0.0
               ) -> tuple[jax.Array, jax.Array]:
  """Picks the classes of the largest scores, such as a mean of predictions.

  Args:
    scores: float[B, C].
    threshold: float32[], or float32[C] by that class: the least score of an
      accepted row.

  Returns:
    int32[B] classes and float32[B], 1 for an accepted row.

  Raises:
    ValueError: for thresholds of another shape.
  """
  check_array('scores', scores)
  if jnp.ndim(threshold):
    check_shape('threshold', threshold, scores.shape[-1:])
  scores = jax.lax.stop_gradient(scores)
  labels = scores.argmax(-1).astype(jnp.int32)
  bar = jnp.broadcast_to(threshold, scores.shape[-1:])[labels]
  return labels, (scores.max(-1) >= bar).astype(jnp.float32)


def blended_label(local_logits: Array, global_logits: Array, *,
                  threshold: Scalar = 0.95, half_gap: Scalar = 0.05
                  ) -> tuple[jax.Array, jax.Array, jax.Array]:
  r"""Blends the labels of two models by the gap of their confidences.

  With :math:`c = \max p` of each, a row that the local model is sure of,
  :math:`c_l \ge \tau`, gets :math:`\lambda \hat y_l + (1 - \lambda) \hat y_g`
  with :math:`\lambda = 2^{-|c_l - c_g| / h}`; every other the global label. A
  row counts if either model is sure of it.

  Args:
    local_logits: float[B, C] of the model in training.
    global_logits: float[B, C] of the model that the client received.
    threshold: tau; 0 accepts all, anything above 1 none.
    half_gap: h, the gap at which both labels count the same; the authors'
      kappa is log(2) / h.

  Returns:
    float32[B, C] distributions, float32[B], 1 for an accepted row, and
    float32[B], lambda, 0 where the label is the global one. Two models that
    are equally sure have a lambda just below 1: the authors' code adds 1e-6 to
    every gap.

  Raises:
    ValueError: if the shapes differ, or for a gap that is not above 0.

  References:
    Liu et al., SAGE, https://arxiv.org/abs/2503.13227.
  """
  check_shape('local_logits', local_logits, ('B', 'C'))
  check_shape('global_logits', global_logits, local_logits.shape)
  arguments.check_number('half_gap', half_gap, arguments.POSITIVE)
  (own, own_sure, own_top), (other, other_sure, other_top) = (
      _hard(logits, threshold) for logits in (local_logits, global_logits))
  gap = jnp.abs(own_top - other_top) + 1e-6
  share = own_sure * jnp.exp2(-gap / half_gap)
  targets = share[:, None] * own + (1 - share[:, None]) * other
  return targets, jnp.maximum(own_sure, other_sure), share


def _hard(logits: Array, threshold: Scalar
          ) -> tuple[jax.Array, jax.Array, jax.Array]:
  """One-hot labels, which of them are confident, and the confidences."""
  labels, sure = pseudo_label(logits, threshold=threshold)
  p = jax.nn.softmax(at_least_float32(jax.lax.stop_gradient(logits)))
  return jax.nn.one_hot(labels, p.shape[-1], dtype=p.dtype), sure, p.max(-1)


def soft_pseudo_label(logits: Array, *, temperature: Scalar = 0.5
                      ) -> jax.Array:
  r"""Sharpens the mean over views: :math:`sharpen(\frac1K \sum_k p(y|u_k))`.

  Args:
    logits: float[K, B, C], one prediction per augmented view.
    temperature: 1 is the plain mean, 0 one-hot; .5 is FedSSL's exponent 2.

  Returns:
    float32[B, C], of sum 1.

  Raises:
    ValueError: for another shape: one view needs its axis too.

  References:
    Berthelot et al., MixMatch, https://arxiv.org/abs/1905.02249, eq. 6 and 7;
    Fan et al., FedSSL, IJCAI 2022, eq. 2.
  """
  check_shape('logits', logits, ('K', 'B', 'C'))
  views = jax.nn.softmax(at_least_float32(jax.lax.stop_gradient(logits)))
  return sharpen(views.mean(0), temperature=temperature)


def agreement_vote(logits: Array, helper_logits: Array, *,
                   threshold: Scalar = 0.75, tie: str = 'lowest',
                   present: Array | None = None
                   ) -> tuple[jax.Array, jax.Array]:
  r"""Takes the class with the most votes of the own model and its helpers.

  Each model has one vote: :math:`\hat y = \arg\max_c \sum_{m}
  1[\arg\max p_m = c]`, for rows that the own model is confident of.

  Args:
    logits: float[B, C] of the own model.
    helper_logits: float[H, B, C]; H of 0 is the own model's pseudo-label.
    threshold: float32[], confidence of the own model; 0 accepts all, anything
      above 1 none.
    tie: 'lowest' class index, as the authors' code does even if the own model
      voted for another; or 'local', the own vote where it is among the best.
    present: float32[H], 1 for a helper that votes and 0 for an empty place,
      whose logits are not read; None lets all vote.

  Returns:
    int32[B] classes and float32[B], 1 for an accepted row.

  Raises:
    ValueError: for another `tie`, or if the shapes do not go together.

  References:
    Jeong et al., FedMatch, https://arxiv.org/abs/2006.12097v1, eq. 3.
  """
  check_choice('tie', tie, ('lowest', 'local'))
  check_shape('logits', logits, ('B', 'C'))
  check_shape('helper_logits', helper_logits, ('H', *logits.shape))
  if present is not None:
    check_shape('present', present, helper_logits.shape[:1])
  num_classes = logits.shape[-1]
  own, accepted = pseudo_label(logits, threshold=threshold)
  own_vote = jax.nn.one_hot(own, num_classes)
  helpers = jax.nn.one_hot(helper_logits.argmax(-1), num_classes)
  if present is not None:
    helpers *= present[:, None, None]
  helpers = helpers.sum(0)
  # Half a vote more can only decide ties.
  votes = helpers + own_vote * (1.5 if tie == 'local' else 1.0)
  return votes.argmax(-1).astype(jnp.int32), accepted


def tsa_threshold(step: Scalar, num_steps: Scalar, *, num_classes: int,
                  schedule: str = 'exp') -> jax.Array:
  r"""Computes the threshold of UDA's training signal annealing.

  A labeled row whose class has a larger probability is left out of the loss.
  :math:`\eta_t = \alpha_t (1 - 1/C) + 1/C` with :math:`\alpha_t` =
  :math:`t/T` ('linear'), :math:`e^{5(t/T - 1)}` ('exp') or
  :math:`1 - e^{-5t/T}` ('log').

  Args:
    step: t, counted over the whole federated run and not the round.
    num_steps: T, steps of the whole run.
    num_classes: C.
    schedule: 'exp' suits few labels, 'log' many.

  Returns:
    float32[] in [1/C, 1]; exactly 1 at the end of 'exp' and 'linear', which
    keeps every row.

  Raises:
    ValueError: for another schedule, or numbers of steps or classes that are
      not above 0.

  References:
    Xie et al., UDA, https://arxiv.org/abs/1904.12848.
  """
  arguments.check_number('num_steps', num_steps, arguments.POSITIVE)
  arguments.check_number('num_classes', num_classes, arguments.POSITIVE)
  check_choice('schedule', schedule, ('linear', 'exp', 'log'))
  time = jnp.clip(jnp.asarray(step, jnp.float32) / num_steps, 0, 1)
  missing = {'linear': 1 - time, 'exp': 1 - jnp.exp(5 * (time - 1)),
             'log': jnp.exp(-5 * time)}[schedule]
  return 1 - missing * (1 - 1 / num_classes)


def flexmatch_thresholds(counts: Array, *, threshold: Scalar = 0.95,
                         num_unused: Scalar = 0.0, mapping: str = 'convex'
                         ) -> jax.Array:
  r"""Lowers the threshold of classes learnt less: :math:`\tau M(\beta_c)`.

  :math:`\beta_c = \sigma_c / \max(\max_v \sigma_v, \text{unused})` and
  :math:`M(\beta) = \beta / (2 - \beta)` ('convex') or :math:`\beta` ('linear').

  Args:
    counts: float32[C], unlabeled examples that the model confidently puts in
      each class. All equal is one threshold for all classes.
    threshold: tau, for the class that is learnt best.
    num_unused: examples that are not confident; the paper's warm-up, 0 is off.
    mapping: 'convex' or 'linear'.

  Returns:
    float32[C]; zeros while nothing is confident.

  Raises:
    ValueError: for another mapping, or a negative number of the host's; those
      of a traced array cannot be seen.

  References:
    Zhang et al., FlexMatch, https://arxiv.org/abs/2110.08263.
  """
  for name, value in (('counts', counts), ('threshold', threshold),
                      ('num_unused', num_unused)):
    arguments.check_number(name, value, arguments.NOT_NEGATIVE)
  check_choice('mapping', mapping, ('convex', 'linear'))
  counts = jnp.asarray(counts, jnp.float32)
  most = jnp.maximum(counts.max(), num_unused)
  beta = counts / jnp.where(most > 0, most, 1)
  return (beta / (2 - beta) if mapping == 'convex' else beta) * threshold


def mixup(lam: Scalar, a: PyTree, b: PyTree) -> PyTree:
  """Blends examples, or label distributions: lam * a + (1 - lam) * b.

  Args:
    lam: float32[] or float32[B]; 1 is `a` and 0 is `b`.
    a: pytree of [B, ...], of any dtype.
    b: pytree of the same structure and shapes.

  Returns:
    The pytree in float32.

  Raises:
    ValueError: if structures or shapes differ, or for `lam` of another shape or
      beyond [0, 1].

  References:
    Zhang et al., mixup, https://arxiv.org/abs/1710.09412.
  """
  arguments.check_alike(a=a, b=b)
  arguments.check_number('lam', lam, arguments.SHARE)

  def blend(x: Array, y: Array) -> jax.Array:
    if jnp.ndim(lam):
      check_shape('lam', lam, jnp.shape(x)[:1])
    share = jnp.reshape(lam, jnp.shape(lam) + (1,) * (
        x.ndim - 1 if jnp.ndim(lam) else 0))
    return share * at_least_float32(x) + (1 - share) * at_least_float32(y)

  return jax.tree.map(blend, a, b)


def mixup_ratio(key: Array, shape: tuple[int, ...] = (), *,
                alpha: Scalar = 0.75, dominant: bool = False) -> jax.Array:
  """Draws lam ~ Beta(alpha, alpha).

  Args:
    key: PRNG key.
    shape: () for one ratio, (B,) for one per row.
    alpha: small is near 0 or 1, 1 uniform, large near a half.
    dominant: MixMatch's max(lam, 1 - lam), which keeps a blend nearer to its
      first example; FedSSL's formula has none.

  Returns:
    float32[shape] in [0, 1].

  Raises:
    ValueError: for an alpha that is not above 0 and finite.

  References:
    Berthelot et al., MixMatch, https://arxiv.org/abs/1905.02249, eq. 8 and 9.
  """
  arguments.check_number('alpha', alpha, arguments.POSITIVE_FINITE)
  # Both gamma variables from one draw: `jax.random.beta` compiles two samplers,
  # each of which takes seconds.
  logs = jax.random.loggamma(key, alpha, (2, *shape))
  lam = jax.nn.sigmoid(logs[0] - logs[1])
  return jnp.maximum(lam, 1 - lam) if dominant else lam


def ramp_up(step: Scalar, num_steps: Scalar, *, shape: str = 'gaussian'
            ) -> jax.Array:
  r"""Ramps a weight up to 1: :math:`e^{-5 (1 - t)^2}`, :math:`t=\min(s/S, 1)`.

  Args:
    step: s.
    num_steps: S; 0 is a weight of 1 throughout.
    shape: 'gaussian', which starts at e^-5; 'linear', t itself; or 'cosine',
      (1 - cos(pi t)) / 2.

  Returns:
    float32[].

  Raises:
    ValueError: for another shape.

  References:
    Laine and Aila, Temporal ensembling, https://arxiv.org/abs/1610.02242.
  """
  check_choice('shape', shape, ('gaussian', 'linear', 'cosine'))
  whole = jnp.asarray(num_steps, jnp.float32)
  time = jnp.where(whole > 0, step / jnp.where(whole > 0, whole, 1), 1)
  time = jnp.clip(time, 0, 1)
  if shape == 'cosine':
    return (1 - jnp.cos(jnp.pi * time)) / 2
  return time if shape == 'linear' else jnp.exp(-5 * (1 - time) ** 2)


def realism_weight(lam: Scalar) -> jax.Array:
  r"""Computes a generated row's weight :math:`g = e^{\max(l, 1 - l) - 1}`.

  Args:
    lam: float32[...] in [0, 1], the blend it was generated with.

  Returns:
    float32[...]: 1 for an unmixed example, e^-.5 for an even blend.

  References:
    Fan et al., FedSSL, IJCAI 2022, eq. 6.
  """
  lam = jnp.asarray(lam, jnp.float32)
  return jnp.exp(jnp.maximum(lam, 1 - lam) - 1)
