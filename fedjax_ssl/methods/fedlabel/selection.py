"""Which of two models labels a row, and the loss of learning that label.

The equations of FedLabel: Cho, Joshi, Dimitriadis, Local or Global: Selective
Knowledge Assimilation for Federated Learning with Limited Labels, ICCV 2023,
https://arxiv.org/abs/2307.08809. The authors' code is `core/trainer.py` of
microsoft/msrflute.
"""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.core import checks
from fedjax_ssl.core.types import Array, Metrics, Number, PyTree, Ratio

CONFIDENCES = ('variance', 'entropy')
LABELERS = ('both', 'local', 'global')
DIVERGENCES = ('student_first', 'discarded_first')
TEACHERS = ('discarded', 'local')
OVER = ('batch', 'accepted')


class Choice(NamedTuple):
  """Which model labels each row, and how; constants for derivatives."""

  labels: jax.Array  # int32[B]
  accepted: jax.Array  # float32[B], 1 where the label is used.
  from_local: jax.Array  # float32[B], 1 where the local model labels.
  # float32[B, C], the logits that the second term of `loss` compares with.
  discarded: jax.Array
  agreed: jax.Array  # float32[B], 1 where both models give the same label.
  # float32[B], confidence of the model not chosen over that of the chosen one.
  ratio: jax.Array


def confidence_score(logits: Array, kind: str = 'variance') -> jax.Array:
  r"""Measures how sure a prediction is; 0 if it is uniform.

  With p = softmax, 'variance' is :math:`\frac1C \sum_c (p_c - 1/C)^2` and
  'entropy' is :math:`\log C - H(p)`. The paper has :math:`-H(p)`, which is not
  positive; a ratio of two such numbers would grow where it should fall. The
  authors' code has 1 / (H(p) + 1e-5).

  Args:
    logits: float[..., C].
    kind: 'variance' or 'entropy'.

  Returns:
    float32[...], at least 0.

  Raises:
    ValueError: for another kind.

  References:
    Cho et al., FedLabel, ICCV 2023, eq. 3 and Figure 11.
  """
  checks.check('confidence', kind, CONFIDENCES)
  log_p = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
  p, size = jnp.exp(log_p), logits.shape[-1]
  if kind == 'variance':
    return jnp.mean(jnp.square(p - 1 / size), -1)
  return jnp.maximum(jnp.sum(p * (log_p + jnp.log(size)), -1), 0)


def select(global_logits: Array, local_logits: Array, *,
           threshold: Number = 0.4, confidence: str = 'variance',
           labeler: str = 'both', teacher: str = 'discarded') -> Choice:
  r"""Lets the surer of two models label each row.

  With s a model's probabilities and h(s) its confidence,
  :math:`s^* = \arg\max_s h(s)`. The label is
  :math:`\hat y = \arg\max_c s^*_c`, used if :math:`\max_c s^*_c > \beta`. If
  both models have the same confidence, the global one labels.

  Args:
    global_logits: float[B, C] of the model that the client received.
    local_logits: float[B, C] of that model after training on its labels.
    threshold: beta, strict; 0 accepts every row and 1 none.
    confidence: h, see `confidence_score`.
    labeler: 'both': the surer model labels; or always the 'local' or the
      'global' one. Then there is no other model to agree, and `agreed` is 0.
    teacher: where both models agree, the second term of `loss` keeps the
      student near one of them: the 'discarded' one, which was not chosen; or
      always the 'local' one, as in the code.

  Returns:
    The choice; its ratio is in [0, 1], and 1 where both are uniform.

  Raises:
    ValueError: for another confidence, labeler or teacher.

  References:
    Cho et al., FedLabel, ICCV 2023, eq. 3, 4 and 7 and Figure 2.
  """
  checks.check('labeler', labeler, LABELERS)
  checks.check('teacher', teacher, TEACHERS)
  logits = [jax.lax.stop_gradient(jnp.asarray(x, jnp.float32))
            for x in (global_logits, local_logits)]
  of_global, of_local = (confidence_score(x, confidence) for x in logits)
  local = {'both': of_local > of_global,
           'local': jnp.ones(of_global.shape, bool),
           'global': jnp.zeros(of_global.shape, bool)}[labeler]

  def where_local(x, y):
    """Rows of x where the local model labels, of y elsewhere."""
    return jnp.where(local[:, None] if x.ndim > 1 else local, x, y)

  chosen, other = where_local(*logits[::-1]), where_local(*logits)
  high = where_local(of_local, of_global)
  low = where_local(of_global, of_local)
  labels = chosen.argmax(-1).astype(jnp.int32)
  # A probability may be rounded to just above 1.
  accepted = jnp.minimum(jax.nn.softmax(chosen).max(-1), 1) > threshold
  agreed = (other.argmax(-1) == labels) & (labeler == 'both')
  ratio = jnp.where(high > 0, low / jnp.where(high > 0, high, 1), 1)
  return Choice(labels, accepted.astype(jnp.float32),
                local.astype(jnp.float32),
                other if teacher == 'discarded' else logits[1],
                agreed.astype(jnp.float32), jnp.clip(ratio, 0, 1))


