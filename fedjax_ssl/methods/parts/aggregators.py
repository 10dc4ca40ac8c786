"""Aggregation rules by name, with their knobs."""
from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl import aggregation
from fedjax_ssl.core import (
  blame,
  checks,
  choices,
  descriptions,
  knobs,
  registry,
  tree,
)
from fedjax_ssl.core.types import PyTree

Rule = Callable[[PyTree, jax.Array], PyTree]

_MEAN = knobs.at(0, 'it is the mean')
_SHARE = knobs.Bound(0, 0.5, below=True)


def mean() -> None:
  """Takes the weighted mean, as in FedAvg.

  McMahan et al., FedAvg, AISTATS 2017, https://arxiv.org/abs/1602.05629.
  """


def median() -> Rule:
  """Takes the weighted median of each number.

  It withstands attackers below half the weight.

  Yin et al., Byzantine-Robust Distributed Learning, ICML 2018,
  https://arxiv.org/abs/1803.01498.
  """
  return aggregation.median


@knobs.checked(trim=_SHARE._replace(cases=(_MEAN,)))
def trimmed_mean(*, trim: float = 0.2) -> Rule:
  """Averages each number without its largest and its smallest values.

  Yin et al., Byzantine-Robust Distributed Learning, ICML 2018,
  https://arxiv.org/abs/1803.01498.

  Args:
    trim: share of the weight that is left out at either end, and so the share
      of attackers that it withstands. 0 is the mean.
  """
  return functools.partial(aggregation.trimmed_mean, trim=trim)


@knobs.checked(share=_SHARE)
def krum(*, share: float = 0.2) -> Rule:
  """Takes the update nearest to its neighbours; of several, their mean.

  Blanchard et al., Byzantine Tolerant Gradient Descent, NeurIPS 2017,
  https://arxiv.org/abs/1703.02757.

  Args:
    share: of a cohort's clients that may be hostile. With f that share as a
      number of clients, rounded up, a cohort should have 2 f + 3 or more.
  """
  return functools.partial(aggregation.krum, share=share)


@knobs.checked(share=_SHARE._replace(cases=(_MEAN,)))
def multi_krum(*, share: float = 0.2) -> Rule:
  """Averages, by weight, the updates that are nearest to their neighbours.

  Blanchard et al., Byzantine Tolerant Gradient Descent, NeurIPS 2017,
  https://arxiv.org/abs/1703.02757.

  Args:
    share: of a cohort's clients that may be hostile: this many, rounded up,
      are left out. 0 is the mean.
  """
  return functools.partial(aggregation.multi_krum, share=share)


@knobs.checked(smoothing=knobs.Bound(above=True), steps=knobs.Bound(
    1, 1000, whole=True))
def geometric_median(*, smoothing: float = 1e-6, steps: int = 8) -> Rule:
  """Finds the point with the least sum of distances to the updates.

  It withstands attackers below half the weight.

  Pillutla et al., Robust Aggregation for Federated Learning,
  https://arxiv.org/abs/1912.13445.

  Args:
    smoothing: smaller distances count as this one; a large value gives the
      mean.
    steps: iterations of the smoothed Weiszfeld algorithm.
  """
  return functools.partial(aggregation.geometric_median, smoothing=smoothing,
                           steps=steps)


@knobs.checked(max_norm=knobs.Bound(above=True, infinite=True))
def norm_clipped(*, max_norm: float = 1.0) -> Rule:
  """Averages the updates; those that are too long are scaled down first.

  Sun et al., Can You Really Backdoor Federated Learning?,
  https://arxiv.org/abs/1911.07963.

  Args:
    max_norm: L2 norm to which longer updates are scaled down.
  """
  return functools.partial(aggregation.norm_clipped, max_norm=max_norm)


