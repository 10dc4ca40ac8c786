"""What the last dense layer of a network reads, for methods that ask for it."""
from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import functools
import operator
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from fedjax_ssl.core import types
from fedjax_ssl.models import layers


class _Call(NamedTuple):
  """One call of a dense layer."""

  path: tuple[str, ...]
  inputs: jax.Array
  outputs: jax.Array


def with_features(model: types.Model) -> types.Model:
  """Adds `features`, `features_train` and `head` to a model of a Flax module.

  So no network needs a second function that returns its features.

  Args:
    model: of a module whose last call of a dense layer makes the logits.
  """
  def features(variables: types.Variables, inputs: jax.Array) -> jax.Array:
    with _dense_layers() as calls:
      model.apply(variables, inputs)
    return _finished(calls)

  def features_train(variables: types.Variables, inputs: jax.Array,
                     mask: jax.Array | None, key: jax.Array | None = None
                     ) -> tuple[jax.Array, jax.Array, types.PyTree]:
    with _dense_layers() as calls:
      logits, stats = model.apply_train(variables, inputs, mask, key)
    return _finished(calls), logits, stats

  @functools.cache
  def head() -> tuple[str, ...]:
    with _dense_layers() as calls:
      # A new function: JAX may know the trace of another and not run it again.
      jax.eval_shape(lambda: model.init(jax.random.key(0)))
    return (*calls[-1].path, 'kernel')

  return model._replace(features=features, features_train=features_train,
                        head=head)


def ends_dense(call: Callable[..., jax.Array], *args: Any) -> bool:
  """Returns whether a module's output is the output of its last dense layer.

  Args:
    call: passes inputs through the module; it is traced only.
    *args: of the call, or their shapes.
  """
  found = False

  def traced(*args: Any) -> jax.Array:
    nonlocal found
    with _dense_layers() as calls:
      logits = call(*args)
    found = bool(calls) and calls[-1].outputs is logits
    return logits
  jax.eval_shape(traced, *args)
  return found


def head(model: types.Model) -> tuple[str, ...]:
  """Returns where the weights of the last layer are; see `types.Model`.

  Raises:
    ValueError: for a network that does not say which layer is its last.
  """
  if model.head is None or model.features_train is None:
    raise ValueError('the model does not say which layer is its last; a Model '
                     'needs features, features_train and head.')
  return model.head()


def place(model: types.Model) -> tuple[str, ...]:
  """Returns where the last layer is in the parameters, with its bias."""
  path = head(model)
  return path[:-1] or path


def at(params: Any, path: tuple[str, ...]) -> Any:
  """Returns what is at a path."""
  return functools.reduce(operator.getitem, path, params)


def put(params: Any, path: tuple[str, ...], value: Any) -> Any:
  """Returns the parameters with this at a path."""
  if not path:
    return value
  return {**params, path[0]: put(params.get(path[0], {}), path[1:], value)}


def without(params: Any, path: tuple[str, ...]) -> Any:
  """Returns the parameters less those at a path."""
  rest = {k: v for k, v in params.items() if k != path[0]}
  if path[1:]:
    rest[path[0]] = without(params[path[0]], path[1:])
  return rest


def filled(model: types.Model, params: Any) -> Any:
  """Returns the parameters with a last layer of zeros, even if they have none.

  Networks give features on their way to logits, so they need one.
  """
  path = place(model)
  shapes = at(model.shapes().params, path)
  return put(params, path, jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype), shapes))


def _finished(calls: list[_Call]) -> jax.Array:
  found = calls[-1].inputs
  return found.astype(jnp.promote_types(found.dtype, jnp.float32))


@contextlib.contextmanager
def _dense_layers() -> Iterator[list[_Call]]:
  """Lists calls of dense layers; the last is the head."""
  calls: list[_Call] = []

  def note(call: Callable[..., Any], args: Any, kwargs: Any,
           context: Any) -> Any:
    outputs = call(*args, **kwargs)
    if isinstance(context.module, (layers.Dense, nn.Dense)) and (
        context.method_name == '__call__'):
      inputs = args[0] if args else kwargs.get('inputs')
      calls.append(_Call(context.module.path, inputs, outputs))
    return outputs

  with nn.intercept_methods(note):
    yield calls
