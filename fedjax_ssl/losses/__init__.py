"""Losses, their targets, and distances between models.

FixMatch's loss is `fixmatch`, in `semi_supervised`.

A loss of rows is `(student, target, mask, *, ...) -> (loss, metrics)`, over the
real rows of a batch; see `supervised`. `fairness` compares a batch's mean with
targets of its own, `adversarial` has no targets; `accuracy` and what measures
models (`proximal`, `squared_distance`, `l1_norm`) return a number alone. These
modules need JAX, NumPy and `fedjax_ssl.arguments` alone, so that they can be
used in other code.
"""
from fedjax_ssl.losses import adversarial
from fedjax_ssl.losses.distances import l1_norm, proximal, squared_distance
from fedjax_ssl.losses.moving import freematch_thresholds, softmatch_weights
from fedjax_ssl.losses.rows import (
  kl_rows,
  masked_mean,
  reduced,
  unit_rows,
)
from fedjax_ssl.losses.semi_supervised import (
  consistency,
  fairness,
  fixmatch,
  inter_client_kl,
  relation_matching,
  relation_matrix,
  squared_error,
  target_kl,
  uda,
)
from fedjax_ssl.losses.supervised import (
  accuracy,
  cross_entropy,
  tsa_cross_entropy,
)
from fedjax_ssl.losses.targets import (
  agreement_vote,
  blended_label,
  flexmatch_thresholds,
  hard_label,
  mixup,
  mixup_ratio,
  pseudo_label,
  ramp_up,
  realism_weight,
  sharpen,
  soft_pseudo_label,
  tsa_threshold,
)

__all__ = [
    'accuracy', 'adversarial', 'agreement_vote', 'blended_label', 'consistency',
    'cross_entropy', 'fairness', 'fixmatch', 'flexmatch_thresholds',
    'freematch_thresholds', 'hard_label', 'inter_client_kl', 'kl_rows',
    'l1_norm', 'masked_mean', 'mixup', 'mixup_ratio', 'proximal',
    'pseudo_label', 'ramp_up', 'realism_weight', 'reduced', 'relation_matching',
    'relation_matrix', 'sharpen', 'soft_pseudo_label', 'softmatch_weights',
    'squared_distance', 'squared_error', 'target_kl', 'tsa_cross_entropy',
    'tsa_threshold', 'uda', 'unit_rows']