def _builder(given: Any) -> Callable[..., Rule | None]:
  """Turns a rule into its builder, with its keyword-only arguments as knobs.

  A rule takes positional arguments. A builder takes none, and is returned as it
  is.

  Raises:
    ValueError: for anything that cannot be called.
  """
  if not callable(given):
    raise ValueError(f'{given!r} is neither a rule nor a function that makes '
                     'one.')
  known = inspect.signature(given).parameters.values()
  if not any(p.default is p.empty and p.kind in _BY_PLACE for p in known):
    return given

  @functools.wraps(given)
  def build(**given_knobs: Any) -> Rule:
    return functools.partial(given, **given_knobs)
  build.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
      [p for p in known if p.kind is p.KEYWORD_ONLY])
  return build


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY,
             inspect.Parameter.POSITIONAL_OR_KEYWORD)

AGGREGATORS: registry.Registry[Callable[..., Rule | None]] = (
    registry.Registry('aggregator', {
        'geometric_median': geometric_median,
        'krum': krum,
        'mean': mean,
        'median': median,
        'multi_krum': multi_krum,
        'norm_clipped': norm_clipped,
        'trimmed_mean': trimmed_mean,
    }, 'fedjax_ssl.aggregators', _builder))


def make(text: str) -> Rule | None:
  """Makes the rule that a text such as 'trimmed_mean(trim=.3)' names.

  None stands for the mean.

  Raises:
    FieldError: for an unknown name or knob, or a user's builder that fails or
      gives no rule.
  """
  made: Any = registry.build('aggregator', text, AGGREGATORS)
  if not _is_own(text):
    rule: Rule | None = made
    return rule
  blame.check('aggregator', text, made, callable(made), 'rule')
  return _Own(made, text)


def resolved(rule: str | Rule) -> Rule:
  """Returns a rule by itself, given as `Task.aggregator` or by its name."""
  return (make(rule) or aggregation.weighted_mean if isinstance(rule, str)
          else checked(rule))


def too_few(text: str, size: int) -> str:
  """Says that a rule's promise needs a larger cohort; '' if it does not.

  Args:
    text: see `make`.
    size: of a cohort.
  """
  name, _ = registry.parse(text)
  if name not in ('krum', 'multi_krum') or _is_own(text):
    return ''
  share = choices.resolved(text, AGGREGATORS)['share']
  hostile = int(aggregation.num_hostile(share, jnp.int32(size)))
  needed = 2 * hostile + 3
  if size >= needed or name == 'multi_krum' and not share:
    return ''
  return (f'{text} promises nothing for {descriptions.count(size, "update")}: '
          f'with {hostile} hostile there must be {needed}')


def _is_own(text: str) -> bool:
  return registry.is_own(text, AGGREGATORS)


def checked(rule: Rule) -> Rule:
  """Makes a user's rule say in one line what is wrong with it.

  That costs nothing in a run: shapes are compared when the rule is traced.

  Args:
    rule: see `Task.aggregator`. One of this library, or that is made to say it
      already, stays as it is.

  Returns:
    A rule that gives what the user's gives. It raises a FieldError where that
    raises anything, or gives something other than one update.
  """
  inner = _inner(rule)
  if isinstance(rule, _Own) or registry.is_library(inner):
    return rule
  return _Own(rule, getattr(inner, '__name__', type(inner).__name__))


def _inner(rule: Any) -> Any:
  """Returns the function of which a rule is a partial one."""
  while isinstance(rule, functools.partial):
    rule = rule.func
  return rule


@dataclasses.dataclass(frozen=True, eq=False)
class _Own:
  """A user's rule that names itself in its errors; see `checked`."""

  rule: Rule
  text: str  # What messages call it.

  def __call__(self, stacked: PyTree, weights: jax.Array) -> PyTree:
    with blame.naming('aggregator', self.text, own=True):
      made = self.rule(stacked, weights)
      fault = tree.unlike(made, jax.tree.map(
          lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked))
    if fault:
      raise checks.FieldError(
          'aggregator', self.text, f'{fault}; a rule takes (updates stacked '
          '[S, ...], weights [S]) and gives one update '
          f'(at {registry.location(_inner(self.rule))}).')
    return made
