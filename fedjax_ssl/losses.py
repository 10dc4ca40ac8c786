r"""Losses on logits, over the real rows of a batch.

Every loss is :math:`\sum_i m_i l_i / \max(\sum_i m_i, 1)` with the mask m, 1
for a real row and 0 for padding: a masked row changes neither value nor
derivative whatever it holds, and a batch without rows costs 0. B rows, C
classes, H helper models. `targets` holds what is trained towards; its functions
are names of this module too.
"""
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.targets import agreement_vote as agreement_vote
from fedjax_ssl.targets import at_least_float32
from fedjax_ssl.targets import flexmatch_thresholds as flexmatch_thresholds
from fedjax_ssl.targets import mixup as mixup
from fedjax_ssl.targets import mixup_ratio as mixup_ratio
from fedjax_ssl.targets import pseudo_label as pseudo_label
from fedjax_ssl.targets import ramp_up as ramp_up
from fedjax_ssl.targets import realism_weight as realism_weight
from fedjax_ssl.targets import sharpen as sharpen
from fedjax_ssl.targets import soft_pseudo_label as soft_pseudo_label
from fedjax_ssl.targets import tsa_threshold as tsa_threshold

PyTree = Any
Array = jax.Array | np.ndarray
Scalar = Array | float
Loss = tuple[jax.Array, dict[str, jax.Array]]


def masked_mean(values: Array, mask: Array, *,
                total: Scalar | None = None) -> jax.Array:
  r"""Mean over real rows: :math:`\sum_i m_i v_i / \max(\text{total}, 1)`.

  Args:
    values: float[B]; a masked value may be NaN.
    mask: float32[B].
    total: rows to divide by, such as the nominal size of the batch; None is
      the sum of the mask.

  Returns:
    float32[].

  Raises:
    ValueError: if the shapes differ, which would broadcast to a wrong mean.
  """
  if jnp.shape(values) != jnp.shape(mask):
    raise ValueError(f'mask has shape {jnp.shape(mask)}; allowed is '
                     f'{jnp.shape(values)}, one entry per row.')
  values = at_least_float32(jnp.where(mask > 0, values, 0))
  mask = jnp.asarray(mask, values.dtype)
  total = jnp.sum(mask) if total is None else total
  return jnp.sum(mask * values) / jnp.maximum(total, 1)


def _visible(logits, mask):
  """Logits with masked rows zeroed: their derivative must not be NaN."""
  return at_least_float32(jnp.where(mask[..., None] > 0, logits, 0))


def _check_rows(logits: Array, mask: Array, **others: Array) -> None:
  """Raises ValueError for shapes that would broadcast to a wrong loss.

  Args:
    logits: must be [B, C].
    mask: must be [B].
    **others: by name; whole numbers must be classes [B], all else [B, C].
  """
  shape = jnp.shape(logits)
  if len(shape) != 2:
    raise ValueError(f'logits have shape {shape}; allowed is [B, C].')
  if jnp.shape(mask) != shape[:1]:
    raise ValueError(f'mask has shape {jnp.shape(mask)}; allowed is '
                     f'{shape[:1]}, one entry per row.')
  for name, value in others.items():
    is_class = jnp.issubdtype(jnp.result_type(value), jnp.integer)
    wanted = shape[:1] if is_class else shape
    if jnp.shape(value) != wanted:
      raise ValueError(
          f'{name} have shape {jnp.shape(value)} and type '
          f'{jnp.result_type(value)}; beside logits of shape {shape} whole '
          f'numbers are classes of shape {shape[:1]}, and all else has the '
          'shape of the logits.')


