"""How good the models are for each client."""
from __future__ import annotations

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Examples, Federation, Method, PyTree, State
from fedjax_ssl.data import federation as federation_lib
from fedjax_ssl.training import client_rows, evaluate

# Clients whose models are brought to the devices at a time.
_AT_ONCE = 8


class Programs(NamedTuple):
  """The compiled programs of a method; whoever keeps them compiles once."""

  of_global: Callable[..., jax.Array] | None  # (server, test) -> float32[C].
  # (clients, server, memory, test) -> float32[clients, C].
  of_own: Callable[..., jax.Array] | None


def programs(method: Method) -> Programs:
  """Makes the programs of a method, for `table`."""
  of_global = of_own = None
  if (model := method.predict) is not None:
    of_global = jax.jit(
        lambda server, test: _of_classes(model, test, server))
  if method.local_predict is not None:
    of_own = jax.jit(functools.partial(_of_own, method.local_predict),
                     static_argnums=0)
  return Programs(of_global, of_own)


def table(compiled: Programs, state: State, federation: Federation
          ) -> dict[str, np.ndarray]:
  """Returns one row for each client, as columns.

  No client has test rows of its own: a model's accuracy on each class of the
  test set is weighed by the classes of the client's rows, labeled or not.
  Classes without test rows are left out.

  Args:
    compiled: of the method.
    state: of a seed.
    federation: of the same seed.

  Returns:
    By name an array [N]: client, its number; rows and labels, how many rows it
    holds, and how many of them with a label; accuracy of the global model, or
    of the client's own if there is none; local_accuracy of the client's own
    model, if the method keeps it. NaN for a client without rows.
  """
  labeled, unlabeled = federation_lib.class_counts(federation)
  mix = (labeled + unlabeled).astype(np.float64)
  found = {'client': np.arange(federation.num_clients),
           'rows': np.asarray(federation.clients.num_labeled, np.int64)
           + np.asarray(federation.clients.num_unlabeled),
           'labels': np.asarray(federation.clients.num_labeled, np.int64)}
  test = jax.tree.map(jnp.asarray, federation.test)
  if compiled.of_global is not None:
    scores = compiled.of_global(state.server, test)
    found['accuracy'] = weighed(np.asarray(scores), mix)
  if compiled.of_own is not None:
    total, size = federation.num_clients, _AT_ONCE
    if all(isinstance(x, jax.Array) for x in jax.tree.leaves(state.memory)):
      size = total  # They are on the devices already.
    parts = [
        compiled.of_own(size, state.server,
                        client_rows.rows_of(state.memory, ids), test)
        for ids in client_rows.chunks(total, size)]
    local = weighed(np.concatenate(parts)[:total], mix)
    found = {**found, 'accuracy': found.get('accuracy', local),
             'local_accuracy': local}
  return found


def _of_own(predict: Callable[..., jax.Array], clients: int, server: PyTree,
            memory: PyTree, test: Examples) -> jax.Array:
  """Returns float32[clients, C], of one client after another."""
  return lax.map(
      lambda i: _of_classes(predict, test, server, tree.take(memory, i)),
      jnp.arange(clients))


def _of_classes(predict: Callable[..., jax.Array], test: Examples,
                *given: PyTree) -> jax.Array:
  """Returns the accuracy on each class of the test set: float32[C]."""
  logits = evaluate.in_batches(predict, test.inputs,
                               jnp.arange(len(test.labels)), given=given)
  accuracy: jax.Array = evaluate.scores(
      logits, jnp.asarray(test.labels))['per_class_accuracy']
  return accuracy


def weighed(accuracy: np.ndarray, mix: np.ndarray) -> np.ndarray:
  """Averages accuracies of classes by how many rows each has: float64[N].

  Args:
    accuracy: [C] or [N, C], NaN for a class that was not measured.
    mix: [N, C] rows of each class; a client without any gets NaN.
  """
  known = np.isfinite(accuracy)
  weights = np.where(known, mix, 0.0)
  total = weights.sum(-1)
  hits = (weights * np.where(known, accuracy, 0.0)).sum(-1)
  return np.where(total > 0, hits / np.maximum(total, 1e-300), np.nan)
