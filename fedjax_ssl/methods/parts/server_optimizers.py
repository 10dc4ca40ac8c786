"""Optimizers of the server, which take the clients' mean update as a gradient.

Reddi et al., Adaptive Federated Optimization, ICLR 2021,
https://arxiv.org/abs/2003.00295. They are optax's, which differ from the paper.
Adam and Yogi correct both moments for the bias of their start. Yogi's moments
begin at 1e-6, the paper's at 0 and tau^2. Adagrad has tau under the root alone,
the paper outside it too, which halves the steps while updates are far smaller
than tau.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.core import blame, checks, knobs, registry, tree
from fedjax_ssl.core.types import PyTree, Variables

Rate = float | None

_BETA = knobs.Bound(0, 1, below=True)
_TAU = knobs.Bound(above=True)
# Default rate of the adaptive ones: each step moves a number by about the rate.
_ADAPTIVE = 0.01


def _or(rate: Rate, default: float) -> float:
  return default if rate is None else rate


def sgd(rate: Rate) -> optax.GradientTransformation:
  """Adds the mean update times the rate; with rate 1, the default, FedAvg."""
  return optax.sgd(_or(rate, 1.0))


@knobs.checked(beta=_BETA)
def momentum(rate: Rate, *, beta: float = 0.9) -> optax.GradientTransformation:
  """Makes FedAvgM, with momentum at the server; default rate 1.

  Hsu et al., Measuring the Effects of Non-Identical Data Distribution for
  Federated Visual Classification, https://arxiv.org/abs/1909.06335.

  Args:
    rate: the learning rate; None is the default.
    beta: decay of the velocity.
  """
  return optax.sgd(_or(rate, 1.0), momentum=beta)


@knobs.checked(beta1=_BETA, beta2=_BETA, tau=_TAU)
def adam(rate: Rate, *, beta1: float = 0.9, beta2: float = 0.99,
         tau: float = 1e-3) -> optax.GradientTransformation:
  """Makes FedAdam; default rate 0.01.

  Args:
    rate: the learning rate; None is the default.
    beta1: decay of the first moment.
    beta2: decay of the second moment.
    tau: added to the root of the second moment.
  """
  return optax.adam(_or(rate, _ADAPTIVE), b1=beta1, b2=beta2, eps=tau)


@knobs.checked(beta1=_BETA, beta2=_BETA, tau=_TAU)
def yogi(rate: Rate, *, beta1: float = 0.9, beta2: float = 0.99,
         tau: float = 1e-3) -> optax.GradientTransformation:
  """Makes FedYogi; default rate 0.01.

  Args:
    rate: the learning rate; None is the default.
    beta1: decay of the first moment.
    beta2: of the second moment, which moves by (1 - beta2) of a square.
    tau: added to the root of the second moment.
  """
  return optax.yogi(_or(rate, _ADAPTIVE), b1=beta1, b2=beta2, eps=tau)


@knobs.checked(tau=_TAU)
def adagrad(rate: Rate, *, tau: float = 1e-3) -> optax.GradientTransformation:
  """Makes FedAdagrad without a first moment; default rate 0.01.

  Args:
    rate: the learning rate; None is the default.
    tau: root of what the sum of squares begins with.
  """
  return optax.adagrad(_or(rate, _ADAPTIVE), initial_accumulator_value=tau**2,
                       eps=0.0)


SERVER_OPTIMIZERS: registry.Registry[
    Callable[..., optax.GradientTransformation]] = (
    registry.Registry('server_optimizer', {
        'adagrad': adagrad,
        'adam': adam,
        'momentum': momentum,
        'sgd': sgd,
        'yogi': yogi,
    }))


def make(text: str, rate: Rate = None) -> optax.GradientTransformation | None:
  """Makes the optimizer that a text such as 'adam(tau=1e-2)' names.

  Args:
    text: name, or name(knob=value, ...).
    rate: its learning rate; None is its default.

  Returns:
    The optimizer; None for sgd with rate 1, which is FedAvg.

  Raises:
    ValueError: for an unknown name or knob, a number out of range, or a
      user's builder that fails or gives no optimizer.
  """
  if rate is not None and (allowed := knobs.fault(rate, knobs.RATE)):
    raise checks.FieldError(
        'server_learning_rate', rate, f'must be {allowed}.')
  made: optax.GradientTransformation = registry.build(
      'server_optimizer', text, SERVER_OPTIMIZERS, rate)
  blame.check('server_optimizer', text, made,
              isinstance(made, optax.GradientTransformation),
              'optax.GradientTransformation')
  if registry.is_own(text, SERVER_OPTIMIZERS):
    made = _watched(text, made)
  same = registry.parse(text)[0] == 'sgd' and _or(rate, 1.0) == 1
  return None if same else made


def _watched(text: str, made: optax.GradientTransformation
             ) -> optax.GradientTransformation:
  """Makes a user's optimizer name itself in its errors."""
  def update(given: PyTree, moments: PyTree, *rest: Any, **words: Any
             ) -> tuple[PyTree, PyTree]:
    step, after = made.update(given, moments, *rest, **words)
    for what, fault in (('a step', tree.unlike(step, given)),
                        ('a state', tree.unlike(after, moments))):
      if fault:
        raise ValueError(f'its update, for {what}, {fault}.')
    return step, after
  return made._replace(init=blame.named('server_optimizer', text, made.init,
                                        own=True),
                       update=blame.named('server_optimizer', text, update,
                                          own=True))


def _is_model(x: Any) -> bool:
  return isinstance(x, Variables)


def trained(message: PyTree) -> PyTree:
  """Returns what an optimizer moves: all but models' running statistics."""
  return jax.tree.map(lambda x: x.params if _is_model(x) else x, message,
                      is_leaf=_is_model)


def step(optimizer: optax.GradientTransformation, mean: PyTree, moments: PyTree
         ) -> tuple[PyTree, PyTree]:
  """Computes what the server adds in place of the mean.

  Running statistics of models are averaged as without an optimizer. A mean of
  zeros, as in a round that nobody joined, leaves the model and the moments as
  they are.

  Args:
    optimizer: of the server.
    mean: of the clients' messages.
    moments: the optimizer's state.

  Returns:
    What to add, of the form of `mean`, and the optimizer's next state.
  """
  change = trained(mean)
  steps, after = optimizer.update(tree.scale(change, -1), moments)
  leaves = jax.tree.leaves(change)
  moves = jnp.any(jnp.stack([jnp.any(x != 0) for x in leaves]))
  steps = tree.where(moves, steps, change)
  added = jax.tree.map(
      lambda x, y: x._replace(params=y) if _is_model(x) else y, mean, steps,
      is_leaf=_is_model)
  return added, tree.where(moves, after, moments)