def cross_entropy(logits: Array, targets: Array, mask: Array, *,
                  label_smoothing: float = 0.0, total: Scalar | None = None
                  ) -> jax.Array:
  r"""Cross entropy :math:`-\sum_c t_c \log p_c`.

  Args:
    logits: float[B, C].
    targets: int32[B] classes, of which -1 counts as masked; or float[B, C]
      distributions, constants for derivatives.
    mask: float32[B].
    label_smoothing: share of the target spread evenly over the classes.
    total: rows to divide by, see `masked_mean`.

  Returns:
    float32[].

  Raises:
    ValueError: if the shapes do not go together, as for one-hot rows of whole
      numbers: make them floats, or give the classes.
  """
  _check_rows(logits, mask, targets=targets)
  targets = jnp.asarray(targets)
  if jnp.issubdtype(targets.dtype, jnp.integer):
    mask = jnp.where(targets >= 0, mask, 0)
    targets = jax.nn.one_hot(targets, logits.shape[-1])
  targets = jax.lax.stop_gradient(targets)
  targets = jnp.where(mask[:, None] > 0, targets, 0)
  targets = ((1 - label_smoothing) * targets
             + label_smoothing / logits.shape[-1])
  log_p = jax.nn.log_softmax(_visible(logits, mask))
  return masked_mean(-jnp.sum(targets * log_p, -1), mask, total=total)


def accuracy(logits: Array, labels: Array, mask: Array) -> jax.Array:
  """Share of rows whose largest logit is at the label.

  Args:
    logits: float[B, C].
    labels: int32[B]; -1 counts as masked.
    mask: float32[B].

  Returns:
    float32[] in [0, 1].
  """
  _check_rows(logits, mask, labels=labels)
  return masked_mean((logits.argmax(-1) == labels).astype(jnp.float32),
                     jnp.where(labels >= 0, mask, 0))


def kl_rows(logits: Array, other_logits: Array) -> jax.Array:
  r"""Divergence :math:`KL[p \| q] = \sum_c p_c (\log p_c - \log q_c)` by row.

  Args:
    logits: float[..., C] of p; wrap in `stop_gradient` if it is a target.
    other_logits: float[..., C] of q.

  Returns:
    float32[...]; 0 where the two agree.
  """
  if jnp.shape(logits)[-1] != jnp.shape(other_logits)[-1]:
    raise ValueError(f'logits have shapes {jnp.shape(logits)} and '
                     f'{jnp.shape(other_logits)}; both need the same classes.')
  log_p = jax.nn.log_softmax(at_least_float32(logits))
  log_q = jax.nn.log_softmax(at_least_float32(other_logits))
  return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)


def fixmatch(weak_logits: Array, strong_logits: Array, mask: Array,
             *, threshold: Scalar = 0.95, over: str = 'batch') -> Loss:
  r"""Confident labels of the weak view train the strong view.

  :math:`1[\max_c q_c \ge \tau]\, CE(\arg\max_c q_c, p(A_s(u)))`, with q of the
  weak view held constant.

  Args:
    weak_logits: float[B, C].
    strong_logits: float[B, C].
    mask: float32[B].
    threshold: tau, float32[] or float32[C] by class; 0 is self-training, above
      1 the loss is 0.
    over: 'batch' divides by all real rows (FixMatch, FedDure), 'confident' by
      the accepted ones (FedMatch's code).

  Returns:
    float32[] and the metric `mask_rate`, the share of rows accepted.

  Raises:
    ValueError: for another `over`, or views of different shapes.

  References:
    Sohn et al., FixMatch, https://arxiv.org/abs/2001.07685, eq. 4.
  """
  if over not in ('batch', 'confident'):
    raise ValueError(f'over is {over!r}; allowed are batch, confident.')
  _check_rows(weak_logits, mask, strong_logits=strong_logits)
  labels, accepted = pseudo_label(weak_logits, threshold=threshold)
  total = jnp.sum(mask) if over == 'batch' else None
  loss = cross_entropy(strong_logits, labels, mask * accepted, total=total)
  return loss, {'mask_rate': masked_mean(accepted, mask)}


