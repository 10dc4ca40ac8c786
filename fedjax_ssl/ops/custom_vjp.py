"""Linear and bilinear maps whose derivatives are maps of the same kind.

Automatic differentiation of slices, stacks and convolutions makes scatters,
interior pads and permuted convolutions that XLA runs slowly inside loops. A
map made here names its own derivatives instead, and these are made here as
well, so first, second and any higher order stay in the forms that were chosen.
Such functions have no forward-mode derivative (`jax.custom_vjp`).
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax


def adjoint_pair(forward: Callable[[Any, Any], Any],
                 backward: Callable[[Any, Any], Any]
                 ) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """Makes two linear maps each the other's derivative rule.

  Args:
    forward: (x, spec) -> y, linear in the pytree x; spec is hashable and
      static.
    backward: (y, spec) -> x, the adjoint of `forward`.

  Returns:
    The same two functions, differentiable in reverse mode at any order.
  """
  there = jax.custom_vjp(forward, nondiff_argnums=(1,))
  back = jax.custom_vjp(backward, nondiff_argnums=(1,))
  there.defvjp(lambda x, spec: (there(x, spec), None),
               lambda spec, _, g: (back(g, spec),))
  back.defvjp(lambda y, spec: (back(y, spec), None),
              lambda spec, _, g: (there(g, spec),))
  return there, back


class Trilinear(NamedTuple):
  """The three gradients of one form T(left, right, out), linear in each.

  out: (left, right, spec) -> dT/dout, the product itself.
  left: (out, right, spec) -> dT/dleft.
  right: (left, out, spec) -> dT/dright.
  """

  out: jax.custom_vjp
  left: jax.custom_vjp
  right: jax.custom_vjp


def trilinear(out: Callable[..., Any], left: Callable[..., Any],
              right: Callable[..., Any]) -> Trilinear:
  """Makes three bilinear maps of one trilinear form each other's derivatives.

  For a convolution y = x * w they are the output, the gradient of the input
  and the gradient of the weights; every derivative of one is one of the others.

  Args:
    out: (left, right, spec) -> out; spec is hashable and static.
    left: (out, right, spec) -> left.
    right: (left, out, spec) -> right.

  Returns:
    The three, differentiable in reverse mode at any order.
  """
  form = Trilinear(*(jax.custom_vjp(f, nondiff_argnums=(2,))
                     for f in (out, left, right)))
  form.out.defvjp(
      lambda a, b, spec: (form.out(a, b, spec), (a, b)),
      lambda spec, ab, g: (form.left(g, ab[1], spec),
                           form.right(ab[0], g, spec)))
  form.left.defvjp(
      lambda c, b, spec: (form.left(c, b, spec), (c, b)),
      lambda spec, cb, g: (form.out(g, cb[1], spec),
                           form.right(g, cb[0], spec)))
  form.right.defvjp(
      lambda a, c, spec: (form.right(a, c, spec), (a, c)),
      lambda spec, ac, g: (form.left(ac[1], g, spec),
                           form.out(ac[0], g, spec)))
  return form
