"""Splits a network: first layers from the server, the others from a client."""
from __future__ import annotations

import jax
import optax

from fedjax_ssl.core.types import PyTree


def shared_layers(params: PyTree, count: int) -> tuple[str, ...]:
  """Names the first `count` convolutions, or dense layers if there are none.

  The normalization of the same number belongs to a layer; that holds up to the
  first shortcut with a convolution of its own.

  Args:
    params: parameters of a network, by layer.
    count: how many; 0 shares nothing.

  Returns:
    The layers, and their normalizations.

  Raises:
    ValueError: if there are fewer such layers.
  """
  for kind in ('Conv_', 'Dense_'):
    found = sorted((k for k in params if k.startswith(kind)),
                   key=lambda k: int(k.removeprefix(kind)))
    if found:
      break
  if not 0 <= count <= len(found):
    raise ValueError(f'num_shared is {count}; the network has {len(found)} '
                     f'layers to share: {", ".join(found) or "give 0"}.')
  own = found[:count]
  # One may have statistics and no parameters, and others are not there.
  return (*own, *(f'Norm_{k.removeprefix(kind)}' for k in own))


def combine(first: PyTree, later: PyTree, shared: tuple[str, ...]) -> PyTree:
  """Joins the `shared` layers of `first` and the other layers of `later`.

  Works on parameters and on statistics.
  """
  return {k: first[k] if k in shared else v for k, v in later.items()}


def freeze(optimizer: optax.GradientTransformation, params: PyTree,
            shared: tuple[str, ...]) -> optax.GradientTransformation:
  """Wraps an optimizer so that it leaves the `shared` layers as they are.

  Their normalization statistics are no optimizer's; see `combine`.
  """
  mask = {k: jax.tree.map(lambda _, k=k: k in shared, v)
          for k, v in params.items()}
  return optax.chain(optimizer, optax.masked(optax.set_to_zero(), mask))