def uda(logits: Array, strong_logits: Array, mask: Array, *,
        threshold: Scalar = 0.0, temperature: Scalar = 1.0) -> Loss:
  r"""Consistency of UDA: :math:`1[\max_c p_c > \tau]\, KL[p_T \| p(A_s(u))]`.

  Args:
    logits: float[B, C] of the clean view, constants for derivatives.
    strong_logits: float[B, C].
    mask: float32[B].
    threshold: tau; 0 keeps all, 1 none. The authors' .8 for CIFAR-10.
    temperature: T, of the clean view; below 1 sharpens. The authors' .4.

  Returns:
    float32[], a mean over all real rows, and the metric `mask_rate`.

  References:
    Xie et al., UDA, https://arxiv.org/abs/1904.12848.
  """
  _check_rows(logits, mask, strong_logits=strong_logits)
  clean = jax.lax.stop_gradient(_visible(logits, mask))
  kept = (jax.nn.softmax(clean).max(-1) > threshold).astype(clean.dtype)
  rows = kl_rows(clean / temperature, _visible(strong_logits, mask))
  return masked_mean(kept * rows, mask), {'mask_rate': masked_mean(kept, mask)}


def tsa_cross_entropy(logits: Array, labels: Array, mask: Array, *,
                      threshold: Scalar) -> Loss:
  r"""Cross entropy over labels not yet learnt: :math:`p(y|x) \le \eta_t`.

  Args:
    logits: float[B, C].
    labels: int32[B]; -1 counts as masked.
    mask: float32[B].
    threshold: eta, see `tsa_threshold`; 1 keeps every row.

  Returns:
    float32[], a mean over the rows kept, and the metric `tsa_rate`, their
    share.

  References:
    Xie et al., UDA, https://arxiv.org/abs/1904.12848.
  """
  _check_rows(logits, mask, labels=labels)
  mask = jnp.where(labels >= 0, mask, 0)
  p = jax.nn.softmax(jax.lax.stop_gradient(_visible(logits, mask)))
  chosen = jnp.take_along_axis(p, jnp.maximum(labels, 0)[:, None], -1)[:, 0]
  # A probability may be rounded to just above 1.
  kept = (jnp.minimum(chosen, 1) <= threshold).astype(jnp.float32)
  return (cross_entropy(logits, labels, mask * kept),
          {'tsa_rate': masked_mean(kept, mask)})


def consistency(logits: Array, targets: Array, mask: Array, *,
                total: Scalar | None = None) -> jax.Array:
  r"""Squared distance to a teacher: :math:`\sum_c (p_c - q_c)^2` by row.

  Args:
    logits: float[B, C] of the student.
    targets: float[B, C] probabilities of the teacher, sharpened or not;
      constants for derivatives.
    mask: float32[B].
    total: rows to divide by; RSCFed's is the nominal size of the batch, also
      for a shorter last one. None is the number of real rows.

  Returns:
    float32[].

  References:
    Tarvainen and Valpola, Mean teachers, https://arxiv.org/abs/1703.01780;
    Liang et al., RSCFed, https://arxiv.org/abs/2203.13993.
  """
  _check_rows(logits, mask, targets=targets)
  gap = jax.nn.softmax(_visible(logits, mask)) - jax.lax.stop_gradient(targets)
  gap = jnp.where(mask[:, None] > 0, gap, 0)
  return masked_mean(jnp.sum(jnp.square(gap), -1), mask, total=total)


def squared_error(logits: Array, targets: Array, mask: Array
                  ) -> jax.Array:
  r"""MixMatch's loss on unlabeled blends: :math:`\frac1C \sum_c (p_c - q_c)^2`.

  Args:
    logits: float[B, C].
    targets: float[B, C] probabilities, constants for derivatives.
    mask: float32[B].

  Returns:
    float32[].

  References:
    Berthelot et al., MixMatch, https://arxiv.org/abs/1905.02249, eq. 4.
  """
  return consistency(logits, targets, mask) / logits.shape[-1]