def loss(choice: Choice, strong_logits: Array, clean_logits: Array,
         mask: Array, *, consistency: Number = 0.1,
         divergence: str = 'student_first', over: str = 'batch'
         ) -> tuple[jax.Array, Metrics]:
  r"""Computes FedLabel's loss on unlabeled rows.

  :math:`1[accepted] (CE(\hat y, p(\psi(x))) + \lambda_k KL(p(x), s^{-*})
  1[agreed])` with :math:`\lambda_k = \lambda_0 h(s^{-*}) / h(s^*)`;
  :math:`s^{-*}` is the discarded model's prediction, psi the strong view.

  Args:
    choice: what `select` returned.
    strong_logits: float[B, C] of the model in training, strong view.
    clean_logits: the same of the rows as they are.
    mask: float32[B]; a row that is not accepted costs 0.
    consistency: lambda_0, the largest weight of the second term; 0 leaves the
      cross entropy.
    divergence: 'student_first', KL(student || discarded) as printed in
      equation 6; or 'discarded_first', KL(discarded || student), as in the
      code.
    over: both terms are averaged over the real rows of the 'batch', as in
      equation 8; or over the 'accepted' rows, and the second over those in
      agreement, as in the code.

  Returns:
    float32[] and the metrics 'mask_rate' (accepted), 'local_rate' (labeled by
    the local model, among the accepted), 'agreed_rate' (among the accepted)
    and 'consistency_loss', its second term.

  Raises:
    ValueError: for another divergence or mean.

  References:
    Cho et al., FedLabel, ICCV 2023, eq. 5 to 8.
  """
  checks.check('divergence', divergence, DIVERGENCES)
  checks.check('over', over, OVER)
  real = jnp.asarray(mask, jnp.float32)
  total = real.sum()
  used = real * choice.accepted
  rows = total if over == 'batch' else None
  hard = losses.cross_entropy(strong_logits, choice.labels, used, total=rows)[0]
  shared = used * choice.agreed
  # Rows that do not count are set to 0, as their derivative must not be NaN.
  student, other = (jnp.where(shared[:, None] > 0, x, 0)
                    for x in (clean_logits, choice.discarded))
  pair = (student, other) if divergence == 'student_first' else (
      other, student)
  soft = jnp.asarray(consistency) * losses.masked_mean(
      choice.ratio * losses.kl_rows(*pair), shared, total=rows)
  accepted = used.sum()
  return hard + soft, {
      'mask_rate': Ratio(accepted, total),
      'local_rate': Ratio((used * choice.from_local).sum(), accepted),
      'agreed_rate': Ratio(shared.sum(), accepted),
      'consistency_loss': Ratio(soft * total, total)}


def mean_square_gaps(params: PyTree, anchor: PyTree) -> jax.Array:
  """Sums over arrays the mean squared distance in each, float32[]."""
  gaps = jax.tree.map(lambda x, y: jnp.mean(jnp.square(x - y)), params, anchor)
  return sum(jax.tree.leaves(gaps), jnp.float32(0))
