r"""FedDure's two regulators as functions: the mathematics of one local step.

The fine regulator f_w (F-reg) is a small network that maps a row's prediction
to a weight in (0, 1). The coarse regulator f_d (C-reg) is a second copy of the
client's network, phi, that learns from the pseudo-labels. Its reward is how
much the labels that the client holds got likelier by that.

Bai et al., FedDure, AAAI 2024, https://arxiv.org/abs/2307.05358, has the
equations that are numbered here. B rows, C classes.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Array, Metrics, Number, PyTree

FORMS = ('probabilities', 'logits')
# (params) -> logits float[B, C] of fixed rows.
Logits = Callable[[PyTree], jax.Array]


class Fine(NamedTuple):
  """F-reg's parameters w: one hidden layer and a sigmoid."""

  kernel: jax.Array  # float[C, hidden]
  bias: jax.Array  # float[hidden]
  out_kernel: jax.Array  # float[hidden]
  out_bias: jax.Array  # float[]


def init_fine(key: Array, num_classes: int, *, hidden: int = 128) -> Fine:
  """Draws F-reg with LeCun's normal kernels and zero biases.

  Its row weights are then near a half.

  Args:
    key: PRNG key.
    num_classes: C.
    hidden: units of the layer; the paper's 128.

  Returns:
    Its parameters in float32.
  """
  keys = jax.random.split(key)
  return Fine(
      jax.random.normal(keys[0], (num_classes, hidden)) / num_classes**0.5,
      jnp.zeros(hidden),
      jax.random.normal(keys[1], (hidden,)) / hidden**0.5, jnp.zeros(()))


def row_weights(fine: Fine, logits: Array, *, form: str = 'probabilities'
                ) -> jax.Array:
  """Computes row weights float[B] in (0, 1), f_w of equation (6).

  Args:
    fine: F-reg's parameters w.
    logits: float[B, C]; derivatives go through them unless the caller stops
      that.
    form: what F-reg sees, 'probabilities' or 'logits'; the paper leaves it
      open, and the authors' unused network sees probabilities.

  Returns:
    float[B].
  """
  x = jax.nn.softmax(logits) if form == 'probabilities' else logits
  hidden = jax.nn.relu(x @ fine.kernel + fine.bias)
  return jax.nn.sigmoid(hidden @ fine.out_kernel + fine.out_bias)


def weighted_loss(logits: Array, labels: Array, mask: Array, weights: Array
                  ) -> tuple[jax.Array, Metrics]:
  r"""Computes the mean of :math:`w_i\, CE(\hat y_i, p_i)` over the real rows.

  Args:
    logits: float[B, C].
    labels: int32[B].
    mask: float32[B].
    weights: float[B], not negative, differentiated like the logits.

  Returns:
    float[], divided by the number of real rows and not by their weights.
  """
  return losses.cross_entropy(logits, labels, mask * weights,
                              total=jnp.sum(mask))


class Lookahead(NamedTuple):
  """A network at phi on the strong views, ready for several gradients.

  The forward pass is run once. `pull`, its linear pullback, is then used by the
  virtual step (4), by the derivative of that step, and by the real step (2).

  Attributes:
    params: phi, where the virtual step starts.
    logits: float[B, C], f_d(A_s(u); phi).
    pull: (gradient of a loss by the logits) -> gradient by phi.
    labels: int32[B] pseudo-labels.
    mask: float32[B].
    detach: whether the weights H count as constants for phi. The paper's
      equations differentiate them, as does its second theorem.
    form: see `row_weights`.
  """

  params: PyTree
  logits: jax.Array
  pull: Callable[[jax.Array], PyTree]
  labels: jax.Array
  mask: jax.Array
  detach: bool = False
  form: str = 'probabilities'

  def gradient(self, weigh: Callable[[jax.Array], jax.Array]) -> PyTree:
    """Computes the gradient by phi of the weighted loss on pseudo-labels (2).

    Args:
      weigh: logits float[B, C] -> weights float[B].

    Returns:
      A pytree like phi.
    """
    def loss(logits):
      seen = jax.lax.stop_gradient(logits) if self.detach else logits
      return weighted_loss(logits, self.labels, self.mask, weigh(seen))[0]
    return self.pull(jax.grad(loss)(self.logits))

  def fine_gradient(self, fine: Fine) -> PyTree:
    """Computes `gradient` with F-reg's weights."""
    return self.gradient(lambda x: row_weights(fine, x, form=self.form))


def virtual_step(ahead: Lookahead, fine: Fine, *, rate: Number) -> PyTree:
  r"""Does step (4): :math:`\phi^- = \phi - \eta_s \nabla_\phi E\, H L_{ce}`.

  It is plain gradient descent, so that it can be differentiated.

  Args:
    ahead: phi with its rows.
    fine: F-reg's parameters w.
    rate: eta_s.

  Returns:
    A pytree like phi, which depends on w.
  """
  return tree.subtract(ahead.params,
                       tree.scale(ahead.fine_gradient(fine), rate))


def meta_gradient(ahead: Lookahead, fine: Fine, labeled_loss: Callable[
    [PyTree], jax.Array], *, rate: Number) -> tuple[jax.Array, Fine]:
  r"""Computes :math:`\nabla_w E\, L_{ce}(y, f_d(x; \phi^-(w)))` of (5).

  The second derivative is exact. w acts on the loss only through the pullback,
  which is linear. So only the pullback's transpose is needed, at the gradient
  of the labeled loss; that costs two forward passes.

  Args:
    ahead: phi with its rows.
    fine: w.
    labeled_loss: parameters -> float[], the labeled rows' cross entropy.
    rate: eta_s; 0 makes the gradient 0.

  Returns:
    The labeled loss at phi^-, and its gradient by w.
  """
  return jax.value_and_grad(
      lambda w: labeled_loss(virtual_step(ahead, w, rate=rate)))(fine)


def look_ahead(network: Logits, params: PyTree, labels: Array, mask: Array,
               **choices: Any) -> Lookahead:
  """Makes a `Lookahead` of a network on fixed rows.

  Args:
    network: parameters -> logits float[B, C] of the strong views.
    params: phi.
    labels: int32[B] pseudo-labels.
    mask: float32[B].
    **choices: `detach` and `form` of `Lookahead`.

  Returns:
    The record; the network is run once.
  """
  logits, pull = jax.vjp(network, params)
  return Lookahead(params, logits, lambda g: pull(g)[0], jnp.asarray(labels),
                   jnp.asarray(mask), **choices)