def inter_client_kl(logits: Array, helper_logits: Array,
                    mask: Array, *, over_helpers: str = 'sum',
                    total: Scalar | None = None) -> jax.Array:
  r"""Agreement with helpers: :math:`\sum_j KL[p_{h_j} \| p]` by row.

  Args:
    logits: float[B, C] of the own model.
    helper_logits: float[H, B, C], constants for derivatives; H of 0 costs 0.
    mask: float32[B]; FedMatch's holds its confident rows only.
    over_helpers: 'sum' (v1 of the paper) or 'mean' (v3 and code).
    total: rows to divide by, see `masked_mean`.

  Returns:
    float32[].

  Raises:
    ValueError: for another `over_helpers`.

  References:
    Jeong et al., FedMatch, https://arxiv.org/abs/2006.12097v1, eq. 1.
  """
  if over_helpers not in ('sum', 'mean'):
    raise ValueError(
        f'over_helpers is {over_helpers!r}; allowed are sum, mean.')
  _check_rows(logits, mask)
  if jnp.shape(helper_logits)[1:] != jnp.shape(logits):
    raise ValueError(f'helper_logits have shape {jnp.shape(helper_logits)}; '
                     f'allowed is (H, *{jnp.shape(logits)}).')
  helpers = _visible(jax.lax.stop_gradient(helper_logits), mask[None])
  rows = kl_rows(helpers, _visible(logits, mask)[None]).sum(0)
  if over_helpers == 'mean':
    rows /= max(len(helper_logits), 1)
  return masked_mean(rows, mask, total=total)


def relation_matrix(logits: Array, labels: Array, mask: Array, *,
                    temperature: Scalar = 2.0) -> jax.Array:
  r"""FedIRM's class relations: row c is softmax(mean logits of class c / T).

  Args:
    logits: float[B, C].
    labels: int32[B]; -1 counts as masked.
    mask: float32[B].
    temperature: T.

  Returns:
    float32[C, C]; the row of a class without examples is uniform.

  References:
    Liu et al., FedIRM, https://arxiv.org/abs/2106.08600.
  """
  _check_rows(logits, mask, labels=labels)
  logits = _visible(logits, mask)
  member = jax.nn.one_hot(labels, logits.shape[-1]) * mask[:, None]
  sums = jnp.matmul(member.T, logits, precision=jax.lax.Precision.HIGHEST)
  means = sums / jnp.maximum(member.sum(0), 1)[:, None]
  return jax.nn.softmax(means / temperature)


def relation_matching(matrix: Array, target: Array) -> jax.Array:
  r"""FedIRM's distance of two relations, :math:`(KL[T\|M] + KL[M\|T]) / 2`.

  Args:
    matrix: float[C, C], rows of sum 1.
    target: float[C, C], a constant for derivatives.

  Returns:
    float32[], averaged over the C rows; 0 if the two agree.

  References:
    Liu et al., FedIRM, https://arxiv.org/abs/2106.08600.
  """
  target = jax.lax.stop_gradient(target)
  if jnp.shape(matrix) != jnp.shape(target):
    raise ValueError(f'matrix has shape {jnp.shape(matrix)} and target '
                     f'{jnp.shape(target)}; both are [C, C].')
  # Derivatives stay finite at a probability of 0.
  log_target, log_matrix = (
      jnp.log(jnp.maximum(x, 1e-8)) for x in (target, matrix))
  return jnp.mean(
      jnp.sum((target - matrix) * (log_target - log_matrix), -1)) / 2


def squared_distance(a: PyTree, b: PyTree) -> jax.Array:
  r"""Sum :math:`\|a - b\|^2` over all leaves, float32[]."""
  gaps = jax.tree.map(
      lambda x, y: jnp.sum(jnp.square(at_least_float32(x)
                                      - at_least_float32(y))), a, b)
  return sum(jax.tree.leaves(gaps), jnp.zeros((), jnp.float32))


def l1_norm(tree: PyTree) -> jax.Array:
  """Sum of absolute values over all leaves, float32[]."""
  norms = [jnp.sum(jnp.abs(at_least_float32(x))) for x in jax.tree.leaves(tree)]
  return sum(norms, jnp.zeros((), jnp.float32))


def proximal(params: PyTree, anchor: PyTree, *, mu: Scalar) -> jax.Array:
  r"""FedProx's pull to where the round began: :math:`\frac\mu2 \|w - w_t\|^2`.

  Args:
    params: pytree of arrays.
    anchor: pytree of the same structure, a constant for derivatives.
    mu: 0 is FedAvg. Some codes leave the half out: their mu is twice ours.

  Returns:
    float32[].

  References:
    Li et al., FedProx, https://arxiv.org/abs/1812.06127, eq. 2.
  """
  return squared_distance(params, jax.lax.stop_gradient(anchor)) * (mu / 2)
